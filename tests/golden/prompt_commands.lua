-- args: repl --device h200 tests/golden/prompt_script.lua heads=4 < SCRIPT 2>&1 | grep -v "^planned"
x = m.input("x", { A.batch, A.embed })
x:dot(model.block.wq, "embed")
:mem
:check _
x:cast("f32"):dot(model.block.wq, "embed")
x:dot(model.block.wq:read(), "embed", { dtype = "f32" })
:shard x
:shrd x
:mem 1
::label::
m.use_layout(m.layout { mesh = { { "dp", 2 }, { "tp", 2 } }, params = { tp = { "heads" } }, acts = { dp = { "batch" }, tp = { "heads" } } })
x:cast("f32"):dot(model.block.wq, "embed")
:shard x:dot(model.block.wq, "embed"):sum("head_dim")
:shard x:dot(model.block.wq, "embed"):dot(model.block.wo, "heads", "head_dim")
:shard model.block
:mem model.block
:mem { x:sum("batch") }
step = m.compile(function(i) return { y = i.x:dot(model.block.wq, "embed"):sum() } end, { x = { A.batch, A.embed } }, { name = "step" })
:shard step
step { x = m.host("f32", 2, 16) }
= model.block.wo:slice("embed", 0, 2):slice("heads", 0, 1):slice("head_dim", 0, 1)
:shard
