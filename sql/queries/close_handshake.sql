-- Closes the source's window: $1.
update hapax.handshake h
set closed_at = greatest(clock_timestamp(), h.opened_at, h.taken_at)
where h.source = $1 and h.closed_at is null and h.open_until > clock_timestamp()
