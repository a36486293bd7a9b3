/* The tables of ops and dtypes. */
#include "runtime/graph/ops.h"

#include <string.h>

const ml_op_info ml_ops[ML_OP_COUNT] = {
#define ML_ROW(ident, name, op_class, sources, outputs, rule, flops, linear, traits, args,         \
               arg_names, expression, doc)                                                         \
    [ML_OP_##ident] = {#ident,                                                                     \
                       name,                                                                       \
                       ML_CLASS_##op_class,                                                        \
                       sources,                                                                    \
                       outputs,                                                                    \
                       ML_RULE_##rule,                                                             \
                       flops,                                                                      \
                       ML_LINEAR_##linear,                                                         \
                       traits,                                                                     \
                       args,                                                                       \
                       arg_names,                                                                  \
                       expression,                                                                 \
                       doc},
#define ML_OP(ident, name, op_class, sources, outputs, rule, flops, linear, traits, args,          \
              arg_names, gradient, doc)                                                            \
    ML_ROW(ident, name, op_class, sources, outputs, rule, flops, linear, traits, args, arg_names,  \
           "", doc)
#define ML_MAP(ident, name, sources, rule, flops, linear, traits, kernel, real, whole, gradient,   \
               doc)                                                                                \
    ML_ROW(ident, name, MAP, sources, 1, rule, flops, linear, ML_CHEAP | ML_BY_PARTS | (traits),   \
           "", "", kernel, doc)
#include "runtime/graph/ops.def"
#undef ML_MAP
#undef ML_OP
};

const ml_dtype_info ml_dtypes[ML_DTYPE_COUNT] = {
#define ML_DTYPE(ident, name, bytes, kind, compute, rank, digits, least, largest, host, from, to,  \
                 memory, load, store, safetensors, cuda, nccl, tensor_map, doc)                    \
    [ML_##ident] = {name,    bytes,  ML_KIND_##kind, ML_##compute, rank,        digits, least,     \
                    largest, memory, load,           store,        safetensors, doc},
#include "runtime/graph/dtypes.def"
#undef ML_DTYPE
};

char ml_op_arg_kind(ml_op op, int i) {
    const char *kinds = ml_ops[op].args;
    const char *star = strchr(kinds, '*');
    return star ? kinds[i % (int)(star - kinds)] : kinds[i];
}

bool ml_dtype_holds(ml_dtype to, ml_dtype from) {
    const ml_dtype_info *a = &ml_dtypes[from], *b = &ml_dtypes[to];
    if (to == from || from == ML_BOOL) return true;
    if (a->kind == ML_KIND_INT && b->kind == ML_KIND_FLOAT) return 8 * a->bytes - 1 <= b->digits;
    if (a->kind == ML_KIND_INT) return b->kind == ML_KIND_INT && a->bytes <= b->bytes;
    return b->kind == ML_KIND_FLOAT && a->digits <= b->digits && a->least >= b->least &&
           a->largest <= b->largest;
}
