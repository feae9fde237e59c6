-- expand: what deletes what is older than its horizon

-- One row: who cleans, and how far it has come.
create table hapax.retention (
    singleton boolean primary key default true check (singleton),
    worker uuid,
    held_until timestamptz not null default '-infinity',
    walk_block bigint not null default 0 check (walk_block >= 0),
    walk_begun_at timestamptz not null default '-infinity',
    stopped text
);
comment on column hapax.retention.held_until is 'Nobody but the worker cleans before.';
comment on column hapax.retention.walk_block is
    'Where the walk over the ledger''s heap goes on; 0: the last one came to its end.';
comment on column hapax.retention.stopped is
    'Why no gateway deletes by itself, until `hapax retain --once` has.';
insert into hapax.retention default values;

-- Whether the worker may clean: for the length of the transaction nobody else does, and after it for the time of hold.
-- Both are needed, since no lock outlives a transaction behind a pooler.
create function hapax.retain_hold(of_worker uuid, hold interval, out held boolean, out at double precision)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as
$$
begin
    at := extract(epoch from clock_timestamp());
    held := pg_try_advisory_xact_lock(hashtextextended('hapax retention', 0));
    if held then
        update hapax.retention r set worker = of_worker, held_until = clock_timestamp() + hold
        where r.worker = of_worker or r.held_until < clock_timestamp()
            -- Or else a clock that is set back leaves the place to nobody.
            or r.held_until > clock_timestamp() + interval '1 hour';
        held := found;
    end if;
end
$$;

-- Leaves the place to the next.
create function hapax.retain_release(of_worker uuid) returns void
    language sql volatile security definer set search_path = pg_catalog, pg_temp as
$$ update hapax.retention r set held_until = '-infinity' where r.worker = of_worker $$;

-- Stops all gateways, or, with null, lets them go on.
create function hapax.retain_stop(why text) returns void
    language sql volatile security definer set search_path = pg_catalog, pg_temp as
$$ update hapax.retention r set stopped = why where r.stopped is distinct from why $$;

-- What has to be known before anything is deleted. newest is that of the bodies, which an index knows; a ledger row is
-- written together with its body.
create function hapax.retain_state(walk_every interval, out at double precision, out newest double precision,
    out stopped text, out walk_due boolean, out walk_block bigint)
    language sql stable security definer set search_path = pg_catalog, pg_temp as
$$
    select extract(epoch from clock_timestamp()),
           (select extract(epoch from max(b.received_at)) from hapax.body b),
           r.stopped,
           r.walk_block > 0 or r.walk_begun_at <= now() - walk_every or r.walk_begun_at > now(),
           r.walk_block
    from hapax.retention r
$$;

-- Whether a ledger row goes. The horizon counts from the receipt, since that is what a provider's retries count from; that
-- of a dead one from its death.
create function hapax.retain_past(status hapax.status, received_at timestamptz, settled_at timestamptz,
    horizon timestamptz, dead_horizon timestamptz) returns boolean
    language sql immutable parallel safe as
$$
    select status not in ('open', 'failed')
        and case status
            when 'dead' then greatest(received_at, settled_at) < dead_horizon
            else received_at < horizon
        end
$$;

-- Deletes events, with their jobs, kept bodies and mismatches, in so many blocks of the ledger's heap, at most so many.
-- Never waits for a row: what somebody is working on is left to the next pass. So the rows' order is of no matter here.
--
-- By place in the heap, since nothing else finds them cheaply for long: deleted rows' places are filled by new ones, so a BRIN
-- index on the time soon tells nothing, and a btree on it would be paid for by each event.
create function hapax.retain_events(from_block bigint, blocks integer, most integer, ledger interval, dead interval,
    dry boolean, out next_block bigint, out blocks_in_all bigint, out events bigint, out jobs bigint, out bodies_kept bigint,
    out mismatches bigint)
    -- Each a few pages or a few rows by an index, whatever the statistics say.
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off as
$$
#variable_conflict use_variable
declare
    first constant tid := format('(%s,0)', from_block);
    past constant tid := format('(%s,0)', from_block + blocks);
    horizon constant timestamptz := now() - ledger;
    dead_horizon constant timestamptz := now() - dead;
    places tid[];
    keys bytea[];
