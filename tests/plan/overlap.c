/* Orders of steps with collectives beside them: random schedules run symbolically, with collectives
 * done as early and as late as their waits allow, give what the old order gives. */
#include <string.h>

#include "runtime/plan/plan_internal.h"
#include "tests/process/support.h"

enum { STATES = 4, VALUES = 120, STEPS = 70, PLACES = STATES + VALUES + 80, MOST_READS = 3 };

typedef struct {
    ml_plan plan;
    ml_graph *graph;
    ml_arena *arena;
    ml_layout layout;
    ml_target target;
    ml_axis axis;
    uint64_t random;
    uint32_t values[VALUES], count;
    int64_t elements; /* of a block */
} world;

static void world_new(world *w, uint64_t seed, int64_t elements) {
    *w = (world){.graph = ml_graph_new(), .arena = ml_arena_new(), .random = seed};
    w->elements = elements;
    w->axis = ml_axis_named(w->graph, "x");
    w->layout =
        (ml_layout){.count = 2, .axis = {{.name = "a", .size = 2}, {.name = "b", .size = 4}}};
    w->target.kind = ML_TARGET_CUDA;
    ml_schedule *s = ML_NEW(w->arena, ml_schedule);
    s->arena = w->arena;
    s->graph = w->graph;
    s->target = &w->target;
    w->plan = (ml_plan){.arena = w->arena, .graph = w->graph, .schedule = s, .layout = &w->layout};
    s->output_values = ML_NEW_ARRAY(w->arena, uint32_t, 4);
    s->update_values = ML_NEW_ARRAY(w->arena, uint32_t, STATES);
    w->plan.roots.updates = ML_NEW_ARRAY(w->arena, ml_update, STATES);
}

static void world_free(world *w) {
    ml_arena_free(w->arena);
    ml_graph_free(w->graph);
}

static uint32_t add_value(world *w, ml_storage_kind kind, uint32_t id, int64_t blocks) {
    ml_schedule *s = w->plan.schedule;
    ml_type type = {.dtype = ML_F32, .rank = 1, .axis = {w->axis}, .size = {blocks * w->elements}};
    *ML_PUSH(s->arena, &s->storages) =
        (ml_storage){.kind = kind, .id = id, .bytes = ml_type_bytes(&type)};
    *ML_PUSH(s->arena, &s->values) =
        (ml_value){.type = type, .storage = s->storages.count - 1, .stride = {1}};
    w->values[w->count++] = s->values.count - 1;
    return s->values.count - 1;
}

/* Its node is its number, so that it can be identified anywhere. */
static ml_step *add_step(world *w, ml_step_kind kind, int reads, const uint32_t *list, int writes) {
    ml_schedule *s = w->plan.schedule;
    ml_step *step = ML_PUSH(s->arena, &s->steps);
    *step =
        (ml_step){.kind = kind, .node = s->steps.count, .read_count = reads, .write_count = writes};
    step->values = ML_NEW_ARRAY(s->arena, uint32_t, reads + writes);
    step->may_alias = ML_NEW_ARRAY(s->arena, uint64_t, writes + 1);
    memcpy(step->values, list, sizeof *list * (size_t)(reads + writes));
    step->bytes = w->elements * 8;
    return step;
}

static void add_collective(world *w, ml_op op, int mesh_axis, uint32_t from, uint32_t to) {
    ml_collective_step *c = ML_NEW(w->arena, ml_collective_step);
    *c =
        (ml_collective_step){.kind = ml_collective_of(op), .mesh_axis = mesh_axis, .dtype = ML_F32};
    c->ranks = w->layout.axis[mesh_axis].size;
    c->count = w->plan.schedule->values.at[from].type.size[0];
    ml_step *step = add_step(w, ML_STEP_COLLECTIVE, 1, (uint32_t[]){from, to}, 1);
    step->collective = c;
    if (op == ML_OP_ALL_REDUCE) step->may_alias[0] = 1;
}

static int64_t blocks_of(const world *w, uint32_t value) {
    return w->plan.schedule->values.at[value].type.size[0] / w->elements;
}

/* A collective of a value that exists; sums of single blocks, gathers into several. */
static void draw_collective(world *w) {
    uint32_t from = w->values[test_range(&w->random, 0, w->count - 1)];
    int mesh_axis = (int)test_range(&w->random, 0, 1);
    bool gather = blocks_of(w, from) == 1 && test_range(&w->random, 0, 2) == 0;
    int64_t blocks = gather ? w->layout.axis[mesh_axis].size : blocks_of(w, from);
    uint32_t to = add_value(w, ML_STORAGE_TEMPORARY, 0, blocks);
    add_collective(w, gather ? ML_OP_ALL_GATHER : ML_OP_ALL_REDUCE, mesh_axis, from, to);
}

