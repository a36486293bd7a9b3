/* Attention: types, arguments, and its definition from products, elementwise ops and reductions. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/attention/attention_internal.h"

enum { ARGS = 13, QKV = 3, GRAD_SOURCES = 6 };

ml_dtype attention_dtype(ml_dtype dtype) {
    return dtype == ML_F64 ? ML_F64 : ML_F32;
}

static void pack(const ml_attention_args *a, int64_t *args) {
    int64_t scale;
    memcpy(&scale, &a->scale, sizeof scale);
    int64_t all[ARGS] = {a->seq,    a->kv_seq, a->heads,     a->kv_heads, a->head_dim,
                         a->causal, a->window, a->pieces,    a->offset,   a->key_ranks,
                         scale,     a->score,  a->derivative};
    memcpy(args, all, sizeof all);
}

static ml_attention_args unpack(const int64_t *args) {
    ml_attention_args a = {(ml_axis)args[0],
                           (ml_axis)args[1],
                           (ml_axis)args[2],
                           (ml_axis)args[3],
                           (ml_axis)args[4],
                           args[5] != 0,
                           args[6],
                           (int)args[7],
                           args[8],
                           args[9],
                           0,
                           (ml_ref)args[11],
                           (ml_ref)args[12]};
    memcpy(&a.scale, &args[10], sizeof a.scale);
    return a;
}

void ml_attention_read(const ml_graph *g, ml_ref n, ml_attention_args *args) {
    assert(ml_graph_node(g, n)->arg_count == ARGS);
    *args = unpack(ml_graph_args(g, n));
}

int ml_attention_captured(const ml_graph *g, ml_ref n) {
    ml_attention_args args = unpack(ml_graph_args(g, n));
    return (ml_graph_node(g, n)->op == ML_OP_ATTENTION ? QKV : GRAD_SOURCES) +
           ml_attention_places(&args);
}

/* The sum of max(0, min(i, keys)) over all i below x. */
static double clamped_sum(double x, double keys) {
    if (x <= 0) return 0;
    return x <= keys ? x * (x - 1) / 2 : keys * (keys - 1) / 2 + (x - keys) * keys;
}

/* The pairs in which the key is not after query + shift. */
static double pairs_up_to(double queries, double keys, double shift) {
    return clamped_sum(queries + shift + 1, keys) - clamped_sum(shift + 1, keys);
}

double ml_attention_pairs(int64_t queries, int64_t keys, int64_t shift, bool causal,
                          int64_t window) {
    double q = (double)queries, k = (double)keys, s = (double)shift;
    double shown = causal ? pairs_up_to(q, k, s) : q * k;
    if (!window) return shown;
    shown -= pairs_up_to(q, k, s - (double)window);
    return shown > 0 ? shown : 0;
}

static void push(ml_type *t, ml_axis axis, int64_t size) {
    if (t->rank == ML_MAX_AXES)
        ml_raise(ML_INVALID, "attention scores would have more than %d axes", ML_MAX_AXES);
    t->axis[t->rank] = axis;
    t->size[t->rank++] = size;
}

void ml_attention_score_type(const ml_graph *g, ml_ref q, ml_ref k, const ml_attention_args *args,
                             ml_type *out) {
    const ml_type *t = ml_graph_type(g, q);
    const ml_axis own[] = {args->seq, args->heads, args->head_dim};
    for (int i = 0; i < 3; i++)
        if (ml_type_find(t, own[i]) < 0)
            ml_raise(ML_INVALID, "attention needs axis \"%s\" in q", ml_axis_name(g, own[i]));
    if (ml_type_find(ml_graph_type(g, k), args->kv_seq) < 0)
        ml_raise(ML_INVALID, "attention needs axis \"%s\" in k", ml_axis_name(g, args->kv_seq));
    *out = (ml_type){.dtype = (uint8_t)attention_dtype(t->dtype)};
    for (int i = 0; i < t->rank; i++)
        if (t->axis[i] != args->seq && t->axis[i] != args->heads && t->axis[i] != args->head_dim)
            push(out, t->axis[i], t->size[i]);
    push(out, args->heads, ml_type_size(t, args->heads));
    push(out, args->seq, ml_type_size(t, args->seq));
    push(out, args->kv_seq, ml_type_size(ml_graph_type(g, k), args->kv_seq));
}

