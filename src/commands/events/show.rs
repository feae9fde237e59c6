//! `hapax events show`: one event in both tiers.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::Exit;
use super::ledger::{Body, Event, Filter, Job, Ledger, Stretch};
use super::list::object;
use super::text::{second, whole, write};
use crate::claim::{Desk, Seen, Stands};
use crate::config::{Config, FastTierKind, OnMismatch};
use crate::generation::Generation;
use crate::identify::EventKey;
use crate::settings::show_duration;

/// Most events of one id that are shown: with `on_mismatch = "accept"` each body is one.
const SHOWN_MAX: i64 = 100;

/// Which event, and what of it.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Its source.
    #[arg(long)]
    source: String,
    /// Its id.
    #[arg(long)]
    id: String,
    /// Its scope; unless given, that of the source.
    #[arg(long)]
    scope: Option<String>,
    /// Its body too: as text if it is, otherwise in base64.
    #[arg(long)]
    body: bool,
    /// Nothing but its body, byte for byte.
    #[arg(long, conflicts_with_all = ["body", "json"])]
    raw: bool,
    /// As JSON.
    #[arg(long)]
    pub(super) json: bool,
}

/// Everything that is known of an event.
struct Known {
    event: Event,
    jobs: Vec<Job>,
    mismatches: Vec<(Vec<u8>, Timestamp)>,
    body: Option<Body>,
    /// `Err`: why Redis cannot be asked.
    markers: Result<Vec<Seen>, String>,
}

pub(super) async fn run(config: &Config, ledger: &Ledger<'_>, arguments: &Arguments) -> Result<(), Exit> {
    let events = find(config, ledger, arguments).await?;
    if arguments.raw {
        return raw(ledger, arguments, &events).await;
    }
    if events.is_empty() {
        return Err(nothing(arguments));
    }
    let mut desk = Desk::open(&config.fast_tier).await;
    let generation = Generation::from_bytes(&ledger.generation().await?);
    for event in events {
        let markers = markers(&mut desk, &event.key).await;
        let known = Known {
            jobs: ledger.jobs(&event).await?,
            mismatches: ledger.mismatches(&event).await?,
            body: ledger.body(&event).await?,
            markers,
            event,
        };
        let told = if arguments.json {
            known.json(arguments.body, generation).to_string() + "\n"
        } else {
            known.text(config, arguments.body, generation)
        };
        if !write(told.as_bytes())? {
            break;
        }
    }
    Ok(())
}

fn nothing(Arguments { source, id, scope, .. }: &Arguments) -> Exit {
    let scope = scope.as_ref().map(|scope| format!(" and scope {:?}", whole(scope))).unwrap_or_default();
    Exit::failed(format!("source {source:?} has no event {:?}{scope} in the ledger", whole(id)))
}

