/* Steps: what all kinds of them have. */
#include "codegen/lower/lower_internal.h"

ml_step *lower_step(lowering *l, ml_step_kind kind, ml_ref node, const uint32_t *reads,
                    int read_count, const uint32_t *writes, int write_count) {
    ml_step *step = ML_PUSH(l->arena, &l->s->steps);
    step->kind = kind;
    step->node = node;
    step->read_count = read_count;
    step->write_count = write_count;
    step->values = ML_NEW_ARRAY(l->arena, uint32_t, read_count + write_count + 1);
    for (int i = 0; i < read_count; i++) step->values[i] = reads[i];
    for (int i = 0; i < write_count; i++) step->values[read_count + i] = writes[i];
    if (kind == ML_STEP_KERNEL && node == 0) return step;
    const ml_graph *g = l->g;
    int op_class = ml_ops[ml_graph_node(g, node)->op].op_class;
    bool loops =
        kind == ML_STEP_KERNEL && op_class != ML_CLASS_SCAN && op_class != ML_CLASS_ROUTINE;
    if (loops) return step; /* lower_describe_ir counts its work */
    step->flops = ml_flops(g, node);
    for (int i = 0; i < read_count + write_count; i++) {
        const ml_type *type = &l->s->values.at[step->values[i]].type;
        step->bytes += ml_type_elements(type) * ml_dtypes[type->dtype].bytes;
    }
    return step;
}
