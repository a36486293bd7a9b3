/* Offloading what a stage saves: values that the tasks of a microbatch save for its later tasks
 * wait in host memory, in a slot of the microbatch, instead of its buffer.
 *
 * The task that computes such a value has it as a temporary, begins its copy once it is written and
 * waits for the end of the copy; each task that reads it copies it back to a temporary, in time for
 * its first use. So a microbatch in flight takes no device memory for it. Values that are written
 * first and read last have the most time for their copies, so they are taken first: as many as
 * bring the rank's peak down to the limit. What is sent, received or an output stays, for messages
 * are between buffers.
 *
 * When copies begin and end follows from a replay of each task's steps (plan/host_copies.h), as for
 * the temporaries of one plan (optimize/offload.c). */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/machine.h"
#include "runtime/pipeline/pipeline_internal.h"
#include "runtime/plan/arena_offsets.h"
#include "runtime/plan/dependencies.h"
#include "runtime/plan/host_copies.h"
#include "runtime/plan/plan_internal.h"

/* Smaller values than this part of a stage's buffer stay. */
enum { SMALL_SHARE = 4096 };

typedef struct {
    pipeline_stage *stage;
    int slots;
    int64_t bytes, offset; /* padded; in the host's slot */
    double slack;          /* seconds for its copies, the fewest of any task, beyond theirs */
    bool read, written;
    uint32_t rank; /* in the order in which they are taken */
} candidate;

typedef struct {
    uint32_t candidate, storage;
    bool back;
    uint32_t from;        /* out: the first step after its writes; back: its first use */
    uint32_t first, last; /* of its uses */
    uint32_t begin, end;  /* it begins before the one step, and is waited for before the other */
    ml_storage_kind kind; /* of the storage, and its number, where it is not copied */
    uint32_t id;
} copy;

typedef struct {
    ml_plan *part;
    pipeline_stage *stage;
    double *clock;
    int64_t *load, *changed; /* bytes by step: of temporaries; of what is copied */
    double gaps;             /* the arena by what is alive at its peak */
    copy *copies;            /* out in the order of `from`; then back, in falling order */
    uint32_t out_count, count;
    __typeof__(((ml_schedule *)NULL)->steps) steps; /* without copies; and so many */
    uint32_t storages, values;
    int *candidate_of; /* by saved value of the stage: 1 + the candidate, 0: none */
} task_line;

typedef struct {
    ml_plan *plan;
    ml_arena *arena;
    double rate, seconds; /* bytes a second, each way; what all tasks take */
    task_line *tasks;
    int task_count;
    candidate *of; /* in the order of stages and saved values */
    uint32_t count;
    int64_t fixed; /* bytes of the rank beside arena and candidates */
} offload;

/* ---- What may be copied ---------------------------------------------------------------------- */

/* Whether messages or the program's outputs leave the value where it is. */
static bool stays(const task_set *set, int saved, int outputs) {
    for (int i = 0; i < outputs; i++)
        if (set->saved_of_output[i] == saved) return true;
    return false;
}

static int *candidates_find(offload *o, pipeline_stage *stage) {
    const task_set *set = &stage->tasks;
    int *of_saved = ML_NEW_ARRAY(o->arena, int, (size_t)set->saved_count + 1);
    for (int i = 0; i < set->saved_count; i++) {
        const saved_value *saved = &set->saved[i];
        if (saved->from < 0 || saved->bytes < set->buffer_bytes / SMALL_SHARE ||
            stays(set, i, stage->local->roots.output_count))
            continue;
        o->of[o->count] = (candidate){.stage = stage,
                                      .slots = stage->slots,
                                      .bytes = memory_padded(saved->bytes),
                                      .slack = 1e30,
                                      .rank = o->count};
        of_saved[i] = (int)++o->count;
    }
    return of_saved;
}

