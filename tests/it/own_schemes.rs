//! A provider that nobody has heard of needs no code: a scheme in the settings is enough, whatever it signs with.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _};
use ring::{digest, hmac};
use serde_json::json;

use crate::harness::gateway::{Gateway, Start};
use crate::harness::publisher::{rsa_sha256, signing_key};
use crate::harness::scene::Scene;

const SECRET: &str = "what the provider and we know";
const URL: &str = "https://hooks.example.com";

/// Ed25519 with milliseconds; RSA over method and URL; HMAC with parts that may be missing; a token that holds a hash of
/// the body; a list whose items are signed one by one.
const SCHEMES: &str = r#"
    [scheme.harbor]
    kind = "ed25519"
    sign = "{ts}.{body}"
    sig = { from = "header:X-Harbor-Signature", encoding = "base64" }
    ts = { from = "header:X-Harbor-Time", unit = "ms", tolerance = "5m" }
    id = "json:/id"

    [scheme.quarry]
    kind = "rsa-pkcs1"
    sign = "{method} {url}\n{body}"
    sig = { from = "header:X-Quarry-Signature", encoding = "base64" }
    id = "json:/id"

    [scheme.meadow]
    kind = "hmac"
    hash = "sha512"
    sign = "[ref:{query:ref};][part:{lower:header:x-meadow-part};]ts:{ts};{body}"
    sig = { from = "header:X-Meadow", split = ";", assign = ":", label = ["s1", "s2"], encoding = "base64url" }
    ts = { from = "sig:time", tolerance = 300 }
    id = "query:ref"

    [scheme.lantern]
    kind = "jwt"
    sig = { from = "header:Authorization", prefix = "Bearer " }
    body_hash = { from = "claim:/body", encoding = "base64" }
    id = "claim:/jti"
    jwt = { algs = ["ES256"], need = ["exp"], ask = { aud = "/aud" } }

    [scheme.caravan]
    kind = "hmac"
    sign = "{json:/parcel}|{json:/state}|{header:x-caravan-run}"
    sig = { from = "json:/seal" }
    every = "/parcels"
    batch = { items = "/parcels", id = "/parcel + /state" }
"#;

/// A delivery as such a provider makes it.
#[derive(Clone)]
struct Delivery {
    source: &'static str,
    query: String,
    headers: Vec<(&'static str, String)>,
    body: String,
    ids: Vec<&'static str>,
}

impl Delivery {
    fn target(&self) -> String {
        format!("/in/{}{}", self.source, self.query)
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut other = self.clone();
        change(&mut other);
        other
    }

    fn saying(&self, old: &str, new: &str) -> Self {
        self.with(|delivery| delivery.body = delivery.body.replace(old, new))
    }

    fn asking(&self, query: &str) -> Self {
        self.with(|delivery| query.clone_into(&mut delivery.query))
    }

    fn headed(&self, name: &str, text: &str) -> Self {
        let replace = |(known, value): &mut (&str, String)| {
            if *known == name {
                text.clone_into(value);
            }
        };
        self.with(|delivery| delivery.headers.iter_mut().for_each(replace))
    }
}

/// The keys of all of them.
struct Providers {
    edwards: Ed25519KeyPair,
    curve: EcdsaKeyPair,
    curve_pem: String,
    now: i64,
}

impl Providers {
    fn new() -> Result<Self> {
        let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).ok().context("key")?;
        let edwards = Ed25519KeyPair::from_pkcs8(document.as_ref()).ok().context("key")?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let (algorithm, der) = (&ECDSA_P256_SHA256_FIXED_SIGNING, key.serialize_der());
        let curve = EcdsaKeyPair::from_pkcs8(algorithm, &der, &SystemRandom::new()).ok().context("key")?;
        let now = jiff::Timestamp::now().as_second();
        Ok(Self { edwards, curve, curve_pem: key.public_key_pem(), now })
    }

