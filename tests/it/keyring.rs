//! Keys that providers publish: fetched from where they may be, once, within limits; nobody else is ever asked.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use futures_util::future::try_join_all;
use hapax::dev::PostgresOptions;
use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::client::{Answer, Client};
use crate::harness::gateway::Gateway;
use crate::harness::load::{metric, until_metric};
use crate::harness::play::hapax;
use crate::harness::publisher::{Authority, Page, Publisher, rsa_sha256, signing_key};
use crate::harness::scene::{Scene, deliver, event};
use crate::harness::stores::private_postgres;
use crate::harness::wait::eventually;

const LIMIT: Duration = Duration::from_secs(60);
const PAYPAL: &str = "api.paypal.com";
const SNS: &str = "sns.us-east-1.amazonaws.com";
/// Names that the settings lead to the publisher too, so that a pin that gives way is seen.
const EVIL: [&str; 3] = ["evil.example", "api.paypal.com.evil.example", "sns.s3.amazonaws.com"];
const WEBHOOK: &str = "0AB12345CD678901E";
const TOPIC: &str = "arn:aws:sns:us-east-1:123456789012:orders";
const CERT: &str = "/v1/notifications/certs/CERT-1";
const PEM: &str = "/SimpleNotificationService-1.pem";

/// A provider, and settings with a source for each way of it.
struct Play {
    scene: Scene,
    authority: Authority,
    publisher: Publisher,
    key: KeyPair,
}

impl Play {
    async fn new() -> Result<Self> {
        Self::on(Scene::new().await?).await
    }

    async fn on(scene: Scene) -> Result<Self> {
        let authority = Authority::new()?;
        let names: Vec<&str> = [PAYPAL, SNS].into_iter().chain(EVIL).collect();
        let publisher = Publisher::start(&authority, &names).await?;
        let play = Self { scene, authority, publisher, key: signing_key()? };
        play.publisher.page(CERT, Page::Text(play.certificate(&["messages.paypal.com"], |_| {})?));
        play.publisher.page(PEM, Page::Text(play.certificate(&["sns.amazonaws.com"], |_| {})?));
        play.publisher.page("/", Page::Text("<ConfirmSubscriptionResponse/>".to_owned()));
        Ok(play)
    }

