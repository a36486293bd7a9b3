/* What programs of a rank hold beside one another. */
#include "runtime/plan/beside.h"

#include "runtime/plan/plan_internal.h"

typedef struct {
    int64_t arena, library, buffers, inputs;
} needs;

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

int64_t ml_plan_arena(const ml_plan *plan) {
    int64_t most = plan->arena_bytes;
    for (const ml_plan *r = plan->rebuild; r != NULL; r = r->next)
        most = larger(most, r->arena_bytes);
    return most;
}

/* What the peak of a plan has counted. */
static needs counted(const ml_plan *plan) {
    const ml_plan *retry = plan->retry;
    needs own = {plan->arena_bytes, plan->library_bytes, plan->buffer_bytes, plan->input_bytes};
    if (retry == NULL) return own;
    own.arena = larger(own.arena, retry->arena_bytes);
    own.library = larger(own.library, retry->library_bytes);
    own.buffers = larger(own.buffers, retry->buffer_bytes);
    return own;
}

static void add_plan(needs *sum, const ml_plan *plan) {
    if (plan == NULL) return;
    sum->arena = larger(sum->arena, ml_plan_arena(plan));
    sum->library = larger(sum->library, plan->library_bytes);
    for (const ml_plan *r = plan->rebuild; r != NULL; r = r->next)
        sum->library = larger(sum->library, r->library_bytes);
    sum->buffers = larger(sum->buffers, plan->buffer_bytes);
    sum->inputs = larger(sum->inputs, plan->input_bytes);
}

/* Of the programs other than the plan's, and of what the rank has allocated. */
static int64_t others_arena(const ml_plan *plan, const ml_rank_programs *programs) {
    int64_t bytes = programs->arena_bytes;
    for (int i = 0; i < programs->count; i++) {
        const ml_plan *both[] = {programs->at[i].plan, programs->at[i].retry};
        for (int j = 0; j < 2; j++)
            if (both[j] != NULL && both[j] != plan) bytes = larger(bytes, ml_plan_arena(both[j]));
    }
    return bytes;
}

/* A program and its retry have inputs and buffers in the same memory; programs of mixed
 * microbatches, buffers. */
static needs add_programs(const ml_plan *plan, const ml_rank_programs *programs) {
    needs all = {.arena = programs->arena_bytes}, own = {0};
    int64_t mixed = 0;
    add_plan(&own, plan);
    for (int i = 0; i < programs->count; i++) {
        const ml_rank_program *program = &programs->at[i];
        const bool its = program->plan == plan || program->retry == plan;
        needs one = {0};
        add_plan(its ? &own : &one, program->plan);
        add_plan(its ? &own : &one, program->retry);
        all.arena = larger(all.arena, one.arena);
        all.library = larger(all.library, one.library);
        all.inputs += one.inputs;
        if (program->plan->roots.mixed)
            mixed = larger(mixed, one.buffers);
        else
            all.buffers += one.buffers;
    }
    all.arena = larger(all.arena, own.arena);
    all.library = larger(all.library, own.library);
    all.inputs += own.inputs;
    all.buffers += plan->roots.mixed ? larger(mixed, own.buffers) : mixed + own.buffers;
    return all;
}

static size_t states_end(size_t end, const ml_held_state *states, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (states[i].id >= end) end = (size_t)states[i].id + 1;
    return end;
}

/* The number of states that marks are for: above each id. */
static size_t count_marks(const ml_plan *plan, const ml_rank_programs *programs) {
    size_t end = states_end(1, plan->states.at, plan->states.count);
    for (int i = 0; i < programs->count; i++) {
        const ml_plan *other = programs->at[i].plan, *retry = programs->at[i].retry;
        end = states_end(end, other->states.at, other->states.count);
        if (retry != NULL) end = states_end(end, retry->states.at, retry->states.count);
    }
    return states_end(end, programs->states, programs->state_count);
}

static void add_states(ml_beside *beside, bool *marked, const ml_held_state *states,
                       uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (marked[states[i].id]) continue;
        marked[states[i].id] = true;
        beside->kind_bytes[states[i].kind] += memory_padded(states[i].bytes);
    }
}

/* Rows of other lengths have other inputs, for which each program reserves room. */
static int64_t others_reserve(const ml_plan *plan, const ml_rank_programs *programs,
                              int64_t inputs) {
    int64_t most = plan->update_states;
    if (most == 0) return 0;
    for (int i = 0; i < programs->count; i++)
        most = larger(most, programs->at[i].plan->update_states);
    return most - plan->update_states -
           (inputs < plan->update_inputs ? inputs : plan->update_inputs);
}

ml_beside ml_plan_beside(const ml_plan *plan, const ml_rank_programs *programs) {
    ml_beside beside = {0};
    const size_t count = count_marks(plan, programs);
    bool *marked = ml_alloc(count);
    if (marked == NULL) ml_raise(ML_NO_MEMORY, "out of memory while planning");
    for (uint32_t i = 0; i < plan->states.count; i++) marked[plan->states.at[i].id] = true;
    for (int i = 0; i < programs->count; i++) {
        const ml_plan *other = programs->at[i].plan, *retry = programs->at[i].retry;
        add_states(&beside, marked, other->states.at, other->states.count);
        if (retry != NULL) add_states(&beside, marked, retry->states.at, retry->states.count);
    }
    add_states(&beside, marked, programs->states, programs->state_count);
    ml_free(marked);
    const needs all = add_programs(plan, programs), own = counted(plan);
    beside.kind_bytes[ML_MEMORY_ACTIVATIONS] += all.arena - own.arena + all.buffers - own.buffers;
    beside.kind_bytes[ML_MEMORY_WORKSPACE] += all.library - own.library + all.inputs - own.inputs;
    for (int i = 0; i < ML_MEMORY_KINDS; i++) beside.bytes += beside.kind_bytes[i];
    beside.arena = others_arena(plan, programs);
    beside.reserved = others_reserve(plan, programs, all.inputs - own.inputs);
    beside.later =
        plan->update_states + beside.reserved + larger(0, plan->update_arena - all.arena);
    return beside;
}
