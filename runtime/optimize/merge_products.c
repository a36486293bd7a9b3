/* Merging products (passes.h). Three patterns, which together are what q, k, v or gate, up become:
 *
 *   forward   h . w1 + b1, h . w2 + b2, ...   weights w with the same reduced axes; biases or none
 *             -> h . concat(w) + concat(b), sliced
 *   backward  g1 . w1 + g2 . w2 + ...   the gradient of h
 *             -> concat(g) . concat(w)
 *   weights   h . g1, h . g2, ...       where the second pattern already joined the g
 *             -> h . concat(g), sliced
 *
 * The products are DOTs, or products by groups of rows (ragged.h), which keep their groups. Weights
 * that are gathered along a reduced axis are joined before, so that one collective gathers them
 * all; gradients of weights that are scattered so are scattered together and then sliced.
 *
 * The concatenation runs over one fresh axis, to which each operand's free axes are flattened. A
 * merged product waits for the operands of all its members, so nodes are visited in an order of
 * their own: ascending, except for what has to wait. */
#include "runtime/graph/rewrite.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/optimize/optimize.h"

#include <stdlib.h>
#include <string.h>

enum {
    MOST_MEMBERS = 16,
    LONGEST_RANGE = 1 << 16, /* nodes between the first and last member of a gradient group */
    LARGE_TERM = 1 << 21,    /* elements: a product of that size keeps a GPU busy */
};

/* Products with one left operand, merged into one. */
typedef struct {
    ml_ref members[MOST_MEMBERS];
    ml_ref biased[MOST_MEMBERS]; /* the additions of biases, each its product's only user; or 0 */
    int count;
    bool gradient; /* the third pattern: right operands are gradients that a sum joined */
    ml_axis fresh; /* made with the group */
    ml_ref merged; /* in the new graph, once the first member was visited */
} group;

/* A sum of products of the gradients with the weights of one forward group. */
typedef struct {
    ml_ref products[MOST_MEMBERS]; /* in the order of the group's members */
    ml_ref rest[MOST_MEMBERS];     /* other addends */
    int rest_count;
    uint32_t group;
} joined_sum;

typedef struct {
    rewrite *r;
    bool *weight;      /* by node: a state, cast, moved and gathered; in 8 bits also scaled */
    bool *derived;     /* by node: computed from states and numbers alone, elementwise */
    bool *gathered;    /* by node: a weight that was gathered on the way */
    ml_ref *user;      /* by node: its last user */
    uint8_t *sent;     /* by product: whose results are gathered apart (ml_find_sent) */
    uint8_t *products; /* by node: users that are products; at most 3 are counted */
    bool *whole;       /* by node: something needs it as a tensor of its own, not as a slice */
    ML_VEC(group) groups;
    ML_VEC(joined_sum) sums;
    uint32_t *group_of;     /* by node: 1 + the group of a product; 0 none */
    uint32_t *sum_of;       /* by node: 1 + the sum that an addition is the root of */
    uint32_t *weight_group; /* by node: 1 + the forward group that a weight is an operand of */
    uint32_t *gradient_sum; /* by node: 1 + the sum that joins a gradient */
} state;

static const ml_node *node_of(const state *s, ml_ref n) {
    return ml_graph_node(s->r->from, n);
}
static ml_ref left_of(const state *s, ml_ref n) {
    return ml_graph_source(s->r->from, n, 0);
}
static ml_ref right_of(const state *s, ml_ref n) {
    return ml_graph_source(s->r->from, n, 1);
}
static const ml_type *type_of(const state *s, ml_ref n) {
    return ml_graph_type(s->r->from, n);
}

static bool is_product(const state *s, ml_ref n) {
    return ml_op_is(node_of(s, n)->op, ML_PRODUCT);
}

/* The axes that a product sums over; *count of them. Rows of an outer product are summed too. */
static const int64_t *reduced_axes(const state *s, ml_ref product, int *count) {
    const ml_node *node = node_of(s, product);
    const int64_t *args = ml_graph_args(s->r->from, product);
    *count = node->op == ML_OP_DOT ? node->arg_count : 1;
    return node->op == ML_OP_RAGGED_DOT ? args + 2 : args;
}

static bool is_reduced(const state *s, ml_ref product, ml_axis axis) {
    int count;
    const int64_t *axes = reduced_axes(s, product, &count);
    for (int i = 0; i < count; i++)
        if (axes[i] == axis) return true;
    return false;
}

