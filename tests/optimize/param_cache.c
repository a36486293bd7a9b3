/* Programs that merge the products of the same weights differently (optimize/param_cache.c): what
 * one caches side by side, another reads parts of. */
#include "runtime/compile.h"
#include "tests/passes/support.h"

enum { WEIGHTS = 4 };

typedef struct {
    fixture *f;
    ml_ref weights[WEIGHTS], left[2];
    ml_axis axis; /* over which products sum */
} layer;

/* Weights of one to three axes besides e, which is the first or the last one; parts of `unit`
 * elements and multiples of it. */
static layer draw_layer(fixture *f, int unit, ml_dtype dtype) {
    layer l = {.f = f, .axis = fixture_axis(f, "e")};
    const bool first = fixture_below(f, 2) == 0;
    for (int i = 0; i < WEIGHTS; i++) {
        static const char *const more[] = {"", " b3", " b2 c3"};
        const char *axes = ml_arena_format(f->arena, "%sa%d%s%s", first ? "e8 " : "", unit,
                                           more[fixture_below(f, 3)], first ? "" : " e8");
        l.weights[i] = fixture_state(f, dtype, axes);
    }
    for (int i = 0; i < 2; i++) l.left[i] = fixture_input(f, ML_F32, "s5 e8", -1, 1);
    return l;
}

/* A microbatch: products of left[of_left[i]] with weights[of_weight[i]]. */
static ml_plan *plan_products(const layer *l, const int *of_left, const int *of_weight,
                              ml_update *update) {
    ml_graph *g = l->f->g;
    ml_ref outputs[WEIGHTS];
    ml_target target = {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132};
    ml_cut cut = {0};
    ml_plan *plan;
    for (int i = 0; i < WEIGHTS; i++) {
        const ml_ref x = ml_cast(g, l->left[of_left[i]], ML_BF16);
        const ml_ref w = ml_cast(g, l->weights[of_weight[i]], ML_BF16);
        outputs[i] = ml_dot(g, x, w, &l->axis, 1, ML_BF16);
    }
    ml_roots roots = {.outputs = outputs,
                      .output_count = WEIGHTS,
                      .updates = update,
                      .update_count = update != NULL,
                      .microbatches = 4};
    ml_compile(&(ml_compile_input){g, &roots, &target, NULL, &cut}, &plan);
    return plan;
}

/* Products of the first `merged` weights with one operand, of the others with another. */
static ml_plan *plan_of(const layer *l, int merged, ml_update *update) {
    static const int of_weight[WEIGHTS] = {0, 1, 2, 3};
    int of_left[WEIGHTS];
    for (int i = 0; i < WEIGHTS; i++) of_left[i] = i >= merged;
    return plan_products(l, of_left, of_weight, update);
}

/* The plan's results, of the cache as its rebuild computes it, are these products. */
static void check_products(const layer *l, const int *of_left, const int *of_weight,
                           const ml_plan *plan) {
    fixture *f = l->f;
    const ml_roots *cached = &plan->rebuild->roots;
    const double *states[SUPPORT_INPUTS], *const *inputs = (const double *const *)f->inputs;
    double *results[WEIGHTS];
    for (int i = 0; i < f->state_count; i++) states[i] = f->states[i];
    for (int i = 0; i < cached->update_count; i++) {
        const ml_update *update = &cached->updates[i];
        ml_reference(plan->rebuild->graph, states, inputs, &update->value, 1, results, false,
                     f->arena);
        states[update->state] = results[0];
    }
    ml_reference(plan->graph, states, inputs, plan->roots.outputs, WEIGHTS, results, false,
                 f->arena);
    for (int i = 0; i < WEIGHTS; i++) {
        const ml_ref x = l->left[of_left[i]], w = l->weights[of_weight[i]];
        const ml_ref y = ml_dot(f->g, x, w, &l->axis, 1, ML_F32);
        const double *expected = fixture_value(f, f->g, y);
        for (int64_t k = 0; k < ml_type_elements(ml_graph_type(f->g, y)); k++)
            CHECK_NEAR(results[i][k], expected[k], 1e-9);
    }
}

