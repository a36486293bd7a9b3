/* Instructions of Hopper (sm_90a): products of a warpgroup (wgmma), waiting for asynchronous copies
 * of what they read, registers moved from one warpgroup to another (setmaxnreg), matrices stored to
 * shared memory (stmatrix). */
#pragma once
#include "mma_ptx.cuh"
#ifndef MLUA_EMULATED
/* All of this thread's copies but those of the LATER latest groups: visible to products. */
template <int LATER> static __device__ __forceinline__ void copies_landed() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LATER> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}
/* What this thread wrote to shared memory is visible to products behind the next barrier. */
static __device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
template <int BARRIER, int THREADS> static __device__ __forceinline__ void sync_some() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}
template <int COUNT> static __device__ __forceinline__ void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
/* Four 8 x 8 matrices, of which a thread holds two neighbours of a row, to shared memory
 * transposed: lane l gives the address of row l % 8 of matrix l / 8 as it is stored. */
static __device__ __forceinline__ void
store_matrices_transposed(unsigned to, unsigned x0, unsigned x1, unsigned x2, unsigned x3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}
/* The compiler may use what products wrote, or overwrite what they read, from here on only. */
template <int N> static __device__ __forceinline__ void keep_in_registers(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> static __device__ __forceinline__ void keep_in_registers(unsigned (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

/* Products of bf16, sum (64 x COLUMNS, f32) = left right, or += where `add`: NAME(sum, left, right,
 * add). Operands are descriptors of shared memory with depth innermost, unless they are flat (1);
 * WGMMA_RS takes the left one from registers. SUMS is COLUMNS / 2, A, B, ... the numbers of the
 * operands behind SUMS. */
#define REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_32                                                                               \
    REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "   \
                 "%31"
#define REGISTERS_64                                                                               \
    REGISTERS_32                                                                                   \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "      \
    "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_96                                                                               \
    REGISTERS_64                                                                                   \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "      \
    "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_128                                                                              \
    REGISTERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, "    \
                 "%109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, "  \
                 "%122, %123, %124, %125, %126, %127"
#define SUMS_16                                                                                    \
    "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),            \
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),    \
        "+f"(c[14]), "+f"(c[15])
#define SUMS_32                                                                                    \
    SUMS_16, "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),         \
        "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), \
        "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
#define SUMS_64                                                                                    \
    SUMS_32, "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]),         \
        "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), \
        "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), \
        "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), \
        "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
#define SUMS_96                                                                                    \
    SUMS_64, "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]),         \
        "+f"(c[70]), "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), \
        "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), \
        "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]), "+f"(c[89]), "+f"(c[90]), \
        "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95])
#define SUMS_128                                                                                   \
    SUMS_96, "+f"(c[96]), "+f"(c[97]), "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]),       \
        "+f"(c[102]), "+f"(c[103]), "+f"(c[104]), "+f"(c[105]), "+f"(c[106]), "+f"(c[107]),        \
        "+f"(c[108]), "+f"(c[109]), "+f"(c[110]), "+f"(c[111]), "+f"(c[112]), "+f"(c[113]),        \
        "+f"(c[114]), "+f"(c[115]), "+f"(c[116]), "+f"(c[117]), "+f"(c[118]), "+f"(c[119]),        \
        "+f"(c[120]), "+f"(c[121]), "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]),        \
        "+f"(c[126]), "+f"(c[127])
#define WGMMA_SS(NAME, COLUMNS, SUMS, A, B, P, LEFT_FLAT, RIGHT_FLAT)                              \
    static __device__ __forceinline__ void NAME(float(&c)[SUMS], unsigned long long left,          \
                                                unsigned long long right, int add) {               \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P ", 0; "                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS                                  \
                     "k16.f32.bf16.bf16 {" REGISTERS_##SUMS                                        \
                     "}, %" #A ", %" #B ", p, 1, 1, " #LEFT_FLAT ", " #RIGHT_FLAT "; }"            \
                     : SUMS_##SUMS                                                                 \
                     : "l"(left), "l"(right), "r"(add));                                           \
    }
/* The same of 8-bit floats, LEFT and RIGHT e4m3 or e5m2; both with depth innermost. */
#define WGMMA_BYTES(...) WGMMA_OF_BYTES(__VA_ARGS__)
#define WGMMA_OF_BYTES(NAME, COLUMNS, SUMS, A, B, P, LEFT, RIGHT)                                  \
    static __device__ __forceinline__ void NAME(float(&c)[SUMS], unsigned long long left,          \
                                                unsigned long long right, int add) {               \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P ", 0; "                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32." #LEFT "." #RIGHT      \
                     " {" REGISTERS_##SUMS "}, %" #A ", %" #B ", p, 1, 1; }"                       \
                     : SUMS_##SUMS                                                                 \
                     : "l"(left), "l"(right), "r"(add));                                           \
    }
#define WGMMA_RS(NAME, COLUMNS, SUMS, A, B, C, D, E, P, RIGHT_FLAT)                                \
    static __device__ __forceinline__ void NAME(float(&c)[SUMS], unsigned a0, unsigned a1,         \
                                                unsigned a2, unsigned a3,                          \
                                                unsigned long long right, int add) {               \
        asm volatile(                                                                              \
            "{ .reg .pred p; setp.ne.b32 p, %" #P ", 0; "                                          \
            "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" REGISTERS_##SUMS    \
            "}, {%" #A ", %" #B ", %" #C ", %" #D "}, %" #E ", p, 1, 1, " #RIGHT_FLAT "; }"        \
            : SUMS_##SUMS                                                                          \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(right), "r"(add));                           \
    }
#else /* tests/kernels/emulator.hh */
#define WGMMA_SS EMULATED_WGMMA_SS
#define WGMMA_RS EMULATED_WGMMA_RS
#define WGMMA_BYTES EMULATED_WGMMA_BYTES
#endif
