/* Products that add to what lies where they write: sums of products, gradient sums in states. */
#include <string.h>

#include "codegen/lower/lower.h"
#include "runtime/compile.h"
#include "runtime/optimize/optimize.h"
#include "tests/ops/support.h"

static ml_dtype dtype;

static ml_ref product(ops_case *c, const char *a, const char *b, const char *over, bool turned) {
    ml_axis axis = ops_axis(c, over);
    ml_ref x = ops_input(c, dtype, a, -1, 1), y = ops_input(c, dtype, b, -1, 1);
    return ml_dot(c->g, turned ? y : x, turned ? x : y, &axis, 1, dtype);
}

/* Sums of products of all forms: contraction over the inner or outer axes, results that are one
 * matrix or a batch, that lie as the sum does or the other way round, that others read too. */
static void build_sums(ops_case *c) {
    ml_ref total = product(c, "t9 k5", "k5 n7", "k", false);
    ml_ref second = product(c, "j6 t9", "j6 n7", "j", false);
    ml_type turned = *ml_graph_type(c->g, second);
    total = ml_map2(c->g, ML_OP_ADD, total, second);
    total = ml_map2(c->g, ML_OP_ADD, product(c, "t9 i3", "n7 i3", "i", false), total);
    ml_ref other = ml_permute(c->g, product(c, "t9 h4", "h4 n7", "h", true), &turned);
    total = ml_map2(c->g, ML_OP_ADD, total, other);
    ops_output(c, total, ops_tolerance(dtype), "sum of four");
    ml_ref batch = product(c, "b2 t9 k5", "b2 k5 n7", "k", false);
    ml_ref shared = product(c, "b2 t9 j6", "b2 j6 n7", "j", false);
    ops_output(c, ml_map2(c->g, ML_OP_ADD, batch, shared), ops_tolerance(dtype), "batched");
    ops_output(c, ml_map1(c->g, ML_OP_SIN, shared), ops_tolerance(dtype), "what it was added to");
}

/* The axes of an operand, in one order or the other, with or without a batch axis. */
static char *axes_of(ops_case *c, const char *batch, const char *a, int64_t a_size, const char *b,
                     int64_t b_size) {
    bool turned = test_range(&c->random, 0, 1);
    return ml_arena_format(c->arena, "%s %s%lld %s%lld", batch, turned ? b : a,
                           (long long)(turned ? b_size : a_size), turned ? a : b,
                           (long long)(turned ? a_size : b_size));
}

/* Sums of two or three products of any shape; every other one is wanted transposed. */
static void build_random_sums(ops_case *c) {
    for (int i = 0; i < 10; i++) {
        int64_t m = test_range(&c->random, 1, 70), n = test_range(&c->random, 1, 70);
        char *row = ml_arena_format(c->arena, "r%c", 'a' + i), *batch = "";
        char *column = ml_arena_format(c->arena, "q%c", 'a' + i);
        if (test_range(&c->random, 0, 2) == 0) batch = "b3";
        ml_ref total = 0;
        for (int k = 0; k < 3; k++) {
            int64_t depth = test_range(&c->random, 1, 90);
            char *over = ml_arena_format(c->arena, "k%c%c", 'a' + i, 'a' + k);
            ml_ref part = product(c, axes_of(c, batch, row, m, over, depth),
                                  axes_of(c, batch, over, depth, column, n), over, false);
            total = k == 0 ? part : ml_map2(c->g, ML_OP_ADD, total, part);
            if (k == 1 && test_range(&c->random, 0, 1)) break;
        }
        ml_type type = *ml_graph_type(c->g, total);
        for (int a = 0; a < type.rank / 2; a++) {
            int64_t size = type.size[a];
            ml_axis axis = type.axis[a];
            int other = type.rank - 1 - a;
            type.size[a] = type.size[other], type.axis[a] = type.axis[other];
            type.size[other] = size, type.axis[other] = axis;
        }
        if (i % 2) total = ml_permute(c->g, total, &type);
        ops_output(c, total, ops_tolerance(dtype), "random sum %d", i);
    }
}

/* Rows that are added to a product, or the product to them: few, and so many that they are sorted.
 */
static void build_scattered(ops_case *c) {
    static const struct {
        const char *tokens, *values, *table, *left, *right;
        int64_t rows;
    } cases[] = {{"t9", "t9 m4", "n7 m4", "n7 k5", "k5 m4", 7},
                 {"b3 t800", "b3 t800 m132", "n300 m132", "n300 k3", "k3 m132", 290}};
    for (int i = 0; i < 4; i++) {
        ml_ref index = ops_index(c, cases[i / 2].tokens, cases[i / 2].rows);
        ml_ref value = ops_input(c, dtype, cases[i / 2].values, -1, 1), part[2];
        ml_type type = ops_type(c, dtype, cases[i / 2].table);
        for (int k = 0; k < 2; k++)
            part[k] = k == i % 2 ? product(c, cases[i / 2].left, cases[i / 2].right, "k", false)
                                 : ml_scatter_add(c->g, index, value, ops_axis(c, "n"), &type);
        ops_output(c, ml_map2(c->g, ML_OP_ADD, part[0], part[1]), 10 * ops_tolerance(dtype),
                   "scattered %d", i);
    }
}

OPS_TEST(accumulated_products) {
    static const ml_dtype dtypes[] = {ML_F32, ML_F64, ML_BF16};
    for (int i = 0; i < 3; i++) {
        dtype = dtypes[i];
        ops_run(build_sums, 40 + (uint64_t)i, OPS_UNFUSED);
        ops_run(build_random_sums, 60 + (uint64_t)i, 0);
        if (dtype != ML_BF16) ops_run(build_scattered, 50 + (uint64_t)i, 0);
    }
}

