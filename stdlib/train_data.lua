-- The data of a training: batches by global sample number, and the model's progress in them.
local core = require "mlua.core"
local m = require "mlua"

-- The corpus, and the model's progress in it.
return function(o)
  local function open(name) return type(name) == "userdata" and name or core.corpus(name, { tokenizer = o.tokenizer }) end
  local corpus = open(o.data)
  local evaluated = o.eval_every and o.eval_data and open(o.eval_data)
  o.progress = m.training_progress(o.model, o.optimizer, ("%s, seed %d"):format(corpus:name(), o.seed))
  local accum = o.dynamic and 1 or o.accum -- of a dynamic layout every rank reads all rows
  local micro = o.batch.size // accum
  local data = { tokens = core.host("i32", micro, o.seq.size), targets = core.host("i32", micro, o.seq.size) }
  local function host() return o.pack == "document" and core.host("i32", micro, o.seq.size) or nil end
  local documents, positions = host(), host()
  data.feeds = { tokens = data.tokens, targets = data.targets, documents = documents, positions = positions } -- of the microbatch that was filled last
  local share = 1 - (o.eval_every and not evaluated and o.eval_share or 0) -- of the data, that training uses
  -- Samples are numbered globally: microbatch i of step s holds the same ones whatever accum is.
  -- A rank reads the rows alone that its part of the program (default: that of training) does.
  local training
  local function rows_of(program)
    if o.dynamic then return 0, micro end
    local first, stop = micro, 0
    for name in pairs(data.feeds) do
      local from, count = core.own_rows(program, name)
      if count > 0 then first, stop = math.min(first, from), math.max(stop, from + count) end
    end
    return math.min(first, stop), stop
  end
  function data.fill(step, i, evaluation, program)
    if step > o.steps and not evaluation then return end -- what no step reads may be damaged
    local first, stop = rows_of(program or training)
    local wanted = ("%d %d %s %d %d %d"):format(step, i, evaluation, first, stop, o.skip or 0)
    if data.held == wanted then return end
    data.held = nil -- where a file is damaged
    local from = evaluation and evaluated or corpus
    from:fill(data.tokens, data.targets, (step - 1) * accum + i, {
      seed = o.seed, vocab = o.vocab, from = evaluation and not evaluated and share or 0, to = evaluation and 1 or share,
      skip = evaluation and 0 or o.skip, first = first, count = stop - first, ahead = true, documents = documents, positions = positions,
    })
    data.held = wanted
  end
  -- What says whether other data would give the same samples: JSON.
  function data.identity()
    local identity = corpus:identity():gsub("^{", ('{"share":%.17g,'):format(share))
    return ('{"data":%s,"eval_data":%s}'):format(identity, evaluated and evaluated:identity() or "null")
  end
  -- Once the programs are traced, and the model has all its parameters.
  function data.begin(program)
    training = program
    local options, seen = core.options(), o.progress.samples()
    if not o.skip and seen > 0 and options.rank == 0 and not options.quiet then
      core.write_error(("m.train continues in %s after the %d samples that the model has seen; skip = 0 begins again\n"):format(corpus:name(), seen))
    end
    o.skip = o.skip or seen
    o.progress.begin(o.skip)
  end
  return data
end
