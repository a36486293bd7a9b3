/* ZeRO-1 over ranks that divide no axis of a state: drawn updates under layouts that fill parts up.
 * Logarithms and reciprocals of states are infinite or NaN in the filling, and none of it may reach
 * what counts. */
#include <stdio.h>

#include "tests/shard/support.h"

enum { ROOM = 64, STATES = 6, OUTPUTS = 5 };

typedef struct {
    fixture *f;
    ml_ref nodes[ROOM];
    int count;
} pool;

static void add(pool *p, ml_ref n) {
    p->nodes[p->count++] = n;
}

static ml_ref pick(pool *p) {
    return p->nodes[fixture_below(p->f, p->count)];
}

/* Something from the pool with the axes of `as`: others are reduced, missing ones repeated. */
static ml_ref shaped(pool *p, const ml_type *as) {
    ml_graph *g = p->f->g;
    ml_ref x = pick(p);
    const ml_type type = *ml_graph_type(g, x);
    for (int i = 0; i < type.rank; i++) {
        ml_op op = fixture_below(p->f, 3) ? ML_OP_SUM : ML_OP_MAX;
        if (ml_type_find(as, type.axis[i]) < 0) x = ml_reduce(g, op, x, &type.axis[i], 1);
    }
    return ml_broadcast(g, x, as);
}

static ml_ref draw_map(pool *p, ml_ref x, const ml_type *type) {
    static const ml_op two[] = {ML_OP_ADD, ML_OP_SUB, ML_OP_MUL, ML_OP_MAXIMUM};
    ml_graph *g = p->f->g;
    if (fixture_below(p->f, 4) == 0) return ml_map1(g, ML_OP_SIN, x);
    return ml_map2(g, two[fixture_below(p->f, 4)], x, shaped(p, type));
}

static ml_ref draw_reduction(pool *p, ml_ref x, const ml_type *type, ml_axis axis) {
    ml_graph *g = p->f->g;
    switch (fixture_below(p->f, 6)) {
    case 0: return ml_reduce(g, ML_OP_SUM, x, type->axis, type->rank);
    case 1: return ml_reduce(g, ML_OP_MAX, x, &axis, 1);
    case 2: return ml_reduce(g, ML_OP_MIN, x, type->axis, type->rank);
    case 3: return ml_dot(g, x, shaped(p, type), &axis, 1, ML_F64);
    default: return ml_reduce(g, ML_OP_SUM, x, &axis, 1);
    }
}

static ml_ref draw_move(pool *p, ml_ref x, ml_axis axis, int64_t size) {
    ml_graph *g = p->f->g;
    int64_t args[] = {axis, fixture_below(p->f, 2)}, at = fixture_below(p->f, size);
    ml_axis turned = fixture_axis(p->f, "turned");
    ml_ref first = ml_slice(g, x, axis, 0, at + 1);
    switch (fixture_below(p->f, 5)) {
    case 0: return ml_pad(g, first, axis, 0, size - at - 1);
    case 1: return ml_graph_add(g, ML_OP_CUMSUM, &x, 1, args, 2, NULL);
    case 2: return ml_graph_add(g, ML_OP_SORT, &x, 1, args, 2, NULL);
    case 3:
        if (at + 1 == size) return x;
        return ml_concat(g, (ml_ref[]){ml_slice(g, x, axis, at + 1, size), first}, 2, axis);
    default: {
        ml_ref last = ml_const_int(g, ML_I32, size - 1);
        ml_ref index = ml_map2(g, ML_OP_SUB, last, ml_iota(g, turned, size));
        return ml_rename(g, ml_gather(g, x, index, axis), turned, axis);
    }
    }
}

static ml_ref draw(pool *p) {
    ml_ref x = pick(p);
    const ml_type type = *ml_graph_type(p->f->g, x);
    int64_t at = type.rank ? fixture_below(p->f, type.rank) : 0, kind = fixture_below(p->f, 4);
    if (type.rank && kind == 0) return draw_move(p, x, type.axis[at], type.size[at]);
    if (type.rank && kind == 1) return draw_reduction(p, x, &type, type.axis[at]);
    return draw_map(p, x, &type);
}

