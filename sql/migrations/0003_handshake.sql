-- expand: windows in which a provider may hand over the secret that it signs with

-- A row is a window that an operator opened, and the one secret that was taken in it. A secret is stored here and nowhere
-- else; nothing replaces it.
create table hapax.handshake (
    number bigint generated always as identity primary key,
    source text not null check (octet_length(source) between 1 and 63),
    opened_at timestamptz not null default clock_timestamp(),
    open_until timestamptz not null,
    closed_at timestamptz,
    secret text check (octet_length(secret) between 16 and 256),
    taken_at timestamptz,
    shown_at timestamptz,
    constraint lasts_a_day_at_most check (open_until > opened_at and open_until <= opened_at + interval '1 day'),
    constraint taken check ((secret is null) = (taken_at is null)),
    constraint taken_while_open check (taken_at between opened_at and least(open_until, closed_at)),
    constraint shown_after_taken check (shown_at >= taken_at and (shown_at is null or taken_at is not null)),
    unique (source, secret)
);
comment on table hapax.handshake is
    'Secrets that providers handed over while `hapax handshake open` held a window open. Whoever may read it can sign events.';
create unique index handshake_open on hapax.handshake (source) where secret is null and closed_at is null;

-- Takes a secret if the source's window is open and none was taken in it; says what came of it: taken | known | spent |
-- closed. The window's row is locked, so that of two secrets at once the second one meets what the first one left.
create function hapax.take_handshake(of_source text, handed text, durability text) returns text
language plpgsql as $$
declare
    newest hapax.handshake;
begin
    perform set_config('synchronous_commit', durability, true);
    if exists (select from hapax.handshake h where h.source = of_source and h.secret = handed) then
        return 'known';
    end if;
    select * into newest from hapax.handshake h where h.source = of_source order by h.number desc limit 1 for update;
    if not found or newest.closed_at is not null or newest.open_until <= clock_timestamp() then
        return 'closed';
    elsif newest.secret is not null then
        return case when newest.secret = handed then 'known' else 'spent' end;
    end if;
    update hapax.handshake h set secret = handed, taken_at = greatest(clock_timestamp(), h.opened_at)
    where h.number = newest.number;
    return 'taken';
end
$$;
comment on function hapax.take_handshake is 'Called by the gateway, for a secret that it has not verified.';
