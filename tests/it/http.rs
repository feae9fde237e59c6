//! What the listener makes of slow, large, broken and hostile requests.

use std::time::Duration;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{Method, StatusCode};

use crate::harness::client::{Raw, raw};
use crate::harness::play::{
    Hold, LIMIT, answer, code, exchange, head, metric, outcome, patient, post, ready, request, signature,
    status, stripe_signature,
};
use crate::harness::scene::{Found, SECRET, Scene, event};

/// So long that it cannot be what ends a connection here.
const LONG_IDLE: &str = "server.idle_timeout = \"10m\"";
const LONG_HEAD: &str = "server.head_timeout = \"10m\"";

async fn nothing_happened(scene: &Scene) -> Result<()> {
    assert_eq!(scene.found().await?, Found::default());
    assert!(scene.markers().await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_slow_head_ends_the_connection_and_an_idle_one_stays() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&["server.head_timeout = \"200ms\"", LONG_IDLE]).await?;
    let silent = Raw::connect(gateway.listen()?).await?;
    // Answered without a look at the body, and after a look at everything.
    let mut idle = Vec::new();
    for bytes in [b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), request("plain", &event("evt_1", "")).0]
    {
        let mut connection = Raw::connect(gateway.listen()?).await?;
        connection.write(&bytes).await?;
        answer(&mut connection).await?;
        idle.push(connection);
    }
    // The slow ones began later than the idle ones; once they are cut, the idle ones had their chance, too.
    for part in
        [&b"P"[..], b"POST /in/stripe HTTP/1.1\r\nHost: x", b"POST /in/stripe HTTP/1.1\r\nHost: x\r\n"]
    {
        let closed = raw(gateway.listen()?, part).await?;
        assert!(closed.is_empty() || status(&String::from_utf8_lossy(&closed))? == 408, "{closed:?}");
    }
    let mut again = idle.remove(0);
    again.write(b"POST /in/st").await?;
    assert!(again.read_to_end().await?.is_empty(), "the second head has its time, too");
    for mut connection in idle.into_iter().chain([silent]) {
        assert!(!connection.has_come(), "an idle connection was closed");
        connection.write(&request("plain", &event("evt_2", "")).0).await?;
        assert_eq!(answer(&mut connection).await?.0, 200);
    }
    Ok(())
}

#[tokio::test]
async fn an_idle_connection_is_closed_in_the_end() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&["server.idle_timeout = \"200ms\"", LONG_HEAD]).await?;
    let mut silent = Raw::connect(gateway.listen()?).await?;
    let mut used = Raw::connect(gateway.listen()?).await?;
    used.write(&request("stripe", &event("evt_1", "")).0).await?;
    assert_eq!(answer(&mut used).await?.0, 200);
    for connection in [&mut silent, &mut used] {
        connection.read_to_end().await?;
    }
    metric(&gateway, "hapax_connections", &[], 0).await
}

