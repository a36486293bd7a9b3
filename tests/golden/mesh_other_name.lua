-- args: check --device cpu --mesh fsdp=8
local m = require "mlua"
m.layout.ddp {}
