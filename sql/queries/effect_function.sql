select
    p.proretset as returns_set,
    p.prorettype = 'void'::regtype as returns_void,
    p.prokind = 'f' as is_function,
    p.provolatile = 'v' as is_volatile,
    has_function_privilege(p.oid, 'execute') as may_execute
from pg_catalog.pg_proc p
where p.oid = to_regprocedure($1)
