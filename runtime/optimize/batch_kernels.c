/* Batches: kernels of one structure that do not depend on one another, such as the optimizer's for
 * each of many parameters or the partial sums of their gradients' norm, become one step and run in
 * one launch. Small tensors alone leave most of a GPU idle, and each launch costs microseconds.
 *
 * Steps move towards the end only, to the last of their kind; small ones first, so that they do not
 * prevent others from moving. No step passes one that writes what it touches or touches what it
 * writes, where a state and its new value are one thing, for they are to share their memory. None
 * prolongs the life of a large tensor until others are computed that might have used its memory.
 * What begins sums over microbatches moves to the beginning, where one launch does so for all sums.
 * Each kernel runs with the blocks that it has alone, so results are equal to the bit. */
#include "runtime/optimize/optimize.h"

#include "runtime/plan/dependencies.h"
#include "runtime/plan/plan_internal.h"

enum {
    FARTHEST = 512,    /* steps that a step may pass */
    SMALL = 256 << 10, /* bytes */
    LARGE = 8 << 20,   /* bytes */
    MOST = 128,        /* members, whatever there is room for */
};

typedef struct {
    ml_schedule *s;
    uint32_t count;
    uint32_t *old;       /* by storage: where it is a state's new value, the state's storage */
    uint32_t *last_read; /* by storage: the step; 0: none */
    int64_t *born;       /* by step: bytes of temporaries that it is the first to write */
    uint64_t *kind;      /* by step: equal where kernels are alike; 0: not to be joined */
    step_uses uses;      /* of the steps as they were; a state's new value counts as the state */
    uint32_t *order, *position; /* the steps as they will run, and the position of each */
    bool *taken;                /* by step: it is a part of another */
} batches;

static uint32_t storage_of(const batches *b, const ml_step *step, int value) {
    return b->s->values.at[step->values[value]].storage;
}

static void find_storages(batches *b, const ml_roots *roots) {
    ml_schedule *s = b->s;
    uint32_t storages = s->storages.count, states = ml_graph_state_count(s->graph);
    uint32_t *of_state = ML_NEW_ARRAY(s->arena, uint32_t, states + 1);
    b->old = ML_NEW_ARRAY(s->arena, uint32_t, storages + 1);
    b->last_read = ML_NEW_ARRAY(s->arena, uint32_t, storages + 1);
    b->order = ML_NEW_ARRAY(s->arena, uint32_t, b->count + 1);
    b->position = ML_NEW_ARRAY(s->arena, uint32_t, b->count + 1);
    b->born = ML_NEW_ARRAY(s->arena, int64_t, b->count + 1);
    b->taken = ML_NEW_ARRAY(s->arena, bool, b->count + 1);
    for (uint32_t t = 0; t < b->count; t++) b->order[t] = b->position[t] = t;
    for (uint32_t i = 0; i < storages; i++) {
        b->old[i] = i;
        if (s->storages.at[i].kind == ML_STORAGE_STATE) of_state[s->storages.at[i].id] = i + 1;
    }
    for (int i = 0; i < roots->update_count; i++) {
        uint32_t at = of_state[roots->updates[i].state];
        if (at != 0) b->old[s->values.at[s->update_values[i]].storage] = at - 1;
    }
    const step_span *spans = step_spans_find(s, s->arena);
    for (uint32_t i = 0; i < storages; i++) {
        uint32_t written = spans[i].first_write, read = spans[i].last_read;
        bool temporary = s->storages.at[i].kind == ML_STORAGE_TEMPORARY && b->old[i] == i;
        if (temporary && written != NO_STEP) b->born[written] += s->storages.at[i].bytes;
        b->last_read[i] = read != NO_STEP ? read : 0;
    }
    for (int i = 0; i < roots->output_count; i++)
        b->last_read[s->values.at[s->output_values[i]].storage] = b->count;
}

/* The first position of a step after t where one of the two writes what the other accesses. Such
 * steps never pass one another. */
static uint32_t first_conflict(const batches *b, uint32_t t) {
    uint32_t first = b->count;
    const step_uses *u = &b->uses;
    for (uint32_t i = u->first[t]; i < u->first[t + 1]; i++) {
        const step_use *own = &u->use[u->by_value[i]];
        uint32_t e = own->writes ? u->by_value[i] + 1 : own->next_write;
        while (e < own->end) {
            const step_use *other = &u->use[e];
            bool counts = other->step != t && !b->taken[other->step];
            if (counts && b->position[other->step] < first) first = b->position[other->step];
            if (counts && other->writes) break;
            e = own->writes ? e + 1 : other->next_write;
        }
    }
    return first;
}

