-- `require "mlua"`: everything a script sees. The pieces live in the files named here; each adds
-- its functions to the one table `m`.
local core = require "mlua.core"

---@class mlua
local m = {}
package.loaded["mlua"] = m

for _, piece in ipairs {
  "tensor", "config", "module", "random", "nn", "loss", "moe", "optim", "schedule", "compile", "layout", "log", "progress", "train", "generate",
} do
  require("mlua." .. piece)
end

return setmetatable(m, {
  __index = function(_, name)
    if type(name) ~= "string" then return nil end
    local names = {}
    for known in pairs(m) do names[#names + 1] = known end
    local guess = core.suggest(name, names)
    core.fail(("mlua has no function %q"):format(name), { help = guess and ("did you mean m.%s?"):format(guess) })
  end,
})
