-- m.tokenizer: ids and texts, one by one, special tokens, errors.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local t = m.tokenizer "bytes"
check.equal(table.concat(t:encode "a\xff\n", " "), "97 255 10")
check.equal(t:decode { 104, 105 }, "hi")
check.equal(("%s %d %s"):format(t.name, t.size, t), "bytes 256 tokenizer of 256 ids from bytes")
check.equal(t:id "a", 97)
check.equal(t:id "ab", nil)
check.equal(t:token(98), "b")
local stream = t:stream()
check.equal(stream(0xC3), "")
check.equal(stream(0xA9), "é")
check.equal(stream(0xF0) .. stream(0x9F), "")
check.equal(stream(65), "\u{FFFD}A")
check.equal(stream(0xE4), "")
check.equal(stream(), "\u{FFFD}")
check.raises("the path of m.tokenizer must be a text, got 3", m.tokenizer, 3)
check.raises("no/such", m.tokenizer, "no/such.json")
check.raises("what a tokenizer encodes must be a text", t.encode, t, 5)
check.raises("encode is a method of a tokenizer", t.encode, "text")
check.raises("has no option \"specials\"", t.encode, t, "a", { specials = true })
check.raises("id 2 must be an integer from 0 to 255, got 256", t.decode, t, { 1, 256 })
check.raises("must be a list of ids", t.decode, t, 1)
check.raises("the id must be an integer from 0 to 255", t.token, t, -1)
check.raises("the id must be an integer from 0 to 255", t:stream(), "a")

-- A SentencePiece model whose ")" + "))" and "))" + ")" are as likely: sums of 32 bits decide between them. The places are
-- those of sentencepiece 0.1.97.
local function field(number, text) return string.char(number << 3 | 2, #text) .. text end
local model = ""
for _, p in ipairs { { "<unk>", 0, 2 }, { "\u{2581}", -3.3, 1 }, { "a", -0.7, 1 }, { ")", -1.3, 1 }, { "))", -1.9, 1 } } do
  model = model .. field(1, field(1, p[1]) .. ("<Bf"):pack(0x15, p[2]) .. string.char(0x18, p[3]))
end
local path = os.tmpname()
os.rename(path, path .. ".model")
path = path .. ".model"
local file = io.open(path, "wb")
file:write(model, field(2, "\x18\1"), field(3, field(1, "identity")))
file:close()
local pieces, short_last = m.tokenizer(path), {}
for n = 0, 59 do
  local ids = pieces:encode(("a"):rep(n) .. ")))")
  if ids[#ids] == 3 then short_last[#short_last + 1] = n end
end
check.equal(table.concat(short_last, " "), "0 1 2 5 6 7 8 9 10 11 12 13 14 15 40")
os.remove(path)
check.done()
