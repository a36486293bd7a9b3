/* The tables of ops and dtypes, and how the arguments of each op read. */
#include <string.h>

#include "runtime/graph/infer.h"

const ml_op_info ml_ops[ML_OP_COUNT] = {
#define ML_OP(ident, name, op_class, sources, rule, flops, expression, doc)                        \
    [ML_OP_##ident] = {#ident,         name,  ML_CLASS_##op_class, sources,                        \
                       ML_RULE_##rule, flops, expression,          doc},
#include "runtime/graph/ops.def"
#undef ML_OP
};

const ml_dtype_info ml_dtypes[ML_DTYPE_COUNT] = {
#define ML_DTYPE(ident, name, bytes, kind, suffix, memory, doc)                                    \
    [ML_##ident] = {name, bytes, ML_KIND_##kind, suffix, memory, doc},
#include "runtime/graph/dtypes.def"
#undef ML_DTYPE
};

const char *op_args(ml_op op) {
    switch (op) {
    case ML_OP_CONST: return "b";
    case ML_OP_IOTA: return "an";
    case ML_OP_STATE:
    case ML_OP_INPUT:
    case ML_OP_PARAM:
    case ML_OP_OUT: return "n";
    case ML_OP_RENAME: return "aa*";
    case ML_OP_PLACE: return "ao*";
    case ML_OP_SLICE:
    case ML_OP_PAD: return "ann";
    case ML_OP_SPLIT: return "aanan";
    case ML_OP_MERGE: return "aaa";
    case ML_OP_CONCAT:
    case ML_OP_GATHER:
    case ML_OP_ARGMAX:
    case ML_OP_SCATTER_ADD: return "a";
    case ML_OP_SUM:
    case ML_OP_MAX:
    case ML_OP_MIN:
    case ML_OP_DOT: return "a*";
    case ML_OP_CUMSUM:
    case ML_OP_SORT: return "an";
    case ML_OP_COORDINATE:
    case ML_OP_ALL_GATHER:
    case ML_OP_ALL_TO_ALL:
    case ML_OP_SHIFT:
    case ML_OP_MIRROR: return "nn";
    case ML_OP_ALL_REDUCE:
    case ML_OP_REDUCE_SCATTER: return "nnn";
    case ML_OP_TOP_K: return "ana";
    case ML_OP_RAGGED_DOT: return "aaaf";
    case ML_OP_RAGGED_OUTER: return "aan";
    case ML_OP_ATTENTION:
    case ML_OP_ATTENTION_GRAD: return "aaaaannnnbff";
    default: return "";
    }
}

char op_arg_kind(ml_op op, int i) {
    const char *kinds = op_args(op);
    const char *star = strchr(kinds, '*');
    return star ? kinds[i % (int)(star - kinds)] : kinds[i];
}
