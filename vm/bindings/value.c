/* Arguments and results of bindings: classes, tensors, states, axes, options. */
#include "vm/vm.h"

#include <string.h>

#include "runtime/base/suggest.h"

const char *const vm_tensor_class = "tensor", *const vm_state_class = "state",
                  *const vm_axis_class = "axis", *const vm_host_class = "host",
                  *const vm_program_class = "program", *const vm_corpus_class = "corpus",
                  *const vm_random_class = "random";

void vm_document(lua_State *L, int function, const vm_entry *entry) {
    function = lua_absindex(L, function);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.docs");
    lua_pushvalue(L, function);
    lua_pushlightuserdata(L, (void *)entry);
    lua_rawset(L, -3);
    lua_pop(L, 1);
}

const vm_entry *vm_documentation(lua_State *L, int function) {
    function = lua_absindex(L, function);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.docs");
    lua_pushvalue(L, function);
    lua_rawget(L, -2);
    const vm_entry *entry = lua_touserdata(L, -1);
    lua_pop(L, 2);
    return entry;
}

void vm_register(lua_State *L, const vm_entry *entries) {
    for (const vm_entry *entry = entries; entry->name; entry++) {
        lua_pushcfunction(L, entry->function);
        vm_document(L, -1, entry);
        lua_setfield(L, -2, entry->name);
    }
}

/* Push "assign, get, set": what there is instead of what is not known. */
static const char *push_keys(lua_State *L, int table) {
    order_push_keys(L, table);
    int keys = lua_gettop(L);
    lua_pushliteral(L, "");
    for (lua_Integer i = 1; i <= luaL_len(L, keys); i++) {
        lua_rawgeti(L, keys, i);
        lua_pushfstring(L, i > 1 ? "%s, %s" : "%s%s", lua_tostring(L, -2), lua_tostring(L, -1));
        lua_replace(L, -3);
        lua_pop(L, 1);
    }
    return lua_tostring(L, -1);
}

/* The methods are in the first upvalue. */
static int class_index(lua_State *L) {
    lua_pushvalue(L, 2);
    if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL) return 1;
    const char *name = luaL_getmetafield(L, 1, "__name") == LUA_TSTRING ? lua_tostring(L, -1) : "?";
    const char *key = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : vm_typename(L, 2);
    return vm_fail(L, lua_pushfstring(L, "methods: %s", push_keys(L, lua_upvalueindex(1))),
                   "a %s has no method %s", name, key);
}

/* Make a metatable whose methods are those rows; `index` replaces the plain lookup where given and
 * finds the methods in its first upvalue. Leaves the methods table on the stack. */
void vm_new_class(lua_State *L, const char *name, const vm_entry *methods, lua_CFunction index,
                  lua_CFunction gc) {
    luaL_newmetatable(L, name);
    lua_newtable(L);
    vm_register(L, methods);
    lua_pushvalue(L, -1);
    lua_pushcclosure(L, index ? index : class_index, 1);
    lua_setfield(L, -3, "__index");
    if (gc) {
        lua_pushcfunction(L, gc);
        lua_setfield(L, -3, "__gc");
    }
    lua_pushstring(L, name); /* getmetatable returns the name, so that scripts cannot change it */
    lua_setfield(L, -3, "__metatable");
    lua_remove(L, -2);
}

bool vm_is_class(lua_State *L, int index, const char *class_name) {
    return luaL_testudata(L, index, class_name) != NULL;
}

/* The metatable of a userdata, or NULL. luaL_testudata looks one up by its name, and operands are
 * asked often. */
static const void *class_of(lua_State *L, int index) {
    if (lua_type(L, index) != LUA_TUSERDATA || !lua_getmetatable(L, index)) return NULL;
    const void *class = lua_topointer(L, -1);
    lua_pop(L, 1);
    return class;
}

/* ---- Tensors and states ---------------------------------------------------------------------- */

