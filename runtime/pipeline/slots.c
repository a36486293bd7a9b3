/* Microbatch buffers of a stage: how many are in use at once, and which one each microbatch has. */
#include "runtime/pipeline/pipeline_internal.h"

static int rank_of(const pipeline_plan *pipeline, int stage) {
    return stage % pipeline->ranks;
}

/* When a rank begins the action before its action `at`: then it has a destination for what that one
 * receives (exec/pipeline/run.c). */
static int64_t expected_at(const pipeline_plan *pipeline, int rank, int at) {
    return at > 0 ? pipeline->schedule.actions[rank][at - 1].start : -1;
}

/* A GPU sends a message from the buffer, which is in use until the receiver has a destination: to
 * the last own action that begins no later than that. A later action may wait for the message;
 * ranks never wait in a circle, for whatever is waited for begins earlier in the schedule. */
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

/* By microbatch: the first action of the stage's rank that uses its buffer, and the last, which may
 * be that of another stage of the rank that reads it in place. */
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

/* The most buffers in use at once, where each is prepared one action before its first. */
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

/* A slot and the action up to which it is used; the one that is free first comes first. */
typedef struct {
    int used_to, number;
} slot;

static bool slot_before(slot a, slot b) {
    return a.used_to != b.used_to ? a.used_to < b.used_to : a.number < b.number;
}

/* The first slot of a heap is in use from now up to `used_to`. */
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

/* Slots are assigned in turn, the one that has been free for longest first. */
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
