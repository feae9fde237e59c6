//! From a path or a text to a [`Config`] or to all that is wrong with it.
//!
//! Invariant: whatever is wrong, there is at least one problem that says so, with file, line and key.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use super::Config;
use super::relations;
use super::source::{self, Providers};
use crate::provider::Scheme;
use crate::settings::{self, Problem, Severity, Table};

/// Largest file of settings that is read, in bytes.
const FILE_MAX: u64 = 4 << 20;

/// The program's environment, as settings see it.
pub(super) type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Settings that can be used, and the warnings about them.
#[derive(Debug)]
pub struct Loaded {
    /// The settings.
    pub config: Config,
    /// Warnings.
    pub warnings: Vec<Problem>,
}

/// What `hapax check` says about a file.
#[derive(Debug)]
pub struct Checked {
    /// One line for each problem.
    pub report: String,
    /// Whether the file can be used.
    pub usable: bool,
}

/// Loads the file and says all that is wrong with it.
#[must_use]
pub fn check(path: &Path) -> Checked {
    match Config::load(path) {
        Ok(loaded) => Checked { report: report(&loaded.warnings), usable: true },
        Err(problems) => Checked { report: report(&problems), usable: false },
    }
}

/// One line for each problem: `file:line: error: key: message`.
#[must_use]
pub fn report(problems: &[Problem]) -> String {
    let mut lines = String::new();
    for problem in problems {
        // Writing to a string cannot fail.
        writeln!(lines, "{problem}").ok();
    }
    lines
}

/// Reads only the `[scheme.NAME]` tables of a file.
///
/// # Errors
/// Every problem found in them.
pub fn own_schemes(path: &Path) -> Result<BTreeMap<String, Arc<Scheme>>, Vec<Problem>> {
    let name = path.display().to_string();
    let text = read_text(path).map_err(|(line, message)| vec![file_error(&name, line, message)])?;
    let (file, mut root) = settings::File::parse(&name, &text);
    let schemes = source::own_schemes(&mut root);
    let problems = file.take_problems();
    if problems.iter().any(|problem| problem.severity == Severity::Error) {
        return Err(problems);
    }
    Ok(schemes.into_iter().filter_map(|(name, scheme)| Some((name, scheme?))).collect())
}

impl Config {
    /// Reads and checks a file and the environment and files that it names.
    ///
    /// # Errors
    /// Every problem found (errors and warnings), at least one of them an error.
    pub fn load(path: &Path) -> Result<Loaded, Vec<Problem>> {
        let name = path.display().to_string();
        let text = read_text(path).map_err(|(line, message)| vec![file_error(&name, line, message)])?;
        Self::parse(&name, &text, &|key| std::env::var(key).ok())
    }

    /// Reads and checks settings; files that they name are sought beside `file_name`.
    ///
    /// # Errors
    /// Every problem found (errors and warnings), at least one of them an error.
    pub fn parse(
        file_name: &str,
        text: &str,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Loaded, Vec<Problem>> {
        parse_with(file_name, text, env, &Providers::embedded()).0
    }
}

/// As [`Config::parse`], with the given provider presets; the file is returned for tests.
pub(super) fn parse_with(
    file_name: &str,
    text: &str,
    env: Environment<'_>,
    providers: &Providers<'_>,
) -> (Result<Loaded, Vec<Problem>>, settings::File) {
    let (file, root) = settings::File::parse(file_name, text);
    let base = Path::new(file_name).parent().unwrap_or(Path::new(""));
    let config = read_root(root, base, env, providers);
    let problems = file.take_problems();
    let failed = problems.iter().any(|problem| problem.severity == Severity::Error);
    let result = match config {
        Some(config) if !failed => Ok(Loaded { config, warnings: problems }),
        _ if failed => Err(problems),
        _ => Err(vec![file_error(file_name, 1, "cannot be used, and no reason was found".to_owned())]),
    };
    (result, file)
}

/// Reads all tables, then compares them, then reports the keys that nobody asked for. `None` only after an error
/// was reported.
fn read_root(
    mut root: Table,
    base: &Path,
    env: Environment<'_>,
    providers: &Providers<'_>,
) -> Option<Config> {
    let secrets = super::secret::Secrets { base, env };
    let mut draft = super::read::Draft::read(&mut root, &secrets);
    let defaults = draft.source_defaults();
    let sources = super::source::read_all(&mut root, &secrets, defaults, providers);
    draft.fit_connections(&sources);
    if root.is_whole() {
        relations::check(&draft, &sources);
    }
    if sources.is_empty() && root.is_whole() && !root.failed("source") {
        root.warning("source", "there is no [source.NAME]: every request will be answered 404");
    }
    root.finish();
    let mut config = draft.finish();
    let mut complete = true;
    for source in sources {
        match source.finish() {
            Some(source) => {
                config.sources.insert(source.name.to_string(), Arc::new(source));
            }
            None => complete = false,
        }
    }
    complete.then_some(config)
}

/// The file's text, or the line and what is wrong.
fn read_text(path: &Path) -> Result<String, (usize, String)> {
    let cannot = |error: io::Error| (1, format!("cannot be read: {error}"));
    let mut bytes = Vec::new();
    let mut file = File::open(path).map_err(cannot)?;
    file.by_ref().take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > FILE_MAX {
        return Err((
            1,
            format!("is larger than {FILE_MAX} bytes, which is the limit for a file of settings"),
        ));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count();
        (line, "is not UTF-8 text from this line on".to_owned())
    })
}

fn file_error(name: &str, line: usize, message: String) -> Problem {
    Problem { file: name.into(), line, key: "(file)".to_owned(), message, severity: Severity::Error }
}