/* What other streams wait for does not move, and nothing moves past it. What is waited for does not
 * move either; but small kernels pass it, which are no work to do meanwhile. */
static bool is_fixed(const batches *b, uint32_t t, bool small) {
    ml_step_kind kind = b->s->steps.at[t].kind;
    return kind == ML_STEP_COLLECTIVE || (kind == ML_STEP_WAIT && !small);
}

static bool is_small(const ml_step *step) {
    return step->bytes <= SMALL;
}

/* Small kernels to right before the first step that needs them done. */
static void move_small(batches *b) {
    uint32_t fixed = b->count; /* the next position of such a step */
    for (uint32_t from = b->count; from-- > 0;) {
        uint32_t t = b->order[from];
        const ml_step *step = &b->s->steps.at[t];
        if (is_fixed(b, t, true)) fixed = from;
        if (step->kind != ML_STEP_KERNEL || !is_small(step) || step->members > 0) continue;
        uint32_t end = first_conflict(b, t);
        if (end > fixed) end = fixed;
        if (end > from + FARTHEST + 1) end = from + FARTHEST + 1;
        for (uint32_t i = from; i + 1 < end; i++) {
            b->order[i] = b->order[i + 1];
            b->position[b->order[i]] = i;
        }
        b->order[end - 1] = t;
        b->position[t] = end - 1;
    }
}

static bool alike(const ml_step *a, const ml_step *b) {
    return a->kernel->key == b->kernel->key && a->read_count == b->read_count &&
           a->write_count == b->write_count;
}

static void find_kinds(batches *b) {
    b->kind = ML_NEW_ARRAY(b->s->arena, uint64_t, b->count + 1);
    for (uint32_t t = 0; t < b->count; t++) {
        const ml_step *step = &b->s->steps.at[t];
        if (step->kind == ML_STEP_KERNEL && step->ir && ml_batch_capacity(step->kernel) > 0)
            b->kind[t] = step->kernel->key;
    }
}

/* Whether step t may run when step `then` does, which comes later: its large operands are there
 * until then anyway, or no more than `born` bytes are computed in between, which is little; and its
 * large results are states. */
static bool waits_for_free(const batches *b, uint32_t t, uint32_t then, int64_t born) {
    const ml_step *step = &b->s->steps.at[t];
    for (int i = 0; i < step->read_count + step->write_count; i++) {
        uint32_t at = storage_of(b, step, i);
        const ml_storage *storage = &b->s->storages.at[at];
        bool free = storage->kind != ML_STORAGE_TEMPORARY || storage->bytes <= SMALL ||
                    (i < step->read_count ? b->last_read[at] >= then || born <= LARGE
                                          : b->old[at] != at || storage->bytes <= LARGE);
        if (!free) return false;
    }
    return true;
}

/* The steps from position `begin` on that can run together with the one at `last`; members[0] is
 * that.
 */
static int find_members(const batches *b, uint32_t begin, uint32_t last, uint32_t *members) {
    const uint32_t then = b->order[last];
    const ml_step *step = &b->s->steps.at[then];
    int found = 1, passed = 0, most = ml_batch_capacity(step->kernel);
    int64_t born = 0;
    members[0] = then;
    for (uint32_t i = last; i-- > begin && passed < FARTHEST && found < most && found < MOST;) {
        uint32_t t = b->order[i];
        if (b->taken[t]) continue;
        bool joins = b->kind[t] == b->kind[then] && alike(&b->s->steps.at[t], step) &&
                     waits_for_free(b, t, then, born) && first_conflict(b, t) > last;
        born += b->born[t];
        if (joins)
            members[found++] = t;
        else
            passed++;
    }
    return found;
}

/* The operands of one step of all members, at the position of the first of them; the others are
 * taken. */
