//! What is known to bite those who receive webhooks of single providers: each preset does what its provider's rule says.
#![expect(clippy::unwrap_used, clippy::panic, reason = "what is not as it must be fails the test that asks")]

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hapax::body::Received;
use hapax::config::Source;
use hapax::error::Code;
use hapax::identify::{Content, Event, identify};
use hapax::provider::Scheme;
use hapax::verify::verify;
use jiff::Timestamp;
use ring::hmac::{Algorithm, HMAC_SHA1_FOR_LEGACY_USE_ONLY as SHA1, HMAC_SHA256 as SHA256, Key, sign};

const NOW: &str = "1700000000";

fn mac(algorithm: Algorithm, key: &[u8], content: &str) -> Vec<u8> {
    sign(&Key::new(algorithm, key), content.as_bytes()).as_ref().to_vec()
}

fn hex_mac(key: &str, content: &str) -> String {
    hex::encode(mac(SHA256, key.as_bytes(), content))
}

fn base64_mac(key: &str, content: &str) -> String {
    STANDARD.encode(mac(SHA256, key.as_bytes(), content))
}

/// What a source of the preset with these secrets makes of a request.
fn receive(
    preset: &str,
    secrets: &[&str],
    headers: &[(&str, &str)],
    body: impl AsRef<[u8]>,
) -> Result<Vec<Event>, Code> {
    let scheme = Scheme::preset(preset).unwrap();
    let keys = secrets.iter().map(|secret| scheme.key(secret).unwrap()).collect();
    let mut source = Source::new("s", scheme, keys);
    source.public_url = Some("https://hooks.example.com".to_owned());
    let mut request = http::Request::post("/in/s");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let head = request.body(()).unwrap().into_parts().0;
    let received = Received { source: Arc::new(source), head, body: Bytes::copy_from_slice(body.as_ref()) };
    let now = Timestamp::from_second(NOW.parse().unwrap()).unwrap();
    let identified = identify(verify(received, now)?)?;
    Ok(match identified.into_parts().1 {
        Content::Event(event) => vec![event],
        Content::Batch(events) => events,
    })
}

/// The one event of a request that is right.
fn event(preset: &str, headers: &[(&str, &str)], body: &str) -> Event {
    let mut events =
        receive(preset, &["secret"], headers, body).unwrap_or_else(|code| panic!("{preset}: {code:?}"));
    events.remove(0)
}

/// The event of a body that is signed as it is, in hex, in the given header.
fn signed(preset: &str, header: &str, prefix: &str, more: &[(&str, &str)], body: &str) -> Event {
    let signature = format!("{prefix}{}", hex_mac("secret", body));
    event(preset, &[&[(header, &*signature)], more].concat(), body)
}

#[test]
fn whsec_means_what_its_provider_means() {
    const WHSEC: &str = "whsec_c2VjcmV0IG9mIGEgdGVzdA==";
    const DECODED: &str = "secret of a test";
    for (preset, secret, key) in [
        ("standard-webhooks", WHSEC, DECODED),
        ("gitlab", WHSEC, DECODED),
        ("openai", WHSEC, DECODED),
        ("openai", "text, not base64", "text, not base64"),
        ("bigcommerce", WHSEC, WHSEC),
    ] {
        let signature = format!("v1,{}", base64_mac(key, &format!("id.{NOW}.{{}}")));
        let headers = [("webhook-id", "id"), ("webhook-timestamp", NOW), ("webhook-signature", &*signature)];
        assert!(receive(preset, &[secret], &headers, "{}").is_ok(), "{preset} {secret}");
    }
    let signature = format!("t={NOW},v1={}", hex_mac(WHSEC, &format!("{NOW}.{{\"id\":\"a\"}}")));
    let headers = [("stripe-signature", &*signature)];
    assert!(receive("stripe", &[WHSEC], &headers, "{\"id\":\"a\"}").is_ok());
}

