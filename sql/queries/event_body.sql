-- Where an event's body is kept: $1 its key, $2 when it was received.
select b.place, b.headers, b.item, b.provider_time, b.body
from (
    select 'hapax.body_kept' as place, k.headers::text, k.item, k.provider_time, k.body, 1 as rank
    from hapax.body_kept k where k.key = $1
    union all
    select 'hapax.' || c.relname, b.headers::text, b.item, b.provider_time, b.body, 2
    from hapax.body b join pg_catalog.pg_class c on c.oid = b.tableoid
    where b.received_at = $2 and b.key = $1
) b
order by b.rank
limit 1
