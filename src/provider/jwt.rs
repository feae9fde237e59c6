//! `kind = "jwt"`: a signed token (JWS, RFC 7515) in the request, and what has to be in it.
//!
//! Invariant: the algorithms that count are listed here, and each is used only with keys that are made for it; the
//! token's header chooses among them and nothing else. Tokens that are not signed are never listed.

use std::borrow::Cow;
use std::time::Duration;

use spki::ObjectIdentifier;

use super::pin::Pinned;
use super::place::Place;
use super::signature::{SigRule, TagEncoding};
use super::template::Template;
use crate::json::{Pointer, Pointers};
use crate::settings::Table;

/// Largest `leeway`: more is no difference of clocks.
const LEEWAY_MAX: Duration = Duration::from_secs(300);

/// An algorithm of RFC 7518, or of RFC 8037.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Alg {
    Hs256,
    Hs384,
    Hs512,
    Rs256,
    Rs384,
    Rs512,
    Es256,
    Es384,
    Es512,
    EdDsa,
}

impl Alg {
    pub(crate) const CHOICES: &[(&str, Self)] = &[
        ("HS256", Self::Hs256),
        ("HS384", Self::Hs384),
        ("HS512", Self::Hs512),
        ("RS256", Self::Rs256),
        ("RS384", Self::Rs384),
        ("RS512", Self::Rs512),
        ("ES256", Self::Es256),
        ("ES384", Self::Es384),
        ("ES512", Self::Es512),
        ("EdDSA", Self::EdDsa),
    ];

    /// The algorithm of that name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::CHOICES.iter().find(|(known, _)| *known == name).map(|(_, alg)| *alg)
    }

    /// As a token's header writes it.
    pub(crate) fn name(self) -> &'static str {
        Self::CHOICES.iter().find(|(_, alg)| *alg == self).map_or("", |(name, _)| name)
    }

    /// The digest of a keyed hash; none for what is signed with a private key.
    pub(crate) fn hmac(self) -> Option<ring::hmac::Algorithm> {
        match self {
            Self::Hs256 => Some(ring::hmac::HMAC_SHA256),
            Self::Hs384 => Some(ring::hmac::HMAC_SHA384),
            Self::Hs512 => Some(ring::hmac::HMAC_SHA512),
            _ => None,
        }
    }
}

/// Where the token stands.
#[derive(Debug)]
pub(crate) struct TokenPlace {
    /// The place.
    pub(crate) place: Place,
    /// What the place was parsed with: the token is found whatever else is read.
    pub(crate) pointers: Pointers,
    /// What may stand before the token.
    prefix: Option<String>,
}

impl TokenPlace {
    /// The token without what may stand before it; case does not count in that (RFC 9110, 11.1).
    pub(crate) fn bare<'t>(&self, text: Cow<'t, str>) -> Cow<'t, str> {
        let Some(prefix) = &self.prefix else { return text };
        let stands = text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
        match text {
            text if !stands => text,
            Cow::Borrowed(text) => Cow::Borrowed(text.get(prefix.len()..).unwrap_or_default()),
            Cow::Owned(text) => Cow::Owned(text.get(prefix.len()..).unwrap_or_default().to_owned()),
        }
    }

    /// What stands before the token when one is sent.
    pub(crate) fn prefix(&self) -> &str {
        self.prefix.as_deref().unwrap_or_default()
    }
}

/// A claim of which each source says what it has to be.
#[derive(Debug)]
pub(crate) struct Ask {
    /// As sources call it.
    pub(crate) name: String,
    /// Where it may stand; the first that is there counts.
    pub(crate) pointers: Vec<String>,
}

/// A chain of certificates in the token's header, `x5c`: the leaf's key signs, and the source's secret is the root.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChainRule {
    /// The extension that the leaf has to have.
    pub(crate) leaf: ObjectIdentifier,
    /// The extension that its issuer has to have.
    pub(crate) issuer: ObjectIdentifier,
}

