/* Layouts in Lua: the one of the session, from the tables that stdlib/layout.lua has checked, and
 * the placement of single tensors. */
#include "vm/vm.h"

#include <stdio.h>
#include <string.h>

#include "runtime/pipeline/schedule.h"

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
    lua_getfield(L, spec, "reshard");
    axis->keep = lua_getfield(L, -1, axis->name) == LUA_TBOOLEAN && !lua_toboolean(L, -1);
    lua_pop(L, 2);
}

static const char *const mesh_key = "mlua.mesh"; /* registry: the mesh axes' names, in order */

/* The names of the mesh are a list at the top of the stack; raises where `name`, by which n is
 * placed, is none of them. */
static void check_mesh_name(lua_State *L, const char *name, ml_ref n) {
    int names = lua_gettop(L);
    int64_t count = vm_table_length(L, names);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, names, i + 1);
        bool same = strcmp(lua_tostring(L, -1), name) == 0;
        lua_pop(L, 1);
        if (same) return;
    }
    /* The presets' names are one letter from each other: none of them is a slip of the pen. */
    bool preset = strlen(name) == 2 && strstr("pp dp ep cp tp sp", name);
    vm_push_suggestion(L, name, names);
    const char *guess = preset ? NULL : lua_tostring(L, -1);
    lua_pushstring(L, "the mesh has");
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, names, i + 1);
        lua_pushfstring(L, "%s%s %s", lua_tostring(L, -2), i ? "," : "", lua_tostring(L, -1));
    }
    if (guess) lua_pushfstring(L, "%s; did you mean %s?", lua_tostring(L, -1), guess);
    vm_fail_with(L, &n, 1, lua_tostring(L, -1), "on: the layout has no mesh axis \"%s\"", name);
}

/* Tensors that were placed before the layout was known. */
static void check_places(lua_State *L) {
    const ml_graph *g = vm_of(L)->graph;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        const ml_node *node = ml_graph_node(g, n);
        for (int k = 0; node->op == ML_OP_PLACE && k < node->arg_count; k += 2)
            check_mesh_name(L, ml_axis_name(g, (ml_axis)ml_graph_args(g, n)[k]), n);
    }
}

/* stages = {axis=, list=, schedule=, chunks=, microbatches=} */
static void read_stages(lua_State *L, int spec, ml_layout *layout) {
    ml_stages *stages = &layout->stages;
    if (lua_getfield(L, spec, "stages") != LUA_TTABLE) return;
    lua_getfield(L, -1, "axis");
    const char *axis = luaL_checkstring(L, -1);
    for (int i = 0; i < layout->count; i++) {
        if (strcmp(layout->axis[i].name, axis) == 0) stages->mesh_axis = i;
    }
    stages->on = layout->axis[stages->mesh_axis].size > 1;
    lua_getfield(L, -2, "list");
    snprintf(stages->list, sizeof stages->list, "%s", luaL_checkstring(L, -1));
    lua_getfield(L, -3, "schedule");
    const char *schedule = luaL_checkstring(L, -1);
    while (strcmp(ml_schedules[stages->schedule].name, schedule) != 0)
        if (++stages->schedule == ML_SCHEDULE_COUNT)
            vm_fail(L, NULL, "there is no schedule \"%s\"", schedule);
    lua_getfield(L, -4, "chunks");
    stages->chunks = (int)vm_integer(L, -1, "the chunks of a pipeline");
    lua_getfield(L, -5, "microbatches");
    stages->microbatches = (int)vm_integer(L, -1, "the microbatches of a pipeline");
}

/* The mesh axis whose ranks form groups, {name=, size=, grouped = true or "together"}, and those of
 * groups: {name=, size = 1, group=, ranks=, step=}, the last ones (shard/groups.h). */
