/* dk and dv of one block of keys, summed over the heads of the group; WHOLE: dq too, to which the
 * blocks of keys of a unit add in order. */
#ifndef MLUA_EMBEDDED
#define WHOLE 0
#endif
#include "attention_grad.h"

static void compute_block(char *const *p, int batch, int kv_head, int key) {
    POSITIONS;
    REAL keys_t[HEAD_WIDTH * KEYS] ALIGNED;
    REAL values_t[VALUE_WIDTH * KEYS] ALIGNED;
    REAL key_tile[KEYS * HEAD_WIDTH] ALIGNED;
    REAL query_tile[QUERIES * HEAD_WIDTH] ALIGNED;
    REAL out_tile[QUERIES * VALUE_WIDTH] ALIGNED;
    REAL scores[QUERIES * KEYS] ALIGNED, grads[QUERIES * KEYS] ALIGNED;
    REAL dk_tile[KEYS * HEAD_WIDTH] ALIGNED;
    REAL dv_tile[KEYS * VALUE_WIDTH] ALIGNED;
    REAL dq_tile[QUERIES * HEAD_WIDTH] ALIGNED, lse[QUERIES] ALIGNED;
    REAL delta[QUERIES] ALIGNED;
    int keys = KV_SEQ - key < KEYS ? KV_SEQ - key : KEYS;
    const ELEMENT *k = HEAD_OF(const ELEMENT, K, kv_head);
    const ELEMENT *v = HEAD_OF(const ELEMENT, V, kv_head);
    k += KEY_ROW(key) * K_SEQ, v += KEY_ROW(key) * V_SEQ;
    ELEMENT *dk = ROW_OF(ELEMENT, DK, kv_head, KEY_ROW(key));
    ELEMENT *dv = ROW_OF(ELEMENT, DV, kv_head, KEY_ROW(key));
    load_tile(v, V_SEQ, V_DIM, keys, VALUE_DIM, dv_tile, KEYS, VALUE_WIDTH, 1);
    transpose(dv_tile, KEYS, VALUE_WIDTH, values_t);
    load_tile(k, K_SEQ, K_DIM, keys, HEAD_DIM, key_tile, KEYS, HEAD_WIDTH, 1);
    transpose(key_tile, KEYS, HEAD_WIDTH, keys_t);
    for (int i = 0; i < KEYS * HEAD_WIDTH; i++) dk_tile[i] = 0;
    for (int i = 0; i < KEYS * VALUE_WIDTH; i++) dv_tile[i] = 0;
    int last_key = key + keys - 1;
    for (int head = kv_head * GROUP; head < (kv_head + 1) * GROUP; head++) {
        int end_query = END_QUERY(last_key);
        for (int query = FIRST_QUERY(key); query < end_query; query += QUERIES) {
            int queries = SEQ - query < QUERIES ? SEQ - query : QUERIES;
            long offset = key - SHIFT - query;
            load_queries(p, batch, head, query, queries, query_tile, out_tile, lse, delta);
            slopes_of_tile(p, batch, head, query, queries, key, keys, query_tile, out_tile, keys_t,
                           values_t, lse, delta, scores, grads);
            multiply(scores, 1, KEYS, out_tile, dv_tile, KEYS, VALUE_WIDTH, queries, 1, CAUSAL * 4,
                     offset);
            multiply(grads, 1, KEYS, query_tile, dk_tile, KEYS, HEAD_WIDTH, queries, 1, CAUSAL * 4,
                     offset);
            if (!WHOLE) continue;
            multiply(grads, KEYS, 1, key_tile, dq_tile, (queries + MR - 1) / MR * MR, HEAD_WIDTH,
                     keys, 0, CAUSAL * 5, offset);
            ELEMENT *dq = ROW_OF(ELEMENT, DQ, head, query);
            for (int i = 0; i < queries; i++)
                for (int d = 0; d < HEAD_DIM; d++)
                    dq[i * DQ_SEQ + d * DQ_DIM] += dq_tile[i * HEAD_WIDTH + d] * SCALE;
        }
    }
    for (int i = 0; i < keys; i++) {
        for (int d = 0; d < HEAD_DIM; d++)
            dk[i * DK_SEQ + d * DK_DIM] = STORE(dk_tile[i * HEAD_WIDTH + d]);
        for (int d = 0; d < VALUE_DIM; d++)
            dv[i * DV_SEQ + d * DV_DIM] = STORE(dv_tile[i * VALUE_WIDTH + d]);
    }
    (void)last_key;
}
#if WHOLE
void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        int kv_head = (int)(unit % KV_HEADS), batch = (int)(unit / KV_HEADS);
        for (int head = kv_head * GROUP; head < (kv_head + 1) * GROUP; head++) {
            ELEMENT *dq = HEAD_OF(ELEMENT, DQ, head);
            for (int i = 0; i < SEQ; i++)
                for (int d = 0; d < HEAD_DIM; d++) dq[i * DQ_SEQ + d * DQ_DIM] = 0;
        }
        for (int key = 0; key < KV_SEQ; key += KEYS) compute_block(p, batch, kv_head, key);
    }
}
#else
void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        int block = (int)(unit % KEY_BLOCKS), kv_head = (int)(unit / KEY_BLOCKS % KV_HEADS);
        compute_block(p, (int)(unit / ((long long)KEY_BLOCKS * KV_HEADS)), kv_head, block * KEYS);
    }
}
#endif
