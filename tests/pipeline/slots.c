/* The blocks of microbatches: none is begun while the task before it may still use its slot, and on
 * GPUs, where the memory of a message may be used again only once the other rank has it, ranks
 * never wait in a circle. */
#include <stdlib.h>
#include <string.h>

#include "runtime/pipeline/pipeline_internal.h"
#include "tests/test.h"

enum { RANKS = 8, STAGES = 24, MOST_TASKS = 3 * STAGES, MOST_LANES = 3 * STAGES };

typedef struct {
    struct ml_pipeline_plan plan;
    ml_arena *arena;
    pipeline_stage stages[STAGES];
    ml_task tasks[MOST_TASKS];
    pipeline_channel channels[MOST_LANES];
    ml_task_edge edges[MOST_LANES];
} slots_case;

/* ---- Drawing ----------------------------------------------------------------------------------
 */

static int add_task(slots_case *c, int stage, int64_t cost, bool weight_grad) {
    pipeline_stage *s = &c->stages[stage];
    if (s->task_count++ == 0) s->first_task = c->plan.task_count;
    c->tasks[c->plan.task_count] = (ml_task){stage, cost, weight_grad};
    return c->plan.task_count++;
}

static void add_lane(slots_case *c, int from, int to) {
    int source = c->tasks[from].stage, target = c->tasks[to].stage;
    bool local = source % c->plan.ranks == target % c->plan.ranks;
    c->edges[c->plan.channel_count] = (ml_task_edge){from, to};
    c->channels[c->plan.channel_count++] = (pipeline_channel){source, target, from, to, 1, local};
}

/* A chain of stages there and back, the last in one task, with now and then a lane that skips some
 * stages (tied weights, or what all layers read). */
static void draw(slots_case *c, uint64_t *random) {
    struct ml_pipeline_plan *plan = &c->plan;
    ml_schedule_kind kind = (ml_schedule_kind)test_range(random, 0, ML_SCHEDULE_COUNT - 1);
    int chunks = ml_schedules[kind].virtual_stages ? (int)test_range(random, 2, 3) : 1;
    int ranks = (int)test_range(random, 2, RANKS), forward[STAGES], backward[STAGES];
    int even = test_range(random, 0, 2) == 0, spread = even ? 1 : (int)test_range(random, 2, 60);
    plan->ranks = ranks;
    plan->count = ranks * chunks;
    plan->microbatches = ranks * (int)test_range(random, 1, 4);
    if (chunks == 1) plan->microbatches += (int)test_range(random, 0, 3);
    for (int v = 0; v < plan->count; v++) {
        bool last = v == plan->count - 1,
             weight_grad = ml_schedules[kind].splits_weight_grad && v > 0;
        int64_t cost = 10 * test_range(random, 1, spread);
        forward[v] = backward[v] = add_task(c, v, last ? 3 * cost : cost, false);
        if (!last) backward[v] = add_task(c, v, weight_grad ? cost : 2 * cost, false);
        if (weight_grad) (void)add_task(c, v, cost, true);
    }
    for (int v = 1; v < plan->count; v++) add_lane(c, forward[v - 1], forward[v]);
    for (int v = plan->count - 1; v > 0; v--) add_lane(c, backward[v], backward[v - 1]);
    for (int i = (int)test_range(random, 0, 2); i > 0 && plan->count > 2; i--) {
        int from = (int)test_range(random, 0, plan->count - 3);
        int to = (int)test_range(random, from + 2, plan->count - 1);
        if (test_range(random, 0, 1))
            add_lane(c, forward[from], forward[to]);
        else
            add_lane(c, backward[to], backward[from]);
    }
    plan->problem = (ml_pipeline_problem){
        kind,     ranks,   chunks, plan->microbatches, plan->task_count, plan->channel_count,
        c->tasks, c->edges};
}

static void make(slots_case *c, uint64_t *random) {
    memset(c, 0, sizeof *c);
    c->arena = ml_arena_new();
    REQUIRE(c->arena != NULL);
    c->plan.stages = c->stages;
    c->plan.tasks = c->tasks;
    c->plan.channels = c->channels;
    draw(c, random);
    ml_pipeline_schedule_build(&c->plan.problem, c->arena, &c->plan.schedule);
    for (int v = 0; v < c->plan.count; v++) pipeline_slots_assign(&c->plan, v, c->arena);
}

