/* Increments: of drawn models (tests/lua/lib/drawn.lua), and of models/ on several ranks. */
#include "tests/process/support.h"

/* 200 that look ahead, 200 that do not and 200 that an oracle decides about, by processes of 20
 * each: one that crashes names its seeds. */
static void all_drawn(process_room *room) {
    for (int seed = 1; seed <= 200; seed += 20) {
        const char *variables = ml_arena_format(room->arena, "DRAWN_COUNT=20 DRAWN_SEED=%d", seed);
        process_run(room, 0, variables,
                    "run \"$ROOT/tests/lua/drawn_models.lua\" --device cpu --quiet");
    }
}

TEST(long, drawn_models) {
    process_in_room(all_drawn);
}

/* The sum of the log probabilities of tokens that increments of models/NAME.lua are fed. */
static double sum_of(process_room *room, const char *name, const char *settings,
                     const char *ranks) {
    const char *variables =
        ml_arena_format(room->arena, "ROOT=\"$ROOT\" MODEL=%s SETTINGS=\"%s\"", name, settings);
    process_result r = process_run(
        room, 0, variables, "run \"$ROOT/tests/lua/lib/named.lua\" --device cpu --quiet %s", ranks);
    return process_number(r.output, "sum ");
}

typedef struct {
    const char *name, *settings;
} named;

static const named gpt = {"gpt", "layers=2 embed=32 heads=2"},
                   llama = {"llama", "layers=2 embed=32 heads=4 kv_heads=2 ffn=48"},
                   gemma = {"gemma", "layers=2 embed=32 heads=4 kv_heads=2 head_dim=8 ffn=48 "
                                     "window=6 pattern=2 score_cap=5.0 logit_cap=6.0"},
                   mamba = {"mamba", "layers=2 embed=32 heads=4 head_dim=8 groups=2 state=8"},
                   deltanet = {"deltanet",
                               "layers=2 embed=32 heads=2 key_dim=8 value_dim=8 ffn=64"},
                   moe = {"gpt_moe", "layers=2 embed=32 heads=4 kv_heads=2 ffn=16 experts=4 "
                                     "capacity=0.7"},
                   dropless = {"gpt_moe", "layers=2 embed=32 heads=4 kv_heads=2 ffn=16 experts=4"},
                   rwkv = {"rwkv", "layers=2 embed=32 heads=4 ffn=64 rank_w=4 rank_a=4 rank_v=4 "
                                   "rank_g=4"};

static void on_ranks(process_room *room, const named *model, const char *ranks) {
    double one = sum_of(room, model->name, model->settings, "");
    CHECK_NEAR(sum_of(room, model->name, model->settings, ranks) / one, 1, 1e-5);
}

DIST_TEST(increments_tensor_parallel) {
    on_ranks(room, &llama, "-n 2 --mesh tp=2");
}
DIST_TEST(increments_pipeline) {
    on_ranks(room, &gpt, "-n 2 --mesh pp=2");
}

DIST_TEST(increments_expert_parallel) {
    on_ranks(room, &moe, "-n 2 --mesh ep=2");
}

static void each_on_ranks(process_room *room) {
    const named *const all[] = {&gpt, &llama, &gemma, &mamba, &deltanet, &rwkv, &moe, &dropless};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        on_ranks(room, all[i], "-n 2 --mesh tp=2");
        on_ranks(room, all[i], "-n 2 --mesh pp=2");
    }
    on_ranks(room, &dropless, "-n 2 --mesh ep=2");
}

TEST(long, increments_on_ranks) {
    process_in_room(each_on_ranks);
}
