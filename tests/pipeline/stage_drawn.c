/* Pipeline stages of programs drawn at random: whatever the graph, the cut gives what the whole
 * gives, and programs may share states of all kinds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/pipeline/support.h"

enum { DRAWN = 40, DRAWN_STATES = 8 };
typedef struct {
    fixture *f;
    ml_graph *g;
    ml_roots roots;
    ml_ref at[DRAWN]; /* numbers, vectors and matrices over a2 and b3 */
    int count;
    ml_ref states[DRAWN_STATES];
    ml_ref tests[3]; /* inputs alone make these */
} drawing;

static ml_ref number(drawing *d, double value) {
    return ml_const(d->g, ML_F64, value);
}
static ml_ref sum_all(drawing *d, ml_ref x) {
    ml_type type = *ml_graph_type(d->g, x);
    return type.rank ? ml_reduce(d->g, ML_OP_SUM, x, type.axis, type.rank) : x;
}
static void in_module(drawing *d, const char *path) {
    ml_graph_set_origin(d->g, &(ml_origin){"drawn.lua", 1, path, NULL});
}
static void output(drawing *d, ml_ref value) {
    d->roots.outputs[d->roots.output_count++] = value;
}
static void update(drawing *d, ml_ref old, ml_ref value) {
    d->roots.updates[d->roots.update_count++] =
        (ml_update){(uint32_t)ml_graph_args(d->g, old)[0], value};
}

static ml_ref draw_any(drawing *d) {
    return d->at[fixture_below(d->f, d->count)];
}
static bool fits(const ml_graph *g, ml_ref a, ml_ref b) {
    const ml_type *x = ml_graph_type(g, a), *y = ml_graph_type(g, b);
    if (x->rank < y->rank) return fits(g, b, a);
    for (int i = 0; i < y->rank; i++)
        if (ml_type_find(x, y->axis[i]) < 0) return false;
    return true;
}

static ml_ref draw_node(drawing *d) {
    ml_graph *g = d->g;
    ml_ref a = draw_any(d), b = draw_any(d);
    const ml_type *type = ml_graph_type(g, a);
    static const ml_op pairs[] = {ML_OP_ADD, ML_OP_ADD, ML_OP_ADD, ML_OP_SUB, ML_OP_MUL};
    switch (fixture_below(d->f, 8)) {
    case 0: return ml_map1(g, fixture_below(d->f, 2) ? ML_OP_TANH : ML_OP_NEG, a);
    case 1:
        return type->rank ? ml_reduce(g, ML_OP_SUM, a, &(ml_axis){type->axis[0]}, 1)
                          : ml_map1(g, ML_OP_SIGMOID, a);
    case 2: {
        ml_type whole = fixture_type(d->f, ML_F64, "a2 b3");
        return ml_broadcast(g, a, &whole);
    }
    case 3: {
        ml_ref test = d->tests[fixture_below(d->f, 3)];
        return ml_where(g, test, a, fixture_below(d->f, 2) && fits(g, a, b) ? b : number(d, 0));
    }
    case 4: {
        if (!type->rank) return ml_map2(d->g, ML_OP_MUL, a, number(d, 0.5));
        ml_axis axis = type->axis[0];
        int64_t args[] = {axis, 1, ml_axis_fresh(g, "k")};
        ml_ref best = ml_graph_add(g, ML_OP_TOP_K, &a, 1, args, 3, NULL);
        ml_ref index = ml_rename(g, ml_out(g, best, 1), (ml_axis)args[2], axis);
        return ml_reduce(g, ML_OP_SUM, ml_gather(g, a, index, axis), &axis, 1);
    }
    default:
        if (!fits(g, a, b)) b = ml_const(g, ML_F64, 0.7);
        return ml_map2(d->g, pairs[fixture_below(d->f, 5)], a, b);
    }
}

static void draw_origin(drawing *d) {
    char path[32] = "";
    int64_t layer = fixture_below(d->f, 7);
    if (layer < 5) snprintf(path, sizeof path, "blocks.%d.part", (int)layer + 1);
    in_module(d, ml_arena_copy(d->f->arena, path, strlen(path)));
}