/* ---- Slots ------------------------------------------------------------------------------------
 */

/* A slot is prepared before the task before it runs: nothing may use it from there on. */
static void check_slots(const slots_case *c) {
    const struct ml_pipeline_plan *plan = &c->plan;
    for (int v = 0; v < plan->count; v++) {
        int rank = v % plan->ranks, count = plan->schedule.action_count[rank];
        int holder[MOST_TASKS * 8], used[MOST_TASKS * 8];
        REQUIRE(c->stages[v].slots <= MOST_TASKS * 8);
        for (int i = 0; i < c->stages[v].slots; i++) holder[i] = -1, used[i] = -2;
        for (int t = 0; t < count; t++) {
            const ml_action *action = &plan->schedule.actions[rank][t];
            if (plan->tasks[action->task].stage != v) continue;
            int slot = c->stages[v].slot_of[action->microbatch];
            if (holder[slot] != action->microbatch) CHECK(used[slot] <= t - 2);
            holder[slot] = action->microbatch;
            used[slot] = t;
        }
    }
}

/* ---- What GPUs wait for -----------------------------------------------------------------------
 */

/* One rank's stream, in the order in which exec/pipeline/run.c fills it. */
typedef enum { ARRIVES, SETTLED, EXPECT, SEND } wait_kind;
typedef struct {
    wait_kind kind;
    int channel, microbatch;
} stream_op;
typedef struct {
    stream_op *ops;
    int count, at;
} stream;

static void enqueue(stream *s, wait_kind kind, int channel, int microbatch) {
    s->ops[s->count++] = (stream_op){kind, channel, microbatch};
}

static void prepare(const slots_case *c, stream *s, const ml_action *next, int **sent) {
    const struct ml_pipeline_plan *plan = &c->plan;
    int v = plan->tasks[next->task].stage, slot = c->stages[v].slot_of[next->microbatch];
    bool begins = next->task == c->stages[v].first_task;
    for (int i = 0; begins && i < plan->channel_count; i++) {
        if (c->channels[i].from != v || c->channels[i].local || sent[i][slot] < 0) continue;
        enqueue(s, SETTLED, i, sent[i][slot]);
        sent[i][slot] = -1;
    }
    for (int i = 0; i < plan->channel_count; i++)
        if (c->channels[i].to_task == next->task && !c->channels[i].local)
            enqueue(s, EXPECT, i, next->microbatch);
}

static void fill(const slots_case *c, int rank, stream *s) {
    const struct ml_pipeline_plan *plan = &c->plan;
    int count = plan->schedule.action_count[rank];
    s->ops = ML_NEW_ARRAY(c->arena, stream_op, (size_t)count * 4 * (size_t)plan->channel_count + 1);
    int **sent = ML_NEW_ARRAY(c->arena, int *, plan->channel_count);
    for (int i = 0; i < plan->channel_count; i++) {
        sent[i] = ML_NEW_ARRAY(c->arena, int, plan->microbatches + 2);
        for (int k = 0; k < plan->microbatches + 2; k++) sent[i][k] = -1;
    }
    prepare(c, s, &plan->schedule.actions[rank][0], sent);
    for (int t = 0; t < count; t++) {
        const ml_action *action = &plan->schedule.actions[rank][t];
        for (int i = 0; i < plan->channel_count; i++)
            if (c->channels[i].to_task == action->task && !c->channels[i].local)
                enqueue(s, ARRIVES, i, action->microbatch);
        if (t + 1 < count) prepare(c, s, action + 1, sent);
        for (int i = 0; i < plan->channel_count; i++) {
            if (c->channels[i].from_task != action->task || c->channels[i].local) continue;
            enqueue(s, SEND, i, action->microbatch);
            sent[i][c->stages[c->channels[i].from].slot_of[action->microbatch]] =
                action->microbatch;
        }
    }
}

