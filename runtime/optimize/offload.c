/* Offloading: temporaries that wait for the backward pass do so in host memory.
 *
 * The peak of a step lies where the backward pass begins. A temporary that no step uses for long
 * around it is copied out after its last use before the peak, in a stream of its own; its memory is
 * free once the copy has ended; a second stream copies it to other memory in time for its first use
 * after the peak. Those that are read first come last back, so the first ones of the forward pass
 * wait longest: as many of them are taken, in that order, as bring the peak down to the limit. Then
 * the peak may be elsewhere, where gradients wait for their norm, say: so it is lowered in rounds.
 *
 * Where copies begin and are waited for follows from a replay of the steps by the planner's machine
 * (base/machine.h): of copies out in order, of copies back as late as their uses allow, for what is
 * back early takes memory. A copy that takes longer than planned is waited for. Nothing else
 * changes, so results are equal to the bit. */
#include "runtime/optimize/optimize.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/machine.h"
#include "runtime/plan/arena_offsets.h"
#include "runtime/plan/dependencies.h"
#include "runtime/plan/host_copies.h"
#include "runtime/plan/plan_internal.h"

/* Smaller temporaries than this part of the peak stay. */
enum { SMALL_SHARE = 4096 };

typedef struct {
    uint32_t storage;
    int64_t bytes;
    uint32_t from, need; /* out before step `from`, which is the first that does not use it; the
                            first step that needs it back */
    uint32_t peak;       /* the step of the peak for which it may be copied */
    uint32_t rank;       /* in the order in which they are taken */
    double slack;        /* seconds before or after that peak, the fewer, beyond the copy's */
    uint32_t free, back; /* before these steps the memory is free, the copy back begins */
} candidate;

typedef struct {
    const ml_plan *plan;
    ml_schedule *s;
    ml_arena *arena; /* of this planning */
    uint32_t steps;
    double rate; /* bytes a second, each way */
    /* Of copies that the plan has already: bytes of host memory, bytes, seconds. */
    int64_t host_base, offloaded_base;
    double seconds_base;
    double *clock;    /* when each step begins, without copies; [steps]: the end */
    int64_t *load;    /* by step, of all temporaries, where none is copied */
    int64_t *changed; /* by step, of what a choice changes in that */
    step_uses uses;
    bool *taken;   /* by storage: is a candidate, or cannot be one */
    candidate *of; /* in the order of `from` */
    uint32_t count;
    uint64_t *by_need; /* need << 32 | index, of the same in that order */
} offload;

typedef struct {
    int64_t peak;  /* bytes of temporaries */
    uint32_t at;   /* its step */
    double stall;  /* seconds for which computation waits */
    double copied; /* seconds in which copies are under way */
} outcome;

/* ---- What may be copied ---------------------------------------------------------------------- */

static void load_find(offload *o) {
    o->load = ML_NEW_ARRAY(o->arena, int64_t, (size_t)o->steps + 2);
    o->changed = ML_NEW_ARRAY(o->arena, int64_t, (size_t)o->steps + 2);
    for (uint32_t i = 0; i < o->s->storages.count; i++) {
        const ml_storage *storage = &o->s->storages.at[i];
        if (storage->kind != ML_STORAGE_TEMPORARY) continue;
        o->load[storage->first] += memory_padded(storage->bytes);
        o->load[storage->last + 1] -= memory_padded(storage->bytes);
    }
    for (uint32_t t = 1; t < o->steps; t++) o->load[t] += o->load[t - 1];
}

/* The last use before the peak and the first one after it, which with all later ones reads. */
static bool gap_find(const offload *o, uint32_t storage, uint32_t peak, candidate *c) {
    const step_uses *u = &o->uses;
    uint32_t begin = u->of_storage[storage], end = u->of_storage[storage + 1], i = begin;
    while (i < end && u->use[i].step < peak) i++;
    if (i == begin || i == end || u->use[i].step == peak) return false;
    for (uint32_t k = i; k < end; k++)
        if (u->use[k].writes) return false;
    *c = (candidate){.storage = storage,
                     .bytes = o->s->storages.at[storage].bytes,
                     .from = u->use[i - 1].step + 1,
                     .need = u->use[i].step,
                     .peak = peak};
    return true;
}

static int by_from(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    if (a->from != b->from) return a->from < b->from ? -1 : 1;
    return a->storage < b->storage ? -1 : a->storage > b->storage;
}