#[tokio::test]
async fn a_slow_body_is_408() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&["server.body_timeout = \"200ms\"", LONG_IDLE]).await?;
    let (bytes, at) = request("stripe", &event("evt_1", ""));
    for part in [&bytes[..at], &bytes[..at + 10]] {
        let (status, text) = exchange(gateway.listen()?, part).await?;
        assert_eq!(status, 408);
        assert!(text.contains(r#""code":"body_too_slow""#), "{text}");
    }
    nothing_happened(&scene).await
}

const CAP: usize = 64 * 1024;

fn too_large(text: &str) -> bool {
    text.starts_with("HTTP/1.1 413 ") && text.contains(r#""code":"body_too_large""#)
}

#[tokio::test]
async fn the_body_cap_counts_bytes_and_not_promises() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&["source.stripe.body_max = \"64KiB\""]).await?;
    let mut client = gateway.client()?;
    let padding = |length: usize| {
        event("evt_1", &format!(r#""x":"{}""#, "x".repeat(length - event("evt_1", r#""x":"""#).len())))
    };
    assert_eq!(padding(CAP).len(), CAP);
    assert_eq!(post(&mut client, "stripe", &padding(CAP)).await?.status, 200);
    let answer_ = post(&mut client, "stripe", &padding(CAP + 1)).await?;
    assert_eq!((answer_.status.as_u16(), code(&answer_).as_str()), (413, "body_too_large"));

    // No length at all: counted as it comes, and cut when it does not end.
    let mut endless = Raw::connect(gateway.listen()?).await?;
    endless.write(&[&head("/in/stripe", &["Transfer-Encoding: chunked"]), &b"\r\n"[..]].concat()).await?;
    let chunk = [b"2000\r\n".as_slice(), &[b'x'; 0x2000], b"\r\n"].concat();
    let mut sent = 0;
    while !endless.has_come() && endless.write(&chunk).await.is_ok() {
        sent += 0x2000;
        assert!(sent < 64 << 20, "it reads without end");
    }
    assert!(too_large(&String::from_utf8(endless.read().await?)?));

    // A length that is a lie: what comes after it is another request, and none.
    let body = event("evt_2", "");
    let lying = head("/in/stripe", &[&signature(&body), "Content-Length: 10"]);
    let text = String::from_utf8(raw(gateway.listen()?, &[&lying, &b"\r\n"[..], &body].concat()).await?)?;
    assert_eq!(status(&text)?, 401);
    assert!(text.contains("HTTP/1.1 400 ") && !text.contains("HTTP/1.1 200 "), "{text}");
    assert_eq!(scene.found().await?.rows.len(), 1);
    Ok(())
}

#[tokio::test]
async fn an_answer_about_the_size_reaches_its_sender() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&["source.stripe.body_max = \"64KiB\""]).await?;
    // Slightly too large, written piece by piece, by a sender that looks for an answer only at the end.
    let length = CAP + 200 * 1024;
    let mut slow = Raw::connect(gateway.listen()?).await?;
    slow.write(&[&head("/in/stripe", &[&format!("Content-Length: {length}")]), &b"\r\n"[..]].concat())
        .await?;
    for piece in vec![b'x'; length].chunks(4096) {
        slow.write(piece).await?;
        tokio::task::yield_now().await;
    }
    assert!(too_large(&answer(&mut slow).await?.1));
    // The connection is still good for the next event.
    slow.write(&request("stripe", &event("evt_1", "")).0).await?;
    assert_eq!(answer(&mut slow).await?.0, 200);

    // Hugely too large: refused without a byte of it.
    let (_, text) = exchange(
        gateway.listen()?,
        &[&head("/in/stripe", &["Content-Length: 10000000000"]), &b"\r\n"[..]].concat(),
    )
    .await?;
    assert!(too_large(&text), "{text}");
    Ok(())
}

#[tokio::test]
async fn a_sender_that_waits_for_100_gets_it_only_if_the_body_is_wanted() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[LONG_IDLE, "server.body_timeout = \"4s\""]).await?;
    let body = event("evt_1", "");
    let length = format!("Content-Length: {}", body.len());
    let expect = |path: &str, lines: &[&str]| [&head(path, lines), &b"\r\n"[..]].concat();

    let mut patient = Raw::connect(gateway.listen()?).await?;
    patient.write(&expect("/in/stripe", &[&signature(&body), &length, "Expect: 100-Continue"])).await?;
    assert_eq!(patient.read().await?, b"HTTP/1.1 100 Continue\r\n\r\n");
    patient.write(&body).await?;
    assert_eq!(answer(&mut patient).await?.0, 200);

    for (path, lines, wanted) in [
        ("/in/stripe", ["Content-Length: 10000000", "Expect: 100-continue"], 413),
        ("/in/none", ["Content-Length: 10", "Expect: 100-continue"], 404),
        ("/in/stripe", ["Content-Length: 10", "Expect: 200-ok"], 417),
    ] {
        let (status, text) = exchange(gateway.listen()?, &expect(path, &lines)).await?;
        assert_eq!(status, wanted, "{text}");
        assert!(!text.contains("100 Continue"), "{text}");
    }
    Ok(())
}

