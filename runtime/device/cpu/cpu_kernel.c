/* C = A B: tiles of C are accumulated in registers (after Goto and van de Geijn). B is packed in
 * blocks of CPU_KERNEL_DEPTH x BLOCK_N, which the second-level cache holds. A is read where it is,
 * in either order: a panel of it (a tile's rows x CPU_KERNEL_DEPTH) stays in the first-level cache
 * by itself while the tiles of a block use it. A tile is `rows` x `cols` elements of C, `cols`
 * being two vectors. */
#include "runtime/device/cpu/cpu_kernel.h"

#include <string.h>

enum { BLOCK_N = 256, LARGEST_TILE = 12 * 32, ROWS_AT_ONCE = 8 };

/* c[i][ldc] = (or +=, where `add`) the sum over p of a(i, p) * b[p][cols]. a(i, p) is
 * a[i * stride + p] for `by_rows` and a[i + p * stride] for `by_cols`. */
typedef void tile_run(int64_t k, const void *a, int64_t stride, const void *b, void *c, int64_t ldc,
                      bool add);
typedef struct {
    int rows, cols;
    tile_run *by_rows, *by_cols;
} tile_kernel;

#define UNROLL _Pragma("GCC unroll 16")
#define TILE_BEGIN(NAME, TYPE, BYTES, ROWS)                                                        \
    enum { LANES = (BYTES) / sizeof(TYPE) };                                                       \
    const TYPE *a = a_panel, *b = b_panel;                                                         \
    TYPE *c = c_tile;                                                                              \
    NAME##_vector low[ROWS], high[ROWS];                                                           \
    UNROLL for (int i = 0; i < ROWS; i++) {                                                        \
        low[i] = high[i] = (NAME##_vector){0};                                                     \
        __builtin_prefetch(c + i * ldc, 1);                                                        \
        __builtin_prefetch(c + i * ldc + LANES, 1);                                                \
    }
#define TILE_STEP(NAME, ROWS, ELEMENT)                                                             \
    NAME##_vector x = *(const NAME##_vector *)b, y = *(const NAME##_vector *)(b + LANES);          \
    UNROLL for (int i = 0; i < ROWS; i++) {                                                        \
        low[i] += (ELEMENT)*x;                                                                     \
        high[i] += (ELEMENT)*y;                                                                    \
    }
#define TILE_END(NAME, ROWS)                                                                       \
    UNROLL for (int i = 0; i < ROWS; i++, c += ldc) {                                              \
        NAME##_vector *x = (NAME##_vector *)c, *y = (NAME##_vector *)(c + LANES);                  \
        *x = add ? *x + low[i] : low[i];                                                           \
        *y = add ? *y + high[i] : high[i];                                                         \
    }
/* Three rows share a pointer: few enough registers, and addresses that the processor computes. */
#define TILE(NAME, TYPE, ATTRIBUTE, BYTES, ROWS)                                                   \
    typedef TYPE NAME##_vector __attribute__((vector_size(BYTES), aligned(sizeof(TYPE))));         \
    ATTRIBUTE static void NAME##_cols(int64_t k, const void *a_panel, int64_t stride,              \
                                      const void *b_panel, void *c_tile, int64_t ldc, bool add) {  \
        TILE_BEGIN(NAME, TYPE, BYTES, ROWS)                                                        \
        for (int64_t p = 0; p < k; p++, a += stride, b += 2 * LANES) {                             \
            TILE_STEP(NAME, ROWS, a[i])                                                            \
        }                                                                                          \
        TILE_END(NAME, ROWS)                                                                       \
    }                                                                                              \
    ATTRIBUTE static void NAME##_rows(int64_t k, const void *a_panel, int64_t stride,              \
                                      const void *b_panel, void *c_tile, int64_t ldc, bool add) {  \
        TILE_BEGIN(NAME, TYPE, BYTES, ROWS)                                                        \
        const TYPE *three[(ROWS + 2) / 3];                                                         \
        UNROLL for (int i = 0; i < (ROWS + 2) / 3; i++) three[i] = a + 3 * i * stride;             \
        for (int64_t p = 0; p < k; p++, b += 2 * LANES) {                                          \
            TILE_STEP(NAME, ROWS, three[i / 3][i % 3 * stride + p])                                \
        }                                                                                          \
        TILE_END(NAME, ROWS)                                                                       \
    }

