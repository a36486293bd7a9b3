/* Pieces of graphs drawn at random: run one after the other over a block of cells, microbatches
 * overlapping, they give what the uncut graph gives. */
#include "runtime/pipeline/split_tasks.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/passes/support.h"

enum { DRAWN = 40, FED = 3, RECEIVED = 4, STATES = 6, MICROBATCHES = 3, OUTPUTS = 5 };

typedef struct {
    fixture *f;
    ml_graph *g; /* what is cut */
    ml_roots roots;
    task_waves waves;
    int input_wave[SUPPORT_INPUTS];
    ml_ref at[2 * DRAWN + FED + RECEIVED + 2 * STATES];
    ml_ref states[STATES];
    int count;
    task_set set;
    int *wave; /* by node of g; 0 for what needs nothing received */
    int microbatches;
    double **fed[MICROBATCHES];   /* by input id */
    double **whole[MICROBATCHES]; /* what the uncut graph gives: outputs */
    double *held[STATES], *expected[STATES];
    double **saved[MICROBATCHES]; /* the block of a microbatch; NULL: not written yet */
} drawing;

/* ---- Drawing ----------------------------------------------------------------------------------
 */

static ml_ref any(drawing *d) {
    return d->at[fixture_below(d->f, d->count)];
}

static ml_ref shaped(drawing *d, ml_ref x, const ml_type *as) {
    ml_type type = *ml_graph_type(d->g, x);
    for (int i = 0; i < type.rank; i++)
        if (ml_type_find(as, type.axis[i]) < 0) x = ml_reduce(d->g, ML_OP_SUM, x, &type.axis[i], 1);
    return ml_broadcast(d->g, x, as);
}

/* Values and places of the largest: an op with two outputs, used apart from each other. */
static ml_ref draw_top(drawing *d, ml_ref a) {
    ml_axis axis = ml_graph_type(d->g, a)->axis[0];
    int64_t args[] = {axis, 1, ml_axis_fresh(d->g, "k")};
    ml_ref best = ml_graph_add(d->g, ML_OP_TOP_K, &a, 1, args, 3, NULL);
    ml_axis k = (ml_axis)args[2];
    ml_ref index = ml_cast(d->g, ml_out(d->g, best, 1), ML_F64);
    d->at[d->count++] = ml_reduce(d->g, ML_OP_SUM, index, &k, 1);
    return ml_reduce(d->g, ML_OP_SUM, best, &k, 1);
}

static ml_ref draw_node(drawing *d) {
    static const ml_op pairs[] = {ML_OP_ADD, ML_OP_ADD, ML_OP_SUB, ML_OP_MUL};
    ml_graph *g = d->g;
    ml_ref a = any(d);
    ml_type type = *ml_graph_type(g, a), whole = fixture_type(d->f, ML_F64, "a4 b6");
    ml_axis axis = type.rank ? type.axis[fixture_below(d->f, type.rank)] : 0;
    switch (fixture_below(d->f, 9)) {
    case 0: return ml_map1(g, fixture_below(d->f, 2) ? ML_OP_TANH : ML_OP_NEG, a);
    case 1: return type.rank ? ml_reduce(g, ML_OP_SUM, a, &axis, 1) : ml_map1(g, ML_OP_SIN, a);
    case 2: return ml_broadcast(g, a, &whole);
    case 3: return type.rank ? draw_top(d, a) : ml_map1(g, ML_OP_TANH, a);
    case 4: {
        if (type.rank < 2) return ml_map1(g, ML_OP_SIGMOID, a);
        ml_ref b = shaped(d, any(d), &whole);
        return ml_dot(g, a, b, &axis, 1, ML_F64);
    }
    case 5: {
        int at = type.rank ? ml_type_find(&type, axis) : -1;
        if (at < 0) return ml_map1(g, ML_OP_ABS, a);
        ml_ref half = ml_slice(g, a, axis, 0, type.size[at] / 2);
        return ml_pad(g, half, axis, type.size[at] - type.size[at] / 2, 0);
    }
    case 6: {
        ml_ref key =
            ml_cast(g, ml_reduce(g, ML_OP_SUM, shaped(d, d->at[0], &whole), whole.axis, 2), ML_I64);
        ml_type f32 = type;
        f32.dtype = ML_F32;
        ml_ref mask = ml_graph_add(g, ML_OP_RANDOM, &key, 1, NULL, 0, &f32);
        return ml_map2(g, ML_OP_MUL, a, ml_cast(g, mask, ML_F64));
    }
    default: {
        ml_ref b = shaped(d, any(d), &type);
        return ml_map2(g, pairs[fixture_below(d->f, 4)], a, b);
    }
    }
}