static void check_results(const layer *l, int merged, const ml_plan *plan) {
    static const int of_weight[WEIGHTS] = {0, 1, 2, 3};
    int of_left[WEIGHTS];
    for (int i = 0; i < WEIGHTS; i++) of_left[i] = i >= merged;
    check_products(l, of_left, of_weight, plan);
}

static void share(fixture *f, ml_dtype dtype) {
    const layer l = draw_layer(f, 8, dtype);
    ml_plan *whole = plan_of(&l, WEIGHTS, NULL);
    const uint32_t states = ml_graph_state_count(f->g);
    CHECK_EQ_INT(whole->rebuild->roots.update_count, 1);
    for (int merged = 1; merged < WEIGHTS; merged++) {
        ml_plan *parts = plan_of(&l, merged, NULL);
        CHECK_EQ_INT(ml_graph_state_count(f->g), states);
        CHECK_EQ_INT(parts->rebuild->roots.update_count, 1);
        CHECK_EQ_INT(parts->rebuild->roots.updates[0].state, states - 1);
        CHECK_EQ_INT(parts->rebuild->cache_source_count, WEIGHTS);
        check_results(&l, merged, parts);
        ml_plan_free(parts);
    }
    check_results(&l, WEIGHTS, whole);
    ml_plan_free(whole);
}
static void shared(fixture *f) {
    share(f, ML_F32);
}
TEST(plan, parts_of_cached_weights) {
    for (uint64_t seed = 1; seed <= 20; seed++) fixture_run(shared, seed);
}

/* Weights in the dtype of the products: the one that a program does not merge is no copy there, but
 * a part of what another program has. */
static void shared_narrow(fixture *f) {
    share(f, ML_BF16);
}
TEST(plan, parts_of_narrow_weights) {
    for (uint64_t seed = 1; seed <= 20; seed++) fixture_run(shared_narrow, seed);
}

/* Parts that begin where products do not read, and those that the program sets, are states of their
 * own. */
static void apart(fixture *f) {
    for (int unit = 3; unit <= 8; unit += 5) {
        const layer l = draw_layer(f, unit, ML_F32);
        ml_plan *whole = plan_of(&l, WEIGHTS, NULL);
        const uint32_t states = ml_graph_state_count(f->g);
        ml_update halved = {(uint32_t)ml_graph_args(f->g, l.weights[3])[0],
                            ml_map2(f->g, ML_OP_MUL, l.weights[3], ml_const(f->g, ML_F32, 0.5))};
        ml_plan *parts = plan_of(&l, 2, unit == 3 ? NULL : &halved);
        CHECK_EQ_INT(ml_graph_state_count(f->g), states + 2);
        CHECK_EQ_INT(parts->rebuild->roots.update_count, 2);
        check_results(&l, 2, parts);
        ml_plan_free(parts);
        ml_plan_free(whole);
    }
}
TEST(plan, parts_that_are_cached_apart) {
    fixture_run(apart, 1);
}

/* A weight that one product reads with others, and another one alone. */
static void within(fixture *f) {
    static const int of_left[WEIGHTS] = {0, 0, 0, 1}, of_weight[WEIGHTS] = {0, 1, 2, 1};
    for (int unit = 3; unit <= 8; unit += 5) {
        const layer l = draw_layer(f, unit, ML_F32);
        const uint32_t states = ml_graph_state_count(f->g);
        ml_plan *plan = plan_products(&l, of_left, of_weight, NULL);
        CHECK_EQ_INT(ml_graph_state_count(f->g), states + (unit == 8 ? 1 : 2));
        check_products(&l, of_left, of_weight, plan);
        ml_plan_free(plan);
    }
}
TEST(plan, parts_of_a_program_s_own_cache) {
    for (uint64_t seed = 1; seed <= 20; seed++) fixture_run(within, seed);
}

