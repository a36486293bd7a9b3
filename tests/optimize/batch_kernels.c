/* Which kernels a GPU runs in one launch (optimize/batch_kernels.c), and which casts of parameters
 * outlive a step (param_cache.c). */
#include <string.h>

#include "runtime/compile.h"
#include "runtime/passes/passes.h"
#include "tests/test.h"

enum { MOST = 16 };
typedef struct {
    ml_graph *g;
    ml_update updates[MOST];
    ml_ref outputs[MOST];
    int update_count, output_count, microbatches;
    ml_plan *plan;
    void (*build)(void *);
} program;

#define ADD(a, b) ml_map2(p->g, ML_OP_ADD, a, b)
#define MUL(a, b) ml_map2(p->g, ML_OP_MUL, a, b)

static ml_type type_of(program *p, int64_t rows, int64_t columns) {
    ml_type type = {.dtype = ML_F32, .rank = 2, .size = {rows, columns}};
    type.axis[0] = ml_axis_named(p->g, ml_arena_format(ml_graph_arena(p->g), "r%d", (int)rows));
    type.axis[1] = ml_axis_named(p->g, ml_arena_format(ml_graph_arena(p->g), "c%d", (int)columns));
    return type;
}

static ml_ref input(program *p, int64_t rows, int64_t columns) {
    ml_input in = {"x", type_of(p, rows, columns)};
    int64_t id = ml_graph_add_input(p->g, &in);
    return ml_graph_add(p->g, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
}

static ml_ref state(program *p, int64_t rows, int64_t columns, uint32_t *id) {
    ml_state made = {.name = "w", .kind = ML_STATE_PARAMETER, .type = type_of(p, rows, columns)};
    *id = ml_graph_add_state(p->g, &made);
    int64_t at = *id;
    return ml_graph_add(p->g, ML_OP_STATE, NULL, 0, &at, 1, NULL);
}

static void set(program *p, uint32_t state, ml_ref value) {
    p->updates[p->update_count++] = (ml_update){state, value};
}

static void plan_body(void *context) {
    program *p = context;
    ml_target target = {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132};
    ml_cut cut = {0};
    p->g = ml_graph_new();
    p->build(p);
    ml_roots roots = {.outputs = p->outputs,
                      .output_count = p->output_count,
                      .updates = p->updates,
                      .update_count = p->update_count,
                      .microbatches = p->microbatches};
    ml_compile(&(ml_compile_input){p->g, &roots, &target, NULL, &cut}, &p->plan);
}

static const ml_schedule *plan_of(program *p, void (*build)(void *)) {
    *p = (program){.build = build, .microbatches = p->microbatches};
    REQUIRE(ml_protect(plan_body, p) == ML_OK);
    return p->plan->schedule;
}

static void done(program *p) {
    ml_plan_free(p->plan);
    ml_graph_free(p->g);
}

static int most_members(const ml_schedule *s) {
    int most = 0;
    for (uint32_t t = 0; t < s->steps.count; t++)
        if (s->steps.at[t].members > most) most = s->steps.at[t].members;
    return most;
}

/* Updates that do not end in their states' memory at once. */
static int copies_in(const ml_schedule *s) {
    int copies = 0;
    for (uint32_t t = 0; t < s->steps.count; t++) copies += s->steps.at[t].kind == ML_STEP_COPY;
    return copies;
}

/* Tensors of all sizes under one rule: a launch for all, in place. */
static void build_rule(void *context) {
    program *p = context;
    static const int64_t rows[] = {1, 7, 64, 3000, 64};
    for (int i = 0; i < 5; i++) {
        uint32_t id;
        ml_ref w = state(p, rows[i], 8, &id);
        set(p, id, ADD(w, MUL(input(p, rows[i], 8), ml_const(p->g, ML_F32, -0.1))));
    }
}

TEST(plan, batch_of_all_sizes) {
    program p = {0};
    const ml_schedule *s = plan_of(&p, build_rule);
    CHECK_EQ_INT(s->steps.count, 1);
    CHECK_EQ_INT(s->steps.at[0].members, 5);
    CHECK_EQ_INT(s->steps.at[0].write_count, 5);
    CHECK_EQ_INT(copies_in(s), 0);
    const ml_kernel *kernel = s->steps.at[0].kernel;
    CHECK_EQ_INT(kernel->table[0], 5);
    CHECK(kernel->grid[0] >= 5 && kernel->pointer_count >= 15);
    done(&p);
}

/* Each needs the one before. */
static void build_chain(void *context) {
    program *p = context;
    ml_ref x = input(p, 64, 8);
    for (int i = 0; i < 4; i++) {
        uint32_t id;
        ml_ref w = state(p, 64, 8, &id);
        ml_axis axis = ml_graph_type(p->g, x)->axis[1];
        ml_ref sum = ml_reduce(p->g, ML_OP_SUM, x, &axis, 1);
        x = ml_map1(p->g, ML_OP_EXP, ADD(w, sum));
        set(p, id, x);
    }
}

TEST(plan, batch_of_a_chain) {
    program p = {0};
    CHECK_EQ_INT(most_members(plan_of(&p, build_chain)), 0);
    done(&p);
}

/* Two states that exchange their values: what sets one must not run beside what reads it. */
static void build_exchange(void *context) {
    program *p = context;
    uint32_t a, b;
    ml_ref first = state(p, 64, 8, &a), second = state(p, 64, 8, &b);
    set(p, a, ADD(second, ml_map1(p->g, ML_OP_EXP, input(p, 64, 8))));
    set(p, b, ADD(first, ml_map1(p->g, ML_OP_EXP, input(p, 64, 8))));
}

TEST(plan, batch_of_an_exchange) {
    program p = {0};
    const ml_schedule *s = plan_of(&p, build_exchange);
    CHECK_EQ_INT(most_members(s), 0);
    CHECK_EQ_INT(copies_in(s), 1); /* one of the two is in place */
    done(&p);
}

/* Sums of gradients of biases over microbatches: added in place, and not by what adds up the rows.
 */
static void build_sums(void *context) {
    program *p = context;
    for (int i = 0; i < 3; i++) {
        uint32_t id;
        ml_ref x = input(p, 4096, 64 + 32 * i), old = state(p, 1, 64 + 32 * i, &id);
        ml_axis rows = ml_graph_type(p->g, x)->axis[0];
        ml_ref sum = ml_reduce(p->g, ML_OP_SUM, x, &rows, 1);
        set(p, id, ADD(old, sum));
    }
}

TEST(plan, batch_of_small_sums) {
    program p = {0};
    const ml_schedule *s = plan_of(&p, build_sums);
    CHECK_EQ_INT(copies_in(s), 0);
    CHECK_EQ_INT(s->steps.at[s->steps.count - 1].members, 3);
    done(&p);
}

/* Two weights under products: one is set, which writes its cast too; that of the other one stays.
 */
static void build_products(void *context) {
    program *p = context;
    for (int i = 0; i < 2; i++) {
        uint32_t id;
        ml_ref w = state(p, 256, 128, &id), x = input(p, 512, 256);
        ml_axis row = ml_graph_type(p->g, w)->axis[0], column = ml_graph_type(p->g, x)->axis[1];
        x = ml_rename(p->g, ml_cast(p->g, x, ML_BF16), column, row);
        p->outputs[p->output_count++] =
            ml_dot(p->g, x, ml_cast(p->g, w, ML_BF16), &row, 1, ML_BF16);
        if (i == 0) set(p, id, MUL(w, ml_const(p->g, ML_F32, 0.5)));
    }
}

TEST(plan, copies_of_weights) {
    program p = {0};
    const ml_schedule *s = plan_of(&p, build_products);
    const ml_plan *rebuild = p.plan->rebuild;
    REQUIRE(rebuild != NULL && rebuild->next != NULL);
    CHECK(rebuild->next->next == NULL);
    for (const ml_plan *r = rebuild; r != NULL; r = r->next) {
        const uint32_t set = p.updates[0].state;
        CHECK_EQ_INT(r->cache_source_count, 1);
        CHECK_EQ_INT(r->cache_sources[0] == set, r != rebuild);
        CHECK_EQ_INT(r->roots.update_count, 1);
    }
    CHECK_EQ_INT(rebuild->schedule->steps.count, 1);
    CHECK_EQ_INT(p.plan->roots.update_count, 2);
    int sets = 0;
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        if (step->kind != ML_STEP_KERNEL || step->write_count != 2 || step->members > 0) continue;
        const ml_storage *first = &s->storages.at[s->values.at[step->values[1]].storage];
        const ml_storage *second = &s->storages.at[s->values.at[step->values[2]].storage];
        sets += first->kind == ML_STORAGE_STATE && second->kind == ML_STORAGE_STATE;
    }
    CHECK_EQ_INT(sets, 1); /* the weight and its copy */
    CHECK_EQ_INT(copies_in(s), 0);
    done(&p);
}

