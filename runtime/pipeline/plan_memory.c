/* What the stages of a rank need: blocks for the microbatches that are under way at once, states,
 * temporaries, work, traffic. */
#include <string.h>

#include "runtime/pipeline/plan.h"
#include "runtime/plan/plan_internal.h"

typedef struct ml_pipeline_plan pipeline_plan;

static int rank_of(const pipeline_plan *pipeline, int stage) {
    return stage % pipeline->ranks;
}

/* When a rank begins the action before its action `at`: by then it has a place for what that one
 * receives (exec/pipeline_run.c). */
static int64_t expected_at(const pipeline_plan *pipeline, int rank, int at) {
    return at > 0 ? pipeline->schedule.actions[rank][at - 1].start : -1;
}

/* GPUs send from where the message lies, which holds the block until the receiver has a place for
 * it: to the last own action that begins no later than that. A later one may wait for the message
 * and ranks never wait in a circle, for whatever is waited for begins earlier in the schedule. */
static void ends_of_messages(const pipeline_plan *pipeline, const pipeline_channel *channel,
                             int *end) {
    int from = rank_of(pipeline, channel->from), to = rank_of(pipeline, channel->to), last = 0;
    int count = pipeline->schedule.action_count[from];
    const ml_action *own = pipeline->schedule.actions[from];
    for (int i = 0; i < pipeline->schedule.action_count[to]; i++) {
        const ml_action *action = &pipeline->schedule.actions[to][i];
        if (action->task != channel->to_task) continue;
        int64_t there = expected_at(pipeline, to, i);
        while (last + 1 < count && own[last + 1].start <= there) last++;
        if (last > end[action->microbatch]) end[action->microbatch] = last;
    }
}

/* By microbatch: the first action of the stage's rank that touches its block, and the last, which
 * may be that of another stage that reads it in place. */
static void ends_find(const pipeline_plan *pipeline, int stage, ml_arena *arena, int *begin,
                      int *end) {
    int rank = rank_of(pipeline, stage);
    bool *reads = ML_NEW_ARRAY(arena, bool, (size_t)pipeline->task_count + 1); /* by task */
    for (int i = 0; i < pipeline->channel_count; i++) {
        const pipeline_channel *channel = &pipeline->channels[i];
        if (channel->local && channel->from == stage) reads[channel->to_task] = true;
    }
    for (int i = 0; i < pipeline->microbatches; i++) begin[i] = -1;
    for (int i = 0; i < pipeline->schedule.action_count[rank]; i++) {
        const ml_action *action = &pipeline->schedule.actions[rank][i];
        bool own = pipeline->tasks[action->task].stage == stage;
        if (own && begin[action->microbatch] < 0) begin[action->microbatch] = i;
        if (own || reads[action->task]) end[action->microbatch] = i;
    }
    for (int i = 0; i < pipeline->channel_count; i++) {
        const pipeline_channel *channel = &pipeline->channels[i];
        if (!channel->local && channel->from == stage) ends_of_messages(pipeline, channel, end);
    }
}

/* How many blocks are in use at once, where each is prepared one action before it begins. */
static int slots_needed(const int *begin, const int *end, int count, int actions, ml_arena *arena) {
    int *change = ML_NEW_ARRAY(arena, int, (size_t)actions + 2), most = 0, alive = 0;
    for (int i = 0; i < count; i++) {
        change[begin[i] > 0 ? begin[i] - 1 : 0]++;
        change[end[i] + 1]--;
    }
    for (int i = 0; i < actions; i++) {
        alive += change[i];
        if (alive > most) most = alive;
    }
    return most;
}

/* A slot and the action to which it is used; the one that is free first goes first. */
typedef struct {
    int used_to, number;
} slot;

static bool slot_before(slot a, slot b) {
    return a.used_to != b.used_to ? a.used_to < b.used_to : a.number < b.number;
}

