-- $1 key, $2 queue, $3 token.
select hapax.begin_parked($1, $2, $3::text::uuid) as transaction
