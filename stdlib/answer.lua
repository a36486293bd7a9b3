-- The text of a sequence while its tokens are drawn: whole characters, what stops it, and what is held back because a stop text may be
-- starting. m.generate and the server use it.
local core = require "mlua.core"
local m = require "mlua"

local Answer = { __name = "answer" }
Answer.__index = Answer

---What ends answers: {ids = set of token ids, texts = list}, of an integer, a text, or a list of both. nil and the problem where one is wrong.
---@param stop integer|string|(integer|string)[]|nil
---@param whose? string before the name in problems
---@return table?
---@return string? problem
function Answer.stops(stop, whose)
  local result = { ids = {}, texts = {} }
  if stop ~= nil and type(stop) ~= "table" then stop = { stop } end
  for _, one in ipairs(stop or {}) do
    if type(one) == "string" and one ~= "" then
      result.texts[#result.texts + 1] = one
    elseif type(one) == "number" and math.tointeger(one) and one >= 0 then
      result.ids[math.tointeger(one)] = true
    else
      return nil, ("%sstop must be token ids and texts that are not empty, got %s"):format(whose or "", m.shown(one))
    end
  end
  if type(stop) == "table" and stop[1] == nil and next(stop) ~= nil then
    return nil, ("%sstop must be a list of token ids and texts"):format(whose or "")
  end
  return result
end

---A tokenizer's texts of ids of which the model may have more than the tokenizer: those have the text of `names`, or "".
---@param tokenizer Tokenizer
---@param names? table<integer, string>
---@return {stream: (fun(self: table, options?: table): fun(id?: integer): string), decode: fun(ids: integer[]): string}
function Answer.texts(tokenizer, names)
  names = names or {}
  local texts = {}
  local function known(id) return not names[id] and id < tokenizer.size end
  function texts:stream(options)
    local add = tokenizer:stream(options)
    return function(id)
      if id ~= nil and not known(id) then return names[id] or "" end
      return add(id)
    end
  end
  function texts.decode(ids)
    local parts, list = {}, {}
    for _, id in ipairs(ids) do
      if known(id) then
        list[#list + 1] = id
      elseif names[id] then
        parts[#parts + 1], parts[#parts + 2], list = tokenizer:decode(list), names[id], {}
      end
    end
    parts[#parts + 1] = tokenizer:decode(list)
    return table.concat(parts)
  end
  return texts
end

---An answer without tokens. `tokenizer` decodes them; without one ids below 256 are bytes; `names` are the texts of further ids, and others have none. It has at most `limit` tokens.
---@param o {tokenizer: Tokenizer?, stops: table?, names: table<integer, string>?, limit: integer?, before: integer[]?, skip_special: boolean?} before: ids whose text comes before, so that words join as they would
---@return table
function Answer.new(o)
  local self = setmetatable({ ids = {}, parts = {}, held = "", stops = o.stops or { ids = {}, texts = {} }, limit = o.limit or math.huge, names = o.names or {} }, Answer)
  self.stream = o.tokenizer and Answer.texts(o.tokenizer, o.names):stream { skip_special = o.skip_special }
  if self.stream then
    for _, id in ipairs(o.before or {}) do self.stream(id) end
  end
  return self
end

-- Where the first stop text in `text` begins, or nil.
local function first_stop(text, stops)
  local first
  for _, stop in ipairs(stops) do
    local at = text:find(stop, 1, true)
    if at and (not first or at < first) then first = at end
  end
  return first
end

-- How many bytes at the end of `text` may be the beginning of a stop text.
local function begun(text, stops)
  local most = 0
  for _, stop in ipairs(stops) do
    for n = math.min(#stop - 1, #text), most + 1, -1 do
      if text:sub(-n) == stop:sub(1, n) then
        most = n
        break
      end
    end
  end
  return most
end

-- Text that may be shown of what is held and `piece`.
local function release(self, piece, last)
  if self.stops.texts[1] == nil then
    if piece ~= "" then self.parts[#self.parts + 1] = piece end
    return piece
  end
  local text = self.held .. piece
  local at = first_stop(text, self.stops.texts)
  if at then
    self.held, self.reason = "", "stop"
    text = text:sub(1, at - 1)
  else
    local keep = last and 0 or begun(text, self.stops.texts)
    self.held = text:sub(#text - keep + 1)
    text = text:sub(1, #text - keep)
  end
  if text ~= "" then self.parts[#self.parts + 1] = text end
  return text
end

---Add a token. Gives the text that may be shown now, and "stop" or "length" where the answer is over: then that is the last of it. `full`:
---the context has no place for another one.
---@param id integer
---@param full? boolean
---@return string text
---@return string? reason
function Answer:add(id, full)
  self.ids[#self.ids + 1] = id
  local text = ""
  if self.stops.ids[id] then
    self.reason = "stop"
    return self:finish(), self.reason
  end
  text = release(self, self.stream and self.stream(id) or self.names[id] or not self.stream and id < 256 and string.char(id) or "")
  if not self.reason and (full or #self.ids >= self.limit) then
    self.reason = "length"
    text = text .. self:finish()
  end
  return text, self.reason
end

---The rest, where nothing more is added: a character that is not whole, and what was held back.
---@return string
function Answer:finish()
  return release(self, self.stream and self.stream() or "", true)
end

---The whole text so far.
---@return string
function Answer:text()
  return table.concat(self.parts)
end

return Answer
