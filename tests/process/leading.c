/* Sums of gradients over ranks: in the sums' own memory, beside the last microbatch where that can
 * be (runtime/plan/reduce_in_place.c); parameters gathered beside the first (prefetch.c). Plans for
 * GPUs, printed; and what ranks on the CPU learn. */
#include <stdio.h>
#include <string.h>

#include "tests/process/support.h"

#define MODEL                                                                                      \
    "\"$ROOT/models/llama.lua\" layers=3 embed=256 heads=4 kv_heads=4 ffn=512 vocab=512 seq=128 "  \
    "batch=32 accum=4 "

typedef struct {
    char kind[32], axis[8];
    int from, to; /* states; -1: something else */
} sum_line;

static int state_at(const char *text) {
    int state = -1;
    return text && sscanf(text, "state %d=", &state) == 1 ? state : -1;
}

/* Collectives of the update in order, at most `room`. */
static int sums_of(process_room *room, const char *arguments, sum_line *list, int most) {
    process_result r = process_run(room, 0, "MLUA_DEBUG=3", "check " MODEL "%s", arguments);
    const char *last = r.output;
    int count = 0;
    for (const char *at = r.output; (at = strstr(at, "collective ")); at++) {
        sum_line line = {.from = -1};
        if (at[11] == ' ' || sscanf(at, "collective %31s over %7s of", line.kind, line.axis) != 2)
            continue;
        const char *to = strstr(at, "-> "), *from = strstr(at, ": "), *end = strchr(at, '\n');
        if (!to || !from || to > end || !strstr(at, "gradient norm") ||
            strstr(at, "gradient norm") > end)
            continue;
        line.from = state_at(from + 2);
        line.to = state_at(to + 3);
        CHECK(count < most);
        list[count++] = line;
        last = at;
    }
    CHECK(last > r.output);
    return count;
}

static bool is(const sum_line *line, const char *kind, const char *axis) {
    return strcmp(line->kind, kind) == 0 && strcmp(line->axis, axis) == 0;
}

static void in_place(const sum_line *list, int count) {
    for (int i = 0; i < count; i++)
        EXPECT(list[i].from >= 0 && list[i].from == list[i].to, "%s over %s: state %d to %d",
               list[i].kind, list[i].axis, list[i].from, list[i].to);
}

enum { MOST = 200, TENSORS = 29 };

/* Last layers first, and each gathered behind its launch's sums. */
PROCESS_TEST(sums_that_lead_on_one_axis) {
    sum_line list[MOST];
    int count = sums_of(room, "--mesh dp=4 --layout zero=false --device h200", list, MOST);
    CHECK_EQ_INT(count, 2 * TENSORS);
    in_place(list, count);
    CHECK(is(&list[0], "reduce_scatter", "dp"));
    for (int i = 0; i < count; i++) {
        int before = 0, behind = 0;
        for (int k = 0; k < count; k++)
            if (list[k].from == list[i].from && k != i) k < i ? before++ : behind++;
        CHECK_EQ_INT(before, is(&list[i], "all_gather", "dp"));
        CHECK_EQ_INT(behind, is(&list[i], "reduce_scatter", "dp"));
    }
    count = sums_of(room, "--mesh dp=4 --layout zero=true --device h200", list, MOST);
    CHECK_EQ_INT(count, TENSORS);
    in_place(list, count);
    for (int i = 0; i < count; i++) CHECK(is(&list[i], "reduce_scatter", "dp"));
}

/* Microbatches use cp: sums over it come after theirs, by one all-reduce each; so do those over
 * several hosts, which lead. */
PROCESS_TEST(sums_that_do_not_lead) {
    sum_line list[MOST];
    int count = sums_of(room, "--mesh cp=4 --layout zero=false --device h200", list, MOST);
    CHECK_EQ_INT(count, TENSORS);
    in_place(list, count);
    for (int i = 0; i < count; i++) CHECK(is(&list[i], "all_reduce", "cp"));
    count = sums_of(room, "--mesh dp=16 batch=64 --layout zero=false --device h200", list, MOST);
    CHECK_EQ_INT(count, TENSORS);
    in_place(list, count);
    for (int i = 0; i < count; i++) CHECK(is(&list[i], "all_reduce", "dp"));
    count = sums_of(room, "--mesh dp=2 --layout zero=false --device cpu", list, MOST);
    CHECK_EQ_INT(count, TENSORS);
    in_place(list, count);
}

