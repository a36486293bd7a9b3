/* The simulation behind every schedule: event by event, each rank's order of tasks is recorded.
 *
 * A unit is a microbatch at a virtual stage. It is open from the start of its first task to the end
 * of its last one that is no weight gradient, and held until its weight gradients are done too. A
 * rank that is free opens the next unit, in a fixed order, while its limits of open and held units
 * allow; else it takes the most advanced task of an open unit. Under the limits of 1F1B this is
 * 1F1B's order wherever a rank need not wait, and the rank never idles while something can run.
 *
 * The simulation ends: the lowest unfinished microbatch can always continue, for units are opened
 * in its order; where edges contradict the order of chunks, that order is given up once nothing
 * else can run. */
#include <assert.h>
#include <string.h>

#include "runtime/pipeline/schedule.h"

static const uint64_t NEVER = UINT64_MAX;
enum { TRIAL_ACTIONS = 1 << 21 };
enum { MOST_ACTIONS = 1 << 24 }; /* tasks times microbatches: 16 million take ten seconds */

/* A task that is ready to run, or a message (an edge) that arrives; the least key comes first. */
typedef struct {
    uint64_t key;
    int task, microbatch;
} ready;
typedef ML_VEC(ready) ready_heap;

typedef struct {
    int first, last; /* of its tasks but weight gradients; -1: none */
    int task_count, weight_grad_count;
} stage;

typedef struct {
    int chunk, group, microbatch; /* of the group that begins with microbatch `group` */
} unit;

typedef struct {
    ready_heap later;    /* tasks of open units */
    ready *weight_grads; /* in the order of the tasks from which they were split */
    int weight_grad_next, weight_grad_count;
    unit next; /* to open */
    int open, held, open_limit, held_limit;
    int running, microbatch; /* task, or -1 */
    bool looked_at;          /* is in `woken` */
    int64_t work;
} rank_state;

typedef struct {
    int *first, *edges; /* of task or rank t: edges[first[t] .. first[t + 1]) */
} edge_index;

/* How a rank chooses its next task, beyond the limit of open units. */
typedef struct schedule_order {
    bool defers;  /* weight gradients run only where nothing else can; else at once */
    int patience; /* and only where no better work comes within so many quarters of their time */
    bool wide;    /* every rank may have as many units open as the first one */
    bool fills;   /* all units are opened before any later task runs */
} schedule_order;
static const schedule_order at_once[] = {{0}};
static const schedule_order filled[] = {{.fills = true}};
static const schedule_order deferred[] = {
    {0}, {true}, {true, 0, true}, {true, 1, true}, {true, 2, true}, {true, 1}, {true, 2}};

typedef struct {
    const ml_pipeline_problem *problem;
    ml_arena *arena, *scratch; /* of the result, and of the simulation */
    int stage_count, microbatches;
    stage *stages;
    ml_task_edge *edges;
    int edge_count;
    edge_index out_of, into; /* by task */
    edge_index to_rank;      /* by rank: the edges to its tasks */
    int *in_flight; /* [edges] microbatches whose source is done and whose user has not begun */
    ready_heap messages; /* by when they arrive: edges that take a while */
    int *rank_of;        /* [tasks] */
    int *after;          /* [tasks]: how many follow in its stage, but weight gradients */
    uint16_t *missing;   /* [tasks][microbatches] sources that are not done */
    uint16_t *unit_left; /* [stages][microbatches] tasks that are not done */
    rank_state *ranks;
    uint64_t *ends; /* a tree: ends[1] is the first, end * leaves + rank; [leaves + rank]: each */
    int leaves;     /* a power of two */
    int *woken, woken_count; /* ranks that may start something */
    schedule_order order;
    bool records; /* the actions, and not their length alone */
    bool *opened; /* [stages][microbatches] */
    int *stage_held;
    ml_pipeline_schedule *out;
} simulation;

/* ---- The kinds ------------------------------------------------------------------------------- */

