/* Copies of parameters that programs keep from step to step (param_cache.c), whatever sets the
 * parameters in between, and kernels that share a launch (optimize/batch_kernels.c): results are
 * to the bit what they are without. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/bench.h"
#include "tests/process/support.h"

#ifdef MLUA_CUDA

/* Two trainings in turn, an evaluation, and a parameter that is set from outside. */
static const char script[] =
    "local m, core = require 'mlua', require 'mlua.core'\n"
    "local A = m.axes { embed = 32, ffn = 48, vocab = 256, seq = 8, batch = 4 }\n"
    "local Net = m.module('Net', function(self)\n"
    "  self.table, self.out = m.param { A.vocab, A.embed }, m.param { A.embed, A.vocab }\n"
    "  self.gate, self.up = m.param { A.embed, A.ffn }, m.param { A.embed, A.ffn }\n"
    "  self.down = m.param { A.ffn, A.embed }\n"
    "end)\n"
    "function Net:forward(tokens)\n"
    "  local x = self.table:gather(tokens, 'vocab')\n"
    "  x = x + (m.silu(x:dot(self.gate, 'embed')) * x:dot(self.up, 'embed')):dot(self.down, "
    "'ffn')\n"
    "  return x:dot(self.out, 'embed')\n"
    "end\n"
    "local net = Net()\n"
    "local tokens = core.host('i32', 4, 8)\n"
    "local targets = core.host('i32', 4, 8)\n"
    "core.corpus(nil, { dtype = 'u8' }):fill(tokens, targets, 1, { seed = 1, vocab = 256, from = "
    "0, to = 1 })\n"
    "local inputs = { tokens = { A.batch, A.seq, dtype = 'i32' }, targets = { A.batch, A.seq, "
    "dtype = 'i32' } }\n"
    "local function loss(feeds) return m.cross_entropy(net(feeds.tokens), feeds.targets) end\n"
    "local function trainer(optimizer)\n"
    "  net(core.input('tokens', { A.batch, A.seq }, 'i32'))\n"
    "  return m.step_program({ loss = function(a, b) return loss { tokens = a, targets = b } end, "
    "batch = A.batch,\n"
    "    seq = A.seq, optimizer = optimizer, clip = 1 }, m.parameters(net))\n"
    "end\n"
    "local train = { [0] = trainer(m.adamw { lr = 0.02 }), trainer(m.lion { lr = 0.01 }),\n"
    "  trainer(m.muon { lr = 0.02 }) }\n"
    "local evaluate = m.compile(function(feeds) local t, n = loss(feeds); return t / n end, "
    "inputs)\n"
    "local function feed(step) return { tokens = tokens, targets = targets, rate = 1, step = step "
    "} end\n"
    "for step = 1, 8 do\n"
    "  local out = train[step % 5 % 3](feed(step))\n"
    "  print(('%.9g %.9g %.9g'):format(out.loss, out.grad_norm, evaluate { tokens = tokens, "
    "targets = targets }))\n"
    "  if step == 4 then net.gate:set(net.up:get()) end\n"
    "end\n";

static void gpu_copies_bits(process_room *room) {
    process_write(room, "copies.lua", script);
    const char *run = "run copies.lua --device cuda --quiet";
    process_result without = process_run(room, 0, "MLUA_PARAM_CACHE=0", "%s", run);
    process_result with = process_run(room, 0, "MLUA_VERIFY=1", "%s", run);
    CHECK(strchr(without.output, '\n') != NULL);
    CHECK_TEXT(with.output, without.output);
}
TEST(gpu_copies, bits) {
    process_in_room(gpu_copies_bits);
}

/* Sums in one row are added up by kernels that have one chunk: they take no part in batches. */
static void gpu_copies_batches(process_room *room) {
    static const char *const models[] = {"gpt.lua --dtype f32", "llama.lua kv_heads=2",
                                         "gpt_moe.lua kv_heads=4 experts=4 accum=2"};
    for (int i = 0; i < 3; i++) {
        char *run = ml_arena_format(room->arena,
                                    "run \"$ROOT\"/models/%s --device cuda --quiet --json layers=3 "
                                    "embed=32 heads=4 ffn=64 seq=16 batch=8 sample=0 steps=3 "
                                    "| sed -E 's/,\"lr\".*//'",
                                    models[i]);
        process_result alone = process_run(room, 0, "MLUA_BATCH=0 MLUA_PARAM_CACHE=0", "%s", run);
        process_result joined = process_run(room, 0, "MLUA_VERIFY=1", "%s", run);
        process_expect(&alone, "\"step\":3");
        CHECK_TEXT(joined.output, alone.output);
    }
}
/* Frozen weights below adapters, which are merged with them: of their copies what trains the
 * adapters writes parts, in one program or after microbatches. */
