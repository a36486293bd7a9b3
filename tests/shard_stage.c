/* Programs cut into pipeline stages: stage by stage and level by level, with what they send passed
 * by hand, they give what the whole program gives; and what they send is what it should be. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "runtime/shard/stage.h"
#include "tests/shard_support.h"

/* ---- A model --------------------------------------------------------------------------------- */

typedef struct {
    int layers;
    bool tied, shared, outer, auxiliary; /* embeddings; a gain of all layers; residual sums outside
                                            of layers; a loss of each layer */
    ml_dtype dtype;
    int width;
} shape;

typedef struct {
    fixture *f;
    ml_graph *g;
    shape shape;
    ml_ref *parameters, shared, loss, auxiliary;
    int count;
    ml_roots roots;
} model;

static void in_module(model *m, const char *path) {
    ml_graph_set_origin(m->g, &(ml_origin){"model.lua", 1, path, NULL});
}

static ml_ref state(model *m, const char *name, ml_state_kind kind, const ml_type *type) {
    ml_state made = {.name = name, .kind = kind, .type = *type};
    int64_t id = ml_graph_add_state(m->g, &made), count = ml_type_elements(type);
    REQUIRE(id < SUPPORT_INPUTS || m->shape.width > 100);
    if (id < SUPPORT_INPUTS) {
        double *values = ML_NEW_ARRAY(m->f->arena, double, count);
        for (int64_t i = 0; i < count; i++)
            values[i] = kind == ML_STATE_GRADIENT ? 0 : fixture_uniform(m->f, 0.1, 1);
        m->f->states[id] = values;
        m->f->state_count = (int)id + 1;
    }
    return ml_graph_add(m->g, ML_OP_STATE, NULL, 0, &id, 1, NULL);
}

static ml_ref parameter(model *m, const char *module, const char *name, const char *axes) {
    ml_type type = fixture_type(m->f, m->shape.dtype == ML_BF16 ? ML_F32 : m->shape.dtype, axes);
    for (int i = 0; i < type.rank; i++)
        if (type.size[i] == 4) type.size[i] = m->shape.width;
    const char *path = ml_arena_format(m->f->arena, "%s%s%s", module, module[0] ? "." : "", name);
    ml_ref made = state(m, path, ML_STATE_PARAMETER, &type);
    m->parameters[m->count++] = made;
    return ml_cast(m->g, made, m->shape.dtype);
}

static ml_ref map2(model *m, ml_op op, ml_ref a, ml_ref b) {
    return ml_map2(m->g, op, a, b);
}
static ml_ref number(model *m, double value) {
    return ml_const(m->g, ML_F32, value);
}
static ml_ref sum_all(model *m, ml_ref x) {
    ml_type type = *ml_graph_type(m->g, x);
    return type.rank ? ml_reduce(m->g, ML_OP_SUM, x, type.axis, type.rank) : x;
}
static ml_ref dot(model *m, ml_ref a, ml_ref b, const char *over) {
    ml_axis axis = fixture_axis(m->f, over);
    return ml_dot(m->g, a, b, &axis, 1, m->shape.dtype);
}

static ml_ref norm(model *m, ml_ref x, const char *module) {
    ml_axis embed = fixture_axis(m->f, "embed");
    ml_ref wide = ml_cast(m->g, x, m->shape.dtype == ML_BF16 ? ML_F32 : m->shape.dtype);
    ml_ref square = ml_reduce(m->g, ML_OP_SUM, map2(m, ML_OP_MUL, wide, wide), &embed, 1);
    ml_ref scale = ml_map1(m->g, ML_OP_RSQRT, map2(m, ML_OP_ADD, square, number(m, 1e-3)));
    ml_ref y = map2(m, ML_OP_MUL, map2(m, ML_OP_MUL, wide, scale), m->shared);
    (void)module;
    return ml_cast(m->g, y, m->shape.dtype);
}