int vm_push_tensor(lua_State *L, ml_ref n) {
    *(ml_ref *)lua_newuserdatauv(L, sizeof n, 0) = n;
    lua_rawgeti(L, LUA_REGISTRYINDEX, vm_of(L)->tensor_metatable);
    lua_setmetatable(L, -2);
    return 1;
}

bool vm_is_state(lua_State *L, int index, uint32_t *id) {
    const bool found = class_of(L, index) == vm_of(L)->state_class;
    if (found) *id = *(const uint32_t *)lua_touserdata(L, index);
    return found;
}

bool vm_is_tensor(lua_State *L, int index) {
    const ml_vm *vm = vm_of(L);
    const void *class = class_of(L, index);
    return class && (class == vm->tensor_class || class == vm->state_class);
}

ml_ref vm_operand(lua_State *L, int index) {
    const ml_vm *vm = vm_of(L);
    const void *class = class_of(L, index);
    if (!class) return 0;
    if (class == vm->tensor_class) return *(const ml_ref *)lua_touserdata(L, index);
    if (class != vm->state_class) return 0;
    return vm_state_value(L, *(const uint32_t *)lua_touserdata(L, index));
}

ml_ref vm_tensor(lua_State *L, int index, const char *what) {
    const ml_ref n = vm_operand(L, index);
    if (n) return n;
    bool values = lua_istable(L, index) || vm_is_class(L, index, vm_host_class);
    vm_fail(L,
            values ? "tables and host arrays are inputs of programs: m.compile(function(i) ... i.x "
                     "... end, {x = {A.seq}}){x = values}"
                   : NULL,
            "%s must be a tensor, got %s", what,
            values ? vm_typename(L, index) : luaL_typename(L, index));
}

uint32_t vm_state(lua_State *L, int index, const char *what) {
    uint32_t id;
    if (vm_is_state(L, index, &id)) return id;
    vm_fail(L, "m.param, m.buffer and m.state make states", "%s must be a state, got %s", what,
            vm_is_class(L, index, vm_tensor_class) ? "a tensor" : luaL_typename(L, index));
}

ml_ref vm_state_node(lua_State *L, uint32_t id) {
    vm_node node;
    vm_begin(L, &node, ML_OP_STATE);
    node.args[0] = id;
    node.arg_count = 1;
    return vm_add(L, &node);
}

ml_ref vm_state_value(lua_State *L, uint32_t id) {
    ml_ref n = vm_state_node(L, id);
    const ml_state *state = ml_graph_state(vm_of(L)->graph, id);
    if (state->kind != ML_STATE_PARAMETER || state->type.dtype != ML_F32) return n;
    return vm_cast(L, n, vm_compute_dtype(L));
}

/* ---- Axes ------------------------------------------------------------------------------------ */

typedef struct {
    ml_vm *vm;
    const char *name;
    vm_axis_site site;
    bool add_site;
} axis_call;

static void name_axis(void *argument) {
    axis_call *call = argument;
    call->site.axis = ml_axis_named(call->vm->graph, call->name);
    if (call->add_site) *ML_PUSH(call->vm->arena, &call->vm->sites) = call->site;
}

static ml_axis axis_named(lua_State *L, const char *name) {
    axis_call call = {.vm = vm_of(L), .name = name};
    vm_protect(L, name_axis, &call);
    return call.site.axis;
}

void vm_push_axis(lua_State *L, ml_axis id, int64_t size) {
    *(vm_axis *)lua_newuserdatauv(L, sizeof(vm_axis), 0) = (vm_axis){id, size};
    luaL_setmetatable(L, vm_axis_class);
}

