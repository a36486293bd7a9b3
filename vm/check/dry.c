#include "vm/check/dry.h"

#include <string.h>

#include "runtime/base/clock.h"
#include "vm/cli/output.h"

enum { CALLS = 10000 };
static const double SECONDS = 1;

static const char *const known_key = "mlua.known"; /* registry: hashes of graphs -> true */
static char ended;                                 /* its address is the error that ends a script */

void dry_note_program(lua_State *L, const ml_plan *plan) {
    ml_vm *vm = vm_of(L);
    if (!vm->dry.runs) return;
    luaL_getsubtable(L, LUA_REGISTRYINDEX, known_key);
    lua_pushinteger(L, (lua_Integer)ml_graph_hash(plan->graph, 0)); /* without the inputs' ids */
    lua_pushvalue(L, -1);
    if (lua_rawget(L, -3) == LUA_TNIL) { /* the same program again, made in a loop, is no news */
        lua_pushvalue(L, -2);
        lua_pushboolean(L, 1);
        lua_rawset(L, -5);
        vm->dry.calls = 0;
    }
    lua_pop(L, 3);
}

/* Between two instructions of a script that has caught the error: it cannot go on. */
static void end_again(lua_State *L, lua_Debug *frame) {
    (void)frame;
    lua_pushlightuserdata(L, &ended);
    lua_error(L);
}

static _Noreturn void end_script(lua_State *L) {
    ml_vm *vm = vm_of(L);
    vm->dry.ended = true;
    lua_sethook(L, end_again, LUA_MASKCOUNT, 1);
    lua_sethook(vm->L, end_again, LUA_MASKCOUNT, 1); /* L may be a coroutine */
    lua_pushlightuserdata(L, &ended);
    lua_error(L);
    __builtin_unreachable();
}

void dry_exit(lua_State *L, int code) {
    vm_of(L)->dry.code = code;
    end_script(L);
}

/* The script's loop does not end. */
static _Noreturn void stop_script(lua_State *L) {
    ml_vm *vm = vm_of(L);
    lua_Debug frame;
    if (!vm->dry.ended && vm_script_frame(L, &frame)) {
        vm->dry.file = vm_intern(L, frame.source + (frame.source[0] == '@'));
        vm->dry.line = frame.currentline;
    }
    end_script(L);
}

void dry_note_call(lua_State *L) {
    ml_vm *vm = vm_of(L);
    if (!vm->dry.runs) return;
    output_discard(vm, true);
    vm->dry.called = true;
    if (vm->dry.calls++ == 0) vm->dry.since = ml_clock_now();
    bool long_enough = vm->dry.calls > 1 && ml_clock_now() - vm->dry.since > SECONDS;
    if (vm->dry.ended || vm->dry.calls > CALLS || long_enough) stop_script(L);
}

const char *dry_end(const ml_vm *vm, int *line) {
    *line = vm->dry.line;
    return vm->dry.ended ? vm->dry.file : NULL;
}

static bool is_end(lua_State *L, int index) {
    return lua_islightuserdata(L, index) && lua_touserdata(L, index) == &ended;
}

/* ---- The chunk's variables ------------------------------------------------------------------- */

static const char *const chunk_key = "mlua.chunk"; /* registry: the function that dry_call calls */
static const char *const locals_key = "mlua.locals"; /* registry: its variables, by name */

/* Of two variables of one name the later one is in scope. */
static void keep_locals(lua_State *L, lua_Debug *frame) {
    const char *name;
    luaL_checkstack(L, 8, "local variables");
    lua_newtable(L);
    for (int i = 1; (name = lua_getlocal(L, frame, i)) != NULL; i++) {
        if (name[0] != '(') {
            lua_createtable(L, 1, 0); /* the value may be nil */
            lua_insert(L, -2);
            lua_rawseti(L, -2, 1);
            lua_setfield(L, -2, name);
        } else {
            lua_pop(L, 1);
        }
    }
    lua_setfield(L, LUA_REGISTRYINDEX, locals_key);
}

static bool is_chunk(lua_State *L, lua_Debug *frame) {
    lua_getinfo(L, "f", frame);
    lua_getfield(L, LUA_REGISTRYINDEX, chunk_key);
    bool same = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
    return same;
}

static void on_return(lua_State *L, lua_Debug *frame) {
    if (is_chunk(L, frame)) keep_locals(L, frame);
}

