/* Reverse-mode differentiation (ml_autodiff) by the rules of ops.def. */
#include "runtime/graph/analysis.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/graph/gradient.h"
#include "runtime/graph/op_interface.h"

/* A node that the roots reach. */
typedef struct {
    ml_ref node;
    ml_ref rule;      /* the node whose rule gives its sources their gradients: it, or the one that
                         it was made in place of, where one of wrt is between (op_interface.h) */
    bool needs;       /* a gradient with respect to it is wanted, or leads to one */
    ml_ref *gradient; /* what its users gave so far, for each of its outputs; 0 none */
    int outputs;
} entry;

/* One vector-Jacobian product over the part of `graph` that its roots reach. */
struct tape {
    ml_graph *graph;
    ml_arena *scratch;
    ml_index index; /* node to entry */
    ML_VEC(entry) entries;
};

typedef struct {
    const ml_ref *roots, *cotangents;
    int root_count;
    const ml_ref *wrt;
    int wrt_count;
    bool stop_at_wrt; /* treat wrt as independent variables, whatever they are computed from */
} product;

static void backward(ml_graph *g, ml_arena *scratch, const product *p, ml_ref *gradients);

static uint64_t hash_of(ml_ref node) {
    return node * 0x9e3779b97f4a7c15u;
}

static entry *find(const tape *t, ml_ref node) {
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&t->index, hash_of(node), &cursor)) != ML_INDEX_NONE)
        if (t->entries.at[at].node == node) return &t->entries.at[at];
    return NULL;
}

static int descending(const void *a, const void *b) {
    ml_ref left = ((const entry *)a)->node, right = ((const entry *)b)->node;
    return left < right ? 1 : left > right ? -1 : 0;
}

static void reach(tape *t, ml_ref node) {
    if (find(t, node)) return;
    entry *e = ML_PUSH(t->scratch, &t->entries);
    e->node = e->rule = node;
    e->outputs = ml_op_outputs(t->graph, node);
    e->gradient = ML_NEW_ARRAY(t->scratch, ml_ref, e->outputs);
    ml_index_add(&t->index, hash_of(node), t->entries.count - 1);
}

static bool contains(const ml_ref *list, int count, ml_ref node) {
    for (int i = 0; i < count; i++)
        if (list[i] == node) return true;
    return false;
}

/* Whether one of wrt is computed of sources of `node` on the way to `at`, itself included. */
static bool wanted_between(const ml_graph *g, const product *p, ml_ref at, ml_ref node) {
    const int count = ml_graph_node(g, at)->source_count;
    if (contains(ml_graph_sources(g, node), ml_graph_node(g, node)->source_count, at)) return false;
    if (contains(p->wrt, p->wrt_count, at)) return true;
    for (int i = 0; i < count; i++)
        if (wanted_between(g, p, ml_graph_source(g, at, i), node)) return true;
    return false;
}

static ml_ref rule_of(ml_graph *g, const product *p, ml_ref node) {
    const ml_op_interface *own = ml_op_interfaces[ml_graph_node(g, node)->op];
    const ml_ref before = own && own->before ? own->before(g, node) : 0;
    for (int i = 0; before && i < ml_graph_node(g, before)->source_count; i++)
        if (wanted_between(g, p, ml_graph_source(g, before, i), node)) return before;
    return node;
}

/* Whether a gradient with respect to a computed value is wanted. */
static bool wants_inner(const ml_graph *g, const product *p) {
    for (int i = 0; i < p->wrt_count; i++)
        if (ml_graph_node(g, p->wrt[i])->source_count > 0) return true;
    return false;
}

