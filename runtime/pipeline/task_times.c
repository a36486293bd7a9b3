/* What tasks and messages of a step took, and how long steps with such times take. */
#include "runtime/pipeline/task_times.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const ml_pipeline_problem *problem;
    const ml_pipeline_schedule *schedule;
    ml_arena *arena;
    int *first, *into; /* edges to task t from other ranks: into[first[t] .. first[t + 1]) */
    int64_t *end;      /* [tasks][microbatches] */
} tables;

static int rank_of(const ml_pipeline_problem *p, int task) {
    return p->tasks[task].stage % p->ranks;
}

/* Within a rank, the order of actions satisfies every edge. */
static bool between_ranks(const ml_pipeline_problem *p, const ml_task_edge *e) {
    return rank_of(p, e->from) != rank_of(p, e->to);
}

static tables tables_new(const ml_pipeline_problem *p, const ml_pipeline_schedule *schedule,
                         ml_arena *arena) {
    tables t = {p, schedule, arena};
    t.first = ML_NEW_ARRAY(arena, int, (size_t)p->task_count + 1);
    t.into = ML_NEW_ARRAY(arena, int, (size_t)p->edge_count + 1);
    t.end = ML_NEW_ARRAY(arena, int64_t, (size_t)p->task_count * (size_t)p->microbatches);
    for (int e = 0; e < p->edge_count; e++)
        if (between_ranks(p, &p->edges[e])) t.first[p->edges[e].to]++;
    for (int i = 1; i <= p->task_count; i++) t.first[i] += t.first[i - 1];
    for (int e = p->edge_count - 1; e >= 0; e--)
        if (between_ranks(p, &p->edges[e])) t.into[--t.first[p->edges[e].to]] = e;
    return t;
}

static int64_t *end_of(const tables *t, int task, int microbatch) {
    return &t->end[(size_t)task * (size_t)t->problem->microbatches + (size_t)microbatch];
}

/* When all messages of the task have arrived, each after its delay (NULL: none); *last becomes the
 * edge of the last one, or -1. */
static int64_t ready_at(const tables *t, int task, int microbatch, const int64_t *delay,
                        int *last) {
    int64_t ready = 0;
    *last = -1;
    for (int i = t->first[task]; i < t->first[task + 1]; i++) {
        int e = t->into[i];
        int64_t there = *end_of(t, t->problem->edges[e].from, microbatch);
        if (delay != NULL) there += delay[e];
        if (*last >= 0 && there <= ready) continue;
        ready = there;
        *last = e;
    }
    return ready;
}

/* ---- Learning -------------------------------------------------------------------------------- */

/* Samples of each edge, or of each task. */
typedef struct {
    int64_t *at; /* [of][microbatches] */
    int *count;
    int room;
} samples;

static samples samples_new(const tables *t, int of) {
    size_t room = (size_t)t->problem->microbatches;
    return (samples){ML_NEW_ARRAY(t->arena, int64_t, (size_t)(of + 1) * room),
                     ML_NEW_ARRAY(t->arena, int, (size_t)of + 1), (int)room};
}

static void sample(samples *s, int of, int64_t time) {
    s->at[(size_t)of * (size_t)s->room + (size_t)s->count[of]++] = time > 0 ? time : 0;
}

