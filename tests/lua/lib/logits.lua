-- Logits of a model of models/ with the weights that --from names, for tests/hf_peers.py: MODEL is the file's name, IDS a
-- safetensors file with ids [batch, seq] of i32, OUT the safetensors file that gets logits [batch, seq, vocab].
local m = require "mlua"
local core = require "mlua.core"
local from = require "mlua.from"

local ids = core.read_tensors(os.getenv "IDS").ids
local options = core.options()
options.overrides = { { "batch", tostring(ids:dims()[1]) }, { "seq", tostring(ids:dims()[2]) } }
local captured
m.train, m.generate = function(o) captured = o end, function() end
dofile(("%s/models/%s.lua"):format(os.getenv "ROOT", os.getenv "MODEL"))
local o = captured
local program = m.compile(function(feeds)
  return { logits = o.model(feeds.tokens):cast "f32":permute(o.batch.name, o.seq.name, "vocab") }
end, { tokens = { o.batch, o.seq, dtype = "i32" } })
from.load(o.model)
local logits = program { tokens = ids }.logits
local dims, bytes = setmetatable(logits:dims(), { __list = true }), 4 * #logits
local text = core.to_json { logits = { dtype = "F32", shape = dims, data_offsets = setmetatable({ 0, bytes }, { __list = true }) } }
local writer = core.tensor_writer(os.getenv "OUT", text .. (" "):rep(-#text % 8))
writer:write(logits)
writer:close()
