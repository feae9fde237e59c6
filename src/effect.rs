//! Effects that are written in Rust, in the place of a SQL function: what they are given, and what they may answer.
//!
//! **Unstable until 1.0**: names and signatures here may change with any version.
//!
//! Invariant: an effect can neither commit nor roll back, and cannot hide an error of its transaction. Never here:
//! opening or ending a transaction.
//!
//! A program of your own that starts the gateway registers its effects by name; settings name them with
//! `effect = "rust:NAME"`:
//!
//! ```no_run
//! use std::path::Path;
//! use std::process::ExitCode;
//!
//! use hapax::commands;
//! use hapax::effect::{Effect, EffectError, Effects, Event, Handle, async_trait};
//!
//! #[derive(serde::Deserialize)]
//! struct Payment {
//!     amount: i64,
//! }
//!
//! struct ApplyPayment;
//!
//! #[async_trait]
//! impl Effect for ApplyPayment {
//!     async fn apply(&self, event: &Event<'_>, handle: &mut Handle<'_>) -> Result<(), EffectError> {
//!         let payment: Payment = event.json()?;
//!         if payment.amount < 0 {
//!             return Err(EffectError::reject("a negative amount"));
//!         }
//!         let insert = "insert into payment (event_id, amount) values ($1, $2)";
//!         handle.execute(insert, &[&event.event_id, &payment.amount]).await?;
//!         Ok(())
//!     }
//! }
//!
//! fn main() -> ExitCode {
//!     let effects = Effects::default().with("apply_payment", ApplyPayment);
//!     match commands::serve::run(Path::new("/etc/hapax/hapax.toml"), false, &effects) {
//!         Ok(()) => ExitCode::SUCCESS,
//!         Err(exit) => {
//!             commands::complain(&exit.message);
//!             ExitCode::from(exit.code)
//!         }
//!     }
//! }
//! ```

mod handle;
mod registry;
mod statement;

pub use async_trait::async_trait;
pub use jiff::Timestamp;
use serde::Deserialize;
pub use tokio_postgres::Row;
pub use tokio_postgres::error::SqlState;
pub use tokio_postgres::types::ToSql;

pub use handle::Handle;
pub(crate) use handle::{Fault, FaultKind};
pub use registry::{Effects, UnknownEffects};

/// Longest cause that is kept of what an effect says, in characters.
const CAUSE_MAX: usize = 1_000;

/// The business effect of a source: what is to happen once for each event, in the transaction that also writes the event's
/// ledger row. Both are committed, or neither is.
///
/// Each event has a transaction of its own. An effect has `postgres.statement_timeout` for all of its work; one that
/// takes longer is dropped where it waits, and its transaction rolled back. It may be called again for the same event if
/// its transaction was not committed, so what it does outside of the transaction may happen more than once. It must not
/// block its thread. A panic fails the event.
#[async_trait]
pub trait Effect: Send + Sync {
    /// Takes effect, by statements through `handle`.
    ///
    /// # Errors
    /// [`EffectError::reject`] refuses the event for good: it is recorded as `rejected` and answered 2xx. Any other error
    /// rolls it back and is answered 503, so that the provider sends it again; with `on_error = "park"` the event is kept, and
    /// the effect is tried again here.
    async fn apply(&self, event: &Event<'_>, handle: &mut Handle<'_>) -> Result<(), EffectError>;
}

/// An event as effects see it; the fields are those of the SQL type `hapax.event`.
#[non_exhaustive]
#[derive(Clone, Copy)]
pub struct Event<'a> {
    /// The source, by its name in the settings.
    pub source: &'a str,
    /// `-` unless the source has a scope.
    pub scope: &'a str,
    /// What it is deduplicated by, within source and scope.
    pub event_id: &'a str,
    /// The provider's name for what happened, if it has one.
    pub event_type: Option<&'a str>,
    /// Made of source, scope and id; the same in the ledger and in Redis. A stable idempotency key.
    pub key: &'a [u8; 16],
    /// Its place in a batch, from 0.
    pub item: Option<i32>,
    /// SHA-256 of the body, without what the provider changes between attempts.
    pub digest: &'a [u8; 32],
    /// The whole request's body, or the item's own bytes in a batch; exactly as received.
    pub body: &'a [u8],
    /// The headers that the source's `headers` list names, as a JSON object of strings.
    pub headers: &'a str,
    /// The transaction's time, by the database's clock.
    pub received_at: Timestamp,
    /// When the provider says it happened.
    pub provider_time: Option<Timestamp>,
    /// Which try of the effect it is, from 1; more than that of a parked event.
    pub attempt: i32,
    /// How often an operator had it replayed.
    pub replay: i32,
}

