/* The interface of an op that has rules of its own: what the core asks of it.
 *
 * A row ML_ROUTINE of ops.def names the op. A folder of runtime/ops defines its interface, a
 * constant ml_interface_IDENT, in which NULL is as its line says; the linker reports a row without
 * one. The table ml_op_interfaces (ops/interfaces.c) has them by op: NULL for the ops of the core.
 * Nothing else in graph, passes, shard and plan knows the op, so that these link without it. */
#ifndef ML_GRAPH_OP_INTERFACE_H
#define ML_GRAPH_OP_INTERFACE_H

#include "runtime/graph/graph.h"

struct infer;
struct tape;
struct reference_run;
struct reference_value;
struct sharder;
struct shard_strategy;
struct ml_placements;

typedef struct {
    /* ---- Types (infer.h) ---- */
    /* Checks the operands and arguments, and gives the type of output 0; raises ML_INVALID. */
    void (*infer)(struct infer *in, ml_type *out);
    /* How many outputs n has; NULL: as many as the op's row says. */
    int (*outputs)(const ml_graph *g, ml_ref n);
    /* The type of output i >= 1; NULL: there is one output. */
    void (*output_type)(const ml_graph *g, ml_ref n, int i, ml_type *out);
    /* The arguments in a printed graph; NULL: by their names in the op's row. */
    void (*print)(const ml_graph *g, ml_ref n, ml_text *out);

    /* ---- Meaning ---- */
    /* Adds the gradients of n's operands (gradient.h), from those of its outputs, 0 where there is
     * none. gradient_of_definition serves ops that have a definition. */
    void (*gradient)(struct tape *t, ml_ref n, const ml_ref *cotangents);
    /* The node that n was made in place of, as n computes itself what that one reads: gradients
     * with respect to what it reads are its own. 0: there is none; NULL: never. */
    ml_ref (*before)(ml_graph *g, ml_ref n);
    /* n by other ops: its outputs. NULL: it has no definition but `evaluate`. */
    void (*define)(ml_graph *g, ml_ref n, ml_ref *outputs);
    /* Whether ml_decompose replaces n by that, attention over up to `longest` keys; NULL: never. */
    bool (*decomposes)(const ml_graph *g, ml_ref n, int64_t longest);
    /* The reference interpreter's output i of n, into zeroed cells (reference.h); or all outputs at
     * once, in the run's scratch arena. Both NULL: ml_decompose replaces it before. */
    void (*evaluate)(struct reference_run *r, ml_ref n, int i, struct reference_value *out);
    struct reference_value *(*evaluate_all)(struct reference_run *r, ml_ref n);
    double (*flops)(const ml_graph *g, ml_ref n);
    /* The program that n runs at each of so many positions, which the caller frees; NULL: none. */
    ml_graph *(*body)(const ml_graph *g, ml_ref n, int64_t *times);
    /* The backward pass may compute it again instead of saving its result (passes/recompute.c): for
     * how many times as long as a product of as many FLOPs, about; 0: it may not. */
    int recomputes;

    /* ---- Sharding (shard_internal.h) ---- */
    /* The ways to cut n's work over mesh axis s->mesh, beside none at all. */
    void (*propose)(struct sharder *s, ml_ref n);
    /* outputs[0..]: n on one rank; as shard_local. NULL: the op on its parts. */
    void (*local)(struct sharder *s, ml_ref n, const ml_ref *sources,
                  const struct ml_placements *need, const struct ml_placements *out,
                  ml_ref *outputs);
    /* Instead of both: places n and makes its versions. */
    void (*place)(struct sharder *s, ml_ref n);
    /* Whether a strategy is possible where n's sources are placed so; NULL: by its axes alone. */
    bool (*feasible)(const struct sharder *s, ml_ref n, const struct shard_strategy *strategy,
                     const struct ml_placements *need);
    /* Adds further versions of n, which is `node` in placement `out`; NULL: there is none. */
    void (*placed)(struct sharder *s, ml_ref n, const struct ml_placements *need,
                   const struct ml_placements *out, ml_ref node);
    /* The two sources that say where the rows of groups begin and end (ML_OWNED, ML_SENT). */
    const ml_ref *(*row_bounds)(const ml_graph *g, ml_ref n);
    /* An axis of which a group of ranks may share elements (key/value heads); NULL or 0: none. */
    ml_axis (*shared_axis)(const ml_graph *g, ml_ref n);
} ml_op_interface;

extern const ml_op_interface *const ml_op_interfaces[ML_OP_COUNT];

/* The interface of a ROUTINE of runtime/ops; raises ML_INTERNAL where the program is linked
 * without it. */
const ml_op_interface *ml_op_interface_of(ml_op op);

#endif
