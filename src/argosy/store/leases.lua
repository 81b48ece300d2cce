-- Grants units of limits to gateways; `argosy.policy.leases` says what is asked and answered, and why.
-- KEYS: what this gateway was told last; who is alive; then one for each ask.
-- ARGV: msgpack of {gateway, number, alive_s, asks}. The answer: msgpack of {gateways, grants}.

local message = cmsgpack.unpack(ARGV[1])
local told = redis.call('HMGET', KEYS[1], 'number', 'answer')
if told[1] == tostring(message.number) then
  return told[2] -- it was heard; the answer got lost
end

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZADD', KEYS[2], now + message.alive_s, message.gateway)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
-- Where the clock was set back, who has died would be alive until it is there again.
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], now + 12 * message.alive_s, '+inf')) do
  redis.call('ZADD', KEYS[2], now + message.alive_s, gateway)
end
local gateways = redis.call('ZCARD', KEYS[2])

-- What of `room` is granted: what is needed as far as it goes, and a share of the rest.
local function share(ask, room)
  local granted = math.min(ask.need, math.max(0, room))
  local rest = math.max(0, room - granted)
  return granted + math.min(ask.ahead, math.floor(rest / (2 * gateways)))
end

-- Units over a sliding window (in 60 slots), or in a period (in one).
local function units(ask, key)
  local sliding = ask.kind == 'window'
  local slot, oldest, latest, width = ask.slot, ask.slot, math.huge, 0
  if sliding then
    width = ask.seconds / 60
    slot = math.floor(now / width)
    oldest = math.floor((now - ask.lease_s) / width) - 60
    latest = slot + 60 -- what is beyond was counted before the clock was set back
  end

  local slots, used, known, ahead = {}, 0, false, 0
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    local at = tonumber(fields[i])
    if at == nil then
      known = true
    elseif at < oldest then
      redis.call('HDEL', key, fields[i])
    elseif at > latest then
      redis.call('HDEL', key, fields[i])
      ahead = ahead + tonumber(fields[i + 1])
    else
      slots[at] = tonumber(fields[i + 1])
      used = used + slots[at]
      slot = math.max(slot, at)
    end
  end

  local function count(at, more)
    slots[at] = (slots[at] or 0) + more
    used = used + more
    redis.call('HSET', key, at, slots[at])
  end

  if ahead > 0 then
    count(slot, ahead)
  end
  for _, back in ipairs(ask.back) do
    if slots[back[1]] then
      count(back[1], -back[2])
    end
  end
  local function recall(aged)
    for _, one in ipairs(aged) do
      local at = sliding and math.floor((now - one[1]) / width) or slot
      if at >= oldest then
        count(at, one[2])
      end
    end
  end
  if ask.seeds and not known then
    recall(ask.seeds)
    known = true
  end
  recall(ask.owed)
  local room = ask.limit - used
  local granted = share(ask, room)
  if granted > 0 then
    count(slot, granted)
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
    local short = ask.need - math.max(0, room)
    for _, at in ipairs(order) do
      reset = (at + 1) * width + ask.seconds + ask.lease_s - now
      if short > 0 then
        short = short - slots[at]
        wait = reset
      end
    end
  end
  return { granted = granted, slot = slot, used = used, wait_s = wait, reset_s = reset, known = known }
end

-- Places for what runs at a time: each gateway's own, as long as it is alive.
local function places(ask, key)
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
  grants[i] = (ask.kind == 'slots' and places or units)(ask, KEYS[2 + i])
end
local answer = cmsgpack.pack({ gateways = gateways, grants = grants })
redis.call('HSET', KEYS[1], 'number', message.number, 'answer', answer)
redis.call('EXPIRE', KEYS[1], 3600)
return answer
