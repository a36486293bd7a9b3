/* Hints for syntax errors: what a text that Lua refuses was probably meant to say. */
#ifndef ML_SYNTAX_H
#define ML_SYNTAX_H

#include <lua.h>
#include <stdbool.h>

/* Push a hint for Lua's message ("'then' expected near '='") about a line of the text, or return
 * false. The message is without its position. */
bool syntax_push_hint(lua_State *L, const char *text, size_t size, int line, const char *message);

#endif
