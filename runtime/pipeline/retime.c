/* What the first steps of a pipeline tell: how long its tasks and messages take, and whether with
 * these times another order is the better one. */
#include <string.h>

#include "runtime/pipeline/plan.h"

typedef struct ml_staged_plan staged_plan;

/* What all stages would have by an order, those of other ranks too. */
static void slots_find(const staged_plan *staged, const ml_pipeline *order, ml_arena *arena,
                       staged_stage *stages) {
    staged_plan trial = *staged;
    trial.pipeline = *order;
    trial.stages = stages;
    memcpy(stages, staged->stages, sizeof *stages * (size_t)staged->count);
    for (int v = 0; v < staged->count; v++) staged_slots(&trial, v, arena);
}

/* Whether all ranks could go by the order with the blocks that they have (`now`), and with the room
 * of the edges. */
static bool fits(const staged_plan *staged, const ml_pipeline *order, const staged_stage *now,
                 ml_arena *arena) {
    staged_stage *stages = ML_NEW_ARRAY(arena, staged_stage, (size_t)staged->count);
    for (int i = 0; i < staged->lane_count; i++)
        if (!staged->lanes[i].local && order->under_way[i] > staged->pipeline.under_way[i])
            return false;
    slots_find(staged, order, arena, stages);
    for (int v = 0; v < staged->count; v++)
        if (stages[v].slots > now[v].slots) return false;
    return true;
}

static void take(ml_plan *plan, const ml_pipeline_problem *timed, int variant) {
    staged_plan *staged = plan->staged;
    ml_pipeline order;
    ml_pipeline_variant(timed, variant, plan->arena, &order);
    staged->pipeline.actions = order.actions;
    for (int v = 0; v < staged->count; v++) {
        int slots = staged->stages[v].slots;
        if (!staged->stages[v].planned) continue;
        staged_slots(staged, v, plan->arena);
        staged->stages[v].slots = slots; /* there are blocks for as many */
    }
}

/* The best order of those that fit, or -1: another one pays once it saves half a percent. Where
 * stages share a rank the order may be part of the result: sums of what several of them use. */
static int best_variant(const staged_plan *staged, const ml_pipeline_problem *timed,
                        ml_arena *arena, staged_forecast *forecast) {
    staged_stage *now = ML_NEW_ARRAY(arena, staged_stage, (size_t)staged->count);
    int best = -1;
    slots_find(staged, &staged->pipeline, arena, now);
    for (int i = 0; i < ML_PIPELINE_VARIANTS && staged->count == staged->ranks; i++) {
        ml_pipeline order;
        double bubble;
        ml_pipeline_variant(timed, i, arena, &order);
        int64_t length =
            ml_pipeline_replay(&staged->problem, &order, &forecast->times, arena, &bubble);
        if (length >= forecast->length - forecast->length_before / 200 ||
            !fits(staged, &order, now, arena))
            continue;
        forecast->length = length;
        forecast->bubble = bubble;
        best = i;
    }
    return best;
}

void staged_measured(ml_plan *plan, const ml_task_time *const *ran, ml_arena *arena,
                     staged_forecast *out) {
    staged_plan *staged = plan->staged;
    memset(out, 0, sizeof *out);
    ml_pipeline_learn(&staged->problem, &staged->pipeline, ran, arena, &out->times);
    out->length = out->length_before =
        ml_pipeline_replay(&staged->problem, &staged->pipeline, &out->times, arena, &out->bubble);
    ml_pipeline_problem timed = ml_pipeline_timed(&staged->problem, &out->times, plan->arena);
    int variant = best_variant(staged, &timed, arena, out);
    out->reordered = variant >= 0;
    if (out->reordered) take(plan, &timed, variant);
}

void staged_times_print(const ml_plan *plan, const staged_forecast *forecast, ml_text *out) {
    const staged_plan *staged = plan->staged;
    const ml_pipeline_times *t = &forecast->times;
    for (int i = 0; i < staged->task_count; i++)
        ml_text_add(out,
                    "stage %d task %d%s: %.3f ms (planned share %lld), after a pause of %.3f ms\n",
                    staged->tasks[i].stage, i - staged->stages[staged->tasks[i].stage].first_task,
                    staged->tasks[i].late ? ", late" : "", 1e-6 * (double)t->task[i],
                    (long long)staged->tasks[i].cost, 1e-6 * (double)t->pause[i]);
    for (int i = 0; i < staged->lane_count; i++) {
        const staged_lane *lane = &staged->lanes[i];
        if (lane->local) continue;
        ml_text_add(out, "message from stage %d to stage %d: %lld bytes, %.3f ms\n", lane->from,
                    lane->to, (long long)lane->bytes, 1e-6 * (double)t->delay[i]);
    }
    ml_text_add(out, "a step of these times: %.3f ms, bubble %.1f%%",
                1e-6 * (double)forecast->length, 100 * forecast->bubble);
    ml_text_add(out, ", with %.2f of the pauses and messages that were seen", t->share);
    if (forecast->reordered)
        ml_text_add(out, ", in another order than before (%.3f ms)",
                    1e-6 * (double)forecast->length_before);
    ml_text_add(out, "\n");
}
