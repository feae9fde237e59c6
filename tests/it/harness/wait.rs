//! Waiting for something to become true: the only place in the tests that lets time pass.

use std::future::Future;
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::process::{Pid, test_kill_process};
use tokio::time::Instant;

const POLL: Duration = Duration::from_millis(5);

/// Asks again and again until there is an answer; an error once `limit` is over.
pub(crate) async fn eventually<T, F, Fut>(limit: Duration, mut probe: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    let deadline = Instant::now() + limit;
    loop {
        let answer = tokio::time::timeout_at(deadline, probe()).await;
        if let Ok(Some(found)) = answer {
            return Ok(found);
        }
        if answer.is_err() || Instant::now() + POLL > deadline {
            bail!("nothing within {limit:?}");
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Whether a process is gone; one that ended and waits to be collected counts as gone.
pub(crate) fn has_ended(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return true };
    let zombie = |stat: String| stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('Z'));
    test_kill_process(pid).is_err() || std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(zombie)
}

#[tokio::test]
async fn the_first_answer_ends_the_wait() -> Result<()> {
    let mut asked = 0;
    let answer = eventually(Duration::from_secs(10), || {
        asked += 1;
        let answer = (asked == 3).then_some(asked);
        async move { answer }
    });
    assert_eq!(answer.await?, 3);
    Ok(())
}

#[tokio::test]
async fn a_probe_that_hangs_does_not_hang_the_wait() {
    let answer = eventually(Duration::from_millis(20), std::future::pending::<Option<()>>);
    assert!(answer.await.is_err());
}
