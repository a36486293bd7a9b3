/* Whether a loss is a sum over sequences. */
#include "runtime/ops/attention/by_sequence.h"

#include "runtime/graph/infer.h"
#include "runtime/ops/attention/attention.h"

/* What a value knows of the rows. */
typedef enum {
    OUTSIDE,   /* nothing: it has no part of a token */
    POSITIONS, /* by position along seq */
    KEYS,      /* likewise, along the keys' name for seq: for attention alone. What nodes that keep
                  documents apart give without seq is as useless elsewhere */
    TOTAL      /* a sum over positions */
} knowledge;

static const char of_one_row[] = "it computes with numbers of documents, which are those of a row";

typedef struct {
    const ml_graph *g;
    ml_axis batch, seq;
    ml_ref documents;
    const ml_apart *apart;
    int apart_count;
    ml_arena *arena;
    uint8_t *known; /* knowledge, by node */
    ml_across_sequences found;
} walk;

static bool has(const walk *w, ml_ref n, ml_axis axis) {
    return ml_type_find(ml_graph_type(w->g, n), axis) >= 0;
}

static knowledge refuse(walk *w, ml_ref n, const char *why) {
    if (!w->found.node) w->found = (ml_across_sequences){n, why};
    return OUTSIDE;
}

/* Whether an argument of n names the axis. */
static bool names(const walk *w, ml_ref n, ml_axis axis) {
    const ml_node *node = ml_graph_node(w->g, n);
    const ml_op_arg *arg = ml_ops[node->op].args, *first = arg;
    for (int i = 0; i < node->arg_count; i++) {
        if (arg->kind == ML_ARG_MANY) arg = first;
        bool axes = arg->kind == ML_ARG_AXIS || arg->kind == ML_ARG_OWN ||
                    arg->kind == ML_ARG_RESULT || arg->kind == ML_ARG_NEW ||
                    arg->kind == ML_ARG_AXIS_OR_0;
        if (axes && ml_graph_args(w->g, n)[i] == axis) return true;
        if (arg->kind == ML_ARG_NEW) i++; /* its size */
        arg++;
    }
    return false;
}

/* The most that an operand knows; *totals counts those that are sums. */
static knowledge of_sources(const walk *w, ml_ref n, int *totals) {
    knowledge most = OUTSIDE;
    *totals = 0;
    for (int i = 0; i < ml_graph_node(w->g, n)->source_count; i++) {
        knowledge k = (knowledge)w->known[ml_graph_source(w->g, n, i)];
        *totals += k == TOTAL;
        if (k > most) most = k;
    }
    return most;
}

/* n, of which an operand is a sum over positions, is linear in these sums together. */
static bool linear_in_totals(const walk *w, ml_ref n, int totals) {
    const ml_node *node = ml_graph_node(w->g, n);
    bool first = w->known[ml_graph_source(w->g, n, 0)] == TOTAL;
    switch (ml_ops[node->op].linear) {
    case ML_LINEAR_NO: return ml_ops[node->op].op_class == ML_CLASS_MAP && node->op == ML_OP_CAST;
    case ML_LINEAR_A: return first && totals == 1;
    case ML_LINEAR_B: return !first && totals == 1;
    case ML_LINEAR_EACH: return totals == 1;
    case ML_LINEAR_JOINT: return totals == node->source_count;
    case ML_LINEAR_CHOSEN: return !first && totals == node->source_count - 1;
    }
    return false;
}

/* ---- Attention ------------------------------------------------------------------------------- */

/* Without what only changes its axes or dtype: m.attention gives what a score function reads all
 * axes of the scores by where(true, x, filler). */
static ml_ref plain(const ml_graph *g, ml_ref n) {
    for (;;) {
        ml_op op = (ml_op)ml_graph_node(g, n)->op;
        bool chosen =
            op == ML_OP_WHERE && ml_graph_node(g, ml_graph_source(g, n, 0))->op == ML_OP_CONST;
        if (!chosen && op != ML_OP_BROADCAST && op != ML_OP_PERMUTE && op != ML_OP_CAST) return n;
        n = ml_graph_source(g, n, chosen);
    }
}

/* The captured tensor that a part of a score function stands for; 0: it is none. */
static ml_ref captured(const ml_graph *g, ml_ref n, ml_ref part) {
    part = plain(g, part);
    if (ml_graph_node(g, part)->op != ML_OP_PARAM) return 0;
    int64_t index = ml_graph_args(g, part)[0];
    int first = ml_attention_captured(g, n);
    if (index < 1 || first + index - 1 >= ml_graph_node(g, n)->source_count) return 0;
    return plain(g, ml_graph_source(g, n, first + (int)index - 1));
}

