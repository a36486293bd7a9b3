-- `mlua serve --measure`: how long a step takes with all slots in use and texts as long as the context, and a first token beside them, by random
-- prompts; with the weights of --from, or the initial ones. Prints an object of JSON and ends.
local core = require "mlua.core"
local prepared = require "mlua.serve_decoder"

local WARM, STEPS, PROMPT = 4, 16, 512 -- steps; tokens

-- A sequence with a prompt of random tokens, the same on all ranks.
local state = 12345
local function opened(decoder, length, seed)
  local ids = {}
  for i = 1, length do
    state = (state * 1103515245 + 12345) % 2147483648
    ids[i] = state // 65536 % decoder.vocab
  end
  return decoder:open(ids, { temperature = 1, seed = seed })
end

-- Steps until each of a list has its first token.
local function read_prompts(decoder, list)
  local reading = list
  while #reading > 0 do
    decoder:step(reading)
    local rest = {}
    for _, s in ipairs(reading) do
      if not s.ready then rest[#rest + 1] = s end
    end
    reading = rest
  end
end

---@param model Module
---@param seq Axis positions
return function(model, seq)
  local options, decoder = core.options(), prepared(model, seq)
  local prompt = math.min(options.prompt_tokens > 0 and options.prompt_tokens or PROMPT, decoder.context // 2)
  local length = decoder.context - WARM - STEPS - 2 * (prompt // decoder.chunk + 2) -- the last ones are drawn
  if length < 1 then core.fail(("a context of %d tokens is too short to be measured"):format(decoder.context)) end
  local list = {}
  for i = 1, decoder.slots do list[i] = opened(decoder, length, i) end
  read_prompts(decoder, list)
  for _ = 1, WARM do decoder:step(list) end
  local began = core.time()
  for _ = 1, STEPS do decoder:step(list) end
  local seconds = (core.time() - began) / STEPS
  decoder:close(list[#list])
  local function first_token(seed)
    local start = core.time()
    list[#list] = opened(decoder, prompt, seed)
    while not list[#list].ready do decoder:step(list) end
    decoder:close(list[#list])
    return core.time() - start
  end
  first_token(1) -- compiles what reads such prompts
  local first = first_token(2)
  if options.rank == 0 then
    core.write(core.to_json { slots = decoder.slots, seconds = seconds, tokens_per_s = decoder.slots / seconds, first_seconds = first } .. "\n")
  end
end
