/* Where operands of recurrences' kernels are in memory. */
#include "codegen/kernels/recurrence.h"

int64_t recurrence_stride(const ml_value *v, ml_axis axis) {
    int at = ml_type_find(&v->type, axis);
    return at < 0 ? 0 : v->stride[at];
}

const char *recurrence_offset(ml_arena *arena, const ml_value *v, const ml_type *rows,
                              const char *row) {
    ml_template_loops loops = {0};
    for (int k = 0; k < rows->rank; k++)
        template_loop_add(&loops, rows->size[k], recurrence_stride(v, rows->axis[k]));
    return template_offset(arena, &loops, row);
}

bool recurrence_copies(const ml_value *v, ml_axis axis, const ml_type *rows, ml_axis along) {
    int64_t odd = v->offset | recurrence_stride(v, axis);
    if (recurrence_stride(v, along) != 1) return false;
    for (int k = 0; k < rows->rank; k++)
        if (rows->axis[k] != along && rows->size[k] > 1) odd |= recurrence_stride(v, rows->axis[k]);
    return odd * ml_dtypes[v->type.dtype].bytes % RECURRENCE_COPY == 0;
}

int recurrence_output(const ml_schedule *s, const ml_step *step, int i) {
    ml_ref node = template_value(s, step, i)->node;
    return ml_graph_node(s->graph, node)->op == ML_OP_OUT ? (int)ml_graph_args(s->graph, node)[0]
                                                          : 0;
}

bool recurrence_quick(const ml_schedule *s, const ml_step *step, ml_axis axis) {
    bool any = false;
    int writes = step->write_count - (step->scan ? step->scan->checkpoints : 0);
    for (int i = step->read_count; i < step->read_count + writes; i++) {
        const ml_type *type = &template_value(s, step, i)->type;
        if (ml_type_find(type, axis) < 0) continue;
        if (!ml_is_narrow((ml_dtype)type->dtype)) return false;
        any = true;
    }
    return any;
}
