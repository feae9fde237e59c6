//! The requests of a plan, and what of them is signed.
//!
//! What is signed is worked out here a second time and in another way than the program does: from the values that
//! went into the request, not from the request.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::plan::{Form, Part, Plan, Spot, TimeAt};
use super::seal::Seal;
use crate::fixture::NOW;

pub(super) const URL: &str = "https://hooks.example.com";
const PATH: &str = "/in/te%20st/w";
const CERT: &str = "https://keys.example.com/k";

/// The values that go into a request.
#[derive(Debug, Clone)]
pub(super) struct Values {
    pub(super) spots: BTreeMap<Spot, String>,
    pub(super) free: String,
    pub(super) id: String,
    pub(super) time: String,
}

/// A request as it arrives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sent {
    pub(super) method: http::Method,
    pub(super) target: String,
    pub(super) headers: Vec<(String, Vec<u8>)>,
    pub(super) body: Vec<u8>,
}

impl Plan {
    /// The timestamp's text, some seconds after the tests' moment.
    pub(super) fn time_text(&self, after: i64) -> String {
        match self.unit {
            "ms" => ((NOW + after) * 1000).to_string(),
            "rfc3339" => jiff::Timestamp::from_second(NOW + after).unwrap().to_string(),
            _ => (NOW + after).to_string(),
        }
    }

    /// The places that are signed and in the request.
    pub(super) fn signed_spots(&self) -> Vec<Spot> {
        let mut spots = Vec::new();
        for part in &self.parts {
            match part {
                Part::At(spot) | Part::Lower(spot) | Part::Line(spot) | Part::Maybe(spot, true) => {
                    spots.push(*spot);
                }
                Part::Listed | Part::Lines => spots.extend([Spot::Header(0), Spot::Header(1)]),
                _ => {}
            }
        }
        spots.sort_unstable();
        spots.dedup();
        spots
    }

    /// Values for a request.
    pub(super) fn values(&self, words: &[String], free: &str) -> Values {
        let spots = self.signed_spots().into_iter().zip(words.iter().cycle().cloned()).collect();
        let mut values =
            Values { spots, free: free.to_owned(), id: "id-1".to_owned(), time: self.time_text(0) };
        if let TimeAt::At(spot) = self.time {
            values.spots.insert(spot, values.time.clone());
        }
        if let Some((spot, hash, encoding)) = self.said {
            let digest = hash.digest([self.body(&values, None).as_slice()]);
            values.spots.insert(spot, encoding.encode(digest.as_ref()));
        }
        values
    }

    pub(super) fn body(&self, values: &Values, sig: Option<&str>) -> Vec<u8> {
        let of_body = |(spot, text): (&Spot, &String)| match spot {
            Spot::Body(at) => Some((format!("f{at}"), text.clone())),
            _ => None,
        };
        let mut fields: Vec<(String, String)> = values.spots.iter().filter_map(of_body).collect();
        if let (Spot::Body(at), Some(sig)) = (self.sig, sig) {
            fields.push((format!("f{at}"), sig.to_owned()));
        }
        fields.push(("free".to_owned(), values.free.clone()));
        match self.form {
            Form::Raw => format!("r{}", values.free).into_bytes(),
            Form::Json => {
                let members = fields.into_iter().map(|(name, text)| (name, text.into()));
                serde_json::Value::Object(members.collect()).to_string().into_bytes()
            }
            Form::Fields => {
                form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish().into_bytes()
            }
        }
    }

    pub(super) fn target(&self, values: &Values, sig: Option<&str>) -> String {
        let of_query = |(spot, text): (&Spot, &String)| match spot {
            Spot::Query(at) => Some((format!("q{at}"), text.clone())),
            _ => None,
        };
        let mut pairs: Vec<(String, String)> = values.spots.iter().filter_map(of_query).collect();
        if let (Spot::Query(at), Some(sig)) = (self.sig, sig) {
            pairs.push((format!("q{at}"), sig.to_owned()));
        }
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish();
        if query.is_empty() { PATH.to_owned() } else { format!("{PATH}?{query}") }
    }

    fn list(&self) -> String {
        let time =
            if let TimeAt::At(Spot::Header(at)) = self.time { format!(",X-F{at}") } else { String::new() };
        format!("x-list, X-F0,x-f1{time}")
    }

    /// The signed bytes.
    pub(super) fn content(&self, values: &Values, secret: &str) -> Vec<u8> {
        let mut content = Vec::new();
        for part in &self.parts {
            content.extend(self.bytes(*part, values, secret));
        }
        content
    }

