/* The operands of attention to cached keys and values, in C and in CUDA
 * (runtime/ops/cached_attention/cached_attention.h says what they are).
 *
 * The queries of a row that read one head of keys are numbered c = i * GROUP + (head % GROUP), i
 * being the query's number in the row. A unit of work has up to QUERIES of them and one of SPLITS
 * equal parts of the keys that they see. With one part it writes the result; with more, to
 * PARTIAL, for each query and part: the values of the part, the largest score, and the sum of the
 * exponentials, which cached_attention_merge adds up.
 *
 * SCORE replaces `x`, the scaled score of head `head` of row `row`, query `i` at `position` and key
 * `kv`, which lies in row `pool_row` of the pools. */
#pragma once
#ifndef MLUA_EMBEDDED
#define ROWS 8
#define NEW 1
#define HEADS 32
#define KV_HEADS 8
#define GROUP 4
#define BLOCK 16
#define COLUMNS 64
#define POOL 8192
#define HEAD_DIM 128  /* columns of q and k */
#define VALUE_DIM 128 /* columns of v and o */
#define CAUSAL 1
#define WINDOW 0
#define SCALE 0.125f
#define LOWEST -3e38f /* instead of -infinity, whose differences are NaN */
#define SCORED 0      /* SCORE is not empty */
#define SCORE
#define QUERY float /* the type of q and o in memory */
#define QUERY_LOAD
#define QUERY_STORE
#define ELEMENT float /* that of k and v */
#define LOAD
#define QUERIES 4
#define SPLITS 1
#define Q_ROW 4096LL
#define Q_SEQ 4096LL
#define Q_HEAD 128LL
#define Q_DIM 1LL
#define K_POOL 1024LL
#define K_HEAD 128LL
#define K_DIM 1LL
#define V_POOL 1024LL
#define V_HEAD 128LL
#define V_DIM 1LL
#define O_AT 6
#define O_ROW 4096LL
#define O_SEQ 4096LL
#define O_HEAD 128LL
#define O_DIM 1LL
#define TABLE_ROW 64LL
#define TABLE_COLUMN 1LL
#define START_ROW 1LL
#define LENGTH_ROW 1LL
#define PARTIAL_AT 7
#endif

#define SLOTS (BLOCK * COLUMNS)
#define ALL_QUERIES (GROUP * NEW)
#define QUERY_BLOCKS ((ALL_QUERIES + QUERIES - 1) / QUERIES)
#define PARTIAL_ROW (VALUE_DIM + 2)
#define PART_OF(row, head, i, split)                                                               \
    ((((row * HEADS + head) * NEW + i) * SPLITS + split) * PARTIAL_ROW)
#define Q_OF(row, head, i) (row * Q_ROW + head * Q_HEAD + i * Q_SEQ)
#define O_OF(row, head, i) (row * O_ROW + head * O_HEAD + i * O_SEQ)

/* The keys that queries `first` .. `last` of a row may see: begin .. end - 1. */
#define FIRST_KEY(start, length, first)                                                            \
    (WINDOW && start + first >= WINDOW && start + first - WINDOW + 1 > length - SLOTS              \
         ? start + first - WINDOW + 1                                                              \
     : length > SLOTS ? length - SLOTS                                                             \
                      : 0)
#define END_KEY(start, length, last)                                                               \
    (CAUSAL && start + last + 1 < length ? start + last + 1 : length)
#define VISIBLE(position, kv) (!(CAUSAL && kv > position) && !(WINDOW && position - kv >= WINDOW))