/* What fills the pipeline behind rank r; for several chunks, up to the first backward task. */
static int limit_1f1b(const ml_pipeline_problem *p, int r) {
    if (p->chunks == 1) return p->ranks - r;
    int limit = 2 * (p->ranks - r - 1) + (p->chunks - 1) * p->ranks + 1;
    return limit < p->chunks * p->microbatches ? limit : p->chunks * p->microbatches;
}

const ml_schedule_rules ml_schedules[] = {
#define ML_SCHEDULE(ident, name, virtual_stages, splits_weight_grad, limit, orders, doc)           \
    {name, doc, virtual_stages, splits_weight_grad, limit, orders, sizeof orders / sizeof *orders},
#include "runtime/pipeline/schedules.def"
#undef ML_SCHEDULE
};

static int open_limit(const ml_pipeline_problem *p, int r) {
    const ml_schedule_rules *rules = &ml_schedules[p->kind];
    return rules->open_limit != NULL ? rules->open_limit(p, r) : p->chunks * p->microbatches;
}

/* ---- The problem ----------------------------------------------------------------------------- */

/* The edges of the problem, then those that keep a stage's tasks in their order. */
static void list_edges(simulation *s) {
    const ml_pipeline_problem *p = s->problem;
    s->edges = ML_NEW_ARRAY(s->scratch, ml_task_edge, p->edge_count + p->task_count);
    for (int e = 0; e < p->edge_count; e++) s->edges[s->edge_count++] = p->edges[e];
    int *previous = ML_NEW_ARRAY(s->scratch, int, s->stage_count);
    for (int v = 0; v < s->stage_count; v++) previous[v] = -1;
    for (int t = 0; t < p->task_count; t++) {
        int *before = &previous[p->tasks[t].stage];
        if (*before >= 0) s->edges[s->edge_count++] = (ml_task_edge){*before, t};
        if (!p->tasks[t].weight_grad) *before = t;
    }
}

/* The edges by a number of each, which is below `count`. */
static edge_index index_edges(const simulation *s, const int *of, int count) {
    edge_index index = {ML_NEW_ARRAY(s->scratch, int, count + 1),
                        ML_NEW_ARRAY(s->scratch, int, s->edge_count)};
    for (int e = 0; e < s->edge_count; e++) index.first[of[e]]++;
    for (int t = 1; t <= count; t++) index.first[t] += index.first[t - 1];
    for (int e = s->edge_count - 1; e >= 0; e--) index.edges[--index.first[of[e]]] = e;
    return index;
}

/* By the task that they come from, by the one that they go to, and by the rank of that. */
static void index_all(simulation *s) {
    const ml_pipeline_problem *p = s->problem;
    int *of = ML_NEW_ARRAY(s->scratch, int, s->edge_count);
    for (int e = 0; e < s->edge_count; e++) of[e] = s->edges[e].from;
    s->out_of = index_edges(s, of, p->task_count);
    for (int e = 0; e < s->edge_count; e++) of[e] = s->edges[e].to;
    s->into = index_edges(s, of, p->task_count);
    for (int e = 0; e < s->edge_count; e++) of[e] = s->rank_of[s->edges[e].to];
    s->to_rank = index_edges(s, of, p->ranks);
}

static void read_problem(simulation *s) {
    const ml_pipeline_problem *p = s->problem;
    for (int v = 0; v < s->stage_count; v++) s->stages[v] = (stage){-1, -1, 0, 0};
    for (int t = p->task_count - 1; t >= 0; t--) {
        assert(p->tasks[t].cost >= 1 && p->tasks[t].stage < s->stage_count);
        stage *v = &s->stages[p->tasks[t].stage];
        s->rank_of[t] = p->tasks[t].stage % p->ranks;
        v->task_count++;
        v->weight_grad_count += p->tasks[t].weight_grad;
        if (p->tasks[t].weight_grad) continue;
        if (v->last < 0) v->last = t;
        if (v->first >= 0) s->after[t] = s->after[v->first] + 1;
        v->first = t;
    }
    list_edges(s);
    index_all(s);
}