    /// A certificate of the signing key.
    fn certificate(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Result<String> {
        self.authority.issue(&self.key, names, change)
    }

    async fn gateway(&self, more: &[&str]) -> Result<Gateway> {
        let at = |host: &str| format!("{host:?} = \"{}\"", self.publisher.address);
        let resolve: Vec<String> = [PAYPAL, SNS].into_iter().chain(EVIL).map(at).collect();
        let ours = [
            format!("keys.ca = [\"{}\"]", self.authority.file().display()),
            format!("keys.resolve = {{ {} }}", resolve.join(", ")),
            "source.paypal.provider = \"paypal\"".to_owned(),
            format!("source.paypal.secrets = [\"another\", {WEBHOOK:?}]"),
            "source.paypal.effect = \"fx.apply\"".to_owned(),
            "source.sns.provider = \"sns\"".to_owned(),
            format!("source.sns.senders = [{TOPIC:?}]"),
            "source.sns.effect = \"fx.apply\"".to_owned(),
        ];
        let all: Vec<&str> = ours.iter().map(String::as_str).chain(more.iter().copied()).collect();
        self.scene.gateway(&all).await
    }
}

fn paypal_url(path: &str) -> String {
    format!("https://{PAYPAL}{path}")
}

/// A delivery as of the preset `paypal`, which names its certificate's URL.
async fn paypal(client: &mut Client, url: &str, body: &Bytes, webhook: &str) -> Result<Answer> {
    let (id, time) = ("69cd13f0-d67a-11e5-baa3-778b53f4ae55", "2026-02-18T20:01:35Z");
    let signed = format!("{id}|{time}|{webhook}|{}", crc32fast::hash(body));
    let headers = [
        ("paypal-transmission-id", id),
        ("paypal-transmission-time", time),
        ("paypal-auth-algo", "SHA256withRSA"),
        ("paypal-cert-url", url),
        ("paypal-transmission-sig", &rsa_sha256(signed.as_bytes())?),
    ];
    client.post("/in/paypal", &headers, body.clone()).await
}

async fn good(client: &mut Client, id: &str, path: &str) -> Result<(u16, Option<String>)> {
    let answer = paypal(client, &paypal_url(path), &event(id, ""), WEBHOOK).await?;
    Ok((answer.status.as_u16(), answer.header("retry-after").map(str::to_owned)))
}

/// A message of SNS, signed; then the fields of `after` are put into it, unsigned.
fn sns_body(fields: &[(&str, &str)], after: &[(&str, &str)]) -> Result<Bytes> {
    let more = [("Timestamp", "2026-05-28T20:26:40.000Z"), ("TopicArn", TOPIC)];
    let message: BTreeMap<&str, &str> = more.into_iter().chain(fields.iter().copied()).collect();
    let signed: Vec<&str> = message.iter().flat_map(|(name, value)| [*name, "\n", *value, "\n"]).collect();
    let field = |(name, value): (&&str, &&str)| ((*name).to_owned(), Value::from(*value));
    let mut body: serde_json::Map<String, Value> = message.iter().map(field).collect();
    let (url, signature) = (format!("https://{SNS}{PEM}"), rsa_sha256(signed.concat().as_bytes())?);
    let of_signature = [("SignatureVersion", "2"), ("SigningCertURL", &url), ("Signature", &signature)];
    for (name, value) in of_signature.into_iter().chain(after.iter().copied()) {
        body.insert(name.to_owned(), value.into());
    }
    Ok(Value::Object(body).to_string().into())
}

async fn sns(client: &mut Client, body: Bytes) -> Result<(u16, String)> {
    let headers = [("content-type", "text/plain; charset=UTF-8")];
    let answer = client.post("/in/sns", &headers, body).await?;
    Ok((answer.status.as_u16(), answer.header("hapax-outcome").unwrap_or_default().to_owned()))
}

/// The code in the log line of the last request that was answered so.
async fn logged(gateway: &Gateway, code: &str) -> Result<Value> {
    gateway.log(|line| line["error.code"] == code).await
}

#[tokio::test]
async fn many_at_once_fetch_once_and_then_never_again() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&[]).await?;
    let to = gateway.listen()?;
    let ids: Vec<String> = (0..24).map(|number| format!("WH-{number}")).collect();
    let sent = ids.iter().map(async |id| good(&mut Client::new(to), id, CERT).await);
    for (status, _) in try_join_all(sent).await? {
        assert_eq!(status, 200);
    }
    play.scene.assert_once(&ids).await?;
    let mut client = gateway.client()?;
    assert_eq!(good(&mut client, "WH-0", CERT).await?.0, 200);
    assert_eq!((play.publisher.connections(), play.publisher.asked()), (1, vec![CERT.to_owned()]));
    assert_eq!(metric(&gateway, "hapax_key_fetches_total", "result=\"fetched\"").await?, 1);
    // Another webhook's event, another body, another algorithm: the key is known and does not help.
    let url = paypal_url(CERT);
    assert_eq!(paypal(&mut client, &url, &event("x", ""), "another one").await?.status.as_u16(), 401);
    logged(&gateway, "signature_mismatch").await?;
    Ok(())
}

