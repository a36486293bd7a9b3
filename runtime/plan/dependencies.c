/* Uses of storages by steps, and the dependencies that follow from them. */
#include "runtime/plan/dependencies.h"

static uint32_t storage_of(const ml_schedule *s, const uint32_t *same, uint32_t t, int value) {
    uint32_t storage = s->values.at[s->steps.at[t].values[value]].storage;
    return same != NULL ? same[storage] : storage;
}

static int value_count(const ml_schedule *s, uint32_t t) {
    return s->steps.at[t].read_count + s->steps.at[t].write_count;
}

/* Set next_write and end of the uses of one storage, from the last to the first. */
static void link_writes(step_use *use, uint32_t begin, uint32_t end) {
    uint32_t write = end;
    for (uint32_t i = end; i-- > begin;) {
        use[i].next_write = write;
        use[i].end = end;
        if (use[i].writes) write = i;
    }
}

void step_uses_find(const ml_schedule *s, const uint32_t *same, ml_arena *arena, step_uses *out) {
    uint32_t steps = s->steps.count, storages = s->storages.count, total = 0;
    uint32_t *at = ML_NEW_ARRAY(arena, uint32_t, (size_t)storages + 2);
    out->first = ML_NEW_ARRAY(arena, uint32_t, (size_t)steps + 1);
    for (uint32_t t = 0; t < steps; t++) {
        out->first[t] = total;
        total += (uint32_t)value_count(s, t);
    }
    out->first[steps] = total;
    out->use = ML_NEW_ARRAY(arena, step_use, (size_t)total + 1);
    uint32_t *by_value = out->by_value = ML_NEW_ARRAY(arena, uint32_t, (size_t)total + 1);
    for (uint32_t t = 0, next = 0; t < steps; t++) /* the storage at first, then its use */
        for (int i = 0; i < value_count(s, t); i++) {
            by_value[next] = storage_of(s, same, t, i);
            at[by_value[next++] + 2]++;
        }
    for (uint32_t i = 0; i < storages; i++) at[i + 2] += at[i + 1];
    for (uint32_t t = 0, next = 0; t < steps; t++)
        for (int i = 0; i < value_count(s, t); i++, next++) {
            uint32_t to = by_value[next] = at[by_value[next] + 1]++;
            out->use[to] = (step_use){.step = t, .writes = i >= s->steps.at[t].read_count};
        }
    out->of_storage = at; /* at[i + 1], which began where storage i does, is now where it ends */
    for (uint32_t i = 0; i < storages; i++) link_writes(out->use, at[i], at[i + 1]);
}

step_span *step_spans_find(const ml_schedule *s, ml_arena *arena) {
    step_span *spans = ML_NEW_ARRAY(arena, step_span, (size_t)s->storages.count + 1);
    for (uint32_t i = 0; i < s->storages.count; i++)
        spans[i] = (step_span){NO_STEP, NO_STEP, NO_STEP, NO_STEP};
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        for (int i = 0; i < value_count(s, t); i++) {
            step_span *span = &spans[s->values.at[step->values[i]].storage];
            if (span->first == NO_STEP) span->first = t;
            span->last = t;
            if (i < step->read_count)
                span->last_read = t;
            else if (span->first_write == NO_STEP)
                span->first_write = t;
        }
    }
    return spans;
}

static void use_state(const ml_schedule *s, uint32_t value, uint32_t end, uint32_t *last) {
    const ml_storage *storage = &s->storages.at[s->values.at[value].storage];
    if (storage->kind == ML_STORAGE_STATE && last[storage->id] < end) last[storage->id] = end;
}

uint32_t *state_last_uses(const ml_schedule *s, int output_count, ml_arena *arena) {
    uint32_t *last = ML_NEW_ARRAY(arena, uint32_t, (size_t)ml_graph_state_count(s->graph) + 1);
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        const bool beside = step->kind == ML_STEP_COLLECTIVE && step->collective->ticket != 0;
        for (int i = 0; i < value_count(s, t); i++)
            use_state(s, step->values[i], beside ? s->steps.count : t + 1, last);
    }
    for (int i = 0; i < output_count; i++) use_state(s, s->output_values[i], s->steps.count, last);
    return last;
}

/* ---- dependencies ---- */
typedef ML_VEC(uint64_t) edge_list; /* from << 32 | to */

static void edges_fill(step_edges *edges, const edge_list *list, uint32_t steps, bool backwards,
                       ml_arena *arena) {
    edges->first = ML_NEW_ARRAY(arena, uint32_t, (size_t)steps + 2);
    edges->edge = ML_NEW_ARRAY(arena, uint32_t, (size_t)list->count + 1);
    for (uint32_t i = 0; i < list->count; i++) {
        uint64_t e = list->at[i];
        edges->first[(backwards ? (uint32_t)e : (uint32_t)(e >> 32)) + 2]++;
    }
    for (uint32_t i = 2; i < steps + 2; i++) edges->first[i] += edges->first[i - 1];
    for (uint32_t i = 0; i < list->count; i++) {
        uint32_t from = (uint32_t)(list->at[i] >> 32), to = (uint32_t)list->at[i];
        edges->edge[edges->first[(backwards ? to : from) + 1]++] = backwards ? from : to;
    }
}

void step_dependencies_find(const ml_schedule *s, ml_arena *arena, step_edges *before,
                            step_edges *after) {
    edge_list list = {0};
    step_uses u;
    step_uses_find(s, NULL, arena, &u);
    for (uint32_t t = 0; t < s->steps.count; t++) {
        for (int i = 0; i < value_count(s, t); i++) {
            uint32_t storage = storage_of(s, NULL, t, i);
            bool reads = i < s->steps.at[t].read_count;
            if (!reads && s->storages.at[storage].kind != ML_STORAGE_TEMPORARY) continue;
            /* A value may have as many readers as there are layers: each looks at writes alone. */
            uint32_t e = u.of_storage[storage];
            if (reads && !u.use[e].writes) e = u.use[e].next_write;
            for (; e < u.of_storage[storage + 1] && u.use[e].step < t;
                 e = reads ? u.use[e].next_write : e + 1)
                if (u.use[e].writes == reads)
                    *ML_PUSH(arena, &list) = (uint64_t)u.use[e].step << 32 | t;
        }
    }
    edges_fill(before, &list, s->steps.count, true, arena);
    edges_fill(after, &list, s->steps.count, false, arena);
}

void storage_uses_count(const ml_schedule *s, uint32_t *reads, uint32_t *writes) {
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        for (int i = 0; i < step->read_count + step->write_count; i++)
            (i < step->read_count ? reads : writes)[s->values.at[step->values[i]].storage]++;
    }
}
