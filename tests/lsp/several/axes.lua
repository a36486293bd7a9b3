-- Axes and settings that several files share: tests/golden/lsp_several.lua renames them where no editor has opened them.
local m = require "mlua"
local cfg = m.config { embed = 16, seq = 8, batch = 4, vocab = 256, steps = 1 }
return { A = m.axes { embed = cfg.embed, ffn = 4 * cfg.embed, seq = cfg.seq, batch = cfg.batch, vocab = cfg.vocab }, cfg = cfg }
