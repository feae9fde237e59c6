//! `hapax verify`: why a request is accepted or refused, told by the gateway's own stages; and the same for files of
//! test vectors.

mod explain;
mod hints;
mod request;
mod token;
mod vectors;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;

use super::{Exit, load, runtime, say};
use crate::config::{Config, Source};
use crate::error::Code;
use crate::keyring::{Keyring, Trouble};
use crate::provider::FetchedKeys;
use crate::tasks::Tasks;

/// Which request, as of which source; or which vectors.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// File with a raw HTTP request, `-` for standard input: head, empty line, body.
    #[arg(required_unless_present = "vectors", conflicts_with = "vectors")]
    request: Option<PathBuf>,
    /// The source that the request is for.
    #[arg(long, value_name = "NAME", requires = "config", required_unless_present = "vectors")]
    source: Option<String>,
    /// The settings; with --vectors, their own schemes are known beside the presets.
    #[arg(long, env = "HAPAX_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The time to check against, in seconds since 1970; default: now.
    #[arg(long, value_name = "EPOCH", conflicts_with = "vectors")]
    now: Option<i64>,
    /// File with test vectors: one line of JSON for each, and a last one with the counts.
    #[arg(long, value_name = "FILE", conflicts_with = "source")]
    vectors: Option<PathBuf>,
    /// Vectors of schemes that are not known count as failed, too.
    #[arg(long, requires = "vectors")]
    strict: bool,
}

/// Checks and explains.
///
/// # Errors
/// 64 if something cannot be read, 1 if the request is refused or a vector does not agree.
pub fn run(options: &Options) -> Result<(), Exit> {
    match (&options.vectors, &options.source, &options.request) {
        (Some(path), ..) => vectors::run(path, options.config.as_deref(), options.strict),
        (None, Some(source), Some(path)) => explain_request(options, source, path),
        _ => Err(Exit::settings("give --vectors FILE, or --source NAME --config FILE REQUEST")),
    }
}

fn explain_request(options: &Options, name: &str, path: &Path) -> Result<(), Exit> {
    let config = options.config.as_deref().ok_or_else(|| Exit::settings("--source needs --config FILE"))?;
    let config = load(config)?;
    let Some(source) = config.sources.get(name) else {
        let known: Vec<&str> = config.sources.keys().map(String::as_str).collect();
        return Err(Exit::settings(format!("no source {name:?}; there are: {}", known.join(", "))));
    };
    let now = match options.now {
        Some(seconds) => Timestamp::from_second(seconds)
            .map_err(|error| Exit::settings(format!("--now {seconds}: {error}")))?,
        None => Timestamp::now(),
    };
    let text = read(path)?;
    let mut raw =
        request::parse(&text).map_err(|problem| Exit::settings(format!("{}: {problem}", path.display())))?;
    let source = with_keys(&config, source, &mut raw, now)?;
    let told = explain::explain(&source, &raw, now, &config.fast_tier);
    say(told.lines.join("\n"))?;
    if told.accepted { Ok(()) } else { Err(Exit::failed("refused")) }
}

/// The source with the keys that the request needs, fetched as the gateway would.
fn with_keys(
    config: &Config,
    source: &Arc<Source>,
    raw: &mut request::Raw<'_>,
    now: Timestamp,
) -> Result<Arc<Source>, Exit> {
    if !source.fetches_keys() {
        return Ok(Arc::clone(source));
    }
    let received = explain::received(source, raw);
    let found = runtime(1)?.block_on(async {
        let keyring = Keyring::start(config, Arc::default(), Tasks::default())?;
        anyhow::Ok(keyring.find(&received, now, Instant::now() + source.deadline).await)
    })?;
    let mut equipped = source.as_ref().clone();
    match found {
        Ok(FetchedKeys::None) => {}
        Ok(FetchedKeys::Certified(keys)) => equipped.certificates = keys.to_vec(),
        Ok(FetchedKeys::Set(key)) => equipped.keys = vec![key],
        Err(Trouble { code: Code::KeysUnavailable, cause }) => {
            return Err(Exit::unavailable(format!("the provider's keys could not be fetched: {cause}")));
        }
        Err(Trouble { cause, .. }) => raw.notes.extend(Some(cause).filter(|cause| !cause.is_empty())),
    }
    Ok(Arc::new(equipped))
}

/// A whole file, or standard input.
fn read(path: &Path) -> Result<Vec<u8>, Exit> {
    let mut bytes = Vec::new();
    let read = if path == Path::new("-") {
        std::io::stdin().read_to_end(&mut bytes).map(drop)
    } else {
        std::fs::read(path).map(|read| bytes = read)
    };
    read.map_err(|error| Exit::settings(format!("{}: {error}", path.display())))?;
    Ok(bytes)
}
