//! The bytes that a provider signed, put together from a request as the scheme's template says.
//!
//! Invariant: what a template names is there once, as it was received, or there is no content; nothing is made up for
//! a part that is missing.

use std::borrow::Cow;
use std::fmt::Write as _;

use http::HeaderName;
use http::header::AsHeaderName;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::error::Code;
use crate::parts::{Fault, Parts};
use crate::provider::place::Place;
use crate::provider::template::{Piece, Template, UrlForm};

/// Most headers that a request may list as signed.
const LISTED_MAX: usize = 64;

/// The content as the slices that it is made of: a large body is never copied.
pub(crate) type Content<'t> = Vec<Cow<'t, [u8]>>;

/// What a template is filled in with.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'t, 'p> {
    /// The request.
    pub(crate) parts: &'t Parts<'p>,
    /// The timestamp's received characters.
    pub(crate) time: Option<&'t str>,
    /// The id's received characters.
    pub(crate) id: Option<&'t str>,
    /// The secret, where it is part of what is signed.
    pub(crate) secret: Option<&'t [u8]>,
    /// Where the time stands, if that is a header: a list of signed headers that lacks it would leave the time open.
    pub(crate) time_header: Option<&'t HeaderName>,
}

impl<'t> Inputs<'t, '_> {
    /// The signed bytes.
    ///
    /// # Errors
    /// What the template names is not there, or there twice.
    pub(crate) fn content(self, sign: &'t Template) -> Result<Content<'t>, Code> {
        let mut content = Vec::with_capacity(sign.pieces.len() + 1);
        for piece in &sign.pieces {
            match piece {
                Piece::Optional(inner) if self.lacks_one(inner)? => {}
                Piece::Optional(inner) => inner.iter().try_for_each(|piece| self.add(piece, &mut content))?,
                piece => self.add(piece, &mut content)?,
            }
        }
        Ok(content)
    }

    /// `name:value` of the listed headers in the order of the list, names in lower case, each there exactly once.
    fn listed(self, list: &HeaderName) -> Result<String, Code> {
        let names: Vec<_> = one_header(self.parts, list)?.split(',').map(str::trim).collect();
        let lacks =
            |wanted: &HeaderName| !names.iter().any(|name| name.eq_ignore_ascii_case(wanted.as_str()));
        if names.len() > LISTED_MAX || self.time_header.is_some_and(lacks) {
            return Err(Code::SignedPartMissing);
        }
        let mut text = String::new();
        for (index, name) in names.iter().enumerate() {
            let name = name.to_ascii_lowercase();
            let separator = if index > 0 { ";" } else { "" };
            let value = one_header(self.parts, name.as_str())?;
            write!(text, "{separator}{name}:{value}").or(Err(Code::Internal))?;
        }
        Ok(text)
    }

    /// `Name: value` and a line break for each listed header in the order of the list and with the names as they stand
    /// there, each header there exactly once; none for an empty list.
    fn lines(self, list: &str) -> Result<String, Code> {
        let names: Vec<&str> = if list.is_empty() { Vec::new() } else { list.split(',').collect() };
        let lacks =
            |wanted: &HeaderName| !names.iter().any(|name| name.eq_ignore_ascii_case(wanted.as_str()));
        if names.len() > LISTED_MAX || self.time_header.is_some_and(lacks) {
            return Err(Code::SignedPartMissing);
        }
        let mut text = String::new();
        for name in names {
            let value = one_header(self.parts, name)?;
            writeln!(text, "{name}: {value}").or(Err(Code::Internal))?;
        }
        Ok(text)
    }

    /// Whether nothing stands at one of the places.
    fn lacks_one(self, pieces: &[Piece]) -> Result<bool, Code> {
        for place in pieces.iter().filter_map(Piece::place) {
            if read(self.parts, place)?.is_none() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn add(self, piece: &'t Piece, content: &mut Content<'t>) -> Result<(), Code> {
        let parts = self.parts;
        let bytes = match piece {
            Piece::Literal(text) => Cow::Borrowed(text.as_bytes()),
            Piece::Body => Cow::Borrowed(parts.body),
            Piece::BodyEscaped => Cow::Owned(escaped(parts.body)?.into_bytes()),
            Piece::Timestamp => Cow::Borrowed(self.time.ok_or(Code::TimestampMissing)?.as_bytes()),
            Piece::Id => Cow::Borrowed(self.id.ok_or(Code::SignedPartMissing)?.as_bytes()),
            Piece::Method => Cow::Borrowed(parts.method.as_str().as_bytes()),
            Piece::Path => Cow::Borrowed(parts.path.as_bytes()),
            Piece::PathEscaped => Cow::Owned(path_escaped(parts.path)?.into_bytes()),
            Piece::PathSlash => Cow::Owned(path_slash(parts.path).into_bytes()),
            Piece::Url(form) => {
                let base = parts.public_url.ok_or(Code::SignedPartMissing)?;
                let (base, path) = url(*form, base, parts.path);
                content.push(to_bytes(base));
                to_bytes(path)
            }
            Piece::FormSorted => Cow::Owned(form_sorted(parts)?.into_bytes()),
            Piece::Crc32 => Cow::Owned(crc32fast::hash(parts.body).to_string().into_bytes()),
            Piece::Secret => Cow::Borrowed(self.secret.ok_or(Code::SignedPartMissing)?),
            Piece::Listed(name) => Cow::Owned(self.listed(name)?.into_bytes()),
            Piece::Lines(place) => Cow::Owned(self.lines(&there(parts, place)?)?.into_bytes()),
            Piece::Text(place) => to_bytes(there(parts, place)?),
            Piece::Lower(place) => Cow::Owned(there(parts, place)?.to_lowercase().into_bytes()),
            Piece::Line(place) => to_bytes(line(parts, place)?),
            // Brackets are not nested.
            Piece::Optional(_) => return Err(Code::Internal),
        };
        content.push(bytes);
        Ok(())
    }
}

/// The public URL with path and query as received.
pub(super) fn url_text(parts: &Parts<'_>) -> Result<String, Code> {
    let base = parts.public_url.ok_or(Code::SignedPartMissing)?;
    Ok(format!("{base}{}", parts.path))
}

fn read<'t>(parts: &Parts<'t>, place: &Place) -> Result<Option<Cow<'t, str>>, Code> {
    parts.read(place).map_err(|fault| match fault {
        Fault::Twice => Code::HeaderRepeated,
        Fault::Invalid | Fault::NotJson => Code::SignedPartMissing,
    })
}

