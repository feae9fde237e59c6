-- Whether there is an event of a source ($1), or a job in a queue ($2).
select case when $1::text is not null then exists (select from hapax.ledger l where l.source = $1)
    else exists (select from hapax.job j where j.queue = $2::text) end as known
