//! What is most often behind a refusal, tried out or looked for.

use std::sync::Arc;

use bytes::Bytes;
use http::header::HOST;
use jiff::Timestamp;

use super::explain::again;
use crate::body::Received;
use crate::config::Tolerance;
use crate::error::Code;
use crate::multipart;
use crate::parts::Parts;
use crate::provider::Kind;
use crate::provider::signature::{TagEncoding, Unit};
use crate::verify::{candidates, signature_texts, timestamp, verify};

/// Parts of header names that tell of a signature.
const SIGNATURE_WORDS: [&str; 6] = ["sig", "hmac", "hub", "token", "digest", "authorization"];

/// What to look at, in the order of how likely it is.
pub(super) fn hints(received: &Received, code: Code, now: Timestamp) -> Vec<String> {
    match code {
        Code::SignatureMismatch => {
            mismatch(received, now, "another secret, or bytes that were changed on the way")
        }
        Code::BodyHashMismatch | Code::UrlHashMismatch => {
            mismatch(received, now, "it is signed for another request, or bytes were changed on the way")
        }
        Code::SignatureMissing => look_alikes(received),
        Code::SignatureMalformed => malformed(received),
        Code::HeaderRepeated => repeated(received),
        Code::TimestampMalformed => units(received),
        Code::TimestampStale | Code::TimestampFuture => off_the_clock(received),
        Code::IdMissing | Code::BodyNotJson => {
            let rules: Vec<&str> = received.source.scheme.id_rules().collect();
            vec![format!("the id is sought at {}", rules.join(", then at "))]
        }
        _ => Vec::new(),
    }
}

fn mismatch(received: &Received, now: Timestamp, otherwise: &str) -> Vec<String> {
    let mut hints = Vec::new();
    let tried = bodies(&received.body).into_iter().chain(urls(received));
    for (what, body, public_url) in tried {
        if verifies(received, body, public_url, now) {
            hints.push(format!("the signature matches if {what}"));
        }
    }
    if hints.is_empty() && received.body.ends_with(b"\n") {
        hints.push(
            "the body ends with a line end: was it added when the request was written down?".to_owned(),
        );
    }
    for (index, key) in received.source.keys.iter().enumerate() {
        hints.extend(key.note().map(|note| format!("secret {index} {note}")));
    }
    if hints.is_empty() {
        hints.push(format!("{otherwise}: a proxy that decodes or re-encodes the body"));
    }
    hints
}

/// What was changed, the body or the public URL as it would then be.
type Change = (String, Option<Bytes>, Option<String>);

