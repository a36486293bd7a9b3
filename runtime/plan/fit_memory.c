/* Plans of a program one after the other, until one fits in memory. What does not depend on how
 * memory is saved is made once (struct plan_base): of a pipeline the stages' global graphs, the
 * schedule and its slots; of each rank's program what the passes make up to where plans differ.
 * There is one plan at a time, for a large one's steps take most of the memory that planning takes;
 * should an earlier one turn out to be the smallest, it is made again. */
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/pipeline/plan.h"
#include "runtime/plan/plan_internal.h"

/* ---- what plans share ---- */
void plan_base_free(struct plan_base *base) {
    if (base == NULL) return;
    for (int i = 0; i < base->part_count; i++)
        if (base->parts[i].graph != NULL) ml_graph_free(base->parts[i].graph);
    if (base->pipeline != NULL) ml_stage_graphs_free(&base->pipeline->cut);
    if (base->global != NULL) ml_graph_free(base->global);
    ml_arena_free(base->arena);
    ml_free(base);
}

static uint64_t hash_layout(const ml_layout *layout, const ml_graph *g, ml_arena *arena,
                            uint64_t seed) {
    ml_text text = {.arena = arena};
    ml_layout_print(layout, g, &text);
    return ml_hash(text.text, strlen(text.text), seed);
}

/* What all ranks of a pipeline know alike: who sends what to whom, in which order. How each makes
 * it is its own affair, but for what changes the order of collectives. */
static uint64_t hash_pipeline(const struct ml_pipeline_plan *pipeline, uint64_t seed) {
    int64_t knobs[] = {ml_knobs()->overlap, ml_knobs()->no_fuse, ml_knobs()->recompute,
                       ml_knobs()->chunk, ml_knobs()->halves};
    seed = ml_hash(knobs, sizeof knobs, seed);
    for (int i = 0; i < pipeline->message_count; i++) {
        const pipeline_message *m = &pipeline->messages[i];
        int64_t fields[] = {m->channel, m->bytes};
        seed = ml_hash(fields, sizeof fields, seed);
    }
    for (int i = 0; i < pipeline->channel_count; i++) {
        const pipeline_channel *channel = &pipeline->channels[i];
        int fields[] = {channel->from, channel->to, channel->from_task, channel->to_task};
        seed = ml_hash(fields, sizeof fields, seed);
    }
    for (int r = 0; r < pipeline->ranks; r++)
        for (int i = 0; i < pipeline->schedule.action_count[r]; i++) {
            const ml_action *a = &pipeline->schedule.actions[r][i];
            int fields[] = {a->task, a->microbatch};
            seed = ml_hash(fields, sizeof fields, seed);
        }
    return seed;
}

typedef struct {
    ml_plan **plan;
    const ml_graph *from;
    const ml_roots *roots;
    const ml_target *target;
    const ml_layout *layout;
    const ml_cut *cut;
    plan_recompute recompute;
    bool overlap, copies;
} plan_call;

static bool is_cut(const plan_call *call) {
    return call->layout != NULL && call->layout->stages.on && call->cut != NULL;
}

/* ---- one plan ---- */
/* The first plan of a pipeline cuts the program for all. */
static void global_cut(const plan_call *call, ml_plan *plan) {
    struct plan_base *base = plan->base;
    plan_global(plan, call->from, call->roots);
    base->global = plan->graph;
    base->roots = plan_roots_copy(base->arena, &plan->roots);
    pipeline_partition(base, call->layout, call->cut);
    base->part_count = base->pipeline->count;
    base->parts = ML_NEW_ARRAY(base->arena, plan_part, (size_t)base->part_count);
    uint64_t hash = ml_graph_hash(plan->graph, 1);
    hash = hash_layout(plan->layout, plan->graph, plan->arena, hash);
    base->hash = hash_pipeline(base->pipeline, hash);
}

