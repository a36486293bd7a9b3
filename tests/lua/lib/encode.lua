-- One thread of m.tokenizer, for tests/text_peers.py: TOKENIZER, DOCS (a file of texts, each behind its length as u32). With
-- IDS each text's ids and what they decode to are written there, each behind its length; else PASSES times seconds are printed:
-- `seconds` of encoding, `table_seconds` with a Lua table of the ids too.
local m = require "mlua"
local core = require "mlua.core"

local t = m.tokenizer(os.getenv "TOKENIZER")
local data = io.open(os.getenv "DOCS", "rb"):read "a"
local texts, at = {}, 1
while at <= #data do texts[#texts + 1], at = string.unpack("<s4", data, at) end

if os.getenv "IDS" then
  local out, formats, kept = io.open(os.getenv "IDS", "wb"), {}, 0
  for i = 0, 128 do formats[i] = "<" .. ("I4"):rep(i) end
  for _, text in ipairs(texts) do
    local ids, parts = t:encode(text), {}
    for i = 1, #ids, 128 do
      local n = math.min(128, #ids - i + 1)
      parts[#parts + 1] = formats[n]:pack(table.unpack(ids, i, i + n - 1))
    end
    local decoded = t:decode(ids)
    if decoded == text then kept = kept + 1 end
    out:write(("<s4s4"):pack(table.concat(parts), decoded))
  end
  out:close()
  core.write(core.to_json { texts = #texts, kept = kept, eos = t.eos or -1 } .. "\n")
else
  local function timed(encode)
    local seconds = setmetatable({}, { __list = true })
    local tokens
    for pass = 1, tonumber(os.getenv "PASSES") do
      local began = core.time()
      tokens = 0
      for _, text in ipairs(texts) do tokens = tokens + encode(text) end
      seconds[pass] = core.time() - began
    end
    return seconds, tokens
  end
  local seconds, tokens = timed(function(text) return t:count(text) end)
  core.write(core.to_json { seconds = seconds, table_seconds = timed(function(text) return #t:encode(text) end), tokens = tokens } .. "\n")
end
