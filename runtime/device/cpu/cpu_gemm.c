/* GEMM steps on the CPU: each matrix product is cut over the pool's threads into blocks of C, and
 * each block is one call of a single-threaded BLAS (or of cpu_kernel.c where there is none). What
 * BLAS cannot address (bf16, operands without a unit stride) is converted in scratch memory. The
 * blocks depend on the shape alone: a BLAS sums an element in another order where it is in
 * another block, so that a cut by the number of threads would let that number change results. */
#include <string.h>

#include "runtime/device/cpu/cpu_few.h"
#include "runtime/device/cpu/cpu_internal.h"
#include "runtime/device/cpu/cpu_kernel.h"
#include "runtime/graph/convert.h"

/* A matrix as BLAS or the conversion sees it: element (i, j) is at data[i * row + j * col]. */
typedef struct {
    char *data;
    int64_t rows, cols, row, col;
    ml_dtype dtype;
} matrix;

typedef struct {
    ml_dtype compute; /* F32 or F64 */
    int64_t m, n, k, batches;
    bool convert_a, convert_b, convert_c;
    enum { MANY_ROWS, FEW_ROWS, FEW_COLS } few; /* a product of few rows: cpu_few.c */
    int64_t a_at, b_at, c_at, bytes;            /* places in one item's scratch */
    bool by_batch; /* a unit of work is a batch item; else a block of C */
    int64_t blocks_m, blocks_n;
    int64_t packing; /* bytes a thread, where there is no BLAS */
} gemm_cut;

typedef struct {
    const ml_gemm *gemm;
    gemm_cut cut;
    const cpu_blas *blas;
    const char *a, *b, *bias;
    char *c, *scratch;
    matrix ready_a, ready_b, ready_c; /* of the item that blocks are computed of */
    matrix from, to;                  /* of a conversion */
    char *packing;                    /* cut.packing bytes for each thread */
} gemm_run;

/* With leading dimensions that an int holds. */
static bool blas_takes(int64_t rows, int64_t cols, int64_t row, int64_t col) {
    if ((rows > 1 && row > INT32_MAX) || (cols > 1 && col > INT32_MAX)) return false;
    bool by_rows = (col == 1 || cols == 1) && (rows == 1 || row >= cols);
    bool by_cols = (row == 1 || rows == 1) && (cols == 1 || col >= rows);
    return by_rows || by_cols;
}

/* In halves, up to MOST_BLOCKS: two blocks may have sides of 32, more of 128, 256 and then 512, so
 * that packing the operands again for each block does not show. A job of `products` as large as
 * this one has that many blocks before any is cut. */
enum { MOST_BLOCKS = 64 };
static void cut_blocks(gemm_cut *cut, int64_t products) {
    if (2.0 * (double)cut->m * (double)cut->n * (double)cut->k < 2e5) return;
    for (int64_t blocks = products; blocks < MOST_BLOCKS; blocks *= 2) {
        int64_t rows = cut->m / cut->blocks_m, cols = cut->n / cut->blocks_n;
        int64_t least = blocks < 2 ? 32 : blocks < 4 ? 128 : blocks < 8 ? 256 : 512;
        if ((rows >= cols ? rows : cols) / 2 < least) return;
        if (rows >= cols)
            cut->blocks_m *= 2;
        else
            cut->blocks_n *= 2;
    }
}

/* Up to how many rows reading the other operand once takes longer than its arithmetic. */
static int64_t few_rows(ml_dtype wide) {
    enum { FEW_OF_FLOATS = 8 };
    if (!cpu_few_reads(wide)) return 0;
    return ml_dtypes[wide].bytes < ml_dtypes[ML_F32].bytes ? CPU_FEW_ROWS : FEW_OF_FLOATS;
}

