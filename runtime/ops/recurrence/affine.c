/* What a node of a step is as a function of one state, by algebra: decay S + sum of u (w^T S) +
 * rest, where decay, u, w and rest depend on other values; or, once keys are summed over, w^T S +
 * rest. The spelling does not matter: products and sums in any order, casts, movements. */
#include <string.h>

#include "runtime/ops/recurrence/recurrence_internal.h"

enum { MOST_FACTORS = 16, MOST_TERMS = 8, MOST_CALLS = 4096 };

static const ml_type *type_of(const affine_state *x, ml_ref n) {
    return ml_graph_type(x->b->g, n);
}

static bool depends(const affine_state *x, ml_ref n) {
    uint32_t at = recurrence_place(x->b, n);
    return at != ML_INDEX_NONE && (x->b->states[at] >> x->state & 1);
}

/* Without what repeats or reorders elements, and casts to wider floats. */
static ml_ref strip(const ml_graph *g, ml_ref n) {
    for (;;) {
        const ml_node *node = ml_graph_node(g, n);
        if (node->op != ML_OP_BROADCAST && node->op != ML_OP_PERMUTE && node->op != ML_OP_CAST)
            return n;
        ml_ref from = ml_graph_source(g, n, 0);
        ml_dtype narrow = (ml_dtype)ml_graph_type(g, from)->dtype;
        ml_dtype to = (ml_dtype)ml_graph_type(g, n)->dtype;
        if (!ml_is_float(to) ? narrow != to : !ml_is_float(narrow) || !ml_dtype_holds(to, narrow))
            return n;
        n = from;
    }
}

/* n without axes along which it is the same because its operands are repeated: 1 - g, not
 * 1 - broadcast(g). */
static ml_ref shrink(ml_graph *g, ml_ref n, int depth) {
    enum { OPERANDS = 3 };
    n = strip(g, n);
    ml_node node = *ml_graph_node(g, n);
    ml_ref sources[OPERANDS];
    ml_type all = {0};
    if (!ml_op_is_function((ml_op)node.op) || node.source_count > OPERANDS || depth == 0) return n;
    for (int k = 0; k < node.source_count; k++) {
        sources[k] = shrink(g, ml_graph_source(g, n, k), depth - 1);
        const ml_type *t = ml_graph_type(g, sources[k]);
        for (int i = 0; i < t->rank; i++)
            if (ml_type_find(&all, t->axis[i]) < 0 && all.rank < ML_MAX_AXES)
                all.axis[all.rank] = t->axis[i], all.size[all.rank++] = t->size[i];
    }
    ml_type type = *ml_graph_type(g, n);
    if (all.rank >= type.rank) return n;
    if (node.op == ML_OP_CAST) return ml_cast(g, sources[0], (ml_dtype)type.dtype);
    for (int k = 0; k < node.source_count; k++) { /* widened ones were cast for this op */
        ml_dtype was = (ml_dtype)ml_graph_type(g, ml_graph_source(g, n, k))->dtype;
        sources[k] = ml_cast(g, sources[k], was);
    }
    all.dtype = ml_graph_type(g, sources[node.source_count - 1])->dtype;
    if (all.rank)
        sources[node.source_count - 1] = ml_broadcast(g, sources[node.source_count - 1], &all);
    return ml_graph_add(g, (ml_op)node.op, sources, node.source_count, NULL, 0, &type);
}

ml_ref affine_strip(ml_graph *g, ml_ref n) {
    enum { DEPTH = 8 };
    return shrink(g, n, DEPTH);
}

bool affine_has_any(const ml_type *t, const ml_type *axes) {
    for (int i = 0; i < axes->rank; i++)
        if (ml_type_find(t, axes->axis[i]) >= 0) return true;
    return false;
}

static bool within(const ml_type *t, const ml_type *all) {
    for (int i = 0; i < t->rank; i++)
        if (ml_type_find(all, t->axis[i]) < 0) return false;
    return true;
}

static bool is_number(const ml_graph *g, ml_ref n, double wanted) {
    double value;
    return ml_graph_constant(g, n, &value) && value == wanted;
}

