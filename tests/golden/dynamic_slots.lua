-- args: check SCRIPT --mesh pp=2,cp=3
-- Pipeline stages under cp = "dynamic": documents that are a little too long for one rank need a slot each, of all three. The schedule has them.
local core, m, dynamic = require "mlua.core", require "mlua", require "mlua.dynamic"
m.use_layout(m.layout.megatron { cp = "dynamic" })
local parts = 16
local o = { batch = core.axis("batch", 42), seq = core.axis("seq", 64), pack = "document" }
local d = dynamic.read(o, parts)
local costs = { ranks = d.ranks, rank = 0, batch = d.batch, slots = d.slots, together = d.together, groups = {} }
for i, group in ipairs(d.groups) do
  local rows = {}
  for k, tokens in ipairs(group.lengths) do rows[k] = { tokens = tokens, seconds = 1e-6 * tokens, attention = 1e-7 * tokens } end
  costs.groups[i] = { ranks = group.ranks, rows = rows }
end
local host = core.host("i32", 42, 64)
for i = 1, 42 * 64 do host[i] = (i - 1) // 64 end
local _, facts = core.placement(costs):plan(host)
print(("%d tokens a rank: %d slots for 42 documents of 64, at most %d"):format(d.most, facts.slots, d.most_slots))
