-- $1 queues, $2 for each: not what is due before; $3 how many are counted at most, 0 for none.
select q.queue, due.first_at, clock.now,
       (select count(*) from (
            select from hapax.job j
            where j.queue = q.queue and j.state = 'pending' and j.due_at <= clock.now and $3 > 0 limit $3
       ) counted) as waiting
from (select clock_timestamp() as now) as clock
    cross join unnest($1::text[], $2::timestamptz[]) as q(queue, since)
    left join lateral (
        select j.due_at as first_at from hapax.job j
        where j.queue = q.queue and j.state = 'pending'
            and j.due_at >= coalesce(q.since, '-infinity') and j.due_at <= clock.now
        order by j.due_at limit 1
    ) due on true
