//! `hapax verify` says what the gateway would do, and why.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use hapax::provider::Scheme;
use hapax::sign::{Draft, sign};
use serde_json::{Value, json};

const SECRET: &str = "a-secret-of-the-test";
const BODY: &str = r#"{"id":"evt_1","type":"a.b","created":1700000000}"#;
const NOW: i64 = 1_700_000_000;

struct Output {
    code: Option<i32>,
    out: String,
    err: String,
}

fn hapax(arguments: &[&str], input: &[u8]) -> Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    command.args(arguments).env_remove("HAPAX_CONFIG");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    // A command that does not read its input ends before it is written.
    drop(child.stdin.take().context("standard input")?.write_all(input));
    let output = child.wait_with_output()?;
    let text = |bytes| String::from_utf8(bytes);
    Ok(Output { code: output.status.code(), out: text(output.stdout)?, err: text(output.stderr)? })
}

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/vectors.json")
}

/// The lines that were printed, the last one apart.
fn lines(output: &Output) -> Result<(Vec<Value>, Value)> {
    let mut lines: Vec<Value> = output.out.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let last = lines.pop().context("no line")?;
    Ok((lines, last))
}

/// Secrets, ids and bodies of the vectors; shorter ones are words that may stand anywhere.
fn telling(vector: &Value) -> Vec<&str> {
    let keys =
        ["secret", "body", "body_base64", "event_id", "public_key", "certificate_pem", "verification_token"];
    let one = keys.iter().filter_map(|key| vector[*key].as_str());
    let lists = ["secrets", "event_ids"].iter().filter_map(|key| vector[*key].as_array()).flatten();
    one.chain(lists.filter_map(Value::as_str)).filter(|text| text.len() >= 8).collect()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { files(&path, found)? } else { found.push(path) }
    }
    Ok(())
}

#[test]
fn nothing_of_a_vector_stands_in_the_program() -> Result<()> {
    let vectors: Value = serde_json::from_slice(&std::fs::read(vectors())?)?;
    let vectors = vectors["vectors"].as_array().context("vectors")?;
    let mut found = Vec::new();
    for folder in ["src", "config", "sql"] {
        files(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut found)?;
    }
    for file in found {
        let text = std::fs::read_to_string(&file)?;
        for literal in vectors.iter().flat_map(telling) {
            assert!(!text.contains(literal), "{}: {literal:?}", file.display());
        }
    }
    Ok(())
}

#[test]
fn all_vectors_of_known_schemes_agree() -> Result<()> {
    let path = vectors();
    let path = path.to_str().context("path")?;
    let output = hapax(&["verify", "--vectors", path], b"")?;
    let (lines, counts) = lines(&output)?;
    assert_eq!((output.code, &counts["disagree"]), (Some(0), &json!(0)), "{}", output.err);
    assert_eq!(counts["total"], lines.len());
    let keys = ["name", "expected", "got", "reason", "event_ids", "event_ids_match", "reply_match"];
    for line in &lines {
        let line = line.as_object().context("object")?;
        assert_eq!(line.keys().map(String::as_str).collect::<Vec<_>>(), keys);
    }
    let unsupported = lines.iter().filter(|line| line["got"] == "unsupported").count();
    assert_eq!(counts["unsupported"], unsupported);
    let strict = hapax(&["verify", "--vectors", path, "--strict"], b"")?;
    assert_eq!((unsupported, strict.code), (0, Some(0)));
    Ok(())
}

#[test]
fn a_changed_vector_is_seen() -> Result<()> {
    let mut file: Value = serde_json::from_slice(&std::fs::read(vectors())?)?;
    let list = file["vectors"].as_array_mut().context("vectors")?;
    list.retain(|vector| vector["scheme"] == "stripe" && vector["expected"] == "accept");
    list.truncate(3);
    list[0]["expected"] = json!("reject");
    list[1]["event_id"] = json!("another");
    list[2]["scheme"] = json!("own");
    let folder = tempfile::tempdir()?;
    let (changed, own) = (folder.path().join("changed.json"), folder.path().join("own.toml"));
    std::fs::write(&changed, file.to_string())?;
    let scheme = Scheme::preset_text("stripe").context("preset")?;
    std::fs::write(&own, format!("[scheme.own]\n{scheme}"))?;
    let (changed, own) = (changed.to_str().context("path")?, own.to_str().context("path")?);
    let counts =
        |agree, unsupported| json!({ "total": 3, "agree": agree, "disagree": 2, "unsupported": unsupported });
    let output = hapax(&["verify", "--vectors", changed], b"")?;
    assert_eq!((output.code, lines(&output)?.1), (Some(1), counts(0, 1)));
    let output = hapax(&["verify", "--vectors", changed, "--config", own], b"")?;
    assert_eq!((output.code, lines(&output)?.1), (Some(1), counts(1, 0)));
    for wrong in [own, "/absent"] {
        let output = hapax(&["verify", "--vectors", wrong], b"")?;
        assert_eq!((output.code, output.out.as_str()), (Some(64), ""));
        assert!(output.err.starts_with(wrong), "{}", output.err);
    }
    Ok(())
}

