-- expand: the ledger, the bodies, and the one statement that writes them

create table hapax.installation (
    singleton boolean primary key default true check (singleton),
    epoch uuid not null default gen_random_uuid(),
    created_at timestamptz not null default now()
);
comment on table hapax.installation is
    'One row. The epoch is part of the generation: a new one makes every marker in the fast tier worthless.';
insert into hapax.installation default values;

create type hapax.status as enum ('open', 'done', 'rejected', 'failed', 'dead', 'unidentified');

-- One row per key. Fixed-width columns come first, so that a row has no padding.
-- The unique key never contains a time: a time-partitioned unique index silently stops deduping.
create table hapax.ledger (
    received_at timestamptz not null,
    settled_at timestamptz,
    token bigint not null,
    status hapax.status not null,
    attempts integer not null default 1 check (attempts >= 0),
    replay integer not null default 0 check (replay >= 0),
    key bytea primary key check (octet_length(key) = 16),
    digest bytea not null check (octet_length(digest) = 32),
    source text not null,
    scope text not null,
    event_id text not null,
    event_type text,
    constraint settled check ((settled_at is null) = (status in ('open', 'failed')))
);
comment on column hapax.ledger.key is 'First 16 bytes of SHA-256 over the length-prefixed source, scope and event id.';
comment on column hapax.ledger.token is 'Random per delivery: tells an attempt of ours whose answer was lost from somebody else''s.';
create index ledger_received_at on hapax.ledger using brin (received_at) with (autosummarize = on);
create index ledger_unsettled on hapax.ledger (status, source, received_at) where status <> 'done';
alter table hapax.ledger set (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_vacuum_scale_factor = 0.02);

-- Raw bytes as received, by day of the database's clock (UTC). No index on the key: a row is found through the
-- ledger's received_at, which is written in the same statement and grows with the heap, so a BRIN index finds it.
create table hapax.body (
    received_at timestamptz not null,
    key bytea not null,
    body bytea not null,
    headers jsonb not null
) partition by range (received_at);
create index body_received_at on hapax.body using brin (received_at) with (pages_per_range = 16, autosummarize = on);
do $$
begin
    alter table hapax.body alter column body set compression lz4;
exception when feature_not_supported then
    -- A server that was built without lz4 keeps its default.
    null;
end
$$;

-- Takes what finds no partition of its own, so that no event is refused for want of one.
create table hapax.body_default partition of hapax.body default;

-- Makes the partitions of today and the given number of days ahead; returns how many it made.
-- CREATE and ATTACH instead of CREATE ... PARTITION OF: the latter queues every insert behind an open reader.
create function hapax.make_body_partitions(days_ahead integer) returns integer
    language plpgsql security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC' as
$$
declare
    first_day constant date := (now() at time zone 'UTC')::date;
    day date;
    name text;
    part regclass;
    made integer := 0;
begin
    perform set_config('lock_timeout', '100ms', true);
    for ahead in 0..days_ahead loop
        day := first_day + ahead;
        name := 'body_' || to_char(day, 'YYYYMMDD');
        part := to_regclass(format('hapax.%I', name));
        continue when exists (select from pg_inherits where inhrelid = part and inhparent = 'hapax.body'::regclass);
        begin
            if part is null then
                execute format(
                    'create table hapax.%I (like hapax.body including defaults including storage including compression)',
                    name);
            end if;
            execute format('alter table hapax.%I add constraint day check (received_at >= %L and received_at < %L)',
                           name, day::timestamptz, (day + 1)::timestamptz);
            execute format('alter table hapax.body attach partition hapax.%I for values from (%L) to (%L)',
                           name, day::timestamptz, (day + 1)::timestamptz);
            execute format('alter table hapax.%I drop constraint day', name);
            made := made + 1;
        exception
            when duplicate_table or duplicate_object then
                -- Another gateway was first.
                null;
            when check_violation then
                -- Some of that day is in the default partition already; the rest goes there too.
                null;
        end;
    end loop;
    return made;
end
$$;
select hapax.make_body_partitions(7);

create view hapax.events as
    select source, scope, event_id, event_type, status::text as status, digest, received_at, settled_at, attempts, replay
    from hapax.ledger;
comment on view hapax.events is 'The stable read interface.';

-- What an effect is called with.
create type hapax.event as (
    source text,
    scope text,
    event_id text,
    event_type text,
    key bytea,
    item integer,
    digest bytea,
    body bytea,
    headers jsonb,
    received_at timestamptz,
    provider_time timestamptz,
    attempt integer,
    replay integer
);

