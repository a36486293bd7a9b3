/* Names that a script reads and never set.
 *
 * In Lua such a name is nil, and `causal = True` trains a model that is not causal. So the table of
 * globals has a metatable: a name that was never assigned raises, with what was probably meant. A
 * name that was assigned, also nil, is declared and reads as in Lua; rawget(_G, name) asks for
 * any name. Tables that a script passes to load() as an environment have no such metatable. Names
 * that other Lua versions have and 5.4 lacks read as nil, because libraries ask for them: `unpack
 * or table.unpack`; calling one raises by itself, and stdlib/hints.lua names what 5.4 has.
 *
 * The files of stdlib/ see a copy of the table, made before the script begins: a script that sets
 * `type` or `table` breaks only itself. */
#include "vm/vm.h"

#include <string.h>

static const char *const declared_key = "mlua.declared"; /* registry: name -> true */
static const char *const library_key = "mlua.globals";   /* registry: what stdlib/ sees of _G */

/* ---- What was probably meant ----------------------------------------------------------------- */

static int get_field(lua_State *L) {
    lua_gettable(L, 1);
    return 1;
}

/* Whether the table at `index` has the field; metamethods may raise, which is no. */
static bool has_field(lua_State *L, int index, const char *name) {
    index = lua_absindex(L, index);
    if (lua_type(L, index) != LUA_TTABLE) return false;
    lua_pushcfunction(L, get_field);
    lua_pushvalue(L, index);
    lua_pushstring(L, name);
    bool has = lua_pcall(L, 2, 1, 0) == LUA_OK && !lua_isnil(L, -1);
    lua_pop(L, 1);
    return has;
}

/* Where the table that a variable holds has the name as a field, add "cfg.name" to the text at
 * `help`. The value is on top, and is popped. */
static void offer_field(lua_State *L, const char *variable, const char *name, int help) {
    bool has = variable[0] != '(' && strcmp(variable, "_ENV") != 0 &&
               strncmp(variable, "mlua__", 6) != 0 && has_field(L, -1, name);
    lua_pop(L, 1);
    if (!has) return;
    const char *sofar = lua_tostring(L, help);
    lua_pushfstring(L, "%s%s.%s", sofar ? lua_pushfstring(L, "%s or ", sofar) : "did you mean ",
                    variable, name);
    lua_replace(L, help);
    lua_settop(L, help);
}

static void add_name(lua_State *L, int names, const char *name) {
    lua_pushstring(L, name);
    lua_rawseti(L, names, (lua_Integer)lua_rawlen(L, names) + 1);
}

/* Make the text (or nil) on top "did you mean cfg.embed or A.embed" for the variables of a frame;
 * their names go to the list at `names`. */
static void offer_fields(lua_State *L, lua_Debug *frame, const char *name, int names) {
    int help = lua_gettop(L);
    const char *variable;
    for (int i = 1; (variable = lua_getlocal(L, frame, i)) != NULL; i++) {
        add_name(L, names, variable);
        offer_field(L, variable, name, help);
    }
    lua_pushvalue(L, help);
    lua_getinfo(L, "f", frame);
    lua_replace(L, help);
    int function = help++;
    for (int i = 1; (variable = lua_getupvalue(L, function, i)) != NULL; i++) {
        add_name(L, names, variable);
        offer_field(L, variable, name, help);
    }
    lua_replace(L, function);
}

/* Likewise, with a question mark, for the innermost functions of scripts that have such a field:
 * the chunk's own variables are in scope, but of a function only those are known that it names. */
static void push_field_help(lua_State *L, const char *name, int names) {
    lua_Debug frame;
    lua_pushnil(L);
    for (int level = 0; lua_isnil(L, -1) && lua_getstack(L, level, &frame); level++) {
        lua_getinfo(L, "S", &frame);
        if (frame.what[0] == 'C' || strncmp(frame.source, VM_STDLIB, sizeof VM_STDLIB - 1) == 0)
            continue;
        offer_fields(L, &frame, name, names);
    }
    if (lua_isnil(L, -1)) return;
    lua_pushfstring(L, "%s?", lua_tostring(L, -1));
    lua_replace(L, -2);
}

/* name, list of names: what push_field_help pushes. */
static int field_help(lua_State *L) {
    push_field_help(L, luaL_checkstring(L, 1), 2);
    return 1;
}

/* Push the help line for a name that was never set, or nil (stdlib/hints.lua). */
static void push_help(lua_State *L, const char *name) {
    lua_Debug frame;
    luaL_checkstack(L, 40, "an error");
    bool script = vm_script_frame(L, &frame);
    vm_push_library(L, "mlua.hints", "undefined");
    lua_pushstring(L, name);
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_GLOBALS);
    lua_pushcfunction(L, field_help);
    if (script) vm_push_source(L, frame.source);
    if (script) lua_pushinteger(L, frame.currentline);
    lua_call(L, script ? 5 : 3, 1);
}

/* ---- The metatable --------------------------------------------------------------------------- */

/* globals, name -> value */
static int read_unknown(lua_State *L) {
    lua_settop(L, 2);
    if (lua_type(L, 2) != LUA_TSTRING) return 0;
    lua_getfield(L, LUA_REGISTRYINDEX, declared_key);
    lua_pushvalue(L, 2);
    if (lua_rawget(L, 3) != LUA_TNIL) return 0;
    const char *name = lua_tostring(L, 2);
    push_help(L, name);
    if (lua_isnil(L, -1)) return 0;
    return vm_fail(L, lua_tostring(L, -1), "the name \"%s\" is not defined", name);
}

/* globals, name, value */
static int set_unknown(lua_State *L) {
    lua_settop(L, 3);
    if (lua_type(L, 2) == LUA_TSTRING) {
        lua_getfield(L, LUA_REGISTRYINDEX, declared_key);
        lua_pushvalue(L, 2);
        lua_pushboolean(L, 1);
        lua_rawset(L, 4);
        lua_settop(L, 3);
    }
    lua_rawset(L, 1);
    return 0;
}

void vm_raw_global(lua_State *L, const char *name) {
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_GLOBALS);
    lua_pushstring(L, name);
    lua_rawget(L, -2);
    lua_remove(L, -2);
}

void vm_globals_register(lua_State *L) {
    lua_newtable(L);
    lua_setfield(L, LUA_REGISTRYINDEX, declared_key);
    static const luaL_Reg methods[] = {
        {"__index", read_unknown}, {"__newindex", set_unknown}, {NULL, NULL}};
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_GLOBALS);
    lua_newtable(L);
    int globals = lua_gettop(L) - 1, copy = globals + 1;
    lua_pushnil(L);
    while (lua_next(L, globals)) {
        lua_pushvalue(L, -2);
        lua_insert(L, -2);
        lua_rawset(L, copy);
    }
    luaL_newlib(L, methods);
    lua_pushvalue(L, -1);
    lua_setmetatable(L, globals);
    lua_setmetatable(L, copy);
    lua_setfield(L, LUA_REGISTRYINDEX, library_key);
    lua_pop(L, 1);
}

void vm_push_library_globals(lua_State *L) {
    lua_getfield(L, LUA_REGISTRYINDEX, library_key);
}

void vm_push_library(lua_State *L, const char *module, const char *name) {
    luaL_checkstack(L, 24, "a function of the library");
    vm_push_library_globals(L);
    lua_getfield(L, -1, "require");
    lua_pushstring(L, module);
    lua_call(L, 1, 1);
    lua_getfield(L, -1, name);
    lua_replace(L, -3);
    lua_pop(L, 1);
}
