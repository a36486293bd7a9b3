/* What `mlua check` reports of layouts: collectives, memory, and how long it takes. */
#include <string.h>

#include "tests/process/support.h"

DIST_TEST(check_of_a_mesh) {
    process_result r = process_run(room, 0, "",
                                   "check \"$ROOT/models/gpt.lua\" layers=2 --device h200 "
                                   "--mesh dp=4,tp=2 --types");
    process_expect(&r, "ranks           8: pp=1 dp=4 cp=1 tp=2;");
    process_expect(&r, "collectives     of one rank, in one step");
    process_expect(&r, "largest redistributions");
    process_expect(&r, "i32[batch=16@dp, seq=256@tp]");
    process_expect(&r, "bf16[batch=16@dp, seq=256, embed=384] partial(tp)");
    /* Parameters that lie in parts are gathered once a step, not for each microbatch. */
    r = process_run(room, 0, "",
                    "check \"$ROOT/models/gpt.lua\" layers=2 --device h200 --mesh dp=4 accum=2");
    process_expect(&r, "x 2    all_gather over dp to bf16[embed=384, ffn=1536]");
    r = process_run(room, 0, "", "check --json \"$ROOT/models/gpt.lua\" layers=2 --mesh dp=4,tp=2");
    process_expect(&r, "\"mesh\":{\"pp\":1,\"dp\":4,\"cp\":1,\"tp\":2}");
    process_expect(&r, "\"redistributions\":[{\"kind\":");
    process_expect(&r, "\"whole_optimizer_bytes\":0");
    /* What the optimizer keeps counts as its own, though another program than the largest has it.
     */
    r = process_run(room, 0, "", "check --json \"$ROOT/models/gpt.lua\" layers=2 --mesh pp=2");
    double sum = 0;
    static const char *const kinds[] = {"parameters", "gradients", "optimizer", "activations",
                                        "workspace"};
    for (int i = 0; i < 5; i++)
        sum += process_number(strstr(r.output, "\"memory_bytes\":"),
                              ml_arena_format(room->arena, "\"%s\":", kinds[i]));
    CHECK(process_number(strstr(r.output, "\"memory_bytes\":"), "\"optimizer\":") > 0);
    CHECK(sum == process_number(r.output, "\"peak_bytes\":"));
    /* ZeRO-1 over 8 of tensors of which some have 3 and 4 elements an axis. */
    r = process_run(room, 0, "",
                    "check \"$ROOT/models/gpt.lua\" layers=1 embed=12 heads=3 seq=31 vocab=251 "
                    "batch=8 --mesh dp=8");
    process_expect(&r, "  288 B of the optimizer's are whole over a mesh axis that is \"flat\"");
    /* 3 divides no axis of a parameter. */
    r = process_run(room, 0, "",
                    "check --json \"$ROOT/models/gpt.lua\" layers=2 batch=12 --mesh dp=3");
    process_expect(&r, "\"whole_optimizer_bytes\":0");
}

/* How often data parallel ranks of two stages add up gradients in a step. */
static double sums_of_gradients(process_room *room, int microbatches) {
    process_result r =
        process_run(room, 0, "",
                    "check --json \"$ROOT/models/gpt.lua\" layers=2 embed=32 heads=4 "
                    "seq=16 vocab=256 batch=16 accum=%d --mesh pp=2,dp=2",
                    microbatches);
    const char *dp = strstr(r.output, "\"dp\":{");
    REQUIRE(dp != NULL);
    return process_number(dp, "\"reduce-scatter\":{\"count\":");
}

/* The first sum of a stage too stays with the rank that made it until the last microbatch. */
DIST_TEST(gradients_are_added_up_once_a_step) {
    CHECK(sums_of_gradients(room, 2) == sums_of_gradients(room, 8));
}

/* On a quiet machine 0.6 s; the bound leaves room for sanitizers. */
DIST_TEST(check_of_175_billion) {
    process_result r = process_run(room, 0, "",
                                   "check --json \"$ROOT/models/gpt.lua\" layout=fsdp layers=96 "
                                   "embed=12288 heads=96 seq=2048 batch=1536 vocab=51200 "
                                   "--device h200 --mesh dp=128,tp=8");
    process_expect(&r, "\"ranks\":1024");
    CHECK(r.cpu_seconds < 30);
}

/* 10^12 parameters on 3,072 ranks. On a quiet machine 0.8 s. What is whole of its gradients is one
 * layer's at a time: the peak is what activations and gathered weights need. */
DIST_TEST(check_of_a_trillion) {
    process_result r = process_run(room, 0, "",
                                   "check --json \"$ROOT/models/gpt.lua\" layout=fsdp layers=140 "
                                   "embed=24576 heads=192 seq=2048 batch=3072 vocab=51200 accum=8 "
                                   "--device h200 --mesh dp=384,tp=8");
    process_expect(&r, "\"ranks\":3072");
    CHECK(process_number(r.output, "\"parameters\":") > 1e12);
    CHECK(process_number(r.output, "\"gradients\":") < 8.0 * (1 << 30));
    CHECK(process_number(r.output, "\"peak_bytes\":") < 64.0 * (1 << 30));
    CHECK(r.cpu_seconds < 30);
}

