//! Key sets that providers publish: fetched once, fetched again when a token names a new key, and never because a stranger
//! names one; good keys go on while their provider is away.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use futures_util::future::try_join_all;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::client::Client;
use crate::harness::gateway::Gateway;
use crate::harness::load::metric;
use crate::harness::play::hapax;
use crate::harness::publisher::{Authority, Page, Publisher, rsa_jwk, rsa_sha256};
use crate::harness::scene::Scene;
use crate::harness::wait::eventually;

const LIMIT: Duration = Duration::from_secs(60);
const HOST: &str = "auth.example.com";
const PATH: &str = "/.well-known/jwks.json";
const GOOGLE: (&str, &str) = ("www.googleapis.com", "/oauth2/v3/certs");
const TRUELAYER: (&str, &str) = ("webhooks.truelayer.com", "/.well-known/jwks");
/// Nobody asks it, and who does is seen.
const EVIL: &str = "evil.example";
/// What was fetched is never fetched again within a test.
const RESTS: &str = "keys.failure_ttl = \"1h\"";
/// It is, as soon as there is a reason.
const RESTLESS: &str = "keys.failure_ttl = \"1ms\"";

/// A key of the provider's.
struct Ec {
    pair: EcdsaKeyPair,
    id: &'static str,
}

impl Ec {
    fn new(id: &'static str) -> Result<Self> {
        let random = SystemRandom::new();
        let document =
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).ok().context("key")?;
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random);
        Ok(Self { pair: pair.ok().context("key")?, id })
    }

    fn jwk(&self) -> Value {
        // After the byte that says that it is not compressed.
        let point = self.pair.public_key().as_ref().get(1..).unwrap_or_default();
        let (x, y) = point.split_at(point.len() / 2);
        let (x, y) = (URL_SAFE_NO_PAD.encode(x), URL_SAFE_NO_PAD.encode(y));
        json!({ "kty": "EC", "crv": "P-256", "kid": self.id, "use": "sig", "x": x, "y": y })
    }

    /// A token that says these claims, under the key's name or another one.
    fn token(&self, id: &str, claims: &Value) -> Result<String> {
        let input = input(&json!({ "alg": "ES256", "kid": id }), claims);
        let signature = self.pair.sign(&SystemRandom::new(), input.as_bytes()).ok().context("signing")?;
        Ok(format!("{input}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}

fn input(header: &Value, claims: &Value) -> String {
    format!("{}.{}", URL_SAFE_NO_PAD.encode(header.to_string()), URL_SAFE_NO_PAD.encode(claims.to_string()))
}

fn set(keys: &[Value]) -> Page {
    Page::Text(json!({ "keys": keys }).to_string())
}

/// A body of `fusionauth`, and the claims that are about it.
fn about(id: &str) -> (Bytes, Value) {
    let body = json!({ "event": { "id": id, "type": "user.create" } }).to_string();
    let hash = ring::digest::digest(&ring::digest::SHA256, body.as_bytes());
    (body.into(), json!({ "request_body_sha256": STANDARD.encode(hash) }))
}

/// The status, and whether it says when to come again.
async fn post(client: &mut Client, body: Bytes, token: &str) -> Result<(u16, bool)> {
    let answer = client.post("/in/auth", &[("x-fusionauth-signature-jwt", token)], body).await?;
    Ok((answer.status.as_u16(), answer.header("retry-after").is_some()))
}

/// A delivery signed with the key under its own name.
async fn deliver(client: &mut Client, key: &Ec, id: &str) -> Result<u16> {
    let (body, claims) = about(id);
    Ok(post(client, body, &key.token(key.id, &claims)?).await?.0)
}

/// A provider, and its key.
struct Play {
    scene: Scene,
    authority: Authority,
    publisher: Publisher,
    key: Ec,
}

impl Play {
    async fn new() -> Result<Self> {
        let authority = Authority::new()?;
        let publisher = Publisher::start(&authority, &[HOST, GOOGLE.0, TRUELAYER.0, EVIL]).await?;
        let play = Self { scene: Scene::new().await?, authority, publisher, key: Ec::new("a")? };
        play.publisher.page(PATH, set(&[play.key.jwk()]));
        Ok(play)
    }

    fn base(&self) -> Vec<String> {
        let at = |host: &str| format!("{host:?} = \"{}\"", self.publisher.address);
        let resolve: Vec<String> = [HOST, GOOGLE.0, TRUELAYER.0, EVIL].into_iter().map(at).collect();
        vec![
            format!("keys.ca = [\"{}\"]", self.authority.file().display()),
            format!("keys.resolve = {{ {} }}", resolve.join(", ")),
        ]
    }

    fn settings(&self, more: &[&str]) -> Vec<String> {
        let mut all = self.base();
        all.extend([
            "source.auth.provider = \"fusionauth\"".to_owned(),
            format!("source.auth.jwks = \"https://{HOST}{PATH}\""),
            "source.auth.effect = \"fx.apply\"".to_owned(),
        ]);
        all.extend(more.iter().map(|line| (*line).to_owned()));
        all
    }

    async fn gateway(&self, more: &[&str]) -> Result<Gateway> {
        let all = self.settings(more);
        self.scene.gateway(&all.iter().map(String::as_str).collect::<Vec<_>>()).await
    }

    /// The provider is gone.
    async fn leave(&mut self) -> Result<()> {
        self.publisher = Publisher::start(&self.authority, &[]).await?;
        Ok(())
    }

    /// It is back where it was.
    async fn come_back(&mut self, to: std::net::SocketAddr) -> Result<()> {
        self.publisher =
            eventually(LIMIT, async || Publisher::start_on(&self.authority, &[HOST], to).await.ok()).await?;
        self.publisher.page(PATH, set(&[self.key.jwk()]));
        Ok(())
    }
}

#[tokio::test]
async fn many_at_once_fetch_the_set_once_and_then_never_again() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&[]).await?;
    let to = gateway.listen()?;
    let ids: Vec<String> = (0..24).map(|number| format!("e-{number}")).collect();
    let sent = ids.iter().map(async |id| deliver(&mut Client::new(to), &play.key, id).await);
    for status in try_join_all(sent).await? {
        assert_eq!(status, 200);
    }
    play.scene.assert_once(&ids).await?;
    assert_eq!(deliver(&mut Client::new(to), &play.key, "e-0").await?, 200);
    assert_eq!((play.publisher.connections(), play.publisher.asked()), (1, vec![PATH.to_owned()]));
    assert_eq!(metric(&gateway, "hapax_key_fetches_total", "result=\"fetched\"").await?, 1);
    // The key is known and does not help another one's token.
    let (body, claims) = about("e-0");
    let forged = Ec::new("a")?.token("a", &claims)?;
    assert_eq!(post(&mut Client::new(to), body, &forged).await?, (401, false));
    gateway.log(|line| line["error.code"] == "signature_mismatch").await?;
    Ok(())
}

#[tokio::test]
async fn googles_own_set_lets_its_tokens_in() -> Result<()> {
    let play = Play::new().await?;
    let (aud, email) = ("https://hooks.example.com", "pusher@p.iam.gserviceaccount.com");
    let google = [
        "source.google.provider = \"google-pubsub\"".to_owned(),
        format!("source.google.claims = {{ aud = \"{aud}\", email = \"{email}\" }}"),
        "source.google.effect = \"fx.apply\"".to_owned(),
    ];
    let gateway = play.gateway(&google.each_ref().map(String::as_str)).await?;
    play.publisher.page(GOOGLE.1, set(&[play.key.jwk(), rsa_jwk("g")?]));
    let mut client = gateway.client()?;
    let mut send = async |aud: &str| {
        let exp = jiff::Timestamp::now().as_second() + 600;
        let claims = json!({ "iss": "https://accounts.google.com", "aud": aud, "email": email, "email_verified": true,
                             "exp": exp });
        let input = input(&json!({ "alg": "RS256", "kid": "g" }), &claims);
        let signature = URL_SAFE_NO_PAD.encode(STANDARD.decode(rsa_sha256(input.as_bytes())?)?);
        let bearer = format!("Bearer {input}.{signature}");
        let body = Bytes::from_static(b"{\"message\":{\"messageId\":\"m-1\"}}");
        anyhow::Ok(client.post("/in/google", &[("authorization", &bearer)], body).await?.status.as_u16())
    };
    assert_eq!(send("https://elsewhere.example").await?, 401);
    assert_eq!(play.publisher.connections(), 0, "a token for somebody else is refused without its key");
    assert_eq!(send(aud).await?, 200);
    assert_eq!(play.publisher.asked(), [GOOGLE.1]);
    play.scene.assert_once(&["m-1".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn a_new_key_is_taken_up_and_the_old_one_goes() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&[RESTLESS]).await?;
    let to = gateway.listen()?;
    assert_eq!(deliver(&mut Client::new(to), &play.key, "e-1").await?, 200);
    let next = Ec::new("b")?;
    play.publisher.page(PATH, set(&[next.jwk()]));
    let taken_up = async || (deliver(&mut Client::new(to), &next, "e-2").await.ok()? == 200).then_some(());
    eventually(LIMIT, taken_up).await?;
    assert_eq!(deliver(&mut Client::new(to), &play.key, "e-3").await?, 401, "its provider took it back");
    let found = play.scene.assert_once(&["e-1".to_owned(), "e-2".to_owned()]).await?;
    assert_eq!(found.rows.len(), 2);
    Ok(())
}

#[tokio::test]
async fn names_that_strangers_make_up_cause_no_fetch_each() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&[RESTS]).await?;
    let mut client = gateway.client()?;
    let (body, claims) = about("e-1");
    for number in 0..20 {
        let forged = Ec::new("x")?.token(&format!("made up {number}"), &claims)?;
        assert_eq!(post(&mut client, body.clone(), &forged).await?, (401, false));
    }
    assert_eq!(deliver(&mut client, &play.key, "e-1").await?, 200);
    assert_eq!(play.publisher.connections(), 1);
    Ok(())
}

