-- expand: what is left to do after the commit

create type hapax.job_state as enum ('pending', 'done', 'dead', 'discarded');

-- One row for each thing that is left to do for an event: a target that has to get it, an effect that failed and is
-- parked, a worker that pulls it. Written in the transaction of the event's row.
--
-- due_at is the only clock: whoever takes a job moves it to the end of the lease, so that a job whose worker died comes
-- due again by itself. The token says who has it; a result counts only with the same token.
create table hapax.job (
    due_at timestamptz not null,
    received_at timestamptz not null,
    settled_at timestamptz,
    attempts integer not null default 0 check (attempts >= 0),
    attempts_max integer not null check (attempts_max > 0),
    replay integer not null default 0 check (replay >= 0),
    state hapax.job_state not null default 'pending',
    token uuid,
    key bytea not null check (octet_length(key) = 16),
    queue text not null check (position(':' in queue) > 1),
    error text,
    primary key (key, queue),
    constraint settled check ((settled_at is null) = (state = 'pending')),
    constraint held check (token is null or state = 'pending')
);
comment on column hapax.job.queue is 'target:NAME, effect:SOURCE or pull:SOURCE.';
comment on column hapax.job.due_at is 'Not taken before; of a job that is held: when its lease ends.';
comment on column hapax.job.attempts is 'Counted when taken, so that a job which kills its worker runs out of them too.';
create index job_due on hapax.job (queue, due_at) where state = 'pending';
-- By key or place, jobs are found by that alone: a statement that names state = 'pending' beside it may be given job_due,
-- and read all that waits, while the statistics are old. What has a token is pending; what is pending has no settled_at.
-- So with the ledger, and ledger_unsettled: as text, a status is looked for in no index.
create index job_settled on hapax.job (state, settled_at) where state <> 'pending';
alter table hapax.job set (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);

-- A redelivered event needs its place in a batch and its provider's time too.
alter table hapax.body add column item integer, add column provider_time timestamptz;
-- Workers look bodies up one by one, which a BRIN index is slow at. It grows at its right end only.
create index body_received on hapax.body (received_at);
drop index hapax.body_received_at;

-- Bodies that must not go with their day: of events that are not done, and of dead ones that came again.
create table hapax.body_kept (
    received_at timestamptz not null,
    key bytea primary key,
    body bytea not null,
    headers jsonb not null,
    item integer,
    provider_time timestamptz
);
alter table hapax.body_kept alter column body set storage external;

-- Ids that came again with another body.
create table hapax.mismatch (
    seen_at timestamptz not null default clock_timestamp(),
    key bytea not null,
    digest bytea not null,
    primary key (key, digest)
);

-- How many deliveries at once each gateway may have under way, of those that a target allows to all of them.
create table hapax.share (
    queue text not null,
    worker uuid not null,
    slots integer not null,
    until timestamptz not null,
    primary key (queue, worker)
);

-- Which source's rows are wanted: open, failed and dead events by their age.
create or replace view hapax.events as
    select source, scope, event_id, event_type, status::text as status, digest, received_at, settled_at,
           greatest(attempts, (select max(j.attempts) from hapax.job j where j.key = ledger.key)) as attempts, replay
    from hapax.ledger;

-- Between 0 and base, doubled with each attempt and at most cap: what failed together does not come back together.
create function hapax.backoff(attempts integer, base interval, cap interval) returns interval
    language sql volatile parallel safe as
$$ select random() * least(cap, base * power(2, least(greatest(attempts, 1), 30) - 1)) $$;

-- Every function that changes an event and its jobs locks the ledger's rows first, in the order of their keys, and then
-- the jobs.

-- What is an event's status, by its jobs.
create function hapax.status_of(of_key bytea) returns hapax.status
    language sql stable as
$$
    select case
        when bool_or(j.state = 'dead') then 'dead'
        when bool_or(j.state = 'pending' and j.error is not null and j.queue like 'effect:%') then 'failed'
        when bool_or(j.state = 'pending') then 'open'
        else 'done'
    end::hapax.status
    from hapax.job j where j.key = of_key
$$;

-- Arms dead and failed events again; returns the keys of those that were. What somebody else is just changing is left.
create function hapax.rearm(keys bytea[]) returns bytea[]
    language plpgsql volatile as
$$
#variable_conflict use_variable
declare
    locked bytea[];