static void cut_make(const plan_call *call, ml_plan *plan) {
    struct plan_base *base = plan->base;
    if (base->pipeline == NULL) {
        global_cut(call, plan);
    } else {
        plan->graph = base->global;
        plan_roots(plan, &base->roots);
    }
    pipeline_plan_stages(plan, call->target, call->cut, call->recompute, call->overlap,
                         call->copies);
    plan->hash = base->hash;
}

static void whole_make(const plan_call *call, ml_plan *plan) {
    struct plan_base *base = plan->base;
    plan->parts = ML_NEW(plan->arena, ml_plan *);
    plan->parts[plan->part_count++] = plan;
    if (base->parts == NULL) {
        plan_global(plan, call->from, call->roots);
        base->parts = ML_NEW(base->arena, plan_part);
        base->part_count = 1;
    }
    plan_local(plan, call->target, call->recompute, call->overlap, NULL, base, base->parts);
    if (call->copies) plan_copies(plan, call->target);
    plan_steps(plan, call->target, call->overlap);
}

static struct plan_base *base_new(bool keeps) {
    struct plan_base *base = ml_alloc(sizeof *base);
    if (base == NULL) ml_raise(ML_NO_MEMORY, "out of memory while planning a program");
    base->arena = ml_arena_new();
    base->keeps = keeps;
    if (base->arena != NULL) return base;
    ml_free(base);
    ml_raise(ML_NO_MEMORY, "out of memory while planning a program");
}

/* Make *call->plan, in the place of an earlier one. */
static void plan_make(const plan_call *call) {
    ml_plan *old = *call->plan, *plan = plan_empty();
    if (old != NULL) {
        plan->base = old->base;
        old->base = NULL;
        if (old->graph == plan->base->global) old->graph = NULL;
        ml_plan_free(old);
    }
    *call->plan = plan;
    plan->layout = call->layout;
    if (plan->base == NULL) plan->base = base_new(call->target->memory_bytes > 0);
    if (is_cut(call))
        cut_make(call, plan);
    else
        whole_make(call, plan);
}

/* ---- which one ---- */
/* Two moments of each parameter that the plan reads. */
static int64_t moment_bytes(const ml_plan *plan) {
    int64_t bytes = 0;
    const ml_schedule *s = plan->schedule;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        if (storage->kind == ML_STORAGE_STATE &&
            ml_graph_state(s->graph, storage->id)->kind == ML_STATE_PARAMETER)
            bytes += 2 * storage->bytes;
    }
    return bytes;
}

/* Bytes that a program should have room for: its own, and, where it keeps more than it must, for
 * what another one, which sets the parameters after all microbatches, keeps of each of them, mostly
 * two moments. */
static int64_t memory_wanted(const ml_plan *plan, bool keeps) {
    int64_t moments = 0;
    if (plan->roots.microbatches > 1 && keeps) {
        if (plan->pipeline != NULL) moments = 2 * plan->state_bytes[ML_MEMORY_PARAMETERS];
        if (plan->refresh != NULL) moments = moment_bytes(plan->refresh);
    }
    return plan->peak_bytes + moments;
}

static bool keeps_copies(const ml_plan *plan) {
    const struct ml_pipeline_plan *pipeline = plan->pipeline;
    for (int v = pipeline ? pipeline->coordinate : 0; pipeline && v < pipeline->count;
         v += pipeline->ranks)
        if (pipeline_once_per_step(pipeline, v) != NULL) return true;
    return plan->refresh != NULL;
}

static bool defers_weight_grads(const struct ml_pipeline_plan *pipeline) {
    for (int v = pipeline ? pipeline->coordinate : 0; pipeline && v < pipeline->count;
         v += pipeline->ranks)
        if (pipeline->stages[v].waves.weight_grad) return true;
    return false;
}

typedef struct {
    plan_recompute recompute;
    bool overlap, copies;
    int64_t peak, wanted; /* bytes: of the plan, and with room for others */
    bool keeps;           /* it has copies of parameters */
} plan_choice;

