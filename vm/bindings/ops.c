/* The elementwise ops: one Lua function for each MAP row of ops.def, operators, and the values that
 * Lua's own comparisons and tests must not see. */
#include "vm/vm.h"

#include <string.h>

#include "vm/language/traps.h"

/* ---- Operands -------------------------------------------------------------------------------- */

/* The dtype that numbers take beside tensors: the widest float, else the widest integer. */
static int dtype_beside(const ml_graph *g, const ml_ref *operands, int first, int count) {
    int best = -1;
    for (int i = first; i < count; i++) {
        if (!operands[i]) continue;
        int dtype = ml_graph_type(g, operands[i])->dtype;
        if (best < 0 || ml_dtypes[dtype].promotion > ml_dtypes[best].promotion) best = dtype;
    }
    return best;
}

/* The dtype of operands that are all numbers: i32 where all are integers that fit, else f32. */
static ml_dtype dtype_of_numbers(lua_State *L, int first, int count, ml_dtype_rule rule) {
    bool wide = false;
    if (rule == ML_RULE_FLOAT) return ML_F32;
    for (int i = first; i < count; i++) {
        if (lua_isboolean(L, i + 1)) continue;
        if (!lua_isinteger(L, i + 1)) return ML_F32;
        lua_Integer value = lua_tointeger(L, i + 1);
        wide = wide || value > INT32_MAX || value < INT32_MIN;
    }
    return wide ? ML_I64 : ML_I32;
}

static const char *kind_name(lua_State *L, int index) {
    return lua_isnone(L, index) ? "nothing" : luaL_typename(L, index);
}

/* Read operand `index`; 0 for numbers and booleans, which wait for the dtype of the others. */
static ml_ref read_operand(lua_State *L, int index, ml_op op) {
    if (lua_type(L, index) == LUA_TNUMBER || lua_isboolean(L, index)) return 0;
    const ml_ref n = vm_operand(L, index);
    if (n) return n;
    const vm_axis *axis = luaL_testudata(L, index, vm_axis_class);
    const char *help = NULL;
    if (axis)
        help = lua_pushfstring(L, "its size is a number: A.%s.size",
                               ml_axis_name(vm_of(L)->graph, axis->id));
    vm_fail(L, help, "operand %d of \"%s\" must be a tensor or a number, got %s", index,
            ml_ops[op].name, axis ? "an Axis" : kind_name(L, index));
}

static _Noreturn void fail_count(lua_State *L, ml_op op) {
    const int wanted = ml_ops[op].sources;
    const char *help = op == ML_OP_WHERE
                           ? "m.where(test, x, y) has x where the test is true, else y"
                       : op == ML_OP_MAXIMUM ? "x:max(\"axis\") is the largest along an axis"
                       : op == ML_OP_MINIMUM ? "x:min(\"axis\") is the smallest along an axis"
                                             : NULL;
    vm_fail(L, help, "\"%s\" takes %d operand%s, got %d", ml_ops[op].name, wanted,
            wanted == 1 ? "" : "s", lua_gettop(L));
}

static ml_ref map(lua_State *L, ml_op op) {
    const ml_op_info *info = &ml_ops[op];
    const ml_graph *g = vm_of(L)->graph;
    ml_ref operands[3] = {0};
    vm_node node;
    vm_begin(L, &node, op);
    if (lua_gettop(L) > info->sources || (lua_gettop(L) < info->sources && lua_gettop(L) > 0))
        fail_count(L, op);
    for (int i = 0; i < info->sources; i++) operands[i] = read_operand(L, i + 1, op);
    int first = op == ML_OP_WHERE ? 1 : 0; /* the test has its own dtype */
    int beside = dtype_beside(g, operands, first, info->sources);
    ml_dtype dtype =
        beside >= 0 ? (ml_dtype)beside : dtype_of_numbers(L, first, info->sources, info->rule);
    for (int i = 0; i < info->sources; i++) {
        if (operands[i]) continue;
        if (lua_isboolean(L, i + 1)) {
            operands[i] = vm_number_from(L, i + 1, ML_BOOL, &node.origin);
        } else if (i < first) {
            vm_fail(L, "compare first: m.gt(x, 0)",
                    "the test of \"where\" must be a bool tensor, got a number");
        } else {
            int whole;
            lua_tointegerx(L, i + 1, &whole);
            if (!whole && ml_dtypes[dtype].kind != ML_KIND_FLOAT)
                vm_fail_with(L, operands, operands[0] ? 1 : 0, "t:cast(\"f32\") first",
                             "\"%s\" cannot combine %s with the number %s", info->name,
                             ml_dtypes[dtype].name, luaL_tolstring(L, i + 1, NULL));
            operands[i] = vm_number_from(L, i + 1, dtype == ML_BOOL ? ML_I32 : dtype, &node.origin);
        }
    }
    node.sources = operands;
    node.source_count = info->sources;
    return vm_add(L, &node);
}

