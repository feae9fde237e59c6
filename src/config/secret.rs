//! Fetching secrets from where the settings say they are.
//!
//! Invariant: an empty secret is never returned (anybody can sign with an empty key), and no message holds any part
//! of one.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use super::load::Environment;
use crate::settings::{Place, SecretSource, Table};

/// Largest secret that is read from a file, in bytes.
const SECRET_MAX: u64 = 64 << 10;

/// Largest file of certificates, in bytes. Some providers give a file with all of their authorities.
const PEM_MAX: u64 = 4 << 20;

/// Where secrets are fetched from.
pub(super) struct Secrets<'a> {
    /// Relative paths start here.
    pub(super) base: &'a Path,
    /// The environment.
    pub(super) env: Environment<'a>,
}

impl Secrets<'_> {
    /// The text of one secret; if it cannot be had, that is reported as an error of `key` at `place`.
    pub(super) fn fetch(
        &self,
        table: &Table,
        key: &str,
        place: &Place,
        source: &SecretSource,
    ) -> Option<String> {
        let origin = origin(source);
        let text = match self.text(source) {
            Ok(text) => text,
            Err(problem) => {
                table.error_at(key, place, format!("{origin} {problem}"));
                return None;
            }
        };
        if text.trim().is_empty() {
            let kind = if text.is_empty() { "is empty" } else { "holds nothing but whitespace" };
            table.error_at(key, place, format!("{origin} {kind}: give the secret that the sender uses"));
            return None;
        }
        if text.trim().len() != text.len() {
            let message =
                format!("{origin} starts or ends with whitespace, which was hardly meant: remove it");
            table.error_at(key, place, message);
            return None;
        }
        Some(text)
    }

    /// The text of a file with certificates or a key.
    pub(super) fn pem(&self, path: &str) -> Result<String, String> {
        read(&self.base.join(path), PEM_MAX).map_err(|problem| format!("file {path:?} {problem}"))
    }

    fn text(&self, source: &SecretSource) -> Result<String, String> {
        match source {
            SecretSource::Literal(text) => Ok(text.clone()),
            SecretSource::Env(name) => match (self.env)(name) {
                Some(text) => Ok(without_newline(text)),
                None => Err("is not set (or is not UTF-8 text)".to_owned()),
            },
            SecretSource::File(path) => read(&self.base.join(path), SECRET_MAX).map(without_newline),
        }
    }
}

fn read(path: &Path, max: u64) -> Result<String, String> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| format!("cannot be read: {error}"))?;
    file.take(max + 1).read_to_end(&mut bytes).map_err(|error| format!("cannot be read: {error}"))?;
    if bytes.len() as u64 > max {
        return Err(format!("is larger than {max} bytes, which is the limit for such a file"));
    }
    // The error of the conversion would hold the bytes.
    String::from_utf8(bytes).ok().ok_or_else(|| "is not UTF-8 text".to_owned())
}

/// Editors and `echo` end a file with a newline that nobody means; more than one is meant.
fn without_newline(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

/// Names the origin of a secret, for messages.
pub(super) fn origin(source: &SecretSource) -> String {
    match source {
        SecretSource::Env(name) => format!("environment variable {name:?}"),
        SecretSource::File(path) => format!("file {path:?}"),
        SecretSource::Literal(_) => "the literal secret".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::File as Settings;

    const CANARY: &str = "canary-7f3a";

    fn fetch(toml: &str, env: Environment<'_>, base: &Path) -> (Vec<String>, String) {
        let (file, mut table) = Settings::parse("t.toml", toml);
        let secrets = Secrets { base, env };
        let found = table.secrets("s").unwrap_or_default();
        let text =
            |one: &crate::settings::Located<SecretSource>| secrets.fetch(&table, "s", &one.place, &one.value);
        let texts = found.iter().filter_map(text).collect();
        (texts, super::super::report(&file.take_problems()))
    }

    #[test]
    fn one_newline_is_cut_from_env_and_file() {
        let folder = tempfile("newline");
        for (text, expected) in [("abc", "abc"), ("abc\n", "abc"), ("abc\r\n", "abc"), ("a c\n", "a c")] {
            std::fs::write(folder.join("secret"), text).unwrap();
            let (texts, _) = fetch("s = { file = \"secret\" }", &|_| None, &folder);
            assert_eq!(texts, [expected], "file {text:?}");
            let (texts, _) = fetch("s = { env = \"S\" }", &|_| Some(text.to_owned()), &folder);
            assert_eq!(texts, [expected], "env {text:?}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_is_no_secret_is_an_error_that_names_its_origin() {
        let folder = tempfile("refused");
        std::fs::write(folder.join("empty"), "\n").unwrap();
        std::fs::write(folder.join("blank"), " \t\n").unwrap();
        std::fs::write(folder.join("binary"), [0xff, 0xfe]).unwrap();
        std::fs::write(folder.join("large"), "x".repeat(70_000)).unwrap();
        let env = |name: &str| match name {
            "EMPTY" => Some(String::new()),
            "BLANK" => Some("  ".to_owned()),
            "TWO" => Some("abc\n\n".to_owned()),
            _ => None,
        };
        for (toml, expected) in [
            ("s = \"abc\\n\"", "the literal secret starts or ends with whitespace"),
            ("s = { env = \"TWO\" }", "environment variable \"TWO\" starts or ends with whitespace"),
            ("s = \"\"", "the literal secret is empty"),
            ("s = \" \"", "the literal secret holds nothing but whitespace"),
            ("s = { env = \"EMPTY\" }", "environment variable \"EMPTY\" is empty"),
            ("s = { env = \"BLANK\" }", "environment variable \"BLANK\" holds nothing but whitespace"),
            ("s = { env = \"UNSET\" }", "environment variable \"UNSET\" is not set"),
            ("s = { file = \"empty\" }", "file \"empty\" is empty"),
            ("s = { file = \"blank\" }", "file \"blank\" holds nothing but whitespace"),
            ("s = { file = \"binary\" }", "file \"binary\" is not UTF-8 text"),
            ("s = { file = \"large\" }", "file \"large\" is larger than 65536 bytes"),
            ("s = { file = \"absent\" }", "file \"absent\" cannot be read"),
            ("s = { file = \".\" }", "file \".\" cannot be read"),
        ] {
            let (texts, report) = fetch(toml, &env, &folder);
            assert!(texts.is_empty(), "{toml}");
            assert!(report.contains(&format!("t.toml:1: error: s: {expected}")), "{toml}: {report}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn one_bad_secret_of_a_list_is_reported_at_its_own_line() {
        let toml = format!("s = [\n  \"{CANARY}\",\n  {{ env = \"UNSET\" }},\n  7,\n]");
        let (texts, report) = fetch(&toml, &|_| None, Path::new(""));
        assert_eq!(texts, [CANARY]);
        assert!(report.contains("t.toml:3: error: s[1]: environment variable \"UNSET\""), "{report}");
        assert!(report.contains("t.toml:4: error: s[2]: found a bare number"), "{report}");
        assert!(!report.contains(CANARY), "{report}");
    }

    fn tempfile(name: &str) -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("hapax-secret-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }
}