begin
    locked := array(
        select l.key from hapax.ledger l
        where l.key = any (keys) and l.status::text in ('dead', 'failed') order by l.key for update skip locked);
    if cardinality(locked) = 0 then
        return locked;
    end if;
    update hapax.job j
    set state = 'pending', settled_at = null, attempts = 0, due_at = clock_timestamp()
    where j.key = any (locked) and j.state::text = 'dead';
    -- Of one that waits, its turn comes now; of one that is being worked on, when its lease ends.
    update hapax.job j
    set due_at = clock_timestamp()
    where j.key = any (locked) and j.settled_at is null and j.token is null and j.due_at > clock_timestamp();
    update hapax.ledger l set status = hapax.status_of(l.key), settled_at = null
    where l.key = any (locked) and l.status::text = 'dead';
    return locked;
end
$$;

-- An event with the token of who has it.
create type hapax.task as (
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
    replay integer,
    token uuid
);

-- Ends jobs of a queue that were taken attempts_max times and never finished; returns the keys of their events, which are
-- dead. Their rows are locked already: whoever holds an event's row may be waiting for them, and is not waited for.
create function hapax.bury(of_queue text, spent bytea[]) returns bytea[]
    language plpgsql volatile as
$$
#variable_conflict use_variable
begin
    spent := array(select l.key from hapax.ledger l where l.key = any (spent) order by l.key for update skip locked);
    update hapax.job j
    set state = 'dead', settled_at = clock_timestamp(), token = null,
        error = coalesce(j.error || '; ', '') || 'taken ' || j.attempts || ' times, and its worker never came back'
    where j.key = any (spent) and j.queue = of_queue and j.settled_at is null and j.attempts >= j.attempts_max;
    update hapax.ledger l set status = 'dead', settled_at = clock_timestamp() where l.key = any (spent);
    return spent;
end
$$;

-- Buries what nobody takes any more, at most n of a queue.
create function hapax.sweep(of_queue text, n integer) returns bytea[]
    language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as
$$
#variable_conflict use_variable
declare
    clock constant timestamptz := clock_timestamp();
begin
    return hapax.bury(of_queue, array(
        select j.key from hapax.job j
        where j.queue = of_queue and j.state = 'pending' and j.due_at <= clock and j.attempts >= j.attempts_max
        order by j.due_at limit n for update skip locked));
end
$$;

-- Takes up to n jobs of a queue that are due, the ones that wait longest first. What was taken attempts_max times and
-- never finished is dead, and given as a key without a token; what belongs to no event any more is given up. Never waits for
-- a lock, and neither that nor what is locked stands in the way of others.
--
-- since: no job that is due earlier is looked for. While another session holds the xmin horizon, the index keeps an entry
-- for each job that ever was due; a reader that knows that they are gone need not go over all of them each time.
--
-- among: not those that wait longest, but those tried the least among so many of them.
create function hapax.take_from(from_queue text, n integer, lease interval, since timestamptz, among integer default null)
    returns table (task hapax.task, was_due timestamptz)
    -- Each a few rows by an index, whatever the statistics say of a table that was just filled or emptied. A way that is
    -- switched off costs so much that even a table of one row would be compiled.
    language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
    set enable_hashjoin = off set enable_mergejoin = off set jit = off as
$$
#variable_conflict use_variable
declare
    -- A constant, or the index is read to the end of what is not due yet.
    clock constant timestamptz := clock_timestamp();
    found_rows tid[];
    chosen tid[];
    keys bytea[];
    dues timestamptz[];
    spent bytea[];
    locked boolean := false;
    given bigint;
