//! Values, places and secrets in settings.

use super::units::DURATION_MILLIS_MAX;
use super::*;

const CANARY: &str = "canary-91c4";

fn lines(file: &File) -> Vec<String> {
    file.take_problems().iter().map(ToString::to_string).collect()
}

#[test]
fn durations_need_a_unit_and_a_sound_number() {
    for (text, millis) in [
        ("1ms", 1),
        ("50ms", 50),
        ("10s", 10_000),
        ("5m", 300_000),
        ("24h", 86_400_000),
        ("36500d", DURATION_MILLIS_MAX),
    ] {
        assert_eq!(parse_duration(text), Some(Duration::from_millis(millis)), "{text}");
    }
    for text in ["", "10", "s", "-1s", "+1s", "1.5s", "10 s", " 10s", "10S", "1w", "10s ", "1s500ms", "1µs"]
    {
        assert_eq!(parse_duration(text), None, "{text}");
    }
    for text in ["36501d", "9223372036854775807ms", "18446744073709551616s", "99999999999999999999d"] {
        assert_eq!(parse_duration(text), None, "{text}");
    }
}

#[test]
fn sizes_need_a_unit_and_a_sound_number() {
    for (text, bytes) in [("512B", 512), ("64KiB", 65_536), ("1MiB", 1 << 20), ("2GiB", 2 << 30)] {
        assert_eq!(parse_size(text), Some(bytes), "{text}");
    }
    for text in ["", "1", "1K", "1KB", "1MB", "1mib", "-1B", "1.5MiB", "99999999999GiB"] {
        assert_eq!(parse_size(text), None, "{text}");
    }
}

#[test]
fn what_is_shown_can_be_typed() {
    for text in ["1ms", "2500ms", "90s", "5m", "25h", "35d"] {
        assert_eq!(parse_duration(text).map(show_duration).as_deref(), Some(text));
    }
    for text in ["1B", "1000B", "64KiB", "3MiB", "1GiB"] {
        assert_eq!(parse_size(text).map(show_size).as_deref(), Some(text));
    }
    assert_eq!(show_duration(Duration::ZERO), "0ms");
    assert_eq!(show_size(0), "0B");
}

#[test]
fn a_wrong_value_says_what_would_be_right() {
    type Read = fn(&mut Table) -> bool;
    let cases: [(&str, Read, &str); 14] = [
        ("k = 10", |t| t.duration("k").is_none(), "found a bare number, expected a string with a unit"),
        ("k = \"10\"", |t| t.duration("k").is_none(), "\"10\" is not a duration above zero"),
        ("k = \"0s\"", |t| t.duration("k").is_none(), "\"0s\" is not a duration above zero"),
        ("k = 30.5", |t| t.duration("k").is_none(), "found a number with a fraction"),
        ("k = 1024", |t| t.size("k").is_none(), "\"64KiB\""),
        ("k = \"0B\"", |t| t.size("k").is_none(), "not a size above zero"),
        (
            "k = \"5\"",
            |t| t.count("k", 1..=9).is_none(),
            "found a string, expected a whole number from 1 to 9",
        ),
        ("k = 10", |t| t.count("k", 1..=9).is_none(), "10 is out of range: give a whole number from 1 to 9"),
        ("k = -1", |t| t.count("k", 0..=9).is_none(), "-1 is out of range"),
        ("k = 99999999999999999999", |t| t.count("k", 0..=9).is_none(), "out of range"),
        ("k = \"true\"", |t| t.flag("k").is_none(), "expected true or false, without quotes"),
        ("k = \"x\"", |t| t.choice("k", &[("a", 1), ("b", 2)]).is_none(), "give one of \"a\", \"b\""),
        ("k = 1", |t| t.table("k").is_none(), "expected a table"),
        ("k = [1]", |t| t.texts("k").is_none(), "k[0]: found a bare number, expected a string"),
    ];
    for (toml, read, expected) in cases {
        let (file, mut table) = File::parse("t.toml", toml);
        assert!(read(&mut table), "{toml}");
        assert!(table.failed("k"), "{toml}");
        let lines = lines(&file);
        assert_eq!(lines.len(), 1, "{toml}: {lines:?}");
        assert!(lines[0].contains(expected), "{toml}: {lines:?}");
    }
}

