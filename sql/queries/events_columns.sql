-- What is told of events in a list.
select l.received_at, l.key, l.source, l.scope, l.event_id, l.event_type, l.status::text as status, l.digest, l.settled_at,
       greatest(l.attempts, (select max(j.attempts) from hapax.job j where j.key = l.key)) as attempts, l.replay,
       (select count(*) from hapax.mismatch m where m.key = l.key) as mismatches,
       (select max(m.seen_at) from hapax.mismatch m where m.key = l.key) as mismatch_at
