/* CONV: convolution along one to three axes, its gradients, and theirs: one op.
 *
 * Of each window three indices are known: p of operand a along `axis`, k along `taps` and t along
 * `axis` again, of which operand b has one and the result the other. An element of the result is
 * the sum of the products over all p, k and t with
 *     up * p = stride * t + dilation * k - before
 * and over the axes that both operands have and the result has not; p outside of a counts as 0.
 * Where b has the taps (a filter), the result is a convolution, and with up > 1 one whose operand
 * has up - 1 zeros between its elements; where the result has them it is the gradient of a filter.
 * All windows of a node are alike in that, and each has up == 1 or stride == 1. Every other axis
 * is in two or three of a, b and the result, with one size, paired by name: channels that b has too
 * and the result keeps are convolved each for itself, and groups are an axis of all three.
 *
 * Sums are in the compute dtype (f32 of bf16) and rounded once. Kernels have none of it:
 * ml_decompose_conv writes it as products and shifted views. */
#ifndef ML_CONV_H
#define ML_CONV_H

#include "runtime/graph/graph.h"

enum {
    CONV_ARGS = 6, /* of each window */
    CONV_WINDOWS = 3,
    CONV_MOST_TAPS = 4096, /* of all windows together */
};
#define CONV_FARTHEST ((int64_t)1 << 40) /* of up, stride, |dilation| and |before| */

typedef struct {
    ml_axis axis, taps;
    int64_t up, stride, dilation, before;
} conv_window;

/* `type` has the result's axes and dtype. */
ml_ref ml_conv(ml_graph *g, ml_ref a, ml_ref b, const conv_window *windows, int count,
               const ml_type *type);
/* The windows of n; gives their number. */
int conv_read(const ml_graph *g, ml_ref n, conv_window windows[CONV_WINDOWS]);
/* Whether the result has the taps: the gradient of a filter. */
bool conv_gives_taps(const ml_graph *g, ml_ref n);
/* The size of a window's index t, and of k. */
int64_t conv_steps(const ml_graph *g, ml_ref n, const conv_window *window);
int64_t conv_taps(const ml_graph *g, ml_ref n, const conv_window *window);
/* The pass: convolutions as products and shifted views. */
ml_graph *ml_decompose_conv(const ml_graph *from, ml_roots *roots);
bool ml_decompose_conv_applies(const ml_graph *g); /* whether there is one */

/* ---- For its interface (interface.c) ---- */

struct infer;
struct ml_placements;
struct reference_run;
struct reference_value;
struct sharder;

void conv_infer(struct infer *in, ml_type *out);
/* The gradient of operand 0 or 1 of n. */
ml_ref conv_gradient(ml_graph *g, ml_ref n, ml_ref cotangent, int operand);
double conv_flops(const ml_graph *g, ml_ref n);
void conv_evaluate(struct reference_run *r, ml_ref n, int i, struct reference_value *out);
void conv_propose(struct sharder *s, ml_ref n);
void conv_local(struct sharder *s, ml_ref n, const ml_ref *sources,
                const struct ml_placements *need, const struct ml_placements *out, ml_ref *outputs);

#endif