static void choose_few(const ml_gemm *g, gemm_cut *cut) {
    if (cut->batches != 1 || cut->compute != ML_F32) return;
    if (g->m <= few_rows(g->b_dtype) && g->m <= g->n && (g->b_row == 1 || g->b_col == 1)) {
        cut->few = FEW_ROWS;
        cut->convert_a = g->a_dtype != ML_F32, cut->convert_b = false;
        cut->convert_c = g->c_dtype != ML_F32 || (g->c_col != 1 && g->n > 1);
    } else if (g->n <= few_rows(g->a_dtype) && (g->a_row == 1 || g->a_col == 1)) {
        cut->few = FEW_COLS; /* C^T = B^T A^T */
        cut->convert_b = g->b_dtype != ML_F32, cut->convert_a = false;
        cut->convert_c = g->c_dtype != ML_F32 || (g->c_row != 1 && g->m > 1);
    }
}

/* Without any scratch memory but for packing, either way round: product() may transpose. */
static gemm_cut cut_plain(const ml_gemm *g) {
    gemm_cut cut = {.m = g->m, .n = g->n, .k = g->k, .blocks_m = 1, .blocks_n = 1};
    cut.batches = g->batch[0] * g->batch[1] * g->batch[2];
    bool wide = g->a_dtype == ML_F64 || g->b_dtype == ML_F64 || g->c_dtype == ML_F64;
    cut.compute = wide ? ML_F64 : ML_F32;
    cut.convert_a = g->a_dtype != cut.compute || !blas_takes(g->m, g->k, g->a_row, g->a_col);
    cut.convert_b = g->b_dtype != cut.compute || !blas_takes(g->k, g->n, g->b_row, g->b_col);
    cut.convert_c = g->c_dtype != cut.compute || !blas_takes(g->m, g->n, g->c_row, g->c_col);
    if (cpu_blas_find() == NULL) {
        int64_t plain = cpu_kernel_packing(cut.compute, g->n, g->k);
        int64_t turned = cpu_kernel_packing(cut.compute, g->m, g->k);
        cut.packing = plain > turned ? plain : turned;
    }
    return cut;
}

static gemm_cut cut_gemm(const ml_gemm *g, int threads) {
    gemm_cut cut = cut_plain(g);
    choose_few(g, &cut);
    if (cut.few) cut.packing = 0;
    int64_t size = ml_dtypes[cut.compute].bytes;
    cut.b_at = cut.convert_a ? cpu_aligned(g->m * g->k * size) : 0;
    cut.c_at = cut.b_at + (cut.convert_b ? cpu_aligned(g->k * g->n * size) : 0);
    cut.bytes = cut.c_at + (cut.convert_c ? cpu_aligned(g->m * g->n * size) : 0);
    cut.by_batch = !cut.few && (threads == 1 || cut.batches >= 2 * threads);
    cut_blocks(&cut, 1);
    return cut;
}

int64_t cpu_gemm_scratch(const ml_gemm *gemm, int threads) {
    gemm_cut cut = cut_gemm(gemm, threads);
    return (cut.by_batch ? cut.bytes * threads : cut.bytes) + cut.packing * threads;
}

/* ---- conversion ---- */
static double element_read(const char *at, ml_dtype dtype) {
    if (dtype == ML_F64) return *(const double *)at;
    if (dtype == ML_F32) return *(const float *)at;
    return ml_element(dtype, at, 0);
}

