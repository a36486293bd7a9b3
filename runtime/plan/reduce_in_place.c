/* Sums of gradients over ranks, where each rank's own sum is.
 *
 * A program that applies the sums of microbatches is the last to read them: the first microbatch of
 * the next step sets them anew. So an all-reduce of such a state is computed in its memory, a
 * reduce-scatter in the rank's part of it, and neither takes temporaries. As their operands are
 * there before the program starts, and their results overlap no other program's temporaries, they
 * may go on beside the last microbatch (`lead_order`, lower.h).
 *
 * None leads along a mesh axis that the microbatches' own collectives use: it would come after
 * those. On GPUs of one host an all-reduce that leads becomes a reduce-scatter and an all-gather:
 * these go by copies, while NCCL's kernels take multiprocessors from products that use all. One
 * that is too small to be cut does not lead there. Between hosts NCCL has them, and its kernels of
 * two communicators have no common order on all ranks: none leads where microbatches send too. */
#include "runtime/plan/dependencies.h"
#include "runtime/plan/plan_internal.h"

typedef __typeof__(((ml_schedule *)0)->steps) step_list;
typedef struct {
    ml_schedule *s;
    uint32_t *reads, *writes; /* by storage */
    uint32_t *sums; /* by storage: of sums of gradients, in their own memory, 1 + the microbatch's
                       step behind which they are final; else 0 */
    bool *waits;    /* by storage: a sum that is reduced within the program */
    bool overlap, used[ML_MAX_MESH]; /* mesh axes that microbatches use */
    bool sends;                      /* the first of their programs has collectives */
} reduction;

static void uses_count(reduction *r, const ml_roots *roots) {
    ml_schedule *s = r->s;
    storage_uses_count(s, r->reads, r->writes);
    for (int i = 0; i < roots->output_count; i++)
        r->reads[s->values.at[s->output_values[i]].storage]++;
    for (int i = 0; i < roots->update_count; i++)
        r->reads[s->values.at[s->update_values[i]].storage]++;
}

static void axes_find(reduction *r, const ml_plan_list *microbatches) {
    for (int i = 0; i < microbatches->count; i++) {
        const ml_schedule *s = microbatches->at[i]->schedule;
        for (uint32_t t = 0; s != NULL && t < s->steps.count; t++)
            if (s->steps.at[t].kind == ML_STEP_COLLECTIVE) {
                r->used[s->steps.at[t].collective->mesh_axis] = true;
                r->sends |= i == 0;
            }
    }
}

/* Those that a microbatch's program uses; several use them in about one order. States that the
 * program itself sets are not for it to write over. */
static void sums_find(reduction *r, const ml_plan *plan, const ml_plan *microbatch) {
    const ml_schedule *s = r->s;
    const uint32_t states = ml_graph_state_count(s->graph);
    const uint32_t known = ml_graph_state_count(microbatch->schedule->graph);
    const uint32_t *last =
        state_last_uses(microbatch->schedule, microbatch->roots.output_count, plan->arena);
    bool *set = ML_NEW_ARRAY(plan->arena, bool, (size_t)states + 1);
    for (int i = 0; i < plan->roots.update_count; i++) set[plan->roots.updates[i].state] = true;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        if (storage->kind == ML_STORAGE_STATE && storage->id < known && !set[storage->id] &&
            ml_graph_state(s->graph, storage->id)->kind == ML_STATE_GRADIENT)
            r->sums[i] = last[storage->id];
    }
}

/* The result's storage becomes the operand's memory, or the rank's part of it; false: it does not.
 */
static bool in_place(reduction *r, const ml_step *step) {
    const ml_collective_step *c = step->collective;
    const ml_value *from = &r->s->values.at[step->values[0]];
    const ml_value *to = &r->s->values.at[step->values[1]];
    const ml_storage *operand = &r->s->storages.at[from->storage];
    ml_storage *result = &r->s->storages.at[to->storage];
    const bool scatters = c->kind == ML_COLLECTIVE_REDUCE_SCATTER;
    if (!scatters && c->kind != ML_COLLECTIVE_ALL_REDUCE) return false;
    if (!r->sums[from->storage] || r->reads[from->storage] != 1 || !value_is_whole(r->s, from))
        return false;
    if (result->kind != ML_STORAGE_TEMPORARY || r->writes[to->storage] != 1 ||
        !value_is_whole(r->s, to))
        return false;
    if (scatters && (operand->part_of != 0 || operand->bytes != result->bytes * c->ranks ||
                     result->bytes % ARENA_ALIGNMENT != 0))
        return false;
    result->kind = ML_STORAGE_STATE;
    result->id = operand->id;
    result->part_of = scatters ? c->mesh_axis + 1 : operand->part_of;
    r->sums[to->storage] = r->sums[from->storage];
    return true;
}

