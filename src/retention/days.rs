//! Bodies: days are dropped whole, what found no day goes row by row, and what is not done is moved aside before.
//!
//! Invariant: no body goes whose event is not done, unless it is kept. Nobody who inserts waits behind a long reader.

use std::time::Duration;

use tokio::time::sleep;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::Ended;
use super::cleaner::{Cleaner, Parameter, STATEMENT_TIMEOUT};
use crate::db::Trouble;

/// Bytes of bodies that one batch moves or deletes.
const BYTES: i64 = 16 << 20;
/// Who holds a lock at two looks so far apart is not waited for: everybody else would wait behind us.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);
/// For the last look and the drop. Inserts wait meanwhile.
const DROP_TIMEOUT: Duration = Duration::from_millis(250);

/// A partition that is past its horizon.
struct Day {
    name: String,
    since: jiff::Timestamp,
    past: jiff::Timestamp,
}

impl Day {
    fn of(row: &Row) -> Result<Self, Ended> {
        Ok(Self { name: row.try_get("name")?, since: row.try_get("since")?, past: row.try_get("past")? })
    }
}

impl Cleaner<'_> {
    /// Drops the days that are past the horizon. One that cannot be dropped now is left to the next pass.
    pub(super) async fn drop_days(&mut self) -> Result<(), Ended> {
        let age = self.limits.retention.body.as_secs_f64();
        let days = "select name, since, past from hapax.retain_days(make_interval(secs => $1))";
        let days = self.ask(days, &[(&age, Type::FLOAT8)]).await?;
        let of = i64::try_from(days.len()).unwrap_or(i64::MAX);
        for (row, at) in days.iter().zip(1..) {
            let day = Day::of(row)?;
            self.keep_bodies(&day).await?;
            if self.dry() || self.drop_day(&day, age).await? {
                self.counts.days_dropped.push(day.name);
            } else {
                self.counts.days_busy.push(day.name);
            }
            self.tell("days of bodies", at, of);
        }
        Ok(())
    }

    async fn keep_bodies(&mut self, day: &Day) -> Result<(), Ended> {
        let statement = "select next_since, more, moved from hapax.retain_bodies($1, $2, $3, $4, $5, $6)";
        let (rows, dry) = (self.rows(), self.dry());
        let mut since = day.since;
        loop {
            let parameters: [Parameter<'_>; 6] = [
                (&day.name, Type::TEXT),
                (&since, Type::TIMESTAMPTZ),
                (&day.past, Type::TIMESTAMPTZ),
                (&rows, Type::INT4),
                (&BYTES, Type::INT8),
                (&dry, Type::BOOL),
            ];
            let row = self.batch(statement, &parameters, STATEMENT_TIMEOUT).await?;
            self.counts.bodies_moved += count(&row, "moved")?;
            if !row.try_get::<_, bool>("more")? {
                return Ok(());
            }
            since = row.try_get("next_since")?;
        }
    }

    /// Whether it is gone.
    async fn drop_day(&mut self, day: &Day, age: f64) -> Result<bool, Ended> {
        let before = self.holders(day).await?;
        if !before.is_empty() {
            sleep(BETWEEN_LOOKS).await;
            let now = self.holders(day).await?;
            if before.iter().any(|holder| now.contains(holder)) {
                return Ok(false);
            }
        }
        let statement = "select hapax.retain_drop($1, make_interval(secs => $2))";
        let parameters: [Parameter<'_>; 2] = [(&day.name, Type::TEXT), (&age, Type::FLOAT8)];
        match self.batch(statement, &parameters, DROP_TIMEOUT).await {
            Ok(row) => Ok(row.try_get(0)?),
            Err(ended) => match ended.trouble() {
                Some(Trouble::Locked | Trouble::Cancelled | Trouble::Retry) => Ok(false),
                Some(Trouble::Lost | Trouble::Resources | Trouble::Statement) | None => Err(ended),
            },
        }
    }

    async fn holders(&mut self, day: &Day) -> Result<Vec<String>, Ended> {
        let rows = self.ask("select hapax.retain_holders($1)", &[(&day.name, Type::TEXT)]).await?;
        rows.first().map_or_else(|| Ok(Vec::new()), |row| Ok(row.try_get(0)?))
    }

    /// Bodies that found no day of their own.
    pub(super) async fn delete_stray_bodies(&mut self) -> Result<(), Ended> {
        let statement =
            "select gone, moved, more from hapax.retain_default($1, $2, make_interval(secs => $3), $4)";
        let (rows, dry, age) = (self.rows(), self.dry(), self.limits.retention.body.as_secs_f64());
        loop {
            let parameters: [Parameter<'_>; 4] =
                [(&rows, Type::INT4), (&BYTES, Type::INT8), (&age, Type::FLOAT8), (&dry, Type::BOOL)];
            let row = self.batch(statement, &parameters, STATEMENT_TIMEOUT).await?;
            self.counts.stray_bodies += count(&row, "gone")?;
            self.counts.bodies_moved += count(&row, "moved")?;
            if !row.try_get::<_, bool>("more")? {
                return Ok(());
            }
        }
    }

    /// Most rows in a batch.
    pub(super) fn rows(&self) -> i32 {
        i32::try_from(self.limits.retention.batch_rows).unwrap_or(i32::MAX)
    }
}

/// A column that counts rows.
pub(super) fn count(row: &Row, column: &str) -> Result<u64, Ended> {
    let rows: Option<i64> = row.try_get(column)?;
    Ok(rows.and_then(|rows| u64::try_from(rows).ok()).unwrap_or(0))
}
