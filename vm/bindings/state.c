/* States in Lua: named tensors that live across steps, their updates, and gradients. */
#include "vm/vm.h"

#include <string.h>

#include "vm/known/known.h"

static const char *const assigning_key = "mlua.assigning"; /* registry: a function */

static const ml_state *info_of(lua_State *L, uint32_t id) {
    return ml_graph_state(vm_of(L)->graph, id);
}

static const char *display_name(const ml_state *state) {
    return state->name ? state->name : "a state without a name";
}

/* ---- Making states --------------------------------------------------------------------------- */

typedef struct {
    ml_graph *graph;
    ml_state state;
    uint32_t id;
} state_call;

static void add_state(void *argument) {
    state_call *call = argument;
    call->id = ml_graph_add_state(call->graph, &call->state);
}

/* Push the one State of an id. */
static void add_object(lua_State *L, uint32_t id) {
    *(uint32_t *)lua_newuserdatauv(L, sizeof id, 0) = id;
    lua_rawgeti(L, LUA_REGISTRYINDEX, vm_of(L)->state_metatable);
    lua_setmetatable(L, -2);
    lua_rawgeti(L, LUA_REGISTRYINDEX, vm_of(L)->states);
    lua_pushvalue(L, -2);
    lua_rawseti(L, -2, (lua_Integer)id + 1);
    lua_pop(L, 1);
}

typedef struct {
    ml_graph *graph;
    ml_origin origin;
    ml_ref value;
    const ml_type *type;
} fit_call;

/* Cast, broadcast and order a value as a state wants it; the axes have been checked. */
static void fit(void *argument) {
    fit_call *call = argument;
    ml_graph_set_origin(call->graph, &call->origin);
    ml_type as = *call->type;
    ml_ref n = ml_cast(call->graph, call->value, as.dtype);
    const ml_type *type = ml_graph_type(call->graph, n);
    if (type->rank == as.rank)
        n = ml_permute(call->graph, n, &as);
    else
        n = ml_broadcast(call->graph, n, &as);
    call->value = n;
}

/* The tensor or number at `index` as a value of state `id`. */
static ml_ref value_for(lua_State *L, uint32_t id, int index, const char *what) {
    const ml_state *state = info_of(L, id);
    const ml_graph *g = vm_of(L)->graph;
    fit_call call = {.graph = vm_of(L)->graph, .type = &state->type};
    if (lua_type(L, index) == LUA_TNUMBER || lua_isboolean(L, index))
        call.value = vm_number(L, index, state->type.dtype);
    else
        call.value = vm_tensor(L, index, what);
    const ml_type *type = ml_graph_type(g, call.value);
    for (int i = 0; i < type->rank; i++) {
        int at = ml_type_find(&state->type, type->axis[i]);
        if (at >= 0 && state->type.size[at] == type->size[i]) continue;
        ml_ref operands[2] = {vm_state_node(L, id), call.value};
        vm_fail_with(L, operands, 2, NULL, "%s of %s cannot have axis \"%s\" of size %lld", what,
                     display_name(state), ml_axis_name(g, type->axis[i]), (long long)type->size[i]);
    }
    vm_origin(L, &call.origin);
    vm_protect(L, fit, &call);
    return call.value;
}

/* The value of a state before the first step. */
static ml_ref initial_value(lua_State *L, uint32_t id, int index) {
    ml_ref n = value_for(L, id, index, "the initial value");
    if (vm_depends_on_input(L, n))
        vm_fail_with(L, &n, 1, "it may use constants, iota and random",
                     "the initial value of %s depends on an input", display_name(info_of(L, id)));
    return n;
}

static const char *set_name(lua_State *L, uint32_t id, int index) {
    ml_vm *vm = vm_of(L);
    const char *name = lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index) : "";
    if (!name[0])
        vm_fail(L, NULL, "a state's name must be a text, got %s", luaL_typename(L, index));
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.names");
    if (lua_getfield(L, -1, name) == LUA_TNUMBER && lua_tointeger(L, -1) != (lua_Integer)id) {
        const ml_state *other = info_of(L, (uint32_t)lua_tointeger(L, -1));
        lua_pushfstring(L, "the first comes from %s:%d",
                        other->origin.file ? other->origin.file : "?", other->origin.line);
        vm_fail(L, lua_tostring(L, -1), "two states cannot both be called \"%s\"", name);
    }
    lua_pop(L, 1);
    ml_state *state = ml_graph_state(vm->graph, id);
    if (state->name) {
        lua_pushnil(L);
        lua_setfield(L, -2, state->name);
    }
    vm_set_integer(L, name, id);
    lua_pop(L, 1);
    return vm_intern(L, name);
}