/* Where links are far slower than computation, parameters are still put together only a little
 * ahead of their users: those of a layer, 1.7 GiB, not of all at once, while one gradient, 1.1 GiB,
 * waits to be added up: 2.33 GiB where all activations are kept, 2.83 where none are; two layers
 * would be 3.4 without the gradient. What is computed again reads parameters that the backward
 * phase gathers for itself: it takes less memory than to keep activations. */
DIST_TEST(gathers_of_slow_links) {
    static const char *const kept[] = {"MLUA_RECOMPUTE=1", "MLUA_RECOMPUTE=0"};
    static const double most[] = {3.0, 2.5};
    double peak[2][2];
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 2; i++) {
            process_result r =
                process_run(room, 0, ml_arena_format(room->arena, "%s MLUA_OVERLAP=%d", kept[k], i),
                            "check --json \"$ROOT/models/gpt.lua\" layout=fsdp layers=12 "
                            "embed=24576 heads=192 seq=2048 batch=3072 vocab=51200 "
                            "accum=8 --device h200 --mesh dp=384,tp=8");
            peak[k][i] = process_number(r.output, "\"peak_bytes\":") / (1 << 30);
        }
        EXPECT(peak[k][0] > 0 && peak[k][1] < peak[k][0] + most[k], "%s: %.2f and %.2f GiB",
               kept[k], peak[k][0], peak[k][1]);
    }
    EXPECT(peak[0][0] < 0.6 * peak[1][0] && peak[0][1] < 0.75 * peak[1][1],
           "%.2f and %.2f GiB with all computed again", peak[0][0], peak[0][1]);
}

/* What ranks do alike, and that they wait for one another, a run says at its start, of programs
 * that train and of no others, once; a quiet one does not. */
DIST_TEST(remarks_on_ranks) {
    static const char vit[] =
        "run --device cpu -n 4 --mesh cp=4 \"$ROOT\"/tests/golden/same_work.lua";
    static const char alike[] = "mesh axis cp: its 4 ranks all do the same work, most of it at ";
    process_result r = process_run(room, 0, "", "%s", vit);
    process_expect(&r, alike);
    const char *reported = strstr(r.output, alike);
    CHECK(reported && !strstr(reported + 1, "mesh axis"));
    r = process_run(room, 0, "", "%s --quiet", vit);
    CHECK_TEXT(r.output, "");
    process_write(
        room, "stages.lua",
        "local m = require 'mlua'\n"
        "local cfg = m.config { microbatches = 1 }\n"
        "local A = m.axes { batch = 8, embed = 64, ffn = 128 }\n"
        "local Block = m.module('Block', function(self)\n"
        "  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }\n"
        "end)\n"
        "function Block:forward(x)\n"
        "  return x + m.gelu(x:dot(self.up, 'embed')):dot(self.down, 'ffn')\n"
        "end\n"
        "local Net = m.module('Net', function(self) self.layers = m.stack(4, Block) end)\n"
        "function Net:forward(x)\n"
        "  for _, block in ipairs(self.layers) do x = block(x) end\n"
        "  return x\n"
        "end\n"
        "local net = Net()\n"
        "local layout = m.layout { mesh = { { 'pp', 2 } }, stages = { pp = 'layers' } }\n"
        "local step = m.compile(function(i)\n"
        "  local loss, all = m.mean((net(i.x) - i.x) ^ 2), m.parameters(net)\n"
        "  for k, g in ipairs(m.grad(loss, all)) do\n"
        "    if cfg.microbatches == 1 then\n"
        "      all[k]:assign(all[k]:read() - 0.1 * g)\n"
        "    else\n"
        "      local axes = m.axes_of(all[k])\n"
        "      local sum = m.state { name = 'sum ' .. k, axes = axes, kind = 'gradient' }\n"
        "      sum:assign(sum:read() + g)\n"
        "    end\n"
        "  end\n"
        "end, { x = { A.batch, A.embed } },\n"
        "  { layout = layout, name = 'step', microbatches = cfg.microbatches })\n"
        "local x = m.host('f32', 8, 64)\n"
        "x:fill(1)\n"
        "for i = 1, cfg.microbatches do step:start { x = x } end\n"
        "step:finish()\n");
    r = process_run(room, 0, "", "run --device cpu -n 2 stages.lua");
    CHECK_TEXT(r.output,
               "program \"step\" runs one microbatch at a time in 2 pipeline stages: a rank waits "
               "for 50% of a step\n"
               "  help: m.train cuts a batch into microbatches, which overlap; an own loop sums "
               "gradients in states of kind \"gradient\" in a program of m.compile(fn, inputs, "
               "{microbatches = 4}), and assigns parameters in another\n");
    r = process_run(room, 0, "", "run --device cpu -n 2 stages.lua microbatches=4");
    CHECK_TEXT(r.output, "");
    /* The optimizer's program of m.train has one microbatch, too. */
    r = process_run(room, 0, "",
                    "run --device cpu -n 2 --mesh pp=2 \"$ROOT/models/gpt.lua\" layers=2 embed=32 "
                    "heads=2 seq=16 batch=8 steps=1 sample=0");
    CHECK(!strstr(r.output, "microbatch at a time"));
}