/* One of several runs of a step: what another program sets is cast once a step. */
TEST(plan, copies_of_microbatches) {
    program p = {.microbatches = 4};
    plan_of(&p, build_products);
    REQUIRE(p.plan->rebuild != NULL);
    CHECK_EQ_INT(p.plan->rebuild->cache_source_count, 2);
    CHECK_EQ_INT(p.plan->rebuild->roots.update_count, 2);
    CHECK_EQ_INT(p.plan->roots.update_count, 2); /* the weight that it sets, and its copy */
    done(&p);
}

/* A frozen weight above an adapter that is set, as one product reads them: of their cached casts
 * what sets the adapter writes the rows below. */
enum { FROZEN_ROWS = 256, ADAPTER_ROWS = 64, COLUMNS = 128 };
static void build_adapter(void *context) {
    program *p = context;
    uint32_t id[2];
    ml_ref w[2] = {state(p, FROZEN_ROWS, COLUMNS, &id[0]), state(p, ADAPTER_ROWS, COLUMNS, &id[1])};
    ml_ref x = input(p, 512, FROZEN_ROWS + ADAPTER_ROWS);
    const ml_axis row = ml_graph_type(p->g, x)->axis[1];
    set(p, id[1], MUL(w[1], ml_const(p->g, ML_F32, 0.5)));
    for (int i = 0; i < 2; i++) {
        const ml_axis own = ml_graph_type(p->g, w[i])->axis[0];
        w[i] = ml_rename(p->g, ml_cast(p->g, w[i], ML_BF16), own, row);
    }
    const ml_ref both = ml_concat(p->g, w, 2, row);
    p->outputs[p->output_count++] = ml_dot(p->g, ml_cast(p->g, x, ML_BF16), both, &row, 1, ML_BF16);
}

