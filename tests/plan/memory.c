/* Placement of blocks, and whole random schedules run symbolically: every step must read what the
 * program's semantics say, wherever assignment and placement put it, whatever shares its launch. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/optimize/optimize.h"
#include "runtime/plan/arena_offsets.h"
#include "runtime/plan/plan_internal.h"
#include "tests/emit/cases.h"
#include "tests/test.h"

static double seconds(void) {
    return (double)clock() / CLOCKS_PER_SEC;
}

/* Blocks like those of a training step: made going forward, freed going back; and short ones. */
static void fill_blocks(arena_block *blocks, uint32_t count, uint32_t steps, uint64_t *random) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t first = (uint32_t)test_range(random, 0, steps - 1), last = first;
        if (test_range(random, 0, 2) == 0 && first < steps / 2)
            last = steps - 1 - first;
        else
            last += (uint32_t)test_range(random, 0, 3);
        if (last >= steps) last = steps - 1;
        int64_t bytes = test_range(random, 0, 3) ? 4096 * test_range(random, 1, 64)
                                                 : test_range(random, 0, 5000);
        blocks[i] = (arena_block){.bytes = bytes, .first = first, .last = last};
    }
}

static bool meet(const arena_block *a, const arena_block *b) {
    bool in_time = a->first <= b->last && b->first <= a->last;
    return in_time && a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
}

TEST(plan, blocks_never_meet) {
    uint64_t random = 7;
    for (int round = 0; round < 40; round++) {
        ml_arena *arena = ml_arena_new();
        uint32_t count = (uint32_t)test_range(&random, 1, 300), step;
        uint32_t steps = (uint32_t)test_range(&random, 1, 200);
        arena_block *blocks = ML_NEW_ARRAY(arena, arena_block, count);
        fill_blocks(blocks, count, steps, &random);
        int64_t size = arena_assign_offsets(blocks, count, steps, arena);
        int64_t least = arena_peak(blocks, count, steps, arena, &step);
        int met = 0;
        for (uint32_t i = 0; i < count; i++) {
            CHECK(blocks[i].offset >= 0 && blocks[i].offset + blocks[i].bytes <= size);
            CHECK(blocks[i].offset % ARENA_ALIGNMENT == 0);
            for (uint32_t j = i + 1; j < count; j++) met += meet(&blocks[i], &blocks[j]);
        }
        CHECK_EQ_INT(met, 0);
        CHECK(size >= least && size <= least + least / 5 + 65536);
        ml_arena_free(arena);
    }
}

TEST(plan, half_a_million_blocks) {
    uint64_t random = 3;
    enum { COUNT = 500000, STEPS = 400000 };
    ml_arena *arena = ml_arena_new();
    arena_block *blocks = ML_NEW_ARRAY(arena, arena_block, COUNT);
    fill_blocks(blocks, COUNT, STEPS, &random);
    double start = seconds();
    int64_t size = arena_assign_offsets(blocks, COUNT, STEPS, arena);
    double taken = seconds() - start;
    uint32_t step;
    int64_t least = arena_peak(blocks, COUNT, STEPS, arena, &step);
    CHECK(size >= least && size <= least + least / 10);
    EXPECT(taken <= 4, "placing half a million blocks took %.1f s", taken);
    ml_arena_free(arena);
}

/* ---- schedules ---- */
enum { STATES = 6, STORAGES = 40, STEPS = 30, ADDRESSES = STATES + STORAGES + 64 };
enum { OPERANDS = 4 * STEPS };

typedef struct {
    ml_plan plan;
    ml_graph *graph;
    ml_arena *arena;
    uint64_t random;
} world;

static void push_step(world *w, int reads, int writes, const uint32_t *values) {
    ml_schedule *s = w->plan.schedule;
    ml_step *step = ML_PUSH(s->arena, &s->steps);
    step->kind = ML_STEP_KERNEL;
    step->read_count = reads;
    step->write_count = writes;
    step->values = ML_NEW_ARRAY(s->arena, uint32_t, reads + writes);
    memcpy(step->values, values, sizeof *values * (size_t)(reads + writes));
    step->may_alias = ML_NEW_ARRAY(s->arena, uint64_t, writes);
    for (int i = 0; i < writes; i++) step->may_alias[i] = test_random(&w->random) & 3;
}

