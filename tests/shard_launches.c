/* Pipelines on GPUs: a message goes through once both its ends are there (nothing is buffered), an
 * edge's go one after another, and the first of an edge keeps both hosts until it is called on the
 * other one, for NCCL connects them then. No rank may wait in a circle under these rules either. If
 * NCCL kept the order of calls (NCCL_LAUNCH_ORDER_IMPLICIT), some did: calls after a message that
 * waits for the one before on its edge would wait too. */
#include <stdlib.h>
#include <string.h>

#include "runtime/plan/staged.h"
#include "tests/test.h"

enum { MOST_STAGES = 32, MOST_EDGES = 4 * MOST_STAGES, MOST_RANKS = 16 };

/* What a rank does, as runtime/exec/staged.c does it. */
typedef enum { EXPECT, ARRIVE, RUN, SEND, SETTLE } launch_kind;
typedef struct {
    launch_kind kind;
    int message; /* edge * microbatches + microbatch; of RUN: -1 */
} launch;
typedef struct {
    launch *at;
    int count, called, passed; /* so far: by the host, and by the device's stream */
} launch_list;

typedef struct {
    struct ml_staged_plan plan;
    bool ahead[MOST_RANKS]; /* messages are expected one action early: not in the first steps after
                               a rank has bound its executables */
    bool connects;          /* NCCL, in the very first step */
    launch_list ranks[MOST_RANKS];
    bool *sends, *receives; /* by message: that end is there */
    bool *calls[2];         /* by edge: its first send, its first receive is called */
} simulation;

static void put(launch_list *list, launch_kind kind, int message) {
    list->at[list->count++] = (launch){kind, message};
}

static int message_of(const simulation *s, int lane, int microbatch) {
    return lane * s->plan.microbatches + microbatch;
}

static void put_prepare(simulation *s, launch_list *list, const ml_action *a) {
    const struct ml_staged_plan *p = &s->plan;
    int v = p->tasks[a->task].stage;
    const staged_stage *stage = &p->stages[v];
    for (int i = 0; i < p->lane_count && a->task == stage->first_task; i++) {
        if (p->lanes[i].from != v || p->lanes[i].local) continue;
        for (int m = a->microbatch - 1; m >= 0; m--) { /* the last one sent from this slot */
            if (stage->slot_of[m] != stage->slot_of[a->microbatch]) continue;
            put(list, SETTLE, message_of(s, i, m));
            break;
        }
    }
    for (int i = 0; i < p->lane_count; i++)
        if (p->lanes[i].to_task == a->task && !p->lanes[i].local)
            put(list, EXPECT, message_of(s, i, a->microbatch));
}

static void put_messages(simulation *s, launch_list *list, const ml_action *a, bool arrive) {
    const struct ml_staged_plan *p = &s->plan;
    for (int i = 0; i < p->lane_count; i++) {
        int task = arrive ? p->lanes[i].to_task : p->lanes[i].from_task;
        if (task == a->task && !p->lanes[i].local)
            put(list, arrive ? ARRIVE : SEND, message_of(s, i, a->microbatch));
    }
}

static void put_rank(simulation *s, int rank) {
    const ml_pipeline *made = &s->plan.pipeline;
    launch_list *list = &s->ranks[rank];
    int count = made->action_count[rank];
    list->at = calloc((size_t)count * 4 * MOST_EDGES, sizeof *list->at);
    for (int i = 0; i < count; i++) {
        const ml_action *a = &made->actions[rank][i];
        if (!s->ahead[rank] || i == 0) put_prepare(s, list, a);
        put_messages(s, list, a, true);
        if (s->ahead[rank] && i + 1 < count) put_prepare(s, list, a + 1);
        put(list, RUN, -1);
        put_messages(s, list, a, false);
    }
}

static bool through(const simulation *s, int message) {
    return s->sends[message] && s->receives[message];
}

