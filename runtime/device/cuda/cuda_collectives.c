#ifdef MLUA_CUDA
/* Collectives of an executable: those that follow one another on one mesh axis are one launch;
 * those with a ticket go on their axis' stream, beside the device's stream, between two events. */
#include "runtime/device/cuda/cuda_ce_collectives.h"

enum { MOST_GROUPED = 512 };

/* ---- Groups ---------------------------------------------------------------------------------- */
/* Whether two storages share memory. What one collective has read for the last time, the next one
 * may be placed over. */
static bool share_memory(const ml_schedule *s, uint32_t a, uint32_t b) {
    const ml_storage *one = &s->storages.at[a], *other = &s->storages.at[b];
    if (a == b) return true;
    if (one->kind != ML_STORAGE_TEMPORARY || other->kind != ML_STORAGE_TEMPORARY) return false;
    return one->offset < other->offset + other->bytes && other->offset < one->offset + one->bytes;
}

static bool touches(const ml_schedule *s, const ml_step *step, uint32_t storage) {
    for (int i = 0; i < 2; i++)
        if (share_memory(s, s->values.at[step->values[i]].storage, storage)) return true;
    return false;
}

/* Whether one step needs what the other writes, or writes where the other reads or writes: those of
 * one launch go on at the same time. */
static bool depend(const ml_schedule *s, const ml_step *a, const ml_step *b) {
    uint32_t a_to = s->values.at[a->values[1]].storage, b_to = s->values.at[b->values[1]].storage;
    return touches(s, a, b_to) || touches(s, b, a_to);
}

/* How many collectives from step i on can be one launch. */
static uint32_t group_size(const ml_executable *e, uint32_t i) {
    const ml_schedule *s = e->plan->schedule;
    const ml_collective_step *first = e->steps[i].step->collective;
    uint32_t end = i + 1;
    for (; end < e->step_count && end - i < MOST_GROUPED; end++) {
        const ml_step *step = e->steps[end].step;
        if (step->kind != ML_STEP_COLLECTIVE || step->collective->mesh_axis != first->mesh_axis ||
            !step->collective->ticket != !first->ticket ||
            step->collective->launch != first->launch)
            break;
        bool bound = false;
        for (uint32_t k = i; k < end && !bound; k++) bound = depend(s, e->steps[k].step, step);
        if (bound) break;
    }
    return end - i;
}

void cuda_collect_load(ml_executable *e) {
    for (uint32_t i = 0; i < e->step_count; i++) {
        const ml_step *step = e->steps[i].step;
        if (step->kind != ML_STEP_COLLECTIVE) continue;
        e->collects[step->collective->mesh_axis] = true;
        if (step->collective->ticket > e->ticket_count) e->ticket_count = step->collective->ticket;
    }
    e->tickets = ML_NEW_ARRAY(e->arena, cuda_ticket, (size_t)e->ticket_count + 1);
    for (uint32_t i = 0; i < e->step_count;) {
        if (e->steps[i].step->kind != ML_STEP_COLLECTIVE) {
            i++;
            continue;
        }
        uint32_t size = group_size(e, i), first = e->steps[i].step->collective->ticket;
        e->steps[i].group = size;
        for (uint32_t k = i; k < i + size && first != 0; k++)
            e->tickets[e->steps[k].step->collective->ticket].first = first;
        i += size;
        if (first == 0) continue;
        cuda_ticket *ticket = &e->tickets[first];
        ML_CHECK(CUDA_OK(cuEventCreate(&ticket->ready, CU_EVENT_DISABLE_TIMING)));
        ML_CHECK(CUDA_OK(cuEventCreate(&ticket->done, CU_EVENT_DISABLE_TIMING)));
    }
}

void cuda_collect_unload(ml_executable *e) {
    for (uint32_t i = 1; e->tickets && i <= e->ticket_count; i++) {
        if (e->tickets[i].ready) CUDA_OK(cuEventDestroy(e->tickets[i].ready));
        if (e->tickets[i].done) CUDA_OK(cuEventDestroy(e->tickets[i].done));
    }
}

ml_status cuda_collect_least(ml_executable *e, int64_t *values, int64_t count) {
    ml_device *device = &e->device->base;
    for (int i = 0; i < ML_MAX_MESH; i++) {
        if (!e->collects[i]) continue;
        const ml_collective_step least = {.kind = ML_COLLECTIVE_ALL_REDUCE,
                                          .mesh_axis = i,
                                          .ranks = ml_ranks_row(device->ranks, i).size,
                                          .count = count,
                                          .dtype = ML_I64,
                                          .combine = ML_COMBINE_MIN};
        ML_TRY(cuda_nccl_collect(device, &least, values, values));
    }
    return ML_OK;
}