    fn bytes(&self, part: Part, values: &Values, secret: &str) -> Vec<u8> {
        let (body, target) = (self.body(values, None), self.target(values, None));
        let at = |spot: Spot| values.spots[&spot].clone();
        let text = match part {
            Part::Body => return body,
            Part::Text(text) => text.to_owned(),
            Part::BodyEscaped => escaped(&String::from_utf8(body).unwrap()),
            Part::Crc32 => crc32fast::hash(&body).to_string(),
            Part::FormSorted => {
                let mut pairs: Vec<_> = form_urlencoded::parse(&body).collect();
                pairs.sort();
                pairs.iter().flat_map(|(name, value)| [name.as_ref(), value.as_ref()]).collect()
            }
            Part::Time => values.time.clone(),
            Part::Id => values.id.clone(),
            Part::Method => "POST".to_owned(),
            Part::Path => target,
            Part::PathEscaped => path_escaped(&target),
            Part::PathSlash => format!("{PATH}/"),
            Part::Url | Part::UrlWithoutPort => format!("{URL}{target}"),
            Part::UrlBase => format!("{URL}{PATH}"),
            Part::UrlWithPort => format!("{URL}:443{target}"),
            Part::UrlUnescaped => format!("{URL}{}", target.replace("%3A", ":").replace("%2F", "/")),
            Part::Lines => self.lines(values),
            Part::Secret => secret.to_owned(),
            Part::At(spot) | Part::Line(spot) => at(spot),
            Part::Lower(spot) => at(spot).to_lowercase(),
            Part::Listed => self.listed(values),
            Part::Maybe(_, false) => String::new(),
            Part::Maybe(spot, true) => format!("k={};", at(spot)),
        };
        text.into_bytes()
    }

    fn lines_list(&self) -> String {
        let time =
            if let TimeAt::At(Spot::Header(at)) = self.time { format!(",x-f{at}") } else { String::new() };
        format!("X-F0,x-f1{time}")
    }

    fn lines(&self, values: &Values) -> String {
        let at = |spot| &values.spots[&Spot::Header(spot)];
        let time = if let TimeAt::At(Spot::Header(at)) = self.time {
            format!("x-f{at}: {}\n", values.time)
        } else {
            String::new()
        };
        format!("X-F0: {}\nx-f1: {}\n{time}", at(0), at(1))
    }

    fn listed(&self, values: &Values) -> String {
        let at = |spot| &values.spots[&Spot::Header(spot)];
        let time = if let TimeAt::At(Spot::Header(at)) = self.time {
            format!(";x-f{at}:{}", values.time)
        } else {
            String::new()
        };
        format!("x-list:{};x-f0:{};x-f1:{}{time}", self.list(), at(0), at(1))
    }

    /// A request with that text as its signature.
    pub(super) fn sent(&self, values: &Values, sig: &str) -> Sent {
        let mut headers: Vec<(String, Vec<u8>)> = Vec::new();
        for (spot, text) in &values.spots {
            if let Spot::Header(at) = spot {
                headers.push((format!("x-f{at}"), text.clone().into()));
            }
        }
        if let Spot::Header(at) = self.sig {
            headers.push((format!("x-f{at}"), sig.into()));
        }
        if self.parts.contains(&Part::Id) {
            headers.push(("x-id".to_owned(), values.id.clone().into()));
        }
        if self.parts.contains(&Part::Listed) {
            headers.push(("x-list".to_owned(), self.list().into()));
        }
        if self.parts.contains(&Part::Lines) {
            headers.push(("x-lines".to_owned(), self.lines_list().into()));
        }
        if self.seal.is_certified() {
            headers.push(("x-cert".to_owned(), CERT.into()));
        }
        let (target, body) = (self.target(values, Some(sig)), self.body(values, Some(sig)));
        Sent { method: http::Method::POST, target, headers, body }
    }

    /// The text at the signature's place for that signature.
    pub(super) fn sig_text(&self, signature: &str, time: &str) -> String {
        match (self.labelled, self.time) {
            (false, _) => signature.to_owned(),
            (true, TimeAt::Label) => format!("t={time},v1={signature}"),
            (true, _) => format!("v0=00,v1={signature}"),
        }
    }

    /// What is really signed: of a token, its header too.
    pub(super) fn input(&self, content: &[u8]) -> Vec<u8> {
        match self.seal {
            Seal::Jwt(alg) => {
                format!("{}.{}", jose(alg.name()), URL_SAFE_NO_PAD.encode(content)).into_bytes()
            }
            _ => content.to_vec(),
        }
    }

    /// A signature, written as the scheme has it.
    pub(super) fn written(&self, signature: &[u8]) -> String {
        match self.seal {
            Seal::Jwt(alg) => format!("{}..{}", jose(alg.name()), URL_SAFE_NO_PAD.encode(signature)),
            _ => self.encoding.encode(signature),
        }
    }
}

/// The header of a token.
pub(super) fn jose(alg: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{{\"alg\":{alg:?}}}"))
}

/// As JSON escapes, with backslashes doubled but before a slash.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for (at, char) in text.char_indices() {
        match char {
            '\\' if text[at + 1..].starts_with('/') => out.push('\\'),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            char if (' '..='~').contains(&char) => out.push(char),
            char => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}").unwrap();
                }
            }
        }
    }
    out
}

/// Of a target whose query holds letters, digits, `=` and `&` only.
fn path_escaped(target: &str) -> String {
    let Some((path, query)) = target.split_once('?') else { return target.replace('%', "%25") };
    let query = query.replace('%', "%25").replace('=', "%3D").replace('&', "%26").replace('+', "%2B");
    format!("{path}?{query}").replace('%', "%25")
}
