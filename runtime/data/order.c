#include "runtime/data/order.h"

#include <math.h>

#include "runtime/base/status.h"

/* SplitMix64's finalizer over both. */
uint64_t order_mix(uint64_t a, uint64_t b) {
    uint64_t z = a + (b + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

int64_t order_permute(uint64_t key, int64_t n, int64_t i) {
    enum { ROUNDS = 6 };
    int half = 1;
    while ((uint64_t)n > 1 && half < 31 && (uint64_t)1 << 2 * half < (uint64_t)n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1, value = (uint64_t)i;
    if (n < 2) return 0;
    do {
        uint64_t left = value >> half, right = value & mask;
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t next = left ^ (order_mix(key + (uint64_t)round, right) & mask);
            left = right, right = next;
        }
        value = left << half | right;
    } while (value >= (uint64_t)n);
    return (int64_t)value;
}

/* ---- Blends ------------------------------------------------------------------------------------
 */

static int64_t divisor(int64_t a, int64_t b) {
    while (b) {
        int64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

/* Whether all weights are whole when multiplied by `scale`; then `parts` has them. */
static bool scale_exactly(const double *weights, int sources, double scale, int64_t *parts) {
    double sum = 0;
    for (int i = 0; i < sources; i++) {
        double part = weights[i] * scale;
        sum += part;
        if (!(sum <= BLEND_PERIOD * 1000.0) || fabs(part - round(part)) > 1e-9 * part) return false;
        parts[i] = (int64_t)round(part);
    }
    return true;
}

/* Multiples of a millionth of the sum, at least one each. */
static void scale_nearly(const double *weights, int sources, int64_t *parts) {
    double sum = 0, before = 0;
    for (int i = 0; i < sources; i++) sum += weights[i];
    for (int i = 0; i < sources; i++) {
        double next = before + weights[i] / sum;
        parts[i] = (int64_t)(round(next * BLEND_PERIOD) - round(before * BLEND_PERIOD));
        if (parts[i] < 1) parts[i] = 1;
        before = next;
    }
}

/* Weights as the smallest whole numbers; their sum. */
static int64_t reduce(const double *weights, int sources, int64_t *parts) {
    int64_t common = 0, sum = 0;
    double scale = 1;
    while (scale <= 1e6 && !scale_exactly(weights, sources, scale, parts)) scale *= 10;
    if (scale > 1e6) scale_nearly(weights, sources, parts);
    for (int pass = 0; pass < 2; pass++) {
        common = sum = 0;
        for (int i = 0; i < sources; i++) common = divisor(parts[i], common);
        for (int i = 0; i < sources; i++) sum += parts[i] /= common;
        if (sum <= BLEND_PERIOD + BLEND_MOST) break;
        scale_nearly(weights, sources, parts);
    }
    return sum;
}

/* Tijdeman's chairman assignment: of the sources that have fallen far enough behind their weight,
 * the one that must be next soonest. No prefix is off by more than 1 - 1 / (2 sources - 2).
 * All numbers are multiplied by period * (2 sources - 2). */
static int choose(const int64_t *parts, const int64_t *taken, int sources, int64_t n,
                  int64_t period) {
    int64_t scale = 2 * (int64_t)sources - 2;
    int best = -1;
    double soonest = 0;
    for (int i = 0; i < sources; i++) {
        int64_t behind = (parts[i] * (n + 1) - taken[i] * period) * scale;
        if (behind < period) continue;
        double wait = (double)(period * (scale - 1) - behind) / (double)parts[i];
        if (best < 0 || wait < soonest) best = i, soonest = wait;
    }
    return best < 0 ? 0 : best;
}

void blend_make(ml_arena *arena, const double *weights, int sources, data_blend *blend) {
    if (sources > BLEND_MOST)
        ml_raise(ML_INVALID, "a blend of %d sources: %d are the most", sources, BLEND_MOST);
    int64_t *parts = ML_NEW_ARRAY(arena, int64_t, sources);
    int64_t *taken = ML_NEW_ARRAY(arena, int64_t, sources);
    int64_t period = reduce(weights, sources, parts);
    if ((double)period * sources > 2e9) /* it would take seconds */
        ml_raise(ML_INVALID, "the weights of %d sources have too many digits", sources);
    uint16_t *source = ML_NEW_ARRAY(arena, uint16_t, period);
    uint32_t *rank = ML_NEW_ARRAY(arena, uint32_t, period);
    for (int64_t n = 0; n < period; n++) {
        int next = sources > 1 ? choose(parts, taken, sources, n, period) : 0;
        source[n] = (uint16_t)next;
        rank[n] = (uint32_t)taken[next]++;
    }
    *blend = (data_blend){sources, period, parts, source, rank};
}

int blend_find(const data_blend *blend, int64_t sample, int64_t *nth) {
    int64_t at = sample % blend->period;
    int source = blend->source[at];
    *nth = sample / blend->period * blend->count[source] + blend->rank[at];
    return source;
}