fn there<'t>(parts: &Parts<'t>, place: &Place) -> Result<Cow<'t, str>, Code> {
    read(parts, place)?.ok_or(Code::SignedPartMissing)
}

/// Where fields are told apart by line breaks, a break inside one would let its rest pass for the next field.
fn line<'t>(parts: &Parts<'t>, place: &Place) -> Result<Cow<'t, str>, Code> {
    let text = there(parts, place)?;
    if text.contains('\n') { Err(Code::SignedPartMissing) } else { Ok(text) }
}

fn to_bytes(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// The form of the URL, in two parts.
fn url<'t>(form: UrlForm, base: &'t str, path: &'t str) -> (Cow<'t, str>, Cow<'t, str>) {
    match form {
        UrlForm::Whole => (base.into(), path.into()),
        UrlForm::Base => {
            let path = path.split_once('?').map_or(path, |(path, _)| path);
            (base.into(), if path == "/" { "" } else { path }.into())
        }
        UrlForm::WithPort => (with_port(base), apostrophes(path)),
        UrlForm::WithoutPort => (without_port(base).0.into(), apostrophes(path)),
        UrlForm::Unescaped => (base.into(), unescaped(path).into()),
    }
}

/// The base up to its port, and whether it has one. The base is `scheme://authority`; an IPv6 address has brackets.
fn without_port(base: &str) -> (&str, bool) {
    match base.rsplit_once(':') {
        Some((before, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => {
            (before, true)
        }
        _ => (base, false),
    }
}

fn with_port(base: &str) -> Cow<'_, str> {
    if without_port(base).1 {
        return base.into();
    }
    let port = if base.starts_with("http:") { ":80" } else { ":443" };
    format!("{base}{port}").into()
}

/// An apostrophe in a query is percent-encoded by the URL standard's serializer, and by senders that sign its output.
fn apostrophes(path: &str) -> Cow<'_, str> {
    match path.split_once('?') {
        Some((path, query)) if query.contains('\'') => {
            format!("{path}?{}", query.replace('\'', "%27")).into()
        }
        _ => path.into(),
    }
}