/* Collect what the roots reach, users before their sources. */
static void collect(tape *t, const product *p) {
    const bool inner = wants_inner(t->graph, p);
    for (int i = 0; i < p->root_count; i++) reach(t, p->roots[i]);
    for (uint32_t next = 0; next < t->entries.count; next++) {
        ml_ref node = t->entries.at[next].node;
        if (p->stop_at_wrt && contains(p->wrt, p->wrt_count, node)) continue;
        if (inner) node = t->entries.at[next].rule = rule_of(t->graph, p, node);
        int count = ml_graph_node(t->graph, node)->source_count;
        for (int i = 0; i < count; i++) reach(t, ml_graph_source(t->graph, node, i));
    }
    if (t->entries.count) qsort(t->entries.at, t->entries.count, sizeof(entry), descending);
    t->index = (ml_index){.arena = t->scratch};
    for (uint32_t i = 0; i < t->entries.count; i++)
        ml_index_add(&t->index, hash_of(t->entries.at[i].node), i);
}

static bool is_float(const ml_graph *g, ml_ref node) {
    return ml_dtypes[ml_graph_type(g, node)->dtype].kind == ML_KIND_FLOAT;
}

/* Gradients flow only through float values that depend on a wanted node. */
static void mark_needs(tape *t, const product *p) {
    for (int i = 0; i < p->wrt_count; i++) {
        entry *e = find(t, p->wrt[i]);
        if (e) e->needs = is_float(t->graph, e->node);
    }
    for (uint32_t i = t->entries.count; i-- > 0;) {
        entry *e = &t->entries.at[i];
        bool several = ml_ops[ml_graph_node(t->graph, e->node)->op].outputs != 1;
        if (e->needs || !(several || is_float(t->graph, e->node))) continue;
        const ml_node *node = ml_graph_node(t->graph, e->rule);
        if (node->op == ML_OP_STOP_GRADIENT) continue;
        for (int s = 0; s < node->source_count && !e->needs; s++) {
            entry *source = find(t, ml_graph_source(t->graph, e->rule, s));
            e->needs = source && source->needs;
        }
    }
}

/* Sum x over the axes that `as` lacks and put the rest into its order and dtype. */
static ml_ref reduce_to(ml_graph *g, ml_ref x, const ml_type *as) {
    ml_type type = *ml_graph_type(g, x);
    ml_axis missing[ML_MAX_AXES];
    int count = 0;
    for (int i = 0; i < type.rank; i++)
        if (ml_type_find(as, type.axis[i]) < 0) missing[count++] = type.axis[i];
    if (count) x = ml_reduce(g, ML_OP_SUM, x, missing, count);
    if (ml_graph_type(g, x)->rank < as->rank) x = ml_broadcast(g, x, as);
    return ml_cast(g, ml_permute(g, x, as), as->dtype);
}

static bool wants(const tape *t, ml_ref node, int source) {
    entry *e = find(t, ml_graph_source(t->graph, node, source));
    return e && e->needs;
}

static void accumulate(ml_graph *g, ml_ref *total, ml_ref value) {
    *total = *total ? ml_map2(g, ML_OP_ADD, *total, value) : value;
}

/* Add x to the gradient of a source of `node`. */
static void give(tape *t, ml_ref node, int source, ml_ref x) {
    entry *e = find(t, ml_graph_source(t->graph, node, source));
    ml_type type = *ml_graph_type(t->graph, e->node);
    accumulate(t->graph, &e->gradient[0], reduce_to(t->graph, x, &type));
}

/* What the rules are made of: the column GRADIENT of ops.def. */
#define NEG(x) ml_map1(G, ML_OP_NEG, x)
#define ADD(x, z) ml_map2(G, ML_OP_ADD, x, z)
#define SUB(x, z) ml_map2(G, ML_OP_SUB, x, z)
#define MUL(x, z) ml_map2(G, ML_OP_MUL, x, z)
#define DIV(x, z) ml_map2(G, ML_OP_DIV, x, z)
#define FN(op, x) ml_map1(G, ML_OP_##op, x)
#define FN2(op, x, z) ml_map2(G, ML_OP_##op, x, z)
#define NUM(v) ml_const(G, dtype, v)
#define WHERE(test, x, z) ml_where(G, test, x, z)
#define TIE(x, z) WHERE(FN2(EQ, x, z), MUL(NUM(0.5), g), NUM(0)) /* equal operands share evenly */
#define AXIS(i) ((ml_axis)ml_graph_args(G, n)[i])
#define FLAT ((void)0)
#define GIVE(source, value) ((void)(wants(t, n, source) ? give(t, n, source, value) : (void)0))