static void draw_kernel(world *w) {
    int reads = (int)test_range(&w->random, 0, MOST_READS);
    uint32_t list[MOST_READS + 2];
    for (int r = 0; r < reads; r++) { /* mostly of what was made just now */
        int64_t back = test_range(&w->random, 0, 2) ? test_range(&w->random, 1, 6) : VALUES;
        int64_t at = (int64_t)w->count - back;
        list[r] = w->values[at >= 0 ? at : test_range(&w->random, 0, w->count - 1)];
    }
    list[reads] = add_value(w, ML_STORAGE_TEMPORARY, 0, 1);
    ml_step *step = add_step(w, ML_STEP_KERNEL, reads, list, 1);
    for (int r = 0; r < reads; r++)
        if (blocks_of(w, list[r]) == 1) step->may_alias[0] |= (uint64_t)1 << r;
    step->flops = (double)test_range(&w->random, 0, 3) * 1e10;
}

static void draw_world(world *w) {
    ml_roots *roots = &w->plan.roots;
    for (uint32_t i = 0; i < STATES; i++) {
        ml_type type = {.dtype = ML_F32, .rank = 1, .axis = {w->axis}, .size = {w->elements}};
        ml_graph_add_state(w->graph,
                           &(ml_state){.name = ml_arena_format(w->arena, "s%u", i), .type = type});
        add_value(w, ML_STORAGE_STATE, i, 1);
    }
    int steps = (int)test_range(&w->random, 2, STEPS);
    for (int i = 0; i < steps && w->count + 1 < VALUES; i++) {
        if (test_range(&w->random, 0, 2) == 0)
            draw_collective(w);
        else
            draw_kernel(w);
    }
    ml_schedule *s = w->plan.schedule;
    roots->output_count = (int)test_range(&w->random, 0, 3);
    for (int i = 0; i < roots->output_count; i++)
        s->output_values[i] = w->values[test_range(&w->random, 0, w->count - 1)];
    for (uint32_t i = 0; i < STATES; i++) {
        uint32_t value = w->values[test_range(&w->random, 0, w->count - 1)];
        if (blocks_of(w, value) != 1) continue;
        roots->updates[roots->update_count].state = i;
        s->update_values[roots->update_count++] = value;
    }
}

/* ---- Running: memory holds a token for each storage, spoilt by what is written over it ---- */
typedef struct {
    uint64_t token[PLACES];
    const ml_schedule *s;
    int64_t state_bytes;
    bool shared; /* storages share memory */
} memory;

static int64_t begin_of(const memory *m, uint32_t i) {
    const ml_storage *at = &m->s->storages.at[i];
    if (!m->shared) return (int64_t)i << 40;
    return at->kind == ML_STORAGE_STATE ? -(1 + (int64_t)at->id) * m->state_bytes : at->offset;
}

static void write_token(memory *m, uint32_t to, uint64_t token) {
    int64_t begin = begin_of(m, to), bytes = m->s->storages.at[to].bytes;
    for (uint32_t i = 0; i < m->s->storages.count; i++) {
        int64_t other = begin_of(m, i), size = m->s->storages.at[i].bytes;
        if (i == to || (other == begin && size == bytes))
            m->token[i] = token;
        else if (other < begin + bytes && begin < other + size)
            m->token[i] = 1;
    }
}

static void run_step(memory *m, const ml_step *step) {
    uint64_t reads[MOST_READS + 1];
    const ml_value *values = m->s->values.at;
    for (int i = 0; i < step->read_count; i++) reads[i] = m->token[values[step->values[i]].storage];
    uint64_t token = step->kind == ML_STEP_COPY
                         ? reads[0]
                         : ml_hash(reads, sizeof *reads * (size_t)step->read_count, step->node);
    write_token(m, values[step->values[step->read_count]].storage, token);
}

/* `late`: collectives with a ticket are done at their wait, else at once. */
static void run(memory *m, bool late) {
    const ml_step *started[STEPS + 1] = {0};
    for (uint32_t i = 0; i < m->s->storages.count; i++)
        m->token[i] =
            m->s->storages.at[i].kind == ML_STORAGE_STATE ? 1000 + m->s->storages.at[i].id : 1;
    for (uint32_t t = 0; t < m->s->steps.count; t++) {
        const ml_step *step = &m->s->steps.at[t];
        uint32_t ticket = step->collective ? step->collective->ticket : 0;
        if (step->kind == ML_STEP_WAIT) {
            REQUIRE(started[ticket] != NULL);
            if (late) run_step(m, started[ticket]);
            started[ticket] = NULL;
            continue;
        }
        if (ticket) started[ticket] = step;
        if (!ticket || !late) run_step(m, step);
    }
    for (int i = 0; i <= STEPS; i++) CHECK(started[i] == NULL);
}

typedef struct {
    uint64_t outputs[4], states[STATES];
} results;

static results old_results(const world *w) {
    const ml_roots *roots = &w->plan.roots;
    const ml_schedule *s = w->plan.schedule;
    memory m = {.s = s};
    results out;
    run(&m, false);
    for (int i = 0; i < roots->output_count; i++)
        out.outputs[i] = m.token[s->values.at[s->output_values[i]].storage];
    for (uint32_t i = 0; i < STATES; i++) out.states[i] = 1000 + i;
    for (int i = 0; i < roots->update_count; i++)
        out.states[roots->updates[i].state] = m.token[s->values.at[s->update_values[i]].storage];
    return out;
}

