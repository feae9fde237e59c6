//! What can go wrong on the path of a request, as data: a stable code, the stage and the dependency. What the
//! sender is told, status codes and wording live in `respond`.

/// The stage of the path at which a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Before the body: routing, permits.
    Accept,
    /// Reading the body.
    Body,
    /// Fetching the key that the request points to.
    Keys,
    /// Checking the signature.
    Verify,
    /// A handshake of the provider.
    Challenge,
    /// Finding the event's id.
    Identify,
    /// The fast tier.
    Claim,
    /// The transaction.
    Record,
}

impl Stage {
    /// As it stands in logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Body => "body",
            Self::Keys => "keys",
            Self::Verify => "verify",
            Self::Challenge => "challenge",
            Self::Identify => "identify",
            Self::Claim => "claim",
            Self::Record => "record",
        }
    }
}

/// Who was at fault beside the request, if somebody was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dependency {
    /// None: the request itself, or this process.
    None,
    /// Redis.
    Redis,
    /// Postgres.
    Postgres,
    /// The business effect.
    Effect,
    /// The provider's server, which publishes its keys.
    Provider,
}

impl Dependency {
    /// As it stands in logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Redis => "redis",
            Self::Postgres => "postgres",
            Self::Effect => "effect",
            Self::Provider => "provider",
        }
    }
}

macro_rules! codes {
    ($($name:ident $text:literal $doc:literal,)*) => {
        /// Stable codes of everything that can go wrong: the log's `error.code`, the metric's label, and the
        /// `code` of the answer's problem document where the sender may know it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Code { $(#[doc = $doc] $name,)* }
        impl Code {
            /// The code as it is written in logs, metrics and answers.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
            /// What it means, in a sentence for the operator.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$name => $doc,)* }
            }
        }
    };
}

codes! {
    UnknownSource "unknown_source" "No source of that name.",
    MethodNotAllowed "method_not_allowed" "The source takes POST.",
    ExpectationFailed "expectation_failed" "An `Expect` other than `100-continue`.",
    Overloaded "overloaded" "A limit of this process is reached.",
    BodyTooLarge "body_too_large" "More bytes than the source takes.",
    BodyTooSlow "body_too_slow" "The body did not arrive in time.",
    BodyIncomplete "body_incomplete" "The connection ended within the body.",
    SignatureMissing "signature_missing" "No signature where the scheme has it.",
    SignatureMalformed "signature_malformed" "No signature that can be decoded.",
    SignatureMismatch "signature_mismatch" "No signature matches any secret.",
    HeaderRepeated "header_repeated" "A header, or another part of the request, that decides about trust stands there twice.",
    TimestampMissing "timestamp_missing" "No timestamp where the scheme has it.",
    TimestampMalformed "timestamp_malformed" "A timestamp that cannot be read.",
    TimestampStale "timestamp_stale" "A timestamp older than the tolerance.",
    TimestampFuture "timestamp_future" "A timestamp ahead of the clock by more than the tolerance.",
    SignedPartMissing "signed_part_missing" "Something that the scheme signs is not in the request.",
    SignedOtherwise "signed_otherwise" "It is said to be signed in a way that the scheme does not take.",
    SignatureReused "signature_reused" "What is signed came before under another id, and the source refuses that (guard).",
    BodyHashMismatch "body_hash_mismatch" "The body does not hash to what the request says.",
    UrlHashMismatch "url_hash_mismatch" "The public URL, with path and query as received, does not hash to what the request says.",
    ClaimMismatch "claim_mismatch" "A claim of the token, or of its header, is missing or not what it has to be.",
    BodyNotSigned "body_not_signed" "Nothing of what is signed covers the body.",
    SenderUnknown "sender_unknown" "Signed by order of somebody who is not among the source's `senders`.",
    KeyUrlRefused "key_url_refused" "The request points to a key, or to a page to visit, at a URL that the scheme does not pin.",
    KeyUnfit "key_unfit" "What the request's URL holds is no certificate of the provider's that is good now.",
    KeysUnavailable "keys_unavailable" "The provider's certificate or set of keys, or a page to confirm at, could not be fetched.",
    HandshakeRefused "handshake_refused" "A handshake whose sender does not know the source's secret for it, or a body that a handshake could have had signed.",
    HandshakeUnexpected "handshake_unexpected" "A secret is handed over, and no window is open for one: `hapax handshake open`.",
    HandshakeMalformed "handshake_malformed" "A GET, HEAD or OPTIONS that is no handshake of the provider, or a handshake whose token is missing or has the wrong shape.",
    IdMissing "id_missing" "No rule of the source yields an id.",
    IdAmbiguous "id_ambiguous" "The id stands there more than once.",
    IdTooLong "id_too_long" "The id is longer than the limit.",
    IdInvalid "id_invalid" "The id is not text that can be kept: NUL, broken UTF-8, not a string or whole number.",
    BodyNotJson "body_not_json" "The id is sought in JSON, and the body is none.",
    BatchMissing "batch_missing" "No list where the source's events should stand.",
    BatchTooLarge "batch_too_large" "More events in one request than the source takes.",
    InFlight "in_flight" "The same event is being written right now.",
    EffectFailed "effect_failed" "The business effect raised an error.",
    FastTierRefused "fast_tier_refused" "The fast tier is away, and the settings say not to go on without it.",
    PostgresUnavailable "postgres_unavailable" "Postgres cannot be reached, or is not ready.",
    RecordTimeout "record_timeout" "The transaction did not end in time.",
    CommitUnknown "commit_unknown" "The connection was lost, and whether the commit happened is not known yet.",
    Mismatch "mismatch" "The id is known with another body, and the source refuses that.",
    Internal "internal" "A fault of this program.",
}
