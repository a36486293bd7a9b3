/* Sessions and programs: states, their initial values and updates, memory, errors. */
#include <math.h>
#include <string.h>

#include "runtime/exec/session.h"
#include "tests/ops/support.h"

typedef struct {
    ml_session *session;
    ml_graph *g;
    ml_arena *arena;
    const char *device;
} world;

typedef void world_body(world *w);
typedef struct {
    world *w;
    world_body *body;
} world_call;

static void world_protected(void *argument) {
    world_call *call = argument;
    world *w = call->w;
    ML_CHECK(ml_session_new(&w->session));
    ML_CHECK(ml_session_open(w->session, w->device, 0));
    w->g = ml_session_graph(w->session);
    call->body(w);
}

static void world_run(world_body *body, const char *device) {
    world w = {.arena = ml_arena_new(), .device = device};
    world_call call = {&w, body};
    ml_status status = ml_protect(world_protected, &call);
    EXPECT(status == ML_OK, "raised: %s", ml_error_last()->text);
    ml_session_free(w.session);
    ml_arena_free(w.arena);
}

static ml_type vector(world *w, int64_t size) {
    return (ml_type){
        .dtype = ML_F32, .rank = 1, .axis = {ml_axis_named(w->g, "x")}, .size = {size}};
}

static uint32_t add_state(world *w, const char *name, const ml_type *type, ml_ref initial) {
    return ml_graph_add_state(w->g, &(ml_state){.name = name, .type = *type, .initial = initial});
}

static ml_ref read_of(world *w, uint32_t state) {
    int64_t id = state;
    return ml_graph_add(w->g, ML_OP_STATE, NULL, 0, &id, 1, &ml_graph_state(w->g, state)->type);
}

static ml_ref add_input(world *w, const char *name, const ml_type *type) {
    int64_t id = ml_graph_add_input(w->g, &(ml_input){.name = name, .type = *type});
    return ml_graph_add(w->g, ML_OP_INPUT, NULL, 0, &id, 1, type);
}

static ml_ref uniform(world *w, const ml_type *type, int64_t key) {
    ml_ref k = ml_const_int(w->g, ML_I64, key);
    return ml_graph_add(w->g, ML_OP_RANDOM, &k, 1, NULL, 0, type);
}

static ml_program *program_of(world *w, ml_ref *outputs, int output_count, ml_update *updates,
                              int update_count) {
    ml_program *program;
    ml_roots roots = {outputs, output_count, updates, update_count};
    ML_CHECK(ml_program_new(w->session, &roots, &program));
    return program;
}

/* Three states that move round in a ring, with an output of an old value. */
static void body_ring(world *w) {
    ml_type type = vector(w, 100);
    uint32_t s[3];
    ml_ref old[3];
    for (int i = 0; i < 3; i++) {
        ml_ref initial = ml_broadcast(w->g, ml_const(w->g, ML_F32, i + 1), &type);
        s[i] = add_state(w, i == 0 ? "a" : i == 1 ? "b" : "c", &type, initial);
        old[i] = read_of(w, s[i]);
    }
    ml_update updates[3] = {{s[0], old[1]}, {s[1], old[2]}, {s[2], old[0]}};
    ml_program *program = program_of(w, old, 1, updates, 3);
    float out[100], value[100];
    void *outputs[1] = {out};
    for (int i = 0; i < 4; i++) {
        ML_CHECK(ml_program_run(program, NULL, outputs));
        CHECK_NEAR(out[99], i % 3 + 1, 0);
        ML_CHECK(ml_session_read_state(w->session, s[2], value));
        CHECK_NEAR(value[7], i % 3 + 1, 0);
    }
}
TEST(exec, states_in_a_ring) {
    world_run(body_ring, "cpu");
}