typedef struct {
    ml_graph *g, *opened;
    ml_target target;
    ml_plan *plan;
} sum_plan;

static ml_ref part(ml_graph *g, const char *name, const char *left, const char *right) {
    ml_axis over = ml_axis_named(g, name);
    ml_ref operand[2];
    for (int i = 0; i < 2; i++) {
        ml_input in = {.name = i ? right : left, .type = {.dtype = ML_F32, .rank = 2}};
        in.type.axis[0] = over;
        in.type.axis[1] = ml_axis_named(g, i ? "n" : "m");
        in.type.size[0] = 64;
        in.type.size[1] = 256;
        int64_t id = ml_graph_add_input(g, &in);
        operand[i] = ml_graph_add(g, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
    }
    return ml_dot(g, operand[0], operand[1], &over, 1, ML_F32);
}

/* state += a b + c d, which is two steps and no memory. */
static void plan_sum(void *context) {
    sum_plan *p = context;
    p->g = ml_graph_new();
    ml_ref sum = ml_map2(p->g, ML_OP_ADD, part(p->g, "k", "a", "b"), part(p->g, "j", "c", "d"));
    ml_state state = {.name = "sum", .kind = ML_STATE_GRADIENT, .type = *ml_graph_type(p->g, sum)};
    int64_t id = ml_graph_add_state(p->g, &state);
    ml_ref old = ml_graph_add(p->g, ML_OP_STATE, NULL, 0, &id, 1, NULL);
    sum = ml_map2(p->g, ML_OP_ADD, ml_map2(p->g, ML_OP_ADD, old, part(p->g, "i", "e", "f")), sum);
    ml_update update = {(uint32_t)id, sum};
    ml_roots roots = {.updates = &update, .update_count = 1};
    ml_compile(&(ml_compile_input){p->g, &roots, &p->target, NULL}, &p->plan);
}

TEST(lower, products_accumulate) {
    static const ml_target targets[] = {
        {.kind = ML_TARGET_C, .threads = 2, .vector_bytes = 32},
        {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132}};
    for (int i = 0; i < 2; i++) {
        sum_plan p = {.target = targets[i]};
        CHECK_STATUS(ml_protect(plan_sum, &p), ML_OK);
        const ml_schedule *s = p.plan->schedule;
        int accumulating = 0, products = 0;
        for (uint32_t t = 0; t < s->steps.count; t++) {
            const ml_step *step = &s->steps.at[t];
            CHECK(step->kind != ML_STEP_COPY);
            products += step->kind == ML_STEP_GEMM;
            accumulating += step->gemm != NULL && step->gemm->accumulate;
            if (step->gemm == NULL || !step->gemm->accumulate) continue;
            uint32_t from = step->values[step->read_count - 1];
            uint32_t to = step->values[step->read_count];
            const ml_storage *a = &s->storages.at[s->values.at[from].storage];
            const ml_storage *b = &s->storages.at[s->values.at[to].storage];
            CHECK(a->kind == b->kind && a->offset == b->offset && a->id == b->id);
        }
        CHECK_EQ_INT(products, 3);
        CHECK(accumulating >= 1);
        ml_plan_free(p.plan);
        ml_graph_free(p.g);
    }
}

/* state = where(first, 0, state) + (a b + c d): cleared or not, then accumulated to, where it is.
 */
static void plan_microbatch(void *context) {
    sum_plan *p = context;
    p->g = ml_graph_new();
    ml_ref term = ml_map2(p->g, ML_OP_ADD, part(p->g, "k", "a", "b"), part(p->g, "j", "c", "d"));
    ml_input first = {.name = "first", .type = {.dtype = ML_BOOL}};
    int64_t input = ml_graph_add_input(p->g, &first);
    ml_state state = {.name = "sum", .kind = ML_STATE_GRADIENT, .type = *ml_graph_type(p->g, term)};
    int64_t id = ml_graph_add_state(p->g, &state);
    ml_ref old = ml_graph_add(p->g, ML_OP_STATE, NULL, 0, &id, 1, NULL);
    ml_ref test = ml_graph_add(p->g, ML_OP_INPUT, NULL, 0, &input, 1, NULL);
    ml_ref kept = ml_where(p->g, test, ml_const(p->g, ML_F32, 0), old);
    ml_update update = {(uint32_t)id, ml_map2(p->g, ML_OP_ADD, kept, term)};
    ml_roots roots = {.updates = &update, .update_count = 1};
    p->opened = ml_split_accumulation(p->g, &roots);
    ml_compile(&(ml_compile_input){p->opened, &roots, &p->target, NULL}, &p->plan);
}

TEST(lower, microbatches_accumulate_in_place) {
    static const ml_target targets[] = {
        {.kind = ML_TARGET_C, .threads = 2, .vector_bytes = 32},
        {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132}};
    for (int i = 0; i < 2; i++) {
        sum_plan p = {.target = targets[i]};
        CHECK_STATUS(ml_protect(plan_microbatch, &p), ML_OK);
        const ml_schedule *s = p.plan->schedule;
        CHECK_EQ_INT(s->steps.count, 3);
        CHECK_EQ_INT(p.plan->arena_bytes, 0);
        CHECK_TEXT(ml_step_label(&s->steps.at[0]), "reset");
        CHECK(s->steps.at[1].gemm->accumulate && s->steps.at[2].gemm->accumulate);
        for (uint32_t t = 0; t < s->steps.count; t++) {
            const ml_step *step = &s->steps.at[t];
            const ml_value *to = &s->values.at[step->values[step->read_count]];
            CHECK_EQ_INT(s->storages.at[to->storage].kind, ML_STORAGE_STATE);
        }
        ml_plan_free(p.plan);
        ml_graph_free(p.opened);
        ml_graph_free(p.g);
    }
}