#[test]
fn a_label_does_not_tell_the_encoding() {
    let body = "{\"id\":\"a\",\"event_id\":\"a\"}";
    let (hex, base64) = (hex_mac("secret", body), base64_mac("secret", body));
    for (preset, header, right, wrong) in [
        ("github", "x-hub-signature-256", &hex, &base64),
        ("notion", "x-notion-signature", &hex, &base64),
        ("typeform", "typeform-signature", &base64, &hex),
        ("twitter", "x-twitter-webhooks-signature", &base64, &hex),
    ] {
        let of = |text: &str| {
            let text = format!("sha256={text}");
            receive(preset, &["secret"], &[(header, &*text), ("x-github-delivery", "a")], body)
        };
        assert!(of(right).is_ok(), "{preset}");
        assert_eq!(of(wrong).unwrap_err(), Code::SignatureMalformed, "{preset}");
    }
}

#[test]
fn hex_digits_are_text_or_bytes_by_provider() {
    let secret = "00ff".repeat(16);
    let signature = hex_mac(&secret, "{}");
    assert!(receive("asana", &[&secret], &[("x-hook-signature", &*signature)], "{}").is_ok());
    let signature = STANDARD.encode(mac(SHA256, &[0, 255].repeat(16), "{}"));
    assert!(receive("adyen-header", &[&secret], &[("hmacsignature", &*signature)], "{}").is_ok());
}

#[test]
fn x_hub_signature_is_sha1_or_sha256_by_provider() {
    let body = "{\"id\":\"a\"}";
    let sha1 = format!("sha1={}", hex::encode(mac(SHA1, b"secret", body)));
    let sha256 = format!("sha256={}", hex_mac("secret", body));
    let ids = [("x-github-delivery", "a"), ("x-request-uuid", "a"), ("x-atlassian-webhook-identifier", "a")];
    for (preset, right, wrong) in [
        ("hub-sha1", &sha1, &sha256),
        ("intercom", &sha1, &sha256),
        ("bitbucket", &sha256, &sha1),
        ("jira", &sha256, &sha1),
    ] {
        let of = |text: &str| {
            receive(preset, &["secret"], &[&[("x-hub-signature", text)], &ids[..]].concat(), body)
        };
        assert!(of(right).is_ok() && of(wrong).is_err(), "{preset}");
    }
}

#[test]
fn secrets_are_normalised_or_split_where_the_provider_does() {
    let signature = format!("hmac-sha256-hex={}", hex_mac("fi", "{\"id\":\"a\"}"));
    let headers = [("x-hmac-signature", &*signature)];
    assert!(receive("easypost", &["\u{fb01}"], &headers, "{\"id\":\"a\"}").is_ok());
    for (given, taken) in [("name:pa:ss", true), ("name:pa", false), ("name:pa:ss:", false)] {
        let basic = format!("Basic {}", STANDARD.encode(given));
        let found = receive("chargebee", &["name:pa:ss"], &[("authorization", &*basic)], "{\"id\":\"a\"}");
        assert_eq!(found.is_ok(), taken, "{given}");
    }
}

#[test]
fn decoded_bytes_are_compared_and_what_cannot_be_decoded_is_skipped() {
    let body = "{\"id\":\"a\"}";
    let right = hex_mac("secret", &format!("{NOW}.{body}"));
    let of = |text: &str| receive("stripe", &["secret"], &[("stripe-signature", text)], body);
    assert!(of(&format!("t={NOW},v1={}", right.to_uppercase())).is_ok());
    assert!(of(&format!("t={NOW},v1=zz,v1=,v1={right}")).is_ok());
    for wrong in ["", "0", &right[1..], &format!("{right}00"), &"0".repeat(44)] {
        assert!(of(&format!("t={NOW},v1={wrong}")).is_err(), "{wrong}");
    }
    let long = [("hmacsignature", &*"A".repeat(44))];
    assert!(receive("adyen-header", &["00ff"], &long, "{}").is_err(), "44 characters that are no signature");
}

