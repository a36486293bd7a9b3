/* Assignment of states. All reads of a program see the values from before it, so an update may
 * write its state's memory only where no read of the old value is still to come:
 * - in place, when the step that first writes the new value is later than every read of the old
 *   one, or is the last reader itself and may overwrite what it reads;
 * - else by a COPY at the end. What the copies (and the outputs) then still need of the old value
 *   of an updated state is copied to a temporary first, so that states can swap. */
#include "runtime/plan/dependencies.h"
#include "runtime/plan/plan_internal.h"

#include <string.h>

enum { NO_INDEX = UINT32_MAX };

typedef struct {
    ml_plan *plan;
    ml_schedule *s;
    step_span *spans; /* without the copies that are appended */
    memory_reads reads;
    bool *read_at_end;    /* by storage: an output or another state's update refers to it */
    uint32_t *storage_of; /* by state: its storage, or NO_INDEX */
    bool *updated;        /* by state */
} assign_work;

static uint32_t value_add(ml_schedule *s, ml_ref node, const ml_type *type, uint32_t storage) {
    ml_value *value = ML_PUSH(s->arena, &s->values);
    value->node = node;
    value->type = *type;
    value->storage = storage;
    int64_t stride = 1;
    for (int i = type->rank - 1; i >= 0; i--) {
        value->stride[i] = stride;
        stride *= type->size[i];
    }
    return s->values.count - 1;
}

static uint32_t storage_add(ml_schedule *s, ml_storage_kind kind, uint32_t id, int64_t bytes,
                            ml_ref node) {
    ml_storage *storage = ML_PUSH(s->arena, &s->storages);
    storage->kind = kind;
    storage->id = id;
    storage->bytes = bytes;
    storage->node = node;
    return s->storages.count - 1;
}

static void copy_add(ml_schedule *s, uint32_t from, uint32_t to, ml_ref node) {
    ml_step *step = ML_PUSH(s->arena, &s->steps);
    step->kind = ML_STEP_COPY;
    step->node = node;
    step->read_count = step->write_count = 1;
    step->values = ML_NEW_ARRAY(s->arena, uint32_t, 2);
    step->values[0] = from;
    step->values[1] = to;
    step->may_alias = ML_NEW(s->arena, uint64_t);
    step->bytes = 2 * ml_type_bytes(&s->values.at[from].type);
}

static void work_fill(assign_work *work) {
    const ml_schedule *s = work->s;
    const ml_roots *roots = &work->plan->roots;
    for (uint32_t i = 0; i < ml_graph_state_count(s->graph); i++) work->storage_of[i] = NO_INDEX;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        if (s->storages.at[i].kind == ML_STORAGE_STATE) work->storage_of[s->storages.at[i].id] = i;
    }
    for (int i = 0; i < roots->output_count; i++) {
        work->read_at_end[s->values.at[s->output_values[i]].storage] = true;
    }
    for (int i = 0; i < roots->update_count; i++) {
        const ml_storage *from = &s->storages.at[s->values.at[s->update_values[i]].storage];
        bool itself = from->kind == ML_STORAGE_STATE && from->id == roots->updates[i].state;
        if (!itself) work->read_at_end[s->values.at[s->update_values[i]].storage] = true;
        work->updated[roots->updates[i].state] = true;
    }
}

/* The type of what is assigned: the rank's part of the state, or less. */
static ml_type assigned_type(const assign_work *work, int update) {
    const ml_update *of = &work->plan->roots.updates[update];
    const ml_schedule *s = work->s;
    return of->part ? s->values.at[s->update_values[update]].type
                    : plan_state(work->plan, of->state);
}

/* The memory that an update writes is the state's, from its first element on. */
static void assign_storage(const assign_work *work, int update, ml_storage *storage) {
    const ml_update *of = &work->plan->roots.updates[update];
    ml_type whole = plan_state(work->plan, of->state);
    storage->kind = ML_STORAGE_STATE;
    storage->id = of->state;
    storage->bytes = ml_type_bytes(&whole);
    storage->offset = of->start * ml_dtypes[whole.dtype].bytes;
}

/* Whether the new value can be computed right where the state is. */
static bool update_in_place(assign_work *work, int update) {
    const ml_schedule *s = work->s;
    uint32_t state = work->plan->roots.updates[update].state;
    const ml_value *value = &s->values.at[s->update_values[update]];
    const ml_storage *storage = &s->storages.at[value->storage];
    ml_type local = assigned_type(work, update);
    const ml_type *type = &local;
    uint32_t old = work->storage_of[state];
    uint32_t first = work->spans[value->storage].first_write;
    if (storage->kind != ML_STORAGE_TEMPORARY || first == NO_STEP) return false;
    if (value->offset != 0 || !ml_value_contiguous(value) || !ml_type_equal(&value->type, type) ||
        storage->bytes != ml_type_bytes(type)) {
        return false;
    }
    if (old == NO_INDEX) return true;
    uint32_t last = work->spans[old].last_read;
    if (work->read_at_end[old] || (last != NO_STEP && last > first)) return false;
    if (last == NO_STEP || last < first) return true;
    const ml_step *step = &s->steps.at[first];
    const uint32_t *storages = memory_read_storages(s, step, &work->reads, s->arena);
    for (int w = 0; w < step->write_count; w++) {
        if (s->values.at[step->values[step->read_count + w]].storage != value->storage) continue;
        if (!memory_may_overwrite(s, step, storages, w, old)) return false;
    }
    return true;
}

