/* Pipeline schedules: every one is valid, keeps its limits of memory, never waits in a circle
 * whatever the tasks' true times, and idles as little as the formulas of its kind say. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/pipeline/stage_internal.h"
#include "runtime/pipeline/task_times.h"
#include "tests/passes/support.h"

/* ---- Problems ---------------------------------------------------------------------------------
 */

enum { MOST_TASKS = 64 * 8 * 3, MOST_EDGES = 2 * MOST_TASKS };

typedef struct {
    ml_pipeline_problem problem;
    int count, edges_count;
    ml_task tasks[MOST_TASKS];
    ml_task_edge edges[MOST_EDGES];
} pipeline_case;

static int add_task(pipeline_case *c, int stage, int64_t cost, bool weight_grad) {
    REQUIRE(c->count < MOST_TASKS);
    c->tasks[c->count] = (ml_task){stage, cost, weight_grad};
    return c->count++;
}

static void add_edge(pipeline_case *c, int from, int to) {
    REQUIRE(c->edges_count < MOST_EDGES);
    c->edges[c->edges_count++] = (ml_task_edge){from, to};
}

/* Costs of a stage's forward, backward and late weight-gradient work; 0 of the last: none. */
typedef struct {
    int forward, backward, weight_grad;
} costs;

static costs even(int forward, int backward, int weight_grad) {
    return (costs){forward, backward, weight_grad};
}

static costs random_costs(uint64_t *random, bool weight_grad) {
    return even((int)test_range(random, 10, 40), (int)test_range(random, 15, 60),
                weight_grad ? (int)test_range(random, 5, 40) : 0);
}

/* A chain of stages there and back. The last stage has one task for both ways; the first one no
 * weight-gradient task, since no stage waits for its backward pass. random: NULL where all stages
 * cost `each`.
 */
static void make_chain(pipeline_case *c, ml_schedule_kind kind, int ranks, int chunks,
                       int microbatches, costs each, uint64_t *random) {
    int stages = ranks * chunks, forward[64 * 8], backward[64 * 8];
    c->count = c->edges_count = 0;
    for (int v = 0; v < stages; v++) {
        costs cost = random ? random_costs(random, each.weight_grad > 0) : each;
        int first = v == 0 ? cost.weight_grad : 0;
        if (v == stages - 1) {
            forward[v] = backward[v] = add_task(c, v, cost.forward + cost.backward + first, false);
        } else {
            forward[v] = add_task(c, v, cost.forward, false);
            backward[v] = add_task(c, v, cost.backward + first, false);
        }
        if (cost.weight_grad && v > 0)
            add_edge(c, backward[v], add_task(c, v, cost.weight_grad, true));
    }
    for (int v = stages - 1; v > 0; v--) add_edge(c, backward[v], backward[v - 1]);
    for (int v = 1; v < stages; v++) add_edge(c, forward[v - 1], forward[v]);
    c->problem = (ml_pipeline_problem){kind,     ranks,          chunks,   microbatches,
                                       c->count, c->edges_count, c->tasks, c->edges};
}

/* ---- The checker ------------------------------------------------------------------------------
 */

typedef struct {
    const pipeline_case *c;
    const ml_pipeline_schedule *made;
    int64_t *end;   /* [tasks][microbatches]; 0: not run yet */
    int64_t *start; /* the same */
} checker;

static int64_t *of(int64_t *table, const checker *k, int task, int microbatch) {
    return &table[(int64_t)task * k->c->problem.microbatches + microbatch];
}

/* Every task of every microbatch once, on its rank, in turn, microbatches in order. */
static bool check_ranks(checker *k) {
    const ml_pipeline_problem *p = &k->c->problem;
    int64_t actions = 0, most = 0;
    int *next = calloc((size_t)p->task_count, sizeof *next);
    bool good = next != NULL;
    for (int r = 0; good && r < p->ranks; r++) {
        int64_t now = 0;
        for (int i = 0; good && i < k->made->action_count[r]; i++, actions++) {
            const ml_action *a = &k->made->actions[r][i];
            const ml_task *task = &p->tasks[a->task];
            good = a->start >= now && a->end == a->start + task->cost &&
                   task->stage % p->ranks == r && a->microbatch == next[a->task]++;
            *of(k->start, k, a->task, a->microbatch) = a->start;
            *of(k->end, k, a->task, a->microbatch) = now = a->end;
        }
        if (now > most) most = now;
    }
    free(next);
    return good && actions == (int64_t)p->task_count * p->microbatches && most == k->made->length;
}