static int core_map(lua_State *L) {
    return vm_push_tensor(L, map(L, (ml_op)lua_tointeger(L, lua_upvalueindex(1))));
}

/* Operators are called with two operands, also unary minus. */
static int operator(lua_State *L) {
    ml_op op = (ml_op)lua_tointeger(L, lua_upvalueindex(1));
    lua_settop(L, ml_ops[op].sources);
    return vm_push_tensor(L, map(L, op));
}

static bool has_function(ml_op op) {
    return ml_ops[op].op_class == ML_CLASS_MAP && op != ML_OP_CAST && op != ML_OP_RANDOM;
}

/* ---- Traps (traps.h) ------------------------------------------------------------------------- */

static int fail_comparison(lua_State *L, const char *symbol, const char *function) {
    ml_ref operands[2];
    int count = 0;
    for (int i = 1; i <= 2; i++)
        if (vm_is_tensor(L, i)) operands[count++] = vm_tensor(L, i, "an operand");
    lua_Debug caller; /* math.max and math.min compare */
    bool most = lua_getstack(L, 1, &caller) && lua_getinfo(L, "nS", &caller) && caller.name &&
                caller.what[0] == 'C' &&
                (strcmp(caller.name, "max") == 0 || strcmp(caller.name, "min") == 0);
    if (most)
        lua_pushfstring(L, "m.%simum(a, b) is that of tensors", caller.name);
    else
        lua_pushfstring(L, "m.%s(a, b) gives a bool tensor; m.where(test, x, y) chooses by it",
                        function);
    return vm_fail_with(L, operands, count, lua_tostring(L, -1),
                        "cannot compare tensors with %s: they have no values while the script runs",
                        symbol);
}

static int tensor_less(lua_State *L) {
    return fail_comparison(L, "< or >", "lt");
}

static int tensor_less_equal(lua_State *L) {
    return fail_comparison(L, "<= or >=", "le");
}

static int tensor_equal(lua_State *L) {
    return fail_comparison(L, "==", "eq");
}

static int tensor_concat(lua_State *L) {
    ml_ref n = vm_tensor(L, vm_is_tensor(L, 1) ? 1 : 2, "an operand");
    return vm_fail_with(L, &n, 1, "m.concat({a, b}, axis) joins tensors; tostring(t) is its type",
                        "cannot join a tensor to a text with ..");
}

static int tensor_length(lua_State *L) {
    ml_ref n = vm_tensor(L, 1, "an operand");
    return vm_fail_with(L, &n, 1,
                        "t:size(axis) is an axis's size, t:elements() the number of elements",
                        "a tensor has no length");
}

static int tensor_call(lua_State *L) {
    ml_ref n = vm_tensor(L, 1, "an operand");
    return vm_fail_with(L, &n, 1,
                        "contract with a:dot(b, \"axis\"); modules are called, tensors are not",
                        "a tensor cannot be called");
}

static int fail_test(lua_State *L, const char *help) {
    ml_ref n = vm_tensor(L, 1, "an operand");
    return vm_fail_with(
        L, &n, 1, help,
        "a tensor is neither true nor false while the script runs: it has no value yet");
}

static int trap_test(lua_State *L) {
    if (vm_is_class(L, 1, vm_tensor_class))
        return fail_test(
            L, "m.where(test, x, y) chooses for each element; t ~= nil asks whether there is "
               "a tensor");
    lua_settop(L, 1);
    return 1;
}

static int trap_choose(lua_State *L) {
    const ml_ref *n = luaL_testudata(L, 1, vm_tensor_class);
    if (n && ml_graph_type(vm_of(L)->graph, *n)->dtype == ML_BOOL)
        return fail_test(L, "m.logical_and(a, b) and m.logical_or(a, b) combine tests; "
                            "m.where(test, x, y) chooses by one");
    lua_settop(L, 1);
    return 1;
}