/// Where the keys are published for those sources that have none of their own (RFC 7517).
#[derive(Debug)]
pub(crate) enum KeySet {
    /// At this URL, for everybody.
    At(Pinned),
    /// Wherever a source says: everybody who uses the provider has a server, or a tenant, of his own.
    Ask,
}

/// All that is special to the kind.
#[derive(Debug)]
pub(crate) struct JwtRule {
    /// Where the token stands.
    pub(crate) token: TokenPlace,
    /// The algorithms that count; at least one.
    pub(crate) algs: Vec<Alg>,
    /// What is signed in the place of claims, in the forms that there are of it; none if the token has claims.
    pub(crate) sign: Vec<Template>,
    /// Claims that have to be there, whatever they say.
    pub(crate) need: Vec<String>,
    /// Claims of which each source says what they have to be.
    pub(crate) ask: Vec<Ask>,
    /// How far the clocks may be apart when `exp` and `nbf` are checked.
    pub(crate) leeway: Duration,
    /// Keys come with the token.
    pub(crate) chain: Option<ChainRule>,
    /// Keys are published.
    pub(crate) jwks: Option<KeySet>,
}

impl JwtRule {
    /// Reads the tables `jwt` and `sig`.
    pub(crate) fn read(table: &mut Table, sign: Vec<Template>) -> Option<Self> {
        for key in ["hash", "key_id"] {
            if table.has(key) {
                table.error(key, "means nothing with kind = \"jwt\", whose tokens say it: drop it");
            }
            table.texts(key);
        }
        if !table.has("jwt") {
            table.error(
                "jwt",
                "is missing: name at least the algorithms that count, e.g. jwt = { algs = [\"HS256\"] }",
            );
        }
        let token = read_place(table);
        let jwks = table.table("jwks").and_then(KeySet::read);
        let mut inner = table.table("jwt")?;
        let algs = read_algs(&mut inner);
        let need = inner.texts("need").unwrap_or_default();
        let ask = read_ask(&mut inner);
        let leeway = inner.duration_within("leeway", Duration::ZERO..=LEEWAY_MAX).unwrap_or_default();
        let chain = inner.table("chain").and_then(ChainRule::read);
        if chain.is_some() && algs.iter().any(|alg| alg.hmac().is_some()) {
            inner.error("algs", "a certificate's key is none for HS256 and its kind: drop those, or chain");
        }
        inner.finish();
        if jwks.is_some() && chain.is_some() {
            table.error("jwks", "means nothing with jwt.chain, whose keys come with the token: drop one");
        }
        if jwks.is_some() && algs.iter().all(|alg| alg.hmac().is_some()) && !algs.is_empty() {
            let why = "holds no key for HS256 and its kind, which both sides keep secret: drop it, or list others in algs";
            table.error("jwks", why);
        }
        let token = token?;
        (!algs.is_empty()).then_some(Self { token, algs, sign, need, ask, leeway, chain, jwks })
    }

    /// Whether secrets are texts that both sides know.
    pub(crate) fn has_hmac(&self) -> bool {
        self.algs.iter().any(|alg| alg.hmac().is_some())
    }
}

/// `ask = { aud = "/aud", bundleId = "/data/bundleId | /summary/bundleId" }`
fn read_ask(table: &mut Table) -> Vec<Ask> {
    let mut asks = Vec::new();
    for (name, text) in table.named_texts("ask") {
        let pointers: Vec<String> = text.value.split(" | ").map(str::to_owned).collect();
        for pointer in &pointers {
            if let Err(message) = Pointer::parse(pointer) {
                table.error_at("ask", &text.place, message);
            }
        }
        asks.push(Ask { name, pointers });
    }
    asks
}

fn read_algs(table: &mut Table) -> Vec<Alg> {
    let mut algs = Vec::new();
    for name in table.texts("algs").unwrap_or_default() {
        let Some(alg) = Alg::named(&name) else {
            let known: Vec<&str> = Alg::CHOICES.iter().map(|(name, _)| *name).collect();
            table.error("algs", format!("{name:?} is not known: give some of {}", known.join(", ")));
            continue;
        };
        algs.push(alg);
    }
    if algs.is_empty() && !table.failed("algs") {
        table.error("algs", "is missing: name the algorithms that count, e.g. [\"HS256\"]");
    }
    algs
}

