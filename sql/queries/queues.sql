-- The queues in which something waits, each found by one step in the index.
with recursive found as (
    (select j.queue from hapax.job j where j.state = 'pending' order by j.queue limit 1)
    union all
    select (select j.queue from hapax.job j where j.state = 'pending' and j.queue > f.queue order by j.queue limit 1)
    from found f where f.queue is not null
)
select queue from found where queue is not null limit 10000
