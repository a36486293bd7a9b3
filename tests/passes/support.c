/* What the tests of the passes share (tests/passes/support.h). */
#include "tests/passes/support.h"
#include "runtime/ops/conv/conv.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/ops/recurrence/recurrence.h"
#include "runtime/optimize/optimize.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    fixture *fixture;
    fixture_body *body;
} call;

static void run_body(void *argument) {
    call *c = argument;
    c->fixture->g = ml_graph_new();
    c->body(c->fixture);
}

void fixture_run(fixture_body *body, uint64_t seed) {
    fixture f = {.random = seed * 2 + 1, .arena = ml_arena_new()};
    call c = {&f, body};
    ml_status status = ml_protect(run_body, &c);
    EXPECT(status == ML_OK, "%s: raised: %s", f.label, ml_error_last()->text);
    ml_graph_free(f.g);
    ml_arena_free(f.arena);
}

double fixture_uniform(fixture *f, double low, double high) {
    return low + (high - low) * ml_random_uniform((int64_t)f->random++, 0);
}

int64_t fixture_below(fixture *f, int64_t bound) {
    return (int64_t)fixture_uniform(f, 0, (double)bound);
}

ml_axis fixture_axis(fixture *f, const char *name) {
    return ml_axis_named(f->g, name);
}

ml_type fixture_type(fixture *f, ml_dtype dtype, const char *axes) {
    ml_type type = {.dtype = dtype};
    char name[32];
    int size, used;
    while (sscanf(axes, " %31[a-z_]%d%n", name, &size, &used) == 2) {
        type.axis[type.rank] = fixture_axis(f, name);
        type.size[type.rank++] = size;
        axes += used;
    }
    return type;
}

static double *random_values(fixture *f, const ml_type *type, double low, double high) {
    int64_t count = ml_type_elements(type);
    double *values = ML_NEW_ARRAY(f->arena, double, count);
    for (int64_t i = 0; i < count; i++) values[i] = fixture_uniform(f, low, high);
    return values;
}

static ml_ref add_input(fixture *f, ml_type type, double *values) {
    ml_input input = {.name = ml_arena_format(f->arena, "x%d", f->input_count), .type = type};
    int64_t id = ml_graph_add_input(f->g, &input);
    f->inputs[id] = values;
    f->nodes[id] = ml_graph_add(f->g, ML_OP_INPUT, NULL, 0, &id, 1, &type);
    f->input_count = (int)id + 1;
    return f->nodes[id];
}

ml_ref fixture_input(fixture *f, ml_dtype dtype, const char *axes, double low, double high) {
    ml_type type = fixture_type(f, dtype, axes);
    return add_input(f, type, random_values(f, &type, low, high));
}

ml_ref fixture_index(fixture *f, const char *axes, int64_t bound) {
    ml_type type = fixture_type(f, ML_I32, axes);
    double *values = random_values(f, &type, 0, (double)bound);
    for (int64_t i = 0; i < ml_type_elements(&type); i++) values[i] = floor(values[i]);
    return add_input(f, type, values);
}

ml_ref fixture_state(fixture *f, ml_dtype dtype, const char *axes) {
    ml_type type = fixture_type(f, dtype, axes);
    return fixture_add_state(f, &type);
}

ml_ref fixture_add_state(fixture *f, const ml_type *type) {
    ml_state state = {.name = ml_arena_format(f->arena, "w%d", f->state_count), .type = *type};
    int64_t id = ml_graph_add_state(f->g, &state);
    f->states[id] = random_values(f, &state.type, -1, 1);
    f->state_count = (int)id + 1;
    return ml_graph_add(f->g, ML_OP_STATE, NULL, 0, &id, 1, &state.type);
}

ml_ref fixture_loss(fixture *f, ml_ref y) {
    ml_type type = *ml_graph_type(f->g, y);
    type.dtype = ML_F64;
    ml_ref weights = add_input(f, type, random_values(f, &type, -1, 1));
    ml_ref product = ml_map2(f->g, ML_OP_MUL, ml_cast(f->g, y, ML_F64), weights);
    f->nodes[f->input_count - 1] = 0; /* its gradient is y: not worth checking */
    return ml_reduce(f->g, ML_OP_SUM, product, type.axis, type.rank);
}