static void start_state(simulation *s) {
    const ml_pipeline_problem *p = s->problem;
    int m = s->microbatches;
    for (int t = 0; t < p->task_count; t++)
        for (int i = 0; i < m; i++)
            s->missing[(size_t)t * m + i] = (uint16_t)(s->into.first[t + 1] - s->into.first[t]);
    for (int v = 0; v < s->stage_count; v++)
        for (int i = 0; i < m; i++)
            s->unit_left[(size_t)v * m + i] = (uint16_t)s->stages[v].task_count;
    for (int r = 0; r < p->ranks; r++) {
        s->ranks[r].running = -1;
        s->ranks[r].open_limit = open_limit(p, s->order.wide ? 0 : r);
        s->ranks[r].held_limit = open_limit(p, 0);
        s->ranks[r].looked_at = true;
        s->woken[s->woken_count++] = r;
    }
}

/* ---- Heaps ----------------------------------------------------------------------------------- */

static void heap_push(ml_arena *arena, ready_heap *heap, ready item) {
    ML_PUSH(arena, heap);
    uint32_t i = heap->count - 1;
    for (; i > 0 && heap->at[(i - 1) / 2].key > item.key; i = (i - 1) / 2)
        heap->at[i] = heap->at[(i - 1) / 2];
    heap->at[i] = item;
}

static ready heap_pop(ready_heap *heap) {
    ready top = heap->at[0], item = heap->at[--heap->count];
    uint32_t i = 0, child;
    while ((child = 2 * i + 1) < heap->count) {
        if (child + 1 < heap->count && heap->at[child + 1].key < heap->at[child].key) child++;
        if (heap->at[child].key >= item.key) break;
        heap->at[i] = heap->at[child];
        i = child;
    }
    heap->at[i] = item;
    return top;
}

/* The end of what a rank runs, in a tree of the least of two; NEVER where it runs nothing. */
static void set_end(simulation *s, int rank, uint64_t end) {
    int i = s->leaves + rank;
    s->ends[i] = end == NEVER ? NEVER : end * (uint64_t)s->leaves + (uint64_t)rank;
    for (i /= 2; i > 0; i /= 2) {
        uint64_t left = s->ends[2 * i], right = s->ends[2 * i + 1];
        s->ends[i] = left < right ? left : right;
    }
}

static bool anything_runs(const simulation *s) {
    return s->ends[1] != NEVER;
}

static int64_t first_end(const simulation *s) {
    return (int64_t)(s->ends[1] / (uint64_t)s->leaves);
}

static int first_rank(const simulation *s) {
    return (int)(s->ends[1] % (uint64_t)s->leaves);
}

/* ---- The simulation -------------------------------------------------------------------------- */

/* Later tasks of a stage before earlier ones; groups of microbatches in order, in each the chunks
 * backwards. */
static uint64_t key_of(const simulation *s, int task, int microbatch) {
    const ml_pipeline_problem *p = s->problem;
    int chunk = p->tasks[task].stage / p->ranks;
    uint64_t after = (uint64_t)s->after[task];
    int group = p->chunks == 1 ? 0 : microbatch / p->ranks;
    return after << 56 | (uint64_t)group << 32 | (uint64_t)(p->chunks - 1 - chunk) << 24 |
           (uint64_t)(microbatch - group * p->ranks);
}

static void wake(simulation *s, int rank) {
    if (s->ranks[rank].looked_at || s->ranks[rank].running >= 0) return;
    s->ranks[rank].looked_at = true;
    s->woken[s->woken_count++] = rank;
}

static void begin(simulation *s, int rank, int task, int microbatch, int64_t now) {
    rank_state *at = &s->ranks[rank];
    int v = s->problem->tasks[task].stage;
    if (task == s->stages[v].first) {
        at->open++, at->held++;
        s->opened[(size_t)v * s->microbatches + microbatch] = true;
        int held = ++s->stage_held[v];
        if (held > s->out->held[v]) s->out->held[v] = held;
    }
    for (int i = s->into.first[task]; i < s->into.first[task + 1]; i++)
        s->in_flight[s->into.edges[i]]--;
    int64_t end = now + s->problem->tasks[task].cost;
    at->running = task, at->microbatch = microbatch;
    at->work += s->problem->tasks[task].cost;
    if (s->records)
        s->out->actions[rank][s->out->action_count[rank]++] =
            (ml_action){task, microbatch, now, end};
    set_end(s, rank, (uint64_t)end);
}