create function hapax.json(e hapax.event) returns jsonb
    language sql immutable strict parallel safe as
$$ select pg_catalog.convert_from((e).body, 'UTF8')::pg_catalog.jsonb $$;
comment on function hapax.json(hapax.event) is
    'The body as jsonb. Raises 22021 if it is not UTF-8, 22P02 if it is not JSON, 22P05 if it holds \u0000.';

-- Names one history of this database. Changes with a restart, a promotion, a restored copy, another database, a
-- rewritten or truncated ledger, and by hand (the epoch). Fails on a standby.
create function hapax.generation() returns bytea
    language plpgsql stable as
$$
declare
    epoch text;
begin
    -- In plpgsql, since its plans are kept: this runs with every batch.
    select i.epoch::text into strict epoch from hapax.installation i;
    begin
        return hapax.hash_of(epoch, (pg_control_system()).system_identifier::text,
                             substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8));
    exception when insufficient_privilege or undefined_function or feature_not_supported then
        -- Some managed databases do not let these be read.
        return hapax.hash_of(epoch, hapax.readable('(pg_control_system()).system_identifier'),
                             hapax.readable('substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)'));
    end;
end
$$;

create function hapax.hash_of(epoch text, system text, timeline text) returns bytea
    language plpgsql stable as
$$
begin
    return substr(sha256(convert_to(concat_ws('/', epoch, system, timeline,
        extract(epoch from pg_postmaster_start_time()),
        -- The oid of the database and the file node of the ledger.
        pg_relation_filepath('hapax.ledger')), 'UTF8')), 1, 6);
end
$$;

-- The value of an expression, or null where this role or this server may not read it.
create function hapax.readable(expression text) returns text
    language plpgsql stable as
$$
declare
    found_value text;
begin
    execute 'select (' || expression || ')::text' into found_value;
    return found_value;
exception when insufficient_privilege or undefined_function or feature_not_supported then
    return null;
end
$$;

-- Records a batch: ledger rows, effects, bodies, in the caller's transaction. Keys are sorted and unique.
--
-- outcomes has one letter per event:
--   a  accepted: new, effect done            d  duplicate: the row was read; digests and statuses are its own
--   o  ours: an earlier attempt committed    l  locked: somebody else is writing the row right now
--   r  rejected for good by the effect       f  failed: the effect raised; sqlstates and messages say what
--                                            n  not tried: the time budget was used up
-- Of l, f and n nothing stays behind.
--
-- Effects run in the order of locks, where there are any. Unidentified events are kept and not given to the effect.
-- items is each one's place in a batch request, or null.
--
-- one_by_one makes each ledger insert and each effect a subtransaction of its own; without it, any error fails
-- the whole call. careful does so for the effects of the marked events only.
--
-- effect_follows: the caller itself runs the effect of a new event, after this and in the same transaction, and then
-- calls hapax.close. Constraints are left as they are until then.
create function hapax.record(
    keys bytea[], tokens bigint[], digests bytea[], sources text[], scopes text[], ids text[], types text[],
    times timestamptz[], headers text[], bodies bytea[], items integer[], unidentified boolean[],
    locks text[], careful boolean[],
    effect text, effect_group text, one_by_one boolean,
    ledger_lock_timeout text, commit_mode text, effect_budget interval, effect_follows boolean,
    out generation bytea, out outcomes text, out row_digests bytea[], out row_statuses text[],
    out sqlstates text[], out messages text[]
) language plpgsql volatile as
$$
#variable_conflict use_variable
declare
    total constant integer := cardinality(keys);
    outcome text[] := array_fill(null::text, array[total]);
    taken bytea[];
    pending integer[];
    fresh integer[];
    kept integer[];
    together integer[];
    dropped bytea[];
    events hapax.event[];
    chosen hapax.event[];
    called bigint;
    started timestamptz;
    spent boolean := false;
    raised text;
    message text;
    ignored text;
    promised boolean;
    ordered boolean := false;
    i integer;
    row_at record;
