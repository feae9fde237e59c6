//! What a request says of its own signature: where the key stands, which hash was used, by whose order it was made.
//!
//! Invariant: a request chooses among what the scheme and the source list, and nothing else. No key is needed here, so all
//! of it is looked at before one is fetched.

use jiff::Timestamp;

use super::content::Inputs;
use super::jwt::{self, WantedKey};
use super::{candidates, decode_any, refuse_repeated, signature_texts, signed_id, stamp, timestamp};
use crate::body::Received;
use crate::config::Source;
use crate::error::Code;
use crate::parts::{Fault, Parts};
use crate::provider::pin::Pinned;
use crate::provider::place::Place;
use crate::provider::signature::Algorithm;
use crate::provider::{Key, Kind, Scheme};

/// What has to be fetched before a request can be verified.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Nothing,
    /// The certificate of its key, which stands where the request says and the scheme pins it.
    Certificate(Pinned),
    /// The provider's set of keys, with the one that the token names.
    KeySet(Pinned, WantedKey),
}

/// What has to be fetched. Everything that can be told without a key is looked at first: for what would be refused anyway,
/// nobody is asked.
///
/// # Errors
/// The reason of a refusal.
pub(crate) fn wanted(received: &Received, now: Timestamp) -> Result<Wanted, Code> {
    let source = received.source.as_ref();
    if let (Kind::Jwt(rule), Some(url)) = (&source.scheme.kind, source.key_set()) {
        refuse_repeated(&source.scheme, &received.head.headers)?;
        let parts = Parts::of(received, &source.scheme.signed);
        return jwt::wanted(source, rule, &parts, now).map(|key| Wanted::KeySet(url.clone(), key));
    }
    let url = certificate_url(received)?;
    Ok(url.map_or(Wanted::Nothing, Wanted::Certificate))
}

/// Where the certificate of the key stands; `None` where nothing has to be fetched.
fn certificate_url(received: &Received) -> Result<Option<Pinned>, Code> {
    let source = received.source.as_ref();
    let scheme = source.scheme.as_ref();
    if scheme.pointing.cert.is_none() || !source.certificates.is_empty() {
        return Ok(None);
    }
    refuse_repeated(scheme, &received.head.headers)?;
    let parts = Parts::of(received, &scheme.signed);
    let texts = signature_texts(&scheme.sig, &parts)?;
    decode_any(&scheme.sig, &candidates(&scheme.sig, &texts)?)?;
    check_said(source, &parts)?;
    if let Kind::Signed { algorithm, .. } = &scheme.kind {
        used_algorithm(scheme, *algorithm, &parts)?;
    }
    let time = match &scheme.ts {
        Some(rule) => timestamp(rule, &scheme.sig, &parts, &texts)?,
        None => None,
    };
    stamp(scheme, time.as_deref())?;
    let id = if scheme.signs_id() { Some(signed_id(scheme, &parts)?) } else { None };
    let id = id.as_ref().map(|(_, text)| text.as_ref());
    let secret = source.keys.first().and_then(Key::as_token);
    let (time, time_header) = (time.as_deref(), scheme.time_header());
    let inputs = Inputs { parts: &parts, time, id, secret, time_header };
    let contents = scheme.templates().iter().map(|sign| inputs.content(sign).map(drop));
    contents.reduce(Result::or).unwrap_or(Err(Code::SignedPartMissing))?;
    pinned(scheme, &parts)
}

/// What the request says of itself: that it is signed in a way that the scheme takes, and by order of somebody whom the
/// source takes.
pub(super) fn check_said(source: &Source, parts: &Parts<'_>) -> Result<(), Code> {
    let scheme = source.scheme.as_ref();
    let says = |place: &Place, wanted: &str| matches!(parts.read(place), Ok(Some(text)) if text == wanted);
    if !scheme.require.iter().all(|(place, wanted)| says(place, wanted)) {
        return Err(Code::SignedOtherwise);
    }
    match (&scheme.pointing.sender, &source.senders) {
        (Some(place), Some(senders)) if !senders.iter().any(|sender| says(place, sender)) => {
            Err(Code::SenderUnknown)
        }
        _ => Ok(()),
    }
}

/// The certificate's URL, if there is such a thing. It is held against the pins even where nothing is fetched from it.
pub(super) fn pinned(scheme: &Scheme, parts: &Parts<'_>) -> Result<Option<Pinned>, Code> {
    let Some(rule) = &scheme.pointing.cert else { return Ok(None) };
    match parts.read(&rule.from) {
        Ok(Some(url)) => rule.pins.check(&url).map(Some).or(Err(Code::KeyUrlRefused)),
        Ok(None) => Err(Code::SignedPartMissing),
        Err(Fault::Twice) => Err(Code::HeaderRepeated),
        Err(Fault::Invalid | Fault::NotJson) => Err(Code::KeyUrlRefused),
    }
}

