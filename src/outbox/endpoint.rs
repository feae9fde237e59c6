//! The URL of a target, taken apart.
//!
//! Invariant: the host is a name or an address and nothing that one reader takes for the one and another for the other
//! (`127.1`, `0x7f.1`, `2130706433`). No part of the URL is in a message: any part may be a secret.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::Uri;
use rustls::pki_types::ServerName;

/// Longest URL, in bytes.
const URL_MAX: usize = 2048;

/// Where a target listens.
#[derive(Clone)]
pub(crate) struct Endpoint {
    uri: Uri,
    host: String,
    port: u16,
    /// The name that its certificate must be for; none without TLS.
    tls: Option<ServerName<'static>>,
}

/// Without anything that is in it.
impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls.is_some() { "Endpoint(https)" } else { "Endpoint(http)" })
    }
}

impl Endpoint {
    /// Reads a URL.
    ///
    /// # Errors
    /// What is wrong with it, without the URL.
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        if text.len() > URL_MAX {
            return Err("has more than 2048 bytes");
        }
        if text.contains('#') {
            return Err("has a fragment (#…), which is never sent");
        }
        let uri: Uri = text.parse().or(Err("is not a URL"))?;
        let secure = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err("does not start with http:// or https://"),
        };
        let authority = uri.authority().ok_or("has no host")?;
        if authority.as_str().contains('@') {
            return Err("has a user name or password: give headers = { authorization = … } in its place");
        }
        let host = host(authority.host())?;
        let after_host = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
        let port = match authority.port_u16() {
            Some(port) if port > 0 => port,
            None if after_host.is_empty() => {
                if secure {
                    443
                } else {
                    80
                }
            }
            _ => return Err("has a port that is none"),
        };
        let name = ServerName::try_from(host.clone()).or(Err("has a host that is no name"))?;
        Ok(Self { host, port, tls: secure.then_some(name), uri })
    }

    pub(super) fn uri(&self) -> &Uri {
        &self.uri
    }

    /// Without brackets.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// The name that its certificate must be for; none without TLS.
    pub(crate) fn tls(&self) -> Option<&ServerName<'static>> {
        self.tls.as_ref()
    }

    /// The host, if it is an address.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

/// Without brackets, in lower case.
fn host(text: &str) -> Result<String, &'static str> {
    if text.is_empty() {
        return Err("has no host");
    }
    if let Some(inside) = text.strip_prefix('[') {
        let address = inside.strip_suffix(']').and_then(|inside| inside.parse::<Ipv6Addr>().ok());
        return address.map(|address| address.to_string()).ok_or("has brackets with no IPv6 address in them");
    }
    let last = text.strip_suffix('.').unwrap_or(text).rsplit('.').next().unwrap_or_default();
    let number =
        last.bytes().all(|byte| byte.is_ascii_digit()) || last.starts_with("0x") || last.starts_with("0X");
    if number && text.parse::<Ipv4Addr>().is_err() {
        return Err("has a host that is neither a name nor an address");
    }
    Ok(text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str) -> (String, u16, bool, bool) {
        let endpoint = Endpoint::parse(text).map_err(|problem| format!("{text}: {problem}")).unwrap();
        let (tls, literal) = (endpoint.tls().is_some(), endpoint.address().is_some());
        (endpoint.host().to_owned(), endpoint.port(), tls, literal)
    }

    #[test]
    fn a_url_is_taken_apart() {
        assert_eq!(
            parts("https://Hooks.Example.com/a?b=c"),
            ("hooks.example.com".to_owned(), 443, true, false)
        );
        assert_eq!(parts("http://a_b.internal:8080"), ("a_b.internal".to_owned(), 8080, false, false));
        assert_eq!(parts("http://127.0.0.1/"), ("127.0.0.1".to_owned(), 80, false, true));
        assert_eq!(parts("https://[::FFFF:7f00:1]:9/"), ("::ffff:127.0.0.1".to_owned(), 9, true, true));
    }

    #[test]
    fn what_two_readers_take_differently_is_refused() {
        for (text, wanted) in [
            ("hooks.example.com", "http:// or https://"),
            ("/hooks", "http:// or https://"),
            ("ftp://example.com/", "http:// or https://"),
            ("https://", "is not a URL"),
            ("https:///x", "is not a URL"),
            ("https://a b/", "is not a URL"),
            ("https://example.com/#x", "fragment"),
            ("https://u:p@example.com/", "authorization"),
            ("https://127.0.0.1@example.com/", "authorization"),
            ("https://example.com:0/", "port"),
            ("https://example.com:/", "port"),
            ("https://example.com:99999/", "port"),
            ("https://127.1/", "neither"),
            ("https://0x7f.0x1/", "neither"),
            ("https://0177.0.0.1/", "neither"),
            ("https://2130706433/", "neither"),
            ("https://127.0.0.1./", "neither"),
            ("https://[::1%25eth0]/", ""),
            ("https://[127.0.0.1]/", "brackets"),
        ] {
            let problem = Endpoint::parse(text).unwrap_err();
            assert!(problem.contains(wanted), "{text}: {problem}");
        }
        assert!(Endpoint::parse(&format!("https://a/{}", "x".repeat(URL_MAX))).is_err());
    }

    #[test]
    fn nothing_of_a_url_is_shown() {
        assert_eq!(
            format!("{:?}", Endpoint::parse("https://canary.example/canary").unwrap()),
            "Endpoint(https)"
        );
    }
}
