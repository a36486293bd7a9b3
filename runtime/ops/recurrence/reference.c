/* The reference interpreter's recurrences: the plain loop. */
#include <string.h>

#include "runtime/ops/recurrence/loop.h"
#include "runtime/ops/recurrence/recurrence.h"

struct reference_loop {
    reference_run *outer;
    ml_recurrence r;
    ml_graph *plain, *body; /* before and after what has no definition was replaced */
    ml_roots roots;
    reference_run inner;
    reference_cell **params; /* by source: at the position at hand */
    reference_value *outputs;
    ml_ref node;
};
typedef struct reference_loop loop;

static reference_value *source(const loop *l, int i) {
    return &l->outer->values[ml_graph_source(l->outer->graph, l->node, i)];
}

static int64_t slice_of(const reference_value *value, int64_t length) {
    return ml_type_elements(&value->type) / length;
}

/* What the step made at position t, to where the node's outputs are. */
static void take(loop *l, int64_t t) {
    for (int i = 0; i < l->roots.output_count; i++) {
        const reference_value *made = &l->inner.values[l->roots.outputs[i]];
        int64_t count = ml_type_elements(&made->type);
        int result = i - l->r.states;
        if (result < 0) {
            memcpy(l->outputs[ml_recurrence_final(&l->r) + i].cells, made->cells,
                   sizeof *made->cells * (size_t)count);
        } else if (result < l->r.stacked) {
            memcpy(l->outputs[result].cells + t * count, made->cells,
                   sizeof *made->cells * (size_t)count);
        } else {
            for (int64_t k = 0; k < count; k++)
                if (reference_is_float(&made->type))
                    l->outputs[result].cells[k].number += made->cells[k].number;
                else
                    l->outputs[result].cells[k].integer += made->cells[k].integer;
        }
    }
}

static int64_t position(const loop *l, int64_t i) {
    return l->r.reverse ? l->r.length - 1 - i : i;
}

reference_run *reference_loop_enter(loop *l, int64_t i) {
    int64_t t = position(l, i);
    for (int i = 0; i < l->r.inputs; i++) {
        reference_value *input = source(l, i);
        l->params[i] = input->cells + t * slice_of(input, l->r.length);
    }
    for (int i = 0; i < l->r.states; i++) {
        reference_value *state = &l->outputs[ml_recurrence_final(&l->r) + i];
        reference_value *history = &l->outputs[ml_recurrence_history(&l->r) + i];
        int64_t count = ml_type_elements(&state->type);
        l->params[l->r.inputs + i] = history->cells + t * count;
        memcpy(history->cells + t * count, state->cells, sizeof *state->cells * (size_t)count);
    }
    reference_start(&l->inner, &l->roots);
    return &l->inner;
}

void reference_loop_leave(loop *l, int64_t i) {
    take(l, position(l, i));
    reference_end(&l->inner);
    l->inner.values = NULL;
    l->inner.outputs = NULL; /* nested ones are computed at each position */
}

static void prepare(void *argument) {
    loop *l = argument;
    reference_run *outer = l->outer;
    int count = ml_op_outputs(outer->graph, l->node);
    ml_roots roots;
    l->plain = ml_recurrence_body(outer->graph, l->node, NULL, &roots);
    l->roots = roots;
    l->roots.outputs = ML_NEW_ARRAY(outer->scratch, ml_ref, roots.output_count + 1);
    l->roots.updates = ML_NEW_ARRAY(outer->scratch, ml_update, 1);
    memcpy(l->roots.outputs, roots.outputs, sizeof(ml_ref) * (size_t)roots.output_count);
    l->body = ml_decompose(l->plain, &l->roots, INT64_MAX);
    l->outputs = ML_NEW_ARRAY(outer->scratch, reference_value, count);
    for (int i = 0; i < count; i++) {
        ml_recurrence_type(outer->graph, l->node, i, &l->outputs[i].type);
        l->outputs[i].cells = ml_arena_alloc(
            outer->scratch, sizeof(reference_cell) * (size_t)ml_type_elements(&l->outputs[i].type));
    }
    int sources = l->r.inputs + l->r.states + l->r.captured;
    l->params = ML_NEW_ARRAY(outer->scratch, reference_cell *, sources + 1);
    for (int i = l->r.inputs + l->r.states; i < sources; i++) l->params[i] = source(l, i)->cells;
    for (int i = 0; i < l->r.states; i++) {
        reference_value *state = &l->outputs[ml_recurrence_final(&l->r) + i];
        memcpy(state->cells, source(l, l->r.inputs + i)->cells,
               sizeof *state->cells * (size_t)ml_type_elements(&state->type));
    }
    l->inner = (reference_run){.graph = l->body,
                               .coordinates = outer->coordinates,
                               .params = l->params,
                               .round = outer->round,
                               .scratch = outer->scratch};
}

loop *reference_loop_new(reference_run *r, ml_ref node, int64_t *length) {
    loop *l = ML_NEW(r->scratch, loop);
    l->outer = r;
    l->node = node;
    ml_recurrence_read(r->graph, node, &l->r);
    *length = l->r.length;
    if (ml_protect(prepare, l) == ML_OK) return l;
    reference_loop_free(l);
    ml_raise_last();
}

void reference_loop_free(loop *l) {
    if (l == NULL) return;
    if (!l->outer->outputs)
        l->outer->outputs =
            ML_NEW_ARRAY(l->outer->scratch, reference_value *, ml_graph_count(l->outer->graph));
    l->outer->outputs[l->node] = l->outputs;
    reference_end(&l->inner);
    l->inner.values = NULL;
    if (l->body) ml_graph_free(l->body);
    if (l->plain) ml_graph_free(l->plain);
    l->body = l->plain = NULL;
}

static void run(void *argument) {
    loop *l = argument;
    for (int64_t i = 0; i < l->r.length; i++) {
        reference_run *inner = reference_loop_enter(l, i);
        for (ml_ref n = 1; n < ml_graph_count(inner->graph); n++)
            if (inner->uses[n]) reference_compute(inner, n);
        reference_loop_leave(l, i);
    }
}

reference_value *recurrence_evaluate(reference_run *r, ml_ref node) {
    int64_t length;
    if (r->outputs && r->outputs[node]) return r->outputs[node];
    loop *l = reference_loop_new(r, node, &length);
    ml_status status = ml_protect(run, l);
    reference_loop_free(l);
    if (status != ML_OK) ml_raise_last();
    return r->outputs[node];
}
