/* What depends on inputs that a prompt gives, and on no token: an encoder, keys and values of
 * attention to it. It is computed once a prompt, by the whole program's own nodes, and a slot holds
 * what the increment reads of it. */
#include "runtime/increment/internal.h"

enum { QKV = 3, MOST = QKV + 32 };

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

bool increment_crosses(const increment *inc, ml_ref n) {
    if (ml_graph_node(inc->g, n)->op != ML_OP_ATTENTION) return false;
    const ml_ref *s = ml_graph_sources(inc->g, n);
    return inc->places[s[0]].fed && !inc->places[s[1]].fed && !inc->places[s[2]].fed;
}

/* ---- What is proven -------------------------------------------------------------------------- */

static bool reads_given(const increment *inc, ml_ref n) {
    ml_op op = (ml_op)ml_graph_node(inc->g, n)->op;
    ml_op_class kind = (ml_op_class)ml_ops[op].op_class;
    bool ends =
        (op == ML_OP_CONCAT || op == ML_OP_PAD) && increment_names(inc->g, n, inc->places[n].axis);
    if (increment_crosses(inc, n)) return true;
    const place *p = &inc->places[n];
    if (p->over || p->other || p->chunk || p->inner || p->kind != ROWS_OF_POSITIONS) return false;
    return kind == ML_CLASS_MAP || (kind == ML_CLASS_MOVE && !ends) || kind == ML_CLASS_REDUCE ||
           op == ML_OP_DOT;
}

void increment_check_given(increment *inc, ml_ref n) {
    for (int i = 0; i < ml_graph_node(inc->g, n)->source_count; i++) {
        if (!inc->places[ml_graph_source(inc->g, n, i)].given || reads_given(inc, n)) continue;
        increment_refuse(inc, n, "attention, products and elementwise ops read it",
                         "%s that depends on the tokens reads what the prompt gives, which has no "
                         "increment yet",
                         ml_ops[ml_graph_node(inc->g, n)->op].name);
    }
}

place increment_cross_place(increment *inc, ml_ref n, place p) {
    ml_attention_args a;
    ml_attention_read(inc->g, n, &a);
    if (p.axis != a.seq || p.other || p.chunk || p.inner || a.causal || a.window || a.placed)
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
    return increment_state(inc, ML_KEPT_SLOT, n, 1, &type);
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

/* ---- Attention to what no token gives -------------------------------------------------------- */

typedef struct {
    increment *inc;
    ml_ref n, sources[MOST];
    ml_attention_args args;
    ml_ref *copies; /* of the score function, by node */
} crossing;

/* Keys or values, over rows. */
static ml_ref keys_of(crossing *c, int i) {
    increment *inc = c->inc;
    ml_ref s = ml_graph_source(inc->g, c->n, i);
    ml_axis batch = inc->places[s].given ? inc->places[s].batch : inc->places[c->n].batch;
    lifting by = {.batch = batch, .by = increment_plain(ML_I32)};
    increment_push(&by.by, inc->row, inc->rows);
    ml_type type = increment_lifted_type(ml_graph_type(inc->g, s), &by);
    ml_ref value = inc->places[s].given ? value_of(inc, s) : increment_squeeze(inc->g, s, batch);
    return ml_broadcast(inc->g, value, &type);
}

static ml_ref copy_node(crossing *c, ml_ref n, const ml_type *score) {
    ml_graph *g = c->inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    if (node.op == ML_OP_IOTA) {
        ml_axis axis = (ml_axis)args[0];
        if (axis == c->args.seq)
            increment_refuse(c->inc, c->n, "a tensor over seq may hold positions",
                             "a score function that uses the index of a query, whose keys no token "
                             "gives, has no increment yet");
        if (axis == c->args.kv_seq || axis == c->args.heads) return n;
        return ml_const_int(g, (ml_dtype)ml_graph_type(g, n)->dtype, 0); /* of the batch */
    }
    if (node.op == ML_OP_PARAM)
        return ml_graph_add(g, ML_OP_PARAM, NULL, 0, args, 1,
                            args[0] ? ml_graph_type(g, c->sources[QKV + args[0] - 1]) : score);
    if (node.op == ML_OP_CONST)
        return ml_graph_add(g, ML_OP_CONST, NULL, 0, args, node.arg_count, ml_graph_type(g, n));
    ml_ref sources[3];
    for (int i = 0; i < node.source_count; i++) sources[i] = c->copies[ml_graph_source(g, n, i)];
    if (node.op == ML_OP_CAST) return ml_cast(g, sources[0], (ml_dtype)ml_graph_type(g, n)->dtype);
    return ml_graph_add(g, (ml_op)node.op, sources, node.source_count, args, node.arg_count, NULL);
}

/* The function over scores {row, heads, new, kv_seq}. */
static ml_ref copy_function(crossing *c, const ml_attention_args *args) {
    increment *inc = c->inc;
    ml_ref root = args->score;
    bool *reached = ML_NEW_ARRAY(inc->arena, bool, root + 1);
    c->copies = ML_NEW_ARRAY(inc->arena, ml_ref, root + 1);
    ml_type score;
    ml_attention_score_type(inc->g, c->sources[0], c->sources[1], args, &score);
    reached[root] = true;
    for (ml_ref n = root; n > 0; n--)
        for (int i = 0; reached[n] && i < ml_graph_node(inc->g, n)->source_count; i++)
            reached[ml_graph_source(inc->g, n, i)] = true;
    for (ml_ref n = 1; n <= root; n++)
        if (reached[n]) c->copies[n] = copy_node(c, n, &score);
    return c->copies[root];
}

ml_ref increment_cross(increment *inc, ml_ref n, at_positions at) {
    crossing *c = ML_NEW(inc->arena, crossing);
    *c = (crossing){.inc = inc, .n = n};
    int count = ml_graph_node(inc->g, n)->source_count;
    if (count > MOST)
        increment_refuse(inc, n, NULL, "a score function uses more than %d tensors", MOST - QKV);
    ml_attention_read(inc->g, n, &c->args);
    ml_attention_args args = c->args;
    args.seq = inc->fresh;
    lifting by = increment_by(inc, &inc->places[n], at);
    ml_type queries =
        increment_lifted_type(ml_graph_type(inc->g, ml_graph_source(inc->g, n, 0)), &by);
    c->sources[0] = ml_broadcast(inc->g, increment_operand(inc, n, 0, at), &queries);
    for (int i = 1; i < count; i++)
        c->sources[i] = i < QKV ? keys_of(c, i) : increment_operand(inc, n, i, at);
    if (args.score) args.score = copy_function(c, &args);
    return ml_attention(inc->g, c->sources, count, &args);
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
