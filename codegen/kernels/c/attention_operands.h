/* The operands of attention, in C and in CUDA.
 *
 * They are q, k, v and, forward, o and lse, the logarithm of the sum of the exponentials of a row's
 * scores; backward o, lse, dO, dq, dk, dv. Each has a stride in elements for rows (SEQ) and
 * columns (DIM), X_HEAD(h), the offset of a head, and X_BATCH(batch), that of a linear batch index.
 * Query head h reads head h / GROUP of k and v. Queries of two PIECES (attention_mask.h) are twice
 * as many heads of half as many rows: piece h % 2 of head h / 2. KEY_ROW(key) is the row of k, v,
 * dk and dv that key `key` has: they may be in the order of ranks, where KEY_RUN keys from each
 * multiple of it on lie side by side.
 *
 * A score function written in Lua comes as statements: CAPTURES declares pointers to the tensors
 * that it reads, for `batch` and `head`; SCORE replaces `x`, the scaled score of query qi and key
 * kv; DERIVATIVE replaces `slope`, d loss / d score, given the score before the function in `raw`.
 * A file that includes this one defines OPERANDS, the array of pointers. */
#pragma once
#ifndef MLUA_EMBEDDED
#define SEQ 1000
#define KV_SEQ 1000
#define HEADS 16
#define KV_HEADS 4
#define GROUP 4
#define HEAD_DIM 128  /* columns of q and k */
#define VALUE_DIM 128 /* columns of v and o */
#define SCALE 0.125f
#define LOWEST -3e38f /* instead of -infinity, whose differences are NaN */
#define Q_AT 0
#define Q_BATCH(batch) (batch * 2048000LL)
#define Q_HEAD(h) (h * 128LL)
#define Q_SEQ 2048LL
#define Q_DIM 1LL
#define K_AT 1
#define K_BATCH(batch) (batch * 512000LL)
#define K_HEAD(h) (h * 128LL)
#define K_SEQ 512LL
#define K_DIM 1LL
#define V_AT 2
#define V_BATCH(batch) (batch * 512000LL)
#define V_HEAD(h) (h * 128LL)
#define V_SEQ 512LL
#define V_DIM 1LL
#define KEY_ROW(key) (key)
#define KEY_RUN 128
#define O_AT 3
#define O_BATCH(batch) (batch * 2048000LL)
#define O_HEAD(h) (h * 128LL)
#define O_SEQ 2048LL
#define O_DIM 1LL
#define LSE_AT 4
#define LSE_BATCH(batch) (batch * 16000LL)
#define LSE_HEAD(h) (h * 1000LL)
#define LSE_SEQ 1LL
#define CAPTURES
#define SCORE
#endif

#include "attention_mask.h"

/* Of a tile of keys, how many from each multiple of that on lie side by side. */
#define RUN_OF(tile) (tile < KEY_RUN ? tile : KEY_RUN)

/* The first element of a head of operand X, and of its row `row`. */
#define HEAD_OF(type, X, h) ((type *)OPERANDS[X##_AT] + X##_BATCH(batch) + X##_HEAD(h))
#define ROW_OF(type, X, h, row)                                                                    \
    ((type *)OPERANDS[X##_AT] + X##_BATCH(batch) + X##_HEAD(h) + row * X##_SEQ)
