/* Instructions of Hopper for its copy engine (TMA) and pairs of blocks (clusters): boxes of tensor
 * maps copied to shared memory, barriers in shared memory of both blocks. */
#pragma once
#include "hopper.cuh"

struct alignas(64) tensor_map {
    char bytes[128];
};
#ifndef MLUA_EMULATED
ML_INLINE unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
ML_INLINE void cluster_sync() { /* all threads of the cluster */
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
ML_INLINE void barriers_visible() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
ML_INLINE void barrier_spin(unsigned barrier, unsigned parity) {
    asm volatile("{ .reg .pred done; again: "
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
                 "@!done bra again; }" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
ML_INLINE void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
/* Of what products have read: with `.release.cluster` every step would wait for a fence. */
ML_INLINE void barrier_release(unsigned barrier, unsigned rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}
/* A box to shared memory of this block, or of both blocks at the same address. */
ML_INLINE void load_box(const tensor_map *map, unsigned to, int x, int y, int z, unsigned barrier,
                        bool both) {
    if (both)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                     "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"((unsigned short)3)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                     "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
                     : "memory");
}
#endif
