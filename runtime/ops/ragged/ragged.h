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
 * of both, PARAM 0 and 1, and of further operands, numbers of the rows, from PARAM 2 on. */
#ifndef ML_RAGGED_H
#define ML_RAGGED_H

#include "runtime/graph/graph.h"
#include "runtime/graph/reference.h"

/* sources: x {batch, rows, reduced}, w {groups, reduced, n}, starts and ends i32 {batch, groups};
 * batch may be missing. Gives {batch, rows, n} of dtype. */
ml_ref ml_ragged_dot(ml_graph *g, const ml_ref *sources, ml_axis rows, ml_axis reduced,
                     ml_dtype dtype);
/* sources: x {batch, rows, m}, y {batch, rows, n}, starts and ends. Gives {groups, m, n}. */
ml_ref ml_ragged_outer(ml_graph *g, const ml_ref *sources, ml_axis rows, ml_dtype dtype);

enum { RAGGED_SQUARE_ROWS = 16, RAGGED_SQUARE_COLUMNS = 256 };
int64_t ragged_blocks(int64_t size, int64_t block); /* whole and partial ones */
void ragged_squares_type(const ml_graph *g, ml_ref outer, ml_type *out);
void reference_ragged_squares(const reference_value *outer, reference_value *out);

enum { RAGGED_PRODUCT_SOURCES = 4, RAGGED_HALVES = 2 };
enum { RAGGED_GATED_ROWS = 2, RAGGED_GATED_COLUMNS = 128 /* in whole blocks of these */ };
void ragged_gated_type(const ml_graph *g, ml_ref dot, ml_type *out);
/* What computes the same without a function: both outputs. */
void ragged_gated_decompose(ml_graph *g, ml_ref n, ml_ref *outputs);

/* The gradient of operand 0 or 1 of n. */
ml_ref ragged_gradient(ml_graph *g, ml_ref n, ml_ref cotangent, int operand);
double ragged_flops(const ml_graph *g, ml_ref n);
/* By definition; `out` is zeroed. */
void reference_ragged(ml_op op, const reference_value *const *source, const int64_t *args,
                      reference_value *out);

#endif
