-- $1 queues.
select pg_notify('hapax_work', u.queue) from unnest($1::text[]) as u(queue)
