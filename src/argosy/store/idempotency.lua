-- Puts something under a name, unless somebody else holds it: then that is returned.
-- KEYS: the name; all answers, by when they were put there; how many bytes they have.
-- ARGV: the claim of who asks; what to put (the claim itself, an answer, or nothing: the name is free again);
-- how many ms it stays there; how many bytes all answers may have.

local name, all, bytes = KEYS[1], KEYS[2], KEYS[3]
local claim, put, ms, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local held = redis.call('GET', name)
if held and held ~= claim then
  return held
end
if put == '' then
  redis.call('DEL', name)
  return false
end
redis.call('SET', name, put, 'PX', ms)
if put == claim then
  return false
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('EXISTS', all) == 0 then
  redis.call('DEL', bytes)
end
-- One of the same name and size that has expired may be there still: then it is counted already.
local added = redis.call('ZADD', all, now, #put .. ' ' .. name)
local sum = redis.call('INCRBY', bytes, added * #put)
while true do
  local oldest = redis.call('ZRANGE', all, 0, 0, 'WITHSCORES')
  if not oldest[1] then
    break
  end
  local gone = tonumber(oldest[2]) <= now - ms
  if sum <= most and not gone then
    break
  end
  local size, of = oldest[1]:match('^(%d+) (.*)$')
  redis.call('ZREM', all, oldest[1])
  if not gone then -- else it has expired, and the name may be somebody's again
    redis.call('DEL', of)
  end
  sum = redis.call('DECRBY', bytes, size)
end
redis.call('PEXPIRE', all, ms)
redis.call('PEXPIRE', bytes, ms)
return false
