-- In one order, so that gateways that start together wait for each other and never deadlock.
insert into hapax.key_rule (source, fingerprint, rule)
select source, fingerprint, rule
from unnest($1::text[], $2::bytea[], $3::text[]) as given (source, fingerprint, rule)
order by source
on conflict (source) do nothing
