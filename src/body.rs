//! Capped, timed read of the raw bytes. Nothing is parsed or decoded here: what was signed is what is kept.

use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use http::header::EXPECT;
use http::request::Parts;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout_at;

use crate::config::Source;
use crate::error::Code;

/// A body that is too large by no more than this is read to its end, so that the sender gets to see the answer
/// instead of a broken pipe.
const OVERSHOOT: usize = 256 * 1024;
/// Bytes in one permit of a byte budget, so that large budgets fit a semaphore.
const PERMIT_BYTES: usize = 1024;

/// A limit on bytes in memory.
#[must_use]
pub fn byte_budget(bytes: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(permits(bytes) as usize))
}

/// What that many bytes take out of a budget.
#[must_use]
pub fn permits(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX)
}

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

/// Reads the body until its end, `source.body_max` or `deadline`. The permit stands for the memory that it takes
/// out of `budget`.
///
/// Dropping the future drops what was read; nothing has happened yet.
///
/// # Errors
/// `BodyTooLarge`, `BodyTooSlow`, `BodyIncomplete`, or `Overloaded` if the budget is used up.
pub async fn read(
    source: Arc<Source>,
    head: Parts,
    body: Incoming,
    deadline: Instant,
    budget: &Arc<Semaphore>,
) -> Result<(Received, OwnedSemaphorePermit), Code> {
    let read = collect(body, source.body_max, budget);
    let (body, permit) = timeout_at(deadline.into(), read).await.unwrap_or(Err(Code::BodyTooSlow))?;
    Ok((Received { source, head, body }, permit))
}

async fn collect(
    mut body: Incoming,
    limit: usize,
    budget: &Arc<Semaphore>,
) -> Result<(Bytes, OwnedSemaphorePermit), Code> {
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit.saturating_add(OVERSHOOT) {
        return Err(Code::BodyTooLarge);
    }
    let mut permit = reserve(budget, 0)?;
    let mut first = Bytes::new();
    let mut rest = BytesMut::new();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        // Trailers are no part of the body.
        let Ok(data) = frame.map_err(|_broken| Code::BodyIncomplete)?.into_data() else { continue };
        length += data.len();
        if length > limit {
            drain(body, OVERSHOOT.saturating_sub(length - limit)).await;
            return Err(Code::BodyTooLarge);
        }
        let more = permits(length).saturating_sub(u32::try_from(permit.num_permits()).unwrap_or(u32::MAX));
        permit.merge(reserve(budget, more)?);
        // Most bodies come in one piece and are kept without a copy.
        if first.is_empty() {
            first = data;
        } else {
            if rest.is_empty() {
                rest.reserve(announced.max(length));
                rest.extend_from_slice(&first);
            }
            rest.extend_from_slice(&data);
        }
    }
    let whole = if rest.is_empty() { first } else { rest.freeze() };
    Ok((whole, permit))
}

fn reserve(budget: &Arc<Semaphore>, permits: u32) -> Result<OwnedSemaphorePermit, Code> {
    Arc::clone(budget).try_acquire_many_owned(permits).map_err(|_used_up| Code::Overloaded)
}

/// Reads and forgets the body of a request that is refused for its head, so that the sender gets to see the answer.
/// Not if it waits to be asked for the body.
pub async fn discard(head: &Parts, body: Incoming, deadline: Instant) {
    if head.headers.contains_key(EXPECT) {
        return;
    }
    drop(timeout_at(deadline.into(), drain(body, OVERSHOOT)).await);
}

/// Reads on and forgets, for a bounded number of bytes; the caller's deadline bounds the time.
async fn drain(mut body: Incoming, mut left: usize) {
    while let Some(Ok(frame)) = body.frame().await {
        let read = frame.data_ref().map_or(0, Bytes::len);
        if read > left {
            return;
        }
        left -= read;
    }
}
