//! Requests from nothing but a number: the id, the body and its signature; and what the ledger must say of them.
//!
//! Invariant: a body is a function of the event's number and of which of its two bodies is wanted, so that its digest can
//! be worked out again when the ledger is read. Only the signature and its time are new each time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Method, Request};
use jiff::Timestamp;

use super::Exit;
use crate::body::Received;
use crate::commands::client::Target;
use crate::commands::send::content_type;
use crate::config::Source;
use crate::identify::{Content, Event, identify};
use crate::parts;
use crate::provider::Key;
use crate::sign::{Draft, sign_for};
use crate::verify::verify;

/// Digits of an event's number behind the prefix: a fixed count, so that the number is found again in any id.
const NUMBER_DIGITS: usize = 9;
/// Events that one run can have.
pub(super) const EVENTS_MAX: u64 = 10_u64.pow(9);
/// What is added to a body stands under this name, which no provider has.
const MEMBER: &str = "hapax_storm";

/// How requests are made.
#[derive(Debug)]
pub(super) struct Recipe {
    source: Arc<Source>,
    key: Key,
    target: Target,
    /// Digits, since some providers' ids are numbers; random, so that runs do not mix.
    prefix: String,
    /// The time that bodies say.
    born: Timestamp,
    batch: u64,
    /// Each event is padded to so many bytes.
    body_bytes: Option<usize>,
}

/// One request.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    pub(super) body: Bytes,
}

