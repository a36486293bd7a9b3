/* The start of a sum over microbatches: zeros in the first one, else what is there. */
#ifndef MLUA_EMBEDDED
#include "prelude.h"
#define ENTRY reset
#define ELEMENT float
#define FLAG ml_bool
#define COUNT 100000LL
#define BLOCK 16384LL /* elements of a unit */
#endif

void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    const ELEMENT *from = (const ELEMENT *)p[1];
    ELEMENT *to = (ELEMENT *)p[2];
    const int first = *(const FLAG *)p[0] != 0;
    if (!first && to == from) return;
    for (long long unit = begin; unit < end; unit++) {
        long long last = (unit + 1) * BLOCK < COUNT ? (unit + 1) * BLOCK : COUNT;
        for (long long i = unit * BLOCK; i < last; i++) to[i] = first ? 0 : from[i];
    }
}