double *fixture_value(fixture *f, const ml_graph *g, ml_ref n) {
    double *result;
    ml_reference(g, (const double *const *)f->states, (const double *const *)f->inputs, &n, 1,
                 &result, false, f->arena);
    return result;
}

const char *fixture_type_text(fixture *f, const ml_graph *g, ml_ref n) {
    ml_text text = {.arena = f->arena};
    ml_type_print(g, ml_graph_type(g, n), &text);
    return text.text;
}

static bool near(double a, double b, double tolerance) {
    if (a == b || (isnan(a) && isnan(b))) return true;
    return fabs(a - b) <= tolerance * (1 + fabs(a) + fabs(b));
}

static void check_near(const fixture *f, const char *what, int64_t i, double actual,
                       double expected, double tolerance) {
    EXPECT(near(actual, expected, tolerance), "%s: %s[%lld] is %.12g, expected %.12g", f->label,
           what, (long long)i, actual, expected);
}

static void check_gradient(fixture *f, ml_ref loss, int input, ml_ref gradient) {
    const double step = 1e-5;
    const ml_type *type = ml_graph_type(f->g, f->nodes[input]);
    if (gradient)
        CHECK_TEXT(fixture_type_text(f, f->g, gradient),
                   fixture_type_text(f, f->g, f->nodes[input]));
    const double *values = gradient ? fixture_value(f, f->g, gradient) : NULL;
    for (int64_t i = 0; i < ml_type_elements(type); i++) {
        double *x = &f->inputs[input][i], kept = *x;
        *x = kept + step;
        double above = fixture_value(f, f->g, loss)[0];
        *x = kept - step;
        double below = fixture_value(f, f->g, loss)[0];
        *x = kept;
        char what[32];
        snprintf(what, sizeof what, "gradient of input %d", input);
        check_near(f, what, i, values ? values[i] : 0, (above - below) / (2 * step), 2e-7);
    }
}

void fixture_check_gradients(fixture *f, ml_ref loss) {
    ml_ref wrt[SUPPORT_INPUTS] = {0}, gradients[SUPPORT_INPUTS], roots[SUPPORT_INPUTS + 1] = {loss};
    int inputs[SUPPORT_INPUTS], count = 0, root_count = 1;
    for (int i = 0; i < f->input_count; i++) {
        if (!f->nodes[i]) continue;
        if (ml_dtypes[ml_graph_type(f->g, f->nodes[i])->dtype].kind != ML_KIND_FLOAT) continue;
        inputs[count] = i, wrt[count++] = f->nodes[i];
    }
    ml_autodiff(f->g, loss, wrt, count, gradients);
    for (int i = 0; i < count; i++) {
        check_gradient(f, loss, inputs[i], gradients[i]);
        if (gradients[i]) roots[root_count++] = gradients[i];
    }
    fixture_check_passes(f, roots, root_count, 1e-9);
}

typedef struct {
    const char *name;
    ml_graph *(*run)(const ml_graph *from, ml_roots *roots);
} named_pass;

static bool never(const void *context, const ml_graph *g, ml_ref n) {
    (void)context, (void)g, (void)n;
    return false;
}

static bool always(const void *context, const ml_graph *g, ml_ref n) {
    (void)context, (void)g, (void)n;
    return true;
}
static ml_graph *segment_linear_scans(const ml_graph *from, ml_roots *roots) {
    return ml_segment_linear_scans(from, roots, 132, 3, always, NULL);
}

