/* What the tests of the graph share. Axes are written "b2 s4": names with sizes. */
#ifndef GRAPH_SUPPORT_H
#define GRAPH_SUPPORT_H

#include "runtime/graph/graph.h"
#include "runtime/ops/attention/attention.h"
#include "tests/test.h"

/* Runs body with an empty graph, which is freed afterwards; what body raises fails the test. */
typedef void graph_body(ml_graph *g);
void graph_run(graph_body *body);

ml_type graph_axes(ml_graph *g, ml_dtype dtype, const char *axes);
ml_axis graph_axis(ml_graph *g, const char *name);
/* A new input. */
ml_ref graph_input(ml_graph *g, ml_dtype dtype, const char *axes);
/* "f32[b=2, s=4]" */
const char *graph_type_text(ml_graph *g, ml_ref n);
/* A valid node of this op over new inputs, the same for each call on a new graph. */
ml_ref graph_sample(ml_graph *g, ml_op op);
/* q [b, s, h, d], k and v [b, t, kv, d] (kv = h where kv_heads equals heads). */
typedef struct {
    ml_ref q, k, v;
    ml_attention_args args;
} graph_qkv;
graph_qkv graph_attention(ml_graph *g, ml_dtype dtype, int kv_heads);
/* 30 * tanh(s / 30) + bias of PARAMs, the bias over heads being captured source 0. */
ml_ref graph_score(ml_graph *g, const graph_qkv *a, ml_ref bias);

#endif