/* y = a^b. The powers and logarithms of 0 that the limits multiply by 0 are left out, as PyTorch
 * does: a^0 is flat in a, and 0^b flat in b for b >= 0 (0^0 too). */
static void pow_rule(tape *t, ml_ref n, ml_ref g) {
    ml_graph *G = t->graph;
    ml_dtype dtype = ml_graph_type(G, n)->dtype;
    ml_ref y = n, a = ml_graph_source(G, n, 0), b = ml_graph_source(G, n, 1);
    ml_ref zero_power = FN2(EQ, b, NUM(0)), power = WHERE(zero_power, NUM(1), b);
    GIVE(0, MUL(g, MUL(FN2(POW, a, SUB(power, NUM(1))), b)));
    ml_ref both = FN2(AND, FN2(EQ, a, NUM(0)), zero_power);
    ml_ref flat = FN2(OR, FN2(EQ, y, NUM(0)), both);
    GIVE(1, MUL(MUL(g, y), FN(LOG, WHERE(flat, NUM(1), a))));
}

/* 1 / sqrt(1 + a^2) without a^2, which overflows: both terms are divided by max(1, |a|)^2. */
static ml_ref asinh_slope(tape *t, ml_ref a) {
    ml_graph *G = t->graph;
    ml_dtype dtype = ml_graph_type(G, a)->dtype;
    ml_ref size = FN(ABS, a), unit = DIV(NUM(1), FN2(MAXIMUM, NUM(1), size));
    ml_ref part = FN2(MINIMUM, NUM(1), size);
    return MUL(unit, FN(RSQRT, ADD(MUL(unit, unit), MUL(part, part))));
}

/* Whether the product of left and right over what `as` lacks has the axes of `as` in its order:
 * those that both have, then the left's, then the right's. */
static bool gives_order(const ml_graph *g, ml_ref left, ml_ref right, const ml_type *as) {
    const ml_type *a = ml_graph_type(g, left), *b = ml_graph_type(g, right);
    int at = 0;
    for (int shared = 1; shared >= 0; shared--)
        for (int i = 0; i < a->rank; i++)
            if (ml_type_find(as, a->axis[i]) >= 0 && (ml_type_find(b, a->axis[i]) >= 0) == shared &&
                as->axis[at++] != a->axis[i])
                return false;
    for (int i = 0; i < b->rank; i++)
        if (ml_type_find(as, b->axis[i]) >= 0 && ml_type_find(a, b->axis[i]) < 0 &&
            as->axis[at++] != b->axis[i])
            return false;
    return true;
}

/* y = sum of a b over axes. The gradient of one operand contracts the other with g over the axes
 * that the other alone brought into the result. Operands of the products keep the dtype of the
 * forward product's operands, so a bf16 product has bf16 gradients whatever it accumulated in. */
static void dot_operand_rule(tape *t, ml_ref n, ml_ref g, int operand) {
    ml_graph *G = t->graph;
    if (!wants(t, n, operand)) return;
    ml_ref self = ml_graph_source(G, n, operand), other = ml_graph_source(G, n, 1 - operand);
    ml_type type = *ml_graph_type(G, self), brought = *ml_graph_type(G, other);
    ml_axis axes[ML_MAX_AXES];
    int count = 0;
    for (int i = 0; i < brought.rank; i++)
        if (ml_type_find(&type, brought.axis[i]) < 0) axes[count++] = brought.axis[i];
    g = ml_cast(G, g, ml_wider(type.dtype, brought.dtype));
    if (count == 0) { /* an outer product */
        give(t, n, operand, MUL(ml_broadcast(G, g, &type), ml_broadcast(G, other, &type)));
        return;
    }
    ml_ref left = operand == 0 ? g : other, right = operand == 0 ? other : g;
    if (!gives_order(G, left, right, &type) && gives_order(G, right, left, &type)) {
        ml_ref swap = left;
        left = right, right = swap;
    }
    ml_ref made = ml_dot(G, left, right, axes, count, type.dtype);
    ml_graph_mark(G, made, ml_graph_node(G, n)->flags & ML_NODE_FP8);
    give(t, n, operand, made);
}