begin
    for round in 1..10 loop
        if among is null then
            select array_agg(f.ctid), array_agg(f.key), array_agg(f.due_at),
                   array_agg(f.key) filter (where f.attempts >= f.attempts_max)
            into found_rows, keys, dues, spent
            from (
                select j.ctid, j.due_at, j.key, j.attempts, j.attempts_max from hapax.job j
                where j.queue = from_queue and j.state = 'pending' and j.due_at >= since and j.due_at <= clock
                    and not (locked and j.attempts >= j.attempts_max)
                order by j.due_at limit n for update skip locked
            ) f;
        else
            chosen := array(
                select f.ctid from (
                    select j.ctid, j.attempts from hapax.job j
                    where j.queue = from_queue and j.state = 'pending' and j.due_at >= since and j.due_at <= clock
                        and not (locked and j.attempts >= j.attempts_max)
                    order by j.due_at limit among
                ) f order by f.attempts, random() limit n);
            select array_agg(f.ctid), array_agg(f.key), array_agg(f.due_at),
                   array_agg(f.key) filter (where f.attempts >= f.attempts_max)
            into found_rows, keys, dues, spent
            from (
                select j.ctid, j.due_at, j.key, j.attempts, j.attempts_max from hapax.job j
                -- It may have been taken meanwhile.
                where j.ctid = any (chosen) and j.queue = from_queue and j.settled_at is null and j.due_at <= clock
                for update skip locked
            ) f;
        end if;
        exit when dues is null;
        if spent is not null then
            return query
            select row(null, null, null, null, u.key, null, null, null, null, null, null, null, null, null)::hapax.task, dues[1]
            from unnest(hapax.bury(from_queue, spent)) as u(key);
        end if;
        return query
        with taken as (
            update hapax.job j
            set token = gen_random_uuid(), due_at = clock_timestamp() + lease, attempts = j.attempts + 1
            where j.ctid = any (found_rows) and j.attempts < j.attempts_max
            returning j.key, j.token, j.attempts, j.replay
        )
        select row(l.source, l.scope, l.event_id, l.event_type, l.key, coalesce(k.item, b.item), l.digest,
                   coalesce(k.body, b.body), coalesce(k.headers, b.headers), l.received_at,
                   coalesce(k.provider_time, b.provider_time), t.attempts, t.replay, t.token)::hapax.task,
               dues[1]
        from taken t
            join hapax.ledger l on l.key = t.key
            left join hapax.body_kept k on k.key = t.key
            left join lateral (
                select b.* from hapax.body b where k.key is null and b.received_at = l.received_at and b.key = l.key limit 1
            ) b on true;
        get diagnostics given = row_count;
        if given < cardinality(keys) then
            -- Of events whose rows somebody deleted by hand.
            update hapax.job j
            set state = 'discarded', settled_at = clock_timestamp(), token = null, error = 'its event is gone'
            where j.key = any (keys) and j.queue = from_queue and not exists (select from hapax.ledger l where l.key = j.key);
        end if;
        exit when given > 0;
        locked := exists (
            select from hapax.job j where j.key = any (spent) and j.queue = from_queue and j.settled_at is null);
    end loop;
end
$$;

-- Ends attempts at jobs, of those whose token still holds; mine says which. results has one letter per job:
--   d  done            f  failed: tried again after the delay, or dead if that was the last attempt
--   r  refused for     x  dead at once, since the same again cannot succeed
--      good            b  given back untried: the attempt does not count
-- events is the status of each job's event if it is settled by that, and null otherwise.
--
-- Where somebody else holds an event's row, mine is null and nothing is changed, to be told again: a program that
-- pulls may hold one for as long as its own transaction takes, and results for other events do not wait for it.
--
-- careful: the same where somebody else holds the job's row alone, which nobody does for long but by hand.
create function hapax.finish(keys bytea[], queues text[], tokens uuid[], results text[], errors text[],
    delays_ms bigint[], careful boolean default false,
    out mine boolean[], out events text[], out digests bytea[], out generation bytea)
    -- As in hapax.take_from.
    language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
    set enable_hashjoin = off set enable_mergejoin = off set jit = off as
$$
#variable_conflict use_variable
declare
    locked bytea[];
    unlocked bigint[];
    ended bytea[];
    refused bytea[];
    settled record;
    letter text;
    i integer;
begin
    locked := array(select l.key from hapax.ledger l where l.key = any (keys) order by l.key for update skip locked);
    events := array_fill(null::text, array[cardinality(keys)]);
    digests := array_fill(null::bytea, array[cardinality(keys)]);
    mine := array_fill(false, array[cardinality(keys)]);
    if cardinality(locked) < cardinality(keys) then
        mine := array(
            select case when u.key = any (locked) or l.key is null then false end
            from unnest(keys) with ordinality as u(key, at) left join hapax.ledger l on l.key = u.key order by u.at);
    end if;
    if careful then
        unlocked := array(
            select u.at
            from unnest(keys, queues, tokens) with ordinality as u(key, queue, token, at)
                join hapax.job j on j.key = u.key and j.queue = u.queue and j.token = u.token
            for update of j skip locked);
        mine := array(
            select case when u.at = any (unlocked) or j.key is null then u.mine end
            from unnest(keys, queues, tokens, mine) with ordinality as u(key, queue, token, mine, at)
                left join hapax.job j on j.key = u.key and j.queue = u.queue and j.token = u.token
            order by u.at);
    end if;
    for settled in
        with given as (
            select * from unnest(keys, queues, tokens, results, errors, delays_ms) with ordinality
                as u(key, queue, token, result, error, delay_ms, at)
        )
        update hapax.job j
        set state = (case
                when g.result in ('d', 'r') then 'done'
                when g.result = 'x' or (g.result = 'f' and j.attempts >= j.attempts_max) then 'dead'
                else 'pending'
            end)::hapax.job_state,
            settled_at = case
                when g.result in ('d', 'r', 'x') or (g.result = 'f' and j.attempts >= j.attempts_max)
                then clock_timestamp()
            end,
            due_at = case
                when g.result in ('f', 'b') then clock_timestamp() + coalesce(g.delay_ms, 0) * interval '1 millisecond'
                else j.due_at
            end,
            attempts = case when g.result = 'b' then greatest(j.attempts - 1, 0) else j.attempts end,
            error = case when g.result in ('d', 'b') then j.error else left(g.error, 1000) end,
            token = null
        from given g
        where j.key = g.key and j.queue = g.queue and j.token = g.token
            and mine[g.at::integer] is not null
        returning g.at::integer as i, j.state
    loop
        i := settled.i;
        mine[i] := true;
        letter := results[i];
        if settled.state <> 'pending' or letter = 'f' then
            ended := ended || keys[i];
        end if;
        if letter = 'r' then
            refused := refused || keys[i];
        end if;
    end loop;
    if refused is not null then
        update hapax.job j set state = 'discarded', settled_at = clock_timestamp(), token = null
        where j.key = any (refused) and j.settled_at is null;
    end if;
    if ended is not null then
        for settled in
            update hapax.ledger l
            set status = s.status, settled_at = case when s.status not in ('open', 'failed') then clock_timestamp() end
            from (
                select u.key,
                       case when u.key = any (refused) then 'rejected'::hapax.status else hapax.status_of(u.key) end as status
                from (select distinct e.key from unnest(ended) as e(key)) u
            ) s
            where l.key = s.key and l.settled_at is null and l.status <> s.status
            returning l.key, l.status::text as status, l.digest
        loop
            continue when settled.status in ('open', 'failed');
            foreach i in array array_positions(keys, settled.key) loop
                events[i] := settled.status;
                digests[i] := settled.digest;
            end loop;
        end loop;
    end if;
    generation := hapax.generation();