#[tokio::test]
async fn nobody_is_asked_for_a_token_that_can_be_refused_without() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&["source.bank.provider = \"truelayer\""]).await?;
    let mut client = gateway.client()?;
    let (body, claims) = about("e-1");
    let good = play.key.token("a", &claims)?;
    let (content, _) = good.rsplit_once('.').context("token")?;
    let secret = input(&json!({ "alg": "HS256", "kid": "a" }), &claims);
    let other = play.key.token("a", &about("e-2").1)?;
    let elsewhere = json!({ "alg": "PS256", "kid": "a", "jku": format!("https://{EVIL}{PATH}") });
    for token in [
        "nothing".to_owned(),
        content.to_owned(),
        format!("{content}."),
        format!("{content}.AAA="),
        format!("{secret}.AAAA"),
        format!("{}.AAAA", input(&json!({ "alg": "none" }), &claims)),
        format!("{}.AAAA", input(&json!({ "kid": "a" }), &claims)),
        format!("{}.AAAA", input(&elsewhere, &claims)),
        format!("{good}.{good}"),
        other,
        play.key.token("a", &json!({}))?,
    ] {
        assert_eq!(post(&mut client, body.clone(), &token).await?, (401, false), "{token}");
    }
    // TrueLayer says in the token whose keys they are: it has to be where they are fetched.
    let mut bank = async |jku: &str| {
        let header = json!({ "alg": "ES512", "kid": "k", "tl_version": "2", "tl_headers": "X-Tl-Webhook-Timestamp", "jku": jku });
        let token = format!("{}..AAAA", URL_SAFE_NO_PAD.encode(header.to_string()));
        let headers = [("tl-signature", token.as_str()), ("x-tl-webhook-timestamp", "2026-05-28T20:26:40Z")];
        anyhow::Ok(client.post("/in/bank", &headers, body.clone()).await?.status.as_u16())
    };
    assert_eq!(bank(&format!("https://{EVIL}{}", TRUELAYER.1)).await?, 401);
    assert_eq!(play.publisher.connections(), 0);
    assert_eq!(bank(&format!("https://{}{}", TRUELAYER.0, TRUELAYER.1)).await?, 503, "nothing stands there");
    assert_eq!(play.publisher.asked(), [TRUELAYER.1]);
    assert!(play.scene.found().await?.rows.is_empty());
    Ok(())
}

