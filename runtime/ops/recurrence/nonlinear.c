/* Why a recurrence has no form in chunks: where its step is not linear in the states, or what a
 * linear one has that no linear scan has. */
#include "runtime/ops/recurrence/recurrence_internal.h"

enum { FREE, LINEAR, BENT }; /* a value as a function of the states */

/* n's place in a list in ascending order. */
static uint32_t place(const ml_refs *list, ml_ref n) {
    uint32_t low = 0, high = list->count;
    while (low + 1 < high) {
        const uint32_t middle = (low + high) / 2;
        if (list->at[middle] <= n)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static int of_sources(const ml_node *node, const int *sources) {
    unsigned summands = ml_op_linear_in((ml_op)node->op);
    const ml_linear linear = ml_ops[node->op].linear;
    int sum = FREE, most = FREE;
    for (int i = 0; i < node->source_count; i++) {
        if (sources[i] != FREE && !(summands >> (i < 31 ? i : 31) & 1)) return BENT;
        sum += sources[i];
        most = sources[i] > most ? sources[i] : most;
    }
    if (linear == ML_LINEAR_EACH) return sum > BENT ? BENT : sum;
    return most;
}

static ml_ref first_bent(const ml_graph *g, const ml_recurrence *r, ml_ref root) {
    ml_arena *arena = ml_graph_arena((ml_graph *)g);
    ml_refs body = {0};
    graph_reach(g, root, arena, &body);
    int *kind = ML_NEW_ARRAY(arena, int, body.count);
    for (uint32_t k = 0; k < body.count; k++) {
        const ml_node *node = ml_graph_node(g, body.at[k]);
        int *sources = ML_NEW_ARRAY(arena, int, node->source_count);
        if (node->op == ML_OP_PARAM) {
            const int64_t i = ml_graph_args(g, body.at[k])[0];
            kind[k] = i >= r->inputs && i < r->inputs + r->states ? LINEAR : FREE;
            continue;
        }
        for (int i = 0; i < node->source_count; i++)
            sources[i] = kind[place(&body, ml_graph_source(g, body.at[k], i))];
        kind[k] = of_sources(node, sources);
        if (kind[k] == BENT) return body.at[k];
    }
    return 0;
}

ml_ref ml_recurrence_nonlinear(const ml_graph *g, ml_ref n) {
    ml_recurrence r;
    ml_ref found = 0;
    ml_recurrence_read(g, n, &r);
    for (int i = 0; i < r.states && !found; i++)
        found = first_bent(g, &r, ml_recurrence_root(g, n, i));
    return found;
}

/* ---- Linear steps ---------------------------------------------------------------------------- */

typedef struct {
    ml_graph *g; /* the step alone: its parameters are the node's */
    const ml_graph *from;
    ml_ref n;
    ml_recurrence_step step;
    const char *why;
    bool composes;
} question;

static void find_step(question *q) {
    ml_recurrence r;
    ml_recurrence_read(q->from, q->n, &r);
    ml_arena *arena = ml_graph_arena(q->g);
    const int sources = r.inputs + r.states + r.captured;
    ml_recurrence_pair *pairs = ML_NEW_ARRAY(arena, ml_recurrence_pair, sources + 1);
    ml_ref *roots = ML_NEW_ARRAY(arena, ml_ref, ml_recurrence_roots(&r) + 1);
    for (int i = 0; i < sources; i++) {
        const ml_type type = *ml_graph_type(q->from, ml_graph_source(q->from, q->n, i));
        pairs[i].value = ml_recurrence_parameter(q->g, &type);
    }
    for (int64_t i = 0; i < sources; i++) {
        ml_type type = *ml_graph_type(q->g, pairs[i].value);
        if (i < r.inputs) ml_recurrence_slice(q->g, pairs[i].value, r.axis, r.length, &type);
        pairs[i].parameter = ml_graph_add(q->g, ML_OP_PARAM, NULL, 0, &i, 1, &type);
    }
    for (int i = 0; i < ml_recurrence_roots(&r); i++)
        roots[i] = graph_copy_plain(q->g, q->from, ml_recurrence_root(q->from, q->n, i));
    q->step = (ml_recurrence_step){.axis = r.axis,
                                   .reverse = r.reverse,
                                   .length = r.length,
                                   .inputs = pairs,
                                   .input_count = r.inputs,
                                   .states = pairs + r.inputs,
                                   .state_count = r.states,
                                   .captured = pairs + r.inputs + r.states,
                                   .captured_count = r.captured,
                                   .next = roots,
                                   .stacked = roots + r.states,
                                   .stacked_count = r.stacked,
                                   .summed = roots + r.states + r.stacked,
                                   .summed_count = r.summed};
}

static void ask_why(void *argument) {
    question *q = argument;
    find_step(q);
    q->why = recurrence_refusal(q->g, &q->step);
}

static void ask_composes(void *argument) {
    question *q = argument;
    find_step(q);
    ml_ref *found = ML_NEW_ARRAY(ml_graph_arena(q->g), ml_ref, 2 * q->step.state_count + 1);
    uint32_t max_plus;
    q->composes =
        ml_recurrence_slopes(q->g, &q->step, found, found + q->step.state_count, &max_plus);
}

static question answer(const ml_graph *g, ml_ref n, void (*ask)(void *)) {
    question q = {.g = ml_graph_derive(g), .from = g, .n = n};
    if (ml_protect(ask, &q) != ML_OK) q.why = NULL, q.composes = false;
    ml_graph_free(q.g);
    return q;
}

const char *ml_recurrence_refusal(const ml_graph *g, ml_ref n) {
    return answer(g, n, ask_why).why;
}

bool ml_recurrence_composes(const ml_graph *g, ml_ref n) {
    return ml_recurrence_elementwise(g, n) && answer(g, n, ask_composes).composes;
}
