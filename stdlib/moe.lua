-- Mixtures of experts: a router sends each token to its top_k of many feed-forward networks.
--
-- Everything about one token happens where its axes say (batch, seq), everything about one expert
-- along the axis "experts" of its parameters, so that layouts split both by name. Without a capacity
-- no token is dropped: all choices are sorted by expert and multiplied by ragged_dot, whose offsets
-- stay on the device. With one, each expert accepts `capacity` times its even share of every sequence,
-- earlier positions first: what is dropped depends on no later token and on no other sequence. Where
-- experts are split over ranks these exchange tokens (all-to-all) with a capacity, and without one
-- where the layout has an `exchange`; else weights are gathered.
local core = require "mlua.core"
local m = require "mlua"
local packing = require "mlua.packing"

local OPTIONS = {
  "experts", "ffn", "top_k", "router", "normalize", "scale", "aux_loss", "aux_over", "z_loss", "bias_balance", "capacity",
  "shared", "expert", "seq", "init", "down_init", "bias", "groups", "top_groups",
}

local function one_of(what, value, ...)
  for _, known in ipairs { ... } do
    if value == known then return value end
  end
  core.fail(("m.moe's %s must be %s, got %s"):format(what, table.concat({ ... }, " or "), m.shown(value)))
end

local function check_number(spec, key, whole)
  local value, kind = spec[key], math.type(spec[key])
  if value == nil or (kind == "integer" or kind and not whole) and value >= 0 and value < math.huge then return end
  core.fail(("m.moe's %s must be %s, 0 or more, got %s"):format(key, whole and "an integer" or "a number", m.shown(value)))
end

