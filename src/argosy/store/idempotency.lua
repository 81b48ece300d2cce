-- Writes a value under an idempotency key, unless another claim holds the key. Then returns the existing value.
-- KEYS: the key; sorted set of all responses by time of writing; counter of their bytes.
-- ARGV: the caller's claim; the value (the claim itself, a response, or empty to free the key);
-- its TTL in ms; the maximum number of bytes of all responses.

local key, responses, bytes = KEYS[1], KEYS[2], KEYS[3]
local claim, value, ttl_ms, max_bytes = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local existing = redis.call('GET', key)
if existing and existing ~= claim then
  return existing
end
if value == '' then
  redis.call('DEL', key)
  return false
end
redis.call('SET', key, value, 'PX', ttl_ms)
if value == claim then
  return false
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('EXISTS', responses) == 0 then
  redis.call('DEL', bytes)
end
-- An expired response with the same key and size may still be in the set. Its bytes are counted already.
local added = redis.call('ZADD', responses, now, #value .. ' ' .. key)
local sum = redis.call('INCRBY', bytes, added * #value)
while true do
  local oldest = redis.call('ZRANGE', responses, 0, 0, 'WITHSCORES')
  if not oldest[1] then
    break
  end
  local expired = tonumber(oldest[2]) <= now - ttl_ms
  if sum <= max_bytes and not expired then
    break
  end
  local size, oldest_key = oldest[1]:match('^(%d+) (.*)$')
  redis.call('ZREM', responses, oldest[1])
  if not expired then -- after expiry another claim may hold the key
    redis.call('DEL', oldest_key)
  end
  sum = redis.call('DECRBY', bytes, size)
end
redis.call('PEXPIRE', responses, ttl_ms)
redis.call('PEXPIRE', bytes, ttl_ms)
return false