/* The next unit to open: groups of `ranks` microbatches, each for all chunks in turn. */
static void next_unit(const ml_pipeline_problem *p, unit *u) {
    int size = p->chunks == 1 || p->microbatches == 1 ? p->microbatches : p->ranks;
    if (++u->microbatch < u->group + size) return;
    if (++u->chunk == p->chunks) *u = (unit){0, u->group + size, 0};
    u->microbatch = u->group;
}

static bool can_open(const simulation *s, int rank, const unit *u) {
    int task = s->stages[u->chunk * s->problem->ranks + rank].first;
    return s->missing[(size_t)task * s->microbatches + u->microbatch] == 0;
}

static bool was_opened(const simulation *s, int rank, const unit *u) {
    size_t v = (size_t)u->chunk * s->problem->ranks + rank;
    return s->stages[v].first < 0 || s->opened[v * s->microbatches + u->microbatch];
}

static bool open_next(simulation *s, int rank, int64_t now) {
    rank_state *at = &s->ranks[rank];
    unit *u = &at->next;
    while (u->group < s->microbatches && was_opened(s, rank, u)) next_unit(s->problem, u);
    if (u->group >= s->microbatches || at->open >= at->open_limit || at->held >= at->held_limit ||
        !can_open(s, rank, u))
        return false;
    begin(s, rank, s->stages[u->chunk * s->problem->ranks + rank].first, u->microbatch, now);
    return true;
}

/* Whether the microbatch's task can begin once this edge's message has arrived. */
static bool waits_alone(const simulation *s, int rank, int edge, int microbatch) {
    const rank_state *at = &s->ranks[rank];
    int user = s->edges[edge].to;
    if (s->rank_of[user] != rank || s->missing[(size_t)user * s->microbatches + microbatch] != 1)
        return false;
    bool opens = user == s->stages[s->problem->tasks[user].stage].first;
    return !opens || (at->open < at->open_limit && at->held < at->held_limit);
}

/* Whether the rank gets better work before `until`. */
static bool better_comes(const simulation *s, int rank, int64_t until) {
    for (uint32_t i = 0; i < s->messages.count; i++) {
        const ready *message = &s->messages.at[i];
        if ((int64_t)message->key <= until &&
            waits_alone(s, rank, message->task, message->microbatch))
            return true;
    }
    for (int i = s->to_rank.first[rank]; i < s->to_rank.first[rank + 1]; i++) {
        int e = s->to_rank.edges[i], task = s->edges[e].from, r = s->rank_of[task];
        if (s->ranks[r].running != task) continue;
        int64_t end = (int64_t)(s->ends[s->leaves + r] / (uint64_t)s->leaves);
        if (end + s->edges[e].delay <= until && waits_alone(s, rank, e, s->ranks[r].microbatch))
            return true;
    }
    return false;
}

static void dispatch(simulation *s, int rank, int64_t now) {
    rank_state *at = &s->ranks[rank];
    bool weight_grad = at->weight_grad_next < at->weight_grad_count;
    if (!weight_grad || s->order.defers) {
        if (open_next(s, rank, now)) return;
        if (s->order.fills && at->next.group < s->microbatches) return;
        weight_grad = weight_grad && !at->later.count;
        if (!weight_grad && !at->later.count) return;
    }
    if (weight_grad && s->order.patience > 0) {
        int64_t cost = s->problem->tasks[at->weight_grads[at->weight_grad_next].task].cost;
        if (better_comes(s, rank, now + cost * s->order.patience / 4)) return;
    }
    ready item = weight_grad ? at->weight_grads[at->weight_grad_next++] : heap_pop(&at->later);
    begin(s, rank, item.task, item.microbatch, now);
}

