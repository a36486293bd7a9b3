/* What the tests of the CPU's matrix products share: random operands of any layout. */
#ifndef DEVICE_PRODUCTS_H
#define DEVICE_PRODUCTS_H

#include <math.h>

#include "runtime/device/cpu/cpu_internal.h"
#include "tests/ops/support.h"

typedef struct {
    uint64_t random;
    ml_arena *arena;
    ml_pool *pool;
} world;

static inline int64_t pick(world *w, int64_t low, int64_t high) {
    return test_range(&w->random, low, high);
}

/* Memory for the batch of one operand, filled with small integers (or NaN). */
static inline void *fill(world *w, ml_dtype dtype, int64_t count, bool spoilt) {
    void *memory = ml_arena_alloc(w->arena, (size_t)(count * ml_dtypes[dtype].bytes));
    for (int64_t i = 0; i < count; i++) {
        ops_store(dtype, memory, i, spoilt ? NAN : (double)pick(w, -8, 8));
    }
    return memory;
}

/* Strides of a matrix in either order, with some padding; the value is the size of its memory. */
static inline int64_t layout(world *w, int64_t rows, int64_t cols, int64_t *row, int64_t *col) {
    int64_t pad = pick(w, 0, 4);
    bool by_rows = pick(w, 0, 1);
    *row = by_rows ? cols + pad : 1;
    *col = by_rows ? 1 : rows + pad;
    return (rows + pad) * (cols + pad) + 1;
}

/* Of `bytes` bytes, as the products want it. */
static inline char *scratch_of(world *w, int64_t bytes) {
    char *scratch = ml_arena_alloc(w->arena, (size_t)bytes + 64);
    return (char *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
}

#endif