end
$$;

-- Holds jobs for longer, of those whose token still holds; returns for each whether it does, and null where the row is
-- locked: an effect that runs for long locks its job, and nobody else's lease may run out for that.
create function hapax.hold(keys bytea[], queues text[], tokens uuid[], lease interval) returns boolean[]
    language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off
    set enable_hashjoin = off set enable_mergejoin = off set jit = off as
$$
#variable_conflict use_variable
declare
    free_rows tid[];
    held bigint[];
begin
    select array_agg(f.ctid), coalesce(array_agg(f.at), '{}') into free_rows, held
    from (
        select j.ctid, u.at
        from unnest(keys, queues, tokens) with ordinality as u(key, queue, token, at)
            join hapax.job j on j.key = u.key and j.queue = u.queue and j.token = u.token
        for update of j skip locked
    ) f;
    update hapax.job j set due_at = greatest(j.due_at, clock_timestamp() + lease) where j.ctid = any (free_rows);
    return array(
        select case when u.at = any (held) then true when j.key is null then false end
        from unnest(keys, queues, tokens) with ordinality as u(key, queue, token, at)
            left join hapax.job j on j.key = u.key and j.queue = u.queue and j.token = u.token
        order by u.at);
end
$$;

-- What is left to do for an event, as far as it is not being done; what was done already is to be done anew.
create function hapax.add_jobs(of_key bytea, of_replay integer, queues text[], attempts integer[]) returns void
    language sql volatile as
$$
    insert into hapax.job (due_at, received_at, attempts_max, replay, key, queue)
    select clock_timestamp(), l.received_at, u.attempts, of_replay, of_key, u.queue
    from unnest(queues, attempts) as u(queue, attempts), hapax.ledger l
    where l.key = of_key
    on conflict (key, queue) do update
    set due_at = excluded.due_at, attempts_max = excluded.attempts_max, replay = excluded.replay, attempts = 0,
        state = 'pending', settled_at = null, token = null, error = null
$$;

-- Runs the effects of parked events, in the order given, each in a subtransaction of its own, and ends the attempts: the
-- arguments and results are those of hapax.finish, and outcomes says how each effect ended, in its letters. job_at,
-- job_queues and job_attempts are what is left to do once the effect is done, as in hapax.record.
create function hapax.run_parked(keys bytea[], queues text[], tokens uuid[], delays_ms bigint[],
    effect text, effect_group text, effect_budget interval, commit_mode text,
    job_at integer[], job_queues text[], job_attempts integer[],
    out mine boolean[], out events text[], out digests bytea[], out generation bytea,
    out outcomes text, out messages text[])
    language plpgsql volatile as
$$
#variable_conflict use_variable
declare
    total constant integer := cardinality(keys);
    outcome text[] := array_fill('b'::text, array[total]);
    held bytea[];
    event hapax.event;
    started timestamptz;
    spent boolean := false;
    raised text;
    message text;
    ignored text;
    called bigint;
    i integer;
