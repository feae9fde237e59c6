//! What is sent, byte by byte, and whether the project's own verifier takes it.

use serde_json::Value;

use super::*;
use crate::fixture::{message, now, received, source};
use crate::provider::Scheme;
use crate::verify::verify;

const SECRET: &str = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQ=";
const OTHER: &str = "whsec_b3RoZXItb3RoZXItb3RoZXItb3RoZXI=";

fn maker(payload: Payload, secrets: &[&str]) -> Maker {
    let keys = secrets.iter().map(|secret| Key::webhooks(secret).unwrap()).collect();
    Maker { payload, keys, headers: Vec::new() }
}

fn raw(message: &Message) -> Outgoing {
    maker(Payload::Raw, &[]).make(message, now()).unwrap()
}

fn envelope_of(message: &Message) -> String {
    let outgoing = maker(Payload::Envelope, &[]).make(message, now()).unwrap();
    assert_eq!(outgoing.headers[CONTENT_TYPE], "application/json");
    String::from_utf8(outgoing.body.to_vec()).unwrap()
}

/// Whether a receiver with this secret takes it.
fn is_taken(outgoing: &Outgoing, secret: &str) -> bool {
    let scheme = Scheme::preset("standard-webhooks").unwrap();
    let headers: Vec<_> =
        outgoing.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    let request = received(source(&scheme, &[secret]), "/hooks", &headers, outgoing.body.clone());
    verify(request, now()).is_ok()
}

#[test]
fn our_own_verifier_takes_every_signature() {
    for payload in [Payload::Raw, Payload::Envelope] {
        let message = message(&b"{\"a\": 1.0}\n"[..]);
        let outgoing = maker(payload, &[SECRET, OTHER]).make(&message, now()).unwrap();
        assert!(is_taken(&outgoing, SECRET) && is_taken(&outgoing, OTHER));
        let one = maker(payload, &[OTHER]).make(&message, now()).unwrap();
        assert!(!is_taken(&one, SECRET) && is_taken(&one, OTHER));
        let altered = Outgoing { body: b"{}".as_slice().into(), ..outgoing };
        assert!(!is_taken(&altered, SECRET));
    }
    assert!(!raw(&message("{}")).headers.contains_key("webhook-signature"), "nothing to sign with");
}

#[test]
fn headers_say_what_the_message_is() {
    let message = Message { attempt: 3, replay: 2, ..message("{}") };
    let headers = raw(&message).headers;
    for (name, wanted) in [
        ("webhook-id", message.id.as_str()),
        ("idempotency-key", &message.id),
        ("webhook-timestamp", "1700000000"),
        ("user-agent", concat!("hapax/", env!("CARGO_PKG_VERSION"))),
        ("hapax-source", "stripe"),
        ("hapax-event-id", "evt_1"),
        ("hapax-event-type", "invoice.paid"),
        ("hapax-attempt", "3"),
        ("hapax-replay", "2"),
    ] {
        assert_eq!(headers[name], wanted, "{name}");
    }
}

#[test]
fn text_that_a_header_would_change_stands_in_none() {
    for text in ["", " a", "a ", "a\nb: c", "a\tb", "é", "\u{7f}", &"x".repeat(TEXT_MAX + 1)] {
        let message =
            Message { event_id: text.to_owned(), event_type: Some(text.to_owned()), ..message("{}") };
        let headers = raw(&message).headers;
        assert!(
            !headers.contains_key("hapax-event-id") && !headers.contains_key("hapax-event-type"),
            "{text:?}"
        );
    }
    let message = Message { event_type: None, event_id: "a b~!".to_owned(), ..message("{}") };
    let headers = raw(&message).headers;
    assert_eq!(headers["hapax-event-id"], "a b~!");
    assert!(!headers.contains_key("hapax-event-type"));
}

