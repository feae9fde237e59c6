-- expand: locks of others count no attempt at a parked effect; the guards are vacuumed as the ledger is

-- The events of these attempts whose effects can run now: with their rows, their jobs and the lock of the effect group, held
-- from here to the commit, so that whoever's lease ran out meanwhile has nothing to run. What somebody else has locked, or has
-- taken, is left out; only the group is waited for. In a statement of its own before hapax.run_parked, that wait takes
-- nothing from the time of the effects, and whoever sees it fail knows that none of them had begun.
create function hapax.lock_parked(keys bytea[], queues text[], tokens uuid[], effect_group text) returns bytea[]
    language plpgsql volatile as
$$
#variable_conflict use_variable
declare
    locked bytea[];
    held bytea[];
    ignored text;
begin
    locked := array(select l.key from hapax.ledger l where l.key = any (keys) order by l.key for update skip locked);
    held := array(
        select j.key from unnest(keys, queues, tokens) as u(key, queue, token) join hapax.job j using (key, queue, token)
        where j.key = any (locked)
        order by j.key for update of j skip locked);
    ignored := set_config('lock_timeout', '0', true);
    if effect_group is not null and cardinality(held) > 0 then
        begin
            perform pg_advisory_xact_lock(hashtextextended('hapax effect group ' || effect_group, 0));
        exception when query_canceled then
            -- No event of this batch is at fault: other effects of the group are slow.
            raise exception 'hapax: effect group % is busy', effect_group using errcode = '40001';
        end;
    end if;
    return held;
end
$$;

-- Runs the effects of parked events, in the order given, each in a subtransaction of its own, and ends the attempts: the
-- arguments and results are those of hapax.finish, and outcomes says how each effect ended, in its letters. job_at,
-- job_queues and job_attempts are what is left to do once the effect is done, as in hapax.record.
--
-- What somebody else holds is given back untried: its outcome is b. mine is false of what nothing was ended of, be it somebody
-- else's by now or locked.
create or replace function hapax.run_parked(keys bytea[], queues text[], tokens uuid[], delays_ms bigint[],
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
    held := hapax.lock_parked(keys, queues, tokens, effect_group);
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
              from unnest(outcome, delays_ms) with ordinality as u(outcome, delay, at) order by u.at), true) f;
    mine := array(select coalesce(u.mine, false) from unnest(mine) with ordinality as u(mine, at) order by u.at);
    set constraints all immediate;
    ignored := set_config('synchronous_commit', commit_mode, true);
    outcomes := array_to_string(outcome, '');
end
$$;

-- A row for each event of a source with a guard, inserted once and deleted with the event.
alter table hapax.guard set (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_vacuum_scale_factor = 0.02);