/* An axis's name as scripts may write it. */
static bool is_axis_name(const char *name) {
    if (!name[0] || strlen(name) > 64) return false;
    for (const char *c = name; *c; c++)
        if (!((*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || *c == '_' ||
              (c != name && *c >= '0' && *c <= '9')))
            return false;
    return true;
}

static int core_axis(lua_State *L) {
    ml_vm *vm = vm_of(L);
    const char *name = lua_type(L, 1) == LUA_TSTRING ? lua_tostring(L, 1) : NULL;
    if (!name || !is_axis_name(name))
        vm_fail(L, "a name is letters, digits and _, not beginning with a digit",
                name ? "an axis cannot be called \"%s\"" : "an axis cannot be called %s",
                luaL_tolstring(L, 1, NULL));
    lua_settop(L, 2);
    if (lua_isnil(L, 2))
        vm_fail(L, lua_pushfstring(L, "m.axis(\"%s\", 64)", name), "axis \"%s\" needs a size",
                name);
    lua_Integer size = vm_integer(L, 2, "the size of an axis");
    if (size < 1)
        vm_fail(L, "a size is a positive integer", "axis \"%s\" cannot have size %lld", name,
                (long long)size);
    ml_axis id = axis_named(L, name);
    bool known = false;
    for (uint32_t i = 0; i < vm->sites.count && !known; i++)
        known = vm->sites.at[i].axis == id && vm->sites.at[i].size == size;
    if (!known) {
        ml_origin origin;
        vm_origin(L, &origin);
        axis_call call = {vm, name, {id, size, origin.file, origin.line}, origin.file != NULL};
        vm_protect(L, name_axis, &call);
    }
    vm_push_axis(L, id, size);
    return 1;
}

static int axis_index(lua_State *L) {
    const vm_axis *axis = luaL_checkudata(L, 1, vm_axis_class);
    const char *key = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "";
    if (strcmp(key, "name") == 0)
        lua_pushstring(L, ml_axis_name(vm_of(L)->graph, axis->id));
    else if (strcmp(key, "size") == 0)
        lua_pushinteger(L, axis->size);
    else
        vm_fail(L, "an Axis has .name and .size", "an Axis has no field %s",
                luaL_tolstring(L, 2, NULL));
    return 1;
}

static int axis_tostring(lua_State *L) {
    const vm_axis *axis = luaL_checkudata(L, 1, vm_axis_class);
    lua_pushfstring(L, "%s=%I", ml_axis_name(vm_of(L)->graph, axis->id), (LUAI_UACINT)axis->size);
    return 1;
}

/* Arithmetic, order, length and calls: of an axis its size may be meant. */
static int axis_operator(lua_State *L) {
    int at = luaL_testudata(L, 1, vm_axis_class) ? 1 : 2;
    const vm_axis *axis = luaL_checkudata(L, at, vm_axis_class);
    const char *name = ml_axis_name(vm_of(L)->graph, axis->id);
    return vm_fail(
        L,
        lua_pushfstring(L, "its size is a number: A.%s.size is %I", name, (LUAI_UACINT)axis->size),
        "an Axis is a name and a size, here %s = %lld, and no number to compute with", name,
        (long long)axis->size);
}

static int axis_equal(lua_State *L) {
    const vm_axis *a = luaL_testudata(L, 1, vm_axis_class),
                  *b = luaL_testudata(L, 2, vm_axis_class);
    lua_pushboolean(L, a && b && a->id == b->id && a->size == b->size);
    return 1;
}

/* Push how the value at `index` is written as an Axis. */
static const char *push_new_axis_help(lua_State *L, int index) {
    index = lua_absindex(L, index);
    if (lua_type(L, index) == LUA_TSTRING && is_axis_name(lua_tostring(L, index)))
        return lua_pushfstring(L, "m.axis(\"%s\", size), or A.%s of A = m.axes{%s = size}",
                               lua_tostring(L, index), lua_tostring(L, index),
                               lua_tostring(L, index));
    if (lua_isinteger(L, index))
        return lua_pushfstring(L,
                               "axes have names: m.axis(\"name\", %I), or A.name of A = "
                               "m.axes{name = %I}",
                               (LUAI_UACINT)lua_tointeger(L, index),
                               (LUAI_UACINT)lua_tointeger(L, index));
    return lua_pushliteral(L, "m.axes{name=size} and m.axis(name, size) make them");
}

static const char *push_shown(lua_State *L, int index) {
    const char *text = luaL_tolstring(L, index, NULL);
    return lua_type(L, index) == LUA_TSTRING ? lua_pushfstring(L, "\"%s\"", text) : text;
}

vm_axis vm_new_axis(lua_State *L, int index, const char *what) {
    index = lua_absindex(L, index);
    const vm_axis *axis = luaL_testudata(L, index, vm_axis_class);
    if (!axis)
        vm_fail(L, push_new_axis_help(L, index), "%s must be an Axis (with a size), got %s", what,
                push_shown(L, index));
    return *axis;
}

vm_axis vm_listed_axis(lua_State *L, int index, const char *what) {
    index = lua_absindex(L, index);
    const vm_axis *axis = luaL_testudata(L, index, vm_axis_class);
    if (!axis)
        vm_fail(L, push_new_axis_help(L, index), "%s must be Axes (with sizes), got %s", what,
                push_shown(L, index));
    return *axis;
}

const char *vm_typename(lua_State *L, int index) {
    if (vm_is_tensor(L, index)) return "a tensor";
    if (vm_is_class(L, index, vm_axis_class)) return "an Axis";
    if (vm_is_class(L, index, vm_host_class)) return "a host array";
    if (lua_isnoneornil(L, index)) return "nothing";
    return lua_pushfstring(L, "a %s", luaL_typename(L, index));
}

/* Push "batch, seq, embed". */
static const char *push_axis_names(lua_State *L, const ml_type *type) {
    lua_pushliteral(L, "");
    for (int i = 0; i < type->rank; i++)
        lua_pushfstring(L, i ? "%s, %s" : "%s%s", lua_tostring(L, -1),
                        ml_axis_name(vm_of(L)->graph, type->axis[i]));
    return lua_tostring(L, -1);
}

/* Push the axis that a number counts to in other libraries, or the last one, in quotes. */
static void push_counted_axis(lua_State *L, int index, const ml_type *type) {
    lua_Integer at = lua_isinteger(L, index) ? lua_tointeger(L, index) : -1;
    if (at < 0 && at >= -type->rank) at += type->rank;
    if (at < 0 || at >= type->rank) at = type->rank - 1;
    lua_pushfstring(L, "\"%s\"", ml_axis_name(vm_of(L)->graph, type->axis[at]));
}

/* Push the axes that the list at `index` names, in quotes; false where it names none. */
static bool push_listed_axes(lua_State *L, int index) {
    int64_t count = lua_istable(L, index) ? vm_table_length(L, index) : 0;
    if (count < 1 || count > ML_MAX_AXES) return false;
    lua_pushliteral(L, "");
    for (int i = 1; i <= count; i++) {
        lua_rawgeti(L, index, i);
        const vm_axis *axis = luaL_testudata(L, -1, vm_axis_class);
        const char *name = axis ? ml_axis_name(vm_of(L)->graph, axis->id)
                           : lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1)
                                                            : NULL;
        if (!name) return false;
        lua_pushfstring(L, "%s%s\"%s\"", lua_tostring(L, -2), i > 1 ? ", " : "", name);
        lua_replace(L, -3);
        lua_pop(L, 1);
    }
    return true;
}