/* By groups of rows: the groups and what the rows have groups of their own along. */
static bool is_shared(const state *s, ml_ref product, ml_axis axis) {
    if (node_of(s, product)->op == ML_OP_DOT) return false;
    return ml_type_find(type_of(s, ml_graph_source(s->r->from, product, 2)), axis) >= 0;
}

/* Axes of the right operand that the result has, in its order. */
static int free_axes(const state *s, ml_ref product, ml_axis *axes, int64_t *sizes) {
    const ml_type *right = type_of(s, right_of(s, product));
    int count = 0;
    for (int i = 0; i < right->rank; i++)
        if (!is_reduced(s, product, right->axis[i]) && !is_shared(s, product, right->axis[i]))
            axes[count] = right->axis[i], sizes[count++] = right->size[i];
    return count;
}

static bool is_scaled(const ml_type *type) {
    return ml_dtypes[type->dtype].bytes == 1 && ml_is_narrow((ml_dtype)type->dtype);
}

/* Its sources precede it. */
static bool is_derived(const state *s, ml_ref n) {
    const ml_node *node = node_of(s, n);
    ml_op_class op_class = ml_ops[node->op].op_class;
    bool computes = op_class == ML_CLASS_MAP || op_class == ML_CLASS_REDUCE ||
                    op_class == ML_CLASS_MOVE || op_class == ML_CLASS_COLLECTIVE;
    bool derived = computes || node->op == ML_OP_STATE || node->op == ML_OP_CONST;
    for (int i = 0; i < node->source_count; i++)
        derived = derived && s->derived[ml_graph_source(s->r->from, n, i)];
    return derived;
}

static void find_users(state *s) {
    for (int i = 0; i < s->r->roots->output_count; i++) s->whole[s->r->roots->outputs[i]] = true;
    for (int i = 0; i < s->r->roots->update_count; i++)
        s->whole[s->r->roots->updates[i].value] = true;
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!s->r->users[n]) continue;
        const ml_node *node = node_of(s, n);
        bool moves = node->op == ML_OP_CAST || ml_ops[node->op].op_class == ML_CLASS_MOVE;
        bool gathers = node->op == ML_OP_ALL_GATHER;
        s->weight[n] = node->op == ML_OP_STATE || gathers || (moves && node->source_count == 1);
        s->gathered[n] = gathers;
        bool strides = node->op == ML_OP_OUT || ml_ops[node->op].op_class == ML_CLASS_MAP ||
                       ml_ops[node->op].op_class == ML_CLASS_REDUCE;
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(s->r->from, n, i);
            s->user[source] = n;
            if (is_product(s, n) && i < 2)
                s->products[source] += s->products[source] < 3;
            else if (!strides)
                s->whole[source] = true;
        }
        s->derived[n] = is_derived(s, n);
        for (int i = 0; i < node->source_count; i++) {
            const ml_ref source = ml_graph_source(s->r->from, n, i);
            s->weight[n] = s->weight[n] &&
                           (s->weight[source] || (is_scaled(type_of(s, n)) && s->derived[source]));
            s->gathered[n] = s->gathered[n] || s->gathered[ml_graph_source(s->r->from, n, i)];
        }
        s->gathered[n] = s->gathered[n] && s->weight[n];
    }
}

/* Whether a weight can be joined with others ahead of a product: as it is, or before it is gathered
 * along an axis that the product reduces. */
static bool joinable(const state *s, ml_ref product) {
    ml_ref weight = right_of(s, product);
    if (!s->weight[weight] || !s->gathered[weight]) return s->weight[weight];
    return node_of(s, weight)->op == ML_OP_ALL_GATHER && node_of(s, product)->op == ML_OP_DOT &&
           !s->gathered[left_of(s, weight)] && is_reduced(s, product, type_of(s, weight)->axis[0]);
}

/* Both not gathered, or by the same ranks along the same axis. */
static bool gathered_alike(const state *s, ml_ref a, ml_ref b) {
    if (!s->gathered[a] || !s->gathered[b]) return s->gathered[a] == s->gathered[b];
    const ml_node *x = node_of(s, a), *y = node_of(s, b);
    return x->op == y->op && x->flags == y->flags &&
           type_of(s, a)->axis[0] == type_of(s, b)->axis[0] &&
           memcmp(ml_graph_args(s->r->from, a), ml_graph_args(s->r->from, b),
                  sizeof(int64_t) * x->arg_count) == 0;
}