/* ---- Checks ---------------------------------------------------------------------------------- */

/* Source i (k or v) has q's batch axes and the three of its own, and no others. */
static void check_key_value(const infer *in, int i, const ml_attention_args *a, const char *whose) {
    const ml_type *q = infer_source(in, 0), *t = infer_source(in, i);
    const ml_axis own[] = {a->kv_seq, a->kv_heads, a->head_dim};
    for (int o = 0; o < 3; o++) infer_find(in, i, own[o], "attend over", whose);
    for (int b = 0; b < q->rank; b++) {
        ml_axis axis = q->axis[b];
        if (axis == a->seq || axis == a->heads || axis == a->head_dim) continue;
        int at = infer_find(in, i, axis, "attend with batch axis", whose);
        if (t->size[at] != q->size[b])
            infer_raise(in, NULL, "cannot attend: \"%s\" is %lld in q, %lld in %s",
                        ml_axis_name(in->g, axis), (long long)q->size[b], (long long)t->size[at],
                        whose);
    }
    if (t->rank != q->rank)
        infer_raise(in, "q, k and v have the same batch axes",
                    "cannot attend: q has axes %s, %s has %s", infer_axes(in, q), whose,
                    infer_axes(in, t));
}

static void check_sizes(const infer *in, const ml_attention_args *a) {
    const ml_type *q = infer_source(in, 0), *k = infer_source(in, 1), *v = infer_source(in, 2);
    int64_t heads = ml_type_size(q, a->heads), kv_heads = ml_type_size(k, a->kv_heads);
    if (ml_type_size(q, a->head_dim) != ml_type_size(k, a->head_dim))
        infer_raise(in, NULL, "cannot attend: \"%s\" is %lld in q, %lld in k",
                    ml_axis_name(in->g, a->head_dim), (long long)ml_type_size(q, a->head_dim),
                    (long long)ml_type_size(k, a->head_dim));
    const ml_axis shared[] = {a->kv_seq, a->kv_heads};
    for (int i = 0; i < 2; i++)
        if (ml_type_size(k, shared[i]) != ml_type_size(v, shared[i]))
            infer_raise(in, NULL, "cannot attend: \"%s\" is %lld in k, %lld in v",
                        ml_axis_name(in->g, shared[i]), (long long)ml_type_size(k, shared[i]),
                        (long long)ml_type_size(v, shared[i]));
    if (heads % kv_heads || (a->kv_heads == a->heads && heads != kv_heads))
        infer_raise(in, "the number of heads is a multiple of that of key/value heads",
                    "cannot attend: \"%s\" is %lld in q, \"%s\" is %lld in k",
                    ml_axis_name(in->g, a->heads), (long long)heads,
                    ml_axis_name(in->g, a->kv_heads), (long long)kv_heads);
    if (a->window < 0)
        infer_raise(in, "0 is no window", "the window of attention is %lld", (long long)a->window);
}

/* A captured tensor has axes of the scores only. */
static void check_captured(const infer *in, int i, const ml_type *score) {
    const ml_type *t = infer_source(in, i);
    for (int k = 0; k < t->rank; k++) {
        int at = ml_type_find(score, t->axis[k]);
        if (at < 0)
            infer_raise(in, "a score function works on one score at a time",
                        "a tensor that the score function uses has axis \"%s\", the scores have %s",
                        ml_axis_name(in->g, t->axis[k]), infer_axes(in, score));
        if (score->size[at] != t->size[k])
            infer_raise(in, NULL,
                        "\"%s\" is %lld in a tensor that the score function uses, %lld in the "
                        "scores",
                        ml_axis_name(in->g, t->axis[k]), (long long)t->size[k],
                        (long long)score->size[at]);
    }
}

