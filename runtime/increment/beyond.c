/* What a node of queries and keys is where the key is later than what the query may read.
 *
 * Comparisons of affine functions of both indices are decided over the whole region at once, at its
 * corners. From there on constants are folded, products with 0 are 0, and what is far below every
 * score, which is how masks are written, becomes 0 in an exponential. */
#include <math.h>
#include <stdlib.h>

#include "runtime/graph/infer.h"
#include "runtime/increment/internal.h"

typedef enum {
    FREE,     /* it may depend on the key */
    KNOWN,    /* it depends on the query alone */
    LOW,      /* so far below other scores that its exponential is 0 */
    CONSTANT, /* it is this value */
} known_kind;
typedef struct {
    known_kind kind;
    double value;
} known;

/* Elements (q, k) with k > q + ahead of nodes that have these axes; or those with k == q + ahead,
 * of which is asked whether none is LOW: then what may be LOW counts as such. */
typedef struct {
    ml_axis query, key;
    bool diagonal;
    int64_t ahead;
} region;

typedef struct {
    ml_ref node;
    region region;
    known known;
} entry;
typedef struct {
    increment *inc;
    ML_VEC(entry) entries;
    ml_index index;
} proof;

/* What a script adds to scores, or puts in their place, to hide them: at most the least f16. */
static const double LOWEST_SCORE = -6e4;

static const known free_ = {FREE, 0}, known_ = {KNOWN, 0}, low = {LOW, 0};
static known constant(double value) {
    return (known){CONSTANT, value};
}

static bool is_constant(known k, double value) {
    return k.kind == CONSTANT && k.value == value;
}
static bool is_low(known k) {
    return k.kind == LOW || (k.kind == CONSTANT && k.value <= LOWEST_SCORE);
}
static bool is_known(known k) {
    return k.kind == KNOWN || k.kind == CONSTANT;
}

/* What is one of both. */
static known join(const region *r, known a, known b) {
    if (r->diagonal && (is_low(a) || is_low(b))) return low;
    if (a.kind == CONSTANT && b.kind == CONSTANT && a.value == b.value) return a;
    if (is_known(a) && is_known(b)) return known_;
    return is_low(a) && is_low(b) ? low : free_;
}

static known product(known a, known b) {
    if (is_constant(a, 0) || is_constant(b, 0)) return constant(0);
    return is_known(a) && is_known(b) ? known_ : free_;
}

/* ---- Comparisons of positions ---------------------------------------------------------------- */

typedef struct {
    int64_t query, key, constant;
} affine;

static const int64_t MOST = (int64_t)1 << 40;

static bool sum_of(affine a, affine b, int64_t sign, affine *out) {
    *out = (affine){a.query + sign * b.query, a.key + sign * b.key, a.constant + sign * b.constant};
    return llabs(out->query) < MOST && llabs(out->key) < MOST && llabs(out->constant) < MOST;
}

static bool whole_constant(const ml_graph *g, ml_ref n, int64_t *out) {
    double value;
    if (!ml_graph_constant(g, n, &value) || value != floor(value) || fabs(value) >= (double)MOST)
        return false;
    *out = (int64_t)value;
    return true;
}

static bool read_affine(const ml_graph *g, ml_ref n, ml_axis query, ml_axis key, affine *out);

static bool affine_product(affine a, affine b, affine *out) {
    if (a.query || a.key) {
        affine swap = a;
        a = b;
        b = swap;
    }
    if (a.query || a.key || llabs(a.constant) > 1 << 20) return false;
    return sum_of((affine){0}, b, a.constant, out);
}

static bool affine_of_two(const ml_graph *g, ml_ref n, ml_axis query, ml_axis key, affine *out) {
    const ml_ref *s = ml_graph_sources(g, n);
    ml_op op = (ml_op)ml_graph_node(g, n)->op;
    affine a, b;
    if (op != ML_OP_ADD && op != ML_OP_SUB && op != ML_OP_MUL) return false;
    if (!read_affine(g, s[0], query, key, &a) || !read_affine(g, s[1], query, key, &b))
        return false;
    return op == ML_OP_MUL ? affine_product(a, b, out)
                           : sum_of(a, b, op == ML_OP_ADD ? 1 : -1, out);
}