#[test]
fn a_header_of_the_settings_takes_the_place_of_none_of_ours() {
    let header = |name: &'static str| (HeaderName::from_static(name), HeaderValue::from_static("theirs"));
    let names = ["x-team", "user-agent", "webhook-id", "content-type", "hapax-attempt", "idempotency-key"];
    let maker = Maker { headers: names.map(header).to_vec(), ..maker(Payload::Raw, &[SECRET]) };
    let message = message("{}");
    let headers = maker.make(&message, now()).unwrap().headers;
    assert!(headers["x-team"] == "theirs" && headers["user-agent"] == "theirs");
    for name in &names[2..] {
        let values: Vec<_> = headers.get_all(*name).iter().collect();
        assert!(values.len() == 1 && values[0] != "theirs", "{name}");
    }
}

#[test]
fn a_raw_body_has_the_type_that_was_kept_or_that_it_shows() {
    let kept = r#"{"content-type":"text/xml; charset=utf-8","user-agent":"x"}"#;
    for (body, headers, item, wanted) in [
        (&b"<a/>"[..], kept, None, "text/xml; charset=utf-8"),
        (b"<a/>", "{}", None, "application/octet-stream"),
        (b"<a/>", "{\"content-type\":\"\\u00e9\"}", None, "application/octet-stream"),
        (b"<a/>", "no json", None, "application/octet-stream"),
        (b"a=b", "{}", None, "application/octet-stream"),
        (b"17", "{}", None, "application/octet-stream"),
        (b"", "{}", None, "application/octet-stream"),
        (b"{\"a\":", "{}", None, "application/octet-stream"),
        (b"{\"a\":\"\xff\"}", "{}", None, "application/octet-stream"),
        (b" \n{\"a\": 1} ", "{}", None, "application/json"),
        (b"[]", "{}", None, "application/json"),
        (b"{}", kept, Some(0), "application/json"),
    ] {
        let message = Message { headers: headers.to_owned(), item, ..message(body) };
        let outgoing = raw(&message);
        assert_eq!(outgoing.headers[CONTENT_TYPE], wanted, "{}", String::from_utf8_lossy(body));
        assert_eq!(outgoing.body, body, "as received");
    }
}

#[test]
fn an_envelope_has_the_source_text_of_json_unchanged() {
    let body = r#"{"b": 1.10, "a":91827364509182736450123, "a": "\u0000\ud800é", "c":[ ]}"#;
    let message = Message {
        headers: r#"{"content-type":"application/json"}"#.to_owned(),
        item: Some(4),
        provider_time: Some(Timestamp::from_second(1_600_000_000).unwrap()),
        ..message(format!(" \n{body}\n"))
    };
    let text = envelope_of(&message);
    assert!(text.ends_with(&format!("\"data\":{body}}}")), "{text}");
    let wanted = format!(
        "{{\"id\":{:?},\"source\":\"stripe\",\"scope\":\"-\",\"event_id\":\"evt_1\",\"event_type\":\"invoice.paid\",\
         \"received_at\":\"2023-11-14T22:13:20Z\",\"provider_time\":\"2020-09-13T12:26:40Z\",\"attempt\":1,\"replay\":0,\
         \"item\":4,\"headers\":{{\"content-type\":\"application/json\"}},\"data\":",
        message.id
    );
    assert!(text.starts_with(&wanted), "{text}");
}

#[test]
fn an_envelope_has_anything_else_in_base64() {
    for body in [&b""[..], b"a=b", b"{} {}", b"\xef\xbb\xbf{}", b"{\"a\":\"\xff\"}", b"NaN"] {
        let text = envelope_of(&Message { event_type: None, ..message(body) });
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["data_base64"], STANDARD.encode(body), "{text}");
        assert!(value.get("data").is_none() && value["event_type"].is_null() && value["item"].is_null());
    }
    for body in ["1", "\"text\"", "null"] {
        assert!(envelope_of(&message(body)).ends_with(&format!("\"data\":{body}}}")), "{body}");
    }
}

#[test]
fn deep_json_is_no_danger() {
    let body = "[".repeat(100_000) + &"]".repeat(100_000);
    assert!(envelope_of(&message(body.clone())).contains(&body));
}

#[test]
fn what_no_request_can_be_made_of_is_the_events_fault() {
    let message = Message { headers: "no json".to_owned(), ..message("{}") };
    let failed = maker(Payload::Envelope, &[]).make(&message, now()).unwrap_err();
    assert_eq!((failed.fault, failed.word), (Fault::Event, "ours"));
}
