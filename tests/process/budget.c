/* --memory SIZE: whatever is computed again to fit, what is learned is the same to the bit, and a
 * run takes no more memory than its budget. */
#include <math.h>
#include <string.h>

#include "runtime/plan/plan.h"
#include "tests/process/support.h"

enum { BUDGETS = 5, FEW = 3 };

static double planned(process_room *room, const char *environment, const char *model) {
    process_result r = process_run(room, 0, environment, "check %s --device cpu --json", model);
    return process_number(r.output, "\"peak_bytes\":") / (1 << 20);
}

/* At budgets from `part` of the least without copies to what the device would take. */
static void check_budgets_of(process_room *room, const char *model, int ranks, int budgets,
                             bool copies, double part) {
    const double rounding = 0.01, channels = ranks > 1 ? 0.1 : 0; /* MiB */
    double most = planned(room, "", model), least = planned(room, "MLUA_RECOMPUTE=1", model);
    EXPECT(least < most, "%s: the least is %.1f MiB of %.1f", model, least, most);
    const char *first = NULL, *environment = copies ? "MLUA_HOST_LINK=1000000" : "";
    least *= part;
    for (int i = 0; i < budgets; i++) {
        double budget = least + (most - least) * i / (budgets - 1) + rounding;
        process_run(room, 0, environment, "run %s -n %d --device cpu --out b%d --memory %.3fMiB",
                    model, ranks, i, budget);
        process_result sums =
            process_shell(room, 0, "cat b%d/checkpoints/*/*.safetensors | sha256sum", i);
        if (first == NULL) first = ml_arena_copy(room->arena, sums.output, strlen(sums.output));
        EXPECT(strcmp(first, sums.output) == 0, "%s: other weights in %.1f MiB", model, budget);
        process_result line =
            process_shell(room, 0, "grep memory_gib b%d/metrics.jsonl; rm -r b%d", i, i);
        double used = 1024 * process_number(line.output, "\"memory_gib\":");
        EXPECT(used > 0 && used <= budget * 1.02 + channels, "%s: %.2f MiB used of %.2f", model,
               used, budget);
    }
}

static void check_budgets(process_room *room, const char *model, int budgets, bool copies) {
    check_budgets_of(room, model, 1, budgets, copies, copies ? 0.9 : 1);
}

static const char small[] =
    "\"$ROOT/models/gpt.lua\" layers=3 embed=32 heads=2 seq=64 batch=8 steps=2 sample=0";
static const char accumulating[] =
    "\"$ROOT/models/gpt.lua\" embed=32 heads=2 seq=64 batch=16 accum=4 steps=2 sample=0";

/* Microbatches in flight wait on the host, each in a slot of its own. */
PROCESS_TEST(memory_budget_of_microbatches) {
    const char *pipeline = ml_arena_format(room->arena, "%s layers=2 --mesh pp=2", accumulating);
    check_budgets_of(room, pipeline, 2, 2, true, 1);
    process_result r = process_run(room, 0, "MLUA_HOST_LINK=1000000",
                                   "check %s --device cpu --memory 1.5MiB", pipeline);
    process_expect(&r, "host memory");
    /* what both programs of a step keep between stages, one of which sends the embedding */
    pipeline =
        "\"$ROOT/models/gpt.lua\" layers=6 embed=32 heads=2 vocab=8000 seq=128 batch=8 accum=4 "
        "steps=1 sample=0 --mesh pp=2";
    process_run(room, 0, "", "run %s -n 2 --device cpu --out whole", pipeline);
    r = process_shell(room, 0, "grep memory_gib whole/metrics.jsonl");
    const double used = 1024 * process_number(r.output, "\"memory_gib\":");
    const double plan = planned(room, "", pipeline);
    EXPECT(fabs(used - plan) <= 0.02 * plan, "%.2f MiB used of %.2f planned", used, plan);
    /* mlua show: by kind, with the optimizer's states, which only one of the programs has */
    r = process_shell(room, 0, "sed -n '/\"memory\"/,/}/p' whole/settings.json");
    double shown = 0;
    for (int i = 0; i < ML_MEMORY_KINDS; i++)
        shown +=
            process_number(r.output, ml_arena_format(room->arena, "\"%s\":", ml_memory_names[i]));
    EXPECT(shown > 0.9 * plan * (1 << 20) && shown <= plan * (1 << 20),
           "%.0f bytes shown of %.2f MiB planned", shown, plan);
}

