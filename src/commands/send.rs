//! `hapax send`: signs an event as its provider would, and sends it.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Method};
use serde::Serialize;

use super::client::{Answer, Connection, Target, raw_request, reachable};
use super::{Exit, load, no_provider, runtime, say};
use crate::config::{Config, Source};
use crate::provider::{Key, Scheme};
use crate::sign::{Draft, PRIVATE_KEY, Signed, fresh_id, sign_for};

/// What to send, as whom, where to, how often.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Take provider, secret and address of this source from the settings.
    #[arg(long, requires = "config", conflicts_with_all = ["provider"])]
    source: Option<String>,
    /// The settings.
    #[arg(long, env = "HAPAX_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// A preset's name, instead of a source of the settings.
    #[arg(long, required_unless_present = "source")]
    provider: Option<String>,
    /// Environment variable with the secret.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["source", "secret_file"])]
    secret_env: Option<String>,
    /// File with the secret.
    #[arg(long, value_name = "FILE", conflicts_with = "source")]
    secret_file: Option<PathBuf>,
    /// Where to send; default: the source's path on the settings' listen address.
    #[arg(long)]
    url: Option<String>,
    /// File with the body, `-` for standard input; default: a sample event with a fresh id.
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// The event's id, where the provider has it in a header or in the sample; with --body, in a header only.
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: Option<String>,
    /// One more header, e.g. the one that has the event's type; may stand there several times.
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(HeaderName, HeaderValue)>,
    /// How often to send the same event.
    #[arg(long, short = 'n', default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// How many of them at once, each on a connection of its own.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    parallel: u32,
    /// Print the request instead of sending it.
    #[arg(long)]
    dry_run: bool,
}

/// Signs and sends.
///
/// # Errors
/// 64 if it is not clear what to send, 69 if it cannot be sent, 1 if an answer is not 2xx.
pub fn run(options: &Options) -> Result<(), Exit> {
    let sender = Sender::from_options(options)?;
    if options.dry_run {
        return print_request(&sender);
    }
    let report = runtime(1)?.block_on(send_all(&Arc::new(sender), options.count, options.parallel))?;
    say(serde_json::to_string(&report).map_err(Exit::software)?)?;
    if report.status.keys().all(|status| (200..300).contains(status)) {
        return Ok(());
    }
    Err(Exit::failed("not every delivery was answered 2xx"))
}

/// One event, and how to sign it.
#[derive(Debug)]
pub struct Sender {
    /// The provider's scheme.
    pub scheme: Arc<Scheme>,
    /// Signs.
    pub key: Key,
    /// For schemes that sign the URL.
    pub public_url: Option<String>,
    /// What claims of a token have to say.
    pub claims: BTreeMap<String, String>,
    /// Where to.
    pub target: Target,
    /// The raw body.
    pub body: Bytes,
    /// For schemes with the id in a header.
    pub id: String,
    /// Headers that signing does not make.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// What came of it.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Deliveries sent.
    pub sent: u32,
    /// Answers by status.
    pub status: BTreeMap<u16, u32>,
    /// Answers by `Hapax-Outcome`.
    pub outcomes: BTreeMap<String, u32>,
    /// The event's id.
    pub id: Option<String>,
}

impl Sender {
    fn from_options(options: &Options) -> Result<Self, Exit> {
        let Signer { scheme, key, public_url, claims, url } = match &options.source {
            Some(name) => of_source(options, name)?,
            None => of_provider(options)?,
        };
        let url = options.url.clone().or(url);
        let url = url.ok_or_else(|| Exit::settings("say where to send: --url http://host:port/in/SOURCE"))?;
        let target = Target::parse(&url).map_err(Exit::settings)?;
        let id = options.id.clone().unwrap_or_else(fresh_id);
        let body = match &options.body {
            Some(path) => read_body(path)?,
            None => sample(&scheme, &id, options.id.is_some())?,
        };
        let headers = options.headers.clone();
        Ok(Self { scheme, key, public_url, claims, target, body, id, headers })
    }

