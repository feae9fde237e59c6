//! TLS to the stores: what the settings say, with the files that they name.
//!
//! Invariant: nothing here makes a connection weaker than its words say in libpq. `require` is stronger: it checks the
//! server as `verify-full` does, unless `tls_unverified` says otherwise.

use ring::digest::{Context, SHA256};

use super::dsn::{self, Words};
use super::secret::Secrets;
use super::{PostgresTls, RedisTls, Secret, TlsText};
use crate::parts::array;
use crate::settings::Table;
use crate::tls::{self, Authorities, Check, Identity};

/// What stands for the authorities that the machine trusts.
const SYSTEM: &str = "system";

const UNVERIFIED: &str = "tls_unverified";

/// `sslmode`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Disable,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

/// Takes out of the DSN what it says about TLS.
pub(super) fn postgres(
    table: &mut Table,
    secrets: &Secrets<'_>,
    url: &Secret,
) -> (Secret, PostgresTls, TlsText) {
    if let Some(word) = dsn::lost_word(&url.0) {
        table.error(
            "url",
            format!("has an @ after {word}, and what is before an @ is user and password: write %40 for @"),
        );
    }
    let (rest, words) = dsn::take_words(&url.0);
    let unverified = table.flag(UNVERIFIED).unwrap_or(false);
    let tls = mode(&words).and_then(|mode| {
        if unverified && mode != Mode::Require {
            table.error(UNVERIFIED, "belongs to sslmode=require in postgres.url: remove it, or say that");
        }
        read(mode, unverified, &words, secrets)
    });
    let tls = tls.unwrap_or_else(|problem| {
        table.error("url", problem);
        PostgresTls::Never
    });
    let files = ["sslrootcert", "sslcert", "sslkey"].map(|word| words.get(word));
    (Secret(rest), tls, text(&format!("{words:?} {unverified}"), files, secrets))
}

/// The words and what the files hold. What cannot be read was reported.
fn text(words: &str, files: [Option<&String>; 3], secrets: &Secrets<'_>) -> TlsText {
    let mut context = Context::new(&SHA256);
    context.update(words.as_bytes());
    for file in files.into_iter().flatten() {
        let held = secrets.pem(file).unwrap_or_default();
        context.update(&(held.len() as u64).to_le_bytes());
        context.update(held.as_bytes());
    }
    TlsText(array(&context.finish()))
}

fn mode(words: &Words) -> Result<Mode, String> {
    const WANTED: &str = "give sslmode=disable, prefer, require, verify-ca or verify-full";
    match words.get("sslmode").map(String::as_str) {
        Some("disable") => Ok(Mode::Disable),
        None | Some("prefer") => Ok(Mode::Prefer),
        Some("require") => Ok(Mode::Require),
        Some("verify-ca") => Ok(Mode::VerifyCa),
        Some("verify-full") => Ok(Mode::VerifyFull),
        Some("allow") => Err(format!("sslmode=allow asks for no TLS as long as it can: {WANTED}")),
        // What was typed may be part of a password.
        Some(_) => Err(format!("its sslmode is none: {WANTED}")),
    }
}

