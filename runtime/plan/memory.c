/* The memory of a plan: liveness of each storage, which ones may follow one another in the same
 * bytes, the offset of each in the arena, and the sums by kind. */
#include "runtime/base/knobs.h"
#include "runtime/plan/arena_offsets.h"
#include "runtime/plan/dependencies.h"
#include "runtime/plan/plan_internal.h"

enum { NO_STORAGE = UINT32_MAX };

bool ml_value_contiguous(const ml_value *value) {
    int64_t expected = 1;
    for (int i = value->type.rank - 1; i >= 0; i--) {
        if (value->type.size[i] != 1 && value->stride[i] != expected) return false;
        expected *= value->type.size[i];
    }
    return true;
}

bool value_is_whole(const ml_schedule *s, const ml_value *value) {
    const ml_storage *storage = &s->storages.at[value->storage];
    return value->offset == 0 && ml_value_contiguous(value) &&
           ml_type_bytes(&value->type) == storage->bytes;
}

static int members_of(const ml_step *step) {
    return step->members > 0 ? step->members : 1;
}

static int member_of_write(const ml_step *step, int write) {
    return write / (step->write_count / members_of(step));
}

/* Whether a step may write a result over the operand's memory. */
static bool overwrites(const ml_step *step, int write, int read) {
    int reads = step->read_count / members_of(step);
    if (step->may_alias == NULL || reads == 0) return false;
    if (read / reads != member_of_write(step, write) || read % reads >= 64) return false;
    return step->may_alias[write] >> read % reads & 1;
}

const uint32_t *memory_read_storages(const ml_schedule *schedule, const ml_step *step,
                                     memory_reads *reads, ml_arena *scratch) {
    if (reads->step == step) return reads->storages.at;
    reads->step = step;
    reads->storages.count = 0;
    for (int i = 0; i < step->read_count; i++)
        *ML_PUSH(scratch, &reads->storages) = schedule->values.at[step->values[i]].storage;
    return reads->storages.at;
}

bool memory_may_overwrite(const ml_schedule *schedule, const ml_step *step,
                          const uint32_t *storages, int write, uint32_t storage) {
    const ml_value *written = &schedule->values.at[step->values[step->read_count + write]];
    int width = ml_dtypes[written->type.dtype].bytes;
    for (int i = 0; i < step->read_count; i++) {
        if (storages[i] != storage) continue;
        const ml_value *read = &schedule->values.at[step->values[i]];
        if (!overwrites(step, write, i)) return false;
        if (read->offset != written->offset || ml_dtypes[read->type.dtype].bytes != width) {
            return false;
        }
    }
    return true;
}

/* Lifetimes of all storages, in steps; a storage that no step writes lives in step 0. */
static void lifetimes_find(ml_schedule *s, int output_count, ml_arena *scratch) {
    const step_span *spans = step_spans_find(s, scratch);
    for (uint32_t i = 0; i < s->storages.count; i++) {
        bool used = spans[i].first != NO_STEP;
        s->storages.at[i].first = used ? spans[i].first : 0;
        s->storages.at[i].last = used ? spans[i].last : 0;
    }
    uint32_t end = s->steps.count > 0 ? s->steps.count - 1 : 0;
    for (int i = 0; i < output_count; i++) {
        s->storages.at[s->values.at[s->output_values[i]].storage].last = end;
    }
}

/* In-place buffer reuse. successor[y] = x: the live range of temporary x starts in the step that
 * ends that of y, and the step may write x over y. Only buffers of equal size are reused, so that
 * no small tensor occupies a large block. */
static void successors_find(const ml_schedule *s, const bool *is_output, uint32_t *successor,
                            bool *reuses, ml_arena *scratch) {
    memory_reads found = {0};
    for (uint32_t i = 0; i < s->storages.count; i++) successor[i] = NO_STORAGE;
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        const uint32_t *storages = memory_read_storages(s, step, &found, scratch);
        const int reads = step->read_count / members_of(step);
        for (int w = 0; w < step->write_count && step->may_alias != NULL; w++) {
            uint32_t x = s->values.at[step->values[step->read_count + w]].storage;
            const ml_storage *started = &s->storages.at[x];
            if (started->kind != ML_STORAGE_TEMPORARY || started->first != t || reuses[x]) continue;
            const int begin = member_of_write(step, w) * reads;
            for (int r = begin; r < begin + reads && !reuses[x]; r++) {
                if (!overwrites(step, w, r)) continue;
                uint32_t y = storages[r];
                const ml_storage *ended = &s->storages.at[y];
                if (ended->kind != ML_STORAGE_TEMPORARY || ended->last != t || y == x ||
                    is_output[y] || successor[y] != NO_STORAGE ||
                    memory_padded(ended->bytes) != memory_padded(started->bytes) ||
                    !memory_may_overwrite(s, step, storages, w, y)) {
                    continue;
                }
                successor[y] = x;
                reuses[x] = true;
            }
        }
    }
}

