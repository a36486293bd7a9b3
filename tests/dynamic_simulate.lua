-- What cp = "dynamic" is worth on more GPUs than there are at hand: the placement of drawn documents with the predicted times of
-- the model's programs, beside one size for all documents.
--   mlua check tests/dynamic_simulate.lua --mesh dp=64 --device h100 longest=8192
-- 12 layers, 2048 wide; lengths lognormal, mean 1024, sigma 1.5, from 128 to `longest`, at most 2,048 tokens of a sequence a rank, 8
-- microbatches. The static layout has every rank in groups of longest / 2048, each with windows of whole documents.
local core = require "mlua.core"
local m = require "mlua"
local dynamic = require "mlua.dynamic"
local options_of = require "mlua.train_options"
local step_of = require "mlua.train_step"

local cfg = m.config { longest = 8192, each = 2048, least = 128, mean = 1024, sigma = 1.5, layers = 12, embed = 2048, heads = 16, ffn = 5632, vocab = 32000, steps = 20 }
local layout = m.layout.megatron { cp = "dynamic" }
m.use_layout(layout)
local groups = m.context_groups()
local accum = 8
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, head_dim = cfg.embed // cfg.heads, ffn = cfg.ffn, vocab = cfg.vocab, seq = cfg.longest,
  batch = accum * groups.ranks * cfg.each // cfg.longest,
}
local Block = m.module("Block", function(self)
  self.norm1, self.norm2 = m.rms_norm { A.embed }, m.rms_norm { A.embed }
  self.wq, self.wk = m.param { A.embed, A.heads, A.head_dim }, m.param { A.embed, A.heads, A.head_dim }
  self.wv, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
  self.gate, self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function Block:forward(x)
  local h = self.norm1(x)
  local q, k, v = h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")
  x = x + m.attention(m.rope(q), m.rope(k), v, { causal = true }):dot(self.wo, "heads", "head_dim")
  local y = self.norm2(x)
  return x + m.swiglu(y:dot(self.gate, "embed"), y:dot(self.up, "embed")):dot(self.down, "ffn")
end
local Net = m.module("Net", function(self)
  self.table, self.blocks, self.norm = m.param { A.vocab, A.embed }, m.stack(cfg.layers, Block), m.rms_norm { A.embed }
end)
function Net:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.table, "embed")
end

local o = options_of.complete { model = Net(), batch = A.batch, seq = A.seq, accum = accum, pack = "document", layout = layout, steps = 1 }
local rows, finish = step_of.dynamic_step(o)
local update = finish:cost()
local costs = dynamic.costs(o, rows)
local placement = core.placement(costs)

local root = core.options().script:match "^(.*)tests/" or ""
local draw = dofile(root .. "tests/lua/lib/lognormal.lua")(cfg.mean, cfg.sigma, cfg.least, cfg.longest)

-- A batch of windows of whole documents, with a shorter one at the end of each; the lengths of each window.
local function windows(host)
  local at, number, ahead, all = 1, 0, {}, {}
  for w = 1, A.batch.size do
    local left, lengths, i = cfg.longest, {}, 1
    for _ = #ahead, 200 do ahead[#ahead + 1] = draw() end
    while left > 0 do
      while i <= #ahead and ahead[i] > left do i = i + 1 end
      local length = i <= #ahead and table.remove(ahead, i) or left
      number, left, lengths[#lengths + 1] = number + 1, left - length, length
      for _ = 1, length do host[at], at = number, at + 1 end
    end
    all[w] = lengths
  end
  return all
end

-- A window on a static group of all sizes' largest: its program's time, of the attention what the documents need.
local largest = costs.groups[#costs.groups]
local row = largest.rows[#largest.rows]
local function static_seconds(lengths)
  local pairs = 0
  for _, length in ipairs(lengths) do pairs = pairs + length * length end
  return row.seconds - row.attention * (1 - pairs / (cfg.longest * cfg.longest))
end

local host = core.host("i32", A.batch.size, cfg.longest)
local sums, static, planned = { busiest = 0, mean = 0, tokens = 0, computed = 0 }, 0, 0
for _ = 1, cfg.steps do
  local all = windows(host)
  local began = os.clock()
  local _, facts = placement:plan(host)
  planned = planned + os.clock() - began
  for name in pairs(sums) do sums[name] = sums[name] + facts[name] end
  local waits = {} -- groups take windows in turns
  for w, lengths in ipairs(all) do
    local g = (w - 1) % (groups.ranks // largest.ranks) + 1
    waits[g] = (waits[g] or 0) + static_seconds(lengths)
  end
  local busiest = 0
  for _, seconds in ipairs(waits) do busiest = math.max(busiest, seconds) end
  static = static + busiest
end
local n = cfg.steps
-- The static throughputs at cp=1 on documents of up to `each` tokens, at the largest size on longer ones.
local function documents(length, longer)
  local lengths, left = {}, length
  while left > 0 do
    local l = draw()
    if (l > cfg.each) == longer then
      l = math.min(l, left)
      left, lengths[#lengths + 1] = left - l, l
      longer = false
    end
  end
  return lengths
end
local function pairs_of(lengths)
  local sum = 0
  for _, l in ipairs(lengths) do sum = sum + l * l end
  return sum
end
local one = costs.groups[1].rows[#costs.groups[1].rows]
local short, long = 0, 0
for _ = 1, 2000 do
  short = short + one.seconds - one.attention * (1 - pairs_of(documents(cfg.each, false)) / cfg.each ^ 2)
  long = long + static_seconds(documents(cfg.longest, true))
end
short, long = short / 2000 * accum + update, long / 2000 * accum + update
local all, in_long = 0, 0
for _ = 1, 20000 do
  local l = draw()
  all, in_long = all + l, in_long + (l > cfg.each and l or 0)
end
local share = in_long / all
print(("static short %.1f ms a step, long %.1f, share of long %.3f, harmonic %.1f; dynamic is %.3f of it"):format(1e3 * short, 1e3 * long, share,
  1e3 * ((1 - share) * short + share * long), ((1 - share) * short + share * long) / (sums.busiest / n + update)))
local n = cfg.steps
print(("%d ranks, sequences up to %d: static cp=%d %.1f ms a step, dynamic %.1f ms, ratio %.3f; with the update of %.1f ms %.3f"):format(
  groups.ranks, cfg.longest, largest.ranks, 1e3 * static / n, 1e3 * sums.busiest / n, static / sums.busiest, 1e3 * update,
  (static + n * update) / (sums.busiest + n * update)))
print(("filling %.1f%%, busiest rank %.3f of the average, %.2f ms a plan"):format(
  100 * (1 - sums.tokens / sums.computed), sums.busiest / sums.mean, 1e3 * planned / n))
