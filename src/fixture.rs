//! What the tests of the pure stages build their requests from.

use std::sync::Arc;

use bytes::Bytes;
use jiff::Timestamp;

use crate::body::Received;
use crate::config::Source;
use crate::outbox::{Message, message_id};
use crate::provider::Scheme;
use crate::settings::{File, Problem};

/// The moment at which tests verify.
pub(crate) const NOW: i64 = 1_700_000_000;

pub(crate) fn now() -> Timestamp {
    Timestamp::from_second(NOW).unwrap()
}

/// Reads a scheme, with everything that is wrong with it.
pub(crate) fn read_scheme(toml: &str) -> (Option<Scheme>, Vec<Problem>) {
    let (file, table) = File::parse("test.toml", toml);
    let scheme = Scheme::read("test", table);
    (scheme, file.take_problems())
}

/// A scheme without mistakes.
pub(crate) fn scheme(toml: &str) -> Arc<Scheme> {
    let (scheme, problems) = read_scheme(toml);
    assert_eq!(problems, []);
    Arc::new(scheme.unwrap())
}

/// A source with these secrets.
pub(crate) fn source(scheme: &Arc<Scheme>, secrets: &[&str]) -> Source {
    let keys = secrets.iter().map(|secret| scheme.key(secret).unwrap()).collect();
    Source::new("test", Arc::clone(scheme), keys)
}

/// A POST of the body with the headers.
pub(crate) fn received(
    source: Source,
    path: &str,
    headers: &[(&str, &[u8])],
    body: impl Into<Bytes>,
) -> Received {
    let mut request = http::Request::post(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let head = request.body(()).unwrap().into_parts().0;
    Received { source: Arc::new(source), head, body: body.into() }
}

/// An event that is to be delivered.
pub(crate) fn message(body: impl Into<Bytes>) -> Message {
    Message {
        id: message_id(&[7; 16], "orders", 0),
        source: "stripe".into(),
        scope: "-".to_owned(),
        event_id: "evt_1".to_owned(),
        event_type: Some("invoice.paid".to_owned()),
        key: [7; 16],
        item: None,
        digest: [9; 32],
        body: body.into(),
        headers: "{}".to_owned(),
        received_at: now(),
        provider_time: None,
        attempt: 1,
        replay: 0,
    }
}
