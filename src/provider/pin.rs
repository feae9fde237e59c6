//! Which URLs a scheme lets a request point to.
//!
//! A URL in a request is a stranger's text. Invariant: only what matches the scheme's patterns from its first to its last
//! character becomes a [`Pinned`], and a `Pinned` holds no character that two readers of URLs could take differently.
//! Nothing is decoded, lower-cased or cut first, so what was checked is what is fetched. A URL that a scheme or a source
//! names in full is held against the same rules.

use std::fmt;

use regex_lite::Regex;
use rustls::pki_types::ServerName;

use crate::settings::Table;

/// Longest URL of a key. The longest that a provider documents is 500 bytes.
const KEY_URL_MAX: usize = 512;
/// Longest URL that a request asks to be visited; it may carry a token.
const VISIT_URL_MAX: usize = 2048;

/// What a `*` stands for in a host: one label, or a part of one. Never a dot.
const LABEL: &str = "[a-z0-9-]+";
/// What it stands for in a path: a segment or a part of one. No dot, so that `..` is none.
const SEGMENT: &str = "[A-Za-z0-9_-]+";
/// A region of a cloud: `us-east-1`. A label would also fit names that anybody can register, such as `s3-us-west-2`.
const REGION: &str = "[a-z]{2,8}(?:-[a-z]{2,12}){1,3}-[0-9]{1,2}";

/// A pattern of hosts, paths or names of certificates: literal text with `*` and `{region}` in it.
#[derive(Debug)]
pub(crate) struct Pattern {
    /// As it was written.
    text: String,
    whole: Regex,
}

impl Pattern {
    /// Reads a pattern of hosts: `*.example.com`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn host(text: &str) -> Result<Self, String> {
        let literal = |char: char| char.is_ascii_lowercase() || char.is_ascii_digit() || "-.".contains(char);
        let fixed = text.rsplit('.').take_while(|label| !label.contains(['*', '{'])).count();
        if fixed < 2 {
            return Err(format!(
                "{text:?} leaves the domain open: end it in two labels or more that are fixed, like \"*.example.com\""
            ));
        }
        Self::parse(text, LABEL, literal)
    }

    /// Reads a pattern of paths: `/certs/*.pem`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn path(text: &str) -> Result<Self, String> {
        if !text.starts_with('/') {
            return Err(format!("{text:?} is no path: start it with \"/\""));
        }
        Self::parse(text, SEGMENT, |char| char.is_ascii_alphanumeric() || "-._/".contains(char))
    }

    fn parse(text: &str, star: &str, literal: impl Fn(char) -> bool) -> Result<Self, String> {
        let mut regex = "^(?:".to_owned();
        for char in text.replace("{region}", "\0").chars() {
            match char {
                '*' => regex.push_str(star),
                '\0' => regex.push_str(REGION),
                char if literal(char) => regex.push_str(&regex_lite::escape(char.encode_utf8(&mut [0; 4]))),
                char => {
                    return Err(format!("{text:?} cannot hold {char:?}: give text, \"*\" or \"{{region}}\""));
                }
            }
        }
        regex.push_str(")$");
        let whole = Regex::new(&regex).map_err(|error| format!("{text:?} is no pattern: {error}"))?;
        Ok(Self { text: text.to_owned(), whole })
    }

    pub(crate) fn fits(&self, text: &str) -> bool {
        self.whole.is_match(text)
    }
}

/// Reads the patterns at a key; mistakes are reported there.
pub(super) fn patterns(
    table: &mut Table,
    key: &'static str,
    parse: fn(&str) -> Result<Pattern, String>,
) -> Vec<Pattern> {
    let mut found = Vec::new();
    for text in table.texts(key).unwrap_or_default() {
        match parse(&text) {
            Ok(pattern) => found.push(pattern),
            Err(message) => table.error(key, message),
        }
    }
    found
}

/// Hosts and paths that a URL may have.
#[derive(Debug)]
pub(crate) struct Pins {
    hosts: Vec<Pattern>,
    paths: Vec<Pattern>,
    /// Whether there may be a query, and how long the whole may be.
    visit: bool,
}

