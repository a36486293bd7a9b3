-- A session of the language server: references and rename of axes, settings, fields and classes over files of the workspace
-- of which the editor has opened one (tests/lsp/several).
local lsp = require "tests.lua.lib.lsp"
local function text_of(name)
  local file = assert(io.open("tests/lsp/" .. name))
  local text = file:read "a"
  file:close()
  return text
end
local s = lsp.session()
s:open("several/layers.lua", text_of "several/layers.lua")
s:settle()
for _, place in ipairs { "A.|embed, A.ffn }, m", '"f|fn"', "layers.|count", "self.|up,", "local |A = axes", "axes.|A" } do
  s:at("references", "several/layers.lua", place)
  s:at("rename", "several/layers.lua", place, { newName = "other" })
end
s:at("rename", "several/layers.lua", "A.|embed, A.ffn }, m", { newName = "vocab" })
s:at("rename", "several/layers.lua", "layers.|count", { newName = "MLP" })
s:at("definition", "several/layers.lua", "A.|embed, A.ffn }, m")
s:at("definition", "several/layers.lua", 'require "a|xes"')
s:print()
