//! Handshakes as data: which request is one, what must be right about it, and what it is answered.
//!
//! Invariant: a handshake can be told from an event by its method and one exact trigger, and one that nobody signed by
//! its whole body too. An answer repeats nothing of a request but tokens of a narrow shape, and no answer is a type
//! that a browser would run.

pub(crate) mod reply;

use http::Method;

use crate::json::{self, Pointers};
use crate::provider::Kind;
use crate::provider::place::Place;
use crate::provider::signature::Algorithm;
use crate::provider::template::{Piece, Template};
use crate::settings::Table;

use reply::{ReplyRule, Shape, is_word};

/// Largest body of a handshake that nobody signed, in bytes.
const UNSIGNED_BODY_MAX: usize = 4096;

/// All handshakes of a scheme.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    /// Pointers of everything that they read.
    pub(crate) pointers: Pointers,
    /// The first that is triggered counts.
    pub(crate) list: Vec<Handshake>,
    /// Shapes of the tokens that are signed for whoever sends them, if what the scheme signs could have one of these
    /// shapes too: such a request must then not be taken for signed by the provider.
    pub(crate) signs: Vec<Shape>,
}

/// One handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    /// POST: signed like every event, unless `unsigned` is there. Others: not signed.
    pub(crate) method: Method,
    /// What tells it from other requests of that method; none: every one is it.
    pub(crate) when: Option<When>,
    /// A POST that need not be signed: what its whole body consists of.
    pub(crate) unsigned: Option<Whole>,
    /// What its sender must know.
    pub(crate) require: Option<Require>,
    /// Where the secret stands that it hands over: what comes after it is signed with that.
    pub(crate) take: Option<Place>,
    /// The answer.
    pub(crate) reply: ReplyRule,
}

/// The trigger.
#[derive(Debug)]
pub(crate) struct When {
    pub(crate) place: Place,
    pub(crate) holds: Holds,
}

/// What the place of a trigger has to hold.
#[derive(Debug)]
pub(crate) enum Holds {
    /// Something.
    Any,
    /// This text.
    Text(String),
    /// A list without items.
    EmptyList,
}

/// The names of all members of a JSON object, or of all fields of a form; sorted. Nothing at all, or an empty object, if
/// there are none.
#[derive(Debug)]
pub(crate) struct Whole(Vec<String>);

/// The place holds the source's secret of that name.
#[derive(Debug)]
pub(crate) struct Require {
    pub(crate) place: Place,
    pub(crate) secret: String,
}

impl Handshakes {
    /// Reads the tables `handshake`.
    pub(crate) fn read(table: &mut Table, kind: Option<&Kind>) -> Self {
        let mut handshakes = Self::default();
        for table in table.table_list("handshake") {
            handshakes.list.extend(Handshake::read(table, &mut handshakes.pointers));
        }
        let signing: Vec<&ReplyRule> = handshakes.replies().filter(|reply| reply.signs()).collect();
        match kind {
            Some(Kind::Signed { algorithm: Algorithm::Hmac(_), sign }) if sign.iter().any(could_be_token) => {
                check_signing(table, sign, &signing);
                handshakes.signs = signing.iter().map(|reply| reply.token).collect();
            }
            Some(Kind::Signed { algorithm: Algorithm::Hmac(_), .. }) => {}
            Some(_) if !signing.is_empty() => {
                table.error(
                    "handshake",
                    "{hmac-…} in an answer needs kind = \"hmac\": nothing else signs for us",
                );
            }
            _ => {}
        }
        if handshakes.hands_over()
            && !matches!(kind, None | Some(Kind::Signed { algorithm: Algorithm::Hmac(_), .. }))
        {
            table.error("handshake", "take needs kind = \"hmac\": what is handed over is the key of that");
        }
        handshakes.check_shown(table);
        handshakes
    }

    fn replies(&self) -> impl Iterator<Item = &ReplyRule> {
        self.list.iter().map(|handshake| &handshake.reply)
    }

    /// What a handshake asks its sender for, an answer must not tell.
    fn check_shown(&self, table: &Table) {
        for name in self.replies().flat_map(ReplyRule::shown) {
            let mut asked = self.required().chain(self.replies().flat_map(ReplyRule::hashed));
            if asked.any(|secret| secret == name) {
                let message =
                    format!("{{config:{name}}} would tell everybody what a handshake's sender has to know");
                table.error("handshake", message);
            }
        }
    }

