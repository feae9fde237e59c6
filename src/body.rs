//! Capped, timed read of the raw bytes.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;

use crate::config::Source;

/// A request with its whole body, exactly as received; nothing about it is trusted yet.
#[derive(Debug)]
pub struct Received {
    /// The source that the path names.
    pub source: Arc<Source>,
    /// Method, URI, headers.
    pub head: Parts,
    /// The raw bytes.
    pub body: Bytes,
}
