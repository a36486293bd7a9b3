#include "vm/language/lexer.h"

#include <string.h>

static const char *const keywords[] = {"and",   "break", "do",       "else", "elseif", "end",
                                       "false", "for",   "function", "goto", "if",     "in",
                                       "local", "nil",   "not",      "or",   "repeat", "return",
                                       "then",  "true",  "until",    "while"};

/* Lua's classes, whatever the locale. */
static bool is_letter(int c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static bool is_digit(int c) {
    return c >= '0' && c <= '9';
}

static bool is_space(int c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static int peek(const lexer *s, size_t ahead) {
    return s->next + ahead < s->size ? (unsigned char)s->text[s->next + ahead] : 0;
}

/* At '[': the number of '=' of a long bracket, or -1. */
static int long_bracket(const lexer *s) {
    int level = 0;
    while (peek(s, 1 + (size_t)level) == '=') level++;
    return peek(s, 1 + (size_t)level) == '[' ? level : -1;
}

static void skip_long(lexer *s, int level) {
    s->next += (size_t)level + 2;
    for (; s->next < s->size; s->next++) {
        if (s->text[s->next] != ']') continue;
        int equals = 0;
        while (peek(s, 1 + (size_t)equals) == '=') equals++;
        if (equals == level && peek(s, 1 + (size_t)equals) == ']') {
            s->next += (size_t)level + 2;
            return;
        }
    }
}

static void skip_space(lexer *s) {
    while (s->next < s->size) {
        if (is_space(peek(s, 0))) {
            s->next++;
        } else if (peek(s, 0) == '-' && peek(s, 1) == '-') {
            s->next += 2;
            int level = peek(s, 0) == '[' ? long_bracket(s) : -1;
            if (level >= 0)
                skip_long(s, level);
            else
                while (s->next < s->size && s->text[s->next] != '\n') s->next++;
        } else {
            return;
        }
    }
}

static void skip_string(lexer *s, int quote) {
    for (s->next++; s->next < s->size && s->text[s->next] != quote; s->next++) {
        if (s->text[s->next] == '\n') return; /* unfinished */
        if (s->text[s->next] != '\\') continue;
        s->next++;
        if (peek(s, 0) == 'z')
            while (is_space(peek(s, 1))) s->next++;
        if (peek(s, 0) == '\r' && peek(s, 1) == '\n') s->next++;
    }
    s->next++;
}

static void skip_number(lexer *s) {
    const char *exponents = peek(s, 0) == '0' && (peek(s, 1) | 32) == 'x' ? "Pp" : "Ee";
    s->next++;
    for (;;) {
        int c = peek(s, 0);
        if (c && strchr(exponents, c)) {
            s->next++;
            if (peek(s, 0) == '+' || peek(s, 0) == '-') s->next++;
        } else if (is_letter(c) || is_digit(c) || c == '.') {
            s->next++;
        } else {
            return;
        }
    }
}

static int scan_word(lexer *s) {
    size_t from = s->next;
    while (is_letter(peek(s, 0)) || is_digit(peek(s, 0))) s->next++;
    size_t length = s->next - from;
    for (size_t i = 0; i < sizeof keywords / sizeof *keywords; i++)
        if (strlen(keywords[i]) == length && memcmp(keywords[i], s->text + from, length) == 0)
            return T_AND + (int)i;
    return T_NAME;
}

static int scan_operator(lexer *s) {
    static const struct {
        char text[3];
        int kind;
    } pairs[] = {{"==", T_EQ},   {"~=", T_NE},  {"<=", T_LE},  {">=", T_GE},   {"..", T_CONCAT},
                 {"//", T_IDIV}, {"<<", T_SHL}, {">>", T_SHR}, {"::", T_LABEL}};
    int c = peek(s, 0);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (c != pairs[i].text[0] || peek(s, 1) != pairs[i].text[1]) continue;
        s->next += 2;
        if (pairs[i].kind == T_CONCAT && peek(s, 0) == '.') {
            s->next++;
            return T_DOTS;
        }
        return pairs[i].kind;
    }
    s->next++;
    return c;
}

void lexer_next(lexer *s) {
    s->last_end = s->end;
    skip_space(s);
    for (size_t i = s->start; i < s->next; i++) s->line += s->text[i] == '\n';
    s->start = s->next;
    int c = peek(s, 0);
    if (s->next >= s->size) {
        s->kind = T_EOF;
    } else if (is_letter(c)) {
        s->kind = scan_word(s);
    } else if (is_digit(c) || (c == '.' && is_digit(peek(s, 1)))) {
        skip_number(s);
        s->kind = T_NUMBER;
    } else if (c == '"' || c == '\'') {
        skip_string(s, c);
        s->kind = T_STRING;
    } else if (c == '[' && long_bracket(s) >= 0) {
        skip_long(s, long_bracket(s));
        s->kind = T_STRING;
    } else {
        s->kind = scan_operator(s);
    }
    if (s->next > s->size) s->next = s->size; /* of an unfinished string */
    s->end = s->next;
}

void lexer_begin(lexer *s, const char *text, size_t size) {
    *s = (lexer){.text = text, .size = size, .line = 1};
    lexer_next(s);
}

bool lexer_is(const lexer *s, const char *text) {
    size_t length = strlen(text);
    return s->end - s->start == length && memcmp(s->text + s->start, text, length) == 0;
}