/* AdamW in one program, beside a plain loop. */
static void body_adamw(world *w) {
    enum { N = 1000 };
    ml_type type = vector(w, N), scalar = {.dtype = ML_F32};
    ml_graph *g = w->g;
    uint32_t p = add_state(w, "p", &type, uniform(w, &type, 42));
    uint32_t m = add_state(w, "m", &type, 0), v = add_state(w, "v", &type, 0);
    ml_ref lr = add_input(w, "lr", &scalar), x = add_input(w, "x", &type);
    ml_ref old = read_of(w, p), diff = ml_map2(g, ML_OP_SUB, old, x), gradient;
    ml_ref loss = ml_reduce(g, ML_OP_SUM, ml_map2(g, ML_OP_MUL, diff, diff), type.axis, 1);
    ml_autodiff(g, loss, &old, 1, &gradient);
#define C(value) ml_const(w->g, ML_F32, value)
#define MUL(a, b) ml_map2(w->g, ML_OP_MUL, a, b)
#define ADD(a, b) ml_map2(w->g, ML_OP_ADD, a, b)
    ml_ref new_m = ADD(MUL(read_of(w, m), C(0.9)), MUL(gradient, C(0.1)));
    ml_ref new_v = ADD(MUL(read_of(w, v), C(0.95)), MUL(MUL(gradient, gradient), C(0.05)));
    ml_ref root = ADD(ml_map1(g, ML_OP_SQRT, new_v), C(1e-8));
    ml_ref change = ADD(ml_map2(g, ML_OP_DIV, new_m, root), MUL(old, C(0.1)));
    ml_ref new_p = ml_map2(g, ML_OP_SUB, old, MUL(change, lr));
    ml_update updates[3] = {{p, new_p}, {m, new_m}, {v, new_v}};
    ml_program *program = program_of(w, &loss, 1, updates, 3);
    const ml_schedule *s = ml_program_plan(program)->schedule;
    for (uint32_t i = 0; i < s->steps.count; i++) CHECK(s->steps.at[i].kind != ML_STEP_COPY);
    float target[N], rate = 0.01f, got[N];
    double value[N], first[N] = {0}, second[N] = {0}, expected = 0;
    for (int i = 0; i < N; i++) target[i] = (float)i / N, value[i] = ml_random_uniform(42, i);
    uint32_t ids[2];
    const void *inputs[2];
    REQUIRE(ml_program_inputs(program, ids) == 2);
    for (int i = 0; i < 2; i++) {
        inputs[i] = strcmp(ml_graph_input(g, ids[i])->name, "lr") == 0 ? (void *)&rate : target;
    }
    for (int step = 0; step < 5; step++) {
        float out;
        void *outputs[1] = {&out};
        ML_CHECK(ml_program_run(program, inputs, outputs));
        expected = 0;
        for (int i = 0; i < N; i++) {
            double d = value[i] - target[i], gr = 2 * d;
            expected += d * d;
            first[i] = 0.9 * first[i] + 0.1 * gr;
            second[i] = 0.95 * second[i] + 0.05 * gr * gr;
            value[i] -= 0.01 * (first[i] / (sqrt(second[i]) + 1e-8) + 0.1 * value[i]);
        }
        CHECK_NEAR(out, expected, 1e-4);
    }
    ML_CHECK(ml_session_read_state(w->session, p, got));
    for (int i = 0; i < N; i++) CHECK_NEAR(got[i], value[i], 1e-4);
}
TEST(exec, adamw) {
    world_run(body_adamw, "cpu");
}

/* Initial values that read other states, which no program uses. */
static void body_initial(world *w) {
    ml_type type = vector(w, 50);
    ml_graph *g = w->g;
    uint32_t a = add_state(w, "a", &type, uniform(w, &type, 1));
    uint32_t b = add_state(w, "b", &type, MUL(read_of(w, a), ml_const(g, ML_F32, 2)));
    uint32_t c = add_state(w, "c", &type, ADD(read_of(w, b), read_of(w, a)));
    ml_ref out = ml_map1(g, ML_OP_NEG, read_of(w, c));
    ml_program *program = program_of(w, &out, 1, NULL, 0);
    float value[50];
    void *outputs[1] = {value};
    ML_CHECK(ml_program_run(program, NULL, outputs));
    for (int i = 0; i < 50; i++) CHECK_NEAR(value[i], -3 * ml_random_uniform(1, i), 1e-6);
    for (int i = 0; i < 50; i++) value[i] = (float)i;
    ML_CHECK(ml_session_write_state(w->session, c, value));
    ML_CHECK(ml_program_run(program, NULL, outputs));
    CHECK_NEAR(value[9], -9, 0);
}
TEST(exec, initial_values) {
    world_run(body_initial, "cpu");
}

