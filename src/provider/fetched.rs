//! Keys that were fetched for a request.

use std::sync::Arc;

use super::token_key::TokenKey;
use super::{Key, PublicKey};

/// Keys that were fetched for a request. They count only where the source has none of its own.
#[derive(Debug, Clone, Default)]
pub enum FetchedKeys {
    /// Nothing had to be fetched.
    #[default]
    None,
    /// Those of the certificate that the request points to.
    Certified(Arc<[PublicKey]>),
    /// Those of a set that is published, in the place of one secret.
    Set(Key),
}

impl FetchedKeys {
    /// Reads a set that everybody can read; a shared secret in it is none any more and is left out.
    ///
    /// # Errors
    /// There is no key in it that can be used.
    pub(crate) fn read_set(text: &[u8]) -> Result<Key, String> {
        let text = std::str::from_utf8(text).or(Err("this is no text"))?;
        TokenKey::published(text).map(Key::tokens)
    }

    pub(crate) fn certified(&self) -> &[PublicKey] {
        match self {
            Self::Certified(keys) => keys,
            Self::None | Self::Set(_) => &[],
        }
    }

    pub(crate) fn set(&self) -> &[Key] {
        match self {
            Self::Set(key) => std::slice::from_ref(key),
            Self::None | Self::Certified(_) => &[],
        }
    }
}
