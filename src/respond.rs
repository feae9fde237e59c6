//! The only map from what happened to status, headers, body, log level and metric label.
//!
//! Two laws: never 2xx before the commit, and never non-2xx because of something that failed after it. Both hold
//! because a 2xx is made from [`Outcome`] only, and an outcome exists only for a committed event, or for a handshake,
//! which promises nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Method, Response, StatusCode};
use http_body_util::Full;

use crate::challenge::Reply;
use crate::claim::Tier;
use crate::config::{OnMismatch, Source};
use crate::error::{Code, Dependency, Stage};

/// `Hapax-Outcome`: what became of the delivery.
pub static HAPAX_OUTCOME: HeaderName = HeaderName::from_static("hapax-outcome");

/// `Hapax-Rearmed`: the event had failed, and is tried again because of this delivery.
pub static HAPAX_REARMED: HeaderName = HeaderName::from_static("hapax-rearmed");

/// A delivery whose event is committed, now or earlier; or a handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// By this delivery.
    Accepted,
    /// By an earlier one; the tier that knew.
    Duplicate(Tier),
    /// By an earlier one with another body; the tier that knew.
    Mismatch(Tier),
    /// By this delivery, and the effect refused it for good.
    Rejected,
    /// By this delivery, and the effect failed: it is tried again from here.
    Parked,
    /// By an earlier one; it had failed, and this delivery has armed it again.
    Rearmed,
    /// No event: the provider expects this answer.
    Handshake(Arc<Reply>),
    /// A batch without items: nothing to commit.
    Empty,
    /// Of a batch, each item by itself. A 2xx if every one of them is committed.
    Batch(Arc<Tally>),
}

/// What became of the items of a batch.
#[derive(Debug, PartialEq, Eq)]
pub struct Tally {
    /// Items by what became of them, in the order of [`WORDS`].
    counts: [usize; WORDS.len()],
    /// The answer for the whole: the worst of the items'.
    worst: Verdict,
    /// Why, if it is not a success.
    pub failure: Option<Failure>,
}

/// `Hapax-Items`: how many items of a batch became what.
pub static HAPAX_ITEMS: HeaderName = HeaderName::from_static("hapax-items");

/// What can become of an item.
const WORDS: [&str; 9] = [
    "accepted",
    "duplicate",
    "mismatch",
    "rejected",
    "parked",
    "unidentified",
    "refused",
    "in_flight",
    "unavailable",
];

impl Tally {
    /// Counts the items' results. A retry of the provider's then brings only what is missing.
    #[must_use]
    pub fn of(source: &Source, results: Vec<(bool, Result<Outcome, Failure>)>) -> Self {
        let mut counts = [0; WORDS.len()];
        let mut worst: Option<(u8, Verdict, Option<Failure>)> = None;
        for (identified, result) in results {
            let verdict = verdict(Some(source), &result);
            let word = if verdict.code == "none" && !identified { "unidentified" } else { verdict.outcome };
            if let Some((_, count)) = WORDS.iter().zip(&mut counts).find(|(known, _)| **known == word) {
                *count += 1;
            }
            let rank = rank(verdict);
            if worst.as_ref().is_none_or(|(highest, ..)| rank > *highest) {
                worst = Some((rank, verdict, result.err()));
            }
        }
        let accepted = Verdict { status: source.ack.status, outcome: "accepted", code: "none" };
        let (worst, failure) = worst.map_or((accepted, None), |(_, verdict, failure)| (verdict, failure));
        Self { counts, worst, failure }
    }

    /// `2 accepted, 1 duplicate`
    #[must_use]
    pub fn text(&self) -> String {
        let some = WORDS.iter().zip(self.counts).filter(|(_, count)| *count > 0);
        some.map(|(word, count)| format!("{count} {word}")).collect::<Vec<_>>().join(", ")
    }
}

/// Unavailable over in flight over refused over success, in which the most telling word stands for all. Not by the
/// status, which is the provider's.
fn rank(verdict: Verdict) -> u8 {
    match (verdict.outcome, verdict.code) {
        ("unavailable", _) => 9,
        ("in_flight", _) => 8,
        ("parked", _) => 5,
        ("accepted", _) => 4,
        ("rejected", _) => 3,
        ("mismatch", "none") => 2,
        (_, "none") => 1,
        _ => 7,
    }
}

/// A delivery that ended without a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What happened.
    pub code: Code,
    /// Where.
    pub stage: Stage,
    /// Who is at fault.
    pub dependency: Dependency,
    /// For the log only.
    pub cause: Option<String>,
}

