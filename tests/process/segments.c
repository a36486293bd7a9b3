/* Scans by segments on a GPU: a training whose states at all positions do not fit learns what one
 * with all of them does, takes the memory that is planned, and about the time.
 *   build/test --gpu -v -j 0 gpu_segments */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process/support.h"

enum { STEPS = 4, BUDGETS = 2, MIB = 1 << 20 };
static const double APART = 0.3; /* of a step's time, what was predicted */

typedef struct {
    const char *name, *settings, *small; /* small: where the GPU is emulated */
    double states;       /* of the memory of a step, the share that is less in the budgets */
    double tolerance[2]; /* relative: of losses, of gradients' norms; the first step's, a tenth */
} segmented;

static const segmented loop = {"loop",
                               "--dtype f32 batch=32 seq=2048 heads=2 width=64 embed=256",
                               "--dtype f32 batch=4 seq=512 heads=1 width=16 embed=16",
                               0.7,
                               {1e-6, 1e-4}},
                       narrow = {"loop in bf16",
                                 "--dtype bf16 batch=32 seq=2048 heads=2 width=64 embed=256",
                                 "--dtype bf16 batch=4 seq=512 heads=1 width=16 embed=16",
                                 0.7,
                                 {2e-2, 2e-2}},
                       products = {"one kernel with products",
                                   "--dtype bf16 kind=lstm layers=2 batch=64 seq=2048 embed=1024",
                                   "--dtype bf16 kind=lstm batch=64 seq=64 embed=64",
                                   0.25,
                                   {1e-3, 1e-2}};

typedef struct {
    double loss[STEPS], norm[STEPS], used, milliseconds; /* used: bytes; the last step's time */
    char text[STEPS][64];                                /* of losses: equal texts, equal bits */
} training;

static training train(process_room *room, const char *settings, const char *memory) {
    training out = {0};
    process_result r = process_run(room, 0, "",
                                   "run --device cuda --json %s "
                                   "\"$ROOT/tests/lua/lib/segments_training.lua\" %s steps=%d",
                                   memory, settings, STEPS);
    const char *at = r.output;
    for (int i = 0; i < STEPS; i++) {
        at = strstr(at, "{\"step\":");
        REQUIRE(at != NULL);
        out.loss[i] = process_number(at, "\"loss\":");
        out.norm[i] = process_number(at, "\"grad_norm\":");
        out.used = process_number(at, "\"memory_gib\":") * 1024 * MIB;
        out.milliseconds = process_number(at, "\"step_ms\":");
        snprintf(out.text[i], sizeof out.text[i], "%.40s", strstr(at, "\"loss\":"));
        at++;
    }
    return out;
}

/* What the context takes of a budget, and what is kept for it: bytes. */
static double context_bytes(process_room *room) {
    process_write(room, "limit.lua",
                  "print('limit ' .. require 'mlua.core'.device().memory_bytes)");
    process_result r = process_run(room, 0, "", "run --device cuda --memory 4GiB limit.lua");
    return 4096.0 * MIB - process_number(r.output, "limit ");
}

static void check_budget(process_room *room, const segmented *s, const char *settings,
                         const training *whole, double budget, double context) {
    const char *script = "\"$ROOT/tests/lua/lib/segments_training.lua\"";
    process_result plan = process_run(room, 0, "", "check --device cuda --memory %.3fMiB %s %s",
                                      budget / MIB, script, settings);
    const char *segments = strstr(plan.output, "loop over ");
    EXPECT(strstr(plan.output, "segments of ") != NULL, "%s: no segments in %.1f MiB: %s", s->name,
           budget / MIB, plan.output);
    plan = process_run(room, 0, "", "check --device cuda --json --memory %.3fMiB %s %s",
                       budget / MIB, script, settings);
    const double peak = process_number(plan.output, "\"peak_bytes\":");
    const double seconds = process_number(plan.output, "\"seconds\":");
    const char *memory = ml_arena_format(room->arena, "--memory %.3fMiB", (budget + context) / MIB);
    const training cut = train(room, settings, memory);
    bool equal = true;
    for (int i = 0; i < STEPS; i++) {
        const double loss = fabs(cut.loss[i] / whole->loss[i] - 1);
        const double norm = fabs(cut.norm[i] / whole->norm[i] - 1);
        equal &= strcmp(cut.text[i], whole->text[i]) == 0;
        const double part = i ? 1 : 0.1;
        EXPECT(loss <= part * s->tolerance[0] && norm <= part * s->tolerance[1],
               "%s, step %d: loss off by %.1e, norm by %.1e", s->name, i + 1, loss, norm);
    }
    printf("%s: losses of step 1 %s, whole %s\n", s->name, cut.text[0], whole->text[0]);
    printf("%s, %.25s: planned %.1f MiB, used %.1f (whole %.1f); predicted %.1f ms, took %.1f "
           "(whole %.1f); losses %s\n",
           s->name, segments, peak / MIB, cut.used / MIB, whole->used / MIB, seconds * 1e3,
           cut.milliseconds, whole->milliseconds, equal ? "equal to the bit" : "near");
    fflush(stdout);
    EXPECT(getenv("EMULATOR") || fabs(seconds * 1e3 / cut.milliseconds - 1) < APART,
           "%s: %.1f ms predicted, %.1f taken", s->name, seconds * 1e3, cut.milliseconds);
    EXPECT(fabs(cut.used - peak) <= 0.01 * peak && cut.used < whole->used,
           "%s: %.1f MiB used of %.1f planned; all %.1f", s->name, cut.used / MIB, peak / MIB,
           whole->used / MIB);
}

static void check_segments(process_room *room, const segmented *s) {
    const char *settings = getenv("EMULATOR") ? s->small : s->settings;
    const training whole = train(room, settings, "");
    const double context = context_bytes(room);
    for (int i = 1; i <= (getenv("EMULATOR") ? 1 : BUDGETS); i++) {
        double least = getenv("EMULATOR") ? 0.03 : s->states;
        check_budget(room, s, settings, &whole, whole.used * (1 - least * i / BUDGETS), context);
    }
}

#define SEGMENTS_TEST(name)                                                                        \
    static void segments_##name(process_room *room) {                                              \
        check_segments(room, &(name));                                                             \
    }                                                                                              \
    TEST(gpu_segments, name) {                                                                     \
        process_in_room(segments_##name);                                                          \
    }
SEGMENTS_TEST(loop)
SEGMENTS_TEST(narrow)
SEGMENTS_TEST(products)
