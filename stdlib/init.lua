-- `require "mlua"`: everything a script sees. The pieces live in the files named here; each adds
-- its functions to the one table `m`.
local core = require "mlua.core"

---@class mlua
local m = {}
package.loaded["mlua"] = m

for _, piece in ipairs {
  "tensor", "hf_config", "hf_views", "from", "task", "config", "module", "random", "packing", "nn", "loss", "moe", "optim", "checkpoint", "schedule", "scan", "compile", "layout", "log", "progress", "train", "generate", "sequences", "conv", "recurrent", "lora", "tokenizer",
} do
  require("mlua." .. piece)
end

local synonyms = require "mlua.synonyms"

-- `path` is what the script wrote after "m.", `name` the last of it.
local function unknown(path, name)
  local help = rawget(m, name) ~= nil and ("all functions are in one table: m.%s"):format(name) or synonyms.for_function(name, m)
  core.fail(("mlua has no function %q"):format(path), { help = help })
end

return setmetatable(m, {
  __index = function(_, name)
    if type(name) ~= "string" then return nil end
    return synonyms.namespace(name, unknown) or unknown(name, name)
  end,
})
