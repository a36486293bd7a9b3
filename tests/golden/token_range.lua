local core = require "mlua.core"
local corpus = core.corpus "tests/golden/token_range.lua"
local tokens, targets = core.host("i32", 1, corpus:size() - 1), core.host("i32", 1, corpus:size() - 1)
corpus:fill(tokens, targets, 0, { vocab = 100 })
