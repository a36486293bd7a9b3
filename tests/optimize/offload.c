/* Copies of temporaries to the host and back (optimize/offload.c): random plans run symbolically,
 * with copies done as early and as late as their waits allow, in the memory that the plan gives
 * them, compute what they computed before. */
#include <string.h>

#include "runtime/optimize/optimize.h"
#include "runtime/plan/plan_internal.h"
#include "tests/test.h"

enum { LAYERS = 12, PLACES = 4 * LAYERS + 8, STEPS = 16 * LAYERS, READS = 3 };

typedef struct {
    ml_plan plan;
    ml_graph *graph;
    ml_arena *arena;
    ml_target target;
    uint64_t random;
    int layers;
} world;

static uint32_t draw(world *w, uint32_t below) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(w->random >> 33) % below;
}

static uint32_t value_new(world *w, int64_t bytes) {
    ml_schedule *s = w->plan.schedule;
    *ML_PUSH(s->arena, &s->storages) = (ml_storage){.bytes = bytes};
    *ML_PUSH(s->arena, &s->values) =
        (ml_value){.type = {.dtype = ML_I32}, .storage = s->storages.count - 1};
    return s->values.count - 1;
}

/* A step of so many milliseconds by the planner's machine; 0 is no operand. */
static void step_new(world *w, uint32_t first, uint32_t second, uint32_t writes, double ms) {
    ml_schedule *s = w->plan.schedule;
    ml_step step = {.kind = ML_STEP_KERNEL, .write_count = 1, .flops = 600e9 * ms};
    step.values = ML_NEW_ARRAY(s->arena, uint32_t, READS);
    if (first) step.values[step.read_count++] = first;
    if (second) step.values[step.read_count++] = second;
    step.values[step.read_count] = writes;
    step.may_alias = ML_NEW(s->arena, uint64_t);
    *ML_PUSH(s->arena, &s->steps) = step;
}

/* Layers, the loss, and their gradients in reverse, which read what the layers wrote. */
static void world_new(world *w, uint64_t seed) {
    *w = (world){.graph = ml_graph_new(), .arena = ml_arena_new(), .random = seed};
    w->layers = 3 + (int)draw(w, LAYERS - 2);
    w->target =
        (ml_target){.kind = ML_TARGET_CUDA, .host_bytes = (int64_t)(1 + draw(w, 60)) * 1000000000};
    ml_schedule *s = ML_NEW(w->arena, ml_schedule);
    s->arena = w->arena, s->graph = w->graph, s->target = &w->target;
    w->plan = (ml_plan){.arena = w->arena, .graph = w->graph, .schedule = s, .target = &w->target};
    value_new(w, 256); /* value 0 is none */
    uint32_t wrote[LAYERS] = {0}, now = 0;
    for (int i = 0; i < w->layers; i++) {
        wrote[i] = value_new(w, (int64_t)(1 + draw(w, 64)) << 20);
        step_new(w, now, i > 1 && draw(w, 4) == 0 ? wrote[draw(w, (uint32_t)i)] : 0, wrote[i],
                 0.1 * (1 + draw(w, 30)));
        now = wrote[i];
    }
    for (int i = w->layers; i-- > 0;) {
        uint32_t gradient = value_new(w, (int64_t)(1 + draw(w, 16)) << 20);
        step_new(w, now, wrote[i], gradient, 0.2 * (1 + draw(w, 30)));
        now = gradient;
    }
    s->output_values = ML_NEW_ARRAY(w->arena, uint32_t, 1);
    s->output_values[0] = now;
    w->plan.roots.output_count = 1;
    w->plan.arena_bytes = ml_memory_assign_offsets(s, 1);
    memory_account(&w->plan);
}

static void world_free(world *w) {
    ml_arena_free(w->arena);
    ml_graph_free(w->graph);
}

/* What the memory of each storage holds: those that a write overlaps hold nothing any more. */
typedef struct {
    const ml_schedule *s;
    bool placed; /* else each storage has memory of its own */
    uint64_t token[PLACES * 4];
} memory;

