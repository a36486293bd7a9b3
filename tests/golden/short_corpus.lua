local core = require "mlua.core"
local corpus = core.corpus("tests/golden/short_corpus.lua")
local seq = corpus:size()
corpus:fill(core.host("i32", 2, seq), core.host("i32", 2, seq), 0)
