-- The documents that tests/dynamic.sh trains on: lognormal lengths, those outside of the bounds drawn anew, each whole in a window.
--   mlua run tests/dynamic_lengths.lua out=DIR least=128 most=4096 each=2048
-- Three files of tokens, Megatron's, whose windows of `most` (short.bin: `each`) tokens hold whole documents and, where no other
-- fits, one shorter than `least`: all.bin; short.bin of those up to `each`; long.bin of the longer ones, filled up with short ones.
-- Prints the share of tokens in documents longer than `each`, and of those that fill windows up.
local m = require "mlua"
local cfg = m.config { out = ".", least = 128, most = 4096, each = 2048, mean = 1024, sigma = 1.5, windows = 400, seed = 1 }

local root = require("mlua.core").options().script:match "^(.*)tests/" or ""
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

local function longer(than)
  return function()
    while true do
      local length = draw()
      if (length > cfg.each) == than then return length end
    end
  end
end

local function write(name, documents) m.write_tokens(cfg.out .. "/" .. name .. ".bin", documents, { format = "megatron" }) end

if m.rank() == 0 then
  local all, filled = windows(cfg.most, function(ahead) return table.remove(ahead, 1) or draw() end, draw)
  local long, tokens = 0, 0
  for _, d in ipairs(all) do
    tokens = tokens + #d
    if #d > cfg.each then long = long + #d end
  end
  write("all", all)
  write("short", (windows(cfg.each, function(ahead) return table.remove(ahead, 1) or longer(false)() end, longer(false))))
  write("long", (windows(cfg.most, longer(true), longer(false))))
  print(("%d documents, %.4f of tokens in longer ones than %d, %.4f fill windows up"):format(#all, long / tokens, cfg.each, filled))
end