/* ---- Groups of products with one left operand ------------------------------------------------ */

/* Weights of 8 bits that are cast for the product, which kernels read where they are: joined, they
 * would be written once more in each step. */
static bool widens_weights(const state *s, ml_ref n) {
    ml_ref right = right_of(s, n);
    return node_of(s, right)->op == ML_OP_CAST &&
           is_scaled(type_of(s, ml_graph_source(s->r->from, right, 0)));
}

/* No batch axes, and something to flatten. */
static bool mergeable(const state *s, ml_ref n) {
    if (!is_product(s, n) || node_of(s, n)->arg_count == 0 || widens_weights(s, n)) return false;
    const ml_type *left = type_of(s, left_of(s, n));
    ml_axis axes[ML_MAX_AXES];
    int64_t sizes[ML_MAX_AXES];
    int count = free_axes(s, n, axes, sizes);
    for (int i = 0; i < count; i++)
        if (ml_type_find(left, axes[i]) >= 0) return false;
    return count > 0;
}

static uint64_t key_of(const state *s, ml_ref n) {
    const ml_node *node = node_of(s, n);
    uint64_t head[3] = {left_of(s, n), type_of(s, n)->dtype, type_of(s, right_of(s, n))->dtype};
    uint64_t hash = ml_hash(head, sizeof head, node->op);
    return ml_hash(ml_graph_args(s->r->from, n), sizeof(int64_t) * node->arg_count, hash);
}

/* Of one op, and of the same groups where they are by groups. */
static bool same_groups(const state *s, ml_ref a, ml_ref b) {
    if (node_of(s, a)->op != node_of(s, b)->op) return false;
    const int64_t *x = ml_graph_args(s->r->from, a), *y = ml_graph_args(s->r->from, b);
    if (node_of(s, a)->op == ML_OP_DOT) return true;
    for (int i = 2; i < RAGGED_SCALE; i++)
        if (ml_graph_source(s->r->from, a, i) != ml_graph_source(s->r->from, b, i)) return false;
    return x[0] == y[0] && x[1] == y[1];
}

/* The same, by the same number where scaled. */
static bool alike(const state *s, ml_ref a, ml_ref b) {
    const int count = node_of(s, a)->source_count;
    if (!same_groups(s, a, b) || node_of(s, b)->source_count != count) return false;
    for (int i = 2; i < count; i++)
        if (ml_graph_source(s->r->from, a, i) != ml_graph_source(s->r->from, b, i)) return false;
    return true;
}

static bool belongs(const state *s, const group *g, ml_ref n) {
    ml_ref first = g->members[0];
    const ml_node *a = node_of(s, first), *b = node_of(s, n);
    if (left_of(s, first) != left_of(s, n) || a->arg_count != b->arg_count) return false;
    if (!alike(s, first, n)) return false;
    if (memcmp(ml_graph_args(s->r->from, first), ml_graph_args(s->r->from, n),
               sizeof(int64_t) * a->arg_count))
        return false;
    for (int i = 0; i < g->count; i++)
        if (right_of(s, g->members[i]) == right_of(s, n)) return false;
    if (!gathered_alike(s, right_of(s, first), right_of(s, n))) return false;
    if (s->sent[first] != s->sent[n]) return false;
    return type_of(s, first)->dtype == type_of(s, n)->dtype && g->count < MOST_MEMBERS &&
           type_of(s, right_of(s, first))->dtype == type_of(s, right_of(s, n))->dtype;
}

static void add_member(state *s, ml_index *index, ml_ref n, bool gradient) {
    uint64_t key = key_of(s, n);
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(index, key, &cursor)) != ML_INDEX_NONE) {
        group *g = &s->groups.at[at];
        if (!belongs(s, g, n)) continue;
        if (gradient &&
            s->gradient_sum[right_of(s, g->members[0])] != s->gradient_sum[right_of(s, n)])
            continue;
        g->members[g->count++] = n;
        return;
    }
    group *g = ML_PUSH(s->r->scratch, &s->groups);
    g->members[g->count++] = n;
    g->gradient = gradient;
    ml_index_add(index, key, s->groups.count - 1);
}