static void body_cycle(world *w) {
    ml_type type = vector(w, 4);
    uint32_t a = add_state(w, "a", &type, 0), b = add_state(w, "b", &type, read_of(w, a));
    ml_graph_state(w->g, a)->initial = read_of(w, b);
    float value[4];
    CHECK_STATUS(ml_session_read_state(w->session, a, value), ML_INVALID);
    CHECK_TEXT(ml_error_last()->text, "the initial value of state \"a\" depends on itself");
}
TEST(exec, initial_values_in_a_circle) {
    world_run(body_cycle, "cpu");
}

/* Several programs over the same states; the arena grows under the first. */
static void body_programs(world *w) {
    ml_type small = vector(w, 8), large = vector(w, 100000);
    ml_graph *g = w->g;
    uint32_t n = add_state(w, "n", &small, 0);
    ml_ref next = ADD(read_of(w, n), ml_const(g, ML_F32, 1));
    ml_ref shown = MUL(next, next);
    ml_program *count = program_of(w, &shown, 1, &(ml_update){n, next}, 1);
    float out[8], sum;
    void *outputs[1] = {out}, *sums[1] = {&sum};
    ML_CHECK(ml_program_run(count, NULL, outputs));
    CHECK_NEAR(out[3], 1, 0);
    ml_ref random = uniform(w, &large, 3);
    ml_ref sorted = ml_graph_add(g, ML_OP_SORT, &random, 1, (int64_t[]){large.axis[0], 0}, 2, NULL);
    ml_ref use = ml_reduce(g, ML_OP_SUM, sorted, large.axis, 1);
    ml_program *other = program_of(w, &use, 1, NULL, 0);
    ML_CHECK(ml_program_run(other, NULL, sums));
    CHECK_NEAR(sum, 50000, 1e-2);
    ML_CHECK(ml_program_run(count, NULL, NULL));
    ML_CHECK(ml_program_run(count, NULL, outputs));
    CHECK_NEAR(out[3], 9, 0);
    ml_program_free(other);
    ML_CHECK(ml_program_run(count, NULL, outputs));
    CHECK_NEAR(out[0], 16, 0);
}
TEST(exec, programs_share_states) {
    world_run(body_programs, "cpu");
}

static void body_too_large(world *w) {
    ml_type type = vector(w, 1 << 20);
    ml_graph_set_origin(w->g, &(ml_origin){"big.lua", 7, "blocks.0", "h"});
    uint32_t s = add_state(w, "weight", &type, 0);
    ml_ref doubled = ADD(read_of(w, s), read_of(w, s));
    ml_ref sorted =
        ml_graph_add(w->g, ML_OP_SORT, &doubled, 1, (int64_t[]){type.axis[0], 0}, 2, NULL);
    ml_session_device(w->session)->target.memory_bytes = 3 << 20;
    ml_roots roots = {.outputs = &sorted, .output_count = 1};
    ml_program *program;
    CHECK_STATUS(ml_program_new(w->session, &roots, &program), ML_TOO_LARGE);
    CHECK(program == NULL);
    const char *text = ml_error_last()->text;
    CHECK(strstr(text, "MiB of memory, and") != NULL);
    CHECK(strstr(text, "f32[x=1048576] h from big.lua:7 (blocks.0)") != NULL);
    CHECK(strstr(ml_error_last()->help, "smaller batch") != NULL);
}
TEST(exec, too_large) {
    world_run(body_too_large, "cpu");
}

static void body_null(world *w) {
    ml_type type = vector(w, 64);
    uint32_t s = add_state(w, "s", &type, uniform(w, &type, 1));
    ml_ref y = MUL(read_of(w, s), read_of(w, s));
    ml_program *program = program_of(w, &y, 1, &(ml_update){s, y}, 1);
    float value[64] = {1};
    void *outputs[1] = {value};
    ML_CHECK(ml_program_run(program, NULL, outputs));
    CHECK_NEAR(value[0], 0, 0);
    CHECK(ml_program_plan(program)->peak_bytes > 0);
}
TEST(exec, null_device) {
    world_run(body_null, "null");
}

