/* Attention on the CPU: parameters, products of tiles, and what forward and backward share.
 *
 * Forward: a unit is a block of query rows of one head; scores are held transposed, [key][query],
 * so that a vector holds query rows: softmax needs no sums across lanes, and keys and values are
 * read as they are in memory. Backward: tiles are [query][key], k and v are transposed once for
 * each block of keys. All products run through one register-blocked function (attention_tiles.h).
 * Operands, strides and the score function are those of attention_operands.h. */
#pragma once
#ifndef MLUA_EMBEDDED
#define LSE_ELEMENT float
#define STORE
#define EXP ml_exp_f32
#define LOG ml_log_f32
#define CLAMPED 0 /* captured tensors must not be read behind their ends */
#define QUERIES 64 /* rows of tiles, multiples of LANES and MR, as the widths are */
#define KEYS 64
#define HEAD_WIDTH 128
#define VALUE_WIDTH 128
#endif

#define OPERANDS p
#include "attention_tiles.h"
#include "attention_operands.h"

#define QUERY_BLOCKS ((SEQ + QUERIES - 1) / QUERIES)
#define KEY_BLOCKS ((KV_SEQ + KEYS - 1) / KEYS)

#define score_tile NAME(score_tile)
#define softmax_keys NAME(softmax_keys)
#define slopes_of_rows NAME(slopes_of_rows)
#define slopes_of_tile NAME(slopes_of_tile)
#define load_queries NAME(load_queries)
#define compute_block NAME(compute_block)