#[tokio::test]
async fn a_certificate_that_is_not_the_providers_is_refused() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&[]).await?;
    let mut client = gateway.client()?;
    let names = ["messages.paypal.com"];
    let stranger = Authority::new()?;
    let lesser = play.authority.lesser()?;
    let of_lesser = lesser.issue(&play.key, &names, |_| {})?;
    let weak = play.authority.issue(&KeyPair::generate()?, &names, |_| {})?;
    let until = |year| move |params: &mut CertificateParams| params.not_after = date_time_ymd(year, 1, 1);
    let from = |year| move |params: &mut CertificateParams| params.not_before = date_time_ymd(year, 1, 1);
    for (case, page, wanted, cause) in [
        ("garbage", "-----BEGIN CERTIFICATE-----\nnothing\n".to_owned(), 401, "PEM"),
        ("empty", String::new(), 401, "no certificate"),
        (
            "no-der",
            "-----BEGIN CERTIFICATE-----\nAAEC\n-----END CERTIFICATE-----\n".to_owned(),
            401,
            "no certificate",
        ),
        ("expired", play.certificate(&names, until(2020))?, 401, "was good until 2020"),
        ("early", play.certificate(&names, from(3000))?, 401, "good from 3000"),
        ("name", play.certificate(&["messages.example.com"], |_| {})?, 401, "another name"),
        ("lookalike", play.certificate(&["paypal.com.example.com"], |_| {})?, 401, "another name"),
        ("stranger", stranger.issue(&play.key, &names, |_| {})?, 401, "no authority"),
        ("no-step", of_lesser.clone(), 401, "no authority"),
        ("key", weak, 401, "RSA"),
        ("step", of_lesser + &lesser.pem, 200, ""),
    ] {
        let path = format!("/v1/notifications/certs/{case}");
        play.publisher.page(&path, Page::Text(page));
        assert_eq!(good(&mut client, case, &path).await?.0, wanted, "{case}");
        let told = |line: &Value| line["error.cause"].as_str().is_some_and(|told| told.contains(cause));
        if wanted == 401 {
            let line = gateway.log(|line| line["error.code"] == "key_unfit" && told(line)).await?;
            assert_eq!((&line["error.stage"], line["event.id"].is_null()), (&json!("keys"), true), "{case}");
        }
    }
    let found = play.scene.found().await?;
    assert_eq!(found.rows.keys().collect::<Vec<_>>(), ["step"]);
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_fetched_is_our_trouble_and_passes() -> Result<()> {
    let mut play = Play::new().await?;
    let gateway = play.gateway(&["keys.failure_ttl = \"1ms\"", "keys.body_max = \"16KiB\""]).await?;
    let mut client = gateway.client()?;
    let certs = |name: &str| format!("/v1/notifications/certs/{name}");
    let large = format!("{}{}", " ".repeat(20 << 10), play.certificate(&["messages.paypal.com"], |_| {})?);
    play.publisher.page(&certs("large"), Page::Text(large));
    play.publisher.page(
        &certs("moved"),
        Page::Status(302, "location: https://api.paypal.com/v1/notifications/certs/CERT-1\r\n"),
    );
    for (name, cause) in [("large", "more than 16384 bytes"), ("moved", "302"), ("nowhere", "404")] {
        let (status, retry_after) = good(&mut client, name, &certs(name)).await?;
        assert_eq!((status, retry_after.is_some()), (503, true), "{name}");
        let line =
            gateway.log(|line| line["error.cause"].as_str().is_some_and(|told| told.contains(cause))).await?;
        assert_eq!(
            (&line["error.code"], &line["error.dependency"]),
            (&json!("keys_unavailable"), &json!("provider"))
        );
    }
    assert_eq!(play.publisher.asked(), [certs("large"), certs("moved"), certs("nowhere")]);

    // Away, under another name, and back.
    let address = play.publisher.address;
    play.publisher = Publisher::start(&play.authority, &[]).await?;
    assert_eq!(good(&mut client, "away", CERT).await?.0, 503);
    play.publisher = eventually(LIMIT, async || {
        Publisher::start_on(&play.authority, &["evil.example"], address).await.ok()
    })
    .await?;
    play.publisher.page(CERT, Page::Text(play.certificate(&["messages.paypal.com"], |_| {})?));
    assert_eq!(good(&mut client, "name", CERT).await?.0, 503);
    assert_eq!(
        (play.publisher.connections(), play.publisher.asked().len()),
        (1, 0),
        "nothing is said to a stranger"
    );
    play.publisher = Publisher::start(&play.authority, &[]).await?;
    play.publisher =
        eventually(LIMIT, async || Publisher::start_on(&play.authority, &[PAYPAL], address).await.ok())
            .await?;
    play.publisher.page(CERT, Page::Text(play.certificate(&["messages.paypal.com"], |_| {})?));
    let back = async || {
        good(&mut Client::new(gateway.listen().ok()?), "back", CERT)
            .await
            .ok()
            .filter(|(status, _)| *status == 200)
    };
    eventually(LIMIT, back).await.context("no recovery")?;
    play.scene.assert_once(&["back".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn a_provider_that_is_silent_holds_up_nobody_else() -> Result<()> {
    let play = Play::new().await?;
    play.publisher.page(CERT, Page::Silence);
    // So long that only what the test does ends the wait, and below what SNS waits.
    let patient = [
        "keys.fetch_timeout = \"13s\"",
        "keys.fetches_max = 1",
        "server.deadline = \"14s\"",
        "server.drain = \"14s\"",
        "fast_tier.lease = \"60s\"",
    ];
    let gateway = play.gateway(&patient).await?;
    let to = gateway.listen()?;
    let waiting = tokio::spawn(async move { good(&mut Client::new(to), "slow", CERT).await });
    eventually(LIMIT, || std::future::ready((!play.publisher.asked().is_empty()).then_some(()))).await?;
    for number in 0..20 {
        assert!(deliver(to, "stripe", &event(&format!("evt_{number}"), "")).await?.is_success());
    }
    // As many fetches at once as there may be; who needs no other key is served.
    assert_eq!(good(&mut Client::new(to), "x", "/v1/notifications/certs/x").await?.0, 503);
    gateway.log(|line| line["error.cause"] == "keys.fetches_max is reached").await?;
    assert_eq!(play.publisher.connections(), 1);
    assert!(!waiting.is_finished(), "it waits while others are served");
    waiting.abort();
    gateway.log(|line| line["error.cause"] == "the client left before the key was there").await?;
    Ok(())
}

#[tokio::test]
async fn a_provider_that_is_silent_is_given_up_within_the_deadline() -> Result<()> {
    let play = Play::new().await?;
    play.publisher.page(CERT, Page::Silence);
    let gateway = play.gateway(&["keys.fetch_timeout = \"300ms\"", "keys.failure_ttl = \"1h\""]).await?;
    let mut client = gateway.client()?;
    let (status, retry_after) = good(&mut client, "slow", CERT).await?;
    assert_eq!((status, retry_after.is_some()), (503, true));
    let line = logged(&gateway, "keys_unavailable").await?;
    assert_eq!(line["error.cause"], "no whole answer within 300ms");
    assert_eq!(metric(&gateway, "hapax_key_fetches_total", "result=\"timeout\"").await?, 1);
    // Remembered for a while, and not asked again.
    assert_eq!(good(&mut client, "slow", CERT).await?.0, 503);
    assert_eq!(play.publisher.connections(), 1);
    Ok(())
}

#[tokio::test]
async fn a_source_causes_so_many_fetches_and_no_more() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&["keys.fetches_per_minute = 3"]).await?;
    let mut client = gateway.client()?;
    assert_eq!(good(&mut client, "first", CERT).await?.0, 200);
    for number in 0..5 {
        assert_eq!(good(&mut client, "x", &format!("/v1/notifications/certs/{number}")).await?.0, 503);
    }
    assert_eq!(play.publisher.connections(), 3);
    // What is known goes on, and so does another source.
    assert_eq!(good(&mut client, "second", CERT).await?.0, 200);
    let body = sns_body(&[("Message", "m"), ("MessageId", "id-1"), ("Type", "Notification")], &[])?;
    assert_eq!(sns(&mut client, body).await?, (200, "accepted".to_owned()));
    Ok(())
}

#[tokio::test]
async fn a_key_that_was_good_is_fetched_anew_whatever_strangers_use_up() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&["keys.fetches_per_minute = 1", "keys.cache_ttl = \"1s\""]).await?;
    let mut client = gateway.client()?;
    assert_eq!(good(&mut client, "first", CERT).await?.0, 200);
    assert_eq!(good(&mut client, "x", "/v1/notifications/certs/x").await?.0, 503);
    let to = gateway.listen()?;
    let again = async || {
        let (status, _) = good(&mut Client::new(to), "second", CERT).await.ok()?;
        (status != 200 || play.publisher.connections() > 1).then_some(status)
    };
    assert_eq!(eventually(LIMIT, again).await?, 200);
    Ok(())
}