static int by_slack(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    if (a->slack != b->slack) return a->slack > b->slack ? -1 : 1;
    return a->storage < b->storage ? -1 : a->storage > b->storage;
}

/* Sorted by two keys: the step first. */
static int by_key(const void *left, const void *right) {
    const uint64_t *a = left, *b = right;
    return *a < *b ? -1 : *a > *b;
}

static void taken_find(offload *o) {
    const ml_schedule *s = o->s;
    o->taken = ML_NEW_ARRAY(o->arena, bool, (size_t)s->storages.count + 1);
    for (uint32_t i = 0; i < s->storages.count; i++)
        o->taken[i] = s->storages.at[i].kind != ML_STORAGE_TEMPORARY;
    for (int i = 0; i < o->plan->roots.output_count; i++)
        o->taken[s->values.at[s->output_values[i]].storage] = true;
    for (int i = 0; i < o->plan->roots.update_count; i++)
        o->taken[s->values.at[s->update_values[i]].storage] = true;
}

/* Both orders of the candidates. */
static void candidates_sort(offload *o) {
    qsort(o->of, o->count, sizeof *o->of, by_from);
    for (uint32_t i = 0; i < o->count; i++) o->by_need[i] = (uint64_t)o->of[i].need << 32 | i;
    qsort(o->by_need, o->count, sizeof *o->by_need, by_key);
}

/* Candidates that lower the peak at a step: those first that are not used for the longest time
 * before and after it. */
static void candidates_add(offload *o, uint32_t peak, bool exposed) {
    const uint32_t before = o->count;
    for (uint32_t i = 0; i < o->s->storages.count; i++) {
        candidate c;
        if (o->taken[i] || o->s->storages.at[i].bytes < o->load[peak] / SMALL_SHARE ||
            !gap_find(o, i, peak, &c))
            continue;
        double before_it = o->clock[peak] - o->clock[c.from];
        double after_it = o->clock[c.need] - o->clock[peak + 1];
        c.slack =
            (before_it < after_it ? before_it : after_it) - host_copy_seconds(o->rate, c.bytes);
        if (c.slack > 0 || exposed) o->of[o->count++] = c;
    }
    qsort(o->of + before, o->count - before, sizeof *o->of, by_slack);
    for (uint32_t i = before; i < o->count; i++) o->of[i].rank = i;
    candidates_sort(o);
}

/* Keep the first so many. */
static void candidates_cut(offload *o, uint32_t count) {
    uint32_t left = 0;
    for (uint32_t i = 0; i < o->count; i++)
        if (o->of[i].rank < count) o->of[left++] = o->of[i];
    o->count = left;
    candidates_sort(o);
}

/* ---- When ------------------------------------------------------------------------------------ */

/* Copies out of the first `count` follow one another, and each has ended before its peak; what they
 * lack of that computation waits for. */
static double plan_out(offload *o, uint32_t count) {
    double now = 0, stall = 0;
    for (uint32_t i = 0; i < o->count; i++) {
        candidate *c = &o->of[i];
        if (c->rank >= count) continue;
        if (now < o->clock[c->from]) now = o->clock[c->from];
        now += host_copy_seconds(o->rate, c->bytes);
        c->free = host_copy_step_after(o->clock, c->from, c->peak, now);
        if (now - o->clock[c->peak] > stall) stall = now - o->clock[c->peak];
    }
    return stall;
}

/* Copies back, from the last to the first: each ends before the next one begins, and before its
 * use. None begins before its peak is over. Where that is too late for some, and computation waits,
 * a few are under way at a time: all at once would fill memory. */
static double plan_back(offload *o, uint32_t count) {
    enum { AHEAD = 4 };
    candidate *later[AHEAD] = {NULL}; /* by turns: those that are needed after this one */
    double next = o->clock[o->steps], stall = 0;
    for (uint32_t i = o->count, n = 0; i-- > 0;) {
        candidate *c = &o->of[(uint32_t)o->by_need[i]];
        if (c->rank >= count) continue;
        candidate **slot = &later[n++ % AHEAD];
        if (*slot != NULL && stall > 0 && (*slot)->back < c->need) (*slot)->back = c->need;
        *slot = c;
        double end = o->clock[c->need] < next ? o->clock[c->need] : next;
        next = end - host_copy_seconds(o->rate, c->bytes);
        if (o->clock[c->peak + 1] - next > stall) stall = o->clock[c->peak + 1] - next;
        c->back = host_copy_step_after(o->clock, c->peak + 1, c->need, next);
        if (c->back > c->peak + 1 && o->clock[c->back] > next) c->back--;
    }
    return stall;
}