typedef struct {
    ml_schedule *schedule;
    int output_count;
    ml_arena *scratch;
    int64_t bytes;
} place_call;

static void place_body(void *context) {
    place_call *call = context;
    ml_schedule *s = call->schedule;
    uint32_t count = s->storages.count, blocks = 0;
    lifetimes_find(s, call->output_count, call->scratch);
    bool *is_output = ML_NEW_ARRAY(call->scratch, bool, (size_t)count + 1);
    bool *reuses = ML_NEW_ARRAY(call->scratch, bool, (size_t)count + 1);
    uint32_t *successor = ML_NEW_ARRAY(call->scratch, uint32_t, (size_t)count + 1);
    uint32_t *block_of = ML_NEW_ARRAY(call->scratch, uint32_t, (size_t)count + 1);
    arena_block *block = ML_NEW_ARRAY(call->scratch, arena_block, (size_t)count + 1);
    for (int i = 0; i < call->output_count; i++) {
        is_output[s->values.at[s->output_values[i]].storage] = true;
    }
    successors_find(s, is_output, successor, reuses, call->scratch);
    for (uint32_t i = 0; i < count; i++) {
        const ml_storage *head = &s->storages.at[i];
        if (head->kind != ML_STORAGE_TEMPORARY || reuses[i]) continue;
        uint32_t last = i;
        block_of[i] = blocks;
        while (successor[last] != NO_STORAGE) last = successor[last], block_of[last] = blocks;
        block[blocks++] = (arena_block){
            .bytes = head->bytes, .first = head->first, .last = s->storages.at[last].last};
    }
    uint32_t steps = s->steps.count > 0 ? s->steps.count : 1;
    call->bytes = arena_assign_offsets(block, blocks, steps, call->scratch);
    uint32_t peak;
    int64_t least = arena_peak(block, blocks, steps, call->scratch, &peak);
    ml_debug(3, "memory: %u blocks in %.3f GiB, %.3f GiB of them alive at step %u\n", blocks,
             (double)call->bytes / (1 << 30), (double)least / (1 << 30), peak);
    for (uint32_t i = 0; i < count; i++) {
        ml_storage *storage = &s->storages.at[i];
        if (storage->kind != ML_STORAGE_TEMPORARY) continue;
        storage->offset = block[block_of[i]].offset;
        /* For the accounts, the live range of a reused buffer ends before the step that reuses it.
         */
        if (successor[i] != NO_STORAGE) storage->last--;
    }
}

int64_t ml_memory_assign_offsets(ml_schedule *schedule, int output_count) {
    place_call call = {.schedule = schedule, .output_count = output_count};
    call.scratch = ml_arena_new();
    if (call.scratch == NULL) ml_raise(ML_NO_MEMORY, "out of memory while placing tensors");
    ml_status status = ml_protect(place_body, &call);
    ml_arena_free(call.scratch);
    if (status != ML_OK) ml_raise_last();
    return call.bytes;
}

/* Which nodes hold gradients of states: those that are marked, and what they are only moved, cast
 * or cut from (passes join products and cut the gradients out of the result). */
static bool *gradients_find(const ml_graph *g, ml_arena *arena) {
    bool *gradient = ML_NEW_ARRAY(arena, bool, ml_graph_count(g));
    for (ml_ref n = ml_graph_count(g) - 1; n > 0; n--) {
        const ml_node *node = ml_graph_node(g, n);
        gradient[n] = gradient[n] || (node->flags & ML_NODE_GRADIENT);
        int op_class = ml_ops[node->op].op_class;
        bool moves =
            op_class == ML_CLASS_MOVE || op_class == ML_CLASS_COLLECTIVE || node->op == ML_OP_CAST;
        if (gradient[n] && moves) gradient[ml_graph_source(g, n, 0)] = true;
        for (int i = 0; gradient[n] && node->op == ML_OP_ADD && i < 2; i++)
            gradient[ml_graph_source(g, n, i)] = true;
    }
    return gradient;
}

