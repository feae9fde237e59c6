use async_trait::async_trait;
use jiff::Timestamp;

use super::super::jobs::{Attempt, Body};
use super::*;
use crate::identify::EventKey;

const RETRY: Retry = Retry { base: Duration::from_secs(5), max: Duration::from_secs(60) };

fn task(content: bool) -> Task {
    let body = || Body { bytes: "{}".into(), headers: "{}".to_owned() };
    Task {
        attempt: Attempt { key: EventKey([1; 16]), queue: "target:orders".into(), token: "t".to_owned() },
        source: "plain".to_owned(),
        scope: "-".to_owned(),
        event_id: "evt_1".to_owned(),
        event_type: None,
        item: None,
        digest: [0; 32],
        content: content.then(body),
        received_at: Timestamp::UNIX_EPOCH,
        provider_time: None,
        number: 1,
        replay: 0,
    }
}

/// Never answers.
#[derive(Debug)]
struct Hangs;

#[async_trait]
impl Target for Hangs {
    async fn deliver(&self, _message: &Message) -> Result<(), Undelivered> {
        std::future::pending().await
    }
}

#[derive(Debug)]
struct Panics;

#[async_trait]
impl Target for Panics {
    async fn deliver(&self, message: &Message) -> Result<(), Undelivered> {
        assert_eq!(message.event_id, "", "as the test asks for");
        Ok(())
    }
}

async fn ending(target: &dyn Target, task: &Task) -> (Ending, Option<Fault>) {
    let (ending, error, _) =
        verdict(task, attempt(target, "orders", task, Duration::from_millis(1)).await, RETRY);
    (ending, error.map(|error| error.fault))
}

/// What ends the same each time runs out of attempts; what a socket or a store of ours did costs none.
#[tokio::test]
async fn an_attempt_counts_unless_something_here_that_may_pass_was_in_its_way() {
    assert_eq!(ending(&Panics, &task(true)).await, (Ending::Failed, Some(Fault::Event)));
    assert_eq!(ending(&Panics, &task(false)).await, (Ending::Hopeless, Some(Fault::Ours)));
    assert_eq!(ending(&Hangs, &task(true)).await, (Ending::Failed, Some(Fault::Target)));
    for (fault, wanted) in [
        (Fault::Target, Ending::Failed),
        (Fault::Message, Ending::Failed),
        (Fault::Event, Ending::Failed),
        (Fault::Ours, Ending::Back),
    ] {
        let failed = Err(ours(fault, "as the test asks for"));
        assert_eq!(verdict(&task(true), failed, RETRY).0, wanted, "{fault:?}");
    }
    assert_eq!(verdict(&task(true), Ok(()), RETRY).0, Ending::Done);
}
