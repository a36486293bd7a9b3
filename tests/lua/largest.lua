-- The place of the largest logit of a large vocabulary, by parts, is argmax's: of equal ones the first.
local m = require "mlua"
local sampling = require "mlua.sampling"
local root = require "mlua.core".options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")

local row, vocab = m.axis("row", 6), m.axis("vocab", 64 * 257)
local run = m.compile(function(i)
  return { parts = sampling.place_of_largest(i.x, "vocab"), whole = i.x:argmax "vocab" }
end, { x = { row, vocab } }, { name = "largest" })
local values, largest = {}, { 0, 256, 257, 64 * 257 - 1, 5000, 9000 }
for i = 1, 6 * vocab.size do values[i] = -(i * 7919 % 104729) end
for i, at in ipairs(largest) do
  values[(i - 1) * vocab.size + at + 1] = 2.5
  if i >= 5 then values[(i - 1) * vocab.size + at + 700] = 2.5 end -- equal, later
end
local out = run { x = values }
for i, at in ipairs(largest) do
  check.equal(out.parts[i], at, "by parts, row " .. i)
  check.equal(out.whole[i], at, "whole, row " .. i)
end
check.done()
