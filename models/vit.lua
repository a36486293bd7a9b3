-- Vision Transformer (Dosovitskiy et al. 2021): an image as a row of patches behind a class token, learned positions, pre-norm
-- blocks, GELU, and one label an image.
--   mlua run models/vit.lua                        ten shapes on noise, drawn by the script
--   mlua run models/vit.lua data=cifar/data_batch_1.bin patch=4   CIFAR-10's binary files
--   mlua check models/vit.lua preset=vit-b16 --device h200 --mesh dp=8
local m = require "mlua"

local cfg = m.config {
  layers = 4, embed = 128, heads = 4, ffn = 512, image = 32, patch = 8, channels = 3, classes = 10, batch = 64, accum = 1, steps = 400,
  eps = 1e-6, lr = 2e-3, warmup = 20, decay = 0.05, clip = 1.0, dropout = 0.0, seed = 1, layout = "megatron", schedule = "1f1b", data = "",
  presets = {
    demo = { layers = 2, embed = 64, heads = 2, ffn = 256, steps = 600 },
    ["vit-b16"] = { layers = 12, embed = 768, heads = 12, ffn = 3072, image = 224, patch = 16, classes = 1000, batch = 4096, steps = 93000, lr = 3e-3, warmup = 10000, decay = 0.3, accum = 8, dropout = 0.1 },
    ["vit-l16"] = { layers = 24, embed = 1024, heads = 16, ffn = 4096, image = 224, patch = 16, classes = 1000, batch = 4096, steps = 93000, lr = 3e-3, warmup = 10000, decay = 0.3, accum = 16, dropout = 0.1 },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, head_dim = m.quotient(cfg, "embed", "heads"), ffn = cfg.ffn, batch = cfg.batch, classes = cfg.classes,
  height = cfg.image, width = cfg.image, channels = cfg.channels, patch = cfg.channels * cfg.patch ^ 2, seq = m.quotient(cfg, "image", "patch") ^ 2 + 1,
}
local one = m.axis("seq", 1)

local Attention = m.module("Attention", function(self)
  self.wq, self.bq = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wk, self.bk = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wv, self.bv = m.param { A.embed, A.heads, A.head_dim }, m.bias { A.heads, A.head_dim }
  self.wo, self.bo = m.param { A.heads, A.head_dim, A.embed }, m.bias { A.embed }
end)

function Attention:forward(x)
  local q, k, v = x:dot(self.wq, "embed") + self.bq, x:dot(self.wk, "embed") + self.bk, x:dot(self.wv, "embed") + self.bv
  return m.attention(q, k, v):dot(self.wo, "heads", "head_dim") + self.bo
end

local Block = m.module("Block", function(self)
  self.norm1, self.attention = m.layer_norm { A.embed, eps = cfg.eps }, Attention()
  self.norm2 = m.layer_norm { A.embed, eps = cfg.eps }
  self.up, self.up_bias = m.param { A.embed, A.ffn }, m.bias { A.ffn }
  self.down, self.down_bias = m.param { A.ffn, A.embed }, m.bias { A.embed }
end)

function Block:forward(x)
  x = x + m.dropout(self.attention(self.norm1(x)), cfg.dropout)
  local h = m.gelu(self.norm2(x):dot(self.up, "embed") + self.up_bias, { exact = true })
  return x + m.dropout(h:dot(self.down, "ffn") + self.down_bias, cfg.dropout)
end

local ViT = m.module("ViT", function(self)
  self.patches, self.patches_bias = m.param { A.patch, A.embed, init = A.patch.size ^ -0.5 }, m.bias { A.embed }
  self.class, self.positions = m.param { one, A.embed, init = "zeros" }, m.param { A.seq, A.embed }
  self.blocks = m.stack(cfg.layers, Block)
  self.norm = m.layer_norm { A.embed, eps = cfg.eps }
  self.head, self.head_bias = m.param { A.embed, A.classes, init = "zeros" }, m.bias { A.classes }
end)

-- Logits over classes of an image over batch, height, width and channels.
function ViT:forward(image)
  local x = m.patches(image, cfg.patch):dot(self.patches, "patch") + self.patches_bias
  local class = self.class:broadcast { m.axis("batch", image:size "batch") }
  x = m.dropout(m.concat({ class:permute(table.unpack(x:axes())), x }, "seq") + self.positions, cfg.dropout)
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):slice("seq", 0, 1):sum "seq":dot(self.head, "embed") + self.head_bias
end

