/* A recurrence by elements: LANES rows side by side, over all positions. */
#ifndef MLUA_EMBEDDED
#include "prelude.h"
#define ENTRY recurrence
#define LENGTH 1000LL
#define REVERSE 0
#define LANES 16
#define FIRST /* pointers x0, x1, ... of P at `row`; values of each lane that are kept */          \
    const float *x0 = (const float *)P[0] + row;                                                   \
    float *x1 = (float *)P[1] + row;                                                               \
    float kept0[LANES];                                                                            \
    for (int l = 0; l < LANES; l++) kept0[l] = 0;
#define WORK /* lane l at position t */                                                            \
    kept0[l] = kept0[l] * 0.5f + x0[t * 16LL + l];                                                 \
    x1[t * 16LL + l] = kept0[l];
#define LAST (void)l; /* lane l after the last position */
#endif

void ENTRY(char *const *P, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        const long long row = unit * LANES;
        (void)row;
        FIRST
        for (long long i = 0; i < LENGTH; i++) {
            const long long t = REVERSE ? LENGTH - 1 - i : i;
#pragma GCC ivdep
            for (int l = 0; l < LANES; l++) {
                WORK
            }
            (void)t;
        }
        for (int l = 0; l < LANES; l++) {
            LAST
        }
    }
}