/* Push what to write in the place of the value at `index`, which names no axis; n: the tensor, or 0
 * where there is none. */
static const char *push_axis_help(lua_State *L, int index, ml_ref n, const char *op) {
    static const struct {
        const char *op, *example; /* with the axis for %s */
    } others[] = {
        {"dot", "a:dot(b, %s)"},
        {"ragged_dot", "t:ragged_dot(other, %s, starts, ends)"},
        {"gather", "t:gather(index, %s)"},
        {"concat", "m.concat({a, b}, %s)"},
        {"rename", "t:rename(%s, \"name\")"},
        {"merge", "t:merge(\"outer\", \"inner\", \"name\")"},
        {"permute", "t:permute(%s) with all of them"},
        {"pad", "t:pad(%s, before, after)"},
        {"top_k", "t:top_k(%s, k, \"choice\")"},
        {"slice", "t:slice(%s, start, stop)"},
        {"split", "t:split(%s, outer, inner) makes two axes of one, t:slice takes a part"},
    };
    const ml_type *type = n ? ml_graph_type(vm_of(L)->graph, n) : NULL;
    if (!type || !type->rank) return lua_pushliteral(L, "axes have names: \"seq\", or A.seq");
    if (!push_listed_axes(L, index)) push_counted_axis(L, index, type);
    const char *wanted = lua_tostring(L, -1), *names = push_axis_names(L, type);
    const char *example = lua_pushfstring(L, "t:%s(%%s)", op);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(op, others[i].op) == 0) example = others[i].example;
    lua_pushfstring(L, "axes have names, here %s: ", names);
    lua_pushfstring(L, example, wanted);
    lua_concat(L, 2);
    return lua_tostring(L, -1);
}

