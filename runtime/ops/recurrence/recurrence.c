/* Recurrences: the node, its type, how a step becomes its functions. */
#include "runtime/ops/recurrence/recurrence.h"

#include <string.h>

#include "runtime/ops/recurrence/recurrence_internal.h"

static ml_recurrence unpack(const int64_t *args, int arg_count, int source_count) {
    ml_recurrence r = {.axis = (ml_axis)args[0],
                       .reverse = args[1] != 0,
                       .length = args[2],
                       .inputs = (int)args[3],
                       .stacked = (int)args[4],
                       .summed = (int)args[5]};
    r.states = arg_count - RECURRENCE_HEAD - r.stacked - r.summed;
    r.captured = source_count - r.inputs - r.states;
    return r;
}

void ml_recurrence_read(const ml_graph *g, ml_ref n, ml_recurrence *out) {
    const ml_node *node = ml_graph_node(g, n);
    *out = unpack(ml_graph_args(g, n), node->arg_count, node->source_count);
}

ml_ref ml_recurrence_root(const ml_graph *g, ml_ref n, int i) {
    assert(i >= 0 && RECURRENCE_HEAD + i < ml_graph_node(g, n)->arg_count);
    return (ml_ref)ml_graph_args(g, n)[RECURRENCE_HEAD + i];
}

int ml_recurrence_roots(const ml_recurrence *r) {
    return r->states + r->stacked + r->summed;
}

static void without_axis(const ml_type *from, int at, ml_type *out) {
    *out = *from;
    out->rank--;
    for (int i = at; i < out->rank; i++) {
        out->axis[i] = from->axis[i + 1];
        out->size[i] = from->size[i + 1];
    }
}

static void with_axis(const ml_type *from, ml_axis axis, int64_t length, ml_type *out) {
    *out = *from;
    out->rank++;
    for (int i = from->rank; i > 0; i--) {
        out->axis[i] = from->axis[i - 1];
        out->size[i] = from->size[i - 1];
    }
    out->axis[0] = axis;
    out->size[0] = length;
}

/* Of output i: root is the step's result that it is made of; whether it is one of each position. */
static bool output_root(const ml_recurrence *r, int i, int *root) {
    int kinds[] = {r->stacked, r->summed, r->states, r->states};
    int first[] = {r->states, r->states + r->stacked, 0, 0};
    int kind = 0;
    for (; kind < 3 && i >= kinds[kind]; kind++) i -= kinds[kind];
    *root = first[kind] + i;
    return kind == 0 || kind == 3;
}

void ml_recurrence_type(const ml_graph *g, ml_ref n, int i, ml_type *out) {
    ml_recurrence r;
    int root;
    ml_recurrence_read(g, n, &r);
    bool all = output_root(&r, i, &root);
    *out = *ml_graph_type(g, ml_recurrence_root(g, n, root));
    if (!all) return;
    ml_type one = *out;
    with_axis(&one, r.axis, r.length, out);
}

/* ---- Checks ---- */

static void check_parameter(const infer *in, const ml_recurrence *r, ml_ref param) {
    int64_t index = ml_graph_args(in->g, param)[0];
    if (index < 0 || index >= in->source_count)
        ml_raise(ML_INTERNAL, "a step has no parameter %lld", (long long)index);
    ml_type slice, type = *infer_source(in, (int)index);
    if (index < r->inputs) {
        if (type.rank == 0 || type.axis[0] != r->axis || type.size[0] != r->length)
            ml_raise(ML_INTERNAL, "input %lld of a recurrence does not begin with its axis",
                     (long long)index);
        without_axis(&type, 0, &slice);
        type = slice;
    }
    if (!ml_type_equal(&type, ml_graph_type(in->g, param)))
        ml_raise(ML_INTERNAL, "parameter %lld of a step has the wrong type", (long long)index);
}