#[tokio::test]
async fn nobody_is_asked_for_what_can_be_refused_without() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&[]).await?;
    let mut client = gateway.client()?;
    let body = event("WH-1", "");
    for url in [
        format!("https://evil.example{CERT}"),
        format!("https://api.paypal.com.evil.example{CERT}"),
        format!("https://evil.example\\@api.paypal.com{CERT}"),
        format!("https://api.paypal.com@evil.example{CERT}"),
        format!("http://api.paypal.com{CERT}"),
        format!("https://api.paypal.com:8443{CERT}"),
        "https://api.paypal.com/redirect".to_owned(),
        String::new(),
    ] {
        assert_eq!(paypal(&mut client, &url, &body, WEBHOOK).await?.status.as_u16(), 401, "{url}");
    }
    logged(&gateway, "key_url_refused").await?;
    let url = paypal_url(CERT);
    let all: [(&str, &str); 5] = [
        ("paypal-transmission-id", "x"),
        ("paypal-transmission-time", "2026-02-18T20:01:35Z"),
        ("paypal-auth-algo", "SHA256withRSA"),
        ("paypal-cert-url", &url),
        ("paypal-transmission-sig", "AAEC"),
    ];
    for (at, (name, _)) in all.iter().enumerate() {
        let mut without = all.to_vec();
        without.remove(at);
        let mut spoilt = all.to_vec();
        spoilt[at].1 = "%";
        let mut twice = all.to_vec();
        twice.push(all[at]);
        // A transmission's id has no form that could be wrong.
        let spoilt = Some(spoilt).filter(|_| *name != "paypal-transmission-id");
        for headers in [without, twice].into_iter().chain(spoilt) {
            let status = client.post("/in/paypal", &headers, body.clone()).await?.status.as_u16();
            assert_eq!(status, 401, "{headers:?}");
        }
    }
    let message = [("Message", "m"), ("MessageId", "id"), ("Type", "Notification")];
    for after in [
        [("TopicArn", "arn:aws:sns:us-east-1:999999999999:orders")],
        [("SigningCertURL", "https://sns.s3.amazonaws.com/SimpleNotificationService-1.pem")],
        [("SignatureVersion", "3")],
        [("Signature", "no base64")],
        [("Timestamp", "yesterday")],
    ] {
        assert_eq!(sns(&mut client, sns_body(&message, &after)?).await?.0, 401, "{after:?}");
    }
    // Raw delivery has no signature.
    assert_eq!(sns(&mut client, Bytes::from_static(b"{\"order\":1}")).await?.0, 401);
    assert_eq!(play.publisher.connections(), 0);
    assert!(play.scene.found().await?.rows.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_topic_is_confirmed_and_its_messages_are_events() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&[]).await?;
    let mut client = gateway.client()?;
    let visit = format!("https://{SNS}/?Action=ConfirmSubscription&TopicArn={TOPIC}&Token=2336");
    let asks = [
        ("Message", "You have chosen …"),
        ("MessageId", "c-1"),
        ("SubscribeURL", visit.as_str()),
        ("Token", "2336"),
        ("Type", "SubscriptionConfirmation"),
    ];
    assert_eq!(sns(&mut client, sns_body(&asks, &[])?).await?, (200, "handshake".to_owned()));
    assert_eq!(play.publisher.asked(), [PEM.to_owned(), visit[format!("https://{SNS}").len()..].to_owned()]);
    assert!(!gateway.lines().iter().any(|line| line.contains("2336")), "the token is in no line");

    // Whatever is changed, nothing is visited and nothing is recorded.
    let message =
        [("Message", "m\nTopicArn\nx"), ("MessageId", "n-1"), ("Subject", "s"), ("Type", "Notification")];
    let evil = "https://evil.example/?Action=ConfirmSubscription";
    for (fields, after) in [
        (&asks[..], vec![("SubscribeURL", evil)]),
        (&asks, vec![("Token", "1")]),
        (&asks, vec![("Type", "Notification")]),
        (
            &message,
            vec![("Type", "SubscriptionConfirmation"), ("SubscribeURL", visit.as_str()), ("Token", "2336")],
        ),
        (&message, vec![("SubscribeURL", visit.as_str())]),
        (&message, vec![("Subject", "t")]),
        (&message, vec![("Message", "m")]),
        (&message, vec![("MessageId", "n-2")]),
    ] {
        assert_eq!(sns(&mut client, sns_body(fields, &after)?).await?.0, 401, "{after:?}");
    }
    // Signed, and still not where SNS confirms.
    let mut asks_elsewhere = asks;
    asks_elsewhere[2].1 = evil;
    assert_eq!(sns(&mut client, sns_body(&asks_elsewhere, &[])?).await?.0, 401);
    assert_eq!(play.publisher.connections(), 2);

    assert_eq!(sns(&mut client, sns_body(&message, &[])?).await?, (200, "accepted".to_owned()));
    assert_eq!(sns(&mut client, sns_body(&message, &[])?).await?, (200, "duplicate".to_owned()));
    let mut bare = message.to_vec();
    bare.retain(|(name, _)| *name != "Subject");
    bare[1].1 = "n-3";
    assert_eq!(sns(&mut client, sns_body(&bare, &[])?).await?.0, 200);
    let mut ends = asks;
    (ends[1].1, ends[4].1) = ("u-1", "UnsubscribeConfirmation");
    assert_eq!(sns(&mut client, sns_body(&ends, &[])?).await?, (200, "accepted".to_owned()));
    let found = play.scene.assert_once(&["n-1".to_owned(), "n-3".to_owned(), "u-1".to_owned()]).await?;
    assert_eq!(found.rows.len(), 3);
    assert_eq!(play.publisher.connections(), 2);

    // A visit that fails: SNS asks again.
    play.publisher.page("/", Page::Status(500, ""));
    assert_eq!(sns(&mut client, sns_body(&asks, &[])?).await?, (503, "unavailable".to_owned()));
    play.publisher.page("/", Page::Text(String::new()));
    assert_eq!(sns(&mut client, sns_body(&asks, &[])?).await?.0, 200);
    Ok(())
}