/* Of where(numbers of query and key are equal, ..., -infinity): what has the numbers. */
static bool compares_numbers(const ml_graph *g, ml_ref n, ml_ref *query, ml_ref *key) {
    ml_attention_args args;
    ml_attention_read(g, n, &args);
    if (!args.score || ml_graph_node(g, args.score)->op != ML_OP_WHERE) return false;
    ml_ref test = plain(g, ml_graph_source(g, args.score, 0));
    if (ml_graph_node(g, test)->op != ML_OP_EQ) return false;
    *query = captured(g, n, ml_graph_source(g, test, 0));
    *key = captured(g, n, ml_graph_source(g, test, 1));
    return *query && *key;
}

bool ml_attention_by_document(const ml_graph *g, ml_ref n) {
    ml_ref query, key;
    if (!compares_numbers(g, n, &query, &key)) return false;
    ml_attention_args args;
    ml_attention_read(g, n, &args);
    const ml_type *of_query = ml_graph_type(g, query), *of_key = ml_graph_type(g, key);
    return ml_type_find(of_query, args.seq) >= 0 && ml_type_find(of_key, args.kv_seq) >= 0 &&
           ml_dtypes[of_query->dtype].kind == ML_KIND_INT;
}

static bool bounded(const walk *w, ml_ref n) {
    ml_ref query, key;
    if (!compares_numbers(w->g, n, &query, &key)) return false;
    return ml_graph_node(w->g, key)->op == ML_OP_RENAME && query == w->documents &&
           plain(w->g, ml_graph_source(w->g, key, 0)) == w->documents;
}

/* Whether n has the numbers of documents, by queries or keys. */
static bool is_numbers(const walk *w, ml_ref n) {
    n = plain(w->g, n);
    if (ml_graph_node(w->g, n)->op == ML_OP_RENAME) n = plain(w->g, ml_graph_source(w->g, n, 0));
    return n == w->documents;
}

/* What a score function captures beside the numbers that it compares has neither their values nor
 * places of its own along the row; NULL: it is so. */
static const char *captures(const walk *w, ml_ref n, const ml_attention_args *args) {
    int numbers = 0;
    double value;
    for (int i = ml_attention_captured(w->g, n); i < ml_graph_node(w->g, n)->source_count; i++) {
        const ml_ref source = ml_graph_source(w->g, n, i);
        numbers += is_numbers(w, source);
        if (w->known[source] == OUTSIDE && !ml_graph_constant(w->g, source, &value) &&
            (has(w, source, args->seq) || has(w, source, args->kv_seq)))
            return "the score function reads a table by the place in the row";
    }
    return numbers > 2 ? of_one_row : NULL;
}

/* Whether a part of a score function is an index along queries or keys. */
static bool is_index(const walk *w, const ml_attention_args *args, ml_ref n) {
    n = plain(w->g, n);
    ml_axis axis = (ml_axis)(ml_graph_node(w->g, n)->arg_count ? ml_graph_args(w->g, n)[0] : 0);
    return ml_graph_node(w->g, n)->op == ML_OP_IOTA && (axis == args->seq || axis == args->kv_seq);
}

/* Indices count along the row: the difference of two, or which is larger, does not depend on it. */
static bool relative(const walk *w, const ml_attention_args *args, ml_ref score) {
    ml_refs body = {0};
    graph_reach(w->g, score, w->arena, &body);
    for (uint32_t i = 0; i < body.count; i++) {
        ml_ref n = body.at[i];
        const ml_node *node = ml_graph_node(w->g, n);
        int indices = 0;
        if (is_index(w, args, n)) continue;
        for (int k = 0; k < node->source_count; k++)
            indices += is_index(w, args, ml_graph_source(w->g, n, k));
        bool differs = node->op == ML_OP_SUB || ml_op_compares((ml_op)node->op);
        if (indices && !(differs && indices == 2)) return false;
    }
    return true;
}

static knowledge of_attention(walk *w, ml_ref n) {
    ml_attention_args args;
    ml_attention_read(w->g, n, &args);
    if (args.seq != w->seq) return refuse(w, n, "attention along another axis than the sequences'");
    if (!bounded(w, n)) return refuse(w, n, "attention crosses documents");
    if (!relative(w, &args, args.score))
        return refuse(w, n, "the score function reads the place of a query or key in its row");
    const char *why = captures(w, n, &args);
    return why ? refuse(w, n, why) : POSITIONS;
}

/* ---- Nodes ----------------------------------------------------------------------------------- */

static knowledge of_leaf(walk *w, ml_ref n) {
    ml_op op = (ml_op)ml_graph_node(w->g, n)->op;
    if (op == ML_OP_INPUT && has(w, n, w->seq)) return POSITIONS;
    if (op == ML_OP_IOTA && has(w, n, w->seq))
        return refuse(w, n, "it counts along the row, in which sequences lie anywhere");
    return OUTSIDE;
}

/* n names seq or the batch, or sums over them. */
static knowledge along(walk *w, ml_ref n) {
    ml_op op = (ml_op)ml_graph_node(w->g, n)->op;
    if (op == ML_OP_SUM || op == ML_OP_DOT) return TOTAL;
    if (op == ML_OP_RENAME) return KEYS;
    if (op == ML_OP_PLACE) return POSITIONS;
    return refuse(w, n, "it joins positions along the sequences' axes");
}