static void draw_levels(drawing *d) {
    int count = 1 + (int)fixture_below(d->f, 3), wave = (int)fixture_below(d->f, 2);
    for (int i = 0; i < count; i++) {
        d->waves.wave[d->waves.count++] = wave;
        wave += 1 + (int)fixture_below(d->f, 3);
    }
    d->waves.weight_grad = fixture_below(d->f, 2);
    d->waves.overlaps = fixture_below(d->f, 2);
    d->waves.once_per_step = fixture_below(d->f, 3) > 0;
    d->microbatches = d->waves.overlaps ? MICROBATCHES : 1;
}

static void draw_leaves(drawing *d) {
    static const char *const axes[] = {"", "a4", "b6", "a4 b6"};
    static const ml_state_kind kinds[] = {ML_STATE_GRADIENT, ML_STATE_PARAMETER, ML_STATE_OTHER};
    for (int i = 0; i < FED + RECEIVED; i++) {
        ml_ref made = fixture_input(d->f, ML_F64, axes[i == 0 ? 3 : fixture_below(d->f, 4)], -1, 1);
        d->at[d->count++] = made;
        int wave = d->waves.wave[fixture_below(d->f, d->waves.count)];
        d->input_wave[ml_graph_args(d->g, made)[0]] = i < FED ? 0 : wave;
    }
    for (int i = 0; i < STATES; i++) {
        ml_type type = fixture_type(d->f, ML_F64, axes[fixture_below(d->f, 4)]);
        ml_state state = {.name = ml_arena_format(d->f->arena, "w%d", i),
                          .type = type,
                          .kind = kinds[fixture_below(d->f, 3)]};
        int64_t id = ml_graph_add_state(d->g, &state);
        d->states[i] = ml_graph_add(d->g, ML_OP_STATE, NULL, 0, &id, 1, &type);
        d->at[d->count++] = d->states[i];
        d->at[d->count++] = ml_cast(d->g, ml_cast(d->g, d->states[i], ML_F32), ML_F64);
    }
}

/* New values: sums that grow as accumulated gradients do, anything that was drawn, or the old value
 * of another state. */
static void draw_roots(drawing *d) {
    ml_arena *arena = d->f->arena;
    d->roots = (ml_roots){.name = "drawn", .outputs = ML_NEW_ARRAY(arena, ml_ref, OUTPUTS)};
    d->roots.updates = ML_NEW_ARRAY(arena, ml_update, STATES);
    for (int i = 0; i < STATES; i++) {
        const ml_type type = *ml_graph_type(d->g, d->states[i]);
        ml_ref value = shaped(d, any(d), &type);
        if (fixture_below(d->f, 2)) value = ml_map2(d->g, ML_OP_ADD, d->states[i], value);
        if (fixture_below(d->f, 3) == 0) continue;
        d->roots.updates[d->roots.update_count++] =
            (ml_update){(uint32_t)ml_graph_args(d->g, d->states[i])[0], value};
    }
    for (int i = 0; i < OUTPUTS; i++) d->roots.outputs[d->roots.output_count++] = any(d);
    bool sends_free = d->waves.wave[0] == 0; /* a piece from which it is sent */
    d->roots.kept = sends_free ? 2 : 0;
}

static void draw(drawing *d) {
    draw_levels(d);
    draw_leaves(d);
    for (int i = 0; i < DRAWN; i++) {
        ml_ref made = draw_node(d);
        if (i % 5 == 4) made = ml_map1(d->g, ML_OP_TANH, made);
        d->at[d->count++] = made;
    }
    draw_roots(d);
}

