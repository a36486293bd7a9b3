/* CACHED_ATTENTION on the CPU. Few queries (NARROW): each key is read once, widened, and multiplied
 * with all of them; a decoding step then runs at the speed of memory. More: products of tiles, with
 * the scores transposed, [key][query], as in attention_forward.c. Where the heads of a key lie side
 * by side in the pools, a unit takes TOGETHER heads, so that memory is read in order. */
#ifndef MLUA_EMBEDDED
#include "prelude.h"
#define ENTRY cached_attention
#define EXP ml_exp_f32
#define NARROW 1
#define TOGETHER 1
#define KEYS 64
#define HEAD_WIDTH 128 /* padded; with NARROW to two vectors */
#define VALUE_WIDTH 128
#endif
#include "attention_tiles.h"
#include "cached_attention_operands.h"

#define unit NAME(unit)
#define begin_unit NAME(begin_unit)
#define find_rows NAME(find_rows)
#define score_key NAME(score_key)
#define score_keys NAME(score_keys)
#define add_values NAME(add_values)
#define rescale_rows NAME(rescale_rows)
#define write_query NAME(write_query)
#define add_keys NAME(add_keys)
#define compute_unit NAME(compute_unit)

/* Scores [key][query] of wide units, [query][key] of narrow ones. */
#if NARROW
#define AT_SCORE(c, j) ((c)*KEYS + (j))
#define AT_OUT(c, d) ((c)*VALUE_WIDTH + (d))
#else
#define AT_SCORE(c, j) ((j)*QUERIES + (c))
#define AT_OUT(c, d) ((d)*QUERIES + (c))
#endif

typedef struct {
    char *const *p;
    const int *table;
    long row, kv_head, first, queries, split; /* `first` query of `queries` */
    long start, begin, end;                   /* keys */
    const long *pool_row;                     /* of each key of a tile */
    REAL q[QUERIES * HEAD_WIDTH] ALIGNED;     /* [query][dimension], wide: [dimension][query] */
    REAL scores[KEYS * QUERIES] ALIGNED, out[QUERIES * VALUE_WIDTH] ALIGNED;
    REAL largest[QUERIES] ALIGNED, sum[QUERIES] ALIGNED;
} unit;

static void begin_unit(unit *u, long number, long head_of_unit) {
    char *const *p = u->p;
    u->split = number % SPLITS, number /= SPLITS;
    u->first = number % QUERY_BLOCKS * QUERIES, number /= QUERY_BLOCKS;
    u->kv_head = number % (KV_HEADS / TOGETHER) * TOGETHER + head_of_unit;
    u->row = number / (KV_HEADS / TOGETHER);
    u->queries = ALL_QUERIES - u->first < QUERIES ? ALL_QUERIES - u->first : QUERIES;
    u->table = (const int *)p[3] + u->row * TABLE_ROW;
    u->start = ((const int *)p[4])[u->row * START_ROW];
    const long length = ((const int *)p[5])[u->row * LENGTH_ROW];
    const long first = u->first / GROUP, last = (u->first + u->queries - 1) / GROUP;
    const long begin = FIRST_KEY(u->start, length, first), end = END_KEY(u->start, length, last);
    const long keys = end > begin ? end - begin : 0;
    u->begin = begin + keys * u->split / SPLITS;
    u->end = begin + keys * (u->split + 1) / SPLITS;
    (void)first, (void)last;
    for (long c = 0; c < QUERIES; c++) u->largest[c] = LOWEST, u->sum[c] = 0;
    for (long i = 0; i < QUERIES * VALUE_WIDTH; i++) u->out[i] = 0;
    for (long c = 0; c < QUERIES; c++) {
        const long query = u->first + c, head = u->kv_head * GROUP + query % GROUP;
        const QUERY *q = (const QUERY *)p[0] + Q_OF(u->row, head, (query / GROUP));
        for (long d = 0; d < HEAD_WIDTH; d++)
            u->q[NARROW ? c * HEAD_WIDTH + d : d * QUERIES + c] =
                c < u->queries && d < HEAD_DIM ? QUERY_LOAD(q[d * Q_DIM]) * SCALE : 0;
    }
}

/* Where keys key .. key + keys - 1 lie. */
static void find_rows(const unit *u, long key, long keys, long *pool_row) {
    for (long j = 0; j < keys; j++) {
        const long row =
            (long)u->table[(key + j) / BLOCK % COLUMNS * TABLE_COLUMN] * BLOCK + (key + j) % BLOCK;
        pool_row[j] = row >= 0 && row < POOL ? row : 0;
    }
}

