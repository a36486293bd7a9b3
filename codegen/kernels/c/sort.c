/* SORT and TOP_K of rows. A small TOP_K inserts into the best so far; else bottom-up merge sort. */
#ifndef MLUA_EMBEDDED
#include "prelude.h"
#define ENTRY sort
#define MEMORY float
#define LOAD
#define INSERTION 0 /* or merge sort */
#define SIZE 1000   /* elements of a row, of which KEPT are written */
#define KEPT 1000
#define WORKSPACE_AT -1 /* pointer of memory for 2 SIZE keys a row; -1: they are on the stack */
#define X_ROW(row) (row * 1000LL)
#define X_STRIDE 1LL
#define VALUES_AT 1 /* pointers of the results, -1 where they are not wanted */
#define VALUES_ROW(row) (row * 1000LL)
#define VALUES_STRIDE 1LL
#define INDICES_AT 2
#define INDICES_ROW(row) (row * 1000LL)
#define INDICES_STRIDE 1LL
#endif
#include "sort_keys.h"

#define merge_sort NAME(merge_sort)

#if !INSERTION
/* Between keys and spare; returns where the result is. */
static sort_key *merge_sort(sort_key *keys, sort_key *spare) {
    for (long long i = 1; i < SIZE; i++) { /* runs of 8 by insertion */
        sort_key key = keys[i];
        long long at = i, least = i / 8 * 8;
        for (; at > least && is_before(key, keys[at - 1]); at--) keys[at] = keys[at - 1];
        keys[at] = key;
    }
    for (long long width = 8; width < SIZE; width *= 2) {
        for (long long start = 0; start < SIZE; start += 2 * width) {
            long long i = start, middle = start + width < SIZE ? start + width : SIZE;
            long long j = middle, stop = middle + width < SIZE ? middle + width : SIZE;
            for (long long at = start; at < stop; at++) {
                int left = i < middle && (j >= stop || !is_before(keys[j], keys[i]));
                spare[at] = left ? keys[i] : keys[j];
                i += left, j += !left;
            }
        }
        sort_key *swap = keys;
        keys = spare, spare = swap;
    }
    return keys;
}
#endif

void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long row = begin; row < end; row++) {
        const MEMORY *x = (const MEMORY *)p[0] + X_ROW(row);
#if INSERTION
        sort_key sorted[KEPT];
        int held = 0;
        for (long long i = 0; i < SIZE; i++) {
            sort_key key = make_key(LOAD(x[i * X_STRIDE]), (unsigned)i);
            if (held == KEPT && !is_before(key, sorted[KEPT - 1])) continue;
            int at = held < KEPT ? held++ : KEPT - 1;
            for (; at > 0 && is_before(key, sorted[at - 1]); at--) sorted[at] = sorted[at - 1];
            sorted[at] = key;
        }
#else
#if WORKSPACE_AT >= 0
        sort_key *keys = (sort_key *)p[WORKSPACE_AT] + row * 2 * SIZE, *spare = keys + SIZE;
#else
        sort_key keys[SIZE], spare[SIZE];
#endif
        for (long long i = 0; i < SIZE; i++) keys[i] = make_key(LOAD(x[i * X_STRIDE]), (unsigned)i);
        sort_key *sorted = merge_sort(keys, spare);
#endif
        for (long long at = 0; at < KEPT; at++) {
            int from = (int)position_of(sorted[at]);
#if VALUES_AT >= 0
            ((MEMORY *)p[VALUES_AT])[VALUES_ROW(row) + at * VALUES_STRIDE] = x[from * X_STRIDE];
#endif
#if INDICES_AT >= 0
            ((int *)p[INDICES_AT])[INDICES_ROW(row) + at * INDICES_STRIDE] = from;
#endif
        }
    }
}
