/* The reference interpreter: every op by its definition, in float64 and int64, one at a time. */
#include "runtime/graph/reference.h"

#include <math.h>
#include <string.h>

#include "runtime/graph/convert.h"
#include "runtime/graph/infer.h"
#include "runtime/graph/op_interface.h"

uint64_t ml_random_bits(int64_t key, int64_t index) {
    return ml_mix(ml_mix((uint64_t)key, 0), (uint64_t)index);
}

double ml_random_uniform(int64_t key, int64_t index) {
    return (double)(ml_random_bits(key, index) >> 40) * 0x1p-24;
}

/* The float nearest to x, without the overflow that C leaves undefined. */
static float to_float(double x) {
    const double limit = 0x1.ffffffp127; /* from here on rounding gives infinity */
    if (x >= limit) return INFINITY;
    return x <= -limit ? -INFINITY : (float)x;
}

reference_cell reference_store(ml_dtype dtype, reference_cell x, bool round) {
    if (dtype == ML_I32) x.integer = (int32_t)(uint32_t)(uint64_t)x.integer;
    if (round && ml_compute_dtype(dtype) == ML_F32) x.number = to_float(x.number);
    if (round && ml_is_narrow(dtype)) x.number = ml_round_to(dtype, x.number);
    return x;
}

static reference_cell number(double value) {
    return (reference_cell){.number = value};
}

static reference_cell integer(int64_t value) {
    return (reference_cell){.integer = value};
}

static reference_value *value_of(reference_run *r, ml_ref node, int source) {
    return &r->values[ml_graph_source(r->graph, node, source)];
}

static void leaf(reference_run *r, ml_ref node, reference_value *out) {
    const int64_t *args = ml_graph_args(r->graph, node);
    int64_t elements = ml_type_elements(&out->type);
    bool is_float = reference_is_float(&out->type);
    const double *from = NULL;
    switch ((ml_leaf_op)ml_graph_node(r->graph, node)->op) {
    case ML_OP_CONST: memcpy(out->cells, args, sizeof *out->cells); return;
    case ML_OP_IOTA:
        for (int64_t i = 0; i < elements; i++) out->cells[i].integer = i;
        return;
    case ML_OP_COORDINATE:
        if (!r->coordinates) break;
        out->cells[0].integer = r->coordinates[args[0]];
        return;
    case ML_OP_STATE: from = r->states ? r->states[args[0]] : NULL; break;
    case ML_OP_INPUT: from = r->inputs ? r->inputs[args[0]] : NULL; break;
    case ML_OP_PARAM:
        if (!r->params) break;
        memcpy(out->cells, r->params[args[0]], sizeof *out->cells * (size_t)elements);
        return;
    }
    if (!from) ml_raise(ML_INTERNAL, "the reference was given no value for node %%%u", node);
    for (int64_t i = 0; i < elements; i++)
        out->cells[i] = is_float ? number(from[i]) : integer((int64_t)from[i]);
}

static void elementwise(reference_run *r, ml_ref node, reference_value *out) {
    ml_op op = ml_graph_node(r->graph, node)->op;
    int count = ml_graph_node(r->graph, node)->source_count;
    reference_walk w = reference_walk_over(&out->type);
    for (int i = 0; i < count; i++)
        reference_walk_follow(&w, i, &out->type, &value_of(r, node, i)->type);
    ml_dtype from = value_of(r, node, 0)->type.dtype;
    int64_t at = 0;
    do {
        reference_cell x[3];
        for (int i = 0; i < count; i++) x[i] = value_of(r, node, i)->cells[w.offset[i]];
        if (op == ML_OP_RANDOM)
            out->cells[at].number = ml_random_uniform(x[0].integer, count == 2 ? x[1].integer : at);
        else
            out->cells[at] = reference_map(op, out->type.dtype, from, x);
        at++;
    } while (reference_walk_step(&w));
}

