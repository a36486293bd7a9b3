/* Forward: a block is a tile of queries of one head. Gives o and lse. */
#include "attention_simt.cuh"

static __device__ __forceinline__ void score_tile(const arguments &a, int batch, int head,
                                                  int query, int key, int keys,
                                                  REAL (&score)[EACH][EACH]) {
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    CAPTURES;
    POSITIONS;
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) {
            int qi = query + ty + 16 * i, kv = key + tx + 16 * j;
            REAL x = score[i][j];
            if (kv < key + keys && qi < SEQ && VISIBLE(qi, kv)) {
                SCORE;
                x = x < LOWEST ? LOWEST : x;
            } else
                x = LOWEST;
            score[i][j] = x;
        }
}
extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    extern __shared__ REAL shared[];
    POSITIONS;
    REAL *queries_tile = shared, *keys_tile = queries_tile + TILE * HEAD_ROW;
    REAL *values_tile = keys_tile + TILE * HEAD_ROW;
    REAL *probabilities = values_tile + TILE * VALUE_ROW;
    int block = blockIdx.x % QUERY_TILES, head = blockIdx.x / QUERY_TILES % HEADS;
    int batch = blockIdx.x / (QUERY_TILES * HEADS), kv_head = head / GROUP;
    int query = (QUERY_TILES - 1 - block) * TILE; /* the longest causal rows first */
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    int queries = SEQ - query < TILE ? SEQ - query : TILE;
    int last_query = query + queries - 1, end = END_KEY(last_query);
    (void)last_query;
    const ELEMENT *k = HEAD_OF(const ELEMENT, K, kv_head);
    const ELEMENT *v = HEAD_OF(const ELEMENT, V, kv_head);
    load_tile(queries_tile, HEAD_ROW, ROW_OF(const ELEMENT, Q, head, query), Q_SEQ, Q_DIM, queries,
              HEAD_DIM, (REAL)SCALE);
    REAL out[EACH][VALUE_EACH] = {}, row_largest[EACH], row_total[EACH];
    for (int i = 0; i < EACH; i++) row_largest[i] = LOWEST, row_total[i] = 0;
    for (int key = FIRST_KEY(query) / TILE * TILE; key < end; key += TILE) {
        int keys = end - key < TILE ? end - key : TILE;
        __syncthreads();
        load_tile(keys_tile, HEAD_ROW, k + KEY_ROW(key) * K_SEQ, K_SEQ, K_DIM, keys, HEAD_DIM, 1);
        load_tile(values_tile, VALUE_ROW, v + KEY_ROW(key) * V_SEQ, V_SEQ, V_DIM, keys, VALUE_DIM,
                  1);
        __syncthreads();
        REAL score[EACH][EACH] = {};
        multiply(score, queries_tile, HEAD_ROW, 1, keys_tile, HEAD_ROW, 1, TILE, HEAD_DIM);
        score_tile(a, batch, head, query, key, keys, score);
        for (int i = 0; i < EACH; i++) {
            REAL next = row_largest[i], sum = 0;
            for (int j = 0; j < EACH; j++) next = score[i][j] > next ? score[i][j] : next;
            next = row_max(next);
            REAL base = next <= LOWEST ? 0 : next; /* a row without keys so far */
            REAL rescale = EXP(row_largest[i] - base);
            row_largest[i] = next;
            for (int j = 0; j < EACH; j++) {
                REAL x = EXP(score[i][j] - base);
                probabilities[(ty + 16 * i) * TILE_ROW + tx + 16 * j] = x;
                sum += x;
            }
            row_total[i] = row_total[i] * rescale + row_sum(sum);
            for (int j = 0; j < VALUE_EACH; j++) out[i][j] *= rescale;
        }
        __syncwarp();
        multiply(out, probabilities, TILE_ROW, 1, values_tile, 1, VALUE_ROW, VALUE_DIM, keys);
    }
    for (int i = 0; i < EACH; i++) {
        int qi = query + ty + 16 * i;
        ELEMENT *o = ROW_OF(ELEMENT, O, head, qi);
        REAL inverse = row_total[i] == 0 ? 0 : 1 / row_total[i];
        for (int j = 0; j < VALUE_EACH; j++)
            if (qi < SEQ && tx + 16 * j < VALUE_DIM)
                o[(tx + 16 * j) * O_DIM] = STORE(out[i][j] * inverse);
        LSE_ELEMENT *lse = ROW_OF(LSE_ELEMENT, LSE, head, qi);
        if (tx == 0 && qi < SEQ)
            *lse = row_total[i] == 0 ? -ML_INF : row_largest[i] + LOG(row_total[i]);
    }
}
