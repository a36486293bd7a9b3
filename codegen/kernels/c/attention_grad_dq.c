/* dq of one block of queries. */
#include "attention_grad.h"

static void compute_block(char *const *p, int batch, int head, int query) {
    POSITIONS;
    REAL keys_t[HEAD_WIDTH * KEYS] ALIGNED;
    REAL values_t[VALUE_WIDTH * KEYS] ALIGNED;
    REAL key_tile[KEYS * HEAD_WIDTH] ALIGNED;
    REAL value_tile[KEYS * VALUE_WIDTH] ALIGNED;
    REAL query_tile[QUERIES * HEAD_WIDTH] ALIGNED;
    REAL out_tile[QUERIES * VALUE_WIDTH] ALIGNED;
    REAL scores[QUERIES * KEYS] ALIGNED, grads[QUERIES * KEYS] ALIGNED;
    REAL dq_tile[QUERIES * HEAD_WIDTH] ALIGNED, lse[QUERIES] ALIGNED;
    REAL delta[QUERIES] ALIGNED;
    int queries = SEQ - query < QUERIES ? SEQ - query : QUERIES;
    int kv_head = head / GROUP, last_query = query + queries - 1;
    const ELEMENT *k = HEAD_OF(const ELEMENT, K, kv_head);
    const ELEMENT *v = HEAD_OF(const ELEMENT, V, kv_head);
    ELEMENT *dq = ROW_OF(ELEMENT, DQ, head, query);
    load_queries(p, batch, head, query, queries, query_tile, out_tile, lse, delta);
    for (int i = 0; i < QUERIES * HEAD_WIDTH; i++) dq_tile[i] = 0;
    int first_key = FIRST_KEY(query) / KEYS * KEYS, end_key = END_KEY(last_query);
    for (int key = first_key; key < end_key; key += KEYS) {
        int keys = end_key - key < KEYS ? end_key - key : KEYS;
        load_tile(v + KEY_ROW(key) * V_SEQ, V_SEQ, V_DIM, keys, VALUE_DIM, value_tile, KEYS,
                  VALUE_WIDTH, 1);
        transpose(value_tile, KEYS, VALUE_WIDTH, values_t);
        load_tile(k + KEY_ROW(key) * K_SEQ, K_SEQ, K_DIM, keys, HEAD_DIM, key_tile, KEYS,
                  HEAD_WIDTH, 1);
        transpose(key_tile, KEYS, HEAD_WIDTH, keys_t);
        slopes_of_tile(p, batch, head, query, queries, key, keys, query_tile, out_tile, keys_t,
                       values_t, lse, delta, scores, grads);
        multiply(grads, KEYS, 1, key_tile, dq_tile, (queries + MR - 1) / MR * MR, HEAD_WIDTH, keys,
                 1, CAUSAL * 5, key - SHIFT - query);
    }
    for (int i = 0; i < queries; i++)
        for (int d = 0; d < HEAD_DIM; d++)
            dq[i * DQ_SEQ + d * DQ_DIM] = STORE(dq_tile[i * HEAD_WIDTH + d] * SCALE);
    (void)last_query;
}
void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        int block = (int)(unit % QUERY_BLOCKS), head = (int)(unit / QUERY_BLOCKS % HEADS);
        compute_block(p, (int)(unit / ((long long)QUERY_BLOCKS * HEADS)), head, block * QUERIES);
    }
}