/* ---- Running --------------------------------------------------------------------------------- */
/* By NCCL; `all`: those too that would go by copies. */
static ml_status enqueue(ml_executable *e, const cuda_step *step, uint32_t count, bool all,
                         CUstream stream) {
    uint32_t calls = 0;
    for (uint32_t i = 0; i < count; i++) calls += all || !step[i].ce;
    if (calls == 0) return ML_OK;
    ML_TRY(cuda_nccl_begin());
    ml_status status = ML_OK;
    for (uint32_t i = 0; i < count && status == ML_OK; i++) {
        if (!all && step[i].ce) continue;
        cuda_doing(step[i].what);
        status = cuda_nccl_enqueue(e->device, step[i].step->collective, step[i].pointers[0],
                                   step[i].pointers[1], stream);
    }
    ml_error error = *ml_error_last();
    ml_status ended = cuda_nccl_end();
    if (status != ML_OK) *ml_error_last() = error;
    return status == ML_OK ? ended : status;
}

/* Before a collective that does not lead: behind those of its axis that do, which a graph has not
 * on its streams. */
static ml_status await_leading(const ml_executable *e, int axis, CUstream stream) {
    if (!e->led || e->last_lead[axis] == 0) return ML_OK;
    CUDA_TRY(cuStreamWaitEvent(stream, e->tickets[e->tickets[e->last_lead[axis]].first].done,
                               e->captures ? CU_EVENT_WAIT_EXTERNAL : CU_EVENT_WAIT_DEFAULT));
    return ML_OK;
}

static ml_status enqueue_here(ml_executable *e, const cuda_step *step, uint32_t count) {
    CUstream stream = e->device->stream;
    ML_TRY(await_leading(e, step->step->collective->mesh_axis, stream));
    ML_TRY(cuda_time_begins(e, step, stream));
    ML_TRY(enqueue(e, step, count, true, stream));
    return cuda_time_ends(e, step, stream);
}

ml_status cuda_collect_alone(ml_executable *e, const cuda_step *step) {
    return enqueue_here(e, step, 1);
}

ml_status cuda_collect_group(ml_executable *e, const cuda_step *step) {
    const ml_collective_step *first = step->step->collective;
    cuda_device *d = e->device;
    if (step->group == 0) return ML_OK; /* went with an earlier one */
    if (first->ticket == 0) return enqueue_here(e, step, step->group);
    CUstream stream = cuda_nccl_axis_stream(d, first->mesh_axis);
    cuda_ticket *ticket = &e->tickets[first->ticket];
    ticket->waited = false;
    if (e->led && first->lead_order != 0) return ML_OK;
    CUDA_TRY(cuEventRecord(ticket->ready, d->stream));
    CUDA_TRY(cuStreamWaitEvent(stream, ticket->ready, 0));
    ML_TRY(await_leading(e, first->mesh_axis, stream));
    ML_TRY(cuda_collect_beside(e, step, stream));
    return first->prefetch ? cuda_prefetch_launched(e, step, stream) : ML_OK;
}

ml_status cuda_collect_beside(ml_executable *e, const cuda_step *step, CUstream stream) {
    cuda_ticket *ticket = &e->tickets[step->step->collective->ticket];
    ML_TRY(cuda_time_begins(e, step, stream));
    ML_TRY(enqueue(e, step, step->group, false, stream));
    ML_TRY(cuda_ce_enqueue(e, step, step->group, stream));
    ML_TRY(cuda_time_ends(e, step, stream));
    CUDA_TRY(cuEventRecord(ticket->done, stream));
    return ML_OK;
}

ml_status cuda_collect_wait(ml_executable *e, const cuda_step *step) {
    cuda_ticket *ticket = &e->tickets[e->tickets[step->step->collective->ticket].first];
    if (ticket->waited) return ML_OK;
    ticket->waited = true;
    const bool outside = e->captures && e->led && step->step->collective->lead_order != 0;
    CUDA_TRY(cuStreamWaitEvent(e->device->stream, ticket->done,
                               outside ? CU_EVENT_WAIT_EXTERNAL : CU_EVENT_WAIT_DEFAULT));
    return ML_OK;
}
#endif