static void add_ready(simulation *s, int rank, int task, int microbatch) {
    rank_state *at = &s->ranks[rank];
    ready item = {.task = task, .microbatch = microbatch};
    if (s->problem->tasks[task].weight_grad) {
        at->weight_grads[at->weight_grad_count++] = item;
        return;
    }
    item.key = key_of(s, task, microbatch);
    heap_push(s->scratch, &at->later, item);
}

static void arrive(simulation *s, int edge, int microbatch) {
    int user = s->edges[edge].to;
    if (--s->missing[(size_t)user * s->microbatches + microbatch] > 0) return;
    if (user != s->stages[s->problem->tasks[user].stage].first)
        add_ready(s, s->rank_of[user], user, microbatch);
    wake(s, s->rank_of[user]);
}

static void finish(simulation *s, int rank, int64_t now) {
    const ml_pipeline_problem *p = s->problem;
    rank_state *at = &s->ranks[rank];
    int task = at->running, microbatch = at->microbatch, v = p->tasks[task].stage;
    at->running = -1;
    set_end(s, rank, NEVER);
    if (task == s->stages[v].last) at->open--;
    if (--s->unit_left[(size_t)v * s->microbatches + microbatch] == 0)
        at->held--, s->stage_held[v]--;
    for (int i = s->out_of.first[task]; i < s->out_of.first[task + 1]; i++) {
        int e = s->out_of.edges[i], in_flight = ++s->in_flight[e];
        if (in_flight > s->out->in_flight[e]) s->out->in_flight[e] = in_flight;
        if (s->edges[e].delay == 0)
            arrive(s, e, microbatch);
        else
            heap_push(s->scratch, &s->messages,
                      (ready){(uint64_t)(now + s->edges[e].delay), e, microbatch});
    }
    wake(s, rank);
}

/* Nothing runs and nothing can: the order in which units are opened does not suit the edges. The
 * first unit that is ready is opened out of order and beyond the limits. */
static bool open_any(simulation *s, int64_t now) {
    const ml_pipeline_problem *p = s->problem;
    for (unit u = {0}; u.group < s->microbatches; next_unit(p, &u))
        for (int r = 0; r < p->ranks; r++) {
            if (was_opened(s, r, &u) || !can_open(s, r, &u)) continue;
            begin(s, r, s->stages[u.chunk * p->ranks + r].first, u.microbatch, now);
            return true;
        }
    return false;
}

/* Nor can a unit be opened: one waits for a later task of a rank that opens all its units first. */
static bool run_any(simulation *s, int64_t now) {
    for (int r = 0; r < s->problem->ranks; r++) {
        if (s->ranks[r].later.count == 0) continue;
        ready item = heap_pop(&s->ranks[r].later);
        begin(s, r, item.task, item.microbatch, now);
        return true;
    }
    return false;
}

/* Time advances to the next end of a task or message; false: there is none. */
static bool advance(const simulation *s, int64_t *now) {
    bool runs = anything_runs(s);
    if (!runs && s->messages.count == 0) return false;
    int64_t next = runs ? first_end(s) : INT64_MAX;
    if (s->messages.count > 0 && (int64_t)s->messages.at[0].key < next)
        next = (int64_t)s->messages.at[0].key;
    *now = next;
    return true;
}

static int64_t simulate(simulation *s) {
    int64_t now = 0;
    do {
        while (anything_runs(s) && first_end(s) == now) finish(s, first_rank(s), now);
        while (s->messages.count > 0 && (int64_t)s->messages.at[0].key == now) {
            ready message = heap_pop(&s->messages);
            arrive(s, message.task, message.microbatch);
        }
        for (int i = 0; i < s->woken_count; i++) {
            s->ranks[s->woken[i]].looked_at = false;
            dispatch(s, s->woken[i], now);
        }
        s->woken_count = 0;
    } while (advance(s, &now) || open_any(s, now) || run_any(s, now));
    return now;
}

