//! A raw HTTP request in a file, as a proxy or a debugger writes it down.

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderName, HeaderValue};

/// A request, and what is odd about how it was written down.
#[derive(Debug)]
pub(super) struct Raw<'a> {
    pub(super) head: Parts,
    pub(super) body: &'a [u8],
    pub(super) notes: Vec<String>,
}

/// Takes a head with CRLF or LF; the body is the rest, byte for byte, or as much of it as `Content-Length` says.
///
/// # Errors
/// Where it is no request.
pub(super) fn parse(text: &[u8]) -> Result<Raw<'_>, String> {
    let (first, mut rest) = line(text).ok_or("there is no request line")?;
    let mut request = request_line(first)?;
    let mut number = 1;
    loop {
        number += 1;
        let (header, tail) = line(rest).ok_or("no empty line ends the head")?;
        rest = tail;
        if header.is_empty() {
            break;
        }
        let (name, value) = header_line(header).map_err(|problem| format!("line {number}: {problem}"))?;
        request = request.header(name, value);
    }
    let head = request.body(()).map_err(|error| error.to_string())?.into_parts().0;
    if head.headers.contains_key(TRANSFER_ENCODING) {
        return Err(
            "the body is written with Transfer-Encoding: give it without, and drop that header".to_owned()
        );
    }
    let mut notes = Vec::new();
    let body = body(&head, rest, &mut notes);
    Ok(Raw { head, body, notes })
}

/// Up to a line end, and what is behind it; a last line without an end is one too.
fn line(text: &[u8]) -> Option<(&[u8], &[u8])> {
    if text.is_empty() {
        return None;
    }
    let end = text.iter().position(|byte| *byte == b'\n').unwrap_or(text.len());
    let line = text.get(..end)?;
    let rest = text.get(end + 1..).unwrap_or_default();
    Some((line.strip_suffix(b"\r").unwrap_or(line), rest))
}

fn request_line(line: &[u8]) -> Result<http::request::Builder, String> {
    let wrong = || {
        let shown = line.get(..line.len().min(80)).unwrap_or_default().escape_ascii();
        format!("line 1: \"{shown}\" is no request line like POST /in/SOURCE HTTP/1.1")
    };
    let text = std::str::from_utf8(line).map_err(|_bad| wrong())?;
    let mut words = text.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(wrong());
    };
    if !version.starts_with("HTTP/") {
        return Err(wrong());
    }
    let method: http::Method = method.parse().map_err(|_bad| wrong())?;
    let target: http::Uri = target.parse().map_err(|_bad| wrong())?;
    Ok(http::Request::builder().method(method).uri(target))
}

fn header_line(line: &[u8]) -> Result<(HeaderName, HeaderValue), String> {
    let wrong = || "this is no header like Name: value".to_owned();
    let colon = line.iter().position(|byte| *byte == b':').ok_or_else(wrong)?;
    let name = line.get(..colon).and_then(|name| HeaderName::from_bytes(name).ok()).ok_or_else(wrong)?;
    let value = line.get(colon + 1..).unwrap_or_default().trim_ascii();
    Ok((name, HeaderValue::from_bytes(value).map_err(|_bad| wrong())?))
}

fn body<'a>(head: &Parts, rest: &'a [u8], notes: &mut Vec<String>) -> &'a [u8] {
    let length =
        head.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    let Some(length) = length else { return rest };
    if rest.len() < length {
        notes.push(format!(
            "the body is cut off, or its line ends were changed: Content-Length says {length} bytes, and there are {}",
            rest.len()
        ));
    }
    rest.get(..length).unwrap_or(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_and_body_are_told_apart() {
        for (text, body) in [
            ("POST /in/a?b=%20 HTTP/1.1\r\nHost: h\r\nX-A:  b c \r\n\r\nx\r\n\r\ny\n", "x\r\n\r\ny\n"),
            ("POST /in/a?b=%20 HTTP/1.1\nX-A: b c\n\nx\n", "x\n"),
            ("POST /in/a?b=%20 HTTP/1.1\nX-A: b c\nContent-Length: 1\n\nx\n", "x"),
            ("POST /in/a?b=%20 HTTP/1.1\nX-A: b c\n\n", ""),
        ] {
            let raw = parse(text.as_bytes()).unwrap();
            assert_eq!(raw.head.uri.path_and_query().unwrap(), "/in/a?b=%20");
            assert_eq!(raw.head.headers["x-a"], "b c");
            assert_eq!(raw.body, body.as_bytes());
            assert_eq!(raw.notes, [""; 0]);
        }
        let raw = parse(b"POST / HTTP/1.1\nContent-Length: 5\n\nx\n").unwrap();
        assert_eq!((raw.body, raw.notes.len()), (b"x\n".as_slice(), 1));
    }

    #[test]
    fn what_is_no_request_is_refused_with_its_line() {
        for (text, wanted) in [
            ("", "no request line"),
            ("{\"a\":1}", "line 1: "),
            ("POST / HTTP/1.1 x\n\n", "line 1: "),
            ("POST /\n\n", "line 1: "),
            ("POST / HTTP/1.1\nX-A: b", "no empty line"),
            ("POST / HTTP/1.1\nX-A: b\nnothing\n\n", "line 3: this is no header"),
            ("POST / HTTP/1.1\nTransfer-Encoding: chunked\n\n0\n", "Transfer-Encoding"),
        ] {
            let problem = parse(text.as_bytes()).unwrap_err();
            assert!(problem.contains(wanted), "{text:?}: {problem}");
        }
    }
}