ml_memory_kind ml_plan_memory_kind(ml_state_kind kind) {
    switch (kind) {
    case ML_STATE_PARAMETER:
    case ML_STATE_CACHE: return ML_MEMORY_PARAMETERS;
    case ML_STATE_OPTIMIZER: return ML_MEMORY_OPTIMIZER;
    case ML_STATE_GRADIENT: return ML_MEMORY_GRADIENTS;
    case ML_STATE_OTHER: break; /* counters, biases of routers: small */
    }
    return ML_MEMORY_WORKSPACE;
}

static ml_memory_kind memory_kind(const ml_storage *storage, const bool *gradient) {
    if (storage->kind == ML_STORAGE_INPUT || storage->node == 0) return ML_MEMORY_WORKSPACE;
    return gradient[storage->node] ? ML_MEMORY_GRADIENTS : ML_MEMORY_ACTIVATIONS;
}

/* The step at which the temporaries need most. */
static uint32_t peak_find(const ml_schedule *s, ml_arena *arena) {
    uint32_t steps = s->steps.count, peak = 0;
    int64_t *change = ML_NEW_ARRAY(arena, int64_t, (size_t)steps + 2), load = 0, most = -1;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        if (storage->kind != ML_STORAGE_TEMPORARY) continue;
        change[storage->first] += memory_padded(storage->bytes);
        change[storage->last + 1] -= memory_padded(storage->bytes);
    }
    for (uint32_t t = 0; t < steps; t++) {
        load += change[t];
        if (load > most) most = load, peak = t;
    }
    return peak;
}

/* The bytes of the state; 0 where it has been counted. Where the rank's part of it is a storage,
 * the whole is one too. */
static int64_t account_state(ml_plan *plan, const ml_schedule *s, const ml_storage *storage,
                             bool *seen) {
    const int64_t bytes = memory_padded(storage->bytes);
    const ml_memory_kind kind = ml_plan_memory_kind(ml_graph_state(s->graph, storage->id)->kind);
    if (seen[storage->id] || storage->part_of != 0) return 0;
    seen[storage->id] = true;
    *ML_PUSH(plan->arena, &plan->states) = (ml_held_state){storage->id, kind, bytes};
    plan->state_bytes[kind] += bytes;
    plan->kind_bytes[kind] += bytes;
    return bytes;
}

/* States that only the rebuild of the parameter cache reads. */
static int64_t account_rebuild(ml_plan *plan, bool *seen) {
    int64_t sum = 0;
    for (const ml_plan *rebuild = plan->rebuild; rebuild != NULL; rebuild = rebuild->next) {
        const ml_schedule *s = rebuild->schedule;
        for (uint32_t i = 0; i < s->storages.count; i++)
            if (s->storages.at[i].kind == ML_STORAGE_STATE)
                sum += account_state(plan, s, &s->storages.at[i], seen);
    }
    return sum;
}

/* The space between blocks counts as workspace. */
void memory_account(ml_plan *plan) {
    const ml_schedule *s = plan->schedule;
    plan->peak_step = peak_find(s, plan->arena);
    bool *seen = ML_NEW_ARRAY(plan->arena, bool, (size_t)ml_graph_state_count(s->graph) + 1);
    const bool *gradient = gradients_find(s->graph, plan->arena);
    int64_t temporaries = 0, states = 0;
    for (int i = 0; i < ML_MEMORY_KINDS; i++) plan->kind_bytes[i] = plan->state_bytes[i] = 0;
    plan->states.count = 0;
    plan->input_bytes = 0;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        int64_t bytes = memory_padded(storage->bytes);
        bool temporary = storage->kind == ML_STORAGE_TEMPORARY;
        if (temporary && (storage->first > plan->peak_step || storage->last < plan->peak_step)) {
            continue;
        }
        if (plan->pipeline_task && storage->kind == ML_STORAGE_INPUT)
            continue; /* of the microbatch buffer */
        if (storage->kind == ML_STORAGE_SAVED || storage->kind == ML_STORAGE_HOST) continue;
        if (storage->kind == ML_STORAGE_STATE) {
            states += account_state(plan, s, storage, seen);
            continue;
        }
        plan->kind_bytes[memory_kind(storage, gradient)] += bytes;
        if (temporary)
            temporaries += bytes;
        else
            plan->input_bytes += bytes;
    }
    states += account_rebuild(plan, seen);
    plan->kind_bytes[ML_MEMORY_WORKSPACE] += plan->library_bytes + plan->arena_bytes - temporaries;
    plan->peak_bytes = states + plan->input_bytes + plan->arena_bytes + plan->library_bytes;
    plan->reach_bytes = plan->peak_bytes;
}
