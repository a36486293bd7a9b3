/* Tensors in Lua: leaves, movements, reductions, contraction and what a tensor reports of itself.
 */
#include "vm/vm.h"

#include <string.h>

#include "vm/bindings/precision.h"

static const ml_type *type_of(lua_State *L, ml_ref n) {
    return ml_graph_type(vm_of(L)->graph, n);
}

/* Append a list of Axis values at `index` to type. */
void vm_read_axes(lua_State *L, int index, const char *what, ml_type *type) {
    if (!lua_istable(L, index))
        vm_fail(L, "write {A.batch, A.seq}", "%s must be a list of axes, got %s", what,
                lua_isuserdata(L, index) ? luaL_tolstring(L, index, NULL)
                                         : luaL_typename(L, index));
    int64_t count = vm_table_length(L, index);
    if (count > ML_MAX_AXES - type->rank)
        vm_fail(L, NULL, "%s may be at most %d, got %lld", what, ML_MAX_AXES,
                (long long)count + type->rank);
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, index, i + 1);
        vm_axis axis = vm_listed_axis(L, -1, what);
        lua_pop(L, 1);
        for (int k = 0; k < type->rank; k++)
            if (type->axis[k] == axis.id)
                vm_fail(L, "axes of one tensor have different names", "%s name \"%s\" twice", what,
                        ml_axis_name(vm_of(L)->graph, axis.id));
        type->axis[type->rank] = axis.id;
        type->size[type->rank++] = axis.size;
    }
}

/* ---- Leaves ---------------------------------------------------------------------------------- */

static ml_ref broadcast(lua_State *L, ml_ref n, const ml_type *type) {
    return type->rank ? vm_unary(L, ML_OP_BROADCAST, n, type) : n;
}

static int core_full(lua_State *L) {
    vm_most_inputs(L, 3, "full");
    ml_type type = {0};
    vm_read_axes(L, 1, "the axes of a tensor", &type);
    type.dtype = (uint8_t)vm_dtype(L, 3, lua_isboolean(L, 2) ? ML_BOOL : ML_F32);
    ml_ref value;
    if (vm_is_tensor(L, 2))
        value = vm_cast(L, vm_tensor(L, 2, "the value of full"), type.dtype);
    else if (lua_type(L, 2) == LUA_TNUMBER || lua_isboolean(L, 2))
        value = vm_number(L, 2, type.dtype);
    else
        return vm_fail(L, NULL, "the value of full must be a number, got %s", luaL_typename(L, 2));
    return vm_push_tensor(L, broadcast(L, value, &type));
}

static int core_iota(lua_State *L) {
    vm_most_inputs(L, 2, "iota");
    vm_axis axis = vm_new_axis(L, 1, "the axis of iota");
    ml_dtype dtype = vm_dtype(L, 2, ML_I32);
    vm_node node;
    vm_begin(L, &node, ML_OP_IOTA);
    node.args[0] = axis.id;
    node.args[1] = axis.size;
    node.arg_count = 2;
    return vm_push_tensor(L, vm_cast(L, vm_add(L, &node), dtype));
}

static int core_random(lua_State *L) {
    ml_type type = {.dtype = ML_F32}, indices;
    vm_read_axes(L, 2, "the axes of a tensor", &type);
    indices = type;
    indices.dtype = ML_I64;
    ml_ref key = vm_is_tensor(L, 1)    ? vm_cast(L, vm_tensor(L, 1, "the key of random"), ML_I64)
                 : lua_isinteger(L, 1) ? vm_number(L, 1, ML_I64)
                                       : 0;
    if (!key)
        vm_fail(L, "m.hash(\"name\") makes one of a text; equal keys give equal numbers",
                "the key of random numbers must be an integer or an i64 tensor, got %s",
                luaL_typename(L, 1));
    ml_ref sources[2] = {key};
    if (!lua_isnoneornil(L, 3))
        sources[1] =
            broadcast(L, vm_cast(L, vm_tensor(L, 3, "the index of random"), ML_I64), &indices);
    vm_node node;
    vm_begin(L, &node, ML_OP_RANDOM);
    node.sources = sources;
    node.source_count = sources[1] ? 2 : 1;
    node.type = &type;
    return vm_push_tensor(L, vm_add(L, &node));
}

typedef struct {
    ml_graph *graph;
    ml_input input;
    int64_t id;
} input_call;

static void add_input(void *argument) {
    input_call *call = argument;
    call->id = ml_graph_add_input(call->graph, &call->input);
}

