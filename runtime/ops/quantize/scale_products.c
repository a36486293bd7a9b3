/* Products of blocks in 8 bits (--dtype fp8). Products that carry ML_NODE_FP8, which scripts make
 * and autodiff hands on to its own, become scaled products of rounded operands:
 *
 *     x dot w   ->   (1 / (a b)) * (round(a x) dot round(b w))     a = largest of the dtype / max
 * |x|
 *
 * E4M3 forward; gradients are E5M2. A scale is that of a whole tensor at this step: the maximum is
 * an ordinary reduction of the global graph, so that sharding makes ranks agree on it. Weights are
 * rounded once, from their f32 states.
 *
 * Weights of one block that multiply the same operand share a scale, and so do the gradients of
 * their results: merge_products.c can then compute them as one product.
 *
 * Rows that are picked of a tensor, as tokens are for experts, have the scale of the tensor, which
 * is rounded before they are picked: the kernel that makes it writes both, and a rank sends bytes.
 *
 * After sharding ml_widen_scaled_products rewrites those that no library serves: 8-bit floats are
 * exact in bf16, so products of bf16 that accumulate in f32 compute the same. */
#include "runtime/ops/quantize/scale_products.h"
#include "runtime/graph/rewrite.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/passes/passes.h"

#include <string.h>

typedef struct {
    ml_ref x, member;        /* the shared operand; a forward product of it */
    ml_ref weight, gradient; /* an operand of each set, or 0 */
} family;

typedef struct {
    rewrite *r;
    uint32_t *parameter; /* by node: 1 + the parameter that it is, cast and moved; 0 */
    ml_ref *next;        /* by node: the next of a ring of operands that share a scale */
    ml_ref *weight_of;   /* by node: the weight that a product multiplies this gradient with */
    ml_ref *most;        /* by node: max |n|, f32, in the new graph; 0 not yet */
    ml_ref *rounded[2];  /* by node: as E4M3, as E5M2 */
    ML_VEC(family) families;
    ml_index index; /* of families, by x */
} state;

static const ml_node *node_of(const state *s, ml_ref n) {
    return ml_graph_node(s->r->from, n);
}

static bool is_marked(const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    const bool dot = node->op == ML_OP_DOT && node->source_count == 2;
    const bool ragged = ml_op_is_ragged(node->op) && node->source_count == RAGGED_SCALE;
    return (dot || ragged) && (node->flags & ML_NODE_FP8) && !(node->flags & ML_NODE_FUNCTION);
}

static bool is_scaled(const ml_graph *g, ml_ref n) {
    return ml_is_scaled_dot(g, n) || (ml_op_is_ragged(ml_graph_node(g, n)->op) &&
                                      ml_ragged_is_scaled(g, ml_graph_source(g, n, 0)));
}

bool ml_scale_products_applies(const ml_graph *g) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (is_marked(g, n)) return true;
    return false;
}

static void find_parameters(state *s) {
    for (ml_ref n = 1; n < s->r->count; n++) {
        const ml_node *node = node_of(s, n);
        if (node->op == ML_OP_STATE) {
            const uint32_t id = (uint32_t)ml_graph_args(s->r->from, n)[0];
            if (ml_graph_state(s->r->from, id)->kind == ML_STATE_PARAMETER)
                s->parameter[n] = id + 1;
        } else if (node->source_count == 1 &&
                   (node->op == ML_OP_CAST || ml_ops[node->op].op_class == ML_CLASS_MOVE)) {
            s->parameter[n] = s->parameter[ml_graph_source(s->r->from, n, 0)];
        }
    }
}

/* ---- Which operands share a scale ------------------------------------------------------------ */

static void join(state *s, ml_ref a, ml_ref b) {
    if (a == 0 || b == 0) return;
    for (ml_ref n = s->next[a]; n != a; n = s->next[n])
        if (n == b) return;
    if (a == b) return;
    ml_ref after = s->next[a];
    s->next[a] = s->next[b];
    s->next[b] = after;
}

/* "blocks.3.attention.wq" and "blocks.3.wo" are of one block: equal up to the first number. */
static size_t block_length(const char *name) {
    for (const char *at = name; (at = strchr(at, '.')) != NULL; at++) {
        const size_t digits = strspn(at + 1, "0123456789");
        if (digits > 0 && (at[1 + digits] == '.' || at[1 + digits] == 0))
            return (size_t)(at - name) + 1 + digits;
    }
    return strlen(name);
}