TEST(exec, devices_by_name) {
    ml_device *device;
    CHECK_STATUS(ml_device_open("tpu", 0, &device), ML_INVALID);
    CHECK_TEXT(ml_error_last()->text, "there is no device \"tpu\"");
    CHECK(device == NULL);
    CHECK_STATUS(ml_device_open("cpu", 0, &device), ML_OK);
    CHECK(device->target.threads >= 1 && device->target.vector_bytes >= 16);
    ml_device_close(device);
}

/* What is not contiguous, or is an input or a state itself, as output and as new value. */
static void body_plain(world *w) {
    ml_type type = vector(w, 6), pair = {.dtype = ML_F32, .rank = 2, .size = {2, 3}};
    pair.axis[0] = ml_axis_named(w->g, "a"), pair.axis[1] = ml_axis_named(w->g, "b");
    ml_type turned = {.dtype = ML_F32, .rank = 2, .size = {3, 2}};
    turned.axis[0] = pair.axis[1], turned.axis[1] = pair.axis[0];
    uint32_t s = add_state(w, "s", &pair, 0), t = add_state(w, "t", &turned, 0);
    uint32_t u = add_state(w, "u", &type, 0);
    ml_ref x = add_input(w, "x", &pair), y = add_input(w, "y", &type);
    ml_ref outputs[3] = {ml_permute(w->g, x, &turned), ml_permute(w->g, read_of(w, s), &turned), y};
    ml_update updates[3] = {{s, x}, {t, read_of(w, s)}, {u, y}};
    ml_program *program = program_of(w, outputs, 3, updates, 3);
    float in[6] = {1, 2, 3, 4, 5, 6}, out[3][6], value[6];
    uint32_t ids[2];
    const void *inputs[2] = {in, in};
    void *to[3] = {out[0], out[1], out[2]};
    CHECK_EQ_INT(ml_program_inputs(program, ids), 2);
    for (int i = 0; i < 2; i++) ML_CHECK(ml_program_run(program, inputs, to));
    ML_CHECK(ml_session_read_state(w->session, t, value));
    static const float expected[6] = {1, 4, 2, 5, 3, 6};
    for (int i = 0; i < 6; i++) {
        CHECK_NEAR(out[0][i], expected[i], 0);
        CHECK_NEAR(out[1][i], expected[i], 0);
        CHECK_NEAR(out[2][i], in[i], 0);
        CHECK_NEAR(value[i], expected[i], 0);
    }
}
TEST(exec, plain_values) {
    world_run(body_plain, "cpu");
}

/* Every allocation in turn fails: an error each time, nothing left behind. */
static void train_once(void *argument) {
    world *w = argument;
    ML_CHECK(ml_session_new(&w->session));
    ML_CHECK(ml_session_open(w->session, "cpu", 0));
    w->g = ml_session_graph(w->session);
    ml_type type = vector(w, 300);
    uint32_t p = add_state(w, "p", &type, uniform(w, &type, 42));
    ml_ref old = read_of(w, p), x = add_input(w, "x", &type), gradient;
    ml_ref loss = ml_reduce(w->g, ML_OP_SUM, MUL(MUL(old, x), old), type.axis, 1);
    ml_autodiff(w->g, loss, &old, 1, &gradient);
    ml_ref sorted =
        ml_graph_add(w->g, ML_OP_SORT, &gradient, 1, (int64_t[]){type.axis[0], 0}, 2, NULL);
    ml_ref outputs[2] = {loss, sorted};
    ml_program *program =
        program_of(w, outputs, 2, &(ml_update){p, ADD(old, MUL(gradient, C(-0.1)))}, 1);
    float in[300] = {1}, out[300], sum;
    const void *inputs[1] = {in};
    void *to[2] = {&sum, out};
    ML_CHECK(ml_program_run(program, inputs, to));
}

TEST(exec, out_of_memory) {
    int64_t fail_at = 0, before = ml_live_blocks();
    ml_status status = ML_NO_MEMORY;
    for (int64_t n = 1; status != ML_OK && n < 20000; n++) {
        world w = {0};
        ml_memory_fail_at(n);
        status = ml_protect(train_once, &w);
        ml_memory_fail_at(0);
        ml_session_free(w.session);
        if (status != ML_OK && status != ML_NO_MEMORY) {
            test_fail("allocation %lld: status %d: %s", (long long)n, status,
                      ml_error_last()->text);
            break;
        }
        if (ml_live_blocks() != before) {
            test_fail("allocation %lld: %lld blocks left", (long long)n,
                      (long long)(ml_live_blocks() - before));
            break;
        }
        fail_at = n;
    }
    CHECK(status == ML_OK && fail_at > 20);
}