/* What the first `count` candidates take. */
static outcome replay(offload *o, uint32_t count) {
    outcome out = {.stall = plan_out(o, count)};
    out.stall += plan_back(o, count);
    memset(o->changed, 0, ((size_t)o->steps + 2) * sizeof *o->changed);
    for (uint32_t i = 0; i < o->count; i++) {
        const candidate *c = &o->of[i];
        if (c->rank >= count) continue;
        o->changed[c->free] -= memory_padded(c->bytes);
        o->changed[c->back] += memory_padded(c->bytes);
        out.copied += 2 * host_copy_seconds(o->rate, c->bytes);
    }
    int64_t change = 0;
    for (uint32_t t = 0; t < o->steps; t++) {
        change += o->changed[t];
        if (o->load[t] + change > out.peak) out.peak = o->load[t] + change, out.at = t;
    }
    return out;
}

/* ---- How many -------------------------------------------------------------------------------- */

/* Host memory is bounded too: so many of the first ones fit. */
static uint32_t within_host(const offload *o) {
    int64_t bytes = 0, limit = o->plan->target->host_memory;
    uint32_t most = o->count;
    int64_t *of_rank = ML_NEW_ARRAY(o->arena, int64_t, (size_t)o->count + 1);
    for (uint32_t i = 0; i < o->count; i++) of_rank[o->of[i].rank] = memory_padded(o->of[i].bytes);
    for (uint32_t i = 0; i < o->count && limit > 0; i++) {
        bytes += of_rank[i];
        if (bytes > limit && i < most) most = i;
    }
    return most;
}

/* The most candidates, `least` or more, whose copies are hidden. */
static uint32_t most_hidden(offload *o, uint32_t least, uint32_t most) {
    while (least < most) {
        uint32_t middle = least + (most - least + 1) / 2;
        if (replay(o, middle).stall <= HOST_COPY_HIDDEN * o->clock[o->steps])
            least = middle;
        else
            most = middle - 1;
    }
    return least;
}

/* The fewest, `least` or more, whose peak is no more than `goal`; `most` where none is. */
static uint32_t fewest(offload *o, uint32_t least, uint32_t most, int64_t goal) {
    while (least < most) {
        uint32_t middle = least + (most - least) / 2;
        if (replay(o, middle).peak <= goal)
            most = middle;
        else
            least = middle + 1;
    }
    return most;
}

/* Take candidates peak by peak, until the largest is no more than `goal` or nothing lowers it. */
static outcome choose(offload *o, int64_t goal, bool exposed) {
    enum { ROUNDS = 24 };
    const double progress = 0.999;
    taken_find(o);
    o->count = 0;
    outcome now = replay(o, 0);
    for (int round = 0; round < ROUNDS && now.peak > goal; round++) {
        const uint32_t before = o->count;
        if (now.at + 1 >= o->steps) break;
        candidates_add(o, now.at, exposed);
        uint32_t most = within_host(o);
        if (most < before) most = before;
        if (!exposed) most = most_hidden(o, before, most);
        int64_t floor = replay(o, most).peak;
        if ((double)floor > progress * (double)now.peak) most = before;
        uint32_t count = fewest(o, before, most, floor > goal ? floor : goal);
        candidates_cut(o, count);
        now = replay(o, count);
        if (count == before) break;
        for (uint32_t i = 0; i < o->count; i++) o->taken[o->of[i].storage] = true;
    }
    return now;
}

/* ---- The new schedule ------------------------------------------------------------------------ */

/* At a step the copies out begin, then memory becomes free, which copies back may take, then what
 * the step needs is waited for. */
typedef enum { COPY_OUT, WAIT_OUT, COPY_BACK, WAIT_BACK } event_kind;
typedef struct {
    uint32_t step, order, candidate;
    event_kind kind;
} event;

typedef struct {
    offload *o;
    __typeof__(((ml_schedule *)NULL)->steps) steps;
    uint32_t *host, *other;      /* by candidate: its storages on the host, and when it is back */
    uint32_t *moved;             /* by storage: the one that it is in now */
    uint32_t *clone;             /* by value: the same in that storage; 0: none yet */
    const ml_host_copy **copies; /* by candidate: out, back */
    arena_block *blocks;         /* of the host */
    uint32_t ticket;
} rewriting;

