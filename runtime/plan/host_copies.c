/* Steps that copy to host memory and back: their times and their form. */
#include "runtime/plan/host_copies.h"

#include <math.h>

#include "runtime/base/machine.h"
#include "runtime/plan/plan_internal.h"

double host_copy_share(const ml_target *target, const ml_layout *layout, bool stages) {
    const ml_machine *m = &ml_machine_planned;
    int64_t ranks = layout != NULL ? ml_layout_ranks(layout) : 1;
    int64_t host = target->host_ranks > 0 ? target->host_ranks : m->host_gpus;
    if (target->kind != ML_TARGET_CUDA) return INFINITY;
    if (ranks > host) ranks = host;
    if (ranks > m->host_gpus / m->host_sockets) ranks = m->host_gpus / m->host_sockets;
    return (stages ? m->host_both_bytes / 2 : m->host_memory_bytes) / (double)ranks;
}

double host_copy_rate(const ml_target *target, const ml_layout *layout, bool stages) {
    double link = (double)target->host_bytes, share = host_copy_share(target, layout, stages);
    return share < link ? share : link;
}

double host_copy_seconds(double rate, int64_t bytes) {
    return ml_machine_planned.launch_seconds + (double)bytes / rate;
}

double *host_copy_clock(const ml_schedule *s, const ml_layout *layout, ml_arena *arena) {
    const double fast = 0.8;
    double *clock = ML_NEW_ARRAY(arena, double, (size_t)s->steps.count + 2);
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        bool beside = step->kind == ML_STEP_WAIT ||
                      (step->collective != NULL && step->collective->ticket > 0);
        clock[t + 1] = clock[t] + (beside ? 0 : fast * plan_step_seconds(s, layout, t));
    }
    return clock;
}

uint32_t host_copy_step_after(const double *clock, uint32_t from, uint32_t to, double when) {
    while (from < to) {
        uint32_t middle = from + (to - from) / 2;
        if (clock[middle] < when)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

uint32_t host_copy_tickets(const ml_schedule *s) {
    uint32_t last = 0;
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_host_copy *copy = s->steps.at[t].host_copy;
        if (copy != NULL && copy->ticket > last) last = copy->ticket;
    }
    return last;
}

const ml_host_copy *host_copy_new(ml_schedule *s, uint32_t ticket, bool back, int64_t bytes) {
    ml_host_copy *made = ML_NEW(s->arena, ml_host_copy);
    *made = (ml_host_copy){.back = back, .ticket = ticket, .bytes = bytes};
    return made;
}

uint32_t host_copy_storage(ml_schedule *s, ml_storage_kind kind, uint32_t like) {
    const ml_storage *of = &s->storages.at[like];
    const ml_storage made = {.kind = kind, .bytes = of->bytes, .node = of->node};
    *ML_PUSH(s->arena, &s->storages) = made;
    return s->storages.count - 1;
}

/* The storage as an operand: what it holds is of no account. */
static uint32_t operand_add(ml_schedule *s, uint32_t storage) {
    const ml_value made = {.type = {.dtype = ML_I32}, .storage = storage};
    *ML_PUSH(s->arena, &s->values) = made;
    return s->values.count - 1;
}

ml_step host_copy_step(ml_schedule *s, const ml_host_copy *copy, bool waits, uint32_t device,
                       uint32_t host) {
    ml_step step = {.kind = waits ? ML_STEP_WAIT : ML_STEP_HOST_COPY,
                    .node = s->storages.at[device].node,
                    .read_count = waits ? 2 : 1,
                    .write_count = !waits,
                    .host_copy = copy,
                    .bytes = waits ? 0 : copy->bytes};
    step.values = ML_NEW_ARRAY(s->arena, uint32_t, 2);
    step.values[0] = operand_add(s, copy->back ? host : device);
    step.values[1] = operand_add(s, copy->back ? device : host);
    step.may_alias = ML_NEW(s->arena, uint64_t);
    return step;
}
