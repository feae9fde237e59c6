//! What a run came to: for people, as JSON, as a picture.

use std::path::Path;
use std::sync::Arc;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::knee::{Knee, us_to_ms};
use super::machine::Used;
use super::plan::Plan;
use super::plot;
use super::proof::Proof;
use super::stage::{Measured, Stages};
use super::tally::{LATE_AFTER, micros};
use super::{Exit, Options, STDOUT};
use crate::commands::{complain, say};

/// All of it.
pub(super) struct Report<'a> {
    pub(super) plan: &'a Arc<Plan>,
    pub(super) stages: &'a Stages,
    pub(super) knee: Option<Knee>,
    pub(super) usage: Used,
    pub(super) proof: Option<Proof>,
}

impl Report<'_> {
    /// Writes what was asked for, and the table.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(super) fn write(&self, options: &Options) -> Result<(), Exit> {
        let measured = self.stages.last().ok_or_else(|| Exit::software("nothing was measured"))?;
        if let Some(path) = &options.svg {
            write_file(path, &plot::svg(measured))?;
        }
        let table = self.table(measured).join("\n");
        match &options.json {
            Some(path) if path == Path::new(STDOUT) => {
                complain(&table);
                say(self.json(measured))
            }
            Some(path) => {
                write_file(path, &format!("{:#}\n", self.json(measured)))?;
                say(table)
            }
            None => say(table),
        }
    }

    /// # Errors
    /// The proof does not hold, exit code 1; nothing was answered, exit code 69.
    pub(super) fn verdict(&self) -> Result<(), Exit> {
        let counts = self.stages.counts();
        match &self.proof {
            Some(proof) if !proof.holds => {
                let told = proof.told.iter().map(|breach| format!("  {}: {}", breach.id, breach.rule));
                let more = proof.breaches - u64::try_from(proof.told.len()).unwrap_or(0);
                let more = (more > 0).then(|| format!("  and {more} more"));
                let lines: Vec<String> = told.chain(more).collect();
                Err(Exit::failed(format!("the proof does not hold:\n{}", lines.join("\n"))))
            }
            _ if counts.answered == 0 && counts.failed > 0 => {
                Err(Exit::unavailable("the gateway answered nothing"))
            }
            _ => Ok(()),
        }
    }

    fn json(&self, measured: &Measured) -> Value {
        let recipe = &self.plan.recipe;
        let mut report = json!({
            "source": recipe.source().name.as_ref(),
            "to": format!("http://{}{}", recipe.target().authority(), recipe.target().path()),
            "id_prefix": recipe.prefix(),
            "interrupted": self.stages.stopped(),
            "measured": {
                "rate_from": measured.pace.from,
                "rate_to": measured.pace.to,
                "requests": measured.latency.len(),
                "took_ms": micros(measured.took) / 1000,
                "latency_us": quantiles(&measured.latency),
                "lateness_us": quantiles(&measured.lateness),
                "late": measured.late,
                "late_after_us": micros(LATE_AFTER),
                "over_time": measured.points,
            },
            "tool": {
                "cpu_ms": self.usage.cpu_ms,
                "cpu_share": self.usage.cpu_share,
                "was_busy": self.usage.was_busy,
                "clock_late": measured.slip.requests,
                "clock_late_max_us": micros(measured.slip.max),
            },
            "knee": self.knee,
            "proof": self.proof,
        });
        let counts = serde_json::to_value(self.stages.counts()).unwrap_or_default();
        if let (Value::Object(report), Value::Object(counts)) = (&mut report, counts) {
            report.extend(counts);
        }
        report
    }

    fn table(&self, measured: &Measured) -> Vec<String> {
        let counts = self.stages.counts();
        let status = counts.status.iter().map(|(status, count)| format!("{status}: {count}"));
        let outcomes = counts.outcomes.iter().map(|(outcome, count)| format!("{outcome}: {count}"));
        let failures = counts.failures.iter().map(|(failure, count)| format!("{failure:?}: {count}"));
        let joined = |parts: Vec<String>| if parts.is_empty() { "-".to_owned() } else { parts.join(", ") };
        let mut lines = vec![
            format!(
                "sent {}, answered {}, failed {}, disconnected {}",
                counts.sent, counts.answered, counts.failed, counts.disconnected
            ),
            format!("status       {}", joined(status.collect())),
            format!("outcome      {}", joined(outcomes.collect())),
        ];
        if counts.failed > 0 {
            lines.push(format!("failures     {}", joined(failures.collect())));
        }
        if counts.retries + counts.given_up + counts.answers_dropped > 0 {
            lines.push(format!(
                "retries      {}; {} answers taken for lost; {} given up",
                counts.retries, counts.answers_dropped, counts.given_up
            ));
        }
        lines.extend(self.knee.as_ref().map(knee_line));
        lines.push(latency_line("latency", &measured.latency));
        lines.push(latency_line("begun after", &measured.lateness));
        lines.extend(self.limits(measured));
        lines.extend(self.proof_lines());
        lines
    }

    /// What the tool itself took, and whether that spoils the numbers.
    fn limits(&self, measured: &Measured) -> Vec<String> {
        let Used { cpu_ms, cpu_share, was_busy } = self.usage;
        let mut lines = vec![format!(
            "this tool    {cpu_ms} ms of processor time, {:.0} % of one processor",
            cpu_share * 100.0
        )];
        if measured.late > 0 {
            lines.push(format!(
                "late         {} requests began more than {} ms after they were due: every connection was waiting for an \
                 answer, or this tool was too slow; the latency counts it",
                measured.late,
                LATE_AFTER.as_millis()
            ));
        }
        if measured.slip.requests > 0 {
            lines.push(format!(
                "schedule     this tool let {} requests go too late, by {:.1} ms at most: the machine was busy",
                measured.slip.requests,
                us_to_ms(micros(measured.slip.max))
            ));
        }
        if was_busy {
            lines.push(
                "warning      this tool had no time left: give it --threads or a machine of its own"
                    .to_owned(),
            );
        }
        if self.stages.stopped() {
            lines.push("interrupted  what was not due yet was not sent".to_owned());
        }
        lines
    }

    fn proof_lines(&self) -> Vec<String> {
        let Some(proof) = &self.proof else { return vec!["proof        none".to_owned()] };
        let verdict = if proof.holds { "holds" } else { "DOES NOT HOLD" };
        let effects = proof.effects.map_or_else(|| "not asked for".to_owned(), |effects| effects.to_string());
        vec![
            format!(
                "proof        {verdict}: {} events sent, {} of them answered 2xx; {} rows, {} of them done; effects: {effects}",
                proof.events, proof.safe, proof.rows, proof.done
            ),
            format!(
                "             of {} events without a 2xx, {} are in the ledger and {} are not",
                proof.unsafe_with_row + proof.unsafe_without_row,
                proof.unsafe_with_row,
                proof.unsafe_without_row
            ),
        ]
    }
}