ml_ref affine_join(ml_graph *g, ml_op op, ml_ref a, ml_ref b) {
    ml_type all = *ml_graph_type(g, a);
    const ml_type *t = ml_graph_type(g, b);
    if (op == ML_OP_MUL && is_number(g, a, 1)) return b;
    if ((op == ML_OP_MUL || op == ML_OP_DIV) && is_number(g, b, 1)) return a;
    for (int i = 0; i < t->rank; i++)
        if (ml_type_find(&all, t->axis[i]) < 0 && all.rank < ML_MAX_AXES) {
            all.axis[all.rank] = t->axis[i];
            all.size[all.rank++] = t->size[i];
        }
    if (all.rank > ml_graph_type(g, a)->rank) a = ml_broadcast(g, a, &all);
    return ml_map2(g, op, a, b);
}

static ml_ref join(const affine_state *x, ml_op op, ml_ref a, ml_ref b) {
    return affine_join(x->b->g, op, a, b);
}

/* a op b, of which either may be 0, for nothing. */
static ml_ref sum(const affine_state *x, ml_op op, ml_ref a, ml_ref b) {
    if (!b) return a;
    if (!a) return op == ML_OP_ADD ? b : ml_map1(x->b->g, ML_OP_NEG, b);
    return join(x, op, a, b);
}

static ml_ref number(const affine_state *x, double value) {
    return ml_const(x->b->g, (ml_dtype)type_of(x, x->base)->dtype, value);
}

/* ---- Sums of outer products ------------------------------------------------------------------ */

/* Products flattened into their factors, without what repeats them. */
static bool factors(const affine_state *x, ml_ref n, ml_ref *list, int *count) {
    ml_graph *g = x->b->g;
    n = affine_strip(g, n);
    const ml_node *node = ml_graph_node(g, n);
    bool outer = node->op == ML_OP_DOT && node->arg_count == 0;
    if (node->op == ML_OP_MUL || outer)
        return factors(x, ml_graph_source(g, n, 0), list, count) &&
               factors(x, ml_graph_source(g, n, 1), list, count);
    if (node->op == ML_OP_DIV || node->op == ML_OP_NEG) {
        ml_ref by = node->op == ML_OP_NEG ? ml_const(g, (ml_dtype)type_of(x, n)->dtype, -1)
                                          : affine_strip(g, ml_graph_source(g, n, 1));
        if (node->op == ML_OP_DIV)
            by = affine_join(g, ML_OP_DIV, ml_const(g, (ml_dtype)type_of(x, by)->dtype, 1), by);
        if (*count == MOST_FACTORS) return false;
        list[(*count)++] = by;
        return factors(x, ml_graph_source(g, n, 0), list, count);
    }
    bool chosen = node->op == ML_OP_WHERE && is_number(g, ml_graph_source(g, n, 2), 0);
    if (*count == MOST_FACTORS) return false;
    if (chosen) {
        ml_ref test = affine_strip(g, ml_graph_source(g, n, 0)), x1 = ml_graph_source(g, n, 1);
        list[(*count)++] = ml_cast(g, test, (ml_dtype)type_of(x, n)->dtype);
        return factors(x, x1, list, count);
    }
    list[(*count)++] = n;
    return true;
}

typedef struct {
    ml_ref key, value; /* 0: 1 */
    bool negative;
} term;

typedef struct {
    term list[MOST_TERMS];
    int count;
    bool with_keys; /* factors with neither keys nor an axis of values only are the keys' */
} term_list;

/* Whether a factor has an axis of the state that no factor with keys has. */
static bool is_value(const affine_state *x, const ml_ref *list, int count, ml_ref n) {
    const ml_type *t = type_of(x, n);
    for (int i = 0; i < t->rank; i++) {
        bool found = false;
        for (int k = 0; k < count && !found; k++)
            found = affine_has_any(type_of(x, list[k]), &x->keys) &&
                    ml_type_find(type_of(x, list[k]), t->axis[i]) >= 0;
        if (!found) return true;
    }
    return false;
}

static bool add_terms(const affine_state *x, term_list *terms, ml_ref n, bool negative);