/* The saved value that the storage of a task is; -1. */
static int saved_of(const pipeline_stage *stage, int task, const ml_storage *storage) {
    const task_set *set = &stage->tasks;
    if (storage->kind == ML_STORAGE_SAVED) return set->tasks[task].exports[storage->id];
    if (storage->kind != ML_STORAGE_INPUT) return -1;
    for (int i = 0; i < set->saved_count; i++)
        if (set->saved[i].input == storage->id) return i;
    return -1;
}

static candidate *candidate_of(const offload *o, const task_line *t, int saved) {
    return saved < 0 || t->candidate_of[saved] == 0 ? NULL : &o->of[t->candidate_of[saved] - 1];
}

static int by_from(const void *left, const void *right) {
    const copy *a = left, *b = right;
    if (a->back != b->back) return a->back - b->back;
    if (a->from != b->from) return (a->from < b->from) == !a->back ? -1 : 1;
    return a->storage < b->storage ? -1 : a->storage > b->storage;
}

static void copies_find(offload *o, task_line *t, int task) {
    const ml_schedule *s = t->part->schedule;
    step_uses uses;
    step_uses_find(s, NULL, o->arena, &uses);
    t->copies = ML_NEW_ARRAY(o->arena, copy, (size_t)s->storages.count + 1);
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        candidate *c = candidate_of(o, t, saved_of(t->stage, task, storage));
        uint32_t begin = uses.of_storage[i], end = uses.of_storage[i + 1];
        if (c == NULL || begin == end) continue;
        copy made = {.candidate = (uint32_t)(c - o->of), .storage = i, .kind = storage->kind};
        made.id = storage->id, made.back = storage->kind == ML_STORAGE_INPUT;
        made.first = made.from = uses.use[begin].step, made.last = uses.use[end - 1].step;
        for (uint32_t k = begin; k < end && !made.back; k++)
            if (uses.use[k].writes) made.from = uses.use[k].step + 1;
        double time =
            made.back ? t->clock[made.from] : t->clock[s->steps.count] - t->clock[made.from];
        time -= host_copy_seconds(o->rate, c->bytes);
        if (time < c->slack) c->slack = time;
        (made.back ? &c->read : &c->written)[0] = true;
        t->copies[t->count++] = made;
        t->out_count += !made.back;
    }
    qsort(t->copies, t->count, sizeof *t->copies, by_from);
}

static void load_find(offload *o, task_line *t) {
    const ml_schedule *s = t->part->schedule;
    const uint32_t steps = s->steps.count;
    int64_t most = 0;
    t->load = ML_NEW_ARRAY(o->arena, int64_t, (size_t)steps + 3);
    t->changed = ML_NEW_ARRAY(o->arena, int64_t, (size_t)steps + 3);
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        if (storage->kind != ML_STORAGE_TEMPORARY) continue;
        t->load[storage->first] += memory_padded(storage->bytes);
        t->load[storage->last + 1] -= memory_padded(storage->bytes);
    }
    for (uint32_t i = 1; i <= steps; i++) t->load[i] += t->load[i - 1];
    for (uint32_t i = 0; i < steps; i++) most = t->load[i] > most ? t->load[i] : most;
    t->gaps = most > 0 ? (double)t->part->arena_bytes / (double)most : 1;
}

static int by_slack(const void *left, const void *right) {
    const candidate *const *x = left, *const *y = right;
    const candidate *a = *x, *b = *y;
    if (a->slack != b->slack) return a->slack > b->slack ? -1 : 1;
    return a < b ? -1 : a > b;
}

/* Those that are written and read, in the order in which they are taken; the others are last. */
static uint32_t candidates_rank(offload *o) {
    candidate **sorted = ML_NEW_ARRAY(o->arena, candidate *, (size_t)o->count + 1);
    uint32_t usable = 0;
    for (uint32_t i = 0; i < o->count; i++) {
        candidate *c = &o->of[i];
        c->rank = UINT32_MAX;
        if (c->read && c->written) sorted[usable++] = c;
    }
    qsort(sorted, usable, sizeof *sorted, by_slack);
    for (uint32_t i = 0; i < usable; i++) sorted[i]->rank = i;
    return usable;
}

