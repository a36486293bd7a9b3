-- Traces of open scripts: a process of its own each, one at a time, the script that was edited last first. Texts that are
-- not saved are handed over; what comes back becomes facts and diagnostics.
local core = require "mlua.core"
local facts_of = require "mlua.lsp_facts"
local settings_of = require "mlua.lsp_settings"
local syntax = require "mlua.syntax"
local texts = require "mlua.lsp_text"

local DELAY, LONGEST = 0.03, 30 -- seconds after a keystroke; of a trace on the clock
local ERROR, WARNING, INFORMATION = 1, 2, 3

local Trace = {}
Trace.__index = Trace

-- Diagnostics ------------------------------------------------------------------------------------------------------------------

-- The text of a file, open or not.
function Trace:text_of(path)
  local document = self.server.documents[path]
  if document then return document.text end
  local file = io.open(path)
  if not file then return texts.new("", self.server.encoding) end
  local source = file:read "a"
  file:close()
  return texts.new(source, self.server.encoding)
end

-- The columns of a line that a message is about: the name that it quotes where the line has it once, else the line's code.
local function columns(line, message)
  for name in message:gmatch "[\"']([%w_.:]+)[\"']" do
    local plain = name:gsub("[.]", "%%.")
    local first, last = line:find("%f[%w_]" .. plain .. "%f[^%w_]")
    if first and not line:find("%f[%w_]" .. plain .. "%f[^%w_]", last + 1) then return first, last end
  end
  local first = line:find "%S" or 1
  local code = line:gsub("%s*%-%-[^%]\"']*$", "")
  return first, math.max(#code, first - 1)
end

function Trace:diagnostic(path, line, message, severity)
  local text = self:text_of(path)
  line = math.min(math.max(line or 1, 1), #text.starts)
  local first, last = columns(text:line(line) or "", message)
  local start = text.starts[line]
  return { range = text:range(start + first - 1, start + last - 1), severity = severity, source = "mlua", message = message }
end

local function related_of(self, facts, operands)
  local list = {}
  for _, operand in ipairs(operands or {}) do
    if operand.file and operand.line then
      local path = facts.path_of(operand.file)
      local at = self:diagnostic(path, operand.line, "", ERROR)
      list[#list + 1] = { location = { uri = texts.uri_of(path), range = at.range }, message = ("%s  %s"):format(operand.name, operand.type) }
    end
  end
  return #list > 0 and list or nil
end

-- The line of the call that an error without a place is about: what does not fit is what m.train trains.
local function training_line(text)
  local at = text.source:find("m%.train%s*[{(]")
  return at and text:line_at(at) or 1
end

-- Diagnostics of a trace, by path.
function Trace:diagnostics_of(document, facts)
  local by_path = { [document.path] = {} }
  local function add(file, line, message, severity)
    local path = file and facts.path_of(file) or document.path
    local item = self:diagnostic(path, line or training_line(document.text), message, severity)
    by_path[path] = by_path[path] or {}
    table.insert(by_path[path], item)
    return item
  end
  local failure = facts.object.error
  if failure then
    local message = (failure.message or failure.text) .. (failure.help and "\nhelp: " .. failure.help or "")
    add(failure.file, failure.line, message, ERROR).relatedInformation = related_of(self, facts, failure.operands)
  end
  for _, hint in ipairs(facts.object.hints) do add(hint.file, hint.line, hint.text, WARNING) end
  local report = facts.object.reports[1]
  for _, filled in ipairs(report and report.filled or {}) do
    add(nil, nil, ("mesh axis %s does not divide %s=%d: %d of each rank, filled up at the end"):format(filled.mesh, filled.axis, filled.size, filled.part), INFORMATION)
  end
  return by_path
end

-- Publish the diagnostics of a script in place of its last ones. A file that several scripts load shows those of all.
function Trace:publish(document, by_path)
  local changed = {}
  for path, by_script in pairs(self.shown) do
    if by_script[document.path] then
      by_script[document.path], changed[path] = nil, true
    end
  end
  for path, list in pairs(by_path) do
    self.shown[path] = self.shown[path] or {}
    self.shown[path][document.path], changed[path] = list, true
  end
  for path in pairs(changed) do
    local all, seen = {}, {}
    for _, list in pairs(self.shown[path]) do
      for _, item in ipairs(list) do
        local key = item.range.start.line .. item.message
        if not seen[key] then all[#all + 1] = item end
        seen[key] = true
      end
    end
    local open = self.server.documents[path]
    self.server:notify("textDocument/publishDiagnostics", {
      uri = open and open.uri or texts.uri_of(path), version = open and open.version, diagnostics = core.list(all),
    })
  end
end

-- Lua's own message about a text that it refuses; nil where it is valid.
function Trace:syntax_error(document)
  local skipped = document.text:skipped()
  local source = document.text.source:sub(skipped + 1)
  local _, problem = load(source, "=x", "t", {})
  if not problem then return nil end
  local line, message = problem:match "^x:(%d+): (.*)$"
  local ok, hint = pcall(syntax.hint, source, tonumber(line) or 1, message or problem)
  return self:diagnostic(document.path, tonumber(line), (message or problem) .. (ok and hint and "\nhelp: " .. hint or ""), ERROR)
end

-- Tracing ----------------------------------------------------------------------------------------------------------------------

---A document was opened or edited: trace it, and the scripts that load it.
function Trace:touch(document)
  local now = core.lsp_clock()
  if self.running then -- what it would find is of an older text
    local path = self.running.document.path
    if path == document.path or self.running.loads[document.path] then self:abort() end
  end
  for path, facts in pairs(self.facts) do
    local other = self.server.documents[path]
    if other and other ~= document and facts.files[document.path] then self.due[path] = now + DELAY end
  end
  self.due[document.path] = now + DELAY
  self.last = document.path
end

function Trace:forget(document)
  if self.running and self.running.document == document then core.lsp_stop() self.running = nil end
  self.due[document.path], self.facts[document.path] = nil, nil
  self:publish(document, {})
end

-- End the trace that runs, and trace its document again.
function Trace:abort()
  core.lsp_stop()
  self.due[self.running.document.path] = self.due[self.running.document.path] or core.lsp_clock() + DELAY
  self.running = nil
end

function Trace:arguments(document)
  local server, root = self.server, self.server:root_of(document.path)
  local given = settings_of.of(server.options, root, document.text.source)
  local folder = root or document.path:match "^(.*)/" or "/"
  local name = document.path:sub(1, #folder + 1) == folder .. "/" and document.path:sub(#folder + 2) or document.path
  local reads = { folder, table.unpack(server.options.read or {}) }
  local words = { "check", name, "--facts", "--quiet", "--buffers", "-", "--confined", table.concat(reads, ":"), "--device", given.device }
  if given.mesh then table.move({ "--mesh", given.mesh }, 1, 2, #words + 1, words) end
  table.move(given.settings, 1, #given.settings, #words + 1, words)
  return words, folder, given
end

-- Whether a file is a script of mlua: other Lua is not run.
local function concerns_mlua(source) return source:find "%f[%w]mlua%f[%W]" or source:find "^%-%-!" end

function Trace:start(document)
  self.due[document.path] = nil
  if not concerns_mlua(document.text.source) then return self:publish(document, {}) end
  local problem = self:syntax_error(document)
  if problem then return self:publish(document, { [document.path] = { problem } }) end
  if not self.server:trusts(document.path) then
    self:publish(document, { [document.path] = {} })
    return self.server:remark_on_trust(document.path)
  end
  local words, folder, given = self:arguments(document)
  if given.problem then
    return self:publish(document, { [document.path] = { self:diagnostic(document.path, 1, given.problem, ERROR) } })
  end
  local buffers = {}
  for path, open in pairs(self.server.documents) do buffers[path] = open.text.source end
  local before = self.facts[document.path]
  self.running = { document = document, folder = folder, version = document.version, began = core.lsp_clock(), loads = before and before.files or {} }
  core.lsp_start(words, core.to_json(buffers), folder)
end

local ENDS = {
  [152] = "the script takes more than 5 s of processor time and was stopped",
  [137] = "the script waits for something and was stopped after 30 s",
}

-- Take a line of the process: of a script that takes long types come first, what plans say later.
function Trace:line(text)
  local running, object = self.running, core.json(text)
  if not running or type(object) ~= "table" then return end
  local document, facts = running.document, facts_of.new(object, running.folder, texts.normal)
  for path, open in pairs(self.server.documents) do facts:place(path, open.text:skipped()) end
  -- A script that fails half way keeps what was known of the rest.
  local before = self.facts[document.path]
  if object.error and before then facts:keep(before) end
  self.facts[document.path], running.facts = facts, facts
end

-- The process has ended.
function Trace:finish(code)
  local running = self.running
  self.running = nil
  if not running then return end
  local document, facts = running.document, running.facts
  if not facts or facts.object.pending then
    local message = ENDS[code] or ("the script could not be traced (exit code %d); the server's log has the reason"):format(code)
    local item = self:diagnostic(document.path, 1, message, ERROR)
    if facts then
      facts.object.pending = nil -- it stays unknown
      item = self:diagnostic(document.path, training_line(document.text), "planning takes more than 10 s: layouts, memory and steps are not known", INFORMATION)
    end
    return self:publish(document, { [document.path] = { item } })
  end
  self:publish(document, self:diagnostics_of(document, facts))
  self.server:traced(document, facts)
end

---Whether nothing is to be traced or is being traced.
function Trace:settled() return not self.running and next(self.due) == nil end

---Start what is due; gives the seconds until the next is.
function Trace:work()
  local now = core.lsp_clock()
  if self.running then
    if now - self.running.began < LONGEST then return LONGEST - (now - self.running.began) end
    core.lsp_stop()
    self:finish(137)
  end
  local chosen, soonest = nil, math.huge
  for path, time in pairs(self.due) do
    if time <= now and (not chosen or path == self.last) then chosen = path end
    soonest = math.min(soonest, time - now)
  end
  if not chosen then return math.min(soonest, 3600) end
  if self.server.documents[chosen] then self:start(self.server.documents[chosen]) else self.due[chosen] = nil end
  return 0
end

---Facts about a file: of the script itself, else of one that loads it.
function Trace:facts_about(path)
  if self.facts[path] and self.facts[path].values[path] then return self.facts[path] end
  for _, facts in pairs(self.facts) do
    if facts.values[path] then return facts end
  end
  return self.facts[path]
end

function Trace:shift(path, ...)
  for _, facts in pairs(self.facts) do facts:shift(path, ...) end
end

return function(server) return setmetatable({ server = server, due = {}, facts = {}, shown = {} }, Trace) end