static const char *const kinds[] = {"parameter", "optimizer", "gradient", "other", NULL};

static int core_state(lua_State *L) {
    static const char *const known[] = {"name", "axes", "dtype", "kind", "init", NULL};
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    vm_check_options(L, 1, "m.state", known);
    state_call call = {.graph = vm_of(L)->graph, .state.kind = ML_STATE_OTHER};
    lua_getfield(L, 1, "dtype");
    call.state.type.dtype = (uint8_t)vm_dtype(L, -1, ML_F32);
    if (vm_option(L, 1, "kind"))
        call.state.kind = (ml_state_kind)luaL_checkoption(L, -1, NULL, kinds);
    if (vm_option(L, 1, "axes"))
        vm_read_axes(L, -1,
                     call.state.kind == ML_STATE_PARAMETER ? "the axes of a parameter"
                                                           : "the axes of a state",
                     &call.state.type);
    vm_origin(L, &call.state.origin);
    vm_protect(L, add_state, &call);
    add_object(L, call.id);
    int result = lua_gettop(L);
    if (vm_option(L, 1, "name")) {
        const char *name = set_name(L, call.id, -1);
        ml_graph_state(call.graph, call.id)->name = name;
    }
    if (vm_option(L, 1, "init")) {
        ml_ref value = initial_value(L, call.id, -1);
        ml_graph_state(call.graph, call.id)->initial = value;
    }
    lua_settop(L, result);
    return 1;
}

static void add_like(void *argument) {
    state_call *call = argument;
    ml_type *type = &call->state.type;
    ml_graph_set_origin(call->graph, &call->state.origin);
    call->state.initial =
        ml_broadcast(call->graph, ml_const(call->graph, (ml_dtype)type->dtype, 0), type);
    add_state(call);
}

/* core.state_like(state, name, kind, dtype): of its axes, 0 at first. */
static int core_state_like(lua_State *L) {
    const uint32_t id = vm_state(L, 1, "the state that another one is like");
    state_call call = {.graph = vm_of(L)->graph, .state.type = info_of(L, id)->type};
    lua_settop(L, 4);
    call.state.kind = (ml_state_kind)luaL_checkoption(L, 3, NULL, kinds);
    if (call.state.kind == ML_STATE_GRADIENT) call.state.gradient_of = id + 1;
    call.state.type.dtype = (uint8_t)vm_dtype(L, 4, ML_F32);
    vm_origin(L, &call.state.origin);
    vm_protect(L, add_like, &call);
    vm_adopt_state(L, call.id, 2);
    return 1;
}

void vm_push_state(lua_State *L, uint32_t id) {
    lua_rawgeti(L, LUA_REGISTRYINDEX, vm_of(L)->states);
    lua_rawgeti(L, -1, (lua_Integer)id + 1);
    lua_remove(L, -2);
}

void vm_adopt_state(lua_State *L, uint32_t id, int name) {
    add_object(L, id);
    const char *text = set_name(L, id, name);
    ml_graph_state(vm_of(L)->graph, id)->name = text;
}

/* core.states(): all states that scripts or the library made, in their order. */
static int core_states(lua_State *L) {
    const uint32_t count = ml_graph_state_count(vm_of(L)->graph);
    lua_settop(L, 0);
    lua_newtable(L);
    for (uint32_t id = 0; id < count; id++) {
        vm_push_state(L, id);
        if (lua_isnil(L, -1) || !info_of(L, id)->name)
            lua_pop(L, 1);
        else
            lua_rawseti(L, 1, (lua_Integer)lua_rawlen(L, 1) + 1);
    }
    return 1;
}

/* ---- Methods --------------------------------------------------------------------------------- */

static uint32_t self(lua_State *L) {
    return vm_state(L, 1, "self");
}

static int state_keep_wide(lua_State *L) {
    ml_graph_state(vm_of(L)->graph, self(L))->no_fp8 = true;
    return 0;
}

