//! Schemes of the grammar, put together at random.

use std::fmt::Write as _;

use proptest::prelude::*;

use super::seal::Seal;
use crate::provider::signature::{Hash, TagEncoding};

/// Numbers of places that have a meaning of their own; parts of templates have lower ones.
const SIG: u8 = 9;
const TIME: u8 = 8;
const SAID: u8 = 7;

/// A place that can hold a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Spot {
    Header(u8),
    Query(u8),
    Body(u8),
}

/// What the body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Raw,
    Json,
    Fields,
}

/// One part of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Text(&'static str),
    Body,
    BodyEscaped,
    Crc32,
    FormSorted,
    Time,
    Id,
    Method,
    Path,
    PathEscaped,
    PathSlash,
    Url,
    UrlBase,
    UrlWithPort,
    UrlWithoutPort,
    UrlUnescaped,
    Secret,
    At(Spot),
    Lower(Spot),
    Line(Spot),
    /// Headers 0 and 1 are listed, and the list itself.
    Listed,
    /// Headers 0 and 1 are listed, each on a line of its own.
    Lines,
    /// In brackets, and whether it is in the request.
    Maybe(Spot, bool),
}

/// Where the timestamp stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TimeAt {
    Nowhere,
    At(Spot),
    /// Beside the signature.
    Label,
}

/// A scheme and the shape of its requests.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) seal: Seal,
    pub(super) form: Form,
    pub(super) parts: Vec<Part>,
    pub(super) sig: Spot,
    pub(super) labelled: bool,
    pub(super) encoding: TagEncoding,
    pub(super) time: TimeAt,
    pub(super) unit: &'static str,
    /// Where the request says what its body hashes to, and how.
    pub(super) said: Option<(Spot, Hash, TagEncoding)>,
    /// Items of a list are signed one by one.
    pub(super) every: bool,
}

fn spot() -> impl Strategy<Value = Spot> {
    (0..3_u8, 0..3_u8).prop_map(|(kind, at)| spot_of(kind, at))
}

fn spot_of(kind: u8, at: u8) -> Spot {
    match kind {
        0 => Spot::Header(at),
        1 => Spot::Query(at),
        _ => Spot::Body(at),
    }
}

fn part() -> impl Strategy<Value = Part> {
    use Part::*;
    let fixed = [
        Text("."),
        Text("|v1:"),
        Text("\n"),
        Body,
        BodyEscaped,
        Crc32,
        FormSorted,
        Id,
        Method,
        Path,
        PathEscaped,
        PathSlash,
        Url,
        UrlBase,
        UrlWithPort,
        UrlWithoutPort,
        UrlUnescaped,
        Listed,
        Lines,
    ];
    prop_oneof![
        proptest::sample::select(fixed.to_vec()),
        spot().prop_map(At),
        spot().prop_map(Lower),
        spot().prop_map(Line),
        (spot(), any::<bool>()).prop_map(|(spot, there)| Maybe(spot, there)),
    ]
}

/// Schemes of that kind. `every`: items of a list are signed one by one.
pub(super) fn plans(seal: Seal, every: bool) -> impl Strategy<Value = Plan> {
    let forms = proptest::sample::select(vec![Form::Raw, Form::Json, Form::Fields]);
    let encodings: Vec<_> = TagEncoding::CHOICES.iter().map(|(_, encoding)| *encoding).collect();
    let encoding = proptest::sample::select(encodings);
    let units = proptest::sample::select(vec!["s", "ms", "s_or_ms", "rfc3339"]);
    let said = proptest::option::weighted(0.3, (0..2_u8, any::<bool>(), encoding.clone()));
    let times = (0..3_u8, 0..3_u8);
    (forms, proptest::collection::vec(part(), 1..6), 0..3_u8, any::<bool>(), encoding, times, units, said)
        .prop_map(move |(form, parts, sig, labelled, encoding, times, unit, said)| {
            let time = match times {
                (0, _) => TimeAt::Nowhere,
                (1, kind) => TimeAt::At(spot_of(kind, TIME)),
                _ => TimeAt::Label,
            };
            let hash = |sha1| if sha1 { Hash::Sha1 } else { Hash::Sha256 };
            let said = said.map(|(kind, sha1, encoding)| (spot_of(kind, SAID), hash(sha1), encoding));
            let form = if every { Form::Json } else { form };
            let sig = spot_of(if every { 2 } else { sig }, SIG);
            Plan { seal, form, parts, sig, labelled, encoding, time, unit, said, every }.made_sound()
        })
}

impl Plan {
    /// Drops what does not go together, and adds what a scheme of the kind needs.
    fn made_sound(mut self) -> Self {
        let token = matches!(self.seal, Seal::Jwt(_));
        self.labelled &= matches!(self.sig, Spot::Header(_)) && !token;
        let in_body = matches!(self.sig, Spot::Body(_));
        if in_body && self.form == Form::Raw {
            self.form = Form::Json;
        }
        if self.time == TimeAt::Label && !self.labelled || token {
            self.time = TimeAt::Nowhere;
        }
        if matches!(self.time, TimeAt::At(spot) if !self.can_hold(spot)) {
            self.time = TimeAt::At(Spot::Header(TIME));
        }
        if in_body || self.every {
            self.said = None;
        }
        self.parts = self.parts.iter().copied().filter(|part| self.can_sign(*part)).collect();
        self.parts.extend((self.time != TimeAt::Nowhere).then_some(Part::Time));
        self.parts.extend(self.said.map(|(spot, ..)| Part::At(spot)));
        if self.parts.iter().all(|part| matches!(part, Part::Text(_) | Part::Method)) {
            self.parts.push(if in_body { Part::At(Spot::Body(0)) } else { Part::Body });
        }
        if matches!(self.seal, Seal::Hash(_)) {
            self.parts.insert(0, Part::Secret);
        }
        self
    }