begin
    messages := array_fill(null::text, array[total]);
    perform from hapax.ledger l where l.key = any (keys) order by l.key for update;
    -- Held from here to the commit: whoever's lease ran out meanwhile has nothing to run.
    held := array(
        select j.key from unnest(keys, queues, tokens) as u(key, queue, token) join hapax.job j using (key, queue, token)
        order by j.key for update of j);
    ignored := set_config('lock_timeout', '0', true);
    if effect_group is not null and cardinality(held) > 0 then
        perform pg_advisory_xact_lock(hashtextextended('hapax effect group ' || effect_group, 0));
    end if;
    started := clock_timestamp();
    for i in 1..total loop
        continue when keys[i] <> all (held) or spent or clock_timestamp() - started > effect_budget;
        select l.source, l.scope, l.event_id, l.event_type, l.key, coalesce(k.item, b.item), l.digest,
               coalesce(k.body, b.body), coalesce(k.headers, b.headers), l.received_at,
               coalesce(k.provider_time, b.provider_time), j.attempts, j.replay
        into event
        from hapax.ledger l
            join hapax.job j on j.key = l.key and j.queue = queues[i]
            left join hapax.body_kept k on k.key = l.key
            left join hapax.body b on k.key is null and b.received_at = l.received_at and b.key = l.key
        where l.key = keys[i];
        if event.body is null then
            outcome[i] := 'x';
            messages[i] := 'its body is gone';
            continue;
        end if;
        begin
            execute format('select %s($1)', effect) using event;
            get diagnostics called = row_count;
            if called <> 1 then
                raise exception 'hapax: effect % ran % times for one event', effect, called;
            end if;
            reset session authorization;
            begin
                set constraints all immediate;
                raise exception using errcode = 'HX999';
            exception when sqlstate 'HX999' then
                null;
            end;
            outcome[i] := 'd';
        exception
            when others or query_canceled or assert_failure then
                get stacked diagnostics raised = returned_sqlstate, message = message_text;
                outcome[i] := case raised when 'HX001' then 'r' else 'f' end;
                messages[i] := left(raised || ' ' || message, 1000);
                spent := spent or raised = '57014';
        end;
    end loop;
    reset session authorization;
    if cardinality(job_at) > 0 then
        perform hapax.add_jobs(keys[u.at], j.replay, array[u.queue], array[u.attempts])
        from unnest(job_at, job_queues, job_attempts) as u(at, queue, attempts)
            join hapax.job j on j.key = keys[u.at] and j.queue = queues[u.at]
        where outcome[u.at] = 'd';
    end if;
    select f.* into mine, events, digests, generation
    from hapax.finish(keys, queues, tokens, outcome, messages,
        array(select case when u.outcome = 'b' then 0 else u.delay end
              from unnest(outcome, delays_ms) with ordinality as u(outcome, delay, at) order by u.at)) f;
    set constraints all immediate;
    ignored := set_config('synchronous_commit', commit_mode, true);
    outcomes := array_to_string(outcome, '');
end
$$;

-- Begins the attempt at one parked event whose effect the caller runs itself, in this transaction; null if the token no
-- longer holds it, and else what names the transaction.
create function hapax.begin_parked(of_key bytea, of_queue text, of_token uuid) returns text
    language plpgsql volatile as
$$
begin
    perform from hapax.ledger l where l.key = of_key for update;
    perform from hapax.job j
    where j.key = of_key and j.queue = of_queue and j.token = of_token for update;
    if not found then
        return null;
    end if;
    return pg_current_xact_id()::text;
end
$$;

-- Ends it, in the letters of hapax.finish: fails unless it is still that transaction.
create function hapax.end_parked(begun_in text, commit_mode text, of_key bytea, of_queue text, of_token uuid,
    result text, error text, job_queues text[], job_attempts integer[],
    out mine boolean[], out events text[], out digests bytea[], out generation bytea)
    language plpgsql volatile as
$$
declare
    ignored text;
begin
    if pg_current_xact_id_if_assigned()::text is distinct from begun_in then
        raise exception 'hapax: the transaction of the attempt ended before its effect did';
    end if;
    if result = 'd' then
        perform hapax.add_jobs(of_key, j.replay, job_queues, job_attempts)
        from hapax.job j where j.key = of_key and j.queue = of_queue;
    end if;
    select f.* into mine, events, digests, generation
    from hapax.finish(array[of_key], array[of_queue], array[of_token], array[result], array[error], array[0::bigint]) f;
    set constraints all immediate;
    ignored := set_config('synchronous_commit', commit_mode, true);
end
$$;

-- How many deliveries of a queue this worker may have under way, out of the total over all workers. What it holds counts
-- until it says less or the time is up.
create function hapax.share_of(of_queue text, of_worker uuid, under_way integer, total integer, hold interval)
    returns integer language plpgsql volatile as
$$
#variable_conflict use_variable
declare
    others integer;
    workers integer;
    place integer;
    fair integer;
    granted integer;
