/* Collectives beside computation: a new order of the steps, and where each collective is waited
 * for.
 *
 * The order comes from simulating a GPU that runs computation in one stream and the collectives of
 * each mesh axis in a stream of their own. Computation stays in order, with two exceptions, at most
 * WINDOW steps ahead: where the next step would wait for a collective, a later one that can run
 * comes first (some weight gradients are reserved for that); and what leads to a collective whose
 * result is needed soon comes before what does not. Pre-communication layout copies (kernels that
 * only write an operand of a collective, such as a gradient in another order) run at once. A
 * collective starts
 * - as soon as its operand is there, where its result is no larger (sums of gradients); those whose
 *   result is needed much later wait for others, to be one launch of BUCKET seconds, and for an
 *   idle stream;
 * - before all else where it may lead (lower.h), beside the microbatch before: in the order in
 *   which that makes the operands, in launches of BUCKET seconds at least, the last ones short;
 * - else (gathered parameters) as late as possible, so that its results do not fill memory: while
 *   less than AHEAD_BYTES, or two of the largest, are unused, or when computation has reached it.
 * Every collective with computation between it and the first step that needs it gets a ticket and
 * a WAIT before that step. The WAIT reads both operands, so that their memory is not reused before.
 *
 * Times are estimates (base/machine.h), those of collectives from the data sheet of what joins the
 * GPUs (ml_target): only the order depends on them, and it is the same on every rank, because they
 * come from the plan and from what the ranks' devices agreed on. */
#include "runtime/plan/overlap.h"
#include "runtime/base/knobs.h"
#include "runtime/base/machine.h"
#include "runtime/plan/dependencies.h"
#include "runtime/plan/due_list.h"
#include "runtime/plan/plan_internal.h"

#include <stdlib.h>

/* Seconds. What is needed later than LATER waits for others to be one launch: gradients of weights,
 * but not what the next part of a layer, which may be several products away, is made of. */
static const double SOON = 1e-3, LATER = 3e-3;
/* Seconds: what small launches reach of a link's speed is little; how much later than estimated a
 * launch may be over, all of it at once. */
static const double BUCKET = 0.6e-3, SLACK = 5 * BUCKET;
static const int64_t AHEAD_BYTES = (int64_t)512 << 20;
enum { WINDOW = 64, MOST_ANCESTORS = 12, MOST_LEFT = 4, NONE = UINT32_MAX };

typedef ML_VEC(uint32_t) step_list;
/* What is asked of steps again and again, a byte each: of WINDOW steps a line of a cache. */
enum {
    COLLECTIVE = 1,
    GROWS = 2,   /* its output exceeds its input: an all-gather */
    AT_ONCE = 4, /* a collective whose result is needed right behind it in the old order */
    LEAVES = 8,  /* can be left: the gradient of weights, which is not needed for long */
    PLACED = 16,
};

typedef struct {
    const ml_schedule *s;
    const ml_layout *layout;
    ml_arena *scratch;
    uint32_t count;
    step_edges before, after;
    double *cost, *clock;  /* of a step; when computation would reach it in the old order */
    double *need, *latest; /* of a collective: when its result is needed, when it must start */
    uint32_t *user;        /* of a collective: the first step that needs it, or `count` */
    uint8_t *marks;        /* COLLECTIVE ... PLACED */
    uint32_t *waiting;     /* steps before it that are not placed */
    double *available;     /* when all before the step that is placed is finished */
    uint32_t *later;       /* of an unplaced step of computation: the next one, or `count`; at
                              [count] the first */
    uint32_t *earlier;     /* the one before, or `count` */
    bool *comm_copy;   /* pre-communication layout copy: read by no step but collectives, none an
                          all-gather */
    bool *gather_copy; /* the same, only all-gathers do; it has a `latest` too */
    uint32_t *group;   /* of a placed collective: those of a launch have the same number */
    uint32_t *order, placed_count, next, group_count;
    due_list eager;         /* collectives whose operands are computed */
    ML_VEC(due_step) fresh; /* those that became so while start_available walks the list */
    bool walks;
    step_list copies_ready; /* comm_copy steps whose operands are there */
    step_list early;        /* all-gathers and their copies: a heap, the first to start on top */
    step_list held[ML_MAX_MESH];      /* wait for others to be one launch */
    uint32_t held_first[ML_MAX_MESH]; /* those before it have started */
    double held_bytes[ML_MAX_MESH], held_need[ML_MAX_MESH];
    double bucket[ML_MAX_MESH]; /* bytes of a launch of BUCKET seconds */
    double progress; /* in the old order's time: of what is computed, whatever was left behind */
    double now, stream[ML_MAX_MESH]; /* when computation and the streams are free */
    int64_t ahead, most_ahead;       /* bytes of results of collectives that no step has used yet */
} overlap;

