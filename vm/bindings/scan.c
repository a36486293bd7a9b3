/* The pieces of m.scan (stdlib/scan.lua): parameters of a step, and the node that is made of it. */
#include "vm/vm.h"

#include <string.h>

#include "runtime/ops/recurrence/recurrence.h"

typedef struct {
    ml_graph *graph;
    ml_origin origin;
    ml_recurrence_step step;
    ml_axis axis;
    ml_ref value, result, *outputs;
} scan_call;

static void make_parameter(void *argument) {
    scan_call *call = argument;
    ml_graph_set_origin(call->graph, &call->origin);
    ml_type type = *ml_graph_type(call->graph, call->value);
    if (call->axis) {
        ml_type slice;
        ml_recurrence_slice(call->graph, call->value, call->axis, call->step.length, &slice);
        type = slice;
    }
    call->result = ml_recurrence_parameter(call->graph, &type);
}

/* value, axis or nil, length */
static int core_scan_parameter(lua_State *L) {
    scan_call call = {.graph = vm_of(L)->graph};
    call.value = vm_tensor(L, 1, "scan's tensor");
    if (!lua_isnoneornil(L, 2)) {
        call.axis = vm_axis_id(L, 2, "scan");
        call.step.length = vm_integer(L, 3, "scan's length");
    }
    vm_origin(L, &call.origin);
    vm_protect(L, make_parameter, &call);
    return vm_push_tensor(L, call.result);
}

/* Tensors of the list in field `key`, in a userdata that stays on the stack. */
static ml_ref *read_list(lua_State *L, const char *key, int *count) {
    lua_getfield(L, 1, key);
    int list = lua_gettop(L);
    *count = lua_istable(L, list) ? (int)lua_rawlen(L, list) : 0;
    ml_ref *refs = lua_newuserdatauv(L, sizeof *refs * ((size_t)*count + 1), 0);
    for (int i = 0; i < *count; i++) {
        lua_rawgeti(L, list, i + 1);
        refs[i] = vm_tensor(L, -1, "a tensor of scan");
        lua_pop(L, 1);
    }
    return refs;
}

static const char **read_names(lua_State *L) {
    lua_getfield(L, 1, "names");
    int list = lua_gettop(L), count = (int)lua_rawlen(L, list);
    const char **names = lua_newuserdatauv(L, sizeof *names * ((size_t)count + 1), 0);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, list, i + 1); /* the list keeps the string */
        names[i] = luaL_checkstring(L, -1);
        lua_pop(L, 1);
    }
    return names;
}

static void make_node(void *argument) {
    scan_call *call = argument;
    ml_graph_set_origin(call->graph, &call->origin);
    ml_recurrence_apply(call->graph, &call->step, call->outputs);
}

static int core_scan(lua_State *L) {
    scan_call call = {.graph = vm_of(L)->graph};
    ml_recurrence_step *s = &call.step;
    int inputs, states;
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    lua_getfield(L, 1, "axis");
    s->axis = vm_axis_id(L, -1, "scan");
    lua_getfield(L, 1, "length");
    s->length = vm_integer(L, -1, "scan's length");
    lua_getfield(L, 1, "reverse");
    s->reverse = lua_toboolean(L, -1);
    s->inputs = (const ml_recurrence_pair *)read_list(L, "inputs", &inputs);
    s->states = (const ml_recurrence_pair *)read_list(L, "states", &states);
    s->input_count = inputs / 2;
    s->next = read_list(L, "next", &s->state_count);
    s->stacked = read_list(L, "stacked", &s->stacked_count);
    if (s->state_count != states / 2) vm_fail(L, NULL, "scan: each state needs its next value");
    s->names = read_names(L);
    vm_origin(L, &call.origin);
    int outputs = s->stacked_count + s->state_count;
    call.outputs = lua_newuserdatauv(L, sizeof *call.outputs * ((size_t)outputs + 1), 0);
    vm_protect(L, make_node, &call);
    lua_createtable(L, outputs, 0);
    for (int i = 0; i < outputs; i++) {
        vm_push_tensor(L, call.outputs[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int core_scanning(lua_State *L) {
    ml_vm *vm = vm_of(L);
    bool before = vm->scanning;
    if (!lua_isnoneornil(L, 1)) vm->scanning = lua_toboolean(L, 1);
    lua_pushboolean(L, before);
    return 1;
}

static const vm_entry functions[] = {
    {"scan_parameter", core_scan_parameter,
     "value: Tensor, axis?: Axis|string, length?: integer -> Tensor",
     "what stands for a tensor in a step: for its slices along an axis, or for itself"},
    {"scan", core_scan, "step: table -> Tensor[]",
     "a step at each position of an axis: {axis=, length=, reverse=, inputs={parameter, tensor, "
     "...}, states={parameter, initial, ...}, next={...}, names={...}, stacked={...}} gives the "
     "stacked results, then the states after the last position"},
    {"scanning", core_scanning, "on?: boolean -> boolean",
     "whether a step is being traced, where nothing may be assigned; gives what it was"},
    {0}};

void vm_scan_register(lua_State *L) {
    vm_register(L, functions);
}