/// A key that was fetched and found good by one rule is not good by the rule that a reload brings.
#[tokio::test]
async fn a_changed_rule_looks_at_the_certificate_anew() -> Result<()> {
    let play = Play::new().await?;
    // As patient as SNS lets a gateway be.
    let patient = [
        "server.reload_check = \"off\"",
        "server.deadline = \"14s\"",
        "server.drain = \"14s\"",
        "postgres.record_timeout = \"12s\"",
        "fast_tier.lease = \"20s\"",
        "keys.fetch_timeout = \"10s\"",
    ];
    let mut gateway = play.gateway(&patient).await?;
    let mut client = gateway.client()?;
    assert_eq!(good(&mut client, "WH-1", CERT).await?.0, 200);
    let before = std::fs::read_to_string(gateway.config())?;
    let preset = include_str!("../../config/providers/paypal.toml");
    let names = "names = [\"*.paypal.com\", \"*.sandbox.paypal.com\"]";
    let other = "names = [\"another.paypal.com\"]";
    for (number, now, status) in [(1, names, 200), (2, other, 401), (3, names, 200)] {
        let own = preset.replace(names, now).replace("[cert]", "[scheme.paypal.cert]");
        std::fs::write(gateway.config(), format!("{before}\n[scheme.paypal]\n{own}"))?;
        gateway.signal(Signal::HUP)?;
        until_metric(&gateway, "hapax_config_reloads_total", "result=\"ok\"", |count| count == number)
            .await?;
        assert_eq!(good(&mut client, &format!("WH-2-{number}"), CERT).await?.0, status, "{now}");
    }
    Ok(())
}