static bool is_collective(const overlap *o, uint32_t step) {
    return o->marks[step] & COLLECTIVE;
}

static int64_t value_bytes(const overlap *o, uint32_t step, int which) {
    return ml_type_bytes(&o->s->values.at[o->s->steps.at[step].values[which]].type);
}

/* Whether a collective's output exceeds its input: an all-gather. Its result takes memory from the
 * start on, so it starts as late as its users allow; others start as soon as they can. */
static bool grows(const overlap *o, uint32_t step) {
    return o->marks[step] & GROWS;
}

static bool leads(const overlap *o, uint32_t t) {
    return is_collective(o, t) && o->s->steps.at[t].collective->lead_order != 0;
}

/* ---- Times ---- */
/* When each result is needed and, stream by stream, when all-gathers must start. */
static void times_find(overlap *o) {
    double clock = 0, stream[ML_MAX_MESH];
    for (uint32_t t = 0; t < o->count; t++) {
        o->cost[t] = plan_step_seconds(o->s, o->layout, t);
        o->clock[t] = clock;
        if (!is_collective(o, t)) clock += o->cost[t];
    }
    for (int i = 0; i < ML_MAX_MESH; i++) stream[i] = clock;
    for (uint32_t t = o->count; t-- > 0;) {
        if (!is_collective(o, t)) continue;
        int axis = o->s->steps.at[t].collective->mesh_axis;
        o->need[t] = clock;
        o->user[t] = o->count;
        for (uint32_t e = o->after.first[t]; e < o->after.first[t + 1]; e++) {
            uint32_t to = o->after.edge[e];
            double when = is_collective(o, to) ? o->latest[to] : o->clock[to];
            if (when < o->need[t]) o->need[t] = when;
            if (to < o->user[t]) o->user[t] = to;
        }
        double end = grows(o, t) && stream[axis] < o->need[t] ? stream[axis] : o->need[t];
        o->latest[t] = end - o->cost[t] - ml_machine_planned.wait_seconds;
        if (grows(o, t)) stream[axis] = end - o->cost[t];
    }
}

/* Whether only collectives of one kind, or layout copies for them, read a step's results. */
static bool only_needed(const overlap *o, uint32_t t, const bool *comm_copy, bool by_growing) {
    for (uint32_t e = o->after.first[t]; e < o->after.first[t + 1]; e++) {
        uint32_t to = o->after.edge[e];
        if (!comm_copy[to] && (!is_collective(o, to) || grows(o, to) != by_growing)) return false;
    }
    return o->after.first[t] < o->after.first[t + 1];
}

static void comm_copies_find(overlap *o) {
    for (uint32_t t = o->count; t-- > 0;) {
        const ml_step *step = &o->s->steps.at[t];
        if (step->kind != ML_STEP_KERNEL && step->kind != ML_STEP_COPY) continue;
        o->comm_copy[t] = only_needed(o, t, o->comm_copy, false);
        o->gather_copy[t] = only_needed(o, t, o->gather_copy, true);
        o->latest[t] = o->clock[t];
        for (uint32_t e = o->after.first[t]; e < o->after.first[t + 1] && o->gather_copy[t]; e++)
            if (o->latest[o->after.edge[e]] - o->cost[t] < o->latest[t])
                o->latest[t] = o->latest[o->after.edge[e]] - o->cost[t];
    }
}

