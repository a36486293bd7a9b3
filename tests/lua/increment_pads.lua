-- Increments of a shift whose result is padded at the end too: its first element is known before any token.
local core, m = require "mlua.core", require "mlua"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check, drawn = dofile(root .. "tests/lua/lib/check.lua"), dofile(root .. "tests/lua/lib/drawn.lua")
local increments = dofile(root .. "tests/lua/lib/increments.lua")
local A = m.axes { batch = 1, seq = 12, embed = 8, vocab = 13 }
local words, head = m.param { name = "words", init = 0.7, A.vocab, A.embed }, m.param { name = "head", init = 0.7, A.embed, A.vocab }
local model = { A = A }
function model.forward(tokens)
  local h = words:gather(tokens, "vocab")
  return (h + (h:pad("seq", 1, 0) + 1):pad("seq", 0, 2):slice("seq", 0, A.seq.size)):dot(head, "embed")
end
local result = increments(model, function() return drawn.whole(model, 1, "f32") end, drawn.numbers(1))
check.near(result.worst, 0, 1e-5, "off at " .. result.where)
check.done()
