/* Kernels whose blocks own queries and read keys and values tile by tile. */
#pragma once
#include "attention_mma.cuh"

#define QUERIES (64 * WARP_TILES) /* rows of a block */
#define QUERY_BLOCKS ((SEQ + QUERIES - 1) / QUERIES)
#define SLOT_BYTES (KEYS * (HEAD_ROW + VALUE_ROW) * 2)

static __device__ __forceinline__ void load_slot(unsigned tiles, const ml_bf16 *k, const ml_bf16 *v,
                                                 int key) {
    int keys = KV_SEQ - key;
    load_tile(tiles, HEAD_ROW, k + KEY_ROW(key) * K_SEQ, K_SEQ, keys, HEAD_DIM, KEYS, HEAD_WIDTH);
    load_tile(tiles + KEYS * HEAD_ROW * 2, VALUE_ROW, v + KEY_ROW(key) * V_SEQ, V_SEQ, keys,
              VALUE_DIM, KEYS, VALUE_WIDTH);
    copies_commit();
}