static int state_read(lua_State *L) {
    return vm_push_tensor(L, vm_state_node(L, self(L)));
}

/* A tensor at 2 becomes what the function of core.assigning makes of it. */
static void convert_assigned(lua_State *L) {
    if (!vm_is_tensor(L, 2) || lua_getfield(L, LUA_REGISTRYINDEX, assigning_key) != LUA_TFUNCTION) {
        lua_settop(L, 2);
        return;
    }
    lua_pushvalue(L, 1);
    lua_pushvalue(L, 2);
    lua_call(L, 2, 1);
    lua_replace(L, 2);
}

static int core_assigning(lua_State *L) {
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    lua_setfield(L, LUA_REGISTRYINDEX, assigning_key);
    return 0;
}

static int state_assign(lua_State *L) {
    uint32_t id = self(L);
    convert_assigned(L);
    vm_recording *recording = vm_of(L)->recording;
    ml_ref given = recording && vm_is_tensor(L, 2) ? vm_tensor(L, 2, "the new value") : 0;
    ml_ref value = value_for(L, id, 2, "the new value");
    if (vm_of(L)->scanning)
        vm_fail(L, "carry it in the scan's state, and assign what it is after the last position",
                "%s is assigned in the step of a scan, which runs at each position",
                display_name(info_of(L, id)));
    if (!vm_of(L)->traces)
        vm_fail(L,
                "assign inside the function that m.compile traces; state:set(values) changes the "
                "value at once",
                "%s is assigned outside of a program, which has no effect",
                display_name(info_of(L, id)));
    if (recording) vm_record_assignment(recording, id, given, value);
    vm_add_update(L, id, value);
    return 0;
}

static int core_tracing(lua_State *L) {
    ml_vm *vm = vm_of(L);
    lua_pushboolean(L, vm->traces);
    if (!lua_isnoneornil(L, 1)) vm->traces = lua_toboolean(L, 1);
    return 1;
}

static int state_name(lua_State *L) {
    lua_pushstring(L, info_of(L, self(L))->name);
    return 1;
}

static int state_set_name(lua_State *L) {
    uint32_t id = self(L);
    const char *name = set_name(L, id, 2);
    ml_graph_state(vm_of(L)->graph, id)->name = name;
    return 0;
}

static int state_set_init(lua_State *L) {
    uint32_t id = self(L);
    ml_ref value = initial_value(L, id, 2);
    ml_graph_state(vm_of(L)->graph, id)->initial = value;
    return 0;
}

static int state_kind(lua_State *L) {
    lua_pushstring(L, kinds[info_of(L, self(L))->kind]);
    return 1;
}

static int state_elements(lua_State *L) {
    lua_pushinteger(L, ml_type_elements(&info_of(L, self(L))->type));
    return 1;
}

static int state_get(lua_State *L) {
    uint32_t id = self(L);
    const ml_state *state = info_of(L, id);
    const ml_type *type = &state->type;
    if (state->kind == ML_STATE_PARAMETER && !state->name && state->initial == 0)
        vm_fail(L, "m.parameters(model) gives all of a model their names and initial values",
                "a parameter has no value before its module has been called or listed");
    if (!vm_of(L)->dry.runs) vm_start_device(L);
    vm_host *host = vm_push_host(L, type->dtype, type->rank, type->size);
    if (!vm_of(L)->dry.runs) vm_check(L, ml_session_read_state(vm_of(L)->session, id, host->data));
    return 1;
}

static _Noreturn void wrong_axes(lua_State *L, const ml_type *type, const vm_wanted *wanted) {
    vm_push_type(L, vm_of(L)->graph, type);
    vm_fail(L, "list each of its axes once, in the order of the values: {A.ffn, A.embed}",
            "these are not the axes of %s, %s", wanted->name, lua_tostring(L, -1));
}

/* The axes of the values by the list at `index`, each of the state's once; order[i]: which of the
 * state's the i-th of them is. */
