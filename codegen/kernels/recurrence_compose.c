/* Whether positions of a recurrence by elements compose: the next value of a state is a function of
 * it alone that has two numbers, and so has one after the other. In the affine algebra it is slope
 * x + offset: the state may be added, subtracted, scaled by what does not depend on it, selected.
 * In max-plus it is max(x + slope, offset): the state may be moved by what does not depend on it,
 * compared, selected (a running maximum, mLSTM's stabiliser max(f + m, i)). */
#include "codegen/kernels/recurrence.h"

enum { NO_FACTOR = -1, NO_FORM = -2 };

typedef struct {
    const ml_graph *g;
    bool max_plus;
    ml_refs nodes; /* ascending */
    bool *depends; /* by node: on the state */
} step_body;

static int place_of(const step_body *b, ml_ref n) {
    for (uint32_t i = 0; i < b->nodes.count; i++)
        if (b->nodes.at[i] == n) return (int)i;
    return -1;
}

static bool source_depends(const step_body *b, ml_ref n, int k) {
    return b->depends[place_of(b, ml_graph_source(b->g, n, k))];
}

/* Which source scales (moves) or selects the others; NO_FACTOR: none. NO_FORM: the node is no such
 * function of the state. */
static int affine_factor(const step_body *b, ml_ref n) {
    ml_op op = (ml_op)ml_graph_node(b->g, n)->op;
    if (op == ML_OP_ADD || op == ML_OP_SUB || op == ML_OP_NEG) return NO_FACTOR;
    if (op == ML_OP_DIV) return source_depends(b, n, 1) ? NO_FORM : 1;
    if (op != ML_OP_MUL) return NO_FORM;
    bool left = source_depends(b, n, 0), right = source_depends(b, n, 1);
    return left && right ? NO_FORM : left ? 1 : 0;
}

static int max_plus_factor(const step_body *b, ml_ref n) {
    ml_op op = (ml_op)ml_graph_node(b->g, n)->op;
    if (op == ML_OP_MAXIMUM) return NO_FACTOR;
    if (op == ML_OP_SUB) return source_depends(b, n, 1) ? NO_FORM : 1;
    if (op != ML_OP_ADD) return NO_FORM;
    bool left = source_depends(b, n, 0), right = source_depends(b, n, 1);
    return left && right ? NO_FORM : left ? 1 : 0;
}

static int factor_of(const step_body *b, ml_ref n) {
    ml_op op = (ml_op)ml_graph_node(b->g, n)->op;
    if (op == ML_OP_BROADCAST || op == ML_OP_PERMUTE) return NO_FACTOR;
    if (op == ML_OP_WHERE) return source_depends(b, n, 0) ? NO_FORM : 0;
    return b->max_plus ? max_plus_factor(b, n) : affine_factor(b, n);
}

static void find_body(step_body *b, const ml_graph *g, ml_ref root, int parameter, bool max_plus,
                      ml_arena *arena) {
    *b = (step_body){.g = g, .max_plus = max_plus};
    graph_reach(g, root, arena, &b->nodes);
    b->depends = ML_NEW_ARRAY(arena, bool, b->nodes.count + 1);
    for (uint32_t i = 0; i < b->nodes.count; i++) {
        const ml_node *node = ml_graph_node(g, b->nodes.at[i]);
        if (node->op == ML_OP_PARAM)
            b->depends[i] = ml_graph_args(g, b->nodes.at[i])[0] == parameter;
        for (int k = 0; k < node->source_count; k++)
            b->depends[i] |= source_depends(b, b->nodes.at[i], k);
    }
}

static bool reads(const ml_graph *g, ml_ref root, int parameter, ml_arena *arena) {
    step_body b;
    find_body(&b, g, root, parameter, false, arena);
    return b.nodes.count > 0 && b.depends[b.nodes.count - 1];
}

bool recurrence_has_form(const ml_graph *g, ml_ref root, int parameter, bool max_plus,
                         ml_arena *arena, ml_refs *factors) {
    step_body b;
    find_body(&b, g, root, parameter, max_plus, arena);
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, root)->dtype;
    if (dtype != ML_F32 && dtype != ML_F64) return false;
    for (uint32_t i = 0; i < b.nodes.count; i++) {
        ml_ref n = b.nodes.at[i];
        if (!b.depends[i]) continue;
        if ((ml_dtype)ml_graph_type(g, n)->dtype != dtype) return false;
        if (ml_graph_node(g, n)->op == ML_OP_PARAM) continue;
        int factor = factor_of(&b, n);
        if (factor == NO_FORM) return false;
        if (factor >= 0) *ML_PUSH(arena, factors) = ml_graph_source(g, n, factor);
    }
    return true;
}

