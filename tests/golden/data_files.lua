-- Files that are no data: what they are taken for, what they are, and what would do.
local m = require "mlua"
local file = os.tmpname()

local function told(what, fn, ...)
  local ok, message = pcall(fn, ...)
  message = ok and "no error" or tostring(message)
  print(("%s: %s"):format(what, (message:gsub("^[^\n]*data_files.lua:%d+: ", ""):gsub("\n *%d+ | [^\n]*", ""):gsub(file:gsub("%p", "%%%0"), "FILE"))))
end
local function write(path, bytes)
  local out = assert(io.open(path, "wb"))
  out:write(bytes)
  out:close()
end
local function corpus(what, bytes, suffix)
  local path = file .. (suffix or "")
  write(path, bytes)
  told(what, m.corpus, path)
  if suffix then os.remove(path) end
end

print "-- not regular files"
os.remove(file)
os.execute("mkfifo " .. file)
told("a pipe", m.corpus, file)
told("a pipe of tensors", m.read_tensors, file)
os.remove(file)
told("a device", m.corpus, "/dev/zero")
told("a device of tensors", m.read_tensors, "/dev/zero")
told("a folder", m.corpus, "tests")
told("a folder of tensors", m.read_tensors, "tests")
told("a file of /proc", m.corpus, "/proc/self/maps")
told("none", m.corpus, "no/such/file")
corpus("empty", "")
told("empty, of tensors", m.read_tensors, file)

print "-- not text"
local npy = "\x93NUMPY\1\0v\0{'descr': '<u2', 'fortran_order': False, 'shape': (9,), }\n" .. ("tokens"):rep(99)
corpus("npy", npy)
corpus("npz", "PK\3\4" .. ("x"):rep(40))
corpus("gzip", "\x1f\x8b\8\0\0\0\0\0\0\3" .. ("x"):rep(40))
corpus("UTF-16", "\xff\xfe" .. ("t\0e\0x\0t\0"):rep(9))
local words = {}
for i = 1, 5000 do words[i] = string.pack("<I4", i * 7919 % 50257) end
corpus("u32 tokens", table.concat(words))
corpus("text with stray characters", ("a word\0 or two\t\27[1m\r\n"):rep(2) .. ("plain text "):rep(100))

print "-- tokens"
corpus("npy", npy .. " ", ".bin")
corpus("llm.c", string.pack("<i4i4i4", 20240520, 1, 9) .. ("\0"):rep(1100), ".bin")
corpus("u32 tokens", table.concat(words), ".bin")
corpus("odd", ("ab"):rep(40) .. "c", ".bin")
corpus("as in text of letters", ("a\0b\0"):rep(400), ".bin")

print "-- not tensors"
write(file, npy)
told("npy", m.read_tensors, file)
write(file, "plain text, which has no header")
told("text", m.read_tensors, file)

print "-- taken as said"
write(file, npy)
print(m.corpus(file, { dtype = "u8" }):size() == #npy, m.corpus(file, { dtype = "u16" }):size() == #npy // 2)
os.remove(file)
