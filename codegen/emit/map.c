/* Expressions of elementwise ops, from the ops table, and closed functions of a graph. */
#include "codegen/emit/emit.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

static void add_cast(ml_text *out, ml_dtype to, ml_dtype from, const char *a) {
    const char *type = emit_compute_type(to);
    bool truncates = ml_dtypes[to].kind == ML_KIND_INT && ml_dtypes[from].kind == ML_KIND_FLOAT;
    if (to == from)
        ml_text_add(out, "%s", a);
    else if (to == ML_BOOL)
        ml_text_add(out, "(%s != 0)", a);
    else if (ml_is_narrow(to))
        ml_text_add(out, "ml_round_%s((%s)%s)", ml_dtypes[to].name, type, a);
    else if (truncates)
        ml_text_add(out, "ml_%s_of_%s(%s)", ml_suffix(to), ml_suffix(from), a);
    else if (strcmp(type, emit_compute_type(from)) == 0)
        ml_text_add(out, "%s", a);
    else
        ml_text_add(out, "(%s)%s", type, a);
}

static size_t word_length(const char *at) {
    size_t length = 0;
    while (at[length] == '_' || isalnum((unsigned char)at[length])) length++;
    return length;
}

/* Substitute operands for the words a, b, c, and functions for the type for words with '@':
 * ml_exp@ is a function of the preludes, erfc@ that of <math.h>. */
static void add_expression(ml_text *out, const char *expression, const char *suffix,
                           const char *const *operands) {
    for (const char *at = expression; *at != 0;) {
        size_t length = word_length(at);
        if (length == 0)
            ml_text_add(out, "%c", *at++);
        else if (at[length] == '@' && strncmp(at, "ml_", 3) == 0)
            ml_text_add(out, "%.*s_%s", (int)length, at, suffix);
        else if (at[length] == '@')
            ml_text_add(out, "ML_MATH_%s(%.*s)", suffix, (int)length, at);
        else if (length == 1 && *at >= 'a' && *at <= 'c')
            ml_text_add(out, "%s", operands[*at - 'a']);
        else
            ml_text_add(out, "%.*s", (int)length, at);
        at += length + (length > 0 && at[length] == '@');
    }
}

void ml_emit_map(ml_text *out, ml_op op, ml_dtype dtype, ml_dtype from,
                 const char *const *operands) {
    const ml_op_info *info = &ml_ops[op];
    if (info->op_class != ML_CLASS_MAP)
        ml_raise(ML_INTERNAL, "cannot print %s as an expression: it is not elementwise",
                 info->name);
    /* Comparisons are computed in the type of what they compare; a bool computes as i32. */
    ml_dtype computed = info->rule == ML_RULE_TEST ? from : dtype;
    if (op == ML_OP_CAST)
        add_cast(out, dtype, from, operands[0]);
    else if (op == ML_OP_RANDOM)
        ml_text_add(out, "ml_random_%s(%s, %s)", ml_suffix(dtype), operands[0], operands[1]);
    else
        add_expression(out, info->expression, ml_suffix(computed), operands);
}

/* One function's printing. Names count from 0, so that the text does not depend on node numbers;
 * `known` maps a node's number to its place in nodes and names. */
typedef struct {
    ml_text *out;
    const ml_function *f;
    const char *prefix;
    ml_index known;
    ML_VEC(const char *) names;
} function_printer;

/* 1 or 0 for a bool that is known, else -1. */
static int known_bool(const ml_function *f, ml_ref n) {
    for (int i = 0; i < f->known_count; i++)
        if (f->known[i] == n) return f->holds[i];
    const ml_node *node = ml_graph_node(f->g, n);
    if (ml_op_is(node->op, ML_RELABEL)) return known_bool(f, ml_graph_source(f->g, n, 0));
    if (node->op != ML_OP_CONST || ml_graph_type(f->g, n)->dtype != ML_BOOL) return -1;
    return ml_graph_args(f->g, n)[0] != 0;
}

