//! Behind a proxy that gives each transaction another session.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use hapax::dev::PostgresOptions;
use http::StatusCode;
use serde_json::Value;

use crate::harness::load::{LIMIT, burst};
use crate::harness::play::{hapax, is_ready};
use crate::harness::receiver::Receiver;
use crate::harness::scene::{PATIENT, Scene, deliver, event};
use crate::harness::stores::{self, private_postgres};
use crate::harness::wait::eventually;

/// A pgbouncer with few sessions; ended when dropped.
pub(crate) struct Bouncer {
    process: Child,
    pub(crate) address: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Bouncer {
    pub(crate) async fn start(url: &str) -> Result<Self> {
        Self::start_with(url, "").await
    }

    /// With these lines at the end of its settings.
    async fn start_with(url: &str, lines: &str) -> Result<Self> {
        let (_, rest) = url.split_once("://").context("a URL")?;
        let (login, place) = rest.split_once('@').context("a user")?;
        let (user, password) = login.split_once(':').context("a password")?;
        let (server, _) = place.split_once('/').context("a database")?;
        let (host, port) = server.split_once(':').context("a port")?;
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        // It refuses to run as root, and whom it becomes must be able to read its files.
        let tag = format!("{}-pgbouncer", stores::folder().tag());
        let folder = tempfile::Builder::new().prefix(&tag).tempdir_in("/tmp")?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(folder.path(), mode)?;
        let (settings, users) = (folder.path().join("bouncer.ini"), folder.path().join("users"));
        std::fs::write(&users, format!("\"{user}\" \"{password}\"\n"))?;
        std::fs::write(
            &settings,
            format!(
                "[databases]\n* = host={host} port={port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\n\
                 auth_type = plain\nauth_file = {}\npool_mode = transaction\ndefault_pool_size = 3\nunix_socket_dir =\n{lines}",
                address.port(),
                users.display(),
            ),
        )?;
        let mut command = Command::new("pgbouncer");
        if rustix::process::geteuid().is_root() {
            command.args(["-u", "nobody"]);
        }
        let process = command.arg(&settings).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let process =
            process.context("pgbouncer is missing: run `make setup`, or apt-get install pgbouncer")?;
        let bouncer = Self { process, address, _folder: folder };
        let listening = async || tokio::net::TcpStream::connect(address).await.ok().map(drop);
        eventually(LIMIT, listening).await.context("pgbouncer does not listen")?;
        Ok(bouncer)
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// One that refuses to be told how a session begins, and one that keeps it to itself.
#[tokio::test]
async fn without_the_setting_it_is_said_what_to_do() -> Result<()> {
    for more in ["", "ignore_startup_parameters = options\n"] {
        let postgres = private_postgres(PostgresOptions::default()).await?;
        let mut scene = Scene::on(&postgres, stores::redis().url()).await?;
        let direct = scene.stores.postgres_url.clone();
        let bouncer = Bouncer::start_with(&direct, more).await?;
        scene.stores.postgres_url = postgres.url_at(bouncer.address, &scene.stores.database);
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), scene.settings(&[], ""))?;
        let path = file.path().to_str().context("a path")?;
        let checked = hapax(&["check", "--online", "--config", path]).await?;
        let told = String::from_utf8_lossy(&checked.stderr);
        assert!(!checked.status.success() && told.contains(ADVICE), "{more}: {told}");
        let gateway = scene.gateway(&[]).await?;
        let answer = deliver(gateway.listen()?, "stripe", &event("evt_1", "")).await?;
        assert_eq!(answer.status, 503, "{more}");
        let says = |line: &Value| line["cause"].as_str().is_some_and(|cause| cause.contains(ADVICE));
        gateway.log(says).await?;
        if more.is_empty() {
            is_ready(&gateway, StatusCode::SERVICE_UNAVAILABLE).await?;
        }
    }
    Ok(())
}

const ADVICE: &str = "say postgres.transaction_pooler = true";

#[tokio::test]
async fn sessions_that_change_with_each_transaction_do_not_matter() -> Result<()> {
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let mut scene = Scene::on(&postgres, stores::redis().url()).await?;
    let direct = scene.stores.postgres_url.clone();
    let bouncer = Bouncer::start(&direct).await?;
    scene.stores.postgres_url = postgres.url_at(bouncer.address, &scene.stores.database);
    let mut settings = PATIENT.to_vec();
    settings.extend(["postgres.transaction_pooler = true", "fast_tier.prefix = \"pooler:\""]);
    let (one, two) = (scene.gateway(&settings).await?, scene.gateway(&settings).await?);
    scene.stores.postgres_url = direct;
    let mut ids = Vec::new();
    for round in 0..20 {
        let bodies = (0..16).map(|at| event(&format!("evt_{round}_{at}"), "")).collect::<Vec<_>>();
        ids.extend((0..16).map(|at| format!("evt_{round}_{at}")));
        let here = burst(one.listen()?, "stripe", bodies.clone());
        let there = burst(two.listen()?, if round % 2 == 0 { "stripe" } else { "other" }, bodies);
        let (here, there) = tokio::try_join!(here, there)?;
        for answer in here.iter().chain(&there) {
            assert!(answer.is_success() || answer.status == 409, "{answer:?}");
        }
    }
    let failed = event("evt_failed", "\"do\":\"raise\"");
    assert_eq!(deliver(one.listen()?, "stripe", &failed).await?.status, 503);
    let found = scene.found().await?;
    // Ten of the rounds went to two sources, which are two events each.
    assert_eq!(found.effects.values().sum::<i64>(), 20 * 16 + 10 * 16);
    assert_eq!(found.effects.len(), ids.len());
    Ok(())
}

#[tokio::test]
async fn deliveries_and_parked_effects_need_no_session_either() -> Result<()> {
    let receiver =
        Receiver::answering(|_, before| (if before % 3 == 0 { 500 } else { 200 }, Duration::ZERO)).await?;
    let postgres = private_postgres(PostgresOptions::default()).await?;
    let mut scene = Scene::on(&postgres, stores::redis().url()).await?;
    let direct = scene.stores.postgres_url.clone();
    let bouncer = Bouncer::start(&direct).await?;
    scene.stores.postgres_url = postgres.url_at(bouncer.address, &scene.stores.database);
    let target = receiver.target("orders");
    let mut settings: Vec<&str> = PATIENT.iter().copied().chain(target.iter().map(String::as_str)).collect();
    settings.extend([
        "postgres.transaction_pooler = true",
        "fast_tier.prefix = \"pooler:\"",
        "source.plain.targets = [\"orders\"]",
        "source.stripe.on_error = \"park\"",
        "source.stripe.retry_base = \"20ms\"",
        "work.poll = \"100ms\"",
    ]);
    let (one, two) = (scene.gateway(&settings).await?, scene.gateway(&settings).await?);
    scene.stores.postgres_url = direct;
    let bodies = |more: &str| (0..40).map(|at| event(&format!("evt_{at}"), more)).collect::<Vec<_>>();
    burst(one.listen()?, "plain", bodies("")).await?;
    burst(two.listen()?, "stripe", bodies("\"do\":\"raise\"")).await?;
    let database = scene.database().await?;
    let done = async |source: &str| {
        let query = "select from hapax.events where source = $1 and status = 'done' having count(*) = 40";
        let is_done = async || (!database.query(query, &[&source]).await.ok()?.is_empty()).then_some(());
        eventually(LIMIT, is_done).await.with_context(|| source.to_owned())
    };
    done("plain").await?;
    assert!(receiver.taken().values().all(|times| *times == 1), "{:?}", receiver.taken());
    let fix = "create or replace function fx.apply(e hapax.event) returns void language sql as \
               $$ insert into fx.effect (source, event_id) values (e.source, e.event_id) $$";
    database.batch_execute(fix).await?;
    done("stripe").await?;
    assert!(scene.found().await?.effects.values().all(|times| *times == 1));
    Ok(())
}