/* ---- When ------------------------------------------------------------------------------------ */

/* Where computation waits for copies in any case, a few are under way at a time: all at once would
 * fill memory. */
enum { AHEAD = 4 };

/* Copies out that are under way when AHEAD more have begun are waited for. */
static void plan_ahead(const offload *o, task_line *t, uint32_t count) {
    copy *earlier[AHEAD] = {NULL};
    for (uint32_t i = 0, n = 0; i < t->out_count; i++) {
        copy *c = &t->copies[i];
        if (o->of[c->candidate].rank >= count) continue;
        copy **slot = &earlier[n++ % AHEAD];
        if (*slot != NULL && (*slot)->end > c->from) (*slot)->end = c->from;
        *slot = c;
    }
}

static double plan_out(const offload *o, task_line *t, uint32_t count) {
    const uint32_t end = t->steps.count;
    double now = 0;
    for (uint32_t i = 0; i < t->out_count; i++) {
        copy *c = &t->copies[i];
        if (o->of[c->candidate].rank >= count) continue;
        if (now < t->clock[c->from]) now = t->clock[c->from];
        now += host_copy_seconds(o->rate, o->of[c->candidate].bytes);
        c->begin = c->from;
        c->end = host_copy_step_after(t->clock, c->from, end, now);
    }
    if (now <= t->clock[end]) return 0;
    plan_ahead(o, t, count);
    return now - t->clock[end];
}

static double plan_back(const offload *o, task_line *t, uint32_t count) {
    copy *later[AHEAD] = {NULL};
    double next = t->clock[t->steps.count], stall = 0;
    for (uint32_t i = t->out_count, n = 0; i < t->count; i++) {
        copy *c = &t->copies[i];
        if (o->of[c->candidate].rank >= count) continue;
        double end = t->clock[c->from] < next ? t->clock[c->from] : next;
        next = end - host_copy_seconds(o->rate, o->of[c->candidate].bytes);
        if (-next > stall) stall = -next;
        c->end = c->from;
        c->begin = host_copy_step_after(t->clock, 0, c->from, next);
        if (c->begin > 0 && t->clock[c->begin] > next) c->begin--;
        copy **slot = &later[n++ % AHEAD];
        if (*slot != NULL && stall > 0 && (*slot)->begin < c->from) (*slot)->begin = c->from;
        *slot = c;
    }
    return stall;
}

/* The arena with the copies of the first `count`, which are planned. */
static int64_t arena_with(const offload *o, task_line *t, uint32_t count) {
    const uint32_t steps = t->steps.count;
    int64_t change = 0, most = 0;
    memset(t->changed, 0, ((size_t)steps + 3) * sizeof *t->changed);
    for (uint32_t i = 0; i < t->count; i++) {
        const copy *c = &t->copies[i];
        if (o->of[c->candidate].rank >= count) continue;
        uint32_t first = c->back ? c->begin : c->first, last = c->last + 1;
        if (!c->back && c->end > last) last = c->end;
        t->changed[first] += o->of[c->candidate].bytes;
        t->changed[last] -= o->of[c->candidate].bytes;
    }
    for (uint32_t i = 0; i <= steps; i++) {
        change += t->changed[i];
        if (t->load[i] + change > most) most = t->load[i] + change;
    }
    return (int64_t)(t->gaps * (double)most);
}

typedef struct {
    int64_t peak; /* bytes of the rank */
    double stall; /* seconds for which computation waits, of one microbatch */
} outcome;