    fn can_hold(&self, spot: Spot) -> bool {
        match spot {
            Spot::Header(_) => true,
            Spot::Query(_) => !self.every,
            Spot::Body(_) => self.form != Form::Raw,
        }
    }

    /// A signature is no part of what it signs; nothing can be left out that is there for another part.
    fn can_sign(&self, part: Part) -> bool {
        let (in_query, in_body) = (matches!(self.sig, Spot::Query(_)), matches!(self.sig, Spot::Body(_)));
        match part {
            Part::Body | Part::BodyEscaped | Part::Crc32 => !in_body,
            Part::FormSorted => !in_body && self.form == Form::Fields,
            Part::Path
            | Part::PathEscaped
            | Part::Url
            | Part::UrlWithPort
            | Part::UrlWithoutPort
            | Part::UrlUnescaped => !in_query && !self.every,
            Part::PathSlash | Part::UrlBase => !self.every,
            Part::Id | Part::Time => !matches!(self.seal, Seal::Jwt(_)),
            Part::At(spot) | Part::Lower(spot) | Part::Line(spot) => self.can_hold(spot),
            Part::Maybe(spot, there) => {
                // The same place outside of brackets has to be there.
                let fixed = |part: &Part| matches!(part, Part::At(at) | Part::Lower(at) | Part::Line(at) if *at == spot);
                let listed = matches!(spot, Spot::Header(0 | 1))
                    && (self.parts.contains(&Part::Listed) || self.parts.contains(&Part::Lines));
                let other = self.parts.contains(&Part::Maybe(spot, !there));
                self.can_hold(spot) && !self.parts.iter().any(fixed) && !listed && !other
            }
            Part::Text(_) | Part::Method | Part::Secret | Part::Listed | Part::Lines => true,
        }
    }

    fn place(&self, spot: Spot) -> String {
        match spot {
            Spot::Header(at) => format!("header:x-f{at}"),
            Spot::Query(at) => format!("query:q{at}"),
            Spot::Body(at) if self.form == Form::Fields => format!("form:f{at}"),
            Spot::Body(at) => format!("json:/f{at}"),
        }
    }

    fn piece(&self, part: Part) -> String {
        match part {
            Part::Text(text) => text.to_owned(),
            Part::Body => "{body}".to_owned(),
            Part::BodyEscaped => "{body_escaped}".to_owned(),
            Part::Crc32 => "{crc32}".to_owned(),
            Part::FormSorted => "{form_sorted}".to_owned(),
            Part::Time => "{ts}".to_owned(),
            Part::Id => "{id}".to_owned(),
            Part::Method => "{method}".to_owned(),
            Part::Path => "{path}".to_owned(),
            Part::PathEscaped => "{path_escaped}".to_owned(),
            Part::PathSlash => "{path_slash}".to_owned(),
            Part::Url => "{url}".to_owned(),
            Part::UrlBase => "{url_base}".to_owned(),
            Part::UrlWithPort => "{url_with_port}".to_owned(),
            Part::UrlWithoutPort => "{url_without_port}".to_owned(),
            Part::UrlUnescaped => "{url_unescaped}".to_owned(),
            Part::Lines => "{lines:header:x-lines}".to_owned(),
            Part::Secret => "{secret}".to_owned(),
            Part::At(spot) => format!("{{{}}}", self.place(spot)),
            Part::Lower(spot) => format!("{{lower:{}}}", self.place(spot)),
            Part::Line(spot) => format!("{{line:{}}}", self.place(spot)),
            Part::Listed => "{listed:header:x-list}".to_owned(),
            Part::Maybe(spot, _) => format!("[k={{{}}};]", self.place(spot)),
        }
    }

    /// The scheme as settings have it.
    pub(super) fn toml(&self) -> String {
        let sign: String = self.parts.iter().map(|part| self.piece(*part)).collect();
        let encoding = |of| TagEncoding::CHOICES.iter().find(|(_, known)| *known == of).unwrap().0;
        let mut toml = format!("{}\nsign = {sign:?}\n", self.seal.toml());
        let id = if self.parts.contains(&Part::Id) { "\"header:x-id\"" } else { "[]" };
        let mut sig = format!("from = {:?}", self.place(self.sig));
        if !matches!(self.seal, Seal::Jwt(_)) {
            write!(sig, ", encoding = {:?}", encoding(self.encoding)).unwrap();
        }
        if self.labelled {
            sig += ", split = \",\", assign = \"=\", label = \"v1\"";
        }
        writeln!(toml, "id = {id}\nsig = {{ {sig} }}").unwrap();
        let from = match self.time {
            TimeAt::Nowhere => None,
            TimeAt::At(spot) => Some(self.place(spot)),
            TimeAt::Label => Some("sig:t".to_owned()),
        };
        if let Some(from) = from {
            writeln!(toml, "ts = {{ from = {from:?}, unit = {:?}, tolerance = 300 }}", self.unit).unwrap();
        }
        if let Some((spot, hash, of)) = self.said {
            let hash = if hash == Hash::Sha1 { "sha1" } else { "sha256" };
            let (from, encoding) = (self.place(spot), encoding(of));
            writeln!(toml, "body_hash = {{ from = {from:?}, hash = {hash:?}, encoding = {encoding:?} }}")
                .unwrap();
        }
        if self.every {
            toml += "every = \"/items\"\n";
        }
        toml
    }
}