static void dot_rule(tape *t, ml_ref n, ml_ref g) {
    dot_operand_rule(t, n, g, 0);
    dot_operand_rule(t, n, g, 1);
}

/* Max or min over axes: equal extremes share the gradient evenly. */
static void extreme_rule(tape *t, ml_ref n, ml_ref g) {
    ml_graph *G = t->graph;
    ml_ref a = ml_graph_source(G, n, 0);
    ml_dtype dtype = ml_graph_type(G, n)->dtype;
    ml_axis axes[ML_MAX_AXES];
    int count = ml_graph_node(G, n)->arg_count;
    for (int i = 0; i < count; i++) axes[i] = (ml_axis)ml_graph_args(G, n)[i];
    ml_ref hit = FN2(EQ, a, n);
    ml_ref hits = ml_reduce(G, ML_OP_SUM, ml_cast(G, hit, ML_F32), axes, count);
    give(t, n, 0, WHERE(hit, DIV(g, ml_cast(G, hits, dtype)), NUM(0)));
}

static void concat_rule(tape *t, ml_ref n, ml_ref g) {
    ml_graph *G = t->graph;
    ml_axis axis = (ml_axis)ml_graph_args(G, n)[0];
    int count = ml_graph_node(G, n)->source_count;
    int64_t start = 0;
    for (int i = 0; i < count; i++) {
        const ml_type *type = ml_graph_type(G, ml_graph_source(G, n, i));
        int64_t size = ml_type_size(type, axis);
        GIVE(i, ml_slice(G, g, axis, start, start + size));
        start += size;
    }
}

static ml_ref rename_back(ml_graph *G, ml_ref n, ml_ref g) {
    int count = ml_graph_node(G, n)->arg_count;
    int64_t args[2 * ML_MAX_AXES];
    const int64_t *forward = ml_graph_args(G, n);
    for (int i = 0; i + 1 < count; i += 2) args[i] = forward[i + 1], args[i + 1] = forward[i];
    return ml_graph_add(G, ML_OP_RENAME, &g, 1, args, count, NULL);
}

/* A gradient has the placement of its value. */
static ml_ref place_back(ml_graph *G, ml_ref n, ml_ref g) {
    return ml_graph_add(G, ML_OP_PLACE, &g, 1, ml_graph_args(G, n), ml_graph_node(G, n)->arg_count,
                        NULL);
}

static ml_ref cumsum_back(ml_graph *G, ml_ref n, ml_ref g) {
    const int64_t args[] = {AXIS(0), !ml_graph_args(G, n)[1]};
    return ml_graph_add(G, ML_OP_CUMSUM, &g, 1, args, 2, NULL);
}

/* result[.., i, ..] = a[.., index[.., i, ..], ..]: each element of g is added at its index. The
 * axis is renamed first: in the sum it counts the positions in the result. */
static ml_ref sort_back(ml_graph *G, ml_ref n, ml_ref g) {
    ml_axis axis = (ml_axis)ml_graph_args(G, n)[0];
    ml_axis position = ml_axis_fresh(G, "position");
    ml_type type = *ml_graph_type(G, ml_graph_source(G, n, 0));
    ml_ref index = ml_rename(G, ml_out(G, n, 1), axis, position);
    return ml_scatter_add(G, index, ml_rename(G, g, axis, position), axis, &type);
}

/* Up to this many elements a comparison with every index is cheaper than a scatter. */
enum { COMPARED_AXIS = 512 };