static bool check_edges(checker *k) {
    const ml_pipeline_problem *p = &k->c->problem;
    for (int m = 0; m < p->microbatches; m++) {
        for (int e = 0; e < p->edge_count; e++)
            if (*of(k->end, k, p->edges[e].from, m) + p->edges[e].delay >
                *of(k->start, k, p->edges[e].to, m))
                return false;
        for (int t = 1; t < p->task_count; t++)
            if (p->tasks[t].stage == p->tasks[t - 1].stage && !p->tasks[t - 1].weight_grad &&
                *of(k->end, k, t - 1, m) > *of(k->start, k, t, m))
                return false;
    }
    return true;
}

/* The most that is under way at once on a rank, by the actions' order alone: from the first task of
 * a unit to its last that is not late (`late`: to its last of all). */
static int most_at_once(const checker *k, int rank, int stage, bool weight_grad) {
    const ml_pipeline_problem *p = &k->c->problem;
    int now = 0, most = 0;
    for (int i = 0; i < k->made->action_count[rank]; i++) {
        int t = k->made->actions[rank][i].task, v = p->tasks[t].stage;
        if (stage >= 0 && v != stage) continue;
        bool first = t == 0 || p->tasks[t - 1].stage != v;
        bool ends = t == p->task_count - 1 || p->tasks[t + 1].stage != v;
        bool before_late = !ends && p->tasks[t + 1].weight_grad;
        now += first;
        if (now > most) most = now;
        now -= weight_grad ? ends : (ends && !p->tasks[t].weight_grad) || before_late;
    }
    return most;
}

static bool check_memory(const checker *k) {
    const ml_pipeline_problem *p = &k->c->problem;
    bool good = true;
    int largest = p->chunks == 1 ? p->ranks : 2 * (p->ranks - 1) + (p->chunks - 1) * p->ranks + 1;
    for (int r = 0; r < p->ranks && ml_schedules[p->kind].open_limit != NULL; r++) {
        int open =
            p->chunks == 1 ? p->ranks - r : 2 * (p->ranks - r - 1) + (p->chunks - 1) * p->ranks + 1;
        bool all = ml_schedules[p->kind].splits_weight_grad;
        good = good && most_at_once(k, r, -1, false) <= (all ? largest : open);
        good = good && most_at_once(k, r, -1, true) <= (all ? largest : open + 1);
    }
    for (int v = 0; v < p->ranks * p->chunks; v++)
        good = good && most_at_once(k, v % p->ranks, v, true) == k->made->held[v];
    return good;
}

/* Ranks that run their actions in order, each once its messages are there, at times of their own.
 * What one rank sends to another lies in a room of as many messages as the schedule says, in the
 * order of sending, and a rank that finds it full waits. */
typedef struct {
    const checker *k;
    int sent[MOST_EDGES], taken[MOST_EDGES];
    int at[64];   /* action of each rank */
    int next[64]; /* edge to look at for sending; -1: the action has not begun */
} walk;

static bool begins(walk *w, int task, int microbatch) {
    const pipeline_case *c = w->k->c;
    for (int e = 0; e < c->edges_count; e++)
        if (c->edges[e].to == task && w->sent[e] <= microbatch) return false;
    for (int e = 0; e < c->edges_count; e++)
        EXPECT(!(c->edges[e].to == task && w->taken[e]++ != microbatch),
               "messages of edge %d are taken out of order", e);
    return true;
}

static bool sends(walk *w, int rank, int task) {
    const pipeline_case *c = w->k->c;
    for (int e = w->next[rank]; e < c->edges_count; e++) {
        w->next[rank] = e;
        if (c->edges[e].from != task) continue;
        bool here = c->tasks[c->edges[e].to].stage % c->problem.ranks == rank;
        if (!here && w->sent[e] - w->taken[e] >= w->k->made->in_flight[e]) return false;
        w->sent[e]++;
    }
    w->next[rank] = -1;
    return true;
}