/* ---- Building one ---------------------------------------------------------------------------- */

static void check_problem(const ml_pipeline_problem *p) {
    int m = p->microbatches, ranks = p->ranks;
    if (m < 1) ml_raise(ML_INVALID, "a pipeline of %d microbatches", m);
    if ((int64_t)m * p->task_count > MOST_ACTIONS) {
        ml_fail(ML_INVALID,
                "a pipeline of %d microbatches and %d tasks for each is too long to plan: %d of "
                "all are the most",
                m, p->task_count, MOST_ACTIONS);
        ml_help("fewer, larger microbatches: %d at most", MOST_ACTIONS / p->task_count);
        ml_raise_last();
    }
    if (p->chunks == 1 || m == 1 || m % ranks == 0) return; /* one: nothing overlaps */
    ml_fail(ML_INVALID,
            "%d microbatches over %d pipeline ranks with %d stages each: interleaved stages take "
            "them in groups of %d",
            m, ranks, p->chunks, ranks);
    int below = m / ranks * ranks;
    if (below)
        ml_help("take %d or %d microbatches, or one stage a rank", below, below + ranks);
    else
        ml_help("take %d microbatches, or one stage a rank", ranks);
    ml_raise_last();
}

static void simulation_new(simulation *s) {
    const ml_pipeline_problem *p = s->problem;
    ml_arena *arena = s->scratch;
    int m = s->microbatches = p->microbatches;
    s->stage_count = p->ranks * p->chunks;
    s->stages = ML_NEW_ARRAY(arena, stage, s->stage_count);
    s->after = ML_NEW_ARRAY(arena, int, p->task_count);
    s->rank_of = ML_NEW_ARRAY(arena, int, p->task_count);
    s->missing = ML_NEW_ARRAY(arena, uint16_t, (size_t)p->task_count * m);
    s->unit_left = ML_NEW_ARRAY(arena, uint16_t, (size_t)s->stage_count * m);
    s->opened = ML_NEW_ARRAY(arena, bool, (size_t)s->stage_count *m);
    s->ranks = ML_NEW_ARRAY(arena, rank_state, p->ranks);
    for (s->leaves = 2; s->leaves < p->ranks;) s->leaves *= 2;
    s->ends = ML_NEW_ARRAY(arena, uint64_t, 2 * s->leaves);
    for (int i = 0; i < 2 * s->leaves; i++) s->ends[i] = NEVER;
    s->woken = ML_NEW_ARRAY(arena, int, p->ranks);
    s->stage_held = ML_NEW_ARRAY(arena, int, s->stage_count);
    read_problem(s);
    s->in_flight = ML_NEW_ARRAY(arena, int, s->edge_count);
}

static void output_new(simulation *s) {
    const ml_pipeline_problem *p = s->problem;
    *s->out = (ml_pipeline_schedule){.actions = ML_NEW_ARRAY(s->arena, ml_action *, p->ranks),
                                     .action_count = ML_NEW_ARRAY(s->arena, int, p->ranks),
                                     .in_flight = ML_NEW_ARRAY(s->arena, int, s->edge_count),
                                     .held = ML_NEW_ARRAY(s->arena, int, s->stage_count)};
    for (int r = 0; r < p->ranks; r++) {
        int tasks = 0, weight_grad = 0;
        for (int v = r; v < s->stage_count; v += p->ranks) {
            tasks += s->stages[v].task_count;
            weight_grad += s->stages[v].weight_grad_count;
        }
        s->ranks[r].weight_grads =
            ML_NEW_ARRAY(s->scratch, ready, (size_t)weight_grad * s->microbatches);
        if (!s->records) continue;
        s->out->actions[r] = ML_NEW_ARRAY(s->arena, ml_action, (size_t)tasks * s->microbatches);
    }
}

