/* How evenly the ranks' attentions share the work. What a mask hides of an attention of parts
 * depends on where the parts begin, which the graph computes from a rank's coordinates: that little
 * arithmetic is done here for every rank. */
#include "runtime/graph/reference.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/shard/shard.h"

enum { MOST_RANKS = 4096 };

typedef struct {
    const ml_graph *g;
    const ml_layout *layout;
    ml_arena *scratch;
    reference_cell *cells;           /* of numbers, by node */
    uint32_t *known, round;          /* known[n] == round: cells[n] is of this rank */
    bool used[ML_MAX_MESH], unknown; /* mesh axes that places depend on; on something else too */
    int64_t coordinate[ML_MAX_MESH];
    double most, average; /* of the ranks */
} work;

static reference_cell value_of(work *w, ml_ref n) {
    const ml_node *node = ml_graph_node(w->g, n);
    const int64_t *args = ml_graph_args(w->g, n);
    reference_cell x[3] = {0};
    if (w->known[n] == w->round) return w->cells[n];
    if (node->op == ML_OP_CONST) {
        x[0].integer = args[0];
    } else if (node->op == ML_OP_COORDINATE) {
        w->used[args[0]] = true;
        x[0].integer = w->coordinate[args[0]];
    } else if (ml_ops[node->op].op_class == ML_CLASS_MAP && node->op != ML_OP_RANDOM) {
        for (int i = 0; i < node->source_count; i++)
            x[i] = value_of(w, ml_graph_source(w->g, n, i));
        ml_dtype from = (ml_dtype)ml_graph_type(w->g, ml_graph_source(w->g, n, 0))->dtype;
        x[0] = reference_map((ml_op)node->op, (ml_dtype)ml_graph_type(w->g, n)->dtype, from, x);
    } else {
        w->unknown = true;
    }
    w->known[n] = w->round;
    w->cells[n] = x[0];
    return x[0];
}

/* Of one attention or gradient on one rank: proportional to its products. */
static double work_of(work *w, ml_ref n) {
    ml_attention_args args;
    ml_attention_read(w->g, n, &args);
    const ml_type *q = ml_graph_type(w->g, ml_graph_source(w->g, n, 0));
    const ml_type *k = ml_graph_type(w->g, ml_graph_source(w->g, n, 1));
    int64_t queries = ml_type_size(q, args.seq);
    int64_t keys = ml_type_size(k, args.kv_seq), end = ml_attention_captured(w->g, n);
    double rows = (double)ml_type_elements(q) / (double)queries; /* batch, heads, head_dim */
    bool gradient = ml_graph_node(w->g, n)->op == ML_OP_ATTENTION_GRAD;
    double pairs = 0;
    if (!args.pieces)
        pairs = ml_attention_pairs(queries, keys, keys - queries, args.causal, args.window);
    for (int i = 0; i < args.pieces; i++) {
        ml_ref q_start = ml_graph_source(w->g, n, (int)end - args.pieces - 1 + i);
        int64_t shift = args.offset + value_of(w, q_start).integer -
                        value_of(w, ml_graph_source(w->g, n, (int)end - 1)).integer;
        pairs += ml_attention_pairs(queries / args.pieces, keys, shift, args.causal, args.window);
    }
    return pairs * rows * (gradient ? 2 : 1);
}

static double work_of_rank(work *w) {
    double sum = 0;
    w->round++;
    for (ml_ref n = 1; n < ml_graph_count(w->g); n++) {
        int op = ml_graph_node(w->g, n)->op;
        if (op == ML_OP_ATTENTION || op == ML_OP_ATTENTION_GRAD) sum += work_of(w, n);
    }
    return sum;
}

/* The next coordinates along the mesh axes that matter; false after the last. */
static bool advance(work *w) {
    for (int i = w->layout->count - 1; i >= 0; i--) {
        if (!w->used[i]) continue;
        if (++w->coordinate[i] < w->layout->axis[i].size) return true;
        w->coordinate[i] = 0;
    }
    return false;
}

static void compare_ranks(void *argument) {
    work *w = argument;
    int64_t ranks = 1, count = 0;
    double sum = 0;
    w->cells = ML_NEW_ARRAY(w->scratch, reference_cell, ml_graph_count(w->g));
    w->known = ML_NEW_ARRAY(w->scratch, uint32_t, ml_graph_count(w->g));
    (void)work_of_rank(w); /* finds the mesh axes that matter */
    for (int i = 0; i < w->layout->count; i++) ranks *= w->used[i] ? w->layout->axis[i].size : 1;
    if (w->unknown || ranks > MOST_RANKS) return;
    do {
        double mine = work_of_rank(w);
        sum += mine;
        count++;
        if (mine > w->most) w->most = mine;
    } while (advance(w));
    w->average = sum / (double)count;
}

double ml_shard_balance(const ml_graph *g, const ml_layout *layout) {
    work w = {.g = g, .layout = layout, .scratch = ml_arena_new()};
    bool compared = w.scratch && ml_protect(compare_ranks, &w) == ML_OK;
    ml_arena_free(w.scratch);
    return compared && w.average > 0 ? w.most / w.average : 1;
}
