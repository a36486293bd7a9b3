/* help(m.gelu), and a bare m.gelu: what stdlib/help.lua needs of the prompt. */
#include <string.h>

#include "vm/repl/repl.h"

static int print(lua_State *L) {
    repl_print(L, 1);
    return 0;
}

/* Of a function of Lua: the text of its file, its line, and the file's name where it is a script's.
 */
static int source(lua_State *L) {
    lua_Debug info;
    lua_pushvalue(L, 1);
    lua_getinfo(L, ">S", &info);
    if (info.what[0] == 'C' || info.linedefined < 1) return 0;
    vm_push_source(L, info.source);
    lua_pushinteger(L, info.linedefined);
    if (strncmp(info.source, VM_STDLIB, sizeof VM_STDLIB - 1) == 0) return 2;
    lua_pushstring(L, info.source + (info.source[0] == '@'));
    return 3;
}

static int global(lua_State *L) {
    vm_raw_global(L, luaL_checkstring(L, 1));
    return 1;
}

void repl_print_help(lua_State *L, int index) {
    index = lua_absindex(L, index);
    vm_push_library(L, "mlua.help", "describe");
    lua_pushvalue(L, index);
    lua_call(L, 1, 0);
}

void repl_help(lua_State *L, int count) {
    vm_push_library(L, "mlua.help", "explain");
    lua_insert(L, 1);
    lua_call(L, count, 0);
}

void repl_push_help(lua_State *L) {
    static const luaL_Reg functions[] = {
        {"print", print}, {"source", source}, {"global", global}, {NULL, NULL}};
    vm_push_library(L, "mlua.help", "start");
    luaL_newlib(L, functions);
    lua_call(L, 1, 1);
}
