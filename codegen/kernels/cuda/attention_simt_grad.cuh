/* One tile of the gradient, for both kernels: these are of query tiles and of key tiles, so that no
 * sum needs atomics. */
#pragma once
#include "attention_grad.cuh"
#include "attention_simt.cuh"

/* P (probabilities) and dS (d loss / d score), [query][key], from tiles of q (scaled), k, v, dO. */
static __device__ __forceinline__ void
slopes_of_tile(const arguments &a, int batch, int head, int query, int key, int keys,
               const REAL *queries_tile, const REAL *grad_out_tile, const REAL *keys_tile,
               const REAL *values_tile, const REAL *lse, const REAL *delta, REAL *probabilities,
               REAL *slopes) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    CAPTURES;
    POSITIONS;
    REAL score[EACH][EACH] = {}, grad[EACH][EACH] = {};
    multiply(score, queries_tile, HEAD_ROW, 1, keys_tile, HEAD_ROW, 1, TILE, HEAD_DIM);
    multiply(grad, grad_out_tile, VALUE_ROW, 1, values_tile, VALUE_ROW, 1, TILE, VALUE_DIM);
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            int qi = query + ty + 16 * i, kv = key + tx + 16 * j;
            REAL x = score[i][j], raw = x, slope = 0;
            (void)raw;
            if (kv < key + keys && qi < SEQ && VISIBLE(qi, kv)) {
                SCORE;
                x = EXP(x - lse[ty + 16 * i]);
                slope = x * (grad[i][j] - delta[ty + 16 * i]);
                DERIVATIVE;
            } else
                x = 0;
            int at = (ty + 16 * i) * TILE_ROW + tx + 16 * j;
            probabilities[at] = x;
            slopes[at] = slope;
        }
}
/* q, do and statistics of a query block; a row without keys gets a large lse. */
static __device__ __forceinline__ void load_queries(const arguments &a, int batch, int head,
                                                    int query, REAL *queries_tile,
                                                    REAL *grad_out_tile, REAL *lse) {
    int queries = SEQ - query < TILE ? SEQ - query : TILE;
    load_tile(queries_tile, HEAD_ROW, ROW_OF(const ELEMENT, Q, head, query), Q_SEQ, Q_DIM, queries,
              HEAD_DIM, (REAL)SCALE);
    load_tile(grad_out_tile, VALUE_ROW, ROW_OF(const ELEMENT, G, head, query), G_SEQ, G_DIM,
              queries, VALUE_DIM, 1);
    if (threadIdx.x < TILE) {
        REAL x = 0;
        if ((int)threadIdx.x < queries)
            x = HEAD_OF(const LSE_ELEMENT, LSE, head)[(query + threadIdx.x) * LSE_SEQ];
        lse[threadIdx.x] = x == -ML_INF ? -(LOWEST) : x;
    }
}
