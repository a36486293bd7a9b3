/* Which values of the forward pass to keep for the backward pass, and which to compute again: the
 * least time for a number of bytes.
 *
 * The forward pass is a list of parts, such as layers; what one part gives another is kept. Within
 * a part a value is kept, which takes its bytes, or computed again once, which takes its seconds
 * and needs its sources, kept or computed again, or is not needed. With a price for each byte the
 * cheapest choice is a minimum cut, so that chains count once and shared values once; all prices
 * together give the part's curve of seconds over bytes. Parts that are alike share it. */
#ifndef ML_RECOMPUTE_CHOOSE_H
#define ML_RECOMPUTE_CHOOSE_H

#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/memory.h"

typedef struct {
    int64_t bytes;
    double seconds; /* to compute it again; negative: cannot be */
    bool needed;    /* the backward pass reads it */
    bool output;    /* of its source, which has several: computed again with it only */
    uint32_t first_source, source_count;
} recompute_value;

typedef struct {
    recompute_value *values;
    uint32_t *sources; /* of the same part, earlier */
    uint32_t count, source_count;
} recompute_part;

typedef enum { RECOMPUTE_UNUSED, RECOMPUTE_KEPT, RECOMPUTE_AGAIN } recompute_fate;

/* Curves of parts that were chosen about before: attempts at a program share them. They live in the
 * arena. */
typedef struct recompute_curves recompute_curves;
recompute_curves *recompute_curves_new(ml_arena *arena);
/* Minimum cuts that were computed for what is in `curves`. */
int64_t recompute_curves_cuts(const recompute_curves *curves);

/* fates[i]: of the values of parts[i], for the share `kept` of the bytes between the least and the
 * most that choices keep: 1 adds no time, 0 keeps the least bytes. Alike parts get alike fates,
 * but that the first of them may keep less than the others. What is in `curves` (NULL: nothing)
 * is not found anew; fates are not to be written to. */
void recompute_choose(const recompute_part *parts, uint32_t count, double kept,
                      recompute_curves *curves, ml_arena *arena, uint8_t **fates);
/* What a choice keeps and adds. */
void recompute_cost(const recompute_part *part, const uint8_t *fates, int64_t *bytes,
                    double *seconds);

#endif