/* Whether n looks positions' numbers up in a table, whose axis it names: seq of a table is none of
 * positions' own. */
static bool looks_up(const walk *w, ml_ref n) {
    return ml_graph_node(w->g, n)->op == ML_OP_GATHER &&
           w->known[ml_graph_source(w->g, n, 0)] == OUTSIDE;
}

static bool keeps_apart(const walk *w, ml_ref n) {
    for (int i = 0; i < w->apart_count; i++)
        if (n >= w->apart[i].first && n < w->apart[i].end) return true;
    return false;
}

/* Whether n computes with the numbers of documents: what only says which are equal, or which
 * positions are of one, does not. */
static bool computes_numbers(const walk *w, ml_ref n) {
    const ml_op op = (ml_op)ml_graph_node(w->g, n)->op;
    const int count = ml_graph_node(w->g, n)->source_count;
    double least = 1;
    int numbers = 0;
    for (int i = 0; i < count; i++) numbers += is_numbers(w, ml_graph_source(w->g, n, i));
    if (numbers == 0 || op == ML_OP_ATTENTION || op == ML_OP_RENAME || is_numbers(w, n))
        return false;
    if (op == ML_OP_EQ || op == ML_OP_NE) return numbers < count;
    if (op == ML_OP_GE && ml_graph_constant(w->g, ml_graph_source(w->g, n, 1), &least))
        return least != 0;
    return true;
}

static knowledge of_node(walk *w, ml_ref n) {
    const ml_node *node = ml_graph_node(w->g, n);
    ml_op op = (ml_op)node->op;
    int totals;
    if (keeps_apart(w, n) && of_sources(w, n, &totals) < TOTAL)
        return has(w, n, w->seq)                      ? POSITIONS
               : of_sources(w, n, &totals) == OUTSIDE ? OUTSIDE
                                                      : KEYS;
    if (ml_ops[op].op_class == ML_CLASS_LEAF) return of_leaf(w, n);
    if (computes_numbers(w, n)) return refuse(w, n, of_one_row);
    if (op == ML_OP_RANDOM) return refuse(w, n, "it draws numbers by the place in the row");
    knowledge most = of_sources(w, n, &totals);
    if (op == ML_OP_OUT) return most;
    if (most == OUTSIDE) return OUTSIDE;
    if (op == ML_OP_ATTENTION) return of_attention(w, n);
    if (most == TOTAL) {
        if (!linear_in_totals(w, n, totals))
            return refuse(w, n, "it is not linear in a sum over positions");
        return has(w, n, w->seq) ? refuse(w, n, "a sum over positions is added to each") : TOTAL;
    }
    if (!ml_op_is(op, ML_BY_PARTS))
        return refuse(w, n, "its rows are not known to be independent of one another");
    bool named = !looks_up(w, n) && (names(w, n, w->seq) || names(w, n, w->batch));
    if (most == KEYS) {
        if (named || has(w, n, w->seq))
            return refuse(w, n, "pairs of positions, outside of attention");
        return ml_op_is_map(op) || ml_ops[op].op_class == ML_CLASS_MOVE
                   ? KEYS
                   : refuse(w, n, "it joins positions along the keys' axis");
    }
    if (named) return along(w, n);
    return has(w, n, w->seq) ? POSITIONS : refuse(w, n, "it leaves out the sequences' axis");
}

ml_across_sequences ml_find_across_sequences(const ml_graph *g, const ml_ref *roots, int count,
                                             ml_axis batch, ml_axis seq, ml_ref documents,
                                             const ml_apart *apart, int apart_count) {
    walk w = {.g = g, .batch = batch, .seq = seq, .documents = documents, .arena = ml_arena_new()};
    w.apart = apart, w.apart_count = apart_count;
    if (!w.arena) ml_raise(ML_NO_MEMORY, "out of memory while a loss is looked at");
    ml_ref last = 0;
    for (int i = 0; i < count; i++) last = roots[i] > last ? roots[i] : last;
    bool *wanted = ML_NEW_ARRAY(w.arena, bool, last + 1);
    w.known = ML_NEW_ARRAY(w.arena, uint8_t, last + 1);
    for (int i = 0; i < count; i++) wanted[roots[i]] = true;
    for (ml_ref n = last; n > 0; n--)
        for (int i = 0; wanted[n] && i < ml_graph_node(g, n)->source_count; i++)
            wanted[ml_graph_source(g, n, i)] = true;
    for (ml_ref n = 1; n <= last && !w.found.node; n++)
        if (wanted[n]) w.known[n] = (uint8_t)of_node(&w, n);
    for (int i = 0; i < count && !w.found.node; i++)
        if (w.known[roots[i]] != TOTAL)
            w.found = (ml_across_sequences){roots[i], "it is no sum over positions"};
    ml_arena_free(w.arena);
    return w.found;
}