static const char lead_script[] =
    "local m, core = require 'mlua', require 'mlua.core'\n"
    "local step, options = require 'mlua.train_step', require 'mlua.train_options'\n"
    "local cfg = m.config { accum = 4, batch = 64, embed = 2048, zero = true }\n"
    "local A = m.axes { batch = cfg.batch, seq = 2048, embed = cfg.embed, ffn = 8192, vocab = 1024 "
    "}\n"
    "local Layer = m.module('Layer', function(self)\n"
    "  self.up, self.down = m.param { A.embed, A.ffn }, m.param { A.ffn, A.embed }\n"
    "end)\n"
    "function Layer:forward(x)\n"
    "  return x + m.gelu(x:dot(self.up, 'embed')):dot(self.down, 'ffn')\n"
    "end\n"
    "local Net = m.module('Net', function(self)\n"
    "  self.table, self.layers = m.param { A.vocab, A.embed }, m.stack(6, Layer)\n"
    "end)\n"
    "function Net:forward(tokens)\n"
    "  local x = self.table:gather(tokens, 'vocab')\n"
    "  for _, layer in ipairs(self.layers) do x = layer(x) end\n"
    "  return x:dot(self.table, 'embed')\n"
    "end\n"
    "m.use_layout(m.layout.megatron { zero = cfg.zero })\n"
    "local o = options.complete { model = Net(), batch = A.batch, seq = A.seq, accum = 4, steps = "
    "1 }\n"
    "local micro, update = step.accumulated_step(o)\n"
    "local alone, behind = update:cost 'h200', update:cost('h200', micro)\n"
    "local rebuild = select(4, update:cost('h200', micro))\n"
    "print(('update %.4f %.4f rebuild %.4f'):format(1e3 * alone, 1e3 * behind, 1e3 * rebuild))\n";

/* An update takes less time behind a microbatch beside which it sums over ranks. */
PROCESS_TEST(sums_that_lead_are_predicted) {
    process_write(room, "lead.lua", lead_script);
    for (int zero = 0; zero < 2; zero++) {
        process_result r =
            process_run(room, 0, "", "check lead.lua --device h200 --mesh dp=4 zero=%s",
                        zero ? "true" : "false");
        double alone = process_number(r.output, "update "), behind = 0;
        CHECK(sscanf(strstr(r.output, "update "), "update %lf %lf", &alone, &behind) == 2);
        EXPECT(behind < 0.9 * alone && behind > 0.2 * alone, "%.4f ms, behind a microbatch %.4f",
               alone, behind);
        r = process_run(room, 0, "MLUA_OVERLAP=0",
                        "check lead.lua --device h200 --mesh dp=4 zero=%s",
                        zero ? "true" : "false");
        CHECK(sscanf(strstr(r.output, "update "), "update %lf %lf", &alone, &behind) == 2);
        EXPECT(behind == alone, "%.4f ms, behind a microbatch %.4f", alone, behind);
    }
}

/* Parameters in parts are gathered after an update, for the most part beside the next microbatch;
 * whole ones are not gathered at all. */
PROCESS_TEST(parameters_are_prefetched) {
    static const char *const knobs[] = {"", "MLUA_OVERLAP=0"};
    double rebuild[2], whole = -1;
    process_write(room, "lead.lua", lead_script);
    for (int i = 0; i < 2; i++) {
        process_result r =
            process_run(room, 0, knobs[i], "check lead.lua --device h200 --mesh dp=4");
        rebuild[i] = process_number(r.output, "rebuild ");
    }
    EXPECT(rebuild[0] > 0 && rebuild[0] < 0.5 * rebuild[1], "%.4f ms, without overlap %.4f",
           rebuild[0], rebuild[1]);
    process_result r =
        process_run(room, 0, "", "check lead.lua --device h200 --mesh dp=4 zero=false");
    whole = process_number(r.output, "rebuild ");
    EXPECT(whole == 0, "%.4f ms of whole parameters", whole);
}
