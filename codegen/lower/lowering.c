/* Lowering: roles, groups, order, steps. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

static void prepare(lowering *l) {
    l->count = ml_graph_count(l->g);
    l->info = ML_NEW_ARRAY(l->scratch, lower_info, l->count + 1);
    l->first_user = ML_NEW_ARRAY(l->scratch, uint32_t, l->count + 2);
    l->stamp = ML_NEW_ARRAY(l->scratch, uint32_t, l->count + 1);
    l->number = ML_NEW_ARRAY(l->scratch, uint32_t, l->count + 1);
    l->kernels.arena = l->pack_index.arena = l->scratch;
    /* About as many as there will be: arrays that grow leave their old memory behind. */
    ML_VEC_RESERVE(l->arena, &l->s->values, l->count / 2 + 1);
    ML_VEC_RESERVE(l->arena, &l->s->storages, l->count / 4 + 1);
    for (uint32_t n = 0; n < l->count; n++) {
        l->info[n].value = l->info[n].storage = l->info[n].partial_value = LOWER_NONE;
        if (n > 0) l->narrow |= ml_is_narrow(ml_graph_type(l->g, n)->dtype);
    }
}

static void make_steps(lowering *l) {
    uint32_t count, *order = lower_order(l, &count);
    ML_VEC_RESERVE(l->arena, &l->s->steps, count + 1);
    for (uint32_t i = 0; i < count; i++) {
        lower_group *group = &l->groups.at[order[i]];
        if (group->opaque)
            lower_opaque_step(l, group);
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
    concat_share_memory(l);
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
    return l.s;
}
