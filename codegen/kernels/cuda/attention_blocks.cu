/* Writes the states of blocks: what masks compare are functions of the query and functions of the
 * key (leaves), whose least and largest values in a block decide whether a comparison
 * holds everywhere (CERTAIN), somewhere (POSSIBLE) or nowhere in it. */
#ifndef MLUA_EMBEDDED
#define LEAF_BOUNDS float low0 = 0, high0 = 0
#define LEAF_VALUES low0 = i && low0 < qi ? low0 : qi, high0 = i && high0 > kv ? high0 : kv
#define POSSIBLE (low0 <= high0)
#define CERTAIN (high0 <= low0)
#endif
#include "attention_blocks.cuh"

extern "C" __global__ void __launch_bounds__(64) ENTRY(arguments a) {
    int part = blockIdx.x % QUERY_PARTS, head = blockIdx.x / QUERY_PARTS % MASK_HEADS;
    int batch = blockIdx.x / (QUERY_PARTS * MASK_HEADS);
    char *states = a.p[STATES_AT] + (long long)blockIdx.x * KEY_PARTS;
    (void)head, (void)batch;
    CAPTURES;
    POSITIONS;
    for (int k = threadIdx.x; k < KEY_PARTS; k += 64) {
        bool odd = false; /* a NaN is outside of all bounds */
        LEAF_BOUNDS;
#pragma unroll 8
        for (int i = 0; i < 64; i++) {
            int qi = part * 64 + i, kv = k * 64 + i;
            qi = qi < SEQ ? qi : SEQ - 1;
            kv = kv < KV_SEQ ? kv : KV_SEQ - 1;
            LEAF_VALUES;
        }
        states[k] = odd ? SHOWN_PARTLY : !(POSSIBLE) ? 0 : (CERTAIN) ? SHOWN_WHOLE : SHOWN_PARTLY;
    }
}