/* One rank, as far as it comes; whether it came any further. */
static bool go_on(walk *w, int rank) {
    const ml_pipeline_schedule *made = w->k->made;
    bool moved = false;
    for (; w->at[rank] < made->action_count[rank]; w->at[rank]++, moved = true) {
        const ml_action *a = &made->actions[rank][w->at[rank]];
        if (w->next[rank] < 0) {
            if (!begins(w, a->task, a->microbatch)) break;
            w->next[rank] = 0;
            moved = true;
        }
        if (!sends(w, rank, a->task)) break;
    }
    return moved;
}

/* The result does not depend on which rank continues first. */
static bool walk_ends(const checker *k) {
    static walk w;
    memset(&w, 0, sizeof w);
    w.k = k;
    memset(w.next, -1, sizeof w.next);
    int ranks = k->c->problem.ranks;
    bool moved = true;
    while (moved) {
        moved = false;
        for (int r = 0; r < ranks; r++) moved = go_on(&w, r) || moved;
    }
    for (int r = 0; r < ranks; r++)
        if (w.at[r] < k->made->action_count[r]) return false;
    return true;
}

static void check_pipeline(const pipeline_case *c, const ml_pipeline_schedule *made) {
    const ml_pipeline_problem *p = &c->problem;
    size_t count = (size_t)p->task_count * (size_t)p->microbatches;
    checker k = {c, made, calloc(count, sizeof(int64_t)), calloc(count, sizeof(int64_t))};
    bool ranks = check_ranks(&k), edges = check_edges(&k), memory = check_memory(&k);
    bool walked = count * (size_t)p->edge_count > 10000000 || walk_ends(&k);
    EXPECT(ranks && edges && memory && walked,
           "schedule %d of %d ranks, %d chunks, %d microbatches: %s%s%s%s", p->kind, p->ranks,
           p->chunks, p->microbatches, ranks ? "" : "wrong tasks; ",
           edges ? "" : "an edge is not respected; ", memory ? "" : "holds too much; ",
           walked ? "" : "waits in a circle");
    free(k.start);
    free(k.end);
}

/* ---- Valid ------------------------------------------------------------------------------------
 */

static pipeline_case made_case;

static void make_and_check(const pipeline_case *c, ml_pipeline_schedule *made, ml_arena *arena) {
    ml_pipeline_schedule_build(&c->problem, arena, made);
    check_pipeline(c, made);
}

static const int shapes[][3] = {/* ranks, chunks, microbatches */
                                {1, 1, 1},  {1, 1, 5}, {1, 3, 4},  {2, 1, 1},  {2, 1, 7},
                                {3, 1, 2},  {4, 1, 3}, {4, 1, 16}, {7, 1, 20}, {16, 1, 40},
                                {2, 2, 2},  {2, 2, 8}, {3, 2, 9},  {4, 2, 4},  {4, 3, 16},
                                {4, 2, 32}, {8, 4, 16}};

static void every_shape(bool weight_grad, bool uneven) {
    uint64_t random = 5;
    ml_arena *arena = ml_arena_new();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = ML_SCHEDULE_1F1B; kind < ML_SCHEDULE_COUNT; kind++)
            for (int times = 0; times < (uneven ? 4 : 1); times++) {
                ml_pipeline_schedule made;
                make_chain(&made_case, (ml_schedule_kind)kind, shapes[i][0], shapes[i][1],
                           shapes[i][2], even(2, weight_grad ? 2 : 4, weight_grad ? 2 : 0),
                           uneven ? &random : NULL);
                make_and_check(&made_case, &made, arena);
            }
    ml_arena_free(arena);
}

TEST(pipeline_schedule, even_costs) {
    every_shape(false, false);
    every_shape(true, false);
}
TEST(pipeline_schedule, uneven_costs) {
    every_shape(false, true);
    every_shape(true, true);
}

/* Stages with two forward passes (a model that runs twice over its layers), a late task in the
 * middle, and an edge that contradicts the order of chunks: all that is asked is that it ends. */
