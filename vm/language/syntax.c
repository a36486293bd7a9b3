#include "vm/language/syntax.h"

#include <lauxlib.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include "vm/language/lexer.h"

/* The text as tokens, and the one at which Lua gave up. A rule looks at the tokens around it, and
 * pushes a hint where it knows the mistake. Some tokens are on the line more than once: rules are
 * tried for each. */
typedef struct {
    size_t start, end;
    int kind, line;
} token;

typedef struct {
    lua_State *L;
    const char *text, *message;
    const token *at; /* the last is T_EOF */
    int count;
    int i; /* the token of the error */
} problem;

typedef bool rule(const problem *p);

__attribute__((format(printf, 2, 3))) static bool say(const problem *p, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    lua_pushvfstring(p->L, format, arguments);
    va_end(arguments);
    return true;
}

static int kind(const problem *p, int i) {
    return i >= 0 && i < p->count ? p->at[i].kind : T_EOF;
}

static int line_of(const problem *p, int i) {
    return p->at[i < 0 ? 0 : i].line;
}

static bool is(const problem *p, int i, const char *text) {
    if (i < 0 || i >= p->count) return false;
    size_t length = p->at[i].end - p->at[i].start;
    return strlen(text) == length && memcmp(p->text + p->at[i].start, text, length) == 0;
}

/* Token i, which nothing separates from the next. */
static bool joined(const problem *p, int i, int first, int second) {
    return kind(p, i) == first && kind(p, i + 1) == second && p->at[i].end == p->at[i + 1].start;
}

static bool says(const problem *p, const char *part) {
    return strstr(p->message, part) != NULL;
}

static const char *push_token(const problem *p, int i) {
    return lua_pushlstring(p->L, p->text + p->at[i].start, p->at[i].end - p->at[i].start);
}

/* The first token on the line of token i. */
static int first_on_line(const problem *p, int i) {
    while (i > 0 && p->at[i - 1].line == p->at[i].line) i--;
    return i;
}

/* The innermost ( { [ before token i that is still open there; -1: none. */
static int open_bracket(const problem *p, int i) {
    int depth = 0;
    while (--i >= 0) {
        int k = kind(p, i);
        if (k == ')' || k == '}' || k == ']') depth++;
        if ((k == '(' || k == '{' || k == '[') && depth-- == 0) return i;
    }
    return -1;
}

/* Push what the tokens before i assign to: "self.count" of `self.count += 1`. */
static const char *push_target(const problem *p, int i) {
    int first = i;
    while (first > 0) {
        int before = first - 1;
        if (kind(p, before) == ']') before = open_bracket(p, before);
        if (before < 0 || (kind(p, before) != T_NAME && kind(p, before) != '[')) break;
        first = before;
        if (kind(p, before) == '[') continue;
        if (first == 0 || (kind(p, first - 1) != '.' && kind(p, first - 1) != ':')) break;
        first--;
    }
    if (first == i) return lua_pushliteral(p->L, "x");
    return lua_pushlstring(p->L, p->text + p->at[first].start,
                           p->at[i - 1].end - p->at[first].start);
}

/* ---- Operators ------------------------------------------------------------------------------- */

static bool is_arithmetic(int k) {
    return k == T_IDIV || k == T_CONCAT || k == T_SHL || k == T_SHR ||
           (k > 0 && k < 128 && strchr("+-*/%^&|", k));
}

static bool compound_assignment(const problem *p) {
    int i = kind(p, p->i) == '=' ? p->i - 1 : p->i;
    if (!is_arithmetic(kind(p, i)) || !joined(p, i, kind(p, i), '=')) return false;
    const char *operator= push_token(p, i), *target = push_target(p, i);
    return say(p, "Lua has no %s=: write %s = %s %s ...", operator, target, target, operator);
}

