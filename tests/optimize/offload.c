/* Copies of temporaries to the host and back (optimize/offload.c): random plans run symbolically,
 * with copies done as early and as late as their waits allow, in the memory that the plan gives
 * them, compute what they computed before. */
#include <string.h>

#include "runtime/optimize/optimize.h"
#include "runtime/passes/recompute_choose.h"
#include "runtime/plan/fit_memory.h"
#include "runtime/plan/host_copies.h"
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

static void world_begin(world *w, uint64_t seed) {
    *w = (world){.graph = ml_graph_new(), .arena = ml_arena_new(), .random = seed};
    w->target.kind = ML_TARGET_CUDA;
    ml_schedule *s = ML_NEW(w->arena, ml_schedule);
    s->arena = w->arena, s->graph = w->graph, s->target = &w->target;
    w->plan = (ml_plan){.arena = w->arena, .graph = w->graph, .schedule = s, .target = &w->target};
    value_new(w, 256); /* value 0 is none */
}

static void world_end(world *w, uint32_t output) {
    ml_schedule *s = w->plan.schedule;
    s->output_values = ML_NEW_ARRAY(w->arena, uint32_t, 1);
    s->output_values[0] = output;
    w->plan.roots.output_count = 1;
    w->plan.arena_bytes = ml_memory_assign_offsets(s, 1);
    memory_account(&w->plan);
}