begin
    row_digests := array_fill(null::bytea, array[total]);
    row_statuses := outcome;
    sqlstates := outcome;
    messages := outcome;
    -- Assignments of single expressions are evaluated without the executor; the usual batch needs few statements.
    ignored := set_config('lock_timeout', ledger_lock_timeout, true);
    ignored := set_config('synchronous_commit', commit_mode, true);

    -- Insert; what is not inserted is decided from a row that was read in a later statement; a row that is gone
    -- by then (purged meanwhile) is inserted again.
    for round in 1..10 loop
        if one_by_one then
            taken := '{}';
            -- A table that is locked as a whole fails the call; after this, a lock that is met is a row's.
            lock table hapax.ledger in row exclusive mode;
            for i in 1..total loop
                continue when outcome[i] is not null;
                begin
                    insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope,
                        event_id, event_type)
                    values (now(), now(), tokens[i],
                        case when unidentified[i] then 'unidentified' else 'done' end::hapax.status,
                        keys[i], digests[i], sources[i], scopes[i], ids[i], types[i])
                    on conflict do nothing;
                    if found then
                        taken := taken || keys[i];
                    end if;
                exception when lock_not_available then
                    outcome[i] := 'l';
                end;
            end loop;
        else
            with inserted as (
                insert into hapax.ledger (received_at, settled_at, token, status, key, digest, source, scope, event_id, event_type)
                select now(), now(), u.token, case when u.unidentified then 'unidentified' else 'done' end::hapax.status,
                       u.key, u.digest, u.source, u.scope, u.id, u.type
                from unnest(keys, tokens, digests, sources, scopes, ids, types, unidentified) with ordinality
                    as u(key, token, digest, source, scope, id, type, unidentified, at)
                where round = 1 or u.at = any (pending)
                on conflict do nothing
                returning key
            )
            select coalesce(array_agg(inserted.key), '{}') into taken from inserted;
        end if;
        if cardinality(taken) = total then
            outcome := array_fill('a'::text, array[total]);
            exit;
        end if;
        for row_at in
            select u.at::integer as i, u.key = any (taken) as is_new, l.digest, l.status::text as status, l.token
            from unnest(keys) with ordinality as u(key, at) join hapax.ledger l using (key)
            where outcome[u.at::integer] is null
        loop
            i := row_at.i;
            if row_at.is_new then
                outcome[i] := 'a';
            else
                outcome[i] := case when row_at.token = tokens[i] then 'o' else 'd' end;
                row_digests[i] := row_at.digest;
                row_statuses[i] := row_at.status;
            end if;
        end loop;
        pending := array_positions(outcome, null);
        exit when cardinality(pending) = 0;
    end loop;
    if cardinality(pending) > 0 then
        raise exception 'hapax: ledger rows come and go' using errcode = '40001';
    end if;
    fresh := array_positions(outcome, 'a');
    kept := fresh;
    if cardinality(array_positions(locks, null)) < total then
        -- Batches of all gateways lock their business rows in one order, so they do not deadlock.
        ordered := true;
        fresh := array(select u.i from unnest(fresh) as u(i) order by locks[u.i] collate "C", u.i);
    end if;
    if true = any (unidentified) then
        -- Kept to be looked at; an effect could not tell them from what it has seen.
        fresh := array(select u.i from unnest(fresh) with ordinality as u(i, at) where not unidentified[u.i] order by u.at);
    end if;

    if (effect is not null or effect_follows) and cardinality(fresh) > 0 then
        -- From here statement_timeout bounds the waits, not the short time-out for ledger rows.
        ignored := set_config('lock_timeout', '0', true);
        if effect_group is not null then
            begin
                perform pg_advisory_xact_lock(hashtextextended('hapax effect group ' || effect_group, 0));
            exception when query_canceled then
                -- No event of this batch is at fault: another gateway's effects are slow.
                raise exception 'hapax: effect group % is busy', effect_group using errcode = '40001';
            end;
        end if;
    end if;
    if effect is not null and cardinality(fresh) > 0 then
        events := array(
            select row(u.source, u.scope, u.id, u.type, u.key, u.item, u.digest, u.body, u.headers::jsonb, now(), u.time,
                1, 0)::hapax.event
            from unnest(sources, scopes, ids, types, keys, items, digests, bodies, headers, times)
                as u(source, scope, id, type, key, item, digest, body, headers, time)
        );
        if one_by_one then
            together := '{}';
        elsif cardinality(fresh) = total and not (true = any (careful)) then
            together := fresh;
        else
            together := array(select u.i from unnest(fresh) with ordinality as u(i, at) where not careful[u.i] order by u.at);
        end if;
        if cardinality(together) > 0 then
            -- Short statements, since they are planned anew for each batch; the shorter one for an idle gateway.
            if cardinality(together) = 1 then
                execute format('select %s($1)', effect) using events[together[1]];
            else
                chosen := events;
                if cardinality(together) < total or ordered then
                    chosen := array(select events[u.i] from unnest(together) with ordinality as u(i, at) order by u.at);
                end if;
                execute format('select %s(e) from unnest($1) as e', effect) using chosen;
            end if;
            get diagnostics called = row_count;
            if called <> cardinality(together) then
                raise exception 'hapax: effect % ran % times for % events', effect, called, cardinality(together);
            end if;
        end if;
        started := clock_timestamp();
        foreach i in array fresh loop
            exit when cardinality(together) = total;
            continue when i = any (together);
            if spent or clock_timestamp() - started > effect_budget then
                outcome[i] := 'n';
                continue;
            end if;
            begin
                execute format('select %s($1)', effect) using events[i];
                get diagnostics called = row_count;
                if called <> 1 then
                    raise exception 'hapax: effect % ran % times for one event', effect, called;
                end if;
                -- The next event's effect is not to run as whoever this one has become.
                reset session authorization;
                -- Deferred constraints name their event here. Done inside a subtransaction that is undone, so that
                -- they are deferred again for the next event.
                begin
                    set constraints all immediate;
                    raise exception using errcode = 'HX999';
                exception when sqlstate 'HX999' then
                    null;
                end;
            exception
                when others or query_canceled or assert_failure then
                    get stacked diagnostics raised = returned_sqlstate, message = message_text;
                    message := left(message, 1000);
                    outcome[i] := case raised when 'HX001' then 'r' else 'f' end;
                    sqlstates[i] := raised;
                    messages[i] := message;
                    -- statement_timeout fires once per statement: nothing bounds what would come after it.
                    spent := spent or raised = '57014';
            end;
        end loop;
        -- Not what an effect made itself: what follows is ours.
        reset session authorization;
        if 'r' = any (outcome) then
            update hapax.ledger l set status = 'rejected'
            where l.key = any (array(select keys[u.i] from unnest(fresh) as u(i) where outcome[u.i] = 'r'));
        end if;
        if 'f' = any (outcome) or 'n' = any (outcome) then
            dropped := array(select keys[u.i] from unnest(fresh) as u(i) where outcome[u.i] in ('f', 'n'));
            delete from hapax.ledger l where l.key = any (dropped);
            kept := array(select u.i from unnest(kept) as u(i) where outcome[u.i] in ('a', 'r'));
        end if;
    end if;

    if cardinality(kept) > 0 then
        insert into hapax.body (received_at, key, body, headers)
        select now(), u.key, u.body, u.headers::jsonb
        from unnest(keys, bodies, headers) with ordinality as u(key, body, headers, at)
        where cardinality(kept) = total or u.at = any (kept);
    elsif outcome && '{d,o}' and current_setting('synchronous_standby_names') <> '' then
        -- A row can be visible before it is replicated. Only a commit that wrote to the log waits for the standby:
        -- a transaction id alone is not enough.
        perform pg_logical_emit_message(true, 'hapax', '');
    end if;

    -- Last words, after everything that an effect may have changed. Where nothing is promised to anybody, nobody waits
    -- for the log.
    if not effect_follows then
        set constraints all immediate;
    end if;
    promised := outcome && '{a,r,d,o}';
    ignored := set_config('synchronous_commit', case when promised then commit_mode else 'off' end, true);
    outcomes := array_to_string(outcome, '');
    generation := hapax.generation();
end
$$;

-- The last words of a transaction in which the caller ran an effect after hapax.record: fails unless it is still that
-- transaction. rejected is the key of an event that the effect refused for good, or null.
create function hapax.close(recorded_in text, commit_mode text, rejected bytea) returns bytea
    language plpgsql volatile as
$$
declare
    ignored text;
begin
    if pg_current_xact_id_if_assigned()::text is distinct from recorded_in then
        raise exception 'hapax: the transaction that recorded the event ended before its effect did';
    end if;
    if rejected is not null then
        update hapax.ledger set status = 'rejected' where key = rejected;
    end if;
    -- What an effect may have changed, as in hapax.record.
    set constraints all immediate;
    ignored := set_config('synchronous_commit', commit_mode, true);
    return hapax.generation();
end
$$;
