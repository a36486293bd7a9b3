/* Layouts in Lua: the one of the session, from the tables that stdlib/layout.lua has checked. */
#include "vm/vm.h"

#include <string.h>

/* The names of a list at the top of the stack as axes. */
static int read_axes(lua_State *L, ml_axis *axes, const char *mesh_axis) {
    int64_t count = vm_table_length(L, lua_gettop(L));
    if (count > ML_MAX_LISTED)
        vm_fail(L, NULL, "mesh axis %s lists more than %d axes", mesh_axis, ML_MAX_LISTED);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, -1, i + 1);
        axes[i] = vm_axis_id(L, -1, "an axis of a layout");
        lua_pop(L, 1);
    }
    return (int)count;
}

static void read_mesh_axis(lua_State *L, int spec, ml_mesh_axis *axis) {
    lua_getfield(L, -1, "name");
    axis->name = vm_intern(L, luaL_checkstring(L, -1));
    lua_getfield(L, -2, "size");
    axis->size = vm_integer(L, -1, "the size of a mesh axis");
    lua_pop(L, 2);
    lua_getfield(L, spec, "params");
    if (lua_getfield(L, -1, axis->name) == LUA_TTABLE)
        axis->params_count = read_axes(L, axis->params, axis->name);
    lua_pop(L, 2);
    lua_getfield(L, spec, "acts");
    if (lua_getfield(L, -1, axis->name) == LUA_TTABLE)
        axis->acts_count = read_axes(L, axis->acts, axis->name);
    lua_pop(L, 2);
    lua_getfield(L, spec, "state");
    axis->flat = lua_getfield(L, -1, axis->name) == LUA_TSTRING;
    lua_pop(L, 2);
}

static int core_set_layout(lua_State *L) {
    ml_vm *vm = vm_of(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    ml_layout *layout = lua_newuserdatauv(L, sizeof *layout, 0);
    memset(layout, 0, sizeof *layout);
    lua_getfield(L, 1, "mesh");
    int64_t count = vm_table_length(L, 3);
    if (count > ML_MAX_MESH) vm_fail(L, NULL, "a mesh has at most %d axes", ML_MAX_MESH);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, 3, i + 1);
        read_mesh_axis(L, 1, &layout->axis[i]);
        lua_pop(L, 1);
    }
    layout->count = (int)count;
    vm->laid_out = true;
    bool plan_only = vm->options->mode != VM_RUN;
    vm_check(L, ml_session_lay_out(vm->session, layout, plan_only));
    return 0;
}

static int core_axis_names(lua_State *L) {
    const ml_vm *vm = vm_of(L);
    lua_newtable(L);
    for (uint32_t i = 0; i < vm->sites.count; i++) {
        lua_pushstring(L, ml_axis_name(vm->graph, vm->sites.at[i].axis));
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

static const vm_entry functions[] = {
    {"set_layout", core_set_layout, "layout: table",
     "the layout of all programs and states: {mesh = {{name=, size=}, ...}, params=, acts=, "
     "state=}"},
    {"axis_names", core_axis_names, "-> string[]", "the axes that the script has made"},
    {0}};

void vm_layout_register(lua_State *L) {
    vm_register(L, functions);
}
