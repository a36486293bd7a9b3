-- Random edits of a model in the language server: no request fails, and the diagnostics after the last edit are those of the
-- text as it is then. EDITS=10000 SEED=1 for more.
local check = require "lib.check"
local lsp = require "tests.lua.lib.lsp"

local edits, seed = tonumber(os.getenv "EDITS" or 60), tonumber(os.getenv "SEED" or 1)
math.randomseed(seed)
local MODELS = { "gpt", "llama", "gpt_moe", "mamba", "bert", "vit", "lora", "rwkv" }
local PIECES = {
  "end", "(", ")", "{", "}", '"', "'", "[[", "]]", "--", "--[[", " = ", ",", ".", ":", "local x = ", "x:dot(", "m.gelu(x)", "self.", "A.embed", "\n", " ", "function ",
  "return ", "größe", "😀", "1e", "..", "if ", " then ", "for _, b in ipairs(t) do ", "self.w = m.param { A.embed }", '"embed"', "m.train { ", "\r\n", "\t",
}
local METHODS = { "hover", "completion", "definition", "references", "prepareRename", "rename" }

local function position(text, offset)
  local before, line = text:sub(1, offset - 1), 0
  local start = 1
  for at in before:gmatch "\n()" do line, start = line + 1, at end
  return { line = line, character = offset - start } -- the session counts in UTF-8
end

local function edit(text)
  local from = math.random(#text + 1)
  while from <= #text and text:byte(from) >= 0x80 and text:byte(from) < 0xC0 do from = from + 1 end
  local stop, piece = from, PIECES[math.random(#PIECES)]
  if math.random() < 0.5 and #text > 0 then -- a deletion, a replacement, or a part moved here
    stop = math.min(from + math.random(30), #text + 1)
    while stop <= #text and text:byte(stop) >= 0x80 and text:byte(stop) < 0xC0 do stop = stop + 1 end
    piece = math.random(3) == 1 and piece or math.random(3) == 1 and text:match("^[^\x80-\xFF]+", math.random(#text)) or ""
    piece = (piece or ""):sub(1, 200)
  end
  return from, stop, piece
end

local function run(model, count)
  local file = assert(io.open("models/" .. model .. ".lua"))
  local original = file:read "a"
  file:close()
  local s = lsp.session({ device = "cpu" }, { general = { positionEncodings = { "utf-8" } } })
  local text = original
  s:open("edited.lua", text)
  for i = 1, count do
    if i % 10 == 0 then text = original end -- else texts stay broken
    if i % 10 == 0 then
      s:change("edited.lua", text)
    else
      local from, stop, piece = edit(text)
      s:change("edited.lua", piece, { start = position(text, from), ["end"] = position(text, stop) })
      text = text:sub(1, from - 1) .. piece .. text:sub(stop)
      s.texts["edited.lua"] = text
    end
    s:request("textDocument/" .. METHODS[math.random(#METHODS)], {
      textDocument = { uri = s.uri "edited.lua" }, position = position(text, math.random(#text + 1)), newName = "renamed",
    })
    if math.random(6) == 1 then s:settle() end
    if math.random(20) == 1 then s:whole("inlayHint", "edited.lua") end
    if math.random(20) == 1 then s:request("textDocument/codeLens", { textDocument = { uri = s.uri "edited.lua" } }) end
  end
  s:settle()
  local answers = s:run()
  local answered = 0
  for _, answer in ipairs(answers) do
    if answer.id then answered = answered + 1 end
    local message = answer.error and answer.error.code == -32603 and answer.error.message or answer.method == "window/logMessage" and answer.params.message
    check.equal(message or "none", "none")
  end
  check.equal(answered, s.count)
  local fresh = lsp.session({ device = "cpu" }, { general = { positionEncodings = { "utf-8" } } })
  fresh:open("edited.lua", text)
  fresh:settle()
  local shown, expected = lsp.text(lsp.diagnostics(answers, "edited.lua")), lsp.text(lsp.diagnostics(fresh:run(), "edited.lua"))
  if shown ~= expected then print(("seed %d, %s: stale diagnostics\n%s\n%s"):format(seed, model, shown, expected)) end
  check.equal(shown, expected)
end

local each = 100 -- edits of a session
local models = math.max(1, edits // each)
for i = 1, models do run(MODELS[(seed + i) % #MODELS + 1], math.min(edits, each)) end
check.done()
