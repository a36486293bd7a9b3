-- args: check --device cpu SCRIPT --mesh cp=2 --layout cp=2
-- How many ranks split sequences is said by --mesh.
local m = require "mlua"
m.layout.megatron {}