static void check_root(const infer *in, const ml_recurrence *r, int i) {
    ml_ref root = (ml_ref)in->args[RECURRENCE_HEAD + i];
    if (root == 0 || !(ml_graph_node(in->g, root)->flags & ML_NODE_FUNCTION))
        ml_raise(ML_INTERNAL, "root %d of a step is no function", i);
    if (i < r->states &&
        !ml_type_equal(ml_graph_type(in->g, root), infer_source(in, r->inputs + i)))
        ml_raise(ML_INTERNAL, "state %d of a recurrence changes its type", i);
    ml_refs body = {0};
    graph_reach(in->g, root, ml_graph_arena(in->g), &body);
    for (uint32_t k = 0; k < body.count; k++)
        if (ml_graph_node(in->g, body.at[k])->op == ML_OP_PARAM) check_parameter(in, r, body.at[k]);
}

void recurrence_infer(infer *in, ml_type *out) {
    ml_recurrence r = unpack(in->args, in->arg_count, in->source_count);
    bool sound = r.inputs >= 0 && r.states >= 0 && r.captured >= 0 && r.stacked >= 0 &&
                 r.summed >= 0 && r.length > 0 && ml_recurrence_roots(&r) > 0;
    if (!sound) ml_raise(ML_INTERNAL, "a recurrence has wrong numbers of operands and roots");
    for (int i = 0; i < ml_recurrence_roots(&r); i++) check_root(in, &r, i);
    int root;
    bool all = output_root(&r, 0, &root);
    ml_type one = *ml_graph_type(in->g, (ml_ref)in->args[RECURRENCE_HEAD + root]);
    if (!all) {
        *out = one;
        return;
    }
    out->dtype = one.dtype;
    infer_append(in, out, r.axis, r.length);
    for (int i = 0; i < one.rank; i++) infer_append(in, out, one.axis[i], one.size[i]);
}

/* ---- Making one ---- */

ml_ref ml_recurrence_parameter(ml_graph *g, const ml_type *type) {
    int64_t index = ((int64_t)1 << 32) + ++g->tables->fresh;
    return ml_graph_add(g, ML_OP_PARAM, NULL, 0, &index, 1, type);
}

static _Noreturn void refuse(ml_ref a, ml_ref b, const char *help, const char *format,
                             const char *what) {
    ml_fail(ML_INVALID, format, what);
    ml_error_last()->operands[0] = a;
    ml_error_last()->operands[1] = b;
    ml_error_last()->operand_count = b ? 2 : 1;
    if (help) ml_help("%s", help);
    ml_raise_last();
}

void ml_recurrence_slice(const ml_graph *g, ml_ref input, ml_axis axis, int64_t length,
                         ml_type *out) {
    const ml_type *t = ml_graph_type(g, input);
    int at = ml_type_find(t, axis);
    if (at < 0)
        refuse(input, 0, "tensors without it are used in the step as they are",
               "scan: an input has no axis \"%s\"", ml_axis_name(g, axis));
    if (t->size[at] != length)
        refuse(input, 0, NULL, "scan: the inputs have different sizes of \"%s\"",
               ml_axis_name(g, axis));
    without_axis(t, at, out);
}

/* A step on its way into functions. */
typedef struct {
    ml_graph *g;
    const ml_recurrence_step *step;
    ml_ref floor;    /* nodes before it depend on no parameter of the step */
    ml_refs body;    /* what the roots reach from there on, and constants, ascending */
    ml_index places; /* of nodes in body */
    uint8_t *inside; /* by place: depends on a parameter, or is a constant */
    ml_ref *copies;  /* by place: in the functions; 0 not yet */
    ML_VEC(ml_ref) sources;
    int inputs; /* sources that are */
} making;

static uint64_t ref_hash(ml_ref n) {
    return n * 0x9E3779B97F4A7C15u;
}

static uint32_t place_of(const making *m, ml_ref n) {
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&m->places, ref_hash(n), &cursor)) != ML_INDEX_NONE)
        if (m->body.at[at] == n) return at;
    return ML_INDEX_NONE;
}