/* Halves the weights whose bits are in `mask`, and writes what the microbatch caches of them. */
static ml_plan *plan_halves(const layer *l, unsigned mask, const ml_plan *microbatch) {
    ml_graph *g = l->f->g;
    ml_update updates[WEIGHTS];
    ml_target target = {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132};
    ml_cut cut = {0};
    ml_plan *plan;
    ml_roots roots = {.updates = updates};
    for (int i = 0; i < WEIGHTS; i++) {
        const ml_ref half = ml_map2(g, ML_OP_MUL, l->weights[i], ml_const(g, ML_F32, 0.5));
        if (mask >> i & 1)
            updates[roots.update_count++] =
                (ml_update){(uint32_t)ml_graph_args(g, l->weights[i])[0], half};
    }
    ml_compile(&(ml_compile_input){g, &roots, &target, NULL, &cut, .applied = {&microbatch, 1}},
               &plan);
    return plan;
}

/* The state's value after the plan has run, where it was `old`; the elements that are written. */
static int64_t write_parts(const layer *l, const ml_plan *plan, uint32_t state, double *old) {
    int64_t written = 0;
    for (int i = 0; i < plan->roots.update_count; i++) {
        const ml_update *update = &plan->roots.updates[i];
        double *part;
        if (update->state != state) continue;
        const int64_t count = ml_type_elements(ml_graph_type(plan->graph, update->value));
        ml_reference(plan->graph, (const double *const *)l->f->states, NULL, &update->value, 1,
                     &part, false, l->f->arena);
        for (int64_t k = 0; k < count; k++) old[update->start + k] = part[k];
        written += count;
    }
    return written;
}

/* What is written is what a rebuild would compute of the halved weights. */
static int64_t check_written(const layer *l, unsigned mask, const ml_plan *microbatch) {
    fixture *f = l->f;
    const ml_plan *rebuild = microbatch->rebuild;
    const ml_update *cached = &rebuild->roots.updates[0];
    const int64_t count = ml_type_elements(ml_graph_type(rebuild->graph, cached->value));
    const double *halved[SUPPORT_INPUTS];
    double *value, *expected;
    ml_plan *update = plan_halves(l, mask, microbatch);
    for (int i = 0; i < f->state_count; i++) halved[i] = f->states[i];
    for (int i = 0; i < WEIGHTS; i++)
        if (mask >> i & 1)
            halved[ml_graph_args(f->g, l->weights[i])[0]] = fixture_value(
                f, f->g, ml_map2(f->g, ML_OP_MUL, l->weights[i], ml_const(f->g, ML_F32, 0.5)));
    ml_reference(rebuild->graph, (const double *const *)f->states, NULL, &cached->value, 1, &value,
                 false, f->arena);
    ml_reference(rebuild->graph, halved, NULL, &cached->value, 1, &expected, false, f->arena);
    const int64_t written = write_parts(l, update, cached->state, value);
    for (int64_t k = 0; k < count && written > 0; k++) CHECK_NEAR(value[k], expected[k], 0);
    ml_plan_free(update);
    return written;
}

/* Of merged weights the program that sets some writes those alone where each is one piece of
 * memory, and otherwise nothing. */
static void written(fixture *f) {
    enum { ALL = (1 << WEIGHTS) - 1, UNIT = 16 }; /* parts of whole 256 bytes */
    const layer l = draw_layer(f, UNIT, ML_F32);
    const bool pieces = ml_graph_type(f->g, l.weights[0])->axis[0] != l.axis;
    ml_plan *microbatch = plan_of(&l, WEIGHTS, NULL);
    REQUIRE(microbatch->rebuild->roots.update_count == 1);
    for (unsigned mask = 1; mask <= ALL; mask++) {
        int64_t elements = 0;
        for (int i = 0; i < WEIGHTS; i++)
            if (mask >> i & 1 && (pieces || mask == ALL))
                elements += ml_type_elements(ml_graph_type(f->g, l.weights[i]));
        CHECK_EQ_INT(check_written(&l, mask, microbatch), elements);
    }
    ml_plan_free(microbatch);
}
TEST(plan, written_parts_of_cached_weights) {
    for (uint64_t seed = 1; seed <= 6; seed++) fixture_run(written, seed);
}
