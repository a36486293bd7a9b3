/* Ops and dtypes: the facts of ops.def and dtypes.def, and predicates over them.
 *
 * Code that treats ops alike asks for a trait or a class. A switch over ops or dtypes has no
 * `default:` (lint refuses it), so that the compiler names each switch that a new row concerns; a
 * switch over the ops of one class converts to that class's enum: ml_leaf_op, ml_map_op,
 * ml_move_op, ml_rest_op (all but elementwise ops and collectives, which have their own table, and
 * the routines of runtime/ops, which have interfaces). */
#ifndef ML_OPS_H
#define ML_OPS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum {
#define ML_DTYPE(ident, ...) ML_##ident,
#include "runtime/graph/dtypes.def"
#undef ML_DTYPE
    ML_DTYPE_COUNT
} ml_dtype;

typedef enum {
#define ML_OP(ident, ...) ML_OP_##ident,
#include "runtime/graph/ops.def"
#undef ML_OP
    ML_OP_COUNT
} ml_op;

typedef enum {
    ML_CLASS_LEAF,
    ML_CLASS_MAP,
    ML_CLASS_MOVE,
    ML_CLASS_REDUCE,
    ML_CLASS_SCAN,
    ML_CLASS_CONTRACT,
    ML_CLASS_ROUTINE,
    ML_CLASS_COLLECTIVE
} ml_op_class;
typedef enum {
    ML_RULE_ARITH,
    ML_RULE_FLOAT,
    ML_RULE_TEST,
    ML_RULE_LOGIC,
    ML_RULE_SAME,
    ML_RULE_OWN
} ml_dtype_rule;
typedef enum { ML_KIND_BOOL, ML_KIND_INT, ML_KIND_FLOAT } ml_dtype_kind;
typedef enum { ML_COMBINE_SUM, ML_COMBINE_MAX, ML_COMBINE_MIN, ML_COMBINE_COUNT } ml_combine;

/* The columns LINEAR and TRAITS of ops.def. */
typedef enum {
    ML_LINEAR_NO,
    ML_LINEAR_A,
    ML_LINEAR_B,
    ML_LINEAR_EACH,
    ML_LINEAR_JOINT,
    ML_LINEAR_CHOSEN
} ml_linear;
typedef enum {
    ML_VIEW = 1 << 0,
    ML_RELABEL = 1 << 1,
    ML_BIJECTIVE = 1 << 2,
    ML_CHEAP = 1 << 3,
    ML_BY_PARTS = 1 << 4,
    ML_SUMS = 1 << 5,
    ML_PRODUCT = 1 << 6,
    ML_EXACT = 1 << 7,
    ML_ROUNDS_ONCE = 1 << 8,
    ML_POSITIVE_A = 1 << 9,
    ML_POSITIVE_B = 1 << 10,
    ML_WIDENS = 1 << 11,
} ml_trait;

/* The column ARGS: an op's arguments, one after another. */
typedef enum {
    ML_ARG_END,
    ML_ARG_MANY, /* the end, too: those before come any number of times */
    ML_ARG_MORE, /* the end, too: the last one comes any number of times */
    ML_ARG_AXIS,
    ML_ARG_OWN,
    ML_ARG_RESULT,
    ML_ARG_NEW, /* the next is its size */
    ML_ARG_AXIS_OR_0,
    ML_ARG_INT,
    ML_ARG_AT,
    ML_ARG_FLAG,
    ML_ARG_BITS,
    ML_ARG_FUNCTION
} ml_arg_kind;
enum { ML_ARG_REQUIRED = -1, ML_AT_END = -2 };
typedef struct {
    ml_arg_kind kind;
    const char *name;
    int fallback; /* where a call in Lua does not give it; or ML_ARG_REQUIRED */
} ml_op_arg;

typedef struct {
    const char *ident, *name;
    ml_op_class op_class;
    int sources, outputs; /* -1 where it varies */
    ml_dtype_rule rule;
    int flops;
    ml_linear linear;
    unsigned traits;
    const char *operands; /* their names in messages: "table, index" */
    const ml_op_arg *args;
    const char *expression; /* of kernels; "" where the op is not elementwise */
    const char *doc;
} ml_op_info;
typedef struct {
    const char *name;
    int bytes;
    ml_dtype_kind kind;
    ml_dtype compute;
    int promotion, digits;
    double least, largest;
    const char *memory;       /* C type in memory, in kernels */
    const char *load, *store; /* functions in kernels; "" for a conversion */
    const char *safetensors, *doc;
} ml_dtype_info;
extern const ml_op_info ml_ops[ML_OP_COUNT];
extern const ml_dtype_info ml_dtypes[ML_DTYPE_COUNT];