/* ---- The simulation ---- */
/* When everything before the step is finished. */
static double available(const overlap *o, uint32_t t) {
    return o->available[t];
}

static void early_push(overlap *o, uint32_t t) {
    ML_PUSH(o->scratch, &o->early);
    uint32_t at = o->early.count - 1, *heap = o->early.at;
    for (; at > 0 && o->latest[heap[(at - 1) / 2]] > o->latest[t]; at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = t;
}

static uint32_t early_pop(overlap *o) {
    uint32_t *heap = o->early.at, top = heap[0], last = heap[--o->early.count], at = 0;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= o->early.count) break;
        if (child + 1 < o->early.count && o->latest[heap[child + 1]] < o->latest[heap[child]])
            child++;
        if (o->latest[last] <= o->latest[heap[child]]) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

static void eager_push(overlap *o, uint32_t t) {
    const due_step step = {available(o, t), t};
    if (o->walks)
        *ML_PUSH(o->scratch, &o->fresh) = step;
    else
        due_add(&o->eager, step);
}

static void ready(overlap *o, uint32_t t) {
    if (leads(o, t)) return; /* lead_axis has it */
    if (o->comm_copy[t]) *ML_PUSH(o->scratch, &o->copies_ready) = t;
    if (o->gather_copy[t]) early_push(o, t);
    if (!is_collective(o, t)) return;
    if (grows(o, t))
        early_push(o, t);
    else
        eager_push(o, t);
}

static void append(overlap *o, uint32_t t, double finish) {
    o->order[o->placed_count++] = t;
    o->marks[t] |= PLACED;
    for (uint32_t e = o->before.first[t]; e < o->before.first[t + 1]; e++) {
        uint32_t from = o->before.edge[e];
        if (!is_collective(o, from) || o->user[from] != t || !grows(o, from)) continue;
        o->ahead -= value_bytes(o, from, 1);
        o->user[from] = o->count; /* once */
    }
    for (uint32_t e = o->after.first[t]; e < o->after.first[t + 1]; e++) {
        uint32_t to = o->after.edge[e];
        if (finish > o->available[to]) o->available[to] = finish;
        if (--o->waiting[to] == 0) ready(o, to);
    }
    if (!is_collective(o, t)) {
        o->later[o->earlier[t]] = o->later[t];
        o->earlier[o->later[t]] = o->earlier[t];
    }
    while (o->next < o->count && (o->marks[o->next] & PLACED)) o->next++;
}

/* Beside computation a launch takes up to three times as long as alone. Who needs a result that
 * is not needed soon (a gradient's norm) is not to come so close behind that all would wait. */
static void start(overlap *o, uint32_t t, bool begins_group) {
    int axis = o->s->steps.at[t].collective->mesh_axis;
    double from = available(o, t);
    if (o->now > from) from = o->now;
    if (o->stream[axis] > from) from = o->stream[axis];
    if (begins_group) from += ml_machine_planned.wait_seconds, o->group_count++;
    o->stream[axis] = from + o->cost[t];
    o->group[t] = o->group_count;
    bool soon = grows(o, t) || o->need[t] - o->progress <= LATER;
    if (grows(o, t) && o->user[t] < o->count) o->ahead += value_bytes(o, t, 1);
    append(o, t, o->stream[axis] + (soon ? 0 : SLACK));
}

static void hold(overlap *o, int axis, uint32_t t) {
    if (o->held[axis].count == o->held_first[axis] || o->need[t] < o->held_need[axis])
        o->held_need[axis] = o->need[t];
    *ML_PUSH(o->scratch, &o->held[axis]) = t;
    o->held_bytes[axis] += ml_step_sent(o->s->steps.at[t].collective);
}

/* Start the next launch of what is held for a mesh axis; false where there is nothing. */
static bool flush(overlap *o, int axis) {
    double bytes = 0;
    uint32_t begin = o->held_first[axis], at = begin;
    for (; at < o->held[axis].count && bytes < o->bucket[axis]; at++) {
        uint32_t t = o->held[axis].at[at];
        start(o, t, at == begin);
        bytes += ml_step_sent(o->s->steps.at[t].collective);
    }
    o->held_first[axis] = at;
    o->held_bytes[axis] -= bytes;
    return at > begin;
}

static bool flush_all(overlap *o) {
    bool any = false;
    for (int i = 0; i < o->layout->count; i++) any |= flush(o, i);
    return any;
}

/* The list stays in order: what a start makes ready comes where the step was. */
static void start_available(overlap *o) {
    if (o->eager.count == 0 || due_earliest(&o->eager) > o->now) return;
    int last = -1;
    o->walks = true;
    for (uint32_t at = 0; (at = due_find(&o->eager, at, o->now)) != DUE_NONE;) {
        const uint32_t t = o->eager.places.at[at].step;
        const int axis = o->s->steps.at[t].collective->mesh_axis;
        if (o->need[t] - o->progress > LATER) {
            hold(o, axis, t);
        } else {
            start(o, t, axis != last);
            last = axis;
        }
        at = due_replace(&o->eager, at, o->fresh.at, o->fresh.count);
        o->fresh.count = 0;
    }
    o->walks = false;
    due_trim(&o->eager);
}

/* Collectives whose results are needed soon start; the others wait for one another and for an idle
 * stream, so that they never delay the former for long. */
static void start_eager(overlap *o) {
    start_available(o);
    for (int i = 0; i < o->layout->count; i++) {
        bool idle = o->stream[i] <= o->now, full = o->held_bytes[i] >= o->bucket[i];
        bool due = o->held_need[i] - o->progress <= LATER;
        if (due)
            while (flush(o, i)) continue;
        else if (full && idle)
            flush(o, i);
    }
}

static void compute(overlap *o, uint32_t t) {
    uint32_t i = 0;
    while (i < o->copies_ready.count && o->copies_ready.at[i] != t) i++;
    if (i < o->copies_ready.count)
        o->copies_ready.at[i] = o->copies_ready.at[--o->copies_ready.count];
    o->now += o->cost[t];
    o->progress += o->cost[t];
    append(o, t, o->now);
}

/* Collectives whose output exceeds the input (all-gathers) start in time for their users, as many
 * as memory allows; with one start all that follow soon in the same stream, up to a bucket. Their
 * layout copies run before. */
static bool start_early(overlap *o, bool forced) {
    double at = o->progress, bytes = 0, limit = 0;
    bool any = false;
    for (int axis = -1; o->early.count > 0; forced = false) {
        uint32_t t = o->early.at[0];
        const ml_collective_step *c = o->s->steps.at[t].collective;
        double busy = c ? o->stream[c->mesh_axis] - o->now : 0;
        double margin = SOON + (c ? o->cost[t] : SOON) + (busy > 0 ? busy : 0);
        bool room = o->ahead < o->most_ahead, done = o->marks[t] & PLACED;
        bool due = at + margin >= o->latest[t] && (room || o->clock[t] <= at);
        bool joins = c && c->mesh_axis == axis && o->latest[t] <= limit && room &&
                     bytes + ml_step_sent(c) <= o->bucket[c->mesh_axis];
        if (!due && !joins && !forced && !done) break;
        if (available(o, t) > o->now && !done && !c) break; /* a kernel waits for a collective */
        early_pop(o);
        if (done) continue;
        any = true;
        if (!c) {
            compute(o, t);
            continue;
        }
        if (axis != c->mesh_axis) bytes = 0, limit = o->latest[t] + SOON;
        start(o, t, axis != c->mesh_axis);
        bytes += ml_step_sent(c);
        axis = c->mesh_axis;
    }
    return any;
}

/* Start the all-gathers that are next in the order of computation, however many bytes of results
 * are unused: one of a slow stream, to be started long before its users, may be on top of the heap
 * and wait for room. */
static bool start_reached(overlap *o) {
    double bytes = 0;
    bool any = false;
    for (int axis = -1; o->next < o->count; any = true) {
        uint32_t t = o->next;
        if (!is_collective(o, t) || !grows(o, t)) break;
        const ml_collective_step *c = o->s->steps.at[t].collective;
        bool joins = c->mesh_axis == axis && bytes + ml_step_sent(c) <= o->bucket[c->mesh_axis];
        if (!joins) bytes = 0;
        start(o, t, !joins);
        bytes += ml_step_sent(c);
        axis = c->mesh_axis;
    }
    return any;
}

/* A product that is not needed for long: the gradient of weights. */
static bool can_be_left(const overlap *o, uint32_t t) {
    if (o->s->steps.at[t].kind != ML_STEP_GEMM) return false;
    for (uint32_t e = o->after.first[t]; e < o->after.first[t + 1]; e++)
        if (o->clock[o->after.edge[e]] - o->clock[t] < 4 * SOON) return false;
    return true;
}

/* What follows from the times of the old order. */
static void marks_add(overlap *o) {
    for (uint32_t t = 0; t < o->count; t++) {
        if (is_collective(o, t) && o->need[t] - o->clock[t] <= SOON) o->marks[t] |= AT_ONCE;
        if (can_be_left(o, t)) o->marks[t] |= LEAVES;
    }
}

/* The first step that can run at once among those that a collective still waits for; NONE where
 * another collective comes before it or they are too many. */
static uint32_t leads_to(const overlap *o, uint32_t t) {
    uint32_t list[MOST_ANCESTORS], count = 0, best = NONE;
    for (uint32_t at = 0;; at++) {
        for (uint32_t e = o->before.first[t]; e < o->before.first[t + 1]; e++) {
            uint32_t from = o->before.edge[e], i = 0;
            if (o->marks[from] & PLACED) continue;
            if (is_collective(o, from) || count == MOST_ANCESTORS) return NONE;
            while (i < count && list[i] != from) i++;
            if (i == count) list[count++] = from;
        }
        if (at == count) break;
        t = list[at];
        if (o->waiting[t] == 0 && t < best && available(o, t) <= o->now) best = t;
    }
    return best;
}

/* Whether a collective whose result is needed right away is close ahead: then there will be time
 * to fill. */
static bool will_wait(const overlap *o) {
    const uint32_t end = o->count - o->next > WINDOW ? o->next + WINDOW : o->count;
    for (uint32_t t = o->next; t < end; t++)
        if ((o->marks[t] & (PLACED | COLLECTIVE | GROWS | AT_ONCE)) == (COLLECTIVE | AT_ONCE))
            return true;
    return false;
}

/* A collective that is needed soon, and waits for computation close ahead: the first step of that
 * which can run. */
static uint32_t urgent(const overlap *o) {
    const uint32_t end = o->count - o->next > WINDOW ? o->next + WINDOW : o->count;
    for (uint32_t t = o->next; t < end; t++) {
        if ((o->marks[t] & (PLACED | COLLECTIVE)) != COLLECTIVE) continue;
        if (o->waiting[t] == 0 || o->need[t] - o->progress > SOON) continue;
        return leads_to(o, t);
    }
    return NONE;
}

/* The step of computation to run next, or NONE where each would have to wait. A few that can be
 * left are reserved for when others wait. */
static uint32_t choose(const overlap *o) {
    for (uint32_t i = 0; i < o->copies_ready.count; i++)
        if (available(o, o->copies_ready.at[i]) <= o->now) return o->copies_ready.at[i];
    uint32_t best = urgent(o), left = NONE, left_count = 0, seen = 0;
    if (best != NONE) return best;
    bool leave = will_wait(o);
    for (uint32_t t = o->later[o->count]; t < o->count && seen < WINDOW; t = o->later[t]) {
        seen++;
        if (o->waiting[t] != 0 || available(o, t) > o->now) continue;
        if (!leave || !(o->marks[t] & LEAVES)) return t;
        if (left == NONE) left = t;
        if (++left_count == MOST_LEFT) break;
    }
    return left;
}

/* When something that waits for a collective can continue; 0 where nothing does. */
static double next_event(const overlap *o) {
    double when = 0;
    uint32_t seen = 0;
    if (o->eager.count > 0) when = due_earliest(&o->eager);
    if (o->early.count > 0 && available(o, o->early.at[0]) > o->now)
        when = available(o, o->early.at[0]);
    for (uint32_t t = o->later[o->count]; t < o->count && seen < WINDOW; t = o->later[t]) {
        seen++;
        if (o->waiting[t] != 0) continue;
        double at = available(o, t);
        if (when == 0 || at < when) when = at;
    }
    return when;
}

/* A launch of what leads, then one of those that only waited for these. */
static void lead(overlap *o, step_list *list) {
    while (list->count > 0) {
        uint32_t following = 0;
        int last = -1;
        for (uint32_t i = 0; i < list->count; i++) {
            const uint32_t t = list->at[i];
            const int axis = o->s->steps.at[t].collective->mesh_axis;
            if (axis != last) o->group_count++;
            last = axis;
            o->group[t] = o->group_count;
            o->user[t] = o->count; /* what it makes takes no memory */
            append(o, t, 0);
            for (uint32_t e = o->after.first[t]; e < o->after.first[t + 1]; e++) {
                const uint32_t to = o->after.edge[e];
                if (leads(o, to) && o->waiting[to] == 0) list->at[following++] = to;
            }
        }
        list->count = following;
    }
}

static int order_of(const void *a, const void *b) {
    const uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
    return one < other ? -1 : one > other;
}

/* Bytes of the next launch: of all an eighth at most, so that the first one starts soon, and a
 * third of what is left, as nothing runs beside the last one. */
static double lead_bytes(const overlap *o, int axis, double all, double left) {
    double bytes = all / 8 < left / 3 ? all / 8 : left / 3;
    return bytes > o->bucket[axis] ? bytes : o->bucket[axis];
}

static void lead_axis(overlap *o, int axis) {
    step_list list = {0};
    ML_VEC(uint64_t) order = {0};
    double all = 0, done = 0, bytes = 0;
    for (uint32_t t = 0; t < o->count; t++) {
        if (!leads(o, t) || o->before.first[t] != o->before.first[t + 1]) continue;
        const ml_collective_step *c = o->s->steps.at[t].collective;
        if (c->mesh_axis != axis) continue;
        *ML_PUSH(o->scratch, &order) = (uint64_t)c->lead_order << 32 | t;
        all += ml_step_sent(c);
    }
    if (order.count > 0) qsort(order.at, order.count, sizeof *order.at, order_of);
    for (uint32_t i = 0; i < order.count; i++) {
        const uint32_t t = (uint32_t)order.at[i];
        const double sent = ml_step_sent(o->s->steps.at[t].collective);
        *ML_PUSH(o->scratch, &list) = t;
        bytes += sent;
        done += sent;
        if (bytes < lead_bytes(o, axis, all, all - done)) continue;
        lead(o, &list);
        bytes = 0;
    }
    lead(o, &list);
}

static void simulate(overlap *o) {
    for (uint32_t t = 0; t < o->count; t++)
        if (o->waiting[t] == 0) ready(o, t);
    for (int i = 0; i < o->layout->count; i++) lead_axis(o, i);
    while (o->placed_count < o->count) {
        start_eager(o);
        start_early(o, false);
        start_reached(o);
        uint32_t t = choose(o);
        if (t != NONE) {
            compute(o, t);
            continue;
        }
        double when = next_event(o);
        if (when > o->now)
            o->now = when;
        else if (!flush_all(o) && !start_early(o, true) && o->placed_count < o->count &&
                 o->eager.count == 0)
            ml_raise(ML_INTERNAL, "overlap: step %u waits for ever", o->next);
    }
}

/* False where there are no collectives. */
static bool marks_find(overlap *o) {
    bool any = false;
    o->eager.arena = o->scratch;
    o->marks = ML_NEW_ARRAY(o->scratch, uint8_t, (size_t)o->count + 1);
    for (uint32_t t = 0; t < o->count; t++) {
        if (o->s->steps.at[t].kind != ML_STEP_COLLECTIVE) continue;
        bool gathers = value_bytes(o, t, 1) > value_bytes(o, t, 0);
        o->marks[t] = COLLECTIVE | (gathers ? GROWS : 0);
        any = true;
    }
    for (int i = 0; i < o->layout->count; i++)
        o->bucket[i] = BUCKET * plan_link_speed(o->layout, o->s->target, i);
    return any;
}

static void overlap_new(overlap *o) {
    size_t count = (size_t)o->count + 1;
    o->cost = ML_NEW_ARRAY(o->scratch, double, count);
    o->clock = ML_NEW_ARRAY(o->scratch, double, count);
    o->need = ML_NEW_ARRAY(o->scratch, double, count);
    o->latest = ML_NEW_ARRAY(o->scratch, double, count);
    o->available = ML_NEW_ARRAY(o->scratch, double, count);
    o->later = ML_NEW_ARRAY(o->scratch, uint32_t, count);
    o->earlier = ML_NEW_ARRAY(o->scratch, uint32_t, count);
    o->user = ML_NEW_ARRAY(o->scratch, uint32_t, count);
    o->waiting = ML_NEW_ARRAY(o->scratch, uint32_t, count);
    o->group = ML_NEW_ARRAY(o->scratch, uint32_t, count);
    o->order = ML_NEW_ARRAY(o->scratch, uint32_t, count);
    o->comm_copy = ML_NEW_ARRAY(o->scratch, bool, count);
    o->gather_copy = ML_NEW_ARRAY(o->scratch, bool, count);
    step_dependencies_find(o->s, o->scratch, &o->before, &o->after);
    times_find(o);
    marks_add(o);
    comm_copies_find(o);
    o->most_ahead = AHEAD_BYTES;
    for (uint32_t t = 0; t < o->count; t++)
        if (is_collective(o, t) && grows(o, t) && 2 * value_bytes(o, t, 1) > o->most_ahead)
            o->most_ahead = 2 * value_bytes(o, t, 1);
    uint32_t last = o->count;
    for (uint32_t t = 0; t < o->count; t++) {
        o->waiting[t] = o->before.first[t + 1] - o->before.first[t];
        if (is_collective(o, t)) continue;
        o->later[last] = t;
        o->earlier[t] = last;
        last = t;
    }
    o->later[last] = o->count;
    o->earlier[o->count] = last;
}

typedef struct {
    ml_plan *plan;
    ml_arena *scratch;
} overlap_call;

static void overlap_body(void *context) {
    const overlap_call *call = context;
    ml_schedule *s = call->plan->schedule;
    overlap o = {
        .s = s, .layout = call->plan->layout, .scratch = call->scratch, .count = s->steps.count};
    if (!marks_find(&o)) return;
    overlap_new(&o);
    simulate(&o);
    const overlap_order order = {.s = s,
                                 .scratch = o.scratch,
                                 .count = o.count,
                                 .order = o.order,
                                 .group = o.group,
                                 .after = &o.after};
    overlap_rewrite(&order, &call->plan->roots);
    ml_debug(3, "overlap: %.2f ms of computation, %.2f ms with collectives\n",
             1e3 * o.clock[o.count - 1], 1e3 * o.now);
}

void plan_overlap(ml_plan *plan) {
    if (plan->layout == NULL) return;
    overlap_call call = {plan, ml_arena_new()};
    if (call.scratch == NULL) ml_raise(ML_NO_MEMORY, "out of memory while ordering collectives");
    ml_status status = ml_protect(overlap_body, &call);
    ml_arena_free(call.scratch);
    if (status != ML_OK) ml_raise_last();
}
