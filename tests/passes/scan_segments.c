/* Scans by segments with segments of other lengths, or of all positions: values and gradients are
 * the same, and where one segment has all positions the gradient computes nothing again. */
#include "runtime/ops/recurrence/recurrence.h"
#include "tests/passes/support.h"

enum { OUTPUTS = 8 };

typedef struct {
    fixture *f;
    ml_ref x, w, state[2];
    ml_roots roots;
} scan;

/* h' = tanh(h W + x), c' = c sigmoid(h) + h': nonlinear, two states, of products. */
static void step_of(scan *s, ml_ref x, const ml_ref before[2], ml_ref next[2]) {
    ml_graph *g = s->f->g;
    const ml_axis h = fixture_axis(s->f, "h"), e = fixture_axis(s->f, "e");
    ml_ref moved = ml_dot(g, ml_rename(g, before[0], h, e), s->w, &e, 1, ML_F64);
    next[0] = ml_map1(g, ML_OP_TANH, ml_map2(g, ML_OP_ADD, moved, x));
    ml_ref kept = ml_map2(g, ML_OP_MUL, before[1], ml_map1(g, ML_OP_SIGMOID, before[0]));
    next[1] = ml_map2(g, ML_OP_ADD, kept, next[0]);
}

static void build(scan *s, const char *positions, int64_t size, bool reverse) {
    fixture *f = s->f;
    ml_graph *g = f->g;
    const ml_axis axis = fixture_axis(f, "s");
    s->x = fixture_input(f, ML_F64, positions, -1, 1);
    s->w = fixture_input(f, ML_F64, "e3 h3", -1, 1);
    ml_type slice, type = fixture_type(f, ML_F64, "b2 h3");
    const int64_t length = ml_type_size(ml_graph_type(g, s->x), axis);
    ml_recurrence_slice(g, s->x, axis, length, &slice);
    ml_recurrence_pair input = {ml_recurrence_parameter(g, &slice), s->x}, states[2];
    ml_ref before[2], next[2], made[4], gradients[4];
    for (int i = 0; i < 2; i++) {
        s->state[i] = fixture_input(f, ML_F64, "b2 h3", -1, 1);
        before[i] = ml_recurrence_parameter(g, &type);
        states[i] = (ml_recurrence_pair){before[i], s->state[i]};
    }
    step_of(s, input.parameter, before, next);
    const ml_ref stacked[2] = {ml_map2(g, ML_OP_MUL, next[1], before[0]), next[0]};
    ml_recurrence_step step = {.axis = axis,
                               .reverse = reverse,
                               .length = length,
                               .inputs = &input,
                               .input_count = 1,
                               .states = states,
                               .state_count = 2,
                               .next = next,
                               .stacked = stacked,
                               .stacked_count = 2};
    ml_recurrence_segments(g, &step, size, made);
    ml_ref loss = fixture_loss(f, ml_map2(g, ML_OP_MUL, made[0], made[1]));
    loss = ml_map2(g, ML_OP_ADD, loss, fixture_loss(f, ml_map2(g, ML_OP_MUL, made[2], made[3])));
    const ml_ref wrt[4] = {s->x, s->w, s->state[0], s->state[1]};
    ml_autodiff(g, loss, wrt, 4, gradients);
    s->roots = (ml_roots){.outputs = ML_NEW_ARRAY(f->arena, ml_ref, OUTPUTS),
                          .updates = ML_NEW_ARRAY(f->arena, ml_update, 1)};
    for (int i = 0; i < 4; i++) s->roots.outputs[s->roots.output_count++] = made[i];
    for (int i = 0; i < 4; i++) s->roots.outputs[s->roots.output_count++] = gradients[i];
}

static int count_scans(const ml_graph *g) {
    int count = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        count += ml_graph_node(g, n)->op == ML_OP_RECURRENCE;
    return count;
}

/* expected: positions of a segment; 0: of none. */
static void check_length(scan *s, int64_t positions, int64_t expected, int scans) {
    fixture *f = s->f;
    int64_t longest = 0, found = 0;
    ml_roots roots = s->roots;
    roots.outputs = ML_NEW_ARRAY(f->arena, ml_ref, OUTPUTS);
    for (int i = 0; i < OUTPUTS; i++) roots.outputs[i] = s->roots.outputs[i];
    ml_graph *resized = ml_resize_segments(f->g, &roots, positions, &longest);
    ml_graph_verify(resized, &roots, "resize_segments");
    ml_graph *simple = ml_simplify(resized, &roots);
    CHECK_EQ_INT(longest, 24);
    for (ml_ref n = 1; n < ml_graph_count(simple); n++)
        if (ml_graph_node(simple, n)->op == ML_OP_RECURRENCE && !found)
            found = ml_recurrence_segment(simple, n);
    CHECK_EQ_INT(found, expected);
    if (scans) CHECK_EQ_INT(count_scans(simple), scans);
    for (int i = 0; i < OUTPUTS; i++) {
        const int64_t count = ml_type_elements(ml_graph_type(f->g, s->roots.outputs[i]));
        CHECK_TEXT(fixture_type_text(f, simple, roots.outputs[i]),
                   fixture_type_text(f, f->g, s->roots.outputs[i]));
        const double *a = fixture_value(f, f->g, s->roots.outputs[i]);
        const double *b = fixture_value(f, simple, roots.outputs[i]);
        for (int64_t k = 0; k < count; k++) CHECK_NEAR(b[k], a[k], 1e-12);
    }
    ml_graph_free(simple);
    ml_graph_free(resized);
}

static void divided(fixture *f) {
    scan s = {.f = f};
    build(&s, "s24 b2 h3", 4, false);
    check_length(&s, 0, 0, 2); /* forward, and its gradient */
    check_length(&s, 24, 0, 2);
    check_length(&s, 4, 4, 0);
    check_length(&s, 12, 12, 0);
    check_length(&s, 9, 8, 0); /* the next that divides */
    check_length(&s, 1, 2, 0);
}

static void reversed_with_rest(fixture *f) {
    scan s = {.f = f};
    build(&s, "s26 h3 b2", 4, true);
    check_length(&s, 0, 0, 4); /* the rest has two */
    check_length(&s, 6, 6, 0);
}

TEST(passes, segments_of_scans_are_resized) {
    fixture_run(divided, 1);
    fixture_run(reversed_with_rest, 2);
}
