-- OpenAI's API as mlua serve speaks it: request bodies to what is asked of a decoder, answers to JSON. It holds no state of a server.
local core = require "mlua.core"
local m = require "mlua"
local Answer = require "mlua.answer"
local sampling = require "mlua.sampling"

local api = {}
local MOST_CHOICES, MOST_STOPS = 128, 16

-- Requests -----------------------------------------------------------------------------------------------------------------

-- A request that is refused: an error that api.read catches.
local function refuse(message, param, code, status) error({ refusal = true, status = status or 400, message = message, param = param, code = code }, 0) end

local SAMPLING = { temperature = true, top_k = true, top_p = true, min_p = true, repetition_penalty = true, presence_penalty = true, frequency_penalty = true, seed = true }
local COMMON = { "model", "max_tokens", "n", "best_of", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "logprobs" }
local IGNORED = { user = true, metadata = true, store = true, service_tier = true, parallel_tool_calls = true, safety_identifier = true, prompt_cache_key = true }
local EMPTY = { suffix = true, logit_bias = true, tools = true, functions = true } -- known, and refused unless they ask for nothing
local OWN = {
  ["/v1/completions"] = { "prompt", "echo" },
  ["/v1/chat/completions"] = { "messages", "max_completion_tokens", "top_logprobs", "response_format", "tool_choice", "chat_template_kwargs" },
}
local known = {}
for path, names in pairs(OWN) do
  known[path] = {}
  for _, list in ipairs { COMMON, names } do
    for _, name in ipairs(list) do known[path][name] = true end
  end
end

local function is_list(value) return type(value) == "table" and (next(value) == nil or value[1] ~= nil) end

