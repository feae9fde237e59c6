-- Deletes the lease only if it is still our own: a slow holder must not remove the next holder's.
if redis.call('get', KEYS[1]) == ARGV[1] then
    return redis.call('del', KEYS[1])
end
return 0