impl Failure {
    /// A failure that no store has a part in.
    #[must_use]
    pub fn new(stage: Stage, code: Code) -> Self {
        Self { code, stage, dependency: Dependency::None, cause: None }
    }
}

/// How an answer is written in metrics and logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// The status.
    pub status: StatusCode,
    /// The value of `Hapax-Outcome`, which is also the metric's label.
    pub outcome: &'static str,
    /// The error's code; `none` if there is none.
    pub code: &'static str,
}

/// Whether the failure of a delivery is worth more than a line of level info.
#[must_use]
pub fn level(result: &Result<Outcome, Failure>) -> &'static str {
    match result {
        Ok(Outcome::Accepted | Outcome::Duplicate(_) | Outcome::Handshake(_) | Outcome::Empty) => "INFO",
        Ok(Outcome::Batch(tally)) if tally.failure.is_none() => "INFO",
        Err(failure) if failure.code == Code::Internal => "ERROR",
        Err(failure) if failure.code == Code::SignatureReused => "WARN",
        Err(failure) if failure.dependency == Dependency::None => "INFO",
        Ok(
            Outcome::Mismatch(_) | Outcome::Rejected | Outcome::Parked | Outcome::Rearmed | Outcome::Batch(_),
        )
        | Err(_) => "WARN",
    }
}

/// What the delivery is answered, in words.
#[must_use]
pub fn verdict(source: Option<&Source>, result: &Result<Outcome, Failure>) -> Verdict {
    match (result, source) {
        (Ok(outcome), Some(source)) => committed(source, outcome),
        (Ok(_), None) => failed(Code::Internal),
        (Err(failure), Some(source)) => understood(source, failed(failure.code)),
        (Err(failure), None) => failed(failure.code),
    }
}

/// The failure in the statuses that this provider understands: some take another one than 401 for a bad signature, and
/// some discard an event after a status that others send it again for.
fn understood(source: &Source, failure: Verdict) -> Verdict {
    let status = match (failure.outcome, failure.status) {
        (_, StatusCode::UNAUTHORIZED) => source.ack.reject,
        ("in_flight" | "unavailable", _) | (_, StatusCode::REQUEST_TIMEOUT) => {
            source.ack.retry.unwrap_or(failure.status)
        }
        (_, status) => status,
    };
    Verdict { status, ..failure }
}

fn committed(source: &Source, outcome: &Outcome) -> Verdict {
    let (outcome, refused) = match outcome {
        Outcome::Accepted => ("accepted", false),
        Outcome::Duplicate(_) | Outcome::Rearmed => ("duplicate", false),
        Outcome::Parked => ("parked", false),
        Outcome::Rejected => ("rejected", false),
        Outcome::Mismatch(_) => ("mismatch", source.on_mismatch == OnMismatch::Refuse),
        Outcome::Empty => ("empty", false),
        Outcome::Batch(tally) => return tally.worst,
        Outcome::Handshake(reply) => {
            return Verdict { status: reply.status, outcome: "handshake", code: "none" };
        }
    };
    if refused {
        return Verdict { outcome, ..failed(Code::Mismatch) };
    }
    Verdict { status: source.ack.status, outcome, code: "none" }
}

fn failed(code: Code) -> Verdict {
    let (status, outcome) = match code {
        Code::UnknownSource => (StatusCode::NOT_FOUND, "refused"),
        Code::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "refused"),
        Code::ExpectationFailed => (StatusCode::EXPECTATION_FAILED, "refused"),
        Code::BodyTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "refused"),
        Code::BodyTooSlow => (StatusCode::REQUEST_TIMEOUT, "refused"),
        Code::BodyIncomplete => (StatusCode::BAD_REQUEST, "refused"),
        Code::SignatureMissing
        | Code::SignatureMalformed
        | Code::SignatureMismatch
        | Code::HeaderRepeated
        | Code::TimestampMissing
        | Code::TimestampMalformed
        | Code::TimestampStale
        | Code::TimestampFuture
        | Code::SignedPartMissing
        | Code::SignedOtherwise
        | Code::SignatureReused
        | Code::BodyHashMismatch
        | Code::UrlHashMismatch
        | Code::ClaimMismatch
        | Code::BodyNotSigned
        | Code::SenderUnknown
        | Code::KeyUrlRefused
        | Code::KeyUnfit
        | Code::HandshakeRefused
        | Code::HandshakeUnexpected => (StatusCode::UNAUTHORIZED, "refused"),
        Code::HandshakeMalformed
        | Code::BatchMissing
        | Code::BatchTooLarge
        | Code::IdMissing
        | Code::IdAmbiguous
        | Code::IdTooLong
        | Code::IdInvalid
        | Code::BodyNotJson => (StatusCode::UNPROCESSABLE_ENTITY, "refused"),
        Code::Mismatch => (StatusCode::UNPROCESSABLE_ENTITY, "mismatch"),
        Code::InFlight => (StatusCode::CONFLICT, "in_flight"),
        Code::Overloaded
        | Code::EffectFailed
        | Code::FastTierRefused
        | Code::KeysUnavailable
        | Code::PostgresUnavailable
        | Code::RecordTimeout
        | Code::CommitUnknown
        | Code::Internal => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
    };
    Verdict { status, outcome, code: code.as_str() }
}

