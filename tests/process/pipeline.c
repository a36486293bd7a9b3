/* Pipelines as a user runs them: they learn what one rank learns, whatever the model does with its
 * states; what they cannot do, and ranks that die in the middle of a step, are reported. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/process/support.h"

#define SCRIPT "\"$ROOT/tests/lua/lib/pipeline.lua\" --dtype f64 --quiet"

static process_result train(process_room *room, int ranks, const char *settings) {
    return process_run(room, 0, "MLUA_VERIFY=1",
                       "run --device cpu -n %d --mesh pp=%d " SCRIPT
                       " %s 2>errors | grep -av ^step",
                       ranks, ranks, settings);
}

/* A weight of all layers, states that forward passes assign, losses of layers, dropout; stages of a
 * rank share its memory. */
PROCESS_TEST(pipelines_learn_what_one_rank_learns) {
    static const char *const settings[] = {"schedule=interleaved chunks=2", "schedule=zero-bubble",
                                           "microbatches=8 schedule=1f1b"};

    char *one = train(room, 1, "accum=4").output, *eight = train(room, 1, "accum=8").output;
    CHECK(strcmp(one, eight) != 0);
    int count = test_all() ? 3 : 2;
    for (int i = 0; i < count; i++)
        process_compare_lines(train(room, 2, settings[i]).output, i == 2 ? eight : one,
                              settings[i]);
    if (!test_all()) return;
    one = train(room, 1, "accum=4 again=true").output;
    process_compare_lines(train(room, 2, "again=true").output, one, "a second training");
    process_compare_lines(train(room, 2, "common=true schedule=zero-bubble").output,
                          train(room, 1, "accum=4 common=true").output, "a state of all layers");
    process_compare_lines(train(room, 4, "again=true").output, one,
                          "a second training on four ranks");
}

/* Gradients that are joined for one product come from different stages, one after the other: what
 * reads one alone is sent on before the other is there. */
