//! From a path or a text to a [`Config`] or to all that is wrong with it.
//!
//! Invariant: whatever is wrong, there is at least one problem that says so, with file, line and key.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use super::Config;
use super::files::{Files, Unread};
use super::secret::Secrets;
use super::source::{self, Providers};
use super::{fixed, relations};
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
    /// The files that they come from.
    pub files: Files,
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
    let text = read_text(path, &mut Files::default());
    let text = text.map_err(|(line, message)| vec![file_error(&name, line, message)])?;
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
        load(path, None).0
    }

    /// As [`Config::load`], for a gateway that runs with these settings already: what cannot change without a restart must be
    /// the same. The files that were read are told in any case.
    pub fn load_again(&self, path: &Path) -> (Result<Loaded, Vec<Problem>>, Files) {
        load(path, Some(self))
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
        Parsing::new(env, &Providers::embedded()).parse(file_name, text).0
    }
}

fn load(path: &Path, running: Option<&Config>) -> (Result<Loaded, Vec<Problem>>, Files) {
    let name = path.display().to_string();
    let (env, providers) = (|key: &str| std::env::var(key).ok(), Providers::embedded());
    let parsing = Parsing::new(&env, &providers);
    let parsing = match running {
        Some(running) => parsing.beside(running),
        None => parsing,
    };
    let text = read_text(path, &mut parsing.files.borrow_mut());
    let result = match text {
        Ok(text) => parsing.parse(&name, &text).0,
        Err((line, message)) => Err(vec![file_error(&name, line, message)]),
    };
    (result, parsing.files.into_inner())
}

/// What settings are read with, beside their text.
pub(super) struct Parsing<'a> {
    env: Environment<'a>,
    providers: &'a Providers<'a>,
    /// The settings that are in use already.
    running: Option<&'a Config>,
    files: RefCell<Files>,
}

impl<'a> Parsing<'a> {
    pub(super) fn new(env: Environment<'a>, providers: &'a Providers<'a>) -> Self {
        Self { env, providers, running: None, files: RefCell::default() }
    }

    /// For a gateway that runs with these settings already.
    pub(super) fn beside(self, running: &'a Config) -> Self {
        Self { running: Some(running), ..self }
    }

    /// As [`Config::parse`]; the file is returned for tests.
    pub(super) fn parse(
        &self,
        file_name: &str,
        text: &str,
    ) -> (Result<Loaded, Vec<Problem>>, settings::File) {
        let (file, root) = settings::File::parse(file_name, text);
        let base = Path::new(file_name).parent().unwrap_or(Path::new(""));
        let config = self.read_root(root, base);
        let problems = file.take_problems();
        let failed = problems.iter().any(|problem| problem.severity == Severity::Error);
        let result = match config {
            Some(config) if !failed => {
                Ok(Loaded { config, warnings: problems, files: self.files.borrow().clone() })
            }
            _ if failed => Err(problems),
            _ => Err(vec![file_error(file_name, 1, "cannot be used, and no reason was found".to_owned())]),
        };
        (result, file)
    }

    /// Reads all tables, then compares them, then reports the keys that nobody asked for. `None` only after an error
    /// was reported.
    fn read_root(&self, mut root: Table, base: &Path) -> Option<Config> {
        let secrets = Secrets { base, env: self.env, files: &self.files };
        let mut draft = super::read::Draft::read(&mut root, &secrets);
        let defaults = draft.source_defaults();
        let targets = super::target::read_all(&mut root, &secrets);
        let known =
            |reading: &super::target::Reading| (reading.target.name.to_string(), reading.target.attempts_max);
        let known = targets.iter().map(known).collect();
        let sources = super::source::read_all(&mut root, &secrets, defaults, self.providers, &known);
        draft.fit_connections(&sources, self.running);
        if root.is_whole() {
            relations::check(&draft, &targets, &sources);
            self.running.into_iter().for_each(|running| fixed::check(&draft, running));
        }
        if sources.is_empty() && root.is_whole() && !root.failed("source") {
            root.warning("source", "there is no [source.NAME]: every request will be answered 404");
        }
        root.finish();
        let mut config = draft.finish();
        for target in targets {
            target.table.finish();
            config.targets.insert(target.target.name.to_string(), Arc::new(target.target));
        }
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
}

/// The file's text, or the line and what is wrong.
fn read_text(path: &Path, files: &mut Files) -> Result<String, (usize, String)> {
    let bytes = files.read(path, FILE_MAX).map_err(|error| match error {
        Unread::Cannot(_) => (1, error.to_string()),
        Unread::TooLarge(_) => (1, format!("{error} for a file of settings")),
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count();
        (line, "is not UTF-8 text from this line on".to_owned())
    })
}

fn file_error(name: &str, line: usize, message: String) -> Problem {
    Problem { file: name.into(), line, key: "(file)".to_owned(), message, severity: Severity::Error }
}
