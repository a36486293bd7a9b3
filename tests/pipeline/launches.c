/* Pipelines on GPUs: a message is transferred once both its ends are there (nothing is buffered),
 * and an edge's go one after another. No rank may wait in a circle under these rules either. If
 * NCCL kept the order of calls (NCCL_LAUNCH_ORDER_IMPLICIT), some did: calls after a message that
 * waits for the one before on its edge would wait too. While executables are fresh, each of their
 * runs may keep the host until all is over that this rank has under way; so the first microbatch
 * runs alone. */
#include <stdlib.h>
#include <string.h>

#include "runtime/pipeline/pipeline_internal.h"
#include "tests/test.h"

enum { MOST_STAGES = 32, MOST_EDGES = 4 * MOST_STAGES, MOST_RANKS = 16, MOST_TASKS = 1000 };

/* What a rank does, as runtime/exec/pipeline/run.c does it. */
typedef enum { EXPECT, ARRIVE, RUN, FRESH_RUN, SEND, SETTLE } launch_kind;
typedef struct {
    launch_kind kind;
    int message; /* edge * microbatches + microbatch; of RUN: -1 */
} launch;
typedef struct {
    launch *at;
    int count, called, passed; /* so far: by the host, and by the device's stream */
} launch_list;

typedef struct {
    struct ml_pipeline_plan plan;
    int alone;      /* microbatches that go alone */
    bool ahead;     /* messages are expected an action early */
    bool all_fresh; /* the runs after them may keep the host too */
    launch_list ranks[MOST_RANKS];
    bool *sends, *receives; /* by message: that end is there */
} simulation;

static void put(launch_list *list, launch_kind kind, int message) {
    list->at[list->count++] = (launch){kind, message};
}

static int message_of(const simulation *s, int channel, int microbatch) {
    return channel * s->plan.microbatches + microbatch;
}

static void put_prepare(simulation *s, launch_list *list, const ml_action *a) {
    const struct ml_pipeline_plan *p = &s->plan;
    int v = p->tasks[a->task].stage;
    const pipeline_stage *stage = &p->stages[v];
    for (int i = 0; i < p->channel_count && a->task == stage->first_task; i++) {
        if (p->channels[i].from != v || p->channels[i].local) continue;
        for (int m = a->microbatch - 1; m >= 0; m--) { /* the last one sent from this slot */
            if (stage->slot_of[m] != stage->slot_of[a->microbatch]) continue;
            put(list, SETTLE, message_of(s, i, m));
            break;
        }
    }
    for (int i = 0; i < p->channel_count; i++)
        if (p->channels[i].to_task == a->task && !p->channels[i].local)
            put(list, EXPECT, message_of(s, i, a->microbatch));
}

static void put_messages(simulation *s, launch_list *list, const ml_action *a, bool arrive) {
    const struct ml_pipeline_plan *p = &s->plan;
    for (int i = 0; i < p->channel_count; i++) {
        int task = arrive ? p->channels[i].to_task : p->channels[i].from_task;
        if (task == a->task && !p->channels[i].local)
            put(list, arrive ? ARRIVE : SEND, message_of(s, i, a->microbatch));
    }
}

static void put_alone(simulation *s, launch_list *list, int rank, int microbatch) {
    const ml_pipeline_schedule *made = &s->plan.schedule;
    const struct ml_pipeline_plan *p = &s->plan;
    int64_t last = -1;
    for (int done = 0; done < p->task_count; done++) { /* by start, then task */
        const ml_action *next = NULL;
        for (int r = 0; r < p->ranks; r++)
            for (int i = 0; i < made->action_count[r]; i++) {
                const ml_action *a = &made->actions[r][i];
                int64_t at = a->start * MOST_TASKS + a->task;
                if (a->microbatch == microbatch && at > last &&
                    (!next || at < next->start * MOST_TASKS + next->task))
                    next = a;
            }
        last = next->start * MOST_TASKS + next->task;
        bool own = p->tasks[next->task].stage % p->ranks == rank;
        if (own) put_prepare(s, list, next);
        for (int i = 0; i < p->channel_count; i++)
            if (p->channels[i].to_task == next->task && !p->channels[i].local &&
                p->channels[i].from % p->ranks == rank)
                put(list, SEND, message_of(s, i, microbatch));
        if (!own) continue;
        put_messages(s, list, next, true);
        put(list, FRESH_RUN, -1);
    }
    put(list, FRESH_RUN, -1); /* what is made for later runs */
}