static void levels_of_nodes(drawing *d) {
    d->wave = ML_NEW_ARRAY(d->f->arena, int, ml_graph_count(d->g));
    for (ml_ref n = 1; n < ml_graph_count(d->g); n++) {
        const ml_node *node = ml_graph_node(d->g, n);
        if (node->op == ML_OP_INPUT) d->wave[n] = d->input_wave[ml_graph_args(d->g, n)[0]];
        for (int i = 0; i < node->source_count; i++) {
            int of = d->wave[ml_graph_source(d->g, n, i)];
            if (of > d->wave[n]) d->wave[n] = of;
        }
    }
}

/* ---- The shape of the pieces ------------------------------------------------------------------
 */

/* What is no pass over memory is computed once. */
static bool heavy(const ml_node *node) {
    ml_op_class class = ml_ops[node->op].op_class;
    return class == ML_CLASS_CONTRACT || class == ML_CLASS_SCAN || class == ML_CLASS_REDUCE;
}

static int heavy_nodes(const ml_graph *g) {
    int count = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) count += heavy(ml_graph_node(g, n));
    return count;
}

static void check_blocks(const task_set *set) {
    for (int i = 0; i < set->saved_count; i++) {
        const saved_value *a = &set->saved[i];
        bool once_per_step = a->from == SAVED_ONCE_PER_STEP;
        CHECK(a->offset % 256 == 0 && a->offset >= 0 && a->bytes > 0);
        CHECK(a->offset + a->bytes <= (once_per_step ? set->once_bytes : set->buffer_bytes));
        for (int k = 0; k < i; k++) {
            const saved_value *b = &set->saved[k];
            if (once_per_step != (b->from == SAVED_ONCE_PER_STEP)) continue;
            CHECK(a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset);
        }
    }
}

static void check_shape(const drawing *d) {
    const task_set *set = &d->set;
    int made = 0, updates = 0;
    CHECK_EQ_INT(set->count, d->waves.count + d->waves.weight_grad);
    for (int p = 0; p < set->count; p++) {
        CHECK(set->tasks[p].weight_grad == (p == d->waves.count));
        made += heavy_nodes(set->tasks[p].graph);
        updates += set->tasks[p].roots.update_count;
    }
    CHECK(made <= heavy_nodes(d->g));
    CHECK_EQ_INT(updates, d->roots.update_count);
    check_blocks(set);
    CHECK(!set->once_per_step || (d->waves.overlaps && d->waves.once_per_step));
    CHECK_EQ_INT(set->once_per_step, set->once_bytes > 0);
    for (int i = d->roots.output_count - d->roots.kept; i < d->roots.output_count; i++) {
        const split_task *from = &set->tasks[set->task_of_output[i]];
        CHECK(!from->weight_grad && from->wave <= d->wave[d->roots.outputs[i]]);
    }
}

/* ---- Running ----------------------------------------------------------------------------------
 */

static double **values(drawing *d, const ml_graph *g, double **inputs, const ml_ref *nodes,
                       int count, double **states) {
    double **results = ML_NEW_ARRAY(d->f->arena, double *, count + 1);
    ml_reference(g, (const double *const *)states, (const double *const *)inputs, nodes, count,
                 results, false, d->f->arena);
    return results;
}

static void assign(drawing *d, const ml_graph *g, const ml_roots *roots, double **inputs,
                   double **states) {
    ml_ref nodes[STATES];
    for (int i = 0; i < roots->update_count; i++) nodes[i] = roots->updates[i].value;
    double **made = values(d, g, inputs, nodes, roots->update_count, states);
    for (int i = 0; i < roots->update_count; i++) states[roots->updates[i].state] = made[i];
}

/* The uncut graph, a microbatch after the other. */
static void run_whole(drawing *d) {
    for (int m = 0; m < d->microbatches; m++) {
        d->whole[m] =
            values(d, d->g, d->fed[m], d->roots.outputs, d->roots.output_count, d->expected);
        assign(d, d->g, &d->roots, d->fed[m], d->expected);
    }
}

