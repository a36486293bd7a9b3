-- LLaVA (Liu et al. 2023, 2024): a language model that reads images: patches of a frozen encoder, projected into its embeddings, take
-- the image's positions within the text; the projector learns at a rate of its own. Encoder of ViT's kind, Llama's blocks after it.
--   mlua run models/llava.lua                       questions about shapes that the script draws
--   mlua run models/llava.lua weights=parts.safetensors freeze=true     given parts, and the projector alone learns
--   mlua check models/llava.lua preset=llava-7b --device h200 --mesh dp=2,tp=4
local m = require "mlua"

local cfg = m.config {
  layers = 4, embed = 192, heads = 4, kv_heads = 2, ffn = 512, vocab = 260, seq = 80, batch = 16, accum = 1, steps = 150, eps = 1e-5,
  eye_layers = 2, eye_embed = 96, eye_heads = 4, eye_ffn = 384, image = 32, patch = 8, channels = 3, weights = "", freeze = false,
  lr = 1e-3, projector_lr = 4e-3, warmup = 20, decay = 0.0, clip = 1.0, rope_base = 10000.0, seed = 1, layout = "megatron", schedule = "1f1b", data = "",
  presets = {
    demo = { layers = 2, embed = 128, ffn = 352, steps = 200 },
    ["llava-7b"] = {
      layers = 32, embed = 4096, heads = 32, kv_heads = 32, ffn = 11008, vocab = 32064, seq = 2048, batch = 128, steps = 5200, lr = 2e-5, projector_lr = 2e-3,
      eye_layers = 23, eye_embed = 1024, eye_heads = 16, eye_ffn = 4096, image = 336, patch = 14, warmup = 156, accum = 8,
    },
  },
}
local A = m.axes {
  embed = cfg.embed, heads = cfg.heads, kv_heads = cfg.kv_heads, head_dim = m.quotient(cfg, "embed", "heads"), ffn = cfg.ffn, vocab = cfg.vocab,
  seq = cfg.seq, batch = cfg.batch, height = cfg.image, width = cfg.image, channels = cfg.channels,
}
local E = m.axes {
  seq = m.quotient(cfg, "image", "patch") ^ 2, patch = cfg.channels * cfg.patch ^ 2, embed = cfg.eye_embed, heads = cfg.eye_heads,
  head_dim = m.quotient(cfg, "eye_embed", "eye_heads"), ffn = cfg.eye_ffn, inner = cfg.embed,
}
local IMAGE = cfg.vocab - 1 -- the token that an image's patches replace, one each

-- The encoder: every patch reads every other.
local Sight = m.module("Sight", function(self)
  self.norm1, self.norm2 = m.layer_norm { E.embed, eps = cfg.eps }, m.layer_norm { E.embed, eps = cfg.eps }
  self.wq, self.wk, self.wv = m.param { E.embed, E.heads, E.head_dim }, m.param { E.embed, E.heads, E.head_dim }, m.param { E.embed, E.heads, E.head_dim }
  self.wo, self.up, self.down = m.param { E.heads, E.head_dim, E.embed }, m.param { E.embed, E.ffn }, m.param { E.ffn, E.embed }
end)

function Sight:forward(x)
  local h = self.norm1(x)
  x = x + m.attention(h:dot(self.wq, "embed"), h:dot(self.wk, "embed"), h:dot(self.wv, "embed")):dot(self.wo, "heads", "head_dim")
  return x + m.gelu(self.norm2(x):dot(self.up, "embed")):dot(self.down, "ffn")
end

local Eye = m.module("Eye", function(self)
  self.patches, self.positions = m.param { E.patch, E.embed, init = E.patch.size ^ -0.5 }, m.param { E.seq, E.embed }
  self.blocks = m.stack(cfg.eye_layers, Sight)
end)

function Eye:forward(image)
  local x = m.patches(image, cfg.patch):dot(self.patches, "patch") + self.positions
  for _, layer in ipairs(self.blocks) do x = layer(x) end
  return x
end

local Projector = m.module("Projector", function(self)
  self.first, self.first_bias = m.param { E.embed, E.inner, init = E.embed.size ^ -0.5 }, m.bias { E.inner }
  self.second, self.second_bias = m.param { E.inner, A.embed }, m.bias { A.embed }
end)

function Projector:forward(x)
  return m.gelu(x:dot(self.first, "embed") + self.first_bias):dot(self.second, "inner") + self.second_bias
end

local Block = m.module("Block", function(self)
  self.norm1, self.norm2 = m.rms_norm { A.embed, eps = cfg.eps }, m.rms_norm { A.embed, eps = cfg.eps }
  self.wq, self.wo = m.param { A.embed, A.heads, A.head_dim }, m.param { A.heads, A.head_dim, A.embed }
  self.wk, self.wv = m.param { A.embed, A.kv_heads, A.head_dim }, m.param { A.embed, A.kv_heads, A.head_dim }
  self.gate, self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }
