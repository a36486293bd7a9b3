-- Which part of a predicted step mlua tune says is longest: shares are of the whole step, bubble or not, and host copies are one.
local core = require "mlua.core"
local check = dofile((core.options().script:match "^(.*)tests/lua/" or "") .. "tests/lua/lib/check.lua")
local command = require "mlua.tune_command"

local function step(shares)
  local p = { seconds = 2, host_wait = 0 }
  for _, name in ipairs { "bubble", "exposed", "products", "attention", "memory", "other" } do p[name] = shares[name] or 0 end
  p.host_wait = shares.host_wait or 0
  return p
end

local name, mine, others = command.longest(step { bubble = 0.5, exposed = 0.25, products = 0.25 }, 1, step { products = 1 }, 1)
check.equal(name, "bubble")
check.equal(mine, 1)
check.equal(others, 0)
name, mine = command.longest(step { bubble = 0.3, exposed = 0.4, products = 0.3 }, 1, step { products = 1 }, 1)
check.equal(name, "exposed communication")
check.equal(mine, 0.8)
name, mine = command.longest(step { products = 0.6, exposed = 0.1, host_wait = 0.6 }, 1, step { products = 0.9, exposed = 0.1 }, 1)
check.equal(name, "waits for host copies")
check.equal(mine, 0.6)