local function check(spec)
  m.check_options("moe", spec, OPTIONS, "A.embed, experts = A.experts, ffn = A.ffn")
  for _, key in ipairs { 1, "experts", "ffn" } do
    if type(spec[key]) ~= "userdata" or core.is_tensor(spec[key]) then
      core.fail(("m.moe's %s must be an axis, got %s"):format(key == 1 and "embed (the first)" or key, m.shown(spec[key])), {
        help = "m.moe { A.embed, experts = A.experts, ffn = A.ffn, top_k = 2 }",
      })
    end
  end
  local k = spec.top_k or 2
  if math.type(k) ~= "integer" or k < 1 or k > spec.experts.size then
    core.fail(("m.moe cannot choose top_k=%s of %d experts"):format(m.shown(k), spec.experts.size))
  end
  for _, key in ipairs { "aux_loss", "z_loss", "bias_balance", "scale" } do check_number(spec, key) end
  check_number(spec, "shared", true)
  if spec.capacity ~= nil and not (type(spec.capacity) == "number" and spec.capacity > 0) then
    core.fail(("m.moe's capacity must be a factor above 0, got %s"):format(m.shown(spec.capacity)), {
      help = "1.25 leaves room for a quarter more than an even share; without capacity nothing is dropped",
    })
  end
  if (spec.shared or 0) > math.maxinteger // spec.ffn.size then
    core.fail(("m.moe's shared = %d experts of ffn = %d would be one axis beyond 2^63"):format(spec.shared, spec.ffn.size))
  end
  local groups, top = spec.groups or 1, spec.top_groups or 1
  if math.type(groups) ~= "integer" or groups < 1 or spec.experts.size % groups ~= 0 then
    core.fail(("m.moe's groups must divide its %d experts, got %s"):format(spec.experts.size, m.shown(groups)))
  end
  if math.type(top) ~= "integer" or top < 1 or top > groups or top * (spec.experts.size // groups) < k then
    core.fail(("m.moe cannot choose top_k=%d experts of top_groups=%s of %d groups"):format(k, m.shown(top), groups))
  end
  if groups > 1 and spec.experts.size // groups < 2 then core.fail "m.moe's groups need two experts each: a group's score is the sum of its two best" end
  one_of("router", spec.router or "softmax", "softmax", "sigmoid")
  one_of("expert", spec.expert or "swiglu", "swiglu", "gelu")
  one_of("aux_over", spec.aux_over or "sequence", "sequence", "batch")
end

local MoE = m.module("MoE", function(self, spec)
  check(spec)
  local embed, experts, ffn, init = spec[1], spec.experts, spec.ffn, spec.init
  local o = { embed = embed.name, ffn = ffn.name, experts = experts, top_k = spec.top_k or 2, seq = spec.seq or "seq" }
  o.router, o.expert = spec.router or "softmax", spec.expert or "swiglu"
  o.normalize = spec.normalize
  if o.normalize == nil then o.normalize = o.top_k > 1 end -- a single normalized weight would be 1 always
  o.scale, o.aux_loss, o.z_loss = spec.scale or 1, spec.aux_loss or 0, spec.z_loss or 0
  o.groups, o.top_groups = spec.groups or 1, spec.top_groups or 1
  o.aux_over, o.balance, o.capacity = spec.aux_over or "sequence", spec.bias_balance or 0, spec.capacity
  self.options = o
  self.router = m.param { embed, experts, init = init, f32 = true }
  self.gate = o.expert == "swiglu" and m.param { experts, embed, ffn, init = init } -- false where it has none
  self.up = m.param { experts, embed, ffn, init = init }
  self.down = m.param { experts, ffn, embed, init = spec.down_init or init }
  local wide = (spec.shared or 0) > 0 and core.axis(ffn.name, spec.shared * ffn.size)
  self.shared_gate = wide and o.expert == "swiglu" and m.param { embed, wide, init = init }
  self.shared_up = wide and m.param { embed, wide, init = init }
  self.shared_down = wide and m.param { wide, embed, init = spec.down_init or init }
  self.bias = (o.balance > 0 or spec.bias) and m.buffer { experts }
  self.load, self.dropped = m.buffer { experts }, m.buffer {}
end)

---A mixture of experts over the axis `embed` of its input. options: `experts` and `ffn` (axes);
---`top_k` experts for each token (default 2); `router`: "softmax", or "sigmoid" (DeepSeek-V3);
---`normalize` the chosen weights to sum to 1 (default: where top_k > 1), times `scale`; `aux_loss`:
---weight of the balance loss E * sum(f_e P_e) (Fedus et al. 2021), over each sequence (default) or
---`aux_over = "batch"` (each microbatch); `z_loss`: weight of logsumexp(logits)^2 (Zoph et al. 2022); `bias_balance`:
---step of a bias for choosing that evens the load without a loss (Wang et al. 2024), which `bias = true` has without it;
---`groups` of experts, of which a token's are in the best `top_groups`; `capacity`: a
---factor, beyond which an expert drops tokens (default: none are dropped); `shared` experts that see
---every token; `expert`: "swiglu" or "gelu"; `seq`: the axis of positions; `init` and `down_init`:
---standard deviations. The router computes in f32. :statistics() returns the last training step's
---load.
---@param spec {experts: Axis, ffn: Axis, top_k: integer, groups: integer, top_groups: integer, bias: boolean, router: string, normalize: boolean, scale: number, aux_loss: number, aux_over: string, z_loss: number, bias_balance: number, capacity: number, shared: integer, expert: string, seq: string, init: number, down_init: number, [integer]: Axis}
---@return MoE
function m.moe(spec) return MoE(spec) end

---A mixture of experts, of m.moe.
---@class MoE: Module
---@field router State
---@field gate State|false
---@field up State
---@field down State
---@field statistics fun(self: MoE): {load: number[], peak: number, dropped: number} how evenly the last training step used the experts: each one's share of all choices, the largest share over the even one, and the share of choices that found no room

-- How evenly the last training step used the experts: `load`, each expert's share of all choices;
-- `peak`, the largest share over the even one; `dropped`, the share of choices that found no room.
function MoE:statistics()
  local counts, total, peak, load = self.load:get(), 0, 0, {}
  for i = 1, #counts do total, peak = total + counts[i], math.max(peak, counts[i]) end
  for i = 1, #counts do load[i] = counts[i] / math.max(total, 1) end
  return { load = load, peak = peak * #counts / math.max(total, 1), dropped = self.dropped:get()[1] / math.max(total, 1) }
end

-- The input's axes but embed, and those of them that are not positions.
local function leading(o, x)
  local lead, others = {}, {}
  for _, axis in ipairs(m.axes_of(x)) do
    if axis.name ~= o.embed then lead[#lead + 1] = axis end
    if axis.name ~= o.embed and axis.name ~= o.seq then others[#others + 1] = axis end
  end
  return lead, others
end

local function join(...)
  local list = {}
  for _, part in ipairs { ... } do
    if type(part) == "table" then table.move(part, 1, #part, #list + 1, list) else list[#list + 1] = part end
  end
  return list
end

-- Several axes as one (in this order, then the rest), and back.
local function flatten(t, axes, rest, name)
  t = t:permute(table.unpack(join(axes, rest)))
  if #axes == 1 then return axes[1].name == name and t or t:rename(axes[1].name, name) end
  local merged = axes[1].name
  for i = 2, #axes do
    t = t:merge(merged, axes[i].name, name)
    merged = name
  end
  return t
end

local function unflatten(t, name, axes)
  if #axes == 1 then return axes[1].name == name and t or t:rename(name, axes[1].name) end
  local size = 1
  for _, axis in ipairs(axes) do size = size * axis.size end
  for i = 1, #axes - 1 do
    size = size // axes[i].size
    t = t:split(name, axes[i], i == #axes - 1 and axes[#axes] or core.axis(name, size))
  end
  return t
end

-- Scores for choosing, 0 for experts outside of the best groups: those whose two best experts have the largest sums
-- (DeepSeek-AI 2024).
local function in_groups(choice, o)
  if o.groups == 1 then return choice end
  local experts, groups = o.experts.name, core.axis("groups", o.groups)
  local within = core.axis("within", o.experts.size // o.groups)
  local axes = choice:axes()
  local split = choice:split(experts, groups, within)
  local best = split:top_k("within", 2, core.axis("within", 2)):sum "within"
  local least = best:top_k("groups", o.top_groups, core.axis("groups", o.top_groups)):min "groups"
  local kept = core.ge(best, least):broadcast(m.axes_of(split))
  return core.where(kept, split, 0):merge("groups", "within", experts):permute(table.unpack(axes))
end

-- What each token chose: weights (f32) and i32 expert ids over `choices`; all probabilities; logits.
local function route(self, x, choices)
  local o = self.options
  local experts = o.experts.name
  local logits = x:cast(x:dtype() == "f64" and "f64" or "f32"):dot(self.router:read(), o.embed)
  local probs = o.router == "softmax" and m.softmax(logits, experts) or core.sigmoid(logits)
  local weights, index = probs:top_k(experts, o.top_k, choices)
  if self.bias or o.groups > 1 then
    local choice = self.bias and m.detach(probs) + self.bias:read() or m.detach(probs)
    local _, chosen = in_groups(choice, o):top_k(experts, o.top_k, choices)
    weights, index = probs:gather(chosen, experts), chosen
  end
  if o.normalize then weights = weights / (weights:sum(choices) + 1e-20) end
  return weights * o.scale, index, probs, logits
end

-- The losses of the router: E * sum over experts of (share of choices) * (mean probability), for each
-- sequence or the whole batch, and the square of logsumexp, as sums over tokens.
local function add_losses(self, lead, hits, probs, logits)
  local o, tokens = self.options, 1
  for _, axis in ipairs(lead) do tokens = tokens * axis.size end
  if o.aux_loss > 0 then
    if o.router == "sigmoid" then probs = probs / probs:sum(o.experts.name) end
    local over, count = {}, 1
    for _, axis in ipairs(lead) do
      if o.aux_over == "batch" or axis.name == o.seq then over[#over + 1], count = axis.name, count * axis.size end
    end
    if #over == 0 then core.fail(("m.moe's balance loss needs the axis %q of positions"):format(o.seq), { help = 'aux_over = "batch"' }) end
    local share = hits:cast(probs:dtype()):sum(table.unpack(over)) * (1 / (count * o.top_k))
    local mean = probs:sum(table.unpack(over)) * (1 / count)
    m.add_loss((share * mean):sum() * (o.aux_loss * o.experts.size * count), tokens)
  end
  if o.z_loss > 0 then
    local lse = m.logsumexp(logits, o.experts.name)
    m.add_loss((lse * lse):sum() * o.z_loss, tokens)
  end
end

-- The load of this step, and the bias that follows it.
local function record(self, load, dropped)
  local o = self.options
  m.step_total(self.load, load, self.bias and o.balance > 0 and function(total)
    self.bias:assign(self.bias:read() + o.balance * core.sign(m.mean(total) - total))
  end)
  m.step_total(self.dropped, dropped or 0)
end

-- `multiply(x, w, over)` is the product of the tokens of each expert with its matrix. A `weight` is
-- applied before the second one: the unweighted result would be retained for nothing else.
local function feed(self, x, up, gate, down, multiply, weight)
  local h, dtype = multiply(x, up, self.options.embed), x:dtype()
  h = gate and m.swiglu(multiply(x, gate, self.options.embed), h) or m.gelu(h)
  if weight then h = (h * weight):cast(dtype) end
  return multiply(h, down, self.options.ffn)
end

-- Every choice is a row; the rows of a sequence in the order of their experts. Sequences are sorted
-- each on its own, so that a layout that splits the batch splits the work.
local function dropless(self, x, positions, others, choices, weights, index)
  local o, experts, tokens = self.options, self.options.experts, 1
  for _, axis in ipairs(positions) do tokens = tokens * axis.size end
  local many = #others > 1 and core.axis("sequences", x:elements() // x:size(o.embed) // tokens)
  local sequences = { many or others[1] }
  -- positions and the axes `more` as one, `name`; other axes but those of `rest` as one, too
  local function arrange(t, more, name, rest)
    t = flatten(t, join(positions, more), join(others, rest), name)
    if many then t = flatten(t, others, join(name, rest), many.name) end
    return t:permute(table.unpack(join(sequences, name, rest)))
  end
  local picked = arrange(index, choices, "rows", {})
  local _, order = picked:sort "rows"
  local hits = core.eq(core.iota(experts, "i32"):broadcast(join(m.axes_of(picked), experts)), picked)
  local counts = hits:cast("i32"):sum "rows"
  local ends = counts:cumsum(experts.name)
  local starts = ends - counts
  local token = order // o.top_k
  local rows = arrange(x, {}, "tokens", { o.embed }):gather(token, "tokens")
  local weight = arrange(weights, choices, "rows", {}):gather(order, "rows")
  local function multiply(a, w, over) return a:ragged_dot(w, over, starts, ends) end
  local y = feed(self, rows, self.up, self.gate, self.down, multiply, weight)
  y = core.scatter_add(token, y, core.axis("tokens", tokens), nil, sequences)
  if many then y = unflatten(y, many.name, others) end
  return unflatten(y, "tokens", positions)
end

-- Where ranks split the positions, a part of these is sorted on its own too: each rank has one.
local function in_parts(self, x, lead, others, choices, weights, index)
  local o, seq = self.options, nil
  for _, axis in ipairs(lead) do
    if axis.name == o.seq then seq = axis end
  end
  if not seq then return dropless(self, x, lead, {}, choices, weights, index) end -- all axes are positions
  local ranks = m.context.training and m.ranks_along(seq.name, others, { o.embed, o.ffn, o.experts.name }) or 1
  if ranks == 1 or seq.size % ranks ~= 0 then return dropless(self, x, { seq }, others, choices, weights, index) end
  local part, within = core.axis("part", ranks), core.axis("within", seq.size // ranks)
  local function cut(t) return t:split(seq.name, part, within) end
  local y = dropless(self, cut(x), { within }, join(part, others), choices, cut(weights), cut(index))
  return y:permute(table.unpack(join(others, part, within, o.embed))):merge("part", "within", seq.name)
end

-- Every expert has `capacity` places for each sequence.
local function with_capacity(self, x, lead, others, choices, weights, index, hits)
  local o, seq, experts = self.options, nil, self.options.experts
  for _, axis in ipairs(lead) do if axis.name == o.seq then seq = axis end end
  if not seq then core.fail(("m.moe with a capacity needs the axis %q of positions"):format(o.seq), { help = "seq names it" }) end
  local share = math.ceil(seq.size * o.top_k / experts.size * o.capacity)
  local places = core.axis("places", math.max(1, math.min(seq.size, share)))
  local picks = core.axis("picks", seq.size * o.top_k)
  local chosen = flatten(index, { seq, choices }, others, "picks"):permute(table.unpack(join(others, picks)))
  local _, order = chosen:sort "picks"
  -- the choice in slot c of expert e
  local counts = hits:sum(seq.name)
  local shape = join(others, experts, places)
  local at = core.iota(places, "i32"):broadcast(shape)
  local taken = core.lt(at, counts)
  local first = (counts:cumsum(experts.name) - counts):broadcast(shape)
  local pick = order:gather(core.where(taken, first + at, 0), "picks")
  local rows = core.where(taken:broadcast(join(shape, core.axis(o.embed, x:size(o.embed)))), x:gather(pick // o.top_k, seq.name), 0)
  rows = flatten(rows, join(others, places), { experts.name, o.embed }, "slots"):permute(experts.name, "slots", o.embed)
  local function multiply(a, w, over) return a:dot(w, over) end
  local y = unflatten(feed(self, rows, self.up, self.gate, self.down, multiply), "slots", join(others, places))
  y = flatten(y, { experts, places }, join(others, o.embed), "slots")
  -- and the slot of choice p: after the earlier ones of its expert
  local all = core.eq(core.iota(experts, "i32"):broadcast(join(others, picks, experts)), chosen):cast "i32"
  local own = ((all:cumsum "picks" - 1) * all):sum(experts.name)
  local kept = core.lt(own, places.size)
  local slot = chosen * places.size + core.minimum(own, places.size - 1)
  local weight = flatten(weights, { seq, choices }, others, "picks"):permute(table.unpack(join(others, picks)))
  y = y:gather(slot, "slots") * core.where(kept, weight, 0)
  y = y:split("picks", seq, choices):sum(choices.name):cast(x:dtype())
  return y, core.where(kept, 0, 1):cast("f32"):sum()
end

function MoE:forward(x)
  local o = self.options
  m.check_tensor("m.moe's module", x)
  core.check_axes("moe", x, o.embed)
  local lead, others = leading(o, x)
  local choices = core.axis("choices", o.top_k)
  local weights, index, probs, logits = route(self, x, choices)
  local hits = core.eq(core.iota(o.experts, "i32"):broadcast(join(lead, choices, o.experts)), index):cast("i32"):sum(choices)
  local counts = hits:sum(table.unpack(lead))
  add_losses(self, lead, hits, probs, logits)
  local y, dropped
  if o.capacity then
    y, dropped = with_capacity(self, x, lead, others, choices, weights, index, hits)
  else
    y = packing.by_position(in_parts, self, x, lead, others, choices, weights, index)
  end
  record(self, counts:cast "f32", dropped)
  if self.shared_up then
    y = y + feed(self, x, self.shared_up, self.shared_gate, self.shared_down, function(a, w, over) return a:dot(w, over) end)
  end
  return y:permute(table.unpack(x:axes()))
end
