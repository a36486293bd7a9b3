-- Sampling text from a trained model.
local core = require "mlua.core"
local from = require "mlua.from"
local m = require "mlua"
local Tokenizer = require "mlua.tokenizer"
local files = require "mlua.tokenizer_files"

-- The id of a token of these logits. The Gumbel trick: argmax of logits/t - log(-log(u)) is a sample.
local function draw(logits, vocab, options, temperature, key)
  if temperature == 0 then return logits:argmax(vocab) end
  logits = logits / temperature
  local few, ids = options.top_k and options.top_k < logits:size(vocab) and core.axis(vocab, options.top_k), nil
  if few then logits, ids = logits:top_k(vocab, few.size, few) elseif options.top_p then logits, ids = logits:sort(vocab, { descending = true }) end
  if options.top_p then -- those before which there is less than top_p
    local p = m.softmax(logits, vocab)
    logits = core.where(core.lt(p:cumsum(vocab) - p, options.top_p), logits, -math.huge)
  end
  local u = core.random(key, m.axes_of(logits))
  local drawn = (logits - core.log(1e-9 - core.log(u + 1e-9))):argmax(vocab)
  return ids and ids:gather(drawn, vocab) or drawn
end

---Continue `prompt` (text, of the tokens of `tokenizer`, by default that of m.train, else of bytes; or a list of token ids) by `tokens` tokens drawn
---at `temperature` (0: always the likeliest), from the `top_k` likeliest, or from the likeliest ones that together have the
---probability `top_p`. The model reads a window of `seq` tokens each time.
---Prints text as it is sampled unless `quiet`; returns the list of all token ids and the text.
---@param model Module
---@param options {prompt: string|integer[], tokens: integer, temperature: number, top_k: integer, top_p: number, seq: Axis, seed: integer, tokenizer: Tokenizer, quiet: boolean}
---@return integer[] ids
---@return string text
function m.generate(model, options)
  m.check_options("generate", options or {}, { "prompt", "tokens", "temperature", "top_k", "top_p", "seq", "seed", "tokenizer", "quiet" })
  if not m.is_module(model) and type(model) ~= "function" then
    local within = type(model) == "table" and rawget(model, "model") ~= nil
    core.fail("m.generate takes a module, got " .. m.shown(model), {
      help = within and "the model comes first: m.generate(model, { prompt = \"a\", seq = A.seq })" or "calling a class makes one: local model = GPT()",
    })
  end
  if core.options().mode == "check" or core.stopped() then return {}, "" end
  options = options or {}
  local seq, temperature = options.seq, options.temperature or 0.8
  if type(seq) ~= "userdata" or core.is_tensor(seq) then
    core.fail("m.generate needs seq, the axis of positions", { help = "seq = A.seq" })
  end
  local count = options.tokens or 200
  if type(count) ~= "number" or not math.tointeger(count) or count < 0 then
    core.fail(("m.generate's tokens must be an integer, 0 or more, got %s"):format(m.shown(count)))
  end
  if options.seed ~= nil and (type(options.seed) ~= "number" or not math.tointeger(options.seed)) then
    core.fail("m.generate's seed must be an integer, got " .. m.shown(options.seed))
  end
  if type(temperature) ~= "number" or not (temperature >= 0) then
    core.fail(("m.generate's temperature must be a number, 0 or more, got %s"):format(m.shown(temperature)))
  end
  if options.top_k ~= nil and not (math.tointeger(options.top_k) and options.top_k >= 1) then
    core.fail("m.generate's top_k must be a positive integer, got " .. m.shown(options.top_k))
  end
  if options.top_p ~= nil and not (type(options.top_p) == "number" and options.top_p > 0 and options.top_p <= 1) then
    core.fail("m.generate's top_p must be a number above 0 and at most 1, got " .. m.shown(options.top_p))
  end
  local tokenizer, file = options.tokenizer, files.of_model[model]
  if tokenizer == nil and type(options.prompt) == "string" and file and file ~= "bytes" then tokenizer = m.tokenizer(file) end
  if tokenizer ~= nil and getmetatable(tokenizer) ~= Tokenizer then
    core.fail("m.generate's tokenizer must be a tokenizer, got " .. m.shown(tokenizer), { help = "tokenizer = m.tokenizer(path)" })
  end
  local vocab -- how many tokens there are
  local batch = core.axis(core.options().ranks > 1 and "sample" or "batch", 1) -- which no layout splits
  local sample = m.compile(function(feeds)
    local logits = model(feeds.tokens):cast("f32"):gather(feeds.position, seq.name):max(batch.name)
    local rest = logits:axes()
    if #rest ~= 1 then
      core.fail("the logits of a model that generates have batch, " .. seq.name .. " and one more axis, not " .. table.concat(rest, ", "))
    end
    vocab = logits:size(rest[1])
    return draw(logits, rest[1], options, temperature, feeds.key)
  end, { tokens = { batch, seq, dtype = "i32" }, position = { dtype = "i32" }, key = { dtype = "i64" } }, { name = "sample", often = true })
  if m.is_module(model) then from.load(model) end -- where no training has
  local prompt, ids = options.prompt or "\n", {}
  if type(prompt) ~= "string" and type(prompt) ~= "table" then
    core.fail("m.generate's prompt must be a text or a list of token ids, got " .. m.shown(prompt))
  end
  if type(prompt) == "string" and tokenizer then
    ids = tokenizer:encode(prompt, { special = true })
  elseif type(prompt) == "string" then
    for i = 1, #prompt do ids[i] = prompt:byte(i) end
  else
    for i, id in ipairs(prompt) do ids[i] = id end
  end
  for _, id in ipairs(ids) do
    if not math.tointeger(id) or id < 0 or id >= vocab then
      core.fail(("m.generate's prompt has the token %s, and the model has 0 to %d"):format(m.shown(id), vocab - 1))
    end
  end
  if #ids == 0 then core.fail("m.generate needs a prompt of at least one token") end
  local show = options.quiet and function() end or core.write
  local stream = tokenizer and tokenizer:stream()
  if stream then
    local parts = {}
    for i, id in ipairs(ids) do parts[i] = stream(id) end
    show(table.concat(parts))
  elseif type(prompt) == "string" then
    show(prompt)
  end
  local window = core.host("i32", 1, seq.size)
  local text = {}
  for i = 1, count do
    local first = math.max(0, #ids - seq.size)
    for j = 1, seq.size do window[j] = ids[first + j] or 0 end
    local key = core.hash(("%d sample %d"):format(options.seed or core.options().seed, i))
    local id = math.tointeger(sample { tokens = window, position = #ids - first - 1, key = key })
    ids[#ids + 1] = id
    text[i] = stream and stream(id) or id < 256 and string.char(id) or ""
    show((stream or id < 256) and text[i] or " " .. id)
    if core.stopped() then break end
  end
  if stream then
    text[#text + 1] = stream() -- of a character that is not whole
    show(text[#text])
  end
  show "\n"
  return ids, table.concat(text)
end
