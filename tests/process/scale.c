/* 1,000 layers on 10,000 ranks, whatever is split over which ranks: planned in 1 GiB, and in 5 s of
 * processor time (2.6 to 4.7 s on 27 November 2026, on a machine with a load of 10). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

typedef struct {
    const char *script, *settings;
} scale_case;

#define DOCUMENTS " pack=document embed=512 kv_heads=8 ffn=1408"
static const scale_case cases[] = {
    {"gpt.lua", "embed=512 batch=10000 --mesh dp=10000"},
    {"gpt.lua", "embed=512 batch=10000 layout=fsdp --mesh dp=10000"},
    {"gpt.lua", "embed=2048 batch=1250 --mesh dp=1250,tp=8"},
    {"gpt.lua", "embed=2048 batch=1250 layout=fsdp --mesh dp=1250,tp=8"},
    {"gpt.lua", "embed=2048 batch=1250 --mesh dp=1250,cp=8"},
    {"gpt.lua", "embed=2048 batch=5000 accum=4 --mesh dp=1250,tp=8"},
    {"gpt.lua", "embed=2048 batch=10000 accum=1000 --mesh pp=1000,dp=10"},
    {"gpt.lua", "embed=2048 batch=5000 accum=500 --mesh pp=250,dp=10,tp=4"},
    {"gpt_moe.lua", "embed=512 batch=10000 --mesh dp=1250,ep=8"},
    {"llama.lua", "batch=40000 accum=4 --mesh dp=10000 --layout cp=dynamic" DOCUMENTS},
    {"llama.lua",
     "batch=10000 accum=4 seq=4096 --mesh dp=10000 --layout cp=dynamic,cp_tokens=1024" DOCUMENTS},
    {"llama.lua", "batch=20000 accum=8 seq=2048 --mesh dp=1250,pp=8 --layout cp=dynamic" DOCUMENTS},
    {"llama.lua", "batch=10000 accum=4 seq=2048 --mesh dp=1250,tp=8 --layout cp=dynamic" DOCUMENTS},
};

/* Memory is short: values are computed again or copied to the host. */
#define SHORT " heads=8 kv_heads=8 embed=512 ffn=1408 vocab=32000 seq=2048 batch=80000"
static const scale_case short_cases[] = {
    {"llama.lua", "pack=document --mesh dp=10000" SHORT},
    {"llama.lua", "layout=fsdp --mesh dp=10000" SHORT},
    {"llama.lua", "--mesh dp=1250,tp=8" SHORT},
    {"llama.lua", SHORT " batch=20000 seq=16384 --mesh dp=1250,cp=8"},
    {"llama.lua", SHORT " batch=640000 accum=64 --mesh dp=1250,pp=8"},
    {"llama.lua", "pack=document accum=8 --mesh dp=10000 --layout cp=dynamic" SHORT},
    {"llama.lua", "pack=document accum=8 --mesh dp=10000 --layout cp=dynamic,cp_tokens=2048" SHORT
                  " batch=10000 seq=16384"},
    {"llama.lua",
     "pack=document accum=64 --mesh dp=1250,pp=8 --layout cp=dynamic" SHORT " batch=640000"},
    {"llama.lua",
     "pack=document accum=8 --mesh dp=64 --layout cp=dynamic layout=fsdp" SHORT " batch=512"},
    /* Documents are placed, by the times of all rows. */
    {"llama.lua", "pack=document accum=4 --mesh dp=8 --layout cp=dynamic data=all.bin" SHORT
                  " batch=16 seq=4096"},
};

static void plan_cases(process_room *room, const scale_case *list, size_t count) {
    const double seconds = 5;
    for (size_t i = 0; i < count; i++) {
        process_result r = process_run(room, 0, "",
                                       "check --json --device h200 \"$ROOT\"/models/%s layers=1000 "
                                       "heads=16 seq=1024 vocab=50304 %s",
                                       list[i].script, list[i].settings);
        process_expect(&r, "\"peak_bytes\":");
        EXPECT(r.cpu_seconds < seconds, "%s %s: %.1f s", list[i].script, list[i].settings,
               r.cpu_seconds);
        EXPECT(r.peak_bytes < (int64_t)1 << 30, "%s %s: %.2f GiB", list[i].script, list[i].settings,
               (double)r.peak_bytes / (1 << 30));
    }
}