    /// Signs the event as of now; all headers are in what it gives.
    ///
    /// # Errors
    /// What is missing.
    pub fn sign(&self) -> Result<Signed, Exit> {
        let draft = Draft {
            method: &Method::POST,
            public_url: self.public_url.as_deref(),
            path: self.target.path(),
            body: &self.body,
            id: Some(&self.id),
            now: jiff::Timestamp::now(),
        };
        let signed = sign_for(&self.scheme, &self.key, &draft, &self.claims).map_err(Exit::settings)?;
        let mut headers = signed.headers;
        if !self.headers.iter().any(|(name, _)| *name == CONTENT_TYPE) {
            headers.push((CONTENT_TYPE, HeaderValue::from_static(content_type(&self.body))));
        }
        headers.extend(self.headers.iter().cloned());
        Ok(Signed { headers, ..signed })
    }
}

/// `NAME: VALUE`
fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let wrong = || "give NAME: VALUE, e.g. \"X-GitHub-Event: issues\"".to_owned();
    let (name, value) = text.split_once(':').ok_or_else(wrong)?;
    Ok((name.parse().ok().ok_or_else(wrong)?, value.trim().parse().ok().ok_or_else(wrong)?))
}

/// What a provider sends is JSON or a form.
pub(super) fn content_type(body: &[u8]) -> &'static str {
    match body.trim_ascii_start().first() {
        Some(b'{' | b'[') => "application/json",
        _ => "application/x-www-form-urlencoded",
    }
}

/// As whom, and where to if nothing else is said.
struct Signer {
    scheme: Arc<Scheme>,
    key: Key,
    public_url: Option<String>,
    claims: BTreeMap<String, String>,
    url: Option<String>,
}

fn of_source(options: &Options, name: &str) -> Result<Signer, Exit> {
    let Some(path) = &options.config else { return Err(Exit::settings("--source needs --config FILE")) };
    let config = load(path)?;
    let (source, key) = source_and_key(&config, name)?;
    let url = address(&config, name);
    Ok(Signer {
        scheme: Arc::clone(&source.scheme),
        key: key.clone(),
        public_url: source.public_url.clone(),
        claims: source.claims.clone(),
        url: Some(url),
    })
}

/// A source of the settings, and what signs for it.
///
/// # Errors
/// There is none.
pub(super) fn source_and_key<'c>(config: &'c Config, name: &str) -> Result<(&'c Arc<Source>, &'c Key), Exit> {
    let Some(source) = config.sources.get(name) else {
        let known: Vec<&str> = config.sources.keys().map(String::as_str).collect();
        return Err(Exit::settings(format!("no source {name:?}; there are: {}", known.join(", "))));
    };
    let key = source.keys.first().ok_or_else(|| no_key(name, &source.scheme))?;
    Ok((source, key))
}

/// Where the gateway of these settings takes a source's requests.
pub(super) fn address(config: &Config, name: &str) -> String {
    format!("http://{}/in/{name}", reachable(config.server.listen))
}

fn no_key(name: &str, scheme: &Scheme) -> Exit {
    let why = if scheme.hands_over() {
        "what its provider handed over is in the database only: name it under the source's secrets"
    } else {
        PRIVATE_KEY
    };
    Exit::settings(format!("source {name:?} has no secret in the settings: {why}"))
}

fn of_provider(options: &Options) -> Result<Signer, Exit> {
    let name = options.provider.as_deref().unwrap_or_default();
    let scheme = Scheme::preset(name).ok_or_else(|| no_provider(name))?;
    if !scheme.takes_secrets() {
        return Err(Exit::settings(PRIVATE_KEY));
    }
    let secret = match (&options.secret_env, &options.secret_file) {
        (Some(name), _) => std::env::var(name).or(Err(Exit::settings(format!(
            "environment variable {name:?} is not set (or is not UTF-8 text)"
        ))))?,
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path)
                .map_err(|error| Exit::settings(format!("{}: {error}", path.display())))?;
            text.strip_suffix('\n').map_or(text.clone(), str::to_owned)
        }
        (None, None) => {
            return Err(Exit::settings("say where the secret is: --secret-env NAME or --secret-file FILE"));
        }
    };
    let key = scheme.key(&secret).map_err(|error| Exit::settings(format!("the secret: {error}")))?;
    let public_url = options.url.as_deref().and_then(base_of).map(str::to_owned);
    Ok(Signer { scheme, key, public_url, claims: BTreeMap::new(), url: None })
}

