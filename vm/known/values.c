/* The values of expressions, noted where the rewritten script calls trap.seen (traps.h). */
#include "vm/known/known.h"

#include <string.h>

static const char *const values_key = "mlua.known.values"; /* registry: the known_values */
static const char *const places_key = "mlua.known.places"; /* source -> place -> index */
enum { MOST_VALUES = 200000 };

static int free_values(lua_State *L) {
    known_values *all = lua_touserdata(L, 1);
    if (all->arena) ml_arena_free(all->arena);
    all->arena = NULL;
    return 0;
}

known_values *known_of(lua_State *L) {
    lua_getfield(L, LUA_REGISTRYINDEX, values_key);
    known_values *all = lua_touserdata(L, -1);
    lua_pop(L, 1);
    return all && all->arena ? all : NULL;
}

/* Push the table of a chunk's places. */
static void push_places(lua_State *L, const char *source) {
    luaL_getsubtable(L, LUA_REGISTRYINDEX, places_key);
    if (lua_rawgetp(L, -1, source) != LUA_TTABLE) {
        lua_pop(L, 1);
        lua_newtable(L);
        lua_pushvalue(L, -1);
        lua_rawsetp(L, -3, source);
    }
    lua_remove(L, -2);
}

/* Push what a table or another value is called, or nil: a module's title. Never raises. */
static void push_description(lua_State *L, int index) {
    index = lua_absindex(L, index);
    vm_push_library(L, "mlua.known", "describe");
    lua_pushvalue(L, index);
    if (lua_pcall(L, 1, 1, 0) != LUA_OK) lua_pop(L, 1), lua_pushnil(L);
}

/* False where nothing is to be said of the value. */
static bool read_value(lua_State *L, int index, known_value *value) {
    ml_vm *vm = vm_of(L);
    if (vm_is_class(L, index, vm_tensor_class)) {
        value->kind = KNOWN_TENSOR;
        value->node = *(ml_ref *)lua_touserdata(L, index);
        value->type = *ml_graph_type(vm->graph, value->node);
        return true;
    }
    if (vm_is_state(L, index, &value->state)) {
        value->kind = KNOWN_STATE;
        value->type = ml_graph_state(vm->graph, value->state)->type;
        return true;
    }
    if (vm_is_class(L, index, vm_axis_class)) {
        const vm_axis *axis = lua_touserdata(L, index);
        value->kind = KNOWN_AXIS;
        value->type = (ml_type){.rank = 1, .axis = {axis->id}, .size = {axis->size}};
        return true;
    }
    if (lua_isnil(L, index) || lua_isfunction(L, index)) return false;
    value->kind = KNOWN_OTHER;
    push_description(L, index);
    if (lua_isstring(L, -1)) value->text = vm_intern(L, lua_tostring(L, -1));
    lua_pop(L, 1);
    return value->text != NULL;
}

typedef struct {
    known_values *all;
    known_value value;
} add_call;

static void add_value(void *argument) {
    add_call *call = argument;
    *ML_PUSH(call->all->arena, &call->all->values) = call->value;
}

/* An expression that was evaluated before: it may have another type now. */
static void note_again(known_value *known, const known_value *value) {
    if (known->kind > KNOWN_STATE || value->kind > KNOWN_STATE) return;
    if (ml_type_equal(&known->type, &value->type) || known->others == KNOWN_OTHERS) return;
    for (int i = 0; i < known->others; i++)
        if (ml_type_equal(&known->other[i], &value->type)) return;
    known->other[known->others++] = value->type;
}

static void note(lua_State *L, known_values *all, const lua_Debug *frame, int at) {
    enum { END_BITS = 31 };
    lua_Integer begin = lua_tointeger(L, at), end = lua_tointeger(L, at + 1);
    int value_at = at + 2;
    bool repeats = lua_type(L, value_at) != LUA_TUSERDATA; /* what is no tensor is noted once */
    if (end <= 0 || end >= (lua_Integer)1 << END_BITS) return;
    luaL_checkstack(L, 12, "an expression's value");
    push_places(L, frame->source);
    lua_Integer place = begin << END_BITS | end;
    known_value *known =
        lua_rawgeti(L, -1, place) == LUA_TNIL ? NULL : all->values.at + lua_tointeger(L, -1);
    lua_pop(L, 1);
    add_call call = {.all = all, .value = {.begin = (size_t)begin, .end = (size_t)end}};
    if (!(known && repeats) && all->values.count < MOST_VALUES &&
        read_value(L, value_at, &call.value)) {
        if (known) {
            note_again(known, &call.value);
        } else {
            call.value.file = vm_intern(L, vm_file_of(frame->source));
            call.value.line = frame->currentline;
            call.value.module = vm_of(L)->module;
            vm_protect(L, add_value, &call);
            lua_pushinteger(L, all->values.count - 1);
            lua_rawseti(L, -2, place);
        }
    }
    lua_pop(L, 1);
}

/* seen(N, begin, end, name, ..., begin, end, value...): gives the values. */
static int trap_seen(lua_State *L) {
    lua_Debug frame;
    known_values *all = known_of(L);
    int names = (int)lua_tointeger(L, 1), top = lua_gettop(L), result = 3 * names + 4;
    if (all && !all->paused && lua_getstack(L, 1, &frame)) {
        lua_getinfo(L, "Sl", &frame);
        for (int i = 0; i < names; i++) note(L, all, &frame, 2 + 3 * i);
        if (top >= result) note(L, all, &frame, result - 2);
    }
    lua_settop(L, top);
    return top >= result ? top - result + 1 : 0;
}

void known_register(lua_State *L) {
    known_values *all = lua_newuserdatauv(L, sizeof *all, 0);
    *all = (known_values){.arena = ml_arena_new()};
    lua_createtable(L, 0, 1);
    vm_set_function(L, "__gc", free_values);
    lua_setmetatable(L, -2);
    lua_setfield(L, LUA_REGISTRYINDEX, values_key);
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.traps");
    vm_set_function(L, "seen", trap_seen);
    lua_pop(L, 1);
}