/// Settings with a source for the preset; its second secret is the right one.
fn settings(folder: &Path, provider: &str, more: &str) -> Result<String> {
    let path = folder.join("hapax.toml");
    let text = format!(
        "postgres.url = \"postgres://h/d\"\nfast_tier = {{ url = \"redis://h\", prefix = \"t:\" }}\n\
         server.deadline = \"2s\"\nserver.body_timeout = \"1s\"\nin_flight.wait = \"500ms\"\n\
         postgres.record_timeout = \"1200ms\"\npostgres.statement_timeout = \"800ms\"\n\
         [source.test]\nprovider = \"{provider}\"\nsecrets = [\"another\", \"{SECRET}\"]\n{more}\n"
    );
    std::fs::write(&path, text)?;
    Ok(path.to_str().context("path")?.to_owned())
}

/// A raw request as the provider would send it.
fn request(provider: &str, public_url: Option<&str>, body: &str) -> Result<Vec<u8>> {
    let scheme = Scheme::preset(provider).context("preset")?;
    let key = scheme.key(SECRET).map_err(anyhow::Error::msg)?;
    let body = body.to_owned().into();
    let draft = Draft {
        method: &http::Method::POST,
        public_url,
        path: "/in/test",
        body: &body,
        id: Some("id-1"),
        now: jiff::Timestamp::from_second(NOW)?,
    };
    let signed = sign(&scheme, &key, &draft).map_err(anyhow::Error::msg)?;
    let mut request = b"POST /in/test HTTP/1.1\r\nHost: inner.example\r\n".to_vec();
    for (name, value) in &signed.headers {
        request.extend_from_slice(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    request.extend_from_slice(b"\r\n");
    request.extend_from_slice(&body);
    Ok(request)
}

fn verify(config: &str, now: i64, request: &[u8]) -> Result<Output> {
    let now = now.to_string();
    let output = hapax(&["verify", "--source", "test", "--config", config, "--now", &now, "-"], request)?;
    let told = format!("{}{}", output.out, output.err);
    assert!(!told.contains(SECRET), "{told}");
    Ok(output)
}

#[test]
fn an_accepted_request_is_named_with_its_secret_and_keys() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = settings(folder.path(), "stripe", "")?;
    let output = verify(&config, NOW + 10, &request("stripe", None, BODY)?)?;
    assert_eq!(output.code, Some(0), "{}", output.out);
    for part in [
        "accepted    an event",
        "secret      0 does not match",
        "secret      1 matches",
        "event id    evt_1",
        "event type  a.b",
        "redis key   t:",
        "10 s behind the clock",
        "signed      {ts}.{body} = 59 bytes: \"1700000000.{",
    ] {
        assert!(output.out.contains(part), "no {part:?} in {}", output.out);
    }
    Ok(())
}

#[test]
fn a_refused_request_is_told_why() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stripe = request("stripe", None, BODY)?;
    let with = |from: &str, to: &str| -> Result<Vec<u8>> {
        Ok(String::from_utf8(stripe.clone())?.replace(from, to).into_bytes())
    };
    let newline = [stripe.as_slice(), b"\n"].concat();
    let right = String::from_utf8(stripe.clone())?;
    let right = right.split("v1=").nth(1).and_then(|text| text.get(..64)).context("signature")?.to_owned();
    let flipped = if right.starts_with('0') { "v1=1" } else { "v1=0" };
    let start = right.get(..1).context("digit")?;
    let forged = with(&format!("v1={start}"), flipped)?;
    let config = settings(folder.path(), "stripe", "")?;
    let cases: [(&[u8], i64, &[&str]); 6] = [
        (&newline, NOW, &["signature_mismatch", "1 does not match", "matches if the line end at the end"]),
        (&stripe, NOW + 301, &["timestamp_stale", "301 s behind the clock", "tolerance 5m", "1 matches"]),
        (&stripe, NOW - 301, &["timestamp_future", "301 s ahead of the clock"]),
        (
            &with("stripe-signature", "x-signature")?,
            NOW,
            &["header:stripe-signature: not there", "x-signature; is it"],
        ),
        (
            &with("Host: ", "stripe-signature: ")?,
            NOW,
            &["2 times, and only one is allowed", "more than once"],
        ),
        (&forged, NOW, &["signature_mismatch", "secret      0 does not match", "signed      {ts}.{body}"]),
    ];
    for (request, now, parts) in cases {
        let output = verify(&config, now, request)?;
        assert_eq!(output.code, Some(1), "{}", output.out);
        for part in parts {
            assert!(output.out.contains(part), "no {part:?} in {}", output.out);
        }
    }
    let output = verify(&config, NOW, &forged)?;
    assert!(!output.out.contains(&right), "the right signature is shown: {}", output.out);
    for wrong in [b"{}".as_slice(), b""] {
        assert_eq!(verify(&config, NOW, wrong)?.code, Some(64));
    }
    Ok(())
}