PROCESS_TEST(pipelines_send_what_has_come) {
    static const char run[] = "run --device cpu -n 4 --mesh pp=4 --dtype f64 --quiet "
                              "\"$ROOT/tests/lua/lib/crossing.lua\" schedule=%s 2>errors | "
                              "grep -av ^step";
    char *expected = process_run(room, 0, "MLUA_VERIFY=1", run, "1f1b").output;
    CHECK(strlen(expected) > 200);
    static const char *const others[] = {"zero-bubble", "gpipe"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        CHECK_TEXT(process_run(room, 0, "MLUA_VERIFY=1", run, others[i]).output, expected);
}

PROCESS_TEST(pipelines_refuse_states_that_come_too_late) {
    process_result r =
        process_run(room, 1, "", "run --device cpu -n 2 --mesh pp=2 " SCRIPT " early=true");
    process_expect(&r, "state \"seen\" (");
    process_expect(&r, "is read before what it is assigned is known");
    process_expect(&r, "microbatches = 1");
    r = process_run(room, 1, "", "check --mesh pp=2 " SCRIPT " early=true");
    process_expect(&r, "state \"seen\" (");
    r = process_run(room, 0, "", "check --mesh pp=2 " SCRIPT " early=true microbatches=1");
    r = process_run(room, 1, "",
                    "run --device cpu -n 2 --mesh pp=2 " SCRIPT
                    " common=true schedule=interleaved chunks=2");
    process_expect(&r, "state \"common\" (");
    process_expect(&r, "is used by several stages of one rank and assigned before");
}

/* The times of steps four to six predict the bubble of seven to nine, and may change the order of
 * what follows: what is learned stays. */
PROCESS_TEST(pipelines_predict_their_bubble) {
    static const char settings[] =
        "--device cpu --dtype f64 --json \"$ROOT/models/gpt.lua\" layers=4 "
        "embed=16 heads=2 seq=8 batch=8 vocab=256 accum=8 steps=10 "
        "warmup=1 sample=0";
    process_result one = process_run(room, 0, "", "run %s 2>errors", settings);
    process_result two =
        process_run(room, 0, "", "run -n 2 --mesh pp=2 %s schedule=zero-bubble 2>errors", settings);
    const char *last[2] = {strstr(one.output, "{\"step\":10,"),
                           strstr(two.output, "{\"step\":10,")};
    REQUIRE(last[0] != NULL && last[1] != NULL);
    double wanted = process_number(last[0], "\"loss\":"),
           loss = process_number(last[1], "\"loss\":");
    CHECK_NEAR(loss, wanted, 1e-5 * wanted);
    double bubble = process_number(last[1], "\"bubble\":");
    double predicted = process_number(last[1], "\"bubble_predicted\":");
    double planned = process_number(last[1], "\"bubble_planned\":");
    CHECK(bubble > 0 && bubble < 1 && predicted > 0 && predicted < 1);
    const char *first = strstr(two.output, "\"bubble\":"),
               *ninth = strstr(two.output, "{\"step\":9,");
    REQUIRE(first != NULL && ninth != NULL);
    CHECK(first > ninth && memchr(ninth, '\n', (size_t)(first - ninth)) == NULL);
    CHECK(planned > 0.03 && planned < 0.3);
}

/* What the model says after training is the same. */
PROCESS_TEST(pipelines_generate) {
    static const char settings[] = "--dtype f64 --quiet layers=2 embed=16 heads=2 seq=8 batch=4 "
                                   "steps=2 warmup=1 sample=12 accum=2";
    process_result one = process_run(
        room, 0, "", "run --device cpu \"$ROOT/models/gpt.lua\" %s 2>errors | grep -av ^step",
        settings);
    process_result two = process_run(
        room, 0, "",
        "run --device cpu -n 2 --mesh pp=2 \"$ROOT/models/gpt.lua\" %s 2>errors | grep -av ^step",
        settings);
    CHECK(strlen(one.output) > 12);
    CHECK_TEXT(two.output, one.output);
}

/* An optimizer that names axes of its own, after each rank has planned another stage: the ranks'
 * plans are reported to be alike all the same. */
PROCESS_TEST(pipelines_take_axes_that_optimizers_name) {
    process_write(room, "muon.lua",
                  "local m = require 'mlua'\n"
                  "m.adamw = m.muon\n"
                  "dofile(os.getenv 'SCRIPT')\n");
    static const char settings[] = "muon.lua layers=2 embed=16 heads=2 seq=8 batch=4 accum=2 "
                                   "steps=3 warmup=1 sample=0";
    static const char script[] = "SCRIPT=\"$ROOT/models/llama.lua\"";
    char several[200];
    snprintf(several, sizeof several, "-n 4 --mesh pp=2,tp=2 %s", settings);
    process_step *one = process_train(room, 3, script, settings);
    process_compare(process_train(room, 3, script, several), one, 3, 2e-5, "pp=2,tp=2");
}

/* Slots in bf16 are rounded by draws that follow from an element's place in the whole tensor: slots
 * in f32 move these losses by 3e-5. */
PROCESS_TEST(slots_in_bf16_in_layouts) {
    process_write(room, "narrow.lua",
                  "local m = require 'mlua'\n"
                  "local adamw = m.adamw\n"
                  "m.adamw = function(o) o.state_dtype = 'bf16' return adamw(o) end\n"
                  "dofile(os.getenv 'SCRIPT')\n");
    /* In f64: in f32 other orders of sums flip single roundings of slots to bf16, which moves a
     * norm by 1e-6 to 6e-5, by the seed. */
    static const char settings[] = "--dtype f64 narrow.lua layers=2 embed=16 heads=2 seq=8 batch=4 "
                                   "accum=2 steps=12 warmup=1 sample=0 lr=0.01";
    static const char script[] = "SCRIPT=\"$ROOT/models/llama.lua\"";
    static const char *const layouts[][2] = {{"-n 2 --mesh dp=2", ""},
                                             {"-n 2 --mesh dp=2", "layout=fsdp"},
                                             {"-n 4 --mesh pp=2,tp=2", ""}};
    process_step *one = process_train(room, 12, script, settings);
    for (int i = 0; i < 3; i++) {
        char several[200];
        snprintf(several, sizeof several, "%s %s %s", layouts[i][0], settings, layouts[i][1]);
        process_compare(process_train(room, 12, script, several), one, 12, 3e-6, several);
    }
}

/* A microbatch's maxima are those of all ranks, so scales are one rank's. FSDP sums gradients in
 * another order, which flips single roundings to bf16: 6e-6 of a norm at step 3 (scales that differ
 * move it by 2e-3). cp and tp sum before values are rounded, and last bits of bf16 fall on other
 * steps of 8-bit floats, which are 16 times as wide. */
PROCESS_TEST(fp8_in_layouts) {
    static const char settings[] =
        "\"$ROOT/models/llama.lua\" --dtype fp8 layers=2 embed=64 heads=4 "
        "kv_heads=2 ffn=128 seq=32 batch=8 accum=2 steps=3 warmup=1 "
        "sample=0 ";
    static const struct {
        const char *layout;
        double bound;
    } layouts[] = {{"-n 2 --mesh dp=2 layout=fsdp", 1e-4},
                   {"-n 2 --mesh cp=2", 1e-2},
                   {"-n 4 --mesh pp=2,tp=2", 1e-2}};
    process_step *one = process_train(room, 3, "", settings);
    for (int i = 0; i < 3; i++) {
        char several[300];
        snprintf(several, sizeof several, "%s %s", settings, layouts[i].layout);
        process_compare(process_train(room, 3, "", several), one, 3, layouts[i].bound, several);
    }
}

/* Experts' products in 8 bits: a rank finds its part of a maximum in the rows that others sent. */
PROCESS_TEST(fp8_of_sent_rows) {
    static const char settings[] =
        "\"$ROOT/models/gpt_moe.lua\" --dtype fp8 layers=1 embed=64 heads=2 kv_heads=1 ffn=64 "
        "experts=4 seq=16 batch=4 steps=2 warmup=1 sample=0 ";
    process_step *one = process_train(room, 2, "", settings);
    char several[300];
    snprintf(several, sizeof several, "%s -n 2 --mesh ep=2 exchange=2.0", settings);
    process_compare(process_train(room, 2, "", several), one, 2, 1e-5, several);
}

/* Ranks whose stages would not send what the others expect, or in another order. */
PROCESS_TEST(pipelines_report_ranks_that_differ) {
    process_write(room, "a.lua",
                  "local m, core = require 'mlua', require 'mlua.core'\n"
                  "local layout = m.layout\n"
                  "rawset(m, 'layout', function(o)\n"
                  "  if core.options().rank == 1 then o.stages.schedule = 'zero-bubble' end\n"
                  "  return layout(o)\n"
                  "end)\n"
                  "dofile(os.getenv 'SCRIPT')\n");
    process_result r =
        process_run(room, 1, "SCRIPT=\"$ROOT/tests/lua/lib/pipeline.lua\"",
                    "run --device cpu -n 2 --mesh pp=2 --dtype f64 --quiet a.lua steps=1");
    process_expect(&r, "the plan of program \"");
    process_expect(&r, "of rank 1 differs from rank 0's");
}

/* A rank that dies while the others wait for its messages. */
PROCESS_TEST(pipelines_report_ranks_that_die) {
    process_write(room, "a.lua",
                  "local core = require 'mlua.core'\n"
                  "if core.options().rank == 1 then\n"
                  "  os.execute('echo pid $PPID >&2; (sleep 0.4; kill -9 $PPID) &')\n"
                  "end\n"
                  "dofile(os.getenv 'SCRIPT')\n");
    train(room, 2, ""); /* compiles the kernels */
    process_result r =
        process_run(room, 128 + SIGKILL, "SCRIPT=\"$ROOT/tests/lua/lib/pipeline.lua\"",
                    "run --device cpu -n 2 --mesh pp=2 --dtype f64 --quiet a.lua steps=1000000");
    process_expect(&r, "mlua: rank 1 (pid ");
    process_expect(&r, "was killed by signal 9 (Killed)");
    const char *reported = strstr(r.output, "pid ");
    int pid = reported ? atoi(reported + 4) : 0;
    CHECK(pid > 0 && kill(pid, 0) != 0);
    EXPECT(r.seconds <= 20, "it takes %.1f s", r.seconds);
}

/* What stage 0 of two keeps of a microbatch, as MLUA_DEBUG=4 prints it. */
static double kept_bytes(process_room *room, int layers) {
    process_result r = process_run(
        room, 0, "MLUA_DEBUG=4",
        "check --device h200 \"$ROOT/models/gpt.lua\" layers=%d embed=1024 heads=16 seq=2048 "
        "batch=2 accum=2 --mesh pp=2,tp=8 2>&1 | grep 'saved values of' | sed 's/.*: //'",
        layers);
    return strtod(r.output, NULL);
}

/* Tensor and sequence parallel, a layer of width e keeps 20 bytes of each token and channel: bf16
 * of its two sums (2 e), queries, keys and values (3 e), what attention gives (e) and what the
 * activation is of (4 e). What is normalised or activated is computed anew. */
PROCESS_TEST(pipelines_keep_little) {
    double bytes = (kept_bytes(room, 8) - kept_bytes(room, 4)) / 2; /* stage 0 has half of them */
    double unit = 2048.0 * 1024 / 8;
    EXPECT(bytes > 0 && bytes <= 20.2 * unit,
           "a layer keeps %.0f bytes, %.2f of each token and channel", bytes, bytes / unit);
}

/* What a check reports of a rank is what the rank takes: the first one, which has most microbatches
 * under way. */
PROCESS_TEST(pipelines_take_what_a_check_reports) {
    static const char settings[] = "--device cpu --json --mesh pp=2 \"$ROOT/models/gpt.lua\" "
                                   "layers=4 embed=64 heads=2 seq=64 batch=16 vocab=256 steps=1 "
                                   "warmup=1 sample=0";
    process_result check = process_run(room, 0, "", "check %s", settings);
    process_result run = process_run(room, 0, "", "run -n 2 %s 2>errors", settings);
    double reported = process_number(check.output, "\"peak_bytes\":");
    double taken = process_number(run.output, "\"memory_gib\":") * (1 << 30);
    EXPECT(fabs(taken - reported) <= 0.03 * reported, "%.0f bytes planned, %.0f taken", reported,
           taken);
}

/* A check plans the first rank, the last and one of those between them, which are alike: of each
 * one stage, or two where they are interleaved, for training and for evaluation. */
PROCESS_TEST(pipelines_plan_what_is_alike_once) {
    static const char *const schedules[] = {"1f1b", "interleaved", "zero-bubble"};
    for (int i = 0; i < 3; i++) {
        process_result r =
            process_run(room, 0, "MLUA_DEBUG=5",
                        "check --device h200 --mesh pp=8 \"$ROOT/models/gpt.lua\" layers=16 "
                        "embed=256 heads=4 vocab=256 batch=32 schedule=%s 2>&1 | grep -c ^shard:",
                        schedules[i]);
        CHECK_EQ_INT(atoi(r.output), i == 1 ? 12 : 6);
    }
}

/* Ranks that are alike have states of their own all the same. */
PROCESS_TEST(pipelines_share_out_states) {
    process_result r =
        process_run(room, 0, "",
                    "check --device h200 --json --mesh pp=8 \"$ROOT/models/gpt.lua\" "
                    "layers=16 embed=256 heads=4 vocab=256 batch=32");
    double each = process_number(r.output, "\"parameters\":") * 4 * 4 / 8;
    double reported = process_number(r.output, "\"state_bytes\":");
    EXPECT(reported >= 0.9 * each && reported <= 1.1 * each,
           "%.0f bytes of states on a rank, and %.0f are an even share", reported, each);
}

/* Layers of two halves, in several kinds. */
static const char halves[] =
    "local m = require 'mlua'\n"
    "local cfg = m.config { kind = 'serial', data = '', steps = 3 }\n"
    "local A = m.axes { embed = 32, ffn = 256, vocab = 256, seq = 8, batch = 16 }\n"
    "local Half = m.module('Half', function(self)\n"
    "  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }\n"
    "end)\n"
    "function Half:forward(x) return m.gelu(x:dot(self.up, 'embed')):dot(self.down, 'ffn') "
    "end\n"
    "local Block = m.module('Block', function(self, i)\n"
    "  self.at, self.first, self.gain = i, Half(), cfg.kind == 'gain' and m.param { A.embed }\n"
    "  if cfg.kind == 'weights' then\n"
    "    self.norm = m.rms_norm { A.embed }\n"
    "    self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }\n"
    "  elseif cfg.kind == 'alternate' and i % 2 == 0 then self.third = Half()\n"
    "  elseif cfg.kind ~= 'single' then self.second = Half() end\n"
    "end)\n"
    "function Block:forward(x)\n"
    "  local first, second = self.first, self.second or self.third\n"
    "  if cfg.kind == 'single' then return x + first(x) end\n"
    "  if cfg.kind == 'weights' then\n"
    "    x = x + m.dropout(first(x), 0.1)\n"
    "    return x + m.dropout(m.gelu(self.norm(x):dot(self.up, 'embed')):dot(self.down, "
    "'ffn'), 0.1)\n"
    "  end\n"
    "  if cfg.kind == 'mixed' and self.at % 2 == 0 then first, second = second, first end\n"
    "  if cfg.kind == 'parallel' then return x + first(x) + second(x) end\n"
    "  x = x + first(x)\n"
    "  if self.gain then x = x * (1 + self.gain) end\n"
    "  return x + second(x)\n"
    "end\n"
    "local Net = m.module('Net', function(self)\n"
    "  self.table, self.blocks = m.param { A.vocab, A.embed }, m.stack(3, Block)\n"
    "end)\n"
    "function Net:forward(tokens)\n"
    "  local x = self.table:gather(tokens, 'vocab')\n"
    "  for _, block in ipairs(self.blocks) do x = block(x) end\n"
    "  return x:dot(self.table, 'embed')\n"
    "end\n"
    "m.train { model = Net(), batch = A.batch, seq = A.seq, vocab = 256, steps = cfg.steps,\n"
    "  data = cfg.data, clip = 1, optimizer = m.adamw { lr = 1e-2 },\n"
    "  layout = m.layout.megatron { schedule = 'zero-bubble', microbatches = 4 } }\n";

/* The gradient of attention is of its layer's stage where a function keeps documents apart, too:
 * stages send what they send without. */
PROCESS_TEST(pipelines_of_documents_send_no_more) {
    double sends[2];
    for (int i = 0; i < 2; i++) {
        process_result check = process_run(
            room, 0, "",
            "check --device h200 \"$ROOT/models/llama.lua\" layers=4 embed=64 heads=4 kv_heads=2 "
            "ffn=128 seq=256 batch=32 accum=4 --mesh pp=2%s",
            i ? " pack=document" : "");
        sends[i] = process_number(check.output, "  pp     send");
    }
    EXPECT(sends[0] == 8 && sends[1] == 8, "%.0f and %.0f sends", sends[0], sends[1]);
}

/* A stage begins within a layer where the first half hands its sum on alone; not where both halves
 * read what the layer is given, or where layers go through their halves in another order. */
PROCESS_TEST(pipelines_begin_within_layers) {
    static const struct {
        const char *kind, *begin;
    } cases[] = {
        {"serial", "  begin at      1 2.second\n"}, {"parallel", "  layers        2 1\n"},
        {"mixed", "  layers        2 1\n"},         {"gain", "  begin at      1 2.second\n"},
        {"weights", "  begin at      1 2.norm\n"},  {"alternate", "  begin at      1 2.third\n"},
        {"single", "  layers        2 1\n"}};
    process_write(room, "halves.lua", halves);
    double sends = 0; /* as many wherever a stage begins within a layer */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        process_result check = process_run(
            room, 0, "", "check --device h200 --mesh pp=2 halves.lua kind=%s", cases[i].kind);
        process_expect(&check, cases[i].begin);
        double now = process_number(check.output, "  pp     send");
        if (i == 0) sends = now;
        EXPECT(!(strstr(cases[i].begin, "begin at") && now != sends), "%s: %.0f sends, not %.0f",
               cases[i].kind, now, sends);
        char *one = ml_arena_format(room->arena, "halves.lua kind=%s", cases[i].kind);
        process_compare(process_train(room, 3, "MLUA_VERIFY=1",
                                      ml_arena_format(room->arena, "%s -n 2 --mesh pp=2", one)),
                        process_train(room, 3, "", one), 3, 1e-5, cases[i].kind);
    }
}

