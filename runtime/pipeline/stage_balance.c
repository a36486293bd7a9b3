/* Contiguous parts to stages, so that the most expensive stage costs as little as possible, and the
 * others come near to equal shares. */
#include <math.h>
#include <string.h>

#include "runtime/pipeline/schedule.h"
#include "runtime/pipeline/stage_internal.h"

/* The least number of stages for the parts before each one where no stage may cost more than `most`
 * (stages are filled from the start), and whether `count` stages are enough for all parts. */
static bool pack(const double *cost, int parts, int count, double most, int *needed) {
    double sum = 0;
    int stages = 0;
    for (int i = 0; i < parts; i++) {
        needed[i] = stages;
        if (cost[i] > most) return false;
        if (!stages || sum + cost[i] > most) stages++, sum = 0;
        sum += cost[i];
    }
    return stages <= count;
}

/* Last stage first: each takes the parts that come nearest to an equal share of what remains, never
 * more than `most`, and enough that the stages before need not exceed it. */
static void share(const double *cost, int count, double most, const int *needed, int *first) {
    double left = 0;
    for (int i = 0; i < first[count]; i++) left += cost[i];
    for (int stage = count - 1; stage >= 0; stage--) {
        double sum = 0, taken = 0, nearest = INFINITY;
        int best = first[stage + 1] - 1;
        for (int at = first[stage + 1] - 1; at >= stage; at--) {
            sum += cost[at];
            if (sum > most && at < first[stage + 1] - 1) break;
            if (needed[at] > stage || (stage == 0 && at > 0)) continue;
            double off = fabs(sum - left / (stage + 1));
            if (off > nearest * (1 + 1e-9)) continue;
            nearest = off, best = at, taken = sum;
        }
        first[stage] = best;
        left -= taken;
    }
}

/* With several stages a rank, ranks should have equal shares. As long as that makes them more
 * equal, a stage gives its first or last part to its neighbour, which is another rank's. */
static void even_ranks(const double *cost, int *first, int count, int ranks, ml_arena *scratch) {
    double *rank = ML_NEW_ARRAY(scratch, double, ranks);
    for (int v = 0; v < count; v++)
        for (int i = first[v]; i < first[v + 1]; i++) rank[v % ranks] += cost[i];
    bool moves = ranks > 1;
    for (int round = 0; moves && round < 4 * count; round++) {
        moves = false;
        for (int v = 1; v < count; v++) {
            double *before = &rank[(v - 1) % ranks], *after = &rank[v % ranks];
            double back = cost[first[v]],
                   on = cost[first[v] - 1]; /* cost of the part that a move takes */
            if (first[v + 1] - first[v] > 1 && *after - *before > back * (1 + 1e-9)) {
                *before += back, *after -= back, first[v]++;
                moves = true;
            } else if (first[v] - first[v - 1] > 1 && *before - *after > on * (1 + 1e-9)) {
                *before -= on, *after += on, first[v]--;
                moves = true;
            }
        }
    }
}

/* The length of a step of some microbatches, with a third of the work in the forward pass. */
static int64_t step_length(const double *cost, const int *first, const ml_layout *layout,
                           ml_arena *scratch) {
    enum { UNITS = 1000000 };
    int ranks = (int)layout->axis[layout->stages.mesh_axis].size, chunks = layout->stages.chunks;
    int count = ranks * chunks, edges = 0;
    double all = 0;
    ml_pipeline_schedule schedule;
    ml_task *task = ML_NEW_ARRAY(scratch, ml_task, 2 * (size_t)count);
    ml_task_edge *edge = ML_NEW_ARRAY(scratch, ml_task_edge, 2 * (size_t)count);
    for (int i = 0; i < first[count]; i++) all += cost[i];
    for (int v = 0; v < count; v++) {
        double sum = 0;
        for (int i = first[v]; i < first[v + 1]; i++) sum += cost[i];
        int64_t units = all > 0 ? (int64_t)(UNITS * (sum / all)) : 0;
        task[2 * v] = (ml_task){.stage = v, .cost = units / 3 + 1};
        task[2 * v + 1] = (ml_task){.stage = v, .cost = units - units / 3 + 1};
        if (v == 0) continue;
        edge[edges++] = (ml_task_edge){.from = 2 * v - 2, .to = 2 * v};
        edge[edges++] = (ml_task_edge){.from = 2 * v + 1, .to = 2 * v - 1};
    }
    edge[edges++] = (ml_task_edge){.from = 2 * count - 2, .to = 2 * count - 1};
    ml_pipeline_problem problem = {.kind = (ml_schedule_kind)layout->stages.schedule,
                                   .ranks = ranks,
                                   .chunks = chunks,
                                   .microbatches = 2 * ranks,
                                   .task_count = 2 * count,
                                   .edge_count = edges,
                                   .tasks = task,
                                   .edges = edge};
    ml_pipeline_schedule_build(&problem, scratch, &schedule);
    return schedule.length;
}

/* Equal shares of ranks instead of stages, where a step is shorter that way. */
static void try_even_ranks(const double *cost, const ml_layout *layout, int count, int *first,
                           ml_arena *scratch) {
    int *even = ML_NEW_ARRAY(scratch, int, (size_t)count + 1);
    memcpy(even, first, sizeof *even * ((size_t)count + 1));
    even_ranks(cost, even, count, count / layout->stages.chunks, scratch);
    if (memcmp(even, first, sizeof *even * ((size_t)count + 1)) == 0) return;
    if (step_length(cost, even, layout, scratch) < step_length(cost, first, layout, scratch))
        memcpy(first, even, sizeof *even * ((size_t)count + 1));
}

void stage_balance(const double *cost, int parts, const ml_layout *layout, ml_arena *scratch,
                   int *first) {
    int count = (int)layout->axis[layout->stages.mesh_axis].size * layout->stages.chunks;
    double low = 0, high = 0;
    int *needed = ML_NEW_ARRAY(scratch, int, parts);
    for (int i = 0; i < parts; i++) {
        high += cost[i];
        if (cost[i] > low) low = cost[i];
    }
    high = high > 0 ? high * 1.0001 : 1;
    for (int i = 0; i < 50 && high - low > 1e-6 * high; i++) { /* bisection */
        double middle = (low + high) / 2;
        if (pack(cost, parts, count, middle, needed))
            high = middle;
        else
            low = middle;
    }
    first[count] = parts;
    (void)pack(cost, parts, count, high, needed);
    share(cost, count, high, needed, first);
    if (layout->stages.chunks > 1) try_even_ranks(cost, layout, count, first, scratch);
}
