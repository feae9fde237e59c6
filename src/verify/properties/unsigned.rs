//! `token` and `basic`, where the secret itself is in the request.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;

use super::alter::low_bits;
use super::made::Sent;
use super::received;
use crate::config::Source;
use crate::fixture::{now, scheme};
use crate::verify::verify;

type Make = fn(&str) -> Sent;

/// A form of the scheme, and the request that gives a text there.
const FORMS: [(&str, Make); 5] = [
    ("from = \"header:x-token\"", |text| sent("/", &[("x-token", text)], "{}")),
    ("from = \"header:x-token\", split = \" \", assign = \"=\", label = \"k\"", |text| {
        sent("/", &[("x-token", &format!("a=b k={text}"))], "{}")
    }),
    ("from = \"query:token\"", |text| sent(&format!("/?{}", form("token", text)), &[], "{}")),
    ("from = \"json:/token\"", |text| sent("/", &[], &serde_json::json!({ "token": text }).to_string())),
    ("from = \"form:token\"", |text| sent("/", &[], &form("token", text))),
];

fn form(name: &str, text: &str) -> String {
    form_urlencoded::Serializer::new(String::new()).append_pair(name, text).finish()
}

fn sent(target: &str, headers: &[(&str, &str)], body: &str) -> Sent {
    let headers = headers.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect();
    Sent { method: http::Method::POST, target: target.to_owned(), headers, body: body.as_bytes().to_vec() }
}

fn accepts(scheme: &Arc<crate::provider::Scheme>, secret: &str, sent: &Sent) -> bool {
    let source = Arc::new(Source::new("test", Arc::clone(scheme), vec![scheme.key(secret).unwrap()]));
    received(&source, sent).is_some_and(|received| verify(received, now()).is_ok())
}

/// The text with one character otherwise, one more and one less; case counts.
fn altered(text: &str, at: usize, byte: char) -> Vec<String> {
    let at = at % text.len();
    let (before, rest) = text.split_at(at);
    let swapped: String =
        text.chars()
            .map(|char| {
                if char.is_ascii_lowercase() { char.to_ascii_uppercase() } else { char.to_ascii_lowercase() }
            })
            .collect();
    let mut texts = vec![
        format!("{before}{byte}{}", &rest[1..]),
        format!("{before}{byte}{rest}"),
        format!("{before}{}", &rest[1..]),
        swapped,
        String::new(),
        format!("{text}{text}"),
    ];
    // White space around it is none of it.
    texts.retain(|other| other.trim() != text);
    texts
}

proptest! {
    #![proptest_config(super::config(200))]

    #[test]
    fn token_accepts_nothing_else(which in 0..FORMS.len(), secret in "[!-+\\--~]{1,40}", at: usize, byte in "[!-+\\--~]") {
        let (sig, made) = FORMS[which];
        let scheme = scheme(&format!("kind = \"token\"\nsig = {{ {sig} }}\nid = []"));
        prop_assert!(accepts(&scheme, &secret, &made(&secret)), "{}", secret);
        for text in altered(&secret, at, byte.chars().next().unwrap()) {
            prop_assert!(!accepts(&scheme, &secret, &made(&text)), "{} for {}", text, secret);
        }
        let mut twice = made(&secret);
        twice.headers.extend(twice.headers.clone());
        twice.target = twice.target.replacen('?', "?token=x&", 1);
        twice.body = match twice.body.as_slice() {
            b"{}" => twice.body,
            [b'{', rest @ ..] => [b"{\"token\":\"x\",", rest].concat(),
            form => [b"token=x&", form].concat(),
        };
        prop_assert!(!accepts(&scheme, &secret, &twice), "{:?}", twice);
    }

    #[test]
    fn basic_accepts_nothing_else(name in "[!-9;-~]{0,12}", password in "[!-~]{1,24}", at: usize, byte in "[!-~]") {
        let secret = format!("{name}:{password}");
        let scheme = scheme("kind = \"basic\"\nid = []");
        let made = |text: &str| sent("/", &[("authorization", text)], "{}");
        let encoded = STANDARD.encode(&secret);
        for start in ["Basic ", "basic "] {
            let right = made(&format!("{start}{encoded}"));
            prop_assert!(accepts(&scheme, &secret, &right), "{:?}", right);
        }
        for text in altered(&secret, at, byte.chars().next().unwrap()) {
            let text = format!("Basic {}", STANDARD.encode(text));
            prop_assert!(!accepts(&scheme, &secret, &made(&text)), "{} for {}", text, secret);
        }
        let mut texts = vec![format!("{encoded}="), format!("{encoded}A"), secret.clone(), encoded.trim_end_matches('=').to_owned()];
        texts.extend(low_bits(&encoded));
        texts.retain(|text| *text != encoded);
        for text in texts {
            let text = format!("Basic {text}");
            prop_assert!(!accepts(&scheme, &secret, &made(&text)), "{} for {}", text, secret);
        }
        for text in [encoded.clone(), format!("Bearer {encoded}"), format!("Basic{encoded}")] {
            prop_assert!(!accepts(&scheme, &secret, &made(&text)), "{} for {}", text, secret);
        }
        let mut twice = made(&format!("Basic {encoded}"));
        twice.headers.extend(twice.headers.clone());
        prop_assert!(!accepts(&scheme, &secret, &twice));
    }
}