static void read_groups(lua_State *L, int mesh, const ml_layout *layout, ml_groups *groups) {
    for (int i = 0; i < layout->count; i++) {
        lua_rawgeti(L, mesh, i + 1);
        if (lua_getfield(L, -1, "group") == LUA_TNUMBER) {
            if (groups->count == 0) groups->first = i;
            int k = groups->count++;
            groups->group[k] = lua_tointeger(L, -1);
            lua_getfield(L, -2, "ranks");
            groups->size[k] = lua_tointeger(L, -1);
            lua_getfield(L, -3, "step");
            groups->step[k] = lua_tointeger(L, -1);
            lua_pop(L, 2);
        }
        lua_getfield(L, -2, "grouped");
        if (lua_toboolean(L, -1)) groups->of = i;
        groups->together |= lua_type(L, -1) == LUA_TSTRING;
        lua_pop(L, 3);
    }
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
    lua_newtable(L);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, 3, i + 1);
        read_mesh_axis(L, 1, &layout->axis[i]);
        lua_pop(L, 1);
        lua_pushstring(L, layout->axis[i].name);
        lua_rawseti(L, 4, i + 1);
    }
    layout->count = (int)count;
    check_places(L);
    lua_setfield(L, LUA_REGISTRYINDEX, mesh_key);
    if (lua_getfield(L, 1, "exchange") == LUA_TNUMBER) layout->exchange = lua_tonumber(L, -1);
    read_stages(L, 1, layout);
    vm->laid_out = true;
    ml_groups groups = {0};
    read_groups(L, 3, layout, &groups);
    ml_session_set_groups(vm->session, &groups);
    bool plan_only = vm->options->mode != VM_RUN;
    vm_check(L, ml_session_lay_out(vm->session, layout, plan_only));
    return 0;
}

/* The kinds of pipeline schedules: a table each, by name too. */
static int core_schedules(lua_State *L) {
    lua_newtable(L);
    for (int i = 0; i < ML_SCHEDULE_COUNT; i++) {
        lua_newtable(L);
        vm_set_string(L, "name", ml_schedules[i].name);
        vm_set_boolean(L, "virtual_stages", ml_schedules[i].virtual_stages);
        lua_pushvalue(L, -1);
        lua_setfield(L, -3, ml_schedules[i].name);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* The names of axes that the script has made, and of those that some tensor has: renamed ones. */
static int core_axis_names(lua_State *L) {
    const ml_vm *vm = vm_of(L);
    const ml_graph_tables *tables = vm->graph->tables;
    lua_newtable(L); /* 1: the list */
    lua_newtable(L); /* 2: which are in it */
    lua_Integer count = 0;
    for (uint32_t i = 0; i < vm->sites.count + tables->types.count; i++) {
        const ml_type *type = i < vm->sites.count ? NULL : tables->types.at[i - vm->sites.count];
        for (int k = 0; k < (type ? type->rank : 1); k++) {
            ml_axis axis = type ? type->axis[k] : vm->sites.at[i].axis;
            if (lua_rawgeti(L, 2, axis) == LUA_TNIL) {
                lua_pushboolean(L, 1);
                lua_rawseti(L, 2, axis);
                lua_pushstring(L, ml_axis_name(vm->graph, axis));
                lua_rawseti(L, 1, ++count);
            }
            lua_settop(L, 2);
        }
    }
    lua_settop(L, 1);
    return 1;
}

/* ---- The placement of a tensor --------------------------------------------------------------- */

static bool is_known_axis(const ml_vm *vm, ml_axis axis) {
    for (uint32_t i = 0; i < vm->sites.count; i++)
        if (vm->sites.at[i].axis == axis) return true;
    return false;
}

/* The first axis of the list at the top of the stack that n has; 0 for an empty list. */
static ml_axis first_present(lua_State *L, ml_ref n, const char *mesh_axis) {
    const ml_vm *vm = vm_of(L);
    const ml_type *t = ml_graph_type(vm->graph, n);
    ml_axis found = 0, first = 0;
    int64_t count = vm_table_length(L, -1);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, -1, i + 1);
        ml_axis axis = vm_axis_in(L, -1, n, "on");
        lua_pop(L, 1);
        bool present = ml_type_find(t, axis) >= 0;
        if (!present && !is_known_axis(vm, axis))
            vm_fail_with(L, &n, 1, NULL, "on: nothing has an axis \"%s\"",
                         ml_axis_name(vm->graph, axis));
        if (present && !found) found = axis;
        if (!first) first = axis;
    }
    if (count && !found)
        vm_fail_with(L, &n, 1, lua_pushfstring(L, "on{%s={}} leaves it whole", mesh_axis),
                     "on: it cannot be split over %s along \"%s\", which it does not have",
                     mesh_axis, ml_axis_name(vm->graph, first));
    return found;
}