static void gpu_copies_adapters(process_room *room) {
    for (int i = 0; i < 2; i++) {
        char *run = ml_arena_format(
            room->arena,
            "run \"$ROOT\"/models/lora.lua --device cuda --quiet --json layers=2 embed=64 heads=4 "
            "kv_heads=2 ffn=128 seq=64 batch=4 pretrain=2 steps=4 lr=0.05 warmup=1 accum=%d "
            "dropout=%s | sed -E 's/,\"lr\".*//'",
            1 + i, i ? "0.1" : "0");
        process_result without = process_run(room, 0, "MLUA_PARAM_CACHE=0", "%s", run);
        process_result with = process_run(room, 0, "MLUA_VERIFY=1", "%s", run);
        process_expect(&without, "\"step\":4");
        CHECK_TEXT(with.output, without.output);
    }
}
TEST(gpu_copies, adapters) {
    process_in_room(gpu_copies_adapters);
}

/* Threads that fill memory of the GPU: whole pieces, rows of them, what is transposed. */
static void gpu_copies_loads(process_room *room) {
    static const char *const scripts[] = {"checkpoint", "checkpoint_pieces", "views_pieces"};
    for (int i = 0; i < 3; i++)
        process_run(room, 0, "", "run \"$ROOT/tests/lua/%s.lua\" --device cuda --quiet",
                    scripts[i]);
}
TEST(gpu_copies, loads) {
    process_in_room(gpu_copies_loads);
}

/* What a program that runs often keeps gathered is left where others hold the memory. */
static void gpu_copies_often(process_room *room) {
    gpu_need_emulator();
    process_write(
        room, "often.lua",
        "local m, core = require 'mlua', require 'mlua.core'\n"
        "local A = m.axes { embed = 256, ffn = 1024, rows = 768 }\n"
        "local Net = m.module('Net', function(self)\n"
        "  for i = 1, 4 do self['w' .. i] = m.param { A.embed, A.ffn } end\n"
        "end)\n"
        "function Net:forward(x)\n"
        "  for i = 1, 4 do\n"
        "    x = x:dot(self['w' .. i], 'embed'):dot(self['w' .. i], 'ffn')\n"
        "  end\n"
        "  return x\n"
        "end\n"
        "local other = m.state { name = 'other', axes = { core.axis('other', 1 << 20) } }\n"
        "m.use_layout(m.layout.megatron { zero = true })\n"
        "m.compile(function(f) other:assign(other + f.by) return { y = f.by } end, { by = {} }) { "
        "by = 1 }\n"
        "local net = Net()\n"
        "local program = m.compile(function(f) return { y = net(f.x):sum('rows', 'embed') } end,\n"
        "  { x = { A.rows, A.embed } }, { layout = m.layout.megatron { zero = true }, often = true "
        "})\n"
        "local x = core.host('f32', 768, 256)\n"
        "for i = 1, #x do x[i] = i % 7 end\n"
        "for run = 1, 2 do print(program { x = x }.y) end\n"
        "print('used ' .. core.device().used_bytes)\n");
    const char *run = "run often.lua --device cuda --dtype f32 --quiet -n 2 --mesh dp=2";
    process_result enough = process_run(room, 0, "MLUA_VERIFY=1", "%s", run);
    process_result little = process_run(room, 0, "EMULATOR_MEMORY=152 MLUA_VERIFY=1", "%s", run);
    const char *most = strstr(enough.output, "used "), *less = strstr(little.output, "used ");
    REQUIRE(most && less && most > enough.output);
    CHECK(strncmp(enough.output, little.output, (size_t)(most - enough.output)) == 0);
    double more = strtod(most + 5, NULL) - strtod(less + 5, NULL);
    EXPECT(more > 3e6, "%g bytes more where there is room", more);
}
TEST(gpu_copies, often) {
    process_in_room(gpu_copies_often);
}
TEST(gpu_copies, batches) {
    process_in_room(gpu_copies_batches);
}
#else
TEST(gpu_copies, all) {
    test_skip("built without the CUDA toolkit's headers");
}
#endif