static double gathers(process_room *room, const char *environment, const char *model) {
    process_result r = process_run(room, 0, environment, "check %s --device cpu --json", model);
    return process_number(r.output, "\"all-gather\":{\"count\":");
}

/* What ranks gather is kept, or gathered again where memory is short: with the same results. */
static void check_gathered_again(process_room *room, const char *model) {
    EXPECT(gathers(room, "MLUA_RECOMPUTE=1", model) > gathers(room, "", model), "%s", model);
    check_budgets_of(room, model, 2, BUDGETS, false, 1);
}

static void budgets_of_layouts(process_room *room) {
    static const char *const layouts[] = {"",
                                          "--mesh dp=2",
                                          "--mesh dp=2 --layout preset=fsdp",
                                          "schedule=zero-bubble --mesh pp=2",
                                          "schedule=interleaved --mesh pp=2",
                                          "--mesh pp=2 --dtype bf16",
                                          "--mesh pp=2,tp=2"};
    static const int ranks[] = {1, 2, 2, 2, 2, 2, 4};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        check_budgets_of(room,
                         ml_arena_format(room->arena, "%s layers=4 %s", accumulating, layouts[i]),
                         ranks[i], BUDGETS, true, 1);
    for (int i = 0; i < 2; i++)
        check_gathered_again(room, ml_arena_format(room->arena, "%s --mesh %s", small,
                                                   i ? "cp=2 --layout zero=false" : "tp=2"));
}

TEST(long, budgets_of_layouts) {
    process_in_room(budgets_of_layouts);
}

/* In steps of half a MiB from `low` to what the model takes where it may: whatever fits in less
 * memory fits in more, and no peak is above its budget. */
static void check_monotone(process_room *room, const char *model, double low) {
    const double most = planned(room, "MLUA_HOST_LINK=50", model);
    int fitting = 0;
    EXPECT(low < most, "%s: takes %.2f MiB", model, most);
    for (double budget = low; budget < most + 0.5; budget += 0.5) {
        process_result r =
            process_run(room, PROCESS_ANY_CODE, "MLUA_HOST_LINK=50",
                        "check %s --device cpu --json --memory %.2fMiB", model, budget);
        const double peak = process_number(r.output, "\"peak_bytes\":") / (1 << 20);
        if (r.code != 0) process_expect(&r, "the program needs");
        EXPECT(r.code == 0 || fitting == 0, "%s: less than %.2f MiB is enough", model, budget);
        EXPECT(r.code != 0 || peak <= budget, "%s: %.2f MiB of %.2f", model, peak, budget);
        fitting += r.code == 0;
    }
    EXPECT(fitting > 2, "%s: %d budgets fit", model, fitting);
}

static const char parameters[] = "\"$ROOT/models/gpt.lua\" layers=6 embed=128 heads=4 vocab=500 "
                                 "batch=16 seq=64 accum=4 --dtype bf16";

/* The program that sets the parameters takes more temporaries than that of the microbatches. */
PROCESS_TEST(memory_budget_is_monotone) {
    check_monotone(room, ml_arena_format(room->arena, "%s --mesh dp=2", parameters), 14);
}

/* The least that an error names is enough, and nothing below it: what programs hold beside one
 * another counts, such as the saved values of a pipeline while the parameters are set, of which a
 * program that is planned before knows but an estimate. */
