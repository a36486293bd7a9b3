-- args: run --device cpu --quiet -n 2 --mesh dp=2 SCRIPT
-- Every rank is fed the whole batch and finds the same id; it is told once.
local m = require "mlua"
local A = m.axes { batch = 4, vocab = 8, embed = 2 }
local wte = m.param { A.vocab, A.embed, name = "wte" }
local run = m.compile(function(i) return wte:gather(i.x, "vocab"):sum() end, { x = { A.batch, dtype = "i32" } }, { layout = m.layout.ddp {} })
run { x = { 1, 2, 3, 8 } }
