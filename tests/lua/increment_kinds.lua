-- Increments of models by the names of what they are known for, against their whole programs (lib/increments.lua); drawn_models.lua
-- draws the rest. A sample; LONG=1 runs all.
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check, drawn = dofile(root .. "tests/lua/lib/check.lua"), dofile(root .. "tests/lua/lib/drawn.lua")
local increments = dofile(root .. "tests/lua/lib/increments.lua")

local kinds = {
  { "ALiBi", { "attention", score = "alibi" } },
  { "relative positions in buckets", { "attention", score = "buckets" }, { "feed" } },
  { "soft caps", { "attention", score = "cap" }, { "attention", score = "cap" }, long = true },
  { "value residuals", { "attention", score = "none", residual = true }, { "attention", score = "none", residual = true }, { "attention", score = "none", residual = true } },
  { "short convolutions", { "conv" }, { "conv" } },
  { "linear attention in chunks", { "chunks" } },
  { "a softmax by hand", { "by_hand", kind = 1 }, { "by_hand", kind = 2 }, long = true },
  { "a triangle of weights", { "triangle" }, { "triangle" }, long = true },
  { "latent attention", { "latent" }, most = 4 * (6 + 4) }, -- the latent and the rotary key, not 16 floats a head
}
local only, long = os.getenv "KIND", os.getenv "LONG" == "1"
for at, kind in ipairs(kinds) do
  if kind[1] == only or not only and (long or not kind.long) then
    local ok, message = pcall(function()
      local model = drawn.model(4000 + at, "causal", table.move(kind, 2, #kind, 1, {}))
      local result = increments(model, function() return drawn.whole(model, 1, "f32") end, drawn.numbers(at))
      if os.getenv "DRAWN_SHOW" then print(kind[1], model.text, result.worst, result.positions) end
      check.equal(result.worst <= 1e-5, true, ("%s: off by %g at %s"):format(kind[1], result.worst, result.where))
      check.equal(result.argmax, 0, kind[1] .. ": positions with another argmax")
      local bytes = 0
      for _, kept in ipairs(result.kept:list()) do bytes = bytes + kept.bytes end
      check.equal(bytes <= (kind.most or math.huge), true, ("%s: keeps %d bytes a position"):format(kind[1], bytes))
    end)
    if not ok then check.equal(tostring(message), "", kind[1]) end
  end
end
check.done()