static _Noreturn void fail_axis(lua_State *L, int index, ml_ref n, const char *op) {
    const char *got = lua_isnone(L, index)    ? "nothing"
                      : lua_isnil(L, index)   ? "nil"
                      : lua_istable(L, index) ? "a table"
                      : lua_type(L, index) == LUA_TNUMBER
                          ? lua_pushfstring(L, "the number %s", luaL_tolstring(L, index, NULL))
                          : vm_typename(L, index);
    const char *help = push_axis_help(L, index, n, op);
    vm_fail_with(L, &n, n != 0, help, "%s takes an axis, by name or as an Axis, not %s", op, got);
}

ml_axis vm_axis_in(lua_State *L, int index, ml_ref n, const char *op) {
    const vm_axis *axis = luaL_testudata(L, index, vm_axis_class);
    if (axis) return axis->id;
    if (lua_type(L, index) != LUA_TSTRING) fail_axis(L, index, n, op);
    return axis_named(L, lua_tostring(L, index));
}

ml_axis vm_axis_id(lua_State *L, int index, const char *op) {
    return vm_axis_in(L, index, 0, op);
}

/* Raise for an axis that n does not have. */
static _Noreturn void missing_axis(lua_State *L, const char *name, ml_ref n, const char *what) {
    const ml_graph *g = vm_of(L)->graph;
    const ml_type *type = ml_graph_type(g, n);
    const char *words[ML_MAX_AXES];
    for (int i = 0; i < type->rank; i++) words[i] = ml_axis_name(g, type->axis[i]);
    const char *guess = ml_suggest(name, words, type->rank);
    if (guess)
        lua_pushfstring(L, "did you mean \"%s\"?", guess);
    else
        lua_pushfstring(L, "its axes are %s", push_axis_names(L, type));
    vm_fail_with(L, &n, 1, type->rank ? lua_tostring(L, -1) : NULL,
                 "%s \"%s\": the tensor has no such axis", what, name);
}

vm_axis vm_axis_of(lua_State *L, int index, ml_ref n, const char *op, const char *what) {
    const ml_graph *g = vm_of(L)->graph;
    const ml_type *type = ml_graph_type(g, n);
    const vm_axis *given = luaL_testudata(L, index, vm_axis_class);
    ml_axis id = vm_axis_in(L, index, n, op);
    int at = ml_type_find(type, id);
    if (at < 0) missing_axis(L, ml_axis_name(g, id), n, what);
    if (given && given->size != type->size[at])
        vm_fail_with(L, &n, 1, NULL, "%s: axis \"%s\" has size %lld in the tensor, not %lld", what,
                     ml_axis_name(g, id), (long long)type->size[at], (long long)given->size);
    return (vm_axis){id, type->size[at]};
}

void vm_push_shape(lua_State *L, ml_dtype dtype, int rank, const int64_t *dims,
                   const char *const *names) {
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    luaL_addstring(&b, ml_dtypes[dtype].name);
    luaL_addchar(&b, '[');
    for (int i = 0; i < rank; i++) {
        char size[32];
        snprintf(size, sizeof size, "%s%lld", names ? "=" : "", (long long)dims[i]);
        if (i) luaL_addstring(&b, ", ");
        if (names) luaL_addstring(&b, names[i]);
        luaL_addstring(&b, size);
    }
    luaL_addchar(&b, ']');
    luaL_pushresult(&b);
}

