-- args: repl --device cpu < SCRIPT
local torch = require "torch"
local m = require "mulua"
require "my_layers"
