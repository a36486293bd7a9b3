/* The time of a plan: its steps in order, and of a pipeline its tasks in the order of the schedule.
 *
 * Computation is one stream, and each mesh axis has one of its own for its collectives, as
 * plan/overlap.c assumes. A collective with a ticket runs beside the steps that follow until its
 * WAIT; beside it computation takes longer, by beside_share, for its bytes pass the same memory,
 * and so does the collective, by beside_link; what is left of it at its WAIT runs alone. Where
 * collectives lead, the plan begins at the time 0, and they before it. */
#include <math.h>

#include "runtime/base/machine.h"
#include "runtime/pipeline/plan.h"
#include "runtime/plan/host_copies.h"
#include "runtime/predict/predict.h"

typedef struct {
    const predict_basis *by;
    const ml_schedule *s;
    const ml_layout *layout;
    /* Until when the collectives of each mesh axis last, and each one by its ticket, were there
     * computation beside them all that time; and how much earlier it is because there was none. */
    double now, stream[ML_MAX_MESH], *end, early[ML_MAX_MESH];
    double host[2], *host_end; /* of copies to the host and back */
    double *final;             /* by state: when its sum of gradients was last written; NULL where
                                  none is added up beside a microbatch */
    double *ready;             /* by state: when it is prefetched; NULL: none is */
    int ready_axis;            /* along which */
    bool sends;                /* the microbatch before has collectives of its own */
    ml_prediction *out;
} replay;

static void wait_until(replay *r, double when, double *waited) {
    if (when <= r->now) return;
    *waited += when - r->now;
    r->now = when;
}

static double beside_link(const replay *r) {
    return r->by->rates->beside_link > 0 ? r->by->rates->beside_link : 1;
}

/* For collectives of a mesh axis, which nothing delays meanwhile. */
static void wait_for(replay *r, int axis, double end) {
    double left = end - r->early[axis] - r->now;
    if (left <= 0) return;
    r->early[axis] += left * (1 - beside_link(r));
    wait_until(r, r->now + left * beside_link(r), &r->out->exposed);
}

/* Those that follow one another without a ticket are one launch too. */
static bool begins_launch(const replay *r, uint32_t at, uint32_t launch) {
    const ml_collective_step *c = r->s->steps.at[at].collective;
    const ml_step *before = at > 0 ? &r->s->steps.at[at - 1] : NULL;
    if (c->ticket != 0) return c->launch != launch;
    return before == NULL || before->kind != ML_STEP_COLLECTIVE ||
           before->collective->ticket != 0 || before->collective->mesh_axis != c->mesh_axis;
}

static void collective(replay *r, const ml_collective_step *c, bool begins) {
    int axis = c->mesh_axis;
    double seconds = predict_collective(r->by->rates, r->s->target, r->layout, axis, c->ranks,
                                        ml_step_sent(c), begins);
    double *stream = &r->stream[axis], now = r->now + r->early[axis];
    if (c->ticket == 0) {
        wait_for(r, axis, *stream);
        wait_until(r, r->now + seconds, &r->out->exposed);
    } else {
        seconds /= beside_link(r);
        r->end[c->ticket] = *stream = (*stream > now ? *stream : now) + seconds;
    }
    r->out->sent += seconds;
}

/* One that leads, beside the microbatch before the plan, which takes longer for it. */
static void leading(replay *r, const ml_step *step, uint32_t launch) {
    const ml_collective_step *c = step->collective;
    const ml_storage *sum = &r->s->storages.at[r->s->values.at[step->values[0]].storage];
    double *stream = &r->stream[c->mesh_axis], *final = &r->final[sum->id];
    double seconds = predict_collective(r->by->rates, r->s->target, r->layout, c->mesh_axis,
                                        c->ranks, ml_step_sent(c), c->launch != launch) /
                     beside_link(r);
    double begin = *stream > *final ? *stream : *final;
    if (r->sends && predict_leaves_host(r->by->rates, r->s->target, r->layout, c->mesh_axis))
        begin = begin > 0 ? begin : 0; /* NCCL's are not beside other NCCL's */
    const double hidden = fmin(begin + seconds, 0) - fmin(begin, 0);
    r->end[c->ticket] = *stream = *final = begin + seconds;
    r->now += hidden * (1 - 1 / (1 + r->by->rates->beside_share));
    r->out->sent += seconds;
}

