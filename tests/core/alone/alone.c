/* The core alone, without families of ops, optimizations, pipelines, ranks, devices and kernels'
 * texts: a model's gradient, its plan on a CPU and on a GPU, and that of one rank of several; and
 * training steps of a session, on a device that interprets plans. */
#include <math.h>
#include <string.h>

#include "runtime/exec/program.h"
#include "runtime/graph/analysis.h"
#include "runtime/graph/op_interface.h"
#include "tests/test.h"

enum { BATCH = 4, IN = 3, OUT = 5, WEIGHTS = IN * OUT };

typedef struct {
    ml_graph *g;
    ml_axis batch, in, out;
    ml_ref loss, gradient;
    ml_roots roots; /* the loss, and a step of gradient descent */
    ml_ref outputs[1];
    ml_update updates[1];
} model;

static ml_type type_of(ml_axis a, int64_t n, ml_axis b, int64_t m) {
    return (ml_type){.dtype = ML_F32, .rank = 2, .axis = {a, b}, .size = {n, m}};
}

/* loss = sum(tanh(x w)^2) */
static void make(model *m, ml_graph *g) {
    m->g = g;
    m->batch = ml_axis_named(g, "batch");
    m->in = ml_axis_named(g, "in"), m->out = ml_axis_named(g, "out");
    ml_input input = {"x", type_of(m->batch, BATCH, m->in, IN)};
    int64_t id = ml_graph_add_input(g, &input);
    ml_ref x = ml_graph_add(g, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
    ml_state state = {.name = "w", .type = type_of(m->in, IN, m->out, OUT)};
    state.initial = ml_broadcast(g, ml_const(g, ML_F32, 0.25), &state.type);
    id = ml_graph_add_state(g, &state);
    ml_ref w = ml_graph_add(g, ML_OP_STATE, NULL, 0, &id, 1, NULL);
    ml_ref y = ml_map1(g, ML_OP_TANH, ml_dot(g, x, w, &m->in, 1, ML_F32));
    m->loss =
        ml_reduce(g, ML_OP_SUM, ml_map2(g, ML_OP_MUL, y, y), (ml_axis[]){m->batch, m->out}, 2);
    ml_autodiff(g, m->loss, &w, 1, &m->gradient);
    ml_ref step = ml_map2(g, ML_OP_MUL, m->gradient, ml_const(g, ML_F32, 0.1));
    m->outputs[0] = m->loss;
    m->updates[0] = (ml_update){(uint32_t)id, ml_map2(g, ML_OP_SUB, w, step)};
    m->roots = (ml_roots){.outputs = m->outputs, .output_count = 1, .updates = m->updates};
    m->roots.update_count = 1;
    m->roots.name = "step";
}

typedef void model_body(model *m);
static void with_model(model_body *body) {
    model m = {0};
    make(&m, ml_graph_new());
    body(&m);
    ml_graph_free(m.g);
}

static double sample(int i) {
    return sin(1 + i);
}

static double *values(const model *m, ml_ref n, const double *w) {
    double x[BATCH * IN], *result;
    for (int i = 0; i < BATCH * IN; i++) x[i] = sample(i);
    const double *states[] = {w}, *inputs[] = {x};
    ml_reference(m->g, states, inputs, &n, 1, &result, false, ml_graph_arena(m->g));
    return result;
}

static double value(const model *m, ml_ref n, const double *w, int at) {
    return values(m, n, w)[at];
}

static void check_gradient(model *m) {
    const double step = 1e-4;
    double w[WEIGHTS];
    for (int i = 0; i < WEIGHTS; i++) w[i] = cos(i);
    for (int i = 0; i < WEIGHTS; i++) {
        const double before = w[i], gradient = value(m, m->gradient, w, i);
        w[i] = before + step;
        const double above = value(m, m->loss, w, 0);
        w[i] = before - step;
        const double below = value(m, m->loss, w, 0);
        w[i] = before;
        CHECK_NEAR(gradient, (above - below) / (2 * step), 1e-6);
    }
}
TEST(core_alone, gradients) {
    with_model(check_gradient);
}

/* The plan as text. */
static const char *planned(model *m, ml_target_kind kind, const ml_layout *layout) {
    ml_target target = {.kind = kind, .arch = 90, .multiprocessors = 132};
    ml_plan *plan = NULL;
    ml_text text = {.arena = ml_graph_arena(m->g)};
    ml_compile(&(ml_compile_input){m->g, &m->roots, &target, layout}, &plan);
    ml_plan_print(plan, &text);
    CHECK(plan->schedule->steps.count >= 3); /* two products, and what is elementwise */
    CHECK(plan->arena_bytes > 0);
    ml_plan_free(plan);
    return text.text;
}

static void check_plans(model *m) {
    CHECK(strstr(planned(m, ML_TARGET_C, NULL), "gemm") != NULL);
    CHECK(strstr(planned(m, ML_TARGET_CUDA, NULL), "gemm") != NULL);
    ml_layout layout = {.count = 1};
    layout.axis[0] = (ml_mesh_axis){.name = "dp", .size = 2, .acts_count = 1, .acts = {m->batch}};
    CHECK(strstr(planned(m, ML_TARGET_CUDA, &layout), "all_reduce") != NULL);
}
TEST(core_alone, plans) {
    with_model(check_plans);
}

static void add_routine(void *argument) {
    model *m = argument;
    ml_ref sources[] = {m->updates[0].value, m->updates[0].value};
    const int64_t args[] = {m->in, m->out, 1, 1, 1, 0};
    ml_type type = *ml_graph_type(m->g, sources[0]);
    (void)ml_graph_add(m->g, ML_OP_CONV, sources, 2, args, 6, &type);
}
static void check_absent(model *m) {
    for (int op = 0; op < ML_OP_COUNT; op++) CHECK(ml_op_interfaces[op] == NULL);
    CHECK_RAISES(add_routine, m, ML_INTERNAL,
                 "conv has no interface: this program is linked without it");
}
TEST(core_alone, routines_are_absent) {
    with_model(check_absent);
}

/* Three steps of a session beside the same by the definition of each op. */
static void check_steps(ml_session *session, model *m, ml_program *program) {
    float x[BATCH * IN], loss, weights[WEIGHTS];
    double w[WEIGHTS];
    for (int i = 0; i < BATCH * IN; i++) x[i] = (float)sample(i);
    for (int i = 0; i < WEIGHTS; i++) w[i] = 0.25;
    for (int step = 0; step < 3; step++) {
        CHECK_STATUS(ml_program_run(program, (const void *[]){x}, (void *[]){&loss}), ML_OK);
        CHECK_NEAR(loss, value(m, m->loss, w, 0), 1e-5);
        memcpy(w, values(m, m->updates[0].value, w), sizeof w);
    }
    CHECK_STATUS(ml_session_read_state(session, m->updates[0].state, weights), ML_OK);
    for (int i = 0; i < WEIGHTS; i++) CHECK_NEAR(weights[i], w[i], 1e-5);
}

TEST(core_alone, training_steps) {
    ml_session *session = NULL;
    ml_program *program = NULL;
    model m = {0};
    REQUIRE(ml_session_new(&session) == ML_OK);
    make(&m, ml_session_graph(session));
    CHECK_STATUS(ml_program_new(session, &m.roots, &program), ML_OK);
    CHECK(ml_program_plan(program)->arena_bytes > 0);
    check_steps(session, &m, program);
    ml_program_free(program);
    ml_session_free(session);
}
