-- args: run --device cpu -n 3
-- Three ranks gather the keys.
local root = require("mlua.core").options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/context.lua")(3, { "seq" }, { "causal", "narrow" })
