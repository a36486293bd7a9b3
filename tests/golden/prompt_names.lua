-- args: repl --device cpu < SCRIPT
_
stpes
steps = 3
stpes
local layers
layers
local heads <const>, width = 4, 8
heads, width
steps = nil
steps
function double(x) return twice * x end
double(2)
twice = 2
double(2)
_
