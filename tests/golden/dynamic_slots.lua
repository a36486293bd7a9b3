-- args: check SCRIPT --mesh pp=2,cp=3
-- Pipeline stages under cp = "dynamic": documents a little longer than half a row of all three ranks need a slot each, and so do those
-- that a bound of a rank's tokens has on short rows. The schedule has them.
local core, m, dynamic = require "mlua.core", require "mlua", require "mlua.dynamic"
local host = core.host("i32", 24, 112)
for i = 1, 24 * 112 do host[i] = (i - 1) // 112 end
for _, case in ipairs { { parts = 16 }, { parts = 4, tokens = 40 } } do
  m.use_layout(m.layout.megatron { cp = "dynamic", cp_tokens = case.tokens })
  local o = { batch = core.axis("batch", 24), seq = core.axis("seq", 112), pack = "document" }
  local d = dynamic.read(o, case.parts)
  local costs = { ranks = d.ranks, most = d.tokens or 0, rank = 0, batch = d.batch, slots = d.slots, together = d.together, groups = {} }
  for i, group in ipairs(d.groups) do
    local rows = {}
    for k, tokens in ipairs(group.lengths) do rows[k] = { tokens = tokens, rows = 1, seconds = 1e-6 * tokens, attention = 1e-7 * tokens } end
    costs.groups[i] = { ranks = group.ranks, rows = rows }
  end
  local _, facts = core.placement(costs):plan(host)
  local lengths = d.groups[#d.groups].lengths
  print(("%d tokens a rank, %d on all three: %d slots for 24 documents of 112, at most %d"):format(
    d.tokens or d.most, lengths[#lengths], facts.slots, d.most_slots))
end