static void print_affine(ml_text *out, ml_op op, const char *const of[3], const char *factor,
                         int which) {
    if (op == ML_OP_ADD || op == ML_OP_SUB)
        ml_text_add(out, "%s %s %s;\n", of[0], op == ML_OP_ADD ? "+" : "-", of[1]);
    else if (op == ML_OP_MUL)
        ml_text_add(out, "%s * %s;\n", factor, which == 0 ? of[1] : of[0]);
    else if (op == ML_OP_DIV)
        ml_text_add(out, "%s / %s;\n", of[0], factor);
    else
        ml_text_add(out, "%s%s;\n", op == ML_OP_NEG ? "-" : "", of[0]);
}

static void print_max_plus(ml_text *out, ml_op op, const char *const of[3], const char *factor,
                           int which) {
    if (op == ML_OP_ADD || op == ML_OP_SUB)
        ml_text_add(out, "%s %s %s;\n", which == 0 ? of[1] : of[0], op == ML_OP_ADD ? "+" : "-",
                    factor);
    else if (op == ML_OP_MAXIMUM)
        ml_text_add(out, "ml_max::of(%s, %s);\n", of[0], of[1]);
    else
        ml_text_add(out, "%s;\n", of[0]);
}

/* Texts of factors are in the order in which recurrence_has_form finds them. */
const char *recurrence_slope(ml_text *out, const ml_graph *g, ml_ref root, int parameter,
                             bool max_plus, const char *const *factors, const char *prefix) {
    step_body b;
    ml_arena *arena = out->arena;
    find_body(&b, g, root, parameter, max_plus, arena);
    const char *zero = max_plus ? "NO_SLOPE" : "0", *one = max_plus ? "0" : "1";
    const char **slope = ML_NEW_ARRAY(arena, const char *, b.nodes.count + 1);
    const char *type = emit_compute_type((ml_dtype)ml_graph_type(g, root)->dtype);
    for (uint32_t i = 0; i < b.nodes.count; i++) {
        ml_ref n = b.nodes.at[i];
        ml_op op = (ml_op)ml_graph_node(g, n)->op;
        slope[i] = op == ML_OP_PARAM && b.depends[i] ? one : zero;
        if (!b.depends[i] || op == ML_OP_PARAM) continue;
        const char *of[3] = {zero, zero, zero};
        for (int k = 0; k < ml_graph_node(g, n)->source_count && k < 3; k++)
            of[k] = slope[place_of(&b, ml_graph_source(g, n, k))];
        int which = factor_of(&b, n);
        const char *factor = which >= 0 ? *factors++ : "";
        slope[i] = ml_arena_format(arena, "%s%u", prefix, i);
        ml_text_add(out, "const %s %s = ", type, slope[i]);
        if (op == ML_OP_WHERE)
            ml_text_add(out, "%s ? %s : %s;\n", factor, of[1], of[2]);
        else
            (max_plus ? print_max_plus : print_affine)(out, op, of, factor, which);
    }
    return b.nodes.count ? slope[b.nodes.count - 1] : zero;
}

bool recurrence_composes(const ml_graph *g, ml_ref n, ml_arena *arena, uint32_t *max_plus,
                         ml_refs *factors) {
    ml_recurrence r;
    ml_recurrence_read(g, n, &r);
    *max_plus = 0;
    if (r.states == 0 || r.states > 31) return false;
    for (int i = 0; i < r.states; i++) {
        ml_ref root = ml_recurrence_root(g, n, i);
        ml_refs affine = {0}, other = {0};
        bool linear = recurrence_has_form(g, root, r.inputs + i, false, arena, &affine);
        if (!linear && !recurrence_has_form(g, root, r.inputs + i, true, arena, &other))
            return false;
        for (int k = 0; k < r.states; k++)
            if (k != i && reads(g, root, r.inputs + k, arena)) return false;
        if (!linear) *max_plus |= 1u << i;
        const ml_refs *own = linear ? &affine : &other;
        for (uint32_t k = 0; k < own->count; k++) *ML_PUSH(arena, factors) = own->at[k];
    }
    return true;
}

const char *ml_recurrence_algebra(const ml_graph *g, ml_ref n) {
    ml_recurrence r;
    ml_refs factors = {0};
    uint32_t max_plus;
    ml_recurrence_read(g, n, &r);
    if (!ml_recurrence_elementwise(g, n)) return NULL;
    if (!recurrence_composes(g, n, ml_graph_arena((ml_graph *)g), &max_plus, &factors)) return NULL;
    if (max_plus == 0) return "affine";
    return max_plus == (1u << r.states) - 1 ? "max-plus" : "affine and max-plus";
}