/* The host, as far as it comes. */
static bool call(simulation *s, launch_list *list) {
    bool moved = false;
    for (; list->called < list->count; list->called++, moved = true) {
        const launch *l = &list->at[list->called];
        int edge = l->message / s->plan.microbatches;
        if (!s->connects || (l->kind != SEND && l->kind != EXPECT)) continue;
        s->calls[l->kind == SEND][edge] = true;
        if (!s->calls[l->kind != SEND][edge]) break;
    }
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

static void lane_add(struct ml_staged_plan *p, ml_task_edge *edges, int from_task, int to_task) {
    int from = p->tasks[from_task].stage, to = p->tasks[to_task].stage;
    p->lanes[p->lane_count] = (staged_lane){.from = from,
                                            .to = to,
                                            .from_task = from_task,
                                            .to_task = to_task,
                                            .local = from % p->ranks == to % p->ranks};
    edges[p->lane_count++] = (ml_task_edge){from_task, to_task};
}

/* A chain of stages there and back: the tasks of tests/shard_pipeline.c. */
static void chain_make(simulation *s, ml_arena *arena, ml_stage_schedule kind, int ranks,
                       int chunks, int microbatches) {
    struct ml_staged_plan *p = &s->plan;
    bool late = kind == ML_SCHEDULE_ZERO_BUBBLE;
    *p = (struct ml_staged_plan){
        .count = ranks * chunks, .microbatches = microbatches, .ranks = ranks};
    p->stages = ML_NEW_ARRAY(arena, staged_stage, MOST_STAGES);
    p->tasks = ML_NEW_ARRAY(arena, ml_task, 3 * MOST_STAGES);
    p->lanes = ML_NEW_ARRAY(arena, staged_lane, MOST_EDGES);
    ml_task_edge *edges = ML_NEW_ARRAY(arena, ml_task_edge, MOST_EDGES);
    int backward[MOST_STAGES], after[MOST_STAGES], after_count = 0;
    for (int v = 0; v < p->count; v++) {
        bool last = v == p->count - 1;
        p->stages[v].first_task = p->task_count;
        p->tasks[p->task_count++] = (ml_task){v, last ? 6 : 2, false};
        if (!last) p->tasks[p->task_count++] = (ml_task){v, late ? 2 : 4, false};
        backward[v] = p->task_count - 1;
        if (late && v > 0) after[after_count++] = p->task_count;
        if (late && v > 0) p->tasks[p->task_count++] = (ml_task){v, 2, true};
        p->stages[v].task_count = p->task_count - p->stages[v].first_task;
    }
    for (int v = p->count - 1; v > 0; v--) lane_add(p, edges, backward[v], backward[v - 1]);
    for (int v = 1; v < p->count; v++)
        lane_add(p, edges, p->stages[v - 1].first_task, p->stages[v].first_task);
    int edge_count = p->lane_count;
    for (int i = 0; i < after_count; i++)
        edges[edge_count++] = (ml_task_edge){after[i] - 1, after[i]};
    p->problem = (ml_pipeline_problem){kind,          ranks,      chunks,   microbatches,
                                       p->task_count, edge_count, p->tasks, edges};
    ml_pipeline_make(&p->problem, arena, &p->pipeline);
    for (int v = 0; v < p->count; v++) staged_slots(p, v, arena);
}

static const int shapes[][3] = {/* ranks, chunks, microbatches */
                                {2, 1, 1}, {2, 1, 7}, {3, 1, 2}, {4, 1, 3},  {4, 1, 16}, {8, 1, 24},
                                {2, 2, 2}, {2, 2, 8}, {3, 2, 9}, {4, 3, 16}, {8, 4, 16}, {2, 8, 8}};

typedef enum { FIRST_STEP, SECOND_STEP, LATER, ODD_RANKS_LATER, EVEN_RANKS_LATER, MOMENTS } moment;
static const char *const moments[] = {"first step", "second step", "later", "odd ranks ahead",
                                      "even ranks ahead"};

static void every_shape(moment when) {
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = ML_SCHEDULE_1F1B; kind <= ML_SCHEDULE_ZERO_BUBBLE; kind++) {
            ml_arena *arena = ml_arena_new();
            simulation s = {.connects = when == FIRST_STEP};
            for (int r = 0; r < MOST_RANKS; r++)
                s.ahead[r] = when == LATER || (when == ODD_RANKS_LATER && r % 2 == 1) ||
                             (when == EVEN_RANKS_LATER && r % 2 == 0);
            chain_make(&s, arena, (ml_stage_schedule)kind, shapes[i][0], shapes[i][1],
                       shapes[i][2]);
            size_t messages = (size_t)s.plan.lane_count * (size_t)s.plan.microbatches;
            s.sends = ML_NEW_ARRAY(arena, bool, messages);
            s.receives = ML_NEW_ARRAY(arena, bool, messages);
            for (int k = 0; k < 2; k++) s.calls[k] = ML_NEW_ARRAY(arena, bool, MOST_EDGES);
            if (!ends(&s))
                test_fail("schedule %d of %d ranks, %d chunks, %d microbatches, %s: ranks wait in "
                          "a circle",
                          kind, shapes[i][0], shapes[i][1], shapes[i][2], moments[when]);
            ml_arena_free(arena);
        }
}

TEST(shard_pipeline, rendezvous) {
    for (int when = FIRST_STEP; when < MOMENTS; when++) every_shape((moment)when);
}
