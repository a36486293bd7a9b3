/* dk and dv by tiles of keys, over the query heads that share them. */
#include "attention_simt_grad.cuh"

extern "C" __global__ void __launch_bounds__(256) ENTRY(arguments a) {
    extern __shared__ REAL shared[];
    POSITIONS;
    REAL *queries_tile = shared, *keys_tile = queries_tile + TILE * HEAD_ROW;
    REAL *values_tile = keys_tile + TILE * HEAD_ROW;
    REAL *grad_out_tile = values_tile + TILE * VALUE_ROW;
    REAL *probabilities = grad_out_tile + TILE * VALUE_ROW;
    REAL *slopes = probabilities + TILE * TILE_ROW;
    REAL *lse = slopes + TILE * TILE_ROW, *delta = lse + TILE;
    int key = blockIdx.x % KEY_TILES * TILE, kv_head = blockIdx.x / KEY_TILES % KV_HEADS;
    int batch = blockIdx.x / (KEY_TILES * KV_HEADS);
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    int keys = KV_SEQ - key < TILE ? KV_SEQ - key : TILE;
    int last_key = key + keys - 1;
    (void)last_key;
    const ELEMENT *k = HEAD_OF(const ELEMENT, K, kv_head);
    const ELEMENT *v = HEAD_OF(const ELEMENT, V, kv_head);
    load_tile(keys_tile, HEAD_ROW, k + KEY_ROW(key) * K_SEQ, K_SEQ, K_DIM, keys, HEAD_DIM, 1);
    load_tile(values_tile, VALUE_ROW, v + KEY_ROW(key) * V_SEQ, V_SEQ, V_DIM, keys, VALUE_DIM, 1);
    REAL dk[EACH][HEAD_EACH] = {}, dv[EACH][VALUE_EACH] = {};
    for (int head = kv_head * GROUP; head < (kv_head + 1) * GROUP; head++) {
        int end = END_QUERY(last_key);
        for (int query = FIRST_QUERY(key); query < end; query += TILE) {
            int queries = SEQ - query < TILE ? SEQ - query : TILE;
            __syncthreads();
            load_queries(a, batch, head, query, queries_tile, grad_out_tile, lse);
            if ((int)threadIdx.x < queries)
                delta[threadIdx.x] =
                    ((const REAL *)a.p[DELTA_AT])[((long long)batch * HEADS + head) * SEQ + query +
                                                  threadIdx.x];
            __syncthreads();
            slopes_of_tile(a, batch, head, query, key, keys, queries_tile, grad_out_tile, keys_tile,
                           values_tile, lse, delta, probabilities, slopes);
            __syncthreads();
            multiply(dv, probabilities, 1, TILE_ROW, grad_out_tile, 1, VALUE_ROW, VALUE_DIM,
                     queries);
            multiply(dk, slopes, 1, TILE_ROW, queries_tile, 1, HEAD_ROW, HEAD_DIM, queries);
        }
    }
    for (int i = 0; i < EACH; i++) {
        int kv = key + ty + 16 * i;
        ELEMENT *to_k = ROW_OF(ELEMENT, DK, kv_head, KEY_ROW(kv));
        ELEMENT *to_v = ROW_OF(ELEMENT, DV, kv_head, KEY_ROW(kv));
        if (kv >= KV_SEQ) continue;
        for (int j = 0; j < HEAD_EACH; j++)
            if (tx + 16 * j < HEAD_DIM) to_k[(tx + 16 * j) * DK_DIM] = STORE(dk[i][j]);
        for (int j = 0; j < VALUE_EACH; j++)
            if (tx + 16 * j < VALUE_DIM) to_v[(tx + 16 * j) * DV_DIM] = STORE(dv[i][j]);
    }
}