fn knee_line(knee: &Knee) -> String {
    let limit = knee.limit.as_deref().unwrap_or("no limit was reached");
    match (knee.rate, knee.measured_rate) {
        (Some(rate), Some(half)) => format!("knee         {rate:.0}/s ({limit}); measured at {half:.0}/s:"),
        (Some(rate), None) => {
            format!("knee         {rate:.0}/s so far ({limit}); measured at the last step:")
        }
        (None, _) => format!("knee         below the first step ({limit}): begin with a lower --rate"),
    }
}

const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];

fn latency_line(name: &str, times: &Histogram<u64>) -> String {
    let shown = QUANTILES
        .iter()
        .map(|(name, quantile)| format!("{name} {:.2} ms", us_to_ms(times.value_at_quantile(*quantile))));
    let shown: Vec<String> = shown.collect();
    format!("{name:<12} {}, max {:.2} ms", shown.join(", "), us_to_ms(times.max()))
}

fn quantiles(times: &Histogram<u64>) -> Value {
    let named = QUANTILES
        .iter()
        .map(|(name, quantile)| (name.replace('.', "_"), Value::from(times.value_at_quantile(*quantile))));
    named.chain([("max".to_owned(), Value::from(times.max()))]).collect::<serde_json::Map<_, _>>().into()
}

fn write_file(path: &Path, text: &str) -> Result<(), Exit> {
    std::fs::write(path, text).map_err(|error| Exit::software(format!("{}: {error}", path.display())))
}
