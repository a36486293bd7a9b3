/* Batches: kernels of one structure that do not depend on one another, such as the optimizer's for
 * each of many parameters or the partial sums of their gradients' norm, become one step and run in
 * one launch. Small tensors alone leave most of a GPU idle, and each launch costs microseconds.
 *
 * Steps move towards the end only, to the last of their kind; and small ones before that, so that
 * they are in no other's way. No step passes one that writes what it touches or touches what it
 * writes, where a state and its new value are one thing, for they are to share their memory. None
 * keeps a large tensor until others are made that might have had its memory. Each kernel keeps its
 * blocks, and so its bits. */
#include "runtime/plan/parts.h"

enum {
    FARTHEST = 512,    /* steps that a step may pass */
    SMALL = 256 << 10, /* bytes */
    LARGE = 8 << 20,   /* bytes */
    MOST = 128,        /* members, whatever there is room for */
};

typedef struct {
    ml_schedule *s;
    uint32_t count;
    uint32_t *old;            /* by storage: where it is a state's new value, the state's storage */
    uint32_t *last_read;      /* by storage: the step; 0: none */
    int64_t *born;            /* by step: bytes of temporaries that it is the first to write */
    uint64_t *reads, *writes; /* by step: a bit for each storage, of which many share one */
    uint32_t *order;          /* the steps as they will run */
    bool *taken;              /* by step: it is a part of another */
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
    b->born = ML_NEW_ARRAY(s->arena, int64_t, b->count + 1);
    b->taken = ML_NEW_ARRAY(s->arena, bool, b->count + 1);
    for (uint32_t i = 0; i < storages; i++) {
        b->old[i] = i;
        if (s->storages.at[i].kind == ML_STORAGE_STATE) of_state[s->storages.at[i].id] = i + 1;
    }
    for (int i = 0; i < roots->update_count; i++) {
        uint32_t at = of_state[roots->updates[i].state];
        if (at != 0) b->old[s->values.at[s->update_values[i]].storage] = at - 1;
    }
    bool *written = ML_NEW_ARRAY(s->arena, bool, storages + 1);
    for (uint32_t t = 0; t < b->count; t++) {
        const ml_step *step = &s->steps.at[t];
        b->order[t] = t;
        for (int i = 0; i < step->read_count; i++) b->last_read[storage_of(b, step, i)] = t;
        for (int i = step->read_count; i < step->read_count + step->write_count; i++) {
            uint32_t at = storage_of(b, step, i);
            bool temporary = s->storages.at[at].kind == ML_STORAGE_TEMPORARY && b->old[at] == at;
            if (temporary && !written[at]) b->born[t] += s->storages.at[at].bytes;
            written[at] = true;
        }
    }
    for (int i = 0; i < roots->output_count; i++)
        b->last_read[s->values.at[s->output_values[i]].storage] = b->count;
}

/* Most pairs of steps are seen at once to touch nothing in common. */
static void find_bits(batches *b) {
    b->reads = ML_NEW_ARRAY(b->s->arena, uint64_t, b->count + 1);
    b->writes = ML_NEW_ARRAY(b->s->arena, uint64_t, b->count + 1);
    for (uint32_t t = 0; t < b->count; t++) {
        const ml_step *step = &b->s->steps.at[t];
        for (int i = 0; i < step->read_count + step->write_count; i++)
            (i < step->read_count ? b->reads : b->writes)[t] |=
                (uint64_t)1 << b->old[storage_of(b, step, i)] % 64;
    }
}

/* Whether one of two steps writes what the other touches. */
static bool conflict(const batches *b, uint32_t x, uint32_t y) {
    if (!(b->writes[x] & (b->reads[y] | b->writes[y])) && !(b->reads[x] & b->writes[y]))
        return false;
    const ml_step *one = &b->s->steps.at[x], *other = &b->s->steps.at[y];
    int values = one->read_count + one->write_count;
    int others = other->read_count + other->write_count;
    for (int i = 0; i < values; i++) {
        uint32_t storage = b->old[storage_of(b, one, i)];
        for (int j = i < one->read_count ? other->read_count : 0; j < others; j++)
            if (b->old[storage_of(b, other, j)] == storage) return true;
    }
    return false;
}

/* What other streams wait for keeps its place, and everything keeps its side of it. */
static bool is_fixed(const batches *b, uint32_t t) {
    ml_step_kind kind = b->s->steps.at[t].kind;
    return kind == ML_STEP_COLLECTIVE || kind == ML_STEP_WAIT;
}

/* Small kernels to right before the first step that needs them done. */
static void move_small(batches *b) {
    for (uint32_t from = b->count; from-- > 0;) {
        uint32_t t = b->order[from], to = from;
        const ml_step *step = &b->s->steps.at[t];
        if (step->kind != ML_STEP_KERNEL || step->bytes > SMALL) continue;
        while (to + 1 < b->count && to - from < FARTHEST && !is_fixed(b, b->order[to + 1]) &&
               !conflict(b, t, b->order[to + 1]))
            to++;
        for (uint32_t i = from; i < to; i++) b->order[i] = b->order[i + 1];
        b->order[to] = t;
    }
}

