select generation, outcomes, row_digests, row_statuses, sqlstates, messages,
       now() as received_at, pg_current_xact_id_if_assigned()::text as transaction
from hapax.record($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19,
                  $20 * interval '1 millisecond', $21, $22, $23, $24, $25, $26)
