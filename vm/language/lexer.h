/* The tokens of a Lua text: for the rewriting of scripts (traps.h), for hints about syntax errors
 * (stdlib/syntax.lua) and for what a name in an error means (globals.c). It never fails: a text
 * that Lua refuses yields tokens too, an unknown character as itself and an unfinished string up to
 * the end of its line. */
#ifndef ML_LEXER_H
#define ML_LEXER_H

#include <stdbool.h>
#include <stddef.h>

typedef enum {
    T_EOF = 256, /* smaller ones are characters */
    T_NAME,
    T_NUMBER,
    T_STRING,
    /* keywords */
    T_AND,
    T_BREAK,
    T_DO,
    T_ELSE,
    T_ELSEIF,
    T_END,
    T_FALSE,
    T_FOR,
    T_FUNCTION,
    T_GOTO,
    T_IF,
    T_IN,
    T_LOCAL,
    T_NIL,
    T_NOT,
    T_OR,
    T_REPEAT,
    T_RETURN,
    T_THEN,
    T_TRUE,
    T_UNTIL,
    T_WHILE,
    /* operators of several characters; others are their character */
    T_EQ,
    T_NE,
    T_LE,
    T_GE,
    T_CONCAT,
    T_DOTS,
    T_IDIV,
    T_SHL,
    T_SHR,
    T_LABEL,
} token_kind;

typedef struct {
    const char *text;
    size_t size, next; /* next: first byte not scanned */
    int kind;          /* of the current token: a token_kind or a character */
    int line;          /* where the current token begins, from 1 */
    size_t start, end; /* current token */
    size_t last_end;   /* previous token */
} lexer;

void lexer_begin(lexer *s, const char *text, size_t size); /* at the first token */
void lexer_next(lexer *s);
/* Whether the current token is this text. */
bool lexer_is(const lexer *s, const char *text);

#endif