static void draw_body(drawing *d) {
    static const char *const axes[] = {"", "a2", "b3", "a2 b3"};
    d->count = 0;
    for (int i = 0; i < DRAWN_STATES; i++) d->at[d->count++] = d->states[i];
    d->at[d->count++] = fixture_input(d->f, ML_F64, axes[fixture_below(d->f, 4)], -1, 1);
    while (d->count < DRAWN) {
        draw_origin(d);
        ml_ref made = draw_node(d);
        d->at[d->count++] = made;
    }
}

/* Sums of gradients, new values of other states, a few outputs: any of what was drawn. */
static void draw_roots(drawing *d, const char *name) {
    d->roots = (ml_roots){.name = name,
                          .outputs = ML_NEW_ARRAY(d->f->arena, ml_ref, 4),
                          .updates = ML_NEW_ARRAY(d->f->arena, ml_update, DRAWN_STATES)};
    ml_ref loss = draw_any(d), gradients[DRAWN_STATES];
    loss = sum_all(d, ml_map2(d->g, ML_OP_MUL, loss, loss));
    in_module(d, "");
    ml_autodiff(d->g, loss, d->states, DRAWN_STATES, gradients);
    for (int i = 0; i < DRAWN_STATES; i++) {
        const ml_type *type = ml_graph_type(d->g, d->states[i]);
        ml_ref value = draw_any(d);
        if (i < 4 && gradients[i]) value = gradients[i];
        if (!fits(d->g, value, d->states[i]) || ml_graph_type(d->g, value)->rank > type->rank)
            value = number(d, 0.3);
        uint32_t id = (uint32_t)ml_graph_args(d->g, d->states[i])[0];
        if (ml_graph_state(d->g, id)->kind == ML_STATE_GRADIENT || fixture_below(d->f, 2))
            value = ml_map2(d->g, ML_OP_ADD,
                            ml_where(d->g, d->tests[0], number(d, 0), d->states[i]), value);
        if (ml_graph_type(d->g, value)->rank < type->rank) value = ml_broadcast(d->g, value, type);
        if (fixture_below(d->f, 4)) update(d, d->states[i], ml_permute(d->g, value, type));
    }
    output(d, loss);
    for (int i = 0; i < 3; i++) output(d, draw_any(d));
}

static int drawn_transfers;

/* Three programs that share states of all kinds, over graphs that look like no model. */
static void draw_programs(fixture *f) {
    static const char *const axes[] = {"", "a2", "b3", "a2 b3"};
    static const ml_state_kind kinds[] = {ML_STATE_GRADIENT, ML_STATE_PARAMETER, ML_STATE_PARAMETER,
                                          ML_STATE_OTHER};
    drawing d = {.f = f, .g = f->g};
    for (int i = 0; i < DRAWN_STATES; i++) {
        ml_type type = fixture_type(f, ML_F64, axes[fixture_below(f, 4)]);
        const char *name = fixture_below(f, 2)
                               ? ml_arena_format(f->arena, "w%d", i)
                               : ml_arena_format(f->arena, "blocks.%d.w%d", 1 + i % 5, i);
        d.states[i] = stage_state(f, name, kinds[fixture_below(f, 4)], &type);
    }
    ml_ref flag = fixture_input(f, ML_F64, "", -1, 1);
    for (int i = 0; i < 3; i++)
        d.tests[i] = ml_map2(f->g, ML_OP_LT, flag, ml_const(f->g, ML_F64, i - 0.5));
    stage_pipeline p = stage_pipeline_of(f, 1 + (int)fixture_below(f, 4), 1);
    ml_type type = fixture_type(f, ML_F64, "a2");
    ml_ref last = stage_state(f, "blocks.5.last", ML_STATE_PARAMETER, &type); /* five layers */
    ml_stage_assign_state(f->g, &p.layout, &p.map, (uint32_t)ml_graph_args(f->g, last)[0]);
    for (int i = 0; i < 3; i++) {
        draw_body(&d);
        draw_roots(&d, "drawn");
        stage_run(&p, &d.roots);
        drawn_transfers += p.last.transfer_count;
    }
}
TEST(pipeline_stage, drawn) {
    int tries = test_all() ? 2000 : 60;
    for (int i = 0; i < tries; i++) fixture_run(draw_programs, 100 + (uint64_t)i);
    CHECK(drawn_transfers > 10 * tries);
}