/// `http://host:port` of a URL.
fn base_of(url: &str) -> Option<&str> {
    let host = url.find("://")? + 3;
    let end = url.get(host..)?.find('/').map_or(url.len(), |slash| host + slash);
    url.get(..end)
}

fn read_body(path: &Path) -> Result<Bytes, Exit> {
    let mut body = Vec::new();
    let read = if path == Path::new("-") {
        std::io::stdin().read_to_end(&mut body).map(drop)
    } else {
        std::fs::read(path).map(|read| body = read)
    };
    read.map_err(|error| Exit::settings(format!("the body {}: {error}", path.display())))?;
    Ok(body.into())
}

fn sample(scheme: &Scheme, id: &str, whole: bool) -> Result<Bytes, Exit> {
    let now = jiff::Timestamp::now();
    let sample = if whole { scheme.sample_of(id, now) } else { scheme.sample(id, now) };
    let sample =
        sample.ok_or_else(|| Exit::settings(format!("{} has no sample: give --body FILE", scheme.name)))?;
    Ok(sample.into())
}

fn print_request(sender: &Sender) -> Result<(), Exit> {
    let signed = sender.sign()?;
    let request = raw_request(&sender.target, &signed.headers, &sender.body);
    let mut out = std::io::stdout();
    out.write_all(&request).and_then(|()| out.flush()).map_err(Exit::software)
}

/// Sends the event `count` times, `parallel` at once. Each answer is printed as it comes.
///
/// # Errors
/// Those of signing, connecting and sending.
pub async fn send_all(sender: &Arc<Sender>, count: u32, parallel: u32) -> Result<Report, Exit> {
    let mut connections = Vec::new();
    for _ in 0..parallel.min(count) {
        connections
            .push(Connection::open(&sender.target).await.map_err(|error| cannot_send(sender, &error))?);
    }
    let lanes = u32::try_from(connections.len()).unwrap_or(u32::MAX);
    let work = connections.into_iter().zip(0u32..).map(|(connection, lane)| {
        let share = count / lanes + u32::from(lane < count % lanes);
        tokio::spawn(send_some(Arc::clone(sender), connection, share))
    });
    let mut report = Report { id: sender.sign()?.id, ..Report::default() };
    for lane in work.collect::<Vec<_>>() {
        for answer in lane.await.map_err(Exit::software)?? {
            report.sent += 1;
            *report.status.entry(answer.status).or_default() += 1;
            let outcome = answer.outcome.unwrap_or_else(|| "none".to_owned());
            *report.outcomes.entry(outcome).or_default() += 1;
        }
    }
    Ok(report)
}

async fn send_some(sender: Arc<Sender>, mut connection: Connection, share: u32) -> Result<Vec<Answer>, Exit> {
    let mut answers = Vec::new();
    for _ in 0..share {
        let headers = sender.sign()?.headers;
        let answer = connection.post(&headers, sender.body.clone());
        let answer = tokio::time::timeout(Duration::from_secs(60), answer).await;
        let answer = answer.map_err(|_elapsed| Exit::unavailable("no answer within 60 seconds"))?;
        let answer = answer.map_err(|error| cannot_send(&sender, &error))?;
        let outcome = answer.outcome.as_deref().unwrap_or("-");
        say(format!("{} {outcome:<10} {:.1} ms", answer.status, answer.took.as_secs_f64() * 1e3))?;
        answers.push(answer);
    }
    Ok(answers)
}

fn cannot_send(sender: &Sender, error: &anyhow::Error) -> Exit {
    Exit::unavailable(format!("cannot send to {}: {error:#}", sender.target.authority()))
}
