/* A step over rows as text: values of a row, and wide ones, an element for each e along the short
 * axis that a thread holds. Sums over that axis part the text into loops: a node's level is the
 * number of loops that end before it can be computed. */
#include "codegen/kernels/recurrence.h"
#include <string.h>

typedef struct {
    bool wide, array; /* array: a later loop or a result needs it */
    int level;
    const char *text; /* NULL: not computed yet */
    int loop;         /* of a wide parameter: where its text is a local; -1 */
} body_node;

typedef struct {
    ml_text *out;
    ml_arena *arena;
    const ml_graph *g;
    ml_axis axis;
    int64_t size;
    const recurrence_text *parameters;
    const char *prefix;
    ml_refs nodes; /* ascending */
    body_node *info;
} body_printer;

static int place_of(const body_printer *p, ml_ref n) {
    for (uint32_t i = 0; i < p->nodes.count; i++)
        if (p->nodes.at[i] == n) return (int)i;
    return -1;
}

/* Past what repeats or reorders. */
static int value_of(const body_printer *p, ml_ref n) {
    while (ml_graph_node(p->g, n)->op == ML_OP_BROADCAST ||
           ml_graph_node(p->g, n)->op == ML_OP_PERMUTE)
        n = ml_graph_source(p->g, n, 0);
    return place_of(p, n);
}

static ml_op op_of(const body_printer *p, int i) {
    return (ml_op)ml_graph_node(p->g, p->nodes.at[i])->op;
}

/* A SUM, or a DOT with one axis; a DOT without is a product. */
static bool is_sum(const body_printer *p, int i) {
    const ml_node *node = ml_graph_node(p->g, p->nodes.at[i]);
    return (node->op == ML_OP_SUM || node->op == ML_OP_DOT) && node->arg_count > 0;
}

static int operands(const body_printer *p, int i, int out[3]) {
    int count = ml_graph_node(p->g, p->nodes.at[i])->source_count;
    for (int k = 0; k < count && k < 3; k++)
        out[k] = value_of(p, ml_graph_source(p->g, p->nodes.at[i], k));
    return count < 3 ? count : 3;
}

static bool wide_operands(const body_printer *p, int i) {
    int from[3], count = operands(p, i, from);
    for (int k = 0; k < count; k++)
        if (p->info[from[k]].wide) return true;
    return false;
}

static void classify(body_printer *p) {
    for (int i = 0; i < (int)p->nodes.count; i++) {
        body_node *node = &p->info[i];
        int from[3], count = operands(p, i, from);
        node->loop = -1;
        if (op_of(p, i) == ML_OP_PARAM)
            node->wide = p->parameters[ml_graph_args(p->g, p->nodes.at[i])[0]].wide;
        for (int k = 0; k < count; k++) {
            const body_node *source = &p->info[from[k]];
            if (source->level > node->level) node->level = source->level;
            node->wide = node->wide || source->wide;
        }
        if (!is_sum(p, i)) continue;
        node->level += node->wide;
        node->wide = false;
    }
    for (int i = 0; i < (int)p->nodes.count; i++) { /* what later loops read */
        int from[3], count = operands(p, i, from), loop = p->info[i].level - is_sum(p, i);
        for (int k = 0; k < count; k++)
            if (p->info[from[k]].level < loop) p->info[from[k]].array = true;
    }
}

static const char *compute_type(const body_printer *p, int i) {
    return emit_compute_type((ml_dtype)ml_graph_type(p->g, p->nodes.at[i])->dtype);
}

/* A value where it is needed: in loop `level`, or outside of loops. */
static const char *use(body_printer *p, int i, int level) {
    body_node *node = &p->info[i];
    ml_op op = op_of(p, i);
    if (op == ML_OP_CONST) {
        ml_text text = {.arena = p->arena};
        const int64_t *args = ml_graph_args(p->g, p->nodes.at[i]);
        double number;
        memcpy(&number, &args[0], sizeof number);
        emit_constant(&text, (ml_dtype)ml_graph_type(p->g, p->nodes.at[i])->dtype, number, args[0]);
        return text.text;
    }
    if (op == ML_OP_PARAM && (node->wide ? node->loop != level : node->text == NULL)) {
        node->text = ml_arena_format(p->arena, "%sp%d%s", p->prefix, i, node->wide ? "e" : "");
        node->loop = level;
        ml_text_add(p->out, "const %s %s = %s;\n", compute_type(p, i), node->text,
                    p->parameters[ml_graph_args(p->g, p->nodes.at[i])[0]].text);
    }
    if (node->wide && node->array && op != ML_OP_PARAM && node->level != level)
        return ml_arena_format(p->arena, "%sa%d[e]", p->prefix, i);
    return node->text;
}

