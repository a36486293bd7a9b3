-- Blocks that do not end where they should: each text is a script of its own.
local binary = os.getenv "MLUA" or "build/mlua"
local name = os.tmpname()
local function try(text)
  local file = assert(io.open(name, "w"))
  file:write(text)
  file:close()
  local pipe = io.popen(("'%s' run - < '%s' 2>&1"):format(binary, name))
  io.write(pipe:read "a", "\n")
  pipe:close()
end

try "if x then\n  y = 1\n"
try "function f()\n  if x then\n    y()\nend\nz = 1\n"
try "local B = m.module('B', function(self)\n  self.x = 1\n)\n"
try "local t = {\n  f = function(x)\n    for i = 1, 3 do\n      print(i)\n  end,\n}\n"
try "function f()\n  y()\n  end\nend\n"
try "function f()\n  return 1\n  y = 2\nend\n"
try "function f()\n  return 1\n\nlocal y = f()\n"
try "if x == 1 then\n  y = 1\nelse if x == 2 then\n  y = 2\nend\n"
try "for i in range(10):\n  print(i)\n"
try "if x == 1:\n  y = 1\nelse:\n  y = 2\n"
try "def f(x):\n  return x\n"
try "if x then\n  y()\nelse:\n  z()\nend\n"
try "if (x) {\n  y = 1\n}\n"
try "for i = 1, 3\n  y()\nend\n"
try "if x\n  y()\nend\n"
try "x = { 1, 2\nprint(x)\n"
try "x = f(1, 2\ny = 2\n"
try "x = f(1,\n  2))\n"
try "x = [[abc\n"
try "while true do\n  if x then\n    continue\n  end\nend\n"
try "local i = 1\ni--\nprint(i)\n"
try "local x = 1\nx ~= 1\n"
os.remove(name)
