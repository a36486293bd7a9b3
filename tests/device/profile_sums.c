/* Sums over a made-up profile: two streams, what overlaps and what does not, folded paths, text. */
#include <jansson.h>
#include <string.h>

#include "runtime/device/profile.h"
#include "tests/test.h"

static ml_profile_step steps[] = {
    {.work = ML_WORK_GEMM,
     .name = "gemm",
     .file = "a.lua",
     .module = "blocks.1.mlp",
     .line = 3,
     .flops = 4e9,
     .bytes = 1000,
     .shape = 7},
    {.work = ML_WORK_COLLECTIVE,
     .name = "all_reduce",
     .file = "a.lua",
     .module = "blocks.1.mlp",
     .line = 3,
     .bytes = 500},
    {.work = ML_WORK_GEMM,
     .name = "gemm",
     .file = "a.lua",
     .module = "blocks.12.mlp",
     .line = 3,
     .flops = 4e9,
     .bytes = 1000,
     .shape = 7},
    {.work = ML_WORK_MAP, .name = "add", .file = "", .module = "", .bytes = 2000},
};
static const ml_profile_program program = {"step", 4, steps};

/* Two training steps that were timed by steps, between others that were not. */
static ml_profile *made(void) {
    ml_profile *p = ml_profile_new(false);
    REQUIRE(p != NULL);
    p->stores = true;
    p->ceilings = (ml_ceilings){.copy_bytes = 1000, .gemm_flops = 1e9};
    ml_run_mode modes[] = {ML_RUN_ALONE, ML_RUN_STEPS, ML_RUN_STEPS, ML_RUN_WHOLE};
    for (int i = 0; i < 4; i++) {
        double at = 100 * i;
        ML_CHECK(ml_profile_begin_step(p, i + 2, modes[i]));
        if (modes[i] == ML_RUN_STEPS) {
            ML_CHECK(ml_profile_step_ran(p, &program, 0, ML_STREAM_MAIN, at, at + 10));
            ML_CHECK(ml_profile_step_ran(p, &program, 1, ML_STREAM_AXIS + 1, at + 5, at + 18));
            ML_CHECK(ml_profile_step_ran(p, &program, 2, ML_STREAM_MAIN, at + 16, at + 21));
            ML_CHECK(ml_profile_step_ran(p, &program, 3, ML_STREAM_MAIN, at + 21, at + 22));
        }
        ML_CHECK(ml_profile_run_ends(p, &program, at, at + 22));
    }
    ml_profile_end_step(p);
    return p;
}

TEST(device, profile_sums) {
    ml_profile *p = made();
    ml_arena *arena = ml_arena_new();
    ml_profile_sums sums;
    CHECK(ml_profile_wants_alone(p, &program, 0) && !ml_profile_wants_alone(p, &program, 3));
    ML_CHECK(ml_profile_alone(p, &program, 2, 3.5));
    CHECK(!ml_profile_wants_alone(p, &program, 0)); /* of the same shape */
    ml_profile_sum(p, arena, &sums);
    CHECK_EQ_INT(sums.first, 3);
    CHECK_EQ_INT(sums.last, 4);
    CHECK_EQ_INT(sums.whole_step, 5);
    CHECK_NEAR(sums.whole_busy, 22, 1e-12);
    CHECK_NEAR(sums.collective, 13, 1e-12);
    CHECK_NEAR(sums.exposed, 6, 1e-12); /* from 10 to 16 */
    CHECK_NEAR(sums.work[ML_WORK_GEMM].seconds, 15, 1e-12);
    CHECK_NEAR(sums.work[ML_WORK_GEMM].ideal, 7, 1e-12);
    CHECK_EQ_INT(sums.work[ML_WORK_GEMM].count, 2);
    CHECK_NEAR(sums.work[ML_WORK_MAP].ideal, 2, 1e-12); /* bytes over bandwidth */
    CHECK_NEAR(sums.total.seconds, 29, 1e-12);
    CHECK_EQ_INT(sums.modules.count, 2);
    CHECK_TEXT(sums.modules.at[0].name, "blocks.*.mlp");
    CHECK_NEAR(sums.modules.at[0].seconds, 28, 1e-12);
    CHECK_TEXT(sums.modules.at[1].name, "-");
    ml_arena_free(arena);
    ml_profile_free(p);
}

/* Before anything was measured alone, the ceilings give the best times. */
TEST(device, profile_ideal_from_ceilings) {
    ml_profile *p = made();
    CHECK_NEAR(ml_profile_ideal(p, &steps[0]), 4, 1e-12);
    CHECK_NEAR(ml_profile_ideal(p, &steps[1]), 0, 0);
    p->ceilings.gemm_flops = 1e12;
    CHECK_NEAR(ml_profile_ideal(p, &steps[0]), 1, 1e-12);
    ml_profile_free(p);
}

TEST(device, profile_trace_of_streams) {
    ml_profile *p = made();
    ml_text text = {.arena = ml_arena_new()};
    ml_layout layout = {.count = 2, .axis = {{.name = "dp"}, {.name = "tp"}}};
    ml_text_add(&text, "%s", ml_trace_head);
    ml_profile_trace(p, 5, "a \"device\"\n", &layout, &text);
    ml_text_add(&text, "%s", ml_trace_tail);
    json_t *root = json_loads(text.text, JSON_REJECT_DUPLICATES, NULL);
    REQUIRE(root != NULL);
    size_t i;
    json_t *event;
    int named = 0, beside = 0;
    json_array_foreach(json_object_get(root, "traceEvents"), i, event) {
        const char *name = json_string_value(json_object_get(event, "name"));
        const json_t *args = json_object_get(event, "args");
        const char *what = json_string_value(json_object_get(args, "name"));
        int64_t thread = json_integer_value(json_object_get(event, "tid"));
        CHECK_EQ_INT(json_integer_value(json_object_get(event, "pid")), 5);
        if (strcmp(name, "process_name") == 0) CHECK_TEXT(what, "rank 5: a \"device\"\n");
        if (what && strcmp(what, "collectives over tp") == 0) named = (int)thread;
        if (strcmp(name, "all_reduce") != 0) continue;
        CHECK_EQ_INT(thread, named); /* the name comes first */
        CHECK_NEAR(json_number_value(json_object_get(event, "dur")), 13e6, 1e-12);
        CHECK(json_object_get(args, "share of ceiling") == NULL);
        beside++;
    }
    CHECK(named > 0);
    CHECK_EQ_INT(beside, 2);
    json_decref(root);
    ml_arena_free(text.arena);
    ml_profile_free(p);
}

/* What is not UTF-8 becomes a question mark, so that every reader takes the file. */
TEST(device, profile_json_text) {
    static const char *const texts[][2] = {
        {"plain", "\"plain\""},
        {"a\"b\\c", "\"a\\\"b\\\\c\""},
        {"\t\x01", "\"\\u0009\\u0001\""},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82\""},
        {"\xff\xc3", "\"??\""},
        {"\xe0\x80\x80\xed\xa0\x80", "\"??????\""},
        {"\xf4\x90\x80\x80", "\"????\""},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        ml_text out = {.arena = ml_arena_new()};
        ml_json_text(&out, texts[i][0]);
        CHECK_TEXT(out.text, texts[i][1]);
        json_t *read = json_loads(out.text, JSON_DECODE_ANY, NULL);
        CHECK(read != NULL);
        json_decref(read);
        ml_arena_free(out.arena);
    }
}