/* The score function and the mask, of keys from `key` on. */
static void score_keys(unit *u, long key, long keys) {
    char *const *p = u->p;
    const long row = u->row;
    for (long c = 0; c < u->queries; c++) {
        const long head = u->kv_head * GROUP + (u->first + c) % GROUP, i = (u->first + c) / GROUP;
        const long position = u->start + i;
        if (!SCORED && (!CAUSAL || position >= key + keys - 1) &&
            (!WINDOW || position - key < WINDOW))
            continue;
        for (long j = 0; j < keys; j++) {
            const long kv = key + j, pool_row = u->pool_row[j];
            REAL x = u->scores[AT_SCORE(c, j)];
            SCORE;
            x = x < LOWEST ? LOWEST : x;
            u->scores[AT_SCORE(c, j)] = VISIBLE(position, kv) ? x : LOWEST;
            (void)pool_row;
        }
        (void)head;
    }
    (void)p, (void)row;
}

/* The scores become exponentials relative to the largest so far, to which `out` and `sum` are
 * brought. */
static void rescale_rows(unit *u, long keys) {
    REAL next[QUERIES] ALIGNED, rescale[QUERIES] ALIGNED;
    for (long c = 0; c < QUERIES; c++) next[c] = u->largest[c];
#if NARROW
    for (long c = 0; c < QUERIES; c++)
        for (long j = 0; j < keys; j++) {
            const REAL x = u->scores[AT_SCORE(c, j)];
            next[c] = x > next[c] ? x : next[c];
        }
#else
    for (long j = 0; j < keys; j++)
        for (long c = 0; c < QUERIES; c++) {
            const REAL x = u->scores[AT_SCORE(c, j)];
            next[c] = x > next[c] ? x : next[c];
        }
#endif
    for (long c = 0; c < QUERIES; c++) {
        const REAL base = next[c] <= LOWEST ? 0 : next[c]; /* a query without keys so far */
        rescale[c] = EXP(u->largest[c] - base);
        u->largest[c] = next[c];
        next[c] = base;
        u->sum[c] *= rescale[c];
    }
#if NARROW
    for (long c = 0; c < QUERIES; c++) {
        for (long j = 0; j < keys; j++)
            u->scores[AT_SCORE(c, j)] = EXP(u->scores[AT_SCORE(c, j)] - next[c]);
        for (long j = 0; j < keys; j++) u->sum[c] += u->scores[AT_SCORE(c, j)];
        for (long d = 0; d < VALUE_WIDTH; d++) u->out[AT_OUT(c, d)] *= rescale[c];
    }
#else
    for (long j = 0; j < keys; j++)
        for (long c = 0; c < QUERIES; c++) {
            const REAL x = EXP(u->scores[AT_SCORE(c, j)] - next[c]);
            u->scores[AT_SCORE(c, j)] = x;
            u->sum[c] += x;
        }
    for (long d = 0; d < VALUE_WIDTH; d++)
        for (long c = 0; c < QUERIES; c++) u->out[AT_OUT(c, d)] *= rescale[c];
#endif
}

#if NARROW
/* scores[c][j] = q[c] . k[j], for as many keys at a time as a vector has lanes: their sums by lanes
 * are transposed and added up. */
