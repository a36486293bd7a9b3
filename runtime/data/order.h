/* The order of samples: a function of (seed, sample) that is computed and never stored.
 *
 * Sample i of a blend is the k-th one of source s, where every prefix of the blend has each source
 * within one sample of its weight; the k-th sample of a source of n windows is in epoch k / n, and
 * each epoch is a permutation of the windows of its own: a Feistel network over the next power of
 * four, repeated until the value is below n. */
#ifndef ML_DATA_ORDER_H
#define ML_DATA_ORDER_H

#include "runtime/base/memory.h"

typedef struct {
    int sources;
    int64_t period;         /* samples after which the blend repeats: at most a million */
    const int64_t *count;   /* [sources]: of a period */
    const uint16_t *source; /* [period] */
    const uint32_t *nth;    /* [period]: which one of its source in this period */
} data_blend;

enum { BLEND_MOST = 4096, BLEND_PERIOD = 1000000 };
/* Weights are positive and finite, and taken as multiples of a millionth of their sum where they
 * are no shorter decimals. Raises. */
void blend_make(ml_arena *arena, const double *weights, int sources, data_blend *blend);
int blend_find(const data_blend *blend, int64_t sample, int64_t *nth); /* the source */

/* The i-th of the numbers [0, n) in the permutation that is `key`. */
int64_t order_permute(uint64_t key, int64_t n, int64_t i);

#endif
