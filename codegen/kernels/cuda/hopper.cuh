/* Instructions of Hopper (sm_90a) for warpgroups that do different work, beside products
 * (wgmma.cuh): barriers in shared memory (mbarrier) and named ones, bulk copies, registers moved
 * from one warpgroup to another (setmaxnreg). */
#pragma once
#include "wgmma.cuh"
#ifndef MLUA_EMULATED
static __device__ __forceinline__ void barrier_init(unsigned at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void barrier_arrive(unsigned at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
static __device__ __forceinline__ bool barrier_test(unsigned at, unsigned parity) { /* at once */
    unsigned done;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
                 "selp.b32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
    return done;
}
static __device__ __forceinline__ void barrier_wait(unsigned at, unsigned parity) {
    unsigned done;
    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.b32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
    while (!done);
}
/* Named barriers, by constants: a kernel with a variable barrier number reserves all 16. */
static __device__ __forceinline__ void sync_warpgroup(int group) {
    if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
    if (group == 1) asm volatile("bar.sync 2, 128;" ::: "memory");
    if (group == 2) asm volatile("bar.sync 3, 128;" ::: "memory");
}
/* Warpgroups issue products in turns, so that one's softmax runs beside another's products. */
static __device__ __forceinline__ void wait_turn(int group) {
    if (group == 0) asm volatile("bar.sync 5, 256;" ::: "memory");
    if (group == 1) asm volatile("bar.sync 6, 256;" ::: "memory");
    if (group == 2) asm volatile("bar.sync 7, 256;" ::: "memory");
}
static __device__ __forceinline__ void pass_turn(int group) {
    if (group == 0) asm volatile("bar.arrive 5, 256;" ::: "memory");
    if (group == 1) asm volatile("bar.arrive 6, 256;" ::: "memory");
    if (group == 2) asm volatile("bar.arrive 7, 256;" ::: "memory");
}
template <int THREADS> static __device__ __forceinline__ void sync_producers() {
    asm volatile("bar.sync 4, %0;" ::"n"(THREADS) : "memory");
}
static __device__ __forceinline__ void bulk_store(float *to, unsigned from, int bytes, bool add) {
    asm volatile("fence.proxy.async;" ::: "memory");
    if (add)
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
            "r"(from), "r"(bytes)
            : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(from), "r"(bytes)
                     : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
static __device__ __forceinline__ void bulk_wait_read() { /* shared memory is free */
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
static __device__ __forceinline__ void bulk_wait() { /* the sums are visible to others */
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}
static __device__ __forceinline__ void acquire_turn(const unsigned *at, unsigned turn) {
    unsigned now;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
    while (now != turn);
}
static __device__ __forceinline__ void release_turn(unsigned *at, unsigned turn) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(turn) : "memory");
}
static __device__ __forceinline__ void sync_producer_warps() { /* two */
    __syncwarp();
    asm volatile("bar.sync 5, 64;" ::: "memory");
}
#endif