/* Computed from nothing, in a few operations: no reason for memory outside of the step. */
static bool is_constant(const ml_graph *g, ml_ref n, int depth) {
    const ml_node *node = ml_graph_node(g, n);
    if (node->op == ML_OP_CONST || node->op == ML_OP_IOTA) return true;
    if (node->source_count == 0 || !ml_op_is((ml_op)node->op, ML_CHEAP) || depth == 0) return false;
    for (int i = 0; i < node->source_count; i++)
        if (!is_constant(g, ml_graph_source(g, n, i), depth - 1)) return false;
    return true;
}

enum { CONSTANT_DEPTH = 4 };

static void reach(making *m, ml_ref n) {
    if (place_of(m, n) != ML_INDEX_NONE) return;
    *ML_PUSH(ml_graph_arena(m->g), &m->body) = n;
    ml_index_add(&m->places, ref_hash(n), m->body.count - 1);
}

static void reach_all(making *m) {
    const ml_recurrence_step *s = m->step;
    for (int i = 0; i < s->state_count; i++) reach(m, s->next[i]);
    for (int i = 0; i < s->stacked_count; i++) reach(m, s->stacked[i]);
    for (int i = 0; i < s->summed_count; i++) reach(m, s->summed[i]);
    for (uint32_t next = 0; next < m->body.count; next++) {
        ml_ref n = m->body.at[next];
        if (n < m->floor && !is_constant(m->g, n, CONSTANT_DEPTH)) continue;
        for (int i = 0; i < ml_graph_node(m->g, n)->source_count; i++)
            reach(m, ml_graph_source(m->g, n, i));
    }
    graph_sort(&m->body);
    m->places = (ml_index){.arena = ml_graph_arena(m->g)};
    for (uint32_t i = 0; i < m->body.count; i++)
        ml_index_add(&m->places, ref_hash(m->body.at[i]), i);
}

static bool is_parameter(const ml_recurrence_pair *pairs, int count, ml_ref n) {
    for (int i = 0; i < count; i++)
        if (pairs[i].parameter == n) return true;
    return false;
}

static void mark_inside(making *m) {
    const ml_recurrence_step *s = m->step;
    m->inside = ml_arena_alloc(ml_graph_arena(m->g), m->body.count + 1);
    m->copies = ML_NEW_ARRAY(ml_graph_arena(m->g), ml_ref, m->body.count + 1);
    for (uint32_t i = 0; i < m->body.count; i++) {
        ml_ref n = m->body.at[i];
        bool inside = is_parameter(s->inputs, s->input_count, n) ||
                      is_parameter(s->states, s->state_count, n) ||
                      is_parameter(s->captured, s->captured_count, n) ||
                      is_constant(m->g, n, CONSTANT_DEPTH);
        for (int k = 0; k < ml_graph_node(m->g, n)->source_count && n >= m->floor && !inside; k++)
            inside = m->inside[place_of(m, ml_graph_source(m->g, n, k))] == 2;
        bool constant = inside && is_constant(m->g, n, CONSTANT_DEPTH);
        m->inside[i] = constant ? 1 : inside ? 2 : 0;
    }
}

/* The function's parameter for one more source of the node. */
static ml_ref parameter_of_source(making *m, ml_ref value, const ml_type *type) {
    int64_t index = m->sources.count;
    *ML_PUSH(ml_graph_arena(m->g), &m->sources) = value;
    ml_ref param = ml_graph_add(m->g, ML_OP_PARAM, NULL, 0, &index, 1, type);
    return graph_copy_node(m->g, m->g, param, NULL, ML_NODE_FUNCTION, 0);
}

static void bind(making *m, const ml_recurrence_pair *pair, ml_ref value) {
    uint32_t at = place_of(m, pair->parameter);
    ml_type type = *ml_graph_type(m->g, pair->parameter);
    ml_ref param = parameter_of_source(m, value, &type);
    if (at != ML_INDEX_NONE) m->copies[at] = param;
}