static int core_input(lua_State *L) {
    vm_most_inputs(L, 3, "input");
    if (lua_type(L, 1) != LUA_TSTRING)
        vm_fail(L, "each input is written by its name: {x = {A.batch, A.embed}}",
                "an input needs a name, got %s",
                lua_type(L, 1) == LUA_TNUMBER ? lua_tostring(L, 1) : vm_typename(L, 1));
    input_call call = {.graph = vm_of(L)->graph};
    call.input.type.dtype = (uint8_t)vm_dtype(L, 3, ML_F32);
    vm_read_axes(L, 2, "the axes of an input", &call.input.type);
    call.input.name = vm_intern(L, lua_tostring(L, 1));
    vm_protect(L, add_input, &call);
    vm_node node;
    vm_begin(L, &node, ML_OP_INPUT);
    node.args[0] = call.id;
    node.arg_count = 1;
    vm_add(L, &node);
    if (!lua_isnoneornil(L, 3)) precision_explicit_input(L, node.result);
    return vm_push_tensor(L, node.result);
}

/* ---- Movements ------------------------------------------------------------------------------- */

static int tensor_cast(lua_State *L) {
    vm_most_arguments(L, 2, "cast");
    ml_ref n = vm_tensor(L, 1, "the operand of cast");
    return vm_push_tensor(L, precision_explicit_cast(L, n, vm_dtype(L, 2, -1)));
}

static int tensor_broadcast(lua_State *L) {
    vm_most_arguments(L, 2, "broadcast");
    ml_ref n = vm_tensor(L, 1, "the operand of broadcast");
    ml_type listed = {0}, type = {.dtype = type_of(L, n)->dtype};
    vm_read_axes(L, 2, "the axes of broadcast", &listed);
    const ml_type *own = type_of(L, n);
    for (int i = 0; i < own->rank; i++)
        if (ml_type_find(&listed, own->axis[i]) < 0)
            type.axis[type.rank] = own->axis[i], type.size[type.rank++] = own->size[i];
    vm_read_axes(L, 2, "the axes of broadcast and of the tensor", &type);
    return vm_push_tensor(
        L, ml_type_equal(&type, type_of(L, n)) ? n : vm_unary(L, ML_OP_BROADCAST, n, &type));
}

static int tensor_permute(lua_State *L) {
    ml_ref n = vm_tensor(L, 1, "the operand of permute");
    ml_type type = {.dtype = type_of(L, n)->dtype};
    int last = lua_gettop(L);
    if (last - 1 > ML_MAX_AXES) vm_fail(L, NULL, "permute takes at most %d axes", ML_MAX_AXES);
    for (int i = 2; i <= last; i++) {
        vm_axis axis = vm_axis_of(L, i, n, "permute", "cannot permute to");
        type.axis[type.rank] = axis.id;
        type.size[type.rank++] = axis.size;
    }
    return vm_push_tensor(L, vm_unary(L, ML_OP_PERMUTE, n, &type));
}

/* One old name -> new name; the new one may be an Axis of the same size. */
static void add_rename(lua_State *L, vm_node *node, ml_ref n, int old, int new_name) {
    vm_axis from = vm_axis_of(L, old, n, "rename", "cannot rename");
    const vm_axis *to = luaL_testudata(L, new_name, vm_axis_class);
    if (to && to->size != from.size)
        vm_fail_with(L, &n, 1, NULL, "cannot rename \"%s\" of size %lld to \"%s\" of size %lld",
                     ml_axis_name(node->graph, from.id), (long long)from.size,
                     ml_axis_name(node->graph, to->id), (long long)to->size);
    if (node->arg_count + 2 > VM_MAX_ARGS)
        vm_fail(L, NULL, "rename takes at most %d axes", ML_MAX_AXES);
    node->args[node->arg_count++] = from.id;
    node->args[node->arg_count++] = vm_axis_in(L, new_name, n, "rename");
}

