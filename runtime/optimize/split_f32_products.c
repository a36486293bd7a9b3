/* Narrow products of f32 on tensor cores (passes.h): what routes tokens to experts.
 *
 * An f32 number b is b1 + b2 + b3, each a bf16: 24 bits in three times eight. Tensor cores multiply
 * bf16 exactly and add up in f32, so that with x a bf16
 *   x b = x b1 + x b2 + x b3
 * is as good as a product in f32, reads half as much, and takes no f32 copy of x. The three parts
 * lie side by side along b's own axis: one product. Where a product over few elements is only
 * rounded to bf16 afterwards, 16 bits of both operands do: a b = a1 b1 + a1 b2 + a2 b1, one product
 * over three times as many elements. */
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"

enum { PARTS = 3, MOST = 128, TILE = 8 };

static const ml_type *type_of(const ml_graph *g, ml_ref n) {
    return ml_graph_type(g, n);
}

static bool is_reduced(const ml_graph *g, ml_ref dot, ml_axis axis) {
    for (int i = 0; i < ml_graph_node(g, dot)->arg_count; i++)
        if ((ml_axis)ml_graph_args(g, dot)[i] == axis) return true;
    return false;
}

/* A product of two f32 operands that share no axis but those summed over. */
static bool is_plain(const ml_graph *g, ml_ref dot) {
    if (ml_graph_node(g, dot)->op != ML_OP_DOT || type_of(g, dot)->dtype != ML_F32) return false;
    const ml_type *a = type_of(g, ml_graph_source(g, dot, 0));
    const ml_type *b = type_of(g, ml_graph_source(g, dot, 1));
    for (int i = 0; i < a->rank; i++)
        if (ml_type_find(b, a->axis[i]) >= 0 && !is_reduced(g, dot, a->axis[i])) return false;
    return a->dtype == ML_F32 && b->dtype == ML_F32;
}

/* What x is a cast of, where that is bf16; 0: nothing is. */
static ml_ref narrow_source(const ml_graph *g, ml_ref x) {
    if (ml_graph_node(g, x)->op != ML_OP_CAST) return 0;
    ml_ref from = ml_graph_source(g, x, 0);
    return type_of(g, from)->dtype == ML_BF16 ? from : 0;
}

/* Its only axis that is (or is not) summed over, if it has few elements, whole tiles of them; 0. */
static ml_axis few(const ml_graph *g, ml_ref dot, ml_ref operand, bool reduced) {
    const ml_type *t = type_of(g, operand);
    ml_axis found = 0;
    for (int i = 0; i < t->rank; i++) {
        if (is_reduced(g, dot, t->axis[i]) != reduced) continue;
        if (found || t->size[i] > MOST || t->size[i] % TILE) return 0;
        found = t->axis[i];
    }
    return found;
}

/* x as the sum of its first `count` parts. */
static void split(ml_graph *g, ml_ref x, ml_ref *parts, int count) {
    for (int i = 0; i < count; i++) {
        parts[i] = ml_cast(g, x, ML_BF16);
        if (i + 1 < count) x = ml_map2(g, ML_OP_SUB, x, ml_cast(g, parts[i], ML_F32));
    }
}

/* x b, where x, source `side`, is a bf16. */
static ml_ref by_parts(rewrite *r, ml_ref dot, const ml_ref *sources, int side, ml_axis own) {
    ml_graph *g = r->to;
    ml_ref x = r->map[narrow_source(r->from, ml_graph_source(r->from, dot, side))];
    ml_ref parts[PARTS], operands[2], sum = 0;
    int64_t size =
        type_of(g, sources[1 - side])->size[ml_type_find(type_of(g, sources[1 - side]), own)];
    split(g, sources[1 - side], parts, PARTS);
    operands[side] = x, operands[1 - side] = ml_concat(g, parts, PARTS, own);
    const ml_node *node = ml_graph_node(r->from, dot);
    ml_ref whole = ml_graph_add(g, ML_OP_DOT, operands, 2, ml_graph_args(r->from, dot),
                                node->arg_count, &(ml_type){.dtype = ML_F32});
    for (int i = PARTS - 1; i >= 0; i--) { /* the least first */
        ml_ref part = ml_slice(g, whole, own, i * size, (i + 1) * size);
        sum = sum ? ml_map2(g, ML_OP_ADD, sum, part) : part;
    }
    return ml_permute(g, sum, type_of(r->from, dot));
}

static ml_ref rounded(rewrite *r, ml_ref dot, ml_axis over) {
    ml_graph *g = r->to;
    ml_ref operands[2];
    for (int side = 0; side < 2; side++) {
        ml_ref parts[2];
        split(g, r->map[ml_graph_source(r->from, dot, side)], parts, 2);
        operands[side] =
            ml_concat(g, (ml_ref[]){parts[0], parts[side], parts[1 - side]}, PARTS, over);
    }
    return ml_dot(g, operands[0], operands[1], &over, 1, ML_BF16);
}

/* Source `side` is a bf16, the other has few elements of its own: their axis, or 0. */
static ml_axis exact_side(const ml_graph *g, ml_ref dot, int *side) {
    for (*side = 0; *side < 2; ++*side) {
        ml_axis own = few(g, dot, ml_graph_source(g, dot, 1 - *side), false);
        if (own && narrow_source(g, ml_graph_source(g, dot, *side))) return own;
    }
    return 0;
}

/* The few elements that a product, read by this cast alone, sums over. */
static ml_axis rounded_over(const ml_graph *g, ml_ref cast, uint32_t users) {
    ml_ref dot = ml_graph_source(g, cast, 0);
    if (type_of(g, cast)->dtype != ML_BF16 || !is_plain(g, dot) || users != 1) return 0;
    return few(g, dot, ml_graph_source(g, dot, 0), true);
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    const ml_graph *g = r->from;
    int side;
    if (ml_graph_node(g, n)->op == ML_OP_CAST) {
        ml_ref dot = ml_graph_source(g, n, 0);
        ml_axis over = rounded_over(g, n, r->users[dot]);
        if (over) return ml_permute(r->to, rounded(r, dot, over), type_of(g, n));
    } else if (is_plain(g, n)) {
        ml_axis own = exact_side(g, n, &side);
        if (own) return by_parts(r, n, sources, side, own);
    }
    return rewrite_copy(r, n, sources);
}

bool ml_split_f32_products_applies(const ml_graph *g) {
    int side;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (is_plain(g, n) &&
            (exact_side(g, n, &side) || few(g, n, ml_graph_source(g, n, 0), true)))
            return true;
    return false;
}

ml_graph *ml_split_f32_products(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, NULL, rule, NULL);
}