/* The inputs of a piece: cells that are given by then, or that an earlier piece has written. */
static double **piece_inputs(drawing *d, int p, int m) {
    const ml_graph *g = d->set.tasks[p].graph;
    double **inputs = ML_NEW_ARRAY(d->f->arena, double *, ml_graph_input_count(g) + 1);
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        if (ml_graph_node(g, n)->op != ML_OP_INPUT) continue;
        uint32_t id = (uint32_t)ml_graph_args(g, n)[0];
        int saved = 0;
        while (saved < d->set.saved_count && d->set.saved[saved].input != id) saved++;
        REQUIRE(saved < d->set.saved_count);
        bool given = d->set.saved[saved].from == SAVED_GIVEN;
        if (given) CHECK(d->input_wave[id] <= d->set.tasks[p].wave);
        inputs[id] = given ? d->fed[m][id] : d->saved[m][saved];
        REQUIRE(inputs[id] != NULL);
        CHECK_EQ_INT(d->set.saved[saved].bytes, ml_type_bytes(ml_graph_type(g, n)));
    }
    return inputs;
}

static void run_piece(drawing *d, int p, int m) {
    const split_task *task = &d->set.tasks[p];
    const ml_roots *roots = &task->roots;
    int from = p == d->set.count ? SAVED_ONCE_PER_STEP : p;
    double **inputs = piece_inputs(d, p, m);
    double **made = values(d, task->graph, inputs, roots->outputs, roots->output_count, d->held);
    CHECK_EQ_INT(roots->kept, roots->output_count);
    for (int i = 0; i < roots->output_count; i++) {
        int saved = task->exports[i];
        CHECK(d->saved[m][saved] == NULL && d->set.saved[saved].from == from);
        CHECK_EQ_INT(d->set.saved[saved].bytes,
                     ml_type_bytes(ml_graph_type(task->graph, roots->outputs[i])));
        d->saved[m][saved] = made[i];
    }
    assign(d, task->graph, roots, inputs, d->held);
}

static bool differ(const double *a, const double *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(a[i] - b[i]) <= 1e-9 * (1 + fabs(b[i])))) return true;
    return false;
}

static void check_outputs(drawing *d, int m) {
    for (int i = 0; i < d->roots.output_count; i++) {
        const saved_value *saved = &d->set.saved[d->set.saved_of_output[i]];
        ml_ref n = d->roots.outputs[i];
        CHECK(saved->from <= d->set.task_of_output[i]);
        const double *made = saved->from == SAVED_GIVEN ? d->fed[m][saved->input]
                                                        : d->saved[m][d->set.saved_of_output[i]];
        EXPECT(!differ(made, d->whole[m][i], ml_type_elements(ml_graph_type(d->g, n))),
               "%s: output %d of microbatch %d", d->f->label, i, m);
    }
}

/* What is the same for all microbatches is computed before them; it assigns nothing. */
static void run_steady(drawing *d) {
    if (!d->set.once_per_step) return;
    CHECK_EQ_INT(d->set.tasks[d->set.count].roots.update_count, 0);
    for (int m = 0; m < d->microbatches; m++) run_piece(d, d->set.count, m);
}

/* Any order in which each piece takes the microbatches in turn, and each microbatch its pieces. */
static void run_pieces(drawing *d) {
    int done[MICROBATCHES] = {0}, left = d->microbatches * d->set.count;
    run_steady(d);
    while (left > 0) {
        int m = (int)fixture_below(d->f, d->microbatches);
        if (done[m] == d->set.count || (m > 0 && done[m] >= done[m - 1])) continue;
        run_piece(d, done[m]++, m);
        left--;
    }
    for (int m = 0; m < d->microbatches; m++) check_outputs(d, m);
    for (int i = 0; i < STATES; i++) {
        const ml_type *type = &ml_graph_state(d->g, (uint32_t)i)->type;
        EXPECT(!differ(d->held[i], d->expected[i], ml_type_elements(type)), "%s: state %d",
               d->f->label, i);
    }
}

static void fill(drawing *d) {
    int inputs = d->f->input_count;
    for (int m = 0; m < d->microbatches; m++) {
        d->fed[m] = ML_NEW_ARRAY(d->f->arena, double *, inputs + 1);
        d->saved[m] = ML_NEW_ARRAY(d->f->arena, double *, d->set.saved_count + 1);
        for (int i = 0; i < inputs; i++) {
            int64_t count = ml_type_elements(&ml_graph_input(d->g, (uint32_t)i)->type);
            d->fed[m][i] = ML_NEW_ARRAY(d->f->arena, double, count);
            for (int64_t k = 0; k < count; k++) d->fed[m][i][k] = fixture_uniform(d->f, -1, 1);
        }
    }
    for (int i = 0; i < STATES; i++) {
        int64_t count = ml_type_elements(&ml_graph_state(d->g, (uint32_t)i)->type);
        d->held[i] = ML_NEW_ARRAY(d->f->arena, double, count);
        for (int64_t k = 0; k < count; k++) d->held[i][k] = fixture_uniform(d->f, -1, 1);
        d->expected[i] = d->held[i];
    }
}