static ml_ref top_k_back(ml_graph *G, ml_ref n, ml_ref g) {
    const int64_t *args = ml_graph_args(G, n);
    ml_axis axis = (ml_axis)args[0], chosen = (ml_axis)args[2];
    int64_t k = args[1];
    ml_type type = *ml_graph_type(G, ml_graph_source(G, n, 0));
    int64_t size = ml_type_size(&type, axis);
    ml_ref index = ml_out(G, n, 1);
    if (size > COMPARED_AXIS || type.rank == ML_MAX_AXES)
        return ml_scatter_add(G, index, g, axis, &type);
    ml_type all = type;
    all.axis[all.rank] = chosen;
    all.size[all.rank++] = k;
    ml_dtype dtype = type.dtype;
    ml_type indices = all;
    indices.dtype = ML_I32;
    ml_ref hit = FN2(EQ, ml_broadcast(G, index, &indices), ml_iota(G, axis, size));
    return ml_reduce(G, ML_OP_SUM, WHERE(hit, ml_broadcast(G, g, &all), NUM(0)), &chosen, 1);
}

static ml_ref slice_back(ml_graph *G, ml_ref n, ml_ref g) {
    const int64_t *args = ml_graph_args(G, n);
    int64_t size = ml_type_size(ml_graph_type(G, ml_graph_source(G, n, 0)), AXIS(0));
    return ml_pad(G, g, AXIS(0), args[1], size - args[2]);
}

static ml_ref pad_back(ml_graph *G, ml_ref n, ml_ref g) {
    const int64_t before = ml_graph_args(G, n)[1];
    int64_t size = ml_type_size(ml_graph_type(G, ml_graph_source(G, n, 0)), AXIS(0));
    return ml_slice(G, g, AXIS(0), before, before + size);
}

static ml_ref merge_back(ml_graph *G, ml_ref n, ml_ref g) {
    const ml_type *type = ml_graph_type(G, ml_graph_source(G, n, 0));
    return ml_split(G, g, AXIS(2), AXIS(0), ml_type_size(type, AXIS(0)), AXIS(1),
                    ml_type_size(type, AXIS(1)));
}

/* Of output i >= 1: its op's rule takes the cotangents of all outputs. */
static void out_rule(tape *t, ml_ref n, ml_ref g) {
    entry *e = find(t, ml_graph_source(t->graph, n, 0));
    accumulate(t->graph, &e->gradient[ml_graph_args(t->graph, n)[0]], g);
}

/* No two indices are equal. */
static void write_rows_rule(tape *t, ml_ref n, ml_ref g) {
    ml_graph *G = t->graph;
    ml_ref index = ml_graph_source(G, n, 1), value = ml_graph_source(G, n, 2);
    ml_axis axis = (ml_axis)ml_graph_args(G, n)[0];
    ml_type type = *ml_graph_type(G, value);
    ml_ref none = ml_broadcast(G, ml_const(G, (ml_dtype)type.dtype, 0), &type);
    GIVE(0, ml_write_rows(G, g, index, none, axis));
    GIVE(2, ml_permute(G, ml_gather(G, g, index, axis), &type));
}

/* ---- For the interfaces of ops (gradient.h) ---------------------------------------------------
 */

ml_graph *gradient_graph(const tape *t) {
    return t->graph;
}
ml_arena *gradient_scratch(const tape *t) {
    return t->scratch;
}
bool gradient_wants(const tape *t, ml_ref n, int i) {
    return wants(t, n, i);
}
void gradient_give(tape *t, ml_ref n, int i, ml_ref x) {
    GIVE(i, x);
}

void gradient_pull_back(void *context, const ml_ref *roots, const ml_ref *cotangents,
                        int root_count, const ml_ref *wrt, int wrt_count, ml_ref *gradients) {
    tape *t = context;
    product p = {roots, cotangents, root_count, wrt, wrt_count, true};
    backward(t->graph, t->scratch, &p, gradients);
}

