-- A name that is misspelt is nil, and given to a function of mlua's own library.
local m = require "mlua"
local A = m.axes { embed = 8 }
local hidden = m.zeros { A.embed }
print(m.gelu(hiden))