PROCESS_TEST(memory_budget_of_updates) {
    static const char *const layouts[] = {"--mesh dp=2", "--mesh pp=2,dp=2"};
    static const double apart[] = {0.0005, 0.04};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        const char *check = ml_arena_format(room->arena, "check %s %s --device cpu --json --memory",
                                            parameters, layouts[i]);
        process_result r = process_run(room, 1, "MLUA_HOST_LINK=50", "%s 1MiB", check);
        const double least = process_number(r.output, "\"peak_bytes\":") / (1 << 20);
        process_run(room, 0, "MLUA_HOST_LINK=50", "%s %.4fMiB", check, (1 + apart[i]) * least);
        process_run(room, 1, "MLUA_HOST_LINK=50", "%s %.4fMiB", check, 0.9995 * least);
    }
}

static void budgets_are_monotone(process_room *room) {
    static const char *const layouts[] = {"",
                                          "--mesh dp=2",
                                          "--mesh dp=2 --layout preset=fsdp",
                                          "--mesh dp=2 --layout zero=false",
                                          "--mesh tp=2,dp=2",
                                          "--mesh dp=2,cp=2",
                                          "--mesh pp=2",
                                          "--mesh pp=2,dp=2"};
    static const double low[] = {20, 10, 8, 20, 5, 6, 10, 8};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        check_monotone(room, ml_arena_format(room->arena, "%s %s", parameters, layouts[i]), low[i]);
}

TEST(long, budgets_are_monotone) {
    process_in_room(budgets_are_monotone);
}

/* Less memory is never predicted to be faster. The planner takes a plan within 1 % at once, and
 * predictions are not by its rates: 2 %. */
static void check_times(process_room *room, const char *model, double low, double high) {
    enum { GRID = 11 };
    double least = 1e9;
    for (int i = 0; i < GRID; i++) {
        double budget = low + (high - low) * i / (GRID - 1);
        process_result r = process_run(
            room, PROCESS_ANY_CODE, "MLUA_HOST_LINK=50",
            "check \"$ROOT/models/%s --device h200 --json --memory %.3fGiB", model, budget);
        if (r.code != 0) process_expect(&r, "the program needs");
        const char *predicted = strstr(r.output, "\"predicted\":");
        const bool fits = r.code == 0 && predicted;
        const double seconds = fits ? process_number(predicted, "\"seconds\":") : 0;
        EXPECT(r.code != 0 || seconds > 0, "%s: no time in %.2f GiB", model, budget);
        EXPECT(r.code == 0 || least == 1e9, "%s: less than %.2f GiB is enough", model, budget);
        EXPECT(seconds <= 1.02 * least, "%s: %.1f ms in %.2f GiB, %.1f ms in less", model,
               1e3 * seconds, budget, 1e3 * least);
        if (seconds > 0 && seconds < least) least = seconds;
    }
    EXPECT(least < 1e9, "%s: nothing fits", model);
}

static void budgets_are_monotone_in_time(process_room *room) {
    check_times(room, "llama.lua\" preset=llama-3b", 49.5, 50.5);
    check_times(room, "llama.lua\" preset=llama-3b", 49, 59);
    check_times(room, "gpt.lua\" preset=gpt-1.3b batch=16 --mesh tp=2", 14, 34);
    check_times(room, "gpt.lua\" preset=gpt-1.3b batch=16 --mesh cp=2", 18, 38);
    check_times(room, "gpt.lua\" preset=gpt-1.3b batch=16 --mesh dp=2 --layout preset=fsdp", 11,
                31);
    check_times(room, "llama.lua\" preset=llama-1b batch=16 accum=8 --mesh pp=2", 15, 27);
}

TEST(long, budgets_are_monotone_in_time) {
    process_in_room(budgets_are_monotone_in_time);
}