static outcome replay(const offload *o, uint32_t count) {
    outcome out = {0};
    int64_t arena = 0;
    for (int i = 0; i < o->task_count; i++) {
        task_line *t = &o->tasks[i];
        out.stall += plan_out(o, t, count) + plan_back(o, t, count);
        int64_t bytes = arena_with(o, t, count);
        arena = bytes > arena ? bytes : arena;
    }
    out.peak = o->fixed + arena;
    for (uint32_t i = 0; i < o->count; i++)
        if (o->of[i].rank >= count) out.peak += o->of[i].slots * o->of[i].bytes;
    return out;
}

/* ---- How many -------------------------------------------------------------------------------- */

static uint32_t within_host(const offload *o, uint32_t most) {
    int64_t bytes = 0, limit = o->plan->target->host_memory;
    int64_t *of_rank = ML_NEW_ARRAY(o->arena, int64_t, (size_t)most + 1);
    for (uint32_t i = 0; i < o->count; i++)
        if (o->of[i].rank < most) of_rank[o->of[i].rank] = o->of[i].slots * o->of[i].bytes;
    for (uint32_t i = 0; i < most && limit > 0; i++) {
        bytes += of_rank[i];
        if (bytes > limit) return i;
    }
    return most;
}

static uint32_t most_hidden(const offload *o, uint32_t most) {
    uint32_t least = 0;
    while (least < most) {
        uint32_t middle = least + (most - least + 1) / 2;
        if (replay(o, middle).stall <= HOST_COPY_HIDDEN * o->seconds)
            least = middle;
        else
            most = middle - 1;
    }
    return least;
}

/* The fewest whose peak is no more than `goal`; that with the least peak of all where none is. */
static uint32_t fewest(const offload *o, uint32_t most, int64_t goal) {
    uint32_t low = 0, best = most;
    int64_t least = replay(o, most).peak;
    for (uint32_t i = most; i > 0 && least > goal; i -= (i + 15) / 16) {
        int64_t peak = replay(o, i - 1).peak; /* more copies may take a larger arena */
        if (peak < least) least = peak, best = i - 1;
    }
    while (low < best) {
        uint32_t middle = low + (best - low) / 2;
        if (replay(o, middle).peak <= (least > goal ? least : goal))
            best = middle;
        else
            low = middle + 1;
    }
    return best;
}

/* ---- The new schedules ----------------------------------------------------------------------- */

typedef struct {
    uint32_t step, order;
    uint32_t copy;
    bool waits;
} event;

/* At a step copies out begin, then memory becomes free, which copies back may take. */
static int by_step(const void *left, const void *right) {
    const event *a = left, *b = right;
    if (a->step != b->step) return a->step < b->step ? -1 : 1;
    return a->order < b->order ? -1 : a->order > b->order;
}

static event *events_find(const offload *o, const task_line *t, uint32_t taken, uint32_t *count) {
    event *events = ML_NEW_ARRAY(o->arena, event, 2 * (size_t)t->count + 1);
    for (uint32_t i = 0; i < t->count; i++) {
        const copy *c = &t->copies[i];
        if (o->of[c->candidate].rank >= taken) continue;
        for (uint32_t waits = 0; waits < 2; waits++)
            events[(*count)++] =
                (event){waits ? c->end : c->begin, (2 * c->back + waits) * t->count + i, i, waits};
    }
    qsort(events, *count, sizeof *events, by_step);
    return events;
}

