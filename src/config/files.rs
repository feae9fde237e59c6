//! The files that settings are read from.
//!
//! Invariant: what is noted of a file is what was read from it, so that no change between reading and looking again is
//! missed. Of what a file holds only a hash is kept, and no `Debug` output shows it: it may be a secret.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, metadata};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use ring::digest::{SHA256, digest};

/// Why a file was not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unread {
    /// The operating system's reason.
    #[error("cannot be read: {0}")]
    Cannot(#[from] io::Error),
    /// It has more bytes than such a file may have.
    #[error("is larger than {0} bytes, which is the limit")]
    TooLarge(u64),
}

/// What was read from which files; equal values mean the same files with the same bytes.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Files(BTreeMap<PathBuf, Noted>);

#[derive(Clone, PartialEq, Eq)]
struct Noted {
    bytes_max: u64,
    /// None if it was not read.
    hash: Option<Vec<u8>>,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Files {
    /// Reads a file of at most `bytes_max`, and notes what was read.
    pub(super) fn read(&mut self, path: &Path, bytes_max: u64) -> Result<Vec<u8>, Unread> {
        let read = read(path, bytes_max);
        self.note(path, bytes_max, read.as_ref().ok());
        read
    }

    fn note(&mut self, path: &Path, bytes_max: u64, read: Option<&Vec<u8>>) {
        let hash = read.map(|bytes| digest(&SHA256, bytes).as_ref().to_vec());
        self.0.insert(path.to_owned(), Noted { bytes_max, hash });
    }

    /// The same files as they are now. What is no plain file (a pipe gives its bytes once) counts as unchanged.
    #[must_use]
    pub fn look_again(&self) -> Self {
        let mut now = Self::default();
        for (path, noted) in &self.0 {
            if metadata(path).is_ok_and(|found| !found.is_file()) {
                now.0.insert(path.clone(), noted.clone());
            } else {
                now.note(path, noted.bytes_max, read(path, noted.bytes_max).ok().as_ref());
            }
        }
        now
    }
}

/// What a look at the files came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// They are as they were read.
    Same,
    /// They are other ones, and may still be being written.
    Unsettled,
    /// They are other ones, and the look before found the same.
    Changed,
}

/// Looks at files one after the other. One look alone would take a file that is just being written for a changed one: its
/// first half may be settings without the other half's sources.
#[derive(Debug)]
pub struct Looks {
    read: Files,
    found: Option<Files>,
}

impl Looks {
    /// Files as they were read.
    #[must_use]
    pub fn after(read: Files) -> Self {
        Self { read, found: None }
    }

    /// What is to be looked at.
    #[must_use]
    pub fn read(&self) -> &Files {
        &self.read
    }

    /// Judges what a look found.
    pub fn judge(&mut self, now: Files) -> Look {
        if now == self.read {
            self.found = None;
            Look::Same
        } else if self.found.as_ref() == Some(&now) {
            Look::Changed
        } else {
            self.found = Some(now);
            Look::Unsettled
        }
    }
}

fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>, Unread> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(Unread::TooLarge(bytes_max));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_content_is_seen_and_the_same_content_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        std::fs::write(&one, "canary").unwrap();
        let mut files = Files::default();
        assert_eq!(files.read(&one, 10).unwrap(), b"canary");
        assert!(matches!(files.read(&two, 10), Err(Unread::Cannot(_))));
        assert!(files.look_again() == files);

        std::fs::write(&one, "canarY").unwrap();
        assert!(files.look_again() != files, "other bytes of the same length");
        // As editors and orchestrators do: another file under the same name.
        std::fs::write(folder.path().join("new"), "canary").unwrap();
        std::fs::rename(folder.path().join("new"), &one).unwrap();
        assert!(files.look_again() == files, "the same bytes in another file");
        std::fs::write(&two, "").unwrap();
        assert!(files.look_again() != files, "a file that was not there");

        std::fs::write(&one, "more than ten").unwrap();
        assert!(matches!(files.read(&one, 10), Err(Unread::TooLarge(10))));
        files.read(&two, 10).unwrap();
        assert!(files.look_again() == files, "still too large");
        let shown = format!("{files:?}");
        assert!(shown.contains("one") && !shown.contains("hash"), "{shown}");
    }

    #[test]
    fn what_two_looks_in_a_row_find_is_a_change() {
        let file = |text: &str| {
            let mut files = Files::default();
            files.note(Path::new("f"), 10, Some(&text.into()));
            files
        };
        let mut looks = Looks::after(file("old"));
        for (text, expected) in [
            ("old", Look::Same),
            ("n", Look::Unsettled),
            ("ne", Look::Unsettled),
            ("old", Look::Same),
            ("ne", Look::Unsettled),
            ("new", Look::Unsettled),
            ("new", Look::Changed),
        ] {
            assert_eq!(looks.judge(file(text)), expected, "{text}");
        }
    }
}
