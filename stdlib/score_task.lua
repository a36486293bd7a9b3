-- `mlua generate --score FILE`: the log-likelihood of a text by the model, with --weights beside that of the weights as they are.
local core = require "mlua.core"
local m = require "mlua"
local text_files = require "mlua.text_files"

-- Pieces of as many tokens as the context has, each scored by itself.
local function pieces(ids, context)
  local lists = {}
  for first = 1, #ids - 1, context do lists[#lists + 1] = table.move(ids, first, math.min(first + context - 1, #ids), 1, {}) end
  if #lists > 0 and #lists[#lists] < 2 then lists[#lists] = nil end
  return lists
end

-- The mean log probability of a token, how many count, and the likeliest token of each place.
local function scored(model, lists, seq, weights)
  local sum, count, likeliest = 0, 0, {}
  for _, r in ipairs(m.score(model, lists, { seq = seq, top = 1, weights = weights })) do
    sum, count = sum + r.logprob, count + r.count
    for _, top in ipairs(r.top) do likeliest[#likeliest + 1] = top[1].id end
  end
  return sum / count, count, likeliest
end

local function share_of_equal(a, b)
  local equal = 0
  for i, id in ipairs(a) do equal = equal + (id == b[i] and 1 or 0) end
  return equal / #a
end

---@param model Module
---@param seq Axis
---@param tokenizer? Tokenizer nil: bytes
return function(model, seq, tokenizer)
  local options = core.options()
  local text = text_files.read(options.score)
  if not text then core.fail(("--score: %s cannot be read"):format(options.score)) end
  local lists = pieces(tokenizer and tokenizer:encode(text) or { text:byte(1, -1) }, seq.size)
  if #lists == 0 then core.fail(("--score: %s has fewer than 2 tokens"):format(options.score)) end
  local mean, count, likeliest = scored(model, lists, seq)
  local line = { file = options.score, tokens = count, logprob = mean }
  local shown = ("%s: %d tokens, log-likelihood %.5f a token"):format(options.score, count, mean)
  if options.weights then
    local other, _, chosen = scored(model, lists, seq, options.weights)
    line.weights, line.weights_logprob, line.same_likeliest = options.weights, other, share_of_equal(likeliest, chosen)
    shown = shown .. (", %.5f with weights in %s (%+.5f); the likeliest token is the same at %.2f %% of places"):format(other, options.weights, other - mean, 100 * line.same_likeliest)
  end
  if options.rank ~= 0 then return end
  if options.json then core.write_json((core.to_json(line):gsub("%s*$", "")) .. "\n") else core.write(shown .. "\n") end
end
