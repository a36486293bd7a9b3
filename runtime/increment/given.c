/* What depends on inputs that a prompt gives, and on no token: an encoder, keys and values of
 * attention to it. It is computed once a prompt, by the whole program's own nodes, and a slot holds
 * what the increment reads of it. */
#include "runtime/increment/internal.h"
#include "runtime/ops/attention/attention.h"

bool increment_gives(const increment *inc, ml_ref n) {
    for (int i = 0; i < inc->in->given_count; i++)
        if (inc->in->given[i] == n) return true;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++)
        if (inc->places[ml_graph_source(inc->g, n, i)].given) return true;
    return false;
}

place increment_given_place(const increment *inc, ml_ref n) {
    ml_axis batch = inc->places[inc->in->tokens].batch;
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        const place *s = &inc->places[ml_graph_source(inc->g, n, i)];
        if (s->given && s->batch) batch = increment_renamed(inc->g, n, s->batch);
    }
    const ml_type *t = ml_graph_type(inc->g, n);
    return (place){.given = true, .batch = ml_type_find(t, batch) >= 0 ? batch : 0};
}

/* ---- What is proven -------------------------------------------------------------------------- */

/* Whether n may read what the prompt gives as its operand i. */
static bool reads_given(const increment *inc, ml_ref n, int i) {
    ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    ml_op_class kind = (ml_op_class)ml_ops[op].op_class;
    bool ends =
        (op == ML_OP_CONCAT || op == ML_OP_PAD) && increment_names(inc->g, n, inc->places[n].axis);
    if (increment_crosses(inc, n)) return true;
    const place *p = &inc->places[n];
    if (p->over || p->other || p->chunk || p->inner || p->kind != ROWS_OF_POSITIONS) return false;
    if (op == ML_OP_ATTENTION) return i >= ml_attention_captured(inc->g, n);
    if (op == ML_OP_CONV) return i == 1;
    if (op == ML_OP_RECURRENCE || op == ML_OP_LINEAR_SCAN) return true;
    return kind == ML_CLASS_MAP || (kind == ML_CLASS_MOVE && !ends) || kind == ML_CLASS_REDUCE ||
           op == ML_OP_DOT;
}

void increment_check_given(increment *inc, ml_ref n) {
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        if (!inc->places[ml_graph_source(inc->g, n, i)].given || reads_given(inc, n, i)) continue;
        increment_refuse(inc, n,
                         "scans, score functions, filters, products and elementwise ops read it",
                         "%s that depends on the tokens reads what the prompt gives, which has no "
                         "increment yet",
                         ml_ops[ml_graph_node(inc->g, n)->op].name);
    }
}

place increment_cross_place(increment *inc, ml_ref n, place p) {
    ml_attention_args a;
    ml_attention_read(inc->g, n, &a);
    if (p.axis != a.seq || p.other || p.chunk || p.inner || a.causal || a.window || a.pieces)
        increment_refuse(inc, n, "without causal and window all of them are seen",
                         "attention of positions of \"%s\" to keys that no token gives has no "
                         "increment yet with causal or window",
                         ml_axis_name(inc->g, p.axis));
    return p;
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* Whether n is computed from what its operand holds, which is no larger. */
static bool is_view(const increment *inc, ml_ref n) {
    const ml_node *node = ml_graph_node(inc->g, n);
    ml_op op = (ml_op)node->op;
    if (node->source_count != 1 || !inc->places[ml_graph_source(inc->g, n, 0)].given) return false;
    const ml_type *t = ml_graph_type(inc->g, n);
    const ml_type *s = ml_graph_type(inc->g, ml_graph_source(inc->g, n, 0));
    if (op == ML_OP_CAST) return ml_dtypes[s->dtype].bytes <= ml_dtypes[t->dtype].bytes;
    return op == ML_OP_BROADCAST || op == ML_OP_PERMUTE || op == ML_OP_RENAME ||
           op == ML_OP_STOP_GRADIENT;
}

/* The state that holds n for each slot. */
static uint32_t state_of(increment *inc, ml_ref n) {
    ml_type type = increment_without(ml_graph_type(inc->g, n), inc->places[n].batch, 0);
    return increment_slot_state(inc, n, 1, &type);
}

static lifting by_row(const increment *inc, ml_ref n) {
    lifting by = {.batch = inc->places[n].batch, .by = increment_plain(ML_I32)};
    increment_push(&by.by, inc->row, inc->rows);
    return by;
}

/* {row, ...} */
static ml_ref value_of(increment *inc, ml_ref n) {
    ml_ref *known = &inc->values[AT_NEW][n];
    if (*known) return *known;
    if (!is_view(inc, n)) return *known = increment_slot_rows(inc, state_of(inc, n));
    ml_ref source = value_of(inc, ml_graph_source(inc->g, n, 0));
    lifting by = by_row(inc, n);
    return inc->values[AT_NEW][n] = increment_lift(inc, n, &source, &by);
}

ml_ref increment_given(increment *inc, ml_ref n, ml_axis axis, int64_t lead, at_positions at) {
    ml_ref value = value_of(inc, n);
    if (ml_type_find(ml_graph_type(inc->g, value), axis) < 0) return value;
    return ml_gather(inc->g, value, increment_index(inc, lead, at), axis);
}

ml_ref increment_without_tokens(increment *inc, ml_ref n, ml_axis batch) {
    return inc->places[n].given ? value_of(inc, n) : increment_squeeze(inc->g, n, batch);
}

/* ---- Once a prompt --------------------------------------------------------------------------- */

/* The slot gets what the increment reads of n. */
static void hold(increment *inc, ml_ref n) {
    ml_graph *g = inc->g;
    while (is_view(inc, n)) n = ml_graph_source(g, n, 0);
    lifting by = by_row(inc, n);
    ml_type type = increment_lifted_type(ml_graph_type(g, n), &by);
    ml_ref value = ml_broadcast(g, increment_squeeze(g, n, inc->places[n].batch), &type);
    increment_slot_give(inc, state_of(inc, n), value);
}

void increment_hold_given(increment *inc) {
    for (ml_ref n = 1; n < inc->end; n++)
        for (int i = 0; inc->live[n] && i < ml_graph_node(inc->g, n)->source_count; i++) {
            ml_ref s = ml_graph_source(inc->g, n, i);
            if (inc->places[n].fed && inc->places[s].given) hold(inc, s);
        }
}
