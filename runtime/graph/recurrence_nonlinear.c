/* Where a step is not linear in its states: why a recurrence has no form in chunks. */
#include "runtime/graph/infer.h"
#include "runtime/graph/recurrence.h"

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