void gradient_of_definition(tape *t, ml_ref n, const ml_ref *cotangents) {
    ml_graph *G = t->graph;
    ml_ref outputs[ML_MAX_OUTPUTS], roots[ML_MAX_OUTPUTS], given[ML_MAX_OUTPUTS];
    int count = ml_graph_node(G, n)->source_count, output_count = ml_op_outputs(G, n), used = 0;
    ml_op_interface_of((ml_op)ml_graph_node(G, n)->op)->define(G, n, outputs);
    for (int i = 0; i < output_count; i++)
        if (cotangents[i]) {
            ml_type type = *ml_graph_type(G, outputs[i]);
            roots[used] = outputs[i], given[used++] = reduce_to(G, cotangents[i], &type);
        }
    ml_ref *sources = ML_NEW_ARRAY(t->scratch, ml_ref, count);
    ml_ref *gradients = ML_NEW_ARRAY(t->scratch, ml_ref, count);
    memcpy(sources, ml_graph_sources(G, n), sizeof(ml_ref) * (size_t)count);
    product inner = {roots, given, used, sources, count, true};
    backward(G, t->scratch, &inner, gradients);
    for (int i = 0; i < count; i++) /* the same tensor may come twice: its gradient is the whole */
        if (gradients[i] && !contains(sources, i, sources[i])) GIVE(i, gradients[i]);
}

ml_ref gradient_parameter(tape *t, ml_ref root, int64_t index) {
    tape function = {.graph = t->graph, .scratch = t->scratch, .index = {.arena = t->scratch}};
    collect(&function, &(product){.roots = &root, .root_count = 1});
    for (uint32_t i = 0; i < function.entries.count; i++) {
        ml_ref node = function.entries.at[i].node;
        if (ml_graph_node(t->graph, node)->op == ML_OP_PARAM &&
            ml_graph_args(t->graph, node)[0] == index)
            return node;
    }
    return 0;
}

static _Noreturn void after_sharding(ml_op op) {
    ml_raise(ML_INTERNAL, "%s has no gradient: sharding comes after autodiff", ml_ops[op].name);
}

/* Add the gradients of n's operands. The names here are those of the column's expressions. */
static void apply_rule(tape *t, ml_ref n, const ml_ref *cotangents) {
    ml_graph *G = t->graph;
    const ml_op op = ml_graph_node(G, n)->op;
    const ml_ref y = n, g = cotangents[0], a = ml_graph_source(G, n, 0);
    const ml_ref b = ml_graph_node(G, n)->source_count > 1 ? ml_graph_source(G, n, 1) : 0;
    const ml_dtype dtype = ml_graph_type(G, n)->dtype;
    const ml_type type = *ml_graph_type(G, a);
    switch (op) {
#define ML_OP(ident, name, op_class, sources, outputs, rule, flops, linear, traits, operands,      \
              args, gradient, doc)                                                                 \
    case ML_OP_##ident:                                                                            \
        (void)(gradient);                                                                          \
        break;
#include "runtime/graph/ops.def"
#undef ML_OP
    case ML_OP_COUNT: break;
    }
}

/* A gradient has the dtype of its value: in 8 bits most would round to 0. */
static void require_wide(const ml_graph *g, ml_ref node) {
    const ml_dtype_info *dtype = &ml_dtypes[ml_graph_type(g, node)->dtype];
    if (dtype->kind != ML_KIND_FLOAT || dtype->bytes > 1) return;
    ml_fail(ML_INVALID, "no gradient passes through %s, which holds values to be read alone",
            dtype->name);
    ml_error_last()->operands[0] = node;
    ml_error_last()->operand_count = 1;
    ml_help("y = x + m.stop_gradient(x:cast(\"%s\"):cast(x:dtype()) - x) rounds x and passes its "
            "gradient on",
            dtype->name);
    ml_raise_last();
}