/* n as an affine function of the indices along both axes. */
static bool read_affine(const ml_graph *g, ml_ref n, ml_axis query, ml_axis key, affine *out) {
    const ml_node node = *ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    *out = (affine){0};
    if (whole_constant(g, n, &out->constant)) return true;
    if (node.op == ML_OP_IOTA) {
        *out = (affine){args[0] == query, args[0] == key, 0};
        return args[0] == query || args[0] == key;
    }
    double test;
    if (node.op == ML_OP_WHERE && ml_graph_constant(g, ml_graph_source(g, n, 0), &test))
        return read_affine(g, ml_graph_source(g, n, test != 0 ? 1 : 2), query, key, out);
    if (node.source_count == 2) return affine_of_two(g, n, query, key, out);
    if (node.source_count != 1) return false;
    ml_ref s = ml_graph_source(g, n, 0);
    if (node.op == ML_OP_RENAME)
        return read_affine(g, s, increment_inner(g, n, query), increment_inner(g, n, key), out);
    bool same = node.op == ML_OP_CAST || node.op == ML_OP_STOP_GRADIENT ||
                node.op == ML_OP_BROADCAST || node.op == ML_OP_PERMUTE;
    if (!same && node.op != ML_OP_SLICE && node.op != ML_OP_NEG) return false;
    if (!read_affine(g, s, query, key, out)) return false;
    if (node.op == ML_OP_NEG) return sum_of((affine){0}, *out, -1, out);
    if (node.op != ML_OP_SLICE) return true;
    out->constant += args[0] == query ? out->query * args[1] : 0;
    out->constant += args[0] == key ? out->key * args[1] : 0;
    return true;
}

/* The least and the largest value in the region of axes of these sizes; false where it is empty. */
static bool bounds(affine f, const region *r, int64_t queries, int64_t keys, int64_t *least,
                   int64_t *most) {
    if (r->diagonal) {
        int64_t ends[2] = {f.key * r->ahead + f.constant, 0};
        ends[1] = ends[0] + (f.query + f.key) * (queries - 1);
        *least = ends[0] < ends[1] ? ends[0] : ends[1];
        *most = ends[0] < ends[1] ? ends[1] : ends[0];
        return r->ahead >= 0 && queries + r->ahead <= keys;
    }
    int64_t last = keys - 2 - r->ahead < queries - 1 ? keys - 2 - r->ahead : queries - 1;
    int64_t from[3] = {0, -r->ahead - 1, last}; /* where the first key bends between both */
    bool any = false;
    for (int i = 0; i < 3; i++) {
        int64_t q = from[i], first = q + r->ahead + 1 > 0 ? q + r->ahead + 1 : 0;
        if (q < 0 || q > last) continue;
        for (int end = 0; end < 2; end++) {
            int64_t value = f.query * q + f.key * (end ? keys - 1 : first) + f.constant;
            if (!any || value < *least) *least = value;
            if (!any || value > *most) *most = value;
            any = true;
        }
    }
    return any;
}

/* A comparison of a with b by the bounds of a - b. */
static known decide(ml_op op, int64_t least, int64_t most) {
    bool yes = least > 0 || most < 0, no = least == 0 && most == 0; /* NE */
    if (op == ML_OP_LT) yes = most < 0, no = least >= 0;
    if (op == ML_OP_LE) yes = most <= 0, no = least > 0;
    if (op == ML_OP_GT) yes = least > 0, no = most <= 0;
    if (op == ML_OP_GE) yes = least >= 0, no = most < 0;
    if (op == ML_OP_EQ) yes = least == 0 && most == 0, no = least > 0 || most < 0;
    return yes || no ? constant(yes) : known_;
}

/* What the elements of both axes are taken from, where it is one thing for both. */
static ml_ref origin_of(const ml_graph *g, ml_ref n) {
    ml_op op = (ml_op)ml_graph_node(g, n)->op;
    while (op == ML_OP_BROADCAST || op == ML_OP_PERMUTE || op == ML_OP_RENAME) {
        n = ml_graph_source(g, n, 0);
        op = (ml_op)ml_graph_node(g, n)->op;
    }
    return n;
}

static known compare(proof *p, ml_ref n, const region *r) {
    const ml_graph *g = p->inc->g;
    const ml_ref *s = ml_graph_sources(g, n);
    const ml_type *t = ml_graph_type(g, n);
    affine a, b, difference;
    int64_t least = 0, most = 0;
    if (r->diagonal && !r->ahead && origin_of(g, s[0]) == origin_of(g, s[1]))
        return decide((ml_op)ml_graph_node(g, n)->op, 0, 0);
    if (!read_affine(g, s[0], r->query, r->key, &a) ||
        !read_affine(g, s[1], r->query, r->key, &b) || !sum_of(a, b, -1, &difference) ||
        !bounds(difference, r, ml_type_size(t, r->query), ml_type_size(t, r->key), &least, &most))
        return free_;
    return decide((ml_op)ml_graph_node(g, n)->op, least, most);
}

