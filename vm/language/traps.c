#define _GNU_SOURCE
#include "vm/language/traps.h"

#include <stdlib.h>
#include <string.h>

#include "vm/language/lexer.h"

typedef struct {
    size_t at;       /* where the text is inserted */
    size_t replaced; /* bytes that it replaces */
    int order;       /* among edits at one place: closings, then operators, then openings */
    uint32_t
        sequence; /* of closings, the first recorded is inserted first; of openings, the last */
    const char *text;
} edit;

typedef struct {
    size_t start, end;
} range;

typedef struct {
    lexer at;   /* the current token */
    int depth;  /* of the recursion */
    int blocks; /* that enclose the current statement */
    traps_kind text_kind;
    ml_arena *arena;
    ML_VEC(edit) edits;
} scanner;

/* The text has compiled before, so that anything unexpected is a bug; it stops the rewriting. */
static void give_up(void) {
    ml_raise(ML_INTERNAL, "the script's text cannot be followed");
}

static void advance(scanner *s) {
    lexer_next(&s->at);
}

static bool accept(scanner *s, int kind) {
    if (s->at.kind != kind) return false;
    advance(s);
    return true;
}

static void expect(scanner *s, int kind) {
    if (!accept(s, kind)) give_up();
}

/* ---- Edits ----------------------------------------------------------------------------------- */

enum { CLOSING, OPERATOR, OPENING };

static void add_edit(scanner *s, size_t at, size_t replaced, int order, const char *text) {
    edit *e = ML_PUSH(s->arena, &s->edits);
    *e = (edit){at, replaced, order, s->edits.count, text};
}

static void wrap(scanner *s, size_t start, size_t end, const char *opening) {
    add_edit(s, start, 0, OPENING, opening);
    add_edit(s, end, 0, CLOSING, ")");
}

/* ---- Values that are noted ------------------------------------------------------------------- */

static const char *seen_text(scanner *s, const range *names, int count, const range *whole) {
    const char *text = ml_arena_format(s->arena, "mlua__trap.seen(%d", count);
    for (int i = 0; i < count; i++)
        text = ml_arena_format(s->arena, "%s,%zu,%zu,%.*s", text, names[i].start, names[i].end,
                               (int)(names[i].end - names[i].start), s->at.text + names[i].start);
    return ml_arena_format(s->arena, "%s,%zu,%zu,", text, whole->start, whole->end);
}

/* The expression from `start` up to here, and names that it begins with or operates on. */
static void observe(scanner *s, size_t start, const range *names, int count) {
    if (s->text_kind != TRAPS_OBSERVED) return;
    wrap(s, start, s->at.last_end, seen_text(s, names, count, &(range){start, s->at.last_end}));
}

/* Variables that a function or a loop declares: noted at the start of its body, which is here. */
static void observe_variables(scanner *s, const range *names, int count) {
    if (s->text_kind != TRAPS_OBSERVED || count == 0) return;
    const char *call = seen_text(s, names, count, &(range){0, 0});
    add_edit(s, s->at.last_end, 0, CLOSING, ml_arena_format(s->arena, " %snil);", call));
}

/* ---- Grammar --------------------------------------------------------------------------------- */

/* What is known of an expression: whether it may be a tensor, and how it ends. */
typedef enum {
    E_VALUE, /* anything */
    E_NAME,  /* a variable, or fields of one by their names: self.norm.gain */
    E_CALL,  /* a call and nothing else: a return of it is a tail call */
    E_PLAIN, /* neither a tensor nor its value: nil, a string, a table, a function, a comparison */
    E_CONSTANT, /* a numeral, true, false */
} expression_kind;

enum { MOST_VARIABLES = 16 };

static void block(scanner *s);
static expression_kind expression(scanner *s, int limit);

static void expression_list(scanner *s) {
    do expression(s, 0);
    while (accept(s, ','));
}

static void function_body(scanner *s) {
    range names[MOST_VARIABLES];
    int count = 0;
    expect(s, '(');
    for (; s->at.kind == T_NAME || s->at.kind == T_DOTS || s->at.kind == ','; advance(s))
        if (s->at.kind == T_NAME && count < MOST_VARIABLES)
            names[count++] = (range){s->at.start, s->at.end};
    expect(s, ')');
    observe_variables(s, names, count);
    block(s);
    expect(s, T_END);
}