static void concat(reference_run *r, ml_ref node, reference_value *out) {
    ml_axis axis = (ml_axis)ml_graph_args(r->graph, node)[0];
    int count = ml_graph_node(r->graph, node)->source_count;
    int position = ml_type_find(&out->type, axis);
    int64_t strides[ML_MAX_AXES], start = 0;
    reference_strides(&out->type, strides);
    for (int i = 0; i < count; i++) {
        const reference_value *part = value_of(r, node, i);
        reference_walk w = reference_walk_over(&part->type);
        reference_walk_follow(&w, 0, &part->type, &part->type);
        reference_walk_follow(&w, 1, &part->type, &out->type);
        do out->cells[w.offset[1] + start * strides[position]] = part->cells[w.offset[0]];
        while (reference_walk_step(&w));
        start += ml_type_size(&part->type, axis);
    }
}

/* Moves of one tensor: out[i] = a[offset + sum(i * stride)], 0 outside of a padded range. */
static void movement(reference_run *r, ml_ref node, reference_value *out) {
    const int64_t *args = ml_graph_args(r->graph, node);
    const reference_value *a = value_of(r, node, 0);
    ml_op op = ml_graph_node(r->graph, node)->op;
    reference_walk w = reference_walk_over(&out->type);
    reference_walk_follow(&w, 0, &out->type, &a->type);
    int64_t strides[ML_MAX_AXES], at = 0, start = 0, low = 0, high = INT64_MAX, inner_size = 1;
    reference_strides(&a->type, strides);
    int axis = -1; /* in the result: of the axis that args name */
    if (op == ML_OP_RENAME) memcpy(w.stride[0], strides, sizeof strides);
    if (op == ML_OP_SLICE) start = args[1] * strides[ml_type_find(&a->type, (ml_axis)args[0])];
    if (op == ML_OP_PAD) {
        axis = ml_type_find(&out->type, (ml_axis)args[0]);
        int from = ml_type_find(&a->type, (ml_axis)args[0]);
        start = -args[1] * strides[from];
        low = args[1], high = args[1] + a->type.size[from];
    }
    if (op == ML_OP_SPLIT) {
        int64_t stride = strides[ml_type_find(&a->type, (ml_axis)args[0])];
        w.stride[0][ml_type_find(&out->type, (ml_axis)args[1])] = stride * args[4];
        w.stride[0][ml_type_find(&out->type, (ml_axis)args[3])] = stride;
    }
    int64_t outer_stride = 0, inner_stride = 0;
    if (op == ML_OP_MERGE) {
        axis = ml_type_find(&out->type, (ml_axis)args[2]);
        w.stride[0][axis] = 0; /* also where the merged axis keeps the name of a part */
        outer_stride = strides[ml_type_find(&a->type, (ml_axis)args[0])];
        int inner = ml_type_find(&a->type, (ml_axis)args[1]);
        inner_stride = strides[inner], inner_size = a->type.size[inner];
    }
    do {
        int64_t i = axis < 0 ? 0 : w.at[axis], from = w.offset[0] + start;
        if (op == ML_OP_MERGE)
            from += i / inner_size * outer_stride + i % inner_size * inner_stride;
        if (i >= low && i < high) out->cells[at] = a->cells[from];
        at++;
    } while (reference_walk_step(&w));
}

static void along_axis(reference_run *r, ml_ref node, ml_ref of, reference_value *out) {
    const int64_t *args = ml_graph_args(r->graph, of);
    const reference_value *a = value_of(r, of, 0);
    ml_axis axis = (ml_axis)args[0];
    bool top = ml_graph_node(r->graph, of)->op == ML_OP_TOP_K;
    ml_axis out_axis = top ? (ml_axis)args[2] : axis;
    bool descending = top || args[1];
    if (node == of) {
        reference_sort(a, axis, out_axis, descending, out, NULL);
        return;
    }
    reference_value values = *out;
    values.cells =
        ml_arena_alloc(r->scratch, sizeof *out->cells * (size_t)ml_type_elements(&out->type));
    reference_sort(a, axis, out_axis, descending, &values, out);
}

/* Output i of an op of runtime/ops. */
static void routine(reference_run *r, ml_ref of, int i, reference_value *out) {
    const ml_op_interface *own = ml_op_interface_of((ml_op)ml_graph_node(r->graph, of)->op);
    if (own->evaluate) {
        own->evaluate(r, of, i, out);
        return;
    }
    if (!own->evaluate_all)
        ml_raise(ML_INTERNAL, "the reference has no definition of %s: ml_decompose replaces it",
                 ml_ops[ml_graph_node(r->graph, of)->op].name);
    const reference_value *values = own->evaluate_all(r, of);
    memcpy(out->cells, values[i].cells, sizeof *out->cells * (size_t)ml_type_elements(&out->type));
}

