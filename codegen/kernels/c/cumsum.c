/* CUMSUM: rows that are adjacent in memory are summed side by side. */
#ifndef MLUA_EMBEDDED
#include "prelude.h"
#define ENTRY cumsum
#define MEMORY float
#define REAL float
#define ADDER double /* type of sums */
#define LOAD
#define STORE
#define SIZE 1000 /* elements of a row */
#define LANES 64  /* rows side by side */
#define BACKWARDS 0
#define X_ROW(row) (row * 1000LL)
#define Y_ROW(row) (row * 1000LL)
#define X_STRIDE 1LL
#define Y_STRIDE 1LL
#endif

void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        const MEMORY *x = (const MEMORY *)p[0];
        MEMORY *y = (MEMORY *)p[1];
        long long row = unit * LANES;
        ADDER sum[LANES] = {0};
        x += X_ROW(row);
        y += Y_ROW(row);
        for (long long step = 0; step < SIZE; step++) {
            long long at = BACKWARDS ? SIZE - 1 - step : step;
#pragma GCC ivdep
            for (long long i = 0; i < LANES; i++) {
                sum[i] += (ADDER)LOAD(x[i + at * X_STRIDE]);
                y[i + at * Y_STRIDE] = STORE((REAL)sum[i]);
            }
        }
    }
}