static int tensor_rename(lua_State *L) {
    vm_most_arguments(L, 3, "rename");
    ml_ref n = vm_tensor(L, 1, "the operand of rename");
    vm_node node;
    vm_begin(L, &node, ML_OP_RENAME);
    if (lua_istable(L, 2)) {
        /* The table's order is none: take the tensor's, so that equal renames are equal nodes. */
        const ml_type *type = type_of(L, n);
        lua_pushnil(L);
        while (lua_next(L, 2)) {
            lua_pop(L, 1);
            vm_axis_of(L, -1, n, "rename", "cannot rename");
        }
        for (int i = 0; i < type->rank; i++) {
            lua_pushstring(L, ml_axis_name(node.graph, type->axis[i]));
            lua_pushvalue(L, -1);
            if (lua_gettable(L, 2) != LUA_TNIL)
                add_rename(L, &node, n, lua_gettop(L) - 1, lua_gettop(L));
            lua_pop(L, 2);
        }
    } else {
        add_rename(L, &node, n, 2, 3);
    }
    node.sources = &n;
    node.source_count = 1;
    return vm_push_tensor(L, node.arg_count ? vm_add(L, &node) : n);
}

static int core_concat(lua_State *L) {
    vm_most_inputs(L, 2, "concat");
    if (!lua_istable(L, 1))
        vm_fail(L, "m.concat({a, b}, \"axis\")", "concat takes a list of tensors, got %s",
                vm_typename(L, 1));
    int64_t count = vm_table_length(L, 1);
    if (count < 1 || count > VM_MAX_SOURCES)
        vm_fail(L, NULL, "concat takes 1 to %d tensors, got %lld", VM_MAX_SOURCES,
                (long long)count);
    ml_ref sources[VM_MAX_SOURCES];
    for (int i = 0; i < count; i++) {
        lua_rawgeti(L, 1, i + 1);
        sources[i] = vm_tensor(L, -1, "an item of concat");
        lua_pop(L, 1);
    }
    vm_node node;
    vm_begin(L, &node, ML_OP_CONCAT);
    node.sources = sources;
    node.source_count = (int)count;
    node.args[0] = vm_axis_in(L, 2, sources[0], "concat");
    node.arg_count = 1;
    return vm_push_tensor(L, vm_add(L, &node));
}

/* The result has the axes kept, the new one, and the value's that the index lacks. Other axes of
 * the index are summed over. */
static int core_scatter_add(lua_State *L) {
    vm_most_arguments(L, 5, "scatter_add");
    ml_ref sources[2] = {vm_tensor(L, 1, "the index of scatter_add"),
                         vm_tensor(L, 2, "the value of scatter_add")};
    vm_axis axis = vm_new_axis(L, lua_isnoneornil(L, 4) ? 3 : 4, "the new axis of scatter_add");
    const ml_type *index = type_of(L, sources[0]), *value = type_of(L, sources[1]);
    ml_type type = {.dtype = value->dtype};
    for (int i = 1; lua_istable(L, 5) && i <= vm_table_length(L, 5); i++) {
        lua_rawgeti(L, 5, i);
        vm_axis kept = vm_axis_of(L, -1, sources[0], "scatter_add", "scatter_add cannot keep");
        lua_pop(L, 1);
        if (type.rank == ML_MAX_AXES - 1)
            vm_fail(L, NULL, "scatter_add would give more than %d axes", ML_MAX_AXES);
        type.axis[type.rank] = kept.id;
        type.size[type.rank++] = kept.size;
    }
    type.axis[type.rank] = axis.id;
    type.size[type.rank++] = axis.size;
    for (int i = 0; i < value->rank; i++) {
        if (ml_type_find(index, value->axis[i]) >= 0) continue;
        if (type.rank == ML_MAX_AXES)
            vm_fail(L, NULL, "scatter_add would give more than %d axes", ML_MAX_AXES);
        type.axis[type.rank] = value->axis[i];
        type.size[type.rank++] = value->size[i];
    }
    vm_node node;
    vm_begin(L, &node, ML_OP_SCATTER_ADD);
    node.sources = sources;
    node.source_count = 2;
    node.args[0] = axis.id;
    node.arg_count = 1;
    node.type = &type;
    return vm_push_tensor(L, vm_add(L, &node));
}

/* x:ragged_dot(w, over, starts, ends): the groups are the axis of `starts` that x lacks, the rows
 * that of x which is neither contracted nor in `starts`. */
