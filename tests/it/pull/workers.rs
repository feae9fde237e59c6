//! Workers as processes, which are stopped, killed and asked to end.

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;

use super::worker::{Worker, Workplace, expire};
use super::{LONG, gateway, role_url, status, until_status};
use crate::harness::load::burst;
use crate::harness::scene::{Scene, deliver, event};
use crate::harness::wait::{eventually, has_ended};

const GOOD: [(&str, &str); 1] = [("GOOD", "1")];

#[tokio::test]
async fn the_documented_worker_does_its_work_and_ends_when_asked() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let mut worker = Workplace::documented(&role_url(&scene).await?)?.start(&[])?;
    deliver(gateway.listen()?, "plain", &event("evt_1", "")).await?;
    until_status(&scene, "evt_1", "done").await.with_context(|| worker.said())?;
    let database = scene.database().await?;
    let query = "select event_id, attempt, body->>'id' from public.payment";
    let row = database.query_one(query, &[]).await?;
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i32>(1), row.get::<_, &str>(2)), ("evt_1", 1, "evt_1"));
    worker.signal(Signal::TERM)?;
    let status = worker.ended().await?;
    ensure!(status.success() && worker.said().is_empty(), "{status}: {}", worker.said());
    Ok(())
}

#[tokio::test]
async fn one_that_is_asked_to_end_ends_what_it_has_in_hand() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let hold = scene.hold().await?;
    let mut worker = Workplace::new(&role_url(&scene).await?)?.start(&[])?;
    deliver(gateway.listen()?, "plain", &event("evt_1", r#""do":"wait""#)).await?;
    scene.waiting(1).await.with_context(|| worker.said())?;
    deliver(gateway.listen()?, "plain", &event("evt_2", "")).await?;
    worker.signal(Signal::TERM)?;
    drop(hold);
    ensure!(worker.ended().await?.success(), "{}", worker.said());
    assert_eq!(status(&scene, "evt_1").await?.0, "done");
    assert_eq!(status(&scene, "evt_2").await?, ("open".to_owned(), 1), "no other was begun");
    assert_eq!(scene.found().await?.effects.len(), 1);
    Ok(())
}

#[tokio::test]
async fn one_that_was_stopped_past_its_lease_cannot_commit() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let hold = scene.hold().await?;
    let place = Workplace::new(&role_url(&scene).await?)?;
    let slow = place.start(&[])?;
    deliver(gateway.listen()?, "plain", &event("evt_1", r#""do":"wait""#)).await?;
    scene.waiting(1).await.with_context(|| slow.said())?;
    slow.signal(Signal::STOP)?;
    drop(hold);
    ensure!(expire(&scene).await? == 1);
    let quick = place.start(&[])?;
    until_status(&scene, "evt_1", "done").await.with_context(|| quick.said())?;
    slow.signal(Signal::CONT)?;
    slow.until_said("evt_1, attempt 1: hapax: this token holds no event: the event is done").await?;
    assert_eq!(status(&scene, "evt_1").await?, ("done".to_owned(), 2));
    scene.assert_once([&"evt_1".to_owned()]).await?;
    // It is none the worse for it.
    quick.sigkill()?;
    deliver(gateway.listen()?, "plain", &event("evt_2", "")).await?;
    until_status(&scene, "evt_2", "done").await.with_context(|| slow.said())?;
    scene.assert_once(["evt_1", "evt_2"].map(String::from).iter()).await?;
    Ok(())
}

#[tokio::test]
async fn an_event_that_kills_five_workers_is_dead_and_can_be_brought_again() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &[]).await?;
    let place = Workplace::new(&role_url(&scene).await?)?;
    let poison = event("evt_poison", r#""do":"kill""#);
    deliver(gateway.listen()?, "plain", &poison).await?;
    deliver(gateway.listen()?, "plain", &event("evt_bad", r#""do":"raise""#)).await?;
    deliver(gateway.listen()?, "plain", &event("evt_good", "")).await?;
    for killed in 1..=5 {
        let worker = place.start(&[])?;
        // Also when it is busy with the others, or the lease of what killed the one before has not run out.
        let process = worker.id();
        let gone = eventually(LONG, async || {
            expire(&scene).await.ok()?;
            has_ended(process).then_some(())
        })
        .await;
        gone.with_context(|| format!("{killed}: {}", worker.said()))?;
        worker.killed().await?;
        assert!(status(&scene, "evt_poison").await?.1 >= killed);
    }
    let worker = place.start(&[])?;
    let dead = eventually(LONG, async || {
        expire(&scene).await.ok()?;
        let both = [status(&scene, "evt_poison").await.ok()?, status(&scene, "evt_bad").await.ok()?];
        (both == [("dead".to_owned(), 5), ("dead".to_owned(), 5)]).then_some(())
    });
    dead.await.with_context(|| worker.said())?;
    assert_eq!(status(&scene, "evt_good").await?, ("done".to_owned(), 1));
    let query = "select j.error from hapax.job j join hapax.ledger using (key) where event_id = $1";
    let database = scene.database().await?;
    let why: String = database.query_one(query, &[&"evt_poison"]).await?.get(0);
    assert_eq!(why, "taken 5 times, and its worker never came back");
    let why: String = database.query_one(query, &[&"evt_bad"]).await?.get(0);
    assert_eq!(why, "this work fails ");
    worker.sigkill()?;

    let answer = deliver(gateway.listen()?, "plain", &poison).await?;
    assert_eq!((answer.outcome.as_str(), answer.rearmed), ("duplicate", true));
    let worker = place.start(&GOOD)?;
    until_status(&scene, "evt_poison", "done").await.with_context(|| worker.said())?;
    assert_eq!(status(&scene, "evt_bad").await?.0, "dead", "the other one was not brought again");
    scene.assert_once(["evt_poison", "evt_good"].map(String::from).iter()).await?;
    Ok(())
}

#[tokio::test]
async fn workers_that_are_killed_at_any_moment_leave_one_effect_for_each_event() -> Result<()> {
    const EVENTS: usize = 2000;
    const WORKERS: usize = 4;
    const KILLS: usize = 40;
    let scene = Scene::new().await?;
    let gateway = gateway(&scene, &["source.plain.attempts_max = 1000"]).await?;
    let ids: Vec<String> = (0..EVENTS).map(|at| format!("evt_{at}")).collect();
    for part in ids.chunks(200) {
        let answers =
            burst(gateway.listen()?, "plain", part.iter().map(|id| event(id, "")).collect()).await?;
        ensure!(answers.iter().all(|answer| answer.outcome == "accepted"));
    }
    let place = Workplace::new(&role_url(&scene).await?)?;
    let mut seeds = 0..KILLS;
    // Once enough of them were killed, the rest is done in peace.
    let mut another = || match seeds.next() {
        Some(seed) => place.start(&[("SEED", seed.to_string().as_str()), GOOD[0]]),
        None => place.start(&GOOD),
    };
    let mut workers = (0..WORKERS).map(|_| another()).collect::<Result<Vec<_>>>()?;
    for _ in 0..KILLS {
        let ended = eventually(LONG, || std::future::ready(workers.iter_mut().position(Worker::has_ended)));
        let ended = ended.await;
        let ended = ended.with_context(|| said(&workers))?;
        workers.swap_remove(ended).killed().await?;
        // Also of those that live: what they are doing then may be another's, too.
        expire(&scene).await?;
        workers.push(another()?);
    }
    let database = scene.database().await?;
    let done = "select count(*) from hapax.events where status = 'done'";
    let finished = eventually(LONG, async || {
        expire(&scene).await.ok()?;
        (database.query_one(done, &[]).await.ok()?.get::<_, i64>(0) == i64::try_from(EVENTS).ok()?)
            .then_some(())
    });
    finished.await.with_context(|| said(&workers))?;
    scene.assert_once(&ids).await?;
    Ok(())
}

fn said(workers: &[Worker]) -> String {
    workers.iter().map(Worker::said).collect()
}

#[tokio::test]
async fn one_without_rights_says_so_and_ends() -> Result<()> {
    let scene = Scene::new().await?;
    let _gateway = gateway(&scene, &[]).await?;
    let url = role_url(&scene).await?;
    let name = super::role_name(&scene);
    let revoke = format!("revoke execute on function hapax.take from {name}");
    scene.database().await?.batch_execute(&revoke).await?;
    let mut worker = Workplace::new(&url)?.start(&[])?;
    ensure!(!worker.ended().await?.success());
    ensure!(worker.said().contains("permission denied for function take"), "{}", worker.said());
    Ok(())
}