#[tokio::test]
async fn without_a_set_the_provider_sends_again_and_is_let_in_once_it_is_back() -> Result<()> {
    let mut play = Play::new().await?;
    let gateway = play.gateway(&[RESTLESS]).await?;
    let (address, to) = (play.publisher.address, gateway.listen()?);
    let secret = json!({ "kty": "oct", "kid": "a", "k": "AAAA" });
    for (page, cause) in [
        (Page::Status(500, ""), "500"),
        (Page::Status(302, "location: https://evil.example/\r\n"), "302"),
        (Page::Text("<html>".to_owned()), "no key set"),
        (Page::Text(format!("{{\"keys\":[]}}{}", " ".repeat(70_000))), "more than 65536 bytes"),
        (set(&[]), "no public key"),
        (set(&[secret]), "no public key"),
    ] {
        play.publisher.page(PATH, page);
        let (body, claims) = about("e-1");
        let told = async || {
            let answer =
                post(&mut Client::new(to), body.clone(), &play.key.token("a", &claims).ok()?).await.ok()?;
            assert_eq!(answer, (503, true), "{cause}");
            gateway.lines().iter().any(|line| line.contains(cause)).then_some(())
        };
        eventually(LIMIT, told).await.context(cause)?;
    }
    let line = gateway.log(|line| line["error.code"] == "keys_unavailable").await?;
    assert_eq!((&line["error.stage"], &line["error.dependency"]), (&json!("keys"), &json!("provider")));
    play.leave().await?;
    assert_eq!(deliver(&mut Client::new(to), &play.key, "e-1").await?, 503);
    play.come_back(address).await?;
    let back = async || (deliver(&mut Client::new(to), &play.key, "e-1").await.ok()? == 200).then_some(());
    eventually(LIMIT, back).await.context("no recovery")?;
    play.scene.assert_once(&["e-1".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn keys_that_were_good_go_on_while_their_provider_is_away() -> Result<()> {
    let mut play = Play::new().await?;
    let gateway = play.gateway(&[RESTLESS, "keys.cache_ttl = \"1s\""]).await?;
    let (address, to) = (play.publisher.address, gateway.listen()?);
    assert_eq!(deliver(&mut Client::new(to), &play.key, "e-1").await?, 200);
    play.leave().await?;
    let failed = async |least: i64| {
        let still = async || {
            assert_eq!(deliver(&mut Client::new(to), &play.key, "e-2").await.ok()?, 200);
            let failed = metric(&gateway, "hapax_key_fetches_total", "result=\"connection\"").await.ok()?;
            (failed >= least).then_some(())
        };
        eventually(LIMIT, still).await
    };
    failed(3).await?;
    // Whether a name that is not known is a new key's, nobody can say.
    let (body, claims) = about("e-3");
    let answer = post(&mut Client::new(to), body, &Ec::new("b")?.token("b", &claims)?).await?;
    assert_eq!(answer, (503, true));
    play.key = Ec::new("c")?;
    play.come_back(address).await?;
    let back = async || (deliver(&mut Client::new(to), &play.key, "e-4").await.ok()? == 200).then_some(());
    eventually(LIMIT, back).await.context("no recovery")?;
    play.scene.assert_once(&["e-1".to_owned(), "e-2".to_owned(), "e-4".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn keys_that_were_good_do_not_go_on_for_ever() -> Result<()> {
    let mut play = Play::new().await?;
    let gateway = play.gateway(&[RESTLESS, "keys.cache_ttl = \"1s\"", "keys.stale_ttl = \"1ms\""]).await?;
    let to = gateway.listen()?;
    assert_eq!(deliver(&mut Client::new(to), &play.key, "e-1").await?, 200);
    play.leave().await?;
    let over = async || (deliver(&mut Client::new(to), &play.key, "e-1").await.ok()? == 503).then_some(());
    eventually(LIMIT, over).await
}

#[tokio::test]
async fn with_secrets_of_its_own_a_source_asks_nobody() -> Result<()> {
    let play = Play::new().await?;
    let own = Ec::new("own")?;
    let secrets = format!("source.auth.secrets = ['{}']", own.jwk());
    let gateway = play.gateway(&[&secrets]).await?;
    let mut client = gateway.client()?;
    assert_eq!(deliver(&mut client, &own, "e-1").await?, 200);
    assert_eq!(deliver(&mut client, &play.key, "e-2").await?, 401);
    assert_eq!(play.publisher.connections(), 0);
    Ok(())
}

#[tokio::test]
async fn changed_settings_lead_to_another_set_without_a_restart() -> Result<()> {
    let play = Play::new().await?;
    // At first nothing is fetched at all.
    let base = play.base();
    let base: Vec<&str> = base.iter().map(String::as_str).collect();
    let mut gateway = play.scene.gateway(&base).await?;
    let to = gateway.listen()?;
    let moved = Ec::new("m")?;
    play.publisher.page("/moved", set(&[moved.jwk()]));
    for (path, key) in [(PATH, &play.key), ("/moved", &moved)] {
        let url = format!("source.auth.jwks = \"https://{HOST}{path}\"");
        let settings: Vec<String> = play.settings(&[&url]);
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        fs::write(gateway.config(), play.scene.settings(&settings, ""))?;
        gateway.signal(Signal::HUP)?;
        let taken_up = async || (deliver(&mut Client::new(to), key, "e-1").await.ok()? == 200).then_some(());
        eventually(LIMIT, taken_up).await.context(path)?;
    }
    assert_eq!(deliver(&mut Client::new(to), &play.key, "e-2").await?, 401);
    assert_eq!(play.publisher.asked(), [PATH, "/moved"]);
    Ok(())
}

#[tokio::test]
async fn the_commands_tell_where_keys_come_from_and_fetch_them() -> Result<()> {
    let play = Play::new().await?;
    let gateway = play.gateway(&[]).await?;
    let config = gateway.config().display().to_string();
    let (body, claims) = about("e-1");
    let token = play.key.token("a", &claims)?;
    let body = std::str::from_utf8(&body)?;
    let request =
        format!("POST /in/auth HTTP/1.1\r\nHost: x\r\nX-FusionAuth-Signature-JWT: {token}\r\n\r\n{body}");
    let file = play.authority.write("good.http", &request)?;
    let run = async |arguments: &[&str]| {
        let output = hapax(arguments).await?;
        anyhow::Ok((
            output.status.code(),
            String::from_utf8(output.stdout)? + &String::from_utf8(output.stderr)?,
        ))
    };
    let verify = async |file: &std::path::Path| {
        run(&["verify", "--source", "auth", "--config", &config, &file.display().to_string()]).await
    };
    let (code, told) = verify(&file).await?;
    assert!(
        code == Some(0) && told.contains("event id    e-1") && told.contains("published at https://"),
        "{told}"
    );
    let other = play.authority.write("other.http", &request.replace("e-1", "e-2"))?;
    let (code, told) = verify(&other).await?;
    assert!(code == Some(1) && told.contains("body_hash_mismatch") && !told.contains("matches"), "{told}");
    assert_eq!(play.publisher.connections(), 1, "nothing is fetched for it");
    let where_from = format!("source auth: keys are fetched from https://{HOST}{PATH}");
    let (code, told) = run(&["check", "--config", &config]).await?;
    assert!(code == Some(0) && told.contains(&where_from), "{told}");
    let (code, told) = run(&["check", "--online", "--config", &config]).await?;
    assert!(code == Some(0) && told.contains(&format!("keys: https://{HOST}{PATH} has 1")), "{told}");
    play.publisher.page(PATH, Page::Text("nothing".to_owned()));
    let (code, told) = verify(&file).await?;
    assert!(code == Some(69) && told.contains("could not be fetched"), "{told}");
    let (code, told) = run(&["check", "--online", "--config", &config]).await?;
    assert!(code == Some(69) && told.contains("no key set"), "{told}");
    Ok(())
}
