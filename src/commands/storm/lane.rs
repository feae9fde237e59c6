//! One connection at a time: takes what is due, sends it, notes what came of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use indicatif::ProgressBar;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Exit;
use super::clock::{Clock, Delivery};
use super::fates::{Fates, Mark};
use super::mix::Cut;
use super::plan::Plan;
use super::recipe::Made;
use super::tally::{End, Failure, Tally};
use crate::commands::client::{Connection, Target, raw_request};

/// What the lanes of a stage share.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) plan: Arc<Plan>,
    pub(super) clock: Clock,
    pub(super) requests: u64,
    /// The number of its first event, in batches.
    pub(super) first_unit: u64,
    pub(super) tally: Mutex<Tally>,
    pub(super) fates: Arc<Mutex<Fates>>,
    pub(super) bar: ProgressBar,
}

pub(super) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends until nothing is left.
///
/// # Errors
/// A request cannot be made; the whole stage is stopped then.
pub(super) async fn drive(load: Arc<Load>) -> Result<(), Exit> {
    let mut connection = None;
    while let Some(delivery) = load.clock.next().await {
        lock(&load.tally).begin(delivery.due.elapsed(), delivery.attempt > 0);
        let end = load.deliver(&mut connection, delivery).await;
        if end.is_err() {
            load.clock.stop();
        }
        load.note(delivery, end.as_ref().unwrap_or(&End::Failed(Failure::Connect)));
        end?;
    }
    Ok(())
}

impl Load {
    fn unit(&self, request: u64) -> u64 {
        self.first_unit + self.plan.mix.unit(request, self.requests)
    }

    async fn deliver(&self, connection: &mut Option<Connection>, delivery: Delivery) -> Result<End, Exit> {
        let Delivery { request, attempt, .. } = delivery;
        let Plan { mix, recipe, .. } = self.plan.as_ref();
        // Each attempt has a time and a signature of its own.
        let made = recipe.make(self.unit(request), mix.variant(request))?;
        if let Some(cut) = mix.cut(request, attempt) {
            // Never more connections than lanes.
            *connection = None;
            return Ok(self.leave(&made, cut).await);
        }
        let drops = mix.drops(request, attempt);
        let sent = timeout(self.plan.timeout, send(recipe.target(), connection, made)).await;
        let end = sent.unwrap_or(End::Failed(Failure::Timeout));
        if matches!(end, End::Failed(_)) {
            *connection = None;
        }
        Ok(match end {
            End::Answered(status, outcome) if drops => End::Lost(status, outcome),
            end => end,
        })
    }

    /// Sends a part of the request, or all of it, and goes away.
    async fn leave(&self, made: &Made, cut: Cut) -> End {
        let target = self.plan.recipe.target();
        let mut request = raw_request(target, &made.headers, &made.body);
        if cut == Cut::InBody {
            request.truncate(request.len() - made.body.len().div_ceil(2));
        }
        let write = async {
            let mut stream = TcpStream::connect(target.authority()).await?;
            stream.write_all(&request).await
        };
        match timeout(self.plan.timeout, write).await {
            Ok(Ok(())) => End::Gone { whole: cut == Cut::BeforeAnswer },
            Ok(Err(_)) => End::Failed(Failure::Closed),
            Err(_) => End::Failed(Failure::Timeout),
        }
    }

    fn note(&self, delivery: Delivery, end: &End) {
        let now = Instant::now();
        let Plan { mix, recipe, retries, .. } = self.plan.as_ref();
        let (variant, batch) = (mix.variant(delivery.request), recipe.batch());
        let first = self.unit(delivery.request) * batch;
        let marks = [(end.is_sent(), Mark::Sent(variant)), (end.is_safe(), Mark::Safe(variant))];
        for (_, mark) in marks.into_iter().filter(|(holds, _)| *holds) {
            lock(&self.fates).add(first, batch, mark);
        }
        let pause = retries.get(delivery.attempt).copied().filter(|_| !end.is_final());
        let mut tally = lock(&self.tally);
        tally.end(end, now - delivery.due, self.clock.is_measured(delivery.due));
        let goes_on = self.clock.finish(delivery, pause);
        tally.counts.given_up += u64::from(!goes_on && !end.is_final() && !retries.is_empty());
        if !goes_on {
            self.bar.inc(1);
        }
    }
}

/// On the lane's connection if it is still good.
async fn send(target: &Target, connection: &mut Option<Connection>, made: Made) -> End {
    let mut kept = connection.take();
    let is_good = match &mut kept {
        Some(kept) => kept.is_ready().await,
        None => false,
    };
    let mut open = match kept.filter(|_| is_good) {
        Some(kept) => kept,
        None => match Connection::open(target).await {
            Ok(open) => open,
            Err(_) => return End::Failed(Failure::Connect),
        },
    };
    match open.post(&made.headers, made.body).await {
        Ok(answer) => {
            *connection = Some(open);
            End::Answered(answer.status, answer.outcome)
        }
        Err(_) => End::Failed(Failure::Closed),
    }
}