/* Of a product with a sum of whole matrices: each summand times the others. */
static bool distribute(const affine_state *x, term_list *terms, ml_ref *list, int count, int at,
                       bool negative) {
    ml_graph *g = x->b->g;
    ml_op op = (ml_op)ml_graph_node(g, list[at])->op;
    for (int side = 0; side < 2; side++) {
        ml_ref product = ml_graph_source(g, list[at], side);
        for (int k = 0; k < count; k++)
            if (k != at) product = join(x, ML_OP_MUL, product, list[k]);
        if (!add_terms(x, terms, product, negative != (side && op == ML_OP_SUB))) return false;
    }
    return true;
}

static ml_ref at_place(const affine_state *x, ml_ref n, ml_axis axis, int64_t at) {
    return ml_reduce(x->b->g, ML_OP_SUM, ml_slice(x->b->g, n, axis, at, at + 1), &axis, 1);
}

/* A product over one short axis that the state has not, times others: a sum of outer products. */
static bool is_short(const affine_state *x, ml_ref n) {
    const ml_node *node = ml_graph_node(x->b->g, n);
    if (node->op != ML_OP_DOT || node->arg_count != 1) return false;
    const ml_axis axis = (ml_axis)ml_graph_args(x->b->g, n)[0];
    return ml_type_find(type_of(x, x->parameter), axis) < 0 &&
           within(type_of(x, x->parameter), type_of(x, n)) &&
           ml_type_size(type_of(x, ml_graph_source(x->b->g, n, 0)), axis) <= AFFINE_WRITES;
}

static bool expand(const affine_state *x, term_list *terms, ml_ref *list, int count, int at,
                   bool negative) {
    const ml_ref a = ml_graph_source(x->b->g, list[at], 0);
    const ml_ref b = ml_graph_source(x->b->g, list[at], 1);
    const ml_axis axis = (ml_axis)ml_graph_args(x->b->g, list[at])[0];
    const int64_t size = ml_type_size(type_of(x, a), axis);
    for (int64_t i = 0; i < size; i++) {
        ml_ref product = join(x, ML_OP_MUL, at_place(x, a, axis, i), at_place(x, b, axis, i));
        for (int k = 0; k < count; k++)
            if (k != at) product = join(x, ML_OP_MUL, product, list[k]);
        if (!add_terms(x, terms, product, negative)) return false;
    }
    return true;
}

static bool add_terms(const affine_state *x, term_list *terms, ml_ref n, bool negative) {
    ml_graph *g = x->b->g;
    ml_ref list[MOST_FACTORS];
    int count = 0;
    if (!factors(x, n, list, &count)) return false;
    for (int k = 0; k < count; k++) {
        if (is_short(x, list[k])) return expand(x, terms, list, count, k, negative);
        ml_op op = (ml_op)ml_graph_node(g, list[k])->op;
        bool whole = within(type_of(x, x->parameter), type_of(x, list[k])) && x->keys.rank > 0;
        if ((op == ML_OP_ADD || op == ML_OP_SUB) && (whole || count == 1))
            return distribute(x, terms, list, count, k, negative);
    }
    if (terms->count == MOST_TERMS) return false;
    term *made = &terms->list[terms->count++];
    *made = (term){.negative = negative};
    for (int k = 0; k < count; k++) {
        const ml_type *t = type_of(x, list[k]);
        double value;
        if (ml_graph_constant(g, list[k], &value) && value == -1) {
            made->negative = !made->negative;
            continue;
        }
        bool of_key = affine_has_any(t, &x->keys) || t->rank == 0 ||
                      (terms->with_keys && !is_value(x, list, count, list[k]));
        ml_ref *side = of_key ? &made->key : &made->value;
        *side = *side ? join(x, ML_OP_MUL, *side, list[k]) : list[k];
    }
    if (!made->key) made->key = number(x, 1);
    return true;
}