/* Layers and logits over four ranks: also where a block has weights or dropout of its own, and
 * ranks with two stages. Equal ranks would lengthen a step of 30 layers, whose stages are less so.
 */
PROCESS_TEST(pipelines_share_out_work) {
    static const struct {
        const char *settings;
        double most;
    } cases[] = {
        {"gpt.lua preset=gpt-1.3b batch=32 schedule=1f1b", 0.185},
        {"gpt.lua preset=gpt-1.3b batch=32 schedule=interleaved", 0.10},
        {"gpt.lua preset=gpt-1.3b batch=32 schedule=zero-bubble", 0.095},
        {"gpt.lua preset=gpt-1.3b batch=32 schedule=interleaved dropout=0.1", 0.10},
        {"llama.lua preset=llama-3b batch=16 schedule=interleaved", 0.09},
        {"llama.lua preset=llama-3b batch=16 schedule=zero-bubble", 0.07},
        {"gpt.lua layers=30 embed=2048 heads=16 vocab=51200 seq=2048 batch=64 schedule=interleaved",
         0.08},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        process_result r = process_run(
            room, 0, "", "check --device h200 --json --mesh pp=4 \"$ROOT\"/models/%s accum=16",
            cases[i].settings);
        double bubble = process_number(r.output, "\"bubble\":");
        EXPECT(bubble > 0.05 && bubble < cases[i].most, "%s: %.3f", cases[i].settings, bubble);
    }
}

/* The gradients of queries, keys and values, and those of gate and up, of the last stage's two
 * layers are kept for their weights' as they are joined for the products before. */
PROCESS_TEST(pipelines_keep_joined_gradients) {
    process_result r = process_run(
        room, 0, "MLUA_DEBUG=4",
        "check --device h200 --mesh pp=2 \"$ROOT/models/llama.lua\" layers=4 embed=2048 heads=16 "
        "kv_heads=16 ffn=2048 seq=128 batch=4 accum=4 vocab=512 schedule=zero-bubble 2>&1 | "
        "grep '^  saved'");
    int joined = 0;
    static const char wanted[] = "by task 0, read by 2: concat bf16[batch=1, seq=128, joined";
    for (const char *at = r.output; (at = strstr(at, wanted)) != NULL; at++) joined++;
    CHECK_EQ_INT(joined, 4);
}