static ml_ref capture(making *m, ml_ref n) {
    ml_type type = *ml_graph_type(m->g, n);
    if (ml_type_find(&type, m->step->axis) >= 0)
        refuse(n, 0, "give it in inputs = {...}: the step gets its slice at each position",
               "scan: the step uses a tensor that has the axis \"%s\"",
               ml_axis_name(m->g, m->step->axis));
    return parameter_of_source(m, n, &type);
}

static void bind_all(making *m) {
    const ml_recurrence_step *s = m->step;
    for (int i = 0; i < s->input_count; i++) {
        if (place_of(m, s->inputs[i].parameter) == ML_INDEX_NONE) continue;
        ml_type slice = *ml_graph_type(m->g, s->inputs[i].parameter), order;
        with_axis(&slice, s->axis, s->length, &order);
        bind(m, &s->inputs[i], ml_permute(m->g, s->inputs[i].value, &order));
        m->inputs++;
    }
    for (int i = 0; i < s->state_count; i++) {
        ml_type order = *ml_graph_type(m->g, s->states[i].parameter);
        bind(m, &s->states[i], ml_permute(m->g, s->states[i].value, &order));
    }
    for (int i = 0; i < s->captured_count; i++)
        if (place_of(m, s->captured[i].parameter) != ML_INDEX_NONE)
            bind(m, &s->captured[i], s->captured[i].value);
}

static ml_ref function_of(making *m, ml_ref n) {
    uint32_t at = place_of(m, n);
    if (m->copies[at] == 0) m->copies[at] = capture(m, n);
    return m->copies[at];
}

static void copy_inside(making *m) {
    for (uint32_t i = 0; i < m->body.count; i++) {
        if (!m->inside[i] || m->copies[i]) continue;
        ml_ref n = m->body.at[i], few[16];
        int count = ml_graph_node(m->g, n)->source_count;
        ml_ref *sources = count > 16 ? ML_NEW_ARRAY(ml_graph_arena(m->g), ml_ref, count) : few;
        for (int k = 0; k < count; k++) sources[k] = function_of(m, ml_graph_source(m->g, n, k));
        m->copies[i] = graph_copy_node(m->g, m->g, n, sources, ML_NODE_FUNCTION, ML_NODE_GRADIENT);
    }
}

/* The next value of state i, in the state's order. */
static ml_ref next_state(ml_graph *g, const ml_recurrence_step *s, int i) {
    ml_ref param = s->states[i].parameter, next = s->next[i];
    const ml_type *state = ml_graph_type(g, param), *type = ml_graph_type(g, next);
    if (ml_type_same_axes(state, type) && state->dtype == type->dtype) {
        ml_type order = *state;
        return ml_permute(g, next, &order);
    }
    ml_arena *arena = ml_graph_arena(g);
    ml_text text = {.arena = arena};
    const ml_origin *origin = ml_graph_origin(g, next);
    ml_text_add(&text, "\"%s\" changes from ", s->names ? s->names[i] : "?");
    ml_type_print(g, state, &text);
    ml_text_add(&text, " to ");
    ml_type_print(g, type, &text);
    if (origin->file) ml_text_add(&text, " at %s:%d", origin->file, origin->line);
    refuse(s->states[i].value, next,
           "a state keeps its dtype and axes from step to step: cast or reduce its new value, or "
           "begin with another initial one",
           "scan: state %s", text.text);
}

