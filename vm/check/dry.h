/* A dry run: a script runs, its programs are planned and return zeros. So do `mlua check` and
 * `mlua repl SCRIPT`.
 *
 * What a script prints after the first call of a program depends on zeros and is discarded
 * (output.h). A loop that waits for a loss to fall might never end: where CALLS calls, or SECONDS,
 * pass without a program that was not known, the script ends there as if by an error. */
#ifndef ML_DRY_H
#define ML_DRY_H

#include "vm/vm.h"

/* Call the function on top of the stack, a script's chunk, without arguments; pops it. Errors pass.
 */
void dry_call(lua_State *L);
/* The same, but programs run: a script that core.end_script may end. */
void dry_call_until(lua_State *L);
/* The same; then, of the prompt, also after an error, the chunk's local variables are globals: the
 * prompt knows them as the script left them. */
void dry_call_keeping(lua_State *L);
/* In a dry run: a program has been planned; a program is called. */
void dry_note_program(lua_State *L, const ml_plan *plan);
void dry_note_call(lua_State *L);
/* os.exit: the script ends, and what follows it is executed. */
_Noreturn void dry_exit(lua_State *L, int code);
/* Where the script was ended; NULL where it ended by itself. */
const char *dry_end(const ml_vm *vm, int *line);
void dry_register(lua_State *L);

#endif
