-- mlua check --facts --confined: what a traced script cannot do, and what is known of one that fails half way.
local check = require "lib.check"
local core = require "mlua.core"

local binary = os.getenv "MLUA" or "build/mlua"

local function facts(text, options)
  local script = os.tmpname()
  local file = assert(io.open(script, "w"))
  file:write(text)
  file:close()
  local pipe = assert(io.popen(("'%s' check '%s' --facts --device cpu %s 2>/dev/null"):format(binary, script, options or "")))
  local output = pipe:read "a"
  pipe:close()
  os.remove(script)
  return core.json(output, "the facts"), script
end

local escape = os.tmpname()
os.remove(escape)
local wanted = ([[
local results = ""
local function try(name, ok) print(name) results = results .. name .. "=" .. tostring(ok and true or false) .. " " end
try("write", io.open("%s", "w"))
try("append", io.open("README.md", "a"))
try("read", io.open("/etc/passwd"))
try("own", io.open("README.md"))
try("popen", (pcall(function() assert(io.popen("true"):close()) end)))
try("execute", os.execute("true"))
try("remove", os.remove("%s"))
try("rename", os.rename("README.md", "%s"))
try("mkdir", os.tmpname and pcall(os.tmpname))
local core, m = require "mlua.core", require "mlua"
local function attempt(name, fn, ...) try(name, (pcall(fn, ...))) end
attempt("library", function() assert(package.loadlib("libc.so.6", "*")) end)
try("update", io.open("README.md", "r+"))
try("shared", io.open("/dev/shm/mlua-escape", "w"))
try("itself", io.open("/proc/self/mem", "r+"))
attempt("start", core.lsp_start, { "help" })
attempt("run", core.lsp_run, { "help" })
attempt("listen", core.http_server, { host = "127.0.0.1", port = 0, body = 1000, waiting = 1000, connections = 1, idle = 1 })
attempt("folders", function() assert(core.make_folders "%s") end)
attempt("lines", function() for line in io.lines "/etc/passwd" do return line end end)
attempt("dofile", dofile, "/etc/hostname")
try("another", io.open("/proc/1/environ"))
try("above", io.open("../../../../../../../../etc/passwd"))
attempt("memory", function() return ("x"):rep(3 << 30) end)
error(results, 0)
]]):format(escape, escape, escape, escape)

local result = facts(wanted, "--confined .:/tmp")
local limits = result.limits
local text = result.error.text
local function refused(names)
  for name in names:gmatch "%S+" do check.equal(text:match("%f[%w]" .. name .. "=(%a+)"), "false", name) end
end
check.equal(text:match "own=(%a+)", "true")
check.equal(text:match "%f[%w]memory=(%a+)", "false", "3 GiB")
if limits:find "calls" then
  refused "write append popen execute remove rename mkdir library update shared itself start run listen folders"
  check.equal(io.open(escape), nil)
else
  print("the kernel filters no system calls: " .. limits)
end
if limits:find "files" then refused "read lines dofile another above" else print("the kernel has no Landlock: " .. limits) end

-- The facts of a script that fails.
local failing, script = facts [[
local m = require "mlua"
local A = m.axes { embed = 8, ffn = 32 }
local w = m.param { A.embed, A.ffn, name = "w" }
local y = w:sum("ffn")
local z = y:dot(w, "ffn")
]]
check.equal(failing.error.message, 'cannot contract "ffn": the left has no such axis')
check.equal(failing.error.line, 5)
check.equal(failing.error.operands[1].name, "y")
check.equal(failing.error.operands[1].type, "f32[embed=8]")
check.equal(failing.error.operands[2].name, "w")
check.equal(failing.error.operands[2].line, 3)
check.equal(failing.parameters[1].name, "w")
local found
for _, value in ipairs(failing.values) do
  if value.line == 4 and value.type == "f32[embed=8]" then found = value end
end
check.equal(found and found.file, script)
check.equal(found and found.finish - found.begin, #'w:sum("ffn")')
check.equal(found and found.axes[1].name, "embed")

-- Noting values changes neither results nor messages.
local plain = facts [[
local function both(...) return ... end
local a, b = both(1, 2)
assert(a == 1 and b == 2 and select("#", both()) == 0 and #{ both(1, 2, 3) } == 3 and (both(4, 5)) == 4)
local t = setmetatable({}, { __index = function(_, k) return k end, __sub = function() return "sub" end, __unm = function() return "unm" end })
assert(t.x == "x" and t - 1 == "sub" and -t == "unm" and ("x"):rep(3) == "xxx")
local s = 0
for i, v in ipairs { 1, 2, 3 } do s = s + i * v end
assert(s == 14 and (function(x, ...) return x + select("#", ...) end)(1, 2, 3) == 3)
local co = coroutine.wrap(function(x) local y = coroutine.yield(x + 1) return y * 2 end)
assert(co(1) == 2 and co(5) == 10)
goto done
do return 1 end
::done::
local missing
local z = missing.field
]]
check.equal(plain.error.message, "attempt to index a nil value (local 'missing')")
check.done()
