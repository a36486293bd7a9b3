-- What models read beside tokens in a row: images as patches, positions relative to one another, texts out of which
-- spans are cut, and texts of which a part alone is to be learned.
local core = require "mlua.core"
local m = require "mlua"

local function positive(what, value)
  if type(value) == "number" and math.tointeger(value) and value >= 1 then return math.tointeger(value) end
  core.fail(("%s must be a positive integer, got %s"):format(what, m.shown(value)))
end

-- Patches ---------------------------------------------------------------------------------------------

---An image as a row of square patches (Dosovitskiy et al. 2021): axes height, width and channels become seq, row by
---row of patches, and patch, which holds a patch's rows, their pixels and these' channels, in this order. `axes` names
---other axes: {height = "y", width = "x", channels = "colour", seq = "patches", patch = "pixels"}.
---@param image Tensor over height, width and channels, and any others
---@param size integer pixels along a side of a patch
---@param axes? {height: string, width: string, channels: string, seq: string, patch: string}
---@return Tensor over image's other axes, seq and patch
function m.patches(image, size, axes)
  m.check_tensor("patches", image, "the image")
  m.check_options("patches", axes, { "height", "width", "channels", "seq", "patch" })
  axes, size = axes or {}, positive("the size of m.patches", size)
  local name = setmetatable({}, { __index = function(_, key) return axes[key] or key end })
  core.check_axes("patches", image, name.height, name.width, name.channels)
  local rest, height, width = {}, image:size(name.height), image:size(name.width)
  for _, axis in ipairs(image:axes()) do
    if axis ~= name.height and axis ~= name.width and axis ~= name.channels then rest[#rest + 1] = axis end
  end
  for axis, pixels in pairs { [name.height] = height, [name.width] = width } do
    if pixels % size ~= 0 then
      core.fail_axis(image, axis, ("patches of %d pixels do not divide %s=%d"):format(size, axis, pixels),
        ("a size that divides %d and %d would do"):format(height, width))
    end
  end
  local rows, columns, channels = height // size, width // size, image:size(name.channels)
  local x = image:split(name.height, core.axis("patch_rows", rows), core.axis("pixel_rows", size))
    :split(name.width, core.axis("patch_columns", columns), core.axis("pixel_columns", size))
  local order = table.move(rest, 1, #rest, 1, {})
  for _, axis in ipairs { "patch_rows", "patch_columns", "pixel_rows", "pixel_columns", name.channels } do order[#order + 1] = axis end
  return x:permute(table.unpack(order)):merge("patch_rows", "patch_columns", core.axis(name.seq, rows * columns))
    :merge("pixel_rows", "pixel_columns", core.axis("pixels", size * size))
    :merge("pixels", name.channels, core.axis(name.patch, size * size * channels))
end

-- Relative positions ------------------------------------------------------------------------------------

-- The distances at which buckets begin: one each up to half of them, then in equal ratios up to `reach` (rounded up, but
-- for what rounding adds to an integer).
local function bucket_starts(buckets, reach)
  local exact, starts = buckets // 2, {}
  for b = 1, buckets - 1 do
    starts[b] = b < exact and b or math.ceil(exact * (reach / exact) ^ ((b - exact) / (buckets - exact)) - 1e-9)
  end
  return starts
end

---The bucket of each key's position relative to each query's (Raffel et al. 2020), to look up a learned bias of
---attention's scores: bias:gather(m.relative_buckets(x), "buckets") has axes heads, seq and kv_seq for
---score = function(s) return s + bias end. Near distances have buckets of their own, further ones share them in equal
---ratios, and the last holds all from `reach` on. Half of the buckets are for keys that come later, or none
---where `causal` hides these.
---@param x Tensor whose axis seq has the queries
---@param options? {buckets: integer, reach: integer, causal: boolean, seq: string, keys: integer} default 32 buckets, reach 128; keys: how many, default as many as queries
---@return Tensor i32 over seq and kv_seq
function m.relative_buckets(x, options)
  m.check_options("relative_buckets", options, { "buckets", "reach", "causal", "seq", "keys" })
  local o = options or {}
  m.check_tensor("relative_buckets", x)
  local seq = o.seq or "seq"
  core.check_axes("relative_buckets", x, seq)
  local buckets, reach = positive("relative_buckets' buckets", o.buckets or 32), positive("relative_buckets' reach", o.reach or 128)
  local side = o.causal and buckets or buckets // 2
  if side < 2 or not o.causal and buckets % 2 ~= 0 or reach <= side // 2 then
    core.fail(("relative_buckets cannot have %d buckets up to a distance of %d"):format(buckets, reach), {
      help = "buckets is even and at least 4, and reach above a quarter of it; with causal at least 2, and reach above half of it",
    })
  end
  local queries, keys = core.axis(seq, x:size(seq)), core.axis("kv_seq", o.keys or x:size(seq))
  local relative = core.iota(keys, "i32"):broadcast { queries, keys } - core.iota(queries, "i32")
  local distance = o.causal and core.maximum(-relative, 0) or core.abs(relative)
  local bucket
  for _, start in ipairs(bucket_starts(side, reach)) do
    local reached = core.ge(distance, start):cast "i32"
    bucket = bucket and bucket + reached or reached
  end
  return o.causal and bucket or bucket + side * core.gt(relative, 0):cast "i32"
end

-- Spans --------------------------------------------------------------------------------------------------

-- `total` in so many parts of one or more, all ways equally likely: each border between two is the beginning of a part
-- with the probability that as many beginnings as are left fall on as many borders as are left.
local function partition(total, parts, random)
  local sizes, left = { 1 }, parts - 1
  for border = 1, total - 1 do
    if random:integer(1, total - border) <= left then
      sizes[#sizes + 1], left = 1, left - 1
    else
      sizes[#sizes] = sizes[#sizes] + 1
    end
  end
  return sizes
end

---How to cut spans out of a text (Raffel et al. 2020), for inputs of `seq` tokens: a share `noise` (default 0.15) of the text in
---spans of `length` tokens on average (default 3), each of which one token replaces, and one token that ends it. `text` is
---the number of the text's tokens, `count` that of spans, `targets` that of the tokens cut out, one before each
---span and one that ends them; draw(random) gives {kept =, cut =} for each span, all ways equally likely.
---@param options {seq: integer, noise: number, length: number}
---@return {text: integer, count: integer, targets: integer, draw: fun(random: table): {kept: integer, cut: integer}[]}
function m.spans(options)
  m.check_options("spans", options or {}, { "seq", "noise", "length" })
  local o = options or {}
  local seq, share, mean = positive("seq of m.spans", o.seq), o.noise or 0.15, o.length or 3
  if type(share) ~= "number" or not (share > 0 and share < 1) then core.fail("noise of m.spans is a share between 0 and 1, got " .. m.shown(share)) end
  if type(mean) ~= "number" or not (mean >= 1) then core.fail("length of m.spans is a number, 1 or more, got " .. m.shown(mean)) end
  local function measure(text)
    local cut = math.max(1, math.floor(text * share + 0.5))
    local count = math.max(1, math.floor(cut / mean + 0.5))
    return text - cut + count + 1, cut, count
  end
  local text = 2
  while measure(text + 1) <= seq do text = text + 1 end
  local inputs, cut, count = measure(text)
  if inputs ~= seq or count > text - cut then
    core.fail(("no text loses a share of %g in spans of %g tokens and leaves seq=%d"):format(share, mean, seq), { help = "a longer seq, less noise or longer spans would do" })
  end
  return {
    text = text, count = count, targets = cut + count + 1,
    draw = function(random)
      local kept, parts = partition(text - cut, count, random), {}
      for i, size in ipairs(partition(cut, count, random)) do parts[i] = { kept = kept[i], cut = size } end
      return parts
    end,
  }
end

-- Texts to answer --------------------------------------------------------------------------------------

---Tokens and targets of a text in parts, of which only some are learned: a part is a text (its bytes are tokens) or a list of
---token ids, and {learn = part} is one that the loss counts, such as a chat's answers. A target is the token that
---follows, or -1 where that is not learned; what is left of `seq` positions is filled with `pad`.
---m.labelled(cfg.seq, { "3+4=", { learn = "7\n" } })
---@param seq integer
---@param parts (string|integer[]|{learn: string|integer[]})[]
---@param options? {pad: integer} default 0
---@return integer[] tokens
---@return integer[] targets
function m.labelled(seq, parts, options)
  m.check_options("labelled", options, { "pad" })
  seq = positive("the length of m.labelled", seq)
  local pad, ids, learned = options and options.pad or 0, {}, {}
  for i, part in ipairs(parts) do
    local learn = type(part) == "table" and part.learn
    local content = learn or part
    if type(content) == "string" then content = { content:byte(1, -1) } end
    if type(content) ~= "table" then
      core.fail(("part %d of m.labelled is a text, a list of tokens or {learn = one}, got %s"):format(i, m.shown(part)))
    end
    for _, id in ipairs(content) do ids[#ids + 1], learned[#ids + 1] = id, learn and true or false end
  end
  if #ids > seq then
    core.fail(("the text has %d tokens, and seq is %d"):format(#ids, seq), { help = "a longer seq, or a shorter text" })
  end
  local tokens, targets = {}, {}
  for i = 1, seq do
    tokens[i] = ids[i] or pad
    targets[i] = learned[i + 1] and ids[i + 1] or -1
  end
  return tokens, targets
end