/* A copy between the device and the host, in the stream of its direction. */
static void host_copy(replay *r, const ml_host_copy *c) {
    double *stream = &r->host[c->back];
    double rate =
        r->by->rates->host_bytes > 0 ? r->by->rates->host_bytes : r->by->rates->copy_bytes / 2;
    const bool stages = r->layout != NULL && r->layout->stages.on;
    rate = fmin(rate, host_copy_share(r->s->target, r->layout, stages));
    double seconds = r->by->rates->launch_seconds + (double)c->bytes / rate;
    *stream = (*stream > r->now ? *stream : r->now) + seconds;
    r->out->copied += seconds;
    r->host_end[c->ticket] = *stream;
}

/* The prefetches of what the step reads. */
static void wait_for_states(replay *r, const ml_step *step) {
    for (int i = 0; r->ready && i < step->read_count; i++) {
        const ml_storage *from = &r->s->storages.at[r->s->values.at[step->values[i]].storage];
        if (from->kind == ML_STORAGE_STATE) wait_for(r, r->ready_axis, r->ready[from->id]);
    }
}

/* Computation, some of it beside collectives and copies. */
static void compute(replay *r, uint32_t at) {
    predict_kind kind = PREDICT_SIMPLE;
    double seconds = predict_step(r->by, r->s, r->layout, at, &kind), busy = r->now;
    for (int i = 0; i < ML_MAX_MESH; i++) {
        double until = r->stream[i] - r->early[i];
        busy = until > busy ? until : busy;
    }
    double beside = busy - r->now, slow = 1 + r->by->rates->beside_share;
    if (beside > seconds * slow) beside = seconds * slow;
    seconds += beside * (1 - 1 / slow);
    busy = r->host[0] > r->host[1] ? r->host[0] : r->host[1];
    if (busy > r->now)
        seconds +=
            ml_machine_planned.host_beside * (busy - r->now < seconds ? busy - r->now : seconds);
    r->now += seconds;
    r->out->busy[kind] += seconds;
}

static void replay_step(replay *r, uint32_t i, uint32_t *launch) {
    const ml_step *step = &r->s->steps.at[i];
    if (step->kind == ML_STEP_COLLECTIVE) {
        const ml_collective_step *c = step->collective;
        if (c->lead_order != 0 && c->ticket != 0 && r->by->microbatch)
            leading(r, step, *launch);
        else
            collective(r, c, begins_launch(r, i, *launch));
        *launch = c->launch;
    } else if (step->kind == ML_STEP_WAIT) {
        if (step->host_copy)
            wait_until(r, r->host_end[step->host_copy->ticket], &r->out->held);
        else
            wait_for(r, step->collective->mesh_axis, r->end[step->collective->ticket]);
    } else if (step->kind == ML_STEP_HOST_COPY) {
        host_copy(r, step->host_copy);
    } else {
        wait_for_states(r, step);
        compute(r, i);
    }
}

static bool is_sum(const ml_schedule *s, const ml_storage *storage) {
    return storage->kind == ML_STORAGE_STATE &&
           ml_graph_state(s->graph, storage->id)->kind == ML_STATE_GRADIENT;
}

static double *finals_new(const ml_schedule *s, ml_arena *arena) {
    return ML_NEW_ARRAY(arena, double, (size_t)ml_graph_state_count(s->graph) + 1);
}

/* Sums that the step writes are final now, unless a later one writes them. */
static void sums_note(replay *r, const ml_step *step) {
    for (int w = 0; w < step->write_count; w++) {
        const uint32_t value = step->values[step->read_count + w];
        const ml_storage *storage = &r->s->storages.at[r->s->values.at[value].storage];
        if (is_sum(r->s, storage)) r->final[storage->id] = r->now;
    }
}

