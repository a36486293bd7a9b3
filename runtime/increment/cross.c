/* Attention of the new positions to keys that no token gives. */
#include "runtime/increment/internal.h"
#include "runtime/ops/attention/attention.h"

enum { QKV = 3, MOST = QKV + 32 };

typedef struct {
    increment *inc;
    ml_ref n, sources[MOST];
    ml_attention_args args; /* of the whole program's */
    ml_axis seq;            /* of the queries in the copy */
    ml_ref *copies;         /* of the score function, by node */
} crossing;

/* Keys or values, over rows. */
static ml_ref keys_of(crossing *c, int i) {
    increment *inc = c->inc;
    ml_ref s = ml_graph_source(inc->g, c->n, i);
    ml_axis batch = inc->places[s].given ? inc->places[s].batch : inc->places[c->n].batch;
    lifting by = {.batch = batch, .by = increment_plain(ML_I32)};
    increment_push(&by.by, inc->row, inc->rows);
    ml_type type = increment_lifted_type(ml_graph_type(inc->g, s), &by);
    ml_ref value = inc->places[s].given ? increment_given(inc, s, 0, 0, AT_NEW)
                                        : increment_squeeze(inc->g, s, batch);
    return ml_broadcast(inc->g, value, &type);
}

static ml_ref copy_node(crossing *c, ml_ref n, const ml_type *score) {
    ml_graph *g = c->inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    if (node.op == ML_OP_IOTA) {
        ml_axis axis = (ml_axis)args[0];
        if (axis == c->args.seq && axis != c->seq)
            increment_refuse(c->inc, c->n, "a tensor over seq may hold positions",
                             "a score function that uses the index of a query, whose keys no token "
                             "gives, has no increment yet");
        if (args[1] != 1) return n;
        return ml_const_int(g, (ml_dtype)ml_graph_type(g, n)->dtype, 0); /* of the batch, too */
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

ml_ref increment_score_function(increment *inc, ml_ref n, const ml_ref *sources, int count,
                                const ml_attention_args *args) {
    if (!args->score) return 0;
    crossing *c = ML_NEW(inc->arena, crossing);
    *c = (crossing){.inc = inc, .n = n, .seq = args->seq};
    if (count > MOST)
        increment_refuse(inc, n, NULL, "a score function uses more than %d tensors", MOST - QKV);
    ml_attention_read(inc->g, n, &c->args);
    for (int i = 0; i < count; i++) c->sources[i] = sources[i];
    return copy_function(c, args);
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
    args.score = increment_score_function(inc, n, c->sources, count, &args);
    return ml_attention(inc->g, c->sources, count, &args);
}