static plan_choice choice_of(const plan_call *call) {
    const ml_plan *plan = *call->plan;
    return (plan_choice){.recompute = call->recompute,
                         .overlap = call->overlap,
                         .copies = call->copies,
                         .peak = plan->peak_bytes,
                         .wanted = memory_wanted(plan, true),
                         .keeps = keeps_copies(plan)};
}

static bool is_choice(const plan_call *call, const plan_choice *choice) {
    return call->recompute == choice->recompute && call->overlap == choice->overlap &&
           call->copies == choice->copies;
}

/* The plan of another call, chosen where it is smaller. */
static void plan_smaller(const plan_call *call, plan_call *made, plan_choice *best) {
    *made = *call;
    plan_make(made);
    if ((*call->plan)->peak_bytes < best->peak) *best = choice_of(made);
}

static plan_call least_call(const plan_call *first) {
    plan_call call = *first;
    call.recompute = RECOMPUTE_ALL;
    call.overlap = call.copies = false;
    return call;
}

/* One after the other: less is kept for weight gradients that are put off, no copies of parameters
 * are kept, collectives do not overlap with other work, and all is computed twice that need not be
 * kept. */
static void plan_rungs(plan_call *call, bool late, int64_t limit, plan_call *made,
                       plan_choice *best) {
    call->recompute = RECOMPUTE_FREE;
    if (late) plan_smaller(call, made, best);
    call->copies = false;
    if (best->keeps && best->wanted > limit) plan_smaller(call, made, best);
    if (best->peak > limit && call->overlap) {
        call->overlap = false;
        plan_smaller(call, made, best);
    }
    call->recompute = RECOMPUTE_ALL;
    if (best->peak > limit) plan_smaller(call, made, best);
}

/* A plan of more than twice the memory is hardly ever saved by a single step: the last one is tried
 * first, and where it does not fit either, those between would not. */
static void plan_short(const plan_call *first, bool late, int64_t limit) {
    plan_call call = *first, made = *first;
    plan_choice best = choice_of(first), least = best;
    if (best.peak / 2 > limit) {
        plan_call last = least_call(first);
        plan_smaller(&last, &made, &least);
    }
    if (least.peak <= limit || best.peak / 2 <= limit)
        plan_rungs(&call, late, limit, &made, &best);
    else
        best = least;
    if (is_choice(&made, &best)) return;
    call.recompute = best.recompute;
    call.overlap = best.overlap;
    call.copies = best.copies;
    plan_make(&call);
}

/* What only further plans would need. */
static void base_done(ml_plan *plan) {
    struct plan_base *base = plan->base;
    for (int i = 0; i < base->part_count; i++) {
        if (base->parts[i].graph != NULL) ml_graph_free(base->parts[i].graph);
        base->parts[i].graph = NULL;
    }
    if (base->pipeline != NULL) return;
    plan->base = NULL;
    plan_base_free(base);
}

void ml_plan_new(const ml_graph *from, const ml_roots *roots, const ml_target *target,
                 const ml_layout *layout, const ml_cut *cut, ml_plan **plan) {
    *plan = NULL;
    int wanted = ml_knobs()->overlap;
    bool overlap = wanted >= 0 ? wanted : target->kind == ML_TARGET_CUDA;
    int64_t limit = target->memory_bytes > 0 ? target->memory_bytes : INT64_MAX;
    plan_call call = {plan, from, roots, target, layout, cut};
    call.recompute = RECOMPUTE_FREE_NOT_LATE;
    call.overlap = overlap && layout != NULL;
    call.copies = cut != NULL && ml_knobs()->copies &&
                  (layout != NULL || (target->kind == ML_TARGET_CUDA && !target->no_fuse));
    plan_make(&call);
    bool late = defers_weight_grads((*plan)->pipeline);
    if (memory_wanted(*plan, late || keeps_copies(*plan)) > limit) plan_short(&call, late, limit);
    base_done(*plan);
}
