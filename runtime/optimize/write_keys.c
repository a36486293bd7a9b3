/* Cached attention to one new position of each row writes its key and value to the pools itself:
 * two kernels less in a step of decoding. For writes in place that this attention alone reads. */
#include "runtime/optimize/optimize.h"
#include "runtime/plan/dependencies.h"
#include "runtime/plan/plan_internal.h"

#include <string.h>

typedef struct {
    ml_schedule *s;
    step_uses uses;
    bool *joined; /* by step: it is a part of an attention */
} work;

static const ml_storage *storage_of(const work *w, const ml_step *step, int i) {
    return &w->s->storages.at[w->s->values.at[step->values[i]].storage];
}

/* The step that writes rows to the pool that attention t reads as its operand `which`, for it alone
 * and in place; NO_STEP. */
static uint32_t find_write(const work *w, uint32_t t, int which) {
    enum { OLD, NEW = 3 };
    const ml_schedule *s = w->s;
    const uint32_t storage = s->values.at[s->steps.at[t].values[which]].storage;
    const uint32_t first = w->uses.of_storage[storage], end = w->uses.of_storage[storage + 1];
    if (end - first != 2 || !w->uses.use[first].writes || w->uses.use[first + 1].step != t)
        return NO_STEP;
    const uint32_t from = w->uses.use[first].step;
    const ml_step *step = &s->steps.at[from];
    if (step->kind != ML_STEP_KERNEL || w->joined[from] ||
        ml_graph_node(s->graph, step->node)->op != ML_OP_WRITE_ROWS)
        return NO_STEP;
    const ml_storage *old = storage_of(w, step, OLD), *new = storage_of(w, step, NEW);
    const bool in_place =
        old->kind == ML_STORAGE_STATE && new->kind == old->kind &&new->id == old->id;
    return in_place ? from : NO_STEP;
}

static void join(work *w, uint32_t t) {
    enum { OLD, INDEX, VALUE, NEW, POOLS = 2 };
    ml_schedule *s = w->s;
    ml_step *step = &s->steps.at[t], whole = *step;
    const ml_step *write[POOLS];
    uint32_t from[POOLS], fresh[POOLS];
    for (int i = 0; i < POOLS; i++) {
        from[i] = find_write(w, t, ML_POOL_READ + i);
        if (from[i] == NO_STEP) return;
        write[i] = &s->steps.at[from[i]];
        fresh[i] = write[i]->values[VALUE];
    }
    if (from[0] == from[1] || !ml_cached_attention_writes(s, step, fresh)) return;
    const int reads = step->read_count;
    uint32_t *values = ML_NEW_ARRAY(s->arena, uint32_t, reads + 2 * POOLS + 1 + POOLS);
    memcpy(values, step->values, sizeof *values * (size_t)reads);
    whole.values = values;
    whole.fresh_at = reads, whole.read_count = reads + 2 * POOLS, whole.write_count = 1 + POOLS;
    whole.may_alias = NULL;
    values[whole.read_count] = step->values[reads]; /* the result */
    for (int i = 0; i < POOLS; i++) {
        values[ML_POOL_READ + i] = write[i]->values[OLD];
        values[reads + 2 * i] = write[i]->values[INDEX];
        values[reads + 2 * i + 1] = write[i]->values[VALUE];
        values[whole.read_count + 1 + i] = write[i]->values[NEW];
        w->joined[from[i]] = true;
    }
    ml_template_cached_attention(s, &whole);
    *step = whole;
}

void plan_write_keys(ml_plan *plan) {
    ml_schedule *s = plan->schedule;
    work w = {.s = s, .joined = ML_NEW_ARRAY(s->arena, bool, s->steps.count + 1)};
    step_uses_find(s, NULL, s->arena, &w.uses);
    for (uint32_t t = 0; t < s->steps.count; t++)
        if (s->steps.at[t].kind == ML_STEP_KERNEL &&
            ml_graph_node(s->graph, s->steps.at[t].node)->op == ML_OP_CACHED_ATTENTION)
            join(&w, t);
    __typeof__(s->steps) steps = {0};
    for (uint32_t t = 0; t < s->steps.count; t++)
        if (!w.joined[t]) *ML_PUSH(s->arena, &steps) = s->steps.at[t];
    s->steps = steps;
}
