//! The integration tests: one binary, a module for each promise, real Postgres and Redis servers of its own.

mod batching;
mod dev;
mod harness;
mod isolation;
mod once;
mod postgres_away;
mod redis_away;
mod tiers;
