-- Which events are meant. A parameter that is null asks for nothing; they are folded away when it is planned.
--   $1 source   $2 scope   $3 keys   $4 ids   $5 statuses   $6 done is not among them   $7 type
--   $8 received since   $9 before   $10 came again with another body   $11 queue of a job   $12 most replays
from hapax.ledger l
where ($1::text is null or l.source = $1)
    and ($2::text is null or l.scope = $2)
    and ($3::bytea[] is null or l.key = any ($3))
    and ($4::text[] is null or l.event_id = any ($4))
    and ($5::text[] is null or l.status = any ($5::hapax.status[]))
    -- As the index on what is not done has it.
    and (not $6::boolean or l.status <> 'done')
    and ($7::text is null or l.event_type = $7)
    and ($8::timestamptz is null or l.received_at >= $8)
    and ($9::timestamptz is null or l.received_at < $9)
    and (not $10::boolean or exists (select from hapax.mismatch m where m.key = l.key))
    and ($11::text is null or exists (select from hapax.job j where j.key = l.key and j.queue = $11))
    and ($12::integer is null or l.replay <= $12)