static void order_body(void *context) {
    simulation *s = context;
    const ml_pipeline_problem *p = s->problem;
    simulation_new(s);
    output_new(s);
    start_state(s);
    s->out->length = simulate(s);
    double work = 0;
    for (int r = 0; r < p->ranks; r++) work += (double)s->ranks[r].work;
    if (s->out->length) s->out->bubble = 1 - work / ((double)s->out->length * p->ranks);
}

void ml_pipeline_schedule_by_order(const ml_pipeline_problem *problem, int number, ml_arena *arena,
                                   ml_pipeline_schedule *out) {
    simulation s = {.problem = problem, .out = out, .scratch = ml_arena_new()};
    if (s.scratch == NULL) ml_raise(ML_NO_MEMORY, "no memory left to plan a pipeline");
    s.records = arena != NULL;
    s.arena = s.records ? arena : s.scratch;
    s.order = ml_schedules[problem->kind].orders[number];
    ml_status status = ml_protect(order_body, &s);
    ml_arena_free(s.scratch);
    if (status != ML_OK) ml_raise_last();
}

/* Where costs are uneven a weight gradient may begin just before its rank gets better work; then
 * another order can be the shorter one, even the one that defers none (order 0, which must be
 * shorter to be taken). Each order is tried on a step of a few microbatches, of fewer for more than
 * 400 ranks: several orders take as many seconds there. An order that opens more units must be
 * worth their memory. */
static int best_order(const ml_pipeline_problem *problem) {
    const ml_schedule_rules *rules = &ml_schedules[problem->kind];
    ml_pipeline_problem trial = *problem;
    int64_t shortest = 0;
    int best = 0, most = TRIAL_ACTIONS / trial.task_count;
    if (rules->order_count == 1) return 0;
    if (most > 4 * trial.ranks) most = 4 * trial.ranks;
    if (trial.microbatches > most) trial.microbatches = most > 0 ? most : 1;
    for (int i = rules->order_count - 1; i >= 0; i--) {
        ml_pipeline_schedule schedule;
        ml_pipeline_schedule_by_order(&trial, i, NULL, &schedule);
        int64_t length = schedule.length;
        if (rules->orders[i].wide) length += length / 200;
        if (shortest > 0 && (i == 0 ? length >= shortest : length > shortest)) continue;
        shortest = length;
        best = i;
    }
    return best;
}

void ml_pipeline_schedule_build(const ml_pipeline_problem *problem, ml_arena *arena,
                                ml_pipeline_schedule *out) {
    check_problem(problem);
    ml_pipeline_schedule_by_order(problem, best_order(problem), arena, out);
}

/* ---- Printing -------------------------------------------------------------------------------- */

/* The index of a task in its stage: F, B, C, ...; W for weight gradients. */
static char letter_of(const ml_pipeline_problem *p, int task) {
    if (p->tasks[task].weight_grad) return 'W';
    int place = 0;
    for (int t = 0; t < task; t++)
        place += p->tasks[t].stage == p->tasks[task].stage && !p->tasks[t].weight_grad;
    return place == 0 ? 'F' : place < 21 ? (char)('A' + place) : 'V';
}

void ml_pipeline_schedule_print(const ml_pipeline_problem *problem, const ml_pipeline_schedule *p,
                                ml_text *out) {
    char *letters = ML_NEW_ARRAY(out->arena, char, problem->task_count + 1);
    for (int t = 0; t < problem->task_count; t++) letters[t] = letter_of(problem, t);
    for (int r = 0; r < problem->ranks; r++) {
        int64_t now = 0;
        for (int i = 0; i < p->action_count[r]; i++) {
            const ml_action *action = &p->actions[r][i];
            int chunk = problem->tasks[action->task].stage / problem->ranks;
            const char *space = i ? " " : "";
            if (action->start > now) ml_text_add(out, "%s.", space), space = " ";
            ml_text_add(out, "%s%c", space, letters[action->task]);
            if (problem->chunks > 1) ml_text_add(out, "%c", chunk < 26 ? 'a' + chunk : 'z');
            ml_text_add(out, "%d", action->microbatch);
            now = action->end;
        }
        ml_text_add(out, now < p->length ? " .\n" : "\n");
    }
}