static void task_rewrite(offload *o, task_line *t, uint32_t taken) {
    ml_schedule *s = t->part->schedule;
    const ml_host_copy **started = ML_NEW_ARRAY(o->arena, const ml_host_copy *, t->count + 1);
    uint32_t *host = ML_NEW_ARRAY(o->arena, uint32_t, (size_t)t->count + 1);
    uint32_t count = 0, at = 0, ticket = host_copy_tickets(s);
    const event *events = events_find(o, t, taken, &count);
    s->steps = (__typeof__(s->steps)){0};
    for (uint32_t step = 0; step <= t->steps.count; step++) {
        for (; at < count && events[at].step <= step; at++) {
            const uint32_t k = events[at].copy, storage = t->copies[k].storage;
            const candidate *of = &o->of[t->copies[k].candidate];
            if (!events[at].waits) {
                host[k] = host_copy_storage(s, ML_STORAGE_HOST, storage);
                s->storages.at[host[k]].offset = of->offset;
                started[k] =
                    host_copy_new(s, ++ticket, t->copies[k].back, s->storages.at[storage].bytes);
                s->storages.at[storage].kind = ML_STORAGE_TEMPORARY;
                s->storages.at[storage].id = 0;
                t->part->offloaded_bytes += t->copies[k].back ? 0 : started[k]->bytes;
            }
            *ML_PUSH(s->arena, &s->steps) =
                host_copy_step(s, started[k], events[at].waits, storage, host[k]);
        }
        if (step < t->steps.count) *ML_PUSH(s->arena, &s->steps) = t->steps.at[step];
    }
}

static void task_restore(task_line *t) {
    ml_schedule *s = t->part->schedule;
    s->steps = t->steps;
    s->storages.count = t->storages;
    s->values.count = t->values;
    t->part->offloaded_bytes = 0;
    for (uint32_t i = 0; i < t->count; i++) {
        s->storages.at[t->copies[i].storage].kind = t->copies[i].kind;
        s->storages.at[t->copies[i].storage].id = t->copies[i].id;
    }
}

/* Which saved values are on the host, and the buffers without them. */
static void buffers_place(offload *o, uint32_t taken) {
    for (int i = 0; i < o->task_count; i++) {
        pipeline_stage *stage = o->tasks[i].stage;
        task_set *set = &stage->tasks;
        stage->host_bytes = set->buffer_bytes = 0;
        for (int k = 0; k < set->saved_count; k++) {
            saved_value *saved = &set->saved[k];
            candidate *c = candidate_of(o, &o->tasks[i], k);
            saved->on_host = c != NULL && c->rank < taken;
            if (saved->from == SAVED_ONCE_PER_STEP) continue;
            int64_t *end = saved->on_host ? &stage->host_bytes : &set->buffer_bytes;
            *(saved->on_host ? &c->offset : &saved->offset) = *end;
            *end += memory_padded(saved->bytes);
        }
    }
}

static void rewrite(offload *o, uint32_t taken) {
    buffers_place(o, taken);
    for (int i = 0; i < o->task_count; i++) {
        task_line *t = &o->tasks[i];
        double copied = 0;
        task_restore(t);
        double stall = plan_out(o, t, taken) + plan_back(o, t, taken);
        for (uint32_t k = 0; k < t->count; k++)
            if (o->of[t->copies[k].candidate].rank < taken)
                copied += host_copy_seconds(o->rate, o->of[t->copies[k].candidate].bytes);
        task_rewrite(o, t, taken);
        t->part->host_bytes = t->stage->host_bytes;
        t->part->copy_seconds = stall + ml_machine_planned.host_beside * copied;
        t->part->arena_bytes = ml_memory_assign_offsets(t->part->schedule, 0);
        memory_account(t->part);
    }
}

/* ---- A rank ---------------------------------------------------------------------------------- */

static void tasks_list(offload *o, int coordinate) {
    const pipeline_plan *pipeline = o->plan->pipeline;
    size_t tasks = 0, saved = 0;
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks) {
        tasks += (size_t)pipeline->stages[v].plan_count;
        saved += (size_t)pipeline->stages[v].tasks.saved_count;
    }
    o->tasks = ML_NEW_ARRAY(o->arena, task_line, tasks + 1);
    o->of = ML_NEW_ARRAY(o->arena, candidate, saved + 1);
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks) {
        pipeline_stage *stage = &pipeline->stages[v];
        int *of_saved = candidates_find(o, stage);
        for (int p = 0; p < stage->plan_count; p++) {
            task_line *t = &o->tasks[o->task_count++];
            const ml_schedule *s = stage->plans[p]->schedule;
            *t = (task_line){.part = stage->plans[p], .stage = stage, .steps = s->steps};
            t->storages = s->storages.count, t->values = s->values.count;
            t->candidate_of = of_saved;
            t->clock = host_copy_clock(s, o->plan->layout, o->arena);
            o->seconds += t->clock[s->steps.count];
            load_find(o, t);
            copies_find(o, t, p);
        }
    }
}

