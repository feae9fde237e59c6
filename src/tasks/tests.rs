//! Loops that fail. Nothing here waits for time to pass: pauses are none, and ages are asked for at a time of the test's choice.

use std::future::{Pending, pending};
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::{mpsc, watch};

use super::*;

fn hasty() -> Tasks {
    Tasks::with_backoff(|_| Duration::ZERO)
}

/// How often a loop was begun, to be waited for.
#[derive(Clone)]
struct Lives(watch::Sender<u32>);

impl Lives {
    fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    /// One more; which it is.
    fn begin(&self) -> u32 {
        self.0.send_modify(|lives| *lives += 1);
        *self.0.borrow()
    }

    async fn reach(&self, lives: u32) {
        self.0.subscribe().wait_for(|begun| *begun >= lives).await.unwrap();
    }
}

fn state(tasks: &Tasks, name: &str, after: Duration) -> LoopState {
    let states = tasks.loops(Instant::now() + after);
    states.into_iter().find(|state| &*state.name == name).unwrap()
}

/// A loop whose first lives end as `fails` says; the one after them waits for ever.
fn failing_first(tasks: &Tasks, name: &'static str, times: u32, fails: fn() -> Result<(), String>) -> Lives {
    let lives = Lives::new();
    let begun = lives.clone();
    tasks.spawn_loop(name, move |beat| {
        let begun = begun.clone();
        async move { if begun.begin() <= times { fails() } else { beat.waiting(pending()).await } }
    });
    lives
}

#[tokio::test]
async fn a_loop_that_fails_makes_the_gateway_unready_until_it_is_healthy() {
    let tasks = hasty();
    let lives = failing_first(&tasks, "bad", UNREADY_AFTER, || panic!("on purpose"));
    failing_first(&tasks, "better", UNREADY_AFTER - 1, || Err("on purpose".to_owned())).reach(3).await;
    lives.reach(UNREADY_AFTER + 1).await;
    let waits = async || {
        while state(&tasks, "bad", Duration::ZERO).age == Some(Age::Never) {
            tokio::task::yield_now().await;
        }
    };
    waits().await;
    assert_eq!(tasks.failing(Instant::now()), [("bad".into(), UNREADY_AFTER)]);
    assert_eq!(state(&tasks, "bad", Duration::ZERO).failures, u64::from(UNREADY_AFTER));
    assert_eq!(state(&tasks, "better", Duration::ZERO).failures, u64::from(UNREADY_AFTER - 1));
    assert_eq!(tasks.failing(Instant::now() + HEALTHY_AFTER), []);
    // Not forgiven yet, by the clock.
    assert_eq!(tasks.fail("bad"), 1);
    lives.reach(UNREADY_AFTER + 2).await;
    assert_eq!(tasks.failing(Instant::now()), [("bad".into(), UNREADY_AFTER + 1)]);
}

#[tokio::test]
async fn a_loop_that_cannot_live_stops_the_process() {
    for (name, fails) in [
        ("panics", (|| panic!("on purpose")) as fn() -> Result<(), String>),
        ("fails", || Err("on purpose".to_owned())),
        ("ends", || Ok(())),
    ] {
        let tasks = hasty();
        let lives = failing_first(&tasks, name, u32::MAX, fails);
        tasks.broken().await;
        assert_eq!(*lives.0.borrow(), BROKEN_AFTER, "{name}");
        assert_eq!(state(&tasks, name, Duration::ZERO).failures, u64::from(BROKEN_AFTER), "{name}");
    }
}

#[tokio::test]
async fn a_factory_that_panics_is_a_loop_that_does() {
    let tasks = hasty();
    tasks.spawn_loop("bad", |_beat| -> Pending<()> { panic!("on purpose") });
    tasks.broken().await;
}

#[tokio::test]
async fn what_is_queued_outlasts_a_failure() {
    let tasks = hasty();
    let (queue, waiting) = mpsc::channel::<&str>(9);
    let (done, mut results) = mpsc::channel(9);
    let waiting = Arc::new(tokio::sync::Mutex::new(waiting));
    for item in ["1", "not a number", "2", "3"] {
        queue.send(item).await.unwrap();
    }
    tasks.spawn_while_needed("adds", move |beat| {
        let (waiting, done) = (Arc::clone(&waiting), done.clone());
        async move {
            let mut waiting = waiting.lock().await;
            while let Some(item) = beat.waiting(waiting.recv()).await {
                done.send(item.parse::<u8>().unwrap()).await.unwrap();
            }
        }
    });
    for wanted in 1..=3 {
        assert_eq!(results.recv().await, Some(wanted));
    }
    drop(queue);
    // Ends with nobody left to send, and is not started again.
    assert_eq!(results.recv().await, None);
    while state(&tasks, "adds", Duration::ZERO).age.is_some() {
        tokio::task::yield_now().await;
    }
    assert_eq!(state(&tasks, "adds", Duration::ZERO).failures, 1);
}