static int tensor_ragged_dot(lua_State *L) {
    static const char *const whats[] = {"the left operand of ragged_dot",
                                        "the right operand of ragged_dot", "",
                                        "the starts of ragged_dot", "the ends of ragged_dot"};
    ml_ref sources[4];
    vm_most_arguments(L, 5, "ragged_dot");
    for (int i = 0; i < 4; i++) {
        int at = i < 2 ? i : i + 1;
        sources[i] = vm_tensor(L, at + 1, whats[at]);
    }
    ml_axis over = vm_axis_in(L, 3, sources[0], "ragged_dot"), rows = 0, groups = 0;
    const ml_type *x = type_of(L, sources[0]), *starts = type_of(L, sources[2]);
    for (int i = 0; i < x->rank; i++)
        if (x->axis[i] != over && ml_type_find(starts, x->axis[i]) < 0) rows = x->axis[i];
    for (int i = 0; i < starts->rank; i++)
        if (ml_type_find(x, starts->axis[i]) < 0) groups = starts->axis[i];
    if (!rows)
        vm_fail_with(L, sources, 2, NULL,
                     "ragged_dot takes a left operand with rows beside the contracted axis");
    if (!groups)
        vm_fail_with(L, &sources[2], 2, NULL,
                     "the starts and ends of ragged_dot have the groups' axis, which the left "
                     "operand has not");
    vm_node node;
    vm_begin(L, &node, ML_OP_RAGGED_DOT);
    node.sources = sources;
    node.source_count = 4;
    node.args[0] = rows;
    node.args[1] = groups;
    node.args[2] = over;
    node.args[3] = 0; /* no function */
    node.arg_count = 4;
    const ml_ref product = precision_product(L, &node, 2);
    precision_mark_fp8(L, product);
    return vm_push_tensor(L, product);
}

/* ---- Contraction ----------------------------------------------------------------------------- */

/* Push which axes a product could sum over: those that both have. */
static const char *push_shared_help(lua_State *L, const ml_ref *sources) {
    const ml_type *a = type_of(L, sources[0]), *b = type_of(L, sources[1]);
    int count = 0;
    lua_pushliteral(L, "");
    for (int i = 0; i < a->rank; i++)
        if (ml_type_find(b, a->axis[i]) >= 0)
            lua_pushfstring(L, "%s%s\"%s\"", lua_tostring(L, -1), count++ ? " and " : "",
                            ml_axis_name(vm_of(L)->graph, a->axis[i]));
    if (!count) return lua_pushliteral(L, "they have none in common: a:dot(b, \"axis\")");
    return lua_pushfstring(L, "a:dot(b, \"axis\") sums over the axis; both have %s",
                           lua_tostring(L, -1));
}

static int tensor_dot(lua_State *L) {
    ml_ref sources[2];
    vm_node node;
    ml_type type = {0};
    bool typed = false;
    int last = lua_gettop(L);
    if (last > 2 && lua_istable(L, last)) {
        static const char *const known[] = {"dtype", NULL};
        vm_check_options(L, last, "dot", known);
        typed = vm_option(L, last, "dtype");
        if (typed) type.dtype = (uint8_t)vm_dtype(L, -1, -1);
        lua_settop(L, last - 1);
    }
    vm_read_op(L, ML_OP_DOT, &node, sources);
    if (typed) node.type = &type;
    if (node.arg_count == 0)
        vm_fail_with(L, sources, 2, push_shared_help(L, sources),
                     "dot needs the axes that it sums over");
    ml_ref product = precision_product(L, &node, 2);
    precision_mark_fp8(L, product);
    vm_hint_scores(L, product);
    return vm_push_tensor(L, product);
}

/* ---- What a tensor is ------------------------------------------------------------------------ */

static int tensor_dtype(lua_State *L) {
    lua_pushstring(L, ml_dtypes[type_of(L, vm_tensor(L, 1, "the operand"))->dtype].name);
    return 1;
}