/* The first slot of a heap is used from now on to `used_to`. */
static void slot_use(slot *heap, int count, int used_to) {
    slot moved = {used_to, heap[0].number};
    int at = 0, child;
    while ((child = 2 * at + 1) < count) {
        if (child + 1 < count && slot_before(heap[child + 1], heap[child])) child++;
        if (!slot_before(heap[child], moved)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

typedef struct {
    pipeline_plan *pipeline;
    int stage;
    ml_arena *arena, *scratch;
} slots_call;

/* Slots are given out in turn, the one that has been free for longest first. */
static void slots_body(void *context) {
    slots_call *call = context;
    pipeline_plan *pipeline = call->pipeline;
    pipeline_stage *stage = &pipeline->stages[call->stage];
    int count = pipeline->microbatches, rank = rank_of(pipeline, call->stage);
    int *begin = ML_NEW_ARRAY(call->scratch, int, (size_t)count);
    int *end = ML_NEW_ARRAY(call->scratch, int, (size_t)count);
    int actions = pipeline->schedule.action_count[rank];
    ends_find(pipeline, call->stage, call->scratch, begin, end);
    stage->slots = slots_needed(begin, end, count, actions, call->scratch);
    stage->slot_of = ML_NEW_ARRAY(call->arena, int, (size_t)count);
    slot *heap = ML_NEW_ARRAY(call->scratch, slot, (size_t)stage->slots);
    for (int i = 0; i < stage->slots; i++) heap[i] = (slot){i - stage->slots - 1, i};
    for (int t = 0; t < actions; t++) {
        int i = pipeline->schedule.actions[rank][t].microbatch;
        if (begin[i] != t) continue;
        stage->slot_of[i] = heap[0].number;
        slot_use(heap, stage->slots, end[i]);
    }
}

void pipeline_slots_assign(pipeline_plan *pipeline, int v, ml_arena *arena) {
    slots_call call = {pipeline, v, arena, ml_arena_new()};
    if (call.scratch == NULL) ml_raise(ML_NO_MEMORY, "no memory left to plan a pipeline");
    ml_status status = ml_protect(slots_body, &call);
    ml_arena_free(call.scratch);
    if (status != ML_OK) ml_raise_last();
}

typedef struct {
    int64_t kinds[ML_MEMORY_KINDS], states[ML_MEMORY_KINDS];
    int64_t arena, library, buffers, once_per_step, saved, peak;
    double flops;
    uint32_t step;
} account;

static void account_states(const ml_plan *part, bool *seen, account *a) {
    const ml_schedule *s = part->schedule;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        if (storage->kind != ML_STORAGE_STATE || seen[storage->id]) continue;
        seen[storage->id] = true;
        a->states[ml_plan_memory_kind(ml_graph_state(s->graph, storage->id)->kind)] +=
            memory_padded(storage->bytes);
    }
}

const ml_plan *pipeline_once_per_step(const pipeline_plan *pipeline, int v) {
    const pipeline_stage *stage = &pipeline->stages[pipeline->stages[v].representative];
    return stage->programs.once_per_step ? stage->plans[stage->programs.count] : NULL;
}

/* What is set aside of a step that may be done again. */
static int64_t account_saved(const ml_plan *plan, int coordinate, ml_arena *arena) {
    pipeline_saved_list list = {0};
    int64_t bytes = 0;
    int64_t until = plan->pipeline->until;
    if (until == 0) return 0;
    pipeline_saved_find(plan, coordinate, until, arena, &list);
    for (uint32_t i = 0; i < list.count; i++)
        if (!list.at[i].begins) bytes += memory_padded(list.at[i].bytes);
    return bytes;
}

typedef struct {
    ml_plan *plan;
    int coordinate; /* whose account; -1: the largest of all ranks' */
    ml_arena *scratch;
    bool *seen; /* by state */
    account best;
} accounting;

static void account_rank(accounting *x, int coordinate, account *a) {
    const ml_plan *plan = x->plan, *largest = NULL;
    const pipeline_plan *pipeline = plan->pipeline;
    memset(x->seen, 0, (size_t)ml_graph_state_count(plan->graph) + 1);
    memset(a, 0, sizeof *a);
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks) {
        const pipeline_stage *stage = &pipeline->stages[pipeline->stages[v].representative];
        a->buffers += stage->programs.buffer_bytes * pipeline->stages[v].slots;
        a->once_per_step += stage->programs.once_bytes;
        for (int p = 0; p < stage->plan_count; p++) {
            const ml_plan *part = stage->plans[p];
            account_states(part, x->seen, a);
            a->flops += part->flops;
            if (part->library_bytes > a->library) a->library = part->library_bytes;
            if (largest == NULL || part->arena_bytes > largest->arena_bytes) largest = part;
        }
    }
    a->arena = largest->arena_bytes;
    a->saved = account_saved(plan, coordinate, x->scratch);
    for (int i = 0; i < ML_MEMORY_KINDS; i++) {
        a->kinds[i] = a->states[i] + largest->kind_bytes[i] - largest->state_bytes[i];
        a->peak += a->states[i];
    }
    a->kinds[ML_MEMORY_ACTIVATIONS] += a->buffers;
    a->kinds[ML_MEMORY_PARAMETERS] += a->once_per_step;
    a->kinds[ML_MEMORY_WORKSPACE] += a->library - largest->library_bytes + a->saved;
    a->peak += a->arena + a->library + a->buffers + a->once_per_step + a->saved;
}

/* And the work that ranks do alike. */
static void traffic_sum(ml_plan *plan, int coordinate) {
    const pipeline_plan *pipeline = plan->pipeline;
    ml_traffic *sent = &plan->traffic[plan->layout->stages.mesh_axis][ML_COLLECTIVE_SEND];
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks) {
        const ml_plan *local = pipeline->stages[pipeline->stages[v].representative].local;
        ml_division_add(&plan->roots.division, &local->roots.division);
        for (int i = 0; i < ML_MAX_MESH; i++) {
            for (int k = 0; k < ML_COLLECTIVE_KINDS; k++) {
                plan->traffic[i][k].count += local->traffic[i][k].count;
                plan->traffic[i][k].bytes += local->traffic[i][k].bytes;
            }
        }
    }
    sent->count += pipeline->sent[coordinate].count;
    sent->bytes += pipeline->sent[coordinate].bytes;
}