#[test]
fn the_bytes_that_were_sent_are_the_ones_that_are_signed() {
    // Line ends between events and at the end; escapes as they were sent; a form, and not the JSON inside.
    for body in [
        "[{\"a\":1},\r\n{\"b\":2}]\r\n",
        "{\"a\":\"\\u00e4\"}",
        "payload=%7B%22a%22%3A1%7D",
        "{\n  \"a\": 1\n}",
    ] {
        let signature = format!("sha256={}", hex_mac("secret", body));
        let headers = [("x-hub-signature-256", &*signature), ("x-github-delivery", "a")];
        assert_eq!(receive("github", &["secret"], &headers, body).unwrap()[0].body, body.as_bytes());
        for other in
            [body.trim_end().replace('\r', ""), body.replace("\\u00e4", "\u{e4}"), body.replace("%22", "\"")]
        {
            let same = other == body;
            assert_eq!(receive("github", &["secret"], &headers, other).is_ok(), same, "{body}");
        }
    }
}

#[test]
fn box_signs_an_escaped_body_now_and_then() {
    let body = "{\"id\":\"a\",\"name\":\"\u{e4}\"}";
    let at = "2023-11-14T22:13:20Z";
    for (spelled, taken) in
        [(body, true), ("{\"id\":\"a\",\"name\":\"\\u00e4\"}", true), ("{\"id\":\"a\"}", false)]
    {
        let signature = base64_mac("secret", &format!("{spelled}{at}"));
        let headers = [
            ("box-signature-version", "1"),
            ("box-signature-algorithm", "HmacSHA256"),
            ("box-signature-secondary", &*signature),
            ("box-delivery-timestamp", at),
        ];
        assert_eq!(receive("box", &["secret"], &headers, body).is_ok(), taken, "{spelled}");
    }
}

#[test]
fn a_json_body_of_twilios_needs_its_hash() {
    let signature = STANDARD.encode(mac(SHA1, b"secret", "https://hooks.example.com/in/s"));
    let headers = [("x-twilio-signature", &*signature), ("i-twilio-idempotency-token", "a")];
    assert_eq!(receive("twilio", &["secret"], &headers, "{\"a\":1}").unwrap_err(), Code::BodyNotSigned);
}

#[test]
fn every_item_has_to_repeat_the_token() {
    let item = |state: &str| format!("{{\"clientState\":\"{state}\",\"id\":\"{state}\"}}");
    let of = |items: &[String]| {
        receive("microsoft-graph", &["secret"], &[], format!("{{\"value\":[{}]}}", items.join(",")))
    };
    assert!(of(&[item("secret")]).is_ok());
    assert!(of(&[item("secret"), item("other")]).is_err());
    assert!(of(&[item("secret"), "{\"id\":\"b\"}".to_owned()]).is_err());
    assert!(of(&[]).is_err());
}

#[test]
fn an_event_of_shopifys_may_be_delivered_to_two_subscriptions() {
    let body = "{}";
    let signature = base64_mac("secret", body);
    let of = |prefix: &str, webhook: &str| {
        let name = |rest: &str| format!("{prefix}shopify-{rest}");
        let (mac, id, event_id) = (name("hmac-sha256"), name("webhook-id"), name("event-id"));
        event("shopify", &[(&mac, &signature), (&id, webhook), (&event_id, "the same")], body).key
    };
    for prefix in ["x-", ""] {
        assert_ne!(of(prefix, "one"), of(prefix, "two"));
        assert_eq!(of(prefix, "one"), of(prefix, "one"));
    }
    assert_eq!(of("x-", "one"), of("", "one"), "the newer webhooks drop the X-");
}