static void put_rank(simulation *s, int rank) {
    const ml_pipeline_schedule *made = &s->plan.schedule;
    launch_list *list = &s->ranks[rank];
    int count = made->action_count[rank];
    list->at = calloc((size_t)count * 4 * MOST_EDGES, sizeof *list->at);
    for (int m = 0; m < s->alone && m < s->plan.microbatches; m++) put_alone(s, list, rank, m);
    int begun = list->count;
    for (int i = 0; i < count; i++) {
        const ml_action *a = &made->actions[rank][i], *next = a + 1;
        if (a->microbatch < s->alone) continue;
        if (!s->ahead || list->count == begun) put_prepare(s, list, a);
        put_messages(s, list, a, true);
        while (next < made->actions[rank] + count && next->microbatch < s->alone) next++;
        if (s->ahead && next < made->actions[rank] + count) put_prepare(s, list, next);
        put(list, s->all_fresh ? FRESH_RUN : RUN, -1);
        put_messages(s, list, a, false);
    }
}

static bool through(const simulation *s, int message) {
    return s->sends[message] && s->receives[message];
}

/* Whether all is over that the rank has under way by its call `at`. */
static bool idle(const simulation *s, const launch_list *list, int at) {
    bool over = list->passed == at;
    for (int i = 0; i < at && over; i++) {
        const launch *l = &list->at[i];
        if (l->kind == SEND || l->kind == EXPECT) over = through(s, l->message);
    }
    return over;
}

/* The host, as far as it comes. */
static bool call(simulation *s, launch_list *list) {
    bool moved = false;
    for (; list->called < list->count; list->called++, moved = true)
        if (list->at[list->called].kind == FRESH_RUN && !idle(s, list, list->called)) break;
    return moved;
}

/* The device's stream, as far as it comes. A stream of an edge waits for it and for the message
 * before: that one is through, or this one would not be there yet on both ends. */
static bool pass(simulation *s, launch_list *list) {
    bool moved = false;
    for (; list->passed < list->called; list->passed++, moved = true) {
        const launch *l = &list->at[list->passed];
        if ((l->kind == ARRIVE || l->kind == SETTLE) && !through(s, l->message)) break;
        if (l->kind == SEND) s->sends[l->message] = true;
        if (l->kind == EXPECT) s->receives[l->message] = true;
    }
    return moved;
}

static bool ends(simulation *s) {
    bool moved = true, all = true;
    for (int r = 0; r < s->plan.ranks; r++) put_rank(s, r);
    while (moved) {
        moved = false;
        for (int r = 0; r < s->plan.ranks; r++) {
            moved = call(s, &s->ranks[r]) || moved;
            moved = pass(s, &s->ranks[r]) || moved;
        }
    }
    for (int r = 0; r < s->plan.ranks; r++) {
        launch_list *list = &s->ranks[r];
        all = all && list->passed == list->count;
        free(list->at);
        *list = (launch_list){0};
    }
    return all;
}

/* ---- Plans ------------------------------------------------------------------------------------
 */

static void lane_add(struct ml_pipeline_plan *p, ml_task_edge *edges, int from_task, int to_task) {
    int from = p->tasks[from_task].stage, to = p->tasks[to_task].stage;
    p->channels[p->channel_count] = (pipeline_channel){.from = from,
                                                       .to = to,
                                                       .from_task = from_task,
                                                       .to_task = to_task,
                                                       .local = from % p->ranks == to % p->ranks};
    edges[p->channel_count++] = (ml_task_edge){from_task, to_task};
}