/// As a script would with `encodeURI(path + "?" + encodeURIComponent(query))`; a second question mark would leave open
/// what is the query.
fn path_escaped(path: &str) -> Result<String, Code> {
    const COMPONENT: &AsciiSet = &NON_ALPHANUMERIC
        .remove(b'-')
        .remove(b'_')
        .remove(b'.')
        .remove(b'!')
        .remove(b'~')
        .remove(b'*')
        .remove(b'\'')
        .remove(b'(')
        .remove(b')');
    const URI: &AsciiSet = &COMPONENT
        .remove(b';')
        .remove(b',')
        .remove(b'/')
        .remove(b'?')
        .remove(b':')
        .remove(b'@')
        .remove(b'&')
        .remove(b'=')
        .remove(b'+')
        .remove(b'$')
        .remove(b'#');
    let whole = match path.split_once('?') {
        Some((_, query)) if query.contains('?') => return Err(Code::SignedPartMissing),
        Some((path, query)) if !query.is_empty() => {
            format!("{path}?{}", utf8_percent_encode(query, COMPONENT))
        }
        Some((path, _)) => path.to_owned(),
        None => path.to_owned(),
    };
    Ok(utf8_percent_encode(&whole, URI).to_string())
}

fn path_slash(path: &str) -> String {
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    path.strip_suffix('/').map_or_else(|| format!("{path}/"), str::to_owned)
}

/// `:/?@!$'()*,;` may stand in a URL escaped or as they are.
fn unescaped(path: &str) -> String {
    const ESCAPES: [(&str, &str); 12] = [
        ("%3A", ":"),
        ("%2F", "/"),
        ("%3F", "?"),
        ("%40", "@"),
        ("%21", "!"),
        ("%24", "$"),
        ("%27", "'"),
        ("%28", "("),
        ("%29", ")"),
        ("%2A", "*"),
        ("%2C", ","),
        ("%3B", ";"),
    ];
    let mut text = path.to_owned();
    for (escape, plain) in ESCAPES {
        text = text.replace(escape, plain).replace(&escape.to_ascii_lowercase(), plain);
    }
    text
}

/// A backslash is doubled unless a slash follows it; what is not printable ASCII becomes `\n`, `\r`, `\t` or UTF-16 in
/// hex.
fn escaped(body: &[u8]) -> Result<String, Code> {
    let text = std::str::from_utf8(body).or(Err(Code::SignedPartMissing))?;
    let mut out = String::with_capacity(text.len() + 16);
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\\' if chars.peek() != Some(&'/') => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            ' '..='~' => out.push(char),
            _ => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    write!(out, "\\u{unit:04x}").or(Err(Code::Internal))?;
                }
            }
        }
    }
    Ok(out)
}

/// Sorted by name, then value. A value that is not UTF-8 is refused: two of them could become one.
fn form_sorted(parts: &Parts<'_>) -> Result<String, Code> {
    let mut pairs: Vec<_> = parts.form_pairs().ok_or(Code::SignedPartMissing)?.collect();
    pairs.sort_unstable();
    pairs.dedup();
    let text: String = pairs.iter().flat_map(|(name, value)| [name.as_ref(), value.as_ref()]).collect();
    if text.contains(char::REPLACEMENT_CHARACTER) { Err(Code::SignedPartMissing) } else { Ok(text) }
}

fn one_header<'t>(parts: &Parts<'t>, name: impl AsHeaderName) -> Result<&'t str, Code> {
    let mut values = parts.headers.get_all(name).iter();
    let value = values.next().ok_or(Code::SignedPartMissing)?;
    if values.next().is_some() {
        return Err(Code::HeaderRepeated);
    }
    std::str::from_utf8(value.as_bytes()).or(Err(Code::SignedPartMissing))
}

#[cfg(test)]
mod tests {
    use crate::fixture::{received, scheme, source};

    use super::*;

    const SECRET: &str = "s";

    /// What the template gives of a request, as text.
    fn content(sign: &str, headers: &[(&str, &[u8])], path: &str, body: &str) -> Result<String, Code> {
        let toml = format!("kind = \"hmac\"\nsign = {sign:?}\nsig = {{ from = \"header:x-sig\" }}\nid = []");
        let mut source = source(&scheme(&toml), &[SECRET]);
        source.public_url = Some("https://a:b@hooks.example.com".to_owned());
        let received = received(source, path, headers, body.to_owned());
        let scheme = &received.source.scheme;
        let parts = Parts::of(&received, &scheme.signed);
        let inputs = Inputs { parts: &parts, time: None, id: None, secret: None, time_header: None };
        inputs.content(&scheme.templates()[0]).map(|content| String::from_utf8(content.concat()).unwrap())
    }