static void replay_begin(replay *r, const predict_basis *by, const ml_plan *part, ml_arena *arena,
                         ml_prediction *out) {
    const ml_schedule *s = part->schedule;
    uint32_t tickets = 0, copies = 0;
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_collective_step *c = s->steps.at[i].collective;
        if (c && c->ticket > tickets) tickets = c->ticket;
        copies += s->steps.at[i].kind == ML_STEP_HOST_COPY;
    }
    *r = (replay){.by = by, .s = s, .layout = part->layout, .out = out};
    r->end = ML_NEW_ARRAY(arena, double, (size_t)tickets + 1);
    r->host_end = ML_NEW_ARRAY(arena, double, (size_t)copies + 1);
}

/* How long before its end a microbatch's program has written each sum for the last time. */
static void replay_sums(const predict_basis *by, const ml_plan *microbatch, ml_arena *arena,
                        replay *r) {
    const uint32_t states = ml_graph_state_count(r->s->graph);
    ml_prediction unused = {0};
    predict_basis alone = *by;
    alone.microbatch = NULL;
    replay m;
    uint32_t launch = 0;
    replay_begin(&m, &alone, microbatch, arena, &unused);
    m.final = finals_new(m.s, arena);
    for (uint32_t i = 0; i < m.s->steps.count; i++) {
        replay_step(&m, i, &launch);
        r->sends |= m.s->steps.at[i].kind == ML_STEP_COLLECTIVE;
        sums_note(&m, &m.s->steps.at[i]);
    }
    for (uint32_t i = 0; i < states && i < ml_graph_state_count(m.s->graph); i++)
        r->final[i] = m.final[i] > 0 ? m.final[i] - m.now : 0;
    for (int i = 0; i < ML_MAX_MESH; i++) r->stream[i] = m.stream[i] - m.early[i] - m.now;
}

/* How much longer a microbatch takes that begins when the rebuild `r` has computed and started its
 * prefetches. */
static double beside_microbatch(const predict_basis *by, replay *r, ml_arena *arena) {
    double seconds[2];
    predict_basis alone = *by;
    alone.microbatch = NULL;
    for (int beside = 0; beside < 2; beside++) {
        ml_prediction unused = {0};
        replay m;
        uint32_t launch = 0;
        replay_begin(&m, &alone, by->microbatch, arena, &unused);
        if (beside) {
            m.ready = ML_NEW_ARRAY(arena, double, (size_t)ml_graph_state_count(m.s->graph) + 1);
            for (uint32_t t = 0; t < r->s->steps.count; t++) {
                const ml_step *step = &r->s->steps.at[t];
                const ml_collective_step *c = step->collective;
                if (step->kind != ML_STEP_COLLECTIVE || !c->prefetch) continue;
                const uint32_t value = step->values[1];
                m.ready[r->s->storages.at[r->s->values.at[value].storage].id] =
                    r->end[c->ticket] - r->now;
                m.ready_axis = c->mesh_axis;
            }
            m.stream[m.ready_axis] = r->stream[m.ready_axis] - r->now;
        }
        for (uint32_t i = 0; i < m.s->steps.count; i++) replay_step(&m, i, &launch);
        for (int i = 0; i < ML_MAX_MESH; i++) wait_for(&m, i, m.stream[i]);
        seconds[beside] = m.now;
    }
    return seconds[1] - seconds[0];
}

static bool has_any(const ml_schedule *s, bool leads) {
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_collective_step *c = s->steps.at[t].collective;
        if (s->steps.at[t].kind == ML_STEP_COLLECTIVE && (leads ? c->lead_order != 0 : c->prefetch))
            return true;
    }
    return false;
}