static uint16_t bf16_round(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void element_write(char *at, ml_dtype dtype, double value) {
    if (dtype == ML_F64)
        *(double *)at = value;
    else if (dtype == ML_F32)
        *(float *)at = (float)value;
    else
        ml_set_element(dtype, at, 0, value);
}

static void widen_row(float *restrict to, const uint16_t *restrict from, int64_t count) {
    uint32_t *restrict bits = (uint32_t *)to;
    for (int64_t i = 0; i < count; i++) bits[i] = (uint32_t)from[i] << 16;
}

static void narrow_row(uint16_t *restrict to, const float *restrict from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = bf16_round(from[i]);
}

/* Rows begin .. end-1 of run->from to run->to. */
static void convert_rows(void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const gemm_run *run = context;
    const matrix *from = &run->from, *to = &run->to;
    int64_t from_size = ml_dtypes[from->dtype].bytes, to_size = ml_dtypes[to->dtype].bytes;
    bool plain = from->col == 1 && to->col == 1;
    for (int64_t i = begin; i < end; i++) {
        char *x = from->data + i * from->row * from_size, *y = to->data + i * to->row * to_size;
        if (plain && from->dtype == ML_BF16 && to->dtype == ML_F32) {
            widen_row((float *)y, (const uint16_t *)x, from->cols);
        } else if (plain && from->dtype == ML_F32 && to->dtype == ML_BF16) {
            narrow_row((uint16_t *)y, (const float *)x, from->cols);
        } else if (plain) {
            ml_convert(from->dtype, x, to->dtype, y, from->cols);
        } else {
            for (int64_t j = 0; j < from->cols; j++) {
                double value = element_read(x + j * from->col * from_size, from->dtype);
                element_write(y + j * to->col * to_size, to->dtype, value);
            }
        }
    }
}

static matrix transposed(matrix m) {
    return (matrix){m.data, m.cols, m.rows, m.col, m.row, m.dtype};
}

static ml_status convert(const gemm_run *run, ml_pool *pool, matrix from, matrix to) {
    gemm_run call = *run;
    bool flip = from.col != 1 && (from.row == 1 || to.col != 1);
    call.from = flip ? transposed(from) : from;
    call.to = flip ? transposed(to) : to;
    int64_t rows = call.from.rows, parts = rows * call.from.cols / 16384;
    if (pool == NULL || parts <= 1) {
        convert_rows(&call, 0, rows, 0);
        return ML_OK;
    }
    if (parts > ml_pool_threads(pool)) parts = ml_pool_threads(pool);
    return ml_pool_run(pool, rows, parts < rows ? parts : rows, convert_rows, &call);
}

/* Where the converted copy of `m` is: without gaps, with the unit stride where m has it. */
static matrix scratch_like(matrix m, char *data, ml_dtype dtype) {
    bool by_cols = m.row == 1 && m.col != 1;
    return (matrix){data, m.rows, m.cols, by_cols ? 1 : m.cols, by_cols ? m.rows : 1, dtype};
}

/* That of C, of which a product with few rows writes whole rows. */
static matrix scratch_for_c(const gemm_cut *cut, matrix c, char *data) {
    if (!cut->few) return scratch_like(c, data, cut->compute);
    bool turned = cut->few == FEW_COLS;
    return (matrix){data, c.rows, c.cols, turned ? 1 : c.cols, turned ? c.rows : 1, cut->compute};
}

/* ---- products ---- */
static bool by_rows(const matrix *m) {
    return (m->col == 1 || m->cols == 1) && (m->rows == 1 || m->row >= m->cols);
}

/* BLAS's view of a matrix whose rows are its columns: the flag, and the leading dimension. */
static const char *blas_view(const matrix *m, int *leading) {
    bool plain = by_rows(m);
    int64_t lines = plain ? m->rows : m->cols, length = plain ? m->cols : m->rows;
    int64_t stride = lines == 1 ? length : plain ? m->row : m->col;
    *leading = (int)(stride > 1 ? stride : 1);
    return plain ? "N" : "T";
}

static void product(const gemm_run *run, matrix a, matrix b, matrix c, int thread) {
    const cpu_blas *blas = run->blas;
    bool accumulate = run->gemm->accumulate;
    if (!by_rows(&c)) { /* C^T = B^T A^T */
        matrix old = a;
        a = transposed(b), b = transposed(old), c = transposed(c);
    }
    if (blas == NULL) {
        cpu_kernel_product(&(cpu_kernel_call){c.dtype, c.rows, c.cols, a.cols, a.data, b.data,
                                              c.data, a.row, a.col, b.row, b.col, c.row, accumulate,
                                              run->packing + thread * run->cut.packing});
        return;
    }
    int m = (int)c.cols, n = (int)c.rows, k = (int)a.cols, lda, ldb, ldc;
    const char *first = blas_view(&b, &lda), *second = blas_view(&a, &ldb);
    blas_view(&c, &ldc);
    if (m == 0 || n == 0) return;
    if (c.dtype == ML_F64) {
        double one = 1, beta = accumulate;
        blas->dgemm(first, second, &m, &n, &k, &one, (const double *)b.data, &lda,
                    (const double *)a.data, &ldb, &beta, (double *)c.data, &ldc, 1, 1);
    } else {
        float one = 1, beta = accumulate;
        blas->sgemm(first, second, &m, &n, &k, &one, (const float *)b.data, &lda,
                    (const float *)a.data, &ldb, &beta, (float *)c.data, &ldc, 1, 1);
    }
}

static matrix part(matrix m, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    m.data += (row * m.row + col * m.col) * ml_dtypes[m.dtype].bytes;
    m.rows = rows;
    m.cols = cols;
    return m;
}

/* Where block `i` of `blocks` begins: at multiples of a cache line's floats, where there are many.
 */
static int64_t border(int64_t count, int64_t i, int64_t blocks) {
    if (i == blocks) return count;
    int64_t at = count / blocks * i;
    return count >= 64 * blocks ? at & ~(int64_t)15 : at;
}

static void add_bias(const gemm_run *run, matrix c, int64_t col) {
    ml_dtype dtype = run->gemm->c_dtype;
    for (int64_t i = 0; i < c.rows; i++) {
        for (int64_t j = 0; j < c.cols; j++) {
            char *at = c.data + (i * c.row + j * c.col) * ml_dtypes[c.dtype].bytes;
            double bias = element_read(run->bias + (col + j) * ml_dtypes[dtype].bytes, dtype);
            element_write(at, c.dtype, element_read(at, c.dtype) + bias);
        }
    }
}

static cpu_gemm_block block_at(const gemm_cut *cut, int64_t unit) {
    int64_t i = unit / cut->blocks_n, j = unit % cut->blocks_n;
    int64_t row = border(cut->m, i, cut->blocks_m), col = border(cut->n, j, cut->blocks_n);
    return (cpu_gemm_block){row, border(cut->m, i + 1, cut->blocks_m) - row, col,
                            border(cut->n, j + 1, cut->blocks_n) - col};
}

static void compute_blocks(void *context, int64_t begin, int64_t end, int thread) {
    const gemm_run *run = context;
    for (int64_t unit = begin; unit < end; unit++) {
        const cpu_gemm_block at = block_at(&run->cut, unit);
        matrix c = part(run->ready_c, at.row, at.rows, at.col, at.cols);
        product(run, part(run->ready_a, at.row, at.rows, 0, run->cut.k),
                part(run->ready_b, 0, run->cut.k, at.col, at.cols), c, thread);
        if (run->bias != NULL) add_bias(run, c, at.col);
    }
}

/* The few rows are those of A, or the columns of B. */
static cpu_few_call few_call(const gemm_run *run) {
    const bool turned = run->cut.few == FEW_COLS;
    const matrix a = turned ? transposed(run->ready_b) : run->ready_a;
    const matrix b = turned ? transposed(run->ready_a) : run->ready_b;
    const matrix c = turned ? transposed(run->ready_c) : run->ready_c;
    return (cpu_few_call){c.rows,
                          c.cols,
                          a.cols,
                          (const float *)a.data,
                          a.row,
                          a.col,
                          b.data,
                          b.dtype,
                          b.row,
                          b.col,
                          (float *)c.data,
                          c.row,
                          run->gemm->accumulate};
}

enum { FEW_UNIT = 32 }; /* columns: two cache lines */

static int64_t few_units(const gemm_run *run) {
    return ((run->cut.few == FEW_COLS ? run->cut.m : run->cut.n) + FEW_UNIT - 1) / FEW_UNIT;
}

static void compute_few(void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const gemm_run *run = context;
    const cpu_few_call call = few_call(run);
    const int64_t first = begin * FEW_UNIT;
    const int64_t last = end * FEW_UNIT < call.n ? end * FEW_UNIT : call.n;
    cpu_few_product(&call, first, last);
    if (run->bias == NULL) return;
    const bool turned = run->cut.few == FEW_COLS;
    matrix c = turned ? part(run->ready_c, first, last - first, 0, run->cut.n)
                      : part(run->ready_c, 0, run->cut.m, first, last - first);
    add_bias(run, c, turned ? 0 : first);
}

/* Parts of columns that are wide enough to be read in long pieces; one for what is done sooner than
 * a thread wakes up. */
static ml_status run_few(gemm_run *run, ml_pool *pool) {
    enum { LEAST_BYTES = 1 << 15, PIECE = 1 << 10 };
    const cpu_few_call call = few_call(run);
    const int64_t units = few_units(run), threads = ml_pool_threads(pool);
    int64_t parts = call.n * ml_dtypes[call.b_dtype].bytes / PIECE;
    if (parts > 4 * threads) parts = 4 * threads;
    if (parts < threads) parts = threads;
    if (call.n * call.k * ml_dtypes[call.b_dtype].bytes < LEAST_BYTES) parts = 1;
    return ml_pool_run(pool, units, parts, compute_few, run);
}

/* Those of a batch item, as they are; where they begin is counted in elements. */
static void set_operands(gemm_run *run, int64_t a, int64_t b, int64_t c) {
    const ml_gemm *g = run->gemm;
    run->ready_a = (matrix){(char *)run->a + a * ml_dtypes[g->a_dtype].bytes,
                            g->m,
                            g->k,
                            g->a_row,
                            g->a_col,
                            g->a_dtype};
    run->ready_b = (matrix){(char *)run->b + b * ml_dtypes[g->b_dtype].bytes,
                            g->k,
                            g->n,
                            g->b_row,
                            g->b_col,
                            g->b_dtype};
    run->ready_c = (matrix){
        run->c + c * ml_dtypes[g->c_dtype].bytes, g->m, g->n, g->c_row, g->c_col, g->c_dtype};
}

/* One item of the batch; `pool` is NULL inside of a job, which is thread `thread` then. */
static ml_status compute_item(gemm_run *run, int64_t item, char *scratch, ml_pool *pool,
                              int thread) {
    const ml_gemm *g = run->gemm;
    const gemm_cut *cut = &run->cut;
    int64_t at[ML_GEMM_BATCHES];
    for (int d = ML_GEMM_BATCHES - 1; d >= 0; d--) {
        at[d] = item % g->batch[d];
        item /= g->batch[d];
    }
    int64_t a = 0, b = 0, c = 0;
    for (int d = 0; d < ML_GEMM_BATCHES; d++) {
        a += at[d] * g->a_batch[d], b += at[d] * g->b_batch[d], c += at[d] * g->c_batch[d];
    }
    set_operands(run, a, b, c);
    const matrix whole_a = run->ready_a, whole_b = run->ready_b, whole_c = run->ready_c;
    ml_status status = ML_OK;
    if (cut->convert_a) {
        run->ready_a = scratch_like(whole_a, scratch, cut->compute);
        status = convert(run, pool, whole_a, run->ready_a);
    }
    if (cut->convert_b && status == ML_OK) {
        run->ready_b = scratch_like(whole_b, scratch + cut->b_at, cut->compute);
        status = convert(run, pool, whole_b, run->ready_b);
    }
    if (cut->convert_c && status == ML_OK) {
        run->ready_c = scratch_for_c(cut, whole_c, scratch + cut->c_at);
        if (g->accumulate) status = convert(run, pool, whole_c, run->ready_c);
    }
    int64_t blocks = cut->blocks_m * cut->blocks_n;
    if (status != ML_OK) return status;
    if (cut->few)
        status = run_few(run, pool);
    else if (pool == NULL || blocks == 1)
        compute_blocks(run, 0, blocks, thread);
    else
        status = ml_pool_run(pool, blocks, blocks, compute_blocks, run);
    if (cut->convert_c && status == ML_OK) status = convert(run, pool, run->ready_c, whole_c);
    return status;
}

static void compute_items(void *context, int64_t begin, int64_t end, int thread) {
    gemm_run run = *(const gemm_run *)context;
    char *scratch = run.scratch + thread * run.cut.bytes;
    for (int64_t item = begin; item < end; item++)
        ML_CHECK(compute_item(&run, item, scratch, NULL, thread));
}

/* ---- blocks as units of a job of several products ---- */
static bool converts(const gemm_cut *cut) {
    return cut->convert_a || cut->convert_b || cut->convert_c;
}

static bool too_large(const ml_gemm *g) {
    return g->m > INT32_MAX || g->n > INT32_MAX || g->k > INT32_MAX;
}

bool cpu_gemm_direct(const ml_gemm *gemm) {
    gemm_cut cut = cut_plain(gemm);
    return !converts(&cut) && !too_large(gemm);
}

int64_t cpu_gemm_blocks(const ml_gemm *gemm, int64_t products) {
    gemm_cut cut = cut_plain(gemm);
    cut_blocks(&cut, products);
    return cut.blocks_m * cut.blocks_n;
}

cpu_gemm_block cpu_gemm_block_at(const ml_gemm *gemm, int64_t products, int64_t i) {
    gemm_cut cut = cut_plain(gemm);
    cut_blocks(&cut, products);
    return block_at(&cut, i);
}

int64_t cpu_gemm_packing(const ml_gemm *gemm) {
    return cut_plain(gemm).packing;
}

void cpu_gemm_compute(const ml_gemm *gemm, const void *a, const void *b, void *c, void *packing) {
    const gemm_cut plain = cut_plain(gemm);
    gemm_run run = {.gemm = gemm, .cut = plain, .a = a, .b = b, .c = c, .packing = packing};
    run.blas = cpu_blas_find();
    set_operands(&run, 0, 0, 0);
    choose_few(gemm, &run.cut);
    if (run.cut.few && !converts(&run.cut)) {
        compute_few(&run, 0, few_units(&run), 0);
        return;
    }
    run.cut = plain;
    compute_blocks(&run, 0, 1, 0);
}

ml_status cpu_gemm_run(const ml_gemm *gemm, const void *a, const void *b, void *c, const void *bias,
                       void *scratch, ml_pool *pool) {
    int threads = ml_pool_threads(pool);
    gemm_run run = {.gemm = gemm, .cut = cut_gemm(gemm, threads), .a = a, .b = b, .bias = bias};
    run.c = c;
    run.scratch = scratch;
    run.packing = run.scratch + (run.cut.by_batch ? run.cut.bytes * threads : run.cut.bytes);
    run.blas = cpu_blas_find();
    if (too_large(gemm)) {
        return ml_fail(ML_INVALID,
                       "a product of %lld x %lld x %lld is beyond what BLAS can address",
                       (long long)gemm->m, (long long)gemm->n, (long long)gemm->k);
    }
    if (!run.cut.by_batch) {
        for (int64_t item = 0; item < run.cut.batches; item++) {
            ML_TRY(compute_item(&run, item, run.scratch, pool, 0));
        }
        return ML_OK;
    }
    double flops = 2.0 * (double)gemm->m * (double)gemm->n * (double)gemm->k;
    int64_t parts = run.cut.batches < 4 * threads ? run.cut.batches : 4 * threads;
    if (threads == 1 || flops * (double)run.cut.batches < 2e5) parts = 1;
    if (run.cut.batches == 0) return ML_OK;
    return ml_pool_run(pool, run.cut.batches, parts, compute_items, &run);
}