/* The error of a budget that is too small names one that fits, in units of its size. */
PROCESS_TEST(memory_budget_names_the_least) {
    static const char *const models[] = {"%s --device h200", "%s --device h200 --mesh dp=2,tp=2",
                                         "%s --device cpu"};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const char *model = ml_arena_format(room->arena, models[i], small);
        process_result r = process_run(room, 1, "", "check %s --memory 0.5MiB", model);
        process_expect(&r, "the program needs");
        process_expect(&r, "MiB of memory, and ");
        process_expect(&r, " with --memory 0.50 MiB has 0.");
        const char *least = strstr(r.output, "help: --memory ");
        REQUIRE(least != NULL);
        least = ml_arena_copy(room->arena, least + 6,
                              strcspn(least + 6, ";") - strlen(" is the least"));
        process_run(room, 0, "", "check %s %s", model, least);
    }
    process_result r = process_run(room, 1, "", "run %s --device cpu --memory 0.5MiB", small);
    process_expect(&r, "MiB is the least; or use a smaller batch");
    process_expect(&r, " with --memory 0.50 MiB has 0.50 MiB for it");
}

static double last_of(const char *text, const char *key) {
    double value = 0;
    for (const char *at = text; (at = strstr(at, key)); at++) value = process_number(at, key);
    return value;
}

/* The curve of what is checked: with its budget and weights, from a budget that fits. */
PROCESS_TEST(memory_curve) {
    const char *const model =
        "check \"$ROOT/models/gpt.lua\" layers=2 embed=128 heads=2 --device h200";
    const char *const bytes = "\"process_bytes\":";
    process_result r = process_run(room, 0, "", "%s --memory-curve --json", model);
    const double least = process_number(r.output, bytes), most = last_of(r.output, bytes);
    const double seconds = process_number(r.output, "\"seconds\":");
    r = process_run(room, 0, "", "%s --json --memory %.4f", model, (least + (1 << 20)) / (1 << 30));
    const double again = process_number(strstr(r.output, "\"predicted\":"), "\"seconds\":");
    EXPECT(again < 1.01 * seconds, "in the least memory %g s, %g of the curve", again, seconds);
    const double middle = (least + most) / 2 / (1 << 30);
    r = process_run(room, 0, "", "%s --memory-curve --json --memory %.4f", model, middle);
    EXPECT(last_of(r.output, bytes) <= middle * (1 << 30), "more than %.4f GiB: %s", middle,
           r.output);
    r = process_run(room, 1, "", "%s --memory-curve --memory 1GiB", model);
    process_expect(&r, "no plan fits --memory: the least takes 1.");
    r = process_run(room, 2, "", "%s --memory-curve --explain", model);
    process_expect(&r, "--memory-curve is of training, without --serve, --types, --explain or");
    const char *const given =
        "check \"$ROOT/models/llama.lua\" --from \"$ROOT/tests/hf/llama\" --json";
    r = process_run(room, 0, "", "%s --device h200", given);
    const double whole = process_number(r.output, bytes);
    r = process_run(room, 0, "", "%s --device h200 --memory-curve", given);
    CHECK(last_of(r.output, bytes) == whole);
    r = process_run(room, 0, "", "%s --memory-curve",
                    "check \"$ROOT/models/gpt.lua\" layers=1 embed=64 heads=2 --device null");
    process_expect(&r, "     MiB   ms a step   slower\n");
}

/* What the device has not is marked. */
PROCESS_TEST(memory_curve_beyond_the_device) {
    const char *const model =
        "check \"$ROOT/models/gpt.lua\" layers=2 embed=4096 heads=32 seq=1024 "
        "batch=64 --device rtx4090";
    process_result r = process_run(room, 0, "", "%s --memory-curve", model);
    process_expect(&r, "beyond the memory of NVIDIA RTX 4090, 24 GiB:");
    process_expect(&r, "within it:");
    r = process_run(room, 0, "", "%s --memory 99GiB", model);
    process_expect(&r, "(--memory), which the device has not");
    process_expect(&r,
                   "predicted step  not known: no table has the rates of NVIDIA RTX 4090, 24 GiB;");
}