fn read(mode: Mode, unverified: bool, words: &Words, secrets: &Secrets<'_>) -> Result<PostgresTls, String> {
    let authorities = words.get("sslrootcert").map(String::as_str);
    let own = [("sslcert", words.get("sslcert")), ("sslkey", words.get("sslkey"))];
    let identity = identity(own, secrets).map_err(|(key, problem)| format!("{key}: {problem}"))?;
    let check = match (mode, authorities) {
        (Mode::Disable | Mode::Prefer, Some(_)) => {
            return Err(
                "sslrootcert checks nothing with sslmode=disable or prefer (which is what a URL without \
                        sslmode means): say sslmode=verify-full"
                    .to_owned(),
            );
        }
        (Mode::Disable, None) if identity.is_some() => {
            return Err("sslcert is shown to nobody with sslmode=disable: remove it".to_owned());
        }
        (Mode::Disable, None) => return Ok(PostgresTls::Never),
        (Mode::Prefer, None) => Check::Nothing,
        (Mode::Require, Some(_)) if unverified => {
            return Err(
                "sslrootcert checks nothing with postgres.tls_unverified: remove one of them".to_owned()
            );
        }
        (Mode::Require, None) if unverified => Check::Nothing,
        (Mode::VerifyCa, None | Some(SYSTEM)) => {
            return Err("with sslmode=verify-ca, anybody with a certificate of any authority of the system would do: \
                        give sslrootcert=FILE, or say sslmode=verify-full"
                .to_owned());
        }
        (Mode::VerifyCa, Some(file)) => Check::Authority(of_named_file(file, secrets)?),
        (Mode::Require | Mode::VerifyFull, None | Some(SYSTEM)) => Check::Full(
            Authorities::of_system().map_err(|problem| format!("{problem}, or give sslrootcert=FILE"))?,
        ),
        (Mode::Require | Mode::VerifyFull, Some(file)) => Check::Full(of_named_file(file, secrets)?),
    };
    let client =
        tls::client(check, identity.as_ref()).map_err(|problem| format!("sslcert, sslkey: {problem}"))?;
    Ok(if mode == Mode::Prefer { PostgresTls::IfOffered(client) } else { PostgresTls::Always(client) })
}

fn of_named_file(path: &str, secrets: &Secrets<'_>) -> Result<Authorities, String> {
    of_file(path, secrets).map_err(|problem| format!("sslrootcert: {problem}"))
}