static ml_graph *decompose_all(const ml_graph *from, ml_roots *roots) {
    ml_graph *without = ml_decompose_conv(from, roots);
    ml_graph *scans = ml_decompose_linear_scans(without, roots, never, NULL);
    ml_graph *g = ml_decompose(scans, roots, INT64_MAX);
    ml_graph_free(scans);
    ml_graph_free(without);
    return g;
}
/* Products of more than 80 elements are what it counts as large here. */
static ml_graph *chunk_small(const ml_graph *from, ml_roots *roots) {
    return ml_chunk_logits(from, roots, 80 * 8);
}
static ml_graph *recompute(const ml_graph *from, ml_roots *roots) {
    return ml_recompute(from, roots, 0, 0, NULL, NULL);
}

static ml_graph *recompute_selective(const ml_graph *from, ml_roots *roots) {
    return ml_recompute(from, roots, 6 << 10, 1, NULL, NULL);
}
/* Along every axis of an input that can be halved, one after the other. */
static ml_graph *halves_of_all(const ml_graph *from, ml_roots *roots) {
    bool done[256] = {false};
    ml_graph *g = ml_simplify(from, roots);
    for (ml_ref n = 1; n < ml_graph_count(from); n++) {
        const ml_type *type = ml_graph_type(from, n);
        for (int i = 0; ml_graph_node(from, n)->op == ML_OP_INPUT && i < type->rank; i++) {
            if (type->size[i] % 2 != 0 || type->axis[i] >= 256 || done[type->axis[i]]) continue;
            done[type->axis[i]] = true;
            ml_graph *next = ml_half_batches(g, roots, type->axis[i], type->size[i]);
            ml_graph_verify(next, roots, "halves");
            ml_graph_free(g);
            g = next;
        }
    }
    return g;
}
static ml_graph *all_passes(const ml_graph *from, ml_roots *roots);

static ml_graph *reuse_concat_slices(const ml_graph *from, ml_roots *roots) {
    static const int level[SUPPORT_INPUTS];
    return ml_reuse_concat_slices(from, roots, level);
}

/* As if each input came later than the one before. */
static ml_graph *reuse_concat_slices_in_turn(const ml_graph *from, ml_roots *roots) {
    int level[SUPPORT_INPUTS];
    for (int i = 0; i < SUPPORT_INPUTS; i++) level[i] = i;
    return ml_reuse_concat_slices(from, roots, level);
}

static const named_pass passes[] = {
    {"simplify", ml_simplify},
    {"decompose", decompose_all},
    {"recompute", recompute},
    {"merge_products", ml_merge_products},
    {"chunk", chunk_small},
    {"all", all_passes},
    {"recompute_selective", recompute_selective},
    {"propagate_layout", ml_propagate_layout},
    {"halves", halves_of_all},
    {"split_accumulation", ml_split_accumulation},
    {"invert_permutations", ml_invert_permutations},
    {"split_scaled_sums", ml_split_scaled_sums},
    {"split_f32_products", ml_split_f32_products},
    {"fuse_expert_norms", ml_fuse_expert_norms},
    {"fuse_gated_experts", ml_fuse_gated_experts},
    {"reuse_concat_slices", reuse_concat_slices},
    {"reuse_concat_slices_in_turn", reuse_concat_slices_in_turn},
    {"segment_linear_scans", segment_linear_scans},
    {"count_sorts", ml_count_sorts},
};
enum { PASS_COUNT = sizeof passes / sizeof *passes };

/* In the order in which a plan runs them. */
static ml_graph *all_passes(const ml_graph *from, ml_roots *roots) {
    const ml_graph *g = from;
    static const int order[] = {1, 0, 3, 0, 4, 0, 2};
    for (int i = 0; i < 7; i++) {
        ml_graph *next = passes[order[i]].run(g, roots);
        ml_graph_verify(next, roots, passes[order[i]].name);
        if (g != from) ml_graph_free((ml_graph *)g);
        g = next;
    }
    return (ml_graph *)g;
}

static const named_pass *find_pass(const char *name) {
    for (int i = 0; i < PASS_COUNT; i++)
        if (strcmp(passes[i].name, name) == 0) return &passes[i];
    return NULL;
}

