/* CACHED_ATTENTION (cached_attention.h): types and arguments. */
#include "runtime/ops/cached_attention/cached_attention.h"

#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/ops/attention/attention.h"

enum { ARGS = 13 };

static void pack(const ml_cached_attention_args *a, int64_t *args) {
    int64_t scale;
    memcpy(&scale, &a->scale, sizeof scale);
    int64_t all[ARGS] = {a->seq,      a->pool,   a->columns, a->heads,  a->kv_heads,
                         a->head_dim, a->kv_seq, a->keys,    a->causal, a->window,
                         a->block,    scale,     a->score};
    memcpy(args, all, sizeof all);
}

static ml_cached_attention_args unpack(const int64_t *args) {
    ml_cached_attention_args a = {(ml_axis)args[0], (ml_axis)args[1], (ml_axis)args[2],
                                  (ml_axis)args[3], (ml_axis)args[4], (ml_axis)args[5],
                                  (ml_axis)args[6], args[7],          args[8] != 0,
                                  args[9],          args[10],         0,
                                  (ml_ref)args[12]};
    memcpy(&a.scale, &args[11], sizeof a.scale);
    return a;
}

void ml_cached_attention_read(const ml_graph *g, ml_ref n, ml_cached_attention_args *args) {
    *args = unpack(ml_graph_args(g, n));
}

ml_axis ml_cached_attention_row(const ml_graph *g, const ml_ref *sources) {
    return ml_graph_type(g, sources[CACHED_START])->axis[0];
}

static void push(ml_type *t, ml_axis axis, int64_t size) {
    t->axis[t->rank] = axis;
    t->size[t->rank++] = size;
}

void ml_cached_attention_score_type(const ml_graph *g, const ml_ref *sources,
                                    const ml_cached_attention_args *args, ml_type *out) {
    const ml_type *q = ml_graph_type(g, sources[CACHED_Q]);
    ml_axis row = ml_cached_attention_row(g, sources);
    *out = (ml_type){.dtype = (uint8_t)attention_dtype((ml_dtype)q->dtype)};
    push(out, row, ml_type_size(q, row));
    push(out, args->heads, ml_type_size(q, args->heads));
    push(out, args->seq, ml_type_size(q, args->seq));
    push(out, args->kv_seq, args->keys);
}

void ml_cached_attention_param_type(const ml_graph *g, const ml_ref *sources,
                                    const ml_cached_attention_args *args, ml_ref captured,
                                    ml_type *out) {
    const ml_type *t = ml_graph_type(g, captured);
    *out = *t;
    if (ml_type_find(t, args->pool) < 0 || t->rank == ML_MAX_AXES) return;
    ml_axis row = ml_cached_attention_row(g, sources);
    *out = (ml_type){.dtype = t->dtype};
    push(out, row, ml_type_size(ml_graph_type(g, sources[CACHED_START]), row));
    push(out, args->kv_seq, args->keys);
    for (int i = 0; i < t->rank; i++)
        if (t->axis[i] != args->pool) push(out, t->axis[i], t->size[i]);
}

/* ---- Checks ---------------------------------------------------------------------------------- */

static const char *const NAMES[] = {"q", "k", "v", "the table", "the start", "the length"};

/* Source i has just these axes. */
static void check_axes(const infer *in, int i, const ml_axis *axes, int count) {
    const ml_type *t = infer_source(in, i);
    ml_text wanted = {.arena = ml_graph_arena(in->g)};
    for (int k = 0; k < count; k++)
        ml_text_add(&wanted, "%s%s", k ? ", " : "", ml_axis_name(in->g, axes[k]));
    for (int k = 0; k < count; k++)
        if (ml_type_find(t, axes[k]) < 0 || t->rank != count)
            infer_raise(in, NULL, "cannot attend: %s has axes %s, and should have %s", NAMES[i],
                        infer_axes(in, t), wanted.text);
}

/* An axis has the same size in sources i and j. */
static void check_size(const infer *in, int i, int j, ml_axis axis) {
    int64_t a = ml_type_size(infer_source(in, i), axis),
            b = ml_type_size(infer_source(in, j), axis);
    if (a != b)
        infer_raise(in, NULL, "cannot attend: \"%s\" is %lld in %s, %lld in %s",
                    ml_axis_name(in->g, axis), (long long)a, NAMES[i], (long long)b, NAMES[j]);
}

