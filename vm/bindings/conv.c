/* core.conv: stdlib/conv.lua reads what scripts write; here is the node. */
#include "runtime/ops/conv/conv.h"

#include "vm/bindings/precision.h"
#include "vm/vm.h"

static int64_t field(lua_State *L, int i) {
    lua_rawgeti(L, -1, i);
    int64_t value = vm_integer(L, -1, "a number of a window");
    lua_pop(L, 1);
    return value;
}

/* args of the windows at index 3, and the size of each result's axis. */
static int read_windows(lua_State *L, const ml_ref *operands, int64_t *args, int64_t *steps) {
    int64_t count = vm_table_length(L, 3);
    if (count < 1 || count > CONV_WINDOWS)
        vm_fail(L, NULL, "a convolution is along 1 to %d axes, not %lld", CONV_WINDOWS,
                (long long)count);
    for (int i = 0; i < count; i++) {
        int64_t *a = args + CONV_ARGS * i;
        lua_rawgeti(L, 3, i + 1);
        for (int k = 0; k < 2; k++) {
            lua_rawgeti(L, -1, k + 1);
            a[k] = vm_axis_of(L, -1, operands[k], "conv", "cannot convolve along").id;
            lua_pop(L, 1);
        }
        lua_rawgeti(L, -1, 7);
        a[2] = lua_isnil(L, -1) ? 1 : vm_integer(L, -1, "a number of a window");
        lua_pop(L, 1);
        for (int k = 0; k < 3; k++) a[3 + k] = field(L, 3 + k);
        steps[i] = field(L, 6);
        lua_pop(L, 1);
    }
    return (int)count;
}

static bool is_listed(lua_State *L, int list, ml_ref x, ml_axis axis) {
    bool found = false;
    for (int i = 1; i <= vm_table_length(L, list) && !found; i++) {
        lua_rawgeti(L, list, i);
        found = vm_axis_in(L, -1, x, "conv") == axis;
        lua_pop(L, 1);
    }
    return found;
}

static void append(lua_State *L, ml_type *type, ml_axis axis, int64_t size) {
    if (type->rank == ML_MAX_AXES)
        vm_fail(L, NULL, "conv would give more than %d axes", ML_MAX_AXES);
    type->axis[type->rank] = axis;
    type->size[type->rank++] = size;
}

/* x's axes but those summed over, then those of w alone. */
static void result_type(lua_State *L, const ml_graph *g, const ml_ref *operands,
                        const int64_t *args, const int64_t *steps, int count, ml_type *type) {
    const ml_type *x = ml_graph_type(g, operands[0]), *w = ml_graph_type(g, operands[1]);
    for (int i = 0; i < x->rank; i++) {
        int64_t size = x->size[i];
        for (int k = 0; k < count; k++)
            if (args[CONV_ARGS * k] == x->axis[i]) size = steps[k];
        if (!is_listed(L, 4, operands[0], x->axis[i])) append(L, type, x->axis[i], size);
    }
    for (int i = 0; i < w->rank; i++) {
        bool taps = false;
        for (int k = 0; k < count; k++) taps = taps || args[CONV_ARGS * k + 1] == w->axis[i];
        if (!taps && ml_type_find(x, w->axis[i]) < 0) append(L, type, w->axis[i], w->size[i]);
    }
}

/* conv(x, w, {{axis, taps, stride, dilation, before, steps, up or nil}, ...}, {summed axes}, dtype)
 */
static int core_conv(lua_State *L) {
    ml_ref operands[2] = {vm_tensor(L, 1, "the tensor of conv"),
                          vm_tensor(L, 2, "the filter of conv")};
    int64_t steps[CONV_WINDOWS];
    vm_node node;
    vm_begin(L, &node, ML_OP_CONV);
    int count = read_windows(L, operands, node.args, steps);
    ml_type type = {0};
    result_type(L, node.graph, operands, node.args, steps, count, &type);
    bool said = !lua_isnoneornil(L, 5);
    const ml_type *x = ml_graph_type(node.graph, operands[0]),
                  *w = ml_graph_type(node.graph, operands[1]);
    type.dtype = (uint8_t)(said ? vm_dtype(L, 5, -1) : ml_wider(x->dtype, w->dtype));
    node.arg_count = CONV_ARGS * count;
    node.sources = operands;
    node.source_count = 2;
    node.type = &type;
    vm_add(L, &node); /* errors show the operands as the script has them */
    if (!said && precision_narrow(L, operands, 2)) {
        x = ml_graph_type(node.graph, operands[0]), w = ml_graph_type(node.graph, operands[1]);
        type.dtype = (uint8_t)ml_wider(x->dtype, w->dtype);
        vm_add(L, &node);
    }
    return vm_push_tensor(L, node.result);
}

static const vm_entry functions[] = {
    {"conv", core_conv,
     "x: Tensor, w: Tensor, windows: table, summed: Axis[]|string[], dtype?: string -> Tensor",
     "a convolution: stdlib/conv.lua"},
    {0}};

void vm_conv_register(lua_State *L) {
    vm_register(L, functions);
}