static bool increment(const problem *p) {
    int i = p->i;
    if (!joined(p, i, '+', '+') && joined(p, i - 1, '+', '+')) i--;
    if (joined(p, i, '+', '+')) {
        const char *target = push_target(p, i);
        return say(p, "Lua has no ++: write %s = %s + 1", target, target);
    }
    size_t end = i > 0 ? p->at[i - 1].end : 0;
    bool name = kind(p, i - 1) == T_NAME || kind(p, i - 1) == ']';
    if (!name || strncmp(p->text + end, "--", 2) != 0) return false;
    const char *target = push_target(p, i);
    return say(p, "-- begins a comment: write %s = %s - 1", target, target);
}

static bool comparison(const problem *p) {
    int i = p->i, first = kind(p, first_on_line(p, i));
    bool tests = first == T_IF || first == T_ELSEIF || first == T_WHILE || first == T_UNTIL;
    if (joined(p, i, '!', '=') || joined(p, i, '!', T_EQ)) return say(p, "write ~= for !=");
    if (joined(p, i - 1, '<', '>')) return say(p, "write ~= for <>");
    if (kind(p, i) == '!') return say(p, "write not x for !x");
    if (joined(p, i - 1, T_EQ, '=')) return say(p, "write == for ===");
    if (joined(p, i - 1, '=', '<') || joined(p, i, '=', '<')) return say(p, "write <= for =<");
    if (tests && joined(p, i, '=', '>')) return say(p, "write >= for =>");
    if (kind(p, i) == '=' && tests && !says(p, "arguments expected"))
        return say(p, "= assigns; == compares");
    if (kind(p, i) == T_NE && says(p, "syntax error"))
        return say(p, "~= compares: if a ~= b then ... end");
    return false;
}

static bool logic(const problem *p) {
    int i = p->i;
    if (joined(p, i - 1, '&', '&') || joined(p, i, '&', '&'))
        return say(p, "write a and b for &&; of tensors m.logical_and(a, b)");
    if (joined(p, i - 1, '|', '|') || joined(p, i, '|', '|'))
        return say(p, "write a or b for ||; of tensors m.logical_or(a, b)");
    if (kind(p, i) == '?' || (kind(p, i) == T_ELSE && says(p, "'then' expected")))
        return say(p, "c and a or b chooses; of tensors m.where(c, a, b)");
    if (is(p, i, "is")) return say(p, "== compares: x == nil, x ~= nil");
    bool inside = kind(p, i) == T_IN || (kind(p, i) == T_NOT && kind(p, i + 1) == T_IN);
    if (inside && says(p, "'then' expected"))
        return say(p, "Lua has no test by in: keep a set, if set[x] then");
    return false;
}

static bool other_operators(const problem *p) {
    int i = p->i;
    if (kind(p, i) == '@')
        return first_on_line(p, i) == i
                   ? say(p, "Lua has no decorators: local f = decorate(function(x) ... end)")
                   : say(p, "Lua has no @: a:dot(b, \"embed\") sums products over the axis");
    if (joined(p, i - 1, '*', '*')) return say(p, "write x ^ 2 for **");
    bool arrow = joined(p, i, '=', '>') || joined(p, i - 1, '-', '>');
    for (int k = first_on_line(p, i); k < i && !arrow; k++) arrow = is(p, k, "lambda");
    if (i > 0 &&
        line_of(p, i - 1) < line_of(p, i)) /* x: x is a method name, and the call continues */
        for (int k = first_on_line(p, i - 1); k < i && !arrow; k++) arrow = is(p, k, "lambda");
    return arrow && say(p, "write function(x) return ... end");
}

/* ---- Comments, texts, numbers, characters ---------------------------------------------------- */

