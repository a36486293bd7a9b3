/* The gradient of ATTENTION: ATTENTION_GRAD where that of o alone is given, and of q, k and v alone
 * wanted; else by the definition, as second derivatives are. */
#include "runtime/graph/gradient.h"

#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "runtime/ops/attention/attention_internal.h"

/* d loss / d s before the score function, from PARAM(1 + captured) = d loss / d s after it. */
static ml_ref score_derivative(tape *t, ml_ref score, int captured) {
    ml_graph *G = gradient_graph(t);
    ml_type type = *ml_graph_type(G, score);
    int64_t index = 1 + captured;
    ml_ref cotangent = ml_graph_add(G, ML_OP_PARAM, NULL, 0, &index, 1, &type);
    ml_ref raw = gradient_parameter(t, score, 0), derivative = 0;
    if (raw) gradient_pull_back(t, &score, &cotangent, 1, &raw, 1, &derivative);
    return derivative ? derivative : ml_broadcast(G, ml_const(G, type.dtype, 0), &type);
}

void attention_gradient(tape *t, ml_ref n, const ml_ref *cotangents) {
    ml_graph *G = gradient_graph(t);
    int count = ml_graph_node(G, n)->source_count;
    int captured = ml_attention_captured(G, n);
    bool plain = cotangents[0] && !cotangents[1];
    for (int i = captured; i < count; i++) plain = plain && !gradient_wants(t, n, i);
    if (!plain) {
        gradient_of_definition(t, n, cotangents);
        return;
    }
    ml_attention_args args;
    ml_attention_read(G, n, &args);
    if (args.score) args.derivative = score_derivative(t, args.score, count - captured);
    ml_ref *sources = ML_NEW_ARRAY(gradient_scratch(t), ml_ref, count + 3);
    memcpy(sources, ml_graph_sources(G, n), sizeof(ml_ref) * (size_t)count);
    memmove(sources + 6, sources + 3, sizeof(ml_ref) * (size_t)(count - 3));
    sources[3] = n, sources[4] = ml_out(G, n, 1), sources[5] = cotangents[0];
    ml_ref grad = ml_attention_grad(G, sources, count + 3, &args);
    for (int i = 0; i < 3; i++) gradient_give(t, n, i, ml_out(G, grad, i));
}
