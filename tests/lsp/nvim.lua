-- Neovim as a user has it, headless: `nvim --clean --headless -c "luafile tests/lsp/nvim.lua" -c qa!` with MLUA, ROOT and FOLDER set.
local root, folder = os.getenv "ROOT", os.getenv "FOLDER"
local script = folder .. "/mlp.lua"
local function write(text)
  local file = assert(io.open(script, "w"))
  file:write(text)
  file:close()
end
local text = [[
local m = require "mlua"
local A = m.axes { embed = 16, batch = 4, seq = 8, vocab = 256 }
local Model = m.module("Model", function(self) self.table = m.param { A.vocab, A.embed } end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  return x:dot(self.table, "embed")
end
m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 1, optimizer = m.sgd { lr = 0.1 } }
]]
write(text)
local lines = {}
local function say(...) lines[#lines + 1] = table.concat({ ... }, " ") end
local status
vim.cmd "filetype on"
dofile(root .. "/editor/nvim/mlua.lua") {
  trusted = { folder }, cmd = { os.getenv "MLUA", "lsp" }, device = "rtx4090", on_status = function(given) status = given end,
}
vim.cmd("edit " .. script)
vim.wait(20000, function() return status ~= nil end, 20)
say("parameters", tostring(status and status.parameters))
local function at(line, character)
  return { textDocument = vim.lsp.util.make_text_document_params(), position = { line = line, character = character } }
end
local function ask(method, params)
  local answers = vim.lsp.buf_request_sync(0, method, params, 20000)
  for _, answer in pairs(answers or {}) do return answer.result end
end
say("hover", ((ask("textDocument/hover", at(4, 8)).contents.value):match "x: [^\n]*"))
local lens
vim.wait(20000, function()
  lens = vim.lsp.codelens.get(0)[1]
  return lens ~= nil
end, 20)
say("lens", lens and lens.command.title:match "parameters, [^,]*" or "none")
say("omnifunc", vim.bo.omnifunc)
local items = ask("textDocument/completion", at(5, 11)).items
say("completion", tostring(#items > 40))
local edit = ask("textDocument/rename", vim.tbl_extend("force", at(4, 8), { newName = "embedded" }))
vim.lsp.util.apply_workspace_edit(edit, "utf-16")
say("renamed", vim.api.nvim_buf_get_lines(0, 5, 6, false)[1])
vim.api.nvim_buf_set_lines(0, 4, 5, false, { '  local embedded = self.table:gather(tokens, "vocbb")' })
vim.wait(20000, function() return #vim.diagnostic.get(0) > 0 end, 20)
local found = vim.diagnostic.get(0)[1]
say("diagnostic", found and ("%d:%d-%d %s"):format(found.lnum + 1, found.col, found.end_col, found.message:match "[^\n]*") or "none")
vim.api.nvim_buf_set_lines(0, 4, 5, false, { '  local embedded = self.table:gather(tokens, "vocab")' })
vim.wait(20000, function() return #vim.diagnostic.get(0) == 0 end, 20)
say("mended", tostring(#vim.diagnostic.get(0)))
io.stdout:write(table.concat(lines, "\n"), "\n")