begin
    perform pg_advisory_xact_lock(hashtextextended('hapax share ' || of_queue, 0));
    delete from hapax.share s where s.queue = of_queue and s.until < clock_timestamp() and s.worker <> of_worker;
    select coalesce(sum(s.slots), 0), count(*), count(*) filter (where s.worker < of_worker)
    into others, workers, place
    from hapax.share s where s.queue = of_queue and s.worker <> of_worker;
    workers := workers + 1;
    fair := total / workers + case when place < total % workers then 1 else 0 end;
    granted := greatest(least(fair, total - others), 0);
    insert into hapax.share (queue, worker, slots, until)
    values (of_queue, of_worker, greatest(granted, under_way), clock_timestamp() + hold)
    on conflict (queue, worker) do update set slots = excluded.slots, until = excluded.until;
    return granted;
end
$$;

-- Pull by SQL. Each of these is for roles that need no right on any table.

create function hapax.take(source text, n int, lease interval) returns setof hapax.task
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as
$$
begin
    if source is null then
        raise exception 'hapax.take: the source is null' using errcode = '22023';
    end if;
    if n is null or n < 1 or n > 10000 then
        raise exception 'hapax.take: n is %, and has to be 1 to 10000', n using errcode = '22023';
    end if;
    perform hapax.check_lease('hapax.take', lease);
    return query
    select (t.task).* from hapax.take_from('pull:' || source, n, lease, '-infinity') t where (t.task).token is not null;
    -- A name with a slip in it would wait for ever.
    if not found and not exists (select from hapax.key_rule k where k.source = take.source) then
        raise exception 'hapax.take: no gateway knows a source "%"', source
            using errcode = '42704', hint = 'It is known once a gateway has started with it in its settings.';
    end if;
end
$$;
comment on function hapax.take is
    'Gives up to n events of a source with effect = "pull", each with a token, for as long as the lease. To be committed '
    'by itself, before the work begins: the attempt counts from then.';

create function hapax.check_lease(asked_by text, lease interval) returns void
    language plpgsql immutable as
$$
begin
    if lease is null or lease < interval '1 second' or lease > interval '1 day' then
        raise exception '%: the lease is %, and has to be 1 second to 1 day', asked_by, lease using errcode = '22023';
    end if;
end
$$;

-- The job that the token holds, with its event's row locked.
create function hapax.held(of_key bytea, of_token uuid) returns hapax.job
    language plpgsql volatile as
$$
declare
    job hapax.job;
    why text;
begin
    if of_key is null or of_token is null then
        raise exception 'hapax: the key or the token is null, and both have to be as hapax.take gave them'
            using errcode = '22023';
    end if;
    perform from hapax.ledger l where l.key = of_key for update;
    select j.* into job from hapax.job j
    where j.key = of_key and j.token = of_token and j.queue like 'pull:%' for update;
    if found then
        if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
            -- Such a caller does not see that another job of the event ended since its snapshot was taken, and would leave
            -- the event open for ever. Locking what was changed since fails with 40001.
            perform from hapax.job j where j.key = of_key for share;
        end if;
        return job;
    end if;
    select case
        when j.state = 'done' then 'the event is done'
        when j.state = 'dead' then 'the event is dead'
        when j.state = 'discarded' then 'the event was given up'
        when j.token is not null then 'another worker has taken the event since'
        else 'the event waits to be taken again'
    end into why
    from hapax.job j where j.key = of_key and j.queue like 'pull:%';
    raise exception 'hapax: this token holds no event: %', coalesce(why, 'no event with this key is pulled')
        using errcode = 'HX002', hint = 'Roll back, so that nothing of this work stays, and take again.';
end
$$;

create function hapax.done(key bytea, token uuid) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as
$$
begin
    perform hapax.finish(array[job.key], array[job.queue], array[job.token], array['d'], array[null::text], array[null::bigint])
    from hapax.held(key, token) as job;
end
$$;
comment on function hapax.done is
    'To be called in the transaction of the work itself, as its last statement. Raises HX002 if the token no longer holds '
    'the event, so that the work of a worker that was too slow is rolled back.';

create function hapax.fail(key bytea, token uuid, error text, retry_in interval default null) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as
$$
declare
    job hapax.job;
    delay interval;
begin
    if retry_in < interval '0' or retry_in > interval '365 days' then
        raise exception 'hapax.fail: retry_in is %, and has to be 0 to 365 days', retry_in using errcode = '22023';
    end if;
    job := hapax.held(key, token);
    delay := coalesce(retry_in, hapax.backoff(job.attempts, interval '1 second', interval '1 hour'));
    perform hapax.finish(array[job.key], array[job.queue], array[job.token], array['f'],
                         array[coalesce(nullif(error, ''), 'failed')], array[(extract(epoch from delay) * 1000)::bigint]);