/* Whether the current token is the key of a table's field: `key = value`. */
static bool is_key(const scanner *s) {
    lexer ahead = s->at;
    if (s->at.kind != T_NAME) return false;
    lexer_next(&ahead);
    return ahead.kind == '=';
}

static void table(scanner *s) {
    expect(s, '{');
    while (s->at.kind != '}') {
        if (accept(s, '[')) {
            expression(s, 0);
            expect(s, ']');
            expect(s, '=');
        } else if (is_key(s)) {
            advance(s);
            advance(s);
        }
        expression(s, 0);
        if (!accept(s, ',') && !accept(s, ';')) break;
    }
    expect(s, '}');
}

static void arguments(scanner *s) {
    if (s->at.kind == '{') {
        table(s);
    } else if (!accept(s, T_STRING)) {
        expect(s, '(');
        if (s->at.kind != ')') expression_list(s);
        expect(s, ')');
    }
}

static expression_kind suffixed(scanner *s) {
    expression_kind kind = E_NAME;
    range whole = {s->at.start, 0};
    if (accept(s, '(')) {
        expression(s, 0);
        expect(s, ')');
        kind = E_VALUE;
    } else {
        expect(s, T_NAME);
    }
    for (;;) {
        whole.end = s->at.last_end;
        switch (s->at.kind) {
        case '.':
            advance(s);
            expect(s, T_NAME);
            if (kind != E_NAME) kind = E_VALUE;
            break;
        case '[':
            advance(s);
            expression(s, 0);
            expect(s, ']');
            kind = E_VALUE;
            break;
        case ':':
            advance(s);
            expect(s, T_NAME);
            arguments(s);
            observe(s, whole.start, &whole, kind == E_NAME);
            kind = E_CALL;
            break;
        case '(':
        case '{':
        case T_STRING:
            arguments(s);
            observe(s, whole.start, NULL, 0);
            kind = E_CALL;
            break;
        default: return kind;
        }
    }
}

static expression_kind simple(scanner *s) {
    switch (s->at.kind) {
    case T_NUMBER:
    case T_TRUE:
    case T_FALSE: advance(s); return E_CONSTANT;
    case T_STRING:
    case T_NIL: advance(s); return E_PLAIN;
    case T_DOTS: advance(s); return E_VALUE;
    case '{': table(s); return E_PLAIN;
    case T_FUNCTION:
        advance(s);
        function_body(s);
        return E_PLAIN;
    default: return suffixed(s);
    }
}

/* Left and right priorities, as in the manual's section 3.4.8; 0: not a binary operator. */
static int left_priority(int kind, int *right) {
    int left;
    switch (kind) {
    case T_OR: left = 1; break;
    case T_AND: left = 2; break;
    case T_EQ:
    case T_NE:
    case T_LE:
    case T_GE:
    case '<':
    case '>': left = 3; break;
    case '|': left = 4; break;
    case '~': left = 5; break;
    case '&': left = 6; break;
    case T_SHL:
    case T_SHR: left = 7; break;
    case T_CONCAT: *right = 8; return 9;
    case '+':
    case '-': left = 10; break;
    case '*':
    case '/':
    case T_IDIV:
    case '%': left = 11; break;
    case '^': *right = 13; return 14;
    default: return 0;
    }
    *right = left;
    return left;
}

enum { UNARY_PRIORITY = 12, MAX_DEPTH = 400 };

static expression_kind unary(scanner *s) {
    int kind = s->at.kind;
    size_t whole = s->at.start;
    advance(s);
    size_t start = s->at.start;
    expression_kind operand = expression(s, UNARY_PRIORITY);
    if (kind == '-') observe(s, whole, &(range){start, s->at.last_end}, operand == E_NAME);
    if (kind != T_NOT) return E_VALUE;
    if (operand < E_PLAIN) wrap(s, start, s->at.last_end, "mlua__trap.test(");
    return E_PLAIN;
}