/* every value here is a scalar at one query and key: repeating or renaming changes nothing */
ml_ref ml_function_strip(const ml_function *f, ml_ref n) {
    for (;;) {
        int op = ml_graph_node(f->g, n)->op, chosen = -1;
        if (op == ML_OP_WHERE) {
            int holds = known_bool(f, ml_graph_source(f->g, n, 0));
            chosen = holds < 0 ? -1 : holds ? 1 : 2;
        } else if (ml_op_is(op, ML_RELABEL))
            chosen = 0;
        if (chosen < 0) return n;
        n = ml_graph_source(f->g, n, chosen);
    }
}

static const char *function_leaf(const function_printer *p, ml_ref n) {
    const ml_function *f = p->f;
    const int64_t *args = ml_graph_args(f->g, n);
    const ml_type *type = ml_graph_type(f->g, n);
    const ml_op op = ml_graph_node(f->g, n)->op;
    if (op == ML_OP_PARAM) return f->values[args[0]];
    if (op == ML_OP_IOTA) return f->index_of(f->context, (ml_axis)args[0]);
    if (op != ML_OP_CONST) return NULL;
    ml_text text = {.arena = p->out->arena};
    double number;
    memcpy(&number, &args[0], sizeof number);
    emit_constant(&text, (ml_dtype)type->dtype, number, args[0]);
    return text.text;
}

static const char *function_value(function_printer *p, ml_ref n);

static const char *function_map(function_printer *p, ml_ref n) {
    const ml_graph *g = p->f->g;
    const ml_node *node = ml_graph_node(g, n);
    const ml_ref *sources = ml_graph_sources(g, n);
    if (!ml_op_is_function(node->op))
        ml_raise(ML_INVALID, "a score function can only compute elementwise, and %s is not",
                 ml_ops[node->op].name);
    const char *operands[3] = {"", "", ""};
    for (int i = 0; i < node->source_count && i < 3; i++)
        operands[i] = function_value(p, sources[i]);
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, n)->dtype;
    const char *name = ml_arena_format(p->out->arena, "%s%u", p->prefix, p->names.count);
    const bool rounds =
        ml_is_narrow(dtype) && node->op != ML_OP_CAST && !ml_op_is(node->op, ML_EXACT);
    ml_text_add(p->out, "const %s %s = ", emit_compute_type(dtype), name);
    if (rounds) ml_text_add(p->out, "ml_round_%s(", ml_dtypes[dtype].name);
    ml_emit_map(p->out, (ml_op)node->op, dtype, (ml_dtype)ml_graph_type(g, sources[0])->dtype,
                operands);
    ml_text_add(p->out, rounds ? ");\n" : ";\n");
    return name;
}

static const char *function_value(function_printer *p, ml_ref n) {
    n = ml_function_strip(p->f, n);
    int holds = known_bool(p->f, n);
    if (holds >= 0) return holds ? "1" : "0";
    uint32_t cursor = 0, at = ml_index_next(&p->known, n, &cursor);
    if (at != ML_INDEX_NONE) return p->names.at[at];
    const char *name = p->f->special ? p->f->special(p->f->context, n) : NULL;
    if (name == NULL) name = function_leaf(p, n);
    if (name == NULL) name = function_map(p, n);
    ml_index_add(&p->known, n, p->names.count);
    *ML_PUSH(p->out->arena, &p->names) = name;
    return name;
}

void ml_emit_functions(ml_text *out, const ml_function *f, const ml_ref *roots, int count,
                       const char *prefix, const char **names) {
    function_printer p = {.out = out, .f = f, .prefix = prefix, .known = {.arena = out->arena}};
    for (int i = 0; i < count; i++) names[i] = function_value(&p, roots[i]);
}

const char *ml_emit_function(ml_text *out, const ml_function *f, ml_ref root, const char *prefix) {
    const char *name;
    ml_emit_functions(out, f, &root, 1, prefix, &name);
    return name;
}
