/* Passes over random graphs: every pass leaves all values as they are, gradients included. */
#include <math.h>
#include <stdio.h>

#include "tests/passes/support.h"

#define AXIS(name) fixture_axis(f, name)
#define MAP2(op, a, b) ml_map2(f->g, ML_OP_##op, a, b)
#define MAP1(op, a) ml_map1(f->g, ML_OP_##op, a)
#define NUM(v) ml_const(f->g, drawn, v)

static ml_dtype drawn = ML_F64; /* of random graphs */

/* ---- Random graphs -----------------------------------------------------------------------------
 */

enum { POOL = 64, NODES_MADE = 40 };
typedef struct {
    fixture *f;
    ml_ref nodes[POOL];
    int count;
} pool;

static ml_ref pick(pool *p) {
    return p->nodes[fixture_below(p->f, p->count)];
}

/* A tensor from the pool with the axes of `as`, by whatever it takes. */
static ml_ref shaped(pool *p, const ml_type *as) {
    fixture *f = p->f;
    ml_ref x = pick(p);
    ml_type type = *ml_graph_type(f->g, x);
    for (int i = 0; i < type.rank; i++) {
        int at = ml_type_find(as, type.axis[i]);
        if (at < 0 || as->size[at] != type.size[i])
            x = ml_reduce(f->g, ML_OP_SUM, x, &type.axis[i], 1);
    }
    if (fixture_below(f, 2)) return x; /* fewer axes broadcast by themselves */
    return ml_broadcast(f->g, x, as);
}

static ml_ref random_map(pool *p) {
    static const ml_op unary[] = {ML_OP_NEG, ML_OP_SIN, ML_OP_TANH, ML_OP_SIGMOID, ML_OP_ABS};
    static const ml_op binary[] = {ML_OP_ADD, ML_OP_SUB, ML_OP_MUL, ML_OP_MAXIMUM, ML_OP_ADD};
    static const double numbers[] = {0, 1, -1, 2, 0.5, 3};
    fixture *f = p->f;
    ml_ref x = pick(p);
    ml_type type = *ml_graph_type(f->g, x);
    switch (fixture_below(f, 5)) {
    case 0: return ml_graph_add(f->g, unary[fixture_below(f, 5)], &x, 1, NULL, 0, NULL);
    case 1: {
        ml_ref operands[2] = {x, NUM(numbers[fixture_below(f, 6)])};
        ml_op op = fixture_below(f, 4) ? binary[fixture_below(f, 4)] : ML_OP_POW;
        if (op == ML_OP_POW) operands[0] = MAP2(ADD, MAP1(ABS, x), NUM(0.5));
        if (op != ML_OP_POW && fixture_below(f, 3) == 0)
            operands[1] = ml_broadcast(f->g, operands[1], &type);
        return ml_graph_add(f->g, op, operands, 2, NULL, 0, NULL);
    }
    case 2: {
        ml_ref test = MAP2(GT, shaped(p, &type), NUM(0));
        return ml_graph_add(f->g, ML_OP_WHERE, (ml_ref[]){test, x, shaped(p, &type)}, 3, NULL, 0,
                            NULL);
    }
    default: {
        ml_ref operands[2] = {x, shaped(p, &type)};
        bool swapped = fixture_below(f, 2);
        return ml_graph_add(f->g, binary[fixture_below(f, 5)],
                            (ml_ref[]){operands[swapped], operands[!swapped]}, 2, NULL, 0, NULL);
    }
    }
}

static ml_ref random_move(pool *p) {
    fixture *f = p->f;
    ml_ref x = pick(p);
    ml_type type = *ml_graph_type(f->g, x);
    if (!type.rank) return x;
    int at = (int)fixture_below(f, type.rank);
    ml_axis axis = type.axis[at];
    int64_t size = type.size[at];
    switch (fixture_below(f, 8)) {
    case 0: {
        int64_t start = fixture_below(f, size), stop = start + 1 + fixture_below(f, size - start);
        return ml_slice(f->g, x, axis, start, stop);
    }
    case 1: return size < 8 ? ml_pad(f->g, x, axis, fixture_below(f, 3), fixture_below(f, 3)) : x;
    case 2: {
        ml_type to = type;
        int other = (int)fixture_below(f, type.rank);
        to.axis[at] = type.axis[other], to.size[at] = type.size[other];
        to.axis[other] = axis, to.size[other] = size;
        return ml_graph_add(f->g, ML_OP_PERMUTE, &x, 1, NULL, 0, &to);
    }
    case 3:
        if (size % 2 || ml_type_find(&type, AXIS("z")) >= 0 || type.rank > 3) return x;
        return ml_split(f->g, x, axis, AXIS("z"), size / 2, axis, 2);
    case 4: {
        int other = (int)fixture_below(f, type.rank);
        if (other == at || size * type.size[other] > 16) return x;
        return ml_merge(f->g, x, axis, type.axis[other], axis);
    }
    case 5:
        if (size > 6) return x;
        return ml_concat(f->g, (ml_ref[]){x, ml_slice(f->g, x, axis, 0, 1), x}, 3, axis);
    case 6: {
        int64_t half = size / 2;
        if (!half) return x;
        return MAP2(ADD, ml_pad(f->g, ml_slice(f->g, x, axis, 0, half), axis, 0, size - half),
                    ml_pad(f->g, ml_slice(f->g, x, axis, half, size), axis, half, 0));
    }
    default:
        if (ml_type_find(&type, AXIS("y")) >= 0) return ml_rename(f->g, x, AXIS("y"), AXIS("w"));
        return ml_type_find(&type, AXIS("w")) >= 0 ? x : ml_rename(f->g, x, axis, AXIS("y"));
    }
}

