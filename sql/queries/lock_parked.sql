-- $1 keys, $2 queues, $3 tokens; $4 the group of their effect. What is locked stays so to the end of the transaction.
select hapax.lock_parked($1, $2, $3::text[]::uuid[], $4)
