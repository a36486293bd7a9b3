/* Random graphs: what fusion makes of any mix of ops equals the reference interpreter. Values stay
 * within [-2, 2] or so; comparisons look at inputs alone, which are exact everywhere.
 * MLUA_RANDOM_GRAPHS=first:count runs other seeds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codegen/lower/lower.h"
#include "tests/ops/support.h"

enum { POOL = 64, STEPS = 26, MOST_ELEMENTS = 60000 };

typedef struct {
    ops_case *c;
    ml_graph *g;
    ml_ref pool[POOL];
    int count;
    uint64_t random;
    ml_dtype dtype;
} builder;

static int64_t pick(builder *b, int64_t low, int64_t high) {
    return test_range(&b->random, low, high);
}

static ml_ref any(builder *b) {
    /* recent nodes more often: deep expressions */
    int at = pick(b, 0, 2) ? (int)pick(b, b->count > 6 ? b->count - 6 : 0, b->count - 1)
                           : (int)pick(b, 0, b->count - 1);
    return b->pool[at];
}

static void add(builder *b, ml_ref n) {
    const ml_type *type = ml_graph_type(b->g, n);
    if (b->count == POOL || ml_type_elements(type) > MOST_ELEMENTS || type->rank > 6) return;
    b->pool[b->count++] = n;
}

static bool includes(const ml_type *all, const ml_type *some) {
    for (int i = 0; i < some->rank; i++) {
        int at = ml_type_find(all, some->axis[i]);
        if (at < 0 || all->size[at] != some->size[i]) return false;
    }
    return true;
}

/* A node whose axes fit together with x's elementwise. */
static ml_ref partner(builder *b, ml_ref x) {
    const ml_type *type = ml_graph_type(b->g, x);
    for (int tries = 0; tries < 20; tries++) {
        ml_ref y = any(b);
        const ml_type *other = ml_graph_type(b->g, y);
        if (includes(type, other) || includes(other, type)) return y;
    }
    return x;
}

static ml_ref bounded(builder *b, ml_ref n) {
    return pick(b, 0, 1) ? ml_map1(b->g, ML_OP_TANH, n) : ml_map1(b->g, ML_OP_SIN, n);
}

static void add_map(builder *b) {
    static const ml_op unary[] = {ML_OP_NEG, ML_OP_TANH, ML_OP_SIGMOID, ML_OP_COS, ML_OP_ABS};
    static const ml_op binary[] = {ML_OP_ADD, ML_OP_SUB, ML_OP_MUL, ML_OP_MAXIMUM, ML_OP_MINIMUM};
    ml_ref x = any(b);
    if (pick(b, 0, 3) == 0) {
        add(b, ml_map1(b->g, unary[pick(b, 0, 4)], x));
    } else if (pick(b, 0, 5) == 0) {
        ml_ref y = ml_map1(b->g, ML_OP_EXP, ml_map1(b->g, ML_OP_NEG, ml_map1(b->g, ML_OP_ABS, x)));
        add(b, y);
    } else {
        ml_ref y = ml_map2(b->g, binary[pick(b, 0, 4)], x, partner(b, x));
        add(b, pick(b, 0, 2) ? y : bounded(b, y));
    }
}

static ml_axis any_axis(builder *b, ml_ref x) {
    const ml_type *type = ml_graph_type(b->g, x);
    return type->rank == 0 ? 0 : type->axis[pick(b, 0, type->rank - 1)];
}

static int64_t size_of(builder *b, ml_ref x, ml_axis axis) {
    const ml_type *type = ml_graph_type(b->g, x);
    return type->size[ml_type_find(type, axis)];
}

static void add_split(builder *b, ml_ref x, ml_axis axis) {
    int64_t size = size_of(b, x, axis);
    int64_t inner = size % 2 == 0 ? 2 : size % 3 == 0 ? 3 : size % 5 == 0 ? 5 : 1;
    if (pick(b, 0, 1)) inner = size / inner;
    add(b, ml_split(b->g, x, axis, ml_axis_fresh(b->g, "o"), size / inner, ml_axis_fresh(b->g, "i"),
                    inner));
}

static ml_ref permuted(builder *b, ml_ref x) {
    ml_type type = *ml_graph_type(b->g, x);
    for (int i = type.rank - 1; i > 0; i--) {
        int at = (int)pick(b, 0, i);
        ml_axis axis = type.axis[i];
        int64_t size = type.size[i];
        type.axis[i] = type.axis[at];
        type.size[i] = type.size[at];
        type.axis[at] = axis;
        type.size[at] = size;
    }
    return ml_permute(b->g, x, &type);
}

