-- args: check --device cpu SCRIPT --mesh dp=4,cp=2
-- A bound of a rank's share of a sequence, where all sequences are split alike.
local m = require "mlua"
m.layout.megatron { cp_tokens = 2048 }