    async fn gateway(&self, scene: &Scene) -> Result<Gateway> {
        let secrets = BTreeMap::from([
            ("harbor", STANDARD.encode(self.edwards.public_key())),
            ("quarry", signing_key()?.public_key_pem().trim_end().to_owned()),
            ("meadow", SECRET.to_owned()),
            ("lantern", self.curve_pem.trim_end().to_owned()),
            ("caravan", SECRET.to_owned()),
        ]);
        let mut lines = vec![
            format!("source.quarry.public_url = {URL:?}"),
            "source.lantern.claims = { aud = \"us\" }".to_owned(),
        ];
        for (name, secret) in &secrets {
            lines.push(format!("source.{name}.provider = {name:?}"));
            lines.push(format!("source.{name}.secrets = {secret:?}"));
            lines.push(format!("source.{name}.effect = \"fx.apply\""));
        }
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        Start::new(scene.settings(&lines, SCHEMES)).start().await
    }

    fn harbor(&self) -> Delivery {
        let (time, body) = (format!("{}789", self.now), json!({ "id": "h-1" }).to_string());
        let signature = STANDARD.encode(self.edwards.sign(format!("{time}.{body}").as_bytes()));
        let headers = vec![("x-harbor-time", time), ("x-harbor-signature", signature)];
        Delivery { source: "harbor", query: String::new(), headers, body, ids: vec!["h-1"] }
    }

    fn quarry() -> Result<Delivery> {
        let (query, body) = ("?site=4".to_owned(), json!({ "id": "q-1" }).to_string());
        let signature = rsa_sha256(format!("POST {URL}/in/quarry{query}\n{body}").as_bytes())?;
        let headers = vec![("x-quarry-signature", signature)];
        Ok(Delivery { source: "quarry", query, headers, body, ids: vec!["q-1"] })
    }

    fn meadow(&self, part: Option<&str>, id: &'static str) -> Delivery {
        let (time, body) = (self.now, json!({ "hay": "dry" }).to_string());
        let of_part = part.map_or_else(String::new, |part| format!("part:{};", part.to_lowercase()));
        let signed = format!("ref:{id};{of_part}ts:{time};{body}");
        let key = hmac::Key::new(hmac::HMAC_SHA512, SECRET.as_bytes());
        let signature = URL_SAFE_NO_PAD.encode(hmac::sign(&key, signed.as_bytes()));
        let mut headers = vec![("x-meadow", format!("s0:x; time:{time}; s2:{signature}"))];
        headers.extend(part.map(|part| ("x-meadow-part", part.to_owned())));
        Delivery { source: "meadow", query: format!("?ref={id}"), headers, body, ids: vec![id] }
    }

    fn lantern(&self) -> Result<Delivery> {
        let body = json!({ "lamp": "on" }).to_string();
        let hash = STANDARD.encode(digest::digest(&digest::SHA256, body.as_bytes()));
        let claims = json!({ "aud": ["them", "us"], "jti": "l-1", "exp": self.now + 600, "body": hash });
        let header = json!({ "alg": "ES256" });
        let [header, claims] = [header, claims].map(|part| URL_SAFE_NO_PAD.encode(part.to_string()));
        let input = format!("{header}.{claims}");
        let signature = self.curve.sign(&SystemRandom::new(), input.as_bytes()).ok().context("signing")?;
        let token = format!("Bearer {input}.{}", URL_SAFE_NO_PAD.encode(signature));
        let headers = vec![("authorization", token)];
        Ok(Delivery { source: "lantern", query: String::new(), headers, body, ids: vec!["l-1"] })
    }