/* ---- Ops ------------------------------------------------------------------------------------- */

static known find(proof *p, ml_ref n, region r);

static known find_source(proof *p, ml_ref n, int i, const region *r) {
    return find(p, ml_graph_source(p->inc->g, n, i), *r);
}

static known find_where(proof *p, ml_ref n, const region *r) {
    known test = find_source(p, n, 0, r);
    if (test.kind == CONSTANT) return find_source(p, n, test.value != 0 ? 1 : 2, r);
    known either = join(r, find_source(p, n, 1, r), find_source(p, n, 2, r));
    return is_known(test) || either.kind == LOW || either.kind == CONSTANT ? either : free_;
}

static known find_two(proof *p, ml_ref n, const region *r) {
    known a = find_source(p, n, 0, r), b = find_source(p, n, 1, r);
    ml_op op = (ml_op)ml_graph_node(p->inc->g, n)->op;
    bool a_scales = a.kind == CONSTANT && a.value > 0, b_scales = b.kind == CONSTANT && b.value > 0;
    if (op == ML_OP_MUL && ((is_low(a) && b_scales) || (is_low(b) && a_scales))) return low;
    if (op == ML_OP_MUL || op == ML_OP_AND) return product(a, b);
    if (op == ML_OP_OR && (is_constant(a, 1) || is_constant(b, 1))) return constant(1);
    if (op == ML_OP_DIV && is_constant(a, 0)) return a;
    if (op == ML_OP_DIV && is_low(a) && b_scales) return low;
    if ((op == ML_OP_ADD || op == ML_OP_MINIMUM) && (is_low(a) || is_low(b))) return low;
    if (op == ML_OP_SUB && is_low(a)) return low;
    if (op == ML_OP_MAXIMUM && is_low(a)) return b;
    if (op == ML_OP_MAXIMUM && is_low(b)) return a;
    return is_known(a) && is_known(b) ? known_ : free_;
}

static known find_map(proof *p, ml_ref n, const region *r) {
    const ml_graph *g = p->inc->g;
    const ml_node node = *ml_graph_node(g, n);
    double values[2] = {0}, value;
    bool all = node.source_count && node.source_count <= 2;
    for (int i = 0; i < node.source_count && all; i++) {
        known k = find_source(p, n, i, r);
        all = k.kind == CONSTANT;
        values[i] = k.value;
    }
    ml_dtype operands = (ml_dtype)ml_graph_type(g, ml_graph_source(g, n, 0))->dtype;
    ml_dtype result = (ml_dtype)ml_graph_type(g, n)->dtype;
    if (all && fold_map((ml_op)node.op, operands, result, values, &value)) return constant(value);
    if (node.op == ML_OP_WHERE) return find_where(p, n, r);
    if (node.source_count == 2) return find_two(p, n, r);
    known a = node.source_count ? find_source(p, n, 0, r) : free_;
    bool passes = node.op == ML_OP_CAST || node.op == ML_OP_STOP_GRADIENT;
    if (passes && (a.kind == LOW || is_low(a))) return low;
    if ((node.op == ML_OP_EXP || node.op == ML_OP_SIGMOID) && is_low(a)) return constant(0);
    return node.op != ML_OP_RANDOM && is_known(a) ? known_ : free_;
}

/* Along the keys' axis a movement shifts the region; along others it changes nothing. */
static known find_move(proof *p, ml_ref n, const region *r) {
    const ml_graph *g = p->inc->g;
    const ml_node node = *ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    region inner = *r;
    if (node.op == ML_OP_RENAME) {
        inner.query = increment_inner(g, n, r->query);
        inner.key = increment_inner(g, n, r->key);
        return find_source(p, n, 0, &inner);
    }
    if (node.op == ML_OP_BROADCAST || node.op == ML_OP_PERMUTE) return find_source(p, n, 0, r);
    if (increment_names(g, n, r->query)) return free_;
    bool along = increment_names(g, n, r->key);
    if (node.op == ML_OP_SLICE) inner.ahead += along ? args[1] : 0;
    if (node.op == ML_OP_PAD) inner.ahead -= along ? args[1] : 0;
    if (node.op == ML_OP_SLICE) return find_source(p, n, 0, &inner);
    if (node.op == ML_OP_PAD) return join(r, constant(0), find_source(p, n, 0, &inner));
    if (node.op == ML_OP_CONCAT) {
        known all = find_source(p, n, 0, r);
        for (int i = 1; i < node.source_count; i++) {
            ml_ref before = ml_graph_source(g, n, i - 1);
            inner.ahead -= along ? ml_type_size(ml_graph_type(g, before), r->key) : 0;
            all = join(r, all, find_source(p, n, i, &inner));
        }
        return all;
    }
    if ((node.op == ML_OP_SPLIT || node.op == ML_OP_MERGE) && !along &&
        ml_type_find(ml_graph_type(g, n), r->key) >= 0)
        return find_source(p, n, 0, r);
    return free_;
}

