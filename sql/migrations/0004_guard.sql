-- expand: signed bytes that must not come again under another id

-- Where a signature does not cover the id, who captures a request can send it again under a fresh one. One row for what
-- was signed, written in the transaction of the event that brought it first.
create table hapax.guard (
    received_at timestamptz not null default now(),
    guard bytea primary key check (octet_length(guard) = 16),
    owner bytea not null check (octet_length(owner) = 16)
);
comment on column hapax.guard.guard is 'First 16 bytes of SHA-256 over the source and the signed bytes.';
comment on column hapax.guard.owner is 'The key of the event that brought them first; of a batch, a hash of the keys of its items.';
create index guard_received_at on hapax.guard using brin (received_at) with (autosummarize = on);

-- hapax.record, for events of which some have a guard: what is signed and by whom it is owned. Beside its outcomes:
--   g  guarded: what is signed belongs to another event, and refuses says so; nothing is recorded, no effect is called
-- repeated says so of each event; of one that is new and stays, it is to be reported.
--
-- Guards are taken before ledger rows, in one order, so that no two gateways wait for each other. An event that is in
-- the ledger already is never refused: it is a duplicate, and the answer to it is that of the first time.
create function hapax.record_guarded(
    keys bytea[], tokens bigint[], digests bytea[], sources text[], scopes text[], ids text[], types text[],
    times timestamptz[], headers text[], bodies bytea[], items integer[], unidentified boolean[],
    locks text[], careful boolean[],
    effect text, effect_group text, one_by_one boolean,
    ledger_lock_timeout text, commit_mode text, effect_budget interval, effect_follows boolean,
    guards bytea[], owners bytea[], refuses boolean[],
    out generation bytea, out outcomes text, out row_digests bytea[], out row_statuses text[],
    out sqlstates text[], out messages text[], out repeated boolean[]
) language plpgsql volatile as
$$
#variable_conflict use_variable
declare
    total constant integer := cardinality(keys);
    outcome text[] := array_fill(null::text, array[total]);
    taken bytea[] := '{}';
    locked bytea[] := '{}';
    dropped bytea[];
    given integer[];
    letters text[];
    recorded record;
    wanted record;
    ignored text;
    i integer;
    place integer;
begin
    ignored := set_config('lock_timeout', ledger_lock_timeout, true);
    if one_by_one then
        -- A table that is locked as a whole fails the call; after this, a lock that is met is a row's.
        lock table hapax.guard in row exclusive mode;
        for wanted in
            select distinct on (u.guard) u.guard, u.owner
            from unnest(guards, owners) with ordinality as u(guard, owner, at)
            where u.guard is not null order by u.guard, u.at
        loop
            begin
                insert into hapax.guard (guard, owner) values (wanted.guard, wanted.owner) on conflict do nothing;
                if found then
                    taken := taken || wanted.guard;
                end if;
            exception when lock_not_available then
                locked := locked || wanted.guard;
            end;
        end loop;
    else
        with inserted as (
            insert into hapax.guard (guard, owner)
            select distinct on (u.guard) u.guard, u.owner
            from unnest(guards, owners) with ordinality as u(guard, owner, at)
            where u.guard is not null order by u.guard, u.at
            on conflict do nothing
            returning hapax.guard.guard
        )
        select coalesce(array_agg(inserted.guard), '{}') into taken from inserted;
    end if;

    -- Whose they are is decided from rows that were read, in a later statement.
    repeated := array(
        select case when u.guard is null or u.guard = any (locked) then false else g.owner <> u.owner end
        from unnest(guards, owners) with ordinality as u(guard, owner, at) left join hapax.guard g on g.guard = u.guard
        order by u.at);
    if cardinality(array_positions(repeated, null)) > 0 then
        raise exception 'hapax: guards come and go' using errcode = '40001';
    end if;
    for i in 1..total loop
        if guards[i] = any (locked) then
            outcome[i] := 'l';
        elsif repeated[i] and refuses[i] then
            -- By itself, so that the usual event costs no query.
            if not exists (select from hapax.ledger l where l.key = keys[i]) then
                outcome[i] := 'g';
            end if;
        end if;
    end loop;

    given := array_positions(outcome, null);
    if cardinality(given) < total then
        keys := array(select keys[u.i] from unnest(given) as u(i) order by u.i);
        tokens := array(select tokens[u.i] from unnest(given) as u(i) order by u.i);
        digests := array(select digests[u.i] from unnest(given) as u(i) order by u.i);
        sources := array(select sources[u.i] from unnest(given) as u(i) order by u.i);
        scopes := array(select scopes[u.i] from unnest(given) as u(i) order by u.i);
        ids := array(select ids[u.i] from unnest(given) as u(i) order by u.i);
        types := array(select types[u.i] from unnest(given) as u(i) order by u.i);
        times := array(select times[u.i] from unnest(given) as u(i) order by u.i);
        headers := array(select headers[u.i] from unnest(given) as u(i) order by u.i);
        bodies := array(select bodies[u.i] from unnest(given) as u(i) order by u.i);
        items := array(select items[u.i] from unnest(given) as u(i) order by u.i);
        unidentified := array(select unidentified[u.i] from unnest(given) as u(i) order by u.i);
        locks := array(select locks[u.i] from unnest(given) as u(i) order by u.i);
        careful := array(select careful[u.i] from unnest(given) as u(i) order by u.i);
    end if;
    select r.* into recorded
    from hapax.record(keys, tokens, digests, sources, scopes, ids, types, times, headers, bodies, items, unidentified,
        locks, careful, effect, effect_group, one_by_one, ledger_lock_timeout, commit_mode, effect_budget,
        effect_follows) as r;

    row_digests := array_fill(null::bytea, array[total]);
    row_statuses := array_fill(null::text, array[total]);
    sqlstates := row_statuses;
    messages := row_statuses;
    letters := string_to_array(recorded.outcomes, null);
    for place in 1..cardinality(given) loop
        i := given[place];
        outcome[i] := letters[place];
        row_digests[i] := recorded.row_digests[place];
        row_statuses[i] := recorded.row_statuses[place];
        sqlstates[i] := recorded.sqlstates[place];
        messages[i] := recorded.messages[place];
    end loop;

    -- A guard stays if one of its events is in the ledger. One that was refused for the sake of an event that failed
    -- afterwards is tried again.
    dropped := array(
        select t.guard from unnest(taken) as t(guard)
        where not exists (
            select from unnest(guards, outcome) as u(guard, letter)
            where u.guard = t.guard and u.letter in ('a', 'r', 'd', 'o')));
    if cardinality(dropped) > 0 then
        delete from hapax.guard g where g.guard = any (dropped);
    end if;
    for i in 1..total loop
        if outcome[i] = 'g' and guards[i] = any (dropped) then
            outcome[i] := 'n';
        end if;
    end loop;
    outcomes := array_to_string(outcome, '');
    generation := recorded.generation;
end
$$;
