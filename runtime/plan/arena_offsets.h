/* Placing blocks with known lifetimes in one arena.
 *
 * A block is alive from step `first` to step `last`, both included; two blocks whose lifetimes
 * meet never share a byte. Offsets and sizes are multiples of ARENA_ALIGNMENT. */
#ifndef ML_ARENA_OFFSETS_H
#define ML_ARENA_OFFSETS_H

#include "runtime/base/memory.h"

enum { ARENA_ALIGNMENT = 256 }; /* bytes */

static inline int64_t memory_padded(int64_t bytes) {
    return (bytes + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
}

typedef struct {
    int64_t bytes, offset;
    uint32_t first, last;
} arena_block;

/* Set the offsets; the value is the end of the highest block. Near-linear in `count`: best fit
 * along the steps in both directions, and by decreasing size where the blocks are few; the
 * smallest result is taken. Steps are 0 .. steps-1. Raises when memory runs out. */
int64_t arena_assign_offsets(arena_block *blocks, uint32_t count, uint32_t steps,
                             ml_arena *scratch);
/* The largest sum of the bytes of blocks alive at one step, and that step. */
int64_t arena_peak(const arena_block *blocks, uint32_t count, uint32_t steps, ml_arena *scratch,
                   uint32_t *step);

#endif
