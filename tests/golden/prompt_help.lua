-- args: repl --device cpu tests/golden/prompt_script.lua heads=4 < SCRIPT
help
help()
m.relu
help(m.relu)
m.exp
m.adamw
model.block.wq.elements
help "relu"
help "x:slice"
help "gelux"
help(m.init.uniform)
print
model
help(Block)
help(model.block)
model.block.forward
-- What a function at the prompt does.
function double(x) return x * 2 end
double
cfg
help(cfg)
help(nothing_at_all)