#[tokio::test]
async fn no_second_request_hides_in_the_first() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[LONG_IDLE, LONG_HEAD]).await?;
    let (hidden, _) = request("stripe", &event("hidden", ""));
    let (cl, te) = ("Content-Length: 5", "Transfer-Encoding: chunked");
    let both = hidden.len() + 5;
    let both = format!("Content-Length: {both}");
    for lines in [
        &[cl, te][..],
        &[te, cl],
        &[&both, te],
        &[te, &both],
        &[cl, "Content-Length: 6"],
        &[cl, "Content-Length: +5"],
        &["Content-Length: 5, 6"],
        &["Content-Length: +5"],
        &["Content-Length: 0x5"],
        &["Transfer-Encoding: xchunked"],
        &["Transfer-Encoding: chunked, identity"],
        &["Transfer-Encoding : chunked"],
        &[te, "Transfer-Encoding: identity"],
        &["X-Folded: a\r\n b", cl],
        &["X-Folded: a\r\n\tTransfer-Encoding: chunked", cl],
    ] {
        let bytes = [&head("/in/stripe", lines), &b"\r\n0\r\n\r\n"[..], &hidden].concat();
        let text = String::from_utf8(raw(gateway.listen()?, &bytes).await?)?;
        assert_eq!(text.matches("HTTP/1.1 ").count(), 1, "{lines:?}: {text}");
        assert!(!status(&text)?.is_success(), "{lines:?}: {text}");
    }
    nothing_happened(&scene).await
}

#[tokio::test]
async fn a_chunked_event_is_as_good_as_any() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let body = event("evt_1", "");
    let (one, two) = body.split_at(20);
    let mut bytes =
        head("/in/stripe", &[&signature(&body), "Transfer-Encoding: chunked", "Trailer: Stripe-Signature"]);
    for piece in [one, two] {
        bytes
            .extend(format!("{}{:x};ext=1\r\n", if piece == one { "\r\n" } else { "" }, piece.len()).bytes());
        bytes.extend([piece, b"\r\n"].concat());
    }
    bytes.extend(b"0\r\nStripe-Signature: t=1,v1=00\r\n\r\n");
    let (status, text) = exchange(gateway.listen()?, &bytes).await?;
    assert_eq!(status, 200, "{text}");
    scene.assert_once([&"evt_1".to_owned()]).await?;
    Ok(())
}

#[tokio::test]
async fn a_head_that_is_too_large_is_431() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&["server.head_max = \"16KiB\""]).await?;
    let with = |length: usize| {
        let body = event("evt_1", "");
        let long = format!("X-Long: {}", "x".repeat(length));
        let length = format!("Content-Length: {}", body.len());
        [&head("/in/stripe", &[&signature(&body), &length, &long]), &b"\r\n"[..], &body].concat()
    };
    assert_eq!(exchange(gateway.listen()?, &with(15_000)).await?.0, 200);
    let mut large = Raw::connect(gateway.listen()?).await?;
    large.write(&with(40_000)).await?;
    assert_eq!(status(&String::from_utf8(large.read().await?)?)?, 431);
    Ok(())
}

