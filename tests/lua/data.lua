-- Corpora: text by a tokenizer, documents, blends; what they refuse.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local base = os.tmpname()
local function write(suffix, text)
  local out = assert(io.open(base .. suffix, "wb"))
  out:write(text)
  out:close()
  return base .. suffix
end
local tokenizer = write(".json", [[{"added_tokens": [{"id": 4, "content": "<|endoftext|>", "special": true}],
  "normalizer": null, "post_processor": null, "decoder": {"type": "ByteLevel"},
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
  "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3}, "merges": ["a b"]}}]])
local lines = write(".jsonl", '{"text": "ab aba"}\n{"text": "b"}\n')
local plain = write(".txt", "abba")

local function window(corpus, n, options)
  options = options or {}
  options.documents, options.positions = m.host("i32", 1, n), m.host("i32", 1, n)
  local tokens, targets = m.host("i32", 1, n), m.host("i32", 1, n)
  corpus:fill(tokens, targets, 0, options)
  local function text(host) return table.concat(host:table(), " ") end
  return text(tokens), text(targets), text(options.documents), text(options.positions)
end

local corpus = m.corpus(lines, { tokenizer = tokenizer })
check.equal(corpus:size(), 7)
check.equal(corpus:documents(), 2)
local tokens, targets, documents, positions = window(corpus, 6)
check.equal(tokens, "2 3 2 0 4 1")
check.equal(targets, "3 2 0 4 -1 4", "a target of the next document counts nothing")
check.equal(documents, "0 0 0 0 0 1")
check.equal(positions, "0 1 2 3 4 0")
check.equal(corpus:text { 2, 3, 1 }, "ab b")
check.equal(m.corpus(plain, { tokenizer = tokenizer }):size(), 4, "ab b a and the end")
check.equal(m.corpus(plain):size(), 4, "bytes")
check.equal(m.corpus(lines):size(), 9, "bytes of lines")
local both = m.corpus(("%s:3,%s:1"):format(lines, plain))
check.equal(both:size(), 13)
check.equal(both:identity():match '"weight":(%d)', "3")
check.equal(m.corpus(plain):identity() ~= m.corpus(lines):identity(), true)
check.raises("needs text", m.corpus, nil, { tokenizer = tokenizer })
check.raises("the weight of", m.corpus, plain .. ":0")
check.raises("gives a weight to 1 of its 2 parts", m.corpus, plain .. ":1," .. lines)
check.raises("empty part", m.corpus, plain .. ",")
check.raises("documents need positions", function()
  local host = m.host("i32", 1, 2)
  m.corpus(plain):fill(host, host, 0, { documents = host })
end)
check.raises("no 3 rows from 0 of 1", function()
  local host = m.host("i32", 1, 2)
  m.corpus(plain):fill(host, host, 0, { count = 3 })
end)

-- Read ahead or not, whole or by rows: the same.
local function rows(options)
  local a, b = m.host("i32", 4, 2):fill(0), m.host("i32", 4, 2):fill(0)
  for step = 0, 5 do both:fill(a, b, step, options) end
  return table.concat(a:table(), " ")
end
check.equal(rows { seed = 1, ahead = true }, rows { seed = 1 })
check.equal(rows({ seed = 1, ahead = true, first = 1, count = 2 }):match "^0 0 (.*) 0 0$", rows({ seed = 1 }):match "^%d+ %d+ (.*) %d+ %d+$")
-- A window of nothing; a reader refuses a source that is smaller than a window before its first batch, however seldom it is drawn.
local empty = m.host("i32", 2, 0)
check.raises("a window of seq=0", m.corpus().fill, m.corpus(), empty, empty, 0)
local seldom = m.corpus(("%s:0.999,%s:0.001"):format(lines, plain))
local one = m.host("i32", 1, 5)
seldom:fill(one, one, 0)
check.raises("has 4 tokens to draw from", seldom.fill, seldom, one, one, 0, { ahead = true })
check.raises("of the text of " .. lines, seldom.fill, seldom, one, one, 0, { vocab = 11 })
for _, suffix in ipairs { "", ".json", ".jsonl", ".txt" } do os.remove(base .. suffix) end
check.done()
