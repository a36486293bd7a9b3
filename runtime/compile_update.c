/* The memory of the program that sets the parameters after all microbatches (compile_update.h). */
#include "runtime/compile_update.h"

#include "runtime/pipeline/plan.h"
#include "runtime/plan/arena_offsets.h"
#include "runtime/plan/plan_internal.h"

/* Whether stages of several ranks hold the state: one sets it, of what the others send. */
static bool is_exchanged(const ml_plan *plan, uint32_t state) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    if (p == NULL || state >= p->map->state_count || p->map->holders[state] == NULL) return false;
    const struct ml_holder *first = p->map->holders[state];
    for (const struct ml_holder *h = first->next; h != NULL; h = h->next)
        if (h->stage % p->ranks != first->stage % p->ranks) return true;
    return false;
}

bool compile_overlaps(const ml_layout *layout, const ml_target *target,
                      const ml_compile_options *options) {
    if (layout == NULL) return false;
    return options->overlap == ML_AUTO ? target->kind == ML_TARGET_CUDA
                                       : options->overlap == ML_ALWAYS;
}

/* Temporaries of a sum of gradients, of which each rank holds a part of `sum` bytes. Ranks add up
 * where the sum is (reduce_in_place.c), but for what each gets not in one piece, or split over
 * several mesh axes: that, `moment` bytes in the end, is alive until the norm of all gradients is
 * known. A reduce-scatter sends a copy where what each rank gets is not in one piece: beside other
 * work copies of many sums are alive. Returns what is alive. */
static int64_t add_reduced(const ml_plan *plan, const ml_state *state, const ml_placements *to,
                           int64_t sum, int64_t moment, update_memory *needs) {
    const ml_layout *layout = plan->update_layout;
    const ml_placements from =
        ml_layout_place(layout, plan->graph, &state->type, state->kind, state->name);
    bool partial = false, pieces = false;
    int64_t part = sum, alive = 0;
    int splits = 0;
    for (int i = 0; i < layout->count; i++) {
        if (from.over[i].kind != ML_PARTIAL_SUM) continue;
        partial = true;
        if (to->over[i].kind != ML_SPLIT) continue;
        if (part < sum) alive += memory_padded(part);
        part /= layout->axis[i].size;
        pieces |= to->over[i].axis > 0;
        splits++;
    }
    const bool uneven = state->type.rank > 0 && ml_layout_uneven(layout, &state->type, to, 0);
    const bool in_place = !pieces && splits <= 1 && !uneven && part % ARENA_ALIGNMENT == 0;
    if (!partial || (in_place && plan->pipeline == NULL)) return 0;
    alive += moment;
    needs->temporaries += alive;
    if (pieces && compile_overlaps(layout, plan->target, plan->options))
        needs->copies += sum;
    else if (pieces && sum > needs->copies)
        needs->copies = sum;
    return alive;
}

/* Of one sum of gradients: two moments in f32 of its parameter, and temporaries. Where stages of
 * several ranks hold it, also its gradient and new value as they are sent, and the sum of all
 * stages'. */
static void add_update(const ml_plan *plan, const ml_storage *storage, update_memory *needs) {
    const ml_state *state = ml_graph_state(plan->graph, storage->id);
    const int64_t sum = memory_padded(storage->bytes);
    ml_type local = state->type;
    int64_t reduced = 0;
    if (plan->update_layout != NULL) {
        ml_placements places =
            ml_layout_place(plan->update_layout, plan->graph, &state->type, ML_STATE_OPTIMIZER,
                            state->name != NULL ? state->name : "a sum of gradients");
        local = ml_layout_local(plan->update_layout, &state->type, &places);
        reduced =
            add_reduced(plan, state, &places, sum, memory_padded(ml_type_bytes(&local)), needs);
    }
    needs->states += 2 * memory_padded(ml_type_bytes(&local));
    if (!is_exchanged(plan, storage->id)) return;
    needs->states += 2 * sum;
    if (reduced != sum) needs->temporaries += sum; /* else ranks add up in the same memory */
}

update_memory compile_update_needs(const ml_plan *plan) {
    const int64_t scalars = 1 << 16; /* bytes: counters, terms of norms that stages exchange */
    enum { OTHER_ROWS = 64 };        /* programs of groups, at most, each with inputs of its own */
    update_memory needs = {0};
    if (plan->roots.microbatches <= 1) return needs;
    needs.states = scalars;
    if (plan->update_layout != plan->layout) needs.inputs = OTHER_ROWS * plan->input_bytes;
    needs.states += needs.inputs;
    bool *seen = ML_NEW_ARRAY(plan->arena, bool, (size_t)ml_graph_state_count(plan->graph) + 1);
    for (int p = 0; p < plan->part_count; p++) {
        const ml_schedule *s = plan->parts[p]->schedule;
        for (uint32_t i = 0; i < s->storages.count; i++) {
            const ml_storage *storage = &s->storages.at[i];
            if (storage->kind != ML_STORAGE_STATE || seen[storage->id]) continue;
            seen[storage->id] = true;
            if (ml_graph_state(plan->graph, storage->id)->kind == ML_STATE_GRADIENT)
                add_update(plan, storage, &needs);
        }
    }
    return needs;
}
