/* Steps of pipelines that are repeated where the capacity of experts overflowed
 * (ragged/moe_dispatch.c).
 *
 * Several microbatches are in flight, so no task can wait to learn whether another one's rows fit.
 * All run, with NaN for the rows that are lost, and each task stores its overflow flags in device
 * memory, by microbatch. After the step the host reads them once, and all ranks of the job compare:
 * a step is valid on all of them or on none. If it is not, the states that it assigned are restored
 * from copies taken before the step; sums over microbatches need no copy where the step does not
 * read their old value (pipeline/saved_states.c). Then the retry program runs the step.
 *
 * A step of one microbatch may include the optimizer, too, and copies of all that it assigns would
 * be as large as the model. Its ranks compare before that: once the last task with flags has ended.
 * After an overflow the remaining tasks only send and receive, so that no message stays in flight.
 */
#include <string.h>

#include "runtime/exec/pipeline/run.h"

ml_status pipeline_buffers_reserve(ml_program *program, int64_t bytes) {
    ml_device *device = program->session->device;
    if (program->microbatch_buffers != NULL && program->buffer_bytes >= bytes) return ML_OK;
    if (program->microbatch_buffers != NULL)
        device->ops->release(device, program->microbatch_buffers);
    program->microbatch_buffers = NULL;
    ml_status status =
        device->ops->allocate(device, bytes > 0 ? bytes : 1, &program->microbatch_buffers);
    program->buffer_bytes = status == ML_OK ? bytes : 0;
    return status;
}

ml_status pipeline_overflow_agree(ml_program *program) {
    const ml_session *session = program->session;
    int64_t latest = 0; /* negative: ml_comm_least finds the latest */
    if (!(program->plan->layout->exchange > 0)) return ML_OK;
    latest = -plan_of(program)->until;
    ml_status status = ml_comm_least(session->comm, &latest);
    program->until = -latest;
    program->may_overflow = latest < 0;
    return status;
}

static bool actions_alike(const ml_pipeline_schedule *a, const ml_pipeline_schedule *b, int rank) {
    if (a->action_count[rank] != b->action_count[rank]) return false;
    for (int i = 0; i < a->action_count[rank]; i++) {
        const ml_action *x = &a->actions[rank][i], *y = &b->actions[rank][i];
        if (x->task != y->task || x->microbatch != y->microbatch) return false;
    }
    return true;
}

bool pipeline_plans_alike(const ml_program *program, const ml_program *retry) {
    const struct ml_pipeline_plan *a = plan_of(program), *b = plan_of(retry);
    bool alike = a->channel_count == b->channel_count && a->message_count == b->message_count;
    for (int i = 0; i < a->channel_count && alike; i++) {
        const pipeline_channel *x = &a->channels[i], *y = &b->channels[i];
        alike = x->from_task == y->from_task && x->to_task == y->to_task && x->bytes == y->bytes;
    }
    for (int i = 0; i < a->message_count && alike; i++)
        alike = a->messages[i].channel == b->messages[i].channel &&
                a->messages[i].bytes == b->messages[i].bytes;
    for (int r = 0; r < a->ranks && alike; r++)
        alike = actions_alike(&a->schedule, &b->schedule, r);
    return alike;
}

/* ---- loading ---- */

/* The states that may be restored, and memory for copies of those whose old value every step reads.
 */