static int compare_times(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int64_t median(int64_t *at, int count) {
    qsort(at, (size_t)count, sizeof *at, compare_times);
    return at[count / 2];
}

static int64_t median_of(const samples *s, int of, int64_t otherwise) {
    if (s->count[of] == 0) return otherwise;
    return median(&s->at[(size_t)of * (size_t)s->room], s->count[of]);
}

static void note_ends(const tables *t, const ml_task_time *const *ran) {
    for (int r = 0; r < t->problem->ranks; r++)
        for (int i = 0; i < t->schedule->action_count[r]; i++) {
            const ml_action *a = &t->schedule->actions[r][i];
            *end_of(t, a->task, a->microbatch) = ran[r][i].end;
        }
}

static void learn_tasks(const tables *t, const ml_task_time *const *ran, int64_t *task) {
    for (int r = 0; r < t->problem->ranks; r++)
        for (int i = 0; i < t->schedule->action_count[r]; i++)
            task[t->schedule->actions[r][i].task] += ran[r][i].end - ran[r][i].begin;
    for (int i = 0; i < t->problem->task_count; i++) task[i] /= t->problem->microbatches;
}

/* The shortest time from the end of each edge's source to the begin of its user. */
static void shortest_gaps(const tables *t, const ml_task_time *const *ran, int64_t *gap) {
    const ml_pipeline_problem *p = t->problem;
    for (int e = 0; e < p->edge_count; e++) gap[e] = INT64_MAX;
    for (int r = 0; r < p->ranks; r++)
        for (int i = 0; i < t->schedule->action_count[r]; i++) {
            const ml_action *a = &t->schedule->actions[r][i];
            for (int k = t->first[a->task]; k < t->first[a->task + 1]; k++) {
                int e = t->into[k];
                int64_t from = *end_of(t, p->edges[e].from, a->microbatch);
                if (ran[r][i].begin - from < gap[e]) gap[e] = ran[r][i].begin - from;
            }
        }
}

/* Clocks of ranks differ a little: where a message seems to arrive before it was sent, all of the
 * receiver's times are shifted. The time of a round trip is unchanged. */
static const ml_task_time *const *common_clock(const tables *t, const ml_task_time *const *ran) {
    const ml_pipeline_problem *p = t->problem;
    int64_t *gap = ML_NEW_ARRAY(t->arena, int64_t, (size_t)p->edge_count + 1);
    int64_t *later = ML_NEW_ARRAY(t->arena, int64_t, (size_t)p->ranks);
    ml_task_time **moved = ML_NEW_ARRAY(t->arena, ml_task_time *, (size_t)p->ranks);
    shortest_gaps(t, ran, gap);
    for (int round = 0; round < p->ranks; round++)
        for (int e = 0; e < p->edge_count; e++) {
            int from = rank_of(p, p->edges[e].from), to = rank_of(p, p->edges[e].to);
            if (from != to && gap[e] < INT64_MAX && later[to] + gap[e] < later[from])
                later[to] = later[from] - gap[e];
        }
    for (int r = 0; r < p->ranks; r++) {
        moved[r] = ML_NEW_ARRAY(t->arena, ml_task_time, (size_t)t->schedule->action_count[r] + 1);
        for (int i = 0; i < t->schedule->action_count[r]; i++)
            moved[r][i] = (ml_task_time){ran[r][i].begin + later[r], ran[r][i].end + later[r]};
    }
    return (const ml_task_time *const *)moved;
}

/* A message for which no task ever waited took no longer than the shortest time up to its task; it
 * is assumed to take as long as others do. */
static void learn_delays(const tables *t, const ml_task_time *const *ran, int64_t *delay) {
    const ml_pipeline_problem *p = t->problem;
    samples waits = samples_new(t, p->edge_count);
    int64_t *most = ML_NEW_ARRAY(t->arena, int64_t, (size_t)p->edge_count + 1);
    int64_t *known = ML_NEW_ARRAY(t->arena, int64_t, (size_t)p->edge_count + 1);
    int known_count = 0, last;
    shortest_gaps(t, ran, most);
    for (int r = 0; r < p->ranks; r++)
        for (int i = 0; i < t->schedule->action_count[r]; i++) {
            const ml_action *a = &t->schedule->actions[r][i];
            int64_t ready = ready_at(t, a->task, a->microbatch, NULL, &last);
            if (last >= 0 && (i == 0 || ready > ran[r][i - 1].end))
                sample(&waits, last, ran[r][i].begin - ready);
        }
    for (int e = 0; e < p->edge_count; e++)
        if (waits.count[e] > 0) known[known_count++] = delay[e] = median_of(&waits, e, 0);
    int64_t usual = known_count > 0 ? median(known, known_count) : 0;
    for (int e = 0; e < p->edge_count; e++)
        if (waits.count[e] == 0 && between_ranks(p, &p->edges[e]))
            delay[e] = most[e] < 0 ? 0 : most[e] < usual ? most[e] : usual;
}

static void learn_pauses(const tables *t, const ml_task_time *const *ran, const int64_t *delay,
                         int64_t *pause) {
    const ml_pipeline_problem *p = t->problem;
    samples pauses = samples_new(t, p->task_count);
    int last;
    for (int r = 0; r < p->ranks; r++)
        for (int i = 1; i < t->schedule->action_count[r]; i++) {
            const ml_action *a = &t->schedule->actions[r][i];
            if (ready_at(t, a->task, a->microbatch, delay, &last) <= ran[r][i - 1].end)
                sample(&pauses, a->task, ran[r][i].begin - ran[r][i - 1].end);
        }
    for (int i = 0; i < p->task_count; i++) pause[i] = median_of(&pauses, i, 0);
}

/* ---- Steps of such times --------------------------------------------------------------------- */

static bool can_begin(const tables *t, const ml_action *a) {
    for (int i = t->first[a->task]; i < t->first[a->task + 1]; i++)
        if (*end_of(t, t->problem->edges[t->into[i]].from, a->microbatch) < 0) return false;
    return true;
}

int64_t ml_pipeline_replay(const ml_pipeline_problem *problem, const ml_pipeline_schedule *schedule,
                           const ml_pipeline_times *times, ml_arena *arena, double *bubble) {
    tables t = tables_new(problem, schedule, arena);
    int *next = ML_NEW_ARRAY(arena, int, (size_t)problem->ranks), last;
    int64_t *free_at = ML_NEW_ARRAY(arena, int64_t, (size_t)problem->ranks), length = 0, work = 0;
    size_t ends = (size_t)problem->task_count * (size_t)problem->microbatches;
    for (size_t i = 0; i < ends; i++) t.end[i] = -1;
    for (bool moves = true; moves;) {
        moves = false;
        for (int r = 0; r < problem->ranks; r++)
            for (; next[r] < schedule->action_count[r]; next[r]++, moves = true) {
                const ml_action *a = &schedule->actions[r][next[r]];
                if (!can_begin(&t, a)) break;
                int64_t ready = ready_at(&t, a->task, a->microbatch, times->delay, &last);
                int64_t begin = free_at[r] + (next[r] > 0 ? times->pause[a->task] : 0);
                if (ready > begin) begin = ready;
                work += times->task[a->task];
                free_at[r] = begin + times->task[a->task];
                *end_of(&t, a->task, a->microbatch) = free_at[r];
                if (free_at[r] > length) length = free_at[r];
            }
    }
    *bubble = length > 0 ? 1 - (double)work / ((double)length * problem->ranks) : 0;
    return length;
}

/* ---- A step of the same length --------------------------------------------------------------- */

enum { UNITS = 64 };

static int64_t length_of(const tables *t, const ml_task_time *const *ran) {
    int64_t begin = INT64_MAX, end = INT64_MIN;
    for (int r = 0; r < t->problem->ranks; r++)
        for (int i = 0; i < t->schedule->action_count[r]; i++) {
            if (ran[r][i].begin < begin) begin = ran[r][i].begin;
            if (ran[r][i].end > end) end = ran[r][i].end;
        }
    return end - begin;
}

/* Delays and pauses times units / UNITS. */
static ml_pipeline_times times_scaled(const tables *t, const ml_pipeline_times *times, int units) {
    const ml_pipeline_problem *p = t->problem;
    ml_pipeline_times out = {.task = times->task, .share = (double)units / UNITS};
    out.pause = ML_NEW_ARRAY(t->arena, int64_t, (size_t)p->task_count + 1);
    out.delay = ML_NEW_ARRAY(t->arena, int64_t, (size_t)p->edge_count + 1);
    for (int i = 0; i < p->task_count; i++) out.pause[i] = times->pause[i] * units / UNITS;
    for (int e = 0; e < p->edge_count; e++) out.delay[e] = times->delay[e] * units / UNITS;
    return out;
}

/* Delays and pauses overlap and vary, so a step loses less than their sum. The least share of them
 * is taken with which a step in the order of the measured one takes as long as that one did. */
static void fit_length(const tables *t, int64_t length, ml_pipeline_times *times) {
    int low = 0, high = 4 * UNITS;
    while (low < high) {
        int middle = (low + high) / 2;
        double bubble;
        ml_pipeline_times scaled = times_scaled(t, times, middle);
        if (ml_pipeline_replay(t->problem, t->schedule, &scaled, t->arena, &bubble) >= length)
            high = middle;
        else
            low = middle + 1;
    }
    *times = times_scaled(t, times, low);
}

void ml_pipeline_times_learn(const ml_pipeline_problem *problem,
                             const ml_pipeline_schedule *schedule, const ml_task_time *const *ran,
                             ml_arena *arena, ml_pipeline_times *times) {
    tables t = tables_new(problem, schedule, arena);
    times->task = ML_NEW_ARRAY(arena, int64_t, (size_t)problem->task_count + 1);
    times->pause = ML_NEW_ARRAY(arena, int64_t, (size_t)problem->task_count + 1);
    times->delay = ML_NEW_ARRAY(arena, int64_t, (size_t)problem->edge_count + 1);
    note_ends(&t, ran);
    ran = common_clock(&t, ran);
    note_ends(&t, ran);
    learn_tasks(&t, ran, times->task);
    learn_delays(&t, ran, times->delay);
    learn_pauses(&t, ran, times->delay, times->pause);
    fit_length(&t, length_of(&t, ran), times);
}

/* A task occupies its rank from its pause on, so a message may arrive that much later. */
ml_pipeline_problem ml_pipeline_problem_timed(const ml_pipeline_problem *problem,
                                              const ml_pipeline_times *times, ml_arena *arena) {
    ml_pipeline_problem timed = *problem;
    ml_task *tasks = ML_NEW_ARRAY(arena, ml_task, (size_t)problem->task_count + 1);
    ml_task_edge *edges = ML_NEW_ARRAY(arena, ml_task_edge, (size_t)problem->edge_count + 1);
    for (int i = 0; i < problem->task_count; i++) {
        tasks[i] = problem->tasks[i];
        tasks[i].cost = times->task[i] + times->pause[i];
        if (tasks[i].cost < 1) tasks[i].cost = 1;
    }
    for (int e = 0; e < problem->edge_count; e++) {
        edges[e] = problem->edges[e];
        int64_t rest = times->delay[e] - times->pause[edges[e].to];
        edges[e].delay = rest > 0 ? rest : 0;
    }
    timed.tasks = tasks;
    timed.edges = edges;
    return timed;
}
