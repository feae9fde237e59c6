//! The two values that stand in Redis: `L <token>` and `D <generation> <digest>`.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::generation::Generation;
use crate::identify::Digest;

/// The first 48 bits of a body digest: enough to see that a reused id has another body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortDigest([u8; 6]);

impl ShortDigest {
    /// Shortens a digest.
    #[must_use]
    pub fn of(digest: Digest) -> Self {
        let mut short = [0; 6];
        short.iter_mut().zip(digest.0).for_each(|(short, byte)| *short = byte);
        Self(short)
    }
}

/// A value as found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Marker<'a> {
    /// Somebody is at work.
    Lease(&'a str),
    /// Committed in the named generation.
    Done { generation: &'a str, digest: ShortDigest },
    /// Not ours, or of a version that we do not know: says nothing.
    Unknown,
}

pub(super) fn lease(token: &str) -> String {
    format!("L {token}")
}

pub(super) fn done(generation: Generation, digest: ShortDigest) -> String {
    format!("D {} {}", generation.text(), URL_SAFE_NO_PAD.encode(digest.0))
}

pub(super) fn read(value: &[u8]) -> Marker<'_> {
    let Ok(text) = std::str::from_utf8(value) else { return Marker::Unknown };
    if let Some(token) = text.strip_prefix("L ") {
        return Marker::Lease(token);
    }
    let Some((generation, digest)) = text.strip_prefix("D ").and_then(|rest| rest.split_once(' ')) else {
        return Marker::Unknown;
    };
    match URL_SAFE_NO_PAD.decode(digest).ok().and_then(|bytes| bytes.try_into().ok()) {
        Some(bytes) => Marker::Done { generation, digest: ShortDigest(bytes) },
        None => Marker::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let generation = Generation::from_bytes(&[9, 8, 7, 6, 5, 4]).unwrap();
        let digest = ShortDigest::of(Digest([3; 32]));
        let text = done(generation, digest);
        assert_eq!(read(text.as_bytes()), Marker::Done { generation: &generation.text(), digest });
        assert!(text.len() <= 20, "Redis keeps {} bytes in the next larger block", text.len());
        assert_eq!(read(lease("abc").as_bytes()), Marker::Lease("abc"));
    }

    #[test]
    fn anything_else_says_nothing() {
        for value in ["", "D", "D ", "D x", "D x y", "D abcdefgh AAAAAAA!", "1", "done", "l abc"] {
            assert_eq!(read(value.as_bytes()), Marker::Unknown, "{value:?}");
        }
        assert_eq!(read(&[0xff, 0xfe]), Marker::Unknown);
    }
}
