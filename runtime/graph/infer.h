/* Inside of runtime/graph: type inference and what the constructors share. */
#ifndef ML_GRAPH_INFER_H
#define ML_GRAPH_INFER_H

#include "runtime/graph/graph.h"

/* The operands of a node to be made. `sources` may be rewritten: promotion puts CASTs in. `args`
 * may be reordered (reduced axes are sorted by position). `frozen` forbids both, for verifying. */
typedef struct infer {
    ml_graph *g;
    ml_op op;
    ml_ref *sources;
    int source_count;
    int64_t *args;
    int arg_count;
    const ml_type *given; /* may be NULL */
    bool frozen;
} infer;

/* Counts and kinds of operands and arguments: mistakes are ours, ML_INTERNAL. */
void graph_check_shape(const infer *in);
/* The type of the node; raises ML_INVALID. */
void infer_type(infer *in, ml_type *out);
void infer_move(infer *in, ml_type *out); /* moves.c */
void infer_scatter(infer *in, ml_type *out);
void infer_write_rows(infer *in, ml_type *out);
void infer_out(infer *in, ml_type *out); /* types.c */

/* Raise ML_INVALID with the sources as operands. `help` may be NULL. */
_Noreturn void infer_raise(const infer *in, const char *help, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
const ml_type *infer_source(const infer *in, int i);
/* Position of `axis` in source i; raises "cannot <what> "axis": <whose> has no such axis". */
int infer_find(const infer *in, int i, int64_t axis, const char *what, const char *whose);
/* Insert CASTs so that the sources first..last-1 have the widest float dtype of theirs, or raise.
 */
ml_dtype infer_promote(infer *in, int first, int last);
void infer_float_only(const infer *in, int i);
void infer_number_only(const infer *in, int i);
/* Raise unless the source is of that dtype. */
void infer_dtype(const infer *in, int i, ml_dtype dtype, const char *whose);
/* Append an axis; raises for a duplicate, a size below 1, or too many axes. */
void infer_append(const infer *in, ml_type *out, ml_axis axis, int64_t size);
/* Raise where i32 does not reach all elements of an axis. */
void infer_indexed(const infer *in, ml_axis axis, int64_t size);
/* "batch, seq, embed" in the graph's arena. */
const char *infer_axes(const infer *in, const ml_type *t);

/* Nodes that `root` reaches through sources, ascending, `root` last; in `arena`. */
typedef ML_VEC(ml_ref) ml_refs;
void graph_reach(const ml_graph *g, ml_ref root, ml_arena *arena, ml_refs *out);
void graph_sort(ml_refs *refs); /* ascending */
/* Whether an argument of the op is a function: the root of nodes that no operand leads to. */
static inline bool graph_has_function(ml_op op) {
    for (const ml_op_arg *arg = ml_ops[op].args; arg->kind > ML_ARG_MORE; arg++)
        if (arg->kind == ML_ARG_FUNCTION) return true;
    return false;
}
/* ml_graph_copy with flags set and cleared. */
ml_ref graph_copy_node(ml_graph *g, const ml_graph *from, ml_ref n, const ml_ref *sources,
                       uint8_t set, uint8_t clear);
/* Copy function `root` of `from` into g with ML_NODE_FUNCTION; 0 for 0. */
ml_ref graph_copy_function(ml_graph *g, const ml_graph *from, ml_ref root);
/* The same without: its nodes are computed. */
ml_ref graph_copy_plain(ml_graph *g, const ml_graph *from, ml_ref root);
/* ml_graph_inline; indices along axis[i] count from the i32 number start[i] unless it is 0. */
ml_ref graph_inline_placed(ml_graph *g, ml_ref root, const ml_ref *values, int count,
                           const ml_axis axis[2], const ml_ref start[2]);
/* The node equal to the one described, or 0. Used by the verifier. */
ml_ref graph_lookup(ml_graph *g, ml_ref n);
/* ml_graph_copy of a node, within a session, that no node of g is equal to: nothing is looked up.
 */
ml_ref graph_append(ml_graph *g, const ml_graph *from, ml_ref n, const ml_ref *sources);
/* The same, but functions of its arguments are in g already, where place(context, n) says; NULL:
 * they are copied. */
typedef ml_ref graph_place(void *context, ml_ref function);
ml_ref graph_append_placed(ml_graph *g, const ml_graph *from, ml_ref n, const ml_ref *sources,
                           graph_place *place, void *context);
/* What an open recording notes: the nodes that the graph is asked for, in order (recording.h). */
typedef struct graph_log {
    ml_arena *arena;
    ML_VEC(ml_ref) nodes;
} graph_log;
/* The index of an interned type. */
uint32_t graph_type_index(ml_graph *g, const ml_type *type);
/* The node of `node`'s op, type and counts, with the flags and the origin of nodes to come: its
 * type is what inference would give. */
ml_ref graph_add_typed(ml_graph *g, const ml_node *node, const ml_ref *sources,
                       const int64_t *args);
/* Nodes to come have the origin of node n of `from`. */
void graph_take_origin(ml_graph *g, const ml_graph *from, ml_ref n);
/* ml_graph_derive; the new graph has room for as much as `like`. */
ml_graph *graph_derive_like(const ml_graph *parent, const ml_graph *like);
/* No more nodes will be added soon: gives back the memory by which equal ones are found. */
void graph_forget(ml_graph *g);

/* A float cast to an integer: towards zero; NaN is 0 and what does not fit the nearest that does.
 */
int64_t fold_truncate(ml_dtype to, double x);
/* The value of a MAP op on constants, rounded to dtype `result`; false where it is not folded.
 * Integers are folded where they and the result are exact as doubles. values[] has a second
 * element even for ops of one operand. */
bool fold_map(ml_op op, ml_dtype operands, ml_dtype result, const double *values, double *value);

#endif
