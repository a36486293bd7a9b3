/* Products by groups of rows with an elementwise epilogue (passes.h, ragged.h): gate and up of an
 * expert are halves of one product's columns; the hidden tensor, elementwise in both and in numbers
 * of the row (the weight of a token's choice), is the product's second output. */
#include "runtime/graph/infer.h"
#include "runtime/graph/rewrite.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/passes/passes.h"

enum { HALVES = RAGGED_HALVES, MOST_NODES = 24 };

typedef struct {
    ml_ref dot, result;            /* in the old graph */
    ml_ref row[RAGGED_GATED_ROWS]; /* numbers of the rows */
    int rows, nodes;
    bool half[HALVES];
} gated;

static const ml_type *type_of(const ml_graph *g, ml_ref n) {
    return ml_graph_type(g, n);
}

/* Which half of a product's columns n is, under whatever name; -1. */
static int half_of(const ml_graph *g, ml_ref n, ml_ref *dot) {
    while (ml_graph_node(g, n)->op == ML_OP_RENAME) n = ml_graph_source(g, n, 0);
    if (ml_graph_node(g, n)->op != ML_OP_SLICE) return -1;
    const int64_t *args = ml_graph_args(g, n);
    *dot = ml_graph_source(g, n, 0);
    const ml_type *type = type_of(g, *dot);
    int64_t size = type->size[type->rank - 1], half = size / HALVES;
    if (ml_graph_node(g, *dot)->op != ML_OP_RAGGED_DOT || type->dtype != ML_BF16 ||
        (ml_axis)args[0] != type->axis[type->rank - 1] || half % RAGGED_GATED_COLUMNS ||
        size != half * HALVES || args[2] - args[1] != half || args[1] % half)
        return -1;
    return args[1] != 0;
}

/* Numbers of the rows of `like`, known before the product. */
static bool is_row(const ml_graph *g, ml_ref n, const gated *f, const ml_type *like) {
    const ml_type *t = type_of(g, n);
    for (int i = 0; i < t->rank; i++) {
        int at = ml_type_find(like, t->axis[i]);
        if (at < 0 || at == like->rank - 1) return false;
    }
    return t->rank > 0 && (!f->dot || n < f->dot) && t->dtype == ML_F32;
}

/* Whether n is made of the halves of one product and of numbers of its rows. */
static bool take(const ml_graph *g, ml_ref n, const ml_type *like, gated *f) {
    const ml_node *node = ml_graph_node(g, n);
    ml_ref dot;
    int half = half_of(g, n, &dot);
    if (half >= 0) {
        if (f->dot && f->dot != dot) return false;
        f->dot = dot, f->half[half] = true;
        return type_of(g, n)->rank == type_of(g, dot)->rank;
    }
    if (node->op == ML_OP_CONST) return true;
    if (is_row(g, n, f, like)) {
        for (int i = 0; i < f->rows; i++)
            if (f->row[i] == n) return true;
        if (f->rows == RAGGED_GATED_ROWS) return false;
        f->row[f->rows++] = n;
        return true;
    }
    bool maps = ml_op_is_function(node->op) || node->op == ML_OP_BROADCAST;
    if (!maps || ++f->nodes > MOST_NODES) return false;
    for (int i = 0; i < node->source_count; i++)
        if (!take(g, ml_graph_source(g, n, i), like, f)) return false;
    return true;
}

/* What n is rounded to 8 bits of, by a scale; else n. */
static ml_ref before_rounding(const ml_graph *g, ml_ref n) {
    ml_ref at = n;
    if (ml_graph_node(g, at)->op != ML_OP_CAST || ml_dtypes[type_of(g, at)->dtype].bytes != 1)
        return n;
    at = ml_graph_source(g, at, 0);
    if (ml_graph_node(g, at)->op == ML_OP_MUL) {
        const ml_ref first = ml_graph_source(g, at, 0);
        at = type_of(g, first)->rank > 0 ? first : ml_graph_source(g, at, 1);
    }
    return ml_graph_node(g, at)->op == ML_OP_CAST ? ml_graph_source(g, at, 0) : n;
}

