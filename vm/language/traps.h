/* Lua traps that metamethods cannot catch, closed by rewriting a script's text before it is loaded.
 *
 * Lua never asks a value whether it is true, and compares values of different types without asking
 * either. So `if m.gt(x, 0) then` would always hold and `loss == 0` never. The rewriter parses the
 * whole grammar of Lua 5.4 (the text is known to compile) and wraps operands, on the same line:
 *
 *   if E, while E, until E, elseif E, not E     E becomes   trap.test(E)
 *   E and F, E or F                             E becomes   trap.choose(E)
 *   E == F, E ~= F                              becomes     trap.equal(E, F), trap.differ(E, F)
 *   return f(x)                                 becomes     return trap.result(f(x))
 *
 * The first three raise for tensors and return E's first value otherwise, as Lua itself would. The
 * last retains the frame of a tail call, so that errors and origins name the line of the return; it
 * costs the stack that proper tail calls would have saved. `choose` lets a tensor pass unless it
 * is a comparison's result: `mask or default` asks whether there is a mask. `test` does not let
 * any tensor pass: `if mask ~= nil` asks that. Operands that cannot be tensors stay as they are.
 * Embedded files are not rewritten.
 *
 * Of a script that an editor asks about (TRAPS_OBSERVED) also the values of expressions are noted,
 * with the bytes that they begin and end at (vm/known/values.c):
 *
 *   a:f(x), a + b                    becomes   trap.seen(N, begin, end, a, ..., begin, end, a:f(x))
 *   x, self.wq as a whole expression becomes   trap.seen(0, begin, end, x)
 *   function(x, y)                   becomes   function(x, y) trap.seen(2, begin, end, x, ...);
 *
 * N: names that are operands or receivers of the call come first, since Lua's own messages name
 * such operands (a nil value (local 'x')) only where they are not wrapped. */
#ifndef ML_TRAPS_H
#define ML_TRAPS_H

#include <lua.h>
#include <stddef.h>

#include "runtime/base/memory.h"
#include "runtime/base/status.h"

typedef enum {
    TRAPS_SCRIPT,
    TRAPS_INPUT, /* of the prompt: locals of the outermost block become globals, so that they stay
                  */
    TRAPS_OBSERVED,
} traps_kind;

/* The rewritten text: a chunk that, called with the table of traps, returns the script's function.
 * NULL where no change is needed. Raises. */
char *traps_rewrite(const char *text, size_t size, traps_kind kind, ml_arena *arena,
                    size_t *result_size);
void traps_register(lua_State *L);

#endif