static void odd_problem(pipeline_case *c, ml_schedule_kind kind, int ranks, int chunks) {
    int stages = ranks * chunks, tasks[3][16];
    c->count = c->edges_count = 0;
    for (int v = 0; v < stages; v++) {
        for (int i = 0; i < 3; i++) {
            tasks[i][v] = add_task(c, v, 1 + (v * 7 + i * 3) % 5, false);
            if (i == 1 && v % 3 == 1) add_task(c, v, 4, true);
        }
    }
    for (int v = 1; v < stages; v++) {
        add_edge(c, tasks[0][v - 1], tasks[0][v]);
        add_edge(c, tasks[1][v], tasks[1][v - 1]);
        add_edge(c, tasks[2][v - 1], tasks[2][v]);
    }
    c->problem = (ml_pipeline_problem){kind,     ranks,          chunks,   2 * ranks,
                                       c->count, c->edges_count, c->tasks, c->edges};
}

TEST(pipeline_schedule, odd_graphs) {
    ml_arena *arena = ml_arena_new();
    for (int kind = ML_SCHEDULE_1F1B; kind < ML_SCHEDULE_COUNT; kind++)
        for (int chunks = 1; chunks <= 4; chunks++) {
            ml_pipeline_schedule made;
            odd_problem(&made_case, (ml_schedule_kind)kind, 4, chunks);
            ml_pipeline_schedule_build(&made_case.problem, arena, &made);
            size_t count = (size_t)made_case.count * (size_t)made_case.problem.microbatches;
            checker k = {&made_case, &made, calloc(count, 8), calloc(count, 8)};
            CHECK(check_ranks(&k) && check_edges(&k) && walk_ends(&k));
            free(k.start);
            free(k.end);
        }
    /* The first stage's work comes after the last one's. */
    static const ml_task tasks[] = {{0, 2, false}, {1, 1, false}, {2, 3, false}, {3, 1, false}};
    static const ml_task_edge edges[] = {{3, 0}, {2, 3}, {1, 2}};
    ml_pipeline_problem back = {ML_SCHEDULE_INTERLEAVED, 2, 2, 4, 4, 3, tasks, edges};
    ml_pipeline_schedule made;
    ml_pipeline_schedule_build(&back, arena, &made);
    CHECK_EQ_INT(made.action_count[0] + made.action_count[1], 16);
    ml_arena_free(arena);
}

/* Messages that take a while, in every order of a kind. */
TEST(pipeline_schedule, messages_take_time) {
    uint64_t random = 21;
    ml_arena *arena = ml_arena_new();
    for (int times = 0; times < 60; times++) {
        int ranks = (int)test_range(&random, 2, 6), m = ranks * (int)test_range(&random, 1, 4);
        int kind = (int)test_range(&random, 0, ML_SCHEDULE_COUNT - 1);
        int chunks = ml_schedules[kind].virtual_stages ? 2 : 1;
        make_chain(&made_case, (ml_schedule_kind)kind, ranks, chunks, m,
                   even(1, 1, ml_schedules[kind].splits_weight_grad), &random);
        for (int e = 0; e < made_case.edges_count; e++)
            if (made_case.tasks[made_case.edges[e].from].stage !=
                made_case.tasks[made_case.edges[e].to].stage)
                made_case.edges[e].delay = test_range(&random, 0, 40);
        for (int order = 0; order < ml_schedules[kind].order_count; order++) {
            ml_pipeline_schedule made;
            ml_pipeline_schedule_by_order(&made_case.problem, order, arena, &made);
            check_pipeline(&made_case, &made);
        }
    }
    ml_arena_free(arena);
}

/* What each task and message of a case takes. */
static ml_pipeline_times draw_times(const pipeline_case *c, uint64_t *random, ml_arena *arena) {
    ml_pipeline_times t = {ML_NEW_ARRAY(arena, int64_t, MOST_TASKS),
                           ML_NEW_ARRAY(arena, int64_t, MOST_TASKS),
                           ML_NEW_ARRAY(arena, int64_t, MOST_EDGES)};
    for (int i = 0; i < c->count; i++) t.task[i] = test_range(random, 2000, 9000);
    for (int i = 0; i < c->count; i++) t.pause[i] = test_range(random, 0, 400);
    for (int e = 0; e < c->edges_count; e++) {
        int from = c->tasks[c->edges[e].from].stage, to = c->tasks[c->edges[e].to].stage;
        t.delay[e] = from % c->problem.ranks == to % c->problem.ranks ? 0 : 100 + 10 * (e % 40);
    }
    return t;
}