    fn required(&self) -> impl Iterator<Item = &str> {
        self.list.iter().filter_map(|handshake| Some(handshake.require.as_ref()?.secret.as_str()))
    }

    /// The source's secrets that they use, each once.
    pub(crate) fn secrets(&self) -> impl Iterator<Item = &str> {
        let used = self.replies().flat_map(|reply| reply.hashed().chain(reply.shown()));
        let mut names: Vec<&str> = self.required().chain(used).collect();
        names.sort_unstable();
        names.dedup();
        names.into_iter()
    }

    /// Whether there is one of that method.
    pub(crate) fn answers(&self, method: &Method) -> bool {
        self.list.iter().any(|handshake| handshake.method == *method)
    }

    /// Whether one of them hands over the secret.
    pub(crate) fn hands_over(&self) -> bool {
        self.list.iter().any(|handshake| handshake.take.is_some())
    }

    /// Whether an answer depends on the public URL.
    pub(crate) fn need_url(&self) -> bool {
        self.replies().any(ReplyRule::needs_url)
    }
}

/// Whether what the template signs could be a token, and nothing but that.
fn could_be_token(sign: &Template) -> bool {
    !sign.has(|piece| matches!(piece, Piece::Literal(text) if !text.bytes().all(is_word)))
}

/// The sender chooses the token and gets its signature, so that nothing the scheme signs may look like a token.
fn check_signing(table: &Table, sign: &[Template], signing: &[&ReplyRule]) {
    let body = |sign: &Template| sign.has(|piece| matches!(piece, Piece::Body));
    if signing.iter().any(|reply| !reply.token_written) && !sign.iter().any(body) {
        table.error(
            "handshake",
            "{hmac-…} would sign whatever this scheme signs: sign needs {body}, or text with a character other than \
             letters, digits, _ and -; or give token, a shape that nothing else has",
        );
    }
}

impl Handshake {
    fn read(mut table: Table, pointers: &mut Pointers) -> Option<Self> {
        let when = table.table_or_empty("when");
        let (method, when) = read_when(when, pointers)?;
        let unsigned = table.texts("unsigned").map(Whole::of);
        let require = table.table("require").and_then(|require| read_require(require, pointers));
        let wrong = table.has("require") && require.is_none();
        let take = table.table("take").and_then(|take| read_take(take, pointers));
        if unsigned.is_some() && method != Method::POST {
            table.error("unsigned", format!("a {method} is never signed and has no body: drop it"));
        }
        if table.has("take") && unsigned.is_none() {
            table.error("take", "needs unsigned: what the body of that first request consists of, e.g. []");
        }
        if !table.has("reply") {
            table.error("", "reply is missing: say what is answered, e.g. reply = { status = 200 }");
        }
        let token = Shape::read(&mut table, "token");
        let reply = table.table("reply").and_then(|reply| ReplyRule::read(reply, &method, token, pointers));
        table.finish();
        if wrong { None } else { Some(Self { method, when, unsigned, require, take, reply: reply? }) }
    }
}

impl Whole {
    fn of(mut names: Vec<String>) -> Self {
        names.sort_unstable();
        Self(names)
    }

    /// Whether the body consists of these, each there once, and of nothing else: such a body is no event.
    pub(crate) fn is(&self, body: &[u8]) -> bool {
        let body = body.trim_ascii();
        if body.len() > UNSIGNED_BODY_MAX {
            return false;
        }
        let found = if body.first() == Some(&b'{') { json::keys(body) } else { Some(fields(body)) };
        found.is_some_and(|mut found| {
            found.sort_unstable();
            found == self.0
        })
    }
}

fn fields(body: &[u8]) -> Vec<String> {
    form_urlencoded::parse(body).map(|(name, _)| name.into_owned()).collect()
}

