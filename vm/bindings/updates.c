/* What states are assigned while a program is traced. Models assign tens of thousands of them, so
 * that the list is no table: Lua sees {State, Tensor} pairs of it, made when it asks for one. */
#include <string.h>

#include "vm/vm.h"

static const char *const updates_class = "updates";

struct vm_updates {
    ml_arena *arena; /* NULL: none was assigned yet */
    ML_VEC(ml_update) list;
    ml_index places; /* by state: where it is in the list */
};

static vm_updates *check_updates(lua_State *L) {
    return luaL_checkudata(L, 1, updates_class);
}

static int updates_gc(lua_State *L) {
    vm_updates *u = check_updates(L);
    if (u->arena) ml_arena_free(u->arena);
    *u = (vm_updates){0};
    return 0;
}

/* ---- Adding ---------------------------------------------------------------------------------- */

typedef struct {
    vm_updates *updates;
    ml_update update;
} add_call;

/* The last assignment counts, in the place of the first. */
static void add_update(void *argument) {
    add_call *call = argument;
    vm_updates *u = call->updates;
    const uint64_t hash = ml_mix(call->update.state, 0);
    uint32_t cursor = 0, at;
    if (!u->arena && (u->arena = ml_arena_new()) == NULL)
        ml_raise(ML_NO_MEMORY, "out of memory: an assignment cannot be noted");
    u->places.arena = u->arena;
    while ((at = ml_index_next(&u->places, hash, &cursor)) != ML_INDEX_NONE)
        if (u->list.at[at].state == call->update.state) {
            u->list.at[at] = call->update;
            return;
        }
    at = u->list.count;
    *ML_PUSH(u->arena, &u->list) = call->update;
    ml_index_add(&u->places, hash, at);
}

void vm_add_update(lua_State *L, uint32_t state, ml_ref value) {
    add_call call = {vm_of(L)->updates, {state, value}};
    vm_protect(L, add_update, &call);
}

/* ---- Taking ---------------------------------------------------------------------------------- */

/* Push an empty list, which assignments go to from now on. */
static void push_new(lua_State *L) {
    vm_updates *u = lua_newuserdatauv(L, sizeof *u, 0);
    *u = (vm_updates){0};
    luaL_setmetatable(L, updates_class);
    lua_pushvalue(L, -1);
    lua_setfield(L, LUA_REGISTRYINDEX, "mlua.updates");
    vm_of(L)->updates = u;
}

static int core_take_updates(lua_State *L) {
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.updates");
    push_new(L);
    lua_pop(L, 1);
    return 1;
}

bool vm_to_updates(lua_State *L, int index, const ml_update **list, int *count) {
    const vm_updates *u = luaL_testudata(L, index, updates_class);
    if (!u) return false;
    *list = u->list.at;
    *count = (int)u->list.count;
    return true;
}

static int updates_length(lua_State *L) {
    lua_pushinteger(L, check_updates(L)->list.count);
    return 1;
}

static int updates_index(lua_State *L) {
    const vm_updates *u = check_updates(L);
    const lua_Integer i = luaL_checkinteger(L, 2);
    if (i < 1 || i > u->list.count) return 0;
    lua_createtable(L, 2, 0);
    vm_push_state(L, u->list.at[i - 1].state);
    lua_rawseti(L, -2, 1);
    vm_push_tensor(L, u->list.at[i - 1].value);
    lua_rawseti(L, -2, 2);
    return 1;
}

static const vm_entry functions[] = {
    {"take_updates", core_take_updates, "-> Updates",
     "the assignments to states since the last call: a list of {State, Tensor}"},
    {0}};

void vm_updates_register(lua_State *L) {
    static const vm_entry none[] = {{0}};
    vm_register(L, functions);
    vm_new_class(L, updates_class, none, updates_index, updates_gc);
    lua_pop(L, 1);
    luaL_getmetatable(L, updates_class);
    vm_set_function(L, "__len", updates_length);
    lua_pop(L, 1);
    push_new(L);
    lua_pop(L, 1);
}
