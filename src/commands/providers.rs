//! `hapax providers`: the presets, and what is known of each provider.

use http::Method;

use super::{Exit, no_provider, say};
use crate::provider::Scheme;
use crate::provider::jwt::KeySet;

/// All of them, or one.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// List them as a table in Markdown.
    #[arg(long)]
    markdown: bool,
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
        None if options.markdown => say(markdown().trim_end()),
        None => rows().iter().map(line).try_for_each(say),
        Some(Command::Show { name }) => {
            let shown = shown(name).ok_or_else(|| no_provider(name))?;
            say(shown.trim_end())
        }
    }
}

const HEAD: [&str; 5] = ["provider", "kind", "the signature binds", "id signed", "dedupe key"];

const NEVER: &str = "never deduplicated";

type Row = [String; HEAD.len()];

/// One row for each preset, under a head.
fn rows() -> Vec<Row> {
    let schemes = Scheme::preset_names().iter().filter_map(|name| Scheme::preset(name));
    std::iter::once(HEAD.map(str::to_owned)).chain(schemes.map(|scheme| row(&scheme))).collect()
}

fn row(scheme: &Scheme) -> Row {
    let id_signed = match (scheme.never_dedupes(), scheme.facts.id_signed) {
        (true, _) => "-",
        (false, true) => "yes",
        (false, false) => "no",
    };
    let binds = scheme.facts.binds.to_string();
    [scheme.name.clone(), scheme.kind().to_owned(), binds, id_signed.to_owned(), dedupe_key(scheme)]
}

fn dedupe_key(scheme: &Scheme) -> String {
    if scheme.never_dedupes() { NEVER.to_owned() } else { scheme.key_rule().replace(" | ", " or ") }
}

fn line([name, kind, binds, id_signed, key]: &Row) -> String {
    format!("{name:<26} {kind:<10} {binds:<19} {id_signed:<9} {key}")
}

/// The same table, for the README.
fn markdown() -> String {
    let mut lines = Vec::new();
    for (index, [name, kind, binds, id_signed, key]) in rows().iter().enumerate() {
        let (name, key) = match index {
            0 => (name.clone(), key.clone()),
            _ if key == NEVER => (format!("`{name}`"), key.clone()),
            _ => (format!("`{name}`"), format!("`{key}`")),
        };
        lines.push(format!("| {name} | {kind} | {binds} | {id_signed} | {key} |\n"));
        if index == 0 {
            lines.push("|---|---|---|---|---|\n".to_owned());
        }
    }
    lines.concat()
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
    text.push_str(&told(&scheme));
    for secret in scheme.handshake_secrets() {
        text.extend(["# its handshake asks for handshake_secrets.", secret, "\n"]);
    }
    if scheme.has_certificates() {
        text.push_str("# its requests name a certificate, which is fetched; no secret makes it\n");
    }
    match scheme.key_set() {
        Some(KeySet::At(url)) => {
            text.extend(["# keys are fetched from ", &url.to_string(), ", unless the source has secrets\n"]);
        }
        Some(KeySet::Ask) => {
            text.push_str("# keys are fetched from the source's jwks, unless it has secrets\n");
        }
        None => {}
    }
    if let Some(place) = scheme.sender() {
        text.extend(["# it signs for everybody: the source's senders list what may stand at ", &place, "\n"]);
    }
    Some(text)
}

fn follows(scheme: &Scheme) -> [(&'static str, bool); 10] {
    [
        ("the signature covers the id", scheme.facts.id_signed),
        ("it covers a time", scheme.signs_time()),
        ("it covers the URL, so public_url is needed", scheme.signs_url()),
        ("guard can be set", scheme.can_guard() && !scheme.facts.id_signed),
        ("no request is ever a duplicate", scheme.never_dedupes()),
        ("handshake by POST", scheme.answers(&Method::POST)),
        ("handshake by GET", scheme.answers(&Method::GET)),
        ("handshake by HEAD", scheme.answers(&Method::HEAD)),
        ("handshake by OPTIONS", scheme.answers(&Method::OPTIONS)),
        ("the secret is handed over in a handshake", scheme.hands_over()),
    ]
}

/// What it is answered, and what nobody knows of it.
fn told(scheme: &Scheme) -> String {
    let ack = &scheme.ack;
    let retry = ack.retry.map_or_else(|| "409 or 503".to_owned(), |status| status.as_u16().to_string());
    let (status, reject) = (ack.status.as_u16(), ack.reject.as_u16());
    let mut lines = vec![
        format!("# it is answered: {status}; a bad signature {reject}; to send again {retry}\n"),
        format!("# the signature binds: {}\n", scheme.facts.binds),
    ];
    for (what, names) in
        [("UNCHECKED, from memory", &scheme.facts.unchecked), ("nobody knows", &scheme.facts.unknown)]
    {
        if !names.is_empty() {
            lines.push(format!("# {what}: {}\n", names.join(", ")));
        }
    }
    lines.concat()
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
            let unchecked = Scheme::preset(name).unwrap().facts.unchecked.len();
            assert_eq!(shown.matches("   # UNCHECKED").count(), unchecked, "{name}");
        }
        let meta = shown("meta").unwrap();
        assert!(meta.contains("handshake_secrets.verify_token") && meta.contains("handshake by GET: yes"));
        let xero = shown("xero").unwrap();
        assert!(xero.contains("# UNCHECKED, from memory: retry_window"), "{xero}");
        assert!(
            xero.contains("# nobody knows: resend_window") && xero.contains("a bad signature 401"),
            "{xero}"
        );
        assert!(
            shown("truelayer").unwrap().contains("# keys are fetched from https://webhooks.truelayer.com/")
        );
        assert!(shown("fusionauth").unwrap().contains("the source's jwks, unless it has secrets"));
        assert!(shown("nobody").is_none());
    }

    #[test]
    fn the_list_says_what_a_signature_binds() {
        let rows = rows();
        let row = |name: &str| rows.iter().find(|row| row[0] == name).unwrap().join(" | ");
        assert_eq!(rows.len(), Scheme::preset_names().len() + 1);
        assert_eq!(row("stripe"), "stripe | hmac | body | yes | json:/id");
        assert_eq!(row("dropbox"), "dropbox | hmac | body | - | never deduplicated");
        assert_eq!(row("wise"), "wise | rsa-pkcs1 | body | no | header:X-Delivery-Id");
        assert!(row("mailgun").starts_with("mailgun | hmac | fields | no | json:/event-data/id or "));
        assert!(row("postmark").starts_with("postmark | basic | none | no"));
    }

    #[test]
    fn the_readme_has_the_table_of_all_presets() {
        let readme = include_str!("../../README.md");
        let (_, table) = readme.split_once("<!-- hapax providers --markdown -->\n").unwrap();
        let (table, _) = table.split_once("<!-- end -->").unwrap();
        assert_eq!(table, markdown(), "run `hapax providers --markdown`");
    }

    #[test]
    fn the_readme_names_all_presets_with_a_handshake() {
        let readme = include_str!("../../README.md");
        let (_, section) = readme.split_once("\n## Handshakes\n").unwrap();
        let (section, _) = section.split_once("\n## ").unwrap();
        for name in Scheme::preset_names() {
            let scheme = Scheme::preset(name).unwrap();
            let asks = !scheme.hands_over() && !scheme.handshakes.list.is_empty();
            assert!(!asks || section.contains(&format!("`{name}`")), "{name}");
        }
    }
}