fn read_when(mut table: Table, pointers: &mut Pointers) -> Option<(Method, Option<When>)> {
    let methods = [("POST", 0), ("GET", 1), ("HEAD", 2), ("OPTIONS", 3)];
    let method = match table.choice("method", &methods) {
        Some(1) => Method::GET,
        Some(2) => Method::HEAD,
        Some(3) => Method::OPTIONS,
        _ => Method::POST,
    };
    let place = one_place(&mut table, &["json", "header", "query", "form"], pointers);
    let equals = table.text("equals");
    let empty = table.flag("empty").unwrap_or(false);
    if place.is_none() && (equals.is_some() || empty) {
        table.error("equals", "needs json, header or query: the place whose text is compared");
    }
    if empty && (equals.is_some() || !matches!(place, Some(Place::Json { .. }))) {
        table.error("empty", "is for json alone: a list without items stands there");
    }
    if place.is_none() && method == Method::POST {
        table.error(
            "",
            "every event would be this handshake: name json, header or query, or a method other than POST",
        );
    }
    if method != Method::POST && place.as_ref().is_some_and(Place::in_body) {
        table.error("json", format!("a {method} has no body: name header or query"));
    }
    table.finish();
    if place.is_none() && method == Method::POST {
        return None;
    }
    let holds = match equals {
        Some(text) => Holds::Text(text),
        None if empty => Holds::EmptyList,
        None => Holds::Any,
    };
    Some((method, place.map(|place| When { place, holds })))
}

fn read_require(mut table: Table, pointers: &mut Pointers) -> Option<Require> {
    let place = one_place(&mut table, &["header", "query"], pointers);
    let secret = table.text("secret");
    if place.is_none() || secret.is_none() {
        table.error(
            "",
            "name header or query, and secret: which of the source's handshake_secrets stands there",
        );
    }
    table.finish();
    Some(Require { place: place?, secret: secret? })
}

fn read_take(mut table: Table, pointers: &mut Pointers) -> Option<Place> {
    let place = one_place(&mut table, &["header", "json"], pointers);
    if place.is_none() {
        table.error("", "name header or json: where the secret stands that is handed over");
    }
    table.finish();
    place
}

