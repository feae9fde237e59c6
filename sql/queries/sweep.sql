-- $1 queue, $2 at most.
select unnest(hapax.sweep($1, $2)) as key