#[tokio::test]
async fn only_post_to_a_source_gets_anywhere() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let mut client = gateway.client()?;
    let body = event("evt_1", "");
    let signature = stripe_signature(SECRET, &body, 0);
    let headers = [("stripe-signature", &signature[..])];
    for path in [
        "/",
        "/in",
        "/in/",
        "/in/none",
        "/in/stripe/",
        "/in//stripe",
        "//in/stripe",
        "/in/Stripe",
        "/IN/stripe",
        "/in/%73tripe",
        "/in/stripe/x",
        "/in/./stripe",
        "/in/stripe;x",
        "/live",
        "/ready",
        "/metrics",
    ] {
        for method in [Method::POST, Method::GET] {
            let answer = client.send(method, path, &headers, body.clone()).await?;
            assert_eq!((answer.status, outcome(&answer)), (StatusCode::NOT_FOUND, "refused"), "{path}");
        }
    }
    for method in [Method::GET, Method::HEAD, Method::PUT, Method::DELETE, Method::OPTIONS, Method::PATCH] {
        let answer = client.send(method.clone(), "/in/stripe", &headers, Bytes::new()).await?;
        assert_eq!(
            (answer.status, outcome(&answer)),
            (StatusCode::METHOD_NOT_ALLOWED, "refused"),
            "{method}"
        );
        assert_eq!(answer.header("allow"), Some("POST"), "{method}");
    }
    nothing_happened(&scene).await?;
    let answer = client.post("/in/stripe?any=query", &headers, body).await?;
    assert_eq!(outcome(&answer), "accepted");
    Ok(())
}

/// An answer byte for byte, without the time of day.
async fn bytes_of(
    gateway: &crate::harness::gateway::Gateway,
    lines: &[&str],
    body: &[u8],
) -> Result<(StatusCode, String)> {
    let length = format!("Content-Length: {}", body.len());
    let lines = [lines, &[&length[..]]].concat();
    let (status, text) =
        exchange(gateway.listen()?, &[&head("/in/stripe", &lines), &b"\r\n"[..], body].concat()).await?;
    let timeless = text.lines().filter(|line| !line.starts_with("date:")).collect::<Vec<_>>().join("\n");
    Ok((status, timeless))
}

#[tokio::test]
async fn whatever_is_wrong_with_a_signature_the_sender_sees_one_answer() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    ready(&gateway).await?;
    let (known, unknown) = (event("known", ""), event("unknown", ""));
    let accepted = bytes_of(&gateway, &[&signature(&known)], &known).await?;
    assert_eq!(accepted.0, 200);
    let sign = |ago: i64| stripe_signature(SECRET, &unknown, ago);
    let good = sign(0);
    let (ts, mac) = good.split_once(",v1=").context("a signature")?;
    let ts_value = &ts[2..];
    let many = format!("{ts}{}", ",v1=00".repeat(10_000));
    let wrong = [
        String::new(),
        format!("{ts},v1={}", "0".repeat(64)),
        format!("{ts},v1={}", &mac[..62]),
        format!("{ts},v1={mac}00"),
        format!("{ts},v1=zz"),
        format!("{ts},v1="),
        format!("{ts},v0={mac}"),
        format!("v1={mac}"),
        format!("t=,v1={mac}"),
        format!("t=x,v1={mac}"),
        format!("t=-1,v1={mac}"),
        format!("t=99999999999999999999,v1={mac}"),
        format!("t={ts_value}=junk,v1={mac}"),
        format!("{ts},t=1,v1={mac}"),
        format!("t=1,{ts},v1={mac}"),
        mac.to_owned(),
        "=".to_owned(),
        ",,,,".to_owned(),
        many,
        sign(3600),
        sign(-3600),
        stripe_signature("whsec_another secret", &unknown, 0),
        stripe_signature(SECRET, &known, 0),
        stripe_signature("", &unknown, 0),
    ];
    let (status, one) = bytes_of(&gateway, &[], &unknown).await?;
    assert_eq!(status, 401);
    assert!(
        one.ends_with(r#"{"type":"about:blank","title":"Unauthorized","status":401,"code":"unauthorized"}"#),
        "{one}"
    );
    for signature in &wrong {
        let line = format!("Stripe-Signature: {signature}");
        assert_eq!(bytes_of(&gateway, &[&line], &unknown).await?.1, one, "{signature:.200}");
    }
    // Repeated, in both orders; and all of it again for an event that is known.
    let (good, bad) = (signature(&unknown), format!("Stripe-Signature: {}", wrong[1]));
    for lines in [[&good[..], &bad[..]], [&bad, &good], [&good, &good]] {
        assert_eq!(bytes_of(&gateway, &lines, &unknown).await?.1, one, "{lines:?}");
    }
    for lines in [&[][..], &[&bad[..]], &[&good[..]]] {
        assert_eq!(bytes_of(&gateway, lines, &known).await?.1, one, "{lines:?}");
    }
    assert_eq!(bytes_of(&gateway, &[], b"").await?.1, one);
    assert_eq!(bytes_of(&gateway, &[], b"\xff\xfe\0\x80").await?.1, one);
    // None of it claimed the id.
    let found = scene.found().await?;
    assert_eq!(found.rows.keys().collect::<Vec<_>>(), ["known"]);
    assert!(scene.markers().await?.len() <= 1);
    assert!(bytes_of(&gateway, &[&good], &unknown).await?.1.contains("hapax-outcome: accepted"));
    Ok(())
}