static bool comment(const problem *p) {
    int i = p->i, first = first_on_line(p, i);
    static const char hint[] = "comments begin with --";
    if (kind(p, i) == '#' || (kind(p, i) == T_IDIV && first == i)) return say(p, hint);
    if (joined(p, i, '/', '*')) return say(p, "comments are --[[ ... ]], or begin with --");
    bool empty = is(p, i, "\"\"") || is(p, i, "''");
    if (empty && kind(p, i + 1) == T_STRING && p->at[i].end == p->at[i + 1].start)
        return say(p, "comments begin with --; [[ ... ]] is a text of several lines");
    bool words = kind(p, i) == T_NAME && kind(p, i - 1) == T_NAME;
    for (int k = first; words && k < i; k++)
        if (kind(p, k) == T_IDIV) return say(p, "// divides; comments begin with --");
    return false;
}

static bool text_or_number(const problem *p) {
    if (says(p, "unfinished string"))
        return say(p, "a text ends on the line where it begins; [[ ... ]] spans lines");
    if (says(p, "unfinished long")) return say(p, "]] ends what [[ begins");
    if (!says(p, "malformed number")) return false;
    const char *number = strstr(p->message, "near '") + strlen("near '");
    bool loop = kind(p, first_on_line(p, p->i)) == T_FOR;
    if (strstr(number, "..") && loop) return say(p, "for i = 1, 10 do ... end");
    if (strstr(number, "..")) return say(p, "leave a space between a number and ..");
    if (strchr(number, '_')) return say(p, "digits have no separators: 1000000");
    return say(p, "a name does not begin with a digit; a product is 2 * x");
}

/* A character that is not ASCII, outside of texts and comments. */
static bool character(const problem *p) {
    static const struct {
        const char *bytes, *hint;
    } known[] = {
        {"\xe2\x80\x9c", "texts are in \"...\" or '...'"},
        {"\xe2\x80\x9d", "texts are in \"...\" or '...'"},
        {"\xe2\x80\x98", "texts are in \"...\" or '...'"},
        {"\xe2\x80\x99", "texts are in \"...\" or '...'"},
        {"\xe2\x88\x92", "minus is -"},
        {"\xe2\x80\x93", "minus is -"},
        {"\xc3\x97", "times is *"},
        {"\xe2\x8b\x85", "times is *"},
        {"\xe2\x89\xa4", "write <="},
        {"\xe2\x89\xa5", "write >="},
        {"\xe2\x89\xa0", "write ~="},
        {"\xc2\xa0", "it is a space that does not break (U+00A0): type a space in its place"},
    };
    if (kind(p, p->i) < 128 || kind(p, p->i) > 255 || !says(p, "near '<\\")) return false;
    const char *at = p->text + p->at[p->i].start;
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        size_t length = strlen(known[k].bytes);
        if (p->at[p->count - 1].end - p->at[p->i].start >= length &&
            memcmp(at, known[k].bytes, length) == 0)
            return say(p, "%s", known[k].hint);
    }
    return say(p, "names are made of a-z, A-Z, 0-9 and _; other characters belong in strings");
}

/* ---- Words of other languages ---------------------------------------------------------------- */

static bool foreign_word(const problem *p) {
    static const char function[] = "write function f(x) ... end", local[] = "write local x = ...",
                      begin[] = "begin with local m = require \"mlua\"",
                      caught[] = "pcall(function() ... end) catches errors",
                      raised[] = "error(message) raises",
                      chosen[] = "if ... elseif ... else ... end", ended[] = "write end",
                      empty[] = "an empty block needs no statement";
    static const struct {
        const char *word, *hint;
    } words[] = {
        {"elif", "write elseif ... then"},
        {"elsif", "write elseif ... then"},
        {"def", function},
        {"func", function},
        {"fn", function},
        {"fun", function},
        {"import", begin},
        {"from", begin},
        {"using", begin},
        {"include", begin},
        {"class", "a class of modules is m.module(\"Net\", function(self) ... end)"},
        {"var", local},
        {"let", local},
        {"const", "write local x <const> = ..."},
        {"auto", local},
        {"int", local},
        {"float", local},
        {"double", local},
        {"bool", local},
        {"try", caught},
        {"except", caught},
        {"catch", caught},
        {"finally", caught},
        {"raise", raised},
        {"throw", raised},
        {"with", "local file <close> = io.open(path) closes it at the block's end"},
        {"pass", empty},
        {"continue", "goto continue, and ::continue:: before the loop's end"},
        {"del", "x = nil"},
        {"global", "a name without local is global"},
        {"nonlocal", "a function may set the locals around it"},
        {"switch", chosen},
        {"match", chosen},
        {"case", chosen},
        {"endif", ended},
        {"endfor", ended},
        {"endwhile", ended},
        {"endfunction", ended},
        {"async", "coroutine.wrap(function() ... end)"},
        {"await", "coroutine.wrap(function() ... end)"},
    };
    /* The word before the error, or the first on the line where that word is. */
    int before = p->i > 0 ? p->i - 1 : 0;
    const int places[] = {before, first_on_line(p, before), first_on_line(p, p->i)};
    for (size_t k = 0; k < 3; k++)
        for (size_t w = 0; w < sizeof words / sizeof *words; w++)
            if (kind(p, places[k]) == T_NAME && is(p, places[k], words[w].word))
                return say(p, "%s", words[w].hint);
    return false;
}