/* The level at which something first reads the state. */
static int first_read(const drawing *d, uint32_t state) {
    uint32_t count = ml_graph_count(d->g);
    int *first = ML_NEW_ARRAY(d->f->arena, int, count), found = INT_MAX;
    for (ml_ref n = 1; n < count; n++) first[n] = d->wave[n] > 0 ? d->wave[n] : INT_MAX;
    for (int i = 0; i < d->roots.output_count; i++)
        if (d->wave[d->roots.outputs[i]] == 0) first[d->roots.outputs[i]] = 0;
    for (int i = 0; i < d->roots.update_count; i++)
        if (d->wave[d->roots.updates[i].value] == 0) first[d->roots.updates[i].value] = 0;
    for (ml_ref n = count - 1; n > 0; n--) {
        const ml_node *node = ml_graph_node(d->g, n);
        if (node->op == ML_OP_STATE && ml_graph_args(d->g, n)[0] == state) found = first[n];
        for (int i = 0; i < node->source_count; i++) {
            int *of = &first[ml_graph_source(d->g, n, i)];
            if (first[n] < *of) *of = first[n];
        }
    }
    return found;
}

/* Whether the state that the message names is read at a lower level than its new value has; sums of
 * gradients may not be read at all but where they grow. */
static bool reads_early(const drawing *d, const char *message) {
    int named = -1;
    if (sscanf(message, "state \"w%d\" (", &named) != 1 || !strstr(message, "is read before"))
        return false;
    for (int i = 0; i < d->roots.update_count; i++) {
        const ml_update *update = &d->roots.updates[i];
        if ((int)update->state != named) continue;
        bool sum = ml_graph_state(d->g, update->state)->kind == ML_STATE_GRADIENT;
        int first = first_read(d, update->state), wave = d->wave[update->value];
        return first < wave || (sum && d->waves.weight_grad && first == wave);
    }
    return false;
}

/* ---- Tests ------------------------------------------------------------------------------------
 */

static int run, refused, overlapping, once_per_step;

static void cut_body(void *context) {
    drawing *d = context;
    task_set_split(d->g, &d->roots, d->input_wave, &d->waves, d->f->arena, &d->set);
}

static void cut_and_run(fixture *f) {
    drawing d = {.f = f, .g = f->g};
    snprintf(f->label, sizeof f->label, "draw %llu", (unsigned long long)(f->random / 2));
    draw(&d);
    ml_graph *drawn = ml_graph_extract(f->g, &d.roots);
    d.g = ml_simplify(drawn, &d.roots);
    levels_of_nodes(&d);
    ml_status status = ml_protect(cut_body, &d);
    if (status != ML_OK) { /* it says which state, and only of microbatches that overlap */
        CHECK(d.waves.overlaps && reads_early(&d, ml_error_last()->text));
        refused++;
    } else {
        run++;
        overlapping += d.waves.overlaps && d.set.count > 1;
        once_per_step += d.set.once_per_step;
        check_shape(&d);
        fill(&d);
        run_whole(&d);
        run_pieces(&d);
    }
    task_set_free(&d.set);
    ml_graph_free(d.g);
    ml_graph_free(drawn);
}

TEST(pipeline_tasks, drawn) {
    int tries = test_all() ? 50000 : 2000;
    run = refused = overlapping = once_per_step = 0;
    for (int i = 0; i < tries; i++) fixture_run(cut_and_run, 30000 + (uint64_t)i);
    if (test_all())
        printf("%d drawn, %d refused, %d overlapping, %d with a steady piece\n", run, refused,
               overlapping, once_per_step);
    CHECK(run > tries / 2 && overlapping > tries / 20 && once_per_step > tries / 20);
}

/* ---- What backward passes are cut into --------------------------------------------------------
 */

static int count_ops(const ml_graph *g, ml_op op) {
    int count = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) count += ml_graph_node(g, n)->op == op;
    return count;
}

