/* dq by tiles of queries, and delta, the row sums of dO o, for the next kernel. */
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
    int block = blockIdx.x % QUERY_TILES, head = blockIdx.x / QUERY_TILES % HEADS;
    int batch = blockIdx.x / (QUERY_TILES * HEADS);
    int query = (QUERY_TILES - 1 - block) * TILE; /* the longest causal rows first */
    int kv_head = head / GROUP, ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    int queries = SEQ - query < TILE ? SEQ - query : TILE;
    int last_query = query + queries - 1, end = END_KEY(last_query);
    (void)last_query;
    const ELEMENT *k = HEAD_OF(const ELEMENT, K, kv_head);
    const ELEMENT *v = HEAD_OF(const ELEMENT, V, kv_head);
    const ELEMENT *o = HEAD_OF(const ELEMENT, O, head);
    REAL *deltas = (REAL *)a.p[DELTA_AT] + ((long long)batch * HEADS + head) * SEQ;
    load_queries(a, batch, head, query, queries_tile, grad_out_tile, lse);
    __syncthreads();
    for (int i = ty; i < TILE; i += 16) {
        REAL sum = 0;
        for (int d = tx; d < VALUE_DIM; d += 16)
            if (i < queries)
                sum += (REAL)LOAD(o[(query + i) * O_SEQ + d * O_DIM]) *
                       grad_out_tile[i * VALUE_ROW + d];
        sum = row_sum(sum);
        if (tx) continue;
        delta[i] = sum;
        if (i < queries) deltas[query + i] = sum;
    }
    REAL out[EACH][HEAD_EACH] = {};
    for (int key = FIRST_KEY(query) / TILE * TILE; key < end; key += TILE) {
        int keys = end - key < TILE ? end - key : TILE;
        __syncthreads();
        load_tile(keys_tile, HEAD_ROW, k + KEY_ROW(key) * K_SEQ, K_SEQ, K_DIM, keys, HEAD_DIM, 1);
        load_tile(values_tile, VALUE_ROW, v + KEY_ROW(key) * V_SEQ, V_SEQ, V_DIM, keys, VALUE_DIM,
                  1);
        __syncthreads();
        slopes_of_tile(a, batch, head, query, key, keys, queries_tile, grad_out_tile, keys_tile,
                       values_tile, lse, delta, probabilities, slopes);
        __syncwarp();
        multiply(out, slopes, TILE_ROW, 1, keys_tile, 1, HEAD_ROW, HEAD_DIM, keys);
    }
    for (int i = 0; i < EACH; i++) {
        int qi = query + ty + 16 * i;
        ELEMENT *dq = HEAD_OF(ELEMENT, DQ, head);
        dq += qi * DQ_SEQ;
        for (int j = 0; j < HEAD_EACH; j++)
            if (qi < SEQ && tx + 16 * j < HEAD_DIM)
                dq[(tx + 16 * j) * DQ_DIM] = STORE(out[i][j] * (REAL)SCALE);
    }
}