    fn caravan() -> Delivery {
        let run = "run-9";
        let parcel = |parcel: u8, state: &str| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
            let seal = hex::encode(hmac::sign(&key, format!("{parcel}|{state}|{run}").as_bytes()));
            json!({ "parcel": parcel, "state": state, "seal": seal })
        };
        let body = json!({ "parcels": [parcel(1, "packed"), parcel(1, "sent"), parcel(2, "packed")] });
        let headers = vec![("x-caravan-run", run.to_owned())];
        let ids = vec!["1:packed", "1:sent", "2:packed"];
        Delivery { source: "caravan", query: String::new(), headers, body: body.to_string(), ids }
    }

    /// What they send, and what others could make of it.
    fn deliveries(&self) -> Result<(Vec<Delivery>, Vec<Delivery>)> {
        let (harbor, quarry, lantern, caravan) =
            (self.harbor(), Self::quarry()?, self.lantern()?, Self::caravan());
        let (whole, bare) = (self.meadow(Some("Hay"), "m-1"), self.meadow(None, "m-2"));
        let forged = vec![
            harbor.saying("h-1", "h-2"),
            harbor.headed("x-harbor-time", &format!("{}790", self.now)),
            quarry.asking("?site=5"),
            quarry.saying("}", "} "),
            whole.with(|delivery| delivery.headers.retain(|(name, _)| *name != "x-meadow-part")),
            whole.asking("?ref=m-3"),
            bare.with(|delivery| delivery.headers.push(("x-meadow-part", "Hay".to_owned()))),
            bare.asking(""),
            lantern.saying("on", "off"),
            lantern.with(|delivery| delivery.body.clear()),
            caravan.saying("sent", "lost"),
            caravan.headed("x-caravan-run", "run-8"),
            caravan.saying("]}", ",{\"parcel\":3,\"state\":\"x\"}]}"),
        ];
        Ok((vec![harbor, quarry, whole, bare, lantern, caravan], forged))
    }
}

/// What `hapax verify` makes of it.
fn explained(gateway: &Gateway, delivery: &Delivery) -> Result<(Option<i32>, String)> {
    let headers = delivery.headers.iter().flat_map(|(name, value)| [*name, ": ", value, "\r\n"]);
    let (target, headers) = (delivery.target(), headers.collect::<String>());
    let body = &delivery.body;
    let request = format!("POST {target} HTTP/1.1\r\nHost: inner.example\r\n{headers}\r\n{body}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    command.args(["verify", "--source", delivery.source, "-", "--config"]).arg(gateway.config());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    drop(child.stdin.take().context("standard input")?.write_all(request.as_bytes()));
    let output = child.wait_with_output()?;
    Ok((output.status.code(), String::from_utf8([output.stdout, output.stderr].concat())?))
}

#[tokio::test]
async fn an_invented_provider_needs_a_scheme_and_no_code() -> Result<()> {
    let scene = Scene::new().await?;
    let providers = Providers::new()?;
    let gateway = providers.gateway(&scene).await?;
    let mut client = gateway.client()?;
    let (right, forged) = providers.deliveries()?;
    let mut told = Vec::new();
    for delivery in forged.iter().chain(&right) {
        let headers: Vec<(&str, &str)> =
            delivery.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        for _ in 0..2 {
            let answer = client.post(&delivery.target(), &headers, delivery.body.clone()).await?;
            let outcome = answer.header("hapax-outcome").unwrap_or_default().to_owned();
            told.push((answer.status.as_u16(), outcome));
        }
    }
    let (refused, accepted) = told.split_at(2 * forged.len());
    assert!(refused.iter().all(|told| *told == (401, "refused".to_owned())), "{refused:?}");
    for pair in accepted.chunks(2) {
        assert_eq!(pair, [(200, "accepted".to_owned()), (200, "duplicate".to_owned())]);
    }
    let ids: Vec<String> =
        right.iter().flat_map(|delivery| &delivery.ids).map(|id| (*id).to_owned()).collect();
    assert_eq!(scene.assert_once(&ids).await?.rows.len(), ids.len());
    for delivery in &right {
        let (code, text) = explained(&gateway, delivery)?;
        assert_eq!(code, Some(0), "{text}");
        assert!(delivery.ids.iter().all(|id| text.contains(id)), "{text}");
    }
    for delivery in &forged {
        assert_eq!(explained(&gateway, delivery)?.0, Some(1), "{}", delivery.source);
    }
    Ok(())
}
