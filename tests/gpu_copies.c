/* Copies of parameters that programs keep from step to step (plan/copies.c), whatever sets the
 * parameters in between, and kernels that share a launch (plan/batch.c): results are to the bit
 * what they are without. */
#include <string.h>

#include "tests/process_support.h"

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
    process_result without = process_run(room, 0, "MLUA_COPIES=0", "%s", run);
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
        process_result alone = process_run(room, 0, "MLUA_BATCH=0 MLUA_COPIES=0", "%s", run);
        process_result joined = process_run(room, 0, "MLUA_VERIFY=1", "%s", run);
        process_expect(&alone, "\"step\":3");
        CHECK_TEXT(joined.output, alone.output);
    }
}
TEST(gpu_copies, batches) {
    process_in_room(gpu_copies_batches);
}
#endif