static uint32_t push_value(world *w, ml_storage_kind kind, uint32_t id, const ml_type *type) {
    ml_schedule *s = w->plan.schedule;
    ml_storage *storage = ML_PUSH(s->arena, &s->storages);
    *storage = (ml_storage){.kind = kind, .id = id, .bytes = ml_type_bytes(type)};
    ml_value *value = ML_PUSH(s->arena, &s->values);
    *value = (ml_value){.type = *type, .storage = s->storages.count - 1};
    value->stride[0] = 1;
    return s->values.count - 1;
}

/* A random program over states, with as many temporaries as it likes. */
static void build_world(world *w) {
    ml_schedule *s = ML_NEW(w->arena, ml_schedule);
    ml_type type = {
        .dtype = ML_F32, .rank = 1, .axis = {ml_axis_named(w->graph, "x")}, .size = {64}};
    uint32_t values[STORAGES], count = 0;
    s->arena = w->arena;
    s->graph = w->graph;
    w->plan = (ml_plan){.arena = w->arena, .graph = w->graph, .schedule = s};
    for (uint32_t i = 0; i < STATES; i++) {
        char *name = ml_arena_format(w->arena, "s%u", i);
        ml_graph_add_state(w->graph, &(ml_state){.name = name, .type = type});
        values[count++] = push_value(w, ML_STORAGE_STATE, i, &type);
    }
    int steps = (int)test_range(&w->random, 1, STEPS);
    for (int i = 0; i < steps && count + 2 < STORAGES; i++) {
        int reads = (int)test_range(&w->random, 0, 3), writes = (int)test_range(&w->random, 1, 2);
        uint32_t list[8];
        for (int r = 0; r < reads; r++) list[r] = values[test_range(&w->random, 0, count - 1)];
        for (int k = 0; k < writes; k++) {
            list[reads + k] = values[count++] = push_value(w, ML_STORAGE_TEMPORARY, 0, &type);
        }
        push_step(w, reads, writes, list);
    }
    ml_roots *roots = &w->plan.roots;
    roots->output_count = (int)test_range(&w->random, 0, 3);
    s->output_values = ML_NEW_ARRAY(w->arena, uint32_t, 4);
    for (int i = 0; i < roots->output_count; i++) {
        s->output_values[i] = values[test_range(&w->random, 0, count - 1)];
    }
    roots->updates = ML_NEW_ARRAY(w->arena, ml_update, STATES);
    s->update_values = ML_NEW_ARRAY(w->arena, uint32_t, STATES);
    for (uint32_t i = 0; i < STATES; i++) {
        if (test_range(&w->random, 0, 3) == 0) continue;
        roots->updates[roots->update_count].state = i;
        s->update_values[roots->update_count++] = values[test_range(&w->random, 0, count - 1)];
    }
}

/* What lies in memory: a token for each storage, spoilt by whatever is written over it. */
typedef struct {
    uint64_t token[ADDRESSES];
    const ml_schedule *s;
    int64_t arena_bytes;
} memory;

static int64_t begin_of(const memory *m, uint32_t storage) {
    const ml_storage *at = &m->s->storages.at[storage];
    return at->kind == ML_STORAGE_STATE ? m->arena_bytes + 256 * (int64_t)at->id : at->offset;
}

static void write_token(memory *m, uint32_t storage, uint64_t token) {
    int64_t begin = begin_of(m, storage), bytes = m->s->storages.at[storage].bytes;
    for (uint32_t i = 0; i < m->s->storages.count; i++) {
        int64_t other = begin_of(m, i), size = m->s->storages.at[i].bytes;
        if (other == begin)
            m->token[i] = token;
        else if (other < begin + bytes && begin < other + size)
            m->token[i] = 1;
    }
}

/* A result is known by its destination and by its operands. */
static uint64_t result_token(uint32_t storage, const uint64_t *reads, int count) {
    return ml_hash(reads, sizeof *reads * (size_t)count, storage + 99);
}

