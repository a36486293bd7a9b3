/* A score function taken apart for kernels that work tile by tile.
 *
 * where(shown, value, -inf) at its root is a mask, if `shown` does not depend on the score: `value`
 * is computed everywhere, and `shown` only in tiles of which it hides a part. Which tiles those are
 * a kernel before works out, for blocks of 64 queries by 64 keys, from bounds: what `shown`
 * compares is built of functions of the query and functions of the key, whose least and largest
 * values in a block decide whether a comparison holds everywhere, somewhere or nowhere in it. Where
 * they do not decide, a block counts as partly hidden, which is always right.
 *
 * What changes along the keys by the same amount from key to key, such as slope[h] (k - q), is
 * computed for a row's first key of the tile; other keys are one multiplication and addition away.
 * In gradients rows are keys: there it is what changes by the same amount from query to query too,
 * and is computed for a row's first query. */
#include <math.h>
#include <string.h>

#include "codegen/kernels/attention.h"
#include "runtime/ops/attention/attention.h"

enum {
    BY_SCORE = 1,
    BY_QUERY = 2,
    BY_KEY = 4,
    BY_HEAD = 8,
    MAX_MASKS = 8,
    MAX_LEAVES = 16,
    BUDGET = 100
};

typedef struct splitter {
    attention_printer *p;
    const ml_function *f;
    int leaf_count;
    ml_ref leaf[MAX_LEAVES]; /* functions of the query alone, or of the key alone */
    ml_text begin, values;   /* of their bounds: declarations, statements for one query and key */
    ml_index known;          /* of nodes: index in `needs`, what they depend on */
    ML_VEC(uint8_t) needs;
    int budget; /* nodes still to be looked at: texts must not grow without bounds */
    int line_count;
    ml_text lines_begin, lines; /* declarations, statements for a row's first key */
} splitter;

static bool is_number(const ml_graph *g, ml_ref n, double wanted) {
    double number;
    if (ml_graph_node(g, n)->op != ML_OP_CONST) return false;
    memcpy(&number, ml_graph_args(g, n), sizeof number);
    return ml_dtypes[ml_graph_type(g, n)->dtype].kind == ML_KIND_FLOAT && number == wanted;
}

static int depends(splitter *s, ml_ref n);

static int depends_itself(splitter *s, ml_ref n) {
    const ml_attention_args *args = &s->p->a->args;
    const ml_node *node = ml_graph_node(s->f->g, n);
    if (node->op == ML_OP_PARAM) {
        int64_t i = ml_graph_args(s->f->g, n)[0];
        if (i < 1 || i > s->p->captured) return BY_SCORE;
        const ml_attention_strides *stride = &s->p->a->strides[s->p->captured_first + i - 1];
        return (stride->seq ? BY_QUERY : 0) | (stride->dim ? BY_KEY : 0) |
               (stride->head ? BY_HEAD : 0);
    }
    if (node->op == ML_OP_IOTA) {
        ml_axis axis = (ml_axis)ml_graph_args(s->f->g, n)[0];
        if (axis == args->seq) return BY_QUERY;
        return axis == args->kv_seq ? BY_KEY : axis == args->heads ? BY_HEAD : 0;
    }
    int of = 0;
    for (int i = 0; i < node->source_count; i++) of |= depends(s, ml_graph_source(s->f->g, n, i));
    return of;
}

static int depends(splitter *s, ml_ref n) {
    n = ml_function_strip(s->f, n);
    uint32_t cursor = 0, at = ml_index_next(&s->known, n, &cursor);
    if (at != ML_INDEX_NONE) return s->needs.at[at];
    int of = depends_itself(s, n);
    ml_index_add(&s->known, n, s->needs.count);
    *ML_PUSH(s->p->text.arena, &s->needs) = (uint8_t)of;
    return of;
}

/* ---- Bounds */

typedef struct {
    const char *low, *high; /* texts; NULL: unknown */
} bounds;
typedef struct {
    const char *possible, *certain;
} truth;
static const truth unknown = {"true", "false"};

