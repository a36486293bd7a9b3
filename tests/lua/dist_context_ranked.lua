-- args: run --device cpu -n 2
-- Two ranks gather the keys of sequences so long that attention reads them in the order of ranks.
local root = require("mlua.core").options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/context.lua")(2, { "seq" }, { "documents", "wide" }, 512)
