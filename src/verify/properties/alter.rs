//! Every way in which somebody could alter a request: each of them has to be refused.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE, URL_SAFE_NO_PAD};

use super::made::{Sent, Values};
use super::plan::{Form, Part, Plan, Spot, TimeAt};
use super::seal::{Pair, Seal};
use crate::provider::signature::TagEncoding;

/// A request that was signed, and what it was made of.
pub(super) struct Signed<'p> {
    pub(super) plan: &'p Plan,
    pub(super) values: &'p Values,
    pub(super) signature: Vec<u8>,
}

/// Where and how a text is altered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Touch {
    pub(super) at: usize,
    /// Not zero.
    pub(super) flip: u8,
    /// A letter or a digit.
    pub(super) char: char,
}

/// Altered requests, each with the name of what was done to it.
pub(super) type Altered = Vec<(String, Sent)>;

impl Signed<'_> {
    pub(super) fn text(&self) -> String {
        self.plan.sig_text(&self.plan.written(&self.signature), &self.values.time)
    }

    pub(super) fn sent(&self) -> Sent {
        self.plan.sent(self.values, &self.text())
    }

    fn with(&self, change: impl FnOnce(&mut Values)) -> Sent {
        let mut values = self.values.clone();
        change(&mut values);
        self.plan.sent(&values, &self.text())
    }

    /// All alterations.
    pub(super) fn altered(&self, touch: Touch, other: &Pair, content: &[u8]) -> Altered {
        let mut all = self.values_altered(touch);
        all.extend(self.pointers_altered());
        all.extend(self.time_altered(touch));
        all.extend(self.target_altered());
        all.extend(self.body_altered(touch));
        all.extend(self.repeated());
        for (name, signature) in self.signatures(touch, other, content) {
            let text = self.plan.sig_text(&signature, &self.values.time);
            all.push((format!("signature: {name}"), self.plan.sent(self.values, &text)));
        }
        all
    }

    fn values_altered(&self, touch: Touch) -> Altered {
        let plan = self.plan;
        let mut all = Altered::new();
        for spot in plan.signed_spots() {
            for text in words(&self.values.spots[&spot], touch) {
                let name = format!("{spot:?} = {text:?}");
                all.push((name, self.with(|values| drop(values.spots.insert(spot, text)))));
            }
            all.push((format!("no {spot:?}"), self.with(|values| drop(values.spots.remove(&spot)))));
        }
        for part in &plan.parts {
            if let Part::Maybe(spot, false) = part {
                let put = self.with(|values| drop(values.spots.insert(*spot, "v".to_owned())));
                all.push((format!("put {spot:?}"), put));
            }
        }
        if plan.parts.contains(&Part::Id) {
            for id in words(&self.values.id, touch) {
                all.push((format!("id {id:?}"), self.with(|values| values.id = id)));
            }
        }
        if plan.parts.contains(&Part::Method) {
            all.push(("method".to_owned(), Sent { method: http::Method::PUT, ..self.sent() }));
        }
        all
    }

    /// Lists of signed headers, and the certificate's URL.
    fn pointers_altered(&self) -> Altered {
        let mut all = Altered::new();
        for name in ["x-list", "x-lines"] {
            for list in ["", "x-f1", "x-list", "X-F0,x-f1,x-f1", "x-f1,X-F0", "X-F0, x-f1"] {
                let mut sent = self.sent();
                let lists = sent.headers.iter_mut().filter(|(known, _)| known == name);
                lists.for_each(|(_, text)| *text = list.into());
                all.push((format!("{name} = {list:?}"), sent));
            }
        }
        if self.plan.seal.is_certified() {
            for url in
                ["https://keys.example.com/k?x", "https://evil.example/k", "http://keys.example.com/k", ""]
            {
                let mut sent = self.sent();
                sent.headers
                    .iter_mut()
                    .filter(|(name, _)| name == "x-cert")
                    .for_each(|(_, text)| *text = url.into());
                all.push((format!("certificate at {url:?}"), sent));
            }
        }
        all.retain(|(_, sent)| *sent != self.sent());
        all
    }

    fn time_altered(&self, touch: Touch) -> Altered {
        let time = &self.values.time;
        let mut texts = vec![
            self.plan.time_text(1),
            format!("0{time}"),
            format!("+{time}"),
            format!("{time}0"),
            String::new(),
        ];
        texts.extend(words(time, touch));
        texts.retain(|text| text != time);
        let written = self.plan.written(&self.signature);
        let mut all = Altered::new();
        for text in texts {
            let sent = match self.plan.time {
                TimeAt::Nowhere => return all,
                TimeAt::At(spot) => self.with(|values| drop(values.spots.insert(spot, text.clone()))),
                TimeAt::Label => self.plan.sent(self.values, &format!("t={text},v1={written}")),
            };
            all.push((format!("time {text:?}"), sent));
        }
        if self.plan.time == TimeAt::Label {
            for text in [
                format!("v1={written}"),
                format!("t={time},t={time},v1={written}"),
                format!("T={time},v1={written}"),
            ] {
                all.push((format!("label {text:?}"), self.plan.sent(self.values, &text)));
            }
        }
        all
    }

    fn target_altered(&self) -> Altered {
        let has = |parts: &[Part]| self.plan.parts.iter().any(|part| parts.contains(part));
        let sent = self.sent();
        let at = |target: String| Sent { target, ..sent.clone() };
        let mut all = Altered::new();
        if has(&[
            Part::Path,
            Part::PathEscaped,
            Part::PathSlash,
            Part::Url,
            Part::UrlBase,
            Part::UrlWithPort,
            Part::UrlWithoutPort,
            Part::UrlUnescaped,
        ]) {
            for (old, new) in [
                ("/w", "/v"),
                ("/w", "/w/"),
                ("/w", "/%77"),
                ("/w", "/./w"),
                ("%20", "%2520"),
                ("/in", "//in"),
            ] {
                all.push((format!("{old} is {new}"), at(sent.target.replacen(old, new, 1))));
            }
        }
        if has(&[
            Part::Path,
            Part::PathEscaped,
            Part::Url,
            Part::UrlWithPort,
            Part::UrlWithoutPort,
            Part::UrlUnescaped,
        ]) {
            let mark = if sent.target.contains('?') { '&' } else { '?' };
            all.push(("more in the query".to_owned(), at(format!("{}{mark}more=1", sent.target))));
        }
        all
    }

    fn body_altered(&self, touch: Touch) -> Altered {
        let plan = self.plan;
        let sent = self.sent();
        let mut bodies = Vec::new();
        let raw = plan.parts.iter().any(|part| matches!(part, Part::Body | Part::BodyEscaped | Part::Crc32));
        if raw || plan.said.is_some() {
            let at = touch.at % sent.body.len();
            let flipped = [&sent.body[..at], &[sent.body[at] ^ touch.flip], &sent.body[at + 1..]].concat();
            let inserted = [&sent.body[..at], &[touch.flip], &sent.body[at..]].concat();
            let removed = [&sent.body[..at], &sent.body[at + 1..]].concat();
            let around = [[&sent.body[..], b"\n"].concat(), [b" ", &sent.body[..]].concat(), Vec::new()];
            bodies.extend([flipped, inserted, removed]);
            bodies.extend(around);
        } else if plan.parts.contains(&Part::FormSorted) {
            bodies.extend([
                [&sent.body[..], b"&more=1"].concat(),
                [&sent.body[..], b"x"].concat(),
                Vec::new(),
            ]);
        }
        bodies.retain(|body| *body != sent.body);
        bodies
            .into_iter()
            .map(|body| {
                (format!("body {:?}", body.escape_ascii().to_string()), Sent { body, ..sent.clone() })
            })
            .collect()
    }

    /// What decides stands there twice.
    fn repeated(&self) -> Altered {
        let sent = self.sent();
        let mut all = Altered::new();
        for (at, (name, text)) in sent.headers.iter().enumerate() {
            let mut twice = sent.clone();
            twice.headers.insert(at, (name.clone(), text.clone()));
            all.push((format!("{name} twice"), twice));
        }
        let mut spots = self.plan.signed_spots();
        spots.push(self.plan.sig);
        if let TimeAt::At(spot) = self.plan.time {
            spots.push(spot);
        }
        for spot in spots {
            let mut twice = sent.clone();
            match (spot, self.plan.form) {
                (Spot::Query(at), _) => twice.target.extend(["&q", &at.to_string(), "=x"]),
                (Spot::Body(at), Form::Fields) => twice.body.extend(format!("&f{at}=x").bytes()),
                (Spot::Body(at), _) => {
                    twice.body.splice(..1, format!("{{\"f{at}\":\"x\",").bytes());
                }
                (Spot::Header(_), _) => continue,
            }
            all.push((format!("{spot:?} twice"), twice));
        }
        all
    }

    /// Texts that stand for other signatures, or for this one in another spelling.
    fn signatures(&self, touch: Touch, other: &Pair, content: &[u8]) -> Vec<(String, String)> {
        let plan = self.plan;
        let own = &self.signature;
        let at = touch.at % own.len();
        let mut flipped = own.clone();
        flipped[at] ^= touch.flip;
        let mut others = vec![
            ("flipped", flipped),
            ("short", own[..own.len() - 1].to_vec()),
            ("long", [&own[..], &[0]].concat()),
            ("padded in front", [&[0], &own[..]].concat()),
            ("empty", Vec::new()),
            ("zeros", vec![0; own.len()]),
        ];
        if !matches!(plan.seal, Seal::Hash(_)) {
            others.push(("of another key", other.sign(&plan.input(content))));
        }
        if plan.seal == Seal::Ed25519 {
            others.push(("with its order added", order_added(own)));
        }
        let mut texts: Vec<(String, String)> =
            others.into_iter().map(|(name, bytes)| (name.to_owned(), plan.written(&bytes))).collect();
        let written = plan.written(own);
        texts.extend(respelled(&written, plan, touch).into_iter().map(|text| (format!("{text:?}"), text)));
        texts.retain(|(_, text)| !is_same(plan, text, &written));
        texts
    }
}