/* The number of a function of the query, or of the key, whose bounds are computed; -1: no room. */
static int leaf_of(splitter *s, ml_ref n) {
    for (int i = 0; i < s->leaf_count; i++)
        if (s->leaf[i] == n) return i;
    if (s->leaf_count == MAX_LEAVES) return -1;
    int i = s->leaf_count++;
    s->leaf[i] = n;
    const char *type = emit_compute_type((ml_dtype)ml_graph_type(s->f->g, n)->dtype);
    const char *prefix = ml_arena_format(s->p->text.arena, "leaf%d_", i);
    ml_text_add(&s->begin, "%s low%d = 0, high%d = 0;\n", type, i, i);
    ml_text_add(&s->values, "{\n");
    const char *value = ml_emit_function(&s->values, s->f, n, prefix);
    ml_text_add(&s->values,
                "const %s x = %s;\nodd |= !(x == x);\nlow%d = i && low%d < x ? low%d : x;\n"
                "high%d = i && high%d > x ? high%d : x;\n}\n",
                type, value, i, i, i, i, i, i);
    return i;
}

static bounds bounds_of(splitter *s, ml_ref n) {
    const ml_graph *g = s->f->g;
    ml_arena *arena = s->p->text.arena;
    n = ml_function_strip(s->f, n);
    int of = depends(s, n);
    if (of & BY_SCORE || s->budget-- <= 0) return (bounds){0};
    if (!(of & BY_QUERY) || !(of & BY_KEY)) {
        int i = leaf_of(s, n);
        if (i < 0) return (bounds){0};
        return (bounds){ml_arena_format(arena, "low%d", i), ml_arena_format(arena, "high%d", i)};
    }
    const ml_node *node = ml_graph_node(g, n);
    bounds a = {0}, b = {0};
    if (node->op != ML_OP_CAST && node->op != ML_OP_NEG && node->op != ML_OP_ADD &&
        node->op != ML_OP_SUB)
        return a;
    a = bounds_of(s, ml_graph_source(g, n, 0));
    if (a.low && node->source_count > 1) b = bounds_of(s, ml_graph_source(g, n, 1));
    if (!a.low || (node->source_count > 1 && !b.low)) return (bounds){0};
    const char *type = emit_compute_type((ml_dtype)ml_graph_type(g, n)->dtype);
    if (node->op == ML_OP_NEG)
        return (bounds){ml_arena_format(arena, "(-%s)", a.high),
                        ml_arena_format(arena, "(-%s)", a.low)};
    if (node->op == ML_OP_ADD)
        return (bounds){ml_arena_format(arena, "(%s + %s)", a.low, b.low),
                        ml_arena_format(arena, "(%s + %s)", a.high, b.high)};
    if (node->op == ML_OP_SUB)
        return (bounds){ml_arena_format(arena, "(%s - %s)", a.low, b.high),
                        ml_arena_format(arena, "(%s - %s)", a.high, b.low)};
    /* a conversion preserves the order, but for those to bool and to narrow floats */
    if (ml_graph_type(g, n)->dtype == ML_BOOL || ml_is_narrow(ml_graph_type(g, n)->dtype))
        return (bounds){0};
    return (bounds){ml_arena_format(arena, "((%s)%s)", type, a.low),
                    ml_arena_format(arena, "((%s)%s)", type, a.high)};
}

static truth opposite(splitter *s, truth t) {
    return (truth){ml_arena_format(s->p->text.arena, "!(%s)", t.certain),
                   ml_arena_format(s->p->text.arena, "!(%s)", t.possible)};
}

static truth compare(splitter *s, int op, bounds a, bounds b) {
    ml_arena *arena = s->p->text.arena;
    truth equal = {ml_arena_format(arena, "(%s <= %s && %s <= %s)", a.low, b.high, b.low, a.high),
                   ml_arena_format(arena, "(%s == %s && %s == %s)", a.low, b.high, b.low, a.high)};
    if (op == ML_OP_EQ) return equal;
    if (op == ML_OP_NE) return opposite(s, equal);
    if (op == ML_OP_GT) return compare(s, ML_OP_LT, b, a);
    if (op == ML_OP_GE) return compare(s, ML_OP_LE, b, a);
    const char *sign = op == ML_OP_LT ? "<" : "<=";
    return (truth){ml_arena_format(arena, "(%s %s %s)", a.low, sign, b.high),
                   ml_arena_format(arena, "(%s %s %s)", a.high, sign, b.low)};
}