/* Begin and end of all actions, by going over them until nothing changes. */
static ml_task_time **walk_times(const pipeline_case *c, const ml_pipeline_schedule *made,
                                 const ml_pipeline_times *t, ml_arena *arena) {
    int m = c->problem.microbatches;
    ml_task_time **ran = ML_NEW_ARRAY(arena, ml_task_time *, (size_t)c->problem.ranks);
    int64_t *end = ML_NEW_ARRAY(arena, int64_t, (size_t)c->count * (size_t)m);
    for (int r = 0; r < c->problem.ranks; r++)
        ran[r] = ML_NEW_ARRAY(arena, ml_task_time, (size_t)made->action_count[r]);
    for (bool changes = true; changes;) {
        changes = false;
        for (int r = 0; r < c->problem.ranks; r++)
            for (int i = 0; i < made->action_count[r]; i++) {
                const ml_action *a = &made->actions[r][i];
                int64_t begin = i > 0 ? ran[r][i - 1].end + t->pause[a->task] : 0;
                for (int e = 0; e < c->edges_count; e++) {
                    int64_t there = end[c->edges[e].from * m + a->microbatch] + t->delay[e];
                    if (c->edges[e].to == a->task && there > begin) begin = there;
                }
                ml_task_time now = {begin, begin + t->task[a->task]};
                changes = changes || now.end != ran[r][i].end;
                ran[r][i] = now;
                end[a->task * m + a->microbatch] = now.end;
            }
    }
    return ran;
}

/* A step's times are learnt from when its actions ran, and predict its length. */
TEST(pipeline_schedule, times_are_learnt) {
    uint64_t random = 3;
    ml_arena *arena = ml_arena_new();
    for (int times = 0; times < 40; times++) {
        int ranks = (int)test_range(&random, 2, 6),
            kind = (int)test_range(&random, 0, ML_SCHEDULE_ZERO_BUBBLE);
        make_chain(&made_case, (ml_schedule_kind)kind, ranks,
                   ml_schedules[kind].virtual_stages ? 2 : 1, 4 * ranks,
                   even(1, 1, ml_schedules[kind].splits_weight_grad), &random);
        ml_pipeline_schedule made;
        ml_pipeline_schedule_build(&made_case.problem, arena, &made);
        ml_pipeline_times t = draw_times(&made_case, &random, arena), learnt;
        ml_task_time **ran = walk_times(&made_case, &made, &t, arena);
        int64_t length = 0, work = 0;
        for (int r = 0; r < ranks; r++)
            for (int i = 0; i < made.action_count[r]; i++) {
                length = ran[r][i].end > length ? ran[r][i].end : length;
                work += t.task[made.actions[r][i].task];
            }
        for (int r = 0; r < ranks && times % 2; r++) { /* clocks that differ */
            int64_t apart = test_range(&random, 0, 4000);
            for (int i = 0; i < made.action_count[r]; i++)
                ran[r][i].begin += apart, ran[r][i].end += apart;
        }
        double bubble;
        CHECK_EQ_INT(ml_pipeline_replay(&made_case.problem, &made, &t, arena, &bubble), length);
        CHECK_NEAR(bubble, 1 - (double)work / ((double)length * ranks), 1e-12);
        ml_pipeline_times_learn(&made_case.problem, &made, (const ml_task_time *const *)ran, arena,
                                &learnt);
        for (int i = 0; i < made_case.count; i++) CHECK_EQ_INT(learnt.task[i], t.task[i]);
        int64_t predicted = ml_pipeline_replay(&made_case.problem, &made, &learnt, arena, &bubble);
        EXPECT((double)llabs(predicted - length) <= 0.001 * (double)length,
               "%d ranks, schedule %d: a step of %lld takes %lld", ranks, kind, (long long)length,
               (long long)predicted);
    }
    ml_arena_free(arena);
}

/* ---- What it idles ----------------------------------------------------------------------------
 */

/* Bubble of a chain with even costs; late 0: the backward pass has all. */
static double bubble_of(ml_schedule_kind kind, int ranks, int chunks, int microbatches, costs each,
                        int64_t *length) {
    ml_arena *arena = ml_arena_new();
    ml_pipeline_schedule made;
    make_chain(&made_case, kind, ranks, chunks, microbatches, each, NULL);
    make_and_check(&made_case, &made, arena);
    *length = made.length;
    ml_arena_free(arena);
    return made.bubble;
}