/* Terms with one key, or one value, become one. */
static void merge_terms(const affine_state *x, term_list *terms) {
    for (int i = 0; i < terms->count; i++)
        for (int k = i + 1; k < terms->count; k++) {
            term *a = &terms->list[i], *b = &terms->list[k];
            ml_op op = a->negative == b->negative ? ML_OP_ADD : ML_OP_SUB;
            ml_ref one = number(x, 1);
            if (a->key == b->key)
                a->value = join(x, op, a->value ? a->value : one, b->value ? b->value : one);
            else if (a->value == b->value)
                a->key = join(x, op, a->key, b->key);
            else
                continue;
            *b = terms->list[--terms->count];
            k = i;
        }
}

int affine_outer(const affine_state *x, ml_ref rest, ml_ref *keys, ml_ref *values) {
    term_list best = {0};
    for (int with_keys = 0; with_keys < 2; with_keys++) {
        term_list terms = {.with_keys = with_keys};
        if (!add_terms(x, &terms, rest, false)) return 0;
        merge_terms(x, &terms);
        if (with_keys == 0 || terms.count < best.count) best = terms;
    }
    if (best.count > AFFINE_WRITES) return 0;
    for (int i = 0; i < best.count; i++) {
        keys[i] = best.list[i].key, values[i] = best.list[i].value;
        if (best.list[i].negative) keys[i] = ml_map1(x->b->g, ML_OP_NEG, keys[i]);
    }
    return best.count;
}

/* The factors of w without keys are u's: w stays what a step has, in its dtype. */
void affine_move_factors(const affine_state *x, ml_ref *u, ml_ref *w) {
    ml_ref list[MOST_FACTORS], keyed = 0, other = 0;
    int count = 0;
    if (!factors(x, *w, list, &count)) return;
    for (int k = 0; k < count; k++) {
        ml_ref *side = affine_has_any(type_of(x, list[k]), &x->keys) ? &keyed : &other;
        *side = *side ? join(x, ML_OP_MUL, *side, list[k]) : list[k];
    }
    if (!keyed || !other) return;
    *w = keyed;
    *u = join(x, ML_OP_MUL, *u, other);
}

/* ---- Contraction over keys ------------------------------------------------------------------- */

static double key_count(const affine_state *x) {
    double count = 1;
    for (int i = 0; i < x->keys.rank; i++) count *= (double)x->keys.size[i];
    return count;
}

static ml_ref sum_keys(const affine_state *x, ml_ref n) {
    const ml_type *t = type_of(x, n);
    ml_axis axes[ML_MAX_AXES];
    int count = 0;
    double missing = key_count(x);
    for (int i = 0; i < x->keys.rank; i++)
        if (ml_type_find(t, x->keys.axis[i]) >= 0) {
            axes[count++] = x->keys.axis[i];
            missing /= (double)x->keys.size[i];
        }
    ml_dtype dtype = (ml_dtype)t->dtype;
    if (count) n = ml_reduce(x->b->g, ML_OP_SUM, n, axes, count);
    return join(x, ML_OP_MUL, n, ml_const(x->b->g, dtype, missing));
}

/* The sum over keys of a c; c 0: 1. */
static ml_ref over_keys(const affine_state *x, ml_ref a, ml_ref c) {
    if (!c) return sum_keys(x, a);
    if (!within(&x->keys, type_of(x, a)) || !within(&x->keys, type_of(x, c)))
        return sum_keys(x, join(x, ML_OP_MUL, a, c));
    ml_dtype dtype = ml_wider((ml_dtype)type_of(x, a)->dtype, (ml_dtype)type_of(x, c)->dtype);
    dtype = ml_wider(dtype, (ml_dtype)type_of(x, x->base)->dtype);
    return ml_dot(x->b->g, a, c, x->keys.axis, x->keys.rank, dtype);
}

static ml_ref rest_over_keys(const affine_state *x, ml_ref rest, ml_ref c) {
    term_list terms = {0};
    ml_ref made = 0;
    if (!rest) return 0;
    if (!add_terms(x, &terms, rest, false)) return over_keys(x, rest, c);
    for (int i = 0; i < terms.count; i++) {
        const term *t = &terms.list[i];
        ml_ref one = over_keys(x, t->key, c);
        if (t->value) one = join(x, ML_OP_MUL, one, t->value);
        made = sum(x, t->negative ? ML_OP_SUB : ML_OP_ADD, made, one);
    }
    return made;
}