static ml_step *join_operands(batches *b, const uint32_t *members, int count) {
    ml_schedule *s = b->s;
    ml_step *into = &s->steps.at[members[0]], whole = *into;
    int reads = into->read_count, writes = into->write_count;
    whole.values = ML_NEW_ARRAY(s->arena, uint32_t, count * (reads + writes) + 1);
    whole.may_alias = ML_NEW_ARRAY(s->arena, uint64_t, count * writes + 1);
    whole.flops = 0;
    whole.bytes = 0;
    for (int m = 0; m < count; m++) {
        const ml_step *member = &s->steps.at[members[m]];
        whole.flops += member->flops;
        whole.bytes += member->bytes;
        for (int i = 0; i < reads; i++) whole.values[m * reads + i] = member->values[i];
        for (int i = 0; i < writes; i++) {
            whole.values[count * reads + m * writes + i] = member->values[reads + i];
            whole.may_alias[m * writes + i] = member->may_alias ? member->may_alias[i] : 0;
        }
        b->taken[members[m]] = m > 0;
    }
    whole.members = count;
    whole.read_count = count * reads;
    whole.write_count = count * writes;
    *into = whole;
    return into;
}

static void join(batches *b, const uint32_t *members, int count) {
    const ml_kernel *kernels[MOST];
    for (int m = 0; m < count; m++) kernels[m] = b->s->steps.at[members[m]].kernel;
    ml_step *whole = join_operands(b, members, count);
    whole->kernel = ML_NEW(b->s->arena, ml_kernel);
    ml_kernel_batch(kernels, count, b->s->arena, whole->kernel);
}

/* Whether step t begins a sum over microbatches where it is, and nothing touches it before. */
static bool begins_sum(const batches *b, uint32_t t) {
    const ml_step *step = &b->s->steps.at[t];
    if (step->kind != ML_STEP_KERNEL || step->ir != NULL || step->node == 0 ||
        ml_graph_node(b->s->graph, step->node)->op != ML_OP_WHERE)
        return false;
    uint32_t sum = storage_of(b, step, 1);
    return b->s->storages.at[sum].kind == ML_STORAGE_STATE &&
           b->old[storage_of(b, step, 2)] == sum && b->uses.use[b->uses.of_storage[sum]].step == t;
}

static void join_sums(batches *b) {
    const ml_schedule *s = b->s;
    uint32_t members[MOST];
    int count = 0;
    for (uint32_t t = 0; t <= b->count; t++) {
        const ml_step *step = t < b->count ? &s->steps.at[t] : NULL, *first = NULL;
        if (step && !begins_sum(b, t)) continue;
        if (count > 0) first = &s->steps.at[members[0]];
        bool joins = step && (!first || (step->values[0] == first->values[0] &&
                                         s->values.at[step->values[2]].type.dtype ==
                                             s->values.at[first->values[2]].type.dtype));
        if ((!step || count == MOST) && count > 1)
            ml_template_reset(b->s, join_operands(b, members, count));
        if (count == MOST) count = 0;
        if (joins) members[count++] = t;
    }
}

void plan_batch_kernels(ml_plan *plan) {
    ml_schedule *s = plan->schedule;
    batches b = {.s = s, .count = s->steps.count};
    find_storages(&b, &plan->roots);
    step_uses_find(s, b.old, s->arena, &b.uses);
    find_kinds(&b);
    join_sums(&b);
    if (!plan->roots.often) move_small(&b); /* of short steps the order of nodes is the best */
    uint32_t *begin[2]; /* after a fixed step; of large kernels and of small ones */
    for (int small = 0; small < 2; small++) {
        begin[small] = ML_NEW_ARRAY(s->arena, uint32_t, b.count + 1);
        for (uint32_t i = 0; i < b.count; i++)
            begin[small][i + 1] = is_fixed(&b, b.order[i], small) ? i + 1 : begin[small][i];
    }
    for (uint32_t i = b.count; i-- > 0;) {
        uint32_t members[MOST];
        if (b.taken[b.order[i]] || b.kind[b.order[i]] == 0) continue;
        bool small = is_small(&s->steps.at[b.order[i]]);
        int count = find_members(&b, begin[small][i], i, members);
        if (count > 1) join(&b, members, count);
    }
    __typeof__(s->steps) steps = {0};
    for (uint32_t i = 0; i < b.count; i++)
        if (!b.taken[b.order[i]]) *ML_PUSH(s->arena, &steps) = s->steps.at[b.order[i]];
    s->steps = steps;
}
