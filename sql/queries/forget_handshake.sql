-- Forgets the source's windows, and its secrets if all of them were shown: $1.
with unshown as (
    select count(*) as count from hapax.handshake h
    where h.source = $1 and h.secret is not null and h.shown_at is null
), gone as (
    delete from hapax.handshake h where h.source = $1 and (select count from unshown) = 0
    returning h.secret
)
select (select count from unshown) as unshown, (select count(gone.secret) from gone) as forgotten