/// Whether the other text is one of the two harmless changes: the case of hex digits, and white space around, which
/// HTTP takes away by itself.
fn is_same(plan: &Plan, text: &str, written: &str) -> bool {
    let token = matches!(plan.seal, Seal::Jwt(_));
    let text = if token { text } else { text.trim() };
    text == written || !token && plan.encoding == TagEncoding::Hex && text.eq_ignore_ascii_case(written)
}

/// Another text for a word, in every way that is more than its case.
fn words(word: &str, touch: Touch) -> Vec<String> {
    let at = touch.at % word.len();
    let (before, rest) = word.split_at(at);
    let (old, after) = rest.split_at(1);
    let mut texts = vec![format!("{before}{}{rest}", touch.char), format!("{before}{after}"), String::new()];
    if !old.eq_ignore_ascii_case(&touch.char.to_string()) {
        texts.push(format!("{before}{}{after}", touch.char));
    }
    texts.retain(|text| text != word);
    texts
}

/// Other spellings, and texts with another character.
fn respelled(written: &str, plan: &Plan, touch: Touch) -> Vec<String> {
    let at = touch.at % written.len();
    let (before, rest) = written.split_at(at);
    let mut texts = words(written, touch);
    texts.extend(["=", "!", ".", "-", "+", "\u{e4}"].map(|char| format!("{before}{char}{}", &rest[1..])));
    texts.extend(["=", "==", ".", "A", "00", "\u{e4}"].map(|end| format!("{written}{end}")));
    texts.extend([format!("0x{written}"), format!("{before} {rest}"), format!("{written}{written}")]);
    texts.extend([
        written.trim_end_matches('=').to_owned(),
        written.replace('+', "-"),
        written.replace('/', "_"),
    ]);
    let signature = written.rsplit('.').next().unwrap_or_default();
    let start = &written[..written.len() - signature.len()];
    texts.extend(low_bits(signature).map(|text| format!("{start}{text}")));
    if !matches!(plan.seal, Seal::Jwt(_)) {
        let bytes = plan.encoding_of(written);
        texts.extend([
            STANDARD.encode(&bytes),
            URL_SAFE.encode(&bytes),
            URL_SAFE_NO_PAD.encode(&bytes),
            hex::encode(&bytes),
        ]);
    }
    texts
}