/* ---- Programs beside one another ------------------------------------------------------------- */
/* The null device, with calls counted. */
static const ml_executable *counted[4];
static int counted_runs, plans_at_once;

static ml_status run_counted(ml_executable *executable) {
    for (int i = 0; i < 4; i++) counted_runs += executable == counted[i];
    return ml_device_null.run(executable);
}

static ml_status compile_counted(ml_device *device, const ml_plan *const *plans, int count) {
    (void)device, (void)plans;
    plans_at_once += count;
    return ML_OK;
}

/* A microbatch of so many rows, which adds to a sum what a product with the weight gives. */
static ml_program *microbatch_of(world *w, int64_t rows, uint32_t weight, uint32_t sum) {
    ml_axis in = ml_axis_named(w->g, "in"), row = ml_axis_named(w->g, "row");
    ml_type type = {.dtype = ML_F32, .rank = 2, .axis = {row, in}, .size = {rows, 64}};
    ml_ref x = ml_cast(w->g, add_input(w, "x", &type), ML_BF16);
    ml_ref y = ml_dot(w->g, x, ml_cast(w->g, read_of(w, weight), ML_BF16), &in, 1, ML_BF16);
    ml_ref value = ml_reduce(w->g, ML_OP_SUM, ml_cast(w->g, y, ML_F32), &row, 1);
    ml_update *update = ML_NEW(w->arena, ml_update);
    *update = (ml_update){sum, ml_map2(w->g, ML_OP_ADD, read_of(w, sum), value)};
    ml_program *program;
    ml_roots roots = {.updates = update, .update_count = 1, .microbatches = 4};
    ML_CHECK(ml_program_new(w->session, &roots, &program));
    return program;
}

/* The cast of a weight serves the microbatches of all programs until the weight is set. */
static void body_cached_once(world *w) {
    enum { ROWS = 256, IN = 64, OUT = 32 };
    static const float x[ROWS * IN], weights[IN * OUT];
    const void *inputs[] = {x};
    ml_device_ops ops = ml_device_null;
    ops.run = run_counted, ops.compile = compile_counted;
    ml_session_device(w->session)->ops = &ops;
    ml_axis in = ml_axis_named(w->g, "in"), out = ml_axis_named(w->g, "out");
    ml_type type = {.dtype = ML_F32, .rank = 2, .axis = {in, out}, .size = {IN, OUT}};
    ml_type row = {.dtype = ML_F32, .rank = 1, .axis = {out}, .size = {OUT}};
    uint32_t weight = add_state(w, "w", &type, uniform(w, &type, 1));
    uint32_t sum = add_state(w, "sum", &row, uniform(w, &row, 2));
    plans_at_once = counted_runs = 0;
    ml_session_together(w->session, true);
    ml_program *a = microbatch_of(w, ROWS, weight, sum), *b = microbatch_of(w, 128, weight, sum);
    CHECK(a->executable == NULL && b->executable == NULL);
    ML_CHECK(ml_session_compile(w->session));
    REQUIRE(a->rebuilds[0] != NULL && b->rebuilds[0] != NULL);
    CHECK_EQ_INT(plans_at_once, 4); /* both, and what rebuilds their caches */
    ml_update halved = {weight,
                        ml_map2(w->g, ML_OP_MUL, read_of(w, weight), ml_const(w->g, ML_F32, 0.5))};
    ml_program *update = program_of(w, NULL, 0, &halved, 1);
    CHECK_EQ_INT(plans_at_once, 4);
    counted[0] = a->rebuilds[0], counted[1] = b->rebuilds[0];
    for (int step = 1; step <= 3; step++) {
        for (int i = 0; i < 3; i++) ML_CHECK(ml_program_run(i == 1 ? b : a, inputs, NULL));
        CHECK_EQ_INT(counted_runs, step);
        ML_CHECK(ml_program_run(update, NULL, NULL));
    }
    ML_CHECK(ml_program_run(b, inputs, NULL));
    ML_CHECK(ml_session_write_state(w->session, weight, weights));
    ML_CHECK(ml_program_run(a, inputs, NULL));
    ML_CHECK(ml_program_run(b, inputs, NULL));
    CHECK_EQ_INT(counted_runs, 5);
    ml_session_device(w->session)->ops = &ml_device_null;
}
TEST(exec, casts_that_programs_share) {
    world_run(body_cached_once, "null");
}

