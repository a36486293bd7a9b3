// What CUDA gives to a kernel, for a C++ compiler: included before every kernel's source by nvrtc.c.
// A block's threads are fibers (cuda.c) that switch at barriers and shuffles; one block runs at a
// time, so shared memory is static.
#pragma once
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include "casts.hh"

struct emu_index { unsigned x, y, z; };
struct emu_thread { void *stack_pointer; emu_index index; int number; bool done; };
extern "C" {
extern emu_thread *emu_now;
extern emu_index emu_block, emu_grid, emu_dimensions;
extern unsigned char emu_dynamic_shared[];
void emu_barrier(int id, int count);
void emu_warp_barrier(unsigned mask);
void emu_yield(void); // to other blocks of a cooperative launch: this one waits for them
bool emu_runs(int lane);                // of this warp
uint64_t *emu_slots(void);              // one for each lane of this warp
unsigned (*emu_fragments(void))[8];     // likewise
void emu_copy_later(unsigned to, const void *from, int bytes); // 16 bytes, zeros past `bytes`
void emu_copy_commit(void);
void emu_copy_wait(int but); // all groups but the last so many; -1: everything
void emu_complain(const char *what);
}
#define threadIdx (emu_now->index)
#define blockIdx emu_block
#define gridDim emu_grid
#define blockDim emu_dimensions
#define warpSize 32
#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define MLUA_NO_CLUSTERS /* blocks run one after another */
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
#define __shared__ static

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(both >> (s >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return r;
}
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

// ---- Bits and arithmetic
template <class To, class From> static inline To emu_bits(From x) {
    To y;
    static_assert(sizeof x == sizeof y, "sizes");
    memcpy(&y, &x, sizeof y);
    return y;
}
static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
static inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __frcp_rn(float a) { return 1 / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
#define __expf expf // libm has functions of these names
#define __logf logf
#define __sinf sinf
#define __cosf cosf
static inline float rsqrtf(float a) { return 1 / sqrtf(a); }
static inline double rsqrt(double a) { return 1 / sqrt(a); }
template <class T> static inline T min(T a, T b) { return a < b ? a : b; }
template <class T> static inline T max(T a, T b) { return a > b ? a : b; }
template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline void __stcs(T *p, T v) { *p = v; }
template <class T> static inline T atomicAdd(T *p, T v) { T old = *p; *p += v; return old; }
static inline size_t __cvta_generic_to_shared(const void *p) {
    return (size_t)((const unsigned char *)p - emu_dynamic_shared);
}

// ---- Threads together
static inline int emu_lane() { return emu_now->number & 31; }
static inline void __syncthreads() { emu_barrier(0, 0); }
static inline void __syncwarp(unsigned mask = ~0u) { emu_warp_barrier(mask); }
static inline void __threadfence() {}
template <class T> static inline T emu_exchange(unsigned mask, T v, int lane) {
    T result;
    memcpy(&emu_slots()[emu_lane()], &v, sizeof v);
    emu_warp_barrier(mask);
    if (!(mask >> lane & 1)) emu_complain("a shuffle reads a lane outside of its mask");
    else if (!emu_runs(lane)) emu_complain("a shuffle reads a lane that does not run");
    memcpy(&result, &emu_slots()[lane], sizeof v);
    emu_warp_barrier(mask);
    return result;
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32) {
    int lane = emu_lane(), other = lane ^ by;
    return emu_exchange(mask, v, other / width <= lane / width ? other : lane);
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
    return emu_exchange(mask, v, emu_lane() / width * width + (from & (width - 1)));
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, int by, int width = 32) {
    return emu_exchange(mask, v, emu_lane() % width >= by ? emu_lane() - by : emu_lane());
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, int by, int width = 32) {
    return emu_exchange(mask, v, emu_lane() % width + by < width ? emu_lane() + by : emu_lane());
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T v) {
    uint64_t bits = 0;
    unsigned equal = 0;
    memcpy(&bits, &v, sizeof v);
    emu_slots()[emu_lane()] = bits;
    emu_warp_barrier(mask);
    for (int i = 0; i < 32; i++) equal |= (unsigned)((mask >> i & 1) && emu_slots()[i] == bits) << i;
    emu_warp_barrier(mask);
    return equal;
}
static inline unsigned __ballot_sync(unsigned mask, int v) {
    unsigned same = __match_any_sync(mask, v != 0);
    return v ? same : mask & ~same;
}
static inline int __any_sync(unsigned mask, int v) { return __ballot_sync(mask, v) != 0; }
static inline int __all_sync(unsigned mask, int v) { return __ballot_sync(mask, v) == mask; }

// ---- PTX
static inline unsigned emu_look(const unsigned *word) {
    emu_yield();
    return *word;
}
static inline unsigned short emu_to_bf16(float x) {
    unsigned u = __float_as_uint(x);
    return x != x ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline unsigned emu_halves(float high, float low) {
    return (unsigned)emu_bits<uint16_t>((_Float16)high) << 16 | emu_bits<uint16_t>((_Float16)low);
}
static inline float emu_of_f16(unsigned word) { return (float)emu_bits<_Float16>((uint16_t)word); }
static inline unsigned emu_pair(float high, float low) {
    return (unsigned)emu_to_bf16(high) << 16 | emu_to_bf16(low);
}
static inline float emu_half(unsigned pair, int high) {
    return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
}
static inline float emu_max(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
static inline unsigned emu_max_pair(unsigned a, unsigned b) {
    float low = emu_max(__uint_as_float(a << 16), __uint_as_float(b << 16));
    float high = emu_max(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u));
    return __float_as_uint(high) | __float_as_uint(low) >> 16;
}
static inline unsigned emu_fma_pair(unsigned x, unsigned y, unsigned z) {
    return emu_pair(fmaf(emu_half(x, 1), emu_half(y, 1), emu_half(z, 1)),
                    fmaf(emu_half(x, 0), emu_half(y, 0), emu_half(z, 0)));
}
static inline float emu_min(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
// ldmatrix: lane i gives the address of row i % 8 of matrix i / 8
static inline void emu_load_matrices(unsigned &r0, unsigned &r1, unsigned &r2, unsigned &r3,
                                     unsigned from, bool transposed) {
    unsigned *result[4] = {&r0, &r1, &r2, &r3};
    int lane = emu_lane();
    emu_fragments()[lane][0] = from;
    emu_warp_barrier(~0u);
    for (int m = 0; m < 4; m++) {
        unsigned short element[2];
        for (int k = 0; k < 2; k++) {
            int row = transposed ? 2 * (lane % 4) + k : lane / 4;
            int column = transposed ? lane / 4 : 2 * (lane % 4) + k;
            unsigned at = emu_fragments()[m * 8 + row][0];
            if (at & 15) emu_complain("ldmatrix reads at no multiple of 16 bytes");
            memcpy(&element[k], emu_dynamic_shared + at + column * 2, 2);
        }
        *result[m] = element[0] | (unsigned)element[1] << 16;
    }
    emu_warp_barrier(~0u);
}
// stmatrix, transposed: of each matrix lane l has rows 2 (l % 4) and the next of column l / 4
static inline void emu_store_transposed(unsigned to, unsigned x0, unsigned x1, unsigned x2,
                                        unsigned x3) {
    const unsigned pair[4] = {x0, x1, x2, x3};
    int lane = emu_lane();
    emu_fragments()[lane][0] = to;
    emu_warp_barrier(~0u);
    for (int m = 0; m < 4; m++)
        for (int k = 0; k < 2; k++) {
            unsigned at = emu_fragments()[m * 8 + lane % 4 * 2 + k][0];
            unsigned short element = (unsigned short)(pair[m] >> 16 * k);
            if (at & 15) emu_complain("stmatrix writes at no multiple of 16 bytes");
            memcpy(emu_dynamic_shared + at + lane / 4 * 2, &element, 2);
        }
    emu_warp_barrier(~0u);
}
// Products of warpgroups (wgmma m64nNk16): nothing is computed before it is waited for.
enum { EMU_PRODUCTS = 64 };
struct emu_product {
    float *c;
    unsigned long long left, right;
    int left_flat, right_flat, columns, add, group;
    bool held;         // the left operand, in registers:
    float row[2][16];  // what this thread's two rows have
};
static emu_product emu_products[1024][EMU_PRODUCTS];
static int emu_product_count[1024], emu_product_group[1024];
static inline void emu_product_add(emu_product p) {
    int n = emu_now->number, *count = &emu_product_count[n];
    p.group = emu_product_group[n];
    if (*count < EMU_PRODUCTS) emu_products[n][(*count)++] = p;
    else emu_complain("more products are under way than the emulator keeps");
}
static inline void emu_product_later(float *c, unsigned long long left, unsigned long long right,
                                     int left_flat, int right_flat, int columns, int add) {
    emu_product_add({c, left, right, left_flat, right_flat, columns, add, 0, false, {}});
}
static inline void emu_held_product(float *c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                    unsigned long long right, int right_flat, int columns, int add) {
    emu_product p = {c, 0, right, 0, right_flat, columns, add, 0, true, {}};
    unsigned mine[4] = {a0, a1, a2, a3}, (*all)[8] = emu_fragments();
    int lane = emu_lane();
    memcpy(all[lane], mine, sizeof mine);
    emu_warp_barrier(~0u);
    for (int k = 0; k < 16; k++)
        for (int h = 0; h < 2; h++)
            p.row[h][k] = emu_half(all[lane / 4 * 4 + k % 8 / 2][h + k / 8 * 2], k & 1);
    emu_warp_barrier(~0u);
    emu_product_add(p);
}
// Element (i, depth) of an operand in the 128-byte mode, as codegen/kernels/cuda/attention_wgmma.cuh lays it out.
static inline float emu_element(unsigned long long operand, int flat, int i, int depth) {
    unsigned start = (operand & 0x3fff) << 4, leading = (operand >> 16 & 0x3fff) << 4;
    unsigned stride = (operand >> 32 & 0x3fff) << 4;
    unsigned at = flat ? start + i / 64 * leading + i % 64 * 2 + depth / 8 * stride + depth % 8 * 128
                       : start + i / 8 * stride + i % 8 * 128 + depth * 2;
    unsigned short half;
    if (operand >> 62 != 1) emu_complain("a product's operand is not in the 128-byte mode");
    memcpy(&half, emu_dynamic_shared + (at ^ (at >> 7 & 7) << 4), 2);
    return emu_half(half, 0);
}
static inline void emu_product_now(const emu_product &p) {
    int lane = emu_lane(), row = emu_now->number / 32 % 4 * 16 + lane / 4;
    for (int i = 0; !p.add && i < p.columns / 2; i++) p.c[i] = 0;
    for (int k = 0; k < 16; k++) {
        float left[2];
        for (int h = 0; h < 2; h++)
            left[h] = p.held ? p.row[h][k] : emu_element(p.left, p.left_flat, row + 8 * h, k);
        for (int i = 0; i < p.columns / 4; i++) {
            float right = emu_element(p.right, p.right_flat, i / 2 * 8 + lane % 4 * 2 + i % 2, k);
            for (int h = 0; h < 2; h++) p.c[i / 2 * 4 + 2 * h + i % 2] += left[h] * right;
        }
    }
}
static inline void emu_products_commit() { emu_product_group[emu_now->number]++; }
static inline void emu_products_wait(int but) { // all groups but the last so many
    int n = emu_now->number, left = 0;
    for (int i = 0; i < emu_product_count[n]; i++) {
        const emu_product p = emu_products[n][i];
        if (p.group >= emu_product_group[n] - but) emu_products[n][left++] = p;
        else emu_product_now(p);
    }
    emu_product_count[n] = left;
}
// mma m16n8k16: a row-major, b column-major, c in f32
static inline void emu_multiply(float &c0, float &c1, float &c2, float &c3, unsigned a0, unsigned a1,
                                unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    float *c[4] = {&c0, &c1, &c2, &c3};
    unsigned mine[6] = {a0, a1, a2, a3, b0, b1}, (*all)[8] = emu_fragments();
    int lane = emu_lane();
    memcpy(all[lane], mine, sizeof mine);
    emu_warp_barrier(~0u);
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + (i & 1);
        double sum = *c[i];
        for (int k = 0; k < 16; k++)
            sum += (double)emu_half(all[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], k & 1) *
                   emu_half(all[column * 4 + k % 8 / 2][4 + k / 8], k & 1);
        *c[i] = (float)sum;
    }
    emu_warp_barrier(~0u);
}
