use std::sync::Arc;
use std::time::Duration;

use ring::hmac;

use crate::fixture::{NOW, now, received, scheme, source};

use super::*;

const STRIPE_LIKE: &str = r#"
    kind = "hmac"
    sign = "{ts}.{body}"
    sig = { from = "header:X-Sig", split = ",", assign = "=", label = "v1" }
    ts = { from = "sig:t", tolerance = 300 }
    id = "json:/id"
"#;
const PLAIN: &str = r#"
    kind = "hmac"
    sign = "{body}"
    sig = { from = "header:X-Sig", assign = "=", label = "sha256" }
    id = "header:X-Id"
"#;
const TWO_FAMILIES: &str = r#"
    kind = "hmac"
    sign = "{id}.{ts}.{body}"
    sig = { from = ["header:a-sig", "header:b-sig"] }
    ts = { from = ["header:a-ts", "header:b-ts"], tolerance = "5m" }
    id = ["header:a-id", "header:b-id"]
"#;
const BODY: &[u8] = br#"{"id":"e1"}"#;

/// Template, body, signed content, verdict.
type Row = (&'static str, &'static [u8], &'static str, Result<(), Code>);

fn mac(algorithm: hmac::Algorithm, secret: &str, content: &[u8]) -> String {
    hex::encode(hmac::sign(&hmac::Key::new(algorithm, secret.as_bytes()), content))
}

fn sha256(secret: &str, content: &[u8]) -> String {
    mac(hmac::HMAC_SHA256, secret, content)
}

/// The `v1` of the body at a time.
fn at(time: &str) -> String {
    sha256("k", &[time.as_bytes(), b".", BODY].concat())
}

fn verdict(toml: &str, secrets: &[&str], headers: &[(&str, &[u8])], body: &[u8]) -> Result<(), Code> {
    let source = source(&scheme(toml), secrets);
    verify(received(source, "/in/test", headers, body.to_vec()), now()).map(drop)
}

fn stripe(header: &str) -> Result<(), Code> {
    verdict(STRIPE_LIKE, &["k"], &[("x-sig", header.as_bytes())], BODY)
}

#[test]
fn a_label_is_left_out_only_where_the_scheme_says_so() {
    let right = self::sha256("k", BODY);
    let accepts = |label: &str, text: &str| {
        let toml = PLAIN.replace("label = \"sha256\"", &format!("label = {label}"));
        verdict(&toml, &["k"], &[("x-sig", text.as_bytes())], BODY).is_ok()
    };
    for (label, bare, sha256, other) in [
        ("\"sha256\"", false, true, false),
        ("[\"sha256\", \"\"]", true, true, false),
        ("\"\"", true, false, false),
        ("\"*\"", false, true, true),
    ] {
        let found = ["", "sha256=", "sha1="].map(|prefix| accepts(label, &format!("{prefix}{right}")));
        assert_eq!(found, [bare, sha256, other], "{label}");
    }
}

#[test]
fn labelled_items_are_read_strictly() {
    let right = at(&NOW.to_string());
    let upper = right.to_uppercase();
    let many = format!("t={NOW},{}v1={right}", format!("v1={right},").repeat(CANDIDATES_MAX));
    let table = [
        (format!("t={NOW},v1={right}"), Ok(())),
        (format!("t={NOW}, v1={right}"), Ok(())),
        (format!("v1={right},t={NOW}"), Ok(())),
        (format!("t={NOW},v1={upper}"), Ok(())),
        (format!("t={NOW},v0=00,v1=zz,v1=,v1={right},junk,,"), Ok(())),
        (format!("t={NOW}=junk,v1={right}"), Err(Code::TimestampMalformed)),
        (format!("t={NOW},t={NOW},v1={right}"), Err(Code::TimestampMalformed)),
        (format!("t={NOW},t=1,v1={right}"), Err(Code::TimestampMalformed)),
        (format!("t=+{NOW},v1={right}"), Err(Code::TimestampMalformed)),
        (format!("t=-{NOW},v1={right}"), Err(Code::TimestampMalformed)),
        (format!("t=0x10,v1={right}"), Err(Code::TimestampMalformed)),
        (format!("t=99999999999999999999,v1={right}"), Err(Code::TimestampMalformed)),
        (format!("t=9223372036854775807,v1={right}"), Err(Code::TimestampMalformed)),
        (format!("t=,v1={right}"), Err(Code::TimestampMissing)),
        (format!("v1={right}"), Err(Code::TimestampMissing)),
        (format!("T={NOW},v1={right}"), Err(Code::TimestampMissing)),
        (format!("t={NOW},v0={right}"), Err(Code::SignatureMissing)),
        (format!("t={NOW}"), Err(Code::SignatureMissing)),
        (String::new(), Err(Code::SignatureMissing)),
        (format!("t={NOW},v1=zz"), Err(Code::SignatureMalformed)),
        (format!("t={NOW},v1="), Err(Code::SignatureMalformed)),
        (format!("t={NOW},v1={right}00"), Err(Code::SignatureMalformed)),
        (format!("t={NOW},v1={}", &right[2..]), Err(Code::SignatureMalformed)),
        (many, Err(Code::SignatureMalformed)),
        (format!("t={NOW},v1={}", "00".repeat(32)), Err(Code::SignatureMismatch)),
        (format!("t=0{NOW},v1={right}"), Err(Code::SignatureMismatch)),
    ];
    for (header, wanted) in table {
        assert_eq!(stripe(&header), wanted, "{header}");
    }
}

#[test]
fn an_opaque_timestamp_is_signed_and_not_read() {
    let toml = STRIPE_LIKE.replace("tolerance = 300", "unit = \"opaque\"");
    for (time, wanted) in [("when", Ok(())), ("a=b", Err(Code::TimestampMalformed))] {
        let header = format!("t={time},v1={}", at(time));
        assert_eq!(verdict(&toml, &["k"], &[("x-sig", header.as_bytes())], BODY), wanted, "{time}");
    }
}

#[test]
fn the_algorithm_is_never_taken_from_the_request() {
    let right = sha256("k", BODY);
    let sha1 = mac(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, "k", BODY);
    let table = [
        (format!("sha256={right}"), Ok(())),
        (format!("sha256={}", right.to_uppercase()), Ok(())),
        (format!("SHA256={right}"), Err(Code::SignatureMissing)),
        (right.clone(), Err(Code::SignatureMissing)),
        (format!("sha1={sha1}"), Err(Code::SignatureMissing)),
        (format!("sha256={sha1}"), Err(Code::SignatureMalformed)),
        ("bogus=aa".to_owned(), Err(Code::SignatureMissing)),
        ("sha256".to_owned(), Err(Code::SignatureMissing)),
        ("=".to_owned(), Err(Code::SignatureMissing)),
        ("sha256=".to_owned(), Err(Code::SignatureMalformed)),
        ("sha256=zz".to_owned(), Err(Code::SignatureMalformed)),
        (format!("sha256={}", "a".repeat(60_000)), Err(Code::SignatureMalformed)),
    ];
    for (header, wanted) in table {
        assert_eq!(verdict(PLAIN, &["k"], &[("x-sig", header.as_bytes())], BODY), wanted, "{header}");
    }
    let other = [("x-hub-signature", right.as_bytes())];
    assert_eq!(verdict(PLAIN, &["k"], &other, BODY), Err(Code::SignatureMissing));
    assert_eq!(verdict(PLAIN, &["k"], &[("x-sig", b"sha256=\xff")], BODY), Err(Code::SignatureMalformed));
}

#[test]
fn the_signature_is_over_the_raw_bytes() {
    for body in [
        "{\"id\":\"e\u{1F680}\u{e9}\"}".as_bytes(),
        b"text=caf\xe9&x=1",
        b"[{\"id\":1},\r\n{\"id\":2}]\r\n",
        b"a=*&b=~&c=+&d=%20",
        b"\xff\xfe\x00\x80",
        b"",
    ] {
        let header = format!("sha256={}", sha256("k", body));
        assert_eq!(verdict(PLAIN, &["k"], &[("x-sig", header.as_bytes())], body), Ok(()));
        let longer = [body, b"\n"].concat();
        let wanted = Err(Code::SignatureMismatch);
        assert_eq!(verdict(PLAIN, &["k"], &[("x-sig", header.as_bytes())], &longer), wanted);
    }
}

#[test]
fn any_secret_of_the_source_may_match() {
    for (secret, wanted) in [("a", Ok(())), ("b", Ok(())), ("c", Err(Code::SignatureMismatch))] {
        let header = format!("sha256={}", sha256(secret, BODY));
        assert_eq!(verdict(PLAIN, &["a", "b"], &[("x-sig", header.as_bytes())], BODY), wanted);
    }
    let header = format!("sha256={}", sha256("", BODY));
    let wanted = Err(Code::SignatureMismatch);
    assert_eq!(verdict(PLAIN, &[], &[("x-sig", header.as_bytes())], BODY), wanted, "no secret at all");
}

#[test]
fn a_header_that_decides_about_trust_must_not_be_repeated() {
    let time = NOW.to_string();
    let sig = sha256("k", &[b"i.", time.as_bytes(), b".", BODY].concat());
    let right: Vec<(&str, &[u8])> =
        vec![("a-id", b"i"), ("a-ts", time.as_bytes()), ("a-sig", sig.as_bytes())];
    assert_eq!(verdict(TWO_FAMILIES, &["k"], &right, BODY), Ok(()));
    for again in 0..3 {
        for value in [right[again].1, b"x"] {
            let mut headers = right.clone();
            headers.push((right[again].0, value));
            assert_eq!(verdict(TWO_FAMILIES, &["k"], &headers, BODY), Err(Code::HeaderRepeated));
            headers.swap(again, 3);
            assert_eq!(verdict(TWO_FAMILIES, &["k"], &headers, BODY), Err(Code::HeaderRepeated));
        }
    }
    let other_family = [&right[..], &[("b-id", b"x"), ("b-id", b"y")]].concat();
    assert_eq!(verdict(TWO_FAMILIES, &["k"], &other_family, BODY), Err(Code::HeaderRepeated));
    let repeatable = PLAIN.replace("label = \"sha256\"", "label = \"sha256\", repeat = true");
    let good = format!("sha256={}", sha256("k", BODY));
    let bad = format!("sha256={}", sha256("x", BODY));
    let headers = [("x-sig", bad.as_bytes()), ("x-sig", good.as_bytes())];
    assert_eq!(verdict(&repeatable, &["k"], &headers, BODY), Ok(()));
    assert_eq!(verdict(PLAIN, &["k"], &headers, BODY), Err(Code::HeaderRepeated));
}

#[test]
fn the_window_is_inclusive_both_ways_and_the_source_overrides_it() {
    let within = |seconds| Some(Tolerance::Within(Duration::from_secs(seconds)));
    let table = [
        (-300, None, Ok(())),
        (-301, None, Err(Code::TimestampStale)),
        (300, None, Ok(())),
        (301, None, Err(Code::TimestampFuture)),
        (2, None, Ok(())),
        (-11, within(10), Err(Code::TimestampStale)),
        (-1000, within(1000), Ok(())),
        (-1_000_000, Some(Tolerance::Off), Ok(())),
    ];
    for (offset, tolerance, wanted) in table {
        let time = (NOW + offset).to_string();
        let header = format!("t={time},v1={}", at(&time));
        let mut source = source(&scheme(STRIPE_LIKE), &["k"]);
        source.tolerance = tolerance;
        // Half a second past the second that the sender could write must not count against it.
        let clock = Timestamp::from_millisecond(NOW * 1000 + 500).unwrap();
        let request = received(source, "/", &[("x-sig", header.as_bytes())], BODY);
        assert_eq!(verify(request, clock).map(drop), wanted, "{offset} {tolerance:?}");
    }
    let stale = format!("t=1,v1={}", "00".repeat(32));
    assert_eq!(stripe(&stale), Err(Code::SignatureMismatch), "stale is said of real signatures only");
}

#[test]
fn units_are_read_strictly() {
    let seconds = |count: i64| Some(Stamp { millis: count * 1000, whole_seconds: true });
    let millis = |count| Some(Stamp { millis: count, whole_seconds: false });
    let table = [
        (Unit::Seconds, "1700000000", seconds(1_700_000_000)),
        (Unit::Seconds, "1700000000 ", None),
        (Unit::Seconds, "1.7e9", None),
        (Unit::Seconds, "", None),
        (Unit::Seconds, "\u{0661}", None),
        (Unit::Millis, "1700000000000", millis(1_700_000_000_000)),
        (Unit::SecondsOrMillis, "100000000000", seconds(100_000_000_000)),
        (Unit::SecondsOrMillis, "100000000001", millis(100_000_000_001)),
        (Unit::Rfc3339, "2023-11-14T22:13:20Z", millis(1_700_000_000_000)),
        (Unit::Rfc3339, "2023-11-14T22:13:20.5+00:00", millis(1_700_000_000_500)),
        (Unit::Rfc3339, "2023-11-14", None),
        (Unit::Rfc3339, "1700000000", None),
        (Unit::Opaque, "1700000000", None),
    ];
    for (unit, text, wanted) in table {
        assert_eq!(unit.parse(text), wanted, "{unit:?} {text}");
    }
}

#[test]
fn only_the_id_that_was_signed_can_name_the_event() {
    let time = NOW.to_string();
    let sig = sha256("k", &[b"0.", time.as_bytes(), b".", BODY].concat());
    let headers: [(&str, &[u8]); 4] =
        [("a-id", b"0"), ("b-id", b"mine"), ("a-ts", time.as_bytes()), ("b-sig", sig.as_bytes())];
    let request = received(source(&scheme(TWO_FAMILIES), &["k"]), "/", &headers, BODY);
    let verified = verify(request, now()).unwrap();
    assert_eq!(crate::identify::identify(verified).map(drop), Err(Code::IdMissing));
    let none: [(&str, &[u8]); 2] = [("a-ts", time.as_bytes()), ("a-sig", sig.as_bytes())];
    assert_eq!(verdict(TWO_FAMILIES, &["k"], &none, BODY), Err(Code::SignedPartMissing));
}

#[test]
fn the_url_is_the_public_one_with_path_and_query_as_received() {
    let toml = r#"
        kind = "hmac"
        sign = "{method}{url}{body}"
        sig = { from = "header:X-Sig" }
        id = "json:/id"
    "#;
    let path = "/in/a%2Fb?x=%27&y=1+2";
    let sig = sha256("k", &[b"POSThttps://hooks.example.com", path.as_bytes(), BODY].concat());
    let headers: [(&str, &[u8]); 3] =
        [("x-sig", sig.as_bytes()), ("host", b"evil.test"), ("x-forwarded-host", b"evil.test")];
    let mut own = source(&scheme(toml), &["k"]);
    assert!(own.scheme.signs_url());
    own.public_url = Some("https://hooks.example.com".to_owned());
    assert!(verify(received(own, path, &headers, BODY), now()).is_ok());
    let without = received(source(&scheme(toml), &["k"]), path, &headers, BODY);
    assert_eq!(verify(without, now()).map(drop), Err(Code::SignedPartMissing));
}

#[test]
fn signed_parts_can_stand_in_query_form_and_json() {
    let toml = |sign: &str| {
        format!(
            "kind = \"hmac\"\nsign = \"{sign}\"\nsig = {{ from = \"header:X-Sig\" }}\nid = \"body:sha256\""
        )
    };
    let json = br#"{"a":{"b":"B\u0041"},"n":9007199254918489}"#;
    let table: [Row; 11] = [
        ("{query:q}", b"", "X y", Ok(())),
        ("{lower:query:q}", b"", "x y", Ok(())),
        ("{json:/a/b}-{json:/n}", json, "BA-9007199254918489", Ok(())),
        ("{form:f}", b"f=%41+b&g=1", "A b", Ok(())),
        ("{formjson:f#/x}", b"f=%7B%22x%22%3A7%7D", "7", Ok(())),
        ("{query:none}", b"", "", Err(Code::SignedPartMissing)),
        ("{json:/none}", json, "", Err(Code::SignedPartMissing)),
        ("{json:/a}", b"no json", "", Err(Code::SignedPartMissing)),
        ("{json:/a}", br#"{"a":"1","a":"1"}"#, "1", Err(Code::HeaderRepeated)),
        ("{form:f}", b"f=1&f=1", "1", Err(Code::HeaderRepeated)),
        ("{form:f}", br#"{"x":"&f=1&"}"#, "1", Err(Code::SignedPartMissing)),
    ];
    for (sign, body, content, wanted) in table {
        let sig = sha256("k", content.as_bytes());
        let source = source(&scheme(&toml(sign)), &["k"]);
        let request = received(source, "/p?q=X%20y", &[("x-sig", sig.as_bytes())], body);
        assert_eq!(verify(request, now()).map(drop), wanted, "{sign}");
    }
}

#[test]
fn a_token_is_compared_whole() {
    let toml = "kind = \"token\"\nsig = { from = \"header:Authorization\" }\nid = \"json:/id\"";
    let table: [(&[u8], Result<(), Code>); 5] = [
        (b"Bearer abc", Ok(())),
        (b"Bearer ab", Err(Code::SignatureMismatch)),
        (b"Bearer abcd", Err(Code::SignatureMismatch)),
        (b"bearer abc", Err(Code::SignatureMismatch)),
        (b"", Err(Code::SignatureMissing)),
    ];
    for (value, wanted) in table {
        assert_eq!(verdict(toml, &["other", "Bearer abc"], &[("authorization", value)], BODY), wanted);
    }
    let twice: [(&str, &[u8]); 2] = [("authorization", b"Bearer abc"), ("authorization", b"x")];
    assert_eq!(verdict(toml, &["Bearer abc"], &twice, BODY), Err(Code::HeaderRepeated));
    assert_eq!(verdict(toml, &["Bearer abc"], &[], BODY), Err(Code::SignatureMissing));
}

#[test]
fn base64_signatures_have_one_spelling() {
    let encoded = |encoding: &str| {
        format!(
            "kind = \"hmac\"\nsign = \"{{body}}\"\nsig = {{ from = \"header:X-Sig\", encoding = \"{encoding}\" }}\nid = \"json:/id\""
        )
    };
    let tag = hex::decode(sha256("k", b"x")).unwrap();
    let standard = crate::provider::signature::TagEncoding::Base64.encode(&tag);
    let url = crate::provider::signature::TagEncoding::Base64Url.encode(&tag);
    assert_eq!(verdict(&encoded("base64"), &["k"], &[("x-sig", standard.as_bytes())], b"x"), Ok(()));
    assert_eq!(verdict(&encoded("base64url"), &["k"], &[("x-sig", url.as_bytes())], b"x"), Ok(()));
    let unpadded = standard.trim_end_matches('=');
    let next = |text: &str| {
        let mut bytes = text.as_bytes().to_vec();
        *bytes.last_mut().unwrap() += 1;
        String::from_utf8(bytes).unwrap()
    };
    let padded = format!("{url}=");
    let headers = [("x-sig", padded.as_bytes())];
    assert_eq!(verdict(&encoded("base64url-padded"), &["k"], &headers, b"x"), Ok(()));
    for (encoding, wrong) in [
        ("base64", unpadded.to_owned()),
        ("base64", next(unpadded) + "="),
        ("base64url", next(&url)),
        ("base64url", padded.clone()),
        ("base64url-padded", url.clone()),
        ("base64url-padded", next(&url) + "="),
    ] {
        let headers = [("x-sig", wrong.as_bytes())];
        assert_eq!(
            verdict(&encoded(encoding), &["k"], &headers, b"x"),
            Err(Code::SignatureMalformed),
            "{wrong}"
        );
    }
}

#[test]
fn a_wrong_key_kind_never_matches() {
    let token = scheme("kind = \"token\"\nsig = { from = \"header:X\" }\nid = []");
    let mut mixed = source(&scheme(PLAIN), &[]);
    mixed.keys = vec![token.key("k").unwrap()];
    let header = format!("sha256={}", sha256("k", BODY));
    let request = received(mixed, "/", &[("x-sig", header.as_bytes())], BODY);
    assert_eq!(verify(request, now()).map(drop), Err(Code::SignatureMismatch));
    assert_eq!(Arc::strong_count(&token), 1);
}