static int tensor_axes(lua_State *L) {
    const ml_type *type = type_of(L, vm_tensor(L, 1, "the operand"));
    lua_createtable(L, type->rank, 0);
    for (int i = 0; i < type->rank; i++) {
        lua_pushstring(L, ml_axis_name(vm_of(L)->graph, type->axis[i]));
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int tensor_size(lua_State *L) {
    vm_most_arguments(L, 2, "size");
    ml_ref n = vm_tensor(L, 1, "the operand");
    lua_pushinteger(L, vm_axis_of(L, 2, n, "size", "cannot find the size of").size);
    return 1;
}

static int tensor_elements(lua_State *L) {
    lua_pushinteger(L, ml_type_elements(type_of(L, vm_tensor(L, 1, "the operand"))));
    return 1;
}

static int tensor_has(lua_State *L) {
    vm_most_arguments(L, 2, "has");
    ml_ref n = vm_tensor(L, 1, "the operand");
    lua_pushboolean(L, ml_type_find(type_of(L, n), vm_axis_in(L, 2, n, "has")) >= 0);
    return 1;
}

static int tensor_tostring(lua_State *L) {
    ml_ref n = *(ml_ref *)luaL_checkudata(L, 1, vm_tensor_class);
    vm_push_type(L, vm_of(L)->graph, type_of(L, n));
    return 1;
}

/* Methods are in the first upvalue. */
static int tensor_index(lua_State *L) {
    lua_pushvalue(L, 2);
    if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL) return 1;
    return vm_missing_method(L, lua_upvalueindex(1), 0);
}

/* ---- Registration ---------------------------------------------------------------------------- */

static const vm_entry functions[] = {
    {"full", core_full, "axes: Axis[], value: number|boolean|Tensor, dtype?: string -> Tensor",
     "a tensor with one value everywhere; f32 where no dtype is given"},
    {"iota", core_iota, "axis: Axis, dtype?: string -> Tensor",
     "0, 1, 2, ... along an axis; i32 where no dtype is given"},
    {"random", core_random, "key: integer|Tensor, axes: Axis[], index?: Tensor -> Tensor",
     "uniform in [0, 1), f32: a function of the key and the element's position, or its index, "
     "alone"},
    {"input", core_input, "name: string, axes: Axis[], dtype?: string -> Tensor",
     "a tensor that the caller of a program provides"},
    {"concat", core_concat, "tensors: Tensor[], axis: Axis|string -> Tensor",
     "tensors one after another along an axis"},
    {"scatter_add", core_scatter_add,
     "index: Tensor, value: Tensor, axis: Axis|string, new_axis?: Axis, keep?: table -> Tensor",
     "zeros of the new axis, plus the values added at the i32 indices; of the index's axes those "
     "listed in `keep` stay, the others are summed over"},
    {0}};

static const vm_entry methods[] = {
    {"cast", tensor_cast, "dtype: string -> Tensor",
     "the tensor converted to another dtype: bool, i32, i64, bf16, f32, f64; floats become "
     "integers "
     "towards zero, NaN 0, and what does not fit the nearest that does"},
    {"broadcast", tensor_broadcast, "axes: Axis[] -> Tensor",
     "repeated along the listed axes that it lacks; these are in the listed order, its other axes "
     "before them"},
    {"permute", tensor_permute, "...: Axis|string -> Tensor",
     "the same elements with the axes in another memory order"},
    {"rename", tensor_rename, "old: Axis|string|table, new?: Axis|string -> Tensor",
     "the same elements under other axis names: t:rename(\"seq\", \"kv_seq\") or "
     "t:rename{seq=\"kv_seq\"}"},
    {"dot", tensor_dot, "other: Tensor, ...: Axis|string|{dtype: string} -> Tensor",
     "the sum of products over the named axes; accumulates in f32 or wider. Operands that are f32 "
     "by default (inputs, random draws) are rounded to the compute dtype; x:cast(\"f32\"), "
     "dtype=\"f32\" in an input's spec or here, and state:read() keep f32"},
    {"ragged_dot", tensor_ragged_dot,
     "other: Tensor, over: Axis|string, starts: Tensor, ends: Tensor -> Tensor",
     "each row times the matrix of the group that it belongs to: group e of `other` has the rows "
     "starts[e] .. ends[e]-1; groups ascend and do not overlap; rows of none give 0"},
    {"dtype", tensor_dtype, "-> string", "the name of the element type"},
    {"axes", tensor_axes, "-> string[]", "the names of the axes, in memory order"},
    {"size", tensor_size, "axis: Axis|string -> integer", "the size of an axis"},
    {"elements", tensor_elements, "-> integer", "the number of elements"},
    {"has", tensor_has, "axis: Axis|string -> boolean", "whether it has an axis"},
    {0}};

void vm_tensor_register(lua_State *L) {
    vm_register(L, functions);
    vm_new_class(L, vm_tensor_class, methods, tensor_index, NULL);
    lua_setfield(L, -2, "tensor_methods");
    luaL_newmetatable(L, vm_state_class); /* state.c fills it */
    vm_of(L)->state_class = lua_topointer(L, -1);
    vm_of(L)->state_metatable = luaL_ref(L, LUA_REGISTRYINDEX);
    luaL_getmetatable(L, vm_tensor_class);
    vm_of(L)->tensor_class = lua_topointer(L, -1);
    lua_pushvalue(L, -1);
    vm_of(L)->tensor_metatable = luaL_ref(L, LUA_REGISTRYINDEX);
    vm_set_function(L, "__tostring", tensor_tostring);
    vm_set_function(L, "__newindex", vm_no_new_field);
    lua_pop(L, 1);
}