impl Pins {
    /// Reads `host` and `path`. What is to be visited may have a query; where a key stands has none.
    pub(super) fn read(table: &mut Table, visit: bool) -> Self {
        let hosts = patterns(table, "host", Pattern::host);
        let paths = patterns(table, "path", Pattern::path);
        if !table.has("host") {
            table.error("host", "is missing: the hosts that may be asked, e.g. \"*.example.com\"");
        }
        if !table.has("path") {
            table.error("path", "is missing: the paths that may be asked for, e.g. \"/certs/*.pem\"");
        }
        Self { hosts, paths, visit }
    }

    /// The URL, if it is one of those.
    ///
    /// # Errors
    /// Why it is none.
    pub(crate) fn check(&self, url: &str) -> Result<Pinned, &'static str> {
        let most = if self.visit { VISIT_URL_MAX } else { KEY_URL_MAX };
        let (host, path, query) = parts(url, most)?;
        if !self.hosts.iter().any(|pattern| pattern.fits(host)) {
            return Err("has a host that the scheme does not pin");
        }
        if !self.paths.iter().any(|pattern| pattern.fits(path)) {
            return Err("has a path that the scheme does not pin");
        }
        match query {
            Some(_) if !self.visit => Err("has a query"),
            Some(query) if !query.bytes().all(is_plain) => Err("has an odd character in its query"),
            query => Ok(Pinned::new(host, path, query)),
        }
    }
}

/// Host, path and query of a URL; all that two readers could take differently is refused.
fn parts(url: &str, most: usize) -> Result<(&str, &str, Option<&str>), &'static str> {
    if url.len() > most {
        return Err("is too long");
    }
    let rest = url.strip_prefix("https://").ok_or("does not start with https://")?;
    if rest.contains('#') {
        return Err("has a fragment");
    }
    let at = rest.find(['/', '?']).ok_or("has no path")?;
    let (authority, target) = rest.split_at_checked(at).ok_or("has no path")?;
    if authority.contains('@') {
        return Err("has a user name");
    }
    let host = match authority.split_once(':') {
        Some((host, "443")) => host,
        Some(_) => return Err("has another port than 443"),
        None => authority,
    };
    Ok(match target.split_once('?') {
        Some((path, query)) => (host, path, Some(query)),
        None => (host, target, None),
    })
}

/// What stands unescaped in a query, and the percent sign.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~%&=+:/,;!*'()@$".contains(&byte)
}

/// A URL that a scheme pins: `https`, port 443.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Pinned {
    host: String,
    /// Path and query.
    target: String,
}

impl Pinned {
    fn new(host: &str, path: &str, query: Option<&str>) -> Self {
        let target = query.map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
        Self { host: host.to_owned(), target }
    }

    /// The one URL that a scheme or the settings name in full; it may have a query.
    ///
    /// # Errors
    /// Why nothing can be fetched from it.
    pub(crate) fn exact(url: &str) -> Result<Self, &'static str> {
        let (host, path, query) = parts(url, KEY_URL_MAX)?;
        if host.bytes().any(|byte| byte.is_ascii_uppercase()) || ServerName::try_from(host).is_err() {
            return Err("has no host that can be asked: give a name in lower case");
        }
        if !path.starts_with('/') {
            return Err("has no path");
        }
        if !path.bytes().chain(query.unwrap_or_default().bytes()).all(is_plain) {
            return Err("has an odd character in it");
        }
        Ok(Self::new(host, path, query))
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn target(&self) -> &str {
        &self.target
    }
}

/// Without the query, which may hold a token.
impl fmt::Display for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.target.split_once('?').map_or(self.target.as_str(), |(path, _)| path);
        write!(f, "https://{}{path}", self.host)
    }
}

