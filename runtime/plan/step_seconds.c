/* Estimates of a step's time, by which the planner orders steps (overlap.c) and weighs what to
 * recompute: base/machine.h's rates, those of links from the target where it has them. */
#include "runtime/base/machine.h"
#include "runtime/plan/plan_internal.h"

bool plan_within_host(const ml_layout *layout, const ml_target *target, int axis) {
    int64_t span = 1;
    for (int i = axis; i < layout->count; i++) span *= layout->axis[i].size;
    return span <= (target->host_ranks > 0 ? target->host_ranks : ml_machine_planned.host_gpus);
}

const ml_layout *plan_layout_along(const ml_plan *plan, int axis, int64_t ranks) {
    const ml_layout *own = plan->layout;
    return own != NULL && own->axis[axis].size == ranks ? own : plan->update_layout;
}

double plan_link_speed(const ml_layout *layout, const ml_target *target, int axis) {
    const ml_machine *m = &ml_machine_planned;
    double link = target->link_bytes > 0 ? (double)target->link_bytes : m->link_bytes;
    return plan_within_host(layout, target, axis) ? m->link_share * link : m->network_bytes;
}

static double loop_seconds(const ml_loop *loop, const ml_layout *layout) {
    const ml_schedule *body = loop->plan->schedule;
    double seconds = 0;
    for (uint32_t t = 0; t < body->steps.count; t++) seconds += plan_step_seconds(body, layout, t);
    return seconds * (double)loop->length;
}

double plan_step_seconds(const ml_schedule *s, const ml_layout *layout, uint32_t t) {
    const ml_step *step = &s->steps.at[t];
    if (step->host_copy != NULL) return 0;
    if (step->kind != ML_STEP_COLLECTIVE) {
        const ml_machine *m = &ml_machine_planned;
        if (step->loop && step->loop->plan) return loop_seconds(step->loop, layout);
        double work = step->flops / m->product_flops, moved = (double)step->bytes / m->memory_bytes;
        return m->launch_seconds + (work > moved ? work : moved);
    }
    const ml_collective_step *c = step->collective;
    return ml_step_sent(c) / plan_link_speed(layout, s->target, c->mesh_axis);
}