/* The addition of a weight with exactly the free axes of a product that serves nothing else. */
static ml_ref bias_of(const state *s, ml_ref product) {
    ml_ref user = s->user[product];
    if (s->r->users[product] != 1 || !user || node_of(s, user)->op != ML_OP_ADD) return 0;
    ml_ref bias = left_of(s, user) == product ? right_of(s, user) : left_of(s, user);
    if (!s->weight[bias] || !ml_type_equal(type_of(s, user), type_of(s, product))) return 0;
    ml_axis axes[ML_MAX_AXES];
    int64_t sizes[ML_MAX_AXES];
    int count = free_axes(s, product, axes, sizes);
    if (type_of(s, bias)->rank != count) return 0;
    for (int i = 0; i < count; i++)
        if (ml_type_find(type_of(s, bias), axes[i]) < 0) return 0;
    return user;
}

/* Biases are merged where all members have one. */
static void find_biases(const state *s, group *g) {
    bool all = true;
    for (int i = 0; i < g->count; i++) all = all && (g->biased[i] = bias_of(s, g->members[i]));
    for (int i = 0; i < g->count && !all; i++) g->biased[i] = 0;
}

static void find_forward_groups(state *s) {
    ml_index index = {.arena = s->r->scratch};
    for (ml_ref n = 1; n < s->r->count; n++)
        if (s->r->users[n] && mergeable(s, n) && joinable(s, n) && !s->weight[left_of(s, n)] &&
            node_of(s, n)->op != ML_OP_RAGGED_OUTER)
            add_member(s, &index, n, false);
    for (uint32_t i = 0; i < s->groups.count; i++) {
        group *g = &s->groups.at[i];
        find_biases(s, g);
        for (int k = 0; k < g->count && g->count > 1; k++) {
            s->group_of[g->biased[k] ? g->biased[k] : g->members[k]] = i + 1;
            s->weight_group[right_of(s, g->members[k])] = i + 1;
        }
    }
}

/* ---- Sums of products with the same weights -------------------------------------------------- */

static bool is_inner_addition(const state *s, ml_ref n, const ml_type *type) {
    return node_of(s, n)->op == ML_OP_ADD && s->r->users[n] == 1 &&
           ml_type_equal(type_of(s, n), type);
}

/* The addends of the sum whose root is n; -1 where there are too many. */
static int addends(const state *s, ml_ref n, ml_ref *out) {
    ml_type type = *type_of(s, n);
    ml_ref stack[2 * MOST_MEMBERS];
    int count = 0, depth = 0;
    stack[depth++] = right_of(s, n), stack[depth++] = left_of(s, n);
    while (depth > 0) {
        ml_ref top = stack[--depth];
        if (!ml_type_equal(type_of(s, top), &type)) return -1;
        if (is_inner_addition(s, top, &type) && depth + 2 < 2 * MOST_MEMBERS)
            stack[depth++] = right_of(s, top), stack[depth++] = left_of(s, top);
        else if (count == MOST_MEMBERS)
            return -1;
        else
            out[count++] = top;
    }
    return count;
}

/* The position in forward group g of the weight that this product multiplies a gradient with; -1
 * where it is no such product, or where its gradient serves other products than it and the one
 * that gives the weight's gradient, or cannot be a slice. */
static int position_in(const state *s, const group *g, ml_ref product) {
    int reduced;
    if (!is_product(s, product) || s->r->users[product] != 1) return -1;
    (void)reduced_axes(s, product, &reduced);
    ml_ref gradient = left_of(s, product), weight = right_of(s, product);
    if (s->products[gradient] > 2 || s->whole[gradient] || s->weight[gradient]) return -1;
    for (int i = 0; i < g->count; i++) {
        ml_ref member = g->members[i];
        if (right_of(s, member) != weight) continue;
        if (!same_groups(s, member, product)) return -1;
        ml_axis axes[ML_MAX_AXES];
        int64_t sizes[ML_MAX_AXES];
        int count = free_axes(s, member, axes, sizes);
        if (count != reduced) return -1;
        for (int k = 0; k < count; k++)
            if (!is_reduced(s, product, axes[k])) return -1;
        const ml_type *type = type_of(s, gradient);
        for (int k = 0; k < type->rank; k++) /* no batch axes */
            if (!is_reduced(s, product, type->axis[k]) &&
                ml_type_find(type_of(s, weight), type->axis[k]) >= 0)
                return -1;
        return i;
    }
    return -1;
}

