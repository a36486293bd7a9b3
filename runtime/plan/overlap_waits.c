/* The schedule in its new order, and the WAITs of collectives that run beside computation. */
#include "runtime/plan/overlap.h"

enum { NONE = UINT32_MAX };

static bool is_collective(const overlap_order *o, uint32_t step) {
    return o->s->steps.at[step].kind == ML_STEP_COLLECTIVE;
}

typedef struct {
    uint32_t *position; /* of each step in the new order */
    uint32_t *computes; /* of each position: the first from there on that is no collective */
    uint32_t *launch;   /* of each position: the first one of its launch, if those are neighbours */
    uint32_t *wait_at;  /* of each collective: the position in the new order before which it is
                           waited for; NONE where nothing runs beside it */
} waits;

/* The position of the first step that needs the result; the first of its launch, if it is one of
 * several collectives. */
static uint32_t first_user(const overlap_order *o, uint32_t t, const waits *w) {
    uint32_t first = o->count;
    for (uint32_t e = o->after->first[t]; e < o->after->first[t + 1]; e++)
        if (w->position[o->after->edge[e]] < first) first = w->position[o->after->edge[e]];
    return w->launch[first];
}

/* The new order, by position. */
static void positions_find(const overlap_order *o, waits *w) {
    const size_t count = (size_t)o->count + 2;
    w->position = ML_NEW_ARRAY(o->scratch, uint32_t, count);
    w->computes = ML_NEW_ARRAY(o->scratch, uint32_t, count);
    w->launch = ML_NEW_ARRAY(o->scratch, uint32_t, count);
    w->computes[o->count] = w->computes[o->count + 1] = o->count;
    w->launch[o->count] = o->count;
    for (uint32_t i = o->count; i-- > 0;)
        w->computes[i] = is_collective(o, o->order[i]) ? w->computes[i + 1] : i;
    for (uint32_t i = 0; i < o->count; i++) {
        uint32_t t = o->order[i], before = i > 0 ? o->order[i - 1] : t;
        bool joins = i > 0 && is_collective(o, t) && is_collective(o, before) &&
                     o->group[t] == o->group[before];
        w->position[t] = i;
        w->launch[i] = joins ? w->launch[i - 1] : i;
    }
}

/* Collectives of one launch are waited for one by one, or none is; those that lead always are. */
static void waits_find(const overlap_order *o, waits *w) {
    positions_find(o, w);
    w->wait_at = ML_NEW_ARRAY(o->scratch, uint32_t, (size_t)o->count + 1);
    bool *beside = ML_NEW_ARRAY(o->scratch, bool, (size_t)o->count + 1);
    for (uint32_t t = 0; t < o->count; t++) {
        w->wait_at[t] = NONE;
        if (!is_collective(o, t)) continue;
        w->wait_at[t] = first_user(o, t, w);
        bool computes = w->computes[w->position[t] + 1] < w->wait_at[t];
        if (computes || o->s->steps.at[t].collective->lead_order != 0) beside[o->group[t]] = true;
    }
    for (uint32_t t = 0; t < o->count; t++)
        if (is_collective(o, t) && !beside[o->group[t]]) w->wait_at[t] = NONE;
}

/* A sum in flight is computed in its operand's memory, if no other step reads that. */
static void sums_in_place(const overlap_order *o, const waits *w, int output_count,
                          int update_count) {
    ml_schedule *s = o->s;
    size_t storages = (size_t)s->storages.count + 1;
    uint32_t *reads = ML_NEW_ARRAY(o->scratch, uint32_t, storages);
    uint32_t *writes = ML_NEW_ARRAY(o->scratch, uint32_t, storages);
    uint32_t *moved = ML_NEW_ARRAY(o->scratch, uint32_t, storages);
    for (uint32_t i = 0; i < s->storages.count; i++) moved[i] = i;
    for (uint32_t t = 0; t < o->count; t++) {
        const ml_step *step = &s->steps.at[t];
        for (int i = 0; i < step->read_count + step->write_count; i++)
            (i < step->read_count ? reads : writes)[s->values.at[step->values[i]].storage]++;
    }
    for (int i = 0; i < output_count; i++) reads[s->values.at[s->output_values[i]].storage]++;
    for (int i = 0; i < update_count; i++) reads[s->values.at[s->update_values[i]].storage]++;
    for (uint32_t t = 0; t < o->count; t++) {
        const ml_step *step = &s->steps.at[t];
        if (w->wait_at[t] == NONE || step->collective->kind != ML_COLLECTIVE_ALL_REDUCE) continue;
        const ml_value *from = &s->values.at[step->values[0]], *to = &s->values.at[step->values[1]];
        const ml_storage *operand = &s->storages.at[from->storage];
        ml_storage *result = &s->storages.at[to->storage];
        bool alone = reads[from->storage] == 1 && writes[to->storage] == 1;
        if (!alone || operand->kind != ML_STORAGE_TEMPORARY || operand->bytes != result->bytes ||
            result->kind != ML_STORAGE_TEMPORARY || from->offset != 0 || to->offset != 0)
            continue;
        moved[to->storage] = moved[from->storage];
        result->bytes = 0;
    }
    for (uint32_t v = 0; v < s->values.count; v++)
        s->values.at[v].storage = moved[s->values.at[v].storage];
}

static ml_step wait_step(ml_schedule *s, const ml_step *started) {
    ml_step wait = {.kind = ML_STEP_WAIT, .node = started->node, .read_count = 2};
    wait.values = started->values;
    wait.collective = started->collective;
    wait.may_alias = ML_NEW(s->arena, uint64_t);
    return wait;
}

static void schedule_rewrite(const overlap_order *o, const waits *w) {
    ml_schedule *s = o->s;
    uint32_t *head = ML_NEW_ARRAY(o->scratch, uint32_t, (size_t)o->count + 1);
    uint32_t *next = ML_NEW_ARRAY(o->scratch, uint32_t, (size_t)o->count + 1), ticket = 0;
    const ml_step *old = s->steps.at;
    for (uint32_t i = 0; i <= o->count; i++) head[i] = NONE;
    for (uint32_t i = o->count; i-- > 0;) {
        uint32_t t = o->order[i];
        if (w->wait_at[t] == NONE) continue;
        next[t] = head[w->wait_at[t]];
        head[w->wait_at[t]] = t;
    }
    __typeof__(s->steps) steps = {0};
    uint32_t all = o->count;
    for (uint32_t t = 0; t < o->count; t++) all += w->wait_at[t] != NONE;
    ML_VEC_RESERVE(s->arena, &steps, all + 1);
    for (uint32_t i = 0; i <= o->count; i++) {
        for (uint32_t t = head[i]; t != NONE; t = next[t])
            *ML_PUSH(s->arena, &steps) = wait_step(s, &steps.at[w->position[t]]);
        if (i == o->count) break;
        uint32_t t = o->order[i];
        ml_step *step = ML_PUSH(s->arena, &steps);
        *step = old[t];
        w->position[t] = steps.count - 1; /* from now on: with the waits */
        if (w->wait_at[t] == NONE) continue;
        ml_collective_step *c = ML_NEW(s->arena, ml_collective_step);
        *c = *step->collective;
        c->ticket = ++ticket;
        c->launch = o->group[t];
        step->collective = c;
    }
    s->steps = steps;
}

void overlap_rewrite(const overlap_order *o, const ml_roots *roots) {
    waits w;
    waits_find(o, &w);
    sums_in_place(o, &w, roots->output_count, roots->update_count);
    schedule_rewrite(o, &w);
}