static void backward(ml_graph *g, ml_arena *scratch, const product *p, ml_ref *gradients) {
    const uint32_t outer = g->origin; /* of a rule that pulls back through a function of its own */
    tape t = {.graph = g, .scratch = scratch, .index = {.arena = scratch}};
    collect(&t, p);
    mark_needs(&t, p);
    for (int i = 0; i < p->root_count; i++) {
        entry *e = find(&t, p->roots[i]);
        if (e->needs) accumulate(g, &e->gradient[0], p->cotangents[i]);
    }
    for (uint32_t i = 0; i < t.entries.count; i++) {
        entry *e = &t.entries.at[i];
        bool given = false;
        for (int o = 0; o < e->outputs; o++) given = given || e->gradient[o];
        if (!e->needs || !given) continue;
        require_wide(g, e->node);
        if (p->stop_at_wrt && contains(p->wrt, p->wrt_count, e->node)) continue;
        if (ml_graph_node(g, e->node)->source_count == 0) continue;
        ml_origin origin = *ml_graph_origin(g, e->node);
        ml_graph_set_origin(g, &origin);
        apply_rule(&t, e->rule, e->gradient);
    }
    for (int i = 0; i < p->wrt_count; i++) {
        entry *e = find(&t, p->wrt[i]);
        gradients[i] = e && e->needs ? e->gradient[0] : 0;
    }
    g->origin = outer;
}

typedef struct {
    ml_graph *graph;
    ml_arena *scratch;
    const product *product;
    ml_ref *gradients;
} pulling;

static void pull(void *argument) {
    pulling *p = argument;
    backward(p->graph, p->scratch, p->product, p->gradients);
}

void ml_pull_back(ml_graph *g, const ml_ref *roots, const ml_ref *cotangents, int root_count,
                  const ml_ref *wrt, int wrt_count, ml_ref *gradients) {
    product p = {roots, cotangents, root_count, wrt, wrt_count, true};
    pulling pulled = {g, ml_arena_new(), &p, gradients};
    if (!pulled.scratch) ml_raise(ML_NO_MEMORY, "no memory left to differentiate the program");
    ml_status status = ml_protect(pull, &pulled);
    ml_arena_free(pulled.scratch);
    if (status != ML_OK) ml_raise_last();
}

typedef struct {
    ml_graph *graph;
    ml_arena *scratch;
    ml_ref loss;
    const ml_ref *wrt;
    int count;
    ml_ref *gradients;
} request;

static void differentiate(void *argument) {
    request *r = argument;
    ml_graph *g = r->graph;
    const ml_type *type = ml_graph_type(g, r->loss);
    if (type->rank || ml_dtypes[type->dtype].kind != ML_KIND_FLOAT) {
        ml_text text = {.arena = r->scratch};
        ml_type_print(g, type, &text);
        ml_fail(ML_INVALID, "cannot differentiate %s: only a float with no axes has a gradient",
                text.text);
        ml_error_last()->operands[0] = r->loss;
        ml_error_last()->operand_count = 1;
        ml_help("sum or average it first: loss:mean()");
        ml_raise_last();
    }
    ml_origin origin = *ml_graph_origin(g, r->loss);
    ml_graph_set_origin(g, &origin);
    ml_graph_set_flags(g, ML_NODE_BACKWARD);
    ml_ref one = ml_const(g, type->dtype, 1);
    product p = {&r->loss, &one, 1, r->wrt, r->count, false};
    backward(g, r->scratch, &p, r->gradients);
    for (int i = 0; i < r->count; i++)
        if (r->gradients[i] && ml_graph_node(g, r->wrt[i])->op == ML_OP_STATE &&
            ml_ops[ml_graph_node(g, r->gradients[i])->op].op_class != ML_CLASS_LEAF)
            ml_graph_mark(g, r->gradients[i], ML_NODE_GRADIENT);
    ml_graph_set_origin(g, &origin);
}

void ml_autodiff(ml_graph *g, ml_ref loss, const ml_ref *wrt, int count, ml_ref *gradients) {
    ml_arena *scratch = ml_arena_new();
    if (!scratch) ml_raise(ML_NO_MEMORY, "no memory left to differentiate the program");
    request r = {g, scratch, loss, wrt, count, gradients};
    ml_status status = ml_protect(differentiate, &r);
    ml_graph_set_flags(g, 0);
    ml_arena_free(scratch);
    if (status != ML_OK) ml_raise_last();
}