#[test]
fn ranges_include_their_ends() {
    let second = Duration::from_secs(1);
    for (toml, holds) in [("1s", true), ("2s", true), ("999ms", false), ("2001ms", false)] {
        let (file, mut table) = File::parse("t", &format!("k = \"{toml}\""));
        assert_eq!(table.duration_within("k", second..=second * 2).is_some(), holds, "{toml}");
        assert!(lines(&file).iter().all(|line| line.contains("from 1s to 2s")));
    }
    for (toml, holds) in [("1KiB", true), ("2KiB", true), ("1023B", false), ("2049B", false)] {
        let (_, mut table) = File::parse("t", &format!("k = \"{toml}\""));
        assert_eq!(table.size_within("k", 1024..=2048).is_some(), holds, "{toml}");
    }
}

#[test]
fn unknown_keys_are_named_with_the_nearest() {
    let (file, mut table) = File::parse("t.toml", "lisen = 1\n\nzzz = 2\n\"a\\nb\" = 3\n[sub]\nx = 1");
    table.text("listen");
    table.flag("other");
    if let Some(sub) = table.table("sub") {
        sub.finish();
    }
    table.finish();
    let expected = [
        "t.toml:1: error: lisen: unknown key; did you mean \"listen\"?",
        "t.toml:3: error: zzz: unknown key; known here: listen, other, sub",
        "t.toml:4: error: \"a\\nb\": unknown key; known here: listen, other, sub",
        "t.toml:6: error: sub.x: unknown key; known here: ",
    ];
    assert_eq!(lines(&file), expected);
}

#[test]
fn every_syntax_error_is_a_problem_with_its_line() {
    for (toml, line) in [
        ("a = 1\nb = \n", 2),
        ("a = 1\na = 2\n", 2),
        ("a = 1\n[t\nx = 1\n", 2),
        ("x = \"abc\ny = 1\n", 1),
        ("a = 1\n\n= 3", 3),
    ] {
        let (file, _) = File::parse("t.toml", toml);
        let lines = lines(&file);
        assert!(
            lines.iter().any(|one| one.starts_with(&format!("t.toml:{line}: error: (syntax)"))),
            "{lines:?}"
        );
    }
}

#[test]
fn tables_and_lists_have_their_own_lines() {
    let toml = "[s.b]\nk = 1\n[s.a]\nk = 2\n[[l]]\nk = 3\n[[l]]\nk = 4\n";
    let (file, mut root) = File::parse("t", toml);
    for (_, table) in root.tables("s") {
        table.error("k", "here");
        table.warning("", "table");
    }
    for table in root.table_list("l") {
        table.error("k", "here");
    }
    let found: Vec<_> = file.take_problems().into_iter().map(|p| (p.line, p.key)).collect();
    let expected = [(1, "s.b"), (2, "s.b.k"), (3, "s.a"), (4, "s.a.k"), (6, "l[0].k"), (8, "l[1].k")];
    assert_eq!(found, expected.map(|(line, key)| (line, key.to_owned())));
}

#[test]
fn a_secret_is_never_shown() {
    let toml = format!("s = \"{CANARY}\"\nt = {{ evn = \"{CANARY}\" }}\nu = [\"{CANARY}\", 1]\n");
    let (file, mut table) = File::parse("t", &toml);
    let shown = format!("{table:?} {file:?} {:?}", table.secret("s"));
    assert!(!shown.contains(CANARY), "{shown}");
    assert_eq!(table.secret("t"), None);
    assert_eq!(table.secrets("u").map(|list| list.len()), Some(1));
    assert_eq!(table.flag("s"), None);
    let shown = format!("{:?} {:?}", lines(&file), table.secrets("s"));
    assert!(!shown.contains(CANARY), "{shown}");
}

proptest::proptest! {
    #[test]
    fn any_text_is_read_without_a_panic(text in "(?s).{0,200}") {
        let (file, table) = File::parse("t", &text);
        table.finish();
        let lines = 1 + text.matches('\n').count();
        for problem in file.take_problems() {
            proptest::prop_assert!((1..=lines).contains(&problem.line));
            proptest::prop_assert!(!problem.key.contains('\n'));
        }
    }
}
