#include "runtime/data/order.h"

#include <math.h>

#include "runtime/base/status.h"

int64_t order_permute(uint64_t key, int64_t n, int64_t i) {
    enum { ROUNDS = 6 };
    int half = 1;
    while ((uint64_t)n > 1 && half < 31 && (uint64_t)1 << 2 * half < (uint64_t)n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1, value = (uint64_t)i;
    if (n < 2) return 0;
    do {
        uint64_t left = value >> half, right = value & mask;
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t next = left ^ (ml_mix(key + (uint64_t)round, right) & mask);
            left = right, right = next;
        }
        value = left << half | right;
    } while (value >= (uint64_t)n);
    return (int64_t)value;
}

/* ---- Blends ---------------------------------------------------------------------------------- */

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
 *
 * With scale = 2 sources - 2, a source of which `taken` were chosen may be sample n from
 *     n + 1 >= period * (taken * scale + 1) / (parts * scale)
 * on, and its deadline is period * ((taken + 1) * scale - 1) / (parts * scale). Some source always
 * may. Products stay below 2^54. */
typedef struct {
    int64_t scale, period;
    const int64_t *parts;
    int64_t *deadline; /* [sources]: (taken + 1) * scale - 1 */
    uint16_t *heap;    /* [count]: sources that may be next; the soonest deadline is first */
    int count;
    uint16_t *next; /* [sources]: the list of those that may be next from the same sample on */
} choosing;

static bool is_sooner(const choosing *c, int a, int b) {
    int64_t left = c->deadline[a] * c->parts[b], right = c->deadline[b] * c->parts[a];
    return left != right ? left < right : a < b;
}

static void push(choosing *c, int source) {
    int at = c->count++;
    for (int above; at > 0 && is_sooner(c, source, c->heap[above = (at - 1) / 2]); at = above)
        c->heap[at] = c->heap[above];
    c->heap[at] = (uint16_t)source;
}

static int pop(choosing *c) {
    int first = c->heap[0], last = c->heap[--c->count], at = 0;
    for (int below; (below = 2 * at + 1) < c->count; at = below) {
        if (below + 1 < c->count && is_sooner(c, c->heap[below + 1], c->heap[below])) below++;
        if (!is_sooner(c, c->heap[below], last)) break;
        c->heap[at] = c->heap[below];
    }
    c->heap[at] = (uint16_t)last;
    return first;
}

/* lists[n]: 1 + the first source that may be next from sample n on. */
static void wait_for(choosing *c, int source, int64_t taken, int64_t now, uint32_t *lists) {
    int64_t pace = c->parts[source] * c->scale;
    int64_t from = (c->period * (taken * c->scale + 1) + pace - 1) / pace - 1;
    c->deadline[source] = (taken + 1) * c->scale - 1;
    if (from < now) from = now;
    if (from >= c->period) return;
    c->next[source] = (uint16_t)lists[from];
    lists[from] = (uint32_t)source + 1;
}

void blend_make(ml_arena *arena, const double *weights, int sources, data_blend *blend) {
    if (sources > BLEND_MOST)
        ml_raise(ML_INVALID, "a blend of %d sources: %d are the most", sources, BLEND_MOST);
    int64_t *parts = ML_NEW_ARRAY(arena, int64_t, sources);
    int64_t *taken = ML_NEW_ARRAY(arena, int64_t, sources);
    int64_t period = reduce(weights, sources, parts);
    uint16_t *source = ML_NEW_ARRAY(arena, uint16_t, period);
    uint32_t *place = ML_NEW_ARRAY(arena, uint32_t, period); /* until it is known: a list */
    choosing c = {.scale = sources > 1 ? 2 * sources - 2 : 1, .period = period, .parts = parts};
    c.deadline = ML_NEW_ARRAY(arena, int64_t, sources);
    c.heap = ML_NEW_ARRAY(arena, uint16_t, sources);
    c.next = ML_NEW_ARRAY(arena, uint16_t, sources);
    for (int i = 0; i < sources; i++) wait_for(&c, i, 0, 0, place);
    for (int64_t n = 0; n < period; n++) {
        for (int i = (int)place[n]; i > 0; i = c.next[i - 1]) push(&c, i - 1);
        int first = pop(&c);
        source[n] = (uint16_t)first;
        place[n] = (uint32_t)taken[first]++;
        wait_for(&c, first, taken[first], n + 1, place);
    }
    *blend = (data_blend){sources, period, parts, source, place};
}

int blend_find(const data_blend *blend, int64_t sample, int64_t *nth) {
    int64_t at = sample % blend->period;
    int source = blend->source[at];
    *nth = sample / blend->period * blend->count[source] + blend->nth[at];
    return source;
}