static void check_operands(const infer *in, const ml_cached_attention_args *a) {
    const int pool_axes = a->kv_heads ? 3 : 2;
    for (int i = CACHED_Q; i <= CACHED_V; i++) infer_float_only(in, i);
    for (int i = CACHED_TABLE; i <= CACHED_LENGTH; i++) infer_dtype(in, i, ML_I32, NAMES[i]);
    if (infer_source(in, CACHED_START)->rank != 1)
        infer_raise(in, NULL, "cannot attend: the start has axes %s, and should have that of rows",
                    infer_axes(in, infer_source(in, CACHED_START)));
    ml_axis row = ml_cached_attention_row(in->g, in->sources);
    check_axes(in, CACHED_Q, (ml_axis[]){row, a->seq, a->heads, a->head_dim}, 4);
    for (int i = CACHED_K; i <= CACHED_V; i++)
        check_axes(in, i, (ml_axis[]){a->pool, a->head_dim, a->kv_heads}, pool_axes);
    check_axes(in, CACHED_TABLE, (ml_axis[]){row, a->columns}, 2);
    check_axes(in, CACHED_LENGTH, &row, 1);
    for (int i = CACHED_TABLE; i <= CACHED_LENGTH; i++) check_size(in, CACHED_Q, i, row);
    check_size(in, CACHED_Q, CACHED_K, a->head_dim);
    check_size(in, CACHED_K, CACHED_V, a->pool);
    if (a->kv_heads) check_size(in, CACHED_K, CACHED_V, a->kv_heads);
    if (infer_source(in, CACHED_K)->dtype != infer_source(in, CACHED_V)->dtype)
        infer_raise(in, "keep both in one dtype", "cannot attend: k is %s, v is %s",
                    ml_dtypes[infer_source(in, CACHED_K)->dtype].name,
                    ml_dtypes[infer_source(in, CACHED_V)->dtype].name);
}

static void check_numbers(const infer *in, const ml_cached_attention_args *a) {
    const ml_type *k = infer_source(in, CACHED_K);
    int64_t heads = ml_type_size(infer_source(in, CACHED_Q), a->heads);
    int64_t kv_heads = a->kv_heads ? ml_type_size(k, a->kv_heads) : 1;
    int64_t columns = ml_type_size(infer_source(in, CACHED_TABLE), a->columns);
    if (heads % kv_heads || (a->kv_heads == a->heads && heads != kv_heads))
        infer_raise(in, "the number of heads is a multiple of that of key/value heads",
                    "cannot attend: \"%s\" is %lld in q, \"%s\" is %lld in k",
                    ml_axis_name(in->g, a->heads), (long long)heads,
                    ml_axis_name(in->g, a->kv_heads), (long long)kv_heads);
    if (a->window < 0)
        infer_raise(in, "0 is no window", "the window of attention is %lld", (long long)a->window);
    if (a->block < 1 || ml_type_size(k, a->pool) % (a->block < 1 ? 1 : a->block))
        infer_raise(in, "a pool is a whole number of blocks",
                    "cannot attend: blocks of %lld positions in a pool of %lld",
                    (long long)a->block, (long long)ml_type_size(k, a->pool));
    if (a->block > INT32_MAX / columns || ml_type_size(k, a->pool) > INT32_MAX || a->keys < 1 ||
        a->keys > INT32_MAX)
        infer_raise(in, NULL, "cannot attend: positions are counted in i32");
}

static void check_function(const infer *in, const ml_cached_attention_args *a) {
    ml_type score;
    ml_cached_attention_score_type(in->g, in->sources, a, &score);
    int count = in->source_count - CACHED_CAPTURED;
    ml_type *params = ML_NEW_ARRAY(ml_graph_arena(in->g), ml_type, count + 1);
    params[0] = score;
    for (int i = 0; i < count; i++) {
        ml_type *t = &params[1 + i];
        ml_cached_attention_param_type(in->g, in->sources, a, in->sources[CACHED_CAPTURED + i], t);
        for (int k = 0; k < t->rank; k++)
            if (ml_type_size(&score, t->axis[k]) != t->size[k])
                infer_raise(in, "a score function works on one score at a time",
                            "a tensor that the score function uses has \"%s\" of size %lld, the "
                            "scores have %s",
                            ml_axis_name(in->g, t->axis[k]), (long long)t->size[k],
                            infer_axes(in, &score));
    }
    if (a->score) attention_check_function(in, a->score, params, count + 1, &score);
}

void cached_attention_infer(infer *in, ml_type *out) {
    ml_cached_attention_args a = unpack(in->args);
    if (in->source_count < CACHED_CAPTURED)
        ml_raise(ML_INTERNAL, "%s has %d operands", ml_ops[in->op].name, in->source_count);
    check_operands(in, &a);
    check_numbers(in, &a);
    check_function(in, &a);
    *out = *infer_source(in, CACHED_Q);
    out->size[ml_type_find(out, a.head_dim)] = ml_type_size(infer_source(in, CACHED_V), a.head_dim);
}

/* ---- Constructor ----------------------------------------------------------------------------- */

ml_ref ml_cached_attention(ml_graph *g, const ml_ref *sources, int count,
                           const ml_cached_attention_args *args) {
    ml_cached_attention_args a = *args;
    int64_t packed[ARGS];
    if (!a.keys)
        a.keys = a.block * ml_type_size(ml_graph_type(g, sources[CACHED_TABLE]), a.columns);
    a.score = 0;
    pack(&a, packed); /* checks the operands before their axes are looked up */
    ml_ref plain =
        ml_graph_add(g, ML_OP_CACHED_ATTENTION, sources, CACHED_CAPTURED, packed, ARGS, NULL);
    if (!args->score) return plain;
    ml_type score;
    ml_cached_attention_score_type(g, sources, &a, &score);
    a.score = attention_prepare_function(g, args->score, &score);
    pack(&a, packed);
    return ml_graph_add(g, ML_OP_CACHED_ATTENTION, sources, count, packed, ARGS, NULL);
}
