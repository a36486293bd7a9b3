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
check.done()
