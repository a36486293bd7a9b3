/* Blocks of a cluster, CLUSTER of them along x (sm_90), which read one another's shared memory.
 * Where blocks run one after another (emulators) or clusters are of one, RANKS is 1: the first
 * block of what would be a cluster has the work of all, the others none. */
#pragma once
#include "mma_ptx.cuh"
#if CLUSTER > 1 && !defined(MLUA_EMULATED) && !defined(MLUA_NO_CLUSTERS)
static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
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
#define load_of_block(at, rank) (*(at))
#define RANKS 1
#define IN_CLUSTER
#endif
