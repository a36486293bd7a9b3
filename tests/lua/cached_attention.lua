-- core.cached_attention over pools that write_rows fills: chunks and single positions of rows of
-- unequal lengths give what m.attention gives of the whole sequences; rings, scores that see
-- positions, shared keys, pools in three dtypes. A step writes its rows alone: it needs no memory of
-- the size of a pool.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
core.compute_dtype "f32"

local ROWS, CONTEXT, BLOCK, HEADS, DIM, NEW = 3, 24, 4, 4, 8, 5
local A = m.axes { row = ROWS, seq = CONTEXT, heads = HEADS, head_dim = DIM, new = NEW }
local slopes = (core.iota(A.heads, "f32") + 1) * 0.05
local function score_of(s, i) return s + (i.k - i.q):cast "f32" * slopes end

-- How many positions each row gets in a turn: one is done first, one begins late, one rests.
local function count_of(turn, row)
  if row == 2 then return turn % 2 == 0 and 0 or NEW end
  return row == 3 and turn == 1 and 0 or row == 1 and NEW or 3
end

-- Blocks in an order that no row has in sequence.
local function tables(columns)
  local list = {}
  for r = 1, ROWS do
    for c = 1, columns do list[#list + 1] = c * ROWS - r end
  end
  return list
end

local function state(name, axes, dtype, init) return m.state { name = name, axes = axes, dtype = dtype or "f32", init = init } end

local function make_step(name, o, inputs, kv, columns)
  local pool = m.axis("pool", (ROWS * columns + 3) * BLOCK)
  local rest = o.shared and { pool, A.head_dim } or { pool, kv, A.head_dim }
  local pools = { state("pool_k_" .. name, rest, o.dtype, 7), state("pool_v_" .. name, rest, o.dtype, 7) }
  return m.compile(function(i)
    local both = { A.row, A.new }
    local at = i.start:broadcast(both) + core.iota(A.new):broadcast(both)
    local fresh = m.lt(core.iota(A.new):broadcast(both), i.count:broadcast(both))
    local function take(x) return x:gather(m.where(fresh, at, -1), "seq") end
    local slot = i.table:gather((at // BLOCK) % columns, "columns") * BLOCK + at % BLOCK
    slot = m.where(fresh, slot, -1)
    local filled = {}
    for n, x in ipairs { inputs.k, inputs.v } do
      filled[n] = pools[n]:read():write_rows(slot, take(x):cast(o.dtype or "f32"), "pool")
      pools[n]:assign(filled[n])
    end
    return { o = core.cached_attention(take(inputs.q), filled[1], filled[2], i.table, i.start, i.start + i.count,
      { seq = "new", causal = true, block = BLOCK, window = o.window, keys = CONTEXT, score = o.score and score_of }) }
  end, { start = { A.row, dtype = "i32" }, count = { A.row, dtype = "i32" },
    table = { A.row, m.axis("columns", columns), dtype = "i32" } }), pools
end

local function compare(name, o)
  local kv = o.kv_heads and m.axis("kv_heads", o.kv_heads) or A.heads
  local axes = o.shared and { A.row, A.seq, A.head_dim } or { A.row, A.seq, kv, A.head_dim }
  local inputs = { q = state("q_" .. name, { A.row, A.seq, A.heads, A.head_dim }, "f32",
    m.normal({ A.row, A.seq, A.heads, A.head_dim }, 1)) }
  for _, key in ipairs { "k", "v" } do inputs[key] = state(key .. "_" .. name, axes, "f32", m.normal(axes, 1)) end
  local function whole_of(x)
    x = x:cast(o.dtype or "f32"):cast "f32"
    return o.shared and x:broadcast { A.row, A.seq, A.heads, A.head_dim } or x
  end
  local expected = m.compile(function()
    return { o = m.attention(inputs.q:read(), whole_of(inputs.k), whole_of(inputs.v),
      { causal = true, window = o.window, score = o.score and score_of }) }
  end, {})({}).o
  local columns = o.columns or CONTEXT // BLOCK
  local step, pools = make_step(name, o, inputs, kv, columns)
  local start, list, done, row = { 0, 0, 0 }, tables(columns), 0, HEADS * DIM
  for turn = 1, 9 do
    local count = {}
    for r = 1, ROWS do count[r] = math.min(count_of(turn, r), CONTEXT - start[r]) end
    local out = step { start = start, count = count, table = list }.o
    for r = 1, ROWS do
      for e = 1, count[r] * row do
        check.near(out[(r - 1) * NEW * row + e], expected[((r - 1) * CONTEXT + start[r]) * row + e], 1e-5, name)
      end
      start[r], done = start[r] + count[r], done + count[r]
    end
  end
  check.equal(done, 24 + 24 + 24, name)
  return step, pools
end

compare("plain", {})
compare("grouped", { kv_heads = 2, score = true })
compare("shared", { shared = true })
compare("window", { window = 7, kv_heads = 1 })
compare("ring", { window = 7, columns = 3, score = true })
compare("bf16", { kv_heads = 2, dtype = "bf16" })
compare("f16", { kv_heads = 2, dtype = "f16" })

check.raises("blocks of 7 positions in a pool of 12", function()
  local t = m.axes { row = 2, new = 1, heads = 2, head_dim = 4, pool = 12, columns = 2 }
  local k, i = m.zeros { t.pool, t.heads, t.head_dim }, m.zeros({ t.row }, "i32")
  core.cached_attention(m.zeros { t.row, t.new, t.heads, t.head_dim }, k, k, m.zeros({ t.row, t.columns }, "i32"), i, i,
    { seq = "new", block = 7 })
end)

-- In place: a program that writes a row of a large pool needs a small arena.
local large = m.axis("pool", 1 << 16)
local pool = state("large", { large, A.head_dim }, "f32", 0)
local write = m.compile(function(i)
  local filled = pool:read():write_rows(i.at, i.value, "pool")
  pool:assign(filled)
  return { sum = filled:sum() }
end, { at = { A.row, dtype = "i32" }, value = { A.row, A.head_dim } })
local ones = {}
for e = 1, ROWS * DIM do ones[e] = 1 end
check.near(write { at = { 5, -1, 65535 }, value = ones }.sum, 2 * DIM)
check.near(write { at = { 5, 7, 65536 }, value = ones }.sum, 3 * DIM)
check.equal(write:plan().arena_bytes < (1 << 16) * DIM * 4 / 2, true, "arena of " .. write:plan().arena_bytes)
check.done()