/// A token can be the whole body.
fn parse(text: &str, pointers: &mut Pointers) -> Result<Place, String> {
    if text == "body" { Ok(Place::Body) } else { Place::parse(text, pointers) }
}

/// `sig = { from = "header:Authorization", prefix = "Bearer " }`
fn read_place(table: &mut Table) -> Option<TokenPlace> {
    if !table.has("sig") {
        table
            .error("sig", "is missing: say where the token stands, e.g. { from = \"header:Authorization\" }");
    }
    let mut sig = table.table("sig")?;
    let mut pointers = Pointers::default();
    let text = sig.text("from");
    if text.is_none() && !sig.failed("from") {
        sig.error("", "sig.from is missing: say where the token stands, e.g. \"header:Authorization\"");
    }
    let prefix = sig.text("prefix");
    let place = match text.as_deref().map(|text| parse(text, &mut pointers)) {
        Some(Ok(place)) if place.in_token() || matches!(place, Place::BodySha256) => {
            sig.error("from", format!("the token cannot stand at {place}"));
            None
        }
        Some(Ok(place)) => Some(place),
        Some(Err(message)) => {
            sig.error("from", message);
            None
        }
        None => None,
    };
    sig.finish();
    Some(TokenPlace { place: place?, pointers, prefix })
}

impl KeySet {
    /// The one for everybody.
    pub(crate) fn url(&self) -> Option<&Pinned> {
        match self {
            Self::At(url) => Some(url),
            Self::Ask => None,
        }
    }

    /// `jwks = { url = "https://…" }`, or `{ url = "ask" }`
    fn read(mut table: Table) -> Option<Self> {
        const KEY: &str = "url";
        const WANTED: &str = "give one that starts with https://, or \"ask\" if each source has another";
        let text = table.text(KEY);
        if text.is_none() && !table.failed(KEY) {
            table.error(KEY, format!("is missing: the URL of the key set; {WANTED}"));
        }
        let set = match text.as_deref() {
            Some("ask") => Some(Self::Ask),
            Some(url) => match Pinned::exact(url) {
                Ok(url) => Some(Self::At(url)),
                Err(why) => {
                    table.error(KEY, format!("{url:?} {why}: {WANTED}"));
                    None
                }
            },
            None => None,
        };
        table.finish();
        set
    }
}

impl ChainRule {
    /// `chain = { leaf = "1.2.3", issuer = "1.2.4" }`
    fn read(mut table: Table) -> Option<Self> {
        let mut oid = |key: &'static str| {
            let text = table.text(key);
            let found = text.as_deref().and_then(|text| ObjectIdentifier::new(text).ok());
            if found.is_none() && !table.failed(key) {
                table.error(
                    key,
                    "give the object identifier of an extension, e.g. \"1.2.840.113635.100.6.11.1\"",
                );
            }
            found
        };
        let (leaf, issuer) = (oid("leaf"), oid("issuer"));
        table.finish();
        Some(Self { leaf: leaf?, issuer: issuer? })
    }
}

impl SigRule {
    /// The one text at the place of a token.
    pub(super) fn of_token(rule: &JwtRule, signed: &mut Pointers) -> Option<Self> {
        let from = vec![parse(&rule.token.place.to_string(), signed).ok()?];
        let encoding = TagEncoding::Base64Url;
        Some(Self { from, split: None, labels: None, encoding, repeat: false })
    }
}

#[cfg(test)]
mod tests {
    use crate::fixture::read_scheme;

    const GOOD: &str = r#"
        kind = "jwt"
        sig = { from = "header:X-Token" }
        ts = { from = "claim:/iat", tolerance = "5m" }
        id = "claim:/jti"
        jwt = { algs = ["ES256"], leeway = "1s" }
    "#;

