/* Nodes that Lua asks for: their origin, constants, casts. */
#include <string.h>

#include "vm/vm.h"

void vm_origin(lua_State *L, ml_origin *origin) {
    ml_vm *vm = vm_of(L);
    *origin = (ml_origin){.module = vm->module};
    lua_Debug frame = {.i_ci = vm->here.alone ? (vm_call_id *)vm->here.call : NULL};
    if (vm->here.alone || !vm_script_frame_above(L, vm->here.call, &frame)) {
        bool held = vm->here.call && frame.i_ci == vm->here.call;
        if (held) origin->file = vm->here.file, origin->line = vm->here.line;
        return;
    }
    const char *file =
        frame.source[0] == '@' || frame.source[0] == '=' ? frame.source + 1 : frame.source;
    if (!vm->file || strcmp(vm->file, file) != 0) vm->file = vm_intern(L, file);
    origin->file = vm->file;
    origin->line = frame.currentline;
}

void vm_begin(lua_State *L, vm_node *node, ml_op op) {
    ml_vm *vm = vm_of(L);
    *node = (vm_node){.vm = vm, .graph = vm->graph, .op = op};
    vm_origin(L, &node->origin);
}

static void add_node(void *argument) {
    vm_node *node = argument;
    ml_graph_set_origin(node->graph, &node->origin);
    node->result = ml_graph_add(node->graph, node->op, node->sources, node->source_count,
                                node->args, node->arg_count, node->type);
}

/* Inside a score function, what depends on the score must be elementwise. */
static bool is_tainted(const ml_vm *vm, const vm_node *node) {
    for (int i = 0; i < node->source_count; i++)
        for (uint32_t k = 0; k < vm->tainted.count; k++)
            if (vm->tainted.at[k] == node->sources[i]) return true;
    return false;
}

static void add_tainted(void *argument) {
    vm_node *node = argument;
    add_node(argument);
    *ML_PUSH(node->vm->arena, &node->vm->tainted) = node->result;
}

ml_ref vm_add(lua_State *L, vm_node *node) {
    bool tainted = is_tainted(node->vm, node);
    if (tainted && (ml_ops[node->op].op_class != ML_CLASS_MAP || node->op == ML_OP_RANDOM))
        vm_fail(
            L, "compute it outside and let the function use the result",
            "a score function cannot use %s on scores or indices: it works on one score at a time",
            ml_ops[node->op].name);
    vm_protect(L, tainted ? add_tainted : add_node, node);
    return node->result;
}

ml_ref vm_unary(lua_State *L, ml_op op, ml_ref a, const ml_type *type) {
    vm_node node;
    vm_begin(L, &node, op);
    node.sources = &a;
    node.source_count = 1;
    node.type = type;
    return vm_add(L, &node);
}

ml_ref vm_cast(lua_State *L, ml_ref n, ml_dtype dtype) {
    if (ml_graph_type(vm_of(L)->graph, n)->dtype == dtype) return n;
    ml_type type = {.dtype = (uint8_t)dtype};
    return vm_unary(L, ML_OP_CAST, n, &type);
}

static void add_constant(void *argument) {
    vm_node *node = argument;
    ml_graph_set_origin(node->graph, &node->origin);
    double value;
    memcpy(&value, &node->args[0], sizeof value);
    node->result = ml_dtypes[node->type->dtype].kind == ML_KIND_FLOAT
                       ? ml_const(node->graph, node->type->dtype, value)
                       : ml_const_int(node->graph, node->type->dtype, node->args[0]);
}

ml_ref vm_number(lua_State *L, int index, ml_dtype dtype) {
    ml_origin origin;
    vm_origin(L, &origin);
    return vm_number_from(L, index, dtype, &origin);
}

ml_ref vm_number_from(lua_State *L, int index, ml_dtype dtype, const ml_origin *origin) {
    vm_node node = {.vm = vm_of(L), .graph = vm_of(L)->graph, .origin = *origin};
    ml_type type = {.dtype = (uint8_t)dtype};
    node.type = &type;
    if (ml_dtypes[dtype].kind == ML_KIND_FLOAT) {
        double value = lua_tonumber(L, index);
        memcpy(&node.args[0], &value, sizeof value);
    } else if (lua_isboolean(L, index)) {
        node.args[0] = lua_toboolean(L, index);
    } else {
        int exact;
        node.args[0] = lua_tointegerx(L, index, &exact);
        if (!exact)
            vm_fail(L, "t:cast(\"f32\") first", "%s values cannot take the number %s",
                    ml_dtypes[dtype].name, luaL_tolstring(L, index, NULL));
        if (dtype == ML_BOOL) node.args[0] = node.args[0] != 0;
    }
    vm_protect(L, add_constant, &node);
    return node.result;
}