/// The algorithm that was used: the scheme's, or the one of the scheme's that the request names.
pub(super) fn used_algorithm(scheme: &Scheme, only: Algorithm, parts: &Parts<'_>) -> Result<Algorithm, Code> {
    let Some(by) = &scheme.pointing.hash_by else { return Ok(only) };
    let Ok(Some(said)) = parts.read(&by.place) else { return Err(Code::SignedOtherwise) };
    let named = by.choices.iter().find(|(name, _)| said == name.as_str());
    named.map(|(_, algorithm)| *algorithm).ok_or(Code::SignedOtherwise)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::json;

    use super::*;
    use crate::fixture::received;

    const URL: &str = "https://sns.us-east-1.amazonaws.com/SimpleNotificationService-1.pem";

    /// A message with more fields; null takes one out.
    fn message(more: &serde_json::Value) -> Bytes {
        let mut body = json!({
            "Type": "Notification", "MessageId": "id-1", "TopicArn": "arn:t", "Message": "m\n\u{e4}",
            "Timestamp": "2026-05-28T20:26:40.000Z", "SignatureVersion": "1", "Signature": "AAEC", "SigningCertURL": URL,
        });
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        body.to_string().into()
    }

    fn source() -> Source {
        let mut source = Source::new("test", Scheme::preset("sns").unwrap(), Vec::new());
        source.senders = Some(vec!["arn:s".to_owned(), "arn:t".to_owned()]);
        source
    }

    /// The string that is signed, and the algorithm.
    fn canonical(body: &Bytes) -> Result<(String, Algorithm), Code> {
        let received = received(source(), "/", &[], body.clone());
        certificate_url(&received)?;
        let scheme = &received.source.scheme;
        let Kind::Signed { algorithm, sign } = &scheme.kind else { return Err(Code::Internal) };
        let parts = Parts::of(&received, &scheme.signed);
        let time = Some("2026-05-28T20:26:40.000Z");
        let inputs = Inputs { parts: &parts, time, id: None, secret: None, time_header: None };
        let content = inputs.content(&sign[0])?.concat();
        Ok((String::from_utf8(content).unwrap(), used_algorithm(scheme, *algorithm, &parts)?))
    }

    #[test]
    fn what_sns_signs_is_every_field_that_is_there_in_order() {
        const TIME: &str = "Timestamp\n2026-05-28T20:26:40.000Z\n";
        const START: &str = "Message\nm\n\u{e4}\nMessageId\nid-1\n";
        let (visit, token) = ("SubscribeURL\nhttps://v\n", "Token\nt\n");
        let end = |kind: &str| format!("TopicArn\narn:t\nType\n{kind}\n");
        for (more, wanted) in [
            (json!({}), format!("{START}{TIME}{}", end("Notification"))),
            (json!({ "Subject": null }), format!("{START}{TIME}{}", end("Notification"))),
            (json!({ "Subject": "s" }), format!("{START}Subject\ns\n{TIME}{}", end("Notification"))),
            (json!({ "Subject": "" }), format!("{START}Subject\n\n{TIME}{}", end("Notification"))),
            (json!({ "UnsubscribeURL": "u" }), format!("{START}{TIME}{}", end("Notification"))),
            (
                json!({ "Type": "SubscriptionConfirmation", "SubscribeURL": "https://v", "Token": "t" }),
                format!("{START}{visit}{TIME}{token}{}", end("SubscriptionConfirmation")),
            ),
            (
                json!({ "Type": "UnsubscribeConfirmation", "SubscribeURL": "https://v", "Token": "t" }),
                format!("{START}{visit}{TIME}{token}{}", end("UnsubscribeConfirmation")),
            ),
            // Two fields that are not a notification's make another string than the one that was signed.
            (json!({ "Token": "t" }), format!("{START}{TIME}{token}{}", end("Notification"))),
        ] {
            assert_eq!(canonical(&message(&more)).map(|(text, _)| text), Ok(wanted));
        }
    }

    #[test]
    fn what_a_request_says_of_its_signature_is_among_what_is_listed() {
        for (more, wanted) in [
            (json!({ "SignatureVersion": "0" }), Code::SignedOtherwise),
            (json!({ "SignatureVersion": null }), Code::SignedOtherwise),
            (json!({ "SignatureVersion": "sha256" }), Code::SignedOtherwise),
            (json!({ "TopicArn": "arn:x" }), Code::SenderUnknown),
            (json!({ "TopicArn": "arn:tt" }), Code::SenderUnknown),
            (json!({ "TopicArn": null }), Code::SenderUnknown),
            (
                json!({ "SigningCertURL": "https://sns.s3.amazonaws.com/SimpleNotificationService-1.pem" }),
                Code::KeyUrlRefused,
            ),
            (json!({ "SigningCertURL": null }), Code::SignedPartMissing),
            (json!({ "SigningCertURL": 1 }), Code::KeyUrlRefused),
            (json!({ "Signature": null }), Code::SignatureMissing),
            (json!({ "Signature": "AAE" }), Code::SignatureMalformed),
            (json!({ "Timestamp": null }), Code::TimestampMissing),
            (json!({ "Message": null }), Code::SignedPartMissing),
            // A line break would let the rest of a field pass for the next one.
            (json!({ "MessageId": "id\nSubject\ns" }), Code::SignedPartMissing),
            (json!({ "Subject": "s\nTimestamp\nx" }), Code::SignedPartMissing),
            (json!({ "Type": "Notification\n" }), Code::SignedPartMissing),
        ] {
            let body = message(&more);
            assert_eq!(canonical(&body).map(drop), Err(wanted), "{body:?}");
        }
        let (one, two) =
            (canonical(&message(&json!({}))), canonical(&message(&json!({ "SignatureVersion": "2" }))));
        let hashes = [one.unwrap().1, two.unwrap().1].map(|algorithm| format!("{algorithm:?}"));
        assert_eq!(hashes, ["RsaPkcs1(Sha1)", "RsaPkcs1(Sha256)"]);
        let twice = String::from_utf8(message(&json!({})).to_vec()).unwrap().replacen(
            '{',
            "{\"TopicArn\":\"arn:s\",",
            1,
        );
        assert!(canonical(&twice.into()).is_err());
    }
}
