-- args: run --device cpu --quiet SCRIPT layers=3 embed=64 heads=4 kv_heads=2 ffn=96 vocab=512 seq=64 batch=8 lr=3e-3 steps=20 sample=0
-- models/gpt_moe.lua against PyTorch: losses and gradient norms of 20 steps, f32, with warm-up, clipping and
-- the router's losses. The numbers: python3 tests/losses_torch.py moe, with the settings above but sample=0.
local m = require "mlua"
local core = require "mlua.core"
local root = core.options().script:match "^(.*)tests/lua/" or ""
local check = dofile(root .. "tests/lua/lib/check.lua")
local write_tokens = dofile(root .. "tests/lua/lib/tokens.lua")

local expected = {
  losses = {
    6.233811, 6.209962, 6.160430, 6.113090, 6.064617, 5.997607, 5.962854, 5.885652, 5.804263, 5.788800,
    5.681730, 5.580816, 5.466936, 5.383605, 5.309108, 5.204515, 5.023397, 5.014317, 4.946700, 4.641096,
  },
  norms = {
    1.669532, 1.895310, 1.559669, 1.749658, 1.373069, 1.349000, 1.440069, 1.452386, 1.291651, 1.223433,
    1.294549, 1.145798, 1.173895, 1.092465, 1.162314, 0.963655, 1.137209, 0.958465, 1.498349, 0.996006,
  },
}

local path, train, losses, norms = os.tmpname(), m.train, {}, {}
function m.train(o)
  o.data = write_tokens(path .. ".bin", o.vocab)
  o.on_step = function(step, out) losses[step], norms[step] = out.loss, out.grad_norm end
  return train(o)
end
dofile(root .. "models/gpt_moe.lua")
os.remove(path)
os.remove(path .. ".bin")
check.all(losses, expected.losses, 1e-5, "losses")
check.all(norms, expected.norms, 1e-4, "gradient norms")
check.done()