PROCESS_TEST(memory_budget) {
    check_budgets(room, small, FEW, false);
    check_budgets(room, small, BUDGETS, true);
    check_budgets(room, ml_arena_format(room->arena, "%s --dtype bf16", small), FEW, false);
    process_result r =
        process_run(room, 0, "",
                    "check \"$ROOT/models/gpt.lua\" layers=2 embed=64 heads=2 --device h200 "
                    "--memory-curve --json");
    EXPECT(process_number(r.output, "\"seconds\":") >
               process_number(strrchr(r.output, '{'), "\"seconds\":"),
           "the least memory takes no more time: %s", r.output);
    process_expect(&r, "\"module\":\"blocks.*\"");
    static const char mamba[] = "\"$ROOT/models/mamba.lua\" layers=4 embed=64 seq=512 batch=4";
    EXPECT(planned(room, "MLUA_RECOMPUTE=1", mamba) < planned(room, "", mamba) / 2,
           "products over chunks of a scan, and its states, are computed again");
    static const char fp8[] =
        "check \"$ROOT/models/gpt.lua\" layers=2 embed=64 heads=2 --device h200 "
        "--dtype fp8 --json";
    process_result whole = process_run(room, 0, "", fp8);
    r = process_run(room, 0, "", ml_arena_format(room->arena, "%s --memory-curve", fp8));
    process_expect(&r, ml_arena_format(room->arena, "\"peak_bytes\":%.0f,",
                                       process_number(whole.output, "\"peak_bytes\":")));
    r = process_run(room, 2, "", "check \"$ROOT/models/gpt.lua\" --memory 3GB");
    process_expect(&r, "--memory takes a size such as 60GiB or 800MiB");
}

/* What a GPU's libraries choose their kernels by is the same whatever is computed again: bits of a
 * product, or of attention, do not depend on the budget. */
PROCESS_TEST(memory_budget_of_libraries) {
    static const char *const models[] = {"llama.lua\" layers=3 embed=256 heads=4 kv_heads=2",
                                         "gpt.lua\" layers=3 embed=256 heads=4",
                                         "gpt_moe.lua\" layers=2"};
    static const char *const how[] = {"", "MLUA_RECOMPUTE=0", "MLUA_RECOMPUTE=1"};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const char *first = NULL;
        for (size_t j = 0; j < sizeof how / sizeof *how; j++) {
            process_result r = process_shell(room, 0,
                                             "MLUA_DEBUG=3 %s \"$MLUA\" check \"$ROOT/models/%s "
                                             "batch=64 --dtype bf16 --device h200 2>&1 | "
                                             "grep -aE '^  (m|heads) .* strides' | sort -u",
                                             how[j], models[i]);
            process_expect(&r, "heads");
            if (!first) first = ml_arena_copy(room->arena, r.output, strlen(r.output));
            EXPECT(strcmp(first, r.output) == 0, "%s: with %s\n%s\nelse\n%s", models[i], how[j],
                   r.output, first);
        }
    }
}

static void budgets_of_models(process_room *room) {
    static const char *const dtypes[] = {"f32", "bf16"};
    static const char *const models[] = {"llama.lua\" layers=2 sample=0 batch=2",
                                         "gpt_moe.lua\" layers=2 sample=0 batch=2",
                                         "gemma.lua\" layers=2 sample=0 batch=2",
                                         "deepseek.lua\" layers=2 sample=0 batch=2",
                                         "deltanet.lua\" layers=2 sample=0 batch=2",
                                         "rwkv.lua\" layers=2 sample=0 batch=2",
                                         "mamba.lua\" layers=2 sample=0 batch=2",
                                         "hybrid.lua\" layers=2 sample=0 batch=2",
                                         "vit.lua\"",
                                         "bert.lua\"",
                                         "t5.lua\"",
                                         "llava.lua\""};
    const size_t count = 2 * sizeof models / sizeof *models;
    for (size_t i = 0; i < 2 * count; i++) /* then all with copies */
        check_budgets(room,
                      ml_arena_format(room->arena, "\"$ROOT/models/%s steps=2 --dtype %s",
                                      models[i % count / 2], dtypes[i % 2]),
                      BUDGETS, i >= count);
}

TEST(long, budgets_of_models) {
    process_in_room(budgets_of_models);
}
