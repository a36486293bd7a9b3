-- The decoder of `mlua serve`, which `mlua check --serve` plans too.
local core = require "mlua.core"
local Decoder = require "mlua.decode"
local given = require "mlua.given"
local kept = require "mlua.kept"

local CHUNK_GPU = 2048 -- tokens of prompts that a step reads on a GPU, unless --chunk says so

---@param model Module
---@param seq Axis positions
---@return table decoder its programs are compiled
return function(model, seq)
  local options, how = core.options(), given.declared[model]
  kept.require_prompt(model, seq)
  local decoder = Decoder.new(model, {
    chunk = options.chunk > 0 and options.chunk or core.device().name ~= "cpu" and CHUNK_GPU or nil,
    seq = how and how.axis or seq, slots = options.slots, weights = options.weights, given = how and given.specs(model, { [how.input] = true }) or nil,
  })
  decoder:prepare(options.batch_invariant and { { temperature = 1, top_p = 0.5, presence_penalty = 1, logprobs = 1 } } or { { temperature = 0 }, { temperature = 1 } })
  return decoder
end
