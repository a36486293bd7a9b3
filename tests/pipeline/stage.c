/* Programs cut into pipeline stages: stage by stage and level by level, with what they send passed
 * by hand, they give what the whole program gives; and what they send is what it should be. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/pipeline/support.h"

/* ---- A model --------------------------------------------------------------------------------- */

typedef struct {
    int layers;
    bool tied, shared, outer, auxiliary; /* embeddings; a gain of all layers; residual sums outside
                                            of layers; a loss of each layer */
    ml_dtype dtype;
    int width, batch; /* of embed, and of the batch where that is another */
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
    return stage_state(m->f, name, kind, type);
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
    type.size[0] = m->shape.batch ? m->shape.batch : m->shape.width;
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
            stage_pipeline p = stage_pipeline_of(&own, cuts[i].ranks, cuts[i].chunks);
            stage_run(&p, &m.roots);
            stage_run(&p, &m.roots);
            ml_graph_free(own.g);
        }
}
TEST(pipeline_stage, steps) {
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
        stage_pipeline p = stage_pipeline_of(&own, cuts[i].ranks, cuts[i].chunks);
        for (int step = 0; step < 2; step++) {
            stage_run(&p, &microbatch);
            stage_run(&p, &microbatch);
            stage_run(&p, &m.roots);
        }
        ml_graph_free(own.g);
    }
}
TEST(pipeline_stage, accumulation) {
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
    stage_pipeline p = stage_pipeline_of(f, 4, 1);
    for (int i = 0; i < f->state_count; i++) /* a length of 0 would divide by 0 */
        if (ml_graph_state(f->g, (uint32_t)i)->kind == ML_STATE_GRADIENT)
            for (int64_t k = 0; k < ml_type_elements(&ml_graph_state(f->g, (uint32_t)i)->type); k++)
                f->states[i][k] = 1;
    stage_run(&p, &m.roots);
    stage_run(&p, &microbatch);
    stage_run(&p, &m.roots);
}
TEST(pipeline_stage, update_first) {
    fixture_run(update_first, 3);
}

/* ---- Errors ---------------------------------------------------------------------------------- */

typedef struct {
    fixture *f;
    stage_pipeline *p;
    model *m;
} attempt;

static void try_cut(void *argument) {
    attempt *a = argument;
    ml_stage_graphs pipeline;
    ml_stage_cut(a->f->g, &a->m->roots, &a->p->layout, &a->p->map, a->f->arena, &pipeline);
    ml_stage_graphs_free(&pipeline);
}