/// As the settings write it.
impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use crate::settings::File;

    use super::*;

    const CERTS: &str = r#"
        host = ["*.paypal.com", "*.sandbox.paypal.com", "sns.{region}.amazonaws.com", "sns.{region}.amazonaws.com.cn"]
        path = ["/v1/notifications/certs/*", "/SimpleNotificationService-*.pem"]
    "#;
    const VISIT: &str = "host = \"sns.{region}.amazonaws.com\"\npath = \"/\"";

    fn pins(toml: &str, visit: bool) -> Pins {
        let (file, mut table) = File::parse("test", toml);
        let pins = Pins::read(&mut table, visit);
        assert_eq!(file.take_problems(), []);
        pins
    }

    #[test]
    fn what_providers_send_is_pinned() {
        let pins = pins(CERTS, false);
        for url in [
            "https://api.paypal.com/v1/notifications/certs/CERT-360caa42-fca2a594-1d93a270",
            "https://api.sandbox.paypal.com/v1/notifications/certs/CERT-360caa42-fca2a594-1d93a270",
            "https://api-m.paypal.com:443/v1/notifications/certs/CERT-1",
            "https://sns.us-east-1.amazonaws.com/SimpleNotificationService-7506a1e35b36ef5a444dd1a8e7cc3ed8.pem",
            "https://sns.us-gov-west-1.amazonaws.com/SimpleNotificationService-1.pem",
            "https://sns.cn-northwest-1.amazonaws.com.cn/SimpleNotificationService-1.pem",
            "https://sns.ap-southeast-7.amazonaws.com/SimpleNotificationService-1.pem",
        ] {
            let pinned = pins.check(url).unwrap();
            assert_eq!(pinned.to_string(), url.replace(":443", ""));
        }
    }

    /// Before the path of a certificate.
    const HOSTS: &[&str] = &[
        "http://api.paypal.com",
        "HTTPS://api.paypal.com",
        "https:/api.paypal.com",
        "https:api.paypal.com",
        "//api.paypal.com",
        "ftp://api.paypal.com",
        " https://api.paypal.com",
        "https:// api.paypal.com",
        "https://paypal.com",
        "https://.paypal.com",
        "https://..paypal.com",
        "https://a.b.paypal.com",
        "https://evilpaypal.com",
        "https://api.paypal.com.evil.example",
        "https://api.paypal.com.",
        "https://api.paypal.comx",
        "https://api.paypal.co",
        "https://api.paypal.com%2eevil.example",
        "https://api%2epaypal.com",
        "https://API.PAYPAL.COM",
        "https://\u{430}pi.paypal.com",
        "https://api.p\u{430}ypal.com",
        "https://api\u{3002}paypal.com",
        "https://api_x.paypal.com",
        "https://*.paypal.com",
        "https://evil.example\\.paypal.com",
        "https://evil.example\\@api.paypal.com",
        "https://user@api.paypal.com",
        "https://user:pass@api.paypal.com",
        "https://api.paypal.com@evil.example",
        "https://api.paypal.com:443@evil.example",
        "https://api.paypal.com:80",
        "https://api.paypal.com:8443",
        "https://api.paypal.com:0443",
        "https://api.paypal.com:",
        "https://api.paypal.com:443:443",
        "https://evil.example#.paypal.com",
        "https://evil.example?.paypal.com",
        "https://evil.example/.paypal.com",
        "https://[::1].paypal.com",
        "https://127.0.0.1",
        "https://api.paypal.com\n",
        "https://api.paypal.com\r\nhost: x",
        "https://api.paypal.com\t",
        "https://api.paypal.com\0",
        "https://evil.example\n.paypal.com",
    ];

    /// Before the path of SNS.
    const SNS_HOSTS: &[&str] = &[
        "https://sns.s3.amazonaws.com",
        "https://x.s3.amazonaws.com",
        "https://sns.s3-us-west-2.amazonaws.com",
        "https://sns.s3-website-us-east-1.amazonaws.com",
        "https://sns.us-east-1.s3.amazonaws.com",
        "https://sns.s3.us-east-1.amazonaws.com",
        "https://sns.us-east-1.amazonaws.com.evil.example",
        "https://sns.us-east-1.amazonaws.com.cn.evil.example",
        "https://sns.us-east-1.amazonaws.comcn",
        "https://sns.us-east-1.amazonaws.co",
        "https://sns.us-east-1xamazonaws.com",
        "https://snsxus-east-1.amazonaws.com",
        "https://xsns.us-east-1.amazonaws.com",
        "https://x.sns.us-east-1.amazonaws.com",
        "https://sns.amazonaws.com",
        "https://sns..amazonaws.com",
        "https://sns.-.amazonaws.com",
        "https://sns.us-east-1-.amazonaws.com",
        "https://sns.us-east.amazonaws.com",
        "https://sns.us-east-1.us-east-1.amazonaws.com",
    ];

    /// Behind a host that is pinned.
    const PATHS: &[&str] = &[
        "",
        "/",
        "?",
        "/x",
        "/v1/notifications/certs/",
        "/v1/notifications/certs/..",
        "/v1/notifications/certs/../../x",
        "/v1/notifications/certs/a/b",
        "/v1/notifications/certs/%2e%2e",
        "/v1/notifications/certs/a%00",
        "/v1/notifications/certs/CERT-1?x=1",
        "/v1/notifications/certs/CERT-1?",
        "/v1/notifications/certs/CERT-1#x",
        "/v1/notifications/certs/CERT-1\n",
        "/v1/notifications/certs/CERT-1 ",
        "//v1/notifications/certs/CERT-1",
        "/x/v1/notifications/certs/CERT-1",
        "/v1\\notifications/certs/CERT-1",
        "/SimpleNotificationService-.pem",
        "/SimpleNotificationService-1.pem.exe",
        "/SimpleNotificationService-1pem",
        "/SimpleNotificationService-1.pem/x",
        "/x.pem",
        "/redirect?to=/SimpleNotificationService-1.pem",
    ];

    #[test]
    fn nothing_else_is() {
        const PEM: &str = "/SimpleNotificationService-1.pem";
        const CERT: &str = "/v1/notifications/certs/CERT-1";
        let hosts = HOSTS.iter().map(|host| format!("{host}{CERT}"));
        let sns = SNS_HOSTS.iter().map(|host| format!("{host}{PEM}"));
        let paths = PATHS.iter().map(|path| format!("https://api.paypal.com{path}"));
        let pins = pins(CERTS, false);
        let long = format!("https://api.paypal.com{CERT}{}", "x".repeat(KEY_URL_MAX));
        for url in hosts.chain(sns).chain(paths).chain([String::new(), long]) {
            assert!(pins.check(&url).is_err(), "{url:?}");
        }
    }

    #[test]
    fn what_is_visited_may_have_a_query_of_plain_characters() {
        let pins = pins(VISIT, true);
        let good = "https://sns.us-east-1.amazonaws.com/?Action=ConfirmSubscription&TopicArn=arn:aws:sns:us-east-1:1:T&Token=2336";
        assert_eq!(pins.check(good).unwrap().target(), &good["https://sns.us-east-1.amazonaws.com".len()..]);
        assert_eq!(pins.check(good).unwrap().to_string(), "https://sns.us-east-1.amazonaws.com/", "no token");
        for bad in ["?a=b#c", "/?a=b c", "/?a=\r\n", "/?a=\\", "/x?a=b", "/?a=\u{e4}", "/?a=\"", "/?a=?"] {
            assert!(pins.check(&format!("https://sns.us-east-1.amazonaws.com{bad}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_url_in_full_is_taken_as_it_is_or_refused() {
        for good in ["https://a.example/x.json", "https://a.example/", "https://127.0.0.1/x?p=B2C_1&v=2"] {
            assert_eq!(
                Pinned::exact(good).map(|url| format!("https://{}{}", url.host(), url.target())),
                Ok(good.to_owned())
            );
        }
        assert_eq!(Pinned::exact("https://a.example:443/x").unwrap().host(), "a.example");
        for (bad, why) in [
            ("http://a.example/x", "https://"),
            ("https://a.example", "no path"),
            ("https://a.example?x", "no path"),
            ("https:///x", "no host"),
            ("https://A.example/x", "lower case"),
            ("https://a b.example/x", "no host"),
            ("https://a.example:8443/x", "another port"),
            ("https://u@a.example/x", "user name"),
            ("https://a.example/x#y", "fragment"),
            ("https://a.example/x y", "odd character"),
            ("https://a.example/x?\r\n", "odd character"),
        ] {
            assert!(Pinned::exact(bad).unwrap_err().contains(why), "{bad}");
        }
    }

    #[test]
    fn a_pattern_that_pins_nothing_is_refused() {
        for text in [
            "",
            "*",
            "*.com",
            "paypal.*",
            "a.{region}.com",
            "com",
            "Api.paypal.com",
            "a b.paypal.com",
            "a[.]b.c.d",
        ] {
            assert!(Pattern::host(text).is_err(), "{text:?}");
        }
        for text in ["", "certs/*", "/a b", "/%2e", "/{x}", "/a?b"] {
            assert!(Pattern::path(text).is_err(), "{text:?}");
        }
        // A dot is a dot.
        assert!(!Pattern::host("a.example.com").unwrap().fits("axexample.com"));
    }
}
