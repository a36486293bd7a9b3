-- A session of the language server: completion while typing, definition, references and rename of variables, fields, axes and settings.
local lsp = require "tests.lua.lib.lsp"
local text = [[
local m = require "mlua"
local cfg = m.config { embed = 64, heads = 4, batch = 8, seq = 16, vocab = 256, steps = 1, presets = { wide = { embed = 128 } } }
local A = m.axes { embed = cfg.embed, batch = cfg.batch, seq = cfg.seq, vocab = cfg.vocab, ffn = 4 * cfg.embed }
local MLP = m.module("MLP", function(self)
  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)
function MLP:forward(x)
  local h = m.gelu(x:dot(self.up, "embed"))
  --
  return x + h:dot(self.down, "ffn")
end
local Model = m.module("Model", function(self)
  self.table, self.layers = m.param { A.vocab, A.embed }, m.stack(2, MLP)
end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  for _, layer in ipairs(self.layers) do x = layer(x) end
  return x:dot(self.table, "embed")
end
local width = m.quotient(cfg, "embed", "heads")
m.train { model = Model(), batch = A.batch, seq = A.seq, optimizer = m.sgd { lr = 0.1 } }
]]
local s = lsp.session()
s:open("edit.lua", text)
s:settle()
s:request("textDocument/codeLens", { textDocument = { uri = s.uri "edit.lua" } })
for _, typed in ipairs {
  "m.gel", "h:su", 'h = h:sum("', "self.", "cfg.", "A.", "m.layout.", "local y = m.param { A.embed, ", "local y = m.param { A.embed, frozen = ", "m.train { pack = \"",
  'm.quotient(cfg, "', "", "MLP:", "math.ma", "cfg.embed:",
} do
  s:change("edit.lua", (text:gsub("  %-%-\n", function() return "  " .. typed .. "\n" end)))
  s:at("completion", "edit.lua", "  " .. typed .. "|\n")
end
s:request("completionItem/resolve", { label = "gelu", data = { library = "gelu" } })
s:change("edit.lua", text)
s:settle()
for _, place in ipairs {
  "local |cfg", "cfg.|embed, batch", "A.|ffn }, m", '"f|fn"', "self.|down =", "local |x = self", '"embed", "|heads"', "A.|batch, seq", "|m.train", "ml|ua\"",
  "MLP:|forward(x)",
} do
  s:at("definition", "edit.lua", place)
  s:at("prepareRename", "edit.lua", place)
  s:at("rename", "edit.lua", place, { newName = "other" })
end
s:at("references", "edit.lua", "local |x = self")
s:at("references", "edit.lua", "A.|ffn }, m", { context = { includeDeclaration = false } })
s:at("rename", "edit.lua", "local |cfg", { newName = "A" })
s:at("rename", "edit.lua", "local |cfg", { newName = "end" })
s:at("rename", "edit.lua", '"f|fn"', { newName = "embed" })
s:at("rename", "edit.lua", "self.|down =", { newName = "up" })
s:print()