static ml_ref random_reduce(pool *p) {
    fixture *f = p->f;
    ml_ref x = pick(p);
    ml_type type = *ml_graph_type(f->g, x);
    if (!type.rank) return x;
    ml_axis axis = type.axis[fixture_below(f, type.rank)];
    switch (fixture_below(f, 4)) {
    case 0: return ml_reduce(f->g, ML_OP_MAX, x, &axis, 1);
    case 1: {
        ml_ref mean = ml_reduce(f->g, ML_OP_SUM, x, &axis, 1);
        return MAP2(SUB, x, ml_broadcast(f->g, mean, &type));
    }
    case 2: {
        ml_ref y = shaped(p, &type);
        if (ml_type_find(ml_graph_type(f->g, y), axis) < 0) return x;
        return ml_dot(f->g, x, y, &axis, 1, drawn);
    }
    default: return ml_reduce(f->g, ML_OP_SUM, x, type.axis, type.rank);
    }
}

static void draw_graph(pool *p) {
    fixture *f = p->f;
    p->nodes[p->count++] = fixture_input(f, drawn, "b2 s4 d3", -2, 2);
    p->nodes[p->count++] = fixture_input(f, drawn, "d3 s4", -2, 2);
    p->nodes[p->count++] = fixture_input(f, drawn, "s4", -2, 2);
    p->nodes[p->count++] = fixture_input(f, drawn, "", -2, 2);
    for (int i = 0; i < NODES_MADE; i++) {
        int64_t kind = fixture_below(f, 8);
        ml_ref n = kind < 4 ? random_map(p) : kind < 7 ? random_move(p) : random_reduce(p);
        if (ml_type_elements(ml_graph_type(f->g, n)) <= 400) p->nodes[p->count++] = n;
        /* keep values near 1, so that differences mean something */
        ml_ref *last = &p->nodes[p->count - 1];
        if (i % 4 == 3) *last = MAP1(TANH, *last);
    }
}

static void check_random(fixture *f) {
    pool p = {.f = f};
    uint64_t seed = f->random / 2;
    draw_graph(&p);
    snprintf(f->label, sizeof f->label, "random graph %llu", (unsigned long long)seed);
    fixture_check_passes(f, p.nodes, p.count, 1e-9);
    ml_ref loss = 0, gradients[4], roots[4];
    for (int i = p.count - 6; i < p.count; i++) {
        ml_ref part = fixture_loss(f, MAP1(TANH, p.nodes[i]));
        loss = loss ? MAP2(ADD, loss, part) : part;
    }
    ml_autodiff(f->g, loss, p.nodes, 4, gradients);
    int count = 0;
    for (int i = 0; i < 4; i++)
        if (gradients[i]) roots[count++] = gradients[i];
    fixture_check_passes(f, roots, count, 1e-9);
}

TEST(passes, random_graphs) {
    for (uint64_t seed = 0; seed < 150; seed++) fixture_run(check_random, 1000 + seed);
}

/* Values whose every step is rounded lie within the bounds of those that are not, and the bounds
 * mean something: most are small. */
typedef struct {
    int64_t elements, loose;
} tally;
static tally tallied;

