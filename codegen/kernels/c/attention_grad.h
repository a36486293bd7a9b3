/* One tile of the gradient. The gradients of one (batch, K/V head) are summed by one unit (WHOLE),
 * or in two passes, dk and dv by blocks of keys and dq by blocks of queries, where units are few or
 * the gradients are not of the type that is computed in. */
#pragma once
#include "attention.h"
#include "attention_grad_operands.h"

#if CLAMPED && KV_SEQ % KEYS
#define USED_KEYS keys
#else
#define USED_KEYS KEYS
#endif

/* Probabilities in `scores` and the gradients of the scaled products in `grads`, [query][key], from
 * tiles q (scaled), dO [query][dim], k and v transposed. */
INLINE void slopes_of_rows(char *const *p, int batch, int head, int query, int queries, int key,
                           int keys, const REAL *lse, const REAL *delta, REAL *scores, REAL *grads,
                           const int masked) {
    CAPTURES;
    POSITIONS;
    (void)p, (void)batch, (void)head, (void)keys;
    for (int i = 0; i < queries; i++) {
        REAL *row = scores + i * KEYS, *grad = grads + i * KEYS;
        REAL base = lse[i], mean = delta[i];
        int qi = query + i;
#pragma GCC ivdep
        for (int j = 0; j < USED_KEYS; j++) {
            int kv = key + j;
            REAL x = row[j], raw = x;
            (void)qi, (void)kv, (void)raw;
            SCORE;
            x = EXP(x - base);
            if (masked) x = VISIBLE(qi, kv) ? x : 0;
            REAL slope = x * (grad[j] - mean);
            row[j] = x;
            DERIVATIVE;
            if (masked) slope = VISIBLE(qi, kv) ? slope : 0; /* what was skipped is anything */
            grad[j] = slope;
        }
    }
}
static __attribute__((noinline)) void slopes_of_tile(char *const *p, int batch, int head, int query,
                                                     int queries, int key, int keys,
                                                     const REAL *query_tile, const REAL *out_tile,
                                                     const REAL *keys_t, const REAL *values_t,
                                                     const REAL *lse, const REAL *delta,
                                                     REAL *scores, REAL *grads) {
    POSITIONS;
    long rows = (queries + MR - 1) / MR * MR, offset = key - SHIFT - query;
    multiply(query_tile, HEAD_WIDTH, 1, keys_t, scores, rows, KEYS, HEAD_DIM, 0, CAUSAL * 3,
             offset);
    multiply(out_tile, VALUE_WIDTH, 1, values_t, grads, rows, KEYS, VALUE_DIM, 0, CAUSAL * 3,
             offset);
    int last_query = query + queries - 1;
    (void)last_query;
    if (NEEDS_MASK(query, last_query, key, keys))
        slopes_of_rows(p, batch, head, query, queries, key, keys, lse, delta, scores, grads, 1);
    else
        slopes_of_rows(p, batch, head, query, queries, key, keys, lse, delta, scores, grads, 0);
}
/* Load the tiles of a query block; delta = rowsum(do o); a row without keys gets a large lse. */
static void load_queries(char *const *p, int batch, int head, int query, int queries,
                         REAL *query_tile, REAL *out_tile, REAL *lse, REAL *delta) {
    const ELEMENT *q = ROW_OF(const ELEMENT, Q, head, query);
    const ELEMENT *o = ROW_OF(const ELEMENT, O, head, query);
    const ELEMENT *g = ROW_OF(const ELEMENT, G, head, query);
    const LSE_ELEMENT *from = ROW_OF(const LSE_ELEMENT, LSE, head, query);
    long rows = (queries + MR - 1) / MR * MR;
    load_tile(q, Q_SEQ, Q_DIM, queries, HEAD_DIM, query_tile, rows, HEAD_WIDTH, SCALE);
    load_tile(g, G_SEQ, G_DIM, queries, VALUE_DIM, out_tile, rows, VALUE_WIDTH, 1);
    REAL parts[QUERIES * LANES] ALIGNED, turned[QUERIES * LANES] ALIGNED;
    for (int i = 0; i < queries; i++) {
        vec sum = {0};
        REAL row[VALUE_WIDTH] ALIGNED;
        load_tile(o + i * O_SEQ, 0, O_DIM, 1, VALUE_DIM, row, 1, VALUE_WIDTH, 1);
        for (int d = 0; d < VALUE_WIDTH; d += LANES)
            sum += *(vec *)(row + d) * *(const vec *)(out_tile + i * VALUE_WIDTH + d);
        *(vec *)(parts + i * LANES) = sum;
    }
    for (int i = queries * LANES; i < QUERIES * LANES; i++) parts[i] = 0;
    transpose(parts, QUERIES, LANES, turned);
    for (int i = 0; i < QUERIES; i++) delta[i] = 0;
    for (int d = 0; d < LANES; d++)
        for (int i = 0; i < QUERIES; i++) delta[i] += turned[d * QUERIES + i];
    for (int i = 0; i < queries; i++) {
        lse[i] = from[i * LSE_SEQ];
        if (lse[i] == -__builtin_inff()) lse[i] = 3e38f;
    }
}