static void write_token(memory *m, uint32_t to, uint64_t token) {
    const ml_storage *a = &m->s->storages.at[to];
    for (uint32_t i = 0; m->placed && i < m->s->storages.count; i++) {
        const ml_storage *b = &m->s->storages.at[i];
        if (a->kind == b->kind && a->offset < b->offset + b->bytes &&
            b->offset < a->offset + a->bytes)
            m->token[i] = 1;
    }
    m->token[to] = token;
}

static void run_step(memory *m, const ml_step *step) {
    uint64_t read[READS + 1] = {step->values[step->read_count]};
    const ml_value *values = m->s->values.at;
    for (int i = 0; i < step->read_count; i++) read[i] = m->token[values[step->values[i]].storage];
    uint64_t token = step->host_copy ? read[0]
                                     : ml_hash(read, sizeof *read * (size_t)step->read_count,
                                               (uint64_t)(step->flops + step->read_count));
    write_token(m, values[step->values[step->read_count]].storage, token);
}

/* `late`: copies are done at their wait, else at once. */
static uint64_t run(const world *w, bool placed, bool late) {
    memory m = {.s = w->plan.schedule, .placed = placed};
    const ml_step *started[STEPS] = {NULL};
    for (uint32_t t = 0; t < m.s->steps.count; t++) {
        const ml_step *step = &m.s->steps.at[t];
        uint32_t ticket = step->host_copy ? step->host_copy->ticket : 0;
        REQUIRE(ticket < STEPS);
        if (step->kind == ML_STEP_WAIT) {
            REQUIRE(started[ticket] != NULL);
            if (late) run_step(&m, started[ticket]);
            started[ticket] = NULL;
        } else {
            if (ticket) started[ticket] = step;
            if (!ticket || !late) run_step(&m, step);
        }
    }
    for (int i = 0; i < STEPS; i++) CHECK(started[i] == NULL);
    return m.token[m.s->values.at[m.s->output_values[0]].storage];
}

TEST(optimize, offload_of_random_plans) {
    int copied = 0, fitted = 0;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        world w;
        world_new(&w, seed * 97);
        const uint64_t expected = run(&w, false, false);
        const int64_t before = w.plan.peak_bytes;
        int64_t limit = before / 100 * (40 + draw(&w, 60));
        plan_offload(&w.plan, limit, seed % 3 == 0);
        CHECK(run(&w, true, false) == expected);
        CHECK(run(&w, true, true) == expected);
        CHECK(w.plan.peak_bytes <= before);
        CHECK(w.plan.host_bytes >= w.plan.offloaded_bytes || w.plan.host_bytes > 0 ||
              w.plan.offloaded_bytes == 0);
        if (seed % 3) CHECK(w.plan.copy_seconds < 0.05);
        copied += w.plan.offloaded_bytes > 0;
        fitted += w.plan.peak_bytes <= limit;
        world_free(&w);
    }
    CHECK(copied > 150 && fitted > 60);
}

/* A copy back that is planned too late for its use: the use waits for it, and then only. */
TEST(optimize, offload_waits) {
    world w;
    world_new(&w, 5);
    w.target.host_bytes = 100000; /* a second: hours for a layer's values */
    const uint64_t expected = run(&w, false, false);
    plan_offload(&w.plan, w.plan.peak_bytes / 2, false);
    CHECK_EQ_INT(w.plan.offloaded_bytes, 0); /* it hides none */
    plan_offload(&w.plan, w.plan.peak_bytes / 2, true);
    CHECK(w.plan.offloaded_bytes > 0 && w.plan.copy_seconds > 1);
    CHECK(run(&w, true, true) == expected);
    const ml_schedule *s = w.plan.schedule;
    for (uint32_t t = 0; t < s->steps.count; t++) { /* what is used is no copy under way */
        const ml_step *step = &s->steps.at[t];
        if (step->kind != ML_STEP_HOST_COPY || !step->host_copy->back) continue;
        uint32_t other = s->values.at[step->values[1]].storage, k = t + 1;
        while (s->steps.at[k].kind != ML_STEP_WAIT ||
               s->steps.at[k].host_copy->ticket != step->host_copy->ticket) {
            for (int i = 0; i < s->steps.at[k].read_count; i++)
                CHECK(s->values.at[s->steps.at[k].values[i]].storage != other);
            k++;
        }
    }
    world_free(&w);
}
