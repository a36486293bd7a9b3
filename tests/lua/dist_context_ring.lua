-- args: run --device cpu -n 4
-- Keys go around a ring of four ranks.
local root = require("mlua.core").options().script:match "^(.*)tests/lua/" or ""
dofile(root .. "tests/lua/lib/context.lua")(4, { "seq", "kv_seq" }, { "documents", "wide" })