void vm_push_type(lua_State *L, const ml_graph *g, const ml_type *t) {
    const char *names[ML_MAX_AXES];
    for (int i = 0; i < t->rank; i++) names[i] = ml_axis_name(g, t->axis[i]);
    vm_push_shape(L, t->dtype, t->rank, t->size, names);
}

void vm_format_bytes(char *out, size_t size, int64_t bytes) {
    double value = (double)bytes;
    if (bytes < 1 << 10)
        snprintf(out, size, "%lld B", (long long)bytes);
    else if (bytes < 1 << 20)
        snprintf(out, size, "%.1f KiB", value / (1 << 10));
    else if (bytes < 1 << 30)
        snprintf(out, size, "%.1f MiB", value / (1 << 20));
    else
        snprintf(out, size, "%.2f GiB", value / (1 << 30));
}

/* ---- Other arguments ------------------------------------------------------------------------- */

/* The first `own` arguments are not counted: the tensor of a method. */
static void check_most(lua_State *L, int most, int own, const char *what) {
    static const char *const helps[][2] = {
        {"slice", "every n-th element: split the axis and slice the inner one"},
        {"pad", "it fills with 0; m.concat joins other values"},
        {"iota", "m.iota(axis) + start, m.iota(axis) * step"},
        {"concat", "m.concat({a, b}, \"axis\") takes the tensors in a list"},
        {"argmax", "of several axes together: merge them first"}};
    if (lua_gettop(L) <= most || lua_isnil(L, most + 1)) return;
    const char *help = NULL;
    for (size_t i = 0; i < sizeof helps / sizeof *helps; i++)
        if (strcmp(helps[i][0], what) == 0) help = helps[i][1];
    vm_fail(L, help, "%s takes %d argument%s, not %d", what, most - own, most - own == 1 ? "" : "s",
            lua_gettop(L) - own);
}

void vm_most_arguments(lua_State *L, int most, const char *what) {
    check_most(L, most, 1, what);
}

void vm_most_inputs(lua_State *L, int most, const char *what) {
    check_most(L, most, 0, what);
}

static _Noreturn void fail_integer(lua_State *L, int index, const char *what) {
    const vm_axis *axis = luaL_testudata(L, index, vm_axis_class);
    const char *help = lua_type(L, index) == LUA_TNUMBER ? "divide with //" : NULL;
    if (axis)
        help = lua_pushfstring(L, "an axis's size is one: A.%s.size",
                               ml_axis_name(vm_of(L)->graph, axis->id));
    bool named = axis || lua_istable(L, index) || lua_isfunction(L, index);
    vm_fail(L, help, "%s must be an integer, got %s", what,
            named ? vm_typename(L, index) : push_shown(L, index));
}

int64_t vm_integer(lua_State *L, int index, const char *what) {
    int exact;
    lua_Integer value = lua_tointegerx(L, index, &exact);
    if (!exact || lua_type(L, index) != LUA_TNUMBER) fail_integer(L, lua_absindex(L, index), what);
    return value;
}

ml_dtype vm_dtype(lua_State *L, int index, int fallback) {
    if (lua_isnoneornil(L, index) && fallback >= 0) return (ml_dtype)fallback;
    const char *name = lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index) : NULL;
    const char *words[ML_DTYPE_COUNT];
    for (int i = 0; i < ML_DTYPE_COUNT; i++) {
        words[i] = ml_dtypes[i].name;
        if (name && strcmp(name, words[i]) == 0) return (ml_dtype)i;
    }
    static const char *const elsewhere[][2] = {
        {"float", "f32"},  {"float32", "f32"}, {"double", "f64"},    {"float64", "f64"},
        {"int", "i32"},    {"int32", "i32"},   {"long", "i64"},      {"int64", "i64"},
        {"half", "bf16"},  {"fp16", "bf16"},   {"float16", "bf16"},  {"f16", "bf16"},
        {"bool_", "bool"}, {"fp32", "f32"},    {"bfloat16", "bf16"}, {"boolean", "bool"}};
    const char *guess = name ? ml_suggest(name, words, ML_DTYPE_COUNT) : NULL;
    for (size_t i = 0; name && i < sizeof elsewhere / sizeof *elsewhere; i++)
        if (strcmp(elsewhere[i][0], name) == 0) guess = elsewhere[i][1];
    const char *help = "dtypes: bool, i32, i64, bf16, f32, f64";
    if (guess) help = lua_pushfstring(L, "did you mean \"%s\"?", guess);
    if (!name) vm_fail(L, help, "a dtype is a name, not %s", vm_typename(L, index));
    vm_fail(L, help, "there is no dtype \"%s\"", name);
}