/* A microbatch of three products: of one operand, or the last one of another. */
static ml_program *microbatch_of_three(world *w, const uint32_t *weights, uint32_t sum,
                                       bool apart) {
    enum { ROWS = 64 };
    ml_axis in = ml_axis_named(w->g, "in"), row = ml_axis_named(w->g, "row");
    ml_type type = {.dtype = ML_F32, .rank = 2, .axis = {row, in}, .size = {ROWS, 64}};
    ml_ref x[2], value = read_of(w, sum);
    for (int i = 0; i < 2; i++) x[i] = ml_cast(w->g, add_input(w, "x", &type), ML_BF16);
    for (int i = 0; i < 3; i++) {
        ml_ref weight = ml_cast(w->g, read_of(w, weights[i]), ML_BF16);
        ml_ref y = ml_dot(w->g, x[i == 2 && apart], weight, &in, 1, ML_BF16);
        y = ml_reduce(w->g, ML_OP_SUM, ml_cast(w->g, y, ML_F32), &row, 1);
        value = ml_map2(w->g, ML_OP_ADD, value, y);
    }
    ml_update *update = ML_NEW(w->arena, ml_update);
    *update = (ml_update){sum, value};
    ml_program *program;
    ml_roots roots = {.updates = update, .update_count = 1, .microbatches = 4};
    ML_CHECK(ml_program_new(w->session, &roots, &program));
    return program;
}

/* What no step sets is cast once, and again where it is written; the rest after each update. */
static void body_frozen_cached_once(world *w) {
    enum { IN = 64, OUT = 32 };
    static const float x[2 * 256 * IN], weights[IN * OUT];
    const void *inputs[] = {x, x};
    ml_device_ops ops = ml_device_null;
    ops.run = run_counted;
    ml_session_device(w->session)->ops = &ops;
    ml_axis in = ml_axis_named(w->g, "in"), out = ml_axis_named(w->g, "out");
    ml_type type = {.dtype = ML_F32, .rank = 2, .axis = {in, out}, .size = {IN, OUT}};
    ml_type row = {.dtype = ML_F32, .rank = 1, .axis = {out}, .size = {OUT}};
    uint32_t frozen = add_state(w, "frozen", &type, uniform(w, &type, 1));
    uint32_t trained = add_state(w, "trained", &type, uniform(w, &type, 2));
    const ml_state sums = {.name = "sum",
                           .kind = ML_STATE_GRADIENT,
                           .type = row,
                           .gradient_of = trained + 1,
                           .initial = uniform(w, &row, 3)};
    uint32_t sum = ml_graph_add_state(w->g, &sums);
    ml_program *program = microbatch_of_three(w, (uint32_t[]){trained, trained, frozen}, sum, true);
    REQUIRE(program->rebuilds[0] != NULL && program->rebuilds[1] != NULL);
    CHECK(program->rebuilds[2] == NULL);
    ml_update halved = {trained,
                        ml_map2(w->g, ML_OP_MUL, read_of(w, trained), ml_const(w->g, ML_F32, 0.5))};
    ml_program *update = program_of(w, NULL, 0, &halved, 1);
    for (int i = 0; i < 2; i++) { /* the one of the frozen weight, and the other one */
        counted[0] = program->rebuilds[i], counted[1] = NULL, counted_runs = 0;
        for (int step = 0; step < 3; step++) {
            for (int k = 0; k < 2; k++) ML_CHECK(ml_program_run(program, inputs, NULL));
            ML_CHECK(ml_program_run(update, NULL, NULL));
        }
        CHECK_EQ_INT(counted_runs, i == 0 ? 1 : 2);
        ML_CHECK(ml_session_write_state(w->session, frozen, weights));
        ML_CHECK(ml_program_run(program, inputs, NULL));
        CHECK_EQ_INT(counted_runs, i == 0 ? 2 : 3);
    }
    ml_session_device(w->session)->ops = &ml_device_null;
}
TEST(exec, casts_of_frozen_weights) {
    world_run(body_frozen_cached_once, "null");
}

