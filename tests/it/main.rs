//! The integration tests: one binary, a module for each promise, real Postgres and Redis servers of its own.

mod batch;
mod batching;
mod commit_truth;
mod crash;
mod deployment;
mod dev;
mod disconnect;
mod effects;
mod generation;
mod handshake;
mod harness;
mod hostile;
mod http;
mod isolation;
mod key_rule;
mod keyring;
mod log;
mod once;
mod pooler;
mod postgres_away;
mod redis_away;
mod stop;
mod tiers;
mod verify;