end
$$;
comment on function hapax.fail is
    'In a transaction of its own, after the work was rolled back. The event comes again after retry_in, or is dead after '
    'its last attempt.';

create function hapax.extend(key bytea, token uuid, lease interval) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as
$$
declare
    job hapax.job;
begin
    perform hapax.check_lease('hapax.extend', lease);
    job := hapax.held(key, token);
    perform hapax.hold(array[job.key], array[job.queue], array[job.token], lease);
end
$$;
comment on function hapax.extend is
    'Holds the event for the lease from now on, if that is longer than it is held anyway. In a transaction of its own.';

revoke execute on function hapax.take, hapax.done, hapax.fail, hapax.extend from public;

-- Records a batch: ledger rows, effects, bodies, in the caller's transaction. Keys are sorted and unique.
--
-- outcomes has one letter per event:
--   a  accepted: new, effect done            d  duplicate: the row was read; digests and statuses are its own
--   o  ours: an earlier attempt committed    l  locked: somebody else is writing the row right now
--   r  rejected for good by the effect       f  failed: the effect raised; sqlstates and messages say what
--   p  parked: it failed, and is kept to be  n  not tried: the time budget was used up
--      tried again
-- Of l, f and n nothing stays behind.
--
-- A duplicate of an event that is dead or failed arms it again: its status is then 'rearmed'. One with another digest
-- is noted in hapax.mismatch.
--
-- job_at, job_queues and job_attempts are what is left to do of accepted events: the place of the event, the queue, and
-- how often it may be tried. parks is how often the failed effect of an event may be tried again; null: it is not
-- parked. faults says that an event's effect has failed already, outside of this call.
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
    job_at integer[], job_queues text[], job_attempts integer[], parks integer[], faults text[],
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
    begun hapax.status[];
    parked integer[] := '{}';
    odd bytea[];
    armed bytea[];
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
    begun := array_fill('done'::hapax.status, array[total]);
    if cardinality(job_at) > 0 then
        foreach i in array job_at loop
            begun[i] := 'open';
        end loop;
    end if;
    if true = any (unidentified) then
        foreach i in array array_positions(unidentified, true) loop
            begun[i] := 'unidentified';
        end loop;
    end if;
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
                    values (now(), case when begun[i] <> 'open' then now() end, tokens[i], begun[i], keys[i],
                        digests[i], sources[i], scopes[i], ids[i], types[i])
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
                select now(), case when u.begun <> 'open' then now() end, u.token, u.begun,
                       u.key, u.digest, u.source, u.scope, u.id, u.type
                from unnest(keys, tokens, digests, sources, scopes, ids, types, begun) with ordinality
                    as u(key, token, digest, source, scope, id, type, begun, at)
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
    if outcome && '{d}' then
        -- Seen even if nobody reads the log. Some of them, since a sender may change its bodies for ever.
        odd := array(
            select u.key from unnest(keys, digests, row_digests, outcome) as u(key, digest, known, outcome)
            where u.outcome = 'd' and u.known <> u.digest);
        if cardinality(odd) > 0 then
            begin
                insert into hapax.mismatch (key, digest)
                select u.key, u.digest from unnest(keys, digests) as u(key, digest)
                where u.key = any (odd) and (select count(*) from hapax.mismatch m where m.key = u.key) < 16
                on conflict do nothing;
            exception when lock_not_available then
                -- Another gateway is noting the same.
                null;
            end;
        end if;
        if row_statuses && '{dead,failed}' then
            armed := hapax.rearm(array(
                select u.key from unnest(keys, digests, row_digests, outcome) as u(key, digest, known, outcome)
                where u.outcome = 'd' and u.known = u.digest));
            -- The body may be gone by now.
            insert into hapax.body_kept (received_at, key, body, headers, item, provider_time)
            select l.received_at, u.key, u.body, u.headers::jsonb, u.item, u.time
            from unnest(keys, bodies, headers, items, times) as u(key, body, headers, item, time)
                join hapax.ledger l using (key)
            where u.key = any (armed)
            on conflict do nothing;
            for i in 1..total loop
                if keys[i] = any (armed) then
                    row_statuses[i] := 'rearmed';
                end if;
            end loop;
        end if;
    end if;
    fresh := array_positions(outcome, 'a');
    kept := fresh;
    if cardinality(array_positions(faults, null)) < total then
        for i in 1..total loop
            if outcome[i] = 'a' and faults[i] is not null then
                outcome[i] := 'p';
                messages[i] := faults[i];
                parked := parked || i;
            end if;
        end loop;
        fresh := array_positions(outcome, 'a');
    end if;
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
                    outcome[i] := case when raised = 'HX001' then 'r' when parks[i] is not null then 'p' else 'f' end;
                    if outcome[i] = 'p' then
                        parked := parked || i;
                    end if;
                    sqlstates[i] := raised;
                    messages[i] := message;
                    -- statement_timeout fires once per statement: nothing bounds what would come after it.
                    spent := spent or raised = '57014';
            end;
        end loop;
        -- Not what an effect made itself: what follows is ours.
        reset session authorization;
        if 'r' = any (outcome) then
            update hapax.ledger l set status = 'rejected', settled_at = now()
            where l.key = any (array(select keys[u.i] from unnest(fresh) as u(i) where outcome[u.i] = 'r'));
        end if;
        if 'f' = any (outcome) or 'n' = any (outcome) then
            dropped := array(select keys[u.i] from unnest(fresh) as u(i) where outcome[u.i] in ('f', 'n'));
            delete from hapax.ledger l where l.key = any (dropped);
            kept := array(select u.i from unnest(kept) as u(i) where outcome[u.i] in ('a', 'r', 'p'));
        end if;
    end if;
    if cardinality(parked) > 0 then
        update hapax.ledger l set status = 'failed', settled_at = null
        where l.key = any (array(select keys[u.i] from unnest(parked) as u(i)));
        insert into hapax.job (due_at, received_at, attempts, attempts_max, key, queue, error)
        select clock_timestamp() + random() * interval '1 second', now(), 1, parks[u.i], keys[u.i],
               'effect:' || sources[u.i], left(concat_ws(' ', sqlstates[u.i], messages[u.i]), 1000)
        from unnest(parked) as u(i);
    end if;
    if cardinality(job_at) > 0 then
        insert into hapax.job (due_at, received_at, attempts_max, key, queue)
        select now(), now(), u.attempts, keys[u.at], u.queue
        from unnest(job_at, job_queues, job_attempts) as u(at, queue, attempts)
        where outcome[u.at] = 'a'
        -- Of an event whose row somebody deleted by hand.
        on conflict (key, queue) do update
        set due_at = excluded.due_at, received_at = excluded.received_at, attempts_max = excluded.attempts_max,
            attempts = 0, replay = 0, state = 'pending', settled_at = null, token = null, error = null;
    end if;

    if cardinality(kept) > 0 then
        insert into hapax.body (received_at, key, body, headers, item, provider_time)
        select now(), u.key, u.body, u.headers::jsonb, u.item, u.time
        from unnest(keys, bodies, headers, items, times) with ordinality as u(key, body, headers, item, time, at)
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
    promised := outcome && '{a,r,d,o,p}';
    ignored := set_config('synchronous_commit', case when promised then commit_mode else 'off' end, true);
    outcomes := array_to_string(outcome, '');
    generation := hapax.generation();
