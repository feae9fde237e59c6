-- expand: hapax.record and hapax.close leave the session as they found it, so that a batch can be a transaction by itself: one
-- statement, without a BEGIN that undoes what was left by an earlier one

-- As before, but for the last words.
create or replace function hapax.record(
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
        if effect is not null then
            -- What an effect may have left in the session: the next batch begins as this one did.
            reset session authorization;
            reset all;
            perform pg_advisory_unlock_all();
        end if;
    end if;
    promised := outcome && '{a,r,d,o,p}';
    ignored := set_config('synchronous_commit', case when promised then commit_mode else 'off' end, true);
    outcomes := array_to_string(outcome, '');
    generation := hapax.generation();
end
$$;

-- As before, but for the last words.
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
    reset session authorization;
    reset all;
    perform pg_advisory_unlock_all();
    ignored := set_config('synchronous_commit', commit_mode, true);
    return hapax.generation();
end
$$;
