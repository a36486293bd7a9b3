/* Methods of tensors that follow from their op's row in ops.def. A call gives the operands, then
 * the arguments by their kinds, then a table of options where there are flags. An op with logic of
 * its own has a method in tensor.c, which may read its call by vm_read_op. */
#include "vm/vm.h"

#include <stdarg.h>
#include <string.h>

enum { MOST_OPERANDS = 4, MOST_FLAGS = 4, SIGNATURE = 128 };

/* Operand i is called name, of *length characters. */
static const char *operand_name(const ml_op_info *info, int i, int *length) {
    const char *name = info->operands;
    while (i-- > 0) name = strchr(name, ',') + 2;
    *length = (int)strcspn(name, ",");
    return name;
}

/* Whether the arguments end so, and how many values of a call they are. */
static bool ends_with_many(ml_op op) {
    return ml_ops[op].args[ml_op_arg_count(op)].kind == ML_ARG_MANY;
}

static int count_parameters(const ml_op_info *info) {
    int count = info->sources, flags = 0;
    for (const ml_op_arg *arg = info->args; arg->kind > ML_ARG_MORE; arg++) {
        if (arg->kind == ML_ARG_FLAG)
            flags = 1;
        else
            count++;
        arg += arg->kind == ML_ARG_NEW;
    }
    return count + flags;
}

/* ---- Reading a call -------------------------------------------------------------------------- */

static ml_ref read_operand(lua_State *L, const ml_op_info *info, int i) {
    const ml_ref n = vm_operand(L, i + 1);
    if (n) return n;
    int length;
    const char *name = operand_name(info, i, &length);
    char what[96];
    snprintf(what, sizeof what, "the %.*s of %s", length, name, info->name);
    return vm_tensor(L, i + 1, what);
}

static void check_flags(lua_State *L, int index, const ml_op_info *info) {
    const char *known[MOST_FLAGS + 1] = {NULL};
    int count = 0;
    for (const ml_op_arg *arg = info->args; arg->kind > ML_ARG_MORE; arg++)
        if (arg->kind == ML_ARG_FLAG) known[count++] = arg->name;
    if (!count || lua_isnoneornil(L, index)) return;
    if (!lua_istable(L, index))
        vm_fail(L, NULL, "%s takes its options in a table, got %s", info->name,
                luaL_typename(L, index));
    vm_check_options(L, index, info->name, known);
}

static bool read_flag(lua_State *L, int index, const char *name) {
    if (!lua_istable(L, index)) return false;
    lua_getfield(L, index, name);
    bool flag = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return flag;
}

/* Axes and numbers, from value `at` of the call on; the next value. */
static int read_arguments(lua_State *L, const ml_op_info *info, vm_node *node, int at) {
    const ml_ref n = node->sources[0];
    char what[96];
    vm_axis axis = {0};
    for (const ml_op_arg *arg = info->args; arg->kind > ML_ARG_MORE; arg++) {
        int64_t *value = &node->args[node->arg_count++];
        const bool left_out = arg->fallback != ML_ARG_REQUIRED && lua_isnoneornil(L, at);
        switch (arg->kind) {
        case ML_ARG_OWN:
            snprintf(what, sizeof what, "cannot %s", info->name);
            axis = vm_axis_of(L, at++, n, info->name, what);
            *value = axis.id;
            break;
        case ML_ARG_NEW:
            snprintf(what, sizeof what, "the %s axis of %s", arg->name, info->name);
            axis = vm_new_axis(L, at++, what);
            value[0] = axis.id, value[1] = axis.size;
            node->arg_count++, arg++;
            break;
        case ML_ARG_INT:
        case ML_ARG_AT:
            snprintf(what, sizeof what, "%s's %s", info->name, arg->name);
            *value = !left_out                    ? vm_integer(L, at, what)
                     : arg->fallback == ML_AT_END ? axis.size
                                                  : arg->fallback;
            if (arg->kind == ML_ARG_AT && *value < 0) *value += axis.size;
            at++;
            break;
        case ML_ARG_AXIS:
        case ML_ARG_RESULT:
            *value = left_out ? node->args[arg->fallback] : vm_axis_in(L, at, n, info->name);
            at++;
            break;
        case ML_ARG_FLAG: break; /* after these */
        case ML_ARG_END:
        case ML_ARG_MANY:
        case ML_ARG_MORE:
        case ML_ARG_AXIS_OR_0:
        case ML_ARG_BITS:
        case ML_ARG_FUNCTION: vm_fail(L, NULL, "%s is not called by its row", info->name);
        }
    }
    return at;
}

void vm_read_op(lua_State *L, ml_op op, vm_node *node, ml_ref *sources) {
    const ml_op_info *info = &ml_ops[op];
    const int first = info->sources + 1, last = lua_gettop(L);
    const bool many = ends_with_many(op);
    if (!many) vm_most_arguments(L, count_parameters(info), info->name);
    for (int i = 0; i < info->sources; i++) sources[i] = read_operand(L, info, i);
    vm_begin(L, node, op);
    node->sources = sources;
    node->source_count = info->sources;
    if (many) {
        if (last - first >= ML_MAX_AXES)
            vm_fail(L, NULL, "%s takes at most %d axes", info->name, ML_MAX_AXES);
        for (int i = first; i <= last; i++)
            node->args[node->arg_count++] = vm_axis_in(L, i, sources[0], info->name);
        return;
    }
    int options = read_arguments(L, info, node, first);
    check_flags(L, options, info);
    for (int i = 0; i < node->arg_count; i++)
        if (info->args[i].kind == ML_ARG_FLAG)
            node->args[i] = read_flag(L, options, info->args[i].name);
}