void attention_check_function(const infer *in, ml_ref root, const ml_type *params, int count,
                              const ml_type *score) {
    ml_graph *g = in->g;
    ml_refs body = {0};
    graph_reach(g, root, ml_graph_arena(g), &body);
    for (uint32_t i = 0; i < body.count; i++) {
        const ml_node *node = ml_graph_node(g, body.at[i]);
        const ml_op_info *info = &ml_ops[node->op];
        bool elementwise = info->op_class == ML_CLASS_MAP || node->op == ML_OP_CONST ||
                           node->op == ML_OP_IOTA || node->op == ML_OP_PARAM;
        if (!elementwise || node->op == ML_OP_RANDOM)
            infer_raise(in, "compute it outside and let the function use the result",
                        "a score function cannot use %s: it is elementwise", info->name);
        if (node->op != ML_OP_PARAM) continue;
        int64_t index = ml_graph_args(g, body.at[i])[0];
        if (index < 0 || index >= count)
            ml_raise(ML_INTERNAL, "a score function has no parameter %lld", (long long)index);
        if (!ml_type_equal(&params[index], ml_graph_type(g, body.at[i])))
            ml_raise(ML_INTERNAL, "parameter %lld of a score function has the wrong type",
                     (long long)index);
    }
    if (!ml_type_same_axes(ml_graph_type(g, root), score) ||
        ml_graph_type(g, root)->dtype != score->dtype)
        ml_raise(ML_INTERNAL, "a score function does not give scores");
    if (!(ml_graph_node(g, root)->flags & ML_NODE_FUNCTION))
        ml_raise(ML_INTERNAL, "a score function is not marked as one");
}

/* `captured`: the first captured source. */
static void check_functions(const infer *in, const ml_attention_args *a, int captured,
                            const ml_type *score) {
    int count = in->source_count - captured;
    ml_type *params = ML_NEW_ARRAY(ml_graph_arena(in->g), ml_type, count + 2);
    params[0] = params[count + 1] = *score;
    for (int i = 0; i < count; i++) params[1 + i] = *infer_source(in, captured + i);
    int known = count + 1 + (in->op == ML_OP_ATTENTION_GRAD);
    if (a->score) attention_check_function(in, a->score, params, known, score);
    if (a->derivative) attention_check_function(in, a->derivative, params, known, score);
}

void attention_infer(infer *in, ml_type *out) {
    ml_attention_args a = unpack(in->args);
    bool grad = in->op == ML_OP_ATTENTION_GRAD;
    int captured = (grad ? GRAD_SOURCES : QKV) + ml_attention_places(&a);
    if (in->source_count < captured)
        ml_raise(ML_INTERNAL, "%s has %d operands", ml_ops[in->op].name, in->source_count);
    for (int i = 0; i < QKV; i++) infer_float_only(in, i);
    infer_promote(in, 0, QKV);
    const ml_axis own[] = {a.seq, a.heads, a.head_dim};
    for (int i = 0; i < 3; i++) infer_find(in, 0, own[i], "attend over", "q");
    check_key_value(in, 1, &a, "k");
    check_key_value(in, 2, &a, "v");
    check_sizes(in, &a);
    ml_type score;
    ml_attention_score_type(in->g, in->sources[0], in->sources[1], &a, &score);
    for (int i = captured; i < in->source_count; i++) check_captured(in, i, &score);
    check_functions(in, &a, captured, &score);
    for (int i = captured - ml_attention_places(&a); i < captured; i++) {
        infer_dtype(in, i, ML_I32, "the place of attention's operand");
        if (infer_source(in, i)->rank) ml_raise(ML_INTERNAL, "attention's places are numbers");
    }
    if (!a.pieces && a.offset) ml_raise(ML_INTERNAL, "attention has an offset and no places");
    if (a.pieces < 0 || a.pieces > 2 || (a.pieces && score.size[score.rank - 2] % a.pieces))
        ml_raise(ML_INTERNAL, "attention's queries are not %d equal pieces", a.pieces);
    if (a.key_ranks < 0 || (a.key_ranks && score.size[score.rank - 1] % (2 * a.key_ranks)))
        ml_raise(ML_INTERNAL, "attention's keys are not two blocks of each of %lld ranks",
                 (long long)a.key_ranks);
    if (grad && (a.score != 0) != (a.derivative != 0))
        ml_raise(ML_INTERNAL, "attention_grad needs both a score function and its derivative");
    const ml_type *q = infer_source(in, 0);
    *out = *q;
    if (!grad) {
        out->size[ml_type_find(q, a.head_dim)] = ml_type_size(infer_source(in, 2), a.head_dim);
        return;
    }
    ml_type o = *q, lse = score;
    o.size[ml_type_find(q, a.head_dim)] = ml_type_size(infer_source(in, 2), a.head_dim);
    lse.rank--;
    if (!ml_type_same_axes(infer_source(in, 3), &o) ||
        !ml_type_same_axes(infer_source(in, 5), &o) ||
        !ml_type_same_axes(infer_source(in, 4), &lse))
        ml_raise(ML_INTERNAL, "attention_grad has an output, logsumexp or cotangent of wrong type");
}

