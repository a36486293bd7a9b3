/* Further operands of attention's gradient, in C and in CUDA. */
#pragma once
#ifndef MLUA_EMBEDDED
#define DERIVATIVE
#define G_AT 5 /* dO, the gradient of o */
#define G_BATCH(batch) (batch * 2048000LL)
#define G_HEAD(h) (h * 128LL)
#define G_SEQ 2048LL
#define G_DIM 1LL
#define DQ_AT 6
#define DQ_BATCH(batch) (batch * 2048000LL)
#define DQ_HEAD(h) (h * 128LL)
#define DQ_SEQ 2048LL
#define DQ_DIM 1LL
#define DK_AT 7
#define DK_BATCH(batch) (batch * 512000LL)
#define DK_HEAD(h) (h * 128LL)
#define DK_SEQ 512LL
#define DK_DIM 1LL
#define DV_AT 8
#define DV_BATCH(batch) (batch * 512000LL)
#define DV_HEAD(h) (h * 128LL)
#define DV_SEQ 512LL
#define DV_DIM 1LL
#endif
