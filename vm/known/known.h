/* What is known about a script once `mlua check --facts` has traced it, in whole or as far as it
 * came: the values of its expressions with their places in the text, the steps of its programs by
 * line, reports, hints, and the error that ended it. The prompt, `mlua check`, `mlua watch` and
 * `mlua lsp` read the same records: graph, programs, hints and reports of one Lua state.
 *
 * values.c notes expressions while the script runs, facts.c gives what C knows to Lua,
 * stdlib/known.lua makes one JSON object of it. confine.c limits a process that traces a script of
 * somebody else's folder. */
#ifndef ML_KNOWN_H
#define ML_KNOWN_H

#include "vm/vm.h"

/* A value of an expression, as its first evaluation gave it. */
typedef enum { KNOWN_TENSOR, KNOWN_STATE, KNOWN_AXIS, KNOWN_OTHER } known_kind;
enum { KNOWN_OTHERS = 3 };
typedef struct {
    known_kind kind;
    const char *file, *module, *text; /* text: of OTHER, a description */
    int line;                         /* where the statement is */
    size_t begin, end;                /* bytes of the text, as Lua reads it */
    ml_ref node;                      /* TENSOR, STATE */
    uint32_t state;
    ml_type type;                /* AXIS: of one axis */
    ml_type other[KNOWN_OTHERS]; /* further types of the expression, and their number */
    int others;
} known_value;
typedef struct {
    ml_arena *arena;
    ML_VEC(known_value) values;
    bool paused; /* expressions that are evaluated now are not recorded */
    bool pending_written;
} known_values;

known_values *known_of(lua_State *L); /* NULL: nothing is noted */
void known_register(lua_State *L);    /* adds trap.seen; the traps are registered */
/* Of --buffers: what vm_load_file takes in the place of files. */
void known_set_buffers(lua_State *L, const char *path);
/* Once the forward pass is traced, before its gradients, optimizer and plan: where the script is
 * large, write what is known so far, as an object of its own with "pending". */
void known_write_pending(lua_State *L);
/* After the script: write the JSON object. `failed`: the error is on top of the stack; pops it. */
void known_write(lua_State *L, bool failed);

/* Restrict this process, before it has threads, to reading below `folders` ("a:b") and where
 * libraries are: no writing of files, no processes, no network, 5 s of processor time until
 * the first program is planned and 15 s in all, 2 GiB.
 * Gives what the kernel enforces: "limits", "limits, calls", "limits, calls, files". */
const char *known_confine(const char *folders);
/* A program is to be planned: from now on the limit is that of script and plans. */
void known_confine_plan(void);

#endif
