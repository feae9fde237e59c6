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
pub(super) enum Marker {
    /// Somebody is at work.
    Lease,
    /// Committed in that generation.
    Done { generation: Generation, digest: ShortDigest },
    /// Not ours, or of a version that we do not know: says nothing.
    Unknown,
}

pub(super) fn lease(token: [u8; 12]) -> String {
    format!("L {}", URL_SAFE_NO_PAD.encode(token))
}

pub(super) fn done(generation: Generation, digest: ShortDigest) -> String {
    format!("D {} {}", generation.text(), URL_SAFE_NO_PAD.encode(digest.0))
}

pub(super) fn read(value: &[u8]) -> Marker {
    let Ok(text) = std::str::from_utf8(value) else { return Marker::Unknown };
    if text.starts_with("L ") {
        return Marker::Lease;
    }
    let done =
        text.strip_prefix("D ").and_then(|rest| rest.split_once(' ')).and_then(|(generation, digest)| {
            let generation = Generation::from_bytes(&URL_SAFE_NO_PAD.decode(generation).ok()?)?;
            let digest = ShortDigest(URL_SAFE_NO_PAD.decode(digest).ok()?.try_into().ok()?);
            Some(Marker::Done { generation, digest })
        });
    done.unwrap_or(Marker::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let generation = Generation::from_bytes(&[9, 8, 7, 6, 5, 4]).unwrap();
        let digest = ShortDigest::of(Digest([3; 32]));
        let text = done(generation, digest);
        assert_eq!(read(text.as_bytes()), Marker::Done { generation, digest });
        assert!(text.len() <= 20, "Redis keeps {} bytes in the next larger block", text.len());
        assert_eq!(read(lease([7; 12]).as_bytes()), Marker::Lease);
    }

    #[test]
    fn anything_else_says_nothing() {
        for value in
            ["", "D", "D ", "D x", "D x y", "D abcdefgh AAAAAAA!", "D abcdefg AAAAAAAA", "1", "done", "l abc"]
        {
            assert_eq!(read(value.as_bytes()), Marker::Unknown, "{value:?}");
        }
        assert_eq!(read(&[0xff, 0xfe]), Marker::Unknown);
    }
}
