/* The step of a RECURRENCE: a loop over a program of its own, whose slices move through memory. */
#include <string.h>

#include "codegen/lower/lower_internal.h"
#include "runtime/ops/recurrence/recurrence.h"

static int64_t bytes_of(const ml_type *type) {
    return ml_type_elements(type) * ml_dtypes[type->dtype].bytes;
}

typedef struct {
    lowering *l;
    ml_ref n;
    ml_recurrence r;
    ml_loop *loop;
    uint32_t *values; /* reads, then writes */
    int reads, count;
    int *output; /* by output: its value; -1 where nothing takes it */
} loop_lowering;

static void find_outputs(loop_lowering *x) {
    int outputs = ml_op_outputs(x->l->g, x->n);
    x->output = ML_NEW_ARRAY(x->l->arena, int, outputs + 1);
    for (int i = 0; i < outputs; i++) {
        ml_ref node = views_output_node(x->l, x->n, i);
        x->output[i] = node ? x->count : -1;
        if (node) x->values[x->count++] = views_value(x->l, node);
    }
    bool *wanted = ML_NEW_ARRAY(x->l->arena, bool, ml_recurrence_roots(&x->r) + 1);
    for (int i = 0; i < ml_recurrence_roots(&x->r); i++)
        wanted[i] = i < x->r.states || x->output[i - x->r.states] >= 0;
    x->loop->wanted = wanted;
}

/* Sums are carried too: what they were, plus the step's term. */
static void describe_sums(loop_lowering *x) {
    int output = x->r.states;
    for (int i = 0; i < x->r.stacked; i++) output += x->output[i] >= 0;
    for (int i = 0; i < x->r.summed; i++) {
        int value = x->output[ml_recurrence_summed(&x->r) + i];
        if (value < 0) continue;
        x->loop->carried[x->loop->carried_count++] =
            (ml_loop_carried){.input = (uint32_t)(x->reads + i),
                              .output = (uint32_t)output++,
                              .initial = -1,
                              .final = value,
                              .history = -1,
                              .bytes = bytes_of(&x->l->s->values.at[x->values[value]].type)};
    }
}

static void describe_states(loop_lowering *x) {
    for (int i = 0; i < x->r.states; i++) {
        int source = x->r.inputs + i;
        x->loop->carried[x->loop->carried_count++] = (ml_loop_carried){
            .input = (uint32_t)source,
            .output = (uint32_t)i,
            .initial = source,
            .final = x->output[ml_recurrence_final(&x->r) + i],
            .history = x->output[ml_recurrence_history(&x->r) + i],
            .bytes = bytes_of(ml_graph_type(x->l->g, ml_graph_source(x->l->g, x->n, source)))};
    }
}

static void describe_inputs(loop_lowering *x) {
    for (int i = 0; i < x->reads; i++) {
        bool state = i >= x->r.inputs && i < x->r.inputs + x->r.states;
        if (state) continue;
        int64_t all = bytes_of(ml_graph_type(x->l->g, ml_graph_source(x->l->g, x->n, i)));
        x->loop->inputs[x->loop->input_count++] =
            (ml_loop_input){.input = (uint32_t)i,
                            .value = i,
                            .bytes = i < x->r.inputs ? all / x->r.length : 0,
                            .all = all,
                            .staged = -1};
    }
    for (int i = 0, output = x->r.states; i < x->r.stacked; i++) {
        if (x->output[i] < 0) continue;
        const ml_type *type = &x->l->s->values.at[x->values[x->output[i]]].type;
        x->loop->stacked[x->loop->stacked_count++] =
            (ml_loop_stacked){.output = (uint32_t)output++,
                              .value = x->output[i],
                              .bytes = bytes_of(type) / x->r.length,
                              .staged = -1};
    }
}

void lower_recurrence_step(lowering *l, ml_ref n) {
    if (lower_one_kernel(l, n)) {
        lower_scan_step(l, n);
        return;
    }
    loop_lowering x = {.l = l, .n = n, .loop = ML_NEW(l->arena, ml_loop)};
    ml_recurrence_read(l->g, n, &x.r);
    x.reads = ml_graph_node(l->g, n)->source_count;
    x.values = ML_NEW_ARRAY(l->arena, uint32_t, x.reads + ml_op_outputs(l->g, n) + 1);
    for (; x.count < x.reads; x.count++)
        x.values[x.count] = views_value(l, ml_graph_source(l->g, n, x.count));
    find_outputs(&x);
    ml_step *step =
        lower_step(l, ML_STEP_KERNEL, n, x.values, x.reads, x.values + x.reads, x.count - x.reads);
    if (ml_template_recurrence_grid(l->s, step, &x.loop->why)) return;
    step->kind = ML_STEP_LOOP;
    x.loop->length = x.r.length;
    x.loop->reverse = x.r.reverse;
    x.loop->inputs = ML_NEW_ARRAY(l->arena, ml_loop_input, x.reads + 1);
    x.loop->stacked = ML_NEW_ARRAY(l->arena, ml_loop_stacked, x.r.stacked + 1);
    x.loop->carried = ML_NEW_ARRAY(l->arena, ml_loop_carried, x.r.states + x.r.summed + 1);
    x.loop->workspace = -1;
    step->loop = x.loop;
    describe_states(&x);
    describe_sums(&x);
    describe_inputs(&x);
}

ml_graph *ml_loop_body(const ml_schedule *s, const ml_step *step, ml_roots *roots) {
    const ml_loop *loop = step->loop;
    ml_graph *body = ml_recurrence_body(s->graph, step->node, loop->wanted, roots);
    for (int i = 0; i < loop->carried_count; i++) {
        const ml_loop_carried *c = &loop->carried[i];
        ml_ref *root = &roots->outputs[c->output];
        if (c->initial >= 0) continue;
        ml_type type = *ml_graph_type(body, *root);
        int64_t param = c->input;
        ml_ref before = ml_graph_add(body, ML_OP_PARAM, NULL, 0, &param, 1, &type);
        *root = ml_permute(body, ml_map2(body, ML_OP_ADD, before, *root), &type);
    }
    return body;
}
