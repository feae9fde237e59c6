//! Fields of a body that is multipart/form-data (RFC 7578).
//!
//! Invariant: whether a body is one, and what separates its parts, shows in the body alone. The content type is signed by
//! nobody, and another boundary in it would make other fields of the same bytes. What two readers could read in two
//! ways is refused; nothing is ever made up for it.

use std::str;

use httparse::{EMPTY_HEADER, Header, Status};
use memchr::memmem;

/// Most headers of a part.
const HEADERS_MAX: usize = 16;
/// Most parts.
const PARTS_MAX: usize = 1024;
/// Longest boundary (RFC 2046, 5.1.1).
const BOUNDARY_MAX: usize = 70;

/// A body that cannot be read in one way only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed;

/// The parts that have a name, in their order.
pub(crate) type Fields<'a> = Vec<(&'a str, &'a [u8])>;

/// Whether the body is multipart: it begins with a boundary on a line of its own, as nothing else does that is read here.
pub(crate) fn is_multipart(body: &[u8]) -> bool {
    delimiter(body).is_some()
}

/// All fields of a body that is multipart.
///
/// # Errors
/// It is not, or it could be read in several ways.
pub(crate) fn fields(body: &[u8]) -> Result<Fields<'_>, Malformed> {
    let delimiter = delimiter(body).ok_or(Malformed)?;
    let mut rest = body.get(delimiter.len()..).ok_or(Malformed)?;
    let separator = [b"\r\n", delimiter].concat();
    let find = memmem::Finder::new(&separator);
    let mut fields = Vec::new();
    while let Some(part) = rest.strip_prefix(b"\r\n") {
        let end = find.find(part).ok_or(Malformed)?;
        let (part, after) = part.split_at_checked(end).ok_or(Malformed)?;
        if fields.len() == PARTS_MAX {
            return Err(Malformed);
        }
        fields.push(field(part)?);
        rest = after.get(separator.len()..).ok_or(Malformed)?;
    }
    match rest.strip_prefix(b"--") {
        Some(end) if end.trim_ascii().is_empty() => Ok(fields),
        _ => Err(Malformed),
    }
}

/// `--BOUNDARY` of the first line, if a part begins after it.
fn delimiter(body: &[u8]) -> Option<&[u8]> {
    let line = body.get(..body.len().min(BOUNDARY_MAX + 4))?;
    let (delimiter, _) = line.split_at_checked(memmem::find(line, b"\r\n")?)?;
    let boundary = delimiter.strip_prefix(b"--")?;
    let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=?".contains(byte);
    (!boundary.is_empty() && boundary.iter().all(allowed)).then_some(delimiter)
}

/// Name and value of one part.
fn field(part: &[u8]) -> Result<(&str, &[u8]), Malformed> {
    let end = memmem::find(part, b"\r\n\r\n").ok_or(Malformed)? + 4;
    let (head, value) = part.split_at_checked(end).ok_or(Malformed)?;
    let mut headers = [EMPTY_HEADER; HEADERS_MAX];
    let headers = match httparse::parse_headers(head, &mut headers) {
        Ok(Status::Complete((read, headers))) if read == head.len() => headers,
        _ => return Err(Malformed),
    };
    // Base64 and the like are of mails, and no browser or server has ever agreed on them here.
    if only(headers, "content-transfer-encoding")?.is_some_and(is_encoded) {
        return Err(Malformed);
    }
    let disposition = only(headers, "content-disposition")?.ok_or(Malformed)?;
    Ok((name(str::from_utf8(disposition).or(Err(Malformed))?)?, value))
}

fn is_encoded(encoding: &[u8]) -> bool {
    !["7bit", "8bit", "binary"].iter().any(|plain| encoding.eq_ignore_ascii_case(plain.as_bytes()))
}

/// The value of a header that stands there once at most.
fn only<'a>(headers: &[Header<'a>], name: &str) -> Result<Option<&'a [u8]>, Malformed> {
    let mut found = headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
    let first = found.next();
    if found.next().is_some() { Err(Malformed) } else { Ok(first.map(|header| header.value)) }
}

