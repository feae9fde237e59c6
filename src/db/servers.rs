//! The servers that a DSN names, and how each is connected to.
//!
//! Invariant: with [`PostgresTls::Always`] nothing but the question for TLS leaves in plain text.

use std::future::poll_fn;
use std::pin::Pin;
use std::str::FromStr as _;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::config::{Host, SslMode, SslNegotiation, TargetSessionAttrs};
use tokio_postgres::error::SqlState;
use tokio_postgres::{AsyncMessage, Client, Connection, Error, NoTls, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::describe;
use crate::config::{self, PostgresTls};
use crate::tls;

/// What a server is told that is spoken to in TLS from the first byte on.
const PROTOCOL: &[u8] = b"postgresql";

/// The servers that a DSN names. The first that takes writes is connected to; each has `connect_timeout` to itself, so
/// that one that is dead or stopped does not keep the others from being tried.
#[derive(Clone)]
pub struct Servers {
    each: Vec<tokio_postgres::Config>,
    tls: Option<MakeRustlsConnect>,
    timeout: Duration,
}

impl std::fmt::Debug for Servers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Servers")
            .field("each", &self.each)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl Servers {
    /// Reads the DSN.
    ///
    /// # Errors
    /// What is wrong with it, without its password.
    pub fn parse(settings: &config::Postgres) -> anyhow::Result<Self> {
        let parsed = tokio_postgres::Config::from_str(&settings.url.0).map_err(|error| {
            anyhow::anyhow!("{}: give postgres://user:password@host/database", describe(&error))
        })?;
        // Its words for TLS were taken out; one that is still there was not understood, and would count for nothing.
        anyhow::ensure!(
            parsed.get_ssl_mode() == SslMode::Prefer,
            "its sslmode cannot be read: give it once, as a parameter"
        );
        let template = template(&parsed, mode(&settings.tls))?;
        let ports = parsed.get_ports();
        let port_of = |at: usize| ports.get(at).or(ports.first()).copied().unwrap_or(5432);
        let mut each: Vec<_> = Vec::new();
        for (at, host) in parsed.get_hosts().iter().enumerate() {
            let mut server = template.clone();
            match host {
                Host::Tcp(name) => server.host(name),
                // It never leaves the machine, and the server offers no TLS on it; libpq does the same.
                Host::Unix(path) => server.host_path(path).ssl_mode(SslMode::Disable),
            };
            if let Some(address) = parsed.get_hostaddrs().get(at) {
                server.hostaddr(*address);
            }
            each.push(server.port(port_of(at)).connect_timeout(settings.connect_timeout).clone());
        }
        anyhow::ensure!(!each.is_empty(), "it names no host: give postgres://user:password@host/database");
        let tls = connector(&settings.tls, parsed.get_ssl_negotiation());
        Ok(Self { each, tls, timeout: settings.connect_timeout })
    }

    /// Sessions begin with these, whatever the role's or the database's own are, and `reset all` comes back to them.
    pub(super) fn beginning_with(mut self, options: &str) -> Self {
        for server in &mut self.each {
            let own = server.get_options().unwrap_or_default();
            server.options(format!("{own} {options}"));
        }
        self
    }

    /// How long it takes at most to try them all.
    pub(super) fn limit(&self) -> Duration {
        self.timeout * u32::try_from(self.each.len()).unwrap_or(u32::MAX)
    }

    pub(super) async fn connect(&self) -> Result<(Client, JoinHandle<()>), Error> {
        self.connect_hearing(None).await
    }

    /// What is said on channels that the client listens on goes to `heard`.
    pub(super) async fn connect_hearing(
        &self,
        heard: Option<mpsc::UnboundedSender<String>>,
    ) -> Result<(Client, JoinHandle<()>), Error> {
        let mut last = Error::__private_api_timeout();
        for server in &self.each {
            // The driver's own time-out ends with the TCP connection; a stopped server accepts that and says nothing.
            match tokio::time::timeout(self.timeout, self.connect_to(server, heard.clone())).await {
                Ok(Ok(connected)) => return Ok(connected),
                Ok(Err(error)) => last = error,
                Err(_elapsed) => last = Error::__private_api_timeout(),
            }
        }
        Err(last)
    }

    async fn connect_to(
        &self,
        server: &tokio_postgres::Config,
        heard: Option<mpsc::UnboundedSender<String>>,
    ) -> Result<(Client, JoinHandle<()>), Error> {
        let Some(tls) = &self.tls else { return in_plain(server, heard).await };
        match server.connect(tls.clone()).await {
            Ok((client, connection)) => Ok((client, tokio::spawn(drive(connection, heard)))),
            Err(error) if server.get_ssl_mode() == SslMode::Prefer && is_about_tls(&error) => {
                in_plain(server.clone().ssl_mode(SslMode::Disable), heard).await
            }
            Err(error) => Err(error),
        }
    }
}

async fn in_plain(
    server: &tokio_postgres::Config,
    heard: Option<mpsc::UnboundedSender<String>>,
) -> Result<(Client, JoinHandle<()>), Error> {
    let (client, connection) = server.connect(NoTls).await?;
    Ok((client, tokio::spawn(drive(connection, heard))))
}

/// Whether the same may succeed without TLS: the handshake failed, or the server does not let us in this way.
fn is_about_tls(error: &Error) -> bool {
    tls::cause(error).is_some() || error.code() == Some(&SqlState::INVALID_AUTHORIZATION_SPECIFICATION)
}

fn mode(tls: &PostgresTls) -> SslMode {
    match tls {
        PostgresTls::Never => SslMode::Disable,
        PostgresTls::IfOffered(_) => SslMode::Prefer,
        PostgresTls::Always(_) => SslMode::Require,
    }
}

fn connector(tls: &PostgresTls, negotiation: SslNegotiation) -> Option<MakeRustlsConnect> {
    let mut client = match tls {
        PostgresTls::Never => return None,
        PostgresTls::IfOffered(client) | PostgresTls::Always(client) => client.clone(),
    };
    if negotiation == SslNegotiation::Direct {
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
    }
    Some(MakeRustlsConnect::new(client))
}

/// Carries a connection's messages to its end; the client's own calls report what is wrong.
///
/// A wait for a synchronous standby that somebody cancels ends in a COMMIT that looks like any other, after a warning. The
/// connection is closed at the warning, so that such a commit is as unknown as one whose answer was lost.
async fn drive<S: AsyncRead + AsyncWrite + Unpin>(
    mut connection: Connection<Socket, S>,
    heard: Option<mpsc::UnboundedSender<String>>,
) {
    while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
        match message {
            // Not by the SQLSTATE, which all plain warnings share, nor by the text, which depends on the language.
            AsyncMessage::Notice(notice) if notice.routine() == Some("SyncRepWaitForLSN") => return,
            AsyncMessage::Notification(said) => {
                if let Some(heard) = &heard {
                    // Nobody hears it if nobody listens any more.
                    drop(heard.send(said.payload().to_owned()));
                }
            }
            _ => {}
        }
    }
}