local function check_names(path, body)
  for name, value in pairs(body) do
    if value == core.null then
      body[name] = nil
    elseif EMPTY[name] then
      if value ~= "" and not (type(value) == "table" and next(value) == nil) then refuse(("%s is not supported"):format(name), name) end
    elseif not known[path][name] and not SAMPLING[name] and not IGNORED[name] then
      local list = {}
      for one in pairs(known[path]) do list[#list + 1] = one end
      for one in pairs(SAMPLING) do list[#list + 1] = one end
      local guess = core.suggest(name, list)
      refuse(("there is no parameter %s%s"):format(m.shown(name), guess and (", did you mean %s?"):format(guess) or ""), name, "unknown_parameter")
    end
  end
end

local function boolean(body, name)
  local value = body[name]
  if value ~= nil and type(value) ~= "boolean" then refuse(("%s must be true or false, got %s"):format(name, m.shown(value)), name) end
  return value or false
end

local function integer(body, name, least, most, default)
  local value = body[name]
  if value == nil then return default end
  local whole = type(value) == "number" and math.tointeger(value)
  if not whole or whole < least or whole > most then
    refuse(("%s must be an integer from %d to %d, got %s"):format(name, least, most, m.shown(value)), name)
  end
  return whole
end

-- What is asked of sampling: names and defaults of OpenAI, and of others that serve.
local function sampling_of(body, logprobs)
  local asked = { temperature = 1, logprobs = logprobs or 0, seed = 0 }
  for name in pairs(SAMPLING) do
    if body[name] ~= nil then asked[name] = body[name] end
  end
  if asked.top_k == -1 or asked.top_k == 0 then asked.top_k = nil end -- all
  if asked.top_p == 0 then asked.temperature, asked.top_p = 0, nil end -- the likeliest
  local ok, problem = sampling.parameters(asked)
  if not ok then refuse(problem, problem:match "^%S+") end
  return asked
end

local function stops_of(body, eos)
  local stop, ids = body.stop, body.stop_token_ids
  if type(stop) == "string" then stop = { stop } end
  if stop ~= nil and (not is_list(stop) or #stop > MOST_STOPS) then refuse(("stop must be a text or a list of at most %d"):format(MOST_STOPS), "stop") end
  for _, text in ipairs(stop or {}) do
    if type(text) ~= "string" then refuse("stop must be texts; stop_token_ids takes ids", "stop") end
  end
  if ids ~= nil and not is_list(ids) then refuse("stop_token_ids must be a list of token ids", "stop_token_ids") end
  local result, problem = Answer.stops(stop)
  if not result then refuse(problem, "stop") end
  for _, id in ipairs(ids or {}) do
    if type(id) ~= "number" or not math.tointeger(id) then refuse("stop_token_ids must be a list of token ids", "stop_token_ids") end
    result.ids[math.tointeger(id)] = true
  end
  if not boolean(body, "ignore_eos") then
    for _, id in ipairs(eos) do result.ids[id] = true end
  end
  return result
end

local function check_ids(ids, vocab)
  for i, id in ipairs(ids) do
    local whole = type(id) == "number" and math.tointeger(id)
    if not whole or whole < 0 or whole >= vocab then refuse(("prompt has the token %s; this model has 0 to %d"):format(m.shown(id), vocab - 1), "prompt") end
    ids[i] = whole
  end
  return ids
end

-- A text, a list of ids, or a list of either: a list of {ids=, text=}.
local function prompts_of(body, model)
  local prompt, list = body.prompt, {}
  if prompt == nil then refuse("prompt is missing", "prompt", "missing_parameter") end
  if type(prompt) == "string" or is_list(prompt) and type(prompt[1]) == "number" then prompt = { prompt } end
  if not is_list(prompt) or #prompt == 0 then refuse("prompt must be a text, a list of token ids, or a list of these", "prompt") end
  for i, one in ipairs(prompt) do
    if type(one) == "string" then
      list[i] = { ids = check_ids(model.encode(one), model.vocab), text = one }
    elseif is_list(one) then
      list[i] = { ids = check_ids(one, model.vocab) }
    else
      refuse("prompt must be a text, a list of token ids, or a list of these", "prompt")
    end
  end
  return list
end

-- The text of a message's content: a text, or parts of which all are texts.
local function content_of(content, i)
  if type(content) == "string" then return content end
  local parts = {}
  for j, part in ipairs(is_list(content) and content or refuse(("messages[%d] has no content"):format(i - 1), "messages")) do
    if type(part) ~= "table" or part.type ~= "text" or type(part.text) ~= "string" then
      refuse(("messages[%d]: only parts of the type text are supported"):format(i - 1), "messages")
    end
    parts[j] = part.text
  end
  return table.concat(parts)
end

local function chat_prompt(body, model)
  local messages, list = body.messages, {}
  if not is_list(messages) or #messages == 0 then refuse("messages must be a list of {role, content}", "messages") end
  for i, message in ipairs(messages) do
    if type(message) ~= "table" or type(message.role) ~= "string" then refuse(("messages[%d] has no role"):format(i - 1), "messages") end
    list[i] = { role = message.role, content = content_of(message.content, i) }
  end
  local variables = body.chat_template_kwargs
  if variables ~= nil and (type(variables) ~= "table" or variables[1] ~= nil) then refuse("chat_template_kwargs must be an object", "chat_template_kwargs") end
  local ids, problem = model.chat(list, variables or {})
  if not ids then refuse(problem, "messages") end
  return { { ids = check_ids(ids, model.vocab) } }
end

local function check_plain_text(body)
  local format, choice = body.response_format, body.tool_choice
  if format ~= nil and (type(format) ~= "table" or format.type ~= "text") then refuse("response_format: only {\"type\": \"text\"} is supported", "response_format") end
  if choice ~= nil and choice ~= "none" and choice ~= "auto" then refuse("tool_choice: tools are not supported", "tool_choice") end
end

local function logprobs_of(body, chat)
  if not chat then return integer(body, "logprobs", 0, 20) end
  local count = integer(body, "top_logprobs", 0, 20, 0)
  if not boolean(body, "logprobs") then
    if count > 0 then refuse("top_logprobs needs logprobs", "top_logprobs") end
    return nil
  end
  return count
end

local function check_lengths(r, model)
  for _, prompt in ipairs(r.prompts) do
    local n = #prompt.ids
    if n == 0 then refuse("a prompt needs at least one token", "prompt") end
    if n > model.context or n == model.context and r.max_tokens > 0 and not r.echo then
      refuse(("this model's context is %d tokens, and the prompt has %d"):format(model.context, n), r.chat and "messages" or "prompt", "context_length_exceeded")
    end
  end
  if #r.prompts * r.n > MOST_CHOICES then refuse(("a request has at most %d answers: prompts times n"):format(MOST_CHOICES), "n") end
end

-- A model that reads its prompt as an input gets it as that, and its answer begins with the same ids each time.
local function as_inputs(r, input)
  if r.echo then refuse("echo is not supported: this model reads its prompt as an input", "echo") end
  for _, prompt in ipairs(r.prompts) do
    if #prompt.ids > input.size then
      refuse(("this model reads at most %d tokens, and the prompt has %d"):format(input.size, #prompt.ids), "prompt", "context_length_exceeded")
    end
    prompt.given, prompt.ids = input.elements(prompt.ids), table.move(input.begin, 1, #input.begin, 1, {})
  end
end

local function read(path, body, model)
  check_names(path, body)
  local chat = path == "/v1/chat/completions"
  if body.model ~= nil and body.model ~= model.name then
    refuse(("there is no model %s here; it is %s"):format(m.shown(body.model), model.name), "model", "model_not_found", 404)
  end
  check_plain_text(body)
  if chat and model.input then refuse("this model reads its prompt as an input, and has no conversations: /v1/completions", "messages") end
  local r = { chat = chat, n = integer(body, "n", 1, MOST_CHOICES, 1), echo = not chat and boolean(body, "echo"), stream = boolean(body, "stream") }
  if integer(body, "best_of", 1, MOST_CHOICES, r.n) ~= r.n then refuse("best_of other than n is not supported", "best_of") end
  r.max_tokens = integer(body, "max_completion_tokens", 0, math.maxinteger) or integer(body, "max_tokens", 0, math.maxinteger, chat and model.context or 16)
  if r.max_tokens == 0 and not r.echo then refuse("max_tokens must be 1 or more; 0 with echo", "max_tokens") end
  r.logprobs = logprobs_of(body, chat)
  r.asked, r.stops = sampling_of(body, r.logprobs), stops_of(body, model.eos)
  r.seeded = body.seed ~= nil
  local options = body.stream_options
  if options ~= nil and (type(options) ~= "table" or not r.stream) then refuse("stream_options is an object, and needs stream", "stream_options") end
  r.include_usage = options ~= nil and boolean(options, "include_usage")
  r.prompts = chat and chat_prompt(body, model) or prompts_of(body, model)
  for _, prompt in ipairs(r.prompts) do prompt.count = #prompt.ids end
  if model.input then as_inputs(r, model.input) end
  check_lengths(r, model)
  return r
end

---What a request asks for: {chat=, prompts={{ids=, text=, count= (tokens of the prompt), given= (what the decoder is given)}...}, n=, max_tokens=, asked= (sampling.lua), seeded=, stops=, echo=, logprobs= (how many
---others, or nil), stream=, include_usage=}; nil and a refusal {status=, message=, param=, code=}. model = {name=, context=, vocab=, eos= (ids),
---encode = fn(text), chat = fn(messages, variables) giving ids or nil and the problem, input = what serve.lua says of a model that reads its
---prompt as an input, or nil}.
---@param path string
---@param body table
---@param model table
---@return table? request
---@return table? refusal
function api.read(path, body, model)
  local ok, result = pcall(read, path, body, model)
  if ok then return result end
  if type(result) == "table" and rawget(result, "refusal") then return nil, result end
  error(result, 0)
end

-- Answers ------------------------------------------------------------------------------------------------------------------

local function or_null(value)
  if value == nil then return core.null end
  return value
end

-- Bytes that are no UTF-8 become U+FFFD each.
local function valid(text)
  local at, parts = 1, {}
  while true do
    local _, wrong = utf8.len(text, at)
    if not wrong then break end
    parts[#parts + 1], parts[#parts + 2], at = text:sub(at, wrong - 1), "\u{FFFD}", wrong + 1
  end
  return at == 1 and text or table.concat(parts) .. text:sub(at)
end

-- A token's text; one that is part of a character as OpenAI writes its bytes.
local function token_name(text)
  if utf8.len(text) then return text end
  return "bytes:" .. text:gsub(".", function(c) return ("\\x%02x"):format(c:byte()) end)
end

-- Log probabilities of a completion: entries {text=, logprob=, top={{text=, logprob=}...}, offset=}, logprob and top nil of a text's first token.
local function completion_logprobs(entries)
  local r = { tokens = core.list {}, token_logprobs = core.list {}, top_logprobs = core.list {}, text_offset = core.list {} }
  for i, e in ipairs(entries) do
    local name = token_name(e.text)
    local top = e.logprob and { [name] = e.logprob }
    for _, other in ipairs(top and e.top or {}) do
      local its = token_name(other.text)
      top[its] = math.max(top[its] or -math.huge, other.logprob)
    end
    r.tokens[i], r.token_logprobs[i], r.top_logprobs[i], r.text_offset[i] = name, or_null(e.logprob), or_null(top), e.offset
  end
  return r
end

local function bytes_of(text)
  local list = core.list {}
  for i = 1, #text do list[i] = text:byte(i) end
  return list
end

local function chat_logprobs(entries)
  local content = core.list {}
  for i, e in ipairs(entries) do
    local top = core.list {}
    for j, other in ipairs(e.top or {}) do top[j] = { token = token_name(other.text), logprob = other.logprob, bytes = bytes_of(other.text) } end
    content[i] = { token = token_name(e.text), logprob = or_null(e.logprob), bytes = bytes_of(e.text), top_logprobs = top }
  end
  return { content = content, refusal = core.null }
end

local function logprobs_json(r, entries)
  if not r.logprobs then return core.null end
  return r.chat and chat_logprobs(entries) or completion_logprobs(entries)
end

local function usage(counts) return { prompt_tokens = counts.prompt, completion_tokens = counts.answer, total_tokens = counts.prompt + counts.answer } end

local function envelope(r, object, choices)
  return { id = r.name, object = object, created = r.created, model = r.model, choices = choices }
end

-- Nine digits give an f32 back.
local function to_text(value) return core.to_json(value, 0, 9) end

---The whole answer: choices {text=, reason=, entries=} in the order of their indexes, counts {prompt=, answer=}. The request has name, created and model.
---@param r table
---@param choices table[]
---@param counts table
---@return string
function api.answer(r, choices, counts)
  local list = core.list {}
  for i, c in ipairs(choices) do
    local one = { index = i - 1, finish_reason = c.reason, logprobs = logprobs_json(r, c.entries) }
    if r.chat then one.message = { role = "assistant", content = valid(c.text), refusal = core.null } else one.text = valid(c.text) end
    list[i] = one
  end
  local value = envelope(r, r.chat and "chat.completion" or "text_completion", list)
  value.usage = usage(counts)
  return to_text(value)
end

local function event(value) return "data: " .. to_text(value) .. "\n\n" end

local PLACE = "\1" -- stands for a text, of which JSON makes "\u0001"

-- What comes before and after the text in the events of a choice that differ in it alone: those of each token but the first and the last.
local function around_text(r, index)
  r.around = r.around or {}
  if not r.around[index] then
    local whole = api.piece(r, index, { text = PLACE, entries = {} })
    local first, last = whole:find('"\\u0001"', 1, true)
    r.around[index] = { whole:sub(1, first - 1), whole:sub(last + 1) }
  end
  return r.around[index]
end

---One event of a stream: a piece of the choice `index` (from 0); `first`: its first one; `reason`: its last.
---@param r table
---@param index integer
---@param piece {text: string, entries: table[], first: boolean, reason: string?}
---@return string
function api.piece(r, index, piece)
  local text = valid(piece.text)
  if not (piece.reason or piece.first or r.logprobs or text == PLACE) then
    local around = around_text(r, index)
    return around[1] .. core.to_json(text) .. around[2]
  end
  local one = { index = index, finish_reason = or_null(piece.reason), logprobs = r.logprobs and logprobs_json(r, piece.entries) or core.null }
  if not r.chat then
    one.text = text
  else
    one.delta = {}
    if piece.first then one.delta.role = "assistant" end
    if piece.first or piece.text ~= "" then one.delta.content = text end
  end
  local value = envelope(r, r.chat and "chat.completion.chunk" or "text_completion", { one })
  if r.include_usage then value.usage = core.null end
  return event(value)
end

---The end of a stream.
---@param r table
---@param counts table
---@return string
function api.last(r, counts)
  local text = "data: [DONE]\n\n"
  if not r.include_usage then return text end
  local value = envelope(r, r.chat and "chat.completion.chunk" or "text_completion", core.list {})
  value.usage = usage(counts)
  return event(value) .. text
end

---A stream that fails after it has begun.
---@param message string
---@param code string
---@return string
function api.failure(message, code)
  return event { error = { message = message, type = "server_error", param = core.null, code = code } }
end

---What GET /v1/models and /v1/models/NAME give.
---@param model table
---@param created integer
---@return string list
---@return string one
function api.models(model, created)
  local one = { id = model.name, object = "model", created = created, owned_by = "mlua", max_model_len = model.context }
  return to_text { object = "list", data = { one } }, to_text(one)
end

return api