static ml_ref new_node(ml_graph *g, const ml_recurrence_step *step) {
    ml_recurrence_step s = *step;
    ml_arena *arena = ml_graph_arena(g);
    making m = {.g = g, .step = &s, .places = {.arena = arena}};
    ml_ref *next = ML_NEW_ARRAY(arena, ml_ref, s.state_count + 1);
    for (int i = 0; i < s.state_count; i++) next[i] = next_state(g, &s, i);
    s.next = next;
    recurrence_hoist(g, &s);
    m.floor = ml_graph_count(g);
    const ml_recurrence_pair *pairs[] = {s.inputs, s.states, s.captured};
    const int counts[] = {s.input_count, s.state_count, s.captured_count};
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < counts[k]; i++)
            if (pairs[k][i].parameter < m.floor) m.floor = pairs[k][i].parameter;
    reach_all(&m);
    mark_inside(&m);
    bind_all(&m);
    copy_inside(&m);
    int roots = s.state_count + s.stacked_count + s.summed_count;
    int64_t *args = ML_NEW_ARRAY(arena, int64_t, RECURRENCE_HEAD + roots);
    const int64_t head[RECURRENCE_HEAD] = {s.axis,   s.reverse,       s.length,
                                           m.inputs, s.stacked_count, s.summed_count};
    memcpy(args, head, sizeof head);
    int at = RECURRENCE_HEAD;
    for (int i = 0; i < s.state_count; i++) args[at++] = function_of(&m, s.next[i]);
    for (int i = 0; i < s.stacked_count; i++) args[at++] = function_of(&m, s.stacked[i]);
    for (int i = 0; i < s.summed_count; i++) args[at++] = function_of(&m, s.summed[i]);
    return ml_graph_add(g, ML_OP_RECURRENCE, m.sources.at, (int)m.sources.count, args,
                        RECURRENCE_HEAD + roots, NULL);
}

ml_ref ml_recurrence_new(ml_graph *g, const ml_recurrence_step *step) {
    ml_ref n = new_node(g, step);
    ml_recurrence_step sunk;
    return recurrence_sink(g, n, &sunk) ? new_node(g, &sunk) : n;
}

/* Equal nodes are one node: what becomes n again. */
ml_ref recurrence_before(ml_graph *g, ml_ref n) {
    ml_recurrence_step sunk;
    for (ml_ref of = n; of-- > 1;)
        if (ml_graph_node(g, of)->op == ML_OP_RECURRENCE && recurrence_sink(g, of, &sunk) &&
            new_node(g, &sunk) == n)
            return of;
    return 0;
}

/* ---- The step as a graph ---- */

typedef struct {
    ml_graph *body;
    const ml_graph *g;
    ml_ref n;
    const bool *wanted;
    ml_roots *roots;
} extraction;

static void extract(void *argument) {
    extraction *e = argument;
    ml_recurrence r;
    ml_recurrence_read(e->g, e->n, &r);
    int count = ml_recurrence_roots(&r);
    ml_arena *arena = ml_graph_arena(e->body);
    *e->roots = (ml_roots){.step = true,
                           .outputs = ML_NEW_ARRAY(arena, ml_ref, count + 1),
                           .updates = ML_NEW_ARRAY(arena, ml_update, 1)};
    for (int i = 0; i < count; i++)
        if (!e->wanted || e->wanted[i])
            e->roots->outputs[e->roots->output_count++] =
                graph_copy_plain(e->body, e->g, ml_recurrence_root(e->g, e->n, i));
}

ml_graph *ml_recurrence_body(const ml_graph *g, ml_ref n, const bool *wanted, ml_roots *roots) {
    extraction e = {ml_graph_derive(g), g, n, wanted, roots};
    if (ml_protect(extract, &e) == ML_OK) return e.body;
    ml_graph_free(e.body);
    ml_raise_last();
}

/* ---- Forms ---- */

/* The same axes, in any order, or some of them. */
static bool within(const ml_type *t, const ml_type *space, bool all) {
    for (int i = 0; i < t->rank; i++) {
        int at = ml_type_find(space, t->axis[i]);
        if (at < 0 || space->size[at] != t->size[i]) return false;
    }
    return !all || t->rank == space->rank;
}

