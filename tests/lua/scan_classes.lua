-- m.scan in its derived forms, of drawn steps of every class, against the loop in f64 on the same inputs: results, first and second
-- gradients, relative in L2. LONG=1 runs all of them.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local long = os.getenv "LONG" == "1"
local seed = tonumber(os.getenv "SCAN_SEED" or "") or 1

local state = seed
local function draw(n) -- 1 .. n
  state = (state * 1103515245 + 12345) % 2147483648
  return state // 65536 % n + 1
end
local function choose(list) return list[draw(#list)] end

local B, H, K, V = 2, 2, 4, 3
local function axes(length)
  return m.axes { batch = B, seq = length, h = H, k = K, v = V }
end

-- The pieces of steps: each computes the same in any of its spellings. `w` repeats over a state's axes.
local function pieces(A)
  local p = {}
  function p.keys(x) return x:broadcast { A.batch, A.h, A.k } end
  function p.wide(x) return x:broadcast { A.batch, A.h, A.k, A.v } end
  function p.outer(key, value)
    return choose {
      function() return p.wide(key) * value end,
      function() return p.wide(value) * key end,
      function() return -(p.wide(-key) * value) end,
      function() return p.wide(value * 0.5) * (key * 2) end,
    }()
  end
  function p.read(S, q)
    return choose {
      function() return S:dot(q, "k") end,
      function() return q:dot(S, "k") end,
      function() return (S * p.wide(q)):sum "k" end,
      function() return -(-S):dot(q, "k") end,
    }()
  end
  function p.add(a, b)
    return choose { function() return a + b end, function() return b + a end, function() return a - -b end }()
  end
  function p.decay(S, g)
    return choose { function() return S * p.wide(g) end, function() return p.wide(g) * S end, function() return S - (1 - p.wide(g)) * S end }()
  end
  function p.delta(S, key, beta, value) -- S + beta k (v - k S)
    local kb = choose { function() return key * p.keys(beta) end, function() return p.keys(beta) * key end }()
    return choose {
      function() return p.add(S, p.outer(key, beta * (value - p.read(S, key)))) end,
      function() return p.add(S - p.outer(kb, p.read(S, key)), p.outer(kb, value)) end,
      function() return p.add(p.outer(key, beta * value), S - p.outer(key, beta * p.read(S, key))) end,
      function() return p.add(S, p.outer(kb, value - p.read(S, key))) end,
    }()
  end
  return p
end

-- {states, step}: step(s, t, p) gives the new states and what is read. t: q, k, u of unit length, v, g and a in (0, 1), b in (0, 1), i.
local matrix = { S = "hkv" }
local function read(p, before, after, q) return draw(4) == 1 and p.read(before, q) or p.read(after, q) end
local classes = {
  linear = { matrix, function(s, t, p)
    local S = p.add(s.S, p.outer(t.k * 0.1, t.v))
    return { S = S }, read(p, s.S, S, t.q)
  end },
  retnet = { matrix, function(s, t, p)
    local S = p.add(p.decay(s.S, t.one * 0.9), p.outer(t.k, t.v))
    return { S = S }, read(p, s.S, S, t.q)
  end },
  mamba2 = { matrix, function(s, t, p)
    local S = p.add(p.decay(s.S, t.g), p.outer(t.k, t.v * t.b))
    return { S = S }, read(p, s.S, S, t.q)
  end },
  gla = { matrix, function(s, t, p)
    local S = p.add(p.decay(s.S, t.a), p.outer(t.k, t.v))
    return { S = S }, read(p, s.S, S, t.q)
  end },
  mlstm = { { C = "hkv", n = "hk", m = "h" }, function(s, t, p)
    local last = m.maximum(m.log(t.g) + s.m, t.i)
    local f, i = m.exp(m.log(t.g) + s.m - last), m.exp(t.i - last)
    local C, n = p.add(s.C * f, p.outer(t.k, t.v * i)), s.n * f + p.keys(i) * t.k
    return { C = C, n = n, m = last }, p.read(C, t.q) / m.maximum(m.abs(n:dot(t.q, "k")), m.exp(-last))
  end },
  delta = { matrix, function(s, t, p)
    local S = p.delta(s.S, t.k, t.b, t.v)
    return { S = S }, read(p, s.S, S, t.q)
  end },
  gated_delta = { matrix, function(s, t, p)
    local S = p.delta(p.decay(s.S, t.g), t.k, t.b, t.v)
    return { S = S }, read(p, s.S, S, t.q)
  end },
  kda = { matrix, function(s, t, p)
    local S = p.delta(p.decay(s.S, t.a), t.k, t.b, t.v)
    return { S = S }, read(p, s.S, S, t.q)
  end },
  rwkv7 = { matrix, function(s, t, p)
    local S = p.add(p.decay(s.S, t.a), p.outer(-t.u, p.read(s.S, t.u * t.a * p.keys(t.b))))
    S = p.add(S, p.outer(t.k, t.v))
    return { S = S }, read(p, s.S, S, t.q)
  end },
  rank2 = { matrix, function(s, t, p)
    local S = p.add(p.decay(s.S, t.g * 0.5), p.outer(t.u * 0.3, p.read(s.S, t.k)))
    S = p.add(S - p.outer(t.k * 0.3, p.read(s.S, t.u)), p.outer(t.k, t.v))
    return { S = S }, read(p, s.S, S, t.q)
  end },
  resets = { matrix, function(s, t, p)
    local S = m.where(p.wide(m.gt(t.b, 0.8)), 0, s.S)
    S = p.add(p.decay(S, t.g * 1.1 - 0.2), p.outer(t.k, t.v))
    return { S = S }, read(p, s.S, S, t.q)
  end },
  beside = { { S = "hkv", c = "hv" }, function(s, t, p) -- a state of no class reads one that is
    local S = p.delta(p.decay(s.S, t.g), t.k, t.b, t.v)
    local c = m.tanh(s.c * 0.7 + p.read(S, t.q))
    return { S = S, c = c }, c * t.v
  end },
  sru = { { c = "hv" }, function(s, t)
    local f = m.sigmoid(t.v * 2 + t.i)
    local c = s.c * f + (1 - f) * t.v
    return { c = c }, m.sigmoid(t.v) * c
  end },
  mingru = { { h = "hv" }, function(s, t)
    local z = m.sigmoid(t.v)
    local h = s.h + z * (t.v - s.h)
    return { h = h }, h
  end },
  hgrn = { { h = "hv" }, function(s, t)
    local f = 0.3 + 0.7 * t.g
    local h = s.h * f + t.v * (1 - f)
    return { h = h }, m.tanh(h) * t.v
  end },
  none = { { h = "hv", S = "hkv" }, function(s, t, p)
    local S = m.tanh(p.decay(s.S, t.g) + p.outer(t.k, t.v))
    local h = m.tanh(s.h * 0.5 + p.read(S, t.q))
    return { h = h, S = S }, h
  end },
}

local function inputs_of(A)
  local keys, values, number = { A.batch, A.seq, A.h, A.k }, { A.seq, A.batch, A.h, A.v }, { A.batch, A.seq, A.h }
  return { q = keys, k = keys, u = keys, a = keys, v = values, g = number, b = number, i = number }
end
local function state_axes(A, text)
  local list = { A.batch }
  for name in text:gmatch "." do list[#list + 1] = A[name] end
  return list
end

local function uniform(shape, at, low, high)
  local dims, n = {}, 1
  for k, a in ipairs(shape) do dims[k], n = a.size, n * a.size end
  local host = m.host("f32", table.unpack(dims))
  for i = 1, n do
    local x = math.sin(at * 12.9898 + i * 78.233) * 43758.5453
    host:set(i, low + (high - low) * (x - math.floor(x)))
  end
  return host
end

-- The program of a step: loss, results and gradients, and the gradients of a sum of them where `second`.
local function program(class, A, options, dtype, as_loop)
  local names, inputs = {}, inputs_of(A)
  for name in pairs(inputs) do names[#names + 1] = name end
  table.sort(names)
  local initial = {}
  for name, text in pairs(class[1]) do
    initial[name], inputs[name] = state_axes(A, text), state_axes(A, text)
    names[#names + 1] = name
  end
  table.sort(names)
  state = options.spelling -- the same spelling in all programs
  return m.compile(function(i)
    local x, xs = {}, {}
    for k, name in ipairs(names) do x[name] = i[name]:cast(dtype); xs[k] = x[name] end
    local p, t, s = pieces(A), {}, {}
    for name in pairs(inputs_of(A)) do t[name] = x[name] end
    for name in pairs(initial) do s[name] = x[name] end
    for _, name in ipairs { "q", "k", "u" } do t[name] = t[name] / m.sqrt((t[name] * t[name]):sum "k"):broadcast { A.batch, A.seq, A.h, A.k } end
    t.one = t.g * 0 + 1
    t.g, t.a = options.decay(t.g), options.decay(t.a)
    local y, last = m.scan(function(s, t)
      if as_loop then -- what is affine no longer is
        local opaque = {}
        for name, S in pairs(s) do opaque[name] = S + m.tanh(S) * 0 end
        s = opaque
      end
      return class[2](s, t, p)
    end, { axis = "seq", state = s, inputs = t, reverse = options.reverse })
    local loss = (y * m.uniform(m.axes_of(y), 5):cast(dtype)):sum()
    for name in pairs(last) do loss = loss + (last[name] * m.uniform(m.axes_of(last[name]), 7):cast(dtype)):sum() end
    local out, sum = { y = y }, 0
    for name, S in pairs(last) do out["last " .. name] = S end
    for k, g in ipairs(m.grad(loss, xs)) do
      out["gradient of " .. names[k]] = g
      if options.second then sum = sum + (g * m.uniform(m.axes_of(g), 9):cast(dtype)):sum() end
    end
    if options.second then
      for k, g in ipairs(m.grad(sum, xs)) do out["second gradient of " .. names[k]] = g end
    end
    return out
  end, inputs)
end

local function values_of(class, A)
  local inputs, values = inputs_of(A), {}
  local range = { q = { -1, 1 }, k = { -1, 1 }, u = { -1, 1 }, v = { -1, 1 }, i = { -2, 2 } }
  local at = 1
  for name, shape in pairs(inputs) do
    local r = range[name] or { 0.02, 0.98 }
    values[name] = uniform(shape, #name + name:byte(), r[1], r[2])
  end
  for name, text in pairs(class[1]) do values[name] = uniform(state_axes(A, text), at + name:byte(), -0.5, 0.5) end
  return values
end

local worst = {}
local function distance(a, b)
  if type(a) == "number" then return math.abs(a - b) / math.max(math.abs(b), 1e-300) end
  local difference, size = 0, 0
  for i = 1, #b do difference, size = difference + (a[i] - b[i]) ^ 2, size + b[i] ^ 2 end
  return size == 0 and math.sqrt(difference) or math.sqrt(difference / size)
end
local function compare(what, got, wanted, bound, kind)
  for name, b in pairs(wanted) do
    local error = distance(got[name], b)
    if not (error <= bound) then check.equal(error, bound, what .. ", " .. kind .. ": " .. name) end
    if error > (worst[kind] or 0) then worst[kind], worst[kind .. " at"] = error, what .. ": " .. name end
  end
end

local function case(name, length, options)
  local class, A = classes[name], axes(length)
  local what = ("%s over %d, seed %d"):format(name, length, options.spelling)
  local values = values_of(class, A)
  local loop = program(class, A, options, "f64", true)(values)
  if not options.only then compare(what, program(class, A, options, "f64")(values), loop, 1e-9, "f64") end
  compare(what, program(class, A, options, "f32")(values), loop, options.bound or 1e-5, "f32")
end

local function plain(g) return g end
local function extreme(g) -- from exp(-20) to 1
  return m.where(m.lt(g, 0.3), m.exp(g * (-20 / 0.3)), m.where(m.lt(g, 0.6), 1, 1 - 0.001 * g))
end
local all = {}
for name in pairs(classes) do all[#all + 1] = name end
table.sort(all)
if long then
  local lengths = { 1, 3, 17, 33, 100, 1000, 4097 }
  for at, name in ipairs(all) do
    for turn, length in ipairs(lengths) do
      case(name, length, { spelling = seed * 1000 + at * 31 + turn, decay = plain, reverse = (at + turn) % 3 == 0, second = length <= 40, only = turn % 2 == 0 and "f32" or nil })
    end
  end
  for at, name in ipairs { "mamba2", "gla", "mlstm", "gated_delta", "kda", "rwkv7", "resets" } do
    case(name, 10000, { spelling = seed + at, decay = extreme, only = "f32" })
  end
else -- a sample, few of whose programs differ: most of the time is that of their kernels' compiler
  case("kda", 37, { spelling = seed, decay = plain, second = true })
  for at, name in ipairs { "mlstm", "rank2", "beside" } do
    case(name, 35, { spelling = seed + at, decay = extreme, reverse = at == 2, only = "f32" })
  end
end
if os.getenv "SCAN_SHOW" then
  for kind, value in pairs(worst) do print(kind, value) end
end
check.done()