static void add_move(builder *b) {
    ml_ref x = any(b);
    ml_axis axis = any_axis(b, x);
    if (axis == 0) return;
    int64_t size = size_of(b, x, axis);
    const ml_type *type = ml_graph_type(b->g, x);
    switch (pick(b, 0, 7)) {
    case 0: add(b, permuted(b, x)); break;
    case 1: add(b, ml_rename(b->g, x, axis, ml_axis_fresh(b->g, "r"))); break;
    case 2: {
        int64_t start = pick(b, 0, size - 1);
        add(b, ml_slice(b->g, x, axis, start, pick(b, start + 1, size)));
        break;
    }
    case 3: add(b, ml_pad(b->g, x, axis, pick(b, 0, 2), pick(b, 0, 3))); break;
    case 4: add_split(b, x, axis); break;
    case 5: {
        ml_axis other = any_axis(b, x);
        if (other != axis) add(b, ml_merge(b->g, x, axis, other, ml_axis_fresh(b->g, "m")));
        break;
    }
    case 6: {
        ml_ref parts[3] = {x, ml_map1(b->g, ML_OP_NEG, x), permuted(b, x)};
        int64_t half = size / 2;
        if (half > 0) parts[1] = ml_slice(b->g, parts[1], axis, 0, half);
        add(b, ml_concat(b->g, parts, (int)pick(b, 2, 3), axis));
        break;
    }
    default:
        if (type->rank < 4) {
            ml_type wider = *type;
            wider.axis[wider.rank] = ml_axis_fresh(b->g, "b");
            wider.size[wider.rank++] = pick(b, 1, 7);
            add(b, ml_broadcast(b->g, x, &wider));
        }
    }
}

static void add_reduce(builder *b) {
    ml_ref x = any(b);
    const ml_type *type = ml_graph_type(b->g, x);
    if (type->rank == 0) return;
    ml_axis axes[ML_MAX_AXES];
    int count = 0;
    double scale = 1;
    for (int i = 0; i < type->rank; i++) {
        if (pick(b, 0, 1) && count > 0) continue;
        if (pick(b, 0, 1)) continue;
        axes[count++] = type->axis[i];
        scale /= (double)type->size[i];
    }
    if (count == 0) return;
    ml_op op = (ml_op[]){ML_OP_SUM, ML_OP_SUM, ML_OP_MAX, ML_OP_MIN}[pick(b, 0, 3)];
    ml_ref y = ml_reduce(b->g, op, x, axes, count);
    if (op == ML_OP_SUM) y = ml_map2(b->g, ML_OP_MUL, y, ml_const(b->g, b->dtype, scale * 4));
    add(b, y);
}

static void add_softmax(builder *b) {
    ml_ref x = any(b);
    ml_axis axis = any_axis(b, x);
    if (axis == 0) return;
    ml_ref e = ml_map1(b->g, ML_OP_EXP,
                       ml_map2(b->g, ML_OP_SUB, x, ml_reduce(b->g, ML_OP_MAX, x, &axis, 1)));
    add(b, ml_map2(b->g, ML_OP_DIV, e, ml_reduce(b->g, ML_OP_SUM, e, &axis, 1)));
}

static void add_dot(builder *b) {
    ml_ref x = any(b), y = partner(b, x);
    const ml_type *a = ml_graph_type(b->g, x), *c = ml_graph_type(b->g, y);
    ml_axis axes[ML_MAX_AXES];
    int count = 0;
    double scale = 1;
    for (int i = 0; i < a->rank; i++) {
        if (ml_type_find(c, a->axis[i]) < 0 || pick(b, 0, 2) == 0) continue;
        scale /= (double)a->size[i];
        axes[count++] = a->axis[i];
    }
    if (count == 0) return;
    /* the other axes of y under new names: a matrix product */
    for (int i = 0; i < a->rank; i++) {
        bool reduced = false;
        for (int k = 0; k < count; k++) reduced = reduced || axes[k] == a->axis[i];
        if (reduced || ml_type_find(ml_graph_type(b->g, y), a->axis[i]) < 0 || pick(b, 0, 1))
            continue;
        y = ml_rename(b->g, y, a->axis[i], ml_axis_fresh(b->g, "n"));
    }
    ml_type probe = *ml_graph_type(b->g, y);
    int64_t elements = ml_type_elements(ml_graph_type(b->g, x));
    for (int i = 0; i < probe.rank; i++)
        if (ml_type_find(a, probe.axis[i]) < 0) elements *= probe.size[i];
    if (elements > 40 * MOST_ELEMENTS || a->rank + probe.rank > 8) return;
    ml_ref z = ml_dot(b->g, x, y, axes, count, b->dtype);
    add(b, ml_map2(b->g, ML_OP_MUL, z, ml_const(b->g, b->dtype, scale * 2)));
}