    fn messages(toml: &str) -> String {
        let (_, problems) = read_scheme(toml);
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn mistakes_are_named_where_they_are() {
        assert_eq!(messages(GOOD), "");
        for (good, bad, wanted) in [
            ("\"ES256\"", "\"none\"", "\"none\" is not known"),
            ("algs = [\"ES256\"]", "algs = []", "name the algorithms"),
            ("algs = [\"ES256\"], ", "", "name the algorithms"),
            ("algs", "alg", "did you mean \"algs\"?"),
            ("jwt = { algs = [\"ES256\"], leeway = \"1s\" }", "", "jwt: is missing"),
            ("leeway = \"1s\"", "leeway = \"1h\"", "leeway"),
            ("leeway = \"1s\"", "ask = { aud = \"aud\" }", "must start with"),
            ("leeway = \"1s\"", "chain = { leaf = \"x\", issuer = \"1.2.3\" }", "object identifier"),
            (
                "\"ES256\"], leeway = \"1s\"",
                "\"HS256\"], chain = { leaf = \"1.2.3\", issuer = \"1.2.4\" }",
                "none for HS256",
            ),
            (
                "id =",
                "jwks = { url = \"http://a.example/x\" }\nid =",
                "jwks.url: \"http://a.example/x\" does not start",
            ),
            ("id =", "jwks = {}\nid =", "jwks.url: is missing"),
            ("id =", "every = \"/x\"\njwks = { url = \"ask\" }\nid =", "jwks: cannot be beside every"),
            ("id =", "jwks = { uri = \"ask\" }\nid =", "did you mean \"url\"?"),
            ("id =", "jwks = \"ask\"\nid =", "jwks: "),
            (
                "\"ES256\"], leeway = \"1s\" }",
                "\"HS256\"] }\njwks = { url = \"ask\" }",
                "holds no key for HS256",
            ),
            (
                "leeway = \"1s\" }",
                "chain = { leaf = \"1.2.3\", issuer = \"1.2.4\" } }\njwks = { url = \"ask\" }",
                "means nothing with jwt.chain",
            ),
            (
                "id =",
                "require = { \"jose:/jku\" = \"https://a.example/y\" }\njwks = { url = \"https://a.example/x\" }\nid =",
                "jwks: is https://a.example/x, and",
            ),
            ("\"header:X-Token\"", "\"claim:/token\"", "the token cannot stand at"),
            ("\"header:X-Token\"", "\"body:sha256\"", "the token cannot stand at"),
            ("\"header:X-Token\"", "[]", "expected a string"),
            ("from = \"header:X-Token\"", "prefix = \"Bearer \"", "sig.from is missing"),
            ("from = \"header:X-Token\"", "from = \"header:X-Token\", encoding = \"hex\"", "unknown key"),
            ("sig = { from = \"header:X-Token\" }", "", "sig: is missing"),
            ("id =", "hash = \"sha1\"\nid =", "means nothing with kind = \"jwt\""),
            ("id =", "sign = \"{secret}{body}\"\nid =", "{secret} is for"),
            ("\"claim:/jti\"", "\"claim:\"", "give a pointer into it"),
            ("\"claim:/jti\"", "\"claim:/a#b\"", "must start with"),
            ("\"claim:/jti\"", "\"headerjson:X\"", "lacks \"#\""),
        ] {
            assert!(GOOD.contains(good), "{good}");
            let found = messages(&GOOD.replacen(good, bad, 1));
            assert!(found.contains(wanted), "{bad}\n{found}");
        }
    }

    #[test]
    fn places_in_a_token_need_a_token() {
        let scheme = |more: &str| {
            messages(&format!(
                "kind = \"hmac\"\nsign = \"{{body}}\"\nsig = {{ from = \"header:x\" }}\n{more}"
            ))
        };
        for more in ["id = \"claim:/jti\"", "id = []\nrequire = { \"jose:/x\" = \"1\" }"] {
            assert!(scheme(more).contains("need kind = \"jwt\""), "{more}");
        }
        assert!(scheme("id = []\njwt = { algs = [\"HS256\"] }").contains("unknown key"));
    }
}