static void print_map(body_printer *p, int i, int level) {
    int from[3], count = operands(p, i, from);
    const char *texts[3] = {"", "", ""};
    ml_ref n = p->nodes.at[i];
    ml_dtype dtype = (ml_dtype)ml_graph_type(p->g, n)->dtype;
    for (int k = 0; k < count; k++) texts[k] = use(p, from[k], level);
    ml_op op = op_of(p, i) == ML_OP_DOT ? ML_OP_MUL : op_of(p, i);
    p->info[i].text = ml_arena_format(p->arena, "%sv%d", p->prefix, i);
    ml_text_add(p->out, "const %s %s = ", compute_type(p, i), p->info[i].text);
    ml_dtype first = (ml_dtype)ml_graph_type(p->g, ml_graph_source(p->g, n, 0))->dtype;
    ml_emit_map(p->out, op, dtype, op_of(p, i) == ML_OP_DOT ? dtype : first, texts);
    ml_text_add(p->out, ";\n");
    if (p->info[i].wide && p->info[i].array)
        ml_text_add(p->out, "%sa%d[e] = %s;\n", p->prefix, i, p->info[i].text);
}

/* One term of a sum, or all of them, which are equal. */
static void print_term(body_printer *p, int i, int level, bool all) {
    int from[3], count = operands(p, i, from);
    const char *a = use(p, from[0], level), *b = count > 1 ? use(p, from[1], level) : NULL;
    const char *name = ml_arena_format(p->arena, "%ss%d", p->prefix, i);
    if (all)
        ml_text_add(p->out, "const %s %s = %lld * ", compute_type(p, i), name, (long long)p->size);
    else
        ml_text_add(p->out, "%s += ", name);
    ml_text_add(p->out, b ? "%s * %s;\n" : "%s;\n", a, b);
    p->info[i].text = name;
}

static bool computes(const body_printer *p, int i) {
    ml_op op = op_of(p, i);
    return op != ML_OP_PARAM && op != ML_OP_CONST && op != ML_OP_BROADCAST && op != ML_OP_PERMUTE;
}

/* Whether a node belongs to loop `level`: a wide one, or the terms of a sum. */
static bool in_loop(const body_printer *p, int i, int level) {
    if (!computes(p, i)) return false;
    if (is_sum(p, i)) return wide_operands(p, i) && p->info[i].level == level + 1;
    return p->info[i].wide && p->info[i].level == level;
}

static void print_level(body_printer *p, int level) {
    bool loops = false;
    for (int i = 0; i < (int)p->nodes.count; i++) {
        const body_node *node = &p->info[i];
        bool narrow = computes(p, i) && !node->wide && node->level == level;
        if (narrow && !is_sum(p, i)) print_map(p, i, -1);
        if (narrow && is_sum(p, i) && !wide_operands(p, i)) print_term(p, i, -1, true);
        if (!in_loop(p, i, level)) continue;
        loops = true;
        if (is_sum(p, i))
            ml_text_add(p->out, "%s %ss%d = 0;\n", compute_type(p, i), p->prefix, i);
        else if (node->array)
            ml_text_add(p->out, "%s %sa%d[N];\n", compute_type(p, i), p->prefix, i);
    }
    if (!loops) return;
    for (int i = 0; i < (int)p->nodes.count; i++) { /* before the loop: it may be the first use */
        int from[3], count = in_loop(p, i, level) ? operands(p, i, from) : 0;
        for (int k = 0; k < count; k++)
            if (!p->info[from[k]].wide) (void)use(p, from[k], -1);
    }
    ml_text_add(p->out, "_Pragma(\"unroll\") for (int e = 0; e < N; e++) {\n");
    for (int i = 0; i < (int)p->nodes.count; i++) {
        if (!in_loop(p, i, level)) continue;
        if (is_sum(p, i))
            print_term(p, i, level, false);
        else
            print_map(p, i, level);
    }
    ml_text_add(p->out, "}\n");
}

void recurrence_body_print(ml_text *out, const ml_graph *g, ml_axis axis, int64_t size,
                           const recurrence_text *parameters, const ml_ref *roots, int count,
                           const char *prefix, recurrence_text *results) {
    body_printer p = {.out = out,
                      .arena = out->arena,
                      .g = g,
                      .axis = axis,
                      .size = size,
                      .parameters = parameters,
                      .prefix = prefix};
    for (int i = 0; i < count; i++) {
        ml_refs body = {0};
        graph_reach(g, roots[i], p.arena, &body);
        for (uint32_t k = 0; k < body.count; k++)
            if (place_of(&p, body.at[k]) < 0) *ML_PUSH(p.arena, &p.nodes) = body.at[k];
    }
    graph_sort(&p.nodes);
    p.info = ML_NEW_ARRAY(p.arena, body_node, p.nodes.count + 1);
    classify(&p);
    int levels = 0;
    for (int i = 0; i < count; i++) {
        body_node *node = &p.info[value_of(&p, roots[i])];
        node->array =
            node->array || (node->wide && op_of(&p, value_of(&p, roots[i])) != ML_OP_PARAM);
        if (node->level > levels) levels = node->level;
    }
    for (int level = 0; level <= levels; level++) print_level(&p, level);
    for (int i = 0; i < count; i++) {
        int at = value_of(&p, roots[i]);
        results[i].wide = p.info[at].wide;
        if (op_of(&p, at) == ML_OP_PARAM)
            results[i].text = parameters[ml_graph_args(g, p.nodes.at[at])[0]].text;
        else
            results[i].text = p.info[at].wide ? ml_arena_format(p.arena, "%sa%d[e]", prefix, at)
                                              : use(&p, at, -1);
    }
}
