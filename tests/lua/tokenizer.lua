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
check.equal(t:count "a\xff\n", 3)
check.equal(t:count "", 0)
check.raises("what a tokenizer encodes must be a text", t.count, t, 5)
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

-- Normal forms are those of Unicode 9, as Hugging Face's: U+1DF6 and U+11930 are later, U+0301 and U+0334 are not.
local vocab, next_free = {}, 256
for byte = 0, 255 do
  local plain = byte > 32 and byte < 127 or byte > 0xA0 and byte ~= 0xAD
  vocab[utf8.char(plain and byte or next_free)], next_free = byte, plain and next_free or next_free + 1
end
path = os.tmpname()
file = io.open(path, "wb")
file:write(core.to_json { version = "1.0", added_tokens = setmetatable({}, { __list = true }), normalizer = { type = "NFC" },
  pre_tokenizer = { type = "ByteLevel", add_prefix_space = false, use_regex = true }, decoder = { type = "ByteLevel" },
  model = { type = "BPE", vocab = vocab, merges = setmetatable({}, { __list = true }) } })
file:close()
local composed = m.tokenizer(path)
os.remove(path)
for from, to in pairs {
  ["a\u{301}\u{334}"] = "\u{E1}\u{334}", ["a\u{1DF6}\u{334}"] = "a\u{1DF6}\u{334}", ["a\u{1DF6}\u{301}\u{334}e\u{301}"] = "a\u{1DF6}\u{334}\u{301}\u{E9}",
  ["\u{11935}\u{11930}"] = "\u{11935}\u{11930}",
} do check.equal(composed:decode(composed:encode(from)), to) end

-- A token of more than 4,096 bytes, as long runs give to trained vocabularies; numbers beyond 64 bits elsewhere in JSON.
do
  local vocab, merges, word = { a = 0 }, {}, "a"
  while #word < 16384 do
    merges[#merges + 1], word = word .. " " .. word, word .. word
    vocab[word] = #merges
  end
  local path = os.tmpname() .. ".json"
  local file = io.open(path, "w")
  file:write(core.to_json { added_tokens = setmetatable({}, { __list = true }), model = { type = "BPE", vocab = vocab, merges = setmetatable(merges, { __list = true }) } })
  file:close()
  check.equal(table.concat(m.tokenizer(path):encode(("a"):rep(2 * 16384 + 5)), " "), "14 14 2 0", "long tokens")
  os.remove(path)
  check.equal(core.json '{"model_max_length": 1000000000000000019884624838656}'.model_max_length, 1e30, "a number beyond 64 bits")
end
check.done()
