-- Files of tokenizers: where that of --from's weights is, and its copies in runs and exports.
local core = require "mlua.core"
local from = require "mlua.from"
local text_files = require "mlua.text_files"

local files = {}

---What made the tokens that a model was trained on: models to files.
---@type table<Module, string>
files.of_model = setmetatable({}, { __mode = "k" })

local NAMES = { "tokenizer.json", "tokenizer.model", "qwen.tiktoken" } -- as m.tokenizer looks for them in a folder
local BESIDE = { "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json" }

local function in_folder(path)
  for _, name in ipairs(NAMES) do
    if text_files.exists(path .. "/" .. name) then return path .. "/" .. name end
  end
end

---The tokenizer of the weights that --from names: that of a Hugging Face folder, or that a run was trained with; nil where there is none.
---@return string?
function files.of_weights()
  local s = from.source()
  if not s or s.kind == "file" then return nil end
  if s.kind == "hf" then return in_folder(s.path) end
  local settings = from.run_settings()
  local name = settings and settings.tokenizer
  return type(name) == "string" and s.path .. "/../../" .. name or nil
end

---The ids that end an answer by the weights that --from names: eos_token_id of generation_config.json or config.json, and the tokenizer's own.
---@param tokenizer? Tokenizer
---@return integer[]
function files.stops_of_weights(tokenizer)
  local s, set, ids = from.source(), {}, {}
  local function add(value)
    if math.type(value) == "integer" and value >= 0 and not set[value] then
      set[value] = true
      ids[#ids + 1] = value
    end
  end
  for _, name in ipairs(s and s.kind == "hf" and { "generation_config.json", "config.json" } or {}) do
    local text = text_files.read(s.path .. "/" .. name)
    local config = text and core.json(text:gsub("([%[:,]%s*)Infinity", "%10"))
    local eos = type(config) == "table" and config.eos_token_id
    for _, id in ipairs(type(eos) == "table" and eos or { eos or nil }) do add(id) end
  end
  add(tokenizer and tokenizer.eos)
  return ids
end

---Copy a tokenizer, a file or a folder that m.tokenizer takes, and what stands beside it, into a folder that is there. Tokenizers of
---Hugging Face and SentencePiece get the names that other programs look for; a .tiktoken file's own says its pattern.
---@param path string
---@param to string
---@return string? name of the copy in `to`; nil and the problem where it could not be made
---@return string? problem
function files.copy(path, to)
  path = text_files.exists(path) and path or in_folder(path) or path
  local text = text_files.read(path)
  if not text then return nil, path .. " cannot be read" end
  local name, folder = path:match "[^/]*$", path:match "^(.*/)" or ""
  if not name:find "%.tiktoken$" then name = text:find "^%s*{" and "tokenizer.json" or "tokenizer.model" end
  local ok, problem = text_files.write(to .. "/" .. name, text)
  for _, other in ipairs(BESIDE) do
    local beside = ok and text_files.read(folder .. other)
    if beside then ok, problem = text_files.write(to .. "/" .. other, beside) end
  end
  return ok and name, problem
end

return files