/// The answer.
#[must_use]
pub fn respond(
    source: Option<&Source>,
    result: &Result<Outcome, Failure>,
    retry_after: Duration,
) -> Response<Full<Bytes>> {
    let verdict = verdict(source, result);
    let mut response = match (result, source) {
        (Ok(Outcome::Handshake(reply)), _) => handshake(reply),
        (_, Some(source)) if verdict.code == "none" => acknowledge(source),
        (_, Some(source)) if is_unauthorized(result) && source.ack.reject_body.is_some() => reject(source),
        _ => problem(verdict, is_unauthorized(result), retry_after),
    };
    if verdict.status == StatusCode::METHOD_NOT_ALLOWED {
        response.headers_mut().insert(ALLOW, allowed(source));
    }
    if let Ok(Outcome::Batch(tally)) = result
        && let Ok(items) = HeaderValue::from_str(&tally.text())
    {
        response.headers_mut().insert(HAPAX_ITEMS.clone(), items);
    }
    if matches!(result, Ok(Outcome::Rearmed)) {
        response.headers_mut().insert(HAPAX_REARMED.clone(), HeaderValue::from_static("true"));
    }
    response.headers_mut().insert(HAPAX_OUTCOME.clone(), HeaderValue::from_static(verdict.outcome));
    response
}

/// Whether the sender may not know why.
fn is_unauthorized(result: &Result<Outcome, Failure>) -> bool {
    let failure = match result {
        Err(failure) => Some(failure),
        Ok(Outcome::Batch(tally)) => tally.failure.as_ref(),
        Ok(_) => None,
    };
    failure.is_some_and(|failure| failed(failure.code).status == StatusCode::UNAUTHORIZED)
}

fn handshake(reply: &Reply) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(reply.body.clone()));
    *response.status_mut() = reply.status;
    *response.headers_mut() = reply.headers.clone();
    response
}

/// The methods that the source takes.
fn allowed(source: Option<&Source>) -> HeaderValue {
    let answers = |method: &Method| source.is_some_and(|source| source.scheme.answers(method));
    let methods = [Method::POST, Method::GET, Method::HEAD, Method::OPTIONS].into_iter();
    let taken: Vec<Method> = methods.filter(|method| *method == Method::POST || answers(method)).collect();
    let names: Vec<&str> = taken.iter().map(Method::as_str).collect();
    HeaderValue::from_str(&names.join(", ")).unwrap_or_else(|_never| HeaderValue::from_static("POST"))
}

fn acknowledge(source: &Source) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(source.ack.body.clone()));
    *response.status_mut() = source.ack.status;
    if let Some(content_type) = &source.ack.content_type {
        response.headers_mut().insert(CONTENT_TYPE, content_type.clone());
    }
    response
}

/// The body that the provider wants in place of a problem document.
fn reject(source: &Source) -> Response<Full<Bytes>> {
    let body = source.ack.reject_body.clone().unwrap_or_default();
    let typed = !body.is_empty();
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = source.ack.reject;
    if typed {
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    }
    response
}