TEST(plan, parts_of_copies_that_are_set) {
    program p = {0};
    const ml_schedule *s = plan_of(&p, build_adapter);
    const ml_plan *rebuild = p.plan->rebuild;
    REQUIRE(rebuild != NULL && rebuild->next == NULL);
    CHECK_EQ_INT(rebuild->cache_source_count, 2);
    CHECK_EQ_INT(p.plan->roots.update_count, 2);
    const ml_update *copy = &p.plan->roots.updates[1];
    CHECK(copy->part && copy->state == rebuild->roots.updates[0].state);
    CHECK_EQ_INT(copy->start, FROZEN_ROWS * COLUMNS);
    CHECK_EQ_INT(copies_in(s), 0);
    const ml_storage *written = &s->storages.at[s->values.at[s->update_values[1]].storage];
    CHECK_EQ_INT(written->kind, ML_STORAGE_STATE);
    CHECK_EQ_INT(written->offset, 2 * FROZEN_ROWS * COLUMNS);
    for (uint32_t t = 0; t < s->steps.count; t++) { /* none reads the frozen weight */
        const ml_step *step = &s->steps.at[t];
        for (int i = 0; i < step->read_count; i++) {
            const ml_storage *read = &s->storages.at[s->values.at[step->values[i]].storage];
            CHECK(read->kind != ML_STORAGE_STATE || read->id != rebuild->cache_sources[0]);
        }
    }
    done(&p);
}