TEST(pipeline_schedule, formulas) {
    for (int ranks = 2; ranks <= 16; ranks *= 2)
        for (int groups = 1; groups <= 4; groups++) {
            int m = ranks * groups;
            int64_t length;
            double ideal = (ranks - 1.0) / (m + ranks - 1.0);
            CHECK_NEAR(bubble_of(ML_SCHEDULE_1F1B, ranks, 1, m, even(1, 2, 0), &length), ideal,
                       1e-12);
            CHECK_EQ_INT(length, 3 * (m + ranks - 1));
            for (int chunks = 2; chunks <= 4; chunks += 2) {
                bubble_of(ML_SCHEDULE_INTERLEAVED, ranks, chunks, m, even(1, 2, 0), &length);
                CHECK_EQ_INT(length, 3 * (m * chunks + ranks - 1)); /* a chunk costs less */
            }
            bubble_of(ML_SCHEDULE_ZERO_BUBBLE, ranks, 1, m, even(1, 1, 1), &length);
            CHECK_EQ_INT(length, 3 * m + ranks - 1); /* a third of 3 (ranks - 1) */
            bubble_of(ML_SCHEDULE_ZERO_BUBBLE, ranks, 1, m, even(2, 3, 1), &length);
            CHECK_EQ_INT(length, 6 * m + (ranks - 1) * (2 + 3 - 1));
        }
}

/* No schedule can end before its busiest rank has waited for its first task, done its work, and
 * seen its last one through the others. 1F1B comes near it whatever the costs. */
TEST(pipeline_schedule, uneven_stages_fill_the_slowest) {
    uint64_t random = 9;
    ml_arena *arena = ml_arena_new();
    for (int times = 0; times < 40; times++) {
        int ranks = 2 + times % 7, m = 4 * ranks;
        ml_pipeline_schedule made, bubbles;
        make_chain(&made_case, ML_SCHEDULE_1F1B, ranks, 1, m, even(1, 1, 1), &random);
        make_and_check(&made_case, &made, arena);
        int64_t work[64] = {0}, most = 0, all = 0;
        for (int t = 0; t < made_case.count; t++)
            work[made_case.tasks[t].stage] += made_case.tasks[t].cost;
        for (int r = 0; r < ranks; r++) {
            all += work[r];
            if (work[r] > most) most = work[r];
        }
        CHECK(made.length <= most * m + (all - most) * 5 / 4);
        made_case.problem.kind = ML_SCHEDULE_ZERO_BUBBLE;
        make_and_check(&made_case, &bubbles, arena);
        CHECK(bubbles.length <= made.length);
    }
    ml_arena_free(arena);
}

/* ---- Text, limits and speed -------------------------------------------------------------------
 */

static const char *printed(ml_arena *arena, ml_schedule_kind kind, int ranks, int chunks, int m,
                           costs each) {
    ml_text text = {.arena = arena};
    ml_pipeline_schedule made;
    make_chain(&made_case, kind, ranks, chunks, m, each, NULL);
    make_and_check(&made_case, &made, arena);
    ml_pipeline_schedule_print(&made_case.problem, &made, &text);
    return text.text;
}