#[test]
fn another_attempt_is_the_same_event_with_the_same_digest() {
    for (preset, header, prefix, first, second) in [
        (
            "coinbase-commerce",
            "x-cc-webhook-signature",
            "",
            r#"{"id":1,"attempt_number":1,"event":{"id":"a"}}"#,
            r#"{"id":2,"attempt_number":2,"event":{"id":"a"}}"#,
        ),
        (
            "notion",
            "x-notion-signature",
            "sha256=",
            r#"{"id":"a","attempt_number":1}"#,
            r#"{"id":"a","attempt_number":2}"#,
        ),
    ] {
        let (one, two) =
            (signed(preset, header, prefix, &[], first), signed(preset, header, prefix, &[], second));
        assert_eq!((one.key, one.digest), (two.key, two.digest), "{preset}");
    }
    let of = |body: &str| {
        let signature = format!("sha1={}", hex::encode(mac(SHA1, b"secret", body)));
        event("intercom", &[("x-hub-signature", &signature)], body).digest
    };
    assert_eq!(of(r#"{"id":"a","delivery_attempts":1}"#), of(r#"{"id":"a","delivery_attempts":2}"#));
    for (preset, header, first, second) in [
        (
            "line",
            "x-line-signature",
            r#"{"events":[{"webhookEventId":"a","deliveryContext":{"isRedelivery":false}}]}"#,
            r#"{"events":[{"webhookEventId":"a","deliveryContext":{"isRedelivery":true}}]}"#,
        ),
        (
            "docusign",
            "x-docusign-signature-1",
            r#"{"event":"e","retryCount":0,"generatedDateTime":"t","data":{"envelopeId":"a"}}"#,
            r#"{"event":"e","retryCount":1,"generatedDateTime":"t","data":{"envelopeId":"a"}}"#,
        ),
    ] {
        let of = |body: &str| event(preset, &[(header, &base64_mac("secret", body))], body);
        let (one, two) = (of(first), of(second));
        assert_eq!((one.key, one.digest), (two.key, two.digest), "{preset}");
    }
    let scheme = Scheme::preset("hubspot-v3").unwrap();
    assert!(scheme.digest_rule().contains("attemptNumber"));
}

#[test]
fn pings_are_never_duplicates() {
    let ping =
        || signed("dropbox", "x-dropbox-signature", "", &[], "{\"list_folder\":{\"accounts\":[\"a\"]}}");
    assert_ne!(ping().key, ping().key);
}

#[test]
fn events_without_an_id_are_told_apart_by_what_they_have() {
    let stamped = |preset: &str, header: &str, label: &str, between: &str, body: &str| {
        let signature = format!("t={NOW},{label}={}", hex_mac("secret", &format!("{NOW}{between}{body}")));
        event(preset, &[(header, &signature)], body).key
    };
    let calendly = |uri: &str| {
        let body = format!(r#"{{"event":"e","created_at":"t","payload":{{"uri":"{uri}"}}}}"#);
        stamped("calendly", "calendly-webhook-signature", "v1", ".", &body)
    };
    let tiktok = |n: &str| stamped("tiktok", "tiktok-signature", "s", ".", n);
    let lemon = |at: &str| {
        let body = format!(
            r#"{{"meta":{{"event_name":"e"}},"data":{{"id":"1","attributes":{{"updated_at":"{at}"}}}}}}"#
        );
        signed("lemonsqueezy", "x-signature", "", &[], &body).key
    };
    let onfido = |n: &str| signed("onfido", "x-sha2-signature", "", &[], n).key;
    let zoom = |uuid: &str| {
        let body = format!(r#"{{"event":"e","event_ts":1,"payload":{{"object":{{"uuid":"{uuid}"}}}}}}"#);
        let signature = format!("v0={}", hex_mac("secret", &format!("v0:{NOW}:{body}")));
        event("zoom", &[("x-zm-signature", &signature), ("x-zm-request-timestamp", NOW)], &body).key
    };
    for (preset, key) in [
        ("calendly", &calendly as &dyn Fn(&str) -> _),
        ("tiktok", &tiktok),
        ("lemonsqueezy", &lemon),
        ("onfido", &onfido),
        ("zoom", &zoom),
    ] {
        assert_eq!(key("1"), key("1"), "{preset}");
        assert_ne!(key("1"), key("2"), "{preset}");
    }
}

#[test]
fn what_names_no_event_is_no_key() {
    // BigCommerce: two real changes of one order can have the same hash.
    let bigcommerce = |id: &str| {
        let body = "{\"hash\":\"the same\"}";
        let signature = format!("v1,{}", base64_mac("secret", &format!("{id}.{NOW}.{body}")));
        let headers = [("webhook-id", id), ("webhook-timestamp", NOW), ("webhook-signature", &*signature)];
        event("bigcommerce", &headers, body).id
    };
    assert_eq!((bigcommerce("a"), bigcommerce("b")), ("a".to_owned(), "b".to_owned()));
    // The names of webhooks, which are the same for each of their events.
    let named =
        [("x-webhook-id", "hook"), ("x-gitlab-webhook-uuid", "hook"), ("x-zendesk-webhook-id", "hook")];
    let body = "{\"event\":{\"id\":\"a\"}}";
    assert_eq!(signed("pagerduty", "x-pagerduty-signature", "v1=", &named, body).id, "a");
    let token = [("x-gitlab-token", "secret"), ("x-gitlab-event-uuid", "event")];
    assert_eq!(event("gitlab-token", &[&token[..], &named].concat(), "{}").id, "event");
    let delivery = [("idempotency-key", "delivery")];
    assert_eq!(event("gitlab-token", &[&token[..], &named, &delivery].concat(), "{}").id, "delivery");
    let only = receive("gitlab-token", &["secret"], &[&token[..1], &named].concat(), "{}");
    assert_eq!(only.unwrap_err(), Code::IdMissing);
    let paddle = "{\"event_id\":\"event\",\"notification_id\":\"destination\"}";
    let signature = format!("ts={NOW};h1={}", hex_mac("secret", &format!("{NOW}:{paddle}")));
    assert_eq!(event("paddle", &[("paddle-signature", &signature)], paddle).id, "event");
    let coinbase = "{\"id\":\"attempt\",\"event\":{\"id\":\"event\"}}";
    assert_eq!(signed("coinbase-commerce", "x-cc-webhook-signature", "", &[], coinbase).id, "event");
}

#[test]
fn several_signatures_come_in_many_forms() {
    let body = "{\"id\":\"a\",\"event\":{\"id\":\"a\"}}";
    let (right, wrong) = (hex_mac("secret", body), hex_mac("other", body));
    let list = format!("v1={wrong},v1={right}");
    assert_eq!(event("pagerduty", &[("x-pagerduty-signature", &list)], body).id, "a");
    // Only the version that is known counts: a newer one beside a wrong one lets nobody in.
    let newer = format!("v2={right},v1={wrong}");
    assert!(receive("circleci", &["secret"], &[("circleci-signature", &*newer)], body).is_err());
    let (one, two) = (format!("sha256={wrong}"), format!("sha256={right}"));
    let repeated = [("x-mollie-signature", &*one), ("x-mollie-signature", &*two)];
    assert_eq!(event("mollie", &repeated, body).id, "a");
    let plain = "{}";
    let (one, two) = (base64_mac("other", plain), base64_mac("secret", plain));
    let numbered = [("x-docusign-signature-1", &*one), ("x-docusign-signature-2", &*two)];
    assert!(receive("docusign", &["secret"], &numbered, plain).is_ok());
    let spaced = format!("v1a,x v1,{}", base64_mac("secret", &format!("id.{NOW}.{body}")));
    let headers = [("webhook-id", "id"), ("webhook-timestamp", NOW), ("webhook-signature", &*spaced)];
    assert!(receive("bigcommerce", &["secret"], &headers, body).is_ok());
    let stamped = |key: &str| hex_mac(key, &format!("{NOW}.{body}"));
    let repeated = format!("t={NOW},v1={},v1={}", stamped("other"), stamped("secret"));
    assert!(receive("stripe", &["secret"], &[("stripe-signature", &*repeated)], body).is_ok());
}

#[test]
fn one_source_takes_the_secrets_of_two_origins() {
    // Shopify signs what was set up in the admin pages with another secret than an app's webhooks.
    for secret in ["of the app", "of the admin pages"] {
        let signature = base64_mac(secret, "{}");
        let headers = [("x-shopify-hmac-sha256", &*signature), ("x-shopify-webhook-id", "a")];
        assert!(receive("shopify", &["of the app", "of the admin pages"], &headers, "{}").is_ok());
    }
}

#[test]
fn spaces_after_a_comma_and_the_case_of_names_do_not_matter() {
    let body = "{\"id\":\"a\",\"name\":\"\u{fc}\"}";
    let millis = format!("{NOW}000");
    for between in [",", ", ", " ,\t"] {
        let signature = format!("t={millis}{between}v1={}", hex_mac("secret", &format!("{millis}.{body}")));
        for name in ["WorkOS-Signature", "workos-signature", "WORKOS-SIGNATURE"] {
            assert_eq!(event("workos", &[(name, &signature)], body).id, "a");
        }
    }
}
