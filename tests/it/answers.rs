//! Each provider is answered in the statuses and words that it understands.

use anyhow::Result;
use bytes::Bytes;

use crate::harness::client::{Answer, Client};
use crate::harness::play::{Hold, outcome, patient, ready};
use crate::harness::scene::{Scene, signed_as};

const SECRET: &str = "00ff00ff00ff00ff";

/// A source for each provider, whose effects do what bodies say.
fn sources(names: &[&str]) -> Vec<String> {
    let of = |name: &&str| {
        [
            format!("source.{name}.provider = \"{name}\""),
            format!("source.{name}.secrets = [\"{SECRET}\"]"),
            format!("source.{name}.effect = \"fx.apply\""),
        ]
    };
    names.iter().flat_map(of).collect()
}

async fn post(client: &mut Client, source: &str, secret: &str, body: &str) -> Result<Answer> {
    let body = Bytes::from(body.to_owned());
    let signed = signed_as(source, secret, &body, Some("an-id"))?;
    let headers: Vec<(&str, &str)> =
        signed.iter().filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))).collect();
    client.post(&format!("/in/{source}"), &headers, body.clone()).await
}

fn told(answer: &Answer) -> (u16, &str, &str) {
    (answer.status.as_u16(), outcome(answer), std::str::from_utf8(&answer.body).unwrap_or("not text"))
}

#[tokio::test]
async fn first_second_and_unsigned_deliveries_are_answered_as_the_provider_wants() -> Result<()> {
    let scene = Scene::new().await?;
    let sources = sources(&["adyen-header", "gocardless", "xero"]);
    let more = ["source.xero.deadline = \"4400ms\""];
    let overrides: Vec<&str> = sources.iter().map(String::as_str).chain(more).collect();
    let gateway = scene.gateway(&overrides).await?;
    ready(&gateway).await?;
    let mut client = gateway.client()?;
    let xero =
        r#"{"events":[{"resourceId":"r"}],"firstEventSequence":1,"lastEventSequence":1,"entropy":"e"}"#;
    for (source, body, status, text) in [
        ("adyen-header", r#"{"id":"a"}"#, 200, "[accepted]"),
        ("gocardless", r#"{"events":[{"id":"EV1"}]}"#, 204, ""),
        ("xero", xero, 200, ""),
    ] {
        assert_eq!(
            told(&post(&mut client, source, SECRET, body).await?),
            (status, "accepted", text),
            "{source}"
        );
        assert_eq!(
            told(&post(&mut client, source, SECRET, body).await?),
            (status, "duplicate", text),
            "{source}"
        );
    }
    let wrong = "ffffffffffffffff";
    let refused = post(&mut client, "gocardless", wrong, r#"{"events":[]}"#).await?;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (498, None));
    assert!(told(&refused).2.contains("\"unauthorized\""), "{refused:?}");
    assert_eq!(told(&post(&mut client, "xero", wrong, xero).await?), (401, "refused", ""));
    Ok(())
}

/// Brevo discards an event for good after any 4xx but 429, and after any 5xx.
#[tokio::test]
async fn what_is_not_committed_is_answered_so_that_the_provider_sends_it_again() -> Result<()> {
    let scene = Scene::new().await?;
    let sources = sources(&["brevo"]);
    let more = ["server.requests_max = 1"];
    let overrides: Vec<&str> = sources.iter().map(String::as_str).chain(more).collect();
    let gateway = scene.gateway(&patient(&overrides)).await?;
    ready(&gateway).await?;
    let event = |id: &str, todo: &str| {
        format!(r#"{{"event":"e","message-id":"{id}","email":"a@b","ts_event":1,"do":"{todo}"}}"#)
    };
    let mut client = gateway.client()?;
    let failed = post(&mut client, "brevo", SECRET, &event("a", "raise")).await?;
    assert_eq!((failed.status.as_u16(), failed.header("retry-after")), (429, Some("5")));
    // Not a place to work is free.
    let hold = Hold::new(&scene).await?;
    let body = event("b", "wait");
    let full = async {
        hold.waiting(1).await?;
        let full = post(&mut gateway.client()?, "brevo", SECRET, &event("c", "")).await?;
        hold.release().await?;
        Ok(full)
    };
    let (first, full) = tokio::try_join!(post(&mut client, "brevo", SECRET, &body), full)?;
    assert_eq!(
        (full.status.as_u16(), full.header("retry-after"), outcome(&full)),
        (429, Some("5"), "unavailable")
    );
    assert_eq!((first.status.as_u16(), outcome(&first)), (200, "accepted"));
    Ok(())
}
