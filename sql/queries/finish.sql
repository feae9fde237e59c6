-- $1 keys, $2 queues, $3 tokens, $4 results, $5 errors, $6 delays in ms, $7 wait for no job's lock.
select mine, events, digests, generation from hapax.finish($1, $2, $3::text[]::uuid[], $4, $5, $6, $7)