/* The nearest colon before the error that ends its line; -1: none. Lua takes the next word for a
 * method, and finds the error later. */
static int colon_at_line_end(const problem *p) {
    for (int k = p->i; k >= 0 && line_of(p, k) + 20 > line_of(p, p->i); k--)
        if (kind(p, k) == ':' && k + 1 < p->count && line_of(p, k + 1) > line_of(p, k)) return k;
    return -1;
}

static bool block_with_colon(const problem *p) {
    int colon = colon_at_line_end(p);
    for (int k = p->i; k >= first_on_line(p, p->i) && says(p, "arguments expected"); k--)
        if (kind(p, k) == ':') colon = k;
    if (colon < 0) return false;
    switch (kind(p, first_on_line(p, colon))) {
    case T_IF:
    case T_ELSEIF: return say(p, "write if ... then ... end");
    case T_FOR: return say(p, "write for i = 1, n do ... end");
    case T_WHILE: return say(p, "write while ... do ... end");
    case T_ELSE: return say(p, "write else without a colon");
    case T_FUNCTION:
    case T_LOCAL: return say(p, "write function f(x) ... end, without a colon");
    default: return false;
    }
}

static bool block_with_braces(const problem *p) {
    static const char hint[] = "blocks have no braces: if ... then ... end, for ... do ... end";
    int first = first_on_line(p, p->i);
    bool opens = kind(p, first) == T_IF || kind(p, first) == T_WHILE || kind(p, first) == T_FOR ||
                 kind(p, first) == T_ELSE || kind(p, first) == T_FUNCTION ||
                 kind(p, first) == T_LOCAL || kind(p, first) == T_DO;
    if (kind(p, p->i) == '{' && opens && !says(p, "'='")) return say(p, hint);
    if (kind(p, p->i) == '}' && first == p->i && open_bracket(p, p->i) < 0) return say(p, hint);
    if (!says(p, "'then' expected") && !says(p, "'do' expected")) return false;
    for (int k = p->i - 1; k >= 0; k--) /* `if (x) {` is a call */
        if (kind(p, k) == T_IF || kind(p, k) == T_WHILE)
            for (int brace = k; brace < p->i; brace++)
                if (kind(p, brace) == '{' && line_of(p, brace + 1) > line_of(p, brace))
                    return say(p, hint);
    return false;
}

static bool loop(const problem *p) {
    bool first = kind(p, first_on_line(p, p->i)) == T_FOR;
    bool c =
        first && (kind(p, p->i) == ';' || (kind(p, p->i) == '(' && kind(p, p->i - 1) == T_FOR));
    return c && say(p, "for i = 1, n do ... end counts");
}

/* ---- Brackets -------------------------------------------------------------------------------- */