/// The place that one of the keys names, each of which is a form of places.
fn one_place(table: &mut Table, keys: &[&'static str], pointers: &mut Pointers) -> Option<Place> {
    let mut found = None;
    for key in keys {
        let Some(text) = table.text(key) else { continue };
        if found.is_some() {
            table.error(key, "is one place too many: name one");
        }
        match Place::parse(&format!("{key}:{text}"), pointers) {
            Ok(place) => found = Some(place),
            Err(message) => table.error(key, message),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use crate::fixture::read_scheme;

    const GOOD: &str = r#"
        kind = "hmac"
        sign = "v0:{body}"
        sig = { from = "header:X-Sig" }
        id = []
        [[handshake]]
        when = { method = "GET", query = "mode", equals = "on" }
        require = { query = "token", secret = "verify_token" }
        reply = { status = 200, type = "application/json", headers = { X-A = "b" }, body = '{"r":"{hmac-hex:query:c}"}' }
    "#;

    /// The messages about a scheme, one to a line.
    fn messages(toml: &str) -> String {
        let (_, problems) = read_scheme(toml);
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn mistakes_are_named_where_they_are() {
        assert_eq!(messages(GOOD), "");
        for (good, bad, wanted) in [
            (
                "method = \"GET\", query = \"mode\", equals = \"on\"",
                "",
                "every event would be this handshake",
            ),
            ("method = \"GET\", query = \"mode\", ", "", "equals: needs json, header or query"),
            ("method = \"GET\"", "method = \"PUT\"", "\"POST\", \"GET\", \"HEAD\""),
            ("query = \"mode\"", "json = \"/mode\"", "a GET has no body"),
            ("query = \"mode\"", "query = \"mode\", header = \"x\"", "one place too many"),
            ("query = \"mode\"", "qery = \"mode\"", "did you mean \"query\"?"),
            ("query = \"token\", ", "", "name header or query, and secret"),
            (", secret = \"verify_token\"", "", "name header or query, and secret"),
            ("reply = {", "replies = {", "reply is missing"),
            ("status = 200", "status = 302", "out of range"),
            ("application/json", "text/html", "\"text/plain\", \"application/json\""),
            ("X-A = \"b\"", "\"X A\" = \"b\"", "cannot be a header"),
            ("X-A = \"b\"", "Content-Type = \"b/c\"", "given by type"),
            ("X-A = \"b\"", "X-A = 1", "expected a string"),
            ("{hmac-hex:query:c}", "{hmac-md5:query:c}", "is not known"),
            ("{hmac-hex:query:c}", "{hmac-hex:json:/c}", "a GET has no body"),
            ("{hmac-hex:query:c}", "{query:}", "lacks a name"),
            ("{hmac-hex:query:c}\"}", "{query:c", "no closing brace"),
            (
                "kind = \"hmac\"\n        sign = \"v0:{body}\"",
                "kind = \"token\"",
                "nothing else signs for us",
            ),
            ("\"v0:{body}\"", "\"{json:/a}\"", "would sign whatever this scheme signs"),
            ("require =", "unsigned = []\nrequire =", "never signed and has no body"),
            ("require =", "take = { header = \"x\" }\nrequire =", "needs unsigned"),
            ("require =", "take = {}\nrequire =", "name header or json"),
            ("query = \"mode\", equals = \"on\"", "query = \"mode\", empty = true", "is for json alone"),
            ("require =", "token = { chars = \"any\" }\nrequire =", "\"plain\", \"word\""),
            ("require =", "token = { min = 9, max = 8 }\nrequire =", "is more than max"),
            ("require =", "token = { chars = \"word\" }\nrequire =", "a token that is signed"),
            ("X-A = \"b\"", "X-A = \"{hmac:query:c}\"", "is not known"),
            ("{hmac-hex:query:c}", "{sha256-hex:query:c + url}", "is not known"),
            ("{hmac-hex:query:c}", "{sha256-hex:config: + endpoint}", "is not known"),
            ("{hmac-hex:query:c}", "{config:verify_token}", "would tell everybody"),
        ] {
            assert!(GOOD.contains(good), "{good}");
            let found = messages(&GOOD.replace(good, bad));
            assert!(found.contains(wanted), "{bad}\n{found}");
        }
    }

    #[test]
    fn a_narrow_shape_of_tokens_stands_in_for_a_body_that_is_signed() {
        let narrow = "token = { chars = \"hex\", min = 20, max = 32 }\n        require =";
        assert_eq!(messages(&GOOD.replace("v0:{body}", "{json:/a}").replace("require =", narrow)), "");
    }

    #[test]
    fn what_is_handed_over_is_the_key_of_an_hmac() {
        let take =
            "[[handshake]]\nwhen = { header = \"x\" }\nunsigned = []\ntake = { header = \"x\" }\nreply = {}";
        let hmac = "kind = \"hmac\"\nsign = \"{body}\"\nsig = { from = \"header:X-Sig\" }\nid = []\n";
        assert_eq!(messages(&format!("{hmac}{take}")), "");
        let token = hmac.replace("hmac", "token").replace("sign = \"{body}\"", "");
        assert!(messages(&format!("{token}{take}")).contains("take needs kind = \"hmac\""));
    }

    #[test]
    fn a_body_is_whole_if_it_has_the_names_and_no_others() {
        let whole = |names: &[&str]| super::Whole::of(names.iter().map(|name| (*name).to_owned()).collect());
        let large = format!("{{\"a\":\"{}\"}}", "x".repeat(5000));
        for (names, body, wanted) in [
            (&[] as &[&str], "", true),
            (&[], " {} ", true),
            (&[], "[]", false),
            (&[], "{\"a\":1}", false),
            (&[], "a", false),
            (&["a"], "{\"a\":1}", true),
            (&["a"], "{\"\\u0061\":1}", true),
            (&["a"], "{\"a\":{\"b\":[1]}}", true),
            (&["a"], "{\"a\":1,\"a\":1}", false),
            (&["a"], "{\"a\":1,\"b\":1}", false),
            (&["a"], "{\"a\":1} {}", false),
            (&["a"], "{\"a\":", false),
            (&["a"], "[{\"a\":1}]", false),
            (&["a"], &large, false),
            (&["a"], "a=1", true),
            (&["a"], "a", true),
            (&["a"], "a=1&a=2", false),
            (&["a"], "a=1&b=2", false),
            (&["a"], "", false),
            (&["b", "a"], "{\"a\":1,\"b\":2}", true),
            (&["b", "a"], "a=1&b=2", true),
        ] {
            assert_eq!(whole(names).is(body.as_bytes()), wanted, "{names:?} {body}");
        }
    }

    #[test]
    fn whether_a_body_could_be_a_token_is_worked_out() {
        for (sign, bare) in [("v0:{body}", false), ("{body}", true), ("v0-{body}", true), ("{body}.", false)]
        {
            let (scheme, problems) = read_scheme(&GOOD.replace("v0:{body}", sign));
            assert_eq!(problems, []);
            assert_eq!(!scheme.unwrap().handshakes.signs.is_empty(), bare, "{sign}");
        }
    }
}
