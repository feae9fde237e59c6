//! What is known to bite those who receive webhooks: each finding of `tests/findings.toml` has a test.
#![expect(clippy::unwrap_used, reason = "what is not as it must be fails the test that asks")]

use std::collections::BTreeSet;
use std::path::Path;

use hapax::settings::{File, Table};

/// A finding, and where it is tested.
struct Finding {
    number: u64,
    says: String,
    tests: Vec<String>,
    absent: Option<String>,
}

fn findings() -> Vec<Finding> {
    let (file, mut table) = File::parse("findings.toml", include_str!("../findings.toml"));
    let read = |mut table: Table| {
        let finding = Finding {
            number: table.count("number", 1..=40).unwrap(),
            says: table.text("says").unwrap(),
            tests: table.texts("tests").unwrap_or_default(),
            absent: table.text("absent"),
        };
        table.finish();
        finding
    };
    let findings = table.table_list("finding").into_iter().map(read).collect();
    table.finish();
    assert_eq!(file.take_problems(), []);
    findings
}

/// Whether `a::b::test` is a test in `src/a/b.rs`, and `it::a::test` one in `tests/it/a.rs`.
fn is_there(test: &str) -> bool {
    let Some((module, name)) = test.rsplit_once("::") else { return false };
    let path = match module.strip_prefix("it::") {
        Some(module) => format!("tests/it/{module}.rs"),
        None => format!("src/{}.rs", module.replace("::", "/")),
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let lines: Vec<&str> = source.lines().collect();
    let at = lines.iter().position(|line| line.contains(&format!("fn {name}(")));
    let marked = |at: usize| {
        lines.iter().take(at).rev().take(3).any(|line| line.contains("#[") && line.contains("test"))
    };
    at.is_some_and(marked)
}

#[test]
fn every_finding_has_a_test_that_is_there() {
    let findings = findings();
    let numbers: BTreeSet<u64> = findings.iter().map(|finding| finding.number).collect();
    assert_eq!(numbers, (1..=40).collect());
    assert_eq!(findings.len(), 40, "each number once");
    for Finding { number, says, tests, absent } in &findings {
        assert!(says.len() > 20 && (!tests.is_empty() || absent.is_some()), "{number}");
        for test in tests {
            assert!(is_there(test), "{number}: {test} is no test");
        }
    }
    assert!(findings.iter().filter(|finding| finding.tests.is_empty()).count() <= 6);
    assert!(!is_there("verify::no_such_test") && !is_there("it::findings::is_there"));
}
