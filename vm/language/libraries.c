/* Where the standard libraries of scripts differ from plain Lua's (globals.c and order.c have
 * more).
 *
 * math.random follows the seed of the command line or of m.config, and so does math.randomseed()
 * without arguments; with arguments it is Lua's. All ranks draw the same numbers: where they set
 * it different seeds, the next program that is made or run raises.
 * debug has traceback alone: its other functions can break what C relies on.
 * os.setlocale knows the locale "C": in others a decimal point is a comma, in kernels and JSON too.
 * io and os.execute are Lua's: a script is a program and has its user's rights. */
#include "vm/vm.h"

#include <string.h>

#include "runtime/comm/comm.h"

static const char *const seed_key = "mlua.randomseed"; /* registry: Lua's math.randomseed */

/* ---- Randomness ------------------------------------------------------------------------------ */

static void follow_seed(lua_State *L, int results) {
    lua_getfield(L, LUA_REGISTRYINDEX, seed_key);
    lua_pushinteger(L, ml_session_seed(vm_of(L)->session));
    lua_call(L, 1, results);
}

void vm_seed_random(lua_State *L) {
    if (!vm_of(L)->random.given) follow_seed(L, 0);
}

/* The seeds that the script sets, and where, for the comparison between ranks. */
static void note_seed(lua_State *L) {
    ml_vm *vm = vm_of(L);
    lua_Integer seeds[] = {lua_tointeger(L, 1), lua_tointeger(L, 2)};
    vm->random.given = true;
    vm->random.hash = ml_hash(seeds, sizeof seeds, vm->random.hash);
    ml_origin origin;
    vm_origin(L, &origin);
    vm->random.file = origin.file;
    vm->random.line = origin.line;
}

static int random_seed(lua_State *L) {
    int count = lua_gettop(L);
    if (count) {
        luaL_checkinteger(L, 1);
        luaL_optinteger(L, 2, 0);
        lua_getfield(L, LUA_REGISTRYINDEX, seed_key);
        for (int i = 1; i <= count; i++) lua_pushvalue(L, i);
        lua_call(L, count, LUA_MULTRET);
        note_seed(L);
    } else {
        vm_of(L)->random.given = false;
        follow_seed(L, LUA_MULTRET);
    }
    return lua_gettop(L) - count;
}

void vm_compare_random(lua_State *L) {
    ml_vm *vm = vm_of(L);
    if (!vm->options->comm || vm->random.compared == vm->random.hash) return;
    vm->random.compared = vm->random.hash;
    char what[256];
    snprintf(what, sizeof what, "the seed of math.randomseed (%s:%d)",
             vm->random.file ? vm->random.file : "?", vm->random.line);
    vm_check(L, ml_comm_agree(vm->options->comm, vm->random.hash, what));
}

/* ---- debug ----------------------------------------------------------------------------------- */

static int missing_debug(lua_State *L) {
    const char *name = luaL_tolstring(L, 2, NULL);
    const char *help = "debug.traceback() stays; the message of an error has its line: "
                       "select(2, pcall(f))";
    return vm_fail(L, help, "debug.%s is not there: scripts have debug.traceback alone", name);
}

/* Replace the library's table, wherever it is found. */
static void reduce_debug(lua_State *L) {
    lua_newtable(L);
    lua_getglobal(L, LUA_DBLIBNAME);
    lua_getfield(L, -1, "traceback");
    lua_setfield(L, -3, "traceback");
    lua_pop(L, 1);
    lua_createtable(L, 0, 1);
    vm_set_function(L, "__index", missing_debug);
    lua_setmetatable(L, -2);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_pushvalue(L, -2);
    lua_setfield(L, -2, LUA_DBLIBNAME);
    lua_pop(L, 1);
    lua_setglobal(L, LUA_DBLIBNAME);
}

/* ---- os -------------------------------------------------------------------------------------- */

/* As where the system has no other locale. */
static int set_locale(lua_State *L) {
    static const char *const categories[] = {"all",     "collate", "ctype", "monetary",
                                             "numeric", "time",    NULL};
    const char *locale = luaL_optstring(L, 1, NULL);
    luaL_checkoption(L, 2, "all", categories);
    bool known = !locale || strcmp(locale, "") == 0 || strcmp(locale, "C") == 0 ||
                 strcmp(locale, "POSIX") == 0;
    lua_pushstring(L, known ? "C" : NULL);
    return 1;
}

void vm_libraries_register(lua_State *L) {
    lua_getglobal(L, LUA_MATHLIBNAME);
    lua_getfield(L, -1, "randomseed");
    lua_setfield(L, LUA_REGISTRYINDEX, seed_key);
    vm_set_function(L, "randomseed", random_seed);
    lua_getglobal(L, LUA_OSLIBNAME);
    vm_set_function(L, "setlocale", set_locale);
    lua_pop(L, 2);
    reduce_debug(L);
    vm_seed_random(L);
}