begin
    blocks_in_all := pg_relation_size('hapax.ledger') / current_setting('block_size')::bigint;
    next_block := from_block + blocks;
    if dry then
        select count(*), array_agg(l.key) into events, keys from hapax.ledger l
        where l.ctid >= first and l.ctid < past
            and hapax.retain_past(l.status, l.received_at, l.settled_at, horizon, dead_horizon);
        select count(*) into jobs from hapax.job j where j.key = any (keys);
        select count(*) into bodies_kept from hapax.body_kept k where k.key = any (keys);
        select count(*) into mismatches from hapax.mismatch m where m.key = any (keys);
        return;
    end if;
    select array_agg(f.ctid) into places
    from (
        select l.ctid from hapax.ledger l
        where l.ctid >= first and l.ctid < past
            and hapax.retain_past(l.status, l.received_at, l.settled_at, horizon, dead_horizon)
        limit most for update skip locked
    ) f;
    with gone as (
        delete from hapax.ledger l
        where l.ctid = any (places)
            and hapax.retain_past(l.status, l.received_at, l.settled_at, horizon, dead_horizon)
        returning l.key
    )
    select count(*), array_agg(g.key) into events, keys from gone g;
    delete from hapax.job j where j.key = any (keys);
    get diagnostics jobs = row_count;
    delete from hapax.body_kept k where k.key = any (keys);
    get diagnostics bodies_kept = row_count;
    delete from hapax.mismatch m where m.key = any (keys);
    get diagnostics mismatches = row_count;
    if cardinality(places) >= most then
        -- There may be more in the last one's block.
        next_block := (places[cardinality(places)]::text::point)[0]::bigint;
    end if;
    update hapax.retention r
    set walk_block = case when next_block >= blocks_in_all then 0 else next_block end,
        walk_begun_at = case when from_block = 0 then now() else r.walk_begun_at end;
end
$$;

-- The same for rows that belong to no event: guards (of signed bytes), and mismatches whose event is gone.
create function hapax.retain_rows(kind text, from_block bigint, blocks integer, most integer, age interval, dry boolean,
    out next_block bigint, out blocks_in_all bigint, out gone bigint)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off as
$$
#variable_conflict use_variable
declare
    first constant tid := format('(%s,0)', from_block);
    past constant tid := format('(%s,0)', from_block + blocks);
    of_table constant regclass := case kind when 'guards' then 'hapax.guard' when 'mismatches' then 'hapax.mismatch' end;
    condition constant text := case kind
        when 'guards' then 't.received_at < $3'
        when 'mismatches' then 't.seen_at < $3 and not exists (select from hapax.ledger l where l.key = t.key)'
    end;
    found_rows constant text := format('from %s t where t.ctid >= $1 and t.ctid < $2 and %s', of_table, condition);
    horizon constant timestamptz := now() - age;
    places tid[];
begin
    blocks_in_all := pg_relation_size(of_table) / current_setting('block_size')::bigint;
    next_block := from_block + blocks;
    if dry then
        execute 'select count(*) ' || found_rows into gone using first, past, horizon;
        return;
    end if;
    execute format('select array_agg(f.ctid) from (select t.ctid %s limit $4 for update skip locked) f', found_rows)
    into places using first, past, horizon, most;
    execute format('delete from %s t where t.ctid = any ($1) and %s', of_table, replace(condition, '$3', '$2'))
    using places, horizon;
    get diagnostics gone = row_count;
    if cardinality(places) >= most then
        next_block := (places[cardinality(places)]::text::point)[0]::bigint;
    end if;
end
$$;

-- The same for bodies that were kept of events that are done by now, or gone. The event's row is locked first, so that nobody
-- sets it to work again meanwhile.
create function hapax.retain_kept(from_block bigint, blocks integer, most integer, age interval, dry boolean,
    out next_block bigint, out blocks_in_all bigint, out gone bigint)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off as