impl Recipe {
    pub(super) fn new(
        source: &Arc<Source>,
        key: &Key,
        target: Target,
        (batch, body_bytes): (u64, Option<usize>),
    ) -> Self {
        let prefix = rand::random_range(10_u64.pow(11)..10_u64.pow(12)).to_string();
        let (source, key, born) = (Arc::clone(source), key.clone(), Timestamp::now());
        Self { source, key, target, prefix, born, batch, body_bytes }
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    /// Stands in every id of the run, and in no other.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Events in a request.
    pub(super) fn batch(&self) -> u64 {
        self.batch
    }

    /// The number of the event with that id.
    pub(super) fn number(&self, id: &str) -> Option<u64> {
        let (_, rest) = id.split_once(&self.prefix)?;
        rest.get(..NUMBER_DIGITS)?.parse().ok()
    }

    fn name(&self, event: u64) -> String {
        format!("{}{event:0NUMBER_DIGITS$}", self.prefix)
    }

    /// The request that brings a unit, signed as of now.
    pub(super) fn make(&self, unit: u64, variant: usize) -> Result<Made, Exit> {
        self.make_at(unit, variant, Timestamp::now())
    }

    fn make_at(&self, unit: u64, variant: usize, now: Timestamp) -> Result<Made, Exit> {
        let body = self.body(unit, variant)?;
        let name = self.name(unit * self.batch);
        let draft = Draft {
            method: &Method::POST,
            public_url: self.source.public_url.as_deref(),
            path: self.target.path(),
            body: &body,
            id: Some(&name),
            now,
        };
        let signed = sign_for(&self.source.scheme, &self.key, &draft, &self.source.claims);
        let mut headers = signed.map_err(Exit::settings)?.headers;
        headers.push((CONTENT_TYPE, HeaderValue::from_static(content_type(&body))));
        Ok(Made { headers, body })
    }

    /// What the gateway must take a unit for: found by its own rules, out of a request that was made as the others.
    pub(super) fn expect(&self, unit: u64, variant: usize) -> Result<Vec<Event>, Exit> {
        self.expect_at(unit, variant, Timestamp::now())
    }

    fn expect_at(&self, unit: u64, variant: usize, now: Timestamp) -> Result<Vec<Event>, Exit> {
        let Made { headers, body } = self.make_at(unit, variant, now)?;
        let mut head = Request::post(self.target.path()).body(()).map_err(Exit::software)?.into_parts().0;
        head.headers.extend(headers);
        let received = Received { source: Arc::clone(&self.source), head, body };
        let identified = verify(received, now).and_then(identify).map_err(|code| {
            let name = &self.source.name;
            Exit::settings(format!(
                "the gateway would refuse what is made for source {name:?}: {}",
                code.as_str()
            ))
        })?;
        Ok(match identified.into_parts().1 {
            Content::Event(event) => vec![event],
            Content::Batch(events) => events,
        })
    }

    /// Whether such requests can be made, told apart and found again, now and at the end of the run.
    pub(super) fn try_out(&self, lasts: Duration, varies: bool, proves: bool) -> Result<(), Exit> {
        let events = self.expect(0, 0)?;
        let end = self.born.checked_add(lasts).map_err(Exit::software)?;
        self.expect_at(0, 0, end).map_err(|Exit { message, .. }| {
            Exit::settings(format!(
                "{message}, at the end of the run: the time of such an event stands in its body; run for less long"
            ))
        })?;
        let scheme = &self.source.scheme.name;
        let ids = |events: &[Event]| events.iter().map(|event| event.id.clone()).collect::<Vec<_>>();
        let numbers = events.iter().map(|event| self.number(&event.id));
        let are_found = numbers.eq((0..self.batch).map(Some)) && ids(&self.expect(0, 0)?) == ids(&events);
        if proves && !are_found {
            return Err(Exit::settings(format!(
                "the sender cannot choose the ids of {scheme}, so its rows cannot be found again: no proof is possible \
                 (--no-proof does without)"
            )));
        }
        let digests = |events: &[Event]| events.iter().map(|event| event.digest).collect::<Vec<_>>();
        if varies && digests(&events) == digests(&self.expect(0, 1)?) {
            return Err(Exit::settings(format!(
                "--mismatch: the digest of {scheme} does not see the change"
            )));
        }
        Ok(())
    }

    fn body(&self, unit: u64, variant: usize) -> Result<Bytes, Exit> {
        let first = unit * self.batch;
        let sample = self.sample(first)?;
        let Some(rules) = &self.source.scheme.batch else {
            return self.finished(&sample, first, variant).map(Bytes::from);
        };
        let items = |body: &str| -> Result<String, Exit> {
            let list = parts::list(body.as_bytes(), &rules.pointers, rules.items).ok();
            let item = list.as_deref().and_then(<[_]>::first).map(|item| item.get().to_owned());
            item.ok_or_else(|| Exit::settings("the preset's sample has no list of events"))
        };
        let mut all = String::new();
        for event in first..first + self.batch {
            let separator = if all.is_empty() { "" } else { "," };
            all += separator;
            all += &self.finished(&items(&self.sample(event)?)?, event, variant)?;
        }
        Ok(sample.replacen(&items(&sample)?, &all, 1).into())
    }

    fn sample(&self, event: u64) -> Result<String, Exit> {
        let scheme = &self.source.scheme;
        let sample = scheme.sample(&self.name(event), self.born);
        sample.ok_or_else(|| Exit::settings(format!("{} has no sample to make events from", scheme.name)))
    }

    /// With what tells it from another event and from its other body, and padded.
    fn finished(&self, event: &str, number: u64, variant: usize) -> Result<String, Exit> {
        let name = self.name(number);
        let mut mark = if event.contains(&name) { String::new() } else { name };
        if variant > 0 {
            mark += "-other";
        }
        let least = with_member(event, &mark);
        let Some(wanted) = self.body_bytes else {
            return Ok(if mark.is_empty() { event.to_owned() } else { least });
        };
        let lacking = wanted.checked_sub(least.len()).ok_or_else(|| {
            Exit::settings(format!(
                "--body: an event of {} has {} bytes already",
                self.source.scheme.name,
                least.len()
            ))
        })?;
        mark.extend(std::iter::repeat_n('x', lacking));
        Ok(with_member(event, &mark))
    }
}

/// Adds a member to a JSON object, or a field to a form.
fn with_member(event: &str, value: &str) -> String {
    match event.split_once('{').filter(|(before, _)| before.trim().is_empty()) {
        Some((before, rest)) => {
            let comma = if rest.trim_start().starts_with('}') { "" } else { "," };
            format!("{before}{{\"{MEMBER}\":\"{value}\"{comma}{rest}")
        }
        None => format!("{}&{MEMBER}={value}", event.trim_end()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::fixture;
    use crate::provider::Scheme;

    const SECRETS: [&str; 3] =
        ["whsec_aGFwYXgtdGVzdC1zZWNyZXQtb2YtMzItYnl0ZXMh", "00ff00ff00ff00ff", "name:pass:word"];

    fn recipe(preset: &str, batch: u64, body_bytes: Option<usize>) -> Option<Recipe> {
        let scheme = Scheme::preset(preset).unwrap();
        let secret = SECRETS.into_iter().find(|secret| scheme.key(secret).is_ok())?;
        let mut source = fixture::source(&scheme, &[secret]);
        source.public_url = Some("https://hooks.example.com".to_owned());
        let key = source.keys[0].clone();
        let target = Target::parse("http://127.0.0.1:1/in/test").unwrap();
        Some(Recipe::new(&Arc::new(source), &key, target, (batch, body_bytes)))
    }

    #[test]
    fn what_is_made_is_found_again() {
        let mut proved = BTreeSet::new();
        for preset in Scheme::preset_names() {
            let Some(recipe) = recipe(preset, 1, None) else { continue };
            // Of private keys, random ids, or nothing that names an event.
            if recipe.try_out(Duration::from_secs(60), false, true).is_err() {
                continue;
            }
            let (first, again, next) = (recipe.expect(8, 0), recipe.expect(8, 0), recipe.expect(9, 0));
            let (first, again, next) =
                (first.unwrap().remove(0), again.unwrap().remove(0), next.unwrap().remove(0));
            assert_eq!((&first.id, first.digest), (&again.id, again.digest), "{preset}");
            assert_eq!((recipe.number(&first.id), recipe.number(&next.id)), (Some(8), Some(9)), "{preset}");
            proved.insert(*preset);
        }
        for preset in ["stripe", "github", "svix", "slack", "shopify", "telegram", "paddle", "gocardless"] {
            assert!(proved.contains(preset), "{preset}: {proved:?}");
        }
    }

    #[test]
    fn bodies_vary_and_are_padded() {
        for preset in ["stripe", "github"] {
            let recipe = recipe(preset, 1, Some(2000)).unwrap();
            recipe.try_out(Duration::ZERO, true, true).unwrap();
            assert_eq!((recipe.body(3, 0).unwrap().len(), recipe.body(3, 1).unwrap().len()), (2000, 2000));
            assert!(serde_json::from_slice::<serde_json::Value>(&recipe.body(3, 1).unwrap()).is_ok());
        }
        let message =
            recipe("stripe", 1, Some(10)).unwrap().try_out(Duration::ZERO, false, true).unwrap_err().message;
        assert!(message.contains("bytes already"), "{message}");
    }

    #[test]
    fn a_batch_has_as_many_events_as_asked() {
        let recipe = recipe("gocardless", 5, Some(600)).unwrap();
        recipe.try_out(Duration::ZERO, true, true).unwrap();
        let numbers: Vec<_> =
            recipe.expect(2, 1).unwrap().iter().map(|event| recipe.number(&event.id)).collect();
        assert_eq!(numbers, (10..15).map(Some).collect::<Vec<_>>());
    }

    #[test]
    fn what_cannot_be_found_again_is_no_proof() {
        for preset in ["dropbox", "twitter"] {
            let recipe = recipe(preset, 1, None).unwrap();
            let message = recipe.try_out(Duration::ZERO, false, true).unwrap_err().message;
            assert!(message.contains("--no-proof"), "{preset}: {message}");
            assert!(recipe.try_out(Duration::ZERO, false, false).is_ok(), "{preset}");
        }
    }
}
