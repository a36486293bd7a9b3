/* LINEAR_SCAN: the recurrence of a matrix state along an axis, which m.scan's steps reduce to where
 * they are affine in the state (recurrence/match.c finds them):
 *
 *     S_t = a_t S_{t-1} + sum_r u_{t,r} (w_{t,r}^T S_{t-1}) + k_t v_t^T        S: keys x values
 *     y_t = q_t^T S_t, or q_t^T S_{t-1} where `after` is false
 *
 * a_t is a number or one number a key (diagonal); u w^T is of rank 0 to 4. Linear attention,
 * RetNet, GLA, Mamba-2, mLSTM: rank 0 (arXiv:2312.06635, 2405.21060). DeltaNet, Gated DeltaNet,
 * KDA, RWKV-7: rank 1 (2406.06484, 2412.06464).
 *
 * Sources, in this order: q, k, v, a, S0 (the initial state), then u_0, w_0, u_1, w_1, ...
 *   q, k, u, w  {axis, keys, batch...}
 *   v           {axis, values, batch...}
 *   a           {axis, batch...} with or without keys
 *   S0          {keys, values, batch...}: its dtype is the state's, f32 or f64
 * Axes in any order. The batch axes are those of S0 beside keys and values; q, k, v, a, u, w may
 * lack some (what heads share). `values` may be 0: a vector state, v {axis, batch...}. a is the
 * decay itself, not its logarithm: it may be 0 (a reset), negative or above 1.
 * Outputs: 0 y {axis, batch..., values}, of dtype `dtype`; 1 the state after the last position, of
 * S0's type. With `reverse` the last position comes first; slices stay where they are.
 * Products take operands as they come (bf16, or f32) and add in f32 (f64 for f64).
 *
 * LINEAR_SCAN_GRAD: sources those of LINEAR_SCAN, then dy and dS (of the final state).
 * Outputs: dq, dk, dv, da, dS0, du_0, dw_0, ...: of each source's dtype, {axis, batch..., keys or
 * values} with all batch axes (the gradient's rule sums over those that a source lacks); dS0 is of
 * S0's type.
 *
 * CPUs and shapes that no kernel serves: ml_linear_scan_decompose, products over chunks of
 * positions (linear_scan/chunks.c). */
#ifndef ML_GRAPH_LINEAR_SCAN_H
#define ML_GRAPH_LINEAR_SCAN_H

#include "runtime/graph/graph.h"

static inline bool ml_op_is_linear_scan(ml_op op) {
    return op == ML_OP_LINEAR_SCAN || op == ML_OP_LINEAR_SCAN_GRAD;
}

enum { LINEAR_SCAN_MOST_RANK = 4, LINEAR_SCAN_FIRST_PAIR = 5 };
enum { LINEAR_SCAN_MOST_SOURCES = LINEAR_SCAN_FIRST_PAIR + 2 * LINEAR_SCAN_MOST_RANK };

typedef struct {
    ml_axis axis, keys, values; /* values: 0 for a vector state */
    bool reverse, after;
    ml_dtype dtype; /* of y */
    int rank;       /* of the low-rank part of the transition: from the number of sources */
    /* read from the operands: */
    bool decay_per_key;
    int64_t length, key_size, value_size; /* value_size: 1 for a vector state */
} ml_linear_scan;

/* One decay a position and no low-rank part: another kernel's. */
static inline bool ml_linear_scan_is_scalar(const ml_linear_scan *s) {
    return s->rank == 0 && !s->decay_per_key;
}

enum { LINEAR_SCAN_Q, LINEAR_SCAN_K, LINEAR_SCAN_V, LINEAR_SCAN_DECAY, LINEAR_SCAN_STATE };

void ml_linear_scan_read(const ml_graph *g, ml_ref n, ml_linear_scan *out); /* of both ops */
/* sources: 5 + 2 rank. Gives y; the final state is its output 1. */
ml_ref ml_linear_scan_new(ml_graph *g, const ml_ref *sources, const ml_linear_scan *scan);
/* sources: those of the scan, dy, dS. Gives dq; the others are outputs 1 and up. */
ml_ref ml_linear_scan_grad(ml_graph *g, const ml_ref *sources, const ml_linear_scan *scan);
/* The type of output i of either op. */
void ml_linear_scan_type(const ml_graph *g, ml_ref n, int i, ml_type *out);
/* Either op by its definition as products over chunks: its outputs. */
void ml_linear_scan_decompose(ml_graph *g, ml_ref n, ml_ref *outputs);

/* ---- Passes ---- */

/* Linear scans as products over chunks of positions, where served() says that no kernel takes one.
 */
typedef bool ml_linear_scan_served(const void *context, const ml_graph *g, ml_ref n);
ml_graph *ml_decompose_linear_scans(const ml_graph *from, ml_roots *roots,
                                    ml_linear_scan_served *served, const void *context);
bool ml_decompose_linear_scans_applies(const ml_graph *g); /* whether there is one */
/* Cuts those that a kernel serves into segments of `least` positions or more, where rows are too
 * few for so many multiprocessors. */
ml_graph *ml_segment_linear_scans(const ml_graph *from, ml_roots *roots, int multiprocessors,
                                  int64_t least, ml_linear_scan_served *served,
                                  const void *context);
/* ---- For its interfaces (interface.c) ---- */

struct infer;
struct ml_placements;
struct reference_run;
struct sharder;

void linear_scan_infer(struct infer *in, ml_type *out);
/* All outputs, by loops over the positions. */
struct reference_value *linear_scan_evaluate(struct reference_run *r, ml_ref n);
void linear_scan_propose(struct sharder *s, ml_ref n);
void linear_scan_local(struct sharder *s, ml_ref n, const ml_ref *sources,
                       const struct ml_placements *need, const struct ml_placements *out,
                       ml_ref *outputs);

/* ---- Inside of linear scans ---- */

/* {axis, batch..., last} of a state's batch axes; last 0: none. */
void linear_scan_slices(const ml_linear_scan *scan, const ml_type *state, ml_axis last,
                        ml_dtype dtype, ml_type *out);
/* The axis of operand i beside the scan's and the batch's; 0: none. Not of the state. */
ml_axis linear_scan_own(const ml_linear_scan *scan, int i);
/* y and the final state (linear_scan/chunks.c). scan: with what is read from the operands. */
void linear_scan_chunks(ml_graph *g, const ml_ref *sources, const ml_linear_scan *scan,
                        ml_ref outputs[2]);
double linear_scan_flops(const ml_graph *g, ml_ref n);

#endif
