/* The scan of a matrix state, forward (linear_scan.cuh): of each chunk, with the state S before it,
 *     y = (q k^T * D) v + d q S,     S = d_C S + (k * tail)^T v
 * where d are decays from the chunk's beginning, tail those to its end. Products of a chunk come in
 * two parts: what needs operands and the state alone; then what needs the scores. */
#ifndef MLUA_EMBEDDED
#define Q_AT 0
#define Q_BATCH(batch) (batch / 32 * 33554432LL + batch % 32 * 128LL)
#define Q_SEQ 4096LL
#define Y_AT 5
#define Y_BATCH(batch) (batch / 32 * 33554432LL + batch % 32 * 128LL)
#define Y_SEQ 4096LL
#define Y_ELEMENT ml_bf16
#define LAST_AT 6 /* the state behind the last position */
#define LAST_BATCH(batch) (batch * 16384LL)
#define LAST_KEY 128LL
#define LAST_VALUE 1LL
#endif
#include "linear_scan.cuh"

#define SLOT (2 * KEY_TILE + VALUE_TILE)

struct memory {
    char slots[SLOTS][SLOT]; /* q, k, v */
    char state[STATE_TILE], scores[BLOCK];
    decay_table tables[2];
    float decays[4 * CHUNK];
};

/* Scores of a warpgroup's 32 columns times the decays between positions, as bf16. */
ML_INLINE void decay_scores(char *tile, const float (&s)[16], const decay_table &t, int group) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int block = group * 2 + half;
        float between = decay_of_blocks(t, block + 1, warp);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = r * 8 + lane / 4, column = n * 8 + lane % 4 * 2, i = half * 8 + n * 4;
                float x = 0, y = 0;
                if (block == warp) {
                    x = s[i + r * 2] * t.diagonal[block][row * 17 + column];
                    y = s[i + r * 2 + 1] * t.diagonal[block][row * 17 + column + 1];
                } else if (block < warp) {
                    float f = t.row[warp * 16 + row] * between;
                    x = s[i + r * 2] * (f * t.end[block * 16 + column]);
                    y = s[i + r * 2 + 1] * (f * t.end[block * 16 + column + 1]);
                }
                *(unsigned *)(tile + swizzled(CHUNK, warp * 16 + row, block * 2 + n) +
                              lane % 4 * 4) = pack_bf16(x, y);
            }
    }
}

ML_INLINE void help(const arguments &a, memory &m, int batch, int first_value) {
    const unsigned slots = shared_address(m.slots);
    const auto q = in_order(OPERAND(const ml_bf16, Q), Q_SEQ);
    const auto k = in_order(OPERAND(const ml_bf16, K), K_SEQ);
    const auto v = in_order(OPERAND(const ml_bf16, V) + first_value, V_SEQ);
    const auto copy = [&](int chunk) {
        const unsigned slot = slots + chunk % SLOTS * SLOT;
        if (chunk < CHUNKS) {
            copy_chunk<KEY_WIDTH, HELPING>(slot, q, chunk, KEYS);
            copy_chunk<KEY_WIDTH, HELPING>(slot + KEY_TILE, k, chunk, KEYS);
            copy_chunk<TILE_VALUES, HELPING>(slot + 2 * KEY_TILE, v, chunk, VALUES - first_value);
        }
        copies_commit();
    };
    for (int i = 0; i < SLOTS - 1; i++) copy(i);
    decay_ring decays = {in_order(OPERAND(const A_ELEMENT, A), A_SEQ), m.decays, 0};
    decays.begin(0, 1);
    sync_some<1, HELPING>();
    tabulate(m.tables[0], decays.of(0));
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        copies_landed<SLOTS - 2>();
        __syncthreads();
        copy(chunk + SLOTS - 1);
        decays.next(chunk, 1);
        tabulate(m.tables[(chunk + 1) % 2], decays.of(chunk + 1));
    }
}

ML_INLINE void compute(const arguments &a, memory &m, int batch, int first_value) {
    const int group = warpgroup(), lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const unsigned slots = shared_address(m.slots), state_tile = shared_address(m.state);
    const unsigned scores = shared_address(m.scores);
    const auto y = in_order(OPERAND(Y_ELEMENT, Y) + first_value, Y_SEQ);
    float state[KEY_BLOCKS][VALUE_HALF / 2];
    move_state<false>(state, OPERAND(float, S), S_KEY, S_VALUE, first_value);
    state_to_tile(m.state, state, group);
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        const unsigned q_tile = slots + chunk % SLOTS * SLOT, k_tile = q_tile + KEY_TILE;
        const unsigned v_tile = k_tile + KEY_TILE;
        const decay_table &t = m.tables[chunk % 2];
        float s[16], out[VALUE_HALF / 2];
        unsigned left[KEY_BLOCKS][4][4];
        fence_async_proxy(); /* the state's tile */
        __syncthreads();
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < KEY_WIDTH / 16; i++)
            product_scores(s, by_columns(q_tile, BLOCK, 0, i),
                           by_columns(k_tile, BLOCK, group * 32, i), i > 0);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < KEY_WIDTH / 16; i++)
            product_values(out, by_columns(q_tile, BLOCK, 0, i),
                           by_rows(state_tile, STATE_BLOCK, group * VALUE_HALF, i), i > 0);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++)
                load_columns(left[b][i], k_tile, b, i, t.end, decay_of_blocks(t, i + 1, 4));
        wgmma_wait<1>();
        keep_in_registers(s);
        decay_scores(m.scores, s, t, group);
        wgmma_wait<0>();
        keep_in_registers(out);
        scale_state(state, decay_of_blocks(t, 0, 4));
        const float before = decay_of_blocks(t, 0, warp);
        const float upper = before * t.row[warp * 16 + lane / 4];
        const float lower = before * t.row[warp * 16 + lane / 4 + 8];
#pragma unroll
        for (int i = 0; i < VALUE_HALF / 2; i++) out[i] *= i / 2 % 2 ? lower : upper;
        fence_async_proxy();
        sync_some<2, COMPUTING>();
        keep_all(state);
        keep_left(left);
        keep_in_registers(out);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; i++)
            product_values(out, by_columns(scores, BLOCK, 0, i),
                           by_rows(v_tile, BLOCK, group * VALUE_HALF, i), 1);
        wgmma_commit();
        add_outer(state, left, v_tile, group);
        wgmma_commit();
        wgmma_wait<1>();
        keep_in_registers(out);
        store_chunk(out, y, chunk, group * VALUE_HALF, VALUES - first_value);
        wgmma_wait<0>();
        keep_all(state);
        keep_left(left);
        state_to_tile(m.state, state, group);
    }
    move_state<true>(state, OPERAND(float, LAST), LAST_KEY, LAST_VALUE, first_value);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) ENTRY(arguments a) {
    extern __shared__ uint4 shared[];
    memory &m = *(memory *)((char *)shared + (1024 - shared_address(shared) % 1024) % 1024);
    const int batch = blockIdx.x / TILES, first_value = blockIdx.x % TILES * TILE_VALUES;
    if (threadIdx.x >= COMPUTING) {
        decrease_registers<FEWER_REGISTERS>();
        help(a, m, batch, first_value);
    } else {
        increase_registers<MORE_REGISTERS>();
        compute(a, m, batch, first_value);
    }
}
