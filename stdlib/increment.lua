-- What a decoder (decode.lua) keeps of its sequences where the step of the model is derived (core.increment): slots, and blocks of positions
-- that sequences hold while they are open. Blocks of a prompt that are whole are shared by sequences that begin alike. A slot has rings of the
-- last positions too, for attention with a window: of the window and one chunk, of which a sequence that begins alike gets a copy.
local core = require "mlua.core"
local m = require "mlua"

local Cache = { __name = "cache" }
Cache.__index = Cache

local BLOCK = 16 -- positions

Cache.CHUNK = 512 -- new positions of a row, at most, where a decoder says nothing else

---@param o {context: integer, slots: integer, positions: integer?, chunk: integer?} positions: of all sequences together; default: as many as they can have; chunk: the most new positions of a row
---@return table
function Cache.new(o)
  local columns = (o.context + BLOCK - 1) // BLOCK
  local count = math.max(columns, ((o.positions or o.slots * columns * BLOCK) + BLOCK - 1) // BLOCK)
  local self = setmetatable({ kept = core.increment_states(), columns = columns, slots = o.slots, count = count, free = {}, slot_free = {}, holders = {}, chunk = o.chunk or Cache.CHUNK }, Cache)
  for i = count - 1, 0, -1 do self.free[#self.free + 1] = i end
  for i = o.slots - 1, 0, -1 do self.slot_free[#self.slot_free + 1] = i end
  return self
end

---Blocks that `positions` positions take.
---@param positions integer
---@return integer
function Cache.blocks_for(positions) return (positions + BLOCK - 1) // BLOCK end

---Whether a sequence may begin with the blocks of another one: nothing is kept but by position, or in rings.
---@return boolean
function Cache:shares()
  if self.all_by_position == nil then
    self.all_by_position, self.rings = true, {}
    for _, kept in ipairs(self.kept:list()) do
      self.all_by_position = self.all_by_position and kept.kind ~= "slot"
      if kept.kind == "ring" then self.rings[#self.rings + 1] = kept end
    end
  end
  return self.all_by_position
end

---A slot, and blocks for `positions` positions, for a sequence; with `like` the whole blocks of another one's prompt, which are read. nil and what is short.
---@param s table gets slot, blocks and cached, the number of positions that are known
---@param positions integer
---@param like? table
---@return boolean?
---@return string? why
function Cache:open(s, positions, like)
  if #self.slot_free == 0 then return nil, "slots" end
  local shared = 0
  if like and like.blocks and self:shares() then shared = math.min(like.cached, like.prompt - 1, positions - 1) // BLOCK end
  if shared > 0 and #self.rings > 0 and like.cached - shared * BLOCK > self.chunk then shared = 0 end -- its rings hold later positions by now
  if Cache.blocks_for(positions) - shared > #self.free then return nil, "blocks" end
  s.slot, s.blocks, s.cached = table.remove(self.slot_free), {}, shared * BLOCK
  if shared > 0 and #self.rings > 0 then self:copy_rings(s.slot, like.slot) end
  for i = 1, shared do
    s.blocks[i] = like.blocks[i]
    self.holders[s.blocks[i]] = self.holders[s.blocks[i]] + 1
  end
  self:grow(s, positions)
  return true
end

-- The rings of a slot become those of another one.
function Cache:copy_rings(slot, from)
  if not self.copy then
    local row = core.axis("row", 1)
    self.copy = m.compile(function(i)
      for _, kept in ipairs(self.rings) do
        local held, place = kept.state:read(), core.axis("place", kept.ring)
        local function places(slot) return (slot * kept.ring):broadcast { row, place } + core.iota(place, "i32") end
        kept.state:assign(held:write_rows(places(i.slots), held:gather(places(i.from), "pool"), "pool"))
      end
    end, { slots = { row, dtype = "i32" }, from = { row, dtype = "i32" } }, { name = "share", often = true })
  end
  self.copy { slots = { slot }, from = { from } }
end

---Blocks for so many positions of an open sequence.
---@param s table
---@param positions integer
function Cache:grow(s, positions)
  while #s.blocks < Cache.blocks_for(positions) do
    local block = table.remove(self.free)
    if not block then core.fail("no block of the cache is free: a sequence must be closed before a step that needs one") end
    self.holders[block] = 1
    s.blocks[#s.blocks + 1] = block
  end
end

---The sequence gives back what it holds.
---@param s table
function Cache:close(s)
  if not s.blocks then return end
  for _, block in ipairs(s.blocks) do
    self.holders[block] = self.holders[block] - 1
    if self.holders[block] == 0 then self.free[#self.free + 1] = block end
  end
  self.slot_free[#self.slot_free + 1] = s.slot
  s.blocks, s.slot = nil, nil
end

---The inputs of a program of `new` positions of each row.
---@param row Axis
---@param new Axis
---@return table<string, table>
function Cache:inputs(row, new)
  local columns = core.axis("columns", self.columns)
  return {
    tokens = { row, new, dtype = "i32" }, start = { row, dtype = "i32" }, count = { row, dtype = "i32" }, slots = { row, dtype = "i32" },
    table = { row, columns, dtype = "i32" },
  }
end

---Host arrays for them.
---@param rows integer
---@param new integer
---@return table<string, Host>
function Cache:hosts(rows, new)
  local function integers(...) return core.host("i32", ...):fill(0) end
  return { tokens = integers(rows, new), start = integers(rows), count = integers(rows), slots = integers(rows), table = integers(rows, self.columns) }
end

---Logits of the new positions, while a program is traced: {row, new, vocabulary}, or with `last` {row, vocabulary} of each row's last.
---@param whole {logits: Tensor, tokens: Tensor, seq: string}
---@param i table the program's inputs
---@param last boolean
---@return Tensor
function Cache:logits(whole, i, last)
  return core.increment(whole.logits, {
    tokens = whole.tokens, seq = whole.seq, kept = self.kept, new = i.tokens, start = i.start, count = i.count, slots = i.slots, table = i.table,
    pool = self.count * BLOCK, slots_max = self.slots, block = BLOCK, last = last, given = whole.given, new_max = self.chunk,
  })
end

---Assign what depends on what a prompt gives to its slot, while a program is traced: its inputs are whole.inputs.
---@param whole table
---@param slots Tensor i32 over an axis of size 1
function Cache:give(whole, slots)
  core.increment_give(whole.logits, { tokens = whole.tokens, seq = whole.seq, kept = self.kept, slots = slots, slots_max = self.slots, given = whole.given })
  self.given = core.take_updates()
  for _, update in ipairs(self.given) do update[1]:assign(update[2]) end
end

---Assign to one slot what another one holds of the same prompt, while a program is traced.
---@param slots Tensor i32 over an axis of size 1
---@param from Tensor likewise
function Cache:give_from(slots, from)
  for _, update in ipairs(self.given) do
    local held = update[1]:read()
    update[1]:assign(held:write_rows(slots, held:gather(from, "slots"), "slots"))
  end
end

---The rows of a program for the sequences of a list. Where there is one for each slot, that of its slot: what a row has been fed stays.
---@param rows integer
---@param list table[]
---@return integer[]
function Cache:rows(rows, list)
  local result = {}
  for i, s in ipairs(list) do result[i] = rows == self.slots and s.slot + 1 or i end
  return result
end

---What a program of `new` positions is fed of the next `counts[i]` tokens of the sequences of a list; its other rows have no work.
---@param hosts table<string, Host>
---@param list table[]
---@param rows integer[] of each sequence (Cache:rows)
---@param counts integer[]
---@param new integer
---@param fed table<integer, {sequence: table, blocks: integer, count: integer}> of each row what it has been fed: its sequence, how many of its blocks, and how many tokens
function Cache:feed(hosts, list, rows, counts, new, fed)
  local start, tokens, columns = hosts.start, hosts.tokens, hosts.table
  local taken, next_slot, used = {}, 0, {}
  for i, s in ipairs(list) do
    local row, n, first, ids = rows[i], counts[i], s.cached, s.ids
    local known, blocks = fed[row], s.blocks
    if not known or known.sequence ~= s then
      known = { sequence = s, blocks = 0 }
      fed[row], hosts.slots[row] = known, s.slot
    end
    if first + n > BLOCK * #blocks then self:grow(s, first + n) end
    if known.count ~= n then hosts.count[row], known.count = n, n end
    start[row], taken[s.slot], used[row] = first, true, true
    for j = 1, n do tokens[(row - 1) * new + j] = ids[first + j] end
    for j = known.blocks + 1, #blocks do columns[(row - 1) * self.columns + j] = blocks[j] end
    known.blocks = #blocks
  end
  for row = 1, #list < #start and #start or 0 do -- slots that no row works for
    if not used[row] then
      while taken[next_slot] do next_slot = next_slot + 1 end
      start[row], hosts.count[row], hosts.slots[row], fed[row] = 0, 0, next_slot, nil
      next_slot = next_slot + 1
    end
  end
end

return Cache
