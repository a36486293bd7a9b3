/* For the gradient of the scan of a matrix state: the states before each chunk as bf16, into a
 * workspace, as tiles of shared memory are (linear_scan.cuh): [batch][tile of values][chunk]. */
#ifndef MLUA_EMBEDDED
#define STATES_AT 12
#endif
#include "linear_scan.cuh"

#define SLOT (KEY_TILE + VALUE_TILE)

struct memory {
    char slots[SLOTS][SLOT]; /* k, v */
    decay_table tables[2];
    float decays[4 * CHUNK];
};

/* 16 bytes a thread. */
ML_INLINE void store_state(char *tile, const float (&state)[KEY_BLOCKS][VALUE_HALF / 2],
                           int group) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int m = 0; m < KEY_BLOCKS; m++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int i = 0; i < VALUE_HALF / 8; i += 4) {
                unsigned x[4];
#pragma unroll
                for (int k = 0; k < 4; k++)
                    x[k] =
                        pack_bf16(state[m][(i + k) * 4 + r * 2], state[m][(i + k) * 4 + r * 2 + 1]);
                transpose_quad(x);
                int row = m * 64 + warp * 16 + r * 8 + lane / 4;
                int part = group * (VALUE_HALF / 8) + i + lane % 4;
                *(uint4 *)(tile + swizzled(KEY_WIDTH, row, part)) = uint4{x[0], x[1], x[2], x[3]};
            }
}

extern "C" __global__ void __launch_bounds__(COMPUTING, BLOCKS_PER_SM) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    memory &m = *(memory *)((char *)shared + (1024 - shared_address(shared) % 1024) % 1024);
    const int batch = blockIdx.x / TILES, first_value = blockIdx.x % TILES * TILE_VALUES;
    const int group = warpgroup();
    const unsigned slots = shared_address(m.slots);
    const auto k = in_order(OPERAND(const ml_bf16, K), K_SEQ);
    const auto v = in_order(OPERAND(const ml_bf16, V) + first_value, V_SEQ);
    char *states = a.p[STATES_AT] + (long long)blockIdx.x * CHUNKS * STATE_TILE;
    const auto copy = [&](int chunk) {
        const unsigned slot = slots + chunk % SLOTS * SLOT;
        if (chunk < CHUNKS) {
            copy_chunk<KEY_WIDTH, COMPUTING>(slot, k, chunk, KEYS);
            copy_chunk<TILE_VALUES, COMPUTING>(slot + KEY_TILE, v, chunk, VALUES - first_value);
        }
        copies_commit();
    };
    for (int i = 0; i < SLOTS - 1; i++) copy(i);
    decay_ring decays = {in_order(OPERAND(const A_ELEMENT, A), A_SEQ), m.decays, 0};
    if (threadIdx.x < 128) decays.begin(0, 1);
    float state[KEY_BLOCKS][VALUE_HALF / 2];
    move_state<false>(state, OPERAND(float, S), S_KEY, S_VALUE, first_value);
    __syncthreads();
    if (threadIdx.x < 128) tabulate(m.tables[0], decays.of(0));
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const unsigned k_tile = slots + chunk % SLOTS * SLOT, v_tile = k_tile + KEY_TILE;
        const decay_table &t = m.tables[chunk % 2];
        unsigned left[KEY_BLOCKS][4][4];
        copies_landed<SLOTS - 2>();
        __syncthreads();
        copy(chunk + SLOTS - 1);
        if (threadIdx.x < 128) decays.next(chunk, 1);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++)
                load_columns(left[b][i], k_tile, b, i, t.end, decay_of_blocks(t, i + 1, 4));
        store_state(states + chunk * (long long)STATE_TILE, state, group);
        scale_state(state, decay_of_blocks(t, 0, 4));
        keep_all(state);
        keep_left(left);
        wgmma_begin();
        add_outer(state, left, v_tile, group);
        wgmma_commit();
        if (threadIdx.x < 128) tabulate(m.tables[(chunk + 1) % 2], decays.of(chunk + 1));
        wgmma_wait<0>();
        keep_all(state);
        keep_left(left);
    }
}
