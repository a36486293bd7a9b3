/* Names and indices that tensors do not have: what errors say of them. What other libraries call
 * things is in stdlib/synonyms.lua. */
#include <string.h>

#include "vm/vm.h"

static const char *const help_key =
    "mlua.method_help"; /* registry: what core.set_method_help got */

static int core_set_method_help(lua_State *L) {
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    lua_setfield(L, LUA_REGISTRYINDEX, help_key);
    return 0;
}

/* Elements are no fields: t[i], t[index]. */
static _Noreturn void fail_index(lua_State *L, ml_ref n) {
    bool tensor = vm_is_tensor(L, 2);
    vm_fail_with(L, &n, 1,
                 tensor
                     ? "t:gather(index, \"axis\") looks up the elements of an axis at i32 indices"
                     : "t:slice(\"axis\", start, stop) takes the positions start .. stop-1 of an "
                       "axis, counted from 0",
                 "a tensor cannot be indexed with %s",
                 lua_type(L, 2) == LUA_TNUMBER ? lua_tostring(L, 2) : vm_typename(L, 2));
}

/* Push the names of the methods in the tables at these indices (0: none), and pass their list to
 * the function that knows what other libraries call things. Leaves the help on the stack. */
static void push_method_help(lua_State *L, const char *name, int methods, int others) {
    order_push_keys(L, methods);
    int list = lua_gettop(L);
    if (others) order_push_keys(L, others);
    for (lua_Integer i = 1, count = others ? luaL_len(L, -1) : 0; i <= count; i++) {
        lua_rawgeti(L, list + 1, i);
        lua_rawseti(L, list, luaL_len(L, list) + 1);
    }
    if (lua_getfield(L, LUA_REGISTRYINDEX, help_key) != LUA_TFUNCTION) return;
    lua_pushstring(L, name);
    lua_pushvalue(L, list);
    lua_call(L, 2, 1);
}

int vm_missing_method(lua_State *L, int methods, int others) {
    ml_ref n = vm_tensor(L, 1, "the operand");
    if (lua_type(L, 2) != LUA_TSTRING) fail_index(L, n);
    const char *name = lua_tostring(L, 2);
    const ml_type *type = ml_graph_type(vm_of(L)->graph, n);
    for (int i = 0; i < type->rank; i++)
        if (strcmp(ml_axis_name(vm_of(L)->graph, type->axis[i]), name) == 0)
            vm_fail_with(L, &n, 1,
                         lua_pushfstring(L, "t:size(\"%s\") is the size of the axis", name),
                         "a tensor has no field \"%s\"", name);
    push_method_help(L, name, methods, others);
    vm_fail_with(L, &n, 1, lua_isstring(L, -1) ? lua_tostring(L, -1) : NULL,
                 "a tensor has no method \"%s\"", name);
}

int vm_no_new_field(lua_State *L) {
    ml_ref n = vm_tensor(L, 1, "the operand");
    uint32_t id;
    return vm_fail_with(
        L, &n, 1,
        vm_is_state(L, 1, &id)
            ? "p:set(values) replaces its value at once, p:assign(value) at the end "
              "of each run of a program"
            : "m.where and m.concat make a changed copy",
        "a %s cannot be assigned to", vm_is_state(L, 1, &id) ? "parameter or state" : "tensor");
}

/* ---- Axes that a tensor does not have -------------------------------------------------------- */

/* What reductions that are composed in Lua do first, so that messages name them. */
static int core_check_axes(lua_State *L) {
    const char *op = luaL_checkstring(L, 1);
    ml_ref n = vm_tensor(L, 2, lua_pushfstring(L, "the operand of %s", op));
    int last = lua_gettop(L) - 1;
    bool module =
        strcmp(op, "moe") == 0 || strcmp(op, "rms_norm") == 0 || strcmp(op, "layer_norm") == 0;
    const char *what = lua_pushfstring(L, module ? "%s reduces" : "cannot take the %s over", op);
    for (int i = 3; i <= last; i++) {
        ml_axis axis = vm_axis_in(L, i, n, op);
        if (ml_type_find(ml_graph_type(vm_of(L)->graph, n), axis) < 0)
            vm_axis_of(L, i, n, op, what);
        for (int k = 3; k < i; k++)
            if (vm_axis_in(L, k, n, op) == axis)
                vm_fail_with(L, &n, 1, NULL, "%s names the axis \"%s\" twice", op,
                             ml_axis_name(vm_of(L)->graph, axis));
    }
    return 0;
}

static const vm_entry functions[] = {
    {"check_axes", core_check_axes, "op: string, x: Tensor, ...: Axis|string",
     "raise where an argument is no axis of x, or one comes twice: `op` is what takes them"},
    {"set_method_help", core_set_method_help, "help: fun(name: string, known: string[]): string?",
     "what gives the help of the error about an unknown method"},
    {0}};

void vm_unknown_register(lua_State *L) {
    vm_register(L, functions);
}