typedef struct {
    ml_plan *plan;
    ml_arena *arena;
    int coordinate;
    int64_t limit;
    bool exposed;
} offload_call;

static void offload_body(void *context) {
    enum { TRIES = 4 };
    const offload_call *call = context;
    ml_plan *plan = call->plan;
    offload o = {.plan = plan,
                 .arena = call->arena,
                 .rate = host_copy_rate(plan->target, plan->layout, true)};
    if (o.rate <= 0) return;
    tasks_list(&o, call->coordinate);
    o.fixed = plan->peak_bytes - plan->arena_bytes;
    for (uint32_t i = 0; i < o.count; i++) o.fixed -= o.of[i].slots * o.of[i].bytes;
    uint32_t most = within_host(&o, candidates_rank(&o));
    if (!call->exposed) most = most_hidden(&o, most);
    int64_t reach = replay(&o, fewest(&o, most, 0)).peak, goal = call->limit;
    for (int i = 0; i < TRIES; i++) {
        uint32_t taken = fewest(&o, most, goal);
        if (taken == 0) break;
        rewrite(&o, taken);
        pipeline_memory(plan, call->coordinate);
        if (plan->peak_bytes <= call->limit || reach > call->limit) break;
        goal -= plan->peak_bytes - call->limit;
    }
    plan->reach_bytes = reach < plan->peak_bytes ? reach : plan->peak_bytes;
}

/* What is left: temporaries of the tasks with the largest arenas. */
static void offload_tasks(ml_plan *plan, int coordinate, int64_t limit, bool exposed,
                          pipeline_task_offload offload_task) {
    const pipeline_plan *pipeline = plan->pipeline;
    const int64_t arena = plan->arena_bytes - (plan->peak_bytes - limit);
    for (int v = coordinate; v < pipeline->count; v += pipeline->ranks) {
        pipeline_stage *stage = &pipeline->stages[v];
        for (int p = 0; p < stage->plan_count; p++) {
            ml_plan *part = stage->plans[p];
            if (part->arena_bytes <= arena) continue;
            offload_task(part, part->peak_bytes - part->arena_bytes + arena, exposed);
            if (part->host_bytes > stage->host_bytes) stage->host_bytes = part->host_bytes;
        }
    }
    pipeline_memory(plan, coordinate);
}

static void offload_rank(ml_plan *plan, int coordinate, int64_t limit, bool exposed,
                         pipeline_task_offload offload_task) {
    offload_call call = {plan, ml_arena_new(), coordinate, limit, exposed};
    if (call.arena == NULL) ml_raise(ML_NO_MEMORY, "out of memory while planning copies");
    ml_status status = ml_protect(offload_body, &call);
    ml_arena_free(call.arena);
    if (status != ML_OK) ml_raise_last();
    if (plan->peak_bytes > limit) offload_tasks(plan, coordinate, limit, exposed, offload_task);
}

void pipeline_offload(ml_plan *plan, int coordinate, int64_t limit, bool exposed,
                      pipeline_task_offload offload_task) {
    const pipeline_plan *pipeline = plan->pipeline;
    int64_t reach = 0;
    for (int r = 0; r < pipeline->ranks; r++) {
        if (!pipeline->stages[r].planned) continue;
        pipeline_memory(plan, r);
        if (plan->peak_bytes > limit) offload_rank(plan, r, limit, exposed, offload_task);
        if (plan->reach_bytes > reach) reach = plan->reach_bytes;
    }
    pipeline_memory(plan, coordinate);
    plan->reach_bytes = reach;
}
