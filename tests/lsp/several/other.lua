-- Loads none of the others: its axis stays.
local m = require "mlua"
local A = m.axes { embed = 3, ffn = 5 }
print(m.param { A.embed, A.ffn }:sum "ffn")
