/* Instructions of sm_80 and later for products of bf16 on tensor cores: asynchronous copies to
 * shared memory (cp.async), ldmatrix, mma.sync m16n8k16 with f32 sums, conversion, exponential.
 * Addresses of shared memory are 32-bit. In emulation tests/kernels/emulator.hh has them. Lane l of
 * a warp holds, of a 16 x 8 accumulator, rows l / 4 and l / 4 + 8 and columns 2 (l % 4) and the
 * next. */
#pragma once
#ifndef MLUA_EMULATED
static __device__ __forceinline__ unsigned shared_address(const void *shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}
static __device__ __forceinline__ void copy_async(unsigned to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
static __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
/* Those but of the LATER latest groups. */
template <int LATER> static __device__ __forceinline__ void copies_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
static __device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                           unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ unsigned pack_bf16(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
/* Four of the bytes 0 to 7 of low and high, by the digits of `order` (base 16, first lowest). */
static __device__ __forceinline__ unsigned permute_bytes(unsigned low, unsigned high,
                                                         unsigned order) {
    return __byte_perm(low, high, order);
}
/* x y + z of each half. */
static __device__ __forceinline__ unsigned fma_bf16_pair(unsigned x, unsigned y, unsigned z) {
    unsigned r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
    return r;
}
static __device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif
