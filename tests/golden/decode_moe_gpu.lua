-- args: MLUA_DEBUG=3 check --device h200 SCRIPT layers=1 seq=784 </dev/null 2>&1 | sed -nE 's/^step [0-9]+: (kernel|gemm) ([^ ]*) of .*/\2/p' | sed -n '/^top_k/,/^few_rows/p'
-- From a router's choice to the experts' products in a step of decoding on a GPU: few rows are ordered by comparisons, without a sort.
local m, Decoder = require "mlua", require "mlua.decode"
local axes, A, model = m.axes, nil, nil
m.axes = function(sizes) A = axes(sizes) return A end
m.train = function(options) model = options.model end
m.generate = function() end
dofile "models/gpt_moe.lua"
Decoder.new(model, { seq = A.seq }):prepare({ { temperature = 0 } }, 1)