end
$$;

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
    job_at integer[], job_queues text[], job_attempts integer[], parks integer[], faults text[],
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
        parks := array(select parks[u.i] from unnest(given) as u(i) order by u.i);
        faults := array(select faults[u.i] from unnest(given) as u(i) order by u.i);
        -- Of what is not given, nothing is left to do.
        select coalesce(array_agg(array_position(given, u.at)), '{}'), coalesce(array_agg(u.queue), '{}'),
               coalesce(array_agg(u.attempts), '{}')
        into job_at, job_queues, job_attempts
        from unnest(job_at, job_queues, job_attempts) as u(at, queue, attempts)
        where u.at = any (given);
    end if;
    select r.* into recorded
    from hapax.record(keys, tokens, digests, sources, scopes, ids, types, times, headers, bodies, items, unidentified,
        locks, careful, effect, effect_group, one_by_one, ledger_lock_timeout, commit_mode, effect_budget,
        effect_follows, job_at, job_queues, job_attempts, parks, faults) as r;

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
            where u.guard = t.guard and u.letter in ('a', 'r', 'p', 'd', 'o')));
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

-- The last words of a transaction in which the caller ran an effect after hapax.record: fails unless it is still that
-- transaction. rejected is the key of an event that the effect refused for good, or null.
create or replace function hapax.close(recorded_in text, commit_mode text, rejected bytea) returns bytea
    language plpgsql volatile as
$$
declare
    ignored text;
begin
    if pg_current_xact_id_if_assigned()::text is distinct from recorded_in then
        raise exception 'hapax: the transaction that recorded the event ended before its effect did';
    end if;
    if rejected is not null then
        delete from hapax.job where key = rejected;
        update hapax.ledger set status = 'rejected', settled_at = now() where key = rejected;
    end if;
    -- What an effect may have changed, as in hapax.record.
    set constraints all immediate;
    ignored := set_config('synchronous_commit', commit_mode, true);
    return hapax.generation();
end
$$;