static void try_sum(state *s, ml_ref n) {
    ml_ref parts[MOST_MEMBERS];
    int count = addends(s, n, parts);
    uint32_t found = 0;
    for (int i = 0; i < count && !found; i++)
        if (is_product(s, parts[i])) found = s->weight_group[right_of(s, parts[i])];
    if (!found) return;
    const group *g = &s->groups.at[found - 1];
    joined_sum sum = {.group = found - 1};
    int matched = 0;
    for (int i = 0; i < count; i++) {
        int at = position_in(s, g, parts[i]);
        if (at >= 0 && !sum.products[at])
            sum.products[at] = parts[i], matched++;
        else
            sum.rest[sum.rest_count++] = parts[i];
    }
    if (matched != g->count) return;
    for (int i = 1; i < matched; i++)
        if (!alike(s, sum.products[0], sum.products[i])) return;
    ml_dtype dtype = type_of(s, left_of(s, sum.products[0]))->dtype;
    for (int i = 0; i < matched; i++) {
        ml_ref gradient = left_of(s, sum.products[i]);
        if (type_of(s, gradient)->dtype != dtype || s->gradient_sum[gradient]) return;
    }
    *ML_PUSH(s->r->scratch, &s->sums) = sum;
    s->sum_of[n] = s->sums.count;
    for (int i = 0; i < matched; i++) s->gradient_sum[left_of(s, sum.products[i])] = s->sums.count;
}

static void find_sums(state *s) {
    uint8_t *inner = ML_NEW_ARRAY(s->r->scratch, uint8_t, s->r->count);
    for (ml_ref n = s->r->count; n-- > 1;) { /* roots before the additions inside of them */
        if (!s->r->users[n] || node_of(s, n)->op != ML_OP_ADD) continue;
        for (int i = 0; i < 2; i++) {
            ml_ref source = ml_graph_source(s->r->from, n, i);
            if (is_inner_addition(s, source, type_of(s, n))) inner[source] = 1;
        }
        if (!inner[n]) try_sum(s, n);
    }
}

/* ---- Groups of weight gradients -------------------------------------------------------------- */

/* Whether the operands of a group can all be there before any member: none depends on one. */
static bool independent(const state *s, const group *g) {
    ml_ref first = g->members[0], last = g->members[g->count - 1];
    if (last - first > LONGEST_RANGE) return false;
    uint8_t *tainted = ml_alloc(last - first + 1);
    if (!tainted) ml_raise(ML_NO_MEMORY, "no memory left to merge products");
    for (int i = 0; i < g->count; i++) tainted[g->members[i] - first] = 1;
    bool good = true;
    for (ml_ref n = first; n <= last && good; n++) {
        if (!s->r->users[n]) continue;
        bool member = tainted[n - first] != 0;
        for (int i = 0; i < node_of(s, n)->source_count; i++) {
            ml_ref source = ml_graph_source(s->r->from, n, i);
            if (source < first || !tainted[source - first]) continue;
            tainted[n - first] = 1;
            good = good && !member;
        }
    }
    ml_free(tainted);
    return good;
}

/* Whether all members are large terms of sums over microbatches: each product can add to its sum by
 * itself, where parts of one product would be written, read and added. */
static bool are_accumulated(const state *s, const group *g) {
    for (int i = 0; i < g->count; i++) {
        ml_ref n = g->members[i], user = s->user[n];
        if (s->r->users[n] != 1 || !user || node_of(s, user)->op != ML_OP_ADD) return false;
        ml_ref kept = left_of(s, user) == n ? right_of(s, user) : left_of(s, user);
        if (node_of(s, kept)->op != ML_OP_WHERE || ml_type_elements(type_of(s, n)) < LARGE_TERM)
            return false;
        if (node_of(s, ml_graph_source(s->r->from, kept, 2))->op != ML_OP_STATE) return false;
    }
    return true;
}

static void find_gradient_groups(state *s) {
    ml_index index = {.arena = s->r->scratch};
    uint32_t before = s->groups.count;
    for (ml_ref n = 1; n < s->r->count; n++)
        if (s->r->users[n] && mergeable(s, n) && s->gradient_sum[right_of(s, n)])
            add_member(s, &index, n, true);
    for (uint32_t i = before; i < s->groups.count; i++) {
        const group *g = &s->groups.at[i];
        uint32_t sum = s->gradient_sum[right_of(s, g->members[0])];
        const group *forward = &s->groups.at[s->sums.at[sum - 1].group];
        if (g->count != forward->count || are_accumulated(s, g) || !independent(s, g)) continue;
        for (int k = 0; k < g->count; k++) s->group_of[g->members[k]] = i + 1;
    }
}