/* A parameter, and an optimizer's values of its shape, of more axes, of fewer and of none. */
static void add_states(pool *p, ml_ref *states, const int64_t *sizes) {
    static const char *const axes[STATES] = {"ab", "ab", "bca", "a", "b", ""};
    for (int i = 0; i < STATES; i++) {
        ml_type type = {.dtype = ML_F64};
        for (const char *name = axes[i]; *name; name++) {
            type.axis[type.rank] = fixture_axis(p->f, (char[]){*name, 0});
            type.size[type.rank++] = sizes[*name - 'a'];
        }
        states[i] = fixture_add_state(p->f, &type);
        ml_graph_state(p->f->g, (uint32_t)i)->kind = i ? ML_STATE_OPTIMIZER : ML_STATE_PARAMETER;
        for (int64_t k = 0; k < ml_type_elements(&type); k++)
            p->f->states[i][k] = fixture_uniform(p->f, 0.5, 2);
        add(p, states[i]);
        add(p, ml_map1(p->f->g, ML_OP_LOG, states[i]));
        add(p, ml_map2(p->f->g, ML_OP_DIV, ml_const(p->f->g, ML_F64, 1), states[i]));
    }
}

/* The sum over the batch of something that ranks have parts of. */
static ml_ref gradient(pool *p, ml_ref weight, const int64_t *sizes) {
    ml_graph *g = p->f->g;
    char axes[64];
    snprintf(axes, sizeof axes, "n60 a%lld b%lld", (long long)sizes[0], (long long)sizes[1]);
    ml_ref x = fixture_input(p->f, ML_F64, axes, -2, 2);
    ml_axis batch = fixture_axis(p->f, "n");
    ml_ref sum = ml_reduce(g, ML_OP_SUM, ml_map2(g, ML_OP_MUL, x, weight), &batch, 1);
    ml_graph_mark(g, sum, ML_NODE_GRADIENT);
    return sum;
}

static void drawn(fixture *f) {
    static const char *const layouts[] = {
        "x3 acts n flat",
        "x5 acts n flat keep",
        "x6 flat",
        "x2 acts n flat; y3 acts n flat",
        "x3 acts n flat; y2 params a acts a",
        "y2 params b acts b; x4 acts n flat",
        "x4 flat acts n; y3 params a",
    };
    pool p = {.f = f};
    ml_ref states[STATES];
    uint64_t seed = f->random / 2;
    const char *text = layouts[seed % (sizeof layouts / sizeof *layouts)];
    int64_t sizes[3];
    for (int i = 0; i < 3; i++) sizes[i] = 1 + fixture_below(f, 11);
    for (int i = 0; i < 2; i++) sizes[i] *= seed % 7 > 3 ? 6 : 1; /* what `params` lists divides */
    add_states(&p, states, sizes);
    add(&p, gradient(&p, states[0], sizes));
    for (int64_t left = 4 + fixture_below(f, 20); left > 0; left--) {
        ml_ref n = draw(&p);
        add(&p, left % 3 ? n : ml_map1(f->g, ML_OP_TANH, n));
    }
    ml_roots roots = {.outputs = &p.nodes[p.count - OUTPUTS], .output_count = OUTPUTS};
    roots.updates = ML_NEW_ARRAY(f->arena, ml_update, STATES);
    for (int i = 0; i < STATES; i++)
        roots.updates[roots.update_count++] =
            (ml_update){(uint32_t)i, shaped(&p, ml_graph_type(f->g, states[i]))};
    snprintf(f->label, sizeof f->label, "drawn updates %llu", (unsigned long long)seed);
    ml_layout layout = shard_layout(f, text);
    (void)shard_check(f, &layout, &roots, 1e-9, true);
}

TEST(shard_uneven, drawn) {
    for (uint64_t seed = 1; seed <= 700; seed++) fixture_run(drawn, seed);
}