/// Without the body and the headers, which must not get into a log.
impl std::fmt::Debug for Event<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { source, scope, event_id, event_type, .. } = self;
        let mut shown = f.debug_struct("Event");
        shown.field("source", source).field("scope", scope).field("event_id", event_id);
        shown.field("event_type", event_type).finish_non_exhaustive()
    }
}

impl<'a> Event<'a> {
    /// The body, read as JSON.
    ///
    /// # Errors
    /// Where it is not the JSON that is read; without quoting it.
    pub fn json<T: Deserialize<'a>>(&self) -> Result<T, EffectError> {
        serde_json::from_slice(self.body).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            EffectError::fail(format!(
                "the body is not the JSON that the effect reads: line {line}, column {column}"
            ))
        })
    }

    /// A kept header's value; several of one name are joined with commas.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<String> {
        let headers: serde_json::Map<String, serde_json::Value> = serde_json::from_str(self.headers).ok()?;
        Some(headers.get(&name.to_ascii_lowercase())?.as_str()?.to_owned())
    }
}

/// Why an effect did not take place.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct EffectError(Kind);

#[derive(Debug, thiserror::Error)]
enum Kind {
    #[error("{0}")]
    Rejected(String),
    #[error("{0}")]
    Failed(String),
    #[error("{}", Fault::of(.0).cause)]
    Sql(#[source] tokio_postgres::Error),
}

impl EffectError {
    /// Refuses the event for good: recorded as `rejected`, answered 2xx, not sent again. What the effect wrote is
    /// undone. The cause goes to the log: nothing of the body should be in it.
    #[must_use]
    pub fn reject(cause: impl Into<String>) -> Self {
        Self(Kind::Rejected(cause.into()))
    }

    /// Fails the event: rolled back, and sent again by the provider, or parked. The cause goes to the log: nothing of the
    /// body should be in it.
    #[must_use]
    pub fn fail(cause: impl Into<String>) -> Self {
        Self(Kind::Failed(cause.into()))
    }

    /// What Postgres calls the error, if it comes from there.
    #[must_use]
    pub fn sqlstate(&self) -> Option<&SqlState> {
        match &self.0 {
            Kind::Sql(error) => error.code(),
            Kind::Rejected(_) | Kind::Failed(_) => None,
        }
    }

    fn cause(&self) -> String {
        kept(&self.to_string())
    }
}

/// Of a [`Row`]'s columns, and of the handle's statements.
impl From<tokio_postgres::Error> for EffectError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self(Kind::Sql(error))
    }
}

/// What an effect's work comes to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// To be committed.
    Done,
    /// To be recorded as rejected, and undone but for that.
    Rejected(String),
    /// To be undone; maybe the same again succeeds.
    Failed {
        /// For the log.
        cause: String,
        /// After a deadlock or a serialization failure.
        transient: bool,
    },
    /// The session has ended, and the transaction with it.
    Lost(String),
}

impl Verdict {
    pub(crate) fn failed(cause: impl AsRef<str>) -> Self {
        Self::Failed { cause: kept(cause.as_ref()), transient: false }
    }

    /// An effect decides about its event as long as its transaction is sound. After a fault it can only turn a statement
    /// that failed by itself (a constraint, say) into a rejection: whatever may pass has to be tried again.
    pub(crate) fn of(fault: Option<Fault>, answer: Result<(), EffectError>) -> Self {
        let Some(Fault { kind, cause }) = fault else {
            return match answer {
                Ok(()) => Self::Done,
                Err(error @ EffectError(Kind::Rejected(_))) => Self::Rejected(error.cause()),
                Err(error) => Self::failed(error.cause()),
            };
        };
        match (kind, answer) {
            (FaultKind::Lost, _) => Self::Lost(cause),
            (FaultKind::Transient, _) => Self::Failed { cause, transient: true },
            (FaultKind::Rejection | FaultKind::Statement, Err(error @ EffectError(Kind::Rejected(_)))) => {
                Self::Rejected(error.cause())
            }
            (FaultKind::Rejection, Err(EffectError(Kind::Sql(_)))) => Self::Rejected(cause),
            (_, Ok(())) => Self::failed(format!("the effect went on after an error: {cause}")),
            (_, Err(_)) => Self::failed(cause),
        }
    }
}