/* The tokens that a step writes: each member of a batch reads its own part. */
static void step_tokens(const ml_schedule *s, const ml_step *step, const uint64_t *token,
                        uint64_t *written) {
    uint64_t read[OPERANDS];
    int members = step->members > 0 ? step->members : 1, reads = step->read_count / members;
    int writes = step->write_count / members;
    for (int i = 0; i < step->read_count; i++)
        read[i] = token[s->values.at[step->values[i]].storage];
    for (int i = 0; i < step->write_count; i++) {
        uint32_t to = s->values.at[step->values[step->read_count + i]].storage;
        written[i] = step->kind == ML_STEP_COPY
                         ? read[0]
                         : result_token(to, read + i / writes * reads, reads);
    }
}

/* The tokens of all storages where nothing shares memory and nothing is assigned. */
static void run_pure(const ml_schedule *s, uint64_t *token) {
    for (uint32_t i = 0; i < s->storages.count; i++) token[i] = 1000 + s->storages.at[i].id;
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        uint64_t written[OPERANDS];
        step_tokens(s, step, token, written);
        for (int i = 0; i < step->write_count; i++)
            token[s->values.at[step->values[step->read_count + i]].storage] = written[i];
    }
}

static bool meets(int64_t a, int64_t b) {
    return a < b + 256 && b < a + 256;
}

/* A write may lie where the step, or its member, reads only as may_alias says. */
static bool step_is_sound(const memory *m, const ml_step *step) {
    int members = step->members > 0 ? step->members : 1, reads = step->read_count / members;
    int writes = step->write_count / members;
    for (int w = 0; w < step->write_count; w++) {
        int64_t to = begin_of(m, m->s->values.at[step->values[step->read_count + w]].storage);
        for (int r = 0; r < step->read_count; r++) {
            int64_t from = begin_of(m, m->s->values.at[step->values[r]].storage);
            bool own = r / reads == w / writes && step->may_alias[w] >> r % reads & 1;
            if (meets(from, to) && (from != to || !own)) return false;
        }
        for (int other = 0; other < w; other++) {
            uint32_t value = step->values[step->read_count + other];
            if (meets(begin_of(m, m->s->values.at[value].storage), to)) return false;
        }
    }
    return true;
}

/* Assign states and place the rest, after `join` where that is not NULL. */
static void run_world(world *w, void join(world *w)) {
    ml_schedule *s = w->plan.schedule;
    const ml_roots *roots = &w->plan.roots;
    uint64_t pure[ADDRESSES], outputs[4], updates[STATES];
    run_pure(s, pure);
    for (int i = 0; i < roots->output_count; i++) {
        outputs[i] = pure[s->values.at[s->output_values[i]].storage];
    }
    for (int i = 0; i < roots->update_count; i++) {
        updates[i] = pure[s->values.at[s->update_values[i]].storage];
    }
    if (join != NULL) join(w);
    uint32_t steps = s->steps.count;
    plan_update_states(&w->plan);
    int64_t bytes = ml_memory_assign_offsets(s, roots->output_count);
    REQUIRE(s->storages.count <= ADDRESSES);
    memory m = {.s = s, .arena_bytes = bytes};
    for (uint32_t i = 0; i < s->storages.count; i++) {
        m.token[i] = s->storages.at[i].kind == ML_STORAGE_STATE ? 1000 + s->storages.at[i].id : 1;
    }
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        uint64_t written[OPERANDS];
        CHECK(step_is_sound(&m, step));
        step_tokens(s, step, m.token, written);
        for (int i = 0; i < step->write_count; i++)
            write_token(&m, s->values.at[step->values[step->read_count + i]].storage, written[i]);
        if (t >= steps) CHECK(step->kind == ML_STEP_COPY);
    }
    for (int i = 0; i < roots->output_count; i++) {
        CHECK(m.token[s->values.at[s->output_values[i]].storage] == outputs[i]);
    }
    uint64_t final[STATES];
    for (uint32_t i = 0; i < STATES; i++) final[i] = 1000 + i;
    for (int i = 0; i < roots->update_count; i++) final[roots->updates[i].state] = updates[i];
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *at = &s->storages.at[i];
        if (at->kind == ML_STORAGE_STATE) CHECK(m.token[i] == final[at->id]);
    }
}

