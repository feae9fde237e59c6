insert into hapax.key_rule as stored (source, fingerprint, rule)
select source, fingerprint, rule
from unnest($1::text[], $2::bytea[], $3::text[]) as given (source, fingerprint, rule)
order by source
on conflict (source) do update
set fingerprint = excluded.fingerprint, rule = excluded.rule, since = excluded.since
where stored.fingerprint <> excluded.fingerprint