/* ---- Order ----------------------------------------------------------------------------------- */

static ml_ref bias_in(const state *s, const group *g, int i) {
    ml_ref addition = g->biased[i];
    return left_of(s, addition) == g->members[i] ? right_of(s, addition) : left_of(s, addition);
}

/* From every right operand and bias of a group to all of its members (their additions, where they
 * have biases). */
static void group_edges(void *context, rewrite_edge *edge, void *edges) {
    const state *s = context;
    for (ml_ref n = 1; n < s->r->count; n++) {
        if (!s->r->users[n] || !s->group_of[n]) continue;
        const group *g = &s->groups.at[s->group_of[n] - 1];
        for (int i = 0; i < g->count; i++) {
            edge(edges, right_of(s, g->members[i]), n);
            edge(edges, left_of(s, g->members[i]), n);
            if (g->biased[i]) edge(edges, bias_in(s, g, i), n);
        }
    }
}

static void begin(rewrite *r) {
    state *s = r->context;
    s->r = r;
    s->weight = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->derived = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->gathered = ML_NEW_ARRAY(r->scratch, bool, r->count);
    s->user = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
    s->products = ML_NEW_ARRAY(r->scratch, uint8_t, r->count);
    s->sent = ML_NEW_ARRAY(r->scratch, uint8_t, r->count);
    s->whole = ML_NEW_ARRAY(r->scratch, bool, r->count);
    uint32_t **tables[] = {&s->group_of, &s->sum_of, &s->weight_group, &s->gradient_sum};
    for (int i = 0; i < 4; i++) *tables[i] = ML_NEW_ARRAY(r->scratch, uint32_t, r->count);
    find_users(s);
    ml_find_sent(r->from, s->sent);
    find_forward_groups(s);
    find_sums(s);
    find_gradient_groups(s);
    if (rewrite_order(r, group_edges, s)) return;
    for (ml_ref n = 1; n < r->count; n++) /* keep what never waits for a gradient */
        if (s->group_of[n] && s->groups.at[s->group_of[n] - 1].gradient) s->group_of[n] = 0;
    if (!rewrite_order(r, group_edges, s))
        ml_raise(ML_INTERNAL, "merged products wait for each other");
}

/* ---- Building -------------------------------------------------------------------------------- */

/* x with these axes as the one axis `to`. */
static ml_ref flatten(ml_graph *g, ml_ref x, const ml_axis *axes, int count, ml_axis to) {
    if (count == 1) return ml_rename(g, x, axes[0], to);
    x = ml_merge(g, x, axes[0], axes[1], to);
    for (int i = 2; i < count; i++) x = ml_merge(g, x, to, axes[i], to);
    return x;
}

static ml_ref outermost(ml_graph *g, ml_ref x, ml_axis axis) {
    ml_type type = *ml_graph_type(g, x);
    int at = ml_type_find(&type, axis);
    int64_t size = type.size[at];
    for (int i = at; i > 0; i--) {
        type.axis[i] = type.axis[i - 1], type.size[i] = type.size[i - 1];
        type.axis[i - 1] = axis, type.size[i - 1] = size;
    }
    return ml_permute(g, x, &type);
}

static ml_ref unflatten(ml_graph *g, ml_ref x, const ml_axis *axes, const int64_t *sizes, int count,
                        ml_axis from) {
    if (count == 1) return ml_rename(g, x, from, axes[0]);
    for (int i = count; i-- > 1;) {
        int64_t outer = 1;
        for (int k = 0; k < i; k++) outer *= sizes[k];
        x = ml_split(g, x, from, i == 1 ? axes[0] : from, outer, axes[i], sizes[i]);
    }
    return x;
}

/* The name of the state that a weight is computed from; NULL: of none. */
static const char *state_of(const state *s, ml_ref n) {
    while (node_of(s, n)->op != ML_OP_STATE && node_of(s, n)->source_count > 0) n = left_of(s, n);
    if (node_of(s, n)->op != ML_OP_STATE) return NULL;
    return ml_graph_state(s->r->from, (uint32_t)ml_graph_args(s->r->from, n)[0])->name;
}

