/* The choice of what to keep (passes/recompute_choose.c), against every choice there is: of random
 * parts with at most 16 values. */
#include "runtime/passes/recompute_choose.h"

#include <string.h>

#include "tests/test.h"

enum { MOST = 16 };

static uint32_t drawn(uint64_t *seed, uint32_t below) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33) % below;
}

/* A part like a layer: products of many seconds, elementwise work of few, some that cannot be
 * repeated, outputs of operators with several. */
static recompute_part draw_values(uint64_t *seed, uint32_t count, ml_arena *arena) {
    recompute_part p = {.count = count};
    p.values = ML_NEW_ARRAY(arena, recompute_value, p.count);
    p.sources = ML_NEW_ARRAY(arena, uint32_t, 3 * p.count);
    for (uint32_t v = 0; v < p.count; v++) {
        recompute_value *value = &p.values[v];
        value->bytes = 1 + drawn(seed, 64);
        value->seconds = drawn(seed, 3) ? 1 + drawn(seed, 8) : 20 + drawn(seed, 60);
        if (drawn(seed, 12) == 0) value->seconds = -1;
        value->needed = drawn(seed, 3) > 0;
        value->first_source = p.source_count;
        for (uint32_t i = v > 0 ? drawn(seed, 3) : 0; i > 0; i--)
            p.sources[p.source_count++] = v - 1 - drawn(seed, v < 4 ? v : 4);
        value->source_count = p.source_count - value->first_source;
        value->output = value->source_count == 1 && drawn(seed, 8) == 0;
        if (value->output) value->seconds = p.values[v - 1].seconds < 0 ? -1 : 0;
    }
    return p;
}

static recompute_part draw(uint64_t *seed, ml_arena *arena) {
    const uint32_t count = 3 + drawn(seed, MOST - 2);
    return draw_values(seed, count, arena);
}

/* Whether the fates give the backward pass all that it needs. */
static bool valid(const recompute_part *p, const uint8_t *fates) {
    for (uint32_t v = 0; v < p->count; v++) {
        const recompute_value *value = &p->values[v];
        if (value->needed && fates[v] == RECOMPUTE_UNUSED) return false;
        if (fates[v] != RECOMPUTE_AGAIN) continue;
        if (value->seconds < 0) return false;
        for (uint32_t i = 0; i < value->source_count; i++) {
            uint8_t source = fates[p->sources[value->first_source + i]];
            if (source == RECOMPUTE_UNUSED) return false;
            if (value->output && source != RECOMPUTE_AGAIN) return false;
        }
    }
    return true;
}

/* least[b]: the fewest seconds of any choice that keeps at most b bytes. */
static void try_all(const recompute_part *p, uint32_t v, uint8_t *fates, int64_t bytes,
                    double seconds, const uint8_t *wanted, double *least) {
    if (v == UINT32_MAX) {
        if (seconds < least[bytes]) least[bytes] = seconds;
        return;
    }
    const recompute_value *value = &p->values[v];
    if (!value->needed && !wanted[v]) {
        fates[v] = RECOMPUTE_UNUSED;
        try_all(p, v - 1, fates, bytes, seconds, wanted, least);
        return;
    }
    if (wanted[v] < 2) { /* not an operator whose output is computed again */
        fates[v] = RECOMPUTE_KEPT;
        try_all(p, v - 1, fates, bytes + value->bytes, seconds, wanted, least);
    }
    if (value->seconds < 0) return;
    uint8_t more[MOST];
    for (uint32_t i = 0; i < p->count; i++) more[i] = wanted[i];
    for (uint32_t i = 0; i < value->source_count; i++) {
        uint8_t *source = &more[p->sources[value->first_source + i]];
        if (value->output)
            *source = 2;
        else if (*source == 0)
            *source = 1;
    }
    fates[v] = RECOMPUTE_AGAIN;
    try_all(p, v - 1, fates, bytes, seconds + value->seconds, more, least);
}

/* Never above the bytes asked for; within 3 % of the step, whose forward pass is these values and
 * whose backward pass takes twice that. */