/// The names and paths of a certificate and its key; what is wrong, and of which.
fn identity(
    [(chain_name, chain), (key_name, key)]: [(&'static str, Option<&String>); 2],
    secrets: &Secrets<'_>,
) -> Result<Option<Identity>, (&'static str, String)> {
    match (chain, key) {
        (Some(chain), Some(key)) => Ok(Some(Identity {
            chain: secrets.pem(chain).map_err(|problem| (chain_name, problem))?,
            key: secrets.pem(key).map_err(|problem| (key_name, problem))?,
        })),
        (None, None) => Ok(None),
        (Some(_), None) => Err((chain_name, format!("is of no use without {key_name}: give both"))),
        (None, Some(_)) => Err((key_name, format!("is of no use without {chain_name}: give both"))),
    }
}

fn of_file(path: &str, secrets: &Secrets<'_>) -> Result<Authorities, String> {
    Authorities::from_pem(&secrets.pem(path)?).map_err(|problem| format!("file {path:?} {problem}"))
}

/// `tls_ca`, `tls_cert`, `tls_key`: with a URL that asks for TLS only.
pub(super) fn redis(table: &mut Table, secrets: &Secrets<'_>, url: &Secret) -> (Option<RedisTls>, TlsText) {
    let files = REDIS_FILES.map(|key| table.text(key));
    let text = text(&format!("{files:?}"), files.each_ref().map(Option::as_ref), secrets);
    (redis_tls(table, secrets, url, files), text)
}

const REDIS_FILES: [&str; 3] = ["tls_ca", "tls_cert", "tls_key"];

fn redis_tls(
    table: &mut Table,
    secrets: &Secrets<'_>,
    url: &Secret,
    [authority, chain, key]: [Option<String>; 3],
) -> Option<RedisTls> {
    let word = url.0.split_once("://").map_or("", |(word, _)| word);
    if word != "rediss" && ["rediss", "valkeys"].iter().any(|tls| word.eq_ignore_ascii_case(tls)) {
        // The driver takes it for TLS, with authorities of its own.
        table.error("url", "asks for TLS by another word: begin it with rediss://");
        return None;
    }
    if word != "rediss" {
        // Without a URL something else was said already.
        for key in REDIS_FILES.into_iter().filter(|key| table.has(key) && !url.0.is_empty()) {
            table.error(
                key,
                "belongs to a URL that begins with rediss://, which asks for TLS: remove it, or say that",
            );
        }
        return None;
    }
    if url.0.contains('#') {
        let message = "ends in # and a word: TLS that checks nothing is not offered for Redis: remove that, and name the \
                       server's authority by fast_tier.tls_ca";
        table.error("url", message);
        return None;
    }
    let authorities = match &authority {
        Some(path) => of_file(path, secrets),
        None => Authorities::of_system().map_err(|problem| format!("{problem}, or give tls_ca = \"file\"")),
    };
    let identity = identity([("tls_cert", chain.as_ref()), ("tls_key", key.as_ref())], secrets);
    let authorities = authorities.map_err(|problem| table.error("tls_ca", problem)).ok()?;
    let identity = identity.map_err(|(key, problem)| table.error(key, problem)).ok()?;
    if let Err(problem) = tls::client(Check::Full(authorities.clone()), identity.as_ref()) {
        table.error("tls_cert", problem);
    }
    Some(RedisTls { authorities, identity })
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::super::{Config, FastTierKind, report};

    /// Settings beside `ca.pem`, `own.pem` and `own.key`.
    struct Settings(tempfile::TempDir);

    impl Settings {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec!["h".to_owned()]).unwrap();
            let certificate = params.self_signed(&key).unwrap().pem();
            std::fs::write(folder.path().join("ca.pem"), &certificate).unwrap();
            std::fs::write(folder.path().join("own.pem"), &certificate).unwrap();
            std::fs::write(folder.path().join("own.key"), key.serialize_pem()).unwrap();
            Self(folder)
        }

        fn read(&self, postgres: &str, redis: &str) -> Result<Config, String> {
            let text = format!("[postgres]\n{postgres}\n[fast_tier]\nprefix = \"t:\"\n{redis}\n");
            let file = self.0.path().join("t.toml");
            let loaded = Config::parse(&file.display().to_string(), &text, &|_| None);
            loaded.map(|loaded| loaded.config).map_err(|problems| report(&problems))
        }
    }

    const POSTGRES: &str = "url = \"postgres://h/d\"";
    const REDIS: &str = "url = \"redis://h\"";

    #[test]
    fn libpqs_words_say_how_postgres_is_reached() {
        let settings = Settings::new();
        for (words, more, expected) in [
            ("", "", "IfOffered(…)"),
            ("sslmode=prefer&sslcert=own.pem&sslkey=own.key", "", "IfOffered(…)"),
            ("sslmode=disable", "", "Never"),
            ("sslmode=require", "tls_unverified = true", "Always(…)"),
            ("sslmode=require&sslrootcert=ca.pem", "", "Always(…)"),
            ("sslmode=verify-ca&sslrootcert=ca.pem", "", "Always(…)"),
            ("sslmode=verify-full&sslrootcert=ca.pem&sslcert=own.pem&sslkey=own.key", "", "Always(…)"),
        ] {
            let url = format!("url = \"postgres://u:p@h/d?connect_timeout=3&{words}\"\n{more}");
            let config = settings.read(&url, REDIS).unwrap();
            assert_eq!(format!("{:?}", config.postgres.tls), expected, "{words}");
            assert_eq!(config.postgres.url.0.trim_end_matches('&'), "postgres://u:p@h/d?connect_timeout=3");
        }
    }

    #[test]
    fn words_that_would_check_less_than_they_seem_to_are_refused() {
        let settings = Settings::new();
        for (words, more, expected) in [
            ("sslmode=allow", "", "postgres.url: sslmode=allow asks for no TLS"),
            ("sslmode=canary", "", "its sslmode is none: give sslmode=disable, prefer, require"),
            ("sslrootcert=ca.pem", "", "sslrootcert checks nothing with sslmode=disable or prefer"),
            ("sslmode=verify-ca", "", "give sslrootcert=FILE, or say sslmode=verify-full"),
            ("sslmode=verify-ca&sslrootcert=system", "", "anybody with a certificate of any authority"),
            (
                "sslmode=require&sslrootcert=ca.pem",
                "tls_unverified = true",
                "checks nothing with postgres.tls_unv",
            ),
            (
                "sslmode=verify-full",
                "tls_unverified = true",
                "postgres.tls_unverified: belongs to sslmode=require",
            ),
            ("", "tls_unverified = true", "postgres.tls_unverified: belongs to sslmode=require"),
            ("sslmode=disable&sslcert=own.pem&sslkey=own.key", "", "is shown to nobody"),
            ("sslmode=require&sslcert=own.pem", "", "sslcert: is of no use without sslkey"),
            ("sslmode=require&sslrootcert=none.pem", "", "sslrootcert: file \"none.pem\" cannot be read"),
            ("sslmode=require&sslrootcert=own.key", "", "sslrootcert: file \"own.key\" has no certificate"),
            (
                "sslmode=prefer&sslcert=own.pem&sslkey=own.pem",
                "",
                "sslcert, sslkey: the key's file has no private key",
            ),
        ] {
            let url = format!("url = \"postgres://u:p@h/d?{words}\"\n{more}");
            let said = settings.read(&url, REDIS).unwrap_err();
            assert!(said.contains(expected) && !said.contains("canary"), "{words}: {said}");
        }
    }

    /// The driver would speak to the host `server`, without a check.
    #[test]
    fn a_word_that_is_lost_before_an_at_sign_is_refused() {
        let settings = Settings::new();
        for url in ["postgres://h/d?sslmode=require&user=canary@server", "postgres://u:canary?sslcert=x@h/d"]
        {
            let said = settings.read(&format!("url = {url:?}"), REDIS).unwrap_err();
            assert!(said.contains("write %40 for @") && !said.contains("canary"), "{said}");
        }
        let kept = settings.read("url = \"postgres://u:a?b%40c@h/d\"", REDIS).unwrap();
        assert_eq!(kept.postgres.url.0, "postgres://u:a?b%40c@h/d");
    }

    #[test]
    fn redis_is_checked_in_full_or_not_reached_by_tls() {
        let settings = Settings::new();
        let tls = "url = \"rediss://h\"\ntls_ca = \"ca.pem\"";
        for redis in [tls, &format!("{tls}\ntls_cert = \"own.pem\"\ntls_key = \"own.key\"")] {
            let config = settings.read(POSTGRES, redis).unwrap();
            assert!(matches!(config.fast_tier.kind, FastTierKind::Redis(redis) if redis.tls.is_some()));
        }
        for (redis, expected) in [
            (
                "url = \"redis://h\"\ntls_ca = \"ca.pem\"",
                "fast_tier.tls_ca: belongs to a URL that begins with rediss://",
            ),
            ("url = \"rediss://h#insecure\"", "fast_tier.url: ends in # and a word"),
            ("url = \"valkeys://h\"", "fast_tier.url: asks for TLS by another word: begin it with rediss://"),
            ("url = \"Rediss://h#insecure\"", "fast_tier.url: asks for TLS by another word"),
            (
                "url = \"rediss://h\"\ntls_ca = \"none.pem\"",
                "fast_tier.tls_ca: file \"none.pem\" cannot be read",
            ),
            (&format!("{tls}\ntls_cert = \"own.pem\""), "fast_tier.tls_cert: is of no use without tls_key"),
            (
                &format!("{tls}\ntls_cert = \"own.pem\"\ntls_key = \"ca.pem\""),
                "fast_tier.tls_cert: the key's file",
            ),
            ("kind = \"off\"\ntls_ca = \"ca.pem\"", "fast_tier.tls_ca: belongs to kind = \"redis\""),
        ] {
            let said = settings.read(POSTGRES, redis).unwrap_err();
            assert!(said.contains(expected), "{redis}: {said}");
        }
    }
}