/* Whether a bool holds somewhere, and everywhere, in a block. */
static truth truth_of(splitter *s, ml_ref n) {
    const ml_graph *g = s->f->g;
    ml_arena *arena = s->p->text.arena;
    n = ml_function_strip(s->f, n);
    const ml_node *node = ml_graph_node(g, n);
    int of = depends(s, n);
    if (s->budget-- <= 0) return unknown;
    if (!(of & BY_QUERY) || !(of & BY_KEY)) {
        bounds b = bounds_of(s, n);
        if (!b.low) return unknown;
        return (truth){ml_arena_format(arena, "(%s != 0)", b.high),
                       ml_arena_format(arena, "(%s != 0)", b.low)};
    }
    if (node->op == ML_OP_NOT) return opposite(s, truth_of(s, ml_graph_source(g, n, 0)));
    if (node->op == ML_OP_AND || node->op == ML_OP_OR) {
        const char *join = node->op == ML_OP_AND ? "&&" : "||";
        truth a = truth_of(s, ml_graph_source(g, n, 0)), b = truth_of(s, ml_graph_source(g, n, 1));
        return (truth){ml_arena_format(arena, "(%s %s %s)", a.possible, join, b.possible),
                       ml_arena_format(arena, "(%s %s %s)", a.certain, join, b.certain)};
    }
    if (!ml_op_compares(node->op)) return unknown;
    bounds a = bounds_of(s, ml_graph_source(g, n, 0)), b = {0};
    if (a.low) b = bounds_of(s, ml_graph_source(g, n, 1));
    return b.low ? compare(s, node->op, a, b) : unknown;
}

/* ---- Lines along the keys */

typedef struct {
    const char *value, *slope; /* at the first key, from key to key; no value: no line */
    const char *across;        /* from query to query; NULL: not always the same */
} line;

/* The product, or quotient, of a line and something that all keys share. */
static line scaled_line(ml_arena *arena, line a, char operator, const line * by) {
    bool even = a.across && by->across && strcmp(by->across, "0") == 0;
    return (line){ml_arena_format(arena, "(%s %c %s)", a.value, operator, by->value),
                  ml_arena_format(arena, "(%s %c %s)", a.slope, operator, by->value),
                  even ? ml_arena_format(arena, "(%s %c %s)", a.across, operator, by->value)
                       : NULL};
}

static const char *as_float(ml_arena *arena, const char *value) {
    return strcmp(value, "0") ? ml_arena_format(arena, "(float)%s", value) : "0";
}

static line line_of(splitter *s, ml_ref n);

static line line_of_two(splitter *s, ml_ref n) {
    const ml_graph *g = s->f->g;
    ml_arena *arena = s->p->text.arena;
    int op = ml_graph_node(g, n)->op;
    line a = line_of(s, ml_graph_source(g, n, 0)), none = {0};
    line b = a.value ? line_of(s, ml_graph_source(g, n, 1)) : none;
    if (!b.value) return none;
    if (op == ML_OP_ADD || op == ML_OP_SUB) {
        char sign = op == ML_OP_ADD ? '+' : '-';
        return (line){ml_arena_format(arena, "(%s %c %s)", a.value, sign, b.value),
                      ml_arena_format(arena, "(%s %c %s)", a.slope, sign, b.slope),
                      a.across && b.across
                          ? ml_arena_format(arena, "(%s %c %s)", a.across, sign, b.across)
                          : NULL};
    }
    if (strcmp(b.slope, "0") == 0) return scaled_line(arena, a, op == ML_OP_MUL ? '*' : '/', &b);
    return op == ML_OP_MUL && strcmp(a.slope, "0") == 0 ? scaled_line(arena, b, '*', &a) : none;
}