static bool index_or_list(const problem *p) {
    int i = p->i, open = open_bracket(p, i);
    bool in_index =
        open > 0 && kind(p, open) == '[' && kind(p, open - 1) != '{' && kind(p, open - 1) != ',';
    bool slice = in_index && (kind(p, i) == ':' || kind(p, i - 1) == ':' || kind(p, i) == ',');
    if (slice || (in_index && says(p, "cannot use '...'")))
        return say(p, "t:slice(\"seq\", start, stop) takes elements of a tensor, from 0");
    if (kind(p, i) == '[' && says(p, "unexpected symbol")) return say(p, "a list is { 1, 2, 3 }");
    bool in_table = open >= 0 && kind(p, open) == '{';
    if (in_table && (kind(p, i) == ':' || kind(p, i - 1) == ':'))
        return say(p, "a table is { name = value, [\"a text\"] = value }");
    return false;
}

static bool parameters(const problem *p) {
    int open = open_bracket(p, p->i), k = kind(p, p->i);
    if (kind(p, first_on_line(p, p->i)) == T_LOCAL && k == ':' && open < 0)
        return say(p, "variables have no types: local x = ...");
    if (open < 0 || kind(p, open) != '(' || (k != '=' && k != ':')) return false;
    int name = open - 1;
    while (name > 0 && (kind(p, name) == T_NAME || kind(p, name) == '.' || kind(p, name) == ':'))
        name--;
    bool declares = kind(p, name) == T_FUNCTION;
    if (declares && k == ':') return say(p, "parameters have no types");
    if (declares) return say(p, "parameters have no defaults: if x == nil then x = 1 end");
    if (k != '=' || kind(p, p->i - 1) != T_NAME) return false;
    const char *option = push_token(p, p->i - 1);
    return say(p, "named arguments are a table: f(x, { %s = ... })", option);
}

static bool begins_value(int k) {
    return k == T_NAME || k == T_NUMBER || k == T_STRING || k == T_FUNCTION || k == T_NIL ||
           k == T_TRUE || k == T_FALSE || k == T_NOT || k == '{';
}

static bool bracket(const problem *p) {
    int i = p->i, open = open_bracket(p, i), k = kind(p, i);
    if ((k == ')' || k == ']' || k == '}') && open < 0) {
        const char *closing = push_token(p, i);
        return say(p, "one %s too many", closing);
    }
    const char *closing = says(p, "')' expected")   ? ")"
                          : says(p, "'}' expected") ? "}"
                          : says(p, "']' expected") ? "]"
                                                    : NULL;
    if (!closing || open < 0) return false;
    const char *opening = push_token(p, open);
    if (line_of(p, i - 1) < line_of(p, i)) {
        say(p, "is a %s missing at the end of line %d, or a comma?", closing, line_of(p, i - 1));
        return line_of(p, open) == line_of(p, i - 1) ||
               say(p, "%s line %d has its %s", lua_tostring(p->L, -1), line_of(p, open), opening);
    }
    if (!begins_value(k)) return say(p, "is a %s missing before this?", closing);
    const char *word = push_token(p, i);
    return say(p, "is a comma missing before %s, or a %s?", word, closing);
}

/* ---- Words of Lua ---------------------------------------------------------------------------- */

static bool keyword(const problem *p) {
    int k = kind(p, p->i);
    if (k < T_AND || k > T_WHILE) return false;
    const char *word = push_token(p, p->i);
    if (says(p, "<name> expected") && kind(p, p->i - 1) == '.')
        return say(p, "%s is a word of Lua: write t[\"%s\"]", word, word);
    if (says(p, "<name> expected")) return say(p, "%s is a word of Lua: choose another name", word);
    if (kind(p, p->i + 1) == '=')
        return say(p, "%s is a word of Lua: { [\"%s\"] = ... }", word, word);
    return false;
}