static void parts_list(ml_plan *plan, int coordinate) {
    const pipeline_plan *pipeline = plan->pipeline;
    int count = 0;
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks)
        count += pipeline->stages[pipeline->stages[v].representative].plan_count;
    plan->parts = ML_NEW_ARRAY(plan->arena, ml_plan *, (size_t)count);
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks) {
        const pipeline_stage *stage = &pipeline->stages[pipeline->stages[v].representative];
        for (int p = 0; p < stage->plan_count; p++)
            plan->parts[plan->part_count++] = stage->plans[p];
    }
}

/* The work of all ranks, as if evenly spread, from that of one of them. */
static double flops_even(const pipeline_plan *pipeline, double own, int coordinate) {
    double mine = 0;
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks)
        for (int i = 0; i < pipeline->cut.stages[v].waves; i++)
            mine += pipeline->cut.stages[v].flops[i];
    return mine > 0 ? own * pipeline->flops / mine / pipeline->ranks : 0;
}

static void account_body(void *context) {
    accounting *x = context;
    pipeline_plan *pipeline = x->plan->pipeline;
    account a;
    x->seen = ML_NEW_ARRAY(x->scratch, bool, (size_t)ml_graph_state_count(x->plan->graph) + 1);
    pipeline->coordinate = x->coordinate;
    if (x->coordinate >= 0) account_rank(x, x->coordinate, &x->best);
    for (int r = 0; x->coordinate < 0 && r < pipeline->ranks; r++) {
        account_rank(x, r, &a);
        if (r > 0 && a.peak <= x->best.peak) continue;
        x->best = a;
        pipeline->coordinate = r;
    }
}

void pipeline_memory(ml_plan *plan, int coordinate) {
    pipeline_plan *pipeline = plan->pipeline;
    accounting x = {.plan = plan, .coordinate = coordinate, .scratch = ml_arena_new()};
    if (x.scratch == NULL) ml_raise(ML_NO_MEMORY, "no memory left to plan a pipeline");
    ml_status status = ml_protect(account_body, &x);
    ml_arena_free(x.scratch);
    if (status != ML_OK) ml_raise_last();
    plan->part_count = 0;
    memset(plan->traffic, 0, sizeof plan->traffic);
    plan->roots.division = (ml_division){0};
    memcpy(plan->kind_bytes, x.best.kinds, sizeof x.best.kinds);
    memcpy(plan->state_bytes, x.best.states, sizeof x.best.states);
    plan->arena_bytes = x.best.arena;
    plan->library_bytes = x.best.library;
    plan->buffer_bytes = x.best.buffers + x.best.once_per_step;
    plan->peak_bytes = x.best.peak;
    plan->flops = flops_even(pipeline, x.best.flops, pipeline->coordinate);
    traffic_sum(plan, pipeline->coordinate);
    parts_list(plan, pipeline->coordinate);
    if (plan->fallback == NULL) return;
    pipeline_memory(plan->fallback, pipeline->coordinate);
    plan_fallback_account(plan);
}
