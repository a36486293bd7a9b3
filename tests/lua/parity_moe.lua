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
    6.221738, 6.215034, 6.179868, 6.129353, 6.062960, 5.997644, 5.956522, 5.874720, 5.813809, 5.742409,
    5.656972, 5.579400, 5.493550, 5.426705, 5.293731, 5.231563, 5.052462, 4.911526, 4.976623, 4.736558,
  },
  norms = {
    1.472590, 1.900547, 1.861306, 1.727688, 1.413736, 1.381147, 1.309347, 1.268231, 1.253421, 1.291449,
    1.293964, 1.235894, 1.106362, 1.019418, 1.307054, 0.990976, 1.202214, 1.028956, 0.852208, 1.123215,
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
