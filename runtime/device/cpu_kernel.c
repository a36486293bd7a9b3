/* C = alpha op(A) op(B) + beta C, column-major: A and B are packed into panels that the cache
 * holds, and tiles of C are accumulated in registers (the scheme of Goto and van de Geijn).
 * A tile is `rows` x `cols` elements of C: `vectors` vectors along a column, `cols` columns. */
#include "runtime/device/cpu_kernel.h"

#include <string.h>

enum { BLOCK_K = 256, BLOCK_M = 192, BLOCK_N = 1536, WIDEST_TILE = 64 * 16 };

typedef struct {
    int rows, cols;
    void (*run)(int64_t k, const void *a, const void *b, void *c, int64_t ldc);
} tile_kernel;

/* tile: c[cols][ldc] += sum over k of a[k][rows] * b[k][cols], with packed a and b. */
#define TILE(NAME, TYPE, ATTRIBUTE, BYTES, VECTORS, COLS)                                          \
    typedef TYPE NAME##_vector __attribute__((vector_size(BYTES), aligned(sizeof(TYPE))));        \
    ATTRIBUTE static void NAME(int64_t k, const void *a_panel, const void *b_panel, void *c_tile, \
                               int64_t ldc) {                                                      \
        enum { LANES = (BYTES) / sizeof(TYPE) };                                                   \
        const TYPE *a = a_panel, *b = b_panel;                                                     \
        TYPE *c = c_tile;                                                                          \
        NAME##_vector sum[COLS][VECTORS];                                                          \
        _Pragma("GCC unroll 16") for (int j = 0; j < COLS; j++)                                    \
            _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)                              \
                sum[j][v] = (NAME##_vector){0};                                                    \
        for (int64_t p = 0; p < k; p++, a += (VECTORS) * LANES, b += COLS) {                       \
            NAME##_vector x[VECTORS];                                                              \
            _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)                              \
                x[v] = *(const NAME##_vector *)(a + v * LANES);                                    \
            _Pragma("GCC unroll 16") for (int j = 0; j < COLS; j++)                                \
                _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)                          \
                    sum[j][v] += x[v] * b[j];                                                      \
        }                                                                                          \
        _Pragma("GCC unroll 16") for (int j = 0; j < COLS; j++)                                    \
            _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)                              \
                *(NAME##_vector *)(c + j * ldc + v * LANES) += sum[j][v];                          \
    }

#if defined(__x86_64__)
#define AVX512 __attribute__((target("avx512f,avx512vl,fma")))
#define AVX2 __attribute__((target("avx2,fma")))
TILE(tile_f32_64, float, AVX512, 64, 2, 12)
TILE(tile_f64_64, double, AVX512, 64, 2, 12)
TILE(tile_f32_32, float, AVX2, 32, 2, 6)
TILE(tile_f64_32, double, AVX2, 32, 2, 6)
#endif
TILE(tile_f32_16, float, , 16, 2, 4)
TILE(tile_f64_16, double, , 16, 2, 4)

static tile_kernel tile_for(bool f64) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) {
        return f64 ? (tile_kernel){16, 12, tile_f64_64} : (tile_kernel){32, 12, tile_f32_64};
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return f64 ? (tile_kernel){8, 6, tile_f64_32} : (tile_kernel){16, 6, tile_f32_32};
    }
#endif
    return f64 ? (tile_kernel){4, 4, tile_f64_16} : (tile_kernel){8, 4, tile_f32_16};
}

