-- $1 keys, $2 queues, $3 tokens, $4 lease in ms.
select hapax.hold($1, $2, $3::text[]::uuid[], $4 * interval '1 millisecond') as mine