/// RFC 9457. Whatever was wrong with a signature, the sender sees one and the same body.
fn problem(verdict: Verdict, unauthorized: bool, retry_after: Duration) -> Response<Full<Bytes>> {
    let code = if unauthorized { "unauthorized" } else { verdict.code };
    let title = verdict.status.canonical_reason().unwrap_or("Error");
    let status = verdict.status.as_u16();
    let body = format!(r#"{{"type":"about:blank","title":"{title}","status":{status},"code":"{code}"}}"#);
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = verdict.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    let again = matches!(verdict.outcome, "unavailable" | "in_flight");
    if again || verdict.code == Code::BodyTooSlow.as_str() {
        headers.insert(RETRY_AFTER, HeaderValue::from(retry_after.as_secs().max(1)));
    }
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;
    use crate::provider::Scheme;

    fn of(preset: &str) -> Source {
        Source::new("s", Scheme::preset(preset).unwrap(), Vec::new())
    }

    fn failure(code: Code) -> Result<Outcome, Failure> {
        Err(Failure::new(Stage::Record, code))
    }

    /// Status, `Retry-After`, content type and body.
    async fn answer(preset: &str, result: &Result<Outcome, Failure>) -> (u16, bool, String, String) {
        let response = respond(Some(&of(preset)), result, Duration::from_secs(5));
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let content_type = head.headers.get(CONTENT_TYPE).map_or("", |value| value.to_str().unwrap());
        (
            head.status.as_u16(),
            head.headers.contains_key(RETRY_AFTER),
            content_type.to_owned(),
            String::from_utf8(body.to_vec()).unwrap(),
        )
    }

    #[tokio::test]
    async fn each_outcome_that_is_committed_gets_the_success_of_its_provider() {
        let outcomes = [
            Outcome::Accepted,
            Outcome::Duplicate(Tier::Redis),
            Outcome::Mismatch(Tier::Postgres),
            Outcome::Rejected,
            Outcome::Empty,
            Outcome::Batch(Arc::new(Tally::of(
                &of("adyen"),
                vec![(true, Ok(Outcome::Duplicate(Tier::Redis)))],
            ))),
        ];
        for outcome in outcomes {
            let answered = answer("adyen", &Ok(outcome)).await;
            assert_eq!(answered, (200, false, "text/plain".to_owned(), "[accepted]".to_owned()));
        }
        let answered = answer("dropbox-sign", &Ok(Outcome::Duplicate(Tier::Redis))).await;
        assert_eq!(answered.3, "Hello API Event Received");
    }

    #[tokio::test]
    async fn what_is_to_be_sent_again_has_a_status_after_which_the_provider_sends_again() {
        for (preset, code, status) in [
            ("stripe", Code::InFlight, 409),
            ("stripe", Code::EffectFailed, 503),
            ("stripe", Code::BodyTooSlow, 408),
            // Discards an event after any other 4xx, and after any 5xx.
            ("brevo", Code::InFlight, 429),
            ("brevo", Code::EffectFailed, 429),
            ("brevo", Code::PostgresUnavailable, 429),
            ("brevo", Code::CommitUnknown, 429),
            ("brevo", Code::Overloaded, 429),
            ("brevo", Code::BodyTooSlow, 429),
            ("brevo", Code::BodyTooLarge, 413),
            ("bitbucket", Code::InFlight, 503),
        ] {
            let (got, retry_after, ..) = answer(preset, &failure(code)).await;
            assert_eq!((got, retry_after), (status, code != Code::BodyTooLarge), "{preset} {code:?}");
        }
    }

    #[tokio::test]
    async fn a_bad_signature_gets_the_status_that_its_provider_looks_for_and_never_a_reason() {
        for code in
            [Code::SignatureMissing, Code::SignatureMismatch, Code::TimestampStale, Code::HeaderRepeated]
        {
            for (preset, status) in [("stripe", 401), ("discord-events", 401), ("gocardless", 498)] {
                let (got, _, _, body) = answer(preset, &failure(code)).await;
                assert!(got == status && body.contains("\"unauthorized\""), "{preset} {got} {body}");
            }
            assert_eq!(answer("xero", &failure(code)).await, (401, false, String::new(), String::new()));
        }
        // Another failure is no refusal of a signature.
        assert_eq!(answer("gocardless", &failure(Code::IdMissing)).await.0, 422);
    }

    #[test]
    fn the_worst_of_a_batch_is_found_whatever_the_statuses_are() {
        let results = |codes: &[Code]| codes.iter().map(|code| (true, failure(*code))).collect::<Vec<_>>();
        let brevo = of("brevo");
        let tally = Tally::of(&brevo, results(&[Code::InFlight, Code::EffectFailed, Code::IdMissing]));
        assert_eq!((tally.worst.status.as_u16(), tally.worst.outcome), (429, "unavailable"));
        let tally = Tally::of(&brevo, vec![(true, Ok(Outcome::Accepted)), (true, failure(Code::InFlight))]);
        assert_eq!((tally.worst.status.as_u16(), tally.worst.outcome), (429, "in_flight"));
    }
}
