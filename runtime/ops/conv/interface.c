/* The interface of CONV. */
#include "runtime/graph/gradient.h"
#include "runtime/graph/op_interface.h"
#include "runtime/ops/conv/conv.h"

static void gradient(tape *t, ml_ref n, const ml_ref *cotangents) {
    for (int i = 0; i < 2; i++)
        if (gradient_wants(t, n, i))
            gradient_give(t, n, i, conv_gradient(gradient_graph(t), n, cotangents[0], i));
}

const ml_op_interface ml_interface_CONV = {
    .infer = conv_infer,
    .gradient = gradient,
    .evaluate = conv_evaluate,
    .flops = conv_flops,
    .recomputes = 1,
    .propose = conv_propose,
    .local = conv_local,
};