/// The name in `form-data; name="json"; filename="a"`. Escapes are refused: some readers take them as they stand.
fn name(disposition: &str) -> Result<&str, Malformed> {
    let (kind, mut rest) = disposition.split_once(';').ok_or(Malformed)?;
    if !kind.trim().eq_ignore_ascii_case("form-data") || disposition.contains(['\\', '%']) {
        return Err(Malformed);
    }
    let mut name = None;
    loop {
        let (key, value) = rest.split_once("=\"").ok_or(Malformed)?;
        let (value, after) = value.split_once('"').ok_or(Malformed)?;
        match key.trim() {
            "name" if name.is_none() => name = Some(value),
            "filename" => {}
            _ => return Err(Malformed),
        }
        match after.trim_start() {
            "" => return name.ok_or(Malformed),
            after => rest = after.strip_prefix(';').ok_or(Malformed)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Vec<(&str, &str)>, Malformed> {
        let fields = fields(body.as_bytes())?;
        Ok(fields.iter().map(|(name, value)| (*name, str::from_utf8(value).unwrap())).collect())
    }

    fn part(head: &str, value: &str) -> String {
        format!("--b\r\n{head}\r\n\r\n{value}\r\n")
    }

    const A: &str = "Content-Disposition: form-data; name=\"a\"";

    #[test]
    fn fields_are_read_as_they_stand() {
        let file =
            "content-disposition: form-data; name=\"f\"; filename=\"x.txt\"\r\nContent-Type: text/plain";
        let body = part(A, "1\r\n--c\r\n2") + &part(file, "") + "--b--\r\n";
        assert_eq!(read(&body), Ok(vec![("a", "1\r\n--c\r\n2"), ("f", "")]));
        assert_eq!(read(&(part(A, "1") + &part(A, "2") + "--b--")), Ok(vec![("a", "1"), ("a", "2")]));
    }

    #[test]
    fn only_a_boundary_on_its_own_line_makes_a_body_multipart() {
        for body in ["a=1&b=2", "--a=b", "--\r\nx", "", "{}", "-b\r\n", "--b\n", "--b b\r\n", "\r\n--b\r\n"] {
            assert!(!is_multipart(body.as_bytes()), "{body:?}");
            assert_eq!(read(body), Err(Malformed), "{body:?}");
        }
        assert!(is_multipart(format!("--{}\r\n", "x".repeat(BOUNDARY_MAX)).as_bytes()));
        assert!(!is_multipart(format!("--{}\r\n", "x".repeat(BOUNDARY_MAX + 1)).as_bytes()));
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        let end = "--b--";
        for head in [
            "Content-Disposition: form-data",
            "Content-Disposition: form-data; filename=\"a\"",
            "Content-Disposition: form-data; name=a",
            "Content-Disposition: form-data; name=\"a\"; name=\"b\"",
            "Content-Disposition: form-data; name=\"a\"; name*=\"b\"",
            "Content-Disposition: form-data; name=\"a\\\"b\"",
            "Content-Disposition: form-data; name=\"a%22\"",
            "Content-Disposition: form-data; name=\"a\" x",
            "Content-Disposition: attachment; name=\"a\"",
            "Content-Type: text/plain",
            &format!("{A}\r\n{A}"),
            &format!("{A}\r\nContent-Transfer-Encoding: base64"),
            &format!("{A}\n\nx: y"),
        ] {
            assert_eq!(read(&(part(head, "v") + end)), Err(Malformed), "{head:?}");
        }
        for body in [
            part(A, "1"),
            part(A, "1") + "--b",
            part(A, "1") + "--b--more",
            part(A, "1") + "--bx",
            format!("--b\r\n{A}\r\n\r\n1--b--"),
            part(A, "1").repeat(PARTS_MAX + 1) + end,
        ] {
            assert_eq!(read(&body), Err(Malformed), "{body:.99}");
        }
    }
}