bool vm_option(lua_State *L, int table, const char *key) {
    if (lua_getfield(L, table, key) != LUA_TNIL) return true;
    lua_pop(L, 1);
    return false;
}

static const char *push_words(lua_State *L, const char *const *known, int count) {
    lua_pushfstring(L, "options: %s", count ? known[0] : "none");
    for (int i = 1; i < count; i++) {
        lua_pushfstring(L, "%s, %s", lua_tostring(L, -1), known[i]);
        lua_replace(L, -2);
    }
    return lua_tostring(L, -1);
}

void vm_check_options(lua_State *L, int table, const char *what, const char *const *known) {
    int count = 0;
    const char *unknown = NULL; /* the first by name, so that the message is the same each time */
    while (known[count]) count++;
    lua_pushnil(L);
    while (lua_next(L, table)) {
        lua_pop(L, 1);
        if (lua_isinteger(L, -1))
            vm_fail(L, push_words(L, known, count), "%s takes its options by name", what);
        if (lua_type(L, -1) != LUA_TSTRING) continue;
        const char *key = lua_tostring(L, -1); /* which the table references */
        bool found = false;
        for (int i = 0; i < count && !found; i++) found = strcmp(known[i], key) == 0;
        if (!found && (!unknown || strcmp(key, unknown) < 0)) unknown = key;
    }
    if (!unknown) return;
    const char *guess = ml_suggest(unknown, known, count);
    if (guess)
        lua_pushfstring(L, "did you mean %s?", guess);
    else
        push_words(L, known, count);
    vm_fail(L, lua_tostring(L, -1), "%s has no option \"%s\"", what, unknown);
}

int64_t vm_table_length(lua_State *L, int table) {
    return (int64_t)lua_rawlen(L, table);
}

void vm_push_suggestion(lua_State *L, const char *word, int words) {
    int count = 0;
    words = lua_absindex(L, words);
    lua_Integer length = (lua_Integer)lua_rawlen(L, words);
    const char **list = lua_newuserdatauv(L, sizeof *list * (size_t)(length + 1), 0);
    for (lua_Integer i = 1; i <= length; i++) {
        if (lua_rawgeti(L, words, i) == LUA_TSTRING) list[count++] = lua_tostring(L, -1);
        lua_pop(L, 1); /* the table references it */
    }
    lua_pushstring(L, ml_suggest(word, list, count));
    lua_remove(L, -2);
}

static const vm_entry entries[] = {
    {"axis", core_axis, "name: string, size: integer -> Axis", "an axis: a name and a size"}, {0}};

void vm_axis_register(lua_State *L) {
    vm_register(L, entries);
    static const vm_entry none[] = {{0}};
    vm_new_class(L, vm_axis_class, none, axis_index, NULL);
    lua_pop(L, 1);
    luaL_getmetatable(L, vm_axis_class);
    vm_set_function(L, "__tostring", axis_tostring);
    vm_set_function(L, "__eq", axis_equal);
    static const char *const operators[] = {"__add", "__sub", "__mul", "__div", "__idiv", "__mod",
                                            "__pow", "__unm", "__lt",  "__le",  "__len",  "__call"};
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        vm_set_function(L, operators[i], axis_operator);
    lua_pop(L, 1);
}