TEST(plan, random_schedules) {
    for (uint64_t seed = 1; seed <= 400; seed++) {
        world w = {.graph = ml_graph_new(), .arena = ml_arena_new(), .random = seed * 77};
        build_world(&w);
        run_world(&w, NULL);
        ml_arena_free(w.arena);
        ml_graph_free(w.graph);
    }
}

static int joined; /* kernels, in all worlds */

/* By storage, how many collectives run before the step that writes it. */
static void find_sides(const ml_schedule *s, uint32_t *side) {
    uint32_t seen = 0;
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        for (int i = 0; i < step->write_count; i++)
            side[s->values.at[step->values[step->read_count + i]].storage] = seen;
        seen += step->kind == ML_STEP_COLLECTIVE;
    }
}

/* Kernels are alike where they have as many operands; some steps are collectives. */
static void join_alike(world *w) {
    ml_schedule *s = w->plan.schedule;
    ml_target target = {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132};
    ir_kernel k;
    double tolerance;
    uint32_t count = s->steps.count, before[STORAGES] = {0}, after[STORAGES] = {0};
    emit_case(&k, 0, &tolerance);
    for (uint32_t t = 0; t < count; t++) {
        ml_step *step = &s->steps.at[t];
        step->bytes = test_range(&w->random, 0, 1) ? 256 : 1 << 20;
        step->ir = &k.ir;
        step->kernel = ML_NEW(s->arena, ml_kernel);
        ml_emit(&k.ir, &target, s->arena, step->kernel);
        step->kernel->key = (uint64_t)(step->read_count * 4 + step->write_count);
        step->kernel->pointer_count = step->read_count + step->write_count;
        if (test_range(&w->random, 0, 9) == 0) step->kind = ML_STEP_COLLECTIVE;
    }
    find_sides(s, before);
    plan_batch_kernels(&w->plan);
    find_sides(s, after);
    CHECK(memcmp(before, after, sizeof before) == 0);
    joined += (int)(count - s->steps.count);
    ir_free(&k);
}

TEST(plan, random_batches) {
    joined = 0;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        world w = {.graph = ml_graph_new(), .arena = ml_arena_new(), .random = seed * 79};
        build_world(&w);
        run_world(&w, join_alike);
        ml_arena_free(w.arena);
        ml_graph_free(w.graph);
    }
    CHECK(joined > 300);
}

/* An optimizer's step that reads and writes its state costs neither a copy nor memory. */
TEST(plan, in_place_update) {
    world w = {.graph = ml_graph_new(), .arena = ml_arena_new(), .random = 5};
    ml_schedule *s = ML_NEW(w.arena, ml_schedule);
    ml_type type = {
        .dtype = ML_F32, .rank = 1, .axis = {ml_axis_named(w.graph, "x")}, .size = {64}};
    s->arena = w.arena;
    s->graph = w.graph;
    w.plan = (ml_plan){.arena = w.arena, .graph = w.graph, .schedule = s};
    ml_graph_add_state(w.graph, &(ml_state){.name = "s", .type = type});
    uint32_t old = push_value(&w, ML_STORAGE_STATE, 0, &type);
    uint32_t new = push_value(&w, ML_STORAGE_TEMPORARY, 0, &type);
    push_step(&w, 1, 1, (uint32_t[]){old, new});
    s->steps.at[0].may_alias[0] = 1;
    s->update_values = &new;
    w.plan.roots = (ml_roots){.updates = &(ml_update){0, 0}, .update_count = 1};
    plan_update_states(&w.plan);
    CHECK_EQ_INT(s->steps.count, 1);
    CHECK_EQ_INT(s->storages.at[1].kind, ML_STORAGE_STATE);
    CHECK_EQ_INT(ml_memory_assign_offsets(s, 0), 0);
    ml_arena_free(w.arena);
    ml_graph_free(w.graph);
}
