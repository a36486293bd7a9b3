/* What programs of a rank hold beside one another (plan/beside.h), by hand and drawn. */
#include "runtime/plan/beside.h"

#include "tests/test.h"

enum { PROGRAMS = 3, STATES = 12, UNIT = 256 };

/* States `first` to `last`; the peak is what memory.c makes of the parts. */
static void set_states(ml_plan *plan, ml_held_state *states, uint32_t first, uint32_t last) {
    plan->states.at = states;
    for (uint32_t id = first; id <= last; id++) {
        const ml_memory_kind kind = id % 2 ? ML_MEMORY_OPTIMIZER : ML_MEMORY_PARAMETERS;
        states[plan->states.count++] = (ml_held_state){id, kind, UNIT * (int64_t)(id + 1)};
    }
    plan->peak_bytes =
        plan->arena_bytes + plan->library_bytes + plan->buffer_bytes + plan->input_bytes;
    for (uint32_t i = 0; i < plan->states.count; i++) plan->peak_bytes += states[i].bytes;
}

TEST(plan, programs_beside_one_another) {
    ml_held_state states[PROGRAMS][STATES];
    ml_plan
        step = {.arena_bytes = 9000, .library_bytes = 10, .buffer_bytes = 300, .input_bytes = 7},
        update = {.arena_bytes = 4000, .library_bytes = 50, .buffer_bytes = 20, .input_bytes = 1},
        rebuild = {.arena_bytes = 9500, .library_bytes = 60},
        retry = {.arena_bytes = 9100, .buffer_bytes = 310, .input_bytes = 7};
    set_states(&step, states[0], 0, 3);
    set_states(&update, states[1], 2, 5);
    set_states(&retry, states[2], 0, 3);
    ml_rank_program at[] = {{&step, NULL}, {&update, NULL}};
    const ml_rank_programs programs = {.at = at, .count = 2};
    ml_beside beside = ml_plan_beside(&step, &programs);
    CHECK(beside.kind_bytes[ML_MEMORY_PARAMETERS] == 5 * UNIT); /* state 4 */
    CHECK(beside.kind_bytes[ML_MEMORY_OPTIMIZER] == 6 * UNIT);  /* state 5 */
    CHECK(beside.kind_bytes[ML_MEMORY_ACTIVATIONS] == 20);      /* the arena of 9000 is enough */
    CHECK(beside.kind_bytes[ML_MEMORY_WORKSPACE] == 40 + 1);
    CHECK(beside.bytes == 11 * UNIT + 61);
    CHECK(ml_plan_beside(&update, &programs).kind_bytes[ML_MEMORY_ACTIVATIONS] == 5000 + 300);
    /* A program that is not among them; memory that freed programs have left. */
    const ml_held_state left[] = {{3, ML_MEMORY_OPTIMIZER, 4 * UNIT}, {9, ML_MEMORY_OPTIMIZER, 1}};
    const ml_rank_programs freed = {
        .at = at, .count = 1, .states = left, .state_count = 2, .arena_bytes = 9800};
    beside = ml_plan_beside(&update, &freed);
    CHECK(beside.kind_bytes[ML_MEMORY_PARAMETERS] == UNIT);           /* state 0 */
    CHECK(beside.kind_bytes[ML_MEMORY_OPTIMIZER] == 2 * UNIT + UNIT); /* 1; 9, padded */
    CHECK(beside.kind_bytes[ML_MEMORY_ACTIVATIONS] == 9800 - 4000 + 300);
    /* The rebuild of a cache runs in the arena too. */
    step.rebuild = &rebuild;
    beside = ml_plan_beside(&step, &programs);
    CHECK(beside.kind_bytes[ML_MEMORY_ACTIVATIONS] == 500 + 20);
    CHECK(beside.kind_bytes[ML_MEMORY_WORKSPACE] == 50 + 1 && ml_plan_arena(&step) == 9500);
    step.rebuild = NULL;
    /* A retry has inputs and buffers of its program; in a check its peak counts it. */
    at[0].retry = &retry;
    CHECK(ml_plan_beside(&step, &programs).kind_bytes[ML_MEMORY_ACTIVATIONS] == 100 + 10 + 20);
    CHECK(ml_plan_beside(&retry, &programs).kind_bytes[ML_MEMORY_ACTIVATIONS] == 20);
    CHECK(ml_plan_beside(&retry, &programs).kind_bytes[ML_MEMORY_WORKSPACE] == 50 + 1);
    step.retry = &retry;
    CHECK(ml_plan_beside(&step, &programs).kind_bytes[ML_MEMORY_ACTIVATIONS] == 20);
}

/* The sum is the rank's memory: the same whichever program is asked about. Programs of mixed
 * microbatches have one set of buffers, as large as the largest's. */
TEST(plan, memory_of_a_rank_is_one_sum) {
    for (uint64_t seed = 1; seed <= 100; seed++) {
        uint64_t state = seed;
        ml_held_state states[PROGRAMS][STATES];
        ml_plan plan[PROGRAMS] = {0};
        ml_rank_program at[PROGRAMS];
        int64_t mixed = 0, buffers = 0, sum[PROGRAMS];
        for (int i = 0; i < PROGRAMS; i++) {
            uint32_t first = (uint32_t)test_range(&state, 0, STATES - 1);
            plan[i].arena_bytes = test_range(&state, 0, 100000);
            plan[i].library_bytes = test_range(&state, 0, 1000);
            plan[i].buffer_bytes = test_range(&state, 0, 1000);
            plan[i].input_bytes = test_range(&state, 0, 1000);
            plan[i].roots.mixed = test_range(&state, 0, 1);
            set_states(&plan[i], states[i], first, (uint32_t)test_range(&state, first, STATES - 1));
            at[i] = (ml_rank_program){&plan[i], NULL};
            if (!plan[i].roots.mixed)
                buffers += plan[i].buffer_bytes;
            else if (plan[i].buffer_bytes > mixed)
                mixed = plan[i].buffer_bytes;
        }
        const ml_rank_programs programs = {.at = at, .count = PROGRAMS};
        int64_t arena = 0;
        for (int i = 0; i < PROGRAMS; i++)
            if (plan[i].arena_bytes > arena) arena = plan[i].arena_bytes;
        for (int i = 0; i < PROGRAMS; i++) {
            const ml_beside beside = ml_plan_beside(&plan[i], &programs);
            sum[i] = plan[i].peak_bytes + beside.bytes;
            CHECK(sum[i] == sum[0]);
            CHECK(beside.kind_bytes[ML_MEMORY_ACTIVATIONS] + plan[i].arena_bytes +
                      plan[i].buffer_bytes ==
                  arena + buffers + mixed);
        }
    }
}
