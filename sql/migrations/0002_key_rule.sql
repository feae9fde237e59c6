-- expand: what fixes the keys of each source's events

create table hapax.key_rule (
    source text primary key,
    fingerprint bytea not null check (octet_length(fingerprint) = 32),
    rule text not null,
    since timestamptz not null default now()
);
comment on table hapax.key_rule is
    'The rule by which the keys of a source''s rows in the ledger were made. Another rule makes other keys, under which '
    'events that took effect already would be new.';
