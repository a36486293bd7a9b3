/* The interface of RECURRENCE. */
#include "runtime/graph/analysis.h"
#include "runtime/graph/op_interface.h"
#include "runtime/ops/recurrence/loop.h"
#include "runtime/ops/recurrence/recurrence_internal.h"

/* Results of the step, final states, histories. */
static int outputs(const ml_graph *g, ml_ref n) {
    ml_recurrence r;
    ml_recurrence_read(g, n, &r);
    return ml_recurrence_history(&r) + r.states;
}

static void print(const ml_graph *g, ml_ref n, ml_text *out) {
    ml_recurrence r;
    ml_recurrence_read(g, n, &r);
    const char *names[] = {"next", "stacked", "summed"};
    const int counts[] = {r.states, r.stacked, r.summed};
    ml_text_add(out, " %s%s inputs=%d states=%d", ml_axis_name(g, r.axis),
                r.reverse ? " reverse" : "", r.inputs, r.states);
    for (int kind = 0, root = 0; kind < 3; kind++) {
        if (counts[kind]) ml_text_add(out, " %s=", names[kind]);
        for (int i = 0; i < counts[kind]; i++)
            ml_text_add(out, "%s%%%u", i ? "," : "", ml_recurrence_root(g, n, root++));
    }
}

static double flops(const ml_graph *g, ml_ref n) {
    ml_recurrence r;
    ml_roots roots;
    double flops = 0;
    ml_recurrence_read(g, n, &r);
    ml_graph *body = ml_recurrence_body(g, n, NULL, &roots);
    for (ml_ref i = 1; i < ml_graph_count(body); i++)
        if (!(ml_graph_node(body, i)->flags & ML_NODE_FUNCTION)) flops += ml_flops(body, i);
    ml_graph_free(body);
    return flops * (double)r.length;
}

static ml_graph *body(const ml_graph *g, ml_ref n, int64_t *times) {
    ml_recurrence r;
    ml_roots roots;
    ml_recurrence_read(g, n, &r);
    *times = r.length;
    return ml_recurrence_body(g, n, NULL, &roots);
}

const ml_op_interface ml_interface_RECURRENCE = {
    .infer = recurrence_infer,
    .outputs = outputs,
    .output_type = ml_recurrence_type,
    .print = print,
    .gradient = recurrence_gradient,
    .before = recurrence_before,
    .evaluate_all = recurrence_evaluate,
    .flops = flops,
    .recomputes = 4,
    .body = body,
    .place = recurrence_shard,
};