static void check_results(const world *w, const results *expected, bool late) {
    const ml_schedule *s = w->plan.schedule;
    memory m = {.s = s, .shared = true, .state_bytes = 1 << 30};
    run(&m, late);
    for (int i = 0; i < w->plan.roots.output_count; i++)
        CHECK(m.token[s->values.at[s->output_values[i]].storage] == expected->outputs[i]);
    for (uint32_t i = 0; i < s->storages.count; i++)
        if (s->storages.at[i].kind == ML_STORAGE_STATE)
            CHECK(m.token[i] == expected->states[s->storages.at[i].id]);
}

static uint32_t tickets(const ml_schedule *s) {
    uint32_t count = 0;
    for (uint32_t t = 0; t < s->steps.count; t++) count += s->steps.at[t].kind == ML_STEP_WAIT;
    return count;
}

TEST(plan, random_overlaps) {
    uint32_t seen = 0;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        world w;
        world_new(&w, seed * 31, seed % 2 ? 64 : 4 << 20);
        if (seed % 3 == 0) w.target.link_bytes = 1000000000;
        draw_world(&w);
        results expected = old_results(&w);
        plan_overlap(&w.plan);
        plan_update_states(&w.plan);
        ml_memory_assign_offsets(w.plan.schedule, w.plan.roots.output_count);
        REQUIRE(w.plan.schedule->storages.count <= PLACES);
        check_results(&w, &expected, false);
        check_results(&w, &expected, true);
        seen += tickets(w.plan.schedule);
        world_free(&w);
    }
    CHECK(seen > 300);
}

/* A backward pass: a sum for each layer runs while the next layers compute, and small sums are
 * put together. */
TEST(plan, overlap_of_gradients) {
    enum { LAYERS = 12 };
    for (int way = 0; way < 4; way++) { /* small; large; small over a slow link; between hosts */
        bool large = way > 0;
        world w;
        uint32_t grads[LAYERS], sums[LAYERS];
        world_new(&w, 1, way == 1 ? 64 << 20 : way == 3 ? 8 << 20 : 1 << 10);
        if (way == 2) w.target.link_bytes = 3000000; /* one alone is a launch, or all are */
        if (way == 3) w.target.host_ranks = 4;
        uint32_t x = add_value(&w, ML_STORAGE_TEMPORARY, 0, 1);
        add_step(&w, ML_STEP_KERNEL, 0, &x, 1);
        for (int i = 0; i < LAYERS; i++) {
            grads[i] = add_value(&w, ML_STORAGE_TEMPORARY, 0, 1);
            add_step(&w, ML_STEP_KERNEL, 1, (uint32_t[]){x, grads[i]}, 1)->flops = 1e12;
            uint32_t next = add_value(&w, ML_STORAGE_TEMPORARY, 0, 1);
            add_step(&w, ML_STEP_KERNEL, 1, (uint32_t[]){x, next}, 1)->flops = 1e12;
            x = next;
        }
        for (int i = 0; i < LAYERS; i++) {
            sums[i] = add_value(&w, ML_STORAGE_TEMPORARY, 0, 1);
            add_collective(&w, ML_OP_ALL_REDUCE, 0, grads[i], sums[i]);
        }
        for (int i = 0; i < LAYERS; i++) {
            uint32_t new = add_value(&w, ML_STORAGE_TEMPORARY, 0, 1);
            add_step(&w, ML_STEP_KERNEL, 1, (uint32_t[]){sums[i], new}, 1);
        }
        plan_overlap(&w.plan);
        const ml_schedule *s = w.plan.schedule;
        uint32_t launches = 0, early = 0;
        for (uint32_t t = 1; t < s->steps.count; t++) {
            if (s->steps.at[t].kind != ML_STEP_COLLECTIVE) continue;
            launches += s->steps.at[t - 1].kind != ML_STEP_COLLECTIVE;
            early += s->steps.at[t].collective->ticket != 0;
        }
        CHECK_EQ_INT(tickets(s), large ? LAYERS : early);
        if (large) CHECK(launches >= LAYERS - 1 && early == LAYERS);
        if (!large) CHECK(launches <= 2);
        world_free(&w);
    }
}

/* The order changes no result, to the bit. */
PROCESS_TEST(overlap_changes_nothing) {
    static const char *const layouts[] = {"--mesh dp=2,tp=2", "--mesh dp=2 layout=fsdp"};
    for (int i = 0; i < 2; i++) {
        char *text[2];
        for (int on = 0; on < 2; on++)
            text[on] = process_run(room, 0, on ? "MLUA_OVERLAP=1 MLUA_VERIFY=1" : "MLUA_OVERLAP=0",
                                   "run \"$ROOT/models/gpt.lua\" --device cpu -n %d %s layers=2 "
                                   "embed=32 heads=4 seq=16 batch=8 vocab=256 warmup=1 steps=3 "
                                   "sample=0 --json | sed 's/,\"tokens_per_s.*//'",
                                   i ? 2 : 4, layouts[i])
                           .output;
        CHECK_TEXT(text[1], text[0]);
    }
}