/* Whether a tensor is compared with something that could be meant as its value. */
static void check_equality(lua_State *L, const char *symbol, const char *function) {
    lua_settop(L, 2);
    bool left = vm_is_class(L, 1, vm_tensor_class), right = vm_is_class(L, 2, vm_tensor_class);
    if (!left && !right) return;
    int other = left ? 2 : 1;
    int type = lua_type(L, other);
    if ((left && right) || type == LUA_TNUMBER || type == LUA_TBOOLEAN || vm_is_tensor(L, other))
        fail_comparison(L, symbol, function);
}

static int trap_equal(lua_State *L) {
    check_equality(L, "==", "eq");
    lua_pushboolean(L, lua_compare(L, 1, 2, LUA_OPEQ));
    return 1;
}

static int trap_differ(lua_State *L) {
    check_equality(L, "~=", "ne");
    lua_pushboolean(L, !lua_compare(L, 1, 2, LUA_OPEQ));
    return 1;
}

static int trap_result(lua_State *L) {
    return lua_gettop(L);
}

void traps_register(lua_State *L) {
    static const luaL_Reg traps[] = {{"test", trap_test},     {"choose", trap_choose},
                                     {"equal", trap_equal},   {"differ", trap_differ},
                                     {"result", trap_result}, {NULL, NULL}};
    luaL_newlib(L, traps);
    lua_setfield(L, LUA_REGISTRYINDEX, "mlua.traps");
}

/* ---- Registration ---------------------------------------------------------------------------- */

static const char *const map_signatures[4] = {
    "", "a: Tensor|number -> Tensor", "a: Tensor|number, b: Tensor|number -> Tensor",
    "a: Tensor, b: Tensor|number, c: Tensor|number -> Tensor"};

/* Rows for the editor, made from ops.def. */
static vm_entry map_entries[ML_OP_COUNT];

static void set_operators(lua_State *L) {
    static const struct {
        const char *name;
        ml_op op;
    } operators[] = {{"__add", ML_OP_ADD}, {"__sub", ML_OP_SUB},   {"__mul", ML_OP_MUL},
                     {"__div", ML_OP_DIV}, {"__idiv", ML_OP_IDIV}, {"__mod", ML_OP_MOD},
                     {"__pow", ML_OP_POW}, {"__unm", ML_OP_NEG}};
    static const luaL_Reg guards[] = {{"__lt", tensor_less},       {"__le", tensor_less_equal},
                                      {"__concat", tensor_concat}, {"__len", tensor_length},
                                      {"__call", tensor_call},     {NULL, NULL}};
    const char *const classes[] = {vm_tensor_class, vm_state_class};
    for (int i = 0; i < 2; i++) {
        luaL_getmetatable(L, classes[i]);
        for (size_t k = 0; k < sizeof operators / sizeof *operators; k++) {
            lua_pushinteger(L, operators[k].op);
            lua_pushcclosure(L, operator, 1);
            lua_setfield(L, -2, operators[k].name);
        }
        luaL_setfuncs(L, guards, 0);
        if (i == 0) vm_set_function(L, "__eq", tensor_equal);
        lua_pop(L, 1);
    }
}

/* The table core is at the top of the stack. */
void vm_ops_register(lua_State *L) {
    set_operators(L);
    lua_getfield(L, -1, "tensor_methods");
    lua_newtable(L);
    lua_Integer count = 0;
    for (int op = 0; op < ML_OP_COUNT; op++) {
        if (!has_function((ml_op)op)) continue;
        map_entries[op] = (vm_entry){ml_ops[op].name, core_map, map_signatures[ml_ops[op].sources],
                                     ml_ops[op].doc};
        lua_pushinteger(L, op);
        lua_pushcclosure(L, core_map, 1);
        vm_document(L, -1, &map_entries[op]);
        lua_pushvalue(L, -1);
        lua_setfield(L, -5, ml_ops[op].name);
        lua_setfield(L, -3, ml_ops[op].name);
        lua_pushstring(L, ml_ops[op].name);
        lua_rawseti(L, -2, ++count);
    }
    lua_setfield(L, -3, "map_ops");
    lua_pop(L, 1);
}