$$
#variable_conflict use_variable
declare
    first constant tid := format('(%s,0)', from_block);
    past constant tid := format('(%s,0)', from_block + blocks);
    horizon constant timestamptz := now() - age;
    keys bytea[];
    done bytea[];
    last_block bigint;
begin
    blocks_in_all := pg_relation_size('hapax.body_kept') / current_setting('block_size')::bigint;
    next_block := from_block + blocks;
    select array_agg(f.key), max((f.ctid::text::point)[0]::bigint) into keys, last_block
    from (
        select k.ctid, k.key from hapax.body_kept k
        where k.ctid >= first and k.ctid < past and k.received_at < horizon
            and not exists (select from hapax.ledger l where l.key = k.key and l.status <> 'done')
        limit case when dry then null else most end
    ) f;
    gone := coalesce(cardinality(keys), 0);
    if dry or keys is null then
        return;
    end if;
    if gone >= most then
        next_block := last_block;
    end if;
    done := array(
        select l.key from hapax.ledger l
        where l.key = any (keys) and l.status = 'done' order by l.key for update skip locked);
    delete from hapax.body_kept k
    where k.key = any (keys) and k.received_at < horizon
        and (k.key in (select unnest(done)) or not exists (select from hapax.ledger l where l.key = k.key));
    get diagnostics gone = row_count;
    if gone = 0 and next_block = from_block then
        -- All of them are being worked on.
        next_block := from_block + 1;
    end if;
end
$$;

-- Deletes jobs that ended long ago, of events that are settled; those of open events stay, to be shown. The place is a time,
-- so that those are not gone over again with each batch.
create function hapax.retain_jobs(of_state text, since timestamptz, most integer, age interval, dry boolean,
    out next_since timestamptz, out more boolean, out gone bigint)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as
$$
#variable_conflict use_variable
declare
    state constant hapax.job_state := of_state;
    horizon constant timestamptz := now() - age;
    places tid[];
begin
    more := false;
    if dry then
        select count(*) into gone from hapax.job j
        where j.state = state and j.settled_at < horizon
            and not exists (select from hapax.ledger l where l.key = j.key and l.status in ('open', 'failed'));
        return;
    end if;
    select array_agg(f.ctid), max(f.settled_at) into places, next_since
    from (
        select j.ctid, j.settled_at from hapax.job j
        where j.state = state and j.settled_at >= since and j.settled_at < horizon
        -- Never waits, as everybody else does who has locked the event's row first.
        order by j.settled_at limit most for update skip locked
    ) f;
    delete from hapax.job j
    where j.ctid = any (places) and j.state = state and j.settled_at < horizon
        and not exists (select from hapax.ledger l where l.key = j.key and l.status in ('open', 'failed'));
    get diagnostics gone = row_count;
    more := coalesce(cardinality(places), 0) >= most;
    if more and gone = 0 and next_since = since then
        next_since := since + interval '1 microsecond';
    end if;
end
$$;

-- Shares of workers that are gone.
create function hapax.retain_shares(age interval, dry boolean, out gone bigint)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as
$$
begin
    if dry then
        select count(*) into gone from hapax.share s where s.until < now() - age;
    else
        delete from hapax.share s where s.until < now() - age;
        get diagnostics gone = row_count;
    end if;
end
$$;

-- The days whose bodies are all older than the age, the oldest first.
create function hapax.retain_days(age interval)
    returns table (name text, since timestamptz, past timestamptz, bytes bigint)
    language sql stable security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC' set datestyle = 'ISO' as
$$
    select c.relname::text, b.bounds[1]::timestamptz, b.bounds[2]::timestamptz, pg_total_relation_size(c.oid)
    from pg_inherits i
        join pg_class c on c.oid = i.inhrelid,
        lateral (
            select regexp_match(pg_get_expr(c.relpartbound, c.oid),
                                '^FOR VALUES FROM \(''([^'']+)''\) TO \(''([^'']+)''\)$') as bounds
        ) b
    where i.inhparent = 'hapax.body'::regclass and c.relname ~ '^body_[0-9]{8}$'
        and b.bounds[2]::timestamptz <= now() - age
    order by 2
