//! The integration tests: one binary, a module for each promise, real Postgres and Redis servers of its own.

mod dev;
mod handshake;
mod harness;
mod once;
mod verify;
