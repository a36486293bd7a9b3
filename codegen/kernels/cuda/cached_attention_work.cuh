/* Which queries and keys a block of CACHED_ATTENTION has, and where keys lie. */
#pragma once
#include "../c/cached_attention_operands.h"
#ifndef KEY_PARTS
#define KEY_PARTS SPLITS /* of the keys, each a block's */
#endif

/* Queries `first` .. of a row, and keys begin .. end - 1. */
struct work {
    int row, kv_head, first, split, start, begin, end;
};
/* `newest`: each row's one query is its last position, whatever p[5] says. */
static __device__ __forceinline__ work find_work(char *const *p, bool newest = false) {
    work w;
    int number = blockIdx.x;
    w.split = number % SPLITS, number /= SPLITS;
    w.first = number % QUERY_BLOCKS * QUERIES, number /= QUERY_BLOCKS;
    w.kv_head = number % KV_HEADS, w.row = number / KV_HEADS;
    w.start = ((const int *)p[4])[w.row * START_ROW];
    const int length = newest ? w.start + 1 : ((const int *)p[5])[w.row * LENGTH_ROW];
    const int after = w.first + QUERIES < ALL_QUERIES ? w.first + QUERIES : ALL_QUERIES;
    const int first = w.first / GROUP, last = (after - 1) / GROUP;
    const int begin = FIRST_KEY(w.start, length, first), end = END_KEY(w.start, length, last);
    const long long keys = end > begin ? end - begin : 0;
    (void)first, (void)last;
    w.begin = begin + (int)(keys * w.split / KEY_PARTS);
    w.end = begin + (int)(keys * (w.split + 1) / KEY_PARTS);
    return w;
}
/* The row of the pools where a key lies; some row where the block has no such key. */
static __device__ __forceinline__ int row_of_key(char *const *p, const work &w, int kv) {
    if (kv >= w.end) return 0;
    const int *table = (const int *)p[3] + w.row * TABLE_ROW;
    const long long at = (long long)table[kv / BLOCK % COLUMNS * TABLE_COLUMN] * BLOCK + kv % BLOCK;
    return at >= 0 && at < POOL ? (int)at : 0;
}
