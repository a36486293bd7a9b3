-- Files of a workspace that belong together by require, whether an editor has opened them or not: in them a name of one may mean
-- what it means in another. They are read and parsed for one request, with what required files return; nothing of them runs.
local core = require "mlua.core"
local names = require "mlua.lsp_names"
local texts = require "mlua.lsp_text"
local workspace = {}

local MOST_FILES, MOST_BYTES, DEEPEST = 2000, 1 << 20, 8
local SKIPPED = { node_modules = true, build = true }

-- The Lua files below a folder.
local function lua_files(folder, depth, found)
  for _, name in ipairs(core.folder(folder) or {}) do
    local path = folder .. "/" .. name
    if #found >= MOST_FILES then return found end
    if name:find "%.lua$" then
      found[#found + 1] = path
    elseif depth < DEEPEST and not name:find "%." and not SKIPPED[name] then
      lua_files(path, depth + 1, found)
    end
  end
  return found
end

---The file that `require(name)` loads in a file of this path; nil where there is none.
---@param path string
---@param name string
---@param root? string of the workspace
function workspace.required(path, name, root)
  name = name:gsub("%.", "/")
  for _, folder in ipairs { path:match "^(.*)/", root } do
    for _, file in ipairs { folder .. "/" .. name .. ".lua", folder .. "/" .. name .. "/init.lua" } do
      if core.lsp_path(file) then return file end
    end
  end
end

local Group = {}
Group.__index = Group

function Group:source(path)
  local open = self.server.documents[path]
  if open then return open.text.source end
  if self.sources[path] == nil then
    local file = io.open(path, "rb")
    local text = file and file:read(MOST_BYTES + 1)
    if file then file:close() end
    self.sources[path] = text and #text <= MOST_BYTES and text or ""
  end
  return self.sources[path]
end

-- What a file requires: paths by name.
function Group:requires(path)
  local known = self.required[path]
  if known then return known end
  known = {}
  self.required[path] = known
  for name in self:source(path):gmatch "require%s*%(?%s*[\"']([%w_%.%-/]+)[\"']" do
    if name ~= "mlua" and not known[name] then known[name] = workspace.required(path, name, self.root) end
  end
  return known
end

-- A value of another file: its tables are numbered by their tokens there.
local function tagged(value, path, depth)
  local result = { makes = value.makes, owner = workspace.owner(value.owner, path) }
  if value.fields and depth < DEEPEST then
    result.fields = {}
    for key, item in pairs(value.fields) do result.fields[key] = tagged(item, path, depth + 1) end
  end
  return result
end

---An owner (lsp_names.lua) with the file of its table: the same in all files.
function workspace.owner(owner, path)
  return owner and owner:gsub("^(table:%d+)%f[^%d@]", function(own) return own .. "@" .. path end) or nil
end

-- The document of a file, with the names of what it requires.
function Group:document(path)
  local known = self.documents[path]
  if known ~= nil then return known end
  self.documents[path] = false -- files that require each other: the second finds nothing of the first
  local imports = {}
  for name, file in pairs(self:requires(path)) do
    local other = self:document(file)
    if other and other.parsed.exports then imports[name] = tagged(other.parsed.exports, file, 0) end
  end
  local open = self.server.documents[path]
  known = {
    path = path, uri = open and open.uri or texts.uri_of(path), parsed = names.parse(self:source(path), imports),
    text = open and open.text or texts.new(self:source(path), self.server.encoding),
  }
  self.documents[path] = known
  return known
end

-- All that is reached from the paths in `reached` by edges(path).
local function reach(reached, edges)
  local queue = {}
  for path in pairs(reached) do queue[#queue + 1] = path end
  while #queue > 0 do
    for _, path in pairs(edges(table.remove(queue))) do
      if not reached[path] then reached[path], queue[#queue + 1] = true, path end
    end
  end
end

---The documents that share names with this one, which comes first: what loads it, and what that loads.
function workspace.related(document, server)
  local root = server:root_of(document.path)
  local group = setmetatable({ server = server, root = root, sources = {}, required = {}, documents = {} }, Group)
  local paths, users, reached = root and lua_files(root, 0, {}) or {}, {}, { [document.path] = true }
  for path in pairs(server.documents) do paths[#paths + 1] = path end
  for _, path in ipairs(paths) do
    for _, file in pairs(group:requires(path)) do
      users[file] = users[file] or {}
      users[file][path] = path
    end
  end
  reach(reached, function(path) return users[path] or {} end)
  reach(reached, function(path) return group:requires(path) end)
  local facts = server.trace:facts_about(document.path)
  for path in pairs(server.documents) do
    if facts and facts.files[path] then reached[path] = true end -- by a name that is computed
  end
  reached[document.path] = nil
  local others, list = {}, { group:document(document.path) }
  for path in pairs(reached) do others[#others + 1] = path end
  table.sort(others)
  for _, path in ipairs(others) do list[#list + 1] = group:document(path) end
  return list
end

return workspace