/// By its key; if that is not there, by looking through the ledger, since its scope or its key may have been made by other
/// settings.
async fn find(config: &Config, ledger: &Ledger<'_>, arguments: &Arguments) -> Result<Vec<Event>, Exit> {
    let Arguments { source, id, scope, .. } = arguments;
    let settings = config.sources.get(source);
    let of_settings = settings.map_or("-", |settings| &*settings.scope);
    let key = EventKey::of(source, scope.as_deref().unwrap_or(of_settings), id);
    let mut filter = Filter {
        source: Some(source.clone()),
        scope: scope.clone(),
        keys: Some(vec![key.0.to_vec()]),
        ids: None,
        statuses: None,
        event_type: None,
        since: None,
        until: None,
        now: ledger.now().await?,
        mismatched: false,
        queue: None,
        replays_max: None,
    };
    let everything = Stretch { since: None, before: None, after: None, newest_first: true };
    if settings.is_none_or(|settings| settings.on_mismatch != OnMismatch::Accept) {
        let found = ledger.page(&filter, everything, SHOWN_MAX).await?;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    (filter.keys, filter.ids) = (None, Some(vec![id.clone()]));
    ledger.page(&filter, everything, SHOWN_MAX).await
}

async fn raw(ledger: &Ledger<'_>, arguments: &Arguments, events: &[Event]) -> Result<(), Exit> {
    let event = match events {
        [event] => event,
        [] => return Err(nothing(arguments)),
        several => {
            return Err(Exit::failed(format!(
                "{} events have this id: give --scope, or show them with --body",
                several.len()
            )));
        }
    };
    let body = ledger.body(event).await?.ok_or_else(|| Exit::failed("its body is not kept any more"))?;
    write(&body.bytes).map(drop)
}

/// What stands in Redis for the event, under both of the keys that it may have there.
async fn markers(desk: &mut Result<Option<Desk>, String>, key: &EventKey) -> Result<Vec<Seen>, String> {
    let desk = match desk {
        Ok(Some(desk)) => desk,
        Ok(None) => return Ok(Vec::new()),
        Err(cause) => return Err(cause.clone()),
    };
    let usual = desk.look(key).await?;
    let guarded = desk.look(&key.guarded()).await?;
    Ok(if guarded.stands == Stands::Nothing { vec![usual] } else { vec![usual, guarded] })
}

/// What a marker is, and what it means.
fn meaning(seen: &Seen, generation: Option<Generation>) -> (&'static str, &'static str) {
    match seen.stands {
        Stands::Nothing => ("none", "nothing stands there: the next delivery asks Postgres"),
        Stands::Lease => {
            ("lease", "a delivery is being recorded, or its process died: others wait, then ask Postgres")
        }
        Stands::Done(of) if Some(of) == generation => {
            ("done", "done in this generation: deliveries are answered as duplicates")
        }
        Stands::Done(_) => {
            ("other_generation", "done in another generation: says nothing, Postgres is asked")
        }
        Stands::Unknown => ("unknown", "not a value of ours: says nothing, Postgres is asked"),
    }
}

/// A body as text, if it is and a terminal would act on nothing in it.
fn as_text(bytes: &[u8]) -> Option<&str> {
    let is_plain = |character: char| !character.is_control() || matches!(character, '\n' | '\r' | '\t');
    std::str::from_utf8(bytes).ok().filter(|text| text.chars().all(is_plain))
}

impl Known {
    fn json(&self, with_body: bool, generation: Option<Generation>) -> Value {
        let job = |job: &Job| {
            json!({
                "queue": job.queue, "state": job.state, "attempts": job.attempts, "attempts_max": job.attempts_max,
                "replay": job.replay, "due_at": job.due_at.to_string(),
                "settled_at": job.settled_at.map(|time| time.to_string()),
                "held_until": job.held.then(|| job.due_at.to_string()), "error": job.error,
            })
        };
        let mismatch = |(digest, at): &(Vec<u8>, Timestamp)| json!({ "digest": hex::encode(digest), "seen_at": at.to_string() });
        let mut event = object(&self.event);
        let more = json!({
            "jobs": self.jobs.iter().map(job).collect::<Vec<_>>(),
            "other_bodies": self.mismatches.iter().map(mismatch).collect::<Vec<_>>(),
            "body": self.body.as_ref().map(|body| body.json(with_body)),
            "redis": match &self.markers {
                Err(cause) => json!({ "error": cause }),
                Ok(markers) => markers.iter().map(|seen| {
                    let (kind, means) = meaning(seen, generation);
                    let left_ms = seen.left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
                    json!({ "key": seen.key, "marker": kind, "value": seen.value, "means": means, "left_ms": left_ms })
                }).collect(),
            },
        });
        if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
            event.extend(more);
        }
        event
    }

    fn text(&self, config: &Config, with_body: bool, generation: Option<Generation>) -> String {
        let Self { event, jobs, mismatches, body, .. } = self;
        let mut told = Told::default();
        told.line("event", &whole(&event.id));
        told.line("source", &whole(&event.source));
        told.line("scope", &whole(&event.scope));
        told.line("type", &event.kind.as_deref().map_or_else(|| "-".to_owned(), whole));
        told.line("status", &event.status);
        told.line("received", &event.received_at.to_string());
        told.line("settled", &event.settled_at.map_or_else(|| "not yet".to_owned(), |time| time.to_string()));
        told.line("attempts", &event.attempts.to_string());
        told.line("replay", &event.replay.to_string());
        told.line("key", &hex::encode(event.key.0));
        told.line("digest", &hex::encode(&event.digest));
        for (digest, at) in mismatches {
            told.line("other body", &format!("{}, seen {}", hex::encode(digest), second(*at)));
        }
        if jobs.is_empty() {
            told.line("jobs", "none");
        }
        for job in jobs {
            told.line("job", &described(job));
        }
        self.tell_markers(&mut told, config, generation);
        match body {
            None => told.line(
                "body",
                &format!("not kept any more (retention.body = {})", show_duration(config.retention.body)),
            ),
            Some(body) => body.tell(&mut told, with_body),
        }
        told.0 + "\n"
    }

    fn tell_markers(&self, told: &mut Told, config: &Config, generation: Option<Generation>) {
        let markers = match &self.markers {
            Ok(_) if !matches!(config.fast_tier.kind, FastTierKind::Redis(_)) => {
                return told.line("redis", "not used by these settings");
            }
            Ok(markers) => markers,
            Err(cause) => return told.line("redis", &format!("cannot be reached: {}", whole(cause))),
        };
        for seen in markers {
            let (_, means) = meaning(seen, generation);
            let value = seen.value.as_deref().map(|value| format!(" ({})", whole(value))).unwrap_or_default();
            let left = match (seen.left, &seen.stands) {
                (_, Stands::Nothing) => String::new(),
                (Some(left), _) => format!("; for {:.1} s more", left.as_secs_f64()),
                (None, _) => "; without a time to live".to_owned(),
            };
            told.line("redis", &format!("{means}{value}{left}"));
            told.line("redis key", &whole(&seen.key));
        }
    }
}

