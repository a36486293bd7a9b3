/* Several GPUs, a rank each: what they learn is what one learns. Layouts that need more GPUs than
 * there are pass over. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process_support.h"

#ifdef MLUA_CUDA
#include "runtime/device/cuda_driver.h"

enum { STEPS = 4 };
typedef struct {
    double loss[STEPS], norm[STEPS];
} learned;

static int gpus(void) {
    int count = 0;
    return cuda_driver_open(&count) == ML_OK ? count : 0;
}

static double number(const char *line, const char *key) {
    const char *at = line ? strstr(line, key) : NULL;
    REQUIRE(at != NULL);
    return strtod(at + strlen(key), NULL);
}

static learned train(process_room *room, int ranks, const char *arguments) {
    learned out;
    process_result r = process_run(
        room, 0, "MLUA_VERIFY=1",
        "run \"$ROOT/models/gpt.lua\" --device cuda --dtype f32 --json -n %d layers=2 embed=32 "
        "heads=4 seq=16 batch=8 vocab=256 sample=0 warmup=1 steps=%d %s",
        ranks, STEPS, arguments);
    for (int i = 0; i < STEPS; i++) {
        char *line = strstr(r.output, ml_arena_format(room->arena, "{\"step\":%d,", i + 1));
        if (!line) ml_raise(ML_INTERNAL, "no step %d in\n%s", i + 1, r.output);
        out.loss[i] = number(line, "\"loss\":");
        out.norm[i] = number(line, "\"grad_norm\":");
    }
    return out;
}

static void compare(process_room *room, const learned *one, int ranks, const char *arguments) {
    if (gpus() < ranks) return;
    learned many = train(room, ranks, arguments);
    for (int i = 0; i < STEPS; i++) {
        double loss = fabs(many.loss[i] / one->loss[i] - 1);
        double norm = fabs(many.norm[i] / one->norm[i] - 1);
        if (!(loss <= 1e-5) || !(norm <= 1e-4))
            test_fail("%d ranks, %s: step %d has loss %.9g and norm %.9g, not %.9g and %.9g", ranks,
                      arguments, i + 1, many.loss[i], many.norm[i], one->loss[i], one->norm[i]);
    }
}

static void gpu_ranks_layouts(process_room *room) {
    if (gpus() < 2) return;
    learned one = train(room, 1, "");
    compare(room, &one, 2, "--mesh dp=2");
    compare(room, &one, 2, "--mesh tp=2");
    compare(room, &one, 2, "--mesh cp=2");
    compare(room, &one, 2, "--mesh dp=2 layout=fsdp");
    compare(room, &one, 4, "--mesh dp=2,tp=2");
    compare(room, &one, 4, "--mesh dp=4 layout=fsdp");
}
TEST(gpu_ranks, layouts) {
    process_in_room(gpu_ranks_layouts);
}
#endif