/* "joined'blocks.*.attention.wq": a state's name, with a * for each number of a layer. */
static const char *joined_name(state *s, const char *name) {
    char *made = ml_arena_format(s->r->scratch, "joined'%s", name), *out = made + strlen("joined'");
    for (bool starts = true; (*out = *name) != 0; starts = *name++ == '.', out++) {
        const size_t digits = starts ? strspn(name, "0123456789") : 0;
        if (digits > 0 && (name[digits] == '.' || name[digits] == 0))
            *out = '*', name += digits - 1;
    }
    return made;
}

/* An axis that no script can name; the same for the same weights of another layer, in another
 * program or again in this one: layers are alike, and so is what is kept (param_cache.c). */
static ml_axis fresh_of(state *s, group *g) {
    const ml_ref weight = right_of(s, g->members[0]);
    const char *name = s->weight[weight] ? state_of(s, weight) : NULL;
    const int number = (int)(g - s->groups.at) + 1;
    name = name ? joined_name(s, name) : ml_arena_format(s->r->scratch, "group'%d", number);
    return g->fresh = ml_axis_named(s->r->to, name);
}

typedef enum { WEIGHTS, BIASES, GRADIENTS } operand_kind;

/* The operands of a forward group's members, flattened and one after another; gradients have the
 * axes over which the weights are flattened. */
static ml_ref joined(state *s, const group *forward, operand_kind kind, const ml_ref *gradients) {
    ml_ref parts[MOST_MEMBERS] = {0}, first = right_of(s, forward->members[0]);
    bool gather = kind == WEIGHTS && s->gathered[first];
    for (int i = 0; i < forward->count; i++) {
        ml_axis axes[ML_MAX_AXES];
        int64_t sizes[ML_MAX_AXES];
        int count = free_axes(s, forward->members[i], axes, sizes);
        ml_ref operand = kind == GRADIENTS ? gradients[i]
                         : kind == BIASES  ? bias_in(s, forward, i)
                                           : right_of(s, forward->members[i]);
        if (gather) operand = left_of(s, operand);
        parts[i] = flatten(s->r->to, s->r->map[operand], axes, count, forward->fresh);
    }
    ml_ref whole = ml_concat(s->r->to, parts, forward->count, forward->fresh);
    if (!gather) return whole;
    whole = outermost(s->r->to, whole, type_of(s, first)->axis[0]);
    return ml_graph_add(s->r->to, ML_OP_ALL_GATHER, &whole, 1, ml_graph_args(s->r->from, first),
                        node_of(s, first)->arg_count, NULL);
}

static void sum_gradients(const state *s, const joined_sum *sum, ml_ref *gradients) {
    for (int i = 0; i < s->groups.at[sum->group].count; i++)
        gradients[i] = left_of(s, sum->products[i]);
}

/* A product as `like` is one, of other operands. */
static ml_ref multiply(state *s, ml_ref like, ml_ref left, ml_ref right, const ml_axis *axes,
                       int count, ml_dtype dtype) {
    ml_graph *to = s->r->to;
    if (ml_is_scaled_dot(s->r->from, like)) {
        ml_ref scale = s->r->map[ml_graph_source(s->r->from, like, 2)];
        return ml_scaled_dot(to, left, right, scale, axes, count, dtype);
    }
    if (node_of(s, like)->op == ML_OP_DOT) return ml_dot(to, left, right, axes, count, dtype);
    ml_ref sources[RAGGED_MOST_SOURCES] = {left, right};
    for (int i = 2; i < node_of(s, like)->source_count; i++)
        sources[i] = s->r->map[ml_graph_source(s->r->from, like, i)];
    ml_axis rows = (ml_axis)ml_graph_args(s->r->from, like)[0];
    if (node_of(s, like)->op == ML_OP_RAGGED_OUTER)
        return ml_ragged_outer(to, sources, rows, dtype);
    return ml_ragged_dot(to, sources, rows, axes[0], dtype);
}

static ml_ref build_sum(state *s, ml_ref n, const joined_sum *sum) {
    ml_graph *to = s->r->to;
    group *forward = &s->groups.at[sum->group];
    ml_axis fresh = fresh_of(s, forward);
    ml_ref gradients[MOST_MEMBERS];
    sum_gradients(s, sum, gradients);
    ml_type type = *type_of(s, n);
    ml_ref left = joined(s, forward, GRADIENTS, gradients);
    ml_ref right = joined(s, forward, WEIGHTS, NULL);
    ml_ref total = multiply(s, sum->products[0], left, right, &fresh, 1, (ml_dtype)type.dtype);
    total = ml_permute(to, total, &type);
    for (int i = 0; i < sum->rest_count; i++)
        total = ml_map2(to, ML_OP_ADD, total, s->r->map[sum->rest[i]]);
    return total;
}

