/* One tile of the gradient, for both kernels. */
#pragma once
#include "attention_grad.cuh"
#include "attention_mma.cuh"

/* s to probabilities and dp to slopes, the gradients of the scaled products. ROWS_ARE_KEYS: rows of
 * the accumulators are keys, columns queries. lse (in units of log2) and delta by query of the
 * tile. */
template <int M, int N, bool ROWS_ARE_KEYS>
static __device__ __forceinline__ void
slopes_of_tile(const arguments &a, int batch, int head, int row, int column, bool masked,
               const float *lse, const float *delta, float (&s)[M][N][4], float (&dp)[M][N][4]) {
    int lane = threadIdx.x % 32;
    CAPTURES;
    POSITIONS;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int r = m * 16 + i / 2 * 8 + lane / 4, c = n * 8 + lane % 4 * 2 + i % 2;
                int at = ROWS_ARE_KEYS ? c : r; /* which query of the tile */
                int qi = ROWS_ARE_KEYS ? column + c : row + r;
                int kv = ROWS_ARE_KEYS ? row + r : column + c;
                bool hidden = masked && !(kv < KV_SEQ && VISIBLE(qi, kv));
                float x = s[m][n][i], raw = x * SCALE, slope;
                (void)raw, (void)qi, (void)kv;
                if (SCORED) {
                    CLAMP_QUERY;
                    CLAMP_KEY;
                    x = raw;
                    SCORE;
                    x = exp2_approx(x * SCORE_LOG2 - lse[at]);
                    x = hidden ? 0 : x;
                    slope = x * (dp[m][n][i] - delta[at]);
                    DERIVATIVE;
                    slope = hidden ? 0 : slope;
                } else {
                    x = exp2_approx(x * SCORE_LOG2 - lse[at]);
                    x = hidden ? 0 : x;
                    slope = x * (dp[m][n][i] - delta[at]);
                }
                s[m][n][i] = x;
                dp[m][n][i] = slope;
            }
}
