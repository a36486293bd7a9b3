-- The documents that tests/dynamic.sh trains on: lognormal lengths, those outside of the bounds drawn anew, each whole in a window.
--   mlua run tests/dynamic_lengths.lua out=DIR least=128 most=4096 each=2048
-- Files of tokens, Megatron's, whose windows hold whole documents and, where no other fits, one shorter than `least`: all.bin has
-- windows of `most` tokens; cp1.bin, cp2.bin, cp4.bin ... windows of 1, 2, 4 times `each` for documents that need so many ranks,
-- filled up with documents of up to `each`. Prints the share of tokens in documents of each class, and of those that fill windows up.
local m = require "mlua"
local core = require "mlua.core"
local cfg = m.config { out = ".", least = 128, most = 4096, each = 2048, mean = 1024, sigma = 1.5, windows = 400, seed = 1 }
if cfg.least < 1 or cfg.least > math.min(cfg.each, cfg.most) then -- documents of up to `each` tokens fill windows up
  core.fail(("least=%g is not from 1 to each=%g and most=%g, so that no document could be drawn"):format(cfg.least, cfg.each, cfg.most), {
    help = "a smaller least=, or a larger each= or most=",
  })
end

local root = core.options().script:match "^(.*)tests/" or ""
local draw = dofile(root .. "tests/lua/lib/lognormal.lua")(cfg.mean, cfg.sigma, cfg.least, cfg.most)

local function document(length)
  local ids = {}
  for i = 1, length do ids[i] = math.random(0, 31999) end
  return ids
end

-- Windows of `size` tokens: the next document that was drawn and, of the `ahead` ones after it, whichever fit.
local function windows(size, next_first, next_fill)
  local documents, filled, ahead = {}, 0, {}
  for _ = 1, cfg.windows do
    local left = size
    local function put(length)
      documents[#documents + 1] = document(length)
      left = left - length
    end
    put(next_first(ahead))
    for _ = #ahead, 200 do ahead[#ahead + 1] = next_fill() end
    local i = 1
    while i <= #ahead do
      if ahead[i] <= left then put(table.remove(ahead, i)) else i = i + 1 end
    end
    if left > 0 then
      filled = filled + left
      put(left)
    end
  end
  return documents, filled / (cfg.windows * size)
end

-- Draws documents of more than `above` and at most `most` tokens.
local function between(above, most)
  return function()
    while true do
      local length = draw()
      if length > above and length <= most then return length end
    end
  end
end

local function write(name, documents) m.write_tokens(cfg.out .. "/" .. name .. ".bin", documents, { format = "megatron" }) end

if m.rank() == 0 then
  local all, filled = windows(cfg.most, function(ahead) return table.remove(ahead, 1) or draw() end, draw)
  write("all", all)
  local tokens, shares, ranks, short = 0, {}, 1, between(0, cfg.each)
  for _, d in ipairs(all) do tokens = tokens + #d end
  while true do
    local above, most, own = ranks > 1 and cfg.each * ranks // 2 or 0, cfg.each * ranks, 0
    for _, d in ipairs(all) do
      if #d > above and #d <= most then own = own + #d end
    end
    local first = between(above, most)
    write("cp" .. ranks, (windows(most, ranks > 1 and first or function(ahead) return table.remove(ahead, 1) or first() end, short)))
    shares[#shares + 1] = ("cp%d %.4f"):format(ranks, own / tokens)
    if most >= cfg.most then break end
    ranks = ranks * 2
  end
  print(("%d documents; shares of tokens: %s; %.4f fill windows up"):format(#all, table.concat(shares, ", "), filled))
end
