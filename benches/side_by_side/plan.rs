//! What is measured: servers, workloads, and which meets which.

use serde::{Deserialize, Serialize};

/// What answers the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Server {
    /// Reads the body, answers 200.
    Hyper,
    /// Verifies as well.
    HyperHmac,
    /// Finds the event's id as well: all that a gateway does before it asks a store. The ceiling.
    HyperHmacId,
    /// A transaction per request, the way it is usually written: each statement waits for the last one's answer.
    NaivePlain,
    /// That, after a `SET NX EX` on a connection of a pool.
    NaivePlainRedis,
    /// A transaction per request in two round trips: the best that it can be.
    Naive,
    /// That, after a `SET NX EX` on a connection that all requests share.
    NaiveRedis,
    /// The gateway, with its default fast tier.
    HapaxRedis,
    /// The gateway, with its own memory as fast tier.
    HapaxMemory,
    /// The gateway without a fast tier.
    HapaxOff,
    /// The gateway with Redis, and a log line for every request.
    HapaxLogAll,
    /// No server: one client of Postgres that writes the same rows in batches.
    PgBatch,
}

impl Server {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Hyper => "hyper",
            Self::HyperHmac => "hyper-hmac",
            Self::HyperHmacId => "hyper-hmac-id",
            Self::NaivePlain => "naive-plain",
            Self::NaivePlainRedis => "naive-plain-redis",
            Self::Naive => "naive",
            Self::NaiveRedis => "naive-redis",
            Self::HapaxRedis => "hapax-redis",
            Self::HapaxMemory => "hapax-memory",
            Self::HapaxOff => "hapax-off",
            Self::HapaxLogAll => "hapax-log-all",
            Self::PgBatch => "pg-batch",
        }
    }

    /// Whether it stores events, so that its effects can be counted.
    pub(crate) const fn stores(self) -> bool {
        !matches!(self, Self::Hyper | Self::HyperHmac | Self::HyperHmacId)
    }

    /// More requests than it can answer in a second; so many are signed before each run.
    pub(crate) const fn rate_max(self) -> usize {
        if self.stores() { 60_000 } else { 160_000 }
    }
}

/// How ids and bodies follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mix {
    /// Every request is a new event.
    New,
    /// Every event is sent ten times, other events in between.
    TenTimes,
    /// The same, and one request in a hundred has another body than its event had before.
    Mismatch,
    /// All requests are one event.
    Hot,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    pub(crate) mix: Mix,
    pub(crate) connections: usize,
    pub(crate) body_bytes: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) workload: Workload,
    pub(crate) servers: Vec<Server>,
}

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// That everything works.
    Quick,
    /// What the ratios need.
    Core,
    /// Larger bodies as well.
    All,
}

pub(crate) const NEW: &str = "new";
pub(crate) const NEW_256: &str = "new-256-connections";
pub(crate) const TEN_TIMES: &str = "ten-times";
pub(crate) const HOT: &str = "hot";
pub(crate) const IDLE: &str = "idle";

const KIB: usize = 1 << 10;

fn case(name: &'static str, mix: Mix, connections: usize, kib: usize, servers: &'static [Server]) -> Case {
    Case { workload: Workload { name, mix, connections, body_bytes: kib * KIB }, servers: servers.to_vec() }
}

/// What of an extent is wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Workloads whose name contains this.
    pub(crate) only: Option<&'a str>,
    /// These servers; all if there are none.
    pub(crate) servers: &'a [String],
}

/// The cases of an extent that are wanted.
pub(crate) fn cases(extent: Extent, wanted: Wanted<'_>) -> Vec<Case> {
    let mut cases = match extent {
        Extent::Quick => quick(),
        Extent::Core => core(),
        Extent::All => core().into_iter().chain(large_bodies()).collect(),
    };
    for case in &mut cases {
        let of = wanted.servers;
        case.servers.retain(|server| of.is_empty() || of.iter().any(|name| name == server.name()));
    }
    let named = |case: &Case| wanted.only.is_none_or(|text| case.workload.name.contains(text));
    cases.retain(|case| named(case) && !case.servers.is_empty());
    cases
}

fn core() -> Vec<Case> {
    use Server::{
        HapaxLogAll, HapaxMemory, HapaxOff, HapaxRedis, Hyper, HyperHmac, HyperHmacId, Naive, NaivePlain,
        NaivePlainRedis, NaiveRedis, PgBatch,
    };
    const ALL_NEW: &[Server] = &[
        HyperHmacId,
        NaivePlain,
        NaivePlainRedis,
        Naive,
        NaiveRedis,
        HapaxRedis,
        HapaxMemory,
        HapaxOff,
        HapaxLogAll,
        PgBatch,
    ];
    const MANY: &[Server] = &[NaivePlain, Naive, NaiveRedis, HapaxRedis, HapaxMemory];
    const REPEATED: &[Server] =
        &[HyperHmacId, NaivePlain, NaivePlainRedis, Naive, NaiveRedis, HapaxRedis, HapaxMemory, HapaxOff];
    const HOTTEST: &[Server] =
        &[Hyper, HyperHmac, HyperHmacId, Naive, NaiveRedis, HapaxRedis, HapaxMemory, HapaxOff];
    vec![
        case(NEW, Mix::New, 64, 1, ALL_NEW),
        case(NEW_256, Mix::New, 256, 1, MANY),
        case(TEN_TIMES, Mix::TenTimes, 64, 1, REPEATED),
        case(HOT, Mix::Hot, 64, 1, HOTTEST),
        case("mismatch", Mix::Mismatch, 64, 1, &[Naive, HapaxRedis]),
        case(IDLE, Mix::New, 1, 1, &[Naive, NaiveRedis, HapaxRedis]),
    ]
}

fn large_bodies() -> Vec<Case> {
    use Server::{HapaxRedis, HyperHmacId, Naive, NaiveRedis};
    const SERVERS: &[Server] = &[HyperHmacId, Naive, NaiveRedis, HapaxRedis];
    vec![case("new-16-kib", Mix::New, 64, 16, SERVERS), case("new-256-kib", Mix::New, 64, 256, SERVERS)]
}

fn quick() -> Vec<Case> {
    use Server::{
        HapaxLogAll, HapaxMemory, HapaxOff, HapaxRedis, Hyper, HyperHmac, HyperHmacId, Naive, NaivePlain,
        NaivePlainRedis, NaiveRedis, PgBatch,
    };
    vec![
        case(NEW, Mix::New, 64, 1, &[NaivePlain, Naive, HapaxRedis, HapaxLogAll, PgBatch]),
        case("mismatch", Mix::Mismatch, 64, 1, &[NaiveRedis, NaivePlainRedis, HapaxMemory]),
        case(HOT, Mix::Hot, 8, 1, &[Hyper, HyperHmac, HyperHmacId, HapaxOff]),
        case("new-256-kib", Mix::New, 8, 256, &[HapaxRedis]),
    ]
}
