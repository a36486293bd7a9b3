/* Forward: o, and lse, the logarithm of the sum of the exponentials of a row. */
#include "attention.h"

#if HEAD_WIDTH > VALUE_WIDTH
#define ROW_WIDTH HEAD_WIDTH
#else
#define ROW_WIDTH VALUE_WIDTH
#endif
#if CLAMPED && SEQ % QUERIES
#define USED_QUERIES queries
#else
#define USED_QUERIES QUERIES
#endif

/* Scores of a tile: scaled already; score function, mask, largest of each query. */
INLINE void score_tile(char *const *p, int batch, int head, int query, int queries, int key,
                       int keys, REAL *scores, REAL *next, const int masked) {
    CAPTURES;
    POSITIONS;
    (void)p, (void)batch, (void)head, (void)queries;
    for (int i = 0; i < keys; i++) {
        REAL *row = scores + i * QUERIES;
        int kv = key + i;
#pragma GCC ivdep
        for (int j = 0; j < USED_QUERIES; j++) {
            int qi = query + j;
            REAL x = row[j];
            (void)qi, (void)kv;
            SCORE;
            x = x < LOWEST ? LOWEST : x;
            if (masked) x = VISIBLE(qi, kv) ? x : LOWEST;
            row[j] = x;
            next[j] = x > next[j] ? x : next[j];
        }
    }
}
static __attribute__((noinline)) void softmax_keys(char *const *p, int batch, int head, int query,
                                                   int queries, int key, int keys,
                                                   const REAL *query_tile, const REAL *key_tile,
                                                   const REAL *value_tile, REAL *scores,
                                                   REAL *row_max, REAL *row_sum, REAL *out) {
    POSITIONS;
    REAL next[QUERIES] ALIGNED, rescale[QUERIES] ALIGNED;
    int last_query = query + queries - 1;
    (void)last_query;
    multiply(key_tile, HEAD_WIDTH, 1, query_tile, scores, (keys + MR - 1) / MR * MR, QUERIES,
             HEAD_DIM, 0, CAUSAL * 1, key - SHIFT - query);
    for (int j = 0; j < QUERIES; j++) next[j] = row_max[j];
    if (NEEDS_MASK(query, last_query, key, keys))
        score_tile(p, batch, head, query, queries, key, keys, scores, next, 1);
    else
        score_tile(p, batch, head, query, queries, key, keys, scores, next, 0);
    for (int j = 0; j < QUERIES; j++) {
        REAL base = next[j] <= LOWEST ? 0 : next[j]; /* a row without keys so far */
        rescale[j] = EXP(row_max[j] - base);
        row_max[j] = next[j];
        next[j] = base;
        row_sum[j] *= rescale[j];
    }
    for (int i = 0; i < keys; i++) {
        REAL *row = scores + i * QUERIES;
#pragma GCC ivdep
        for (int j = 0; j < QUERIES; j++) {
            REAL x = EXP(row[j] - next[j]);
            row[j] = x;
            row_sum[j] += x;
        }
    }
    for (int d = 0; d < VALUE_DIM; d++)
        for (int j = 0; j < QUERIES; j++) out[d * QUERIES + j] *= rescale[j];
    multiply(value_tile, 1, VALUE_WIDTH, scores, out, VALUE_WIDTH, QUERIES, keys, 1, CAUSAL * 2,
             key - SHIFT - query);
}
static void compute_block(char *const *p, int batch, int head, int query) {
    POSITIONS;
    REAL query_tile[HEAD_WIDTH * QUERIES] ALIGNED;
    REAL key_tile[KEYS * HEAD_WIDTH] ALIGNED;
    REAL value_tile[KEYS * VALUE_WIDTH] ALIGNED;
    REAL scores[KEYS * QUERIES] ALIGNED, out[VALUE_WIDTH * QUERIES] ALIGNED;
    REAL row_max[QUERIES] ALIGNED, row_sum[QUERIES] ALIGNED;
    REAL rows[QUERIES * ROW_WIDTH] ALIGNED; /* q in row-major order; at last o */
    int queries = SEQ - query < QUERIES ? SEQ - query : QUERIES;
    int kv_head = head / GROUP;
    const ELEMENT *q = ROW_OF(const ELEMENT, Q, head, query);
    const ELEMENT *k = HEAD_OF(const ELEMENT, K, kv_head);
    const ELEMENT *v = HEAD_OF(const ELEMENT, V, kv_head);
    ELEMENT *o = ROW_OF(ELEMENT, O, head, query);
    LSE_ELEMENT *lse = ROW_OF(LSE_ELEMENT, LSE, head, query);
    load_tile(q, Q_SEQ, Q_DIM, queries, HEAD_DIM, rows, QUERIES, HEAD_WIDTH, SCALE);
    transpose(rows, QUERIES, HEAD_WIDTH, query_tile);
    for (int j = 0; j < QUERIES; j++) row_max[j] = LOWEST, row_sum[j] = 0;
    for (int i = 0; i < VALUE_WIDTH * QUERIES; i++) out[i] = 0;
    int last_query = query + queries - 1;
    int first_key = FIRST_KEY(query) / KEYS * KEYS, end_key = END_KEY(last_query);
    for (int key = first_key; key < end_key; key += KEYS) {
        int keys = end_key - key < KEYS ? end_key - key : KEYS;
        load_tile(k + KEY_ROW(key) * K_SEQ, K_SEQ, K_DIM, keys, HEAD_DIM, key_tile,
                  (keys + MR - 1) / MR * MR, HEAD_WIDTH, 1);
        load_tile(v + KEY_ROW(key) * V_SEQ, V_SEQ, V_DIM, keys, VALUE_DIM, value_tile, keys,
                  VALUE_WIDTH, 1);
        softmax_keys(p, batch, head, query, queries, key, keys, query_tile, key_tile, value_tile,
                     scores, row_max, row_sum, out);
    }
    transpose(out, VALUE_WIDTH, QUERIES, rows);
    for (int j = 0; j < queries; j++) {
        /* a row without keys gives 0 and a logsumexp of -infinity; NaN stays NaN */
        REAL inverse = row_sum[j] == 0 ? 0 : 1 / row_sum[j];
        for (int d = 0; d < VALUE_DIM; d++)
            o[j * O_SEQ + d * O_DIM] = STORE(rows[j * VALUE_WIDTH + d] * inverse);
        lse[j * LSE_SEQ] = row_sum[j] == 0 ? -__builtin_inff() : row_max[j] + LOG(row_sum[j]);
    }
    (void)last_query;
}
void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    for (long long unit = begin; unit < end; unit++) {
        int block = (int)(unit % QUERY_BLOCKS), head = (int)(unit / QUERY_BLOCKS % HEADS);
        compute_block(p, (int)(unit / ((long long)QUERY_BLOCKS * HEADS)), head, block * QUERIES);
    }
}
