#ifdef MLUA_CUDA
/* Collectives that start before their program does (codegen/lower/lower.h: lead_order): sums of
 * gradients over ranks, beside the backward pass of the last microbatch.
 *
 * A program that writes sums of gradients records events on the device's stream as it uses them for
 * the last time, some MARKS. The program that applies them puts its leading collectives on their
 * axes' streams before its own graph or steps, each launch behind the events of its operands.
 * Whatever is not known to be in order otherwise waits for the whole stream. */
#include "runtime/base/knobs.h"
#include "runtime/device/cuda/cuda_ce_collectives.h"
#include "runtime/plan/dependencies.h"

enum { NONE = UINT32_MAX, MARKS = 64 };

/* ---- Programs that write sums ---------------------------------------------------------------- */
static bool writes_sums(const ml_plan *plan) {
    for (int i = 0; i < plan->roots.update_count; i++)
        if (ml_graph_state(plan->schedule->graph, plan->roots.updates[i].state)->kind ==
            ML_STATE_GRADIENT)
            return true;
    return false;
}

/* Those that lead, and which of them wait for one another. */
static void leaders_find(ml_executable *e) {
    const ml_schedule *s = e->plan->schedule;
    uint32_t *ticket = ML_NEW_ARRAY(e->arena, uint32_t, (size_t)s->storages.count + 1);
    for (uint32_t t = 0; t < e->step_count; t++) {
        const ml_step *step = e->steps[t].step;
        if (step->kind != ML_STEP_COLLECTIVE || step->collective->lead_order == 0) continue;
        if (step->collective->ticket == 0) continue;
        e->leads = true;
        e->last_lead[step->collective->mesh_axis] = step->collective->ticket;
        e->steps[t].leader = ticket[s->values.at[step->values[0]].storage];
        ticket[s->values.at[step->values[1]].storage] = step->collective->ticket;
    }
}

void cuda_lead_load(ml_executable *e) {
    const ml_plan *plan = e->plan;
    leaders_find(e);
    if (e->leads || !e->device->nccl || plan->pipeline_task || !cuda.cuEventRecordWithFlags) return;
    if (!writes_sums(plan)) return;
    const uint32_t states = ml_graph_state_count(plan->schedule->graph);
    uint32_t *last = state_last_uses(plan->schedule, plan->roots.output_count, e->arena);
    int64_t *final = ML_NEW_ARRAY(e->arena, int64_t, e->step_count + 1), all = 0, bytes = 0;
    for (uint32_t i = 0; i < plan->states.count; i++) {
        const ml_held_state *state = &plan->states.at[i];
        if (state->kind != ML_MEMORY_GRADIENTS || last[state->id] == 0) continue;
        final[last[state->id]] += state->bytes; /* behind so many steps */
        all += state->bytes;
    }
    for (uint32_t t = 0; t < e->step_count; t++) {
        bytes += final[t + 1];
        if (bytes * MARKS < all && t + 1 < e->step_count) continue;
        cuda_sum_mark *mark = ML_PUSH(e->arena, &e->marks);
        mark->step = t;
        ML_CHECK(CUDA_OK(cuEventCreate(&mark->event, CU_EVENT_DISABLE_TIMING)));
        bytes = 0;
    }
    for (uint32_t i = 0; i < states; i++) { /* from now on by mark: the first one behind the step */
        uint32_t m = 0;
        while (last[i] > 0 && e->marks.at[m].step + 1 < last[i]) m++;
        last[i] = last[i] > 0 ? m : NONE;
    }
    e->sum_marks = last;
    e->sum_count = states;
}

void cuda_lead_unload(ml_executable *e) {
    if (e->device->marked == e) e->device->marked = NULL;
    for (uint32_t i = 0; i < e->marks.count; i++)
        if (e->marks.at[i].event) CUDA_OK(cuEventDestroy(e->marks.at[i].event));
}

ml_status cuda_lead_mark(const ml_executable *e, uint32_t step, uint32_t *next) {
    if (*next == e->marks.count || e->marks.at[*next].step != step) return ML_OK;
    CUDA_TRY(cuEventRecordWithFlags(e->marks.at[(*next)++].event, e->device->stream,
                                    e->captures ? CU_EVENT_RECORD_EXTERNAL : 0));
    return ML_OK;
}

/* ---- Programs that apply them ---------------------------------------------------------------- */
/* The mark behind which the operand of a collective is final; NONE: none is known. */
static uint32_t mark_of(const ml_executable *e, const cuda_step *step) {
    const ml_executable *by = e->behind;
    const ml_schedule *s = e->plan->schedule;
    const ml_storage *sum = &s->storages.at[s->values.at[step->step->values[0]].storage];
    return sum->id < by->sum_count ? by->sum_marks[sum->id] : NONE;
}

/* Whether a launch may go on beside the last microbatch. NCCL's kernels of two communicators have
 * no common order on all ranks; and a graph has what it sends on streams of its own. */
static bool may_go_beside(const ml_executable *by, const cuda_step *step) {
    bool sends = false, copies = true;
    for (int i = 0; by && i < ML_MAX_MESH; i++) sends |= by->collects[i];
    for (uint32_t i = 0; i < step->group; i++) copies &= step[i].ce != NULL;
    return by && (copies || !sends) &&
           !(by->graph && by->collects[step->step->collective->mesh_axis]);
}

static ml_status await_leaders(const ml_executable *e, const cuda_step *step, CUstream stream) {
    uint32_t last = 0;
    for (uint32_t i = 0; i < step->group; i++) {
        const uint32_t first = e->tickets[step[i].leader].first;
        if (step[i].leader == 0 || first == last) continue;
        CUDA_TRY(cuStreamWaitEvent(stream, e->tickets[first].done, 0));
        last = first;
    }
    return ML_OK;
}

/* The stream waits for the operands of a launch. */
static ml_status await_sums(ml_executable *e, const cuda_step *step, CUstream stream) {
    cuda_device *d = e->device;
    const ml_executable *by = e->behind;
    uint32_t last = 0;
    bool known = may_go_beside(by, step);
    ML_TRY(await_leaders(e, step, stream));
    for (uint32_t i = 0; i < step->group && known; i++) {
        const uint32_t mark = mark_of(e, &step[i]);
        known = mark != NONE;
        if (known && mark > last) last = mark;
    }
    if (known) { /* marks are recorded in order */
        CUDA_TRY(cuStreamWaitEvent(stream, by->marks.at[last].event, 0));
        return ML_OK;
    }
    cuda_ticket *ticket = &e->tickets[step->step->collective->ticket];
    CUDA_TRY(cuEventRecord(ticket->ready, d->stream));
    CUDA_TRY(cuStreamWaitEvent(stream, ticket->ready, 0));
    return ML_OK;
}

ml_status cuda_lead_start(ml_executable *e) {
    enum { FIRST = 1 };
    for (uint32_t t = 0; t < e->step_count && e->leads; t++) {
        const cuda_step *step = &e->steps[t];
        if (step->step->kind != ML_STEP_COLLECTIVE || step->step->collective->lead_order == 0)
            continue;
        if (step->group == 0) continue;
        CUstream stream = cuda_nccl_axis_stream(e->device, step->step->collective->mesh_axis);
        ML_TRY(await_sums(e, step, stream));
        ML_TRY(cuda_collect_beside(e, step, stream));
    }
    if (e->leads && e->runs == FIRST)
        ml_debug(1, "lead: collectives of program \"%s\" begin beside the run before: %s\n",
                 e->plan->roots.name ? e->plan->roots.name : "", e->behind ? "yes" : "no");
    return ML_OK;
}
#endif
