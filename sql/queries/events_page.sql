    -- $13 newest first   $14 and $15: the last one of the page before   $16 how many
    and ($14::timestamptz is null or case
        when $13::boolean then l.received_at <= $14 and (l.received_at, l.key) < ($14, $15::bytea)
        else l.received_at >= $14 and (l.received_at, l.key) > ($14, $15::bytea)
    end)
order by
    case when not $13 then l.received_at end, case when not $13 then l.key end,
    l.received_at desc, l.key desc
limit $16::bigint
