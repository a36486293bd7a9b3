-- A module of a user, as tests/lua/globals.lua requires it: it sets a global and asks for names of other Lua versions.
local unpack, load = unpack or table.unpack, loadstring or load
function set_by_module(...) return unpack { ... } end
return { jit = jit and true or false, undefined = function() return undefined_in_module end, load = load }
