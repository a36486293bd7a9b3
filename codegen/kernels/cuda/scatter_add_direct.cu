/* SCATTER_ADD of few tokens: a thread an element of the result, columns fastest. */
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY scatter_add
#define POINTERS 12
#define MEMORY float  /* of the result */
#define ELEMENT float /* of the value */
#define ADDER float
#define REAL float
#define LOAD
#define STORE
#define BASED 0 /* on a third operand, of the result's type and strides */
#define BASE_AT 2
#define RESULT_AT 2
#define COMPENSATED 0
#define BATCHES 1LL
#define TOKENS 1000LL
#define ROWS 100LL
#define COLUMNS 64LL
#define ROW_STRIDE 64LL
#define INDEX_BATCH(batch) (batch * 1000LL)
#define INDEX_TOKEN(token) (token)
#define VALUE_BATCH(batch) (batch * 64000LL)
#define VALUE_TOKEN(token) (token * 64LL)
#define VALUE_COLUMN(column) (column)
#define RESULT_BATCH(batch) (batch * 6400LL)
#define RESULT_COLUMN(column) (column)
#endif
#include "add_exactly.cuh"

struct arguments {
    char *p[POINTERS];
};

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    long long element = blockIdx.x * 256LL + threadIdx.x;
    if (element >= BATCHES * ROWS * COLUMNS) return;
    long long column = element % COLUMNS, row = element / COLUMNS % ROWS;
    long long batch = element / (COLUMNS * ROWS);
    const int *index = (const int *)a.p[0] + INDEX_BATCH(batch);
    const ELEMENT *value = (const ELEMENT *)a.p[1] + VALUE_BATCH(batch) + VALUE_COLUMN(column);
    long long at = RESULT_BATCH(batch) + row * ROW_STRIDE + RESULT_COLUMN(column);
#if BASED
    ADDER sum = ((const MEMORY *)a.p[BASE_AT])[at], lost = 0;
#else
    ADDER sum = 0, lost = 0;
#endif

    for (long long token = 0; token < TOKENS; token++)
        if (index[INDEX_TOKEN(token)] == row) {
            const ADDER more = (ADDER)LOAD(value[VALUE_TOKEN(token)]);
            if (COMPENSATED)
                add_exactly(sum, lost, more);
            else
                sum += more;
        }
    if (COMPENSATED && lost - lost == 0) sum += lost; /* else it is infinite */
    ((MEMORY *)a.p[RESULT_AT])[at] = STORE((REAL)sum);
}