/* ---- Forms ----------------------------------------------------------------------------------- */

static bool add_pair(const affine_state *x, affine_form *f, ml_ref u, ml_ref w) {
    for (int i = 0; i < f->pairs; i++) {
        if (f->w[i] == w) return f->u[i] = join(x, ML_OP_ADD, f->u[i], u), true;
        if (f->u[i] == u) return f->w[i] = join(x, ML_OP_ADD, f->w[i], w), true;
    }
    if (f->pairs == AFFINE_PAIRS) return false;
    f->u[f->pairs] = u, f->w[f->pairs++] = w;
    return true;
}

/* What has no keys, repeated over them: an outer product with ones. */
static void widen(const affine_state *x, affine_form *f, ml_ref n) {
    if (!f->vector || !affine_has_any(type_of(x, n), &x->keys)) return;
    f->vector = false;
    if (f->decay) f->pairs = 1, f->u[0] = number(x, 1), f->w[0] = f->decay;
    f->decay = 0;
}

static void scale(const affine_state *x, affine_form *f, ml_op op, ml_ref by) {
    if (f->decay) f->decay = join(x, op, f->decay, by);
    if (f->rest) f->rest = join(x, op, f->rest, by);
    for (int i = 0; i < f->pairs; i++) f->u[i] = join(x, op, f->u[i], by);
}

static void negate(const affine_state *x, affine_form *f) {
    ml_graph *g = x->b->g;
    if (f->decay) f->decay = ml_map1(g, ML_OP_NEG, f->decay);
    if (f->rest) f->rest = ml_map1(g, ML_OP_NEG, f->rest);
    for (int i = 0; i < f->pairs; i++) f->u[i] = ml_map1(g, ML_OP_NEG, f->u[i]);
}

static bool add_form(const affine_state *x, affine_form *a, affine_form *b, ml_op op) {
    bool a_is = a->decay || a->pairs, b_is = b->decay || b->pairs;
    if (a_is && b_is && a->vector != b->vector) return false;
    if (!a_is) a->vector = b->vector;
    a->rounded = a->rounded || b->rounded;
    a->rest = sum(x, op, a->rest, b->rest);
    b->rest = 0;
    if (op == ML_OP_SUB) negate(x, b);
    a->decay = sum(x, ML_OP_ADD, a->decay, b->decay);
    for (int i = 0; i < b->pairs; i++)
        if (!add_pair(x, a, b->u[i], b->w[i])) return false;
    return true;
}

/* Where the test is as wanted; else 0. */
static ml_ref chosen(const affine_state *x, ml_ref test, ml_ref n, bool wanted) {
    ml_graph *g = x->b->g;
    ml_type all;
    if (!n) return 0;
    ml_ref zero = ml_const(g, (ml_dtype)type_of(x, n)->dtype, 0);
    all = *type_of(x, n);
    const ml_type *t = type_of(x, test);
    for (int i = 0; i < t->rank; i++)
        if (ml_type_find(&all, t->axis[i]) < 0 && all.rank < ML_MAX_AXES)
            all.axis[all.rank] = t->axis[i], all.size[all.rank++] = t->size[i];
    n = ml_broadcast(g, n, &all);
    return wanted ? ml_where(g, test, n, zero) : ml_where(g, test, zero, n);
}

static void choose(const affine_state *x, affine_form *f, ml_ref test, bool wanted) {
    f->decay = chosen(x, test, f->decay, wanted);
    f->rest = chosen(x, test, f->rest, wanted);
    for (int i = 0; i < f->pairs; i++) f->u[i] = chosen(x, test, f->u[i], wanted);
}

/* The sum over keys of f times c. */
static bool contract(const affine_state *x, affine_form *f, ml_ref c) {
    affine_form made = {.vector = true, .rest = rest_over_keys(x, f->rest, c)};
    if (f->vector) return false;
    if (f->decay) made.decay = c ? join(x, ML_OP_MUL, f->decay, c) : f->decay;
    for (int i = 0; i < f->pairs; i++)
        made.decay =
            sum(x, ML_OP_ADD, made.decay, join(x, ML_OP_MUL, f->w[i], over_keys(x, f->u[i], c)));
    *f = made;
    return true;
}