/// A cause as the log and the ledger keep it: Postgres takes no NUL in a text, and an event must not fail for what its effect
/// says of it.
fn kept(cause: &str) -> String {
    cause.chars().take(CAUSE_MAX).map(|char| if char == '\0' { ' ' } else { char }).collect()
}

/// What an effect raised, for the log. Messages about data ("invalid input syntax for type integer: …") quote the body,
/// which must not be there.
pub(crate) fn raised(sqlstate: &str, message: &str) -> String {
    if sqlstate.starts_with("22") {
        return format!("a data exception in the effect; its text may quote the body (SQLSTATE {sqlstate})");
    }
    let message: String = message.chars().take(CAUSE_MAX).collect();
    format!("{message} (SQLSTATE {sqlstate})")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(kind: FaultKind, answer: Result<(), EffectError>) -> Verdict {
        Verdict::of(Some(Fault { kind, cause: "first".to_owned() }), answer)
    }

    fn rejected() -> Result<(), EffectError> {
        Err(EffectError::reject("no"))
    }

    #[test]
    fn a_sound_transaction_ends_as_the_effect_says() {
        assert_eq!(Verdict::of(None, Ok(())), Verdict::Done);
        assert_eq!(Verdict::of(None, rejected()), Verdict::Rejected("no".to_owned()));
        assert_eq!(Verdict::of(None, Err(EffectError::fail("why"))), Verdict::failed("why"));
    }

    #[test]
    fn every_cause_can_be_stored() {
        let said = format!("\0 said \0{}", "é".repeat(CAUSE_MAX));
        let mut stored = String::from("  said  ");
        stored.extend(std::iter::repeat_n('é', CAUSE_MAX - 8));
        let failed = Err(EffectError::fail(said.clone()));
        assert_eq!(Verdict::of(None, failed), Verdict::failed(stored.clone()));
        assert_eq!(Verdict::of(None, Err(EffectError::reject(said))), Verdict::Rejected(stored));
        let fault = Fault { kind: FaultKind::Other, cause: "of\0a driver".to_owned() };
        let failed = Verdict::Failed { cause: "of a driver".to_owned(), transient: false };
        assert_eq!(Verdict::of(Some(fault), rejected()), failed);
    }

    #[test]
    fn no_fault_is_ever_done() {
        use FaultKind::{Lost, Other, Rejection, Statement, Transient};
        for kind in [Lost, Other, Rejection, Statement, Transient] {
            for answer in [Ok(()), rejected(), Err(EffectError::fail("why"))] {
                let accepted = answer.is_ok();
                let verdict = after(kind, answer);
                assert!(!matches!(verdict, Verdict::Done), "{kind:?}");
                if accepted {
                    assert!(
                        !matches!(verdict, Verdict::Rejected(_)),
                        "{kind:?}: a swallowed error is no rejection"
                    );
                }
            }
        }
    }

    #[test]
    fn what_may_pass_is_never_rejected() {
        use FaultKind::{Lost, Other, Statement, Transient};
        assert_eq!(after(Lost, rejected()), Verdict::Lost("first".to_owned()));
        assert_eq!(after(Other, rejected()), Verdict::failed("first"));
        let again = Verdict::Failed { cause: "first".to_owned(), transient: true };
        assert_eq!(after(Transient, rejected()), again);
        assert_eq!(after(Statement, rejected()), Verdict::Rejected("no".to_owned()));
    }

    #[test]
    fn a_swallowed_error_is_the_cause() {
        let verdict = after(FaultKind::Statement, Ok(()));
        assert_eq!(verdict, Verdict::failed("the effect went on after an error: first"));
    }
}
