-- The language server, `mlua lsp`: JSON-RPC over standard input and output. It answers from the facts of the last trace
-- (lsp_trace.lua), whose process alone runs scripts; a request that needs no facts is answered while a trace runs.
local complete = require "mlua.lsp_complete"
local core = require "mlua.core"
local hover = require "mlua.lsp_hover"
local lens = require "mlua.lsp_lens"
local names = require "mlua.lsp_names"
local places = require "mlua.lsp_places"
local texts = require "mlua.lsp_text"
local trace = require "mlua.lsp_trace"

local FULL_AND_PARTS = 2 -- how edits are sent: ranges of the text, or all of it
local ERROR, INFO = 1, 3 -- kinds of messages
local PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR, NOT_INITIALIZED = -32700, -32600, -32601, -32602, -32603, -32002

local Server = {}
Server.__index = Server

-- Messages ---------------------------------------------------------------------------------------------------------------------

function Server:send(message)
  message.jsonrpc = "2.0"
  core.lsp_send(core.to_json(message))
end

function Server:notify(method, params) self:send { method = method, params = params } end

function Server:reply(id, result) self:send { id = id, result = result == nil and core.null or result } end

---End the request with an error of the protocol.
function Server.refuse(code, message) error { code = code, message = message } end

function Server:fail(id, code, message) self:send { id = id == nil and core.null or id, error = { code = code, message = message } } end

-- Folders ----------------------------------------------------------------------------------------------------------------------