/* Bytes of f32 inputs; all others that are read lie there in bf16. */
static int64_t wide_inputs(const ml_graph *g) {
    int64_t bytes = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        const ml_type *type = ml_graph_type(g, n);
        if (ml_graph_node(g, n)->op == ML_OP_INPUT && type->dtype == ML_F32)
            bytes += ml_type_bytes(type);
    }
    return bytes;
}

static ml_update grows(fixture *f, ml_ref by) {
    ml_type type = *ml_graph_type(f->g, by);
    ml_state state = {.name = "sum", .type = type, .kind = ML_STATE_GRADIENT};
    int64_t id = ml_graph_add_state(f->g, &state);
    ml_ref held = ml_graph_add(f->g, ML_OP_STATE, NULL, 0, &id, 1, &type);
    return (ml_update){(uint32_t)id, ml_map2(f->g, ML_OP_ADD, held, by)};
}

/* What a backward pass has of a gated layer, from what is kept of the forward one: x, in bf16. The
 * gate is read in the pass, and by a product with dy that no task waits for; the gradient of the
 * scale is a sum. */
static void cut_layer(fixture *f) {
    ml_graph *g = f->g;
    int wave[SUPPORT_INPUTS] = {0};
    ml_axis token = fixture_axis(f, "t"), ffn = fixture_axis(f, "f"), embed = fixture_axis(f, "e");
    ml_ref fed = fixture_input(f, ML_BF16, "t64 e16", -1, 1);
    ml_ref dy = fixture_input(f, ML_BF16, "t64 e16", -1, 1);
    wave[ml_graph_args(g, fed)[0]] = 1;
    wave[ml_graph_args(g, dy)[0]] = 2;
    ml_ref w = ml_cast(g, fixture_state(f, ML_F32, "e16 f32"), ML_BF16);
    ml_ref scale = ml_cast(g, fixture_state(f, ML_BF16, "f32"), ML_F32);
    ml_ref table = ml_cast(g, fixture_state(f, ML_F32, "v8 e16"), ML_BF16);
    ml_ref found = ml_gather(g, table, fixture_index(f, "t64", 8), fixture_axis(f, "v"));
    ml_ref x = ml_dot(g, ml_map2(g, ML_OP_ADD, fed, found), w, &embed, 1, ML_BF16);
    ml_ref wide = ml_cast(g, x, ML_F32);
    ml_graph_set_flags(g, ML_NODE_COPY); /* recomputed from x */
    ml_ref cube = ml_map2(g, ML_OP_MUL, wide, ml_map2(g, ML_OP_MUL, wide, wide));
    ml_ref gate = ml_map1(g, ML_OP_SIGMOID, cube);
    ml_ref act = ml_cast(g, ml_map1(g, ML_OP_NEG, gate), ML_BF16);
    ml_graph_set_flags(g, 0);
    ml_ref back =
        ml_map2(g, ML_OP_MUL, gate, ml_cast(g, ml_dot(g, dy, w, &embed, 1, ML_BF16), ML_F32));
    ml_ref dx = ml_map2(g, ML_OP_MUL, back, ml_broadcast(g, scale, ml_graph_type(g, gate)));
    ml_ref sent[] = {x, ml_dot(g, ml_cast(g, dx, ML_BF16), w, &ffn, 1, ML_BF16)};
    ml_update updates[] = {grows(f, ml_reduce(g, ML_OP_SUM, back, &token, 1)),
                           grows(f, ml_dot(g, act, dy, &token, 1, ML_F32))};
    ml_roots roots = {.name = "layer", .outputs = sent, .updates = updates};
    roots.output_count = roots.kept = roots.update_count = 2;
    task_waves waves = {
        .count = 2, .wave = {1, 2}, .weight_grad = true, .overlaps = true, .once_per_step = true};
    task_set set;
    task_set_split(g, &roots, wave, &waves, f->arena, &set);
    const ml_graph *main = set.tasks[1].graph, *weight_grad = set.tasks[2].graph;
    CHECK_EQ_INT(count_ops(main, ML_OP_DOT), 2);
    CHECK_EQ_INT(count_ops(main, ML_OP_SUM), 1);
    CHECK_EQ_INT(count_ops(main, ML_OP_STATE), 2); /* the sum and the scale, not the weight */
    CHECK_EQ_INT(count_ops(weight_grad, ML_OP_DOT), 1);
    CHECK_EQ_INT(count_ops(weight_grad, ML_OP_SUM), 0);
    CHECK_EQ_INT(wide_inputs(weight_grad), 0);
    CHECK_EQ_INT(set.once_bytes, 16 * 32 * 2); /* the weight; few rows of the table are read */
    task_set_free(&set);
}