/* The product of all members of g, whose right operands are joined as the forward group's. */
static ml_ref build_merged(state *s, const group *g, const group *forward,
                           const ml_ref *gradients) {
    ml_graph *to = s->r->to;
    ml_ref first = g->members[0];
    ml_axis axes[ML_MAX_AXES];
    int count;
    const int64_t *reduced = reduced_axes(s, first, &count);
    for (int i = 0; i < count; i++) axes[i] = (ml_axis)reduced[i];
    ml_ref right = joined(s, forward, g->gradient ? GRADIENTS : WEIGHTS, gradients);
    ml_ref left = s->r->map[left_of(s, first)];
    ml_dtype dtype = (ml_dtype)type_of(s, first)->dtype;
    ml_ref merged = multiply(s, first, left, right, axes, count, dtype);
    if (!g->biased[0]) return merged;
    return ml_map2(to, ML_OP_ADD, merged, joined(s, forward, BIASES, NULL));
}

/* The part of a merged product that stands for n, a member or the addition of its bias. Of a
 * gradient group, the parts lie in the order of the forward group whose weights they are the
 * gradients of. `scatter` (or 0) is a user of n that scatters it: then what it makes. */
static ml_ref build_member(state *s, ml_ref n, group *g, ml_ref scatter) {
    ml_graph *to = s->r->to;
    group *forward = g;
    ml_ref gradients[MOST_MEMBERS], product = n;
    for (int i = 0; i < g->count; i++)
        if (g->biased[i] == n) product = g->members[i];
    if (g->gradient) {
        const joined_sum *sum = &s->sums.at[s->gradient_sum[right_of(s, n)] - 1];
        sum_gradients(s, sum, gradients);
        forward = &s->groups.at[sum->group];
    }
    ml_axis fresh = fresh_of(s, forward);
    if (!g->merged) g->merged = build_merged(s, g, forward, gradients);
    ml_type type = *type_of(s, scatter ? scatter : n);
    ml_ref whole = g->merged;
    if (scatter) {
        whole = outermost(to, whole, type.axis[0]);
        whole =
            ml_graph_add(to, ML_OP_REDUCE_SCATTER, &whole, 1, ml_graph_args(s->r->from, scatter),
                         node_of(s, scatter)->arg_count, NULL);
    }
    int64_t start = 0;
    for (int i = 0; i < forward->count; i++) {
        ml_axis axes[ML_MAX_AXES];
        int64_t sizes[ML_MAX_AXES], size = 1;
        int count = free_axes(s, forward->members[i], axes, sizes);
        for (int k = 0; k < count; k++) size *= sizes[k];
        ml_ref operand = g->gradient ? gradients[i] : right_of(s, forward->members[i]);
        if (operand == right_of(s, product)) {
            ml_ref part = ml_slice(to, whole, fresh, start, start + size);
            return ml_permute(to, unflatten(to, part, axes, sizes, count, fresh), &type);
        }
        start += size;
    }
    ml_raise(ML_INTERNAL, "a merged product lost its member %%%u", n);
}

/* The merged product of gradients that n scatters along an axis that all of it has; or NULL. */
static group *scattered(const state *s, ml_ref n) {
    if (node_of(s, n)->op != ML_OP_REDUCE_SCATTER) return NULL;
    ml_ref product = left_of(s, n);
    if (!s->group_of[product]) return NULL;
    group *g = &s->groups.at[s->group_of[product] - 1];
    const ml_type *right = type_of(s, right_of(s, product));
    bool all = ml_type_find(right, type_of(s, n)->axis[0]) < 0;
    return g->gradient && all ? g : NULL;
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    state *s = r->context;
    group *scatters = scattered(s, n);
    if (scatters) return build_member(s, left_of(s, n), scatters, n);
    if (s->group_of[n]) return build_member(s, n, &s->groups.at[s->group_of[n] - 1], 0);
    if (s->sum_of[n]) return build_sum(s, n, &s->sums.at[s->sum_of[n] - 1]);
    return rewrite_copy(r, n, sources);
}

ml_graph *ml_merge_products(const ml_graph *from, ml_roots *roots) {
    state s = {0};
    return rewrite_run(from, roots, begin, rule, &s);
}
