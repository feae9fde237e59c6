-- What the role lacks of the rights that recording needs; empty if nothing. For a schema that is there.
select coalesce(string_agg(wanted.what, ', '), '') as lacking
from (values
    ('select on hapax.installation', has_table_privilege('hapax.installation', 'select')),
    ('select on hapax.ledger', has_table_privilege('hapax.ledger', 'select')),
    ('insert on hapax.ledger', has_table_privilege('hapax.ledger', 'insert')),
    ('update on hapax.ledger', has_table_privilege('hapax.ledger', 'update')),
    ('delete on hapax.ledger', has_table_privilege('hapax.ledger', 'delete')),
    ('insert on hapax.body', has_table_privilege('hapax.body', 'insert')),
    ('select on hapax.key_rule', has_table_privilege('hapax.key_rule', 'select')),
    ('insert on hapax.key_rule', has_table_privilege('hapax.key_rule', 'insert')),
    ('select on hapax.guard', has_table_privilege('hapax.guard', 'select')),
    ('insert on hapax.guard', has_table_privilege('hapax.guard', 'insert')),
    ('delete on hapax.guard', has_table_privilege('hapax.guard', 'delete')),
    ('select on hapax.job', has_table_privilege('hapax.job', 'select')),
    ('insert on hapax.job', has_table_privilege('hapax.job', 'insert')),
    ('update on hapax.job', has_table_privilege('hapax.job', 'update')),
    ('delete on hapax.job', has_table_privilege('hapax.job', 'delete')),
    ('select on hapax.body', has_table_privilege('hapax.body', 'select')),
    ('select on hapax.body_kept', has_table_privilege('hapax.body_kept', 'select')),
    ('insert on hapax.body_kept', has_table_privilege('hapax.body_kept', 'insert')),
    ('select on hapax.mismatch', has_table_privilege('hapax.mismatch', 'select')),
    ('insert on hapax.mismatch', has_table_privilege('hapax.mismatch', 'insert')),
    ('select on hapax.share', has_table_privilege('hapax.share', 'select')),
    ('insert on hapax.share', has_table_privilege('hapax.share', 'insert')),
    ('update on hapax.share', has_table_privilege('hapax.share', 'update')),
    ('delete on hapax.share', has_table_privilege('hapax.share', 'delete')),
    ('execute on hapax.record', (
        select bool_and(has_function_privilege(p.oid, 'execute'))
        from pg_catalog.pg_proc p
        where p.pronamespace = 'hapax'::regnamespace
            and p.proname in ('record', 'record_guarded', 'close', 'generation', 'hash_of', 'readable', 'rearm',
                'status_of', 'take_from', 'finish', 'hold', 'share_of', 'bury', 'sweep', 'run_parked', 'begin_parked', 'end_parked', 'add_jobs'))),
    ('execute on hapax.retain_state and the other functions of that name', (
        select bool_and(has_function_privilege(p.oid, 'execute'))
        from pg_catalog.pg_proc p
        where p.pronamespace = 'hapax'::regnamespace and p.proname like 'retain\_%'))
) as wanted(what, held)
where not wanted.held