static void plan_at_scale(process_room *room) {
    process_shell(room, 0,
                  "$MLUA run $ROOT/tests/dynamic_lengths.lua most=4096 each=2048 --device cpu");
    plan_cases(room, cases, sizeof cases / sizeof *cases);
    plan_cases(room, short_cases, sizeof short_cases / sizeof *short_cases);
}

TEST(long, a_thousand_layers_on_ten_thousand_ranks) {
    process_in_room(plan_at_scale);
}

/* What a prediction of a thousand stages takes grows with their tasks, not with tasks times states.
 */
PROCESS_TEST(a_thousand_stages_in_a_gibibyte) {
    process_result r =
        process_run(room, 0, "",
                    "check --json --device h200 \"$ROOT/models/gpt.lua\" layers=1000 "
                    "heads=16 embed=2048 batch=10000 accum=1000 --mesh pp=1000,dp=10");
    EXPECT(r.peak_bytes < (int64_t)1 << 30, "%.2f GiB", (double)r.peak_bytes / (1 << 30));
}

/* Estimates by few layers lead to a plan that fits and is about as fast as by compiling all layers
 * at each attempt, as is done where nothing is folded. */
PROCESS_TEST(estimates_find_what_attempts_find) {
    static const struct {
        const char *arguments, *memory;
    } list[] = {
        {"llama.lua batch=80 seq=1024 --mesh dp=10", "20GiB"},
        {"gpt.lua layout=fsdp batch=80 seq=1024 --mesh dp=10", "30GiB"},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        double seconds[2], bytes[2];
        for (int fold = 0; fold < 2; fold++) {
            process_result r =
                process_run(room, 0, fold ? "MLUA_FOLD=1" : "MLUA_FOLD=0",
                            "check --json --device h200 --memory %s "
                            "\"$ROOT\"/models/%s layers=300 embed=512 heads=8 vocab=8000",
                            list[i].memory, list[i].arguments);
            const char *predicted = strstr(r.output, "\"predicted\":{\"seconds\":");
            const char *process = strstr(r.output, "\"process_bytes\":");
            EXPECT(predicted && process, "%s: %.300s", list[i].arguments, r.output);
            if (!predicted || !process) return;
            seconds[fold] = strtod(predicted + strlen("\"predicted\":{\"seconds\":"), NULL);
            bytes[fold] = strtod(process + strlen("\"process_bytes\":"), NULL);
        }
        EXPECT(seconds[1] < 1.02 * seconds[0] && bytes[1] <= strtod(list[i].memory, NULL) * 0x1p30,
               "%s: %.4f s in %.2f GiB, %.4f s in %.2f GiB", list[i].arguments, seconds[1],
               bytes[1] / 0x1p30, seconds[0], bytes[0] / 0x1p30);
    }
}

/* What an estimate says of a program is near what its plan says: time, that of attention, memory,
 * how much longer than with all values stored, and work, in a budget that needs recomputation too.
 */
PROCESS_TEST(estimates_are_near_plans) {
    static const char *const settings[] = {"--mesh dp=4,tp=2", "--mesh dp=8 --memory 4GiB"};
    process_write(
        room, "both.lua",
        "local core = require 'mlua.core'\n"
        "local program = core.program\n"
        "core.program = function(o)\n"
        "  if o.name ~= 'microbatch' then return program(o) end\n"
        "  o.plan_only = true\n"
        "  local both = { program(o), nil }\n"
        "  o.estimate = true\n"
        "  both[2] = program(o)\n"
        "  o.plan_only, o.estimate = nil, nil\n"
        "  local file = io.open('both', 'w')\n"
        "  for i, p in ipairs(both) do\n"
        "    local seconds, attention, fits = p:cost 'h200'\n"
        "    local share, slowed = p:room()\n"
        "    assert(fits and (p:plan().peak_bytes == nil) == (i == 2))\n"
        "    file:write(('%.9g %.9g %.9g %.9g %.9g\\n'):format(seconds, attention, share, slowed,"
        " p:plan().flops))\n"
        "  end\n"
        "  file:close()\n"
        "  return program(o)\n"
        "end\n"
        "dofile(os.getenv 'ROOT' .. '/models/llama.lua')\n");
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        enum { FIGURES = 5 };
        double plan[FIGURES], estimate[FIGURES];
        process_run(room, 0, "",
                    "check --device h200 both.lua layers=300 embed=256 heads=4 ffn=512 vocab=1024 "
                    "pack=document "
                    "batch=32 seq=1024 accum=2 %s",
                    settings[i]);
        process_result both = process_shell(room, 0, "cat both");
        char *text = (char *)both.output;
        for (int k = 0; k < FIGURES; k++) plan[k] = strtod(text, &text);
        for (int k = 0; k < FIGURES; k++) estimate[k] = strtod(text, &text);
        for (int k = 0; k < FIGURES; k++)
            EXPECT(plan[k] > 0 && fabs(estimate[k] - plan[k]) < 0.04 * plan[k == 1 ? 0 : k],
                   "%s: figure %d: %g, of the plan %g", settings[i], k, estimate[k], plan[k]);
    }
}

