//! `hapax retain`: one pass over everything that is older than its horizon, by an operator's order.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::{Exit, complain, connect, load, runtime, say};
use crate::config::Config;
use crate::db;
use crate::db::Session;
use crate::retention::{self, Clock, Counts, Ended, Limits, Mode, Progress, run_once};

/// What a pass is asked for.
#[expect(clippy::struct_excessive_bools, reason = "one for each flag of the command line")]
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The settings, as TOML.
    #[arg(long, env = "HAPAX_CONFIG", value_name = "FILE")]
    config: PathBuf,
    /// Run one pass to its end. It confirms what had stopped the gateways' own passes.
    #[arg(long, required_unless_present = "dry_run")]
    once: bool,
    /// Say what would go, and write nothing.
    #[arg(long, conflicts_with = "force")]
    dry_run: bool,
    /// The share of the time that deleting may take, 0.001 to 1, in place of retention.duty; 1 to hurry.
    #[arg(long, value_name = "SHARE", value_parser = duty)]
    duty: Option<f64>,
    /// Go on although the database's clock is behind its newest rows, or jumps.
    #[arg(long)]
    force: bool,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

fn duty(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| (0.001..=1.0).contains(share));
    share.ok_or_else(|| "give a number from 0.001 to 1".to_owned())
}

/// How long another cleaner's word is waited for: one that was killed leaves it behind.
const WAIT: Duration = retention::HOLD.saturating_add(Duration::from_secs(2));
const WAIT_PAUSE: Duration = Duration::from_millis(500);

/// Runs a pass and says what it did.
///
/// # Errors
/// Exit code 64 for the settings, 69 for Postgres, 1 if a clock looks wrong or a gateway is just at it.
pub fn run(options: &Options) -> Result<(), Exit> {
    let config = load(&options.config)?;
    runtime(1)?.block_on(retain(options, &config))
}

async fn retain(options: &Options, config: &Config) -> Result<(), Exit> {
    let mut session = connect(&config.postgres).await?;
    db::check_migrations(&session).await.map_err(Exit::unavailable)?;
    let mut settings = config.retention.clone();
    settings.duty = options.duty.unwrap_or(settings.duty);
    let mode = if options.dry_run { Mode::Look } else { Mode::Ordered { force: options.force } };
    let limits = Limits { retention: settings, mode };
    let (started, mut counts, mut show) = (Instant::now(), Counts::default(), Show::new());
    let ended = pass(&mut session, &limits, &mut counts, &mut show).await;
    show.bar.finish_and_clear();
    counts.warnings.iter().for_each(|warning| complain(&format!("warning: {warning}")));
    tell(options, &counts, started.elapsed(), ended.is_ok())?;
    ended.map_err(|ended| match ended {
        Ended::Held => Exit::failed(
            "another cleaner is at work, and one at a time is enough: try again later, or watch hapax_retention_* of the gateways",
        ),
        Ended::Stopped(stop) => Exit::failed(format!("stopped: {stop}")),
        Ended::Failed(_) | Ended::Silent(_) | Ended::NoAnswer => Exit::unavailable(format!(
            "the pass did not come to its end: {ended}; what it deleted until then is gone, run it again"
        )),
    })
}

async fn pass(
    session: &mut Session,
    limits: &Limits,
    counts: &mut Counts,
    show: &mut Show,
) -> Result<(), Ended> {
    let (began, mut said) = (Instant::now(), false);
    loop {
        let mut clock = Clock::default();
        let mut tell = |_: &Counts, progress: Progress| show.progress(progress);
        match run_once(session, limits, &mut clock, counts, &mut tell).await {
            // Before anything was done; later, somebody else has taken the place.
            Err(Ended::Held) if *counts == Counts::default() && began.elapsed() < WAIT => {
                if !std::mem::replace(&mut said, true) {
                    complain("another cleaner is at work, or was killed just now; waiting for a moment");
                }
                tokio::time::sleep(WAIT_PAUSE).await;
            }
            ended => return ended,
        }
    }
}

/// A bar on a terminal, and a line for each step elsewhere.
struct Show {
    bar: ProgressBar,
    step: &'static str,
    lines: bool,
}

impl Show {
    fn new() -> Self {
        let lines = !std::io::stderr().is_terminal();
        let bar = if lines { ProgressBar::hidden() } else { ProgressBar::new(0) };
        let style = ProgressStyle::with_template("{msg:12} {wide_bar} {percent:>3} %  {elapsed}");
        // The template is fixed; with a wrong one, the bar would be a plain one.
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, step: "", lines }
    }

    fn progress(&mut self, Progress { step, at, of }: Progress) {
        if step != self.step {
            self.step = step;
            self.bar.set_message(step);
            if self.lines {
                complain(&format!("going over: {step}"));
            }
        }
        self.bar.set_length(of);
        self.bar.set_position(at);
    }
}

fn tell(options: &Options, counts: &Counts, took: Duration, complete: bool) -> Result<(), Exit> {
    if options.json {
        let seconds = took.as_secs_f64();
        let result =
            json!({ "dry_run": options.dry_run, "complete": complete, "seconds": seconds, "counts": counts });
        return say(result);
    }
    let [deleted, moved, dropped] = if options.dry_run {
        ["would delete", "would move aside", "would drop"]
    } else {
        ["deleted", "moved aside", "dropped"]
    };
    for (kind, rows) in counts.rows() {
        if rows > 0 {
            say(format!("{deleted} {rows} {}", kind.replace('_', " ")))?;
        }
    }
    if counts.bodies_moved > 0 {
        say(format!("{moved} {} bodies of events that are not done", counts.bodies_moved))?;
    }
    tell_days(dropped, counts)?;
    if complete && counts.rows().iter().all(|(_, rows)| *rows == 0) && counts.days_dropped.is_empty() {
        say(if options.dry_run { "nothing would be deleted" } else { "nothing to delete" })?;
    }
    Ok(())
}

fn tell_days(dropped: &str, counts: &Counts) -> Result<(), Exit> {
    for day in &counts.days_dropped {
        say(format!("{dropped} hapax.{day}"))?;
    }
    for day in &counts.days_busy {
        say(format!(
            "busy: hapax.{day} is in use by a long transaction, or has bodies that are just needed: run it again later"
        ))?;
    }
    Ok(())
}