fn bodies(body: &[u8]) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut change = |what: &str, body: Vec<u8>| changes.push((what.to_owned(), Some(body.into()), None));
    if let Some(cut) = body.strip_suffix(b"\n") {
        change(
            "the line end at the end of the body is cut off",
            cut.strip_suffix(b"\r").unwrap_or(cut).to_vec(),
        );
    }
    change("a line end is added to the body", [body, b"\n"].concat());
    let unix = replaced(body, b"\r\n", b"\n");
    if unix != body {
        change("the body's CRLF line ends are LF", unix.clone());
    }
    let dos = replaced(&unix, b"\n", b"\r\n");
    if dos != body {
        change("the body's LF line ends are CRLF", dos);
    }
    changes
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((first, tail)) = rest.split_first() {
        if let Some(tail) = rest.strip_prefix(from) {
            out.extend_from_slice(to);
            rest = tail;
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    out
}

fn urls(received: &Received) -> Vec<Change> {
    let Some(base) = received.source.public_url.as_deref().filter(|_| received.source.scheme.signs_url())
    else {
        return Vec::new();
    };
    let host = received.head.headers.get(HOST).and_then(|host| host.to_str().ok());
    let swapped = match base.split_once("://") {
        Some(("https", rest)) => Some(format!("http://{rest}")),
        Some(("http", rest)) => Some(format!("https://{rest}")),
        _ => None,
    };
    let of_host = host.into_iter().flat_map(|host| [format!("https://{host}"), format!("http://{host}")]);
    let others = swapped.into_iter().chain(of_host).filter(|other| other != base);
    others.map(|other| (format!("public_url is {other:?}"), None, Some(other))).collect()
}

/// Whether it would be right but for that, and but for its age.
fn verifies(received: &Received, body: Option<Bytes>, public_url: Option<String>, now: Timestamp) -> bool {
    let mut other = again(received);
    other.body = body.unwrap_or(other.body);
    let mut source = received.source.as_ref().clone();
    source.tolerance = Some(Tolerance::Off);
    source.public_url = public_url.or(source.public_url);
    other.source = Arc::new(source);
    verify(other, now).is_ok()
}

fn look_alikes(received: &Received) -> Vec<String> {
    let like = |name: &&str| SIGNATURE_WORDS.iter().any(|word| name.contains(word));
    let names: Vec<&str> = received.head.headers.keys().map(http::HeaderName::as_str).filter(like).collect();
    let mut hints = Vec::new();
    if let Some(labels) = &received.source.scheme.sig.labels {
        let names: Vec<_> =
            labels.names.iter().map(|name| if name.is_empty() { "nothing" } else { name }).collect();
        hints.push(format!("only what is labelled {} counts as a signature", names.join(" or ")));
    }
    hints.push(match names.as_slice() {
        [] => {
            "no header of the request looks like a signature: does the provider sign, does a proxy drop it?"
                .to_owned()
        }
        names => format!(
            "these headers of the request look like it: {}; is it another provider?",
            names.join(", ")
        ),
    });
    hints
}

fn malformed(received: &Received) -> Vec<String> {
    let scheme = received.source.scheme.as_ref();
    let Kind::Signed { algorithm, .. } = &scheme.kind else { return Vec::new() };
    let parts = Parts::of(received, &scheme.signed);
    let Ok(texts) = signature_texts(&scheme.sig, &parts) else {
        let cut = multipart::is_multipart(&received.body) && parts.fields().is_none();
        let form = "the form in the body is cut off, or its parts can be read in more than one way";
        return vec![if cut { form } else { "the signature is not UTF-8" }.to_owned()];
    };
    let Ok(found) = candidates(&scheme.sig, &texts) else {
        return vec!["more signatures than any provider sends".to_owned()];
    };
    let mut hints = Vec::new();
    for (name, encoding) in TagEncoding::CHOICES {
        if found.iter().any(|text| encoding.fits(text, *algorithm)) {
            hints.push(format!(
                "it could be read as {name}, and this scheme writes {:?}",
                scheme.sig.encoding
            ));
        }
    }
    if hints.is_empty() {
        hints.push(format!(
            "a signature of this scheme is {algorithm:?}, written as {:?}",
            scheme.sig.encoding
        ));
    }
    hints
}

fn repeated(received: &Received) -> Vec<String> {
    let twice = |name: &&http::HeaderName| received.head.headers.get_all(*name).iter().nth(1).is_some();
    let names = received.source.scheme.once.iter().filter(twice);
    names.map(|name| format!("header {name} stands there more than once")).collect()
}

fn time_of(received: &Received) -> Option<String> {
    let scheme = received.source.scheme.as_ref();
    let parts = Parts::of(received, &scheme.signed);
    let texts = signature_texts(&scheme.sig, &parts).ok()?;
    let time = timestamp(scheme.ts.as_ref()?, &scheme.sig, &parts, &texts).ok().flatten();
    time.map(std::borrow::Cow::into_owned)
}

fn units(received: &Received) -> Vec<String> {
    let (Some(time), Some(rule)) = (time_of(received), &received.source.scheme.ts) else { return Vec::new() };
    let digits = time.bytes().all(|byte| byte.is_ascii_digit());
    let told = match (rule.unit, digits, time.len()) {
        (Unit::Seconds, true, 13) => "13 digits are milliseconds, and this scheme counts seconds",
        (Unit::Millis, true, 10) => "10 digits are seconds, and this scheme counts milliseconds",
        (Unit::Rfc3339, true, _) => "this scheme writes a date and time, like 2026-01-31T12:00:00Z",
        (_, false, _) if Unit::Rfc3339.parse(&time).is_some() => {
            "this is a date, and this scheme writes a number"
        }
        _ => return Vec::new(),
    };
    vec![told.to_owned()]
}

fn off_the_clock(received: &Received) -> Vec<String> {
    let mut hints = units(received);
    if hints.is_empty() {
        let told = "the signature is right: a request that is sent again, or a clock that is wrong (--now sets the one \
                    to check against; the source's tolerance, how far they may be apart)";
        hints.push(told.to_owned());
    }
    hints
}