/* The ops of one class, with their values in ml_op, for switches over these alone. */
#define ML_KEEP(enumerator) enumerator,
#define ML_DROP(enumerator)
#define ML_THIRD(a, b, c, ...) c
#define ML_CHOOSE(...) ML_THIRD(__VA_ARGS__)
#define ML_ONLY_LEAF_LEAF ~, ML_KEEP
#define ML_ONLY_MAP_MAP ~, ML_KEEP
#define ML_ONLY_MOVE_MOVE ~, ML_KEEP
#define ML_ONLY_REST_LEAF ~, ML_KEEP
#define ML_ONLY_REST_MOVE ~, ML_KEEP
#define ML_ONLY_REST_REDUCE ~, ML_KEEP
#define ML_ONLY_REST_SCAN ~, ML_KEEP
#define ML_ONLY_REST_CONTRACT ~, ML_KEEP
#define ML_ONLY_REST_ROUTINE ~, ML_KEEP
#define ML_OF_CLASS(wanted, op_class, ident)                                                       \
    ML_CHOOSE(~, ML_ONLY_##wanted##_##op_class, ML_DROP, ~)(ML_##wanted##_##ident = ML_OP_##ident)
typedef enum {
#define ML_OP(ident, name, op_class, ...) ML_OF_CLASS(LEAF, op_class, ident)
#include "runtime/graph/ops.def"
#undef ML_OP
} ml_leaf_op;
typedef enum {
#define ML_OP(ident, name, op_class, ...) ML_OF_CLASS(MAP, op_class, ident)
#include "runtime/graph/ops.def"
#undef ML_OP
} ml_map_op;
typedef enum {
#define ML_OP(ident, name, op_class, ...) ML_OF_CLASS(MOVE, op_class, ident)
#include "runtime/graph/ops.def"
#undef ML_OP
} ml_move_op;
typedef enum { /* all but elementwise ops, collectives and the routines of runtime/ops */
#define ML_ROUTINE(...)
#define ML_OP(ident, name, op_class, ...) ML_OF_CLASS(REST, op_class, ident)
#include "runtime/graph/ops.def"
#undef ML_OP
#undef ML_ROUTINE
} ml_rest_op;

/* ---- Questions about ops ---- */

/* Whether the op has all of these traits. */
static inline bool ml_op_is(ml_op op, unsigned traits) {
    return (ml_ops[op].traits & traits) == traits;
}
static inline bool ml_op_is_map(ml_op op) {
    return ml_ops[op].op_class == ML_CLASS_MAP;
}
/* Elementwise, and a function of its operands alone: RANDOM depends on the element's index. */
static inline bool ml_op_is_function(ml_op op) {
    return op != ML_OP_RANDOM && ml_op_is_map(op);
}
/* Compares two numbers. */
static inline bool ml_op_compares(ml_op op) {
    return ml_ops[op].rule == ML_RULE_TEST && ml_ops[op].sources == 2;
}
/* Moves elements, or repeats them, or puts zeros between them, by a rule that no data decides. */
static inline bool ml_op_moves(ml_op op) {
    return ml_ops[op].op_class == ML_CLASS_MOVE && ml_op_is(op, ML_CHEAP);
}
/* A view in which each element of the operand is at most once. */
static inline bool ml_op_selects(ml_op op) {
    return op != ML_OP_BROADCAST && ml_op_is(op, ML_VIEW);
}
/* Which operands are summands of a linear op: bit i for operand i; all bits for EACH and JOINT. */
static inline unsigned ml_op_linear_in(ml_op op) {
    static const unsigned operands[] = {0, 1, 2, ~0u, ~0u, 6};
    return operands[ml_ops[op].linear];
}
/* How many arguments the op takes; times any number where they end with
 * ML_ARG_MANY, or at least one less where they end with ML_ARG_MORE. */
int ml_op_arg_count(ml_op op);
const ml_op_arg *ml_op_arg_of(ml_op op, int i);
/* An axis, never 0. */
static inline bool ml_arg_is_axis(ml_arg_kind kind) {
    return kind >= ML_ARG_AXIS && kind <= ML_ARG_NEW;
}

/* ---- Questions about dtypes ---- */

static inline bool ml_is_float(ml_dtype dtype) {
    return ml_dtypes[dtype].kind == ML_KIND_FLOAT;
}
/* A float that is computed in a wider type. */
static inline bool ml_is_narrow(ml_dtype dtype) {
    return ml_is_float(dtype) && ml_dtypes[dtype].compute != dtype;
}
/* The dtype that a narrow float, or a bool, is computed and summed in; itself for others. */
static inline ml_dtype ml_compute_dtype(ml_dtype dtype) {
    return ml_dtypes[dtype].compute;
}
/* Whether every value of `from` is one of `to`. */
bool ml_dtype_holds(ml_dtype to, ml_dtype from);
/* Of two floats, that of higher promotion; of two narrow ones that differ, the one that both are
 * computed in, for neither holds the other's values. */
static inline ml_dtype ml_wider(ml_dtype a, ml_dtype b) {
    if (a != b && ml_is_narrow(a) && ml_is_narrow(b)) return ml_compute_dtype(a);
    return ml_dtypes[a].promotion >= ml_dtypes[b].promotion ? a : b;
}
/* Of the kernels' functions on this dtype: "f32" in ml_exp_f32. */
static inline const char *ml_suffix(ml_dtype dtype) {
    return ml_dtypes[ml_compute_dtype(dtype)].name;
}

#endif
