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
    ('execute on hapax.record', (
        select bool_and(has_function_privilege(p.oid, 'execute'))
        from pg_catalog.pg_proc p
        where p.pronamespace = 'hapax'::regnamespace
            and p.proname in ('record', 'record_guarded', 'close', 'generation', 'hash_of', 'readable')))
) as wanted(what, held)
where not wanted.held
