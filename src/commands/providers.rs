//! `hapax providers`: the presets, and what is known of each provider.

use http::Method;

use super::{Exit, say};
use crate::provider::Scheme;

/// All of them, or one.
#[derive(Debug, clap::Args)]
pub struct Options {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Print a preset, with what is known of the provider; a [scheme.NAME] of your own has the same form.
    Show {
        /// The preset's name.
        name: String,
    },
}

/// Lists or shows.
///
/// # Errors
/// 64 if there is no such preset.
pub fn run(options: &Options) -> Result<(), Exit> {
    match &options.command {
        None => Scheme::preset_names().iter().filter_map(|name| line(name)).try_for_each(say),
        Some(Command::Show { name }) => {
            let shown = shown(name).ok_or_else(|| {
                let known = Scheme::preset_names().join(", ");
                Exit::settings(format!("no provider {name:?}; there are: {known}"))
            })?;
            say(shown.trim_end())
        }
    }
}

fn line(name: &str) -> Option<String> {
    let scheme = Scheme::preset(name)?;
    let rule = if scheme.never_dedupes() { "never deduplicated".to_owned() } else { scheme.key_rule() };
    Some(format!("{name:<24} {rule}"))
}

/// The preset's text with its unchecked facts marked, and what follows from it.
fn shown(name: &str) -> Option<String> {
    let scheme = Scheme::preset(name)?;
    let mut text = String::new();
    for line in Scheme::preset_text(name)?.lines() {
        text.push_str(line);
        let key = line.split_once('=').map_or("", |(key, _)| key.trim());
        if scheme.facts.unchecked.iter().any(|fact| fact == key) {
            text.push_str("   # UNCHECKED");
        }
        text.push('\n');
    }
    text.push_str("\n# What follows:\n");
    for (what, holds) in follows(&scheme) {
        text.extend(["# ", what, if holds { ": yes\n" } else { ": no\n" }]);
    }
    for secret in scheme.handshake_secrets() {
        text.extend(["# its handshake asks for handshake_secrets.", secret, "\n"]);
    }
    if scheme.has_certificates() {
        text.push_str("# its requests name a certificate, which is fetched; no secret makes it\n");
    }
    if let Some(place) = scheme.sender() {
        text.extend(["# it signs for everybody: the source's senders list what may stand at ", &place, "\n"]);
    }
    Some(text)
}

fn follows(scheme: &Scheme) -> [(&'static str, bool); 7] {
    [
        ("the signature covers the id", scheme.facts.id_signed),
        ("it covers a time", scheme.signs_time()),
        ("it covers the URL, so public_url is needed", scheme.signs_url()),
        ("no request is ever a duplicate", scheme.never_dedupes()),
        ("handshake by POST", scheme.answers(&Method::POST)),
        ("handshake by GET", scheme.answers(&Method::GET)),
        ("handshake by HEAD", scheme.answers(&Method::HEAD)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::read_scheme;

    #[test]
    fn what_is_shown_can_be_read_again_and_says_what_is_unchecked() {
        for name in Scheme::preset_names() {
            let shown = shown(name).unwrap();
            let (scheme, problems) = read_scheme(&shown);
            assert!(problems.is_empty() && scheme.is_some(), "{name}");
            assert_eq!(
                shown.matches("# UNCHECKED").count(),
                Scheme::preset(name).unwrap().facts.unchecked.len()
            );
        }
        let meta = shown("meta").unwrap();
        assert!(meta.contains("handshake_secrets.verify_token") && meta.contains("handshake by GET: yes"));
        assert!(line("dropbox").unwrap().contains("never deduplicated"));
        assert!(shown("nobody").is_none());
    }

    #[test]
    fn the_readme_lists_every_preset() {
        let readme = include_str!("../../README.md");
        let (_, list) = readme.split_once("Presets of this version:").unwrap();
        let (list, _) = list.split_once('(').unwrap();
        let names: Vec<&str> = list.split('`').skip(1).step_by(2).collect();
        assert_eq!(names, Scheme::preset_names());
    }
}