static bool alike(const ml_step *a, const ml_step *b) {
    return a->kind == ML_STEP_KERNEL && a->ir != NULL && b->ir != NULL &&
           a->kernel->key == b->kernel->key && ml_batch_capacity(a->kernel) > 0 &&
           a->read_count == b->read_count && a->write_count == b->write_count;
}

/* Whether step t may run when step `then` does, which comes later: its large operands are there
 * until then anyway, or no more than `born` bytes are made in between, which is little; and its
 * large results are states. */
static bool waits_for_free(const batches *b, uint32_t t, uint32_t then, int64_t born) {
    const ml_step *step = &b->s->steps.at[t];
    for (int i = 0; i < step->read_count + step->write_count; i++) {
        uint32_t at = storage_of(b, step, i);
        const ml_storage *storage = &b->s->storages.at[at];
        bool kept = storage->kind != ML_STORAGE_TEMPORARY || storage->bytes <= SMALL ||
                    (i < step->read_count ? b->last_read[at] >= then || born <= LARGE
                                          : b->old[at] != at || storage->bytes <= LARGE);
        if (!kept) return false;
    }
    return true;
}

/* The steps that can run together with the one at `last`; members[0] is that. */
static int find_members(const batches *b, uint32_t last, uint32_t *members) {
    const uint32_t then = b->order[last];
    const ml_step *step = &b->s->steps.at[then];
    uint32_t passed[FARTHEST], count = 0;
    int found = 1, most = ml_batch_capacity(step->kernel);
    int64_t born = 0;
    members[0] = then;
    for (uint32_t i = last; i-- > 0 && count < FARTHEST && found < most && found < MOST;) {
        uint32_t t = b->order[i];
        if (b->taken[t]) continue;
        if (is_fixed(b, t)) break;
        bool joins = alike(&b->s->steps.at[t], step) && waits_for_free(b, t, then, born);
        for (uint32_t p = 0; p < count && joins; p++) joins = !conflict(b, t, passed[p]);
        for (int m = 0; m < found && joins; m++) joins = !conflict(b, t, members[m]);
        born += b->born[t];
        if (joins)
            members[found++] = t;
        else
            passed[count++] = t;
    }
    return found;
}

/* One step of all members, in the place of the first of them. */
static void join(batches *b, const uint32_t *members, int count, const ml_target *target) {
    ml_schedule *s = b->s;
    ml_step *into = &s->steps.at[members[0]], whole = *into;
    const ml_kernel *kernels[MOST];
    int reads = into->read_count, writes = into->write_count;
    whole.values = ML_NEW_ARRAY(s->arena, uint32_t, count * (reads + writes) + 1);
    whole.may_alias = ML_NEW_ARRAY(s->arena, uint64_t, count * writes + 1);
    whole.flops = 0;
    whole.bytes = 0;
    for (int m = 0; m < count; m++) {
        const ml_step *member = &s->steps.at[members[m]];
        kernels[m] = member->kernel;
        whole.flops += member->flops;
        whole.bytes += member->bytes;
        for (int i = 0; i < reads; i++) whole.values[m * reads + i] = member->values[i];
        for (int i = 0; i < writes; i++) {
            whole.values[count * reads + m * writes + i] = member->values[reads + i];
            whole.may_alias[m * writes + i] = member->may_alias ? member->may_alias[i] : 0;
        }
        b->taken[members[m]] = m > 0;
    }
    whole.kernel = ML_NEW(s->arena, ml_kernel);
    ml_emit_batch(into->ir, kernels, count, target, s->arena, whole.kernel);
    whole.members = count;
    whole.read_count = count * reads;
    whole.write_count = count * writes;
    *into = whole;
}

void plan_batch(ml_plan *plan, const ml_target *target) {
    ml_schedule *s = plan->schedule;
    batches b = {.s = s, .count = s->steps.count};
    find_storages(&b, &plan->roots);
    find_bits(&b);
    move_small(&b);
    for (uint32_t i = b.count; i-- > 0;) {
        uint32_t members[MOST];
        const ml_step *step = &s->steps.at[b.order[i]];
        if (b.taken[b.order[i]] || !alike(step, step)) continue;
        int count = find_members(&b, i, members);
        if (count > 1) join(&b, members, count, target);
    }
    __typeof__(s->steps) steps = {0};
    for (uint32_t i = 0; i < b.count; i++)
        if (!b.taken[b.order[i]]) *ML_PUSH(s->arena, &steps) = s->steps.at[b.order[i]];
    s->steps = steps;
}