/* ---- Methods --------------------------------------------------------------------------------- */

/* An Axis that the result has under its name must have the size that it has there. */
static void check_result(lua_State *L, const ml_op_info *info, const vm_node *node) {
    int at = info->sources + 1;
    for (const ml_op_arg *arg = info->args; arg->kind > ML_ARG_MORE; arg++, at++) {
        const vm_axis *axis = luaL_testudata(L, at, vm_axis_class);
        const ml_type *type = ml_graph_type(node->graph, node->result);
        int i = axis ? ml_type_find(type, axis->id) : -1;
        if (arg->kind == ML_ARG_RESULT && i >= 0 && type->size[i] != axis->size)
            vm_fail_with(L, node->sources, node->source_count, NULL,
                         "%s gives axis \"%s\" the size %lld, not %lld", info->name,
                         ml_axis_name(node->graph, axis->id), (long long)type->size[i],
                         (long long)axis->size);
        arg += arg->kind == ML_ARG_NEW;
    }
}

static int call_op(lua_State *L) {
    const ml_op op = (ml_op)lua_tointeger(L, lua_upvalueindex(1));
    const ml_op_info *info = &ml_ops[op];
    ml_ref sources[MOST_OPERANDS];
    vm_node node;
    vm_read_op(L, op, &node, sources);
    const ml_type type = *ml_graph_type(node.graph, sources[0]);
    if (ends_with_many(op) && node.arg_count == 0) {
        for (int i = 0; i < type.rank; i++) node.args[node.arg_count++] = type.axis[i];
        if (type.rank == 0) return vm_push_tensor(L, sources[0]);
    }
    ml_ref n = vm_add(L, &node);
    check_result(L, info, &node);
    if (ml_op_moves(op) && ml_type_equal(&type, ml_graph_type(node.graph, n)))
        return vm_push_tensor(L, sources[0]); /* all of an axis, or no padding */
    vm_push_tensor(L, n);
    for (int i = 1; i < info->outputs; i++) {
        vm_begin(L, &node, ML_OP_OUT);
        node.sources = &n;
        node.source_count = node.arg_count = 1;
        node.args[0] = i;
        vm_push_tensor(L, vm_add(L, &node));
    }
    return info->outputs;
}

/* ---- Registration ---------------------------------------------------------------------------- */

static void add(char *text, const char *format, ...) {
    va_list list;
    size_t used = strlen(text);
    va_start(list, format);
    vsnprintf(text + used, SIGNATURE - used, format, list);
    va_end(list);
}

/* "index: Tensor, axis: Axis|string -> Tensor" */
static void write_signature(ml_op op, char *text) {
    const ml_op_info *info = &ml_ops[op];
    bool options = false;
    *text = 0;
    for (int i = 1; i < info->sources; i++) {
        int length;
        const char *name = operand_name(info, i, &length);
        add(text, ", %.*s: Tensor", length, name);
    }
    for (const ml_op_arg *arg = info->args; arg->kind > ML_ARG_MORE; arg++) {
        const bool number = arg->kind == ML_ARG_INT || arg->kind == ML_ARG_AT;
        if (arg->kind == ML_ARG_FLAG) {
            add(text, options ? ", %s: boolean" : ", options?: {%s: boolean", arg->name);
            options = true;
            continue;
        }
        add(text, ", %s%s: %s", ends_with_many(op) ? "..." : arg->name,
            arg->fallback == ML_ARG_REQUIRED ? "" : "?",
            number                    ? "integer"
            : arg->kind == ML_ARG_NEW ? "Axis"
                                      : "Axis|string");
        arg += arg->kind == ML_ARG_NEW;
    }
    add(text, "%s -> Tensor%s", options ? "}" : "", info->outputs > 1 ? ", Tensor" : "");
    memmove(text, text + 2, strlen(text) - 1);
}

/* The table core is at the top of the stack. */
void vm_op_methods_register(lua_State *L) {
    static char signatures[ML_OP_COUNT][SIGNATURE];
    static vm_entry entries[ML_OP_COUNT];
    lua_getfield(L, -1, "tensor_methods");
    for (int op = 0; op < ML_OP_COUNT; op++) {
        const ml_op_info *info = &ml_ops[op];
        if (!*info->operands) continue;
        if (lua_getfield(L, -1, info->name) == LUA_TNIL) {
            write_signature((ml_op)op, signatures[op]);
            entries[op] = (vm_entry){info->name, call_op, signatures[op], info->doc};
            lua_pushinteger(L, op);
            lua_pushcclosure(L, call_op, 1);
            vm_document(L, -1, &entries[op]);
            lua_setfield(L, -3, info->name);
        }
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}