static line line_of(splitter *s, ml_ref n) {
    const ml_graph *g = s->f->g;
    ml_arena *arena = s->p->text.arena;
    n = ml_function_strip(s->f, n);
    int of = depends(s, n), op = ml_graph_node(g, n)->op;
    ml_dtype dtype = (ml_dtype)ml_graph_type(g, n)->dtype;
    line none = {0}, a;
    if (of & BY_SCORE || (dtype != ML_I32 && dtype != ML_F32) || s->budget-- <= 0) return none;
    if (!(of & BY_KEY)) {
        const char *prefix = ml_arena_format(arena, "line%d_", s->line_count++);
        const char *across = !(of & BY_QUERY) ? "0" : op == ML_OP_IOTA ? "1" : NULL;
        return (line){ml_emit_function(&s->lines, s->f, n, prefix), "0", across};
    }
    if (op == ML_OP_IOTA)
        return (line){s->f->index_of(s->f->context, (ml_axis)ml_graph_args(g, n)[0]), "1", "0"};
    if (op == ML_OP_ADD || op == ML_OP_SUB || op == ML_OP_MUL ||
        (op == ML_OP_DIV && dtype == ML_F32))
        return line_of_two(s, n);
    if (op != ML_OP_NEG && (op != ML_OP_CAST || dtype != ML_F32)) return none;
    a = line_of(s, ml_graph_source(g, n, 0));
    if (!a.value) return none;
    if (op == ML_OP_CAST)
        return (line){ml_arena_format(arena, "(float)%s", a.value), as_float(arena, a.slope),
                      a.across ? as_float(arena, a.across) : NULL};
    return (line){ml_arena_format(arena, "(-%s)", a.value),
                  ml_arena_format(arena, "(-%s)", a.slope),
                  a.across ? ml_arena_format(arena, "(-%s)", a.across) : NULL};
}

/* The text of a value along the keys: of `row`, and `step` keys behind the first. In gradients: of
 * `row`, a key, and `step` queries behind the first. */
static const char *line_text(void *context, ml_ref n) {
    attention_printer *p = context;
    splitter *s = p->splitter;
    int op = ml_graph_node(s->f->g, n)->op, of = depends(s, n);
    bool sum = op == ML_OP_ADD || op == ML_OP_SUB || op == ML_OP_MUL || op == ML_OP_DIV ||
               op == ML_OP_NEG || op == ML_OP_CAST;
    if (!sum || of & BY_SCORE || !(of & BY_KEY) || ml_graph_type(s->f->g, n)->dtype != ML_F32)
        return NULL;
    s->budget = BUDGET;
    line a = line_of(s, n);
    const char *step = p->a->backward ? a.across : a.slope;
    if (!a.value || !step) return NULL;
    int i = s->line_count++;
    ml_text_add(&s->lines_begin, "float line%d[2], slope%d[2];\n", i, i);
    ml_text_add(&s->lines, "line%d[row] = %s;\nslope%d[row] = %s;\n", i, a.value, i, step);
    return ml_arena_format(p->text.arena, "(line%d[row] + slope%d[row] * step)", i, i);
}

/* ---- Masks */

/* Takes masks off the root: masks[i] is holds[i] where the score shows. */
static ml_ref take_masks(splitter *s, ml_ref n, ml_ref *masks, bool *holds, int *count) {
    const ml_graph *g = s->f->g;
    for (;;) {
        n = ml_function_strip(s->f, n);
        if (ml_graph_node(g, n)->op != ML_OP_WHERE || *count == MAX_MASKS) return n;
        ml_ref mask = ml_function_strip(s->f, ml_graph_source(g, n, 0));
        ml_ref yes = ml_function_strip(s->f, ml_graph_source(g, n, 1));
        ml_ref no = ml_function_strip(s->f, ml_graph_source(g, n, 2));
        bool shows = is_number(g, no, -INFINITY);
        if ((!shows && !is_number(g, yes, -INFINITY)) || depends(s, mask) & BY_SCORE) return n;
        masks[*count] = mask;
        holds[(*count)++] = shows;
        n = shows ? yes : no;
    }
}