#[test]
fn a_form_in_parts_is_read_or_said_to_be_cut_off() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = settings(folder.path(), "dropbox-sign", "")?;
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, SECRET.as_bytes());
    let hash = hex::encode(ring::hmac::sign(&key, b"1700000000account_confirmed"));
    let event = json!({ "event": { "event_time": "1700000000", "event_type": "account_confirmed", "event_hash": hash } });
    let head = "POST /in/test HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=b0\r\n\r\n";
    let part = format!("--b0\r\nContent-Disposition: form-data; name=\"json\"\r\n\r\n{event}\r\n");
    let output = verify(&config, NOW, format!("{head}{part}--b0--\r\n").as_bytes())?;
    assert!(output.code == Some(0) && output.out.contains(&hash), "{}", output.out);
    let output = verify(&config, NOW, format!("{head}{part}").as_bytes())?;
    assert!(output.code == Some(1) && output.out.contains("form in the body is cut off"), "{}", output.out);
    Ok(())
}

#[test]
fn another_public_url_is_found() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = settings(folder.path(), "square", "public_url = \"https://outer.example\"")?;
    let body = BODY.replace("\"id\"", "\"event_id\"");
    let output = verify(&config, NOW, &request("square", Some("https://outer.example"), &body)?)?;
    assert_eq!(output.code, Some(0), "{}", output.out);
    let output = verify(&config, NOW, &request("square", Some("http://inner.example"), &body)?)?;
    assert_eq!(output.code, Some(1));
    let hint = "the signature matches if public_url is \"http://inner.example\"";
    assert!(output.out.contains(hint), "{}", output.out);
    Ok(())
}

/// Settings, request, time, exit code, and what is told.
type Case<'a> = (&'a str, &'a [u8], i64, i32, &'a [&'a str]);

#[test]
fn the_claim_that_is_wrong_is_told_and_the_token_is_not() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let url = "https://outer.example";
    let config = settings(folder.path(), "messagebird", &format!("public_url = \"{url}\""))?;
    let right = request("messagebird", Some(url), BODY)?;
    let changed = String::from_utf8(right.clone())?.replace("evt_1", "evt_2").into_bytes();
    let elsewhere = request("messagebird", Some("http://inner.example"), BODY)?;
    let asking = tempfile::tempdir()?;
    let asking =
        settings(asking.path(), "messagebird", &format!("public_url = \"{url}\"\nclaims.aud = \"me\""))?;
    let cases: [Case<'_>; 6] = [
        (
            &config,
            &right,
            NOW,
            0,
            &["accepted    an event", "event id    id-1", "HS256, names no key", "1 matches"],
        ),
        (&config, &right, NOW + 61, 1, &["timestamp_stale", "exp: ended 1 s before the clock", "1 matches"]),
        (&config, &right, NOW - 2, 1, &["timestamp_future", "nbf: begins 2 s after the clock", "leeway 1 s"]),
        (&config, &changed, NOW, 1, &["body_hash_mismatch", "claim:/iss has to be \"MessageBird\": it is"]),
        (
            &config,
            &elsewhere,
            NOW,
            1,
            &["url_hash_mismatch", "matches if public_url is \"http://inner.example\""],
        ),
        (
            &asking,
            &right,
            NOW,
            1,
            &["claim_mismatch", "aud is not what the source's claims want", "one of them matches"],
        ),
    ];
    for (config, request, now, code, parts) in cases {
        let output = verify(config, now, request)?;
        assert_eq!(output.code, Some(code), "{}", output.out);
        for part in parts {
            assert!(output.out.contains(part), "no {part:?} in {}", output.out);
        }
        assert!(!output.out.contains("eyJ"), "the token is shown: {}", output.out);
    }
    Ok(())
}

#[test]
fn a_handshake_is_told_without_its_secret() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = settings(folder.path(), "meta", "handshake_secrets = { verify_token = \"vt-canary\" }")?;
    for (token, code, part) in [("vt-canary", 0, "a handshake, answered 200"), ("x", 1, "handshake_refused")]
    {
        let path = format!("/in/test?hub.mode=subscribe&hub.verify_token={token}&hub.challenge=123");
        let output = verify(&config, NOW, format!("GET {path} HTTP/1.1\n\n").as_bytes())?;
        assert_eq!(output.code, Some(code), "{}", output.out);
        assert!(output.out.contains(part) && !output.out.contains("canary"), "{}", output.out);
    }
    Ok(())
}

#[test]
fn providers_are_listed_and_shown() -> Result<()> {
    let output = hapax(&["providers"], b"")?;
    let lines = output.out.lines().skip(1);
    let names: Vec<&str> = lines.filter_map(|line| line.split(' ').next()).collect();
    assert_eq!((output.code, names.as_slice()), (Some(0), Scheme::preset_names()));
    let table = hapax(&["providers", "--markdown"], b"")?;
    assert!(
        table.code == Some(0) && table.out.contains("| `stripe` | hmac | body | yes | `json:/id` |"),
        "{}",
        table.out
    );
    let output = hapax(&["providers", "show", "slack"], b"")?;
    assert!(output.code == Some(0) && output.out.contains("# UNCHECKED"), "{}", output.out);
    assert_eq!(hapax(&["providers", "show", "nobody"], b"")?.code, Some(64));
    Ok(())
}
