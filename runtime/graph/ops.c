/* The tables of ops and dtypes. */
#include "runtime/graph/ops.h"

#define ARGS(...) ((const ml_op_arg[]){__VA_ARGS__{ML_ARG_END}})
#define ARG(kind, name, fallback) {ML_ARG_##kind, #name, fallback},
#define AXIS(name) ARG(AXIS, name, ML_ARG_REQUIRED)
#define OWN(name) ARG(OWN, name, ML_ARG_REQUIRED)
#define RESULT(name) ARG(RESULT, name, ML_ARG_REQUIRED)
#define RESULT_OR(name, fallback) ARG(RESULT, name, fallback)
#define NEW(name) ARG(NEW, name, ML_ARG_REQUIRED) ARG(INT, name##_size, ML_ARG_REQUIRED)
#define AXIS_OR_0(name) ARG(AXIS_OR_0, name, 0)
#define INT(name) ARG(INT, name, ML_ARG_REQUIRED)
#define INT_OR(name, fallback) ARG(INT, name, fallback)
#define AT(name, fallback) ARG(AT, name, fallback)
#define FLAG(name) ARG(FLAG, name, 0)
#define BITS(name) ARG(BITS, name, ML_ARG_REQUIRED)
#define FUNCTION(name) ARG(FUNCTION, name, 0)
#define MANY {ML_ARG_MANY},
#define MORE {ML_ARG_MORE},

const ml_op_info ml_ops[ML_OP_COUNT] = {
#define ML_ROW(ident, name, op_class, sources, outputs, rule, flops, linear, traits, operands,     \
               args, expression, doc)                                                              \
    [ML_OP_##ident] = {#ident,                                                                     \
                       name,                                                                       \
                       ML_CLASS_##op_class,                                                        \
                       sources,                                                                    \
                       outputs,                                                                    \
                       ML_RULE_##rule,                                                             \
                       flops,                                                                      \
                       ML_LINEAR_##linear,                                                         \
                       traits,                                                                     \
                       operands,                                                                   \
                       args,                                                                       \
                       expression,                                                                 \
                       doc},
#define ML_OP(ident, name, op_class, sources, outputs, rule, flops, linear, traits, operands,      \
              args, gradient, doc)                                                                 \
    ML_ROW(ident, name, op_class, sources, outputs, rule, flops, linear, traits, operands, args,   \
           "", doc)
#define ML_MAP(ident, name, sources, rule, flops, linear, traits, kernel, real, whole, gradient,   \
               doc)                                                                                \
    ML_ROW(ident, name, MAP, sources, 1, rule, flops, linear, ML_CHEAP | ML_BY_PARTS | (traits),   \
           "", ARGS(), kernel, doc)
#include "runtime/graph/ops.def"
#undef ML_MAP
#undef ML_OP
};

const ml_dtype_info ml_dtypes[ML_DTYPE_COUNT] = {
#define ML_DTYPE(ident, name, bytes, kind, compute, promotion, digits, least, largest, host, from, \
                 to, memory, load, store, safetensors, cuda, nccl, tensor_map, doc)                \
    [ML_##ident] = {name,    bytes,  ML_KIND_##kind, ML_##compute, promotion,   digits, least,     \
                    largest, memory, load,           store,        safetensors, doc},
#include "runtime/graph/dtypes.def"
#undef ML_DTYPE
};

int ml_op_arg_count(ml_op op) {
    const ml_op_arg *args = ml_ops[op].args;
    int count = 0;
    while (args[count].kind > ML_ARG_MORE) count++;
    return count;
}

const ml_op_arg *ml_op_arg_of(ml_op op, int i) {
    const ml_op_arg *args = ml_ops[op].args;
    int count = ml_op_arg_count(op);
    if (args[count].kind == ML_ARG_MORE) return &args[i < count ? i : count - 1];
    return &args[i % count];
}

bool ml_dtype_holds(ml_dtype to, ml_dtype from) {
    const ml_dtype_info *a = &ml_dtypes[from], *b = &ml_dtypes[to];
    if (to == from || from == ML_BOOL) return true;
    if (a->kind == ML_KIND_INT && b->kind == ML_KIND_FLOAT) return 8 * a->bytes - 1 <= b->digits;
    if (a->kind == ML_KIND_INT) return b->kind == ML_KIND_INT && a->bytes <= b->bytes;
    return b->kind == ML_KIND_FLOAT && a->digits <= b->digits && a->least >= b->least &&
           a->largest <= b->largest;
}
