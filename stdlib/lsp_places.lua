-- Definition, references and rename of variables, fields of modules, axes and settings.
local core = require "mlua.core"
local names = require "mlua.lsp_names"
local texts = require "mlua.lsp_text"
local workspace = require "mlua.lsp_workspace"
local places = {}

local INVALID_PARAMS = -32602
local NO_AXES = { require = true, module = true, print = true, error = true, assert = true, quotient = true }

local function content(token) return token.kind == "STRING" and token.text:match "^[\"']([%w_]+)[\"']$" or nil end

-- Axes that the text declares, as a set.
local function axes_of(parsed)
  local set = {}
  for _, token in ipairs(parsed.tokens) do
    if token.owner == "axes" and token.key then set[token.text] = true end
    local call = token.call
    if call and call.library and call.name == "axis" and content(token) then set[content(token)] = true end
  end
  return set
end

-- What a token names: {variable=}, {axis=}, {setting=} or {field=, owner=}; nil: nothing of the script's.
local function meaning(document, token, axes)
  if token.variable then return { variable = token.variable } end
  local name = content(token)
  if name then
    if token.call and token.call.config then return { setting = name } end
    return (axes[name] and not (token.call and NO_AXES[token.call.name])) and { axis = name } or nil
  end
  if not token.field or token.method and not (token.owner or ""):find "^class:" then return nil end
  local owner = token.owner
  if owner == "axes" then return { axis = token.field } end
  if owner == "config" then return { setting = token.field } end
  if owner and owner:find "^argument:" then return axes[token.field] and { axis = token.field } or nil end
  if owner and owner:find "^option:" then return nil end
  return owner and owner ~= "library" and { field = token.field, owner = workspace.owner(owner, document.path) } or nil
end

local function same(a, b)
  if not a or not b then return false end
  return a.variable == b.variable and a.axis == b.axis and a.setting == b.setting and a.field == b.field and a.owner == b.owner
end

-- The range of a token's name, without the quotes of a string.
local function name_range(document, token)
  if token.kind == "STRING" then return document.text:range(token.first + 1, token.last - 1) end
  return document.text:range(token.first, token.last)
end

-- Every token that means the same in these documents: {document, token} pairs.
local function occurrences(documents, wanted)
  local list = {}
  for _, document in ipairs(documents) do
    local axes = axes_of(document.parsed)
    if wanted.axis then axes[wanted.axis] = true end
    for _, token in ipairs(document.parsed.tokens) do
      if token.kind ~= "EOF" and same(meaning(document, token, axes), wanted) then list[#list + 1] = { document = document, token = token } end
    end
  end
  return list
end

-- What the token at a byte means, the token, and the documents in which it may occur: this one for a variable.
local function meaning_at(document, offset, server)
  local token = names.token_at(document.parsed, offset)
  if not token then return nil end
  if token.variable then return meaning(document, token), token, { document } end
  local documents, axes = workspace.related(document, server), {}
  for _, other in ipairs(documents) do
    for name in pairs(axes_of(other.parsed)) do axes[name] = true end
  end
  token = names.token_at(documents[1].parsed, offset)
  return meaning(documents[1], token, axes), token, documents
end

local function location(place) return { uri = place.document.uri, range = name_range(place.document, place.token) } end

-- A file that require names.
local function required_file(document, token, server)
  local name = token.kind == "STRING" and token.call and token.call.name == "require" and token.text:match "^[\"'](.*)[\"']$"
  local file = name and workspace.required(document.path, name, server:root_of(document.path))
  local start = { line = 0, character = 0 }
  return file and core.list { { uri = texts.uri_of(file), range = { start = start, ["end"] = start } } } or nil
end

function places.definition(document, _, offset, _, server)
  local wanted, token, documents = meaning_at(document, offset, server)
  if not wanted then return token and required_file(document, token, server) end
  local list, keys = {}, {}
  local variable = wanted.variable
  if variable and variable.token and not variable.token.implicit then
    return core.list { location { document = document, token = variable.token } }
  end
  for _, place in ipairs(occurrences(documents, wanted)) do
    if place.token.sets or place.token.made or place.token.body then list[#list + 1] = location(place) end
    if place.token.key and not keys[1] then keys[1] = location(place) end
  end
  return core.list(keys[1] and { keys[1] } or list)
end

function places.references(document, _, offset, params, server)
  local wanted, _, documents = meaning_at(document, offset, server)
  local list = {}
  local declared = not params.context or params.context.includeDeclaration ~= false
  for _, place in ipairs(wanted and occurrences(documents, wanted) or {}) do
    local declares = place.token.key or wanted.variable and place.token == wanted.variable.token
    if declared or not declares then list[#list + 1] = location(place) end
  end
  return core.list(list)
end

-- Whether it may be renamed: forward is what the library calls.
local function can_rename(wanted)
  if wanted and wanted.field == "forward" then return false end
  local variable = wanted and wanted.variable
  return wanted and not (variable and (not variable.token or variable.token.implicit) and variable.kind ~= "global")
end

function places.prepare(document, _, offset, _, server)
  local wanted, token = meaning_at(document, offset, server)
  return can_rename(wanted) and name_range(document, token) or nil
end

-- Why the new name cannot be taken; nil where it can.
local function conflict(document, wanted, to)
  local token = core.tokens(to)
  if #token ~= 2 or token[1].kind ~= "NAME" then return ("%q is no name of Lua"):format(to) end
  if wanted.variable then
    for _, other in ipairs(document.parsed.variables) do
      local meet = other.from <= wanted.variable.till and wanted.variable.from <= other.till
      if other ~= wanted.variable and other.name == to and #other.uses > 0 and meet then return to .. " is a variable there already" end
    end
  elseif wanted.axis then
    if axes_of(document.parsed)[to] then return ("the script has an axis %q already"):format(to) end
  else
    for _, other in ipairs(document.parsed.tokens) do
      local taken = meaning(document, other, {})
      if taken and (wanted.setting and taken.setting == to or wanted.field and taken.field == to and taken.owner == wanted.owner) then return to .. " is taken already" end
    end
  end
end

function places.rename(document, _, offset, params, server)
  local wanted, _, documents = meaning_at(document, offset, server)
  if not can_rename(wanted) then server.refuse(INVALID_PARAMS, "nothing of the script's is here to be renamed") end
  for _, other in ipairs(documents) do
    local problem = conflict(other, wanted, params.newName)
    if problem then server.refuse(INVALID_PARAMS, other == documents[1] and problem or problem .. ": " .. other.path) end
  end
  local changes = {}
  for _, place in ipairs(occurrences(documents, wanted)) do
    local uri = place.document.uri
    changes[uri] = changes[uri] or core.list {}
    table.insert(changes[uri], { range = name_range(place.document, place.token), newText = params.newName })
  end
  return { changes = changes }
end

return places