/* ---- Constructors ---------------------------------------------------------------------------- */

ml_ref attention_prepare_function(ml_graph *g, ml_ref root, const ml_type *score) {
    if (!root || (ml_graph_node(g, root)->flags & ML_NODE_FUNCTION)) return root;
    const ml_type *t = ml_graph_type(g, root);
    if (ml_dtypes[t->dtype].kind != ML_KIND_FLOAT) {
        ml_fail(ML_INVALID, "a score function gives a float, not %s", ml_dtypes[t->dtype].name);
        ml_help("m.where(test, s, -math.huge) masks");
        ml_raise_last();
    }
    root = ml_cast(g, root, score->dtype);
    if (t->rank < score->rank) { /* a choice by a constant test widens it, elementwise */
        ml_ref s = ml_graph_add(g, ML_OP_PARAM, NULL, 0, (int64_t[]){0}, 1, score);
        ml_ref sources[] = {ml_const_int(g, ML_BOOL, 1), root, s};
        root = ml_graph_add(g, ML_OP_WHERE, sources, 3, NULL, 0, NULL);
    }
    return graph_copy_function(g, g, root);
}

static ml_ref add(ml_graph *g, ml_op op, const ml_ref *sources, int count,
                  const ml_attention_args *args) {
    ml_attention_args prepared = *args;
    if (args->score || args->derivative) {
        ml_attention_args plain = *args;
        plain.score = plain.derivative = 0;
        plain.pieces = 0;
        plain.offset = plain.key_ranks = 0;
        int64_t unchecked[ARGS];
        pack(&plain, unchecked);
        /* Checks q, k and v before their axes are looked up. */
        ml_ref first = ml_graph_add(g, ML_OP_ATTENTION, sources, QKV, unchecked, ARGS, NULL);
        ml_type score;
        ml_attention_score_type(g, ml_graph_source(g, first, 0), ml_graph_source(g, first, 1), args,
                                &score);
        prepared.score = attention_prepare_function(g, args->score, &score);
        prepared.derivative = attention_prepare_function(g, args->derivative, &score);
    }
    int64_t packed[ARGS];
    pack(&prepared, packed);
    return ml_graph_add(g, op, sources, count, packed, ARGS, NULL);
}

ml_ref ml_attention(ml_graph *g, const ml_ref *sources, int count, const ml_attention_args *args) {
    return add(g, ML_OP_ATTENTION, sources, count, args);
}

ml_ref ml_attention_grad(ml_graph *g, const ml_ref *sources, int count,
                         const ml_attention_args *args) {
    return add(g, ML_OP_ATTENTION_GRAD, sources, count, args);
}