static void check_part(const recompute_part *p, ml_arena *arena) {
    enum { BYTES = MOST * 64 + 1 };
    static double least[BYTES];
    uint8_t fates[MOST] = {0}, none[MOST] = {0}, *chosen;
    double step = 0;
    for (int i = 0; i < BYTES; i++) least[i] = 1e30;
    try_all(p, p->count - 1, fates, 0, 0, none, least);
    for (int i = 1; i < BYTES; i++)
        if (least[i - 1] < least[i]) least[i] = least[i - 1];
    for (uint32_t v = 0; v < p->count; v++)
        step += 3 * (p->values[v].seconds > 0 ? p->values[v].seconds : 0);
    int64_t most, fewest, bytes;
    double seconds;
    recompute_choose(p, 1, 1, NULL, arena, &chosen);
    recompute_cost(p, chosen, &most, &seconds);
    recompute_choose(p, 1, 0, NULL, arena, &chosen);
    recompute_cost(p, chosen, &fewest, &seconds);
    CHECK(least[fewest] < 1e30 && (fewest == 0 || least[fewest - 1] >= 1e30));
    for (int i = 0; i <= 10; i++) {
        recompute_choose(p, 1, i / 10.0, NULL, arena, &chosen);
        CHECK(valid(p, chosen));
        recompute_cost(p, chosen, &bytes, &seconds);
        double excess = (double)(int64_t)((1 - i / 10.0) * (double)(most - fewest));
        int64_t limit = most - (int64_t)excess;
        CHECK(bytes <= limit);
        double error = (seconds - least[limit]) / (step + least[limit]);
        CHECK(error <= 0.03);
    }
}

TEST(passes, recompute_choice_of_random_parts) {
    uint64_t seed = 7;
    for (int i = 0; i < 80; i++) {
        ml_arena *arena = ml_arena_new();
        recompute_part p = draw(&seed, arena);
        check_part(&p, arena);
        ml_arena_free(arena);
    }
}

/* Parts alike are chosen about once, and all but one of them have one of two choices. */
TEST(passes, recompute_choice_of_layers) {
    enum { LAYERS = 40 };
    ml_arena *arena = ml_arena_new();
    uint64_t seed = 3;
    recompute_part layer = draw(&seed, arena), parts[LAYERS];
    uint8_t *fates[LAYERS];
    for (int i = 0; i < LAYERS; i++) parts[i] = layer;
    int64_t most = 0, fewest = 0, bytes;
    double seconds, slowest = 0, before = -1;
    for (int share = 10; share >= 0; share--) {
        recompute_choose(parts, LAYERS, share / 10.0, NULL, arena, fates);
        int64_t sum = 0;
        double all = 0;
        int changes = 0;
        for (int i = 0; i < LAYERS; i++) {
            recompute_cost(&layer, fates[i], &bytes, &seconds);
            sum += bytes;
            all += seconds;
            if (i > 0 && fates[i] != fates[i - 1]) changes++;
        }
        if (share == 10) most = sum;
        recompute_choose(parts, LAYERS, 0, NULL, arena, fates);
        recompute_cost(&layer, fates[0], &bytes, &slowest);
        fewest = LAYERS * bytes;
        CHECK(changes <= 2 && all >= before);
        CHECK((double)(sum - fewest) <= share / 10.0 * (double)(most - fewest) + 1);
        before = all;
    }
    ml_arena_free(arena);
}

/* What attempts with other shares found is not searched for again, and choices are the same. */
TEST(passes, recompute_choice_by_known_curves) {
    enum { VALUES = 24, SHARES = 16 };
    ml_arena *arena = ml_arena_new();
    recompute_curves *curves = recompute_curves_new(arena);
    uint64_t seed = 5;
    const recompute_part part = draw_values(&seed, VALUES, arena);
    int64_t alone = 0;
    for (int i = 0; i < SHARES; i++) {
        const double kept = (i + 0.5) / SHARES;
        uint8_t *known, *anew;
        recompute_curves *of_one = recompute_curves_new(arena);
        recompute_choose(&part, 1, kept, curves, arena, &known);
        recompute_choose(&part, 1, kept, of_one, arena, &anew);
        CHECK(memcmp(known, anew, VALUES) == 0);
        alone += recompute_curves_cuts(of_one);
    }
    const int64_t cuts = recompute_curves_cuts(curves);
    EXPECT(2 * cuts < alone, "%lld cuts beside %lld", (long long)cuts, (long long)alone);
    for (int i = 0; i <= SHARES; i++) {
        uint8_t *fates;
        recompute_choose(&part, 1, (double)i / SHARES, curves, arena, &fates);
    }
    CHECK_EQ_INT(recompute_curves_cuts(curves), cuts);
    ml_arena_free(arena);
}
