-- Grants units of shared limits to gateways. `argosy.policy.leased_quota` documents the requests and grants.
-- KEYS: the last reply to this gateway; sorted set of live gateways; then one key for each request.
-- ARGV: msgpack of {gateway, number, alive_s, asks}. Returns msgpack of {gateways, grants}.

local message = cmsgpack.unpack(ARGV[1])
local last = redis.call('HMGET', KEYS[1], 'number', 'answer')
if last[1] == tostring(message.number) then
  return last[2] -- the message was processed, but its reply was lost
end

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZADD', KEYS[2], now + message.alive_s, message.gateway)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
-- If the clock was set back, dead gateways would count as alive until it reaches the old time again.
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], now + 12 * message.alive_s, '+inf')) do
  redis.call('ZADD', KEYS[2], now + message.alive_s, gateway)
end
local gateways = redis.call('ZCARD', KEYS[2])

-- Units to grant of `room`: the needed units as far as available, and a share of the rest in advance.
local function share(ask, room)
  local granted = math.min(ask.need, math.max(0, room))
  local rest = math.max(0, room - granted)
  return granted + math.min(ask.ahead, math.floor(rest / (2 * gateways)))
end

-- Grants units of a sliding window, counted in 60 slots, or of a calendar period, counted in one slot.
local function window(ask, key)
  local sliding = ask.kind == 'window'
  local slot, oldest, latest, width = ask.slot, ask.slot, math.huge, 0
  if sliding then
    width = ask.seconds / 60
    slot = math.floor(now / width)
    oldest = math.floor((now - ask.lease_s) / width) - 60
    latest = slot + 60 -- later slots were counted before the clock was set back
  end

  local slots, used, known, future = {}, 0, false, 0
  local own, own_held, dead_held = 'held:' .. message.gateway, 0, 0
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    local at = tonumber(fields[i])
    if fields[i] == own then
      own_held = tonumber(fields[i + 1])
    elseif at == nil and fields[i]:sub(1, 5) == 'held:' then
      if not redis.call('ZSCORE', KEYS[2], fields[i]:sub(6)) then
        dead_held = dead_held + tonumber(fields[i + 1])
        redis.call('HDEL', key, fields[i])
      end
    elseif at == nil then
      known = true
    elseif at < oldest then
      redis.call('HDEL', key, fields[i])
    elseif at > latest then
      redis.call('HDEL', key, fields[i])
      future = future + tonumber(fields[i + 1])
    else
      slots[at] = tonumber(fields[i + 1])
      used = used + slots[at]
      slot = math.max(slot, at)
    end
  end

  local function count(at, amount)
    slots[at] = (slots[at] or 0) + amount
    used = used + amount
    redis.call('HSET', key, at, slots[at])
  end

  if future > 0 then
    count(slot, future)
  end
  -- The units that this gateway held were freed if it seemed dead, and those of dead ones are free now.
  if ask.was_held ~= own_held or dead_held > 0 then
    count(slot, math.max(ask.was_held - own_held - dead_held, -(slots[slot] or 0)))
  end
  for _, back in ipairs(ask.back) do
    if slots[back[1]] then
      count(back[1], -back[2])
    end
  end
  -- Counts past usage, given as pairs of age in seconds and units.
  local function count_past(aged)
    for _, pair in ipairs(aged) do
      local at = sliding and math.floor((now - pair[1]) / width) or slot
      if at >= oldest then
        count(at, pair[2])
      end
    end
  end
  if ask.seeds and not known then
    count_past(ask.seeds)
    known = true
  end
  count_past(ask.owed)
  local room = ask.limit - used
  local granted = share(ask, room)
  if granted < ask.need and ask.overdraft > 0 and room >= ask.overdraft_above then
    granted = math.min(ask.need, room + ask.overdraft) -- then no unit is free until some are returned
  end
  if granted > 0 then
    count(slot, granted)
  end
  if ask.held and ask.held + granted > 0 then
    redis.call('HSET', key, own, ask.held + granted)
  elseif own_held > 0 then
    redis.call('HDEL', key, own)
  end
  if known then
    redis.call('HSET', key, 'known', 1)
  end
  redis.call('EXPIRE', key, math.ceil(ask.keep_s))

  local wait, reset = 0, 0
  if sliding then
    local order = {}
    for at in pairs(slots) do
      order[#order + 1] = at
    end
    table.sort(order)
    local missing = ask.need - math.max(0, room)
    for _, at in ipairs(order) do
      reset = (at + 1) * width + ask.seconds + ask.lease_s - now
      if missing > 0 then
        missing = missing - slots[at]
        wait = reset
      end
    end
  end
  return { granted = granted, slot = slot, used = used, wait_s = wait, reset_s = reset, known = known }
end

-- Grants concurrency slots. A gateway holds its slots as long as it is alive.
local function concurrency(ask, key)
  local others = 0
  local held = redis.call('HGETALL', key)
  for i = 1, #held, 2 do
    if held[i] ~= message.gateway then
      if redis.call('ZSCORE', KEYS[2], held[i]) then
        others = others + tonumber(held[i + 1])
      else
        redis.call('HDEL', key, held[i])
      end
    end
  end
  local granted = share(ask, ask.limit - others - ask.kept)
  local mine = ask.kept + granted
  if mine > 0 then
    redis.call('HSET', key, message.gateway, mine)
    redis.call('EXPIRE', key, math.ceil(ask.keep_s))
  else
    redis.call('HDEL', key, message.gateway)
  end
  return { granted = granted, slot = 0, used = others + mine, wait_s = 0, reset_s = 0, known = true }
end

local grants = {}
for i, ask in ipairs(message.asks) do
  grants[i] = (ask.kind == 'slots' and concurrency or window)(ask, KEYS[2 + i])
end
local answer = cmsgpack.pack({ gateways = gateways, grants = grants })
redis.call('HSET', KEYS[1], 'number', message.number, 'answer', answer)
redis.call('EXPIRE', KEYS[1], 3600)
return answer