#[tokio::test]
async fn too_many_requests_are_503_and_the_others_go_on() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&patient(&["server.requests_max = 2"])).await?;
    ready(&gateway).await?;
    let hold = Hold::new(&scene).await?;
    let mut delayed = Vec::new();
    for n in 0..2 {
        let mut connection = Raw::connect(gateway.listen()?).await?;
        connection.write(&request("stripe", &event(&format!("evt_{n}"), r#""do":"wait""#)).0).await?;
        delayed.push(connection);
    }
    hold.waiting(1).await?;
    metric(&gateway, "hapax_requests_in_flight", &[], 2).await?;
    let mut client = gateway.client()?;
    let over = post(&mut client, "plain", &event("evt_over", "")).await?;
    assert_eq!(
        (over.status.as_u16(), outcome(&over), code(&over).as_str()),
        (503, "unavailable", "overloaded")
    );
    assert!(over.header("retry-after").context("no Retry-After")?.parse::<u64>()? >= 1);

    // A client that leaves does not make room: its event is still being worked on.
    delayed.remove(0).reset()?;
    metric(&gateway, "hapax_connections", &[], 2).await?;
    assert_eq!(post(&mut client, "plain", &event("evt_over", "")).await?.status, 503);
    hold.release().await?;
    assert_eq!(answer(&mut delayed[0]).await?.0, 200);
    let taken = async || {
        let answer = post(&mut gateway.client().ok()?, "plain", &event("evt_over", "")).await.ok()?;
        (answer.status == 200).then_some(())
    };
    crate::harness::wait::eventually(LIMIT, taken).await
}

#[tokio::test]
async fn too_many_connections_wait_and_do_not_fail() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&["server.connections_max = 2", LONG_IDLE]).await?;
    let mut open = vec![Raw::connect(gateway.listen()?).await?, Raw::connect(gateway.listen()?).await?];
    metric(&gateway, "hapax_connections", &[], 2).await?;
    let mut waiting = Raw::connect(gateway.listen()?).await?;
    waiting.write(&request("stripe", &event("evt_waits", "")).0).await?;
    for n in 0..20 {
        open[0].write(&request("stripe", &event(&format!("evt_{n}"), "")).0).await?;
        assert_eq!(answer(&mut open[0]).await?.0, 200);
    }
    assert!(!waiting.has_come(), "it was let in over the limit");
    drop(open.pop());
    assert_eq!(answer(&mut waiting).await?.0, 200);
    tokio::time::timeout(Duration::from_secs(30), metric(&gateway, "hapax_connections", &[], 2)).await??;
    Ok(())
}

/// A sender that is still writing when its head is refused gets to see why.
#[tokio::test]
async fn a_refused_head_is_answered_to_a_sender_that_writes_on() -> Result<()> {
    let scene = Scene::new().await?;
    let gateway = scene.gateway(&[]).await?;
    let body = "x".repeat(200_000);
    for (head, status) in [("POST /in/nobody", 404), ("PUT /in/stripe", 405)] {
        let request = format!("{head} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let mut connection = Raw::connect(gateway.listen()?).await?;
        connection.write(request.as_bytes()).await?;
        let answer = String::from_utf8_lossy(&connection.read().await?).into_owned();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{head}: {answer}");
    }
    Ok(())
}
