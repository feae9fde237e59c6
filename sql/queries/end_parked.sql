-- $1 transaction, $2 commit mode, $3 key, $4 queue, $5 token, $6 result, $7 error; $8 $9 what is left to do once it is done.
select mine, events, digests, generation from hapax.end_parked($1, $2, $3, $4, $5::text::uuid, $6, $7, $8, $9)
