-- expand: the way back: settled events again, dead ones their turn, and events given up

-- These are called by operators' commands. Each says of every key what came of it, in a word; done is the only one that
-- changed something. As everywhere, rows of the ledger are locked before jobs. Nobody is waited for: an event that somebody
-- else is changing is busy.
--
--   done          as asked                          gone     no such event, any more
--   due           its turn is now or has come       busy     somebody else is changing it right now
--   held          a worker has it                   bodiless its body is not kept any more
--   unfinished    it is open or failed              settled  nothing is left to do
--   unidentified  it has no id of its own           refused  its effect refused it, and a target alone cannot undo that
--
-- only_look: changes nothing and locks nothing.

-- The events of these that are there and, unless only looked at, can be locked at once with all their jobs: a worker that holds
-- jobs of several events for longer locks them in no order.
create function hapax.lock_events(keys bytea[], only_look boolean) returns bytea[]
    language plpgsql volatile as
$$
#variable_conflict use_variable
declare
    locked bytea[];
    busy bytea[];
begin
    if only_look then
        return array(select l.key from hapax.ledger l where l.key = any (keys));
    end if;
    locked := array(select l.key from hapax.ledger l where l.key = any (keys) order by l.key for update skip locked);
    with mine as (
        select j.key, j.queue from hapax.job j where j.key = any (locked) order by j.key, j.queue for update skip locked
    )
    select array_agg(j.key) into busy
    from hapax.job j left join mine using (key, queue)
    where j.key = any (locked) and mine.key is null;
    if busy is null then
        return locked;
    end if;
    return array(select u.key from unnest(locked) as u(key) where u.key <> all (busy));
end
$$;

-- Whether the event can still be given to anybody.
create function hapax.has_body(of_key bytea) returns boolean
    language sql stable as
$$
    select exists (select from hapax.body_kept k where k.key = of_key)
        or exists (select from hapax.ledger l join hapax.body b on b.received_at = l.received_at and b.key = l.key
                   where l.key = of_key)
$$;

-- Whether a worker has it. One whose lease ran out may be at work, but what it brings no longer counts once its job is
-- given to somebody else.
create function hapax.is_held(of_key bytea, only_queue text) returns boolean
    language sql stable as
$$
    select exists (
        select from hapax.job j
        where j.key = of_key and j.state = 'pending' and j.token is not null and j.due_at > clock_timestamp()
            and (only_queue is null or j.queue = only_queue))
$$;

-- Puts settled events back to open, each with a replay number of its own. job_at, job_queues and job_attempts are what is to
-- be done: the place of the event, the queue, and how often it may be tried.
--
-- partly: what else there is to do or was done stays as it is; otherwise it is given up, since it comes of the old replay.
-- acts: the event has an effect. What that refused is not handed to a target by itself.
create function hapax.replay(keys bytea[], acts boolean[], job_at integer[], job_queues text[], job_attempts integer[],
    partly boolean, only_look boolean, commit_mode text) returns text[]
    language plpgsql volatile set enable_seqscan = off as
$$
#variable_conflict use_variable
declare
    total constant integer := cardinality(keys);
    outcome text[] := array_fill('gone'::text, array[total]);
    locked bytea[];
    good bytea[];
    event record;
    ignored text;
begin
    ignored := set_config('synchronous_commit', commit_mode, true);
    locked := hapax.lock_events(keys, only_look);
    for event in
        select u.at::integer as i, l.key, l.status, acts[u.at] as acts, l.key = any (locked) as mine
        from unnest(keys) with ordinality as u(key, at) join hapax.ledger l using (key)
    loop
        outcome[event.i] := case
            when not event.mine then 'busy'
            when event.status = 'unidentified' then 'unidentified'
            when event.status in ('open', 'failed') then 'unfinished'
            when hapax.is_held(event.key, null) then 'held'
            when event.status = 'rejected' and partly and event.acts then 'refused'
            when not hapax.has_body(event.key) then 'bodiless'
            when not event.i = any (job_at) then 'settled'
            else 'done'
        end;
        if outcome[event.i] = 'done' then
            good := good || event.key;
        end if;
    end loop;
    if good is null or only_look then
        return outcome;
    end if;
    if not partly then
        update hapax.job j set state = 'discarded', settled_at = clock_timestamp(), token = null
        where j.key = any (good) and j.state in ('pending', 'dead');
    end if;
    update hapax.ledger l set replay = l.replay + 1 where l.key = any (good);
    perform hapax.add_jobs(l.key, l.replay, w.queues, w.attempts)
    from (
        select u.at, array_agg(u.queue order by u.queue) as queues, array_agg(u.attempts order by u.queue) as attempts
        from unnest(job_at, job_queues, job_attempts) as u(at, queue, attempts) group by u.at
    ) w join hapax.ledger l on l.key = keys[w.at]
    where outcome[w.at] = 'done';
    perform hapax.restate(good);
    return outcome;
