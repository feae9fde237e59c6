-- $1 queue, $2 worker, $3 under way, $4 total, $5 for how long in ms.
select hapax.share_of($1, $2::text::uuid, $3, $4, $5 * interval '1 millisecond') as granted
