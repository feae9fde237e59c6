//! TLS to the stores: only to whom the settings trust, nothing in plain text, and what a refusal says.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Result};
use hapax::dev::{Postgres, PostgresOptions, Redis, RedisOptions};
use http::StatusCode;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use tempfile::TempDir;

use crate::harness::gateway::{Gateway, Start};
use crate::harness::load::until_redis_in_use;
use crate::harness::play::{hapax, is_ready, ready};
use crate::harness::proxy::{Direction, Proxy, Verdict};
use crate::harness::scene::{PATIENT, Scene, deliver, event};
use crate::harness::stores::{self, private_postgres, private_redis};

/// A certificate and its key, as PEM.
struct Pair {
    certificate: String,
    key: String,
}

/// An authority and what it issued, and files of all of that for clients.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    folder: TempDir,
}

impl Authority {
    fn new() -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "an authority of the tests");
        let certificate = params.self_signed(&key)?.pem();
        let folder = tempfile::Builder::new().prefix(stores::folder().tag()).tempdir_in("/tmp")?;
        // The servers run as somebody else.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755))?;
        std::fs::write(folder.path().join("ca.crt"), certificate)?;
        Ok(Self { issuer: Issuer::new(params, key), folder })
    }

    fn issue(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Result<Pair> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        change(&mut params);
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Pair { certificate, key: key.serialize_pem() })
    }

    /// For where the tests' servers are.
    fn server(&self) -> Result<Pair> {
        self.issue(&["127.0.0.1"], |_| {})
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn ca(&self) -> String {
        self.path("ca.crt").display().to_string()
    }

    /// Writes a pair to files; their paths.
    fn write(&self, name: &str, pair: &Pair) -> Result<[String; 2]> {
        let paths = [self.path(&format!("{name}.crt")), self.path(&format!("{name}.key"))];
        std::fs::write(&paths[0], &pair.certificate)?;
        std::fs::write(&paths[1], &pair.key)?;
        Ok(paths.map(|path| path.display().to_string()))
    }
}

/// Starts the server anew with this certificate.
async fn equip_postgres(mut postgres: Postgres, pair: &Pair, hba: Option<&str>) -> Result<Postgres> {
    let owner = std::fs::metadata(postgres.data())?;
    let write = |name: &str, text: &str| -> Result<()> {
        let path = postgres.data().join(name);
        std::fs::write(&path, text)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        Ok(chown(&path, Some(owner.uid()), Some(owner.gid()))?)
    };
    write("server.crt", &pair.certificate)?;
    write("server.key", &pair.key)?;
    write("postgresql.auto.conf", "ssl = on\n")?;
    if let Some(hba) = hba {
        write("pg_hba.conf", hba)?;
    }
    let restarted = tokio::task::spawn_blocking(move || postgres.restart().map(|()| postgres));
    Ok(restarted.await??)
}

/// A Redis that also listens for TLS; where.
async fn tls_redis(authority: &Authority, pair: &Pair, clients: &str) -> Result<(Redis, SocketAddr)> {
    let redis = private_redis(RedisOptions::default()).await?;
    let [certificate, key] = authority.write("redis", pair)?;
    for path in [&certificate, &key] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))?;
    }
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
    let mut set = redis::cmd("CONFIG");
    set.arg("SET").arg("tls-cert-file").arg(certificate).arg("tls-key-file").arg(key);
    set.arg("tls-ca-cert-file").arg(authority.ca()).arg("tls-auth-clients").arg(clients);
    set.arg("tls-port").arg(address.port());
    set.exec_async(&mut stores::connect_redis(&redis.url()).await?).await?;
    Ok((redis, address))
}

/// A proxy, and what clients sent through it.
fn recorder(server: SocketAddr) -> Result<(Proxy, Arc<Mutex<Vec<u8>>>)> {
    let sent = Arc::<Mutex<Vec<u8>>>::default();
    let seen = Arc::clone(&sent);
    let hook = move |direction, bytes: &[u8]| {
        if direction == Direction::ToServer {
            seen.lock().expect("nobody panicked").extend(bytes);
        }
        Verdict::Forward
    };
    Ok((Proxy::start_with(server, Box::new(hook))?, sent))
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

fn postgres_url(url: &str, words: &str) -> String {
    format!("postgres.url = \"{url}?{words}\"")
}

/// `hapax check --online` on these settings: its exit code, and all that it said.
async fn check(scene: &Scene, overrides: &[&str]) -> Result<(Option<i32>, String)> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("hapax.toml");
    std::fs::write(&path, scene.settings(overrides, ""))?;
    let output = hapax(&["check", "--online", "--config", &path.display().to_string()]).await?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said)?;
    assert!(
        !said.contains("BEGIN") && !said.contains("hapax:"),
        "a certificate, a key or a password: {said}"
    );
    Ok((output.status.code(), said))
}