/* After a pass of a program, PASS@PROGRAM, without the line that says so. */
static const char *graph_after(process_room *room, const char *environment, const char *pass,
                               const char *arguments) {
    const char *set = ml_arena_format(room->arena, "%s MLUA_DUMP=%s", environment, pass);
    process_result r =
        process_run(room, 0, set, "check --json --device h200 %s 2>&1 >/dev/null", arguments);
    const char *graph = strchr(r.output, '\n');
    EXPECT(graph != NULL && strncmp(r.output, "-- ", 3) == 0, "%s: %.200s", arguments, r.output);
    return graph ? graph : "";
}

/* Few of the layers that repeat go through the passes, and the graph of all is the same as if all
 * did, node by node. */
PROCESS_TEST(folded_layers_become_what_all_do) {
    static const struct {
        const char *unfolded, *whole, *arguments;
    } programs[] = {
        {"unfold_layers@step", "simplify_merged@step", "gpt.lua layout=fsdp --mesh dp=2,tp=2,cp=2"},
        {"unfold_layers@step", "simplify_merged@step", "gpt_moe.lua --mesh dp=2,ep=4"},
        {"unfold_stages@update", "simplify@update", "gpt.lua accum=4 --mesh pp=2,dp=4"},
        {"unfold_layers@step", "simplify_merged@step",
         "llama.lua ffn=128 pack=document --mesh dp=2,tp=2"}, /* functions of attention */
    };
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        const char *run = ml_arena_format(
            room->arena, "\"$ROOT\"/models/%s layers=36 heads=4 embed=64 seq=64 vocab=256 batch=64",
            programs[i].arguments);
        EXPECT(strcmp(graph_after(room, "", programs[i].unfolded, run),
                      graph_after(room, "MLUA_FOLD=0", programs[i].whole, run)) == 0,
               "%s: the graphs differ", run);
    }
}

/* Layers whose weights have names of their own: their products are joined along axes of their own,
 * so the passes' result does not repeat, and they run over all layers. */
PROCESS_TEST(layers_that_do_not_unfold_are_planned_whole) {
    process_write(
        room, "named.lua",
        "local m = require 'mlua'\n"
        "local A = m.axes { batch = 16, seq = 8, vocab = 64, embed = 32, ffn = 64 }\n"
        "local Net = m.module('Net', function(self)\n"
        "  self.wte = m.param { A.vocab, A.embed }\n"
        "  for i = 1, 40 do\n"
        "    self['gate' .. i], self['up' .. i] = m.param { A.embed, A.ffn }, m.param { A.embed, "
        "A.ffn }\n"
        "    self['down' .. i] = m.param { A.ffn, A.embed }\n"
        "  end\n"
        "end)\n"
        "function Net:forward(tokens)\n"
        "  local x = self.wte:gather(tokens, 'vocab')\n"
        "  for i = 1, 40 do\n"
        "    local h = m.silu(x:dot(self['gate' .. i], 'embed')) * x:dot(self['up' .. i], "
        "'embed')\n"
        "    x = x + h:dot(self['down' .. i], 'ffn')\n"
        "  end\n"
        "  return x:dot(self.wte, 'embed')\n"
        "end\n"
        "m.train { model = Net(), batch = A.batch, seq = A.seq, vocab = 64, steps = 1,\n"
        "  optimizer = m.sgd { lr = 0.1 }, layout = m.layout.ddp {} }\n");
    const char *run = "named.lua --mesh dp=4";
    const char *all = graph_after(room, "MLUA_FOLD=0", "simplify_merged@step", run);
    CHECK(strstr(all, "joined'up12") != NULL || strstr(all, "joined'gate12") != NULL);
    EXPECT(strcmp(graph_after(room, "", "unfold_layers@step", run), all) != 0, "%s", "it unfolds");
    EXPECT(strcmp(graph_after(room, "", "param_cache@step", run),
                  graph_after(room, "MLUA_FOLD=0", "param_cache@step", run)) == 0,
           "%s", "the graphs differ");
}
