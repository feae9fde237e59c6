-- What `hapax dev` shows: a business table, and the effect that writes to it.
-- There is no unique constraint on the event: if it took effect twice, it would stand here twice.

create schema demo;

create table demo.payment (
    event_id text not null,
    amount bigint not null,
    currency text not null,
    paid_at timestamptz not null
);

create function demo.apply_payment(e hapax.event) returns void
    language plpgsql volatile as
$$
declare
    event constant jsonb := hapax.json(e);
begin
    if e.event_type = 'payment_intent.succeeded' then
        insert into demo.payment (event_id, amount, currency, paid_at)
        values (e.event_id,
                (event #>> '{data,object,amount}')::bigint,
                event #>> '{data,object,currency}',
                coalesce(e.provider_time, e.received_at));
    end if;
end
$$;