async fn refused(scene: &Scene, overrides: &[&str], wanted: &[&str]) -> Result<()> {
    let (code, said) = check(scene, overrides).await?;
    assert_eq!(code, Some(69), "{overrides:?}: {said}");
    for wanted in wanted {
        assert!(said.contains(wanted), "{overrides:?}: {wanted:?} is not in {said}");
    }
    Ok(())
}

async fn accepted(scene: &Scene, overrides: &[&str]) -> Result<()> {
    let (code, said) = check(scene, overrides).await?;
    assert_eq!(code, Some(0), "{overrides:?}: {said}");
    Ok(())
}

async fn accepts(gateway: &Gateway, id: &str) -> Result<()> {
    let answer = deliver(gateway.listen()?, "stripe", &event(id, "")).await?;
    assert_eq!((answer.status, answer.outcome.as_str()), (200, "accepted"));
    Ok(())
}

#[tokio::test]
async fn an_event_goes_through_stores_that_are_reached_by_tls_and_nothing_goes_in_plain_text() -> Result<()> {
    let authority = Authority::new()?;
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let postgres = equip_postgres(postgres, &authority.server()?, None).await?;
    let (redis, tls) = tls_redis(&authority, &authority.server()?, "no").await?;
    let scene = Scene::on(&postgres, redis.url()).await?;
    let (to_postgres, sent_to_postgres) = recorder(postgres.address())?;
    let (to_redis, sent_to_redis) = recorder(tls)?;
    let url = postgres.url_at(to_postgres.address(), &scene.stores.database);
    let words = format!("sslmode=verify-full&sslrootcert={}", authority.ca());
    let redis_url = format!("fast_tier.url = \"rediss://{}\"", to_redis.address());
    let ca = format!("fast_tier.tls_ca = \"{}\"", authority.ca());
    let overrides = [postgres_url(&url, &words), redis_url, ca];
    let gateway = scene.gateway(&overrides.each_ref().map(String::as_str)).await?;
    ready(&gateway).await?;
    accepts(&gateway, "evt_private").await?;
    crate::harness::play::settled(&scene, 1).await?;

    let sessions = "select bool_and(ssl), count(*) from pg_stat_ssl join pg_stat_activity using (pid) \
                    where application_name = 'hapax'";
    let row = scene.database().await?.query_one(sessions, &[]).await?;
    assert!(row.get::<_, bool>(0) && row.get::<_, i64>(1) >= 2, "heartbeat and recording, all by TLS");
    let sent = sent_to_postgres.lock().expect("nobody panicked");
    // How a client asks for TLS, and the first byte of a handshake.
    assert_eq!(sent.get(..9), Some(&[0, 0, 0, 8, 4, 210, 22, 47, 22][..]));
    assert!(!contains(&sent, "evt_private") && !contains(&sent, "application_name"));
    let sent = sent_to_redis.lock().expect("nobody panicked");
    assert!(sent.first() == Some(&22) && !contains(&sent, "SET") && !contains(&sent, "scene:"));
    let lines = gateway.lines().join("\n");
    assert!(!lines.contains("BEGIN") && !lines.contains(&authority.ca()), "{lines}");
    Ok(())
}