/// The same with a low bit that decides nothing, where the last character of base64 has one.
pub(super) fn low_bits(text: &str) -> Option<String> {
    let bare = text.trim_end_matches('=');
    let (start, last) = bare.split_at(bare.len().checked_sub(1)?);
    let alphabet: Vec<u8> = (b'A'..=b'Z').chain(b'a'..=b'z').chain(b'0'..=b'9').chain(*b"-_").collect();
    let at = alphabet.iter().position(|char| *char == last.as_bytes()[0])?;
    Some(format!("{start}{}{}", char::from(alphabet[at ^ 1]), &text[bare.len()..]))
}

/// `S + L` stands for the same number as `S`; a lax reader takes both.
fn order_added(signature: &[u8]) -> Vec<u8> {
    let order = hex::decode("edd3f55c1a631258d69cf7a2def9de1400000000000000000000000000000010").unwrap();
    let mut sum = signature.to_vec();
    let mut carry = 0_u16;
    for (byte, order) in sum[32..].iter_mut().zip(order) {
        let total = u16::from(*byte) + u16::from(order) + carry;
        *byte = total.to_le_bytes()[0];
        carry = total >> 8;
    }
    sum
}

impl Plan {
    fn encoding_of(&self, written: &str) -> Vec<u8> {
        self.encoding.decode_any(written).unwrap_or_default()
    }
}
