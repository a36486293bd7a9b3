local core = require "mlua.core"
core.corpus("no/such/book.txt")