end)

function Block:forward(x)
  local h, rope = self.norm1(x), { base = cfg.rope_base }
  local q, k, v = m.rope(h:dot(self.wq, "embed"), rope), m.rope(h:dot(self.wk, "embed"), rope), h:dot(self.wv, "embed")
  x = x + m.attention(q, k, v, { causal = true }):dot(self.wo, "heads", "head_dim")
  h = self.norm2(x)
  return x + m.swiglu(h:dot(self.gate, "embed"), h:dot(self.up, "embed")):dot(self.down, "ffn")
end

local Llava = m.module("Llava", function(self)
  self.eye, self.projector = m.freeze(Eye()), Projector()
  self.embedding, self.blocks = m.param { A.vocab, A.embed }, m.stack(cfg.layers, Block)
  self.norm = m.rms_norm { A.embed, eps = cfg.eps }
  if cfg.freeze then m.freeze { self.embedding, self.blocks, self.norm } end
end)

-- The n-th position of an image within a text is the image's n-th patch.
function Llava:forward(tokens, image)
  local seen = self.projector(self.eye(image)):rename("seq", "patches")
  local is_image = m.eq(tokens, IMAGE)
  local patch = m.maximum(is_image:cast("i32"):cumsum "seq" - 1, 0)
  local x = m.where(is_image, seen:gather(patch, "patches"), self.embedding:gather(tokens, "vocab"))
  for _, block in ipairs(self.blocks) do x = block(x) end
  return self.norm(x):dot(self.embedding, "embed")
end

-- A shape in one of four corners, and a question about it, which stands before the image or after it.
local COLOURS = { red = { 1, -1, -1 }, green = { -1, 1, -1 }, blue = { -1, -1, 1 }, white = { 1, 1, 1 } }
local NAMES, SHAPES, CORNERS = { "red", "green", "blue", "white" }, { "disc", "square", "diamond" }, { "top left", "top right", "bottom left", "bottom right" }
local image = m.host("f32", cfg.image, cfg.image, cfg.channels)
local patches = {}
for i = 1, E.seq.size do patches[i] = IMAGE end

local function sample(_, random)
  local colour, shape, corner = random:integer(1, 4), random:integer(1, 3), random:integer(0, 3)
  local half, front = cfg.image / 2, COLOURS[NAMES[colour]]
  local radius = random:uniform(0.5, 0.9) * half / 2
  local x0, y0 = (corner % 2 + 0.5) * half, (corner // 2 + 0.5) * half
  random:fill(image, -0.5, 0.5) -- noise
  for y = 0, cfg.image - 1 do
    for x = 0, cfg.image - 1 do
      local u, v = math.abs(x - x0) / radius, math.abs(y - y0) / radius
      if ({ u * u + v * v, math.max(u, v), u + v })[shape] < 1 then
        for c = 1, cfg.channels do image[(y * cfg.image + x) * cfg.channels + c] = front[(c - 1) % 3 + 1] end
      end
    end
  end
  local asked = random:integer(1, 3)
  local question, answer = ({ "What colour is it?", "What shape is it?", "Where is it?" })[asked], ({ NAMES[colour], SHAPES[shape], CORNERS[corner + 1] })[asked]
  local parts = random:integer(0, 1) == 0 and { patches, "\n" .. question } or { question .. "\n", patches }
  local tokens, targets = m.labelled(cfg.seq, { "USER: ", parts[1], parts[2], "\nASSISTANT: ", { learn = answer .. "\n" } })
  return { image = image, tokens = tokens, targets = targets }
end

local model = Llava()
if cfg.weights ~= "" then -- of the encoder, the language model or both, by the names of their parameters
  local given = m.read_tensors(cfg.weights)
  for _, p in ipairs(m.parameters(model, { frozen = true })) do
    if given[p:name()] then p:set(given[p:name()]) end
  end
end
m.train {
  model = model, batch = A.batch, seq = A.seq, steps = cfg.steps, accum = cfg.accum, clip = cfg.clip, sample = sample,
  inputs = { image = { A.batch, A.height, A.width, A.channels }, tokens = { A.batch, A.seq, dtype = "i32" }, targets = { A.batch, A.seq, dtype = "i32" } },
  loss = function(i)
    local logits = model(i.tokens, i.image)
    local sum, count = m.cross_entropy(logits, i.targets)
    return sum, count, { accuracy = m.accuracy(logits, i.targets) }
  end,
  optimizer = m.adamw {
    lr = cfg.lr, weight_decay = cfg.decay,
    groups = function(name) if name:find "^projector" then return { lr = cfg.projector_lr } end end,
  },
  schedule = m.cosine { warmup = cfg.warmup }, layout = m.layout[cfg.layout] { zero = true, schedule = cfg.schedule }, -- mesh axes are 1 unless --mesh sizes them
}