/* A program that halves a weight, after these microbatches. */
static ml_program *halve_after(world *w, uint32_t weight, const ml_program *microbatch) {
    const ml_plan *plan = ml_program_plan(microbatch);
    ml_update halved = {weight,
                        ml_map2(w->g, ML_OP_MUL, read_of(w, weight), ml_const(w->g, ML_F32, 0.5))};
    ml_session_applies(w->session, (ml_plan_list){&plan, 1});
    ml_program *program = program_of(w, NULL, 0, &halved, 1);
    ml_session_applies(w->session, (ml_plan_list){0});
    return program;
}

/* A frozen weight above a trained one, which one product reads: the program that sets the latter
 * writes its part of the cast. That of the other one may have become stale before. */
static void body_cache_written(world *w) {
    enum { IN = 64, OUT = 32, ROWS = 256 };
    static const float x[ROWS * 2 * IN], weights[IN * OUT];
    const void *inputs[] = {x};
    ml_device_ops ops = ml_device_null;
    ops.run = run_counted;
    ml_session_device(w->session)->ops = &ops;
    ml_axis in = ml_axis_named(w->g, "in"), out = ml_axis_named(w->g, "out"),
            row = ml_axis_named(w->g, "row");
    ml_type type = {.dtype = ML_F32, .rank = 2, .axis = {in, out}, .size = {IN, OUT}};
    ml_type line = {.dtype = ML_F32, .rank = 1, .axis = {out}, .size = {OUT}};
    ml_type left = {.dtype = ML_F32, .rank = 2, .axis = {row, in}, .size = {ROWS, 2 * IN}};
    uint32_t frozen = add_state(w, "frozen", &type, uniform(w, &type, 1));
    uint32_t trained = add_state(w, "trained", &type, uniform(w, &type, 2));
    const ml_state sums = {.name = "sum",
                           .kind = ML_STATE_GRADIENT,
                           .type = line,
                           .gradient_of = trained + 1,
                           .initial = uniform(w, &line, 3)};
    uint32_t sum = ml_graph_add_state(w->g, &sums);
    ml_ref parts[] = {ml_cast(w->g, read_of(w, frozen), ML_BF16),
                      ml_cast(w->g, read_of(w, trained), ML_BF16)};
    ml_ref both = ml_concat(w->g, parts, 2, in);
    ml_ref y =
        ml_dot(w->g, ml_cast(w->g, add_input(w, "x", &left), ML_BF16), both, &in, 1, ML_BF16);
    ml_update update = {sum, ml_reduce(w->g, ML_OP_SUM, ml_cast(w->g, y, ML_F32), &row, 1)};
    ml_roots roots = {.updates = &update, .update_count = 1, .microbatches = 4};
    ml_program *program;
    ML_CHECK(ml_program_new(w->session, &roots, &program));
    ml_program *halve = halve_after(w, trained, program);
    REQUIRE(program->rebuilds[0] != NULL && program->rebuilds[1] == NULL);
    CHECK_EQ_INT(halve->plan->roots.update_count, 2);
    counted[0] = program->rebuilds[0], counted[1] = NULL, counted_runs = 0;
    for (int step = 0; step < 8; step++) {
        static const int runs[] = {1, 1, 1, 2, 2, 3, 3, 3}; /* up to the microbatches of a step */
        ML_CHECK(ml_program_run(program, inputs, NULL));
        CHECK_EQ_INT(counted_runs, runs[step]);
        if (step == 2) ML_CHECK(ml_session_write_state(w->session, frozen, weights));
        ML_CHECK(ml_program_run(halve, NULL, NULL));
        if (step == 4) ML_CHECK(ml_session_write_state(w->session, trained, weights));
    }
    const int64_t bytes = w->session->state_bytes;
    ml_program_free(program);
    CHECK_EQ_INT(w->session->state_bytes, bytes); /* held by what writes it */
    ml_program_free(halve);
    CHECK(w->session->state_bytes < bytes);
    ml_session_device(w->session)->ops = &ml_device_null;
}
TEST(exec, casts_that_updates_write) {
    world_run(body_cache_written, "null");
}

