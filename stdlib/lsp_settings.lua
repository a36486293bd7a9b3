-- For which mesh, device and settings a script is traced: its first line `--! mesh tp=2,dp=4 device h200 preset=small`, else
-- .mlua.json in the workspace, else the editor's options, each key for itself.
local core = require "mlua.core"
local settings = {}

local MESH, SETTING = "^[%a_][%w_]*=%d+$", "^[%a_][%w_.]*=%S+$"

local function is_mesh(text)
  for item in (text .. ","):gmatch "([^,]*)," do
    if not item:find(MESH) then return false end
  end
  return true
end

-- Words such as "mesh", "tp=2,dp=4", "device", "h200", "preset=small" into result; gives what is wrong with them.
local function read_words(words, result)
  local i = 1
  while words[i] do
    local word, value = words[i], words[i + 1]
    if word == "mesh" or word == "device" then
      if not value then return word .. " has no value" end
      result[word], i = value, i + 1
    elseif word:find(SETTING) then
      table.insert(result.settings, word)
    else
      return ("%q is none of: mesh tp=2,dp=4; device h200; key=value"):format(word)
    end
    i = i + 1
  end
end

local function read_file(path)
  local file = io.open(path)
  if not file then return {} end
  local text = file:read "a"
  file:close()
  local value, problem = core.json(text)
  if type(value) ~= "table" then return {}, path .. " is not valid JSON: " .. (problem or "no object") end
  return value
end

-- The fields of an object of JSON.
local function read_object(object, result)
  if type(object.mesh) == "string" then result.mesh = object.mesh end
  if type(object.device) == "string" then result.device = object.device end
  for key, value in pairs(type(object.settings) == "table" and object.settings or {}) do
    if type(value) ~= "table" then table.insert(result.settings, key .. "=" .. tostring(value)) end
  end
end

---@param options table of the editor
---@param root string? the workspace
---@param source string the script's text
---@return table result mesh, device, settings (a list of key=value), problem
function settings.of(options, root, source)
  local result = { settings = {} }
  read_object(options, result)
  if root then
    local object, problem = read_file(root .. "/.mlua.json")
    read_object(object, result)
    result.problem = problem
  end
  local head = source:match "^%-%-!([^\r\n]*)"
  if head then
    local words = {}
    for word in head:gmatch "%S+" do words[#words + 1] = word end
    result.problem = result.problem or read_words(words, result)
  end
  if result.mesh and not is_mesh(result.mesh) then
    result.problem, result.mesh = ("the mesh %q is not like tp=2,dp=4"):format(result.mesh), nil
  end
  if result.device and not core.lsp_device(result.device) then
    result.problem, result.device = ("there is no device %q"):format(result.device), nil
  end
  result.device = result.device or core.lsp_device() or "cpu"
  return result
end

return settings
