//! Provider presets and the scheme grammar as data.

use std::sync::Arc;
use std::time::Duration;

use crate::settings::Table;

/// How a provider signs, and what is known about it.
#[derive(Debug)]
pub struct Scheme {
    /// Name of the preset or of the user's own scheme.
    pub name: String,
    /// What is known of the provider's behaviour.
    pub facts: Facts,
}

/// What is known of a provider's behaviour; used for defaults and by `check`.
#[derive(Debug, Default, Clone)]
pub struct Facts {
    /// How long the provider retries by itself.
    pub retry_window: Option<Duration>,
    /// How long an operator can resend by hand.
    pub resend_window: Option<Duration>,
    /// How long the provider waits for an answer.
    pub answer_deadline: Option<Duration>,
    /// The largest body it sends, in bytes.
    pub body_max: Option<usize>,
    /// Whether the signature covers the id.
    pub id_signed: bool,
}

/// A secret, decoded and ready for use; never printed.
#[derive(Clone)]
pub struct Key {
    _bytes: Arc<[u8]>,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(…)")
    }
}

impl Scheme {
    /// Reads a scheme table; mistakes are reported to the table's file.
    pub fn read(name: &str, table: Table) -> Option<Self> {
        table.finish();
        Some(Self { name: name.to_owned(), facts: Facts::default() })
    }

    /// The embedded preset of that name.
    #[must_use]
    pub fn preset(name: &str) -> Option<Arc<Self>> {
        let _ = name;
        None
    }

    /// Names of all embedded presets.
    #[must_use]
    pub fn preset_names() -> &'static [&'static str] {
        &[]
    }

    /// Turns the text of a secret into a key, as this scheme encodes it.
    ///
    /// # Errors
    /// What is wrong with it, without the secret.
    pub fn key(&self, secret: &str) -> Result<Key, String> {
        Ok(Key { _bytes: secret.as_bytes().into() })
    }
}
