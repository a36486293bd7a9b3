-- What pcall catches is used as a string, whether it comes from mlua or from Lua.
local m = require "mlua"
local A = m.axes { batch = 2, embed = 3 }
local x, y = m.zeros { A.batch }, m.zeros { m.axis("batch", 5) }
local ok, err = pcall(function() return x + y end)
print(ok, type(err), err:match "batch", err:find("axis", 1, true) ~= nil, #err == #tostring(err))
print(err:upper():sub(1, 12), (err:gsub("\n.*", "")))
print("caught: " .. err:sub(1, 20), err:len() == #err, ("%s"):format(err) == tostring(err))
print(err.message, err.line, err.nothing, err.rep ~= nil)
ok, err = pcall(function() local t = nil; return t.x end)
print(ok, err:match "nil", (err .. ""):match "index")
print(pcall(function() return err:match() end))
