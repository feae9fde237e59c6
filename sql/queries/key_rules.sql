select source, fingerprint, rule, to_char(since at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"') as since
from hapax.key_rule
