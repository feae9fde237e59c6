//! hapax, a webhook dedupe gateway.
//!
//! `accept → read body → verify → identify ‖ claim (Redis) → record (Postgres) → settle (Redis) → respond`

pub mod admin;
pub mod body;
pub mod claim;
pub mod commands;
pub mod config;
pub mod db;
pub mod dev;
pub mod error;
pub mod flight;
pub mod generation;
pub mod identify;
pub mod ingest;
pub mod log;
pub mod metrics;
pub mod provider;
pub mod record;
pub mod respond;
pub mod serve;
pub mod server;
pub mod settings;
pub mod tasks;
pub mod verify;
