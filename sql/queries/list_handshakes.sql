-- All windows, for people; never a secret.
select
    h.source,
    to_char(h.opened_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') as opened_at,
    case
        when h.secret is not null and h.shown_at is not null then 'secret taken, shown'
        when h.secret is not null then 'secret taken, not shown yet'
        when h.closed_at is not null then 'closed, nothing was taken'
        when h.open_until <= clock_timestamp() then 'expired, nothing was taken'
        else 'open until ' || to_char(h.open_until at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
    end as state
from hapax.handshake h
order by h.source, h.number
limit 10000