TEST(pipeline_tasks, layer) {
    fixture_run(cut_layer, 1);
}

/* Of a product's halves, gate and up, the pass back reads both, in f32, and a product that waits
 * one: the whole lies in memory, once. What a routine has besides, here indices, is written to its
 * cell by the routine. */
static void cut_halves(fixture *f) {
    ml_graph *g = f->g;
    int wave[SUPPORT_INPUTS] = {0};
    ml_axis token = fixture_axis(f, "t"), embed = fixture_axis(f, "e"),
            joined = fixture_axis(f, "j"), ffn = fixture_axis(f, "f");
    ml_ref x = fixture_input(f, ML_BF16, "t64 e16", -1, 1);
    ml_ref dy = fixture_input(f, ML_BF16, "t64 f32", -1, 1);
    wave[ml_graph_args(g, x)[0]] = 1;
    wave[ml_graph_args(g, dy)[0]] = 2;
    ml_ref w = ml_cast(g, fixture_state(f, ML_F32, "e16 j64"), ML_BF16), half[2], wide[2];
    ml_ref both = ml_dot(g, x, w, &embed, 1, ML_BF16);
    for (int i = 0; i < 2; i++) {
        half[i] = ml_rename(g, ml_slice(g, both, joined, i * 32, i * 32 + 32), joined, ffn);
        wide[i] = ml_cast(g, half[i], ML_F32);
    }
    int64_t args[] = {ffn, 2, ml_axis_fresh(g, "k")};
    ml_ref best = ml_graph_add(g, ML_OP_TOP_K, &half[0], 1, args, 3, NULL),
           index = ml_out(g, best, 1);
    ml_ref act = ml_cast(g, ml_map2(g, ML_OP_MUL, wide[0], wide[1]), ML_BF16);
    ml_ref slope = ml_cast(g, dy, ML_F32), back[2];
    for (int i = 0; i < 2; i++)
        back[i] = ml_cast(g, ml_map2(g, ML_OP_MUL, slope, wide[i]), ML_BF16);
    ml_ref total = ml_cast(g, ml_reduce(g, ML_OP_SUM, slope, &ffn, 1), ML_F64);
    ml_ref picked = ml_map2(g, ML_OP_MUL, ml_cast(g, index, ML_F64), total);
    ml_ref sent[] = {best, act, back[0], back[1], picked};
    ml_update update = grows(f, ml_dot(g, half[1], dy, (ml_axis[]){token, ffn}, 2, ML_F32));
    ml_roots roots = {.name = "halves",
                      .outputs = sent,
                      .output_count = 5,
                      .kept = 5,
                      .updates = &update,
                      .update_count = 1};
    task_waves waves = {.count = 2, .wave = {1, 2}, .weight_grad = true, .overlaps = true};
    task_set set;
    task_set_split(g, &roots, wave, &waves, f->arena, &set);
    for (int p = 1; p < 3; p++) { /* `both` and dy, and the indices */
        const ml_graph *task = set.tasks[p].graph;
        int64_t bytes = 0;
        for (ml_ref n = 1; n < ml_graph_count(task); n++)
            if (ml_graph_node(task, n)->op == ML_OP_INPUT)
                bytes += ml_type_bytes(ml_graph_type(task, n));
        CHECK_EQ_INT(bytes, 64 * 64 * 2 + 64 * 32 * 2 + (p == 1 ? 64 * 2 * 4 : 0));
    }
    CHECK_EQ_INT(count_ops(set.tasks[0].graph, ML_OP_STOP_GRADIENT), 0);
    CHECK_EQ_INT(count_ops(set.tasks[2].graph, ML_OP_DOT), 1);
    task_set_free(&set);
}

TEST(pipeline_tasks, halves) {
    fixture_run(cut_halves, 2);
}
