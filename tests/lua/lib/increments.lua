-- Increments of a model against its whole program: sequences of drawn lengths are read in chunks of drawn sizes and single positions, by
-- rows that change from call to call, some of them without work, in slots and blocks that later sequences use again.
local m = require "mlua"
local core = require "mlua.core"

local ROWS, SLOTS, SEQUENCES = 2, 3, 5

local function take(list, draw) return table.remove(list, draw(#list)) end

-- Places of the pool and slots that sequences hold.
local function places(columns, draw)
  local free, slots = {}, {}
  for i = 1, SLOTS * columns do free[i] = i - 1 end
  for i = 1, SLOTS do slots[i] = i - 1 end
  return {
    has_slot = function() return #slots > 0 end,
    open = function(s) s.slot, s.at, s.blocks = take(slots, draw), 0, {} end,
    grow = function(s, positions, block)
      while #s.blocks * block < positions do s.blocks[#s.blocks + 1] = take(free, draw) end
    end,
    close = function(s)
      slots[#slots + 1] = s.slot
      for _, b in ipairs(s.blocks) do free[#free + 1] = b end
      s.slot, s.blocks = nil, nil
    end,
  }
end

local function check_row(report, s, at, got, first, vocab)
  local best, second, best_got = -math.huge, -math.huge, -math.huge
  local chosen, chosen_got
  for id = 1, vocab do
    local a, b = got[first + id], s.wanted[at * vocab + id]
    local off = math.abs(a - b) / math.max(1, math.abs(b))
    if not (off <= report.worst) then report.worst, report.where = off, ("sequence %d, position %d"):format(s.index, at) end
    if b > best then best, second, chosen = b, best, id elseif b > second then second = b end
    if a > best_got then best_got, chosen_got = a, id end
  end
  report.positions, report.sum = report.positions + 1, report.sum + got[first + s.ids[at + 1] + 1]
  if chosen ~= chosen_got and best - second > 4e-5 then report.argmax = report.argmax + 1 end
end

-- One call of a program of `new` positions a row for sequences that are open; the others of its rows have no work.
local function advance(p, rows, open, draw, report, vocab, context)
  local feed = { tokens = {}, start = {}, count = {}, slots = {}, table = {} }
  local idle = {}
  for slot = 0, SLOTS - 1 do idle[slot] = true end
  for row = 1, ROWS do
    if rows[row] then idle[rows[row].slot] = nil end
  end
  local others = {}
  for slot = 0, SLOTS - 1 do others[#others + 1] = idle[slot] and slot or nil end
  for row = 1, ROWS do
    local s = rows[row]
    local count = s and math.min(draw(p.new), s.stop - s.at) or 0
    feed.start[row], feed.count[row] = s and s.at or draw(context) - 1, count
    feed.slots[row] = s and s.slot or take(others, draw)
    if s then open.grow(s, s.at + count, p.block) end
    for i = 1, p.new do feed.tokens[#feed.tokens + 1] = i <= count and s.ids[s.at + i] or draw(vocab) - 1 end
    for c = 1, p.columns do feed.table[#feed.table + 1] = s and s.blocks[c] or 0 end
  end
  local got = p.program(feed)
  for row = 1, ROWS do
    local s, count = rows[row], feed.count[row]
    for i = p.last and math.max(count, 1) or 1, count do
      local first = p.last and (row - 1) * vocab or ((row - 1) * p.new + i - 1) * vocab
      check_row(report, s, s.at + i - 1, got, first, vocab)
    end
    if s then s.at = s.at + count end
  end
end

---Programs of increments of `model` ({forward(tokens, A), A}, of drawn.lua): a list of {program, new, last}, and the states that they keep.
local function programs(model, sizes, block)
  local A, most = model.A, 1
  for _, size in ipairs(sizes) do most = math.max(most, size.new) end -- where windows are held in rings
  local whole = core.input("whole", { A.batch, A.seq }, "i32")
  local logits, kept = model.forward(whole, A), core.increment_states()
  local row, columns = m.axis("row", ROWS), m.axis("columns", (A.seq.size + block - 1) // block)
  local list = {}
  for i, size in ipairs(sizes) do
    local new, last = m.axis("new", size.new), size.last
    list[i] = { new = size.new, last = last, block = block, columns = columns.size }
    list[i].program = m.compile(function(f)
      local y = core.increment(logits, {
        tokens = whole, seq = A.seq.name, kept = kept, new = f.tokens, start = f.start, count = f.count, slots = f.slots, table = f.table,
        pool = SLOTS * columns.size * block, slots_max = SLOTS, block = block, last = last, new_max = most,
      })
      y = m.log_softmax(y:cast "f32", A.vocab.name)
      return last and y:permute("row", A.vocab.name) or y:permute("row", "new", A.vocab.name)
    end, {
      tokens = { row, new, dtype = "i32" }, start = { row, dtype = "i32" }, count = { row, dtype = "i32" }, slots = { row, dtype = "i32" },
      table = { row, columns, dtype = "i32" },
    }, { name = size.new == 1 and "step" or "chunk" })
  end
  return list, kept
end

---Compare: {worst = the largest difference of a log probability, relative where that is above 1, where, argmax = how many
---positions choose another token, positions, sum (of the log probabilities of one token each), kept}.
---`whole()` is a program: tokens {1, seq} -> log probabilities {1, seq, vocab}.
return function(model, whole, draw)
  local A, block = model.A, ({ 4, 8, 16 })[draw(3)]
  local vocab, length = A.vocab.size, A.seq.size
  local sizes = { { new = 1, last = true }, { new = 1 + draw(8), last = draw(4) == 1 } }
  local list, kept = programs(model, sizes, block)
  local program, waiting, active = whole(), {}, {}
  for k = 0, SEQUENCES - 1 do
    local s = { index = k, stop = k == 0 and length or draw(length), ids = {} }
    for i = 1, length do s.ids[i] = draw(vocab) - 1 end
    s.wanted, waiting[k + 1] = program { tokens = s.ids }, s
  end
  local open, report = places((length + block - 1) // block, draw), { worst = 0, argmax = 0, positions = 0, sum = 0, where = "", kept = kept }
  while #waiting + #active > 0 do
    while #waiting > 0 and open.has_slot() and (#active == 0 or draw(2) == 1) do
      local s = table.remove(waiting, 1)
      open.open(s)
      active[#active + 1] = s
    end
    local rows, left = {}, table.move(active, 1, #active, 1, {})
    for row = 1, ROWS do
      if #left > 0 and draw(5) > 1 then rows[row] = take(left, draw) end
    end
    advance(list[draw(#list)], rows, open, draw, report, vocab, length)
    for i = #active, 1, -1 do
      if active[i].at == active[i].stop then open.close(table.remove(active, i)) end
    end
  end
  return report
end
