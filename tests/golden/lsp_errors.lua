-- Sessions of the language server: what it says of scripts that are wrong, each with its text.
local lsp = require "tests.lua.lib.lsp"
local head = 'local m = require "mlua"\nlocal A = m.axes { embed = 8, ffn = 32, batch = 4 }\n'
local scripts = {
  "--!\nlocal x = = 1\n",
  "--!\nif x = 1 then\nend\n",
  "--!\nlocal function f()\n  return 1\n",
  "--!\nprint(undefined_name)\n",
  head .. "local a = m.param { A.embed, A.ffn, name = 'a' }\nlocal b = m.param { A.batch, A.ffn, name = 'b' }\nlocal c = a + b\n",
  head .. "local a = m.param { A.embed, name = 'a' }\nlocal b = a:dot(a, 'ffn')\n",
  head .. "local a = m.param { A.embd }\n",
  head .. "local a = m.param { A.embed, nam = 'a' }\n",
  head .. "local a = m.gleu(m.param { A.embed, name = 'a' })\n",
  head .. "local a = m.param { A.embed, name = 'a' }\nif m.gt(a, 0) then print 'x' end\n",
  head .. "local x = nil\nlocal y = x.field\n",
  head .. "error 'my own error'\n",
  "--! mesh tp device h200\n" .. head,
  "--! device h2000\n" .. head,
  "--! steps=3\nlocal m = require 'mlua'\nlocal cfg = m.config { step = 1 }\n",
  'local m = require "mlua"\nlocal helper = require "helper"\nhelper.f(m.axis("embed", 8))\n',
  "\xEF\xBB\xBFlocal mlua, größe = 1\n",
  "local s = 'mlua größe 😀' print(undefined)\n",
  "#!/usr/bin/env mlua\nlocal m = require 'mlua'\nprint(m.nothing)\n",
}
scripts[#scripts + 1] = "vim.opt.number = true\n" -- other Lua is not traced
-- A model with a change each.
local model = [[
local m = require "mlua"
local A = m.axes { embed = 16, batch = 4, seq = 8, vocab = 256 }
local Model = m.module("Model", function(self) self.table = m.param { A.vocab, A.embed } end)
function Model:forward(tokens)
  local x = self.table:gather(tokens, "vocab")
  return x:dot(self.table, "embed")
end
m.train { model = Model(), batch = A.batch, seq = A.seq, steps = 1, optimizer = m.sgd { lr = 0.1 } }
]]
local function changed(from, to)
  local first, last = model:find(from, 1, true)
  scripts[#scripts + 1] = model:sub(1, first - 1) .. to .. model:sub(last + 1)
end
changed('local m = require "mlua"', '--! device rtx3090\nlocal m = require "mlua"')
scripts[#scripts] = scripts[#scripts]:gsub("vocab = 256", "vocab = 8388608"):gsub("embed = 16,", "embed = 4096,") -- does not fit
changed("steps = 1", 'steps = 1, layout = m.layout { mesh = { { "dp", 3 } }, acts = { dp = { "batch" } } }') -- does not divide
changed("steps = 1", 'steps = 1, layout = m.layout { mesh = { { "dp", 2 } }, acts = { dp = { "bath" } } }')
changed('return x:dot(self.table, "embed")', "x:dot(self.table, 'embed')")
changed("model = Model()", "model = Model")
changed("model = Model(), ", "")
changed("steps = 1", "stepz = 1")
changed('return x:dot(self.table, "embed")', 'return x:dot(self.table, "embed"):sum("vocab")')
changed('local x = self.table:gather(tokens, "vocab")', 'local x = self.table:gather(tokens, "vocab")\n  local scores = m.softmax(x:dot(x, "embed"), "seq")\n  x = x * scores:sum()')
changed('local x = self', 'local x = x.self')
changed("m.sgd { lr = 0.1 }", 'm.sgd { lr = "0.1" }')
changed("steps = 1", 'steps = 1, data = "absent.txt"')
local s = lsp.session { device = "cpu" }
s:open("helper.lua", 'local m = require "mlua"\nlocal helper = {}\nfunction helper.f(axis)\n  return m.param { axis }:dot(m.param { axis }, "ffn")\nend\nreturn helper\n')
for i, text in ipairs(scripts) do s:open(("%02d.lua"):format(i), text) end
s:settle()
local answers = s:run()
for i in ipairs(scripts) do lsp.show(("%02d.lua:"):format(i), lsp.diagnostics(answers, ("%02d.lua"):format(i))) end
lsp.show("helper.lua:", lsp.diagnostics(answers, "helper.lua"))
