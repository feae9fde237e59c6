-- expand: who cleans keeps the place, whoever asks for it meanwhile

-- Whether the worker may clean: for the length of the transaction nobody else does, and after it for the time of hold.
-- Both are needed, since no lock outlives a transaction behind a pooler.
--
-- Whoever has the place waits for one that asked for it just now and does not get it; one that has not gives up at once.
create or replace function hapax.retain_hold(of_worker uuid, hold interval, out held boolean, out at double precision)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as
$$
declare
    place constant bigint := hashtextextended('hapax retention', 0);
begin
    at := extract(epoch from clock_timestamp());
    if exists (select from hapax.retention r where r.worker = of_worker and r.held_until >= clock_timestamp()) then
        perform pg_advisory_xact_lock(place);
        held := true;
    else
        held := pg_try_advisory_xact_lock(place);
    end if;
    if held then
        update hapax.retention r set worker = of_worker, held_until = clock_timestamp() + hold
        where r.worker = of_worker or r.held_until < clock_timestamp()
            -- Or else a clock that is set back leaves the place to nobody.
            or r.held_until > clock_timestamp() + interval '1 hour';
        held := found;
    end if;
end
$$;
