/* Runs after attention_wgmma_grad.cu: rounds dq, which that kernel sums in f32 in the workspace, to
 * bf16, one block for a tile of 64 queries. A tile that no key block was added to is 0. */
#include "attention_wgmma_grad.cuh"

extern "C" __global__ void __launch_bounds__(128) ENTRY(arguments a) {
    int query = blockIdx.x % QUERY_TILES * 64, head = blockIdx.x / QUERY_TILES % HEADS;
    int batch = blockIdx.x / (QUERY_TILES * HEADS);
    ml_bf16 *dq = HEAD_OF(ml_bf16, DQ, head);
    const float *work = (const float *)a.p[DELTA_AT];
    const float4 *sums =
        (const float4 *)(work + SUMS_AT) + (long long)blockIdx.x * (16 * DIM) + threadIdx.x;
    bool any = ((const unsigned *)(work + TURNS_AT))[blockIdx.x] > 0;
    query += threadIdx.x / 32 * 16;
    float x[DIM / 2];
#pragma unroll
    for (int i = 0; i < DIM / 8; i++) {
        float4 sum = any ? sums[i * 128] : float4{0, 0, 0, 0};
        x[4 * i] = sum.x, x[4 * i + 1] = sum.y, x[4 * i + 2] = sum.z, x[4 * i + 3] = sum.w;
    }
    store_rows<DIM / 2>(x, SCALE, dq + query * DQ_SEQ, DQ_SEQ, SEQ - query);
}