/// All that a DSN says, but for the servers; read-write ones only, and a dead peer is noticed.
fn template(parsed: &tokio_postgres::Config, mode: SslMode) -> anyhow::Result<tokio_postgres::Config> {
    let negotiation = parsed.get_ssl_negotiation();
    anyhow::ensure!(
        negotiation == SslNegotiation::Postgres || mode == SslMode::Require,
        "sslnegotiation=direct needs TLS: say sslmode=verify-full"
    );
    let mut server = tokio_postgres::Config::new();
    if let Some(user) = parsed.get_user() {
        server.user(user);
    }
    if let Some(password) = parsed.get_password() {
        server.password(password);
    }
    if let Some(database) = parsed.get_dbname() {
        server.dbname(database);
    }
    if let Some(options) = parsed.get_options() {
        server.options(options);
    }
    server
        .application_name(parsed.get_application_name().unwrap_or("hapax"))
        .ssl_mode(mode)
        .ssl_negotiation(negotiation)
        .channel_binding(parsed.get_channel_binding())
        .target_session_attrs(TargetSessionAttrs::ReadWrite)
        .keepalives_idle(Duration::from_secs(30))
        .keepalives_interval(Duration::from_secs(5))
        .keepalives_retries(3)
        .tcp_user_timeout(Duration::from_secs(45));
    Ok(server)
}

/// For the pool.
impl deadpool_postgres::Connect for Servers {
    fn connect(
        &self,
        _: &tokio_postgres::Config,
    ) -> Pin<Box<dyn Future<Output = Result<(Client, JoinHandle<()>), Error>> + Send + '_>> {
        Box::pin(Servers::connect(self))
    }
}