end
$$;

-- Sets what follows from the jobs of events whose rows are locked.
create function hapax.restate(keys bytea[]) returns void
    language sql volatile as
$$
    update hapax.ledger l
    set status = s.status,
        settled_at = case when s.status not in ('open', 'failed') then coalesce(l.settled_at, clock_timestamp()) end
    from (select u.key, hapax.status_of(u.key) as status from unnest(keys) as u(key)) s
    where l.key = s.key and l.status <> s.status
$$;

-- Gives dead jobs all their attempts again, and those that wait their turn now.
create function hapax.retry(keys bytea[], only_queue text, only_look boolean, commit_mode text) returns text[]
    language plpgsql volatile set enable_seqscan = off as
$$
#variable_conflict use_variable
declare
    total constant integer := cardinality(keys);
    outcome text[] := array_fill('gone'::text, array[total]);
    locked bytea[];
    good bytea[];
    event record;
    ignored text;
begin
    ignored := set_config('synchronous_commit', commit_mode, true);
    locked := hapax.lock_events(keys, only_look);
    for event in
        select u.at::integer as i, l.key, l.key = any (locked) as mine, j.*
        from unnest(keys) with ordinality as u(key, at) join hapax.ledger l using (key),
            lateral (
                select coalesce(bool_or(j.state = 'dead'), false) as is_dead,
                       coalesce(bool_or(j.state = 'pending' and j.due_at > clock_timestamp() and j.token is null), false)
                           as waits,
                       coalesce(bool_or(j.state = 'pending'), false) as is_pending
                from hapax.job j where j.key = l.key and (only_queue is null or j.queue = only_queue)
            ) j
    loop
        outcome[event.i] := case
            when not event.mine then 'busy'
            when not event.is_dead and not event.is_pending then 'settled'
            when not event.is_dead and not event.waits then 'due'
            when not hapax.has_body(event.key) then 'bodiless'
            else 'done'
        end;
        if outcome[event.i] = 'done' then
            good := good || event.key;
        end if;
    end loop;
    if good is null or only_look then
        return outcome;
    end if;
    update hapax.job j set state = 'pending', settled_at = null, attempts = 0, due_at = clock_timestamp()
    where j.key = any (good) and j.state = 'dead' and (only_queue is null or j.queue = only_queue);
    -- Of one that is being worked on, when its lease ends.
    update hapax.job j set due_at = clock_timestamp()
    where j.key = any (good) and j.state = 'pending' and j.token is null and j.due_at > clock_timestamp()
        and (only_queue is null or j.queue = only_queue);
    perform hapax.restate(good);
    return outcome;
end
$$;

-- Gives up what is left to do. By force also what a worker has: what that brings does not count any more.
--
-- acts: the event has an effect. Of one queue alone, the event's status follows from what is left; if that is nothing, it is
-- done if anything of it was, and otherwise rejected.
create function hapax.discard(keys bytea[], acts boolean[], only_queue text, force boolean, only_look boolean, commit_mode text)
    returns text[]
    language plpgsql volatile set enable_seqscan = off as
$$
#variable_conflict use_variable
declare
    total constant integer := cardinality(keys);
    outcome text[] := array_fill('gone'::text, array[total]);
    locked bytea[];
    good bytea[];
    idle bytea[] := '{}';
    event record;
    ignored text;
begin
    ignored := set_config('synchronous_commit', commit_mode, true);
    locked := hapax.lock_events(keys, only_look);
    for event in
        select u.at::integer as i, l.key, l.status, acts[u.at] as acts, l.key = any (locked) as mine, exists (
            select from hapax.job j
            where j.key = l.key and j.state in ('pending', 'dead') and (only_queue is null or j.queue = only_queue)
        ) as is_left
        from unnest(keys) with ordinality as u(key, at) join hapax.ledger l using (key)
    loop
        outcome[event.i] := case
            when not event.mine then 'busy'
            when not event.is_left and (only_queue is not null or event.status not in ('open', 'failed', 'dead'))
                then 'settled'
            when not force and hapax.is_held(event.key, only_queue) then 'held'
            else 'done'
        end;
        if outcome[event.i] = 'done' then
            good := good || event.key;
            if not event.acts then
                idle := idle || event.key;
            end if;
        end if;
    end loop;
    if good is null or only_look then
        return outcome;
    end if;
    update hapax.job j set state = 'discarded', settled_at = clock_timestamp(), token = null
    where j.key = any (good) and j.state in ('pending', 'dead') and (only_queue is null or j.queue = only_queue);
    if only_queue is null then
        update hapax.ledger l set status = 'rejected', settled_at = clock_timestamp() where l.key = any (good);
    else
        perform hapax.restate(good);
        update hapax.ledger l set status = 'rejected'
        where l.key = any (idle) and l.status = 'done'
            and not exists (select from hapax.job j where j.key = l.key and j.state = 'done');
    end if;
    return outcome;
end
$$;