static bool same_block(const state *s, ml_ref a, ml_ref b) {
    const char *x = ml_graph_state(s->r->from, s->parameter[a] - 1)->name;
    const char *y = ml_graph_state(s->r->from, s->parameter[b] - 1)->name;
    if (x == NULL || y == NULL) return false;
    const size_t length = block_length(x);
    return length == block_length(y) && strncmp(x, y, length) == 0;
}

static bool same_axes(const state *s, ml_ref a, ml_ref b) {
    const int count = node_of(s, a)->arg_count;
    return count == node_of(s, b)->arg_count &&
           memcmp(ml_graph_args(s->r->from, a), ml_graph_args(s->r->from, b),
                  sizeof(int64_t) * (size_t)count) == 0;
}

static family *next_family(state *s, ml_ref x, uint32_t *cursor) {
    const uint32_t at = ml_index_next(&s->index, x, cursor);
    return at == ML_INDEX_NONE ? NULL : &s->families.at[at];
}

/* A forward product of x and a weight. */
static void add_forward(state *s, ml_ref n, ml_ref x, ml_ref weight) {
    uint32_t cursor = 0;
    for (family *f; (f = next_family(s, x, &cursor)) != NULL;) {
        if (f->x != x || !same_axes(s, f->member, n) || !same_block(s, f->weight, weight)) continue;
        join(s, f->weight, weight);
        return;
    }
    *ML_PUSH(s->r->scratch, &s->families) = (family){x, n, weight, 0};
    ml_index_add(&s->index, x, s->families.count - 1);
}

static bool in_ring(const state *s, ml_ref ring, ml_ref n) {
    ml_ref at = ring;
    do {
        if (at == n) return true;
        at = s->next[at];
    } while (at != ring);
    return false;
}

/* A product of x and a gradient, whose own product is with a weight of a family of x. */
static void add_gradient(state *s, ml_ref x, ml_ref gradient) {
    uint32_t cursor = 0;
    const ml_ref weight = s->weight_of[gradient];
    for (family *f; weight && (f = next_family(s, x, &cursor)) != NULL;) {
        if (f->x != x || !in_ring(s, f->weight, weight)) continue;
        if (f->gradient) join(s, f->gradient, gradient);
        f->gradient = gradient;
        return;
    }
}

static bool is_backward(const state *s, ml_ref n) {
    return node_of(s, n)->flags & ML_NODE_BACKWARD;
}

/* By pairs of operands: (x, weight) forward; (gradient, weight), then (x, gradient) backward. */
static void find_families(state *s) {
    for (int round = 0; round < 3; round++)
        for (ml_ref n = 1; n < s->r->count; n++) {
            if (!s->r->users[n] || !is_marked(s->r->from, n)) continue;
            for (int i = 0; i < 2; i++) {
                ml_ref a = ml_graph_source(s->r->from, n, i);
                ml_ref b = ml_graph_source(s->r->from, n, 1 - i);
                const bool gradient = is_backward(s, b);
                if (round == 0 && !is_backward(s, n) && s->parameter[b] && !s->parameter[a])
                    add_forward(s, n, a, b);
                if (round == 1 && gradient && s->parameter[a]) s->weight_of[b] = a;
                if (round == 2 && gradient && !s->parameter[a]) add_gradient(s, a, b);
            }
        }
}

/* Each operand that shares a scale comes before every product that uses the scale. */
static void scale_edges(void *context, rewrite_edge *edge, void *edges) {
    const state *s = context;
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!s->r->users[n] || !is_marked(s->r->from, n)) continue;
        for (int i = 0; i < 2; i++) {
            const ml_ref operand = ml_graph_source(s->r->from, n, i);
            for (ml_ref at = s->next[operand]; at != operand; at = s->next[at]) edge(edges, at, n);
        }
    }
}

static void begin(rewrite *r) {
    state *s = r->context;
    s->r = r;
    s->index.arena = r->scratch;
    s->parameter = ML_NEW_ARRAY(r->scratch, uint32_t, r->count);
    ml_ref **tables[] = {&s->next, &s->weight_of, &s->most, &s->rounded[0], &s->rounded[1]};
    for (int i = 0; i < 5; i++) *tables[i] = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    for (ml_ref n = 1; n < r->count; n++) s->next[n] = n;
    find_parameters(s);
    find_families(s);
    if (rewrite_order(r, scale_edges, s)) return;
    r->order = NULL; /* one waits for itself: each has its own scale */
    for (ml_ref n = 1; n < r->count; n++) s->next[n] = n;
}