static void replay_part(const predict_basis *by, const ml_plan *part, ml_arena *arena,
                        ml_prediction *out) {
    replay r;
    uint32_t launch = 0;
    const bool leads = by->microbatch && has_any(part->schedule, true);
    replay_begin(&r, by, part, arena, out);
    if (leads) r.final = finals_new(r.s, arena);
    if (leads && by->microbatch->schedule) replay_sums(by, by->microbatch, arena, &r);
    for (uint32_t i = 0; i < r.s->steps.count; i++) replay_step(&r, i, &launch);
    if (by->microbatch && by->microbatch->schedule && has_any(part->schedule, false)) {
        const double more = beside_microbatch(by, &r, arena);
        out->exposed += more;
        r.now += more;
    } else {
        for (int i = 0; i < ML_MAX_MESH; i++) wait_for(&r, i, r.stream[i]);
    }
    out->seconds += r.now;
}

/* ---- Pipelines ---- */
static const double UNIT = 1e-9; /* schedules count nanoseconds */

/* What a task's computation is for all its ranks and microbatches, summed; its one run. */
static double task_seconds(const predict_basis *by, const ml_plan *task, double times,
                           ml_arena *arena, ml_prediction *sum) {
    ml_prediction one = {0};
    replay_part(by, task, arena, &one);
    predict_add(sum, &one, times);
    return one.seconds;
}

/* Whether messages between two coordinates of the stages' mesh axis leave a host: ranks of a host
 * are neighbours, and the axes behind this one are within it. */
static bool leaves_host(const ml_rates *rates, const ml_plan *plan, int from, int to) {
    const ml_layout *layout = plan->layout;
    int64_t stride = 1,
            host = plan->target->host_ranks > 0 ? plan->target->host_ranks : rates->host_ranks;
    for (int i = layout->stages.mesh_axis + 1; i < layout->count; i++)
        stride *= layout->axis[i].size;
    return from * stride / host != to * stride / host;
}

static double message_seconds(const ml_rates *rates, const ml_plan *plan,
                              const pipeline_channel *channel) {
    int ranks = plan->pipeline->ranks;
    if (channel->local) return 0;
    bool far = leaves_host(rates, plan, channel->from % ranks, channel->to % ranks);
    double rate = far ? rates->network_bytes : rates->link_bytes;
    return (far ? rates->network_seconds : rates->link_seconds) + (double)channel->bytes / rate;
}

static void times_of_tasks(const predict_basis *by, const ml_plan *plan, ml_arena *arena,
                           int64_t *task, ml_prediction *out) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    for (int v = 0; v < p->count; v++) {
        const pipeline_stage *stage = pipeline_representative(p, v);
        for (int i = 0; i < stage->task_count; i++) {
            double seconds = task_seconds(by, stage->plans[i], p->microbatches, arena, out);
            int64_t units = (int64_t)(seconds / UNIT);
            task[p->stages[v].first_task + i] = units > 0 ? units : 1;
        }
    }
}

/* What is computed once a step, by the rank that takes longest; *waits: the mean time that ranks
 * wait for it. */
static double once_seconds(const predict_basis *by, const ml_plan *plan, ml_arena *arena,
                           double *waits, ml_prediction *out) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    double longest = 0, sum = 0;
    for (int rank = 0; rank < p->ranks; rank++) {
        double seconds = 0;
        for (int v = rank; v < p->count; v += p->ranks) {
            const ml_plan *once = pipeline_once_per_step(p, v);
            if (once) seconds += task_seconds(by, once, 1, arena, out);
        }
        longest = seconds > longest ? seconds : longest;
        sum += seconds;
    }
    *waits = longest - sum / p->ranks;
    return longest;
}