/* Layers, the loss, and their gradients in reverse, which read what the layers wrote. */
static void world_new(world *w, uint64_t seed) {
    world_begin(w, seed);
    w->layers = 3 + (int)draw(w, LAYERS - 2);
    w->target.host_bytes = (int64_t)(1 + draw(w, 60)) * 1000000000;
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
    world_end(w, now);
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

/* Ranks share the memory of their socket; those of stages copy out and back at once. */
TEST(optimize, offload_shares_host_memory) {
    ml_target target = {.kind = ML_TARGET_CUDA, .host_bytes = 50000000000};
    const ml_layout four = {.count = 2, .axis = {{.size = 2}, {.size = 2}}};
    const ml_layout eight = {.count = 1, .axis = {{.size = 8}}};
    CHECK(host_copy_rate(&target, NULL, false) == 50e9);
    double rate = host_copy_rate(&target, &four, false);
    CHECK(rate > 25e9 && rate < 38e9);
    CHECK(host_copy_rate(&target, &eight, false) == rate); /* four a socket */
    CHECK(host_copy_rate(&target, &four, true) < 0.8 * rate);
    target.host_ranks = 1; /* each on a host of its own */
    CHECK(host_copy_rate(&target, &four, false) == 50e9);
    target = (ml_target){.kind = ML_TARGET_C, .host_bytes = 50000000000};
    CHECK(host_copy_rate(&target, &four, true) == 50e9);
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

/* ---- Keep, compute again or copy, against every choice there is ------------------------------ */

enum { FEW = 6, MIB = 1 << 20, LOSS_MIB = 512 };
static const double STEPS_FASTER = 0.8; /* than planned, as copies are planned for */

/* Seconds are milliseconds of steps. The forward pass is the values in order, the backward pass
 * takes twice as long for each, in reverse. */
typedef struct {
    world *w;
    recompute_part part;
    recompute_value values[FEW];
    uint32_t sources[2 * FEW];
    int64_t host_bytes, limit;
    ml_plan *plan; /* of the last attempt */
} choice_case;

static void draw_case(choice_case *c, world *w) {
    *c = (choice_case){.w = w, .host_bytes = (int64_t)(5 + draw(w, 46)) * 1000000000};
    c->part = (recompute_part){.values = c->values, .sources = c->sources, .count = FEW};
    for (uint32_t v = 0; v < FEW; v++) {
        recompute_value *value = &c->values[v];
        *value = (recompute_value){.bytes = (int64_t)(1 + draw(w, 64)) * MIB,
                                   .needed = draw(w, 3) > 0,
                                   .first_source = c->part.source_count};
        value->seconds = draw(w, 3) ? 1 + draw(w, 8) : 20 + draw(w, 60);
        if (draw(w, 10) == 0) value->seconds = -1;
        for (uint32_t i = v > 0 ? draw(w, 3) : 0; i > 0; i--)
            c->sources[c->part.source_count++] = v - 1 - draw(w, v < 3 ? v : 3);
        value->source_count = c->part.source_count - value->first_source;
    }
}

/* The value for the backward pass: what is computed again is so once. */
static uint32_t value_again(choice_case *c, const uint8_t *fates, uint32_t *now, uint32_t v) {
    if (fates[v] != RECOMPUTE_AGAIN || now[FEW + v]) return now[v];
    const recompute_value *value = &c->values[v];
    uint32_t from[2] = {0, 0};
    for (uint32_t i = 0; i < value->source_count; i++)
        from[i] = value_again(c, fates, now, c->sources[value->first_source + i]);
    uint32_t made = value_new(c->w, value->bytes);
    step_new(c->w, from[0], from[1], made, value->seconds);
    now[FEW + v] = 1;
    return now[v] = made;
}

static void build(choice_case *c, const uint8_t *fates) {
    world *w = c->w;
    ml_arena_free(w->arena);
    ml_graph_free(w->graph);
    const uint64_t random = w->random;
    world_begin(w, random);
    w->target.host_bytes = c->host_bytes;
    uint32_t now[2 * FEW] = {0}, gradient = value_new(w, 256);
    for (uint32_t v = 0; v < FEW; v++) {
        const recompute_value *value = &c->values[v];
        uint32_t from[2] = {0, 0};
        for (uint32_t i = 0; i < value->source_count; i++)
            from[i] = now[c->sources[value->first_source + i]];
        now[v] = value_new(w, value->bytes);
        step_new(w, from[0], from[1], now[v], value->seconds < 0 ? 1 : value->seconds);
    }
    step_new(w, now[FEW - 1], 0, gradient, 1);
    ml_schedule *s = w->plan.schedule;
    plan_add_workspace(s, &s->steps.at[s->steps.count - 1], (int64_t)LOSS_MIB * MIB);
    for (uint32_t v = FEW; v-- > 0;) {
        uint32_t read = c->values[v].needed ? value_again(c, fates, now, v) : 0;
        uint32_t next = value_new(w, 256);
        step_new(w, gradient, read, next,
                 2 * (c->values[v].seconds < 0 ? 1 : c->values[v].seconds));
        gradient = next;
    }
    world_end(w, gradient);
    c->plan = &w->plan;
}

static void try_choice(void *context, const plan_choice *choice, plan_size *size) {
    choice_case *c = context;
    ml_arena *arena = ml_arena_new();
    uint8_t *fates;
    recompute_choose(&c->part, 1, choice->kept, NULL, arena, &fates);
    build(c, fates);
    if (choice->offload != OFFLOAD_NONE)
        plan_offload(c->plan, c->limit, choice->offload == OFFLOAD_ALL);
    *size = (plan_size){.peak = c->plan->peak_bytes,
                        .reach = c->plan->reach_bytes,
                        .seconds = c->plan->copy_seconds};
    for (uint32_t t = 0; t < c->plan->schedule->steps.count; t++)
        size->seconds += plan_step_seconds(c->plan->schedule, NULL, t);
    ml_arena_free(arena);
}

/* What a choice adds, fates by digits (0: kept, 1: copied, 2: computed again): its backward pass in
 * order, with copies out that follow one another from each value's last use on, and copies back in
 * the order of their needs. */
typedef struct {
    const choice_case *c;
    int fate[FEW];
    bool has[FEW], used[FEW];
    double now, again, back, stall; /* seconds of the backward pass; of copies back */
} trial;

static void trial_need(trial *t, uint32_t v) {
    const recompute_value *value = &t->c->values[v];
    if (t->has[v]) return;
    t->has[v] = t->used[v] = true;
    if (t->fate[v] == 1 && v + 1 < FEW) {
        t->back += (double)value->bytes / (double)t->c->host_bytes;
        if (t->back - t->now > t->stall) t->stall = t->back - t->now;
    }
    if (t->fate[v] < 2) return;
    for (uint32_t i = 0; i < value->source_count; i++)
        trial_need(t, t->c->sources[value->first_source + i]);
    t->again += value->seconds < 0 ? 1e30 : value->seconds / 1000;
    t->now += STEPS_FASTER * value->seconds / 1000;
}

static double added_by(const choice_case *c, int choice, int64_t *kept) {
    trial t = {.c = c};
    double last[FEW] = {0}, end = 0, out = 0, copies = 0;
    for (uint32_t v = 0; v < FEW; v++, choice /= 3) {
        const recompute_value *value = &c->values[v];
        t.fate[v] = choice % 3;
        end += STEPS_FASTER * (value->seconds < 0 ? 1 : value->seconds) / 1000;
        last[v] = end;
        for (uint32_t i = 0; i < value->source_count; i++)
            last[c->sources[value->first_source + i]] = end;
    }
    for (uint32_t v = FEW; v-- > 0;) {
        double seconds = c->values[v].seconds < 0 ? 1 : c->values[v].seconds;
        if (c->values[v].needed) trial_need(&t, v);
        t.now += STEPS_FASTER * 2 * seconds / 1000;
    }
    *kept = c->values[FEW - 1].bytes; /* which the loss reads */
    for (uint32_t v = 0; v + 1 < FEW; v++) {
        double copy = (double)c->values[v].bytes / (double)c->host_bytes;
        if (t.used[v] && t.fate[v] == 0) *kept += c->values[v].bytes;
        if (!t.used[v] || t.fate[v] != 1) continue;
        out = (out > last[v] ? out : last[v]) + copy;
        copies += copy;
    }
    return t.again + t.stall + (out > end ? out - end : 0) + 0.02 * 2 * copies;
}

static double seconds_of(const ml_plan *plan) {
    double seconds = plan->copy_seconds;
    for (uint32_t t = 0; t < plan->schedule->steps.count; t++)
        seconds += plan_step_seconds(plan->schedule, NULL, t);
    return seconds;
}

/* The least that any choice within the limit adds. */
static double least_added(const choice_case *c, int64_t others) {
    double least = 1e30;
    int choices = 1;
    for (int v = 0; v < FEW; v++) choices *= 3;
    for (int k = 0; k < choices; k++) {
        int64_t kept;
        double added = added_by(c, k, &kept);
        if (kept + others <= c->limit && added < least) least = added;
    }
    return least;
}

/* Never above the budget, and within 3 % of the step that is the fastest in it. */
TEST(optimize, offload_choice_of_random_parts) {
    enum { BUDGETS = 5 };
    int copied = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        world w;
        choice_case c;
        uint8_t all[FEW] = {0};
        world_begin(&w, seed * 13);
        draw_case(&c, &w);
        build(&c, all);
        const int64_t most = w.plan.peak_bytes, others = (int64_t)LOSS_MIB * MIB + MIB;
        const int64_t fewest = others + c.values[FEW - 1].bytes;
        const double whole = seconds_of(c.plan);
        for (int i = 0; i < BUDGETS; i++) {
            c.limit = fewest + (most - fewest) * i / BUDGETS;
            double least = least_added(&c, others);
            plan_fit fit = {try_choice, &c, c.limit, true};
            plan_fit_memory(&fit, &(plan_choice){.kept = 1});
            CHECK(c.plan->peak_bytes <= c.limit);
            CHECK(seconds_of(c.plan) - whole <= least + 0.03 * (whole + least));
            copied += c.plan->offloaded_bytes > 0;
        }
        world_free(&w);
    }
    CHECK(copied > 100);
}
