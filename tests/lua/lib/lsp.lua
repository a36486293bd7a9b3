-- The protocol's other side, for tests: sessions of `mlua lsp`. All messages are written at once; the request mlua/settled
-- between them waits until open scripts are traced. Paths are below ROOT, which is printed in the place of this folder.
local core = require "mlua.core"
local lsp = {}

local binary = os.getenv "MLUA" or "build/mlua"
local root = core.lsp_path "."

local function uri_of(name) return "file://" .. root .. "/tests/lsp/" .. name end

local Session = {}
Session.__index = Session

---A session whose workspace is tests/lsp; options are those of initialize.
function lsp.session(options, capabilities)
  local session = setmetatable({ messages = {}, texts = {}, versions = {}, count = 0 }, Session)
  options = options or {}
  if options.trusted == nil then options.trusted = true end
  options.device = options.device or "rtx4090" -- whose rates no table has: predicted times change as tables do
  session:request("initialize", { rootUri = "file://" .. root .. "/tests/lsp", capabilities = capabilities or {}, initializationOptions = options })
  session:notify("initialized", {})
  return session
end

function Session:notify(method, params) self.messages[#self.messages + 1] = { jsonrpc = "2.0", method = method, params = params } end

function Session:request(method, params)
  self.count = self.count + 1
  self.messages[#self.messages + 1] = { jsonrpc = "2.0", id = self.count, method = method, params = params }
  return self.count
end

function Session:open(name, text)
  self.texts[name], self.versions[name] = text, 1
  self:notify("textDocument/didOpen", { textDocument = { uri = uri_of(name), languageId = "lua", version = 1, text = text } })
end

---Replace the whole text, or a range of it.
function Session:change(name, text, range)
  self.versions[name] = self.versions[name] + 1
  if not range then self.texts[name] = text end
  self:notify("textDocument/didChange", {
    textDocument = { uri = uri_of(name), version = self.versions[name] }, contentChanges = { { text = text, range = range } },
  })
end

Session.uri = uri_of

function Session:close(name) self:notify("textDocument/didClose", { textDocument = { uri = uri_of(name) } }) end
function Session:settle() self:request("mlua/settled", {}) end

-- Where the n-th "|"-marked place is: "q = |h:dot" is before h.
local function place(text, marked)
  local before, after = marked:match "^(.-)|(.*)$"
  local from = assert(text:find(before .. after, 1, true), marked) + #before
  local line, start = 0, 1
  for at in text:gmatch "\n()" do
    if at > from then break end
    line, start = line + 1, at
  end
  return { line = line, character = from - start }
end

---A request at a place, which is named by the text around it.
function Session:at(method, name, marked, more)
  local params = more or {}
  params.textDocument, params.position = { uri = uri_of(name) }, place(self.texts[name], marked)
  return self:request("textDocument/" .. method, params)
end

function Session:whole(method, name)
  return self:request("textDocument/" .. method, {
    textDocument = { uri = uri_of(name) }, range = { start = { line = 0, character = 0 }, ["end"] = { line = 10000, character = 0 } },
  })
end

---Run the session. Gives the messages of the server.
function Session:run(keep_open)
  local out = os.tmpname()
  if not keep_open then
    self:request("shutdown")
    self:notify("exit")
  end
  local pipe = assert(io.popen(("'%s' lsp > '%s'"):format(binary, out), "w"))
  for _, message in ipairs(self.messages) do
    local body = core.to_json(message)
    pipe:write(("Content-Length: %d\r\n\r\n%s"):format(#body, body))
  end
  assert(pipe:close())
  local file = assert(io.open(out))
  local text, answers, at = file:read "a", {}, 1
  file:close()
  os.remove(out)
  while at <= #text do
    local length, body = text:match("^Content%-Length: (%d+)\r\n\r\n()", at)
    answers[#answers + 1] = core.json(text:sub(body, body + length - 1), "an answer")
    at = body + tonumber(length)
  end
  return answers
end

---The diagnostics of a file that were published last.
function lsp.diagnostics(answers, name)
  local last
  for _, answer in ipairs(answers) do
    if answer.method == "textDocument/publishDiagnostics" and answer.params.uri == uri_of(name) then last = answer.params.diagnostics end
  end
  return last
end

function lsp.text(value) return core.to_json(value) end

---Print a value of the protocol.
function lsp.show(mark, value) print(mark .. " " .. (value == nil and "none" or core.to_json(value)):gsub(root:gsub("%p", "%%%0"), "ROOT")) end

---Run, and print every message of both sides; of completions the first labels. Texts of documents are in the script.
function Session:print()
  local function show(mark, message)
    message.jsonrpc = nil
    local items = type(message.result) == "table" and message.result.items
    for i, item in ipairs(items or {}) do items[i] = item.label .. (item.detail and ": " .. item.detail or "") end
    if items and #items > 12 then
      message.result.items = table.move(items, 1, 12, 1, { [13] = ("%d more"):format(#items - 12) })
    end
    lsp.show(mark, message)
  end
  local answers = self:run()
  local by_id = {}
  for at, answer in ipairs(answers) do
    if answer.id then by_id[answer.id] = { answer, at } end
  end
  -- Notices come when they can: of each kind and file the last is shown, where all traces are done.
  local shown = 1
  local function show_notices(upto)
    local last = {}
    for at = shown, upto do
      local answer = answers[at]
      if answer.method then last[answer.method .. tostring(answer.params.uri)] = at end
    end
    for at = shown, upto do
      local answer = answers[at]
      if answer.method and last[answer.method .. tostring(answer.params.uri)] == at then show("<", answer) end
    end
    shown = upto + 1
  end
  for _, message in ipairs(self.messages) do
    if message.method == "textDocument/didOpen" then message.params.textDocument.text = "..." end
    local change = message.method == "textDocument/didChange" and message.params.contentChanges[1]
    if change and #change.text > 200 then change.text = "..." end
    show(">", message)
    local answer = by_id[message.id]
    if answer and message.method == "mlua/settled" then show_notices(answer[2]) end
    if answer then show("<", answer[1]) end
  end
end

return lsp
