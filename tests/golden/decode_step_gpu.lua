-- args: MLUA_DEBUG=3 check --device h200 SCRIPT preset=demo layers=1 seq=784 </dev/null 2>&1 | sed -nE 's/^step [0-9]+: (kernel|gemm) ([^ ]*) of .*/\2/p' | grep -E "few_rows|attention|write_rows|mul.sub.add|sigmoid|rsqrt"
-- A layer of a step of decoding on a GPU: norms and gates are parts of products, queries, keys and values one product and one rotation, and
-- attention writes the new key and value; with weights of their own dtype, then of 8 bits.
local m, Decoder = require "mlua", require "mlua.decode"
local axes, A, model = m.axes, nil, nil
m.axes = function(sizes) A = axes(sizes) return A end
m.train = function(options) model = options.model end
m.generate = function() end
dofile "models/llama.lua"
Decoder.new(model, { seq = A.seq }):prepare({ { temperature = 0 } }, 1)
Decoder.new(model, { seq = A.seq, weights = "int8" }):prepare({ { temperature = 0 } }, 1)