#if defined(__x86_64__)
#define AVX512 __attribute__((target("avx512f,avx512vl,fma")))
#define AVX2 __attribute__((target("avx2,fma")))
TILE(tile_f32_64, float, AVX512, 64, 12)
TILE(tile_f64_64, double, AVX512, 64, 12)
TILE(tile_f32_32, float, AVX2, 32, 6)
TILE(tile_f64_32, double, AVX2, 32, 6)
#endif
TILE(tile_f32_16, float, , 16, 4)
TILE(tile_f64_16, double, , 16, 4)

static tile_kernel tile_for(ml_dtype dtype) {
    bool f64 = dtype == ML_F64;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
        return f64 ? (tile_kernel){12, 16, tile_f64_64_rows, tile_f64_64_cols}
                   : (tile_kernel){12, 32, tile_f32_64_rows, tile_f32_64_cols};
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return f64 ? (tile_kernel){6, 8, tile_f64_32_rows, tile_f64_32_cols}
                   : (tile_kernel){6, 16, tile_f32_32_rows, tile_f32_32_cols};
    }
#endif
    return f64 ? (tile_kernel){4, 4, tile_f64_16_rows, tile_f64_16_cols}
               : (tile_kernel){4, 8, tile_f32_16_rows, tile_f32_16_cols};
}

/* Equal parts of at most `most`, in whole units. */
static int64_t even_part(int64_t count, int64_t most, int64_t unit) {
    int64_t parts = (count + most - 1) / most;
    int64_t part = parts > 0 ? (count + parts - 1) / parts : 1;
    return (part + unit - 1) / unit * unit;
}

int64_t cpu_kernel_depth(int64_t k) {
    return even_part(k, CPU_KERNEL_DEPTH, 1);
}

static int64_t packed_bytes(int64_t lines, int64_t count, ml_dtype dtype) {
    return (lines * count * ml_dtypes[dtype].bytes + 63) / 64 * 64;
}

/* Bytes of a thread's packing buffer: one block of B, and one tile of A for last rows that do not
 * fill a tile. Threads compute parts of the product, and even_part may choose a larger block for a
 * part than for the whole: the largest is counted. */
int64_t cpu_kernel_packing(ml_dtype dtype, int64_t n, int64_t k) {
    tile_kernel tile = tile_for(dtype);
    int64_t cols = even_part(n < BLOCK_N ? n : BLOCK_N, BLOCK_N, tile.cols);
    int64_t depth = k < CPU_KERNEL_DEPTH ? k : CPU_KERNEL_DEPTH;
    return packed_bytes(tile.rows, depth, dtype) + packed_bytes(cols, depth, dtype);
}

/* Four by four elements: to[p * width + i] = from[i * stride + p]. */
typedef float quad __attribute__((vector_size(16), aligned(4)));
typedef int quad_index __attribute__((vector_size(16)));
typedef double pair __attribute__((vector_size(16), aligned(8)));
typedef long long pair_index __attribute__((vector_size(16)));

static inline void turn_f32(float *to, int64_t width, const float *from, int64_t stride) {
    const quad_index low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
    quad a = *(const quad *)from, b = *(const quad *)(from + stride);
    quad c = *(const quad *)(from + 2 * stride), d = *(const quad *)(from + 3 * stride);
    quad ac = __builtin_shuffle(a, c, low), bd = __builtin_shuffle(b, d, low);
    *(quad *)to = __builtin_shuffle(ac, bd, low);
    *(quad *)(to + width) = __builtin_shuffle(ac, bd, high);
    ac = __builtin_shuffle(a, c, high), bd = __builtin_shuffle(b, d, high);
    *(quad *)(to + 2 * width) = __builtin_shuffle(ac, bd, low);
    *(quad *)(to + 3 * width) = __builtin_shuffle(ac, bd, high);
}

static inline void turn_f64(double *to, int64_t width, const double *from, int64_t stride) {
    const pair_index low = {0, 2}, high = {1, 3};
    for (int i = 0; i < 4; i += 2) {
        for (int p = 0; p < 4; p += 2) {
            pair a = *(const pair *)(from + i * stride + p);
            pair b = *(const pair *)(from + (i + 1) * stride + p);
            *(pair *)(to + p * width + i) = __builtin_shuffle(a, b, low);
            *(pair *)(to + (p + 1) * width + i) = __builtin_shuffle(a, b, high);
        }
    }
}

#define TYPE float
#define NAME(name) name##_f32
#include "runtime/device/cpu/cpu_kernel_body.h"
#undef TYPE
#undef NAME
#define TYPE double
#define NAME(name) name##_f64
#include "runtime/device/cpu/cpu_kernel_body.h"

void cpu_kernel_product(const cpu_kernel_call *call) {
    if (call->m == 0 || call->n == 0) return;
    if (call->dtype == ML_F64)
        product_f64(call);
    else
        product_f32(call);
}
