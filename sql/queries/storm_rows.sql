-- The ledger's rows of one run of `hapax storm`: those of its source since it began that have its prefix in the id.
select l.event_id, l.digest, l.status::text as status
from hapax.ledger l
where l.received_at >= $1
  and l.source = $2
  and position($3 in l.event_id) > 0