/* Is `shown` true at qi and kv? And of a whole block: what the kernel before needs. */
static void set_masks(splitter *s, const ml_ref *masks, const bool *holds, int count) {
    attention_printer *p = s->p;
    ml_text shown = {.arena = p->text.arena}, possible = shown, certain = shown, at = shown;
    for (int i = 0; i < count; i++) {
        const char *prefix = ml_arena_format(p->text.arena, "shown%d_", i);
        const char *name = ml_emit_function(&shown, s->f, masks[i], prefix);
        s->budget = BUDGET;
        truth t = truth_of(s, masks[i]);
        if (!holds[i]) t = opposite(s, t);
        ml_text_add(&at, "%s%s%s", i ? " && " : "", holds[i] ? "" : "!", name);
        ml_text_add(&possible, "%s%s", i ? " && " : "", t.possible);
        ml_text_add(&certain, "%s%s", i ? " && " : "", t.certain);
        p->masked_by_head |= (depends(s, masks[i]) & BY_HEAD) != 0;
    }
    ml_text_add(&shown, "const bool shown = %s", at.text);
    template_set_text(&p->text, "SHOWN", shown.text);
    template_set_text(&p->text, "LEAF_BOUNDS", s->begin.text ? s->begin.text : "");
    template_set_text(&p->text, "LEAF_VALUES", s->values.text ? s->values.text : "");
    template_set_text(&p->text, "POSSIBLE", possible.text);
    template_set_text(&p->text, "CERTAIN", certain.text);
}

void attention_split_score(attention_printer *p, const ml_function *f) {
    ml_arena *arena = p->text.arena;
    const ml_text empty = {.arena = arena};
    splitter s = {.p = p, .f = f, .begin = empty, .values = empty};
    s.lines = s.lines_begin = empty;
    s.known = (ml_index){.arena = arena};
    ml_ref *masks = ML_NEW_ARRAY(arena, ml_ref, MAX_MASKS);
    bool *holds = ML_NEW_ARRAY(arena, bool, MAX_MASKS);
    ml_ref open = take_masks(&s, p->a->args.score, masks, holds, &p->masks);
    if (p->masks > 0) set_masks(&s, masks, holds, p->masks);
    ml_function shown = *f;
    shown.known = masks, shown.holds = holds, shown.known_count = p->masks;
    p->open_score_is_plain =
        ml_graph_node(f->g, open)->op == ML_OP_PARAM && ml_graph_args(f->g, open)[0] == 0;
    ml_text score = empty, slope = empty;
    shown.special = line_text;
    p->splitter = &s;
    ml_text_add(&score, "x = %s", ml_emit_function(&score, &shown, open, "score_"));
    p->splitter = NULL;
    template_set_text(&p->text, "OPEN_SCORE", score.text);
    template_set_text(&p->text, "OPEN_LINES", s.lines_begin.text ? s.lines_begin.text : "");
    template_set_text(&p->text, "OPEN_LINE_ROWS", s.lines.text ? s.lines.text : "");
    if (!p->a->args.derivative) return;
    shown.special = NULL;
    ml_text_add(&slope, "slope = %s",
                ml_emit_function(&slope, &shown, p->a->args.derivative, "slope_"));
    template_set_text(&p->text, "OPEN_DERIVATIVE", slope.text);
}

void attention_open_score(attention_printer *p) {
    static const char *const names[] = {"SCORE", "LINES", "LINE_ROWS", "DERIVATIVE"};
    static const char *const open[] = {"OPEN_SCORE", "OPEN_LINES", "OPEN_LINE_ROWS",
                                       "OPEN_DERIVATIVE"};
    for (int i = 0; i < 3 + (p->a->args.derivative != 0); i++)
        template_set_text(&p->text, names[i], template_get(&p->text, open[i]));
    if (p->open_score_is_plain) attention_bind_exponents(p, false);
}

/* ---- States of blocks */

enum { PART = 64 };

void attention_reserve_states(attention_printer *p) {
    enum { WORD = 4 };
    const ml_attention_step *a = p->a;
    int64_t heads = p->masked_by_head ? a->heads : 1;
    int64_t bytes = p->batches * heads * attention_divide_up(a->seq, PART) *
                    attention_divide_up(a->kv_seq, PART);
    int at = template_workspace(p->schedule, p->step, ML_I32, (bytes + WORD - 1) / WORD);
    attention_bind_workspace(p, "STATES_AT", at);
    attention_set(p, "MASKED_BY_HEAD", p->masked_by_head);
}

ml_kernel *attention_states_kernel(attention_printer *p) {
    int64_t heads = p->masked_by_head ? p->a->heads : 1;
    int64_t blocks = attention_divide_up(p->a->seq, PART) * heads * p->batches;
    return attention_kernel(p, "attention_blocks.cu", "attention blocks", blocks, 64, 0);
}