/* A value of the rank's part of the sum that is reduced along the collective's mesh axis. */
static uint32_t add_part(reduction *r, const ml_step *step) {
    ml_schedule *s = r->s;
    const ml_collective_step *c = step->collective;
    const ml_value *whole = &s->values.at[step->values[1]];
    ml_storage storage = s->storages.at[whole->storage];
    storage.bytes /= c->ranks;
    storage.part_of = c->mesh_axis + 1;
    ml_value value = {.node = whole->node, .storage = s->storages.count, .stride = {1}};
    value.type = (ml_type){.dtype = c->dtype, .rank = 1, .size = {c->count / c->ranks}};
    value.type.axis[0] = whole->type.axis[0];
    *ML_PUSH(s->arena, &s->storages) = storage;
    *ML_PUSH(s->arena, &s->values) = value;
    return s->values.count - 1;
}

static ml_step step_of(reduction *r, const ml_step *all, ml_collective kind, uint32_t from,
                       uint32_t to, uint32_t order) {
    ml_step step = *all;
    ml_collective_step *c = ML_NEW(r->s->arena, ml_collective_step);
    *c = *all->collective;
    c->kind = kind;
    c->lead_order = order;
    if (kind != all->collective->kind) c->count /= c->ranks; /* of an all-reduce */
    step.collective = c;
    step.values = ML_NEW_ARRAY(r->s->arena, uint32_t, 2);
    step.values[0] = from;
    step.values[1] = to;
    step.may_alias = ML_NEW(r->s->arena, uint64_t);
    return step;
}

/* Whether it is an all-reduce that copies between GPUs can serve, in parts. */
static bool is_cut(const ml_plan *plan, const reduction *r, const ml_step *step) {
    const ml_collective_step *c = step->collective;
    const ml_storage *sum = &r->s->storages.at[r->s->values.at[step->values[1]].storage];
    return plan->target->kind == ML_TARGET_CUDA && c->kind == ML_COLLECTIVE_ALL_REDUCE &&
           c->combine == ML_COMBINE_SUM && sum->part_of == 0 && c->count % c->ranks == 0 &&
           sum->bytes / c->ranks % ARENA_ALIGNMENT == 0 &&
           plan_within_host(plan->layout, plan->target, c->mesh_axis);
}

/* The step, in place, as one or two. */
static void add_reduced(const ml_plan *plan, reduction *r, const ml_step *step, step_list *steps) {
    const ml_collective_step *c = step->collective;
    const uint32_t from = step->values[0], to = step->values[1];
    const uint32_t operand = r->s->values.at[from].storage, sum = r->s->values.at[to].storage;
    const bool cut = is_cut(plan, r, step), reduces = c->kind == ML_COLLECTIVE_ALL_REDUCE;
    const bool host = plan_within_host(plan->layout, plan->target, c->mesh_axis);
    const bool may = host ? cut || !reduces : !r->sends;
    const bool leads = r->overlap && !r->used[c->mesh_axis] && !r->waits[operand] && may;
    r->waits[sum] = !leads;
    if (!leads || !cut) {
        *ML_PUSH(r->s->arena, steps) =
            step_of(r, step, c->kind, from, to, leads ? r->sums[operand] : 0);
        return;
    }
    const uint32_t part = add_part(r, step), order = r->sums[operand];
    *ML_PUSH(r->s->arena, steps) =
        step_of(r, step, ML_COLLECTIVE_REDUCE_SCATTER, from, part, order);
    *ML_PUSH(r->s->arena, steps) = step_of(r, step, ML_COLLECTIVE_ALL_GATHER, part, to, order);
}

void plan_reduce_in_place(ml_plan *plan, bool overlap) {
    ml_schedule *s = plan->schedule;
    const ml_plan *microbatch = plan->applied.count > 0 ? plan->applied.at[0] : NULL;
    if (microbatch == NULL || microbatch->schedule == NULL || plan->layout == NULL) return;
    const size_t storages = (size_t)s->storages.count + 1;
    reduction r = {.s = s,
                   .overlap = overlap,
                   .reads = ML_NEW_ARRAY(plan->arena, uint32_t, storages),
                   .writes = ML_NEW_ARRAY(plan->arena, uint32_t, storages),
                   .sums = ML_NEW_ARRAY(plan->arena, uint32_t, storages),
                   .waits = ML_NEW_ARRAY(plan->arena, bool, storages)};
    axes_find(&r, &plan->applied);
    sums_find(&r, plan, microbatch);
    uses_count(&r, &plan->roots);
    step_list steps = {0};
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        if (step->kind == ML_STEP_COLLECTIVE && in_place(&r, step))
            add_reduced(plan, &r, step, &steps);
        else
            *ML_PUSH(s->arena, &steps) = *step;
    }
    s->steps = steps;
}
