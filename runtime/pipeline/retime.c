/* A step's forecast from the measured times of the first steps, and a better order of actions where
 * these times favour one. */
#include <string.h>

#include "runtime/pipeline/pipeline_internal.h"

/* The slots of all stages under an order, those of other ranks too. */
static void slots_find(const pipeline_plan *pipeline, const ml_pipeline_schedule *order,
                       ml_arena *arena, pipeline_stage *stages) {
    pipeline_plan trial = *pipeline;
    trial.schedule = *order;
    trial.stages = stages;
    memcpy(stages, pipeline->stages, sizeof *stages * (size_t)pipeline->count);
    for (int v = 0; v < pipeline->count; v++) pipeline_slots_assign(&trial, v, arena);
}

/* Whether the buffers (`now`) and the room of channels that all ranks have suffice for the order.
 */
static bool fits(const pipeline_plan *pipeline, const ml_pipeline_schedule *order,
                 const pipeline_stage *now, ml_arena *arena) {
    pipeline_stage *stages = ML_NEW_ARRAY(arena, pipeline_stage, (size_t)pipeline->count);
    for (int i = 0; i < pipeline->channel_count; i++)
        if (!pipeline->channels[i].local && order->in_flight[i] > pipeline->schedule.in_flight[i])
            return false;
    slots_find(pipeline, order, arena, stages);
    for (int v = 0; v < pipeline->count; v++)
        if (stages[v].slots > now[v].slots) return false;
    return true;
}

static void take(ml_plan *plan, const ml_pipeline_problem *timed, int number) {
    pipeline_plan *pipeline = plan->pipeline;
    ml_pipeline_schedule order;
    ml_pipeline_schedule_by_order(timed, number, plan->arena, &order);
    pipeline->schedule.actions = order.actions;
    for (int v = 0; v < pipeline->count; v++) {
        int slots = pipeline->stages[v].slots;
        if (!pipeline->stages[v].planned) continue;
        pipeline_slots_assign(pipeline, v, plan->arena);
        pipeline->stages[v].slots = slots; /* there are buffers for as many */
    }
}

/* The best order of those that fit, or -1: it must save half a percent. Where several stages share
 * a rank the order may affect results (sums of what several of them use), and is not changed. */
static int best_order(const pipeline_plan *pipeline, const ml_pipeline_problem *timed,
                      ml_arena *arena, pipeline_forecast *forecast) {
    pipeline_stage *now = ML_NEW_ARRAY(arena, pipeline_stage, (size_t)pipeline->count);
    int best = -1, orders = ml_schedules[timed->kind].order_count;
    slots_find(pipeline, &pipeline->schedule, arena, now);
    for (int i = 0; i < orders && pipeline->count == pipeline->ranks; i++) {
        ml_pipeline_schedule order;
        double bubble;
        ml_pipeline_schedule_by_order(timed, i, arena, &order);
        int64_t length =
            ml_pipeline_replay(&pipeline->problem, &order, &forecast->times, arena, &bubble);
        if (length >= forecast->length - forecast->length_before / 200 ||
            !fits(pipeline, &order, now, arena))
            continue;
        forecast->length = length;
        forecast->bubble = bubble;
        best = i;
    }
    return best;
}

void pipeline_retime(ml_plan *plan, const ml_task_time *const *ran, ml_arena *arena,
                     pipeline_forecast *out) {
    pipeline_plan *pipeline = plan->pipeline;
    memset(out, 0, sizeof *out);
    ml_pipeline_times_learn(&pipeline->problem, &pipeline->schedule, ran, arena, &out->times);
    out->length = out->length_before = ml_pipeline_replay(&pipeline->problem, &pipeline->schedule,
                                                          &out->times, arena, &out->bubble);
    ml_pipeline_problem timed =
        ml_pipeline_problem_timed(&pipeline->problem, &out->times, plan->arena);
    int number = best_order(pipeline, &timed, arena, out);
    out->reordered = number >= 0;
    if (out->reordered) take(plan, &timed, number);
}

void pipeline_times_print(const ml_plan *plan, const pipeline_forecast *forecast, ml_text *out) {
    const pipeline_plan *pipeline = plan->pipeline;
    const ml_pipeline_times *t = &forecast->times;
    for (int i = 0; i < pipeline->task_count; i++)
        ml_text_add(
            out, "stage %d task %d%s: %.3f ms (planned share %lld), after a pause of %.3f ms\n",
            pipeline->tasks[i].stage, i - pipeline->stages[pipeline->tasks[i].stage].first_task,
            pipeline->tasks[i].weight_grad ? ", weight gradients" : "", 1e-6 * (double)t->task[i],
            (long long)pipeline->tasks[i].cost, 1e-6 * (double)t->pause[i]);
    for (int i = 0; i < pipeline->channel_count; i++) {
        const pipeline_channel *channel = &pipeline->channels[i];
        if (channel->local) continue;
        ml_text_add(out, "message from stage %d to stage %d: %lld bytes, %.3f ms\n", channel->from,
                    channel->to, (long long)channel->bytes, 1e-6 * (double)t->delay[i]);
    }
    ml_text_add(out, "a step of these times: %.3f ms, bubble %.1f%%",
                1e-6 * (double)forecast->length, 100 * forecast->bubble);
    ml_text_add(out, ", with %.2f of the pauses and messages that were seen", t->share);
    if (forecast->reordered)
        ml_text_add(out, ", in another order than before (%.3f ms)",
                    1e-6 * (double)forecast->length_before);
    ml_text_add(out, "\n");
}
