-- `mlua check --serve`: what a step of `mlua serve` takes with all slots in use, every text as long as the context, and what reads a prompt.
-- Nothing is run.
local command = require "mlua.tune_command"
local core = require "mlua.core"
local kept = require "mlua.kept"
local prepared = require "mlua.serve_decoder"

local PROMPT = 512 -- tokens

-- The programs of a decoder that has increments: of a step of all slots, of `new` tokens of one prompt, and the others.
local function programs_of(decoder, new)
  local step, reading, others = nil, nil, {}
  for _, list in pairs(decoder.programs) do
    for _, program in ipairs(list) do
      local many = program.new and program.new > 1
      if program.new == new and program.rows == 1 then
        reading = program.run
      elseif not many and program.rows == decoder.slots then
        step = program.run
      else
        others[#others + 1] = program.run
      end
    end
  end
  return step, reading, others
end

---@param model Module
---@param seq Axis positions
return function(model, seq)
  local options, decoder = core.options(), prepared(model, seq)
  local prompt = math.min(options.prompt_tokens > 0 and options.prompt_tokens or PROMPT, decoder.context - 1)
  decoder:prepare({ { temperature = 1 } }, 1, prompt)
  local chunk = decoder:chunk_of(prompt)
  local step, reading, others = programs_of(decoder, chunk)
  local seconds, report = reading and core.predicted_seconds(reading), kept.report(model, seq)
  if options.json then
    local found = report and core.json(report) or {}
    found.slots, found.chunk, found.chunk_seconds = decoder.slots, chunk, seconds
    report = core.to_json(found)
  else
    local first = seconds and (", %d of a prompt of %d are read in %.2f ms"):format(math.min(chunk, prompt), prompt, 1e3 * seconds) or ""
    report = (report or "") .. ("texts at once   %d, of up to %d tokens%s\n"):format(decoder.slots, decoder.context, first)
  end
  core.report(command.joined({ step, reading }, others), { step = 1, tokens = decoder.slots, kept = report })
end