-- Ten shapes by what of a square around them, -1 .. 1, they fill: of any size, anywhere, of any colour on noise of another.
local SHAPES = {
  function(x, y) return x * x + y * y < 1 end, function(x, y) return x * x + y * y < 1 and x * x + y * y > 0.4 end, -- disc, ring
  function() return true end, function(x, y) return math.max(math.abs(x), math.abs(y)) > 0.6 end, -- square, frame
  function(x, y) return math.abs(x) + math.abs(y) < 1 end, function(x, y) return 2 * math.abs(x) < y + 1 end, -- diamond, triangle
  function(x, y) return math.abs(x) < 0.3 or math.abs(y) < 0.3 end, function(x, y) return math.abs(x * x - y * y) < 0.2 end, -- plus, cross
  function(_, y) return y % 0.7 < 0.35 end, function(x) return x % 0.7 < 0.35 end, -- lines across, lines down
}
local function draw(label, random)
  local shape, size = SHAPES[label % #SHAPES + 1], cfg.image
  local radius = random:uniform(0.2, 0.35) * size
  local x0, y0 = random:uniform(radius, size - radius), random:uniform(radius, size - radius)
  local back, front, pixels = {}, {}, {}
  for c = 1, cfg.channels do back[c], front[c] = random:uniform(-1, 0), random:uniform(0, 1) end
  for y = 0, size - 1 do
    for x = 0, size - 1 do
      local u, v = (x - x0) / radius, (y - y0) / radius
      local colour = u >= -1 and u <= 1 and v >= -1 and v <= 1 and shape(u, v) and front or back
      for c = 1, cfg.channels do pixels[#pixels + 1] = colour[c] + random:uniform(-0.2, 0.2) end
    end
  end
  return pixels
end

-- CIFAR-10's record `index`: a label, then a byte a pixel, a channel after another.
local file = cfg.data ~= "" and assert(io.open(cfg.data, "rb"), "there is no file " .. cfg.data)
local pixels_of = cfg.image ^ 2
local records = file and file:seek "end" // (1 + pixels_of * cfg.channels)
local function read(index)
  local length = 1 + pixels_of * cfg.channels
  file:seek("set", index % records * length)
  local record, image = file:read(length), {}
  for p = 0, pixels_of - 1 do
    for c = 0, cfg.channels - 1 do image[#image + 1] = record:byte(2 + c * pixels_of + p) / 127.5 - 1 end
  end
  return { image = image, label = record:byte() }
end

local model = ViT()
m.train {
  model = model, batch = A.batch, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip,
  inputs = { image = { A.batch, A.height, A.width, A.channels }, label = { A.batch, dtype = "i32" } },
  sample = function(index, random)
    if file then return read(random:integer(0, records - 1)) end
    local label = random:integer(0, cfg.classes - 1)
    return { image = draw(label, random), label = label }
  end,
  loss = function(i)
    local logits = model(i.image)
    local sum, count = m.cross_entropy(logits, i.label, { axis = "classes" })
    return sum, count, { accuracy = m.accuracy(logits, i.label, { axis = "classes" }) }
  end,
  optimizer = m.adamw { lr = cfg.lr, weight_decay = cfg.decay }, schedule = m.cosine { warmup = cfg.warmup, final = 0 },
  layout = m.layout[cfg.layout] { zero = true, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