static void impossible(fixture *f) {
    model m;
    begin_model(&m, f, (shape){.layers = 3, .tied = true, .dtype = ML_F64});
    step_program(&m);
    stage_pipeline p = stage_pipeline_of(f, 4, 1);
    attempt a = {f, &p, &m};
    CHECK_RAISES(try_cut, &a, ML_INVALID,
                 "cannot cut \"blocks\", 3 layers, into 4 pipeline stages");
    CHECK_TEXT(ml_error_last()->help, "each stage needs a layer: pp=3 at most");
    p = stage_pipeline_of(f, 2, 2);
    CHECK_RAISES(try_cut, &a, ML_INVALID,
                 "cannot cut \"blocks\", 3 layers, into 4 pipeline stages");
    CHECK_TEXT(ml_error_last()->help,
               "each stage needs a layer: with 2 stages a rank, pp=1 at most; or fewer chunks");
    p = stage_pipeline_of(f, 2, 1);
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
TEST(pipeline_stage, impossible) {
    fixture_run(impossible, 4);
}

static void no_layers(fixture *f) {
    model m;
    begin_model(&m, f, (shape){.layers = 0, .tied = true, .dtype = ML_F64});
    step_program(&m);
    stage_pipeline p = stage_pipeline_of(f, 2, 1);
    attempt a = {f, &p, &m};
    CHECK_RAISES(try_cut, &a, ML_INVALID,
                 "the model has no list of modules to cut into pipeline stages");
}
TEST(pipeline_stage, no_layers) {
    fixture_run(no_layers, 5);
}

/* Without memory at any point nothing leaks, and the map stays as it was. */
static void out_of_memory(fixture *f) {
    model m;
    begin_model(&m, f, (shape){.layers = 4, .tied = true, .dtype = ML_F64});
    step_program(&m);
    stage_pipeline p = stage_pipeline_of(f, 2, 1);
    attempt a = {f, &p, &m};
    ml_status status = ML_NO_MEMORY;
    int n = 0;
    while (status == ML_NO_MEMORY && n < 100) {
        ml_memory_fail_at(++n);
        status = ml_protect(try_cut, &a);
        ml_memory_fail_at(0);
        if (status == ML_NO_MEMORY) CHECK(p.map.count == 0 && p.map.holders == NULL);
    }
    CHECK(n > 3 && status == ML_OK);
    CHECK_EQ_INT(p.map.count, 2);
}
TEST(pipeline_stage, out_of_memory) {
    fixture_run(out_of_memory, 9);
}

/* States that no program was cut with go where their names say. */
static void by_name(fixture *f) {
    model m;
    begin_model(&m, f, (shape){.layers = 4, .dtype = ML_F64});
    stage_pipeline p = stage_pipeline_of(f, 2, 1);
    ml_type type = fixture_type(f, ML_F32, "embed4");
    uint32_t id = (uint32_t)ml_graph_args(
        f->g, state(&m, "blocks.4.up.adamw.m", ML_STATE_OPTIMIZER, &type))[0];
    ml_stage_assign_state(f->g, &p.layout, &p.map, id);
    ml_stage_assign_state(f->g, &p.layout, &p.map, 0);
    CHECK(ml_stage_holds(&p.map, id, 1) && !ml_stage_holds(&p.map, id, 0));
    CHECK(ml_stage_holds(&p.map, 0, 0) && !ml_stage_holds(&p.map, 0, 1));
    CHECK(!ml_stage_holds(&p.map, id + 7, 0));
}
TEST(pipeline_stage, by_name) {
    fixture_run(by_name, 6);
}

/* ---- What is sent ---------------------------------------------------------------------------- */

typedef struct {
    int forward, backward; /* as large as a layer's output, from a stage to the next or back */
    int table, gain;       /* the embedding's and the shared gain's gradients and new values */
    int numbers, others;
} traffic;

static traffic traffic_of(fixture *f, const ml_roots *program, stage_pipeline *p) {
    ml_roots roots = *program;
    traffic sent = {0};
    ml_graph *g = ml_graph_extract(f->g, &roots), *simple = ml_simplify(g, &roots);
    ml_stage_graphs pipeline;
    ml_stage_cut(simple, &roots, &p->layout, &p->map, f->arena, &pipeline);
    for (int i = 0; i < pipeline.transfer_count; i++) {
        const ml_transfer *t = &pipeline.transfers[i];
        int64_t bytes = ml_type_bytes(ml_graph_type(simple, t->node));
        bool activation = bytes == 128 * 3 * 128 * 2;
        if (activation && t->to == t->from + 1)
            sent.forward++;
        else if (activation && t->to == t->from - 1)
            sent.backward++;
        else if (bytes == 5 * 128 * 4)
            sent.table++;
        else if (bytes == 128 * 4)
            sent.gain++;
        else if (bytes <= 8)
            sent.numbers++;
        else
            sent.others++;
    }
    ml_stage_graphs_free(&pipeline);
    ml_graph_free(simple);
    ml_graph_free(g);
    return sent;
}

/* Four stages of a bf16 model, with what a layer adds to its input added in it or outside: at each
 * boundary one tensor of bf16 is sent forward and one back; the rest is small or seldom. */
static void boundaries(fixture *f) {
    for (int outer = 0; outer < 2; outer++) {
        fixture own = {.random = f->random, .arena = f->arena, .g = ml_graph_new()};
        model m;
        begin_model(&m, &own,
                    (shape){.layers = 8,
                            .tied = true,
                            .shared = true,
                            .auxiliary = true,
                            .outer = outer,
                            .dtype = ML_BF16,
                            .width = 128});
        new_roots(&m, "evaluation");
        output(&m, m.loss);
        stage_pipeline p = stage_pipeline_of(&own, 2, 2);
        traffic sent = traffic_of(&own, &m.roots, &p);
        CHECK_EQ_INT(sent.forward, 3);
        CHECK_EQ_INT(sent.numbers, 1); /* the loss, to the other rank */
        CHECK_EQ_INT(sent.backward + sent.table + sent.gain + sent.others, 0);
        CHECK(ml_stage_holds(&p.map, 0, 0) && ml_stage_holds(&p.map, 0, 3));
        CHECK(!ml_stage_holds(&p.map, 0, 1) && !ml_stage_holds(&p.map, 0, 2));
        ml_ref *sums = ML_NEW_ARRAY(f->arena, ml_ref, m.count + 1);
        microbatch_program(&m, sums);
        sent = traffic_of(&own, &m.roots, &p);
        CHECK_EQ_INT(sent.forward, 3);
        CHECK_EQ_INT(sent.backward, 3);
        CHECK_EQ_INT(sent.gain, 2); /* between the stages of a rank, which keep one part of it */
        CHECK_EQ_INT(sent.table + sent.numbers + sent.others, 0);
        new_roots(&m, "update");
        apply(&m, sums);
        sent = traffic_of(&own, &m.roots, &p);
        CHECK_EQ_INT(sent.table, 1 + 1);
        CHECK_EQ_INT(sent.gain, 1 + 3);
        CHECK_EQ_INT(sent.numbers, 3 + 3); /* squares, and the length that they make */
        CHECK_EQ_INT(sent.forward + sent.backward + sent.others, 0);
        ml_graph_free(own.g);
    }
}
TEST(pipeline_stage, boundaries) {
    fixture_run(boundaries, 7);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Equal layers are distributed evenly, whatever is added to gradient states outside of them. */
static void even(fixture *f) {
    model m;
    begin_model(&m, f,
                (shape){.layers = 48, .tied = true, .dtype = ML_BF16, .width = 1024, .batch = 1});
    microbatch_program(&m, ML_NEW_ARRAY(f->arena, ml_ref, m.count + 1));
    stage_pipeline p = stage_pipeline_of(f, 4, 1);
    (void)traffic_of(f, &m.roots, &p);
    for (int s = 0; s <= 4; s++) CHECK_EQ_INT(p.map.first[s], 12 * s);
}
TEST(pipeline_stage, even) {
    fixture_run(even, 10);
}

/* A thousand layers on 256 stages: each has its share. */
static void scale(fixture *f) {
    model m;
    begin_model(&m, f, (shape){.layers = 1000, .tied = true, .dtype = ML_BF16, .width = 128});
    step_program(&m);
    stage_pipeline p = stage_pipeline_of(f, 64, 4);
    ml_stage_graphs pipeline;
    double start = seconds();
    ml_stage_cut(f->g, &m.roots, &p.layout, &p.map, f->arena, &pipeline);
    double taken = seconds() - start;
    printf("%u nodes cut in %.3f s, %d transfers\n", ml_graph_count(f->g), taken,
           pipeline.transfer_count);
    CHECK(taken < 1);
    for (int s = 0; s < 256; s++) {
        int layers = p.map.first[s + 1] - p.map.first[s];
        CHECK(layers >= (s < 255 ? 3 : 1) && layers <= 4);
    }
    ml_stage_graphs_free(&pipeline);
}
TEST(pipeline_stage, scale) {
    fixture_run(scale, 8);
}
