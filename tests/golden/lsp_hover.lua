-- A session of the language server: diagnostics, types, layouts and steps of a small model on a mesh, then an edit that breaks it.
local lsp = require "tests.lua.lib.lsp"
local text = [[
--! mesh dp=2,tp=2 device rtx4090
local m = require "mlua"
local cfg = m.config { embed = 64, ffn = 256, batch = 8, seq = 16, vocab = 256, steps = 1 }
local A = m.axes { embed = cfg.embed, ffn = cfg.ffn, batch = cfg.batch, seq = cfg.seq, vocab = cfg.vocab }
local MLP = m.module("MLP", function(self)
  self.norm = m.rms_norm { A.embed }
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function MLP:forward(x)
  local h = self.norm(x):dot(self.up, "embed")
  return x + m.gelu(h):dot(self.down, "ffn")
end
local Model = m.module("Model", function(self)
  self.table, self.mlp = m.param { A.vocab, A.embed }, MLP()
end)
function Model:forward(tokens)
  return self.mlp(self.table:gather(tokens, "vocab")):dot(self.table, "embed")
end
m.train { model = Model(), batch = A.batch, seq = A.seq, layout = m.layout.megatron { dp = 1, tp = 1 }, optimizer = m.sgd { lr = 0.1 } }
]]
local s = lsp.session()
s:open("mlp.lua", text)
s:settle()
for _, place in ipairs {
  "local |h = self", "self.norm(|x)", "dot(self.u|p", "self.norm(x):d|ot(self.up", "x |+ m.gelu", "m.g|elu(h)", "dot(self.down, |\"ffn\")", "cfg.e|mbed,", "A.f|fn }",
  "self.d|own = ", "optimi|zer", "Mo|del()",
} do
  s:at("hover", "mlp.lua", place)
end
s:whole("inlayHint", "mlp.lua")
s:change("mlp.lua", "-- a line more\n", { start = { line = 1, character = 0 }, ["end"] = { line = 1, character = 0 } })
s.texts["mlp.lua"] = text:gsub("\n", "\n-- a line more\n", 1)
s:at("hover", "mlp.lua", "local |h = self") -- traced again or not
s:change("mlp.lua", (text:gsub("m.param { A.ffn, A.embed }", "m.param { A.seq, A.embed }")))
s:settle()
s:at("hover", "mlp.lua", "local |h = self") -- what was known stays
s:print()
