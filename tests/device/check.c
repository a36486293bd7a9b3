/* The comparison of steps with the reference: right results pass, spoilt ones are reported. */
#include <math.h>
#include <string.h>

#include "runtime/device/check.h"
#include "runtime/exec/session.h"
#include "tests/test.h"

enum { ELEMENTS = 100, SPOILT = 3 };

typedef ml_ref builder(ml_graph *g, ml_ref x);
typedef struct {
    const char *name;
    builder *build; /* from x = 0, 0.01 .. 0.99 */
    double spoil;   /* too much for element 3 */
} check_case;

typedef struct {
    const check_case *c;
    ml_session *session;
    ml_program *program;
    ml_dtype dtype; /* of the result */
    double spoil;   /* added to element 3 of temporaries when they are read */
} world;

static void read_memory(void *context, uint32_t storage, int64_t offset, int64_t bytes, void *to) {
    const world *w = context;
    const ml_storage *at = &ml_program_plan(w->program)->schedule->storages.at[storage];
    memcpy(to, (const char *)w->program->addresses[storage] + offset, (size_t)bytes);
    if (at->kind != ML_STORAGE_TEMPORARY || bytes < ELEMENTS * ml_dtypes[w->dtype].bytes) return;
    if (w->dtype == ML_F64)
        ((double *)to)[SPOILT] += w->spoil;
    else if (w->dtype == ML_F32)
        ((float *)to)[SPOILT] += (float)w->spoil;
    else
        ((int32_t *)to)[SPOILT] += (int32_t)w->spoil;
}

static ml_ref times(ml_graph *g, ml_ref x, double factor) {
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, x)->dtype;
    return ml_map2(g, ML_OP_MUL, x, ml_const(g, dtype, factor));
}

static ml_ref less(ml_graph *g, ml_ref x, double number) {
    return ml_map2(g, ML_OP_SUB, x, ml_const(g, ML_F32, number));
}

static ml_ref plain(ml_graph *g, ml_ref x) {
    return ml_map1(g, ML_OP_EXP, ml_map2(g, ML_OP_MUL, x, x));
}
/* f64 with the digits of f32 */
static ml_ref through_f32(ml_graph *g, ml_ref x) {
    return times(g, ml_cast(g, times(g, x, 1.1), ML_F64), 3.3);
}
/* exactly 0, but for roundings */
static ml_ref cancelled(ml_graph *g, ml_ref x) {
    ml_ref third = ml_map2(g, ML_OP_DIV, x, ml_const(g, ML_F32, 3));
    return ml_map2(g, ML_OP_SUB, x, times(g, third, 3));
}
static ml_ref less_mean(ml_graph *g, ml_ref x) {
    ml_axis axis = ml_graph_type(g, x)->axis[0];
    ml_ref equal = ml_map2(g, ML_OP_ADD, times(g, x, 0), ml_const(g, ML_F32, 1000.1));
    ml_ref mean = times(g, ml_reduce(g, ML_OP_SUM, equal, &axis, 1), 1.0 / ELEMENTS);
    return ml_map2(g, ML_OP_SUB, equal, mean);
}
/* -30 .. -129: from element 57 on exp is 0 in f32, and its logarithm any number */
static ml_ref underflowing(ml_graph *g, ml_ref x) {
    return ml_map1(g, ML_OP_LOG, ml_map1(g, ML_OP_EXP, less(g, times(g, x, -100), 30)));
}
/* infinite in f32 from element 39 on, in f64 nowhere */
static ml_ref overflowing(ml_graph *g, ml_ref x) {
    ml_ref large = ml_map1(g, ML_OP_EXP, less(g, times(g, x, 100), -50));
    return ml_map2(g, ML_OP_DIV, large, large);
}
/* a rounding decides about each element that is a whole number */
static ml_ref decided(ml_graph *g, ml_ref x) {
    ml_ref y = ml_map2(g, ML_OP_DIV, times(g, x, 330), ml_const(g, ML_F32, 3.3f));
    return ml_cast(g, ml_map2(g, ML_OP_ADD, y, ml_const(g, ML_F32, 0)), ML_I32);
}
static ml_ref running(ml_graph *g, ml_ref x) {
    int64_t args[] = {ml_graph_type(g, x)->axis[0], 0};
    ml_ref y = less(g, x, 0.495); /* comes back to 0 */
    return ml_graph_add(g, ML_OP_CUMSUM, &y, 1, args, 2, NULL);
}
static ml_ref rounded_to_bf16(ml_graph *g, ml_ref x) {
    ml_ref y = times(g, x, 1.1);
    return ml_map2(g, ML_OP_SUB, ml_cast(g, ml_cast(g, y, ML_BF16), ML_F32), y);
}

static const check_case cases[] = {
    {"plain", plain, 0.25},
    {"f32 in f64", through_f32, 1e-6},
    {"cancelled", cancelled, 1e-5},
    {"less the mean", less_mean, 0.1},
    {"underflow", underflowing, 0.1},
    {"overflow", overflowing, 0.01},
    {"decided by rounding", decided, 2},
    {"running sums", running, 0.05},
    {"rounded to bf16", rounded_to_bf16, 0.02},
};

static void body(void *argument) {
    world *w = argument;
    ml_checker *checker;
    ML_CHECK(ml_session_new(&w->session));
    ML_CHECK(ml_session_open(w->session, "cpu", 0));
    ml_graph *g = ml_session_graph(w->session);
    ml_graph_set_origin(g, &(ml_origin){"sum.lua", 3, "blocks.1", NULL});
    ml_type type = {.dtype = ML_F32, .rank = 1, .axis = {ml_axis_named(g, "x")}};
    type.size[0] = ELEMENTS;
    int64_t id = ml_graph_add_input(g, &(ml_input){"x", type});
    ml_ref x = ml_graph_add(g, ML_OP_INPUT, NULL, 0, &id, 1, &type), y = w->c->build(g, x);
    ml_roots roots = {.outputs = &y, .output_count = 1};
    w->dtype = (ml_dtype)ml_graph_type(g, y)->dtype;
    float in[ELEMENTS];
    double out[ELEMENTS];
    const void *inputs[1] = {in};
    void *outputs[1] = {out};
    for (int i = 0; i < ELEMENTS; i++) in[i] = (float)i / 100;
    ML_CHECK(ml_program_new(w->session, &roots, &w->program));
    ML_CHECK(ml_program_run(w->program, inputs, outputs));
    uint32_t last = ml_program_plan(w->program)->schedule->steps.count - 1;
    ML_CHECK(ml_check_new(ml_program_plan(w->program), read_memory, w, &checker));
    ML_CHECK(ml_check_begin(checker));
    for (uint32_t step = 0; step <= last; step++) {
        ML_CHECK(ml_check_reads(checker, step));
        ML_CHECK(ml_check_step(checker, step));
    }
    w->spoil = w->c->spoil;
    ML_CHECK(ml_check_begin(checker));
    ml_status status = ML_OK;
    for (uint32_t step = 0; step <= last && status == ML_OK; step++)
        status = ml_check_step(checker, step);
    CHECK_STATUS(status, ML_INTERNAL);
    CHECK(strstr(ml_error_last()->text, "element 3 of") != NULL);
    CHECK(strstr(ml_error_last()->text, "(sum.lua:3 blocks.1)") != NULL);
    ml_check_free(checker);
}

TEST(device, check_reports_wrong_steps) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world w = {.c = &cases[i]};
        ml_status status = ml_protect(body, &w);
        EXPECT(status == ML_OK, "%s: raised: %s", cases[i].name, ml_error_last()->text);
        ml_session_free(w.session);
    }
}