/* The left operand of the product `n`, if that is a product with a function. */
static bool find(const ml_graph *g, ml_ref n, gated *f) {
    enum { LATER = ML_NODE_BACKWARD | ML_NODE_COPY };
    *f = (gated){0};
    if (ml_graph_node(g, n)->op != ML_OP_RAGGED_DOT) return false;
    f->result = before_rounding(g, ml_graph_source(g, n, 0));
    const ml_node *node = ml_graph_node(g, f->result);
    const ml_type *type = type_of(g, f->result);
    if (ml_ops[node->op].op_class != ML_CLASS_MAP || node->flags & LATER ||
        type->dtype != ML_BF16 || !take(g, f->result, type, f) || !f->half[0] || !f->half[1])
        return false;
    const ml_type *product = type_of(g, f->dot);
    for (int i = 0; i + 1 < product->rank; i++)
        if (product->axis[i] != type->axis[i]) return false;
    for (int i = 0; i < f->rows; i++)
        if (f->row[i] > f->dot) return false;
    return ml_graph_args(g, f->dot)[3] == 0;
}

typedef struct {
    gated *of;   /* by node of the old graph that is such a product */
    ml_ref *dot; /* by node that is the elementwise result: its product */
} state;

static void begin(rewrite *r) {
    state *s = r->context = ML_NEW(r->scratch, state);
    s->of = ML_NEW_ARRAY(r->scratch, gated, r->count);
    s->dot = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    gated f;
    for (ml_ref n = 1; n < r->count; n++) {
        if (!r->users[n] || !find(r->from, n, &f) || s->of[f.dot].dot) continue;
        s->of[f.dot] = f, s->dot[f.result] = f.dot;
    }
}

/* The same in terms of parameters: the halves, then the numbers of the rows. */
static ml_ref function(rewrite *r, const gated *f, ml_ref n) {
    ml_graph *g = r->to;
    const ml_graph *from = r->from;
    const ml_node *node = ml_graph_node(from, n);
    ml_ref dot, sources[3];
    int64_t parameter = half_of(from, n, &dot);
    for (int i = 0; i < f->rows && parameter < 0; i++)
        if (f->row[i] == n) parameter = HALVES + i;
    if (parameter >= 0)
        return ml_graph_add(g, ML_OP_PARAM, NULL, 0, &parameter, 1, type_of(from, n));
    for (int i = 0; i < node->source_count; i++)
        sources[i] = function(r, f, ml_graph_source(from, n, i));
    return ml_graph_add(g, node->op, sources, node->source_count, ml_graph_args(from, n),
                        node->arg_count, type_of(from, n));
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    const state *s = r->context;
    const gated *f = &s->of[n];
    const ml_type type = *type_of(r->from, n);
    if (f->dot) {
        ml_ref all[RAGGED_MOST_SOURCES + RAGGED_GATED_ROWS];
        const int count = ml_graph_node(r->from, n)->source_count;
        for (int i = 0; i < count; i++) all[i] = sources[i];
        for (int i = 0; i < f->rows; i++) all[count + i] = r->map[f->row[i]];
        const int64_t *args = ml_graph_args(r->from, n);
        ml_ref root = graph_copy_function(r->to, r->to, function(r, f, f->result));
        return ml_graph_add(r->to, ML_OP_RAGGED_DOT, all, count + f->rows,
                            (int64_t[]){args[0], args[1], args[2], root}, 4, &type);
    }
    if (!s->dot[n]) return rewrite_copy(r, n, sources);
    ml_ref second = ml_out(r->to, r->map[s->dot[n]], 1);
    ml_axis named = type_of(r->to, second)->axis[type.rank - 1];
    if (named != type.axis[type.rank - 1])
        second = ml_rename(r->to, second, named, type.axis[type.rank - 1]);
    return ml_permute(r->to, second, &type);
}

bool ml_fuse_gated_experts_applies(const ml_graph *g) {
    gated f;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (find(g, n, &f)) return true;
    return false;
}

ml_graph *ml_fuse_gated_experts(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, begin, rule, NULL);
}