impl Body {
    fn json(&self, with_body: bool) -> Value {
        let headers: Value = serde_json::from_str(&self.headers).unwrap_or(Value::Null);
        let mut value = json!({
            "place": self.place, "body_bytes": self.bytes.len(), "headers": headers, "item": self.item,
            "provider_time": self.provider_time.map(|time| time.to_string()),
        });
        if let (true, Value::Object(value)) = (with_body, &mut value) {
            match as_text(&self.bytes) {
                Some(text) => value.insert("text".to_owned(), text.into()),
                None => value.insert("base64".to_owned(), STANDARD.encode(&self.bytes).into()),
            };
        }
        value
    }

    fn tell(&self, told: &mut Told, with_body: bool) {
        told.line("body", &format!("{} bytes in {}", self.bytes.len(), self.place));
        if let Some(item) = self.item {
            told.line("item", &format!("{item} of its batch"));
        }
        if let Some(time) = self.provider_time {
            told.line("its time", &time.to_string());
        }
        told.line("headers", &whole(&self.headers));
        if with_body {
            match as_text(&self.bytes) {
                Some(text) => told.block("as text", text),
                None => told.block("in base64", &STANDARD.encode(&self.bytes)),
            }
        }
    }
}

fn described(job: &Job) -> String {
    let Job { queue, state, attempts, attempts_max, replay, .. } = job;
    let mut text =
        format!("{}: {state}, {attempts} of {attempts_max} attempts, replay {replay}", whole(queue));
    let time = match (&job.settled_at, job.held) {
        (Some(at), _) => format!(", since {}", second(*at)),
        (None, true) => format!(", a worker has it until {}", second(job.due_at)),
        (None, false) => format!(", due {}", second(job.due_at)),
    };
    text.push_str(&time);
    if let Some(error) = &job.error {
        // Writing to a String cannot fail.
        write!(text, "; last error: {}", whole(error)).unwrap_or_default();
    }
    text
}

#[derive(Default)]
struct Told(String);

impl Told {
    fn line(&mut self, name: &str, value: &str) {
        writeln!(self.0, "{name:<12}{value}").unwrap_or_default();
    }

    fn block(&mut self, name: &str, text: &str) {
        writeln!(self.0, "{name}:\n{}", text.trim_end_matches('\n')).unwrap_or_default();
    }
}