static ml_status copies_load(ml_program *program, const pipeline_saved_list *list) {
    struct pipeline_run *run = program->pipeline;
    ml_device *device = program->session->device;
    ml_status status = ML_OK;
    run->copies = ml_alloc(sizeof *run->copies * ((size_t)list->count + 1));
    if (run->copies == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a program");
    for (uint32_t i = 0; i < list->count && status == ML_OK; i++) {
        state_copy *copy = &run->copies[run->copy_count++];
        *copy = (state_copy){.of = list->at[i]};
        if (copy->of.begins) continue;
        status =
            device->ops->allocate(device, copy->of.bytes > 0 ? copy->of.bytes : 1, &copy->memory);
    }
    return status;
}

typedef struct {
    const ml_program *program;
    ml_arena *arena;
    pipeline_saved_list list;
} saved_call;

static void saved_body(void *context) {
    saved_call *call = context;
    pipeline_saved_find(call->program->plan, plan_of(call->program)->coordinate,
                        call->program->until, call->arena, &call->list);
}

static ml_status flags_load(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    struct pipeline_run *run = program->pipeline;
    ml_device *device = program->session->device;
    for (int v = 0; v < plan->count; v++) {
        run->stages[v].first_flag = run->flag_count;
        if (mine(program, v)) run->flag_count += plan->stages[v].overflow_flags;
    }
    size_t bytes = sizeof(float) * (size_t)run->flag_count * (size_t)plan->microbatches;
    run->found = ml_alloc(bytes + 1);
    if (run->found == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a program");
    return device->ops->allocate(device, (int64_t)bytes + 1, (void **)&run->flags);
}

ml_status retry_load(ml_program *program) {
    saved_call call = {.program = program};
    if (!program->may_overflow) return ML_OK;
    ML_TRY(flags_load(program));
    call.arena = ml_arena_new();
    if (call.arena == NULL) return ml_fail(ML_NO_MEMORY, "out of memory for a program");
    ml_status status = ml_protect(saved_body, &call);
    if (status == ML_OK) status = copies_load(program, &call.list);
    ml_arena_free(call.arena);
    return status;
}

void retry_unload(ml_program *program) {
    struct pipeline_run *run = program->pipeline;
    ml_device *device = program->session->device;
    for (uint32_t i = 0; i < run->copy_count; i++)
        if (run->copies[i].memory != NULL) device->ops->release(device, run->copies[i].memory);
    if (run->flags != NULL) device->ops->release(device, run->flags);
    ml_free(run->copies);
    ml_free(run->found);
}

/* ---- running ---- */

/* Whether the queued step does not read the state's old value. */
static bool begins_anew(const ml_program *program, const pipeline_saved_state *saved) {
    const struct pipeline_run *run = program->pipeline;
    for (int i = 0; i < program->input_count && saved->begins; i++) {
        if (program->input_ids[i] != saved->input) continue;
        bool fed;
        memcpy(&fed, run->feeds + program->input_offsets[i], sizeof fed);
        return fed == saved->when;
    }
    return false;
}

static ml_status copy_take(ml_program *program, state_copy *copy) {
    ml_device *device = program->session->device;
    const session_state *state = &program->session->states[copy->of.state];
    copy->taken = !begins_anew(program, &copy->of);
    if (!copy->taken) return ML_OK;
    if (copy->memory == NULL)
        ML_TRY(device->ops->allocate(device, state->bytes > 0 ? state->bytes : 1, &copy->memory));
    return device->ops->copy(device, copy->memory, state->memory, state->bytes);
}

/* A program and its retry share buffers: before one writes to them, what the other sent from
 * them must have arrived on every rank. */
static ml_status buffers_hand_over(ml_program *program) {
    ml_program *owner = program->owner != NULL ? program->owner : program;
    ml_device *device = program->session->device;
    if (owner->retry == NULL || owner->ran == program) return ML_OK;
    owner->ran = program;
    ml_status status = device->ops->wait(device);
    return status == ML_OK ? ml_comm_barrier(program->session->comm) : status;
}

ml_status retry_begin(ml_program *program) {
    struct pipeline_run *run = program->pipeline;
    run->flags_known = false;
    run->overflow.factor = 0;
    ml_status status = buffers_hand_over(program);
    for (uint32_t i = 0; i < run->copy_count && status == ML_OK; i++)
        status = copy_take(program, &run->copies[i]);
    return status;
}

ml_status retry_note(ml_program *program, int v, int p, int microbatch) {
    const pipeline_stage *stage = &plan_of(program)->stages[v];
    struct pipeline_run *run = program->pipeline;
    if (stage->overflow_flags == 0 || stage->overflow_task != p) return ML_OK;
    ml_device *device = program->session->device;
    float *to = run->flags + (size_t)microbatch * run->flag_count + run->stages[v].first_flag;
    return device->ops->copy(device, to,
                             saved_address(program, v, microbatch, stage->overflow_saved),
                             (int64_t)sizeof *to * stage->overflow_flags);
}

/* ---- whether a step is valid ---- */

enum { STAGE_BITS = 32 };

/* The first exchange of this rank that overflowed, in the order of stages: later ones route NaN.
 * Its stage and number in one, or INT64_MAX; *factor is the largest of all microbatches. */
static int64_t first_found(const ml_program *program, float *factor) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    const struct pipeline_run *run = program->pipeline;
    for (int v = plan->coordinate; v < plan->count; v += plan->ranks) {
        for (int i = 0; i < plan->stages[v].overflow_flags; i++) {
            for (int m = 0; m < plan->microbatches; m++) {
                int at = m * run->flag_count + run->stages[v].first_flag + i;
                if (run->found[at] > *factor) *factor = run->found[at];
            }
            if (*factor > 0) return (int64_t)v << STAGE_BITS | i;
        }
    }
    return INT64_MAX;
}

/* Every rank gets the name of the exchange that rank `from` has found. */
static ml_status name_share(ml_program *program, int from) {
    ml_comm *comm = program->session->comm;
    char unused[EXCHANGE_NAME], *name = program->pipeline->overflow.name;
    int rank = ml_comm_rank(comm), other = rank == 0 ? from : rank == from ? 0 : -1;
    ml_status status = ML_OK;
    if (from != 0)
        status = ml_comm_swap(comm, other, name, rank == 0 ? name : unused,
                              EXCHANGE_NAME / (int)sizeof(int64_t));
    return status == ML_OK ? ml_comm_share(comm, name, EXCHANGE_NAME) : status;
}

/* All ranks compare their flags: the first exchange of all, and its largest factor. */
static ml_status found_share(ml_program *program, int64_t mine, float factor) {
    ml_comm *comm = program->session->comm;
    exchange_overflow *overflow = &program->pipeline->overflow;
    int64_t first = mine, largest = 0, from = INT64_MAX;
    int32_t bits;
    ml_status status = ml_comm_least(comm, &first);
    if (status != ML_OK || first == INT64_MAX) return status;
    memcpy(&bits, &factor, sizeof bits); /* of positive numbers they are in their order */
    if (mine == first) largest = -(int64_t)bits;
    status = ml_comm_least(comm, &largest);
    if (mine == first && largest == -(int64_t)bits) from = ml_comm_rank(comm);
    if (status == ML_OK) status = ml_comm_least(comm, &from);
    if (status != ML_OK) return status;
    bits = (int32_t)-largest;
    memcpy(&factor, &bits, sizeof factor);
    overflow->factor = (double)factor;
    memset(overflow->name, 0, sizeof overflow->name);
    if (mine == first) {
        const pipeline_stage *stage = &plan_of(program)->stages[first >> STAGE_BITS];
        uint32_t flag = (uint32_t)first;
        exchange_name(stage->local->roots.overflow_origins[flag], overflow->name);
    }
    return name_share(program, (int)from);
}

/* Waits for this rank's tasks so far, and for all other ranks. */
static ml_status check_flags(ml_program *program) {
    const struct ml_pipeline_plan *plan = plan_of(program);
    struct pipeline_run *run = program->pipeline;
    ml_device *device = program->session->device;
    float factor = 0;
    int64_t bytes = (int64_t)sizeof(float) * run->flag_count * plan->microbatches;
    ml_status status = bytes > 0 ? device->ops->download(device, run->found, run->flags, bytes)
                                 : device->ops->wait(device);
    int64_t mine = status == ML_OK ? first_found(program, &factor) : INT64_MAX;
    if (status == ML_OK) status = found_share(program, mine, factor);
    run->flags_known = status == ML_OK;
    return status;
}

ml_status retry_check_flags(ml_program *program, int64_t start) {
    bool at_once = program->may_overflow && program->until < INT64_MAX;
    if (!at_once || program->pipeline->flags_known || start < program->until) return ML_OK;
    return check_flags(program);
}

static ml_status states_restore(ml_program *program) {
    struct pipeline_run *run = program->pipeline;
    ml_device *device = program->session->device;
    ml_status status = ML_OK;
    for (uint32_t i = 0; i < run->copy_count && status == ML_OK; i++) {
        const state_copy *copy = &run->copies[i];
        const session_state *state = &program->session->states[copy->of.state];
        if (copy->taken)
            status = device->ops->copy(device, state->memory, copy->memory, state->bytes);
    }
    return status;
}

ml_status pipeline_overflow(ml_program *program, exchange_overflow *found) {
    struct pipeline_run *run = program->pipeline;
    ml_status status = run->flags_known ? ML_OK : check_flags(program);
    *found = run->overflow;
    return status == ML_OK && found->factor > 0 ? states_restore(program) : status;
}
