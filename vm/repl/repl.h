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
/* Signature and text of a function, what else there is to know of another value (repl_help.c). */
void repl_print_help(lua_State *L, int index);
/* The same of the first `count` values of the stack, of what texts name; of the prompt for none. */
void repl_help(lua_State *L, int count);
/* Push what `help` is at the prompt: prints itself, or describes its argument. */
void repl_push_help(lua_State *L);

/* What an input asks for (repl_commands.c): "= x" for values, ":mem x" for memory. */
typedef enum {
    REPL_EXPRESSION,
    REPL_VALUES,
    REPL_CHECK,
    REPL_MEM,
    REPL_SHARD,
    REPL_HELP,
    REPL_UNKNOWN
} repl_command;
const char *repl_command_name(int i); /* NULL after the last */
/* *rest: the expression behind it. */
repl_command repl_read_command(const char *text, const char **rest);
/* Of REPL_UNKNOWN push a message. The chunk is "@[3]". */
void repl_push_unknown(lua_State *L, const char *chunk, const char *text);
/* Report all values of the stack; what there is without any. */
void repl_run_command(lua_State *L, repl_command command);

/* Complete the name that ends the text: insert what is certain into the line; where several names
 * are possible print them and return true, so that the line is shown again. */
bool repl_complete(lua_State *L, struct editline *edit, const char *text, size_t length);
/* The names that could continue the text, as a sorted list on top of the stack; the value is the
 * length of the part that they replace. */
size_t repl_candidates(lua_State *L, const char *text, size_t length);

#endif
