/* The models that make their examples: what ranks learn under a layout is what one rank learns. */
#include <math.h>
#include <stdlib.h>

#include "tests/process/support.h"

enum { STEPS = 3 };

typedef struct {
    const char *model, *settings;
} example;

static const example bert = {"bert", "seq=32"}, t5 = {"t5", "seq=32 head_dim=8"},
                     vit = {"vit", "image=12 patch=4 data="},
                     llava = {"llava", "kv_heads=2 seq=48 image=8 patch=4 eye_layers=1 "
                                       "eye_embed=16 eye_heads=2 eye_ffn=32 data="},
                     lora = {"lora", "kv_heads=2 seq=64 pretrain=0 data="};

/* Rounding in another order is some 1e-7 of a loss of 5; Adam's first steps magnify it. */
static void under_layouts(process_room *room, const example *e, const char *const *layouts,
                          int count) {
    const char *script = ml_arena_format(
        room->arena,
        "\"$ROOT/models/%s.lua\" layers=2 embed=32 heads=4 ffn=64 batch=8 warmup=2 lr=1e-3 %s",
        e->model, e->settings);
    process_step *one = process_train(room, STEPS, "", script);
    for (int i = 0; i < count; i++) {
        const char *arguments = ml_arena_format(room->arena, "%s %s", script, layouts[i]);
        process_step *other = process_train(room, STEPS, "", arguments);
        process_compare(other, one, STEPS, 1e-5, arguments);
    }
}

/* One layout each; all of them in the long test, as each compiles kernels of its own. */
#define EXAMPLE(name, layout)                                                                      \
    DIST_TEST(name) {                                                                              \
        under_layouts(room, &name, &(const char *const){layout}, 1);                               \
    }
EXAMPLE(bert, "-n 2 --mesh tp=2")
EXAMPLE(t5, "-n 2 --mesh pp=2")
EXAMPLE(vit, "-n 2 --mesh dp=2")
EXAMPLE(llava, "-n 2 --mesh tp=2")
EXAMPLE(lora, "-n 2 --mesh dp=2")

static void every_layout(process_room *room) {
    static const char *const layouts[] = {
        "-n 2 --mesh dp=2",         "-n 2 --mesh tp=2",
        "-n 2 --mesh pp=2",         "-n 2 --mesh cp=2",
        "-n 4 --mesh dp=2,tp=2",    "-n 4 --mesh pp=2,dp=2",
        "-n 2 --mesh dp=2 accum=2", "-n 2 --mesh dp=2 layout=fsdp",
    };
    const example *const all[] = {&bert, &t5, &vit, &llava, &lora};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        under_layouts(room, all[i], layouts, (int)(sizeof layouts / sizeof *layouts));
}

TEST(long, models_with_examples) {
    process_in_room(every_layout);
}

/* Adapters of a run's checkpoint are its model's; exported for other programs they are parts of its
 * weights, beside which adapters begin anew. */
PROCESS_TEST(adapters_exported) {
    static const char settings[] =
        "\"$ROOT/models/lora.lua\" layers=1 embed=32 heads=2 kv_heads=1 ffn=32 seq=64 batch=4 "
        "warmup=1 lr=0.05 data=";
    process_run(room, 0, "", "run --device cpu %s pretrain=1 steps=24 --out a", settings);
    process_run(room, 0, "", "export a b --hf");
    process_run(room, 0, "", "check --device cpu \"$ROOT/models/llama.lua\" --from b seq=64");
    const char *run = ml_arena_format(room->arena, "%s --from", settings);
    process_step *own = process_train(room, 1, "", ml_arena_format(room->arena, "%s a", run));
    process_step *merged = process_train(room, 1, "", ml_arena_format(room->arena, "%s b", run));
    double loss = strtod(own->loss, NULL), other = strtod(merged->loss, NULL);
    EXPECT(fabs(loss - other) < 1e-5 * loss, "%s is not %s", own->loss, merged->loss);
    CHECK(loss < 5.46); /* without adapters it is 5.517 */
}
