//! Private Postgres and Redis servers.