/* Computes all outputs at once. */
static bool keeps_outputs(const ml_graph *g, ml_ref node) {
    const ml_op_interface *own = ml_op_interfaces[ml_graph_node(g, node)->op];
    return own && own->evaluate_all;
}

/* Output i >= 1 of an op that has several. */
static void output(reference_run *r, ml_ref node, reference_value *out) {
    ml_ref of = ml_graph_source(r->graph, node, 0);
    if (ml_ops[ml_graph_node(r->graph, of)->op].op_class == ML_CLASS_SCAN)
        along_axis(r, node, of, out);
    else
        routine(r, of, (int)ml_graph_args(r->graph, node)[0], out);
}

static void evaluate_rest(reference_run *r, ml_ref node, reference_value *out) {
    const int64_t *args = ml_graph_args(r->graph, node);
    const ml_node *n = ml_graph_node(r->graph, node);
    const reference_value *a = n->source_count > 0 ? value_of(r, node, 0) : NULL;
    const reference_value *b = n->source_count > 1 ? value_of(r, node, 1) : NULL;
    switch ((ml_rest_op)n->op) {
    case ML_OP_CONST:
    case ML_OP_IOTA:
    case ML_OP_STATE:
    case ML_OP_INPUT:
    case ML_OP_PARAM:
    case ML_OP_COORDINATE: leaf(r, node, out); return;
    case ML_OP_BROADCAST:
    case ML_OP_RENAME:
    case ML_OP_PERMUTE:
    case ML_OP_SLICE:
    case ML_OP_PAD:
    case ML_OP_SPLIT:
    case ML_OP_MERGE:
    case ML_OP_PLACE: movement(r, node, out); return;
    case ML_OP_CONCAT: concat(r, node, out); return;
    case ML_OP_GATHER: reference_gather(a, b, (ml_axis)args[0], out); return;
    case ML_OP_SUM:
    case ML_OP_MAX:
    case ML_OP_MIN: reference_reduce(n->op, a, out); return;
    case ML_OP_ARGMAX: reference_argmax(a, (ml_axis)args[0], out); return;
    case ML_OP_CUMSUM: reference_cumsum(a, (ml_axis)args[0], args[1] != 0, out); return;
    case ML_OP_SORT:
    case ML_OP_TOP_K: along_axis(r, node, node, out); return;
    case ML_OP_OUT: output(r, node, out); return;
    case ML_OP_DOT:
        reference_dot(a, b, n->source_count == 3 ? value_of(r, node, 2) : NULL, args, n->arg_count,
                      out);
        return;
    case ML_OP_SCATTER_ADD: reference_scatter_add(a, b, (ml_axis)args[0], out); return;
    case ML_OP_WRITE_ROWS:
        reference_write_rows(a, b, value_of(r, node, 2), (ml_axis)args[0], out);
        return;
    }
    ml_raise(ML_INTERNAL, "the reference has no definition of %s", ml_ops[n->op].name);
}

void reference_evaluate(reference_run *r, ml_ref node, reference_value *out) {
    ml_op op = ml_graph_node(r->graph, node)->op;
    if (ml_op_is_map(op))
        elementwise(r, node, out);
    else if (ml_op_interfaces[op])
        routine(r, node, 0, out);
    else if (ml_ops[op].op_class == ML_CLASS_COLLECTIVE)
        ml_raise(ML_INTERNAL, "%s needs all ranks", ml_ops[op].name);
    else
        evaluate_rest(r, node, out);
}

/* Sources a node's values come from: OUT reads what its op reads. */
static ml_ref origin_of_values(const ml_graph *g, ml_ref node) {
    if (ml_graph_node(g, node)->op != ML_OP_OUT) return node;
    ml_ref of = ml_graph_source(g, node, 0);
    return keeps_outputs(g, of) ? node : of;
}