/* Where an error is raised the chunk's frame is still there. */
static void keep_before_error(lua_State *L) {
    lua_Debug frame;
    for (int level = 0; lua_getstack(L, level, &frame); level++)
        if (is_chunk(L, &frame)) {
            keep_locals(L, &frame);
            return;
        }
}

static void set_globals(lua_State *L) {
    if (lua_getfield(L, LUA_REGISTRYINDEX, locals_key) == LUA_TTABLE) {
        lua_pushnil(L);
        while (lua_next(L, -2)) {
            lua_rawgeti(L, -1, 1);
            lua_setglobal(L, lua_tostring(L, -3));
            lua_pop(L, 1);
        }
    }
    lua_pop(L, 1);
}

/* ---- The call -------------------------------------------------------------------------------- */

/* Whether the script itself raised the error: by assert or error. */
static bool is_raised_by_script(lua_State *L) {
    static const char *const names[] = {"assert", "error"};
    lua_Debug raiser, caller;
    if (!lua_getstack(L, 1, &raiser) || !lua_getstack(L, 2, &caller)) return false;
    lua_getinfo(L, "S", &caller);
    if (!lua_getinfo(L, "f", &raiser) || caller.source[0] != '@') return lua_pop(L, 1), false;
    bool same = false;
    for (int i = 0; i < 2; i++) {
        lua_getglobal(L, names[i]);
        same |= lua_rawequal(L, -1, -2);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    return same;
}

/* A check of values, which are zeros here, is no mistake: the script ends there. */
static bool ends_at_check(lua_State *L) {
    ml_vm *vm = vm_of(L);
    lua_Debug frame;
    if (!vm->dry.called || vm->dry.ended || vm->options->mode != VM_CHECK) return false;
    if (lua_type(L, 1) != LUA_TSTRING || !is_raised_by_script(L)) return false;
    if (!vm_script_frame(L, &frame)) return false;
    vm->dry.ended = true;
    vm->dry.file = vm_intern(L, frame.source + (frame.source[0] == '@'));
    vm->dry.line = frame.currentline;
    const char *text = lua_tostring(L, 1);
    const char *place = lua_pushfstring(L, "%s:%d: ", vm->dry.file, vm->dry.line);
    if (strncmp(text, place, strlen(place)) == 0) text += strlen(place);
    vm->dry.message = vm_intern(L, text);
    lua_pop(L, 1);
    return true;
}

static int handle_message(lua_State *L) {
    if (is_end(L, 1)) return 1;
    if (!ends_at_check(L)) return vm_message_handler(L);
    lua_pushlightuserdata(L, &ended);
    return 1;
}

static int handle_and_keep(lua_State *L) {
    keep_before_error(L);
    return handle_message(L);
}

static void call(lua_State *L, bool keeps, bool dry) {
    ml_vm *vm = vm_of(L);
    bool before = vm->dry.runs;
    if (keeps) {
        lua_pushvalue(L, -1);
        lua_setfield(L, LUA_REGISTRYINDEX, chunk_key);
        lua_sethook(L, on_return, LUA_MASKRET, 0);
    }
    lua_pushcfunction(L, keeps ? handle_and_keep : handle_message);
    lua_insert(L, -2);
    vm->dry.runs = dry;
    int status = lua_pcall(L, 0, 0, -2);
    vm->dry.runs = before;
    output_discard(vm, false);
    if (keeps || vm->dry.ended) lua_sethook(L, NULL, 0, 0);
    if (keeps) set_globals(L);
    if (status != LUA_OK && !is_end(L, -1)) lua_error(L);
    lua_pop(L, status == LUA_OK ? 1 : 2);
}

void dry_call(lua_State *L) {
    call(L, false, true);
}

void dry_call_keeping(lua_State *L) {
    call(L, true, true);
}

void dry_call_until(lua_State *L) {
    call(L, false, false);
}

static int core_end_script(lua_State *L) {
    end_script(L);
}

static int core_discard_output(lua_State *L) {
    ml_vm *vm = vm_of(L);
    bool before = vm->discards;
    if (vm->dry.runs) output_discard(vm, lua_toboolean(L, 1));
    lua_pushboolean(L, before);
    return 1;
}

static const vm_entry functions[] = {
    {"discard_output", core_discard_output, "discard: boolean -> boolean",
     "in a check: whether standard output is discarded from now on; gives whether it was"},
    {"end_script", core_end_script, "",
     "end the script here, as if it were over: where mlua generate or export has its model"},
    {0}};

void dry_register(lua_State *L) {
    vm_register(L, functions);
}
