-- Secrets of the source that were never shown, which they are now: $1.
update hapax.handshake h
set shown_at = greatest(clock_timestamp(), h.taken_at)
where h.source = $1 and h.secret is not null and h.shown_at is null
returning h.secret, to_char(h.taken_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') as taken_at