$$;

-- Moves bodies of a day aside whose events are not done, at most so many and (but for the first) so many bytes. From the
-- events' side, since few of them are.
create function hapax.retain_bodies(day text, since timestamptz, past timestamptz, most integer, bytes bigint,
    dry boolean, out next_since timestamptz, out more boolean, out moved bigint)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off as
$$
#variable_conflict use_variable
declare
    wanted constant text := format($q$
        select l.key, l.received_at from hapax.ledger l
        where l.status in ('open', 'rejected', 'failed', 'dead', 'unidentified') and l.received_at >= $1 and l.received_at < $2
            and not exists (select from hapax.body_kept k where k.key = l.key)$q$);
    looked bigint;
    here bigint;
begin
    if dry then
        execute format('select count(*) from (%s) w join hapax.%I b on b.received_at = w.received_at and b.key = w.key',
                       wanted, day)
        into moved using since, past;
        more := false;
        return;
    end if;
    execute format($q$
        with wanted as materialized (%s order by l.received_at limit $3),
        here as materialized (
            select b.*, sum(pg_column_size(b.body)) over (order by b.received_at, b.key) - pg_column_size(b.body) as before
            from wanted w join hapax.%I b on b.received_at = w.received_at and b.key = w.key
        ),
        moved as (
            insert into hapax.body_kept (received_at, key, body, headers, item, provider_time)
            select h.received_at, h.key, h.body, h.headers, h.item, h.provider_time from here h where h.before < $4
            on conflict do nothing
            returning 1
        )
        select (select count(*) from wanted), (select max(received_at) from wanted), (select count(*) from here),
               (select count(*) from moved)$q$, wanted, day)
    into looked, next_since, here, moved using since, past, most, bytes;
    more := looked >= most or moved < here;
    if moved < here then
        next_since := since;
    elsif more and moved = 0 and next_since = since then
        -- Their bodies are nowhere. Should others be of the same moment, the day does not go.
        next_since := since + interval '1 microsecond';
    end if;
end
$$;

-- Who has a lock on what dropping a day needs for itself, by transaction.
create function hapax.retain_holders(day text) returns text[]
    language sql volatile security definer set search_path = pg_catalog, pg_temp as
$$
    select coalesce(array_agg(distinct l.virtualtransaction), '{}') from pg_locks l
    where l.locktype = 'relation' and l.granted and l.pid is distinct from pg_backend_pid()
        and l.database = (select d.oid from pg_database d where d.datname = current_database())
        and l.relation in ('hapax.body'::regclass, 'hapax.body_default'::regclass, to_regclass(format('hapax.%I', day)))
$$;

-- Drops a day, unless a body is left in it whose event is not done and which is not kept. Inserts wait meanwhile; so the caller
-- looks before that nobody holds the locks for long, moves bodies before, and sets short time-outs.
create function hapax.retain_drop(day text, age interval) returns boolean
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off as
$$
#variable_conflict use_variable
declare
    bounds record;
    is_left boolean;
begin
    -- The parent first, like everybody who reads or inserts.
    lock table only hapax.body in access exclusive mode;
    select d.since, d.past into bounds from hapax.retain_days(age) d where d.name = day;
    if not found then
        return false;
    end if;
    execute format('lock table hapax.%I in access exclusive mode', day);
    execute format($q$
        select exists (
            select from hapax.ledger l join hapax.%I b on b.received_at = l.received_at and b.key = l.key
            where l.status in ('open', 'rejected', 'failed', 'dead', 'unidentified')
                and l.received_at >= $1 and l.received_at < $2
                and not exists (select from hapax.body_kept k where k.key = l.key))$q$, day)
    into is_left using bounds.since, bounds.past;
    if is_left then
        return false;
    end if;
    execute format('drop table hapax.%I', day);
    return true;
end
$$;

-- Deletes old bodies that found no day of their own, those of events that are not done after they are moved aside.
create function hapax.retain_default(most integer, bytes bigint, age interval, dry boolean,
    out gone bigint, out moved bigint, out more boolean)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
    set enable_seqscan = off set enable_bitmapscan = off as