    #[test]
    fn the_url_has_many_forms() {
        for (sign, path, wanted) in [
            ("{url}", "/p?a='%2F", "https://a:b@hooks.example.com/p?a='%2F"),
            ("{url_base}", "/p?a=1", "https://a:b@hooks.example.com/p"),
            ("{url_base}", "/?a=1", "https://a:b@hooks.example.com"),
            ("{url_with_port}", "/p'?a='", "https://a:b@hooks.example.com:443/p'?a=%27"),
            ("{url_without_port}", "/p?a", "https://a:b@hooks.example.com/p?a"),
            ("{url_unescaped}", "/p%2f?a=%3A%20", "https://a:b@hooks.example.com/p/?a=:%20"),
            ("{path}", "/p%2f?a", "/p%2f?a"),
            ("{path_escaped}", "/in/test?a=%20b&c='d'", "/in/test?a%253D%252520b%2526c%253D'd'"),
            ("{path_escaped}", "/p%2f?", "/p%252f"),
        ] {
            assert_eq!(content(sign, &[], path, "").as_deref(), Ok(wanted), "{sign}");
        }
        for (base, with, without) in [
            ("http://h", "http://h:80", "http://h"),
            ("http://h:8080", "http://h:8080", "http://h"),
            ("https://u:1@h", "https://u:1@h:443", "https://u:1@h"),
            ("https://[::1]", "https://[::1]:443", "https://[::1]"),
            ("https://[::1]:9", "https://[::1]:9", "https://[::1]"),
        ] {
            assert_eq!((with_port(base).as_ref(), without_port(base).0), (with, without));
        }
    }

    #[test]
    fn a_form_is_sorted_and_each_pair_counts_once() {
        for (body, wanted) in [
            ("b=2&a=1&b=1&a=1", Ok("a1b1b2")),
            ("ab=1&a=2", Ok("a2ab1")),
            ("a=&b=%26+", Ok("ab& ")),
            ("", Ok("")),
            ("{\"a\":1}", Err(Code::SignedPartMissing)),
            ("a=%ff", Err(Code::SignedPartMissing)),
        ] {
            assert_eq!(
                content("{form_sorted}", &[], "/", body).as_deref(),
                wanted.as_ref().map(|text| *text)
            );
        }
    }

    #[test]
    fn a_body_is_escaped_to_printable_ascii() {
        let text = "\\ \\/ \u{e4} \u{1f600} \r\n\t \u{7f}";
        let wanted = r"\\ \/ \u00e4 \ud83d\ude00 \r\n\t \u007f";
        assert_eq!(content("{body_escaped}", &[], "/", text).as_deref(), Ok(wanted));
    }

    #[test]
    fn what_stands_in_brackets_is_left_out_as_a_whole() {
        let sign = "a[b{json:/x}c]d[{lower:json:/y}]";
        assert_eq!(content(sign, &[], "/", "{\"x\":1,\"y\":\"Z\"}").as_deref(), Ok("ab1cdz"));
        assert_eq!(content(sign, &[], "/", "{\"x\":null}").as_deref(), Ok("ad"));
        assert_eq!(content(sign, &[], "/", "{\"x\":1,\"x\":2}"), Err(Code::HeaderRepeated));
        assert_eq!(content(sign, &[], "/", "no json"), Err(Code::SignedPartMissing));
    }

    #[test]
    fn a_line_has_no_break_and_a_checksum_is_decimal() {
        assert_eq!(content("{line:json:/x}", &[], "/", "{\"x\":\"a\\r\"}").as_deref(), Ok("a\r"));
        assert_eq!(content("{line:json:/x}", &[], "/", "{\"x\":\"a\\n\"}"), Err(Code::SignedPartMissing));
        // As zlib has it.
        assert_eq!(content("{crc32}", &[], "/", "webhook").as_deref(), Ok("2322863958"));
    }

    #[test]
    fn listed_headers_are_there_exactly_once() {
        let sign = "{listed:header:x-list}";
        let list: (&str, &[u8]) = ("x-list", b"X-B, x-list");
        let one: (&str, &[u8]) = ("x-b", b"1 2");
        assert_eq!(content(sign, &[list, one], "/", "").as_deref(), Ok("x-b:1 2;x-list:X-B, x-list"));
        assert_eq!(content(sign, &[list], "/", ""), Err(Code::SignedPartMissing));
        assert_eq!(content(sign, &[list, one, one], "/", ""), Err(Code::HeaderRepeated));
        assert_eq!(content(sign, &[one], "/", ""), Err(Code::SignedPartMissing));
    }
}