static void read_order(lua_State *L, int index, const ml_type *type, vm_wanted *wanted,
                       int *order) {
    unsigned used = 0;
    if (!lua_istable(L, index) || vm_table_length(L, index) != type->rank)
        wrong_axes(L, type, wanted);
    for (int i = 0; i < type->rank; i++) {
        lua_rawgeti(L, index, i + 1);
        const vm_axis *given = luaL_testudata(L, -1, vm_axis_class);
        int at = ml_type_find(type, vm_axis_id(L, -1, "p:set"));
        if (at < 0 || used >> at & 1 || (given && given->size != type->size[at]))
            wrong_axes(L, type, wanted);
        lua_pop(L, 1);
        used |= 1u << at;
        order[i] = at;
        wanted->dims[i] = type->size[at];
        wanted->axes[i] = ml_axis_name(vm_of(L)->graph, type->axis[at]);
    }
}

/* The elements in the state's order of axes, from the order of read_order. */
static void reorder(const ml_type *type, const int *order, const char *from, char *to) {
    int64_t stride[ML_MAX_AXES], at[ML_MAX_AXES] = {0}, step = 1, place = 0;
    const int64_t count = ml_type_elements(type), width = ml_dtypes[type->dtype].bytes;
    for (int i = type->rank; i-- > 0;) {
        stride[order[i]] = step;
        step *= type->size[order[i]];
    }
    for (int64_t i = 0; i < count; i++) {
        memcpy(to + i * width, from + place * width, (size_t)width);
        for (int k = type->rank; k-- > 0;) {
            place += stride[k];
            if (++at[k] < type->size[k]) break;
            place -= stride[k] * type->size[k];
            at[k] = 0;
        }
    }
}

static int state_set(lua_State *L) {
    uint32_t id = self(L);
    const ml_type *type = &info_of(L, id)->type;
    vm_wanted wanted;
    int order[ML_MAX_AXES];
    lua_settop(L, 3);
    bool ordered = !lua_isnil(L, 3);
    vm_want(L, display_name(info_of(L, id)), type, &wanted);
    wanted.is_state = true;
    if (ordered) read_order(L, 3, type, &wanted, order);
    const void *data = vm_contents(L, 2, &wanted);
    if (ordered) {
        void *own = lua_newuserdatauv(L, (size_t)ml_type_bytes(type), 0);
        reorder(type, order, data, own);
        data = own;
    }
    if (!vm_of(L)->dry.runs) vm_start_device(L);
    if (!vm_of(L)->dry.runs) vm_check(L, ml_session_write_state(vm_of(L)->session, id, data));
    return 0;
}

static int state_tostring(lua_State *L) {
    const ml_state *state = info_of(L, self(L));
    vm_push_type(L, vm_of(L)->graph, &state->type);
    if (state->name) lua_pushfstring(L, "%s %s", state->name, lua_tostring(L, -1));
    return 1;
}

/* Its own methods first, then those of tensors (second upvalue). */
static int state_index(lua_State *L) {
    lua_pushvalue(L, 2);
    if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL) return 1;
    lua_getfield(L, LUA_REGISTRYINDEX, "mlua.tensor_methods");
    int methods = lua_gettop(L);
    lua_pushvalue(L, 2);
    if (lua_rawget(L, methods) != LUA_TNIL) return 1;
    lua_pop(L, 1);
    vm_missing_method(L, methods, lua_upvalueindex(1));
}

/* ---- Gradients ------------------------------------------------------------------------------- */

typedef struct {
    ml_graph *graph;
    ml_origin origin;
    ml_ref loss;
    ml_ref *wrt, *gradients;
    const bool *is_state;
    int count;
} grad_call;

static void differentiate(void *argument) {
    grad_call *call = argument;
    ml_graph *g = call->graph;
    ml_graph_set_origin(g, &call->origin);
    ml_compile_gradients(g, call->loss, call->wrt, call->count, call->gradients);
    ml_graph_set_origin(g, &call->origin);
    for (int i = 0; i < call->count; i++) {
        ml_type type = *ml_graph_type(g, call->wrt[i]);
        if (!call->gradients[i])
            call->gradients[i] = ml_broadcast(g, ml_const(g, type.dtype, 0), &type);
        if (call->is_state[i]) ml_graph_mark(g, call->gradients[i], ML_NODE_GRADIENT);
    }
}

