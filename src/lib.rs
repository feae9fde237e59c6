//! hapax, a webhook dedupe gateway.
//!
//! The path of a request: `accept → read body → find key → verify → identify ‖ claim (Redis) → record (Postgres) → settle (Redis)
//! → respond`. Each stage takes the last stage's type by value, so that none can be skipped; right of `‖` nothing can be
//! cancelled by the client.
//!
//! What must hold: no 2xx before Postgres has committed the event; at most one committed effect for each (source,
//! scope, event id); what did not commit can be sent again at once; Redis changes latency only; unverified bytes touch
//! no store (but for [`handover`]: a secret that a provider hands over while an operator waits for it); a reused id is
//! seen; every limit has a name.
//!
//! | modules | are about |
//! |---|---|
//! | [`server`], [`admin`] | connections |
//! | [`ingest`], [`flight`] | the path itself |
//! | [`body`], [`keyring`], [`verify`], [`challenge`], [`identify`], [`claim`], [`record`], [`respond`] | its stages |
//! | [`effect`] | what happens once for each event, where it is written in Rust |
//! | [`outbox`] | delivering events to targets, after the commit |
//! | [`work`], [`outbox`] | what is left to do after the commit |
//! | [`handover`] | secrets that providers hand over |
//! | [`guard`] | signed bytes that come again under another id |
//! | [`provider`], [`sign`] | how providers sign, as data, and its inverse |
//! | [`config`], [`settings`] | what an operator may say |
//! | [`db`], [`generation`] | Postgres connections, migrations, and which history of the database this is |
//! | [`retention`] | what is deleted, and when |
//! | [`tls`] | encrypted connections to the stores |
//! | [`serve`], [`reload`], [`tasks`], [`log`], [`metrics`], [`error`] | a running process |
//! | [`commands`], [`dev`] | everything beside `serve` |

pub mod admin;
pub mod body;
pub mod challenge;
pub mod claim;
pub mod commands;
pub mod config;
pub mod db;
pub mod dev;
pub mod effect;
pub mod error;
#[cfg(test)]
mod fixture;
pub mod flight;
pub mod generation;
pub mod guard;
pub mod handover;
pub mod identify;
pub mod ingest;
mod json;
pub mod keyring;
pub mod log;
pub mod metrics;
mod multipart;
pub mod outbox;
mod parts;
pub mod provider;
pub mod record;
pub mod reload;
pub mod respond;
pub mod retention;
pub mod serve;
pub mod server;
pub mod settings;
pub mod sign;
pub mod tasks;
pub mod tls;
pub mod verify;
pub mod work;