/* Args in the order of the mesh axes' names: that of the table is not the same on every rank. */
static void add_place(vm_node *node, ml_axis mesh_axis, ml_axis axis) {
    const char *name = ml_axis_name(node->graph, mesh_axis);
    int at = node->arg_count;
    node->arg_count += 2;
    for (; at > 0 && strcmp(ml_axis_name(node->graph, (ml_axis)node->args[at - 2]), name) > 0;
         at -= 2) {
        node->args[at] = node->args[at - 2];
        node->args[at + 1] = node->args[at - 1];
    }
    node->args[at] = mesh_axis;
    node->args[at + 1] = axis;
}

static int tensor_on(lua_State *L) {
    static const char help[] =
        "t:on{tp={\"seq\"}} splits it along seq, t:on{tp={}} leaves it whole";
    ml_ref n = vm_tensor(L, 1, "the operand of on");
    vm_most_arguments(L, 2, "on");
    if (!lua_istable(L, 2))
        vm_fail(L, help, "on takes lists of axes by mesh axis, got %s", vm_typename(L, 2));
    vm_node node;
    vm_begin(L, &node, ML_OP_PLACE);
    node.sources = &n;
    node.source_count = 1;
    lua_pushnil(L);
    while (lua_next(L, 2)) {
        if (lua_type(L, -2) != LUA_TSTRING || !lua_istable(L, -1))
            vm_fail(L, help, "on takes lists of axes by mesh axis");
        if (node.arg_count == 2 * ML_MAX_MESH)
            vm_fail(L, NULL, "a mesh has at most %d axes", ML_MAX_MESH);
        const char *mesh_axis = lua_tostring(L, -2);
        if (lua_getfield(L, LUA_REGISTRYINDEX, mesh_key) == LUA_TTABLE)
            check_mesh_name(L, mesh_axis, n);
        lua_pop(L, 1);
        ml_axis axis = first_present(L, n, mesh_axis);
        lua_pushvalue(L, -2);
        add_place(&node, vm_axis_id(L, -1, "a mesh axis"), axis);
        lua_pop(L, 2);
    }
    return vm_push_tensor(L, node.arg_count ? vm_add(L, &node) : n);
}

static const vm_entry methods[] = {
    {"on", tensor_on, "axes: table<string, (Axis|string)[]> -> Tensor",
     "the same tensor, split over each listed mesh axis along the first of the axes, whole where "
     "the list is empty: t:on{tp={\"seq\"}, dp={}} overrides the layout's tables for this tensor "
     "and its gradient; without a layout it does nothing"},
    {0}};

static const vm_entry functions[] = {
    {"set_layout", core_set_layout, "layout: table",
     "the layout of all programs and states: {mesh = {{name=, size=}, ...}, params=, acts=, "
     "state=}"},
    {"schedules", core_schedules, "-> table",
     "the pipeline schedules, as a list and by name: {name = string, virtual_stages = boolean}"},
    {"axis_names", core_axis_names, "-> string[]", "the axes that the script has made"},
    {0}};

void vm_layout_register(lua_State *L) {
    vm_register(L, functions);
    lua_getfield(L, -1, "tensor_methods");
    vm_register(L, methods);
    lua_pop(L, 1);
}
