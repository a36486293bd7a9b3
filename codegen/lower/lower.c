/* Lowering: roles, groups, order, steps. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

#include "runtime/base/knobs.h"

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
    bool routine = kind != ML_STEP_KERNEL ||
                   ml_ops[ml_graph_node(g, node)->op].op_class == ML_CLASS_SCAN ||
                   ml_graph_node(g, node)->op == ML_OP_SCATTER_ADD ||
                   ml_graph_node(g, node)->op == ML_OP_RAGGED_DOT ||
                   ml_graph_node(g, node)->op == ML_OP_RAGGED_OUTER;
    if (!routine) return step;
    step->flops = ml_flops(g, node);
    for (int i = 0; i < read_count + write_count; i++) {
        const ml_type *type = &l->s->values.at[step->values[i]].type;
        step->bytes += ml_type_elements(type) * ml_dtypes[type->dtype].bytes;
    }
    return step;
}

static void prepare(lowering *l) {
    l->count = ml_graph_count(l->g);
    l->info = ML_NEW_ARRAY(l->scratch, lower_info, l->count + 1);
    l->first_user = ML_NEW_ARRAY(l->scratch, uint32_t, l->count + 2);
    l->stamp = ML_NEW_ARRAY(l->scratch, uint32_t, l->count + 1);
    l->kernels.arena = l->pack_index.arena = l->scratch;
    for (uint32_t n = 0; n < l->count; n++)
        l->info[n].value = l->info[n].storage = l->info[n].partial_value = LOWER_NONE;
}

static void make_steps(lowering *l) {
    uint32_t count, *order = lower_order(l, &count);
    for (uint32_t i = 0; i < count; i++) {
        lower_group *group = &l->groups.at[order[i]];
        if (group->library)
            lower_library_step(l, group);
        else
            lower_kernel_step(l, group);
    }
}

static void lower_body(void *context) {
    lowering *l = context;
    ml_schedule *s = l->s;
    prepare(l);
    fuse_roles(l);
    fuse_groups(l);
    overlay_concats(l);
    make_steps(l);
    s->output_values = ML_NEW_ARRAY(l->arena, uint32_t, l->roots->output_count + 1);
    s->update_values = ML_NEW_ARRAY(l->arena, uint32_t, l->roots->update_count + 1);
    for (int i = 0; i < l->roots->output_count; i++)
        s->output_values[i] = views_value(l, l->roots->outputs[i]);
    for (int i = 0; i < l->roots->update_count; i++)
        s->update_values[i] = views_value(l, l->roots->updates[i].value);
}

ml_schedule *ml_lower(const ml_graph *g, const ml_roots *roots, const ml_target *target,
                      ml_arena *arena) {
    lowering l;
    memset(&l, 0, sizeof l);
    l.g = g;
    l.roots = roots;
    l.target = target;
    l.arena = arena;
    l.s = ML_NEW(arena, ml_schedule);
    l.s->graph = g;
    l.s->arena = arena;
    l.s->target = target;
    l.scratch = ml_arena_new();
    if (l.scratch == NULL) ml_raise(ML_NO_MEMORY, "out of memory while lowering a program");
    ml_status status = ml_protect(lower_body, &l);
    ml_arena_free(l.scratch);
    if (l.work != NULL) ml_arena_free(l.work);
    if (status != ML_OK) ml_raise_last();
    if (ml_knobs()->debug >= 3) {
        ml_text text = {.arena = arena};
        ml_lower_print(l.s, &text);
        ml_debug(3, "%s", text.text ? text.text : "");
    }
    return l.s;
}
