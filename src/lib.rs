//! hapax, a webhook dedupe gateway.
//!
//! `accept → read body → verify → identify ‖ claim (Redis) → record (Postgres) → settle (Redis) → respond`

pub mod body;
pub mod config;
pub mod dev;
pub mod error;
#[cfg(test)]
mod fixture;
pub mod identify;
mod json;
mod parts;
pub mod provider;
pub mod settings;
pub mod sign;
pub mod verify;
