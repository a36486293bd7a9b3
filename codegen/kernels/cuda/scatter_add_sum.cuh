/* SCATTER_ADD: the sum of the tokens at sorted positions first .. end - 1, for WIDTH columns. */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY scatter_add
#define POINTERS 12
#define ELEMENT float /* of the value */
#define ADDER float
#define LOAD
#define TOKENS 1000LL
#define COLUMNS 64LL
#define WIDTH 4
#define CHUNK 64  /* tokens of which a block adds up those of one row */
#define LIMIT 100 /* keys of all batches */
#define SORTED_AT 4
#define KEYS_AT 3
#define STARTS_AT 8
#define PARTIAL_AT 9
#define VALUE_BATCH(batch) (batch * 64000LL)
#define VALUE_TOKEN(token) (token * 64LL)
#define VALUE_COLUMN(column) (column)
#endif

struct arguments {
    char *p[POINTERS];
};

struct __align__(WIDTH * sizeof(ELEMENT)) values {
    ELEMENT x[WIDTH];
};
ML_INLINE void sum_tokens(const arguments &a, unsigned first, unsigned end, long long column,
                          ADDER (&sum)[WIDTH]) {
    const unsigned *tokens = (const unsigned *)a.p[SORTED_AT];
    const ELEMENT *value = (const ELEMENT *)a.p[1] + VALUE_COLUMN(column);
#pragma unroll 8
    for (unsigned i = first; i < end; i++) {
        long long all = tokens[i], token = all % TOKENS, batch = all / TOKENS;
        (void)token, (void)batch;
        values v = *(const values *)(value + VALUE_BATCH(batch) + VALUE_TOKEN(token));
        for (int j = 0; j < WIDTH; j++) sum[j] += (ADDER)LOAD(v.x[j]);
    }
}
