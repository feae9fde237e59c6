-- What is left or was left to do for an event: $1 its key.
select j.queue, j.state::text as state, j.attempts, j.attempts_max, j.replay, j.due_at, j.settled_at, j.error,
       j.token is not null and j.due_at > clock_timestamp() as held
from hapax.job j
where j.key = $1
order by j.queue