local function is_below(path, folder) return path == folder or path:sub(1, #folder + 1) == folder .. "/" end

---The workspace folder of a file: the innermost.
function Server:root_of(path)
  local best
  for _, folder in ipairs(self.folders) do
    if is_below(path, folder) and (not best or #folder > #best) then best = folder end
  end
  return best
end

---Whether the user trusts the folder of a file, so that its scripts may run.
function Server:trusts(path)
  local trusted = self.options.trusted
  if trusted == true then return self:root_of(path) ~= nil end
  for _, folder in ipairs(type(trusted) == "table" and trusted or {}) do
    if type(folder) == "string" and is_below(path, texts.normal(folder)) then return true end
  end
  return false
end

function Server:remark_on_trust(path)
  if self.remarked then return end
  self.remarked = true
  self:notify("window/showMessage", {
    type = INFO,
    message = ("mlua does not run scripts of folders that are not trusted, so that tensors of %s are unknown: list the folder in the option trusted"):format(path),
  })
end

-- Documents --------------------------------------------------------------------------------------------------------------------

local handlers = {} -- by method: function(server, params, id), gives the result of a request

function Server:document_of(params)
  if type(params.textDocument) ~= "table" or type(params.textDocument.uri) ~= "string" then self.refuse(INVALID_PARAMS, "textDocument.uri is missing") end
  local path = texts.path_of(params.textDocument.uri)
  return self.documents[path and texts.normal(path)]
end

handlers["textDocument/didOpen"] = function(server, params)
  local item = params.textDocument
  local path = texts.path_of(item.uri)
  if not path then return end
  local document = { uri = item.uri, path = texts.normal(path), version = item.version, text = texts.new(item.text, server.encoding) }
  document.parsed = names.parse(item.text)
  server.documents[document.path] = document
  server.trace:touch(document)
end

handlers["textDocument/didChange"] = function(server, params)
  local document = server:document_of(params)
  if not document then return end
  for _, change in ipairs(params.contentChanges) do
    server.trace:shift(document.path, document.text:apply(change))
  end
  document.version = params.textDocument.version
  document.parsed = names.parse(document.text.source)
  server.trace:touch(document)
end

handlers["textDocument/didSave"] = function(server, params)
  local document = server:document_of(params)
  if document then server.trace:touch(document) end
end

handlers["textDocument/didClose"] = function(server, params)
  local document = server:document_of(params)
  if not document then return end
  server.trace:forget(document)
  server.documents[document.path] = nil
end

-- Life -------------------------------------------------------------------------------------------------------------------------

-- null of JSON as nil.
local function given(value)
  if value ~= core.null then return value end
end

-- The editor's options; those that it does not name are unset.
local function read_options(server, options)
  if type(options) ~= "table" then return end
  for _, key in ipairs { "trusted", "mesh", "device", "settings", "read", "inlayHints" } do server.options[key] = given(options[key]) end
end

function handlers.initialize(server, params)
  local general = given((given(params.capabilities) or {}).general) or {}
  for _, encoding in ipairs(given(general.positionEncodings) or {}) do
    if encoding == "utf-8" then server.encoding = encoding end
  end
  read_options(server, given(params.initializationOptions))
  for _, folder in ipairs(given(params.workspaceFolders) or {}) do
    server.folders[#server.folders + 1] = texts.normal(texts.path_of(folder.uri) or "/")
  end
  local root = given(params.rootUri)
  if #server.folders == 0 and root then server.folders[1] = texts.normal(texts.path_of(root) or "/") end
  server.ready = true
  return {
    serverInfo = { name = "mlua" },
    capabilities = {
      positionEncoding = server.encoding, textDocumentSync = { openClose = true, change = FULL_AND_PARTS, save = true },
      hoverProvider = true, inlayHintProvider = true, definitionProvider = true, referencesProvider = true,
      renameProvider = { prepareProvider = true }, codeLensProvider = { resolveProvider = false },
      completionProvider = { triggerCharacters = { ".", ":", "\"", "'", "{", "," }, resolveProvider = true },
    },
  }
end

handlers["initialized"] = function() end
handlers["$/setTrace"] = function() end
handlers["$/cancelRequest"] = function() end -- requests are answered in their order, before the next is read

function handlers.shutdown(server)
  core.lsp_stop()
  server.down = true
end

function handlers.exit(server) server.ended = true end

handlers["workspace/didChangeConfiguration"] = function(server, params)
  read_options(server, given(params.settings) and (params.settings.mlua or params.settings))
  server.remarked = nil
  for _, document in pairs(server.documents) do server.trace:touch(document) end
end

handlers["workspace/didChangeWatchedFiles"] = function(server)
  for _, document in pairs(server.documents) do server.trace:touch(document) end
end

handlers["workspace/didChangeWorkspaceFolders"] = function(server, params)
  for _, folder in ipairs(params.event.removed) do
    local path = texts.normal(texts.path_of(folder.uri) or "/")
    for i = #server.folders, 1, -1 do
      if server.folders[i] == path then table.remove(server.folders, i) end
    end
  end
  for _, folder in ipairs(params.event.added) do server.folders[#server.folders + 1] = texts.normal(texts.path_of(folder.uri) or "/") end
  for _, document in pairs(server.documents) do server.trace:touch(document) end
end

---Answered once every open script has been traced: for tests and status items.
handlers["mlua/settled"] = function(server, _, id) server.waiting = id end

-- Requests ---------------------------------------------------------------------------------------------------------------------

-- A request at a place of an open document.
local function at_place(answer)
  return function(server, params)
    local document = server:document_of(params)
    if not document then return nil end
    if type(params.position) ~= "table" then server.refuse(INVALID_PARAMS, "position is missing") end
    return answer(document, server.trace:facts_about(document.path), document.text:offset(params.position), params, server)
  end
end

handlers["textDocument/hover"] = at_place(hover.at)

handlers["textDocument/inlayHint"] = function(server, params)
  local document = server:document_of(params)
  if not document or server.options.inlayHints == false then return core.list {} end
  return hover.hints(document, server.trace:facts_about(document.path), params.range)
end

handlers["textDocument/completion"] = at_place(complete.at)
handlers["completionItem/resolve"] = function(_, item) return complete.resolve(item) end
handlers["textDocument/definition"] = at_place(places.definition)
handlers["textDocument/references"] = at_place(places.references)
handlers["textDocument/prepareRename"] = at_place(places.prepare)
handlers["textDocument/rename"] = at_place(places.rename)

handlers["textDocument/codeLens"] = function(server, params)
  local document = server:document_of(params)
  return document and lens.of(document, server.trace:facts_about(document.path)) or core.list {}
end

-- After a trace: what a status item shows.
function Server:traced(document, facts)
  local report = facts.object.reports[1]
  if not report then return end
  self:notify("mlua/status", {
    uri = document.uri, parameters = report.parameters, peakBytes = report.peak_bytes, flops = report.flops, device = report.device,
    tokens = report.tokens, seconds = report.predicted and report.predicted.seconds,
    tokensPerSecond = report.predicted and report.predicted.tokens_per_s, failed = facts.object.error ~= nil,
  })
end

-- The loop ---------------------------------------------------------------------------------------------------------------------

function Server:receive(text)
  local message, problem = core.json(text)
  if type(message) ~= "table" then return self:fail(nil, PARSE_ERROR, "no valid JSON: " .. tostring(problem)) end
  local method, id = message.method, message.id
  if type(method) ~= "string" then
    if id == nil then self:fail(nil, INVALID_REQUEST, "a message has a method") end
    return -- the answer to a request: this server sends none
  end
  local handler = handlers[method]
  if not handler then
    if id ~= nil then self:fail(id, METHOD_NOT_FOUND, "there is no method " .. method) end
    return
  end
  if not self.ready and method ~= "initialize" and method ~= "exit" then
    if id ~= nil then self:fail(id, NOT_INITIALIZED, "initialize comes first") end
    return
  end
  if self.down and id ~= nil then return self:fail(id, INVALID_REQUEST, "the server was shut down") end
  local ok, result = pcall(handler, self, given(message.params) or {}, id)
  if not ok and type(result) == "table" and rawget(result, "code") then
    self:fail(id, result.code, result.message)
  elseif not ok then
    self:notify("window/logMessage", { type = ERROR, message = ("%s: %s"):format(method, tostring(result)) })
    if id ~= nil then self:fail(id, INTERNAL_ERROR, tostring(result)) end
  elseif id ~= nil and self.waiting ~= id then
    self:reply(id, result)
  end
end

function Server:run()
  while not self.ended do
    local seconds = self.trace:work()
    if self.waiting ~= nil and self.trace:settled() then
      self:reply(self.waiting, core.null)
      self.waiting = nil
    end
    -- While settling, what follows waits too.
    local what, text, code = core.lsp_wait(seconds, self.waiting == nil)
    if what == "message" then
      self:receive(text)
    elseif what == "line" or what == "process" then
      local ok, problem = pcall(what == "line" and self.trace.line or self.trace.finish, self.trace, what == "line" and text or code)
      if not ok then self:notify("window/logMessage", { type = ERROR, message = tostring(problem) }) end
    elseif what == "end" then
      break
    end
  end
  core.lsp_stop()
end

return function()
  local server = setmetatable({ documents = {}, folders = {}, options = {}, encoding = "utf-16" }, Server)
  server.trace = trace(server)
  server:run()
end
