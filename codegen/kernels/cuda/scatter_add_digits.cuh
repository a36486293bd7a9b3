/* SCATTER_ADD: stable radix sort of (key, token), key = batch ROWS + index, or LIMIT where the
 * index is out of bounds. s[0] is the shift; pass 0 reads the indices, others the keys and tokens
 * of the pass before. */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define ENTRY scatter_add
#define POINTERS 12
#define TOKENS 1000LL
#define ROWS 100LL
#define LIMIT 100  /* keys of all batches */
#define ALL 1000LL /* tokens of all batches */
#define RADIX 128
#define TILE 2048 /* tokens of a block */
#define TILES 1
#define KEYS_IN_AT 3
#define COUNTS_AT 7
#define INDEX_BATCH(batch) (batch * 1000LL)
#define INDEX_TOKEN(token) (token)
#endif

struct arguments {
    char *p[POINTERS];
    long long s[1];
};

ML_INLINE unsigned key_of(const arguments &a, long long i) {
    if (a.s[0] > 0) return ((const unsigned *)a.p[KEYS_IN_AT])[i];
    long long token = i % TOKENS, batch = i / TOKENS;
    long long row = ((const int *)a.p[0])[INDEX_BATCH(batch) + INDEX_TOKEN(token)];
    return row >= 0 && row < ROWS ? (unsigned)(batch * ROWS + row) : (unsigned)LIMIT;
}