static void predict_pipeline(const predict_basis *by, const ml_plan *plan, ml_arena *arena,
                             ml_prediction *out) {
    const struct ml_pipeline_plan *p = plan->pipeline;
    ml_pipeline_times times = {
        .task = ML_NEW_ARRAY(arena, int64_t, (size_t)p->task_count + 1),
        .pause = ML_NEW_ARRAY(arena, int64_t, (size_t)p->task_count + 1),
        .delay = ML_NEW_ARRAY(arena, int64_t, (size_t)p->problem.edge_count + 1),
        .share = 1,
    };
    times_of_tasks(by, plan, arena, times.task, out);
    for (int i = 0; i < p->channel_count; i++)
        times.delay[i] = (int64_t)(message_seconds(by->rates, plan, &p->channels[i]) / UNIT);
    double bubble, waits, share = 1.0 / p->ranks;
    int64_t length = ml_pipeline_replay(&p->problem, &p->schedule, &times, arena, &bubble);
    double once = once_seconds(by, plan, arena, &waits, out);
    for (int i = 0; i < PREDICT_KINDS; i++) out->busy[i] *= share;
    out->exposed *= share;
    out->sent *= share;
    out->copied *= share;
    out->held *= share;
    out->seconds = (double)length * UNIT + once;
    if (out->seconds > 0) out->bubble = (bubble * (double)length * UNIT + waits) / out->seconds;
}

/* ---- A program ---- */
typedef struct {
    const predict_basis *by;
    const ml_plan *plan;
    ml_arena *scratch;
    ml_prediction *out;
} prediction_call;

static void predict_body(void *context) {
    const prediction_call *call = context;
    if (call->plan->pipeline)
        predict_pipeline(call->by, call->plan, call->scratch, call->out);
    else
        replay_part(call->by, call->plan, call->scratch, call->out);
    /* Which wait for the slowest of them. */
    int64_t ranks = call->plan->layout ? ml_layout_ranks(call->plan->layout) : 1;
    double spread = call->by->rates->rank_spread * log2((double)ranks);
    call->out->exposed += spread * call->out->seconds;
    call->out->seconds *= 1 + spread;
    call->out->bubble /= 1 + spread;
}

static void microbatch_body(void *context) {
    const prediction_call *call = context;
    const struct ml_pipeline_plan *p = call->plan->pipeline;
    for (int rank = 0; rank < p->ranks; rank++) {
        ml_prediction own = {0};
        for (int v = rank; v < p->count; v += p->ranks) {
            const pipeline_stage *stage = pipeline_representative(p, v);
            for (int i = 0; i < stage->task_count && stage->plans != NULL; i++)
                task_seconds(call->by, stage->plans[i], 1, call->scratch, &own);
        }
        if (own.seconds > call->out->seconds) *call->out = own;
    }
}

static void predict_in_scratch(const predict_basis *by, const ml_plan *plan, void (*body)(void *),
                               ml_prediction *out) {
    *out = (ml_prediction){0};
    prediction_call call = {by, plan, ml_arena_new(), out};
    if (call.scratch == NULL) ml_raise(ML_NO_MEMORY, "out of memory while predicting a step");
    ml_status status = ml_protect(body, &call);
    ml_arena_free(call.scratch);
    if (status != ML_OK) ml_raise_last();
    if (plan->fewer == NULL) return;
    ml_prediction few = *out, fewer;
    predict_in_scratch(by, plan->fewer, body, &fewer);
    predict_add(out, &few, plan->beyond);
    predict_add(out, &fewer, -plan->beyond);
}

void predict_plan(const predict_basis *by, const ml_plan *plan, ml_prediction *out) {
    predict_in_scratch(by, plan, predict_body, out);
}

void predict_microbatch(const predict_basis *by, const ml_plan *plan, ml_prediction *out) {
    predict_in_scratch(by, plan, plan->pipeline ? microbatch_body : predict_body, out);
}

/* Shares of the sum's time. */
void predict_add(ml_prediction *sum, const ml_prediction *one, double times) {
    double seconds = sum->seconds + times * one->seconds;
    if (seconds > 0)
        sum->bubble = (sum->bubble * sum->seconds + one->bubble * times * one->seconds) / seconds;
    sum->seconds = seconds;
    sum->exposed += times * one->exposed;
    sum->sent += times * one->sent;
    sum->copied += times * one->copied;
    sum->held += times * one->held;
    for (int i = 0; i < PREDICT_KINDS; i++) sum->busy[i] += times * one->busy[i];
}