/* The right operand of `kind`, whose left operand began at `start`. */
static expression_kind binary(scanner *s, int kind, int right, size_t start, expression_kind left) {
    size_t left_end = s->at.last_end, operator_start = s->at.start, operator_end = s->at.end;
    advance(s);
    size_t right_start = s->at.start;
    expression_kind operand = expression(s, right);
    range names[2];
    int count = 0;
    if (left == E_NAME) names[count++] = (range){start, left_end};
    if (operand == E_NAME) names[count++] = (range){right_start, s->at.last_end};
    switch (kind) {
    case T_AND:
    case T_OR:
        if (left < E_PLAIN) wrap(s, start, left_end, "mlua__trap.choose(");
        return E_VALUE;
    case T_EQ:
    case T_NE:
        if (left == E_PLAIN || operand == E_PLAIN) return E_PLAIN;
        if (left == E_CONSTANT && operand == E_CONSTANT) return E_PLAIN;
        add_edit(s, operator_start, operator_end - operator_start, OPERATOR, ", ");
        wrap(s, start, s->at.last_end, kind == T_EQ ? "mlua__trap.equal(" : "mlua__trap.differ(");
        return E_PLAIN;
    case T_LE:
    case T_GE:
    case '<':
    case '>':
    case T_CONCAT: return E_PLAIN;
    default: observe(s, start, names, count); return E_VALUE;
    }
}

static expression_kind expression(scanner *s, int limit) {
    if (++s->depth > MAX_DEPTH) give_up();
    size_t start = s->at.start;
    bool is_unary =
        s->at.kind == T_NOT || s->at.kind == '-' || s->at.kind == '#' || s->at.kind == '~';
    expression_kind kind = is_unary ? unary(s) : simple(s);
    int right = 0, left;
    while ((left = left_priority(s->at.kind, &right)) > limit)
        kind = binary(s, s->at.kind, right, start, kind);
    if (kind == E_NAME && limit == 0) observe(s, start, NULL, 0);
    s->depth--;
    return kind;
}

static void condition(scanner *s) {
    size_t start = s->at.start;
    if (expression(s, 0) < E_PLAIN) wrap(s, start, s->at.last_end, "mlua__trap.test(");
}

static void if_statement(scanner *s) {
    do {
        advance(s); /* if, elseif */
        condition(s);
        expect(s, T_THEN);
        block(s);
    } while (s->at.kind == T_ELSEIF);
    if (accept(s, T_ELSE)) block(s);
    expect(s, T_END);
}

static void for_statement(scanner *s) {
    range names[MOST_VARIABLES];
    int count = 0;
    advance(s);
    do {
        if (count < MOST_VARIABLES) names[count++] = (range){s->at.start, s->at.end};
        expect(s, T_NAME);
    } while (accept(s, ','));
    if (!accept(s, '=')) expect(s, T_IN);
    expression_list(s);
    expect(s, T_DO);
    observe_variables(s, names, count);
    block(s);
    expect(s, T_END);
}

/* At the prompt `local x = 1` becomes `x = 1`, and `local x` becomes `x = nil`. */
static bool becomes_global(const scanner *s) {
    if (s->text_kind != TRAPS_INPUT || s->blocks != 1) return false;
    scanner ahead = *s; /* moves over names, which adds no edits */
    advance(&ahead);
    while (ahead.at.kind == T_NAME || ahead.at.kind == ',' || ahead.at.kind == '<' ||
           ahead.at.kind == '>') {
        if (lexer_is(&ahead.at, "close")) return false;
        advance(&ahead);
    }
    return true;
}

static void local_statement(scanner *s) {
    bool global = becomes_global(s);
    if (global) add_edit(s, s->at.start, s->at.end - s->at.start, OPERATOR, "");
    advance(s);
    if (accept(s, T_FUNCTION)) {
        expect(s, T_NAME);
        function_body(s);
        return;
    }
    do {
        expect(s, T_NAME);
        size_t start = s->at.start;
        if (accept(s, '<')) {
            expect(s, T_NAME);
            expect(s, '>');
            if (global) add_edit(s, start, s->at.last_end - start, OPERATOR, "");
        }
    } while (accept(s, ','));
    if (accept(s, '='))
        expression_list(s);
    else if (global)
        add_edit(s, s->at.last_end, 0, CLOSING, " = nil");
}