static void score_key(unit *u, const ELEMENT *k, long keys) {
    REAL key[HEAD_WIDTH] ALIGNED, part[QUERIES][LANES * LANES] ALIGNED,
        turned[LANES * LANES] ALIGNED;
    for (long first = 0; first < keys; first += LANES) {
        for (long j = 0; j < LANES && first + j < keys; j++) {
            load_tile(k + u->pool_row[first + j] * K_POOL, 0, K_DIM, 1, HEAD_DIM, key, 1,
                      HEAD_WIDTH, 1);
            for (long c = 0; c < QUERIES; c++) {
                const vec *q = (const vec *)(u->q + c * HEAD_WIDTH), *x = (const vec *)key;
                vec even = {0}, odd = {0};
                for (long d = 0; d < HEAD_WIDTH / LANES; d += 2)
                    even += q[d] * x[d], odd += q[d + 1] * x[d + 1];
                ((vec *)part[c])[j] = even + odd;
            }
        }
        for (long c = 0; c < QUERIES; c++) {
            transpose(part[c], LANES, LANES, turned);
            vec sum = {0};
            for (long lane = 0; lane < LANES; lane++) sum += ((vec *)turned)[lane];
            *(vec *)(u->scores + AT_SCORE(c, first)) = sum;
        }
    }
}
static void add_values(unit *u, const ELEMENT *v, long keys) {
    REAL value[4][VALUE_WIDTH] ALIGNED;
    for (long first = 0; first < keys; first += 4) {
        for (long j = 0; j < 4; j++) /* behind the last one zeros */
            load_tile(v + (first + j < keys ? u->pool_row[first + j] : 0) * V_POOL, 0, V_DIM,
                      first + j < keys, VALUE_DIM, value[j], 1, VALUE_WIDTH, 1);
        for (long c = 0; c < QUERIES; c++) {
            REAL weight[4];
            for (long j = 0; j < 4; j++)
                weight[j] = first + j < keys ? u->scores[AT_SCORE(c, first + j)] : 0;
            vec *out = (vec *)(u->out + c * VALUE_WIDTH);
            for (long d = 0; d < VALUE_WIDTH / LANES; d++)
                out[d] += weight[0] * ((vec *)value[0])[d] + weight[1] * ((vec *)value[1])[d] +
                          weight[2] * ((vec *)value[2])[d] + weight[3] * ((vec *)value[3])[d];
        }
    }
}
#else
static void score_key(unit *u, const ELEMENT *k, long keys) {
    REAL tile[KEYS * HEAD_WIDTH] ALIGNED;
    const long padded = (keys + MR - 1) / MR * MR;
    for (long j = 0; j < padded; j++)
        load_tile(k + (j < keys ? u->pool_row[j] : 0) * K_POOL, 0, K_DIM, j < keys, HEAD_DIM,
                  tile + j * HEAD_WIDTH, 1, HEAD_WIDTH, 1);
    multiply(tile, HEAD_WIDTH, 1, u->q, u->scores, padded, QUERIES, HEAD_DIM, 0, 0, 0);
}
static void add_values(unit *u, const ELEMENT *v, long keys) {
    REAL tile[KEYS * VALUE_WIDTH] ALIGNED;
    for (long j = 0; j < keys; j++)
        load_tile(v + u->pool_row[j] * V_POOL, 0, V_DIM, 1, VALUE_DIM, tile + j * VALUE_WIDTH, 1,
                  VALUE_WIDTH, 1);
    multiply(tile, 1, VALUE_WIDTH, u->scores, u->out, VALUE_WIDTH, QUERIES, keys, 1, 0, 0);
}
#endif

static void write_query(const unit *u, long c) {
    const long head = u->kv_head * GROUP + (u->first + c) % GROUP, i = (u->first + c) / GROUP;
#if SPLITS > 1
    REAL *to = (REAL *)u->p[PARTIAL_AT] + PART_OF(u->row, head, i, u->split);
    for (long d = 0; d < VALUE_DIM; d++) to[d] = u->out[AT_OUT(c, d)];
    to[VALUE_DIM] = u->largest[c], to[VALUE_DIM + 1] = u->sum[c];
#else
    QUERY *o = (QUERY *)u->p[O_AT] + O_OF(u->row, head, i);
    const REAL inverse = u->sum[c] == 0 ? 0 : 1 / u->sum[c];
    for (long d = 0; d < VALUE_DIM; d++) o[d * O_DIM] = QUERY_STORE(u->out[AT_OUT(c, d)] * inverse);
#endif
}

static void add_keys(unit *u, long key, long keys) {
    score_key(u, (const ELEMENT *)u->p[1] + u->kv_head * K_HEAD, keys);
    score_keys(u, key, keys);
    rescale_rows(u, keys);
    add_values(u, (const ELEMENT *)u->p[2] + u->kv_head * V_HEAD, keys);
}

static void compute_unit(unit *u) {
    long pool_row[KEYS];
    for (long h = 0; h < TOGETHER; h++) u[h].pool_row = pool_row;
    for (long key = u->begin; key < u->end; key += KEYS) {
        const long keys = u->end - key < KEYS ? u->end - key : KEYS;
        find_rows(u, key, keys, pool_row);
        for (long h = 0; h < TOGETHER; h++) add_keys(u + h, key, keys);
    }
    for (long h = 0; h < TOGETHER; h++)
        for (long c = 0; c < u->queries; c++) write_query(u + h, c);
}

void ENTRY(char *const *p, const long long *s, long long begin, long long end) {
    (void)s;
    unit u[TOGETHER];
    for (long long number = begin; number < end; number++) {
        for (long h = 0; h < TOGETHER; h++) {
            u[h].p = p;
            begin_unit(u + h, (long)number, h);
        }
        compute_unit(u);
    }
}
