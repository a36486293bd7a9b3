/* Recurrent models: what ranks learn under a layout is what one rank learns. */
#include "tests/process/support.h"

enum { STEPS = 3 };

typedef struct {
    const char *model, *settings;
} recurrent;

static const recurrent mamba = {"mamba", "heads=4 head_dim=8 groups=2 state=8"},
                       deltanet = {"deltanet", "heads=2 key_dim=8 value_dim=8 ffn=64"},
                       kda = {"deltanet", "heads=2 key_dim=8 value_dim=8 ffn=64 decay_per=key "
                                          "rank=4"},
                       hybrid = {"hybrid",
                                 "pattern=\"DE M- *-\" layers=3 heads=4 kv_heads=2 head_dim=8 "
                                 "key_heads=2 value_heads=4 key_dim=8 value_dim=8 ssm_heads=4 "
                                 "ssm_dim=8 state=8 ffn=64 expert_ffn=32 shared_ffn=32 experts=4"},
                       rwkv = {"rwkv", "heads=4 ffn=64 rank_w=4 rank_a=4 rank_v=4 rank_g=4"};

/* Rounding in another order is some 1e-7 of a loss of 5; Adam's first steps magnify it. */
static void under_layouts(process_room *room, const recurrent *e, const char *const *layouts,
                          int count) {
    const char *script =
        ml_arena_format(room->arena,
                        "\"$ROOT/models/%s.lua\" layers=2 embed=32 seq=48 batch=8 warmup=2 lr=1e-3 "
                        "sample=0 --dtype f32 %s",
                        e->model, e->settings);
    process_step *one = process_train(room, STEPS, "", script);
    for (int i = 0; i < count; i++) {
        const char *arguments = ml_arena_format(room->arena, "%s %s", script, layouts[i]);
        process_step *other = process_train(room, STEPS, "", arguments);
        process_compare(other, one, STEPS, 1e-5, arguments);
    }
}

/* Few rows on a GPU: a rank's map, which is a scan itself, is cut into segments with maps of
 * theirs. */
PROCESS_TEST(segments_of_context_parallel_maps) {
    process_result r = process_run(room, 0, "",
                                   "check \"$ROOT/models/deltanet.lua\" preset=gdn-1.3b layers=1 "
                                   "batch=1 --device h200 --mesh cp=2");
    process_expect(&r, "peak memory");
}

/* One layout each; all of them in the long test, as each compiles kernels of its own. */
#define RECURRENT(name, layout)                                                                    \
    DIST_TEST(name) {                                                                              \
        under_layouts(room, &name, &(const char *const){layout}, 1);                               \
    }
RECURRENT(mamba, "-n 2 --mesh cp=2")
RECURRENT(deltanet, "-n 2 --mesh cp=2")
RECURRENT(kda, "-n 2 --mesh tp=2")
RECURRENT(hybrid, "-n 2 --mesh tp=2")
RECURRENT(rwkv, "-n 2 --mesh pp=2")

static void every_layout(process_room *room) {
    static const char *const layouts[] = {
        "-n 2 --mesh dp=2",      "-n 2 --mesh tp=2",      "-n 2 --mesh pp=2",
        "-n 2 --mesh cp=2",      "-n 3 --mesh cp=3",      "-n 4 --mesh cp=4",
        "-n 4 --mesh cp=2,tp=2", "-n 4 --mesh pp=2,dp=2", "-n 2 --mesh dp=2 accum=2",
    };
    const recurrent *const all[] = {&mamba, &deltanet, &kda, &hybrid, &rwkv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        under_layouts(room, all[i], layouts, (int)(sizeof layouts / sizeof *layouts));
}

TEST(long, recurrent_models) {
    process_in_room(every_layout);
}

/* Segments, for which there is memory alone, of a scan whose axis ranks share, as one rank. */
static void segments_over(process_room *room, int ranks, const char *memory) {
    const char *script = ml_arena_format(
        room->arena, "--device cpu --mesh cp=%d --memory %s \"$ROOT/tests/lua/lib/segments.lua\"",
        ranks, memory);
    process_result r = process_run(room, 0, "", "check %s", script);
    process_expect(&r, "segments of ");
    process_run(room, 0, "", "run -n %d %s", ranks, script);
}

static void write_segments(process_room *room) {
    process_run(room, 0, "SEGMENTS=write", "run --device cpu \"$ROOT/tests/lua/lib/segments.lua\"");
}

DIST_TEST(segments_of_scans) {
    write_segments(room);
    segments_over(room, 3, "0.0007");
}

/* lua/scan_context is the case of three ranks, dist/segments_of_scans that of segments. */
static void scan_context(process_room *room) {
    write_segments(room);
    segments_over(room, 2, "0.001");
    segments_over(room, 4, "0.00055");
    for (int ranks = 2; ranks <= 4; ranks += 2)
        process_run(room, 0, "",
                    "run --device cpu -n %d --mesh cp=%d \"$ROOT/tests/lua/scan_context.lua\"",
                    ranks, ranks);
}

TEST(long, scan_context) {
    process_in_room(scan_context);
}
