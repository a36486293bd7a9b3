-- args: run --device cpu --json SCRIPT > /dev/null
-- Losses that count nothing in evaluation, and one that is not finite although what it draws is.
local m = require "mlua"
local A = m.axes { vocab = 256, embed = 4, seq = 4, batch = 4 }
local Model = m.module("Model", function(self) self.table = m.param { A.vocab, A.embed } end)
function Model:forward(tokens) return self.table:gather(tokens, "vocab"):dot(self.table, "embed") end
local model = Model()

local function train(name, hide, options)
  local steps = 0
  local o = { model = model, batch = A.batch, seq = A.seq, steps = 4, eval_every = 2, log_every = 1000, skip = 0, on_step = function() steps = steps + 1 end }
  function o.loss(tokens, targets)
    local hidden = hide(tokens, targets)
    return m.cross_entropy(model(m.where(hidden, 0, tokens)), m.where(hidden, targets, -1))
  end
  for key, value in pairs(options or {}) do o[key] = value end
  local ok, message = pcall(m.train, o)
  message = ok and "trained" or tostring(message):gsub("\n *%d+ | [^\n]*", ""):gsub("^%S+ ", "")
  io.stderr:write(("%s, after %d steps: %s\n"):format(name, steps, message))
end

train("a mask of dropout", function(tokens) return m.eq(m.dropout(m.ones(m.axes_of(tokens)), 0.5), 0) end)
train("a mask that is always drawn", function(tokens) return m.eq(m.dropout(m.ones(m.axes_of(tokens)), 0.5, { always = true }), 0) end)
train("a random mask", function(tokens) return m.random_mask(m.axes_of(tokens), 0.5) end)
train("nothing in the data counts", function(tokens) return m.lt(tokens, m.full({}, m.context.training and 256 or 0, "i32")) end)

-- Where a step fails, its masks are drawn again: dropout's are none of those that count nothing.
train("not finite", nil, {
  loss = function(tokens, targets)
    local hidden = m.eq(m.dropout(m.ones(m.axes_of(tokens)), 0.5), 0)
    local sum, count = m.cross_entropy(model(tokens), m.where(hidden, targets, -1))
    return sum + m.log(sum * 0), count
  end,
  eval_every = 0,
})
train("not finite in microbatches", nil, {
  loss = function(tokens, targets)
    local hidden = m.eq(m.dropout(m.ones(m.axes_of(tokens)), 0.5), 0)
    local sum, count = m.cross_entropy(model(tokens), m.where(hidden, targets, -1))
    return sum + m.log(sum * 0), count
  end,
  eval_every = 0, accum = 2,
})
local function mistake(fn, ...)
  local ok, message = pcall(fn, ...)
  io.stderr:write((tostring(message):gsub("\n *%d+ | [^\n]*", ""):gsub("^%S+ ", "")), ok and "no error\n" or "\n")
end
mistake(function() m.random_mask({ A.seq }, 1.5) end)
mistake(function() m.dropout(m.ones { A.seq }, 0.5, { allways = true }) end)