/* A chain of stages there and back: the tasks of tests/pipeline/schedule.c. */
static void chain_make(simulation *s, ml_arena *arena, ml_schedule_kind kind, int ranks, int chunks,
                       int microbatches) {
    struct ml_pipeline_plan *p = &s->plan;
    bool weight_grad = ml_schedules[kind].splits_weight_grad;
    *p = (struct ml_pipeline_plan){
        .count = ranks * chunks, .microbatches = microbatches, .ranks = ranks};
    p->stages = ML_NEW_ARRAY(arena, pipeline_stage, MOST_STAGES);
    p->tasks = ML_NEW_ARRAY(arena, ml_task, 3 * MOST_STAGES);
    p->channels = ML_NEW_ARRAY(arena, pipeline_channel, MOST_EDGES);
    ml_task_edge *edges = ML_NEW_ARRAY(arena, ml_task_edge, MOST_EDGES);
    int backward[MOST_STAGES], after[MOST_STAGES], after_count = 0;
    for (int v = 0; v < p->count; v++) {
        bool last = v == p->count - 1;
        p->stages[v].first_task = p->task_count;
        p->tasks[p->task_count++] = (ml_task){v, last ? 6 : 2, false};
        if (!last) p->tasks[p->task_count++] = (ml_task){v, weight_grad ? 2 : 4, false};
        backward[v] = p->task_count - 1;
        if (weight_grad && v > 0) after[after_count++] = p->task_count;
        if (weight_grad && v > 0) p->tasks[p->task_count++] = (ml_task){v, 2, true};
        p->stages[v].task_count = p->task_count - p->stages[v].first_task;
    }
    for (int v = p->count - 1; v > 0; v--) lane_add(p, edges, backward[v], backward[v - 1]);
    for (int v = 1; v < p->count; v++)
        lane_add(p, edges, p->stages[v - 1].first_task, p->stages[v].first_task);
    if (p->count > 2) { /* what the first and the last stage share */
        lane_add(p, edges, p->stages[0].first_task, p->stages[p->count - 1].first_task);
        lane_add(p, edges, backward[p->count - 1], backward[0]);
    }
    int edge_count = p->channel_count;
    for (int i = 0; i < after_count; i++)
        edges[edge_count++] = (ml_task_edge){after[i] - 1, after[i]};
    p->problem = (ml_pipeline_problem){kind,          ranks,      chunks,   microbatches,
                                       p->task_count, edge_count, p->tasks, edges};
    ml_pipeline_schedule_build(&p->problem, arena, &p->schedule);
    for (int v = 0; v < p->count; v++) pipeline_slots_assign(p, v, arena);
}

static const int shapes[][3] = {/* ranks, chunks, microbatches */
                                {2, 1, 1}, {2, 1, 7}, {3, 1, 2}, {4, 1, 3},  {4, 1, 16}, {8, 1, 24},
                                {2, 2, 2}, {2, 2, 8}, {3, 2, 9}, {4, 3, 16}, {8, 4, 16}, {2, 8, 8}};

/* Whether no rank waits in a circle, for every shape and kind. */
static bool every_shape(int alone, bool ahead, bool all_fresh, bool report) {
    bool all = true;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = ML_SCHEDULE_1F1B; kind < ML_SCHEDULE_COUNT; kind++) {
            ml_arena *arena = ml_arena_new();
            simulation s = {.alone = alone, .ahead = ahead, .all_fresh = all_fresh};
            chain_make(&s, arena, (ml_schedule_kind)kind, shapes[i][0], shapes[i][1], shapes[i][2]);
            size_t messages = (size_t)s.plan.channel_count * (size_t)s.plan.microbatches;
            s.sends = ML_NEW_ARRAY(arena, bool, messages);
            s.receives = ML_NEW_ARRAY(arena, bool, messages);
            bool good = ends(&s);
            EXPECT(good || !report,
                   "schedule %d of %d ranks, %d chunks, %d microbatches, %d alone: ranks "
                   "wait in a circle",
                   kind, shapes[i][0], shapes[i][1], shapes[i][2], alone);
            all = all && good;
            ml_arena_free(arena);
        }
    return all;
}

TEST(pipeline_schedule, rendezvous) {
    for (int ahead = 0; ahead < 2; ahead++) {
        every_shape(0, ahead, false, true);
        every_shape(1, ahead, false, true);
        every_shape(1000, ahead, false, true);
        /* This is what the first microbatch runs alone for. */
        CHECK(!every_shape(0, ahead, true, false));
    }
}