static void check_bounds(fixture *f) {
    pool p = {.f = f};
    bool unrounded[SUPPORT_INPUTS] = {false};
    uint64_t seed = f->random / 2;
    draw_graph(&p);
    for (int i = 0; i < f->input_count; i++)
        for (int64_t k = 0; k < ml_type_elements(ml_graph_type(f->g, p.nodes[i])); k++)
            f->inputs[i][k] = round(f->inputs[i][k] * 64) / 64;
    const double *const *inputs = (const double *const *)f->inputs;
    for (int i = 4; i < p.count; i++) {
        double *exact, *rounded, *bounds;
        ml_reference(f->g, NULL, inputs, &p.nodes[i], 1, &exact, false, f->arena);
        ml_reference(f->g, NULL, inputs, &p.nodes[i], 1, &rounded, true, f->arena);
        ml_reference_bounds(f->g, inputs, unrounded, p.nodes[i], &bounds, f->arena);
        for (int64_t k = 0; k < ml_type_elements(ml_graph_type(f->g, p.nodes[i])); k++) {
            double off = fabs(rounded[k] - exact[k]);
            EXPECT(off <= bounds[k],
                   "graph %llu: element %lld of %s is %.9g, rounded %.9g, and its bound %.3g",
                   (unsigned long long)seed, (long long)k, fixture_type_text(f, f->g, p.nodes[i]),
                   exact[k], rounded[k], bounds[k]);
            tallied.elements++;
            double unit = drawn == ML_F32 ? 6e-8 : 4e-3;
            tallied.loose += !(bounds[k] <= 1e3 * unit * fmax(fabs(exact[k]), 1));
        }
    }
}

TEST(passes, bounds_of_roundings) {
    static const ml_dtype dtypes[] = {ML_F32, ML_BF16};
    for (int d = 0; d < 2; d++) {
        drawn = dtypes[d];
        tallied = (tally){0};
        for (uint64_t seed = 0; seed < 40; seed++) fixture_run(check_bounds, 9000 + seed);
        if (d == 0) CHECK(tallied.loose * 10 < tallied.elements);
    }
    drawn = ML_F64;
}

/* ---- Random networks of products
 * ----------------------------------------------------------------- */

enum { MOST_WEIGHTS = 24 };
typedef struct {
    fixture *f;
    ml_ref weights[MOST_WEIGHTS];
    int count;
} network;

/* A new weight, or now and then one that was used before. */
static ml_ref network_weight(network *w, const char *axes) {
    fixture *f = w->f;
    ml_type type = fixture_type(f, ML_F64, axes);
    for (int i = 0; i < w->count && fixture_below(f, 3) == 0; i++)
        if (ml_type_same_axes(&type, ml_graph_type(f->g, w->weights[i]))) return w->weights[i];
    return w->weights[w->count++] = fixture_state(f, ML_F64, axes);
}

/* h -> several projections of it, combined, and back to embed. */
static ml_ref network_layer(network *w, ml_ref h) {
    static const char *const axes[] = {"heads2 dim2", "ffn4", "dim2 heads2"};
    fixture *f = w->f;
    ml_axis embed = AXIS("embed");
    int64_t kind = fixture_below(f, 3), projections = 1 + fixture_below(f, 3);
    char up[32], down[32];
    snprintf(up, sizeof up, "embed3 %s", axes[kind]);
    snprintf(down, sizeof down, "%s embed3", axes[kind]);
    bool biased = fixture_below(f, 2);
    ml_ref mixed = 0;
    for (int64_t i = 0; i < projections; i++) {
        ml_ref x = ml_dot(f->g, h, network_weight(w, up), &embed, 1, ML_F64);
        if (biased) x = MAP2(ADD, x, network_weight(w, axes[kind]));
        x = fixture_below(f, 2) ? MAP1(TANH, x) : x;
        mixed = mixed ? MAP2(MUL, mixed, x) : x;
    }
    ml_type over = fixture_type(f, ML_F64, axes[kind]);
    return ml_dot(f->g, mixed, network_weight(w, down), over.axis, over.rank, ML_F64);
}

static void check_network(fixture *f) {
    network w = {.f = f};
    snprintf(f->label, sizeof f->label, "network %llu", (unsigned long long)(f->random / 2));
    ml_ref layers[4] = {fixture_input(f, ML_F64, "b2 s3 embed3", -1, 1)};
    for (int i = 1; i < 4; i++) {
        ml_ref h = layers[fixture_below(f, i)];
        ml_ref y = network_layer(&w, fixture_below(f, 2) ? MAP1(SIN, h) : h);
        layers[i] = fixture_below(f, 4) ? MAP2(ADD, layers[i - 1], y) : y;
    }
    ml_ref roots[MOST_WEIGHTS + 1] = {fixture_loss(f, layers[3])};
    ml_ref gradients[MOST_WEIGHTS];
    ml_autodiff(f->g, roots[0], w.weights, w.count, gradients);
    int count = 1;
    for (int i = 0; i < w.count; i++)
        if (gradients[i]) roots[count++] = gradients[i];
    fixture_check_passes(f, roots, count, 1e-9);
}

TEST(passes, random_networks) {
    for (uint64_t seed = 0; seed < 60; seed++) fixture_run(check_network, 5000 + seed);
}
