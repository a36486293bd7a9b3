/* Parts of the prompt that need no terminal: printing values, completing names. */
#ifndef ML_REPL_H
#define ML_REPL_H

#include "vm/vm.h"

struct editline;

/* Print the value at `index`: a tensor's type, bytes and origin; a table's first items. */
void repl_print(lua_State *L, int index);
/* Elements in row-major order; names of the axes may be NULL. */
typedef struct {
    ml_dtype dtype;
    int rank;
    const int64_t *size;
    const char *const *names;
    const double *values;
} repl_array;
/* Print the first rows and columns, mean and extremes. */
void repl_print_array(const repl_array *a);
/* As repl_print, with the numbers of tensors, which are computed here, and of host arrays
 * (repl_values.c). */
void repl_print_values(lua_State *L, int index);
/* Complete the name that ends the text: insert what is certain into the line; where several names
 * are possible print them and return true, so that the line is shown again. */
bool repl_complete(lua_State *L, struct editline *edit, const char *text, size_t length);
/* The names that could continue the text, as a sorted list on top of the stack; the value is the
 * length of the part that they replace. */
size_t repl_candidates(lua_State *L, const char *text, size_t length);

#endif