$$
#variable_conflict use_variable
declare
    horizon constant timestamptz := now() - age;
    places tid[];
    keys bytea[];
    done bytea[];
begin
    more := false;
    if dry then
        select count(*), count(*) filter (where l.status <> 'done' and k.key is null) into gone, moved
        from hapax.body_default b
            left join hapax.ledger l on l.key = b.key and l.received_at = b.received_at
            left join hapax.body_kept k on k.key = b.key
        where b.received_at < horizon;
        return;
    end if;
    select array_agg(f.ctid) filter (where f.before < bytes), array_agg(f.key) filter (where f.before < bytes),
           coalesce(bool_or(f.before >= bytes), false) or count(*) >= most
    into places, keys, more
    from (
        select o.ctid, o.key, sum(o.size) over (order by o.ctid) - o.size as before
        from (
            select b.ctid, b.key, pg_column_size(b.body)::bigint as size from hapax.body_default b
            where b.received_at < horizon order by b.received_at limit most for update skip locked
        ) o
    ) f;
    done := array(
        select l.key from hapax.ledger l
        where l.key = any (keys) and l.status = 'done' order by l.key for update skip locked);
    insert into hapax.body_kept (received_at, key, body, headers, item, provider_time)
    select b.received_at, b.key, b.body, b.headers, b.item, b.provider_time
    from hapax.body_default b join hapax.ledger l on l.key = b.key and l.received_at = b.received_at
    where b.ctid = any (places) and l.status <> 'done'
    on conflict do nothing;
    get diagnostics moved = row_count;
    delete from hapax.body_default b
    where b.ctid = any (places) and b.received_at < horizon
        and (b.key in (select unnest(done))
            or exists (select from hapax.body_kept k where k.key = b.key)
            or not exists (select from hapax.ledger l where l.key = b.key and l.received_at = b.received_at));
    get diagnostics gone = row_count;
    -- Or else those that somebody is working on would be tried for ever.
    more := more and gone > 0;
end
$$;

-- About how many rows there are, how many of them are past their horizon, and the newest one, from a sample of pages.
create function hapax.retain_sample(ledger interval, dead interval, body interval, jobs interval)
    returns table (kind text, rows_in_all double precision, rows_past double precision, newest double precision)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC' as
$$
declare
    pages_most constant double precision := 500;
    sampled record;
    pages bigint;
    percent double precision;
begin
    for sampled in
        select * from (values
            ('events', 'hapax.ledger', 'received_at', format(
                'hapax.retain_past(t.status, t.received_at, t.settled_at, %L, %L)', now() - ledger, now() - dead)),
            ('guards', 'hapax.guard', 'received_at', format('t.received_at < %L', now() - ledger)),
            ('jobs', 'hapax.job', 'received_at', format(
                't.state in (''done'', ''discarded'') and t.settled_at < %L', now() - jobs)),
            ('bodies', 'hapax.body', 'received_at', format('t.received_at < %L', date_trunc('day', now() - body)))
        ) as v(kind, name, at, condition)
    loop
        select sum(pg_relation_size(p.relid)) / current_setting('block_size')::bigint into pages
        from pg_partition_tree(sampled.name::regclass) p;
        percent := least(100, 100 * pages_most / greatest(pages, 1));
        execute format(
            'select count(*) * 100 / %1$s, count(*) filter (where %2$s) * 100 / %1$s, extract(epoch from max(t.%3$I))
             from %4$s t tablesample system (%1$s)', percent, sampled.condition, sampled.at, sampled.name)
        into rows_in_all, rows_past, newest;
        kind := sampled.kind;
        return next;
    end loop;
end
$$;

do $$
declare
    of_retention regprocedure;
begin
    -- They delete with their owner's rights: not for workers, which need usage on the schema only.
    for of_retention in
        select p.oid from pg_catalog.pg_proc p where p.pronamespace = 'hapax'::regnamespace and p.proname like 'retain\_%'
    loop
        execute format('revoke execute on function %s from public', of_retention);
    end loop;
end
$$;