static void return_statement(scanner *s) {
    advance(s);
    if (s->at.kind == T_EOF || s->at.kind == T_END || s->at.kind == T_ELSE ||
        s->at.kind == T_ELSEIF || s->at.kind == T_UNTIL || accept(s, ';'))
        return;
    size_t start = s->at.start;
    expression_kind kind = expression(s, 0);
    if (s->at.kind == ',') {
        advance(s);
        expression_list(s);
    } else if (kind == E_CALL) {
        wrap(s, start, s->at.last_end, "mlua__trap.result(");
    }
    accept(s, ';');
}

static void statement(scanner *s) {
    switch (s->at.kind) {
    case ';':
    case T_BREAK: advance(s); return;
    case T_IF: if_statement(s); return;
    case T_FOR: for_statement(s); return;
    case T_LOCAL: local_statement(s); return;
    case T_WHILE:
        advance(s);
        condition(s);
        expect(s, T_DO);
        block(s);
        expect(s, T_END);
        return;
    case T_DO:
        advance(s);
        block(s);
        expect(s, T_END);
        return;
    case T_REPEAT:
        advance(s);
        block(s);
        expect(s, T_UNTIL);
        condition(s);
        return;
    case T_FUNCTION:
        advance(s);
        while (s->at.kind == T_NAME || s->at.kind == '.' || s->at.kind == ':') advance(s);
        function_body(s);
        return;
    case T_LABEL:
        advance(s);
        expect(s, T_NAME);
        expect(s, T_LABEL);
        return;
    case T_GOTO:
        advance(s);
        expect(s, T_NAME);
        return;
    default:
        suffixed(s);
        while (accept(s, ',')) suffixed(s);
        if (accept(s, '=')) expression_list(s);
    }
}

static void block(scanner *s) {
    if (++s->depth > MAX_DEPTH) give_up();
    s->blocks++;
    while (s->at.kind != T_EOF && s->at.kind != T_END && s->at.kind != T_ELSE &&
           s->at.kind != T_ELSEIF && s->at.kind != T_UNTIL) {
        if (s->at.kind == T_RETURN) {
            return_statement(s);
            break;
        }
        statement(s);
    }
    s->blocks--;
    s->depth--;
}

/* ---- The rewritten text ---------------------------------------------------------------------- */

static int compare_edits(const void *left, const void *right) {
    const edit *a = left, *b = right;
    if (a->at != b->at) return a->at < b->at ? -1 : 1;
    if (a->order != b->order) return a->order - b->order;
    int earlier = a->sequence < b->sequence ? -1 : 1;
    return a->order == OPENING ? -earlier : earlier;
}

static char *apply(const scanner *s, size_t *result_size) {
    static const char before[] = "local mlua__trap = ... return function(...) ";
    static const char after[] = "\nend";
    size_t size = sizeof before - 1 + s->at.size + sizeof after - 1;
    for (uint32_t i = 0; i < s->edits.count; i++) size += strlen(s->edits.at[i].text);
    char *result = ml_arena_alloc(s->arena, size + 1), *to = result;
    to = mempcpy(to, before, sizeof before - 1);
    size_t from = 0;
    for (uint32_t i = 0; i < s->edits.count; i++) {
        const edit *e = &s->edits.at[i];
        to = mempcpy(to, s->at.text + from, e->at - from);
        to = mempcpy(to, e->text, strlen(e->text));
        from = e->at + e->replaced;
    }
    to = mempcpy(to, s->at.text + from, s->at.size - from);
    to = mempcpy(to, after, sizeof after - 1);
    *result_size = (size_t)(to - result);
    return result;
}

char *traps_rewrite(const char *text, size_t size, traps_kind kind, ml_arena *arena,
                    size_t *result_size) {
    scanner s = {.arena = arena, .text_kind = kind};
    lexer_begin(&s.at, text, size);
    block(&s);
    if (s.at.kind != T_EOF) give_up();
    if (s.edits.count == 0) return NULL;
    qsort(s.edits.at, s.edits.count, sizeof *s.edits.at, compare_edits);
    return apply(&s, result_size);
}
