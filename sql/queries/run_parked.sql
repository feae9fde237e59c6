-- $1 keys, $2 queues, $3 tokens, $4 delays in ms; $5 effect, $6 its group, $7 budget in ms, $8 commit mode; $9 $10 $11
-- what is left to do once an effect is done.
select mine, events, digests, generation, outcomes, messages
from hapax.run_parked($1, $2, $3::text[]::uuid[], $4, $5, $6, $7 * interval '1 millisecond', $8, $9, $10, $11)
