-- What the generation is made of, for operators. A part that may not be read is null.
select hapax.generation() as generation,
       (select epoch::text from hapax.installation) as epoch,
       hapax.readable('(pg_control_system()).system_identifier') as system,
       hapax.readable('substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)') as timeline,
       to_char(pg_postmaster_start_time() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as started,
       pg_relation_filepath('hapax.ledger') as ledger
