//! Holds `config/SCHEMES.md` against what reads schemes: neither knows a name that the other does not.
//!
//! The document is read by its form: a heading that is one word in backticks names a table, and the first cell of a row
//! what the row is about.

use std::collections::BTreeSet;

use super::Scheme;
use super::handshake::reply;
use super::jwt::Alg;
use super::place::{self, Place};
use super::reading::KindName;
use super::signature::{Hash, TagEncoding};
use super::template::{self, Template};
use crate::fixture::read_scheme;
use crate::json::Pointers;
use crate::settings::File;

const DOCUMENT: &str = include_str!("../../config/SCHEMES.md");
/// Every table that there is, without what belongs into it.
const TABLES: &str = "
    [sig]
    [ts]
    [key]
    [body_hash]
    [url_hash]
    [cert]
    [confirm]
    [batch]
    [jwt]
    [jwt.chain]
    [ack]
    [[handshake]]
    when = { method = \"GET\" }
    require = {}
    take = {}
    token = {}
    reply = {}
";

type Names = BTreeSet<String>;

/// What stands in the first cells of the tables with that title, each name in full.
fn documented(title: &str) -> Names {
    let (mut names, mut table, mut counts) = (Names::new(), String::new(), false);
    for line in DOCUMENT.lines() {
        if let Some(heading) = line.strip_prefix("##") {
            let heading = heading.trim_start_matches('#').trim();
            let word = heading.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
            table = word.map_or_else(String::new, |word| format!("{word}."));
        } else if line.starts_with("| ") && !line.starts_with("| `") {
            counts = line.starts_with(&format!("| {title} |"));
        } else if counts && line.starts_with("| `") {
            let name = line.split('`').nth(1).unwrap();
            assert!(names.insert(format!("{table}{name}")), "{table}{name} twice");
        }
    }
    assert!(!names.is_empty(), "{title}");
    names
}

/// Names in braces in a message.
fn in_braces(message: &str) -> Names {
    let parts = message.split('{').skip(1).filter_map(|rest| rest.split_once('}'));
    parts.map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn every_key_of_a_scheme_is_documented_and_no_other() {
    let mut asked = Names::new();
    let kinds = KindName::CHOICES.iter().map(|(name, _)| *name);
    for (kind, table) in kinds.flat_map(|kind| [(kind, true), (kind, false)]) {
        // Items of a list are read in the place of the request.
        let tables = if table { TABLES.to_owned() } else { TABLES.replace("[batch]", "") };
        let (file, table) = File::parse("test", &format!("kind = {kind:?}\nsign = \"{{body}}\"\n{tables}"));
        drop(Scheme::read("test", table));
        asked.extend(file.asked().iter().map(|key| key.replace("[0]", "")));
    }
    let documented = documented("key");
    let missing: Vec<_> = asked.difference(&documented).collect();
    let unknown: Vec<_> = documented.difference(&asked).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "not documented: {missing:?}, not known: {unknown:?}");
}

#[test]
fn every_piece_of_a_template_is_documented_and_no_other() {
    let known: Names = template::WORDS
        .iter()
        .map(|(word, _)| format!("{{{word}}}"))
        .chain(template::AROUND.iter().map(|(word, _)| format!("{{{word}:PLACE}}")))
        .chain([format!("{{{}:header:NAME}}", template::LISTED), "{PLACE}".to_owned()])
        .collect();
    assert_eq!(documented("piece"), known);
    for piece in known {
        let text = format!("{{body}}{}", piece.replace("PLACE", "header:NAME"));
        assert!(Template::parse(&text, &mut Pointers::default()).is_ok(), "{text}");
    }
    // What the message offers when a piece is not known.
    for (word, _) in template::WORDS {
        assert!(in_braces(template::NAMES).contains(*word), "{word}");
    }
    for (word, _) in template::AROUND {
        assert!(in_braces(template::NAMES).contains(&format!("{word}:…")), "{word}");
    }
}

#[test]
fn every_place_is_documented_and_no_other() {
    let documented = documented("place");
    let told = place::FORMS.split('"').skip(1).step_by(2).map(str::to_owned);
    assert_eq!(documented, told.collect());
    for text in &documented {
        let found = Place::parse(text, &mut Pointers::default());
        assert_eq!(
            found.unwrap().to_string(),
            text.replace("header:NAME", "header:name").replace("headerjson:NAME", "headerjson:name")
        );
    }
}

#[test]
fn every_token_of_an_answer_is_documented_and_no_other() {
    let names: Names =
        documented("token").iter().map(|token| in_braces(token).pop_first().unwrap()).collect();
    for name in &names {
        let body = format!("{{{name}}}").replace("config:NAME + ", "config:OTHER + ");
        let toml = format!(
            "kind = \"hmac\"\nsign = \"{{ts}}.{{body}}\"\nsig = {{ from = \"header:x\" }}\nts = {{ from = \"header:t\" }}\n\
             id = []\n[[handshake]]\nwhen = {{ header = \"x\" }}\nreply = {{ body = {body:?} }}"
        );
        assert_eq!(read_scheme(&toml).1, [], "{name}");
    }
    let word = |name: &str| name.split(':').next().unwrap().to_owned();
    let told = in_braces(reply::NAMES);
    assert_eq!(
        names.iter().map(|name| word(name)).collect::<Names>(),
        told.iter().map(|name| word(name)).collect()
    );
}

#[test]
fn every_choice_is_documented() {
    let kinds = KindName::CHOICES.iter().map(|(name, _)| *name);
    let hashes = Hash::CHOICES.iter().map(|(name, _)| *name);
    let encodings = TagEncoding::CHOICES.iter().map(|(name, _)| *name);
    let algorithms = Alg::CHOICES.iter().map(|(name, _)| *name);
    for name in kinds.chain(hashes).chain(encodings).chain(algorithms) {
        assert!(DOCUMENT.contains(&format!("`{name}`")), "{name}");
    }
}