static ml_graph *run_pass(fixture *f, const char *name, const ml_ref *nodes, int count,
                          ml_roots *roots) {
    *roots = (ml_roots){.output_count = count};
    roots->outputs = ML_NEW_ARRAY(f->arena, ml_ref, count);
    memcpy(roots->outputs, nodes, sizeof *nodes * (size_t)count);
    ml_graph *result = find_pass(name)->run(f->g, roots);
    ml_graph_verify(result, roots, name);
    return result;
}

void fixture_check_pass(fixture *f, const char *name, const ml_ref *nodes, int count,
                        double tolerance) {
    ml_roots roots;
    ml_graph *result = run_pass(f, name, nodes, count, &roots);
    for (int i = 0; i < count; i++) {
        CHECK_TEXT(fixture_type_text(f, result, roots.outputs[i]),
                   fixture_type_text(f, f->g, nodes[i]));
        const double *before = fixture_value(f, f->g, nodes[i]);
        const double *after = fixture_value(f, result, roots.outputs[i]);
        int64_t elements = ml_type_elements(ml_graph_type(f->g, nodes[i]));
        for (int64_t k = 0; k < elements; k++)
            check_near(f, name, k, after[k], before[k], tolerance);
    }
    ml_graph_free(result);
}

void fixture_check_passes(fixture *f, const ml_ref *nodes, int count, double tolerance) {
    for (int i = 0; i < PASS_COUNT; i++)
        fixture_check_pass(f, passes[i].name, nodes, count, tolerance);
}

int fixture_count_after(fixture *f, const char *pass, const ml_ref *nodes, int count, ml_op op) {
    ml_roots roots;
    ml_graph *result = run_pass(f, pass, nodes, count, &roots);
    int found = 0;
    for (ml_ref n = 1; n < ml_graph_count(result); n++) found += ml_graph_node(result, n)->op == op;
    ml_graph_free(result);
    return found;
}

ml_ref fixture_recurrence(fixture *f, const ml_ref xghw[4], bool reverse) {
    ml_graph *g = f->g;
    ml_recurrence_pair in[2], h = {0, xghw[2]};
    ml_type type = *ml_graph_type(g, h.value);
    ml_axis s = fixture_axis(f, "s");
    const ml_type *x = ml_graph_type(g, xghw[0]);
    int64_t length = x->size[ml_type_find(x, s)];
    h.parameter = ml_recurrence_parameter(g, &type);
    for (int i = 0; i < 2; i++) {
        ml_recurrence_slice(g, xghw[i], s, length, &type);
        in[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &type), xghw[i]};
    }
    ml_ref gated = ml_map2(g, ML_OP_MUL, h.parameter, in[1].parameter);
    ml_ref scaled = ml_map2(g, ML_OP_MUL, in[0].parameter, xghw[3]);
    ml_ref next = ml_map2(g, ML_OP_ADD, ml_map1(g, ML_OP_TANH, gated), scaled);
    ml_ref summed = ml_map2(g, ML_OP_MUL, h.parameter, in[0].parameter);
    ml_recurrence_step step = {.axis = s,
                               .reverse = reverse,
                               .length = length,
                               .inputs = in,
                               .input_count = 2,
                               .states = &h,
                               .state_count = 1,
                               .next = &next,
                               .stacked = &gated,
                               .stacked_count = 1,
                               .summed = &summed,
                               .summed_count = 1};
    return ml_recurrence_new(g, &step);
}

ml_ref fixture_linear_scan(fixture *f, const ml_ref *sources, int rank, bool after, bool reverse) {
    const ml_type *state = ml_graph_type(f->g, sources[LINEAR_SCAN_STATE]);
    ml_axis values = fixture_axis(f, "v");
    ml_linear_scan scan = {.axis = fixture_axis(f, "s"),
                           .keys = fixture_axis(f, "k"),
                           .values = ml_type_find(state, values) >= 0 ? values : 0,
                           .reverse = reverse,
                           .after = after,
                           .dtype = (ml_dtype)state->dtype,
                           .rank = rank};
    return ml_linear_scan_new(f->g, sources, &scan);
}