#[tokio::test]
async fn keys_need_neither_store() -> Result<()> {
    let mut postgres = private_postgres(PostgresOptions::default()).await?;
    let play = Play::on(Scene::on(&postgres, "redis://127.0.0.1:1".to_owned()).await?).await?;
    let gateway = play.gateway(&[]).await?;
    postgres.stop()?;
    let mut client = gateway.client()?;
    let body = event("WH-1", "");
    assert_eq!(paypal(&mut client, &paypal_url(CERT), &body, "another one").await?.status.as_u16(), 401);
    assert_eq!(paypal(&mut client, &paypal_url(CERT), &body, WEBHOOK).await?.status.as_u16(), 503);
    let visit = format!("https://{SNS}/?Action=ConfirmSubscription");
    let asks = [
        ("Message", "m"),
        ("MessageId", "c-1"),
        ("SubscribeURL", visit.as_str()),
        ("Token", "1"),
        ("Type", "SubscriptionConfirmation"),
    ];
    assert_eq!(sns(&mut client, sns_body(&asks, &[])?).await?, (200, "handshake".to_owned()));
    Ok(())
}

#[tokio::test]
async fn with_certificates_in_a_file_nobody_is_asked() -> Result<()> {
    let play = Play::new().await?;
    let old = play.authority.issue(
        &KeyPair::from_pem(include_str!("../data/other-key.pem"))?,
        &["x.example"],
        |_| {},
    )?;
    // Trusted as it is: expired, and for another name.
    let own = play.certificate(&["x.example"], |params| params.not_after = date_time_ymd(2020, 1, 1))?;
    let file = play.authority.write("own.pem", &(old + &own))?;
    let certificates = format!("source.paypal.certificates = [{file:?}]");
    let gateway = play.gateway(&[&certificates]).await?;
    let mut client = gateway.client()?;
    assert_eq!(good(&mut client, "WH-1", CERT).await?.0, 200);
    let elsewhere = format!("https://evil.example{CERT}");
    assert_eq!(paypal(&mut client, &elsewhere, &event("WH-2", ""), WEBHOOK).await?.status.as_u16(), 401);
    assert_eq!(paypal(&mut client, &paypal_url(CERT), &event("WH-2", ""), "x").await?.status.as_u16(), 401);
    assert_eq!(play.publisher.connections(), 0);
    Ok(())
}