static bool missing_word(const problem *p) {
    const char *word = says(p, "'then' expected") ? "then" : says(p, "'do' expected") ? "do" : NULL;
    if (word && p->i > 0 && line_of(p, p->i - 1) < line_of(p, p->i))
        return say(p, "is %s missing at the end of line %d?", word, line_of(p, p->i - 1));
    if (kind(p, p->i) == '(' && kind(p, p->i - 1) == T_FUNCTION && says(p, "<name> expected"))
        return say(p, "a function has a name, or is a value: local f = function(x) ... end");
    if (kind(p, p->i) == '=' && kind(p, p->i - 1) == ')' && says(p, "syntax error"))
        return say(p, "a call cannot be assigned to");
    if (says(p, "no visible label")) return say(p, "write ::continue:: before the loop's end");
    bool call = kind(p, p->i - 1) == T_NAME && says(p, "syntax error") &&
                begins_value(kind(p, p->i)) && line_of(p, p->i - 1) == line_of(p, p->i);
    if (!call) return false;
    const char *function = push_token(p, p->i - 1), *word_after = push_token(p, p->i);
    if (first_on_line(p, p->i) == p->i - 1)
        return say(p, "a call has parentheses: %s(%s)", function, word_after);
    return say(p, "is a comma or an operator missing before %s?", word_after);
}

/* ---- Missing ends ---------------------------------------------------------------------------- */

/* The column of the first token on the line of token i. */
static size_t indentation(const problem *p, int i) {
    size_t start = p->at[first_on_line(p, i)].start, column = 0;
    while (column < start && p->text[start - column - 1] != '\n') column++;
    return column;
}

enum { DEEPEST = 200 };

/* By the indentation of lines that begin with `end`: the opening word of a block that probably has
 * none (an end further left than it closes it), or, with `too_many`, the end that closes a block
 * further left. -1: none is seen. */
static int odd_block(const problem *p, bool too_many) {
    int open[DEEPEST], depth = 0;
    for (int i = 0; i < p->i; i++) {
        int k = kind(p, i);
        if (k == T_FUNCTION || k == T_IF || k == T_DO || k == T_REPEAT) {
            if (k == T_IF && kind(p, i - 1) == T_ELSE && line_of(p, i - 1) == line_of(p, i) &&
                !too_many)
                return i; /* `else if` */
            if (depth == DEEPEST) return -1;
            open[depth++] = i;
        } else if (k == T_END || k == T_UNTIL) {
            if (depth == 0) return -1;
            int opening = open[--depth];
            size_t left = indentation(p, opening), right = indentation(p, i);
            if (first_on_line(p, i) != i || line_of(p, opening) == line_of(p, i)) continue;
            if (!too_many && right < left) return opening;
            if (too_many && right > left) return i;
        }
    }
    return depth && !too_many ? open[depth - 1] : -1;
}

/* The innermost block that is open at the error and began after the bracket that is open there, as
 * in m.module("Net", function(self) ... ); -1: none. */
static int block_in_bracket(const problem *p) {
    int closed = 0;
    for (int i = p->i - 1; i > open_bracket(p, p->i); i--) {
        int k = kind(p, i);
        closed += k == T_END || k == T_UNTIL;
        if ((k == T_FUNCTION || k == T_IF || k == T_DO || k == T_REPEAT) && closed-- == 0) return i;
    }
    return -1;
}

static bool say_no_end(const problem *p, int opening) {
    if (opening < 0) return false;
    if (kind(p, opening) == T_IF && kind(p, opening - 1) == T_ELSE)
        return say(p, "line %d: else if opens an if with an end of its own; elseif does not",
                   line_of(p, opening));
    const char *word = push_token(p, opening);
    return say(p, "does the %s of line %d have an end?", word, line_of(p, opening));
}

