#include "vm/check/sizes.h"

#include "runtime/pipeline/plan.h"

void sizes_json(lua_State *L, const struct ml_pipeline_plan *pipeline, json_t *object) {
    const ml_vm *vm = vm_of(L);
    const ml_layout *layout = ml_session_layout(vm->session);
    json_t *axes = json_object(), *mesh = json_object(), *settings = json_object();
    for (uint32_t i = vm->sites.count; i-- > 0;)
        json_object_set_new(axes, ml_axis_name(vm->graph, vm->sites.at[i].axis),
                            json_integer(vm->sites.at[i].size));
    int top = lua_gettop(L);
    int named = lua_getfield(L, LUA_REGISTRYINDEX, "mlua.mesh") == LUA_TTABLE; /* layout.c */
    for (int i = 0; named && i < (int)lua_rawlen(L, -1); i++) { /* no layout: of one rank */
        lua_rawgeti(L, -1, i + 1);
        json_object_set_new(mesh, lua_tostring(L, -1),
                            json_integer(layout ? layout->axis[i].size : 1));
        lua_pop(L, 1);
    }
    lua_getfield(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    if (lua_getfield(L, -1, "mlua") == LUA_TTABLE) {
        lua_pushliteral(L, "settings");
        lua_rawget(L, -2);
        for (lua_pushnil(L); lua_istable(L, -2) && lua_next(L, -2); lua_pop(L, 1))
            if (lua_type(L, -2) == LUA_TSTRING && lua_isinteger(L, -1))
                json_object_set_new(settings, lua_tostring(L, -2),
                                    json_integer(lua_tointeger(L, -1)));
    }
    lua_settop(L, top);
    json_object_set_new(object, "axes", axes);
    json_object_set_new(object, "mesh", mesh);
    json_object_set_new(object, "settings", settings);
    if (pipeline) json_object_set_new(object, "layers", json_integer(pipeline->map->layers));
}