/* Whether a reduction is one over the keys. */
static bool reduces_keys(const affine_state *x, ml_ref n) {
    const ml_node *node = ml_graph_node(x->b->g, n);
    if (node->arg_count != x->keys.rank) return false;
    for (int i = 0; i < node->arg_count; i++)
        if (ml_type_find(&x->keys, (ml_axis)ml_graph_args(x->b->g, n)[i]) < 0) return false;
    return true;
}

static bool find_sum(affine_state *x, ml_ref n, affine_form *f) {
    ml_graph *g = x->b->g;
    affine_form other;
    ml_op op = (ml_op)ml_graph_node(g, n)->op;
    ml_ref a = ml_graph_source(g, n, 0), b = ml_graph_source(g, n, 1);
    if (!affine_find(x, a, f) || !affine_find(x, b, &other)) return false;
    widen(x, f, n);
    widen(x, &other, n);
    return add_form(x, f, &other, op);
}

static bool find_product(affine_state *x, ml_ref n, affine_form *f) {
    ml_graph *g = x->b->g;
    const ml_node *node = ml_graph_node(g, n);
    ml_ref a = ml_graph_source(g, n, 0), b = ml_graph_source(g, n, 1);
    ml_op op = (ml_op)node->op;
    bool dot = op == ML_OP_DOT && node->arg_count > 0;
    if (depends(x, b) && op == ML_OP_DIV) return false;
    ml_ref by = depends(x, b) ? a : b, other = by == a ? b : a;
    if (depends(x, by) || !affine_find(x, other, f)) return false;
    by = affine_strip(g, by);
    if (dot) return reduces_keys(x, n) && contract(x, f, by);
    widen(x, f, n);
    scale(x, f, op == ML_OP_DIV ? ML_OP_DIV : ML_OP_MUL, by);
    return true;
}

static bool find_choice(affine_state *x, ml_ref n, affine_form *f) {
    ml_graph *g = x->b->g;
    affine_form other;
    ml_ref test = ml_graph_source(g, n, 0);
    if (depends(x, test)) return false;
    if (!affine_find(x, ml_graph_source(g, n, 1), f)) return false;
    if (!affine_find(x, ml_graph_source(g, n, 2), &other)) return false;
    test = affine_strip(g, test);
    widen(x, f, n);
    widen(x, &other, n);
    choose(x, f, test, true);
    choose(x, &other, test, false);
    return add_form(x, f, &other, ML_OP_ADD);
}

bool affine_find(affine_state *x, ml_ref n, affine_form *f) {
    ml_graph *g = x->b->g;
    *f = (affine_form){0};
    if (++x->calls > MOST_CALLS) return false;
    if (n == x->base) {
        f->decay = number(x, 1);
        return true;
    }
    if (!depends(x, n)) {
        ml_ref rest = affine_strip(g, n);
        f->rest = is_number(g, rest, 0) ? 0 : rest;
        return true;
    }
    const ml_node *node = ml_graph_node(g, n);
    ml_op op = (ml_op)node->op;
    if (op == ML_OP_ADD || op == ML_OP_SUB) return find_sum(x, n, f);
    if (op == ML_OP_MUL || op == ML_OP_DIV || op == ML_OP_DOT) return find_product(x, n, f);
    if (op == ML_OP_WHERE) return find_choice(x, n, f);
    bool passes = op == ML_OP_PERMUTE || op == ML_OP_BROADCAST || op == ML_OP_CAST ||
                  op == ML_OP_NEG || op == ML_OP_SUM;
    if (!passes || !affine_find(x, ml_graph_source(g, n, 0), f)) return false;
    if (op == ML_OP_CAST) {
        ml_dtype from = (ml_dtype)type_of(x, ml_graph_source(g, n, 0))->dtype;
        ml_dtype to = (ml_dtype)type_of(x, n)->dtype;
        f->rounded = f->rounded || !ml_dtype_holds(to, from);
        return ml_is_float(from) && ml_is_float(to);
    }
    if (op == ML_OP_NEG) negate(x, f);
    if (op == ML_OP_SUM) return reduces_keys(x, n) && contract(x, f, 0);
    widen(x, f, n);
    return true;
}

