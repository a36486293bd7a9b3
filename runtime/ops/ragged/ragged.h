/* Products of rows that belong to groups: the experts of a mixture, each with its own matrix.
 *
 * Group e has the rows starts[e] .. ends[e]-1 of an axis (for each element of a batch axis that
 * rows and bounds may share: matrices are the same for all). Groups come in ascending order, do not
 * overlap, and may be empty. RAGGED_DOT multiplies each row by its group's matrix; rows of no group
 * give 0, so that a rank that holds some of the groups computes a part of a sum. RAGGED_OUTER sums
 * the outer products of the rows of each group: each is the other's gradient. Where its third
 * argument is set (ml_fuse_expert_norms) it has a second output: sums of the squares of its blocks
 * of 16 x 256, which its kernels compute from registers. Where RAGGED_DOT's last argument is a
 * function (ml_fuse_gated_experts) its columns are two halves, and a second output is that function
 * of both, PARAM 0 and 1, and of further operands, numbers of the rows, from PARAM 2 on.
 *
 * Operands of 8 bits (quantize/scale_products.c) have a fifth source, their scale: an f32 number by
 * which every sum is multiplied before it is rounded. */
#ifndef ML_RAGGED_H
#define ML_RAGGED_H

#include "runtime/graph/graph.h"

/* sources: x {batch, rows, reduced}, w {groups, reduced, n}, starts and ends i32 {batch, groups};
 * batch may be missing; of x in 8 bits also the scale. Gives {batch, rows, n} of dtype. */
ml_ref ml_ragged_dot(ml_graph *g, const ml_ref *sources, ml_axis rows, ml_axis reduced,
                     ml_dtype dtype);
/* sources: x {batch, rows, m}, y {batch, rows, n}, starts, ends, scale. Gives {groups, m, n}. */
ml_ref ml_ragged_outer(ml_graph *g, const ml_ref *sources, ml_axis rows, ml_dtype dtype);

static inline bool ml_op_is_ragged(ml_op op) {
    return op == ML_OP_RAGGED_DOT || op == ML_OP_RAGGED_OUTER;
}

enum { RAGGED_SCALE = 4 /* its place, where there is one */, RAGGED_MOST_SOURCES };

/* Whether a product by groups of this left operand has a scale, and how many sources it has before
 * numbers of the rows. */
static inline bool ml_ragged_is_scaled(const ml_graph *g, ml_ref left) {
    const ml_dtype dtype = (ml_dtype)ml_graph_type(g, left)->dtype;
    return ml_is_narrow(dtype) && ml_dtypes[dtype].bytes == 1;
}
static inline int ml_ragged_sources(const ml_graph *g, ml_ref left) {
    return ml_ragged_is_scaled(g, left) ? RAGGED_MOST_SOURCES : RAGGED_SCALE;
}

enum { RAGGED_SQUARE_ROWS = 16, RAGGED_SQUARE_COLUMNS = 256 };
int64_t ragged_blocks(int64_t size, int64_t block); /* whole and partial ones */
enum { RAGGED_HALVES = 2 };
enum { RAGGED_GATED_ROWS = 2, RAGGED_GATED_COLUMNS = 128 /* in whole blocks of these */ };

/* ---- Passes ---- */

/* Sums of squares of products by groups come from the products' kernels. Last: other passes do not
 * know this second output. */
ml_graph *ml_fuse_expert_norms(const ml_graph *from, ml_roots *roots);
bool ml_fuse_expert_norms_applies(const ml_graph *g); /* whether there is one */
/* What follows the halves of a product by groups elementwise comes from the product's kernel. Last,
 * too. */
ml_graph *ml_fuse_gated_experts(const ml_graph *from, ml_roots *roots);
bool ml_fuse_gated_experts_applies(const ml_graph *g); /* whether there is one */

/* ---- For its interfaces (interface.c) ---- */

struct infer;
struct ml_placements;
struct reference_run;
struct reference_value;
struct sharder;

void ragged_infer(struct infer *in, ml_type *out);
void ragged_squares_type(const ml_graph *g, ml_ref outer, int i, ml_type *out);
void ragged_gated_type(const ml_graph *g, ml_ref dot, int i, ml_type *out);
void ragged_check_gated(struct infer *in, const ml_type *out);
/* The gradient of operand 0 or 1 of n. */
ml_ref ragged_gradient(ml_graph *g, ml_ref n, ml_ref cotangent, int operand);
/* What computes the same without a function: both outputs. */
void ragged_gated_define(ml_graph *g, ml_ref n, ml_ref *outputs);
double ragged_flops(const ml_graph *g, ml_ref n);
/* By definition: of output 0, and of the squares of a RAGGED_OUTER. */
void ragged_evaluate(struct reference_run *r, ml_ref n, int i, struct reference_value *out);
void ragged_squares(const struct reference_value *outer, struct reference_value *out);
void ragged_propose(struct sharder *s, ml_ref n);
void ragged_local(struct sharder *s, ml_ref n, const ml_ref *sources,
                  const struct ml_placements *need, const struct ml_placements *out,
                  ml_ref *outputs);

#endif
