-- Dispatch to experts by hand: what gives each row a result of its own has an increment, which agrees with the whole program; what only
-- looks like it is refused at its line. An oracle that changes later tokens says which of these look ahead.
local core = require "mlua.core"
local m = require "mlua"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check, drawn = dofile(root .. "tests/lua/lib/check.lua"), dofile(root .. "tests/lua/lib/drawn.lua")
local increments = dofile(root .. "tests/lua/lib/increments.lua")
local A = m.axes { batch = 1, seq = 16, embed = 8, vocab = 13, experts = 3, choices = 2, rows = 32 }
local function param(name, ...) return m.param { name = name, init = 0.7, ... } end
local words, router, other, head = param("words", A.vocab, A.embed), param("router", A.embed, A.experts), param("other", A.embed, A.experts), param("head", A.embed, A.vocab)
local w, bias = param("w", A.experts, A.embed, m.axis("out", 8)), param("bias", A.experts, m.axis("out", 8))
local batch -- of the program that is traced
local line = {} -- of the error that a case names

-- Positions and choices as one axis of rows.
local function joined(t) return t:permute("batch", "seq", "choices"):merge("seq", "choices", "rows") end
local function hits(keys) return core.eq(m.iota(A.experts, "i32"):broadcast { batch, A.rows, A.experts }, keys):cast "i32" end
local function at_line(name, ...)
  line[name] = debug.traceback("", 2):match "increment_rows.lua:(%d+)"
  return ...
end

local function dispatched(h, o)
  local weights, index = m.softmax(h:dot(router, "embed"), "experts"):top_k("experts", 2, A.choices)
  local keys, counted = joined(index), joined(index)
  if o.other_keys then
    local _, third = h:dot(other, "embed"):top_k("experts", 2, A.choices)
    counted = joined(third)
  end
  if o.below_0 then keys, counted = keys - 1, counted - 1 end
  local sorted, order = at_line("sort", keys:sort("rows", { descending = o.descending }))
  local counts = at_line("sum", hits(counted):sum "rows")
  local ends = counts:cumsum "experts"
  local x = h:rename("seq", "tokens"):gather(order // 2, "tokens")
  if o.index then x = x + order:cast "f32" * 1e-2 end
  if o.mean then x = x - x:mean "rows" end
  local y = x:ragged_dot(w, "embed", o.bounds and ends or ends - counts, ends)
  if o.bias then y = y + bias:gather(sorted, "experts") end
  y = m.tanh(y) * joined(weights):gather(order, "rows")
  if o.back == "rows" then -- each row at its own place, then split
    y = core.scatter_add(order, y, A.rows, nil, { batch }):split("rows", A.seq, A.choices):sum "choices"
  elseif o.back == "none" then
    y = y:split("rows", A.seq, A.choices):sum "choices"
  else
    y = core.scatter_add(order // 2, y, A.seq, nil, { batch })
  end
  if o.load then y = y + counts:cast "f32":sum "experts" * 0 + counts:cast("f32"):max "experts" end
  return y:rename("out", "embed")
end

local function placed(h, o)
  local weights, index = m.softmax(h:dot(router, "embed"), "experts"):top_k("experts", 2, A.choices)
  local places, keys, all = m.axis("places", 5), joined(index), nil
  local _, order = at_line("sort", keys:sort "rows")
  local counts = hits(keys):sum "rows"
  local shape = { batch, A.experts, places }
  local first = (counts:cumsum "experts" - counts):broadcast(shape) + m.iota(places, "i32"):broadcast(shape)
  local y = h:gather(order:gather(first, "rows") // 2, "seq"):permute("batch", "experts", "places", "embed")
  y = m.tanh(y:dot(w, "embed")):permute("experts", "places", "batch", "out"):merge("experts", "places", "slots")
  all = hits(keys)
  local rank = ((all:cumsum("rows", { reverse = o.reverse }) - 1) * all):sum "experts"
  local kept = core.lt(rank, o.more and 6 or 5)
  local weight = o.bare and joined(weights) or core.where(kept, joined(weights), 0)
  y = y:gather(keys * 5 + core.minimum(rank, 4), "slots") * weight
  return y:split("rows", A.seq, A.choices):sum("choices"):rename("out", "embed")
end

-- Which lines an error names: of the sort, or the sum, or (true) any.
local cases = {
  { "dispatched", dispatched, {} },
  { "a bias by the sorted keys", dispatched, { bias = true } },
  { "rows at their own places", dispatched, { back = "rows" } },
  { "places of groups", placed, {} },
  { "bounds of other keys", dispatched, { other_keys = true }, "sum" },
  { "keys below 0", dispatched, { below_0 = true }, true },
  { "the largest key first", dispatched, { descending = true }, true },
  { "ends in the place of starts", dispatched, { bounds = true }, "sum" },
  { "a mean over sorted rows", dispatched, { mean = true }, "sort" },
  { "indices as values", dispatched, { index = true }, "sort" },
  { "no way back", dispatched, { back = "none" }, "sort" },
  { "counts as values", dispatched, { load = true }, "sum" },
  { "places, without a mask", placed, { bare = true }, "sort" },
  { "places, a mask of one place more", placed, { more = true }, "sort" },
  { "places from the end", placed, { reverse = true }, true },
}
local only = os.getenv "CASE"
for i, case in ipairs(cases) do
  local name, f, o, refused = table.unpack(case)
  if not only or only == name then
    local model = { A = A }
    function model.forward(tokens, axes)
      batch = axes.batch
      local h = words:gather(tokens, "vocab")
      return (h + 3 * f(h:cumsum "seq", o)):dot(head, "embed")
    end
    local ok, result = pcall(increments, model, function() return drawn.whole(model, 1, "f32") end, drawn.numbers(i))
    if os.getenv "DRAWN_SHOW" then print(name, ok and result.worst or result, refused and line[refused], drawn.oracle(model, i)) end
    if refused then
      local text = tostring(result)
      local at = text:match "increment_rows.lua:(%d+): "
      check.equal(not ok and (refused == true and at ~= nil or at == line[refused]), true, name .. ": is refused: " .. text)
    elseif check.equal(ok, true, name .. ": " .. tostring(result)) or ok then
      check.equal(result.worst <= 1e-5, true, ("%s: off by %g at %s"):format(name, result.worst, result.where))
    end
  end
end
check.done()