static bool block_end(const problem *p) {
    bool one_missing = says(p, "'end' expected"), one_more = says(p, "<eof> expected");
    int k = kind(p, p->i), before = kind(p, p->i - 1);
    if (one_more && k == T_END) {
        int odd = odd_block(p, true);
        return odd >= 0 ? say(p, "one end too many: is it that of line %d?", line_of(p, odd))
                        : say(p, "one end too many");
    }
    bool closes = k == ')' || k == '}' || k == ',', after_value = before == T_END;
    after_value = after_value || before == ')' || before == '}' || begins_value(before);
    if (closes && open_bracket(p, p->i) >= 0 && (one_missing || after_value))
        return say_no_end(p, block_in_bracket(p));
    if (!one_missing && !one_more) return false;
    int opening = odd_block(p, false);
    bool outside = line_of(p, p->i) > line_of(p, p->i - 1) && opening >= 0 &&
                   indentation(p, p->i) <= indentation(p, opening);
    if (one_missing && outside) return say_no_end(p, opening);
    if (k != T_EOF && k != T_ELSE && k != T_ELSEIF && k != T_UNTIL && k != T_END && !closes)
        return say(p, "return ends its block; do return x end leaves earlier");
    return one_missing && say_no_end(p, opening);
}

/* ---- The rules ------------------------------------------------------------------------------- */

/* Exact ones first: a later rule may match what an earlier one explains better. */
static rule *const rules[] = {
    text_or_number,   character,    compound_assignment,
    increment,        comparison,   logic,
    other_operators,  comment,      foreign_word,
    block_with_colon, loop,         block_with_braces,
    index_or_list,    parameters,   block_end,
    keyword,          missing_word, bracket,
};

static bool try_rules(problem *p) {
    for (size_t k = 0; k < sizeof rules / sizeof *rules; k++) {
        int top = lua_gettop(p->L);
        if (rules[k](p)) {
            lua_copy(p->L, -1, top + 1);
            lua_settop(p->L, top + 1);
            return true;
        }
        lua_settop(p->L, top);
    }
    return false;
}

/* Push the tokens of the text as a block of memory. */
static const token *push_tokens(lua_State *L, const char *text, size_t size, int *count) {
    token *list = NULL;
    for (int pass = 0; pass < 2; pass++) {
        lexer at;
        *count = 0;
        for (lexer_begin(&at, text, size);; lexer_next(&at)) {
            if (list) list[*count] = (token){at.start, at.end, at.kind, at.line};
            ++*count;
            if (at.kind == T_EOF) break;
        }
        if (!list) list = lua_newuserdatauv(L, (size_t)*count * sizeof *list, 0);
    }
    return list;
}

/* Whether Lua's message is about token i. */
static bool is_near(const problem *p, int i, const char *near) {
    if (strncmp(near, "<eof>", 5) == 0) return kind(p, i) == T_EOF;
    if (strncmp(near, "'<\\", 3) == 0) return kind(p, i) >= 128 && kind(p, i) <= 255;
    size_t length = p->at[i].end - p->at[i].start;
    bool whole = near[0] == '\'' && strlen(near) >= length + 2 && near[length + 1] == '\'';
    bool prefix = says(p, "unfinished") || says(p, "malformed");
    return (whole || prefix) && near[0] == '\'' &&
           memcmp(near + 1, p->text + p->at[i].start, whole ? length : (near[1] != 0 ? 1 : 0)) == 0;
}

bool syntax_push_hint(lua_State *L, const char *text, size_t size, int line, const char *message) {
    const char *near = strstr(message, " near ");
    if (!near && !strstr(message, "no visible label")) return false;
    luaL_checkstack(L, 20, "a hint");
    int top = lua_gettop(L);
    problem p = {.L = L, .text = text, .message = message};
    p.at = push_tokens(L, text, size, &p.count);
    for (p.i = 0; p.i < p.count; p.i++) {
        bool there = p.at[p.i].line == line || kind(&p, p.i) == T_EOF;
        if (!there || (near && !is_near(&p, p.i, near + strlen(" near ")))) continue;
        if (!try_rules(&p)) continue;
        lua_replace(L, top + 1);
        lua_settop(L, top + 1);
        return true;
    }
    lua_settop(L, top);
    return false;
}
