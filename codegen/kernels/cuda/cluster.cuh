/* Blocks of a cluster, CLUSTER of them along x (sm_90), which read one another's shared memory.
 * Where blocks run one after another (emulators) or clusters are of one, RANKS is 1: the first
 * block of what would be a cluster has the work of all, the others none. */
#pragma once
#include "mma_ptx.cuh"
#if CLUSTER > 1 && !defined(MLUA_EMULATED) && !defined(MLUA_NO_CLUSTERS)
static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
/* The two halves of a barrier: that blocks have begun, so that others may write to their shared
 * memory. */
static __device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
static __device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
static __device__ __forceinline__ void store_in_block(float *at, int rank, float x) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "st.shared::cluster.f32 [there], %2; }" ::"r"(shared_address(at)),
                 "r"(rank), "f"(x)
                 : "memory");
}
/* Of the block `rank` of the cluster, what lies in its shared memory at `at` of this one's. */
static __device__ __forceinline__ float load_of_block(const float *at, int rank) {
    float x;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; "
                 "ld.shared::cluster.f32 %0, [there]; }"
                 : "=f"(x)
                 : "r"(shared_address(at)), "r"(rank)
                 : "memory");
    return x;
}
#define RANKS CLUSTER
#define IN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define cluster_sync() __syncthreads()
#define cluster_arrive()
#define cluster_wait()
#define store_in_block(at, rank, x) (*(at) = (x))
#define load_of_block(at, rank) (*(at))
#define RANKS 1
#define IN_CLUSTER
#endif
