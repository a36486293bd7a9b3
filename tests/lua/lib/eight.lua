-- Products of floats of 8 bits by their definition, for lua/fp8 and lua/fp8_experts.
-- The nearest number of `digits` bits and exponents from `least` on, ties to even, in f64.
local function round(x, digits, least)
  local exponent = x == 0 and least or math.floor(math.log(math.abs(x), 2) + 1e-12)
  if x ~= 0 and math.abs(x) < 2.0 ^ exponent then exponent = exponent - 1 end
  local unit = 2.0 ^ (math.max(exponent, least) - digits + 1)
  local n = x / unit
  local whole = math.floor(n)
  if n - whole > 0.5 or (n - whole == 0.5 and whole % 2 == 1) then whole = whole + 1 end
  return whole * unit
end
local function f32(x) return (string.unpack("f", string.pack("f", x))) end
local function bf16(x) return round(x, 8, -126) end
local FORMATS = { e4m3 = { 448, 4, -6 }, e5m2 = { 57344, 3, -14 } }

-- The values as products read them, in f64, by one scale for all tensors of the list.
local function rounded(tensors, format)
  local largest, digits, least = table.unpack(FORMATS[format])
  local most, all = 2.0 ^ -100, {}
  for _, values in ipairs(tensors) do
    for i = 1, #values do most = math.max(most, math.abs(values[i])) end
  end
  local scale = f32(largest / most)
  for k, values in ipairs(tensors) do
    all[k] = {}
    for i = 1, #values do all[k][i] = round(f32(values[i] * scale), digits, least) * most / largest end
  end
  return table.unpack(all)
end

-- The sum over k of a(i, k) b(k, j), and over k of |a b|; and `share`, the bound of its sums, for `same`. With `share` an adder aligns the
-- terms to the largest one: each of them, and the sum before, loses up to that share of it.
local function product(rows, depth, columns, a, b, share)
  local sum, size = {}, {}
  for i = 0, rows - 1 do
    for j = 0, columns - 1 do
      local s, z, most = 0.0, 0.0, 0.0
      for k = 0, depth - 1 do
        local term = a(i, k) * b(k, j)
        s, z, most = s + term, z + math.abs(term), math.max(most, math.abs(term))
      end
      sum[#sum + 1], size[#size + 1] = s, share and (depth + 1) * most or z
    end
  end
  return sum, size, share
end
local function at(values, stride) return function(i, j) return values[i * stride + j + 1] end end
local function turned(values, stride) return function(i, j) return values[j * stride + i + 1] end end
-- Within a rounding of the result to bf16 (unit 2^-9 of it), sums in f32 (2^-20 of the terms' sizes).
local function same(check, actual, what, unit, sum, size, share)
  local worst = 0
  for i = 1, #sum do worst = math.max(worst, math.abs(actual[i] - sum[i]) / (unit * math.abs(sum[i]) + (share or 2.0 ^ -20) * size[i])) end
  check.equal(worst <= 1, true, what .. " by the rounded operands: " .. worst .. " of the bound")
end

return { bf16 = bf16, rounded = rounded, product = product, at = at, turned = turned, same = same }
