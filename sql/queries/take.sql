-- $1 queue, $2 how many, $3 lease in ms, $4 not those due before, $5 those tried the least among so many. At least one row,
-- for the clock.
select (t.task).source, (t.task).scope, (t.task).event_id, (t.task).event_type, (t.task).key, (t.task).item,
       (t.task).digest, (t.task).body, (t.task).headers::text as headers, (t.task).received_at,
       (t.task).provider_time, (t.task).attempt, (t.task).replay, (t.task).token::text as token,
       t.was_due, clock.now
from (select clock_timestamp() as now) as clock
    left join hapax.take_from($1, $2, $3 * interval '1 millisecond', coalesce($4::timestamptz, '-infinity'),
                                    $5) t on true
