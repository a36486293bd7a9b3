/* Several programs in Lua: made together, and only where all of them fit in memory. */
#include "vm/vm.h"

#include <string.h>

/* core.together(fn): makes the programs of fn, whose kernels are compiled at once. */
static int core_together(lua_State *L) {
    ml_vm *vm = vm_of(L);
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    ml_session_together(vm->session, true);
    if (lua_pcall(L, 0, LUA_MULTRET, 0) != LUA_OK) {
        ml_session_together(vm->session, false);
        return lua_error(L);
    }
    vm_check(L, ml_session_compile(vm->session));
    return lua_gettop(L);
}

/* Whether the error on top of the stack is that a plan does not fit. */
static bool is_too_large(lua_State *L) {
    const ml_error *last = ml_error_last();
    const size_t length = strcspn(last->text, "\n");
    char sentence[sizeof last->text];
    memcpy(sentence, last->text, length);
    sentence[length] = '\0';
    const bool same = strstr(luaL_tolstring(L, -1, NULL), sentence) != NULL;
    lua_pop(L, 1);
    return same && last->status == ML_TOO_LARGE;
}

/* core.fitting(fn): what fn gives, which makes programs; nothing where it gives nothing or one of
 * them does not fit in memory, and then all that fn made are dropped. Ranks plan and drop alike. */
static int core_fitting(lua_State *L) {
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.programs"); /* where nothing runs */
    lua_insert(L, 1);
    const lua_Integer before = (lua_Integer)lua_rawlen(L, 1);
    const int status = lua_pcall(L, 0, LUA_MULTRET, 0);
    if (status != LUA_OK && !is_too_large(L)) return lua_error(L);
    if (status == LUA_OK && !lua_isnoneornil(L, 2)) return lua_gettop(L) - 1;
    for (lua_Integer i = (lua_Integer)lua_rawlen(L, 1); i > before; i--) {
        lua_pushnil(L);
        lua_rawseti(L, 1, i);
    }
    lua_settop(L, 0);
    lua_gc(L, LUA_GCCOLLECT); /* their memory is for the next ones */
    return 0;
}

static const vm_entry functions[] = {
    {"together", core_together, "fn: function -> any",
     "call fn(); the kernels of all programs that it makes are compiled at once"},
    {"fitting", core_fitting, "fn: function -> any",
     "call fn(), which makes programs; nil where it gives nil or one of them does not fit in "
     "memory, "
     "and then they are dropped"},
    {0}};

void vm_programs_register(lua_State *L) {
    vm_register(L, functions);
}