/* Save the old value of an updated state for later: *value becomes one in a copy of the state. */
static void value_save(assign_work *work, uint32_t *value, uint32_t *saved) {
    ml_schedule *s = work->s;
    uint32_t old = s->values.at[*value].storage, state = s->storages.at[old].id;
    ml_type local = plan_state(work->plan, state);
    const ml_type *type = &local;
    ml_ref node = s->values.at[*value].node;
    if (saved[state] == NO_INDEX) {
        saved[state] = storage_add(s, ML_STORAGE_TEMPORARY, 0, ml_type_bytes(type), node);
        uint32_t from = value_add(s, node, type, old);
        copy_add(s, from, value_add(s, node, type, saved[state]), node);
    }
    ml_value copy = s->values.at[*value];
    copy.storage = saved[state];
    *ML_PUSH(s->arena, &s->values) = copy;
    *value = s->values.count - 1;
}

static bool reads_updated(const assign_work *work, uint32_t value) {
    const ml_storage *storage = &work->s->storages.at[work->s->values.at[value].storage];
    return storage->kind == ML_STORAGE_STATE && work->updated[storage->id] &&
           work->storage_of[storage->id] == work->s->values.at[value].storage;
}

/* The updates whose done[] is false, by copies. */
static void updates_copy(assign_work *work, const bool *done) {
    ml_schedule *s = work->s;
    const ml_roots *roots = &work->plan->roots;
    uint32_t states = ml_graph_state_count(s->graph);
    uint32_t *saved = ML_NEW_ARRAY(s->arena, uint32_t, (size_t)states + 1);
    memset(saved, 0xff, sizeof(uint32_t) * ((size_t)states + 1));
    for (int i = 0; i < roots->output_count; i++) {
        if (reads_updated(work, s->output_values[i])) value_save(work, &s->output_values[i], saved);
    }
    for (int i = 0; i < roots->update_count; i++) {
        if (!done[i] && reads_updated(work, s->update_values[i])) {
            value_save(work, &s->update_values[i], saved);
        }
    }
    for (int i = 0; i < roots->update_count; i++) {
        if (done[i]) continue;
        uint32_t state = roots->updates[i].state, value = s->update_values[i];
        const ml_state *info = ml_graph_state(s->graph, state);
        ml_type type = assigned_type(work, i);
        if (!ml_value_contiguous(&s->values.at[value])) {
            ml_raise(ML_INTERNAL, "the new value of state \"%s\" is not contiguous in memory",
                     info->name);
        }
        uint32_t to = work->storage_of[state];
        if (to == NO_INDEX || roots->updates[i].part) {
            to = storage_add(s, ML_STORAGE_STATE, state, 0, 0);
            assign_storage(work, i, &s->storages.at[to]);
        }
        if (!roots->updates[i].part) work->storage_of[state] = to;
        ml_ref node = roots->updates[i].value;
        copy_add(s, value, value_add(s, node, &type, to), node);
    }
}

void plan_update_states(ml_plan *plan) {
    ml_schedule *s = plan->schedule;
    const ml_roots *roots = &plan->roots;
    size_t storages = (size_t)s->storages.count + 1, states = ml_graph_state_count(s->graph) + 1;
    assign_work work = {
        .plan = plan,
        .s = s,
        .read_at_end = ML_NEW_ARRAY(s->arena, bool, storages),
        .storage_of = ML_NEW_ARRAY(s->arena, uint32_t, states),
        .updated = ML_NEW_ARRAY(s->arena, bool, states),
    };
    work.spans = step_spans_find(s, s->arena);
    work_fill(&work);
    bool *done = ML_NEW_ARRAY(s->arena, bool, (size_t)roots->update_count + 1);
    for (int i = 0; i < roots->update_count; i++) {
        const ml_value *value = &s->values.at[s->update_values[i]];
        ml_storage *storage = &s->storages.at[value->storage];
        uint32_t state = roots->updates[i].state;
        if (update_in_place(&work, i)) {
            assign_storage(&work, i, storage);
            done[i] = true;
        } else if (value->storage == work.storage_of[state] && value->offset == 0 &&
                   ml_value_contiguous(value)) {
            done[i] = true; /* assigned to itself */
        }
    }
    updates_copy(&work, done);
}

void plan_export_outputs(ml_plan *plan) {
    ml_schedule *s = plan->schedule;
    for (int i = 0; i < plan->roots.output_count; i++) {
        const ml_value *value = &s->values.at[s->output_values[i]];
        ml_storage *storage = &s->storages.at[value->storage];
        int64_t bytes = ml_type_bytes(&value->type);
        if (!ml_value_contiguous(value))
            ml_raise(ML_INTERNAL, "output %d of a task is not contiguous in memory", i);
        if (storage->kind == ML_STORAGE_TEMPORARY && value->offset == 0 &&
            storage->bytes == bytes) {
            storage->kind = ML_STORAGE_SAVED;
            storage->id = (uint32_t)i;
            continue;
        }
        ml_type type = value->type;
        ml_ref node = value->node;
        uint32_t target = storage_add(s, ML_STORAGE_SAVED, (uint32_t)i, bytes, node);
        copy_add(s, s->output_values[i], value_add(s, node, &type, target), node);
    }
}

void plan_add_workspace(ml_schedule *s, ml_step *step, int64_t bytes) {
    int count = step->read_count + step->write_count++;
    uint32_t *values = ML_NEW_ARRAY(s->arena, uint32_t, (size_t)count + 1);
    ml_type type = {.dtype = ML_I32};
    memcpy(values, step->values, sizeof *values * (size_t)count);
    values[count] = value_add(s, 0, &type, storage_add(s, ML_STORAGE_TEMPORARY, 0, bytes, 0));
    step->values = values;
}