static void add_gather(builder *b) {
    ml_ref x = any(b);
    ml_axis axis = any_axis(b, x);
    if (axis == 0) return;
    char axes[32];
    snprintf(axes, sizeof axes, "q%d", (int)pick(b, 1, 9));
    ml_ref index = ops_index(b->c, axes, size_of(b, x, axis));
    index = ml_rename(b->g, index, ops_axis(b->c, "q"), ml_axis_fresh(b->g, "q"));
    ml_ref y = ml_gather(b->g, x, index, axis);
    add(b, y);
    if (pick(b, 0, 1))
        add(b, bounded(b, ml_scatter_add(b->g, index, y, axis, ml_graph_type(b->g, x))));
}

static void add_other(builder *b) {
    ml_ref x = any(b);
    const ml_type *type = ml_graph_type(b->g, x);
    ml_axis axis = any_axis(b, x);
    if (axis == 0) return;
    if (pick(b, 0, 2) == 0) {
        ml_ref key = ml_const_int(b->g, ML_I64, pick(b, 1, 1000));
        ml_type random = *type;
        random.dtype = (uint8_t)b->dtype;
        ml_ref r = ml_graph_add(b->g, ML_OP_RANDOM, &key, 1, NULL, 0, &random);
        add(b, ml_map2(b->g, ML_OP_MUL, x, r));
    } else if (pick(b, 0, 1)) {
        ml_ref i = ml_iota(b->g, axis, size_of(b, x, axis));
        ml_ref low = ml_map2(b->g, ML_OP_LT, i, ml_const_int(b->g, ML_I32, pick(b, 0, 6)));
        add(b, ml_where(b->g, ml_broadcast(b->g, low, type), x, ml_map1(b->g, ML_OP_NEG, x)));
    } else {
        int64_t args[2] = {axis, pick(b, 0, 1)};
        add(b, bounded(b, ml_graph_add(b->g, ML_OP_CUMSUM, &x, 1, args, 2, NULL)));
    }
}

static ml_dtype current_dtype;
static uint64_t current_seed;

static void build_random(ops_case *c) {
    builder b = {.c = c, .g = c->g, .random = current_seed * 77 + 5, .dtype = current_dtype};
    static const char *const shapes[] = {"b6 s40 e24",   "e24", "b6 s40", "s40 e24",
                                         "b6 s40 h4 d6", "",    "s40",    "e24 f30"};
    for (int i = 0; i < 8; i++) add(&b, ops_input(c, b.dtype, shapes[i], -1, 1));
    for (int step = 0; step < STEPS; step++) {
        switch (pick(&b, 0, 12)) {
        case 0:
        case 1:
        case 2: add_move(&b); break;
        case 3:
        case 4: add_reduce(&b); break;
        case 5: add_softmax(&b); break;
        case 6: add_dot(&b); break;
        case 7: add_gather(&b); break;
        case 8: add_other(&b); break;
        default: add_map(&b);
        }
    }
    double tolerance = b.dtype == ML_F64 ? 1e-9 : 2e-4;
    for (int i = 8; i < b.count; i++)
        if (i + 4 >= b.count || pick(&b, 0, 2) == 0)
            ops_output(c, b.pool[i], tolerance, "node %d of graph %d", i, (int)current_seed);
}

OPS_TEST(random_graphs) {
    int first = 1, count = 10;
    const char *wanted = getenv("MLUA_RANDOM_GRAPHS");
    if (wanted != NULL) sscanf(wanted, "%d:%d", &first, &count);
    for (int i = first; i < first + count; i++) {
        current_dtype = i % 3 ? ML_F32 : ML_F64;
        current_seed = (uint64_t)i;
        ops_run(build_random, current_seed, 0);
    }
}

/* For every target: no compilation, so many graphs are cheap. */
typedef struct {
    ops_case c;
    ml_graph *simple;
    ml_target target;
} planned;

static void plan_random(void *context) {
    planned *p = context;
    p->c.g = ml_graph_new();
    build_random(&p->c);
    ml_roots roots = {.outputs = p->c.outputs, .output_count = p->c.output_count};
    p->simple = ml_simplify(p->c.g, &roots);
    ml_lower_verify(ml_lower(p->simple, &roots, &p->target, p->c.arena));
}

TEST(lower, random_invariants) {
    static const ml_target targets[] = {
        {.kind = ML_TARGET_C, .threads = 2, .vector_bytes = 32},
        {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132},
        {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132, .no_fuse = true}};
    static const ml_dtype dtypes[] = {ML_F32, ML_BF16, ML_F64};
    for (int i = 0; i < 150; i++) {
        current_seed = 1000 + (uint64_t)i / 3;
        current_dtype = dtypes[i / 3 % 3];
        planned p = {.target = targets[i % 3]};
        p.c.random = current_seed;
        p.c.arena = ml_arena_new();
        EXPECT(ml_protect(plan_random, &p) == ML_OK, "graph %d, target %d: %s", (int)current_seed,
               i % 3, ml_error_last()->text);
        if (p.simple != NULL) ml_graph_free(p.simple);
        if (p.c.g != NULL) ml_graph_free(p.c.g);
        ml_arena_free(p.c.arena);
    }
}
