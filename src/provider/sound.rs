//! Keys that are right one by one, and together would leave something unsigned or could never be used.
//!
//! Invariant: what a scheme states is looked at in every request, and what it trusts is signed. A key that has no effect
//! is refused: whoever wrote it believes that something is checked.

use super::Kind;
use super::covers;
use super::place::Place;
use super::signature::{SaidHash, SigRule, TsRule};
use super::template::{Piece, Template};
use crate::settings::Table;

/// What is held against each other.
pub(super) struct Together<'s> {
    pub(super) kind: &'s Kind,
    pub(super) sig: &'s SigRule,
    pub(super) ts: Option<&'s TsRule>,
    /// Where the request says what its body hashes to, and its URL.
    pub(super) hashes: [Option<&'s SaidHash>; 2],
    /// Places of `require`, of the hashes and of the key's name.
    pub(super) others: &'s [&'s Place],
}

impl Together<'_> {
    /// Reports what does not go together.
    pub(super) fn check(&self, table: &Table) {
        if let Kind::Signed { algorithm, .. } = self.kind {
            if table.has("url_hash") {
                table.error("url_hash", "is for kind = \"jwt\": sign {url} itself");
            }
            if table.has("key_id") && (table.has("cert") || !algorithm.has_public_keys()) {
                table.error("key_id", "is for public keys that the settings give: drop it");
            }
        }
        for (key, hash) in ["body_hash", "url_hash"].into_iter().zip(self.hashes) {
            if hash.is_some_and(|hash| !self.is_signed(&hash.from)) {
                table.error(
                    key,
                    "is not part of what is signed, so that anybody could say another hash: have sign hold its place",
                );
            }
        }
        if table.has("every") {
            self.check_items(table);
        }
    }

    /// A form with the whole body in it needs no hash of it.
    fn is_signed(&self, place: &Place) -> bool {
        let sign = self.kind.templates();
        let held = |sign: &Template| sign.has_body() || covers(sign, place);
        self.kind.sends_secret() || place.in_token() || (!sign.is_empty() && sign.iter().all(held))
    }

    /// An item is read by itself: it has the headers of its request, and neither its URL nor a form around it.
    fn check_items(&self, table: &Table) {
        if matches!(self.kind, Kind::Jwt(_)) {
            table.error("every", "is not for kind = \"jwt\": one token signs the whole request");
            return;
        }
        let sign = self.kind.templates();
        let times = self.ts.map_or(&[] as &[Place], TsRule::places);
        let mut places = self.sig.from.iter().chain(times).chain(self.others.iter().copied());
        let outside = |piece: &Piece| {
            matches!(
                piece,
                Piece::Path | Piece::PathEscaped | Piece::PathSlash | Piece::Url(_) | Piece::FormSorted
            )
        };
        if places.any(is_outside)
            || sign.iter().any(|sign| sign.has(outside) || sign.places().any(is_outside))
        {
            table.error("every", "items have no URL and no form: give places in the item, or headers");
        }
    }
}

fn is_outside(place: &Place) -> bool {
    matches!(place, Place::Query(_) | Place::Form(_) | Place::FormJson { .. })
}

#[cfg(test)]
mod tests {
    use crate::fixture::read_scheme;

    fn messages(kind: &str, sign: &str, more: &str) -> String {
        let (_, problems) = read_scheme(&format!(
            "kind = {kind:?}\nsign = {sign}\nsig = {{ from = \"header:x-sig\" }}\nid = \"header:x-id\"\n{more}"
        ));
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn what_would_leave_something_unsigned_is_refused() {
        let unsigned = "so that anybody could say another hash";
        let (hash, url_hash) = ("body_hash = { from = \"header:h\" }", "url_hash = { from = \"header:h\" }");
        let (query, id) = ("body_hash = { from = \"query:h\" }", "id_signed = true");
        for (kind, sign, more, wanted) in [
            ("hmac", "\"{method}{header:t}\"", hash, unsigned),
            ("hmac", "\"{header:h}{header:t}\"", hash, ""),
            ("hmac", "[\"{header:h}\", \"{header:t}\"]", hash, unsigned),
            ("hmac", "[\"{header:h}\", \"{body}\"]", hash, ""),
            ("hmac", "\"{url_base}\"", query, unsigned),
            ("hmac", "\"{url}\"", query, ""),
            ("hmac", "\"{url}{body}\"", url_hash, "url_hash: is for kind"),
            ("jwt", "\"{header:t}\"\njwt = { algs = [\"HS256\"] }", url_hash, unsigned),
            ("jwt", "[]\njwt = { algs = [\"HS256\"] }", hash, unsigned),
            ("hmac", "\"{body}\"", "key_id = \"header:k\"", "key_id: is for public keys"),
            ("ecdsa-p256", "\"{body}\"", "key_id = \"header:k\"", ""),
            // Any form may be the signed one.
            ("hmac", "[\"{id}{body}\", \"{body}\"]", id, "id_signed: is false"),
            ("hmac", "[\"{id}{body}\", \"{header:x-id}{body}\"]", id, ""),
            ("hmac", "\"{body}[{header:n}{id}]\"", "", "would not always be signed"),
            ("hmac", "\"{header:t}[{header:n}{body}]\"", "", "would not always be signed"),
        ] {
            let found = messages(kind, sign, more);
            let right = if wanted.is_empty() { found.is_empty() } else { found.contains(wanted) };
            assert!(right, "{kind} {sign} {more}: {found:?}");
        }
    }

    #[test]
    fn an_item_that_is_signed_by_itself_has_no_url() {
        let wanted = "items have no URL";
        for (sign, more, wanted) in [
            ("\"{json:/a}{header:b}{body}{method}\"", "", ""),
            ("\"{body}{path}\"", "", wanted),
            ("\"{body}{url}\"", "", wanted),
            ("\"{body}[{query:a}]\"", "", wanted),
            ("\"{body}\"", "require = { \"query:a\" = \"1\" }", wanted),
            ("\"{body}{ts}\"", "ts = { from = \"form:a\" }", wanted),
            ("\"{body}\"\njwt = { algs = [\"HS256\"] }", "", "every: is not for kind"),
        ] {
            let kind = if sign.contains("jwt") { "jwt" } else { "hmac" };
            let found = messages(kind, sign, &format!("every = \"/items\"\n{more}"));
            let right = if wanted.is_empty() { found.is_empty() } else { found.contains(wanted) };
            assert!(right, "{sign} {more}: {found:?}");
        }
    }
}