static bool is_elementwise(const ml_graph *g, ml_ref root, const ml_type *space) {
    ml_refs body = {0};
    graph_reach(g, root, ml_graph_arena((ml_graph *)g), &body);
    for (uint32_t i = 0; i < body.count; i++) {
        ml_op op = (ml_op)ml_graph_node(g, body.at[i])->op;
        bool same = ml_op_is_function(op) || op == ML_OP_PARAM || op == ML_OP_CONST ||
                    op == ML_OP_BROADCAST || op == ML_OP_PERMUTE;
        if (!same || !within(ml_graph_type(g, body.at[i]), space, false)) return false;
    }
    return true;
}

bool ml_recurrence_elementwise(const ml_graph *g, ml_ref n) {
    ml_recurrence r;
    ml_recurrence_read(g, n, &r);
    const ml_type *space = ml_graph_type(g, ml_recurrence_root(g, n, 0));
    for (int i = 0; i < ml_recurrence_roots(&r); i++) {
        ml_ref root = ml_recurrence_root(g, n, i);
        if (!within(ml_graph_type(g, root), space, true) || !is_elementwise(g, root, space))
            return false;
    }
    return true;
}

ml_ref ml_recurrence_find(const ml_graph *g, ml_ref root, ml_op op) {
    ml_refs body = {0};
    graph_reach(g, root, ml_graph_arena((ml_graph *)g), &body);
    for (uint32_t i = 0; i < body.count; i++)
        if (ml_graph_node(g, body.at[i])->op == op) return body.at[i];
    return 0;
}

ml_dtype ml_recurrence_roughest(const ml_graph *g, ml_ref n) {
    ml_recurrence r;
    ml_dtype roughest = ML_F64;
    ml_recurrence_read(g, n, &r);
    for (int i = 0; i < ml_recurrence_roots(&r); i++) {
        ml_refs body = {0};
        graph_reach(g, ml_recurrence_root(g, n, i), ml_graph_arena((ml_graph *)g), &body);
        for (uint32_t k = 0; k < body.count; k++) {
            ml_dtype dtype = (ml_dtype)ml_graph_type(g, body.at[k])->dtype;
            if (ml_is_narrow(dtype) && ml_dtypes[dtype].digits < ml_dtypes[roughest].digits)
                roughest = dtype;
        }
    }
    return roughest;
}

/* Results at all positions where no state is carried: by the same ops, over all of them. */
static bool apply_stateless(ml_graph *g, const ml_recurrence_step *s, ml_ref *outputs) {
    recurrence_body b;
    if (s->state_count || s->summed_count) return false;
    recurrence_body_find(&b, g, s, s->stacked, s->stacked_count);
    for (int i = 0; i < s->stacked_count; i++) {
        uint32_t at = recurrence_place(&b, s->stacked[i]);
        if (at != ML_INDEX_NONE && !b.vectorizes[at]) return false;
    }
    ml_origin origin = *g->tables->origins.at[g->origin];
    for (int i = 0; i < s->stacked_count; i++) {
        ml_type one = *ml_graph_type(g, s->stacked[i]), all;
        with_axis(&one, s->axis, s->length, &all);
        ml_ref full = recurrence_vectorized(&b, s->stacked[i]);
        bool lacks = ml_graph_type(g, full)->rank < all.rank;
        outputs[i] = lacks ? ml_broadcast(g, full, &all) : ml_permute(g, full, &all);
    }
    ml_graph_set_origin(g, &origin);
    return true;
}

void ml_recurrence_apply(ml_graph *g, const ml_recurrence_step *step, ml_ref *outputs) {
    if (apply_stateless(g, step, outputs) || recurrence_match(g, step, outputs) ||
        recurrence_segments(g, step, outputs))
        return;
    ml_ref made = ml_recurrence_new(g, step);
    int count = step->stacked_count + step->summed_count + step->state_count;
    for (int i = 0; i < count; i++) outputs[i] = ml_out(g, made, i);
}
