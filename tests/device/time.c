/* Products that are timed: any of those that steps have, in bounded memory, and by their size. */
#include <string.h>

#include "runtime/device/device.h"
#include "tests/test.h"

static ml_product matrices(int64_t m, int64_t n, int64_t k, ml_dtype dtype) {
    ml_product p = {.gemm = {.m = m, .n = n, .k = k, .batch = {1, 1, 1}}};
    p.gemm.a_row = k, p.gemm.b_row = p.gemm.c_row = n;
    p.gemm.a_col = p.gemm.b_col = p.gemm.c_col = 1;
    p.gemm.a_dtype = p.gemm.b_dtype = p.gemm.c_dtype = dtype;
    return p;
}

static ml_product groups(int64_t batch, int64_t rows, bool outer) {
    enum { GROUPS = 4, K = 24, N = 40 };
    ml_product p = {.grouped = true, .rows = rows / 2};
    p.ragged = (ml_ragged){.outer = outer,
                           .batch = batch,
                           .rows = rows,
                           .groups = GROUPS,
                           .k = K,
                           .n = N,
                           .a_batch = rows * K,
                           .a_row = K,
                           .a_col = 1,
                           .b_batch = outer ? rows * N : 0,
                           .b_group = outer ? 0 : K * N,
                           .b_row = N,
                           .b_col = 1,
                           .c_batch = outer ? 0 : rows * N,
                           .c_group = outer ? K * N : 0,
                           .c_row = N,
                           .c_col = 1,
                           .start_batch = GROUPS,
                           .end_batch = GROUPS,
                           .start_stride = 1,
                           .end_stride = 1,
                           .dtype = ML_F32,
                           .b_dtype = ML_F32,
                           .c_dtype = ML_F32};
    return p;
}

/* Fewer rows than groups, which are multiplied all the same. */
static ml_product few_rows(void) {
    enum { ROWS = 8, SIDE = 512 };
    ml_product p = groups(1, ROWS, false);
    ml_ragged *r = &p.ragged;
    p.rows = 3;
    r->k = r->n = r->a_row = r->b_row = r->c_row = SIDE;
    r->a_batch = r->c_batch = ROWS * SIDE, r->b_group = SIDE * SIDE;
    return p;
}

static ml_product batched(void) {
    ml_product p = matrices(48, 32, 16, ML_BF16);
    p.gemm.batch[1] = 3, p.gemm.batch[2] = 5;
    p.gemm.a_batch[1] = 5 * 48 * 16, p.gemm.a_batch[2] = 48 * 16; /* B is one for all */
    p.gemm.c_batch[1] = 5 * 48 * 32, p.gemm.c_batch[2] = 48 * 32;
    p.gemm.accumulate = true;
    return p;
}

/* The last ones are far larger than a part of them that takes as long for its size; they would need
 * gigabytes. */
TEST(device, products_are_timed) {
    enum { RANKS = 2, COUNT = 11, LARGE = 8 };
    ml_product all[COUNT] = {matrices(64, 64, 64, ML_F32),
                             matrices(64, 64, 64, ML_F64),
                             matrices(2, 256, 512, ML_F32),
                             batched(),
                             groups(2, 96, false),
                             groups(2, 96, true),
                             matrices(16, 0, 16, ML_F32),
                             few_rows(),
                             matrices(8192, 8192, 8192, ML_F32),
                             matrices(16, 16, 1 << 26, ML_F32),
                             matrices(1 << 26, 8, 8, ML_F32)};
    double seconds[COUNT];
    ml_device *device = NULL;
    all[0].gemm.epilogue = ML_EPILOGUE_BIAS;
    REQUIRE(ml_device_open("cpu", 0, &device) == ML_OK);
    REQUIRE(device->ops->time_products(device, all, COUNT, RANKS, 1, seconds) == ML_OK);
    for (int i = 0; i < COUNT; i++)
        EXPECT(i == 6 ? seconds[i] == 0 : seconds[i] > 0, "product %d: %g s", i, seconds[i]);
    const double flops = 2.0 * 3 * 512 * 512, fastest = 2e11; /* of a core */
    EXPECT(seconds[7] > flops / fastest, "three rows of four groups: %g s", seconds[7]);
    for (int i = LARGE; i < COUNT; i++)
        EXPECT(seconds[i] > 100 * seconds[0], "product %d: %g s, a small one %g", i, seconds[i],
               seconds[0]);
    EXPECT(device->peak_bytes <= RANKS * ((int64_t)64 << 20), "%lld bytes",
           (long long)device->peak_bytes);
    CHECK(device->current_bytes == 0);
    ml_device_close(device);
    CHECK(ml_device_null.time_products == NULL);
}
