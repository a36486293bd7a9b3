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
local s = lsp.session { device = "cpu" }
s:open("helper.lua", 'local m = require "mlua"\nlocal helper = {}\nfunction helper.f(axis)\n  return m.param { axis }:dot(m.param { axis }, "ffn")\nend\nreturn helper\n')
for i, text in ipairs(scripts) do s:open(("%02d.lua"):format(i), text) end
s:settle()
local answers = s:run()
for i in ipairs(scripts) do lsp.show(("%02d.lua:"):format(i), lsp.diagnostics(answers, ("%02d.lua"):format(i))) end
lsp.show("helper.lua:", lsp.diagnostics(answers, "helper.lua"))