static int by_step(const void *left, const void *right) {
    const event *a = left, *b = right;
    if (a->step != b->step) return a->step < b->step ? -1 : 1;
    if (a->kind != b->kind) return a->kind < b->kind ? -1 : 1;
    return a->order < b->order ? -1 : a->order > b->order;
}

static void step_add(rewriting *w, const event *e) {
    ml_schedule *s = w->o->s;
    const candidate *c = &w->o->of[e->candidate];
    bool back = e->kind == COPY_BACK || e->kind == WAIT_BACK;
    bool waits = e->kind == WAIT_OUT || e->kind == WAIT_BACK;
    const ml_host_copy **copy = &w->copies[2 * e->candidate + back];
    if (!waits) *copy = host_copy_new(s, ++w->ticket, back, c->bytes);
    uint32_t device = back ? w->other[e->candidate] : c->storage, host = w->host[e->candidate];
    *ML_PUSH(s->arena, &w->steps) = host_copy_step(s, *copy, waits, device, host);
    arena_block *block = &w->blocks[e->candidate];
    if (e->kind == COPY_OUT) block->first = w->steps.count - 1;
    if (e->kind == WAIT_BACK) block->last = w->steps.count - 1, w->moved[c->storage] = device;
}

/* The value in the storage in which its own is back. */
static uint32_t value_moved(rewriting *w, uint32_t value) {
    ml_schedule *s = w->o->s;
    uint32_t storage = w->moved[s->values.at[value].storage];
    if (storage == s->values.at[value].storage) return value;
    if (w->clone[value] == 0) {
        const ml_value made = s->values.at[value];
        *ML_PUSH(s->arena, &s->values) = made;
        s->values.at[s->values.count - 1].storage = storage;
        w->clone[value] = s->values.count - 1;
    }
    return w->clone[value];
}

static void step_move(rewriting *w, const ml_step *old) {
    ml_schedule *s = w->o->s;
    ml_step step = *old;
    size_t count = (size_t)(step.read_count + step.write_count);
    step.values = ML_NEW_ARRAY(s->arena, uint32_t, count + 1);
    for (size_t i = 0; i < count; i++) step.values[i] = value_moved(w, old->values[i]);
    *ML_PUSH(s->arena, &w->steps) = step;
}

static event *events_find(const offload *o) {
    const uint32_t count = o->count;
    event *events = ML_NEW_ARRAY(o->arena, event, 4 * (size_t)count + 1);
    for (uint32_t i = 0, n = 0; i < count; i++) {
        const candidate *c = &o->of[i];
        events[n++] = (event){c->from, i, i, COPY_OUT};
        events[n++] = (event){c->free, i, i, WAIT_OUT};
        events[n++] = (event){c->back, c->need, i, COPY_BACK};
        events[n++] = (event){c->need, i, i, WAIT_BACK};
    }
    qsort(events, 4 * (size_t)count, sizeof *events, by_step);
    return events;
}

static rewriting rewriting_new(offload *o) {
    const uint32_t count = o->count;
    ml_schedule *s = o->s;
    rewriting w = {.o = o, .ticket = host_copy_tickets(s)};
    w.moved = ML_NEW_ARRAY(o->arena, uint32_t, (size_t)s->storages.count + 1);
    w.clone = ML_NEW_ARRAY(o->arena, uint32_t, (size_t)s->values.count + 1);
    w.host = ML_NEW_ARRAY(o->arena, uint32_t, (size_t)count + 1);
    w.other = ML_NEW_ARRAY(o->arena, uint32_t, (size_t)count + 1);
    w.copies = ML_NEW_ARRAY(o->arena, const ml_host_copy *, 2 * (size_t)count + 1);
    w.blocks = ML_NEW_ARRAY(o->arena, arena_block, (size_t)count + 1);
    for (uint32_t i = 0; i < s->storages.count; i++) w.moved[i] = i;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t storage = o->of[i].storage;
        w.host[i] = host_copy_storage(s, ML_STORAGE_HOST, storage);
        w.other[i] = host_copy_storage(s, ML_STORAGE_TEMPORARY, storage);
        w.blocks[i].bytes = memory_padded(o->of[i].bytes);
    }
    return w;
}

