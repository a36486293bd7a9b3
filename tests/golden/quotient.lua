-- A size that another must divide, and does not.
local m = require "mlua"
local cfg = m.config { embed = 384, heads = 6, most = 500, none = 0 }
print(m.quotient(cfg, "embed", "heads"))
print(select(2, pcall(m.quotient, cfg, "embed", "none")))
print(select(2, pcall(m.quotient, cfg, "embed", "most")))
cfg.heads = 5
m.quotient(cfg, "embed", "heads")
