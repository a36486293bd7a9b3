/* Adds up the parts of the keys (cached_attention_operands.h): a unit is a query of a head. */
#ifndef MLUA_EMBEDDED
#include "prelude.h"
#define ENTRY cached_attention_merge
#define REAL float
#define EXP ml_exp_f32
#endif
#include "cached_attention_operands.h"

void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        const long long i = unit % NEW, head = unit / NEW % HEADS, row = unit / (NEW * HEADS);
        const REAL *part = (const REAL *)p[PARTIAL_AT] + PART_OF(row, head, i, 0);
        REAL largest = LOWEST, sum = 0, out[VALUE_DIM];
        for (int k = 0; k < SPLITS; k++) {
            const REAL x = part[k * PARTIAL_ROW + VALUE_DIM];
            largest = x > largest ? x : largest;
        }
        for (int d = 0; d < VALUE_DIM; d++) out[d] = 0;
        for (int k = 0; k < SPLITS; k++, part += PARTIAL_ROW) {
            if (part[VALUE_DIM + 1] == 0) continue; /* it has no keys */
            const REAL weight = EXP(part[VALUE_DIM] - largest);
            sum += part[VALUE_DIM + 1] * weight;
            for (int d = 0; d < VALUE_DIM; d++) out[d] += part[d] * weight;
        }
        QUERY *o = (QUERY *)p[O_AT] + O_OF(row, head, i);
        const REAL inverse = sum == 0 ? 0 : 1 / sum;
        for (int d = 0; d < VALUE_DIM; d++) o[d * O_DIM] = QUERY_STORE(out[d] * inverse);
    }
}
