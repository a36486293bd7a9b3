-- Models drawn at random from the language's ops, each with the answer to whether it looks ahead: of every seed and kind ("causal",
-- "ahead", or "either") one model. `drawn.oracle` decides that by the whole program alone, without the compiler's pass.
local m = require "mlua"
local core = require "mlua.core"
local drawn = {}

local root = core.options().script:match "^(.*)tests/lua/" or ""
local ahead_file = root .. "tests/lua/lib/drawn_ahead.lua"
local causal_parts = dofile(root .. "tests/lua/lib/drawn_causal.lua")(m, core)
local ahead_parts, either_parts = dofile(ahead_file)(m, core), dofile(root .. "tests/lua/lib/drawn_either.lua")(m, core)

local function sorted_names(parts)
  local names = {}
  local without = (" %s "):format(os.getenv "DRAWN_WITHOUT" or "")
  for name in pairs(parts) do
    if not without:find((" %s "):format(name), 1, true) then names[#names + 1] = name end
  end
  table.sort(names)
  return names
end
drawn.causal, drawn.ahead, drawn.either = sorted_names(causal_parts), sorted_names(ahead_parts), sorted_names(either_parts)
local often = table.move(drawn.causal, 1, #drawn.causal, 5, { "attention", "attention", "attention", "scan" }) -- of many kinds each

-- Lines of drawn_ahead.lua by the name of the part: each has one whose comment begins with "ahead".
local function lines_of_parts()
  local lines, at, name = {}, 0, nil
  for line in io.lines(ahead_file) do
    at = at + 1
    name = line:match "^ *function parts%.([%w_]+)" or line:match "^ *parts%.([%w_]+) =" or name
    if line:find("-- ahead:", 1, true) then
      if lines[name] then error(name .. " has two lines that look ahead") end
      lines[name] = at
    end
  end
  return lines
end
local ahead_lines = lines_of_parts()

---Numbers that follow from a seed: 1 .. n (splitmix64: Steele, Lea and Flood 2014).
function drawn.numbers(seed)
  local state = seed
  return function(n)
    state = state + 0x9e3779b97f4a7c15
    local z = (state ~ state >> 30) * 0xbf58476d1ce4e5b9
    z = (z ~ z >> 27) * 0x94d049bb133111eb
    return ((z ~ z >> 31) >> 1) % n + 1
  end
end

local function drawing(seed, draw)
  local d = { int = draw, held = {} }
  function d.choose(list) return list[draw(#list)] end
  function d.coin() return draw(2) == 1 end
  function d.hold(module)
    d.held[#d.held + 1] = module
    return module
  end
  -- A parameter of the deviation 1 / sqrt(fan), a number or an axis.
  function d.w(fan, ...)
    local size = type(fan) == "number" and fan or fan.size
    return d.hold(m.param { init = m.init.normal(size ^ -0.5), ... })
  end
  return d
end

local norms = {
  function(d) return d.hold(m.rms_norm { d.A.embed }) end,
  function(d) return d.hold(m.layer_norm { d.A.embed }) end,
  function() return function(x) return m.l2_norm(x, "embed") * 4 end end,
}

-- {norm, part, name}, a residual block.
local function block(d, parts, name, options) return { d.choose(norms)(d), parts[name](d, options or {}), name } end

---The model of a seed: {forward(tokens, A) -> logits, A (with a batch of 1), module, text, line (of drawn_ahead.lua, where it looks
---ahead)}. `only`: its parts in place of drawn ones, {{name, option = value}...}.
---@param kind string "causal", "ahead", or "either" of them
function drawn.model(seed, kind, only)
  local d = drawing(seed, drawn.numbers(seed * 3 + ({ causal = 0, ahead = 1, either = 2 })[kind]))
  local length = d.choose { 20, 24, 27, 32, 36 }
  d.A = m.axes { batch = 1, seq = length, embed = 12, vocab = 19, ffn = 10, key = 5 }
  local table_, blocks, text = d.w(1, d.A.vocab, d.A.embed), {}, {}
  local positions = d.int(3) == 1 and d.w(2, d.A.seq, d.A.embed)
  local count = only and #only or 1 + d.int(3)
  for i = 1, count do blocks[i] = block(d, causal_parts, only and only[i][1] or d.choose(often), only and only[i]) end
  local line
  if kind == "either" then
    local name = only and only.either or d.choose(drawn.either)
    table.insert(blocks, d.int(#blocks + 1), { d.choose(norms)(d), either_parts[name](d), "either " .. name })
  end
  if kind == "ahead" then
    local name = only and only.ahead or d.choose(drawn.ahead)
    line = assert(ahead_lines[name], name)
    table.insert(blocks, d.int(#blocks + 1), { d.choose(norms)(d), ahead_parts[name](d), "ahead " .. name })
  end
  for _, b in ipairs(blocks) do text[#text + 1] = b[3] end
  local final, head, cap, parallel = d.choose(norms)(d), d.w(d.A.embed, d.A.embed, d.A.vocab), d.int(3) == 1, d.int(4) == 1
  local Model = m.module(("Drawn%s%d"):format(kind, seed), function(self) self.held = d.held end)

  local function forward(tokens, A)
    local c = { A = A, tokens = tokens }
    local x = table_:gather(tokens, "vocab")
    if positions then x = x + positions end
    for i, b in ipairs(blocks) do
      if parallel and i == 1 then -- two blocks that read the same
        x = x + b[2](b[1](x), c) + (blocks[2] and m.tanh(x) or 0)
      else
        x = x + b[2](b[1](x), c)
      end
    end
    local logits = final(x):dot(head, "embed")
    return cap and 5 * m.tanh(logits / 5) or logits
  end
  function Model:forward(tokens, A) return forward(tokens, A) end
  local model = Model()
  return {
    forward = function(tokens, A) return model(tokens, A) end, A = d.A, module = model, line = line,
    text = ("%s %d, %d positions: %s"):format(kind, seed, length, table.concat(text, ", ")),
  }
end

-- The oracle ----------------------------------------------------------------------------------------------

---The whole program over a batch of sequences: tokens -> log probabilities {batch, seq, vocab}.
function drawn.whole(model, batch, dtype)
  local A = {}
  for key, axis in pairs(model.A) do A[key] = axis end
  A.batch = m.axis("batch", batch)
  local before = core.compute_dtype()
  core.compute_dtype(dtype)
  local program = m.compile(function(i)
    return m.log_softmax(model.forward(i.tokens, A):cast(dtype), "vocab"):permute("batch", "seq", "vocab")
  end, { tokens = { A.batch, A.seq, dtype = "i32" } }, { name = "whole" })
  core.compute_dtype(before)
  return program
end

-- The largest difference of two results at positions before `cut` of all rows.
local function difference(a, b, batch, length, vocab, cut)
  local worst = 0
  for row = 0, batch - 1 do
    for i = row * length * vocab + 1, (row * length + cut) * vocab do worst = math.max(worst, math.abs(a[i] - b[i])) end
  end
  return worst
end

---Whether what a model says of a position follows from later tokens: the whole program in f64, later tokens of drawn sequences replaced by
---others. Gives the largest change of a log probability, and at which cut.
function drawn.oracle(model, seed)
  local batch, length, vocab = 3, model.A.seq.size, model.A.vocab.size
  local program, draw = drawn.whole(model, batch, "f64"), drawn.numbers(seed + 77)
  local function sequences()
    local list = {}
    for i = 1, batch * length do list[i] = draw(vocab) - 1 end
    return list
  end
  local tokens, worst, where = sequences(), 0, 0
  local first = program { tokens = tokens }
  for cut = 1, length - 1 do
    local others, changed = sequences(), {}
    for i = 1, batch * length do changed[i] = (i - 1) % length >= cut and others[i] or tokens[i] end
    local change = difference(first, program { tokens = changed }, batch, length, vocab, cut)
    if not (change <= worst) then worst, where = change, cut end -- also where it is no number
  end
  return worst, where
end

return drawn