/* Of programs that merge products differently, the first to run in a step computes what all read:
 * also where the program that made the states is freed. */
static void body_parts_cached_once(world *w) {
    static const float x[64 * 64];
    const void *inputs[] = {x, x};
    ml_device_ops ops = ml_device_null;
    ops.run = run_counted;
    ml_session_device(w->session)->ops = &ops;
    ml_axis in = ml_axis_named(w->g, "in"), out = ml_axis_named(w->g, "out");
    ml_type type = {.dtype = ML_F32, .rank = 2, .axis = {in, out}, .size = {64, 32}};
    ml_type row = {.dtype = ML_F32, .rank = 1, .axis = {out}, .size = {32}};
    ml_state sums = {
        .name = "sum", .kind = ML_STATE_GRADIENT, .type = row, .initial = uniform(w, &row, 4)};
    uint32_t weights[3], sum = ml_graph_add_state(w->g, &sums);
    for (int i = 0; i < 3; i++)
        weights[i] = add_state(w, i == 0 ? "q" : i == 1 ? "k" : "v", &type, uniform(w, &type, i));
    ml_program *together = microbatch_of_three(w, weights, sum, false);
    const int64_t bytes = w->session->state_bytes;
    ml_program *apart = microbatch_of_three(w, weights, sum, true);
    CHECK_EQ_INT(w->session->state_bytes, bytes);
    REQUIRE(together->rebuilds[0] != NULL && apart->rebuilds[0] != NULL);
    ml_update halved = {
        weights[1], ml_map2(w->g, ML_OP_MUL, read_of(w, weights[1]), ml_const(w->g, ML_F32, 0.5))};
    ml_program *update = program_of(w, NULL, 0, &halved, 1);
    counted[0] = together->rebuilds[0], counted[1] = apart->rebuilds[0], counted_runs = 0;
    for (int step = 1; step <= 3; step++) {
        for (int i = 0; i < 4; i++)
            ML_CHECK(ml_program_run((step + i) % 2 ? together : apart, inputs, NULL));
        CHECK_EQ_INT(counted_runs, step);
        ML_CHECK(ml_program_run(update, NULL, NULL));
    }
    ml_program_free(together);
    counted[0] = NULL;
    CHECK_EQ_INT(w->session->state_bytes, bytes);
    for (int i = 0; i < 2; i++) ML_CHECK(ml_program_run(apart, inputs, NULL));
    CHECK_EQ_INT(counted_runs, 4);
    ml_program_free(apart);
    CHECK(w->session->state_bytes < bytes);
    ml_session_device(w->session)->ops = &ml_device_null;
}
TEST(exec, parts_of_casts_that_programs_share) {
    world_run(body_parts_cached_once, "null");
}

/* A program that is started before its kernels were asked for has them compiled then. */
static void body_waits(world *w) {
    ml_type type = vector(w, 100);
    uint32_t s = add_state(w, "s", &type, ml_broadcast(w->g, ml_const(w->g, ML_F32, 1), &type));
    ml_update doubled = {s, ml_map2(w->g, ML_OP_ADD, read_of(w, s), read_of(w, s))};
    ml_update less = {s, ml_map2(w->g, ML_OP_SUB, read_of(w, s), ml_const(w->g, ML_F32, 1))};
    ml_session_together(w->session, true);
    ml_program *first = program_of(w, NULL, 0, &doubled, 1);
    ml_program *second = program_of(w, NULL, 0, &less, 1);
    float value[100];
    for (int i = 0; i < 2; i++) {
        ML_CHECK(ml_program_run(first, NULL, NULL));
        ML_CHECK(ml_program_run(second, NULL, NULL));
        ML_CHECK(ml_program_run(first, NULL, NULL));
    }
    ML_CHECK(ml_session_compile(w->session)); /* nothing waits */
    ML_CHECK(ml_session_read_state(w->session, s, value));
    CHECK_NEAR(value[99], ((1 * 2 - 1) * 2 * 2 - 1) * 2, 0);
    ml_program_free(first);
    ml_program_free(second);
}
TEST(exec, programs_compiled_at_once) {
    world_run(body_waits, "cpu");
}