void reference_start(reference_run *r, const ml_roots *roots) {
    uint32_t count = ml_graph_count(r->graph);
    r->values = ML_NEW_ARRAY(r->scratch, reference_value, count);
    r->uses = ML_NEW_ARRAY(r->scratch, uint32_t, count);
    for (int i = 0; i < roots->output_count; i++) r->uses[roots->outputs[i]]++;
    for (int i = 0; i < roots->update_count; i++) r->uses[roots->updates[i].value]++;
    for (ml_ref node = count; node-- > 1;) {
        if (!r->uses[node]) continue;
        ml_ref of = origin_of_values(r->graph, node);
        for (int s = 0; s < ml_graph_node(r->graph, of)->source_count; s++)
            r->uses[ml_graph_source(r->graph, of, s)]++;
    }
}

static void release_sources(reference_run *r, ml_ref node) {
    ml_ref of = origin_of_values(r->graph, node);
    for (int s = 0; s < ml_graph_node(r->graph, of)->source_count; s++) {
        ml_ref source = ml_graph_source(r->graph, of, s);
        if (--r->uses[source]) continue;
        ml_free(r->values[source].cells);
        r->values[source].cells = NULL;
    }
}

reference_value *reference_begin(reference_run *r, ml_ref node) {
    reference_value *out = &r->values[node];
    out->type = *ml_graph_type(r->graph, node);
    out->cells = ml_alloc(sizeof *out->cells * (size_t)ml_type_elements(&out->type));
    if (!out->cells) ml_raise(ML_NO_MEMORY, "no memory left for a value of the reference");
    return out;
}

void reference_finish(reference_run *r, ml_ref node) {
    reference_value *out = &r->values[node];
    int64_t elements = ml_type_elements(&out->type);
    bool round = r->round && ml_graph_node(r->graph, node)->op != ML_OP_CONST;
    for (int64_t i = 0; i < elements; i++)
        out->cells[i] = reference_store(out->type.dtype, out->cells[i], round);
    release_sources(r, node);
}

void reference_compute(reference_run *r, ml_ref node) {
    reference_evaluate(r, node, reference_begin(r, node));
    reference_finish(r, node);
}

double *reference_result(const reference_run *r, ml_ref node, ml_arena *arena) {
    const reference_value *value = &r->values[node];
    int64_t elements = ml_type_elements(&value->type);
    bool is_float = reference_is_float(&value->type);
    double *result = ML_NEW_ARRAY(arena, double, elements);
    for (int64_t k = 0; k < elements; k++)
        result[k] = is_float ? value->cells[k].number : (double)value->cells[k].integer;
    return result;
}

void reference_end(reference_run *r) {
    if (!r->values) return;
    for (ml_ref node = 1; node < ml_graph_count(r->graph); node++) ml_free(r->values[node].cells);
}

typedef struct {
    const ml_graph *asked;
    const ml_ref *nodes;
    int count;
    double **results;
    ml_arena *arena;
    ml_graph *graph;
    reference_run run;
} request;

static void interpret(void *argument) {
    request *a = argument;
    reference_run *r = &a->run;
    ml_roots roots = {.output_count = a->count};
    roots.outputs = ML_NEW_ARRAY(r->scratch, ml_ref, a->count + 1);
    for (int i = 0; i < a->count; i++) roots.outputs[i] = a->nodes[i];
    r->graph = a->graph = ml_decompose(a->asked, &roots, INT64_MAX);
    reference_start(r, &roots);
    for (ml_ref node = 1; node < ml_graph_count(r->graph); node++)
        if (r->uses[node]) reference_compute(r, node);
    for (int i = 0; i < a->count; i++)
        a->results[i] = reference_result(r, roots.outputs[i], a->arena);
}

void ml_reference(const ml_graph *g, const double *const *states, const double *const *inputs,
                  const ml_ref *nodes, int count, double **results, bool round, ml_arena *arena) {
    request a = {.asked = g, .nodes = nodes, .count = count, .results = results, .arena = arena};
    a.run = (reference_run){.states = states, .inputs = inputs, .round = round};
    a.run.scratch = ml_arena_new();
    if (!a.run.scratch) ml_raise(ML_NO_MEMORY, "no memory left for the reference interpreter");
    ml_status status = ml_protect(interpret, &a);
    reference_end(&a.run);
    if (a.graph) ml_graph_free(a.graph);
    ml_arena_free(a.run.scratch);
    if (status != ML_OK) ml_raise_last();
}