/* Copies and waits of all candidates; the bytes of host memory. */
static int64_t schedule_rewrite(offload *o) {
    ml_schedule *s = o->s;
    uint32_t at = 0, count = o->count;
    rewriting w = rewriting_new(o);
    const event *events = events_find(o);
    const ml_step *old = s->steps.at;
    for (uint32_t t = 0; t < o->steps; t++) {
        for (; at < 4 * count && events[at].step <= t; at++) step_add(&w, &events[at]);
        step_move(&w, &old[t]);
    }
    s->steps = w.steps;
    int64_t bytes = arena_assign_offsets(w.blocks, count, s->steps.count, o->arena);
    for (uint32_t i = 0; i < count; i++)
        s->storages.at[w.host[i]].offset = o->host_base + w.blocks[i].offset;
    return o->host_base + bytes;
}

/* ---- A plan ---------------------------------------------------------------------------------- */

/* What a schedule was, where an attempt at it turns out to be too large. */
typedef struct {
    __typeof__(((ml_schedule *)NULL)->steps) steps;
    uint32_t storages, values;
} unplaced;

static void schedule_restore(ml_schedule *s, const unplaced *before) {
    s->steps = before->steps;
    s->storages.count = before->storages;
    s->values.count = before->values;
}

static void plan_accept(offload *o, ml_plan *plan, const outcome *out) {
    const int64_t reach = plan->reach_bytes;
    plan->host_bytes = schedule_rewrite(o);
    plan->offloaded_bytes = o->offloaded_base;
    for (uint32_t i = 0; i < o->count; i++) plan->offloaded_bytes += o->of[i].bytes;
    plan->copy_seconds =
        o->seconds_base + out->stall + ml_machine_planned.host_beside * out->copied;
    plan->arena_bytes =
        ml_memory_assign_offsets(o->s, plan->pipeline_task ? 0 : plan->roots.output_count);
    memory_account(plan);
    plan->reach_bytes = reach < plan->peak_bytes ? reach : plan->peak_bytes;
}

typedef struct {
    ml_plan *plan;
    ml_arena *arena;
    int64_t limit;
    bool exposed;
} offload_call;

static void offload_body(void *context) {
    enum { TRIES = 4 };
    const double CLOSER = 1.002;
    const offload_call *call = context;
    ml_plan *plan = call->plan;
    offload o = {.plan = plan,
                 .s = plan->schedule,
                 .arena = call->arena,
                 .steps = plan->schedule->steps.count,
                 .rate = host_copy_rate(plan->target, plan->layout, false),
                 .host_base = plan->host_bytes,
                 .offloaded_base = plan->offloaded_bytes,
                 .seconds_base = plan->copy_seconds};
    if (o.steps == 0 || o.rate <= 0) return;
    o.clock = host_copy_clock(o.s, plan->layout, o.arena);
    load_find(&o);
    step_uses_find(o.s, NULL, o.arena, &o.uses);
    o.of = ML_NEW_ARRAY(o.arena, candidate, (size_t)o.s->storages.count + 1);
    o.by_need = ML_NEW_ARRAY(o.arena, uint64_t, (size_t)o.s->storages.count + 1);
    int64_t alive = replay(&o, 0).peak, others = plan->peak_bytes - plan->arena_bytes;
    if (alive == 0) return;
    /* The arena is somewhat larger than what is alive at the peak, and will be. */
    double gaps = (double)plan->arena_bytes / (double)alive;
    int64_t limit = call->limit - others;
    outcome out = choose(&o, 0, call->exposed);
    plan->reach_bytes = others + (int64_t)(gaps * (double)out.peak);
    bool enough = plan->reach_bytes <= call->limit;
    const unplaced before = {o.s->steps, o.s->storages.count, o.s->values.count};
    for (int i = 0; i < TRIES; i++) {
        if (enough) out = choose(&o, (int64_t)((double)limit / gaps), call->exposed);
        if (o.count == 0) return;
        plan_accept(&o, plan, &out);
        if (plan->peak_bytes <= call->limit || !enough || i + 1 == TRIES) return;
        gaps *= CLOSER * (double)plan->arena_bytes / (double)limit;
        schedule_restore(o.s, &before);
    }
}

void plan_offload(ml_plan *plan, int64_t limit, bool exposed) {
    offload_call call = {plan, ml_arena_new(), limit, exposed};
    if (call.arena == NULL) ml_raise(ML_NO_MEMORY, "out of memory while planning copies");
    ml_status status = ml_protect(offload_body, &call);
    ml_arena_free(call.arena);
    if (status != ML_OK) ml_raise_last();
}
