-- args: repl --device cpu SCRIPT < tests/golden/prompt_error.in
-- What the script knew where it failed the prompt knows.
local m = require "mlua"
local A = m.axes { embed = 4, ffn = 8 }
local w = m.param { A.embed, A.ffn, name = "w" }
do
  local inner = w:sum("ffn")
  local function fails(x) return x:sum("ffm") end
  fails(w)
end
local later = 1
