/* SORT and TOP_K: their arguments and results. */
#pragma once
#ifndef MLUA_EMBEDDED
#include "prelude.cuh"
#define POINTERS 3
#ifndef SCALARS
#define SCALARS 0 /* numbers that a launch has of its own */
#endif
#define MEMORY float
#define LOAD
#define ROWS 100LL
#define SIZE 1000 /* elements of a row, of which KEPT are written */
#define KEPT 1000
#define X_ROW(row) (row * 1000LL)
#define X_STRIDE 1LL
#define VALUES_AT 1 /* pointers of the results, -1 where they are not wanted */
#define VALUES_ROW(row) (row * 1000LL)
#define VALUES_STRIDE 1LL
#define INDICES_AT 2
#define INDICES_ROW(row) (row * 1000LL)
#define INDICES_STRIDE 1LL
#endif

struct arguments {
    char *p[POINTERS];
#if SCALARS
    long long s[SCALARS];
#endif
};

/* Element `at` of a row of the results is element `from` of the input. */
ML_INLINE void write(const arguments &a, long long row, int at, int from) {
    const MEMORY *x = (const MEMORY *)a.p[0] + X_ROW(row);
    (void)x;
#if VALUES_AT >= 0
    ((MEMORY *)a.p[VALUES_AT])[VALUES_ROW(row) + at * VALUES_STRIDE] = x[from * X_STRIDE];
#endif
#if INDICES_AT >= 0
    ((int *)a.p[INDICES_AT])[INDICES_ROW(row) + at * INDICES_STRIDE] = from;
#endif
}