/* ---- Keys ------------------------------------------------------------------------------------ */

/* The fewest axes of the state that a product or sum with it, or its next value, sums over. */
void affine_keys(affine_state *x) {
    const ml_graph *g = x->b->g;
    const ml_type *state = type_of(x, x->parameter);
    x->keys = (ml_type){0};
    for (uint32_t i = 0; i < x->b->body.count; i++) {
        ml_ref n = x->b->body.at[i];
        const ml_node *node = ml_graph_node(g, n);
        if ((node->op != ML_OP_DOT && node->op != ML_OP_SUM) || !depends(x, n)) continue;
        if (node->arg_count == 0 || (x->keys.rank && node->arg_count >= x->keys.rank)) continue;
        ml_type keys = {0};
        bool fits = false;
        for (int k = 0; k < node->source_count && !fits; k++) {
            ml_ref source = ml_graph_source(g, n, k);
            fits = depends(x, source) && within(state, type_of(x, source));
        }
        for (int k = 0; k < node->arg_count && fits; k++) {
            int at = ml_type_find(state, (ml_axis)ml_graph_args(g, n)[k]);
            fits = at >= 0;
            if (!fits) break;
            keys.axis[keys.rank] = state->axis[at], keys.size[keys.rank++] = state->size[at];
        }
        if (fits) x->keys = keys;
    }
}

/* ---- Steps by elements ----------------------------------------------------------------------- */

/* n, which depends on no state, in the state's type; 0: zeros. */
static bool free_of_states(ml_graph *g, const ml_recurrence_step *s, ml_ref state, ml_ref *n) {
    const ml_type type = *ml_graph_type(g, state);
    ml_refs body = {0};
    if (*n) graph_reach(g, *n, ml_graph_arena(g), &body);
    for (uint32_t i = 0; i < body.count; i++)
        for (int k = 0; k < s->state_count; k++)
            if (body.at[i] == s->states[k].parameter) return false;
    ml_ref made = *n ? ml_cast(g, *n, (ml_dtype)type.dtype) : ml_const(g, (ml_dtype)type.dtype, 0);
    const bool whole = ml_type_same_axes(ml_graph_type(g, made), &type);
    *n = whole ? ml_permute(g, made, &type) : ml_broadcast(g, made, &type);
    return true;
}

static bool affine_slope(ml_graph *g, const ml_recurrence_step *s, const recurrence_body *b, int i,
                         ml_ref *slope, ml_ref *offset) {
    const ml_ref state = s->states[i].parameter;
    affine_state x = {.b = (recurrence_body *)b, .state = i, .parameter = state, .base = state};
    affine_form f;
    if (!affine_find(&x, s->next[i], &f) || f.vector || f.pairs || f.rounded) return false;
    *slope = f.decay;
    *offset = f.rest;
    return free_of_states(g, s, state, slope) && free_of_states(g, s, state, offset);
}

bool ml_recurrence_slopes(ml_graph *g, const ml_recurrence_step *s, ml_ref *slopes, ml_ref *offsets,
                          uint32_t *max_plus) {
    enum { MOST = 16 };
    recurrence_body b;
    *max_plus = 0;
    if (s->state_count > MOST) return false;
    recurrence_body_find(&b, g, s, s->next, s->state_count);
    for (int i = 0; i < s->state_count; i++) {
        const ml_dtype dtype = (ml_dtype)ml_graph_type(g, s->states[i].parameter)->dtype;
        if (dtype != ML_F32 && dtype != ML_F64) return false;
        if (affine_slope(g, s, &b, i, &slopes[i], &offsets[i])) continue;
        if (!recurrence_max_plus(g, s, i, &slopes[i], &offsets[i])) return false;
        *max_plus |= 1u << i;
    }
    return true;
}
