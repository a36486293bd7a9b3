/* The comparison of steps with the reference: right results pass, spoilt ones are told. */
#include <string.h>

#include "runtime/device/check.h"
#include "runtime/exec/session.h"
#include "tests/test.h"

typedef struct {
    ml_session *session;
    ml_program *program;
    float spoil; /* added to element 3 of temporaries when they are read */
} world;

static void read_memory(void *context, uint32_t storage, int64_t offset, int64_t bytes, void *to) {
    const world *w = context;
    const ml_storage *at = &ml_program_plan(w->program)->schedule->storages.at[storage];
    memcpy(to, (const char *)w->program->addresses[storage] + offset, (size_t)bytes);
    if (at->kind == ML_STORAGE_TEMPORARY && bytes >= 16) ((float *)to)[3] += w->spoil;
}

static void body(void *argument) {
    world *w = argument;
    ml_checker *checker;
    ML_CHECK(ml_session_new(&w->session));
    ML_CHECK(ml_session_open(w->session, "cpu", 0));
    ml_graph *g = ml_session_graph(w->session);
    ml_graph_set_origin(g, &(ml_origin){"sum.lua", 3, "blocks.1", NULL});
    ml_type type = {.dtype = ML_F32, .rank = 1, .axis = {ml_axis_named(g, "x")}, .size = {100}};
    int64_t id = ml_graph_add_input(g, &(ml_input){"x", type});
    ml_ref x = ml_graph_add(g, ML_OP_INPUT, NULL, 0, &id, 1, &type);
    ml_ref y = ml_map1(g, ML_OP_EXP, ml_map2(g, ML_OP_MUL, x, x));
    ml_roots roots = {.outputs = &y, .output_count = 1};
    float in[100], out[100];
    const void *inputs[1] = {in};
    void *outputs[1] = {out};
    for (int i = 0; i < 100; i++) in[i] = (float)i / 100;
    ML_CHECK(ml_program_new(w->session, &roots, &w->program));
    ML_CHECK(ml_program_run(w->program, inputs, outputs));
    REQUIRE(ml_program_plan(w->program)->schedule->steps.count == 1);
    ML_CHECK(ml_check_new(ml_program_plan(w->program), read_memory, w, &checker));
    ML_CHECK(ml_check_begin(checker));
    CHECK_STATUS(ml_check_reads(checker, 0), ML_OK);
    CHECK_STATUS(ml_check_step(checker, 0), ML_OK);
    w->spoil = 0.25f;
    CHECK_STATUS(ml_check_begin(checker), ML_OK);
    CHECK_STATUS(ml_check_step(checker, 0), ML_INTERNAL);
    CHECK(strstr(ml_error_last()->text, "element 3 of") != NULL);
    CHECK(strstr(ml_error_last()->text, "(sum.lua:3 blocks.1)") != NULL);
    ml_check_free(checker);
}

TEST(exec, check_tells_wrong_steps) {
    world w = {0};
    ml_status status = ml_protect(body, &w);
    if (status != ML_OK) test_fail("raised: %s", ml_error_last()->text);
    ml_session_free(w.session);
}