#[tokio::test]
async fn a_loop_that_is_cancelled_ends_and_others_go_on() {
    let tasks = hasty();
    let (cancel, cancel_other) = (CancellationToken::new(), CancellationToken::new());
    let patient = async |beat: Beat| beat.cancelled().await;
    let one = tasks.spawn_until("target:one", &cancel, patient);
    let early = Lives::new();
    let begun = early.clone();
    let other = tasks.spawn_until(String::from("target:other"), &cancel_other, move |beat| {
        let life = begun.begin();
        async move {
            if life > 1 {
                beat.cancelled().await;
            }
        }
    });
    cancel.cancel();
    one.await.unwrap();
    // Ended before it was cancelled, so it was started again.
    early.reach(2).await;
    assert_eq!(state(&tasks, "target:one", Duration::ZERO).failures, 0);
    assert_eq!(state(&tasks, "target:other", Duration::ZERO).failures, 1);
    tasks.begin_stop();
    other.await.unwrap();
    assert!(tasks.finish(Duration::MAX).await);
}

/// Or else a stop would wait for a pause, or start a loop just to end it.
#[tokio::test]
async fn a_loop_that_is_cancelled_between_two_lives_has_no_other() {
    let tasks = Tasks::with_backoff(|_| Duration::MAX);
    let (cancel, lives) = (CancellationToken::new(), Lives::new());
    let begun = lives.clone();
    let ends = tasks.spawn_until("target:one", &cancel, move |_beat| {
        begun.begin();
        async {}
    });
    while state(&tasks, "target:one", Duration::ZERO).failures == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(tasks.fail("target:one"), 0);
    cancel.cancel();
    ends.await.unwrap();
    assert_eq!(*lives.0.borrow(), 1);
}

#[tokio::test]
async fn a_stop_ends_all_loops() {
    let tasks = hasty();
    let (held, mut released) = mpsc::channel::<()>(1);
    tasks.spawn_loop("for ever", move |_beat| {
        let held = held.clone();
        async move {
            held.closed().await;
        }
    });
    tasks.begin_stop();
    assert!(tasks.finish(Duration::ZERO).await);
    assert_eq!(released.recv().await, None);
}

#[tokio::test]
async fn a_stuck_loop_grows_old_and_an_idle_one_does_not() {
    const LATER: Duration = Duration::from_secs(60);
    let tasks = hasty();
    let (mute, stuck, idle) = (Lives::new(), Lives::new(), Lives::new());
    let (begun_mute, begun_stuck, begun_idle) = (mute.clone(), stuck.clone(), idle.clone());
    tasks.spawn_loop("mute", move |_beat| {
        begun_mute.begin();
        pending::<()>()
    });
    tasks.spawn_loop("stuck", move |beat| {
        let begun = begun_stuck.clone();
        async move {
            // Both are over: the second is dropped.
            beat.waiting(async {}).await;
            tokio::select! { biased; () = beat.waiting(pending()) => {}, () = async {} => {} }
            begun.begin();
            pending::<()>().await;
        }
    });
    tasks.spawn_loop("idle", move |beat| {
        let begun = begun_idle.clone();
        async move {
            let wait = async {
                begun.begin();
                pending::<()>().await;
            };
            beat.waiting(wait).await;
        }
    });
    mute.reach(1).await;
    stuck.reach(1).await;
    idle.reach(1).await;
    assert_eq!(state(&tasks, "mute", LATER).age, Some(Age::Never));
    assert_eq!(state(&tasks, "idle", LATER).age, Some(Age::Since(Duration::ZERO)));
    let Some(Age::Since(age)) = state(&tasks, "stuck", LATER).age else { panic!("it spoke") };
    assert!(age > LATER / 2, "{age:?}");
    assert!(state(&tasks, "stuck", LATER * 2).age > Some(Age::Since(LATER)));
}

#[test]
fn pauses_grow_to_a_limit() {
    for in_a_row in 1..=100 {
        let wanted = PAUSE.start().saturating_mul(1 << (in_a_row - 1).min(20)).min(*PAUSE.end());
        let pause = backoff(in_a_row);
        assert!(pause <= wanted && pause >= wanted / 2, "{in_a_row}: {pause:?}");
    }
}

/// Of several loops with one name (a lane and its successor) the worst is told.
#[tokio::test]
async fn the_oldest_of_a_name_is_told() {
    let tasks = hasty();
    let begun = Arc::new(AtomicU32::new(0));
    for _ in 0..2 {
        let begun = Arc::clone(&begun);
        tasks.spawn_while_needed("lane:none", move |beat| {
            let first = begun.fetch_add(1, Ordering::SeqCst) == 0;
            async move { if first { pending().await } else { beat.waiting(pending::<()>()).await } }
        });
    }
    while begun.load(Ordering::SeqCst) < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(tasks.loops(Instant::now()).len(), 1);
    assert_eq!(state(&tasks, "lane:none", Duration::ZERO).age, Some(Age::Never));
    assert_eq!(tasks.fail("lane:none"), 2);
}
