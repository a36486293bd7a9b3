-- Tokenizers: text to token ids and back.
local core = require "mlua.core"
local jinja = require "mlua.jinja"
local m = require "mlua"
local text_files = require "mlua.text_files"
local write_chat = require "mlua.jinja_run"

local Tokenizer = { __name = "tokenizer" }
Tokenizer.__index = Tokenizer

local function check_text(what, value)
  if type(value) ~= "string" then core.fail(("%s must be a text, got %s"):format(what, m.shown(value))) end
  return value
end

local function check_id(what, id, size)
  local integer = type(id) == "number" and math.tointeger(id)
  if not integer or integer < 0 or integer >= size then
    core.fail(("%s must be an integer from 0 to %d, got %s"):format(what, size - 1, m.shown(id)))
  end
  return integer
end

local function check_self(self, name)
  if getmetatable(self) ~= Tokenizer then
    core.fail(("%s is a method of a tokenizer"):format(name), { help = ("local t = m.tokenizer(path); t:%s(...)"):format(name) })
  end
end

---The ids of a text, all of it: truncation and padding that a tokenizer.json has are not applied. `special` adds the
---tokens that the tokenizer puts around a text (bos, eos); `plain` takes special tokens that the text spells, as
---"<|endoftext|>", for ordinary text.
---@param text string
---@param options? {special: boolean, plain: boolean}
---@return integer[]
function Tokenizer:encode(text, options)
  check_self(self, "encode")
  m.check_options("encode", options, { "special", "plain" })
  options = options or {}
  return self.core:encode(check_text("what a tokenizer encodes", text), options.special, options.plain)
end

---How many ids encode gives for a text, without the table of them.
---@param text string
---@param options? {special: boolean, plain: boolean}
---@return integer
function Tokenizer:count(text, options)
  check_self(self, "count")
  m.check_options("count", options, { "special", "plain" })
  options = options or {}
  return self.core:count(check_text("what a tokenizer encodes", text), options.special, options.plain)
end

---The text of ids, of which `skip_special` leaves special tokens out.
---@param ids integer[]
---@param options? {skip_special: boolean}
---@return string
function Tokenizer:decode(ids, options)
  check_self(self, "decode")
  m.check_options("decode", options, { "skip_special" })
  if type(ids) ~= "table" then core.fail("what a tokenizer decodes must be a list of ids, got " .. m.shown(ids)) end
  for i = 1, #ids do check_id(("id %d"):format(i), ids[i], self.size) end
  return self.core:decode(ids, options and options.skip_special)
end

---A function that gives the text of one id after the other, whole characters each time, and without an id what is left:
---for text that is shown while it is made.
---@param options? {skip_special: boolean}
---@return fun(id?: integer): string
function Tokenizer:stream(options)
  check_self(self, "stream")
  m.check_options("stream", options, { "skip_special" })
  local decoder, size = self.core:stream(options and options.skip_special), self.size
  return function(id)
    return decoder:add(id ~= nil and check_id("the id", id, size) or nil)
  end
end

---The id of a token by its text as the file has it, as "<|endoftext|>"; nil where it has none.
---@param token string
---@return integer?
function Tokenizer:id(token)
  check_self(self, "id")
  return self.core:id(check_text("a token", token))
end

---The text of a token as the file has it; nil where the id is none.
---@param id integer
---@return string?
function Tokenizer:token(id)
  check_self(self, "token")
  return self.core:token(check_id("the id", id, self.size))
end

-- The template that the model's folder has and the texts of its special tokens.
local function chat_of(self)
  local folder = self.name:match "^(.*)/[^/]*%.[%w]+$" or (self.name:find "/" or not self.name:find "%.") and self.name or "."
  local config = core.json(text_files.read(folder .. "/tokenizer_config.json") or "{}", folder .. "/tokenizer_config.json")
  local template, variables = text_files.read(folder .. "/chat_template.jinja") or config.chat_template, {}
  for key, value in pairs(config) do
    if key:find "_token$" then variables[key] = type(value) == "table" and value.content or value end
  end
  if type(template) == "table" then -- several, by name
    local list = template
    for _, entry in ipairs(list) do
      if entry.name == "default" then template = entry.template end
    end
  end
  if type(template) ~= "string" then
    core.fail("the tokenizer " .. self.name .. " has no chat template", { help = "chat(messages, { template = text }), or chat_template.jinja beside the tokenizer" })
  end
  return template, variables
end

---The text of a conversation as the model was trained on it, by its chat template (that of tokenizer_config.json or
---chat_template.jinja beside the tokenizer, or `template`), and the text's ids. `prompt` has it end where the model's answer
---begins (default true); other options are variables of the template, as tools or enable_thinking.
---@param messages {role: string, content: string}[]
---@param options? {prompt: boolean, template: string}
---@return string text
---@return integer[] ids
function Tokenizer:chat(messages, options)
  check_self(self, "chat")
  if type(messages) ~= "table" or type(messages[1]) ~= "table" then
    core.fail("chat takes a list of messages, got " .. m.shown(messages), { help = 't:chat { { role = "user", content = "Hello" } }' })
  end
  if options ~= nil and type(options) ~= "table" then core.fail("chat's options must be a table, got " .. m.shown(options)) end
  options = options or {}
  local template, variables = options.template, {}
  if template == nil then template, variables = chat_of(self) end
  check_text("the template of chat", template)
  for key, value in pairs(options) do
    if type(key) ~= "string" then core.fail("chat's options are named, got " .. m.shown(key)) end
    if key ~= "prompt" and key ~= "template" then variables[key] = value end
  end
  variables.messages, variables.add_generation_prompt = messages, options.prompt ~= false
  local text = write_chat(jinja.parse(template), variables)
  return text, self:encode(text)
end

function Tokenizer:__tostring()
  return ("tokenizer of %d ids from %s"):format(self.size, self.name)
end

---A tokenizer: a tokenizer.json, .tiktoken, SentencePiece .model, or the folder that holds one; "bytes" makes each
---byte a token. Its fields: size (one more than the largest id), name, bos and eos (the ids that begin and end a text, or nil).
---@param path string
---@return Tokenizer
function m.tokenizer(path)
  local handle = core.tokenizer(check_text("the path of m.tokenizer", path))
  local t = setmetatable({ core = handle }, Tokenizer)
  t.name, t.size, t.bos, t.eos = handle:facts()
  return t
end

return Tokenizer