/* A message is through when both ends have come to it. */
static bool runs(const slots_case *c, stream *streams) {
    const struct ml_pipeline_plan *plan = &c->plan;
    uint8_t *posted =
        ML_NEW_ARRAY(c->arena, uint8_t, (size_t)plan->channel_count * (size_t)plan->microbatches);
    bool moved = true, done = false;
    while (moved && !done) {
        moved = false, done = true;
        for (int r = 0; r < plan->ranks; r++) {
            stream *s = &streams[r];
            for (; s->at < s->count; s->at++, moved = true) {
                const stream_op *op = &s->ops[s->at];
                uint8_t *state = &posted[op->channel * plan->microbatches + op->microbatch];
                if (op->kind == SEND || op->kind == EXPECT)
                    *state |= op->kind == SEND ? 1 : 2;
                else if (*state != 3)
                    break;
            }
            done = done && s->at == s->count;
        }
    }
    return done;
}

/* ---- Tests ------------------------------------------------------------------------------------
 */

static void check_case(slots_case *c, int draw) {
    stream streams[RANKS] = {0};
    check_slots(c);
    for (int r = 0; r < c->plan.ranks; r++) fill(c, r, &streams[r]);
    EXPECT(runs(c, streams),
           "draw %d: schedule %d of %d ranks, %d stages, %d microbatches waits in a circle", draw,
           c->plan.problem.kind, c->plan.ranks, c->plan.count, c->plan.microbatches);
}

/* A step whose tasks and messages took what the plan did not know. */
static const ml_task_time *const *step_of(slots_case *c, uint64_t *random) {
    const struct ml_pipeline_plan *plan = &c->plan;
    ml_task_time **ran = ML_NEW_ARRAY(c->arena, ml_task_time *, (size_t)plan->ranks);
    int64_t *took = ML_NEW_ARRAY(c->arena, int64_t, (size_t)plan->task_count);
    for (int t = 0; t < plan->task_count; t++)
        took[t] = 1000 * plan->tasks[t].cost + test_range(random, 0, 9000);
    int64_t message = test_range(random, 0, 3000), later = 0;
    for (int r = 0; r < plan->ranks; r++) {
        ran[r] = ML_NEW_ARRAY(c->arena, ml_task_time, (size_t)plan->schedule.action_count[r]);
        for (int i = 0; i < plan->schedule.action_count[r]; i++) {
            const ml_action *a = &plan->schedule.actions[r][i];
            int64_t begin = 10000 * a->start + later;
            ran[r][i] = (ml_task_time){begin, begin + took[a->task]};
            later += message / plan->microbatches;
        }
    }
    return (const ml_task_time *const *)ran;
}

/* Another order, from times of a step, serves with the blocks and rooms of the first one. */
TEST(pipeline_slots, another_order_fits) {
    static slots_case c;
    int tries = test_all() ? 8000 : 300, reordered = 0;
    for (int i = 0; i < tries; i++) {
        uint64_t random = 9000 + (uint64_t)i;
        make(&c, &random);
        int slots[STAGES], room[MOST_LANES];
        for (int v = 0; v < c.plan.count; v++)
            slots[v] = c.stages[v].slots, c.stages[v].planned = true;
        memcpy(room, c.plan.schedule.in_flight, sizeof *room * (size_t)c.plan.channel_count);
        ml_plan plan = {.pipeline = &c.plan, .arena = c.arena};
        pipeline_forecast forecast;
        pipeline_retime(&plan, step_of(&c, &random), c.arena, &forecast);
        reordered += forecast.reordered;
        CHECK(forecast.length <= forecast.length_before && forecast.length > 0);
        CHECK(!forecast.reordered || c.plan.count == c.plan.ranks);
        for (int v = 0; v < c.plan.count; v++) CHECK_EQ_INT(c.stages[v].slots, slots[v]);
        for (int l = 0; l < c.plan.channel_count; l++)
            CHECK(c.channels[l].local || c.plan.schedule.in_flight[l] <= room[l]);
        check_case(&c, i);
        ml_arena_free(c.arena);
    }
    CHECK(reordered > 0 && reordered < tries);
}

TEST(pipeline_slots, no_circle) {
    static slots_case c;
    int tries = test_all() ? 20000 : 400;
    for (int i = 0; i < tries; i++) {
        uint64_t random = 77 + (uint64_t)i;
        make(&c, &random);
        check_case(&c, i);
        ml_arena_free(c.arena);
    }
}
