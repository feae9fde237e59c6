-- Closes the source's window if one is open, and opens another one, unless as many secrets as may be are stored: $1
-- source, $2 seconds, $3 most secrets. No row: they are.
with closed as (
    update hapax.handshake h
    set closed_at = least(greatest(clock_timestamp(), h.opened_at, h.taken_at), h.open_until)
    where h.source = $1 and h.closed_at is null
    returning h.number
)
insert into hapax.handshake (source, opened_at, open_until)
select $1, now.now, now.now + make_interval(secs => $2)
from (select clock_timestamp() as now) as now
where (select count(*) from hapax.handshake h where h.source = $1 and h.secret is not null) < $3
    and (select count(*) from closed) >= 0
returning to_char(open_until at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') as open_until