static int core_grad(lua_State *L) {
    grad_call call = {.graph = vm_of(L)->graph, .loss = vm_tensor(L, 1, "the loss of grad")};
    if (!lua_istable(L, 2))
        vm_fail(L, "m.grad(loss, {a, b})", "grad takes a list of tensors, got %s",
                vm_typename(L, 2));
    call.count = (int)vm_table_length(L, 2);
    size_t count = (size_t)call.count + 1;
    call.wrt = lua_newuserdatauv(L, count * sizeof(ml_ref), 0);
    call.gradients = lua_newuserdatauv(L, count * sizeof(ml_ref), 0);
    bool *is_state = lua_newuserdatauv(L, count, 0);
    call.is_state = is_state;
    for (int i = 0; i < call.count; i++) {
        lua_rawgeti(L, 2, i + 1);
        uint32_t id;
        is_state[i] = vm_is_state(L, -1, &id);
        call.wrt[i] =
            is_state[i] ? vm_state_node(L, id) : vm_tensor(L, -1, "an item of grad's list");
        call.gradients[i] = 0;
        lua_pop(L, 1);
    }
    vm_origin(L, &call.origin);
    if (vm_of(L)->options->facts) known_write_pending(L);
    vm_protect(L, differentiate, &call);
    lua_createtable(L, call.count, 0);
    for (int i = 0; i < call.count; i++) {
        vm_push_tensor(L, call.gradients[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* ---- Registration ---------------------------------------------------------------------------- */

static const vm_entry functions[] = {
    {"states", core_states, "-> State[]",
     "all states that have a name, in the order of their making"},
    {"state", core_state,
     "options: {name: string, axes: Axis[], dtype: string, kind: string, init: Tensor|number} -> "
     "State",
     "a named tensor that lives across steps; kind is parameter, optimizer, gradient (a sum over "
     "microbatches, of which ranks may hold parts) or other"},
    {"state_like", core_state_like,
     "state: State, name: string, kind: string, dtype?: string -> State",
     "a state of the axes of another one, 0 at first"},
    {"assigning", core_assigning, "convert: function",
     "convert(state, value) gives what state:assign(value) assigns instead of a tensor"},
    {"tracing", core_tracing, "on?: boolean -> boolean",
     "set whether states may be assigned, as in a program or in a module that is called; gives "
     "what "
     "it was"},
    {"grad", core_grad, "loss: Tensor, xs: (Tensor|State)[] -> Tensor[]",
     "the gradients of a scalar with respect to tensors or states; zeros where it does not depend "
     "on them"},
    {0}};
static const vm_entry methods[] = {
    {"read", state_read, "-> Tensor", "the value at the start of the step, in the stored dtype"},
    {"keep_wide", state_keep_wide, "",
     "keep its products in the compute dtype with --dtype fp8, as fp8 = false of m.param does"},
    {"assign", state_assign, "value: Tensor|number", "the value from the end of the step on"},
    {"name", state_name, "-> string?", "the name: the key of checkpoints and randomness"},
    {"set_name", state_set_name, "name: string", "name the state; names are unique"},
    {"set_init", state_set_init, "value: Tensor|number", "the value before the first step"},
    {"get", state_get, "-> Host", "a copy of the value in host memory"},
    {"set", state_set, "values: Host|table|number, axes?: (Axis|string)[]",
     "replace the value; the values have the state's dimensions, or those of the axes that are "
     "listed, all of the state's in any order: p:set(tensors[\"up.weight\"], {A.ffn, A.embed})"},
    {"kind", state_kind, "-> string", "parameter, optimizer, gradient or other"},
    {"elements", state_elements, "-> integer", "the number of elements"},
    {0}};

void vm_state_register(lua_State *L) {
    vm_register(L, functions);
    lua_getfield(L, -1, "tensor_methods");
    lua_setfield(L, LUA_REGISTRYINDEX, "mlua.tensor_methods");
    lua_newtable(L);
    lua_setfield(L, LUA_REGISTRYINDEX, "mlua.names");
    lua_newtable(L);
    vm_of(L)->states = luaL_ref(L, LUA_REGISTRYINDEX);
    luaL_getmetatable(L, vm_state_class);
    lua_newtable(L);
    vm_register(L, methods);
    lua_pushcclosure(L, state_index, 1);
    lua_setfield(L, -2, "__index");
    vm_set_string(L, "__metatable", vm_state_class);
    vm_set_function(L, "__tostring", state_tostring);
    vm_set_function(L, "__newindex", vm_no_new_field);
    lua_pop(L, 1);
    vm_updates_register(L);
    vm_recording_register(L);
}