/* ---- Rounding -------------------------------------------------------------------------------- */

/* What rows are picked of, by n or by what n only arranges; n itself where there is no such. */
static ml_ref picked_of(const state *s, ml_ref n) {
    ml_ref from = n;
    for (ml_ref at = n;; at = ml_graph_source(s->r->from, at, 0)) {
        const ml_op op = node_of(s, at)->op;
        if (op == ML_OP_GATHER)
            from = ml_graph_source(s->r->from, at, 0);
        else if (op != ML_OP_PERMUTE && op != ML_OP_RENAME && op != ML_OP_MERGE &&
                 op != ML_OP_SPLIT)
            return s->parameter[from] ? n : from;
    }
}

/* What is rounded: of a weight's cast, the state. */
static ml_ref value_of(const state *s, ml_ref n) {
    const ml_ref under =
        s->parameter[n] && node_of(s, n)->op == ML_OP_CAST ? ml_graph_source(s->r->from, n, 0) : n;
    return s->r->map[ml_graph_type(s->r->from, under)->dtype == ML_F32 ? under : n];
}

static ml_ref most_of(state *s, ml_ref n) {
    ml_graph *to = s->r->to;
    n = picked_of(s, n);
    if (s->most[n]) return s->most[n];
    /* In f32: a kernel that computes a maximum of bf16 divides by it as it is, and stores it
     * rounded for the products, whose results would be off by as much. */
    const ml_ref value = ml_cast(to, value_of(s, n), ML_F32);
    const ml_type type = *ml_graph_type(to, value);
    return s->most[n] =
               ml_reduce(to, ML_OP_MAX, ml_map1(to, ML_OP_ABS, value), type.axis, type.rank);
}

/* max |x| over all that share n's scale; not so small that a scale would overflow. */
static ml_ref shared_most(state *s, ml_ref n) {
    ml_graph *to = s->r->to;
    ml_ref first = n; /* the same order from any member: one node for all of them */
    for (ml_ref at = s->next[n]; at != n; at = s->next[at])
        if (at < first) first = at;
    ml_ref most = ml_map2(to, ML_OP_MAXIMUM, most_of(s, first), ml_const(to, ML_F32, 0x1p-100));
    for (ml_ref at = s->next[first]; at != first; at = s->next[at])
        most = ml_map2(to, ML_OP_MAXIMUM, most, most_of(s, at));
    return most;
}

/* n, of `bytes` in the place of what it picks rows of. */
static ml_ref picked(state *s, ml_ref n, ml_ref from, ml_ref bytes) {
    if (n == from) return bytes;
    const ml_ref *old = ml_graph_sources(s->r->from, n);
    const ml_ref source = picked(s, old[0], from, bytes);
    const ml_node *node = node_of(s, n);
    ml_type type = *ml_graph_type(s->r->from, n);
    type.dtype = ml_graph_type(s->r->to, bytes)->dtype;
    ml_ref sources[2] = {source};
    if (node->source_count > 1) sources[1] = s->r->map[old[1]];
    return ml_graph_add(s->r->to, node->op, sources, node->source_count,
                        ml_graph_args(s->r->from, n), node->arg_count, &type);
}

static ml_ref rounded(state *s, ml_ref n, ml_dtype dtype) {
    ml_graph *to = s->r->to;
    ml_ref *made = &s->rounded[dtype == ML_E5M2][n];
    if (*made) return *made;
    const ml_ref largest = ml_const(to, ML_F32, ml_dtypes[dtype].largest);
    const ml_ref scale = ml_map2(to, ML_OP_DIV, largest, shared_most(s, n));
    const ml_ref from = picked_of(s, n);
    const ml_ref value = ml_cast(to, value_of(s, from), ML_F32);
    const ml_ref bytes = ml_cast(to, ml_map2(to, ML_OP_MUL, value, scale), dtype);
    return *made = picked(s, n, from, bytes);
}

