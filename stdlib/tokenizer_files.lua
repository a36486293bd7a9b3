-- Files of tokenizers: where that of --from's weights is, and its copies in runs and exports.
local core = require "mlua.core"
local from = require "mlua.from"

local files = {}

---What made the tokens that a model was trained on: models to files.
---@type table<Module, string>
files.of_model = setmetatable({}, { __mode = "k" })

local NAMES = { "tokenizer.json", "tokenizer.model", "qwen.tiktoken" } -- as m.tokenizer looks for them in a folder
local BESIDE = { "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json" }

local function read_text(path)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read "a" -- nil: a folder
  file:close()
  return text
end

local function write_text(path, text)
  local file, problem = io.open(path, "wb")
  if not file then return nil, problem end
  local ok, why = file:write(text)
  local closed, reason = file:close()
  return ok and closed, why or reason
end

local function in_folder(path)
  for _, name in ipairs(NAMES) do
    if read_text(path .. "/" .. name) then return path .. "/" .. name end
  end
end

---The tokenizer of the weights that --from names: that of a Hugging Face folder, or that a run was trained with; nil where there is none.
---@return string?
function files.of_weights()
  local s = from.source()
  if not s or s.kind == "file" then return nil end
  if s.kind == "hf" then return in_folder(s.path) end
  local run = s.path .. "/../.."
  local text = read_text(run .. "/settings.json")
  local name = text and core.json(text, run .. "/settings.json").tokenizer
  return type(name) == "string" and run .. "/" .. name or nil
end

---Copy a tokenizer, a file or a folder that m.tokenizer takes, and what stands beside it, into a folder that is there. Tokenizers of
---Hugging Face and SentencePiece get the names that other programs look for; a .tiktoken file's own says its pattern.
---@param path string
---@param to string
---@return string? name of the copy in `to`; nil and the problem where it could not be made
---@return string? problem
function files.copy(path, to)
  path = read_text(path) and path or in_folder(path) or path
  local text = read_text(path)
  if not text then return nil, path .. " cannot be read" end
  local name, folder = path:match "[^/]*$", path:match "^(.*/)" or ""
  if not name:find "%.tiktoken$" then name = text:find "^%s*{" and "tokenizer.json" or "tokenizer.model" end
  local ok, problem = write_text(to .. "/" .. name, text)
  for _, other in ipairs(BESIDE) do
    local beside = ok and read_text(folder .. other)
    if beside then ok, problem = write_text(to .. "/" .. other, beside) end
  end
  return ok and name, problem
end

return files
