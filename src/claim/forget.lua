-- Deletes a done marker only: a lease belongs to a delivery that is under way. What is no string is nobody's here.
local value = redis.pcall('get', KEYS[1])
if type(value) == 'string' and string.sub(value, 1, 2) == 'D ' then
    return redis.call('del', KEYS[1])
end
return 0