/* The scaled product in the place of n; its operands and their scale come first. */
static ml_ref scaled_product(rewrite *r, ml_ref n, const ml_ref *sources, const ml_ref *operand,
                             ml_ref scale) {
    const ml_dtype dtype = (ml_dtype)ml_graph_type(r->from, n)->dtype;
    const ml_node *node = ml_graph_node(r->from, n);
    const int64_t *args = ml_graph_args(r->from, n);
    if (node->op == ML_OP_DOT) {
        ml_axis axes[ML_MAX_AXES];
        for (int i = 0; i < node->arg_count; i++) axes[i] = (ml_axis)args[i];
        return ml_scaled_dot(r->to, operand[0], operand[1], scale, axes, node->arg_count, dtype);
    }
    const ml_ref all[] = {operand[0], operand[1], sources[2], sources[3], scale};
    return node->op == ML_OP_RAGGED_DOT
               ? ml_ragged_dot(r->to, all, (ml_axis)args[0], (ml_axis)args[2], dtype)
               : ml_ragged_outer(r->to, all, (ml_axis)args[0], dtype);
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    state *s = r->context;
    ml_graph *to = r->to;
    if (!is_marked(r->from, n)) return rewrite_copy(r, n, sources);
    ml_graph_set_flags(to, node_of(s, n)->flags & ML_NODE_BACKWARD);
    ml_ref operand[2], scale = 0;
    double largest = 1;
    for (int i = 0; i < 2; i++) {
        const ml_ref source = ml_graph_source(r->from, n, i);
        const bool second = i == 1 && is_backward(s, ml_graph_source(r->from, n, 0));
        const bool gradient = is_backward(s, source) && !second; /* E5M2 times E5M2 is in no GPU */
        const ml_dtype dtype = gradient ? ML_E5M2 : ML_E4M3;
        operand[i] = rounded(s, source, dtype);
        const ml_ref most = shared_most(s, source);
        scale = scale ? ml_map2(to, ML_OP_MUL, scale, most) : most;
        largest *= ml_dtypes[dtype].largest;
    }
    scale = ml_map2(to, ML_OP_MUL, scale, ml_const(to, ML_F32, 1 / largest));
    return scaled_product(r, n, sources, operand, scale);
}

ml_graph *ml_scale_products(const ml_graph *from, ml_roots *roots) {
    state s = {0};
    return rewrite_run(from, roots, begin, rule, &s);
}

/* ---- Products that no library serves --------------------------------------------------------- */

typedef struct {
    ml_scaled_product_served *served;
    const void *context;
} widening;

bool ml_widen_scaled_products_applies(const ml_graph *g) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (is_scaled(g, n)) return true;
    return false;
}

/* As a product of bf16 that gives f32: 8-bit floats are exact in bf16. */
static ml_ref wide_product(rewrite *r, ml_ref n, const ml_ref *sources) {
    ml_graph *to = r->to;
    const ml_node *node = ml_graph_node(r->from, n);
    const int64_t *args = ml_graph_args(r->from, n);
    ml_ref all[RAGGED_SCALE];
    for (int i = 0; i < 2; i++) all[i] = ml_cast(to, sources[i], ML_BF16);
    if (node->op == ML_OP_DOT) {
        ml_axis axes[ML_MAX_AXES];
        for (int i = 0; i < node->arg_count; i++) axes[i] = (ml_axis)args[i];
        return ml_dot(to, all[0], all[1], axes, node->arg_count, ML_F32);
    }
    all[2] = sources[2], all[3] = sources[3];
    return node->op == ML_OP_RAGGED_DOT
               ? ml_ragged_dot(to, all, (ml_axis)args[0], (ml_axis)args[2], ML_F32)
               : ml_ragged_outer(to, all, (ml_axis)args[0], ML_F32);
}

static ml_ref widen(rewrite *r, ml_ref n, const ml_ref *sources) {
    const widening *w = r->context;
    ml_graph *to = r->to;
    if (!is_scaled(r->from, n) || w->served(w->context, r->from, n))
        return rewrite_copy(r, n, sources);
    const ml_ref scale = sources[ml_graph_node(r->from, n)->source_count - 1];
    const ml_ref sum = ml_map2(to, ML_OP_MUL, wide_product(r, n, sources), scale);
    return ml_cast(to, sum, (ml_dtype)ml_graph_type(r->from, n)->dtype);
}

ml_graph *ml_widen_scaled_products(const ml_graph *from, ml_roots *roots,
                                   ml_scaled_product_served *served, const void *context) {
    widening w = {served, context};
    return rewrite_run(from, roots, NULL, widen, &w);
}