/* Sums over other axes. */
static known find_reduction(proof *p, ml_ref n, const region *r) {
    const ml_graph *g = p->inc->g;
    ml_op op = (ml_op)ml_graph_node(g, n)->op;
    if (increment_names(g, n, r->query) || increment_names(g, n, r->key)) return free_;
    known a = find_source(p, n, 0, r);
    if (op == ML_OP_DOT) return product(a, find_source(p, n, 1, r));
    if (is_low(a) && op != ML_OP_ARGMAX) return low;
    if (is_constant(a, 0) || (a.kind == CONSTANT && op != ML_OP_SUM && op != ML_OP_ARGMAX))
        return a;
    return is_known(a) ? known_ : free_;
}

static known by_op(proof *p, ml_ref n, const region *r) {
    const ml_graph *g = p->inc->g;
    ml_op op = (ml_op)ml_graph_node(g, n)->op;
    double value;
    if (ml_graph_constant(g, n, &value)) return constant(value);
    if (op == ML_OP_LT || op == ML_OP_LE || op == ML_OP_GT || op == ML_OP_GE || op == ML_OP_EQ ||
        op == ML_OP_NE) {
        known k = compare(p, n, r);
        return k.kind == CONSTANT ? k : find_map(p, n, r);
    }
    ml_op_class class = ml_ops[op].op_class;
    if (class == ML_CLASS_MAP) return find_map(p, n, r);
    if (class == ML_CLASS_MOVE) return find_move(p, n, r);
    return class == ML_CLASS_REDUCE || op == ML_OP_DOT ? find_reduction(p, n, r) : free_;
}

/* What only queries make depend on tokens is known; what only keys do is free. */
static known find(proof *p, ml_ref n, region r) {
    const increment *inc = p->inc;
    const place *at = &inc->places[n];
    uint64_t hash = ml_mix(n, (uint64_t)r.query << 48 | (uint64_t)r.key << 32 |
                                  (uint32_t)(r.ahead << 1 | r.diagonal));
    uint32_t cursor = 0, i;
    while ((i = ml_index_next(&p->index, hash, &cursor)) != ML_INDEX_NONE) {
        const entry *e = &p->entries.at[i];
        if (e->node == n && e->region.query == r.query && e->region.key == r.key &&
            e->region.ahead == r.ahead && e->region.diagonal == r.diagonal)
            return e->known;
    }
    bool of_chunk = at->chunk && !at->outer;
    bool by_query = !at->fed || of_chunk || (at->axis == r.query && !at->other);
    bool by_key = !by_query && !at->other && ml_type_find(ml_graph_type(inc->g, n), r.query) < 0;
    known k = by_key ? free_ : by_op(p, n, &r);
    if (k.kind == FREE && by_query) k = known_;
    ml_index_add(&p->index, hash, p->entries.count);
    *ML_PUSH(inc->arena, &p->entries) = (entry){n, r, k};
    return k;
}

/* Where a query sees no key, the largest of its scores is itself LOW. */
bool increment_masked(increment *inc, ml_ref n, ml_axis query, ml_axis key, int64_t ahead) {
    const ml_node node = *ml_graph_node(inc->g, n);
    proof p = {.inc = inc, .index = {.arena = inc->arena}};
    region r = {query, key, false, ahead}, own = {query, key, true, 0};
    known k = find_source(&p, n, 0, &r);
    if (node.op == ML_OP_DOT) k = product(k, find_source(&p, n, 1, &r));
    if (node.op == ML_OP_MAX && is_low(k) && !is_constant(k, -INFINITY))
        return !is_low(find_source(&p, n, 0, &own));
    return is_known(k);
}
