//! The integration tests: one binary, a module for each promise, real Postgres and Redis servers of its own.

mod crash;
mod dev;
mod disconnect;
mod harness;
mod http;
mod log;
mod once;
mod stop;
