//! A handshake's answer, filled in.
//!
//! Invariant: nothing of the request goes into it but tokens of the handshake's shape, and nothing of the settings but
//! what the scheme names; a part that is missing means that there is no answer.

use std::borrow::Cow;

use http::{HeaderMap, HeaderValue};
use ring::digest;

use super::Reply;
use crate::config::Source;
use crate::error::Code;
use crate::parts::Parts;
use crate::provider::Key;
use crate::provider::handshake::reply::{HashPart, ReplyPiece, ReplyRule, Shape};
use crate::provider::place::Place;
use crate::verify::tag;

/// What an answer is made of.
pub(super) struct Answer<'t, 'p> {
    pub(super) rule: &'t ReplyRule,
    /// The key that signs for the source.
    pub(super) key: Option<&'t Key>,
    pub(super) parts: &'t Parts<'p>,
    pub(super) source: &'t Source,
}

impl Answer<'_, '_> {
    pub(super) fn reply(&self) -> Result<Reply, Code> {
        let mut headers = HeaderMap::with_capacity(self.rule.headers.len());
        for (name, pieces) in &self.rule.headers {
            let value = HeaderValue::from_str(&self.filled(pieces, false)?);
            headers.insert(name, value.or(Err(Code::HandshakeMalformed))?);
        }
        let body = self.filled(&self.rule.body, self.rule.json)?.into();
        Ok(Reply { status: self.rule.status, headers, body })
    }

    fn filled(&self, pieces: &[ReplyPiece], json: bool) -> Result<String, Code> {
        let mut filled = String::new();
        for piece in pieces {
            match piece {
                ReplyPiece::Literal(text) => filled.push_str(text),
                piece if json => filled.push_str(&escaped(&self.text(piece)?)),
                piece => filled.push_str(&self.text(piece)?),
            }
        }
        Ok(filled)
    }

    fn text(&self, piece: &ReplyPiece) -> Result<String, Code> {
        match piece {
            ReplyPiece::Literal(text) => Ok(text.clone()),
            ReplyPiece::Token(place) => Ok(self.token(place)?.into_owned()),
            ReplyPiece::Hmac(encoding, place) => {
                let token = self.token(place)?;
                let key = self.key.and_then(Key::as_hmac).ok_or(Code::HandshakeRefused)?;
                Ok(encoding.encode(tag(key, &[token.as_bytes().into()]).as_ref()))
            }
            ReplyPiece::Sha256(hashed) => {
                let mut context = digest::Context::new(&digest::SHA256);
                for part in hashed {
                    context.update(&self.hash_part(part)?);
                }
                Ok(hex::encode(context.finish()))
            }
            ReplyPiece::Config(name) => {
                Ok(String::from_utf8_lossy(configured(name, self.source)?).into_owned())
            }
        }
    }

    fn hash_part(&self, part: &HashPart) -> Result<Vec<u8>, Code> {
        match part {
            HashPart::Token(place) => Ok(self.token(place)?.as_bytes().to_vec()),
            HashPart::Config(name) => Ok(configured(name, self.source)?.to_vec()),
            HashPart::Endpoint => {
                let base = self.source.public_url.as_deref().ok_or(Code::HandshakeRefused)?;
                let path = self.parts.path.split_once('?').map_or(self.parts.path, |(path, _)| path);
                Ok(format!("{base}{path}").into_bytes())
            }
        }
    }

    fn token(&self, place: &Place) -> Result<Cow<'_, str>, Code> {
        token(place, self.parts, self.rule.token)
    }
}

/// What the settings have under that name.
pub(super) fn configured<'s>(name: &str, source: &'s Source) -> Result<&'s [u8], Code> {
    source.handshake_secrets.get(name).and_then(Key::as_token).ok_or(Code::HandshakeRefused)
}

/// The text at a place, if it has the shape of a token.
pub(super) fn token<'a>(place: &Place, parts: &Parts<'a>, shape: Shape) -> Result<Cow<'a, str>, Code> {
    match parts.read(place) {
        Ok(Some(text)) if shape.fits(text.as_bytes()) => Ok(text),
        Ok(_) | Err(_) => Err(Code::HandshakeMalformed),
    }
}

/// As it stands inside a JSON string.
fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted.get(1..quoted.len() - 1).unwrap_or_default().to_owned()
}
