-- The examples that models of models/ make of texts and files: what is hidden, cut out, drawn or learned.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

-- What a model's script hands to its last m.train, under these settings.
local function options_of(model, settings)
  local config, train, captured = m.config, m.train, nil
  m.config = function(defaults)
    for key, value in pairs(settings) do defaults[key] = value end
    return config(defaults)
  end
  m.train = function(o) captured = o end
  dofile(root .. "models/" .. model .. ".lua")
  m.config, m.train = config, train
  return captured
end

local function window(length, index)
  local text, after = m.host("i32", 1, length), m.host("i32", 1, length)
  m.corpus():fill(text, after, index, { seed = 1 })
  return text
end

-- BERT: [CLS] a [SEP] b [SEP] of 64; of 61 tokens 9 are to be restored, of which 80 % are hidden, and 10 % may be any.
local bert = options_of("bert", { layers = 1, embed = 8, heads = 1, ffn = 8, seq = 64 })
local hidden, changed, follows = 0, 0, 0
for index = 0, 199 do
  local s = bert.sample(index, m.random_numbers(1, index))
  local text, is_hidden, at = window(61, index), {}, 0
  check.equal(("%d %d %d %d"):format(#s.tokens, #s.segments, #s.places, #s.targets), "64 64 9 9")
  for i, place in ipairs(s.places) do
    check.equal(i == 1 or place > s.places[i - 1], true, "places ascend")
    is_hidden[place + 1] = s.targets[i]
    if s.tokens[place + 1] == 259 then hidden = hidden + 1 elseif s.tokens[place + 1] ~= s.targets[i] then changed = changed + 1 end
  end
  local same = true
  for i, token in ipairs(s.tokens) do
    local special = i == 1 and 257 or (i == 64 or i < 64 and s.segments[i] == 0 and s.segments[i + 1] == 1) and 258
    if special then
      check.equal(token, special)
    else
      at = at + 1
      same = same and (s.order == 1 and s.segments[i] == 1 or (is_hidden[i] or token) == text[at])
    end
  end
  check.equal(same, true, "the text of sample " .. index)
  follows = follows + 1 - s.order
end
check.equal(math.abs(hidden / 1800 - 0.8) < 0.04 and math.abs(changed / 1800 - 0.1) < 0.03, true, ("hidden %d, changed %d of 1800"):format(hidden, changed))
check.equal(math.abs(follows - 100) < 35, true, ("%d of 200 follow"):format(follows))

-- T5: tokens and targets together are the text.
local t5 = options_of("t5", { layers = 1, embed = 8, heads = 1, head_dim = 8, ffn = 8, seq = 64, vocab = 320 })
local length = m.spans { seq = 64 }.text
for index = 0, 49 do
  local s = t5.sample(index, m.random_numbers(1, index))
  local spans, span, whole = {}, nil, {}
  for _, token in ipairs(s.targets) do
    if token >= 256 then
      span = {}
      spans[token] = span
    elseif token ~= 1 then
      span[#span + 1] = token
    end
  end
  for _, token in ipairs(s.tokens) do
    if token >= 256 then table.move(spans[token], 1, #spans[token], #whole + 1, whole) elseif token ~= 1 then whole[#whole + 1] = token end
  end
  local text = window(length, index)
  check.equal(#s.tokens == 64 and #whole == length and s.before[1] == 0 and s.before[5] == s.targets[4] and #s.before == #s.targets, true)
  for i = 1, length do
    if whole[i] ~= text[i] then check.equal(whole[i], text[i], ("token %d of sample %d"):format(i, index)) end
  end
end

-- ViT: CIFAR-10's records have a label, and a channel after another.
local path = os.tmpname()
local file = assert(io.open(path, "wb"))
for record = 0, 2 do
  local bytes = { string.char(3 * record) }
  for i = 0, 47 do bytes[#bytes + 1] = string.char(100 * record // 2 + i) end
  file:write(table.concat(bytes))
end
file:close()
local tiny = { layers = 1, embed = 8, heads = 1, ffn = 8, image = 4, patch = 2 }
tiny.data = path
local vit, seen = options_of("vit", tiny), {}
for index = 0, 19 do
  local s = vit.sample(index, m.random_numbers(1, index))
  seen[s.label // 3] = true
  for pixel = 0, 15 do
    for c = 0, 2 do check.near(s.image[3 * pixel + c + 1], (100 * (s.label // 3) // 2 + 16 * c + pixel) / 127.5 - 1, 1e-12) end
  end
end
check.equal(#seen, 2, "records")
tiny.data = ""
local drawn = options_of("vit", tiny).sample(0, m.random_numbers(1, 0))
check.equal(#drawn.image, 48)

-- LLaVA: a token for each patch, in a row, and an answer that is learned.
local llava = options_of("llava", { layers = 1, embed = 8, heads = 1, kv_heads = 1, ffn = 8, eye_layers = 1, eye_embed = 8, eye_heads = 1, eye_ffn = 8 })
for index = 0, 19 do
  local s = llava.sample(index, m.random_numbers(1, index))
  local first, last, count, answer = nil, nil, 0, {}
  for i, token in ipairs(s.tokens) do
    if token == 259 then first, last, count = first or i, i, count + 1 end
    if s.targets[i] ~= -1 then answer[#answer + 1] = string.char(s.targets[i]) end
  end
  check.equal(count == 16 and last - first == 15, true, "an image's tokens")
  check.equal((" red green blue white disc square diamond "):find(" " .. table.concat(answer):match "(%w+)\n$" .. " ") ~= nil
    or table.concat(answer):find "^%l+ %l+\n$" ~= nil, true, "the answer " .. table.concat(answer))
end

-- Chats: of a file, the assistant's words alone.
file = assert(io.open(path, "wb"))
file:write('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]}\n')
file:close()
local lora = options_of("lora", { layers = 1, embed = 8, heads = 1, kv_heads = 1, ffn = 8, seq = 32, pretrain = 0, data = path })
local s, learned = lora.sample(0, m.random_numbers(1, 0)), {}
for i, target in ipairs(s.targets) do
  if target ~= -1 then learned[#learned + 1] = ("%d%s"):format(i, string.char(target)) end
end
check.equal(string.char(table.unpack(s.tokens, 1, 26)), "user: hi\nassistant: Hello\n")
check.equal(table.concat(learned, " "), "20H 21e 22l 23l 24o 25\n")
os.remove(path)
check.done()
