-- What the gateway has to know: the secrets taken, and which sources have a window that a secret may still be taken in
-- or was just taken in, by the database's clock.
select h.source, h.secret, h.closed_at is null and h.open_until > clock_timestamp() as open
from hapax.handshake h
where h.secret is not null or (h.closed_at is null and h.open_until > clock_timestamp())
order by h.source, h.number
limit 10000