/* The rest, for both types. Strides in elements: op(A)(i, p) = a[i * a_row + p * a_col]. */
#define GEMM(NAME, TYPE, IS_F64)                                                                   \
    static void NAME##_pack(TYPE *to, const TYPE *from, int64_t count, int64_t stride, int64_t k,  \
                            int64_t k_stride, int width, TYPE alpha) {                             \
        for (int64_t i = 0; i < count; i += width) {                                               \
            int64_t filled = count - i < width ? count - i : width;                                \
            for (int64_t p = 0; p < k; p++, to += width) {                                         \
                const TYPE *x = from + i * stride + p * k_stride;                                  \
                for (int64_t j = 0; j < filled; j++) to[j] = alpha * x[j * stride];                \
                for (int64_t j = filled; j < width; j++) to[j] = 0;                                \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    static void NAME##_tiles(tile_kernel tile, int64_t m, int64_t n, int64_t k, const TYPE *a,     \
                             const TYPE *b, TYPE *c, int64_t ldc) {                                \
        for (int64_t j = 0; j < n; j += tile.cols) {                                               \
            int64_t cols = n - j < tile.cols ? n - j : tile.cols;                                  \
            for (int64_t i = 0; i < m; i += tile.rows) {                                           \
                int64_t rows = m - i < tile.rows ? m - i : tile.rows;                              \
                if (rows == tile.rows && cols == tile.cols) {                                      \
                    tile.run(k, a + i * k, b + j * k, c + i + j * ldc, ldc);                       \
                    continue;                                                                      \
                }                                                                                  \
                TYPE edge[WIDEST_TILE] = {0};                                                      \
                tile.run(k, a + i * k, b + j * k, edge, tile.rows);                                \
                for (int64_t y = 0; y < cols; y++)                                                 \
                    for (int64_t x = 0; x < rows; x++)                                             \
                        c[i + x + (j + y) * ldc] += edge[x + y * tile.rows];                       \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
    static void NAME(const char *trans_a, const char *trans_b, const int *m_at, const int *n_at,   \
                     const int *k_at, const TYPE *alpha, const TYPE *a, const int *lda,            \
                     const TYPE *b, const int *ldb, const TYPE *beta, TYPE *c, const int *ldc_at,  \
                     size_t length_a, size_t length_b) {                                           \
        (void)length_a, (void)length_b;                                                            \
        int64_t m = *m_at, n = *n_at, k = *k_at, ldc = *ldc_at;                                    \
        int64_t a_row = *trans_a == 'N' ? 1 : *lda, a_col = *trans_a == 'N' ? *lda : 1;            \
        int64_t b_row = *trans_b == 'N' ? 1 : *ldb, b_col = *trans_b == 'N' ? *ldb : 1;            \
        for (int64_t j = 0; j < n && *beta != 1; j++)                                              \
            for (int64_t i = 0; i < m; i++)                                                        \
                c[i + j * ldc] = *beta == 0 ? 0 : *beta * c[i + j * ldc];                          \
        if (m == 0 || n == 0 || k == 0) return;                                                    \
        tile_kernel tile = tile_for(IS_F64);                                                       \
        int64_t deep = k < BLOCK_K ? k : BLOCK_K, tall = m < BLOCK_M ? m : BLOCK_M;                \
        int64_t wide = n < BLOCK_N ? n : BLOCK_N;                                                  \
        tall = (tall + tile.rows - 1) / tile.rows * tile.rows;                                     \
        wide = (wide + tile.cols - 1) / tile.cols * tile.cols;                                     \
        TYPE *packed = ml_alloc((size_t)(deep * (tall + wide)) * sizeof(TYPE));                    \
        if (packed == NULL) ml_raise(ML_NO_MEMORY, "out of memory in a matrix product");           \
        TYPE *packed_b = packed + deep * tall;                                                     \
        for (int64_t j = 0; j < n; j += wide)                                                      \
            for (int64_t p = 0; p < k; p += deep) {                                                \
                int64_t cols = n - j < wide ? n - j : wide, depth = k - p < deep ? k - p : deep;   \
                NAME##_pack(packed_b, b + p * b_row + j * b_col, cols, b_col, depth, b_row,        \
                            tile.cols, *alpha);                                                    \
                for (int64_t i = 0; i < m; i += tall) {                                            \
                    int64_t rows = m - i < tall ? m - i : tall;                                    \
                    NAME##_pack(packed, a + i * a_row + p * a_col, rows, a_row, depth, a_col,      \
                                tile.rows, 1);                                                     \
                    NAME##_tiles(tile, rows, cols, depth, packed, packed_b, c + i + j * ldc, ldc); \
                }                                                                                  \
            }                                                                                      \
        ml_free(packed);                                                                           \
    }

GEMM(gemm_f32, float, false)
GEMM(gemm_f64, double, true)

static const cpu_blas kernels = {gemm_f32, gemm_f64, "built-in kernels (no BLAS found)"};

const cpu_blas *cpu_kernel_blas(void) { return &kernels; }
