-- Sessions of the language server on models of models/: no diagnostic, the lines above modules and m.train, and a type of each.
local lsp = require "tests.lua.lib.lsp"
local s = lsp.session { mesh = "dp=2" }
local MODELS = { "gpt", "llama", "gpt_moe", "bert", "vit", "mamba" }
for _, model in ipairs(MODELS) do
  local file = assert(io.open("models/" .. model .. ".lua"))
  s:open(model .. ".lua", file:read "a")
  file:close()
end
s:settle()
local lenses, hints = {}, {}
for _, model in ipairs(MODELS) do
  lenses[model] = s:request("textDocument/codeLens", { textDocument = { uri = s.uri(model .. ".lua") } })
  hints[model] = s:whole("inlayHint", model .. ".lua")
end
local results = {}
local answers = s:run()
for _, answer in ipairs(answers) do
  if answer.id then results[answer.id] = answer.result end
end
for _, model in ipairs(MODELS) do
  lsp.show(model .. " diagnostics", lsp.diagnostics(answers, model .. ".lua"))
  for _, lens in ipairs(results[lenses[model]]) do print(("%4d | %s"):format(lens.range.start.line + 1, lens.command.title)) end
  local list = results[hints[model]]
  for i, hint in ipairs(list) do
    if i == 1 or i == #list // 2 or i == #list then print(("%4d | %s"):format(hint.position.line + 1, hint.label)) end
  end
end