TEST(pipeline_schedule, printed) {
    ml_arena *arena = ml_arena_new();
    CHECK_TEXT(printed(arena, ML_SCHEDULE_1F1B, 3, 1, 4, even(1, 2, 0)),
               "F0 F1 F2 . B0 F3 B1 . B2 . B3\n"
               ". F0 F1 . B0 F2 B1 F3 B2 . B3 .\n"
               ". F0 F1 F2 F3 .\n");
    CHECK_TEXT(printed(arena, ML_SCHEDULE_1F1B, 3, 1, 4, even(1, 1, 1)),
               "F0 F1 F2 . B0 F3 B1 . B2 . B3\n"
               ". F0 F1 . B0 W0 F2 B1 W1 F3 B2 W2 . B3 W3 .\n"
               ". F0 W0 F1 W1 F2 W2 F3 W3 .\n");
    CHECK_TEXT(printed(arena, ML_SCHEDULE_ZERO_BUBBLE, 3, 1, 4, even(1, 1, 1)),
               "F0 F1 F2 . B0 F3 B1 B2 B3\n"
               ". F0 F1 . B0 F2 B1 W0 F3 B2 W1 B3 W2 W3\n"
               ". F0 F1 F2 W0 F3 W1 W2 W3\n");
    CHECK_TEXT(printed(arena, ML_SCHEDULE_INTERLEAVED, 2, 2, 4, even(1, 2, 0)),
               "Fa0 Fa1 Fb0 Fb1 Fa2 . Bb0 Fa3 Bb1 Fb2 Ba0 Fb3 Ba1 . Bb2 . Bb3 Ba2 Ba3\n"
               ". Fa0 Fa1 Fb0 Fb1 Fa2 Ba0 Fa3 Ba1 Fb2 Fb3 Ba2 Ba3 .\n");
    CHECK_TEXT(printed(arena, ML_SCHEDULE_GPIPE, 3, 1, 4, even(1, 2, 0)),
               "F0 F1 F2 F3 . B0 . B1 . B2 . B3\n"
               ". F0 F1 F2 F3 B0 . B1 . B2 . B3 .\n"
               ". F0 F1 F2 F3 .\n");
    ml_arena_free(arena);
}

static void make_it(void *argument) {
    ml_arena *arena = argument;
    ml_pipeline_schedule made;
    ml_pipeline_schedule_build(&made_case.problem, arena, &made);
}

TEST(pipeline_schedule, groups_of_microbatches) {
    ml_arena *arena = ml_arena_new();
    make_chain(&made_case, ML_SCHEDULE_INTERLEAVED, 4, 2, 6, even(1, 2, 0), NULL);
    CHECK_RAISES(make_it, arena, ML_INVALID,
                 "6 microbatches over 4 pipeline ranks with 2 stages each: interleaved stages take "
                 "them in groups of 4");
    CHECK_TEXT(ml_error_last()->help, "take 4 or 8 microbatches, or one stage a rank");
    make_chain(&made_case, ML_SCHEDULE_INTERLEAVED, 4, 2, 3, even(1, 2, 0), NULL);
    CHECK_RAISES(make_it, arena, ML_INVALID,
                 "3 microbatches over 4 pipeline ranks with 2 stages each: interleaved stages take "
                 "them in groups of 4");
    CHECK_TEXT(ml_error_last()->help, "take 4 microbatches, or one stage a rank");
    ml_arena_free(arena);
}

/* A million tasks; the limit is for a machine that does much else besides. */
TEST(pipeline_schedule, large_and_fast) {
    ml_arena *arena = ml_arena_new();
    ml_pipeline_schedule made;
    make_chain(&made_case, ML_SCHEDULE_INTERLEAVED, 64, 8, 1024, even(1, 2, 0), NULL);
    clock_t began = clock();
    ml_pipeline_schedule_build(&made_case.problem, arena, &made);
    double seconds = (double)(clock() - began) / CLOCKS_PER_SEC;
    EXPECT(seconds <= 2, "a schedule of a million tasks took %.2f s", seconds);
    CHECK_EQ_INT(made.length, 3 * (1024 * 8 + 63));
    check_pipeline(&made_case, &made);
    ml_arena_free(arena);
}

/* What adds up rows costs the same, whichever op computed the rows. */
static void scattered(fixture *f) {
    ml_axis k = fixture_axis(f, "k"), v = fixture_axis(f, "v");
    ml_ref index = fixture_index(f, "s64", 5);
    ml_ref there = fixture_input(f, ML_F32, "s64 d8", -1, 1);
    ml_ref made = ml_dot(f->g, fixture_input(f, ML_F32, "s64 k32", -1, 1),
                         fixture_input(f, ML_F32, "k32 d8", -1, 1), &k, 1, ML_F32);
    ml_type type = fixture_type(f, ML_F32, "v5 d8");
    double cost = stage_flops(f->g, ml_scatter_add(f->g, index, there, v, &type));
    CHECK(cost > 64 * 8 * sizeof(float));
    CHECK(stage_flops(f->g, ml_scatter_add(f->g, index, made, v, &type)) == cost);
}
TEST(pipeline_schedule, scattered) {
    fixture_run(scattered, 11);
}
