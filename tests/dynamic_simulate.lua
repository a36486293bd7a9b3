-- What cp = "dynamic" is worth on more GPUs than there are at hand: the placement of drawn documents with the predicted times of
-- the model's programs, beside one size for all documents.
--   mlua check tests/dynamic_simulate.lua --mesh dp=64 --device h100 longest=8192
-- 12 layers, 2048 wide; lengths lognormal, mean 1024, sigma 1.5, from 128 to `longest`, 8 microbatches of 2,048 tokens a rank;
-- --layout cp_tokens=2048 bounds a rank's share of a sequence. The static layout has every rank in groups of longest / 2048, each with windows of whole documents. Documents that
-- need 1, 2, 4 ranks are classes: of each its share of tokens, and a step of a static layout of so many ranks that has no others but to
-- fill windows up. These steps weighted by the shares are the harmonic mean of throughputs; the static layout's step over it is what
-- the ratio could be without filling, with even ranks and no more microbatches.
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
local gpu = core.options().device_name
-- The update's sums over ranks go on beside the last microbatch, a row of one rank. A static layout's are taken to do so, too, beside a
-- row of `each` tokens, which they do not where its own ranks exchange keys and values: the ratio is no less than this.
local function update_seconds(finish, row)
  local seconds, _, _, rebuilds = finish:cost(gpu, row.program)
  return seconds + rebuilds
end
local update = update_seconds(finish, dynamic.lead(o, rows))
local costs = dynamic.costs(o, rows, gpu)
local placement = core.placement(costs)

-- Static layouts' rows: cfg.each tokens a rank.
local function whole_rows()
  local d = setmetatable({ groups = {} }, { __index = o.dynamic })
  for g, group in ipairs(o.dynamic.groups) do d.groups[g] = { ranks = group.ranks, lengths = { cfg.each }, several = {} } end
  local static_rows, static_finish = step_of.dynamic_step(setmetatable({ dynamic = d }, { __index = o }))
  return dynamic.costs(o, static_rows, gpu), update_seconds(static_finish, static_rows[1])
end
local whole, static_update = whole_rows()

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

-- Query-key pairs of the rank of `ranks` that has most of a window's: rank r has blocks r and 2 ranks - 1 - r of 2 ranks.
local function most_pairs(lengths, ranks, half)
  local most = 0
  for r = 0, ranks - 1 do
    local start, sum = 0, 0
    for _, length in ipairs(lengths) do
      for _, block in ipairs { r, 2 * ranks - 1 - r } do
        local from, to = math.max(block * half, start) - start, math.min((block + 1) * half, start + length) - start
        if to > from then sum = sum + 0.5 * (to - from) * (from + to + 1) end
      end
      start = start + length
    end
    most = math.max(most, sum)
  end
  return most
end

-- A window of a group of size number g: of the attention what the documents need of the rank that has most of it.
local function window_seconds(g, lengths)
  local group = costs.groups[g]
  local row = whole.groups[g].rows[1]
  return row.seconds - row.attention * (1 - 2 * most_pairs(lengths, group.ranks, row.tokens // 2) / (group.ranks * row.tokens ^ 2))
end
local largest = #costs.groups
local static_groups = groups.ranks // costs.groups[largest].ranks

local host = core.host("i32", A.batch.size, cfg.longest)
local sums, static, planned = { busiest = 0, mean = 0, tokens = 0, computed = 0, mine = 0 }, 0, 0
for _ = 1, cfg.steps do
  local all = windows(host)
  local began = os.clock()
  local mine, facts = placement:plan(host)
  planned = planned + os.clock() - began
  facts.mine = #mine
  for name in pairs(sums) do sums[name] = sums[name] + facts[name] end
  local waits = {} -- groups take windows in turns
  for w, lengths in ipairs(all) do
    local g = (w - 1) % static_groups + 1
    waits[g] = (waits[g] or 0) + window_seconds(largest, lengths)
  end
  local busiest = 0
  for _, seconds in ipairs(waits) do busiest = math.max(busiest, seconds) end
  static = static + busiest
end

-- The class of a document, and windows of one: it begins with a document of the class, and shorter ones fill it up.
local function class_of(length)
  local g = 1
  while costs.groups[g].ranks * cfg.each < length do g = g + 1 end
  return g
end
local function class_window(g)
  local lengths, left = {}, costs.groups[g].ranks * cfg.each
  while left > 0 do
    local l = draw()
    if class_of(l) == g or #lengths > 0 and class_of(l) < g then
      l = math.min(l, left)
      left, lengths[#lengths + 1] = left - l, l
    end
  end
  return lengths
end

local WINDOWS, DOCUMENTS = 2000, 20000
local shares, all, mean = {}, 0, 0
for _ = 1, DOCUMENTS do
  local l = draw()
  local g = class_of(l)
  all, shares[g] = all + l, (shares[g] or 0) + l
end
for g, group in ipairs(costs.groups) do
  local sum = 0
  for _ = 1, WINDOWS do sum = sum + window_seconds(g, class_window(g)) end
  local step = sum / WINDOWS * accum + static_update
  mean = mean + (shares[g] or 0) / all * step
  print(("static cp=%d on documents that need it: %.1f ms a step, %.3f of tokens"):format(group.ranks, 1e3 * step, (shares[g] or 0) / all))
end
local n = cfg.steps
local all_static, placed = static / n + static_update, sums.busiest / n + update
print(("static cp=%d on all: %.1f ms a step, %.1f of them the update"):format(costs.groups[largest].ranks, 1e3 * all_static, 1e3 * static_update))
print(("weighted by shares: %.1f ms a step, the static layout's is %.3f of it"):format(1e3 * mean, all_static / mean))
print(("dynamic: %.1f ms a step, %.1f of them the update, %.3f of the mean's throughput, ratio to static %.3f, %.3f without the update"):format(
  1e3 * placed, 1e3 * update, mean / placed, all_static / placed, static / sums.busiest))
print(("%.1f microbatches on rank 0, filling %.1f%%, busiest rank %.3f of the average, %.2f ms a plan"):format(
  sums.mine / n,   100 * (1 - sums.tokens / sums.computed), sums.busiest / sums.mean, 1e3 * planned / n))