static ml_ref layer(model *m, ml_ref x, const char *path) {
    ml_ref h = norm(m, x, path);
    ml_ref up = dot(m, h, parameter(m, path, "up", "embed4 ffn3"), "embed");
    up = map2(m, ML_OP_ADD, ml_map1(m->g, ML_OP_TANH, up), parameter(m, path, "bias", "ffn3"));
    ml_ref y = dot(m, up, parameter(m, path, "down", "ffn3 embed4"), "ffn");
    return m->shape.outer ? y : map2(m, ML_OP_ADD, x, y);
}

static ml_ref tokens(model *m) {
    ml_type type = fixture_type(m->f, ML_I32, "batch4 seq3");
    type.size[0] = m->shape.width;
    if (m->shape.width == 4) return fixture_index(m->f, "batch4 seq3", 5);
    int64_t id = ml_graph_add_input(m->g, &(ml_input){"tokens", type});
    return ml_graph_add(m->g, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
}

/* The loss, outside of any layer. */
static void forward(model *m) {
    in_module(m, "");
    ml_ref input = tokens(m), targets = tokens(m);
    ml_axis vocab = fixture_axis(m->f, "vocab");
    ml_ref table = parameter(m, "", "wte", "vocab5 embed4");
    ml_type gain = fixture_type(m->f, ML_F32, "embed4");
    gain.size[0] = m->shape.width;
    m->shared = m->shape.shared ? parameter(m, "", "gain", "embed4")
                                : ml_broadcast(m->g, number(m, 1), &gain);
    ml_ref x = ml_gather(m->g, table, input, vocab);
    x = map2(m, ML_OP_ADD, x, parameter(m, "", "wpe", "seq3 embed4"));
    for (int i = 0; i < m->shape.layers; i++) {
        const char *path = ml_arena_format(m->f->arena, "blocks.%d", i + 1);
        in_module(m, path);
        ml_ref y = layer(m, x, path);
        in_module(m, "");
        x = m->shape.outer ? map2(m, ML_OP_ADD, x, y) : y;
        if (!m->shape.auxiliary) continue;
        in_module(m, path);
        ml_ref z = sum_all(m, ml_cast(m->g, map2(m, ML_OP_MUL, y, y), ML_F32));
        in_module(m, "");
        z = map2(m, ML_OP_MUL, z, number(m, 0.1));
        m->auxiliary = m->auxiliary ? map2(m, ML_OP_ADD, m->auxiliary, z) : z;
    }
    in_module(m, "norm");
    x = norm(m, x, "norm");
    in_module(m, "");
    ml_ref head = m->shape.tied ? table : parameter(m, "", "head", "vocab5 embed4");
    ml_ref logits = ml_cast(m->g, dot(m, x, head, "embed"), ML_F32);
    ml_ref total = ml_map1(m->g, ML_OP_LOG,
                           ml_reduce(m->g, ML_OP_SUM, ml_map1(m->g, ML_OP_EXP, logits), &vocab, 1));
    ml_ref hit = map2(
        m, ML_OP_EQ,
        ml_broadcast(
            m->g, ml_iota(m->g, vocab, 5),
            &(ml_type){ML_I32,
                       3,
                       {ml_graph_type(m->g, logits)->axis[0], ml_graph_type(m->g, logits)->axis[1],
                        ml_graph_type(m->g, logits)->axis[2]},
                       {ml_graph_type(m->g, logits)->size[0], ml_graph_type(m->g, logits)->size[1],
                        ml_graph_type(m->g, logits)->size[2]}}),
        targets);
    ml_ref picked =
        ml_reduce(m->g, ML_OP_SUM, ml_where(m->g, hit, logits, number(m, 0)), &vocab, 1);
    m->loss = sum_all(m, map2(m, ML_OP_SUB, total, picked));
}

static void output(model *m, ml_ref value) {
    m->roots.outputs[m->roots.output_count++] = value;
}
static void update(model *m, ml_ref old, ml_ref value) {
    m->roots.updates[m->roots.update_count++] =
        (ml_update){(uint32_t)ml_graph_args(m->g, old)[0], value};
}

static ml_ref *gradients_of(model *m) {
    ml_ref *gradients = ML_NEW_ARRAY(m->f->arena, ml_ref, m->count + 1);
    ml_ref loss = m->auxiliary ? map2(m, ML_OP_ADD, m->loss, m->auxiliary) : m->loss;
    ml_autodiff(m->g, loss, m->parameters, m->count, gradients);
    in_module(m, "");
    return gradients;
}

/* Clipped to length 1, then momentum. Outputs the length. */
static void apply(model *m, const ml_ref *gradients) {
    ml_ref squares = 0;
    for (int i = 0; i < m->count; i++) {
        ml_ref square = sum_all(m, map2(m, ML_OP_MUL, gradients[i], gradients[i]));
        squares = squares ? map2(m, ML_OP_ADD, squares, square) : square;
    }
    ml_ref length = ml_map1(m->g, ML_OP_SQRT, squares);
    ml_ref scale = map2(m, ML_OP_MINIMUM, map2(m, ML_OP_DIV, number(m, 1), length), number(m, 1));
    ml_ref finite = ml_map1(m->g, ML_OP_IS_FINITE, length);
    for (int i = 0; i < m->count; i++) {
        const ml_type type = *ml_graph_type(m->g, m->parameters[i]);
        uint32_t id = (uint32_t)ml_graph_args(m->g, m->parameters[i])[0];
        const char *name = ml_graph_state(m->g, id)->name;
        ml_ref moment = state(m, ml_arena_format(m->f->arena, "%s.sgd.momentum", name),
                              ML_STATE_OPTIMIZER, &type);
        ml_ref g = ml_where(m->g, finite, map2(m, ML_OP_MUL, gradients[i], scale), number(m, 0));
        ml_ref value = map2(m, ML_OP_ADD, map2(m, ML_OP_MUL, moment, number(m, 0.9)), g);
        update(m, moment, value);
        update(m, m->parameters[i],
               map2(m, ML_OP_SUB, m->parameters[i], map2(m, ML_OP_MUL, value, number(m, 0.1))));
    }
    output(m, length);
}

static void new_roots(model *m, const char *name) {
    m->roots = (ml_roots){.name = name,
                          .outputs = ML_NEW_ARRAY(m->f->arena, ml_ref, 8),
                          .updates = ML_NEW_ARRAY(m->f->arena, ml_update, 3 * m->count + 8)};
}

static void begin_model(model *m, fixture *f, shape s) {
    *m = (model){.f = f, .g = f->g, .shape = s};
    if (!s.width) m->shape.width = 4;
    m->parameters = ML_NEW_ARRAY(f->arena, ml_ref, 4 * s.layers + 8);
    forward(m);
}

/* Loss, auxiliary loss, gradient norm, new parameters. */
static void step_program(model *m) {
    new_roots(m, "step");
    ml_ref *gradients = gradients_of(m);
    output(m, map2(m, ML_OP_DIV, m->loss, number(m, 12)));
    if (m->auxiliary) output(m, m->auxiliary);
    apply(m, gradients);
}

/* The program of one microbatch, which adds to states of gradients, or sets them where `first`. */
static void microbatch_program(model *m, ml_ref *sums) {
    new_roots(m, "microbatch");
    ml_ref *gradients = gradients_of(m);
    ml_ref first = map2(m, ML_OP_LT, fixture_input(m->f, ML_F32, "", -1, 1), number(m, -2));
    for (int i = 0; i <= m->count; i++) {
        ml_ref value = i < m->count ? gradients[i] : m->loss;
        const ml_type type = *ml_graph_type(m->g, value);
        sums[i] = state(m, ml_arena_format(m->f->arena, "sum %d", i), ML_STATE_GRADIENT, &type);
        ml_ref old = ml_where(m->g, first, number(m, 0), sums[i]);
        update(m, sums[i], map2(m, ML_OP_ADD, old, value));
    }
}

/* ---- Stages ---------------------------------------------------------------------------------- */

/* What all stages hold; NaN where they hold nothing. */
typedef struct {
    fixture *f;
    ml_layout layout;
    ml_stage_map map;
    double **states[64]; /* by stage, by state */
    uint32_t settled;
    ml_staged last; /* of the last program; its graphs are gone */
} pipeline;

static pipeline pipeline_of(fixture *f, int ranks, int chunks) {
    pipeline p = {.f = f, .layout = {.count = 1}};
    p.layout.axis[0] = (ml_mesh_axis){.name = "pp", .size = ranks};
    p.layout.stages =
        (ml_stages){.on = true, .chunks = chunks, .microbatches = 1, .list = "layers"};
    p.map.arena = f->arena;
    for (int s = 0; s < ranks * chunks; s++)
        p.states[s] = ML_NEW_ARRAY(f->arena, double *, SUPPORT_INPUTS);
    return p;
}

static double *filled(fixture *f, const ml_type *type, double value) {
    int64_t count = ml_type_elements(type);
    double *values = ML_NEW_ARRAY(f->arena, double, count);
    for (int64_t i = 0; i < count; i++) values[i] = value;
    return values;
}

/* States that were just given holders get their values there; of sums of gradients the first. */
static void fill_states(pipeline *p) {
    for (uint32_t id = 0; id < (uint32_t)p->f->state_count; id++) {
        const ml_state *state = ml_graph_state(p->f->g, id);
        int64_t bytes = ml_type_elements(&state->type) * (int64_t)sizeof(double);
        bool first = true;
        for (int s = 0; s < p->map.count; s++) {
            if (p->states[s][id] && !isnan(p->states[s][id][0])) continue;
            bool held = ml_stage_holds(&p->map, id, s);
            p->states[s][id] = filled(p->f, &state->type, held ? 0 : NAN);
            if (held && (state->kind != ML_STATE_GRADIENT || first))
                memcpy(p->states[s][id], p->f->states[id], (size_t)bytes);
            if (held) first = false;
        }
    }
}

static double **values_of(pipeline *p, const ml_graph *g, int stage, double **inputs,
                          const ml_ref *nodes, int count) {
    double **results = ML_NEW_ARRAY(p->f->arena, double *, count + 1);
    ml_reference(g, (const double *const *)p->states[stage], (const double *const *)inputs, nodes,
                 count, results, false, p->f->arena);
    return results;
}

static void same(pipeline *p, const char *what, int i, int stage, const double *actual,
                 const double *expected, int64_t count) {
    double largest = 1e-3;
    for (int64_t k = 0; k < count; k++) largest = fmax(largest, fabs(expected[k]));
    for (int64_t k = 0; k < count; k++)
        if (!(fabs(actual[k] - expected[k]) <= 1e-9 * largest)) {
            test_fail("%s: %s %d at stage %d, element %lld: %.12g, expected %.12g", p->f->label,
                      what, i, stage, (long long)k, actual[k], expected[k]);
            return;
        }
}

/* Pass what stages send, level by level; inputs that did not come yet are NaN. */
static double ***pass_transfers(pipeline *p, const ml_staged *staged) {
    int count = (int)ml_graph_input_count(p->f->g);
    double ***inputs = ML_NEW_ARRAY(p->f->arena, double **, staged->count);
    for (int s = 0; s < staged->count; s++) {
        inputs[s] = ML_NEW_ARRAY(p->f->arena, double *, count);
        for (int i = 0; i < count; i++)
            inputs[s][i] = i < p->f->input_count
                               ? p->f->inputs[i]
                               : filled(p->f, &ml_graph_input(p->f->g, (uint32_t)i)->type, NAN);
    }
    double **sent = ML_NEW_ARRAY(p->f->arena, double *, staged->transfer_count + 1);
    for (int first = 0, end; first < staged->transfer_count; first = end) {
        int level = staged->transfers[first].from_level;
        for (end = first; end < staged->transfer_count; end++) {
            const ml_transfer *t = &staged->transfers[end];
            if (t->from_level != level) break;
            const ml_stage *from = &staged->stages[t->from];
            CHECK(t->to_level > t->from_level && t->to_level < staged->stages[t->to].levels);
            CHECK(t->output >= from->roots.output_count - from->roots.kept);
            CHECK(t->output < from->roots.output_count && t->from != t->to);
            sent[end] = values_of(p, from->graph, t->from, inputs[t->from],
                                  &from->roots.outputs[t->output], 1)[0];
        }
        for (int i = first; i < end; i++)
            inputs[staged->transfers[i].to][staged->transfers[i].input] = sent[i];
        if (end < staged->transfer_count) CHECK(staged->transfers[end].from_level > level);
    }
    return inputs;
}

static void check_outputs(pipeline *p, const ml_staged *staged, const ml_roots *whole,
                          double ***inputs, double **expected) {
    int ranks = (int)p->layout.axis[0].size;
    for (int i = 0; i < whole->output_count; i++)
        for (int rank = 0; rank < ranks; rank++) {
            int found = 0;
            for (int s = rank; s < staged->count; s += ranks) {
                const ml_stage *stage = &staged->stages[s];
                if (stage->output_of[i] < 0) continue;
                found++;
                ml_ref node = stage->roots.outputs[stage->output_of[i]];
                same(p, "output", i, s, values_of(p, stage->graph, s, inputs[s], &node, 1)[0],
                     expected[i], ml_type_elements(ml_graph_type(stage->graph, node)));
            }
            CHECK_EQ_INT(found, 1);
        }
}

/* New values at every holder and nowhere else; parts of gradients make up the whole. */
static void check_updates(pipeline *p, const ml_staged *staged, const ml_roots *whole,
                          double ***inputs, double **expected) {
    double **made[64][SUPPORT_INPUTS] = {0};
    for (int s = 0; s < staged->count; s++)
        for (int u = 0; u < staged->stages[s].roots.update_count; u++) {
            const ml_update *update = &staged->stages[s].roots.updates[u];
            CHECK(ml_stage_holds(&p->map, update->state, s) && !made[s][update->state]);
            made[s][update->state] =
                values_of(p, staged->stages[s].graph, s, inputs[s], &update->value, 1);
        }
    for (int u = 0; u < whole->update_count; u++) {
        uint32_t id = whole->updates[u].state;
        const ml_state *state = ml_graph_state(p->f->g, id);
        int64_t count = ml_type_elements(&state->type);
        double *total = filled(p->f, &state->type, 0);
        bool sum = state->kind == ML_STATE_GRADIENT;
        CHECK(p->map.holders[id] != NULL);
        for (const struct ml_holder *h = p->map.holders[id]; h; h = h->next) {
            if (!CHECK(made[h->stage][id] != NULL)) continue;
            double *value = p->states[h->stage][id] = made[h->stage][id][0];
            if (!sum) same(p, state->name, u, h->stage, value, expected[u], count);
            for (int64_t k = 0; k < count; k++) total[k] += value[k];
        }
        if (sum) same(p, state->name, u, -1, total, expected[u], count);
        p->f->states[id] = expected[u];
    }
}

static void cut_and_run(pipeline *p, const ml_roots *program) {
    ml_roots roots = *program;
    fixture *f = p->f;
    roots.outputs = ML_NEW_ARRAY(f->arena, ml_ref, roots.output_count + 1);
    roots.updates = ML_NEW_ARRAY(f->arena, ml_update, roots.update_count + 1);
    memcpy(roots.outputs, program->outputs, sizeof(ml_ref) * (size_t)roots.output_count);
    memcpy(roots.updates, program->updates, sizeof(ml_update) * (size_t)roots.update_count);
    ml_graph *g = ml_graph_extract(f->g, &roots), *simple = ml_simplify(g, &roots);
    ml_stage_cut(simple, &roots, &p->layout, &p->map, f->arena, &p->last);
    for (int s = 0; s < p->last.count; s++)
        ml_graph_verify(p->last.stages[s].graph, &p->last.stages[s].roots, "stage");
    fill_states(p);
    int outputs = roots.output_count, count = outputs + roots.update_count;
    ml_ref *nodes = ML_NEW_ARRAY(f->arena, ml_ref, count + 1);
    for (int i = 0; i < count; i++)
        nodes[i] = i < outputs ? roots.outputs[i] : roots.updates[i - outputs].value;
    double **expected = ML_NEW_ARRAY(f->arena, double *, count + 1);
    ml_reference(simple, (const double *const *)f->states, (const double *const *)f->inputs, nodes,
                 count, expected, false, f->arena);
    double ***inputs = pass_transfers(p, &p->last);
    check_outputs(p, &p->last, &roots, inputs, expected);
    check_updates(p, &p->last, &roots, inputs, expected + outputs);
    ml_staged graphs = p->last;
    ml_staged_free(&graphs);
    ml_graph_free(simple);
    ml_graph_free(g);
}

/* ---- Tests ----------------------------------------------------------------------------------- */

static const struct {
    int layers, ranks, chunks;
} cuts[] = {{4, 2, 1}, {7, 2, 1}, {7, 4, 1}, {8, 2, 2}, {5, 1, 1}};
enum { CUTS = sizeof cuts / sizeof *cuts };

static void whole_steps(fixture *f) {
    for (int variant = 0; variant < 4; variant++)
        for (int i = 0; i < CUTS; i++) {
            fixture own = {.random = f->random, .arena = f->arena, .g = ml_graph_new()};
            model m;
            snprintf(own.label, sizeof own.label, "variant %d, %d layers on %d x %d stages",
                     variant, cuts[i].layers, cuts[i].ranks, cuts[i].chunks);
            begin_model(&m, &own,
                        (shape){.layers = cuts[i].layers,
                                .tied = variant != 0,
                                .shared = variant >= 2,
                                .outer = variant == 3,
                                .auxiliary = variant >= 1,
                                .dtype = ML_F64});
            step_program(&m);
            pipeline p = pipeline_of(&own, cuts[i].ranks, cuts[i].chunks);
            cut_and_run(&p, &m.roots);
            cut_and_run(&p, &m.roots);
            ml_graph_free(own.g);
        }
}
TEST(shard_stage, steps) {
    fixture_run(whole_steps, 1);
}

/* Two microbatches, then the update; twice. Sums of gradients stay in parts at their stages. */
static void accumulation(fixture *f) {
    for (int i = 0; i < CUTS; i++) {
        fixture own = {.random = f->random, .arena = f->arena, .g = ml_graph_new()};
        model m;
        snprintf(own.label, sizeof own.label, "%d layers on %d x %d stages", cuts[i].layers,
                 cuts[i].ranks, cuts[i].chunks);
        begin_model(
            &m, &own,
            (shape){.layers = cuts[i].layers, .tied = true, .shared = true, .dtype = ML_F64});
        ml_ref *sums = ML_NEW_ARRAY(f->arena, ml_ref, m.count + 1);
        microbatch_program(&m, sums);
        ml_roots microbatch = m.roots;
        new_roots(&m, "update");
        output(&m, sums[m.count]);
        apply(&m, sums);
        pipeline p = pipeline_of(&own, cuts[i].ranks, cuts[i].chunks);
        for (int step = 0; step < 2; step++) {
            cut_and_run(&p, &microbatch);
            cut_and_run(&p, &microbatch);
            cut_and_run(&p, &m.roots);
        }
        ml_graph_free(own.g);
    }
}
TEST(shard_stage, accumulation) {
    fixture_run(accumulation, 2);
}

/* The update first: sums of gradients then have one holder, by their parameters' names or none. */
static void update_first(fixture *f) {
    model m;
    begin_model(&m, f, (shape){.layers = 4, .tied = true, .dtype = ML_F64});
    ml_ref *sums = ML_NEW_ARRAY(f->arena, ml_ref, m.count + 1);
    microbatch_program(&m, sums);
    ml_roots microbatch = m.roots;
    new_roots(&m, "update");
    output(&m, sums[m.count]);
    apply(&m, sums);
    pipeline p = pipeline_of(f, 4, 1);
    for (int i = 0; i < f->state_count; i++) /* a length of 0 would divide by 0 */
        if (ml_graph_state(f->g, (uint32_t)i)->kind == ML_STATE_GRADIENT)
            for (int64_t k = 0; k < ml_type_elements(&ml_graph_state(f->g, (uint32_t)i)->type); k++)
                f->states[i][k] = 1;
    cut_and_run(&p, &m.roots);
    cut_and_run(&p, &microbatch);
    cut_and_run(&p, &m.roots);
}
TEST(shard_stage, update_first) {
    fixture_run(update_first, 3);
}

/* ---- Errors ---------------------------------------------------------------------------------- */

typedef struct {
    fixture *f;
    pipeline *p;
    model *m;
} attempt;

static void try_cut(void *argument) {
    attempt *a = argument;
    ml_staged staged;
    ml_stage_cut(a->f->g, &a->m->roots, &a->p->layout, &a->p->map, a->f->arena, &staged);
    ml_staged_free(&staged);
}

static void impossible(fixture *f) {
    model m;
    begin_model(&m, f, (shape){.layers = 3, .tied = true, .dtype = ML_F64});
    step_program(&m);
    pipeline p = pipeline_of(f, 4, 1);
    attempt a = {f, &p, &m};
    CHECK_RAISES(try_cut, &a, ML_INVALID,
                 "cannot cut \"blocks\", 3 layers, into 4 pipeline stages");
    CHECK_TEXT(ml_error_last()->help, "each stage needs a layer: pp=3 at most");
    p = pipeline_of(f, 2, 2);
    CHECK_RAISES(try_cut, &a, ML_INVALID,
                 "cannot cut \"blocks\", 3 layers, into 4 pipeline stages");
    CHECK_TEXT(ml_error_last()->help,
               "each stage needs a layer: with 2 stages a rank, pp=1 at most; or fewer chunks");
    p = pipeline_of(f, 2, 1);
    snprintf(p.layout.stages.list, sizeof p.layout.stages.list, "block");
    CHECK_RAISES(try_cut, &a, ML_INVALID,
                 "the model has no list of modules \"block\" to cut into pipeline stages");
    CHECK_TEXT(ml_error_last()->help, "its lists: \"blocks\" (3)");
    CHECK_EQ_INT(p.map.count, 0);
    CHECK(p.map.holders == NULL);
    snprintf(p.layout.stages.list, sizeof p.layout.stages.list, "blocks");
    try_cut(&a);
    CHECK_EQ_INT(p.map.count, 2);
    CHECK_EQ_INT(p.map.layers, 3);
    CHECK_TEXT(p.map.list, "blocks");
}
TEST(shard_stage, impossible) {
    fixture_run(impossible, 4);
}

static void no_layers(fixture *f) {
    model m;
    begin_model(&m, f, (shape){.layers = 0, .tied = true, .dtype = ML_F64});
    step_program(&m);
    pipeline p = pipeline_of(f, 2, 1);
    attempt a = {f, &p, &m};
    CHECK_RAISES(try_cut, &a, ML_INVALID,
                 "the model has no list of modules to cut into pipeline stages");
}
TEST(shard_stage, no_layers) {
    fixture_run(no_layers, 5);
}

/* States that no program was cut with go where their names say. */
static void by_name(fixture *f) {
    model m;
    begin_model(&m, f, (shape){.layers = 4, .dtype = ML_F64});
    pipeline p = pipeline_of(f, 2, 1);
    ml_type type = fixture_type(f, ML_F32, "embed4");
    uint32_t id = (uint32_t)ml_graph_args(
        f->g, state(&m, "blocks.4.up.adamw.m", ML_STATE_OPTIMIZER, &type))[0];
    ml_stage_settle(f->g, &p.layout, &p.map, id);
    ml_stage_settle(f->g, &p.layout, &p.map, 0);
    CHECK(ml_stage_holds(&p.map, id, 1) && !ml_stage_holds(&p.map, id, 0));
    CHECK(ml_stage_holds(&p.map, 0, 0) && !ml_stage_holds(&p.map, 0, 1));
    CHECK(!ml_stage_holds(&p.map, id + 7, 0));
}
TEST(shard_stage, by_name) {
    fixture_run(by_name, 6);
}