#[tokio::test]
async fn verify_tells_of_the_key_and_fetches_it() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&[]).await?;
    let body = sns_body(&[("Message", "m"), ("MessageId", "id-1"), ("Type", "Notification")], &[])?;
    let request = format!("POST /in/sns HTTP/1.1\r\nHost: x\r\n\r\n{}", std::str::from_utf8(&body)?);
    let (config, good) =
        (gateway.config().display().to_string(), play.authority.write("good.http", &request)?);
    let elsewhere = play.authority.write("evil.http", &request.replace(SNS, "sns.s3.amazonaws.com"))?;
    let verify = async |file: &Path| {
        let output =
            hapax(&["verify", "--source", "sns", "--config", &config, &file.display().to_string()]).await?;
        anyhow::Ok((output.status.code(), String::from_utf8(output.stdout)?))
    };
    let (code, told) = verify(&good).await?;
    assert!(code == Some(0) && told.contains("event id    id-1"), "{told}");
    let (code, told) = verify(&elsewhere).await?;
    assert!(code == Some(1) && told.contains("key_url_refused") && told.contains("does not pin"), "{told}");
    play.publisher.page(PEM, Page::Text("nothing".to_owned()));
    let (code, told) = verify(&good).await?;
    assert!(code == Some(1) && told.contains("key_unfit") && told.contains("no certificate"), "{told}");
    play.publisher.page(PEM, Page::Status(500, ""));
    assert_eq!(verify(&good).await?.0, Some(69));
    Ok(())
}
