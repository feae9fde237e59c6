-- The other bodies that came under an event's id: $1 its key.
select m.digest, m.seen_at from hapax.mismatch m where m.key = $1 order by m.seen_at