#[tokio::test]
async fn a_postgres_that_is_not_the_one_that_was_meant_is_refused() -> Result<()> {
    let (authority, stranger) = (Authority::new()?, Authority::new()?);
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let postgres = equip_postgres(postgres, &authority.server()?, None).await?;
    let scene = Scene::on(&postgres, stores::redis().url()).await?;
    let url = &scene.stores.postgres_url;
    let asked = |words: &str| postgres_url(url, words);
    let (ours, theirs) = (authority.ca(), stranger.ca());

    // Who issued it.
    let trusts = ["comes from nobody trusted", "sslrootcert=FILE"];
    for mode in ["verify-full", "verify-ca", "require"] {
        refused(&scene, &[&asked(&format!("sslmode={mode}&sslrootcert={theirs}"))], &trusts).await?;
        accepted(&scene, &[&asked(&format!("sslmode={mode}&sslrootcert={ours}"))]).await?;
    }
    refused(&scene, &[&asked("sslmode=require")], &trusts).await?;
    accepted(&scene, &[&asked("sslmode=require"), "postgres.tls_unverified = true"]).await?;
    for words in ["sslmode=prefer", "sslmode=disable"] {
        accepted(&scene, &[&asked(words)]).await?;
    }

    // For whom.
    let elsewhere = authority.issue(&["db.example.com", "10.0.0.1"], |_| {})?;
    let postgres = equip_postgres(postgres, &elsewhere, None).await?;
    let names = ["connect by a name that the server's certificate is for", "db.example.com"];
    refused(&scene, &[&asked(&format!("sslmode=verify-full&sslrootcert={ours}"))], &names).await?;
    accepted(&scene, &[&asked(&format!("sslmode=verify-ca&sslrootcert={ours}"))]).await?;

    // Until when.
    let expired = authority.issue(&["127.0.0.1"], |params| params.not_after = date_time_ymd(2020, 1, 1))?;
    let _postgres = equip_postgres(postgres, &expired, None).await?;
    for mode in ["verify-full", "verify-ca"] {
        let asked = asked(&format!("sslmode={mode}&sslrootcert={ours}"));
        refused(&scene, &[&asked], &["renew the server's certificate"]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_postgres_without_tls_is_asked_for_it_and_told_nothing() -> Result<()> {
    let scene = Scene::new().await?;
    let authority = Authority::new()?;
    let (proxy, sent) = recorder(stores::postgres().address())?;
    let url = stores::postgres().url_at(proxy.address(), &scene.stores.database);
    let words = format!("sslmode=verify-full&sslrootcert={}", authority.ca());
    refused(&scene, &[&postgres_url(&url, &words)], &["server does not support TLS", "ssl = on"]).await?;
    assert_eq!(
        *sent.lock().expect("nobody panicked"),
        [0, 0, 0, 8, 4, 210, 22, 47],
        "more than the question"
    );
    accepted(&scene, &[&postgres_url(&url, "sslmode=prefer")]).await
}

#[tokio::test]
async fn of_several_hosts_the_one_with_tls_is_taken() -> Result<()> {
    let authority = Authority::new()?;
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let postgres = equip_postgres(postgres, &authority.server()?, None).await?;
    let scene = Scene::on(&postgres, stores::redis().url()).await?;
    let both = format!("@{},{}/", stores::postgres().address(), postgres.address());
    let url = scene.stores.postgres_url.replace(&format!("@{}/", postgres.address()), &both);
    let words = format!("sslmode=verify-full&sslrootcert={}", authority.ca());
    let gateway = scene.gateway(&[&postgres_url(&url, &words)]).await?;
    ready(&gateway).await?;
    accepts(&gateway, "evt_1").await
}

#[tokio::test]
async fn who_the_machine_trusts_is_trusted_unless_the_settings_name_others() -> Result<()> {
    let authority = Authority::new()?;
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let postgres = equip_postgres(postgres, &authority.server()?, None).await?;
    let (redis, tls) = tls_redis(&authority, &authority.server()?, "no").await?;
    let scene = Scene::on(&postgres, redis.url()).await?;
    let url = postgres_url(&scene.stores.postgres_url, "sslmode=require");
    let settings = scene.settings(&[&url, &format!("fast_tier.url = \"rediss://{tls}\"")], "");
    let gateway = Start::new(settings).env("SSL_CERT_FILE", &authority.ca()).start().await?;
    ready(&gateway).await?;
    accepts(&gateway, "evt_1").await
}

#[tokio::test]
async fn a_client_certificate_is_shown() -> Result<()> {
    let authority = Authority::new()?;
    let own = authority.issue(&[], |params| params.distinguished_name.push(DnType::CommonName, "hapax"))?;
    let [chain, key] = authority.write("own", &own)?;
    let (redis, tls) = tls_redis(&authority, &authority.server()?, "yes").await?;
    let postgres = private_postgres(PostgresOptions {
        settings: vec![("ssl_ca_file".to_owned(), authority.ca())],
        ..PostgresOptions::default()
    });
    let postgres = postgres.await?;
    let scene = Scene::on(&postgres, redis.url()).await?;
    // With a password as before, and a certificate that the authority issued.
    let hba = "hostssl all all 127.0.0.1/32 scram-sha-256 clientcert=verify-full\n\
               hostnossl all all 127.0.0.1/32 scram-sha-256\n";
    let _postgres = equip_postgres(postgres, &authority.server()?, Some(hba)).await?;

    let words = format!("sslmode=verify-full&sslrootcert={}", authority.ca());
    let without = postgres_url(&scene.stores.postgres_url, &words);
    refused(&scene, &[&without], &["connection requires a valid client certificate"]).await?;
    let with = postgres_url(&scene.stores.postgres_url, &format!("{words}&sslcert={chain}&sslkey={key}"));
    accepted(&scene, &[&with]).await?;

    let redis_url = format!("fast_tier.url = \"rediss://{tls}\"");
    let ca = format!("fast_tier.tls_ca = \"{}\"", authority.ca());
    let asks = ["the server asks for a client certificate", "fast_tier.tls_cert"];
    refused(&scene, &[&with, &redis_url, &ca], &asks).await?;
    let (chain, key) =
        (format!("fast_tier.tls_cert = \"{chain}\""), format!("fast_tier.tls_key = \"{key}\""));
    accepted(&scene, &[&with, &redis_url, &ca, &chain, &key]).await
}

#[tokio::test]
async fn a_redis_that_is_not_the_one_that_was_meant_is_refused() -> Result<()> {
    let (authority, stranger) = (Authority::new()?, Authority::new()?);
    let scene = Scene::new().await?;
    let ca = |authority: &Authority| format!("fast_tier.tls_ca = \"{}\"", authority.ca());
    let url = |address: SocketAddr| format!("fast_tier.url = \"rediss://{address}\"");
    let (_redis, tls) = tls_redis(&authority, &authority.server()?, "no").await?;
    accepted(&scene, &[&url(tls), &ca(&authority)]).await?;
    let trusts = ["comes from nobody trusted", "fast_tier.tls_ca"];
    refused(&scene, &[&url(tls), &ca(&stranger)], &trusts).await?;
    refused(&scene, &[&url(tls)], &trusts).await?;

    let elsewhere = authority.issue(&["redis.example.com"], |_| {})?;
    let (_redis, tls) = tls_redis(&authority, &elsewhere, "no").await?;
    let names = ["connect by a name that the server's certificate is for", "redis.example.com"];
    refused(&scene, &[&url(tls), &ca(&authority)], &names).await?;

    let expired = authority.issue(&["127.0.0.1"], |params| params.not_after = date_time_ymd(2020, 1, 1))?;
    let (_redis, tls) = tls_redis(&authority, &expired, "no").await?;
    refused(&scene, &[&url(tls), &ca(&authority)], &["renew the server's certificate"]).await?;

    let (proxy, sent) = recorder(stores::redis().address())?;
    refused(&scene, &[&url(proxy.address()), &ca(&authority)], &["give the port that speaks TLS"]).await?;
    assert!(!contains(&sent.lock().expect("nobody panicked"), "SET"), "a command in plain text");
    Ok(())
}

#[tokio::test]
async fn stores_that_are_not_trusted_are_as_if_they_were_away() -> Result<()> {
    let (authority, stranger) = (Authority::new()?, Authority::new()?);
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let postgres = equip_postgres(postgres, &stranger.server()?, None).await?;
    let (redis, tls) = tls_redis(&stranger, &stranger.server()?, "no").await?;
    let scene = Scene::on(&postgres, redis.url()).await?;
    let words = format!("sslmode=verify-full&sslrootcert={}", authority.ca());
    let mut overrides = PATIENT.map(str::to_owned).to_vec();
    overrides.extend([
        "postgres.record_timeout = \"2500ms\"".to_owned(),
        postgres_url(&scene.stores.postgres_url, &words),
        format!("fast_tier.url = \"rediss://{tls}\""),
        format!("fast_tier.tls_ca = \"{}\"", authority.ca()),
        "postgres.statement_timeout = \"2s\"".to_owned(),
    ]);
    let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
    let gateway = scene.gateway(&overrides).await?;
    is_ready(&gateway, StatusCode::SERVICE_UNAVAILABLE).await?;
    let answer = deliver(gateway.listen()?, "stripe", &event("evt_1", "")).await?;
    assert_eq!((answer.status, answer.outcome.as_str()), (503, "unavailable"));
    assert!(answer.retry_after.is_some());
    for field in ["cause", "error"] {
        let says = |line: &serde_json::Value| {
            line[field].as_str().is_some_and(|text| text.contains("nobody trusted"))
        };
        gateway.log(|line| says(line) || says(&line["fields"])).await?;
    }

    // The right one takes its place.
    let _postgres = equip_postgres(postgres, &authority.server()?, None).await?;
    is_ready(&gateway, StatusCode::OK).await?;
    until_redis_in_use(&gateway, false).await?;
    accepts(&gateway, "evt_1").await?;
    scene.assert_once([&"evt_1".to_owned()]).await.map(drop)
}

#[test]
fn there_is_one_implementation_of_cryptography() -> Result<()> {
    let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock");
    let lock = std::fs::read_to_string(lock).context("Cargo.lock")?;
    for name in ["aws-lc-rs", "aws-lc-sys", "openssl", "openssl-sys", "native-tls"] {
        assert!(
            !lock.contains(&format!("name = \"{name}\"")),
            "{name} came in through a crate's default features"
        );
    }
    Ok(())
}
