#ifdef MLUA_CUDA
#include "runtime/device/cuda/cuda_gemm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/dynamic.h"

/* ---- The library ----------------------------------------------------------------------------- */
static const char *resolve(cuda_gemm_library *library, void *handle) {
    static const struct {
        const char *symbol;
        size_t at;
    } calls[] = {
#define ENTRY(name) {#name, offsetof(cuda_gemm_library, name)},
        CUBLASLT_CALLS(ENTRY)
#undef ENTRY
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        void *address = dlsym(handle, calls[i].symbol);
        if (!address) return calls[i].symbol;
        memcpy((char *)library + calls[i].at, &address, sizeof address);
    }
    return NULL;
}

static ml_status load_library(cuda_gemm_library *library) {
    void *handle = ml_dynamic_open("libcublasLt.so.13");
    if (!handle) handle = ml_dynamic_open("libcublasLt.so.12");
    if (!handle) {
        ml_fail(ML_DEVICE, "cuBLASLt is missing: %s", dlerror());
        return ml_help("install the CUDA toolkit's libcublasLt.so.13, or add its folder to "
                       "LD_LIBRARY_PATH; --device cpu needs none");
    }
    const char *missing = resolve(library, handle);
    if (missing) return ml_fail(ML_DEVICE, "cuBLASLt is too old: it has no %s", missing);
    library->version = library->cublasLtGetVersion();
    return ML_OK;
}

ml_status gemm_fail(const cuda_gemm_library *library, cublasStatus_t status, const char *call) {
    const char *what = cuda_doing_now();
    return ml_fail(ML_DEVICE, "%s failed: %s%s%s", call, library->cublasLtGetStatusName(status),
                   *what ? " at " : "", what);
}

static ml_status open_library(cuda_gemm_library *library) {
    ML_TRY(load_library(library));
    LT_TRY(library, cublasLtCreate, &library->handle);
    return ML_OK;
}

ml_status cuda_gemm_open(cuda_device *device) {
    if (device->gemms) return ML_OK;
    cuda_gemm_library *library = ml_alloc(sizeof *library);
    if (library) library->arena = ml_arena_new();
    if (!library || !library->arena) {
        ml_free(library);
        return ml_fail(ML_NO_MEMORY, "no memory for cuBLASLt");
    }
    library->index.arena = library->arena;
    ml_status status = open_library(library);
    if (status != ML_OK) {
        ml_arena_free(library->arena);
        ml_free(library);
        return status;
    }
    device->gemms = library;
    return ML_OK;
}

void cuda_gemm_close(cuda_device *device) {
    cuda_gemm_library *library = device->gemms;
    if (!library) return;
    for (uint32_t i = 0; i < library->gemms.count; i++) {
        cuda_gemm *gemm = library->gemms.at[i];
        if (gemm->operation) library->cublasLtMatmulDescDestroy(gemm->operation);
        if (gemm->x) library->cublasLtMatrixLayoutDestroy(gemm->x);
        if (gemm->y) library->cublasLtMatrixLayoutDestroy(gemm->y);
        if (gemm->d) library->cublasLtMatrixLayoutDestroy(gemm->d);
    }
    library->cublasLtDestroy(library->handle);
    ml_arena_free(library->arena);
    ml_free(library);
    device->gemms = NULL;
}

/* ---- Batches --------------------------------------------------------------------------------- */
/* Drop loops of one turn, join neighbours that step like one, and give the longest to cuBLASLt. */
static void arrange_batches(cuda_gemm *gemm) {
    const ml_gemm *g = &gemm->shape.gemm;
    gemm_loop loops[ML_GEMM_BATCHES];
    int count = 0, longest = 0;
    for (int i = 0; i < ML_GEMM_BATCHES; i++) {
        gemm_loop loop = {g->batch[i], g->a_batch[i], g->b_batch[i], g->c_batch[i]};
        gemm_loop *last = count > 0 ? &loops[count - 1] : NULL;
        if (loop.size == 0) gemm->empty = true;
        if (loop.size == 1) continue;
        if (last && last->a == loop.size * loop.a && last->b == loop.size * loop.b &&
            last->c == loop.size * loop.c) {
            loop.size *= last->size;
            *last = loop;
        } else
            loops[count++] = loop;
    }
    for (int i = 1; i < count; i++)
        if (loops[i].size > loops[longest].size) longest = i;
    for (int i = 0; i < ML_GEMM_BATCHES; i++) gemm->outer[i].size = 1;
    gemm->strided.size = 1;
    for (int i = 0, at = 0; i < count; i++)
        if (i == longest)
            gemm->strided = loops[i];
        else
            gemm->outer[at++] = loops[i];
}

/* ---- Descriptors ----------------------------------------------------------------------------- */
static cudaDataType_t data_type(ml_dtype dtype) {
#define NONE CUDA_R_8U /* none of cublasLt's products takes it */
    static const cudaDataType_t types[ML_DTYPE_COUNT] = {
#define ML_DTYPE(ident, name, bytes, kind, compute, promotion, digits, least, largest, host, from, \
                 to, memory, load, store, file, cuda, nccl, tensor_map, doc)                       \
    [ML_##ident] = cuda,
#include "runtime/graph/dtypes.def"
#undef ML_DTYPE
#undef NONE
    };
    return types[dtype];
}

/* A matrix op(X) of rows x columns with these strides: whether cuBLASLt must transpose what is in
 * memory, and the distance between the stored columns. */
typedef struct {
    int64_t rows, columns, row_stride, column_stride;
} matrix;

static bool leading_dimension(const matrix *m, bool *transposed, int64_t *distance) {
    bool plain = m->row_stride == 1 || m->rows == 1;
    bool turned = m->column_stride == 1 || m->columns == 1;
    if (plain && (m->columns == 1 || m->column_stride >= m->rows)) {
        *transposed = false;
        *distance = m->columns == 1 ? m->rows : m->column_stride;
        return true;
    }
    if (turned && (m->rows == 1 || m->row_stride >= m->columns)) {
        *transposed = true;
        *distance = m->rows == 1 ? m->columns : m->row_stride;
        return true;
    }
    return false;
}

static ml_status make_layout(cuda_gemm_library *library, const matrix *m, ml_dtype dtype,
                             int64_t batch, int64_t batch_stride, bool *transposed,
                             cublasLtMatrixLayout_t *layout) {
    int64_t distance = 0;
    int32_t count = (int32_t)batch;
    if (!leading_dimension(m, transposed, &distance))
        return ml_fail(ML_INTERNAL,
                       "cuBLASLt cannot read a matrix of %lld x %lld with strides %lld, %lld at %s",
                       (long long)m->rows, (long long)m->columns, (long long)m->row_stride,
                       (long long)m->column_stride, cuda_doing_now());
    LT_TRY(library, cublasLtMatrixLayoutCreate, layout, data_type(dtype),
           (uint64_t)(*transposed ? m->columns : m->rows),
           (uint64_t)(*transposed ? m->rows : m->columns), distance);
    if (batch == 1) return ML_OK;
    LT_TRY(library, cublasLtMatrixLayoutSetAttribute, *layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
           &count, sizeof count);
    LT_TRY(library, cublasLtMatrixLayoutSetAttribute, *layout,
           CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride, sizeof batch_stride);
    return ML_OK;
}

static ml_status make_layouts(cuda_gemm_library *library, cuda_gemm *gemm, bool transposed[2]) {
    const ml_gemm *g = &gemm->shape.gemm;
    const gemm_loop *batch = &gemm->strided;
    const matrix a = {g->m, g->k, g->a_row, g->a_col}, b = {g->k, g->n, g->b_row, g->b_col};
    const matrix a_t = {g->k, g->m, g->a_col, g->a_row}, b_t = {g->n, g->k, g->b_col, g->b_row};
    const matrix c = {g->m, g->n, g->c_row, g->c_col}, c_t = {g->n, g->m, g->c_col, g->c_row};
    bool c_transposed = false;
    gemm->swapped = g->c_col == 1 || g->n == 1;
    ML_TRY(make_layout(library, gemm->swapped ? &b_t : &a, gemm->swapped ? g->b_dtype : g->a_dtype,
                       batch->size, gemm->swapped ? batch->b : batch->a, &transposed[0], &gemm->x));
    ML_TRY(make_layout(library, gemm->swapped ? &a_t : &b, gemm->swapped ? g->a_dtype : g->b_dtype,
                       batch->size, gemm->swapped ? batch->a : batch->b, &transposed[1], &gemm->y));
    ML_TRY(make_layout(library, gemm->swapped ? &c_t : &c, g->c_dtype, batch->size, batch->c,
                       &c_transposed, &gemm->d));
    if (c_transposed || (g->epilogue == ML_EPILOGUE_BIAS && !gemm->swapped))
        return ml_fail(ML_INTERNAL, "cuBLASLt cannot write this layout%s at %s",
                       g->epilogue == ML_EPILOGUE_BIAS ? " with a bias" : "", cuda_doing_now());
    return ML_OK;
}

static ml_status make_operation(cuda_gemm_library *library, cuda_gemm *gemm,
                                const bool transposed[2]) {
    const ml_gemm *g = &gemm->shape.gemm;
    bool wide = g->c_dtype == ML_F64;
    cublasOperation_t x = transposed[0] ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t y = transposed[1] ? CUBLAS_OP_T : CUBLAS_OP_N;
    LT_TRY(library, cublasLtMatmulDescCreate, &gemm->operation,
           wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, wide ? CUDA_R_64F : CUDA_R_32F);
    LT_TRY(library, cublasLtMatmulDescSetAttribute, gemm->operation, CUBLASLT_MATMUL_DESC_TRANSA,
           &x, sizeof x);
    LT_TRY(library, cublasLtMatmulDescSetAttribute, gemm->operation, CUBLASLT_MATMUL_DESC_TRANSB,
           &y, sizeof y);
    /* Hopper adds up 8-bit floats in fewer bits than f32 has. Gradients are promoted to f32 every
     * 128 of k. */
    const int8_t fast = g->a_dtype == ML_E4M3 && g->b_dtype == ML_E4M3;
    if (g->scaled)
        LT_TRY(library, cublasLtMatmulDescSetAttribute, gemm->operation,
               CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    if (g->epilogue != ML_EPILOGUE_BIAS) return ML_OK;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cudaDataType_t type = data_type(g->c_dtype);
    /* Heuristics read the alignment off the pointer; each call sets the real one. */
    const void *pointer = (const void *)(uintptr_t)gemm->shape.alignment[3];
    LT_TRY(library, cublasLtMatmulDescSetAttribute, gemm->operation, CUBLASLT_MATMUL_DESC_EPILOGUE,
           &epilogue, sizeof epilogue);
    LT_TRY(library, cublasLtMatmulDescSetAttribute, gemm->operation,
           CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type);
    LT_TRY(library, cublasLtMatmulDescSetAttribute, gemm->operation,
           CUBLASLT_MATMUL_DESC_BIAS_POINTER, &pointer, sizeof pointer);
    return ML_OK;
}

static ml_status make_gemm(cuda_gemm_library *library, cuda_gemm *gemm) {
    const ml_gemm *g = &gemm->shape.gemm;
    bool transposed[2];
    const bool scaled = g->scaled && (g->c_dtype == ML_BF16 || g->c_dtype == ML_F32);
    bool supported =
        scaled ||
        (g->a_dtype == g->b_dtype &&
         (g->a_dtype == g->c_dtype || (ml_is_narrow(g->a_dtype) && g->c_dtype == ML_F32)));
    if (!supported)
        return ml_fail(ML_INTERNAL, "cuBLASLt has no product of %s and %s into %s, wanted at %s",
                       ml_dtypes[g->a_dtype].name, ml_dtypes[g->b_dtype].name,
                       ml_dtypes[g->c_dtype].name, cuda_doing_now());
    arrange_batches(gemm);
    gemm->empty |= g->m == 0 || g->n == 0 || g->k == 0;
    if (gemm->empty) return ML_OK;
    ML_TRY(make_layouts(library, gemm, transposed));
    return make_operation(library, gemm, transposed);
}

typedef struct {
    cuda_gemm_library *library;
    const cuda_gemm_shape *shape;
    uint64_t hash;
    cuda_gemm *gemm;
} gemm_request;

static void add_gemm(void *argument) {
    gemm_request *request = argument;
    cuda_gemm_library *library = request->library;
    request->gemm = ML_NEW(library->arena, cuda_gemm);
    request->gemm->shape = *request->shape;
    *ML_PUSH(library->arena, &library->gemms) = request->gemm;
    ML_CHECK(make_gemm(library, request->gemm));
    ml_index_add(&library->index, request->hash, library->gemms.count - 1);
}

/* Field by field: padding between fields must not count. */
static bool same_shape(const cuda_gemm_shape *p, const cuda_gemm_shape *q) {
    const ml_gemm *a = &p->gemm, *b = &q->gemm;
    return memcmp(a, b, offsetof(ml_gemm, a_dtype)) == 0 && a->a_dtype == b->a_dtype &&
           a->b_dtype == b->b_dtype && a->c_dtype == b->c_dtype && a->accumulate == b->accumulate &&
           a->epilogue == b->epilogue && a->scaled == b->scaled &&
           memcmp(p->alignment, q->alignment, sizeof p->alignment) == 0;
}

ml_status cuda_gemm_find(cuda_device *device, const cuda_gemm_shape *shape, cuda_gemm **gemm) {
    cuda_gemm_library *library = device->gemms;
    uint64_t hash = ml_hash(&shape->gemm, offsetof(ml_gemm, a_dtype), 0);
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&library->index, hash, &cursor)) != ML_INDEX_NONE)
        if (same_shape(&library->gemms.at[at]->shape, shape)) {
            *gemm = library->gemms.at[at];
            return ML_OK;
        }
    gemm_request request = {library, shape, hash, NULL};
    ML_TRY(ml_protect(add_gemm, &request));
    *gemm = request.gemm;
    return ML_OK;
}

const char *gemm_describe(const cuda_gemm *gemm, char *out, int size) {
    const ml_gemm *g = &gemm->shape.gemm;
    int64_t batch = g->batch[0] * g->batch[1] * g->batch[2];
    snprintf(out, (size_t)size, "%lld x %lld x %lld (m, n, k) x %lld %s%s%s -> %s%s%s",
             (long long)g->m, (long long)g->n, (long long)g->k, (long long)batch,
             ml_dtypes[g->a_dtype].name, g->a_dtype == g->b_dtype ? "" : " by ",
             g->a_dtype == g->b_dtype ? "" : ml_dtypes[g->b_dtype].name, ml_dtypes[g->c_dtype].name,
             g->accumulate ? " accumulated" : "",
             g->epilogue == ML_EPILOGUE_BIAS ? " with bias" : "");
    return out;
}

/* ---- Running --------------------------------------------------------------------------------- */
cublasStatus_t gemm_call(cuda_device *device, const cuda_gemm *gemm, void *a, void *b, void *c,
                         const cublasLtMatmulAlgo_t *algorithm) {
    const cuda_gemm_library *library = device->gemms;
    const bool wide = gemm->shape.gemm.c_dtype == ML_F64;
    const double one = 1, beta = gemm->shape.gemm.accumulate ? 1 : 0;
    const float one_f = 1, beta_f = (float)beta;
    const void *alpha = wide ? (const void *)&one : &one_f;
    return library->cublasLtMatmul(library->handle, gemm->operation, alpha, gemm->swapped ? b : a,
                                   gemm->x, gemm->swapped ? a : b, gemm->y,
                                   wide ? (const void *)&beta : &beta_f, c, gemm->d, c, gemm->d,
                                   algorithm, (void *)(uintptr_t)device->workspace,
                                   ML_GEMM_WORKSPACE, device->stream);
}

/* Nothing is summed up: C is 0, or stays as it is. */
static ml_status run_empty(cuda_device *device, const cuda_gemm *gemm, char *c) {
    const ml_gemm *g = &gemm->shape.gemm;
    const int64_t bytes = ml_dtypes[g->c_dtype].bytes;
    if (g->accumulate || g->m == 0 || g->n == 0) return ML_OK;
    if (g->epilogue == ML_EPILOGUE_BIAS)
        return ml_fail(ML_INTERNAL, "a bias is added to an empty product at %s", cuda_doing_now());
    bool rows = g->c_col == 1 || g->n == 1;
    int64_t width = rows ? g->n : g->m, height = rows ? g->m : g->n;
    int64_t pitch = rows ? g->c_row : g->c_col;
    for (int64_t i = 0; i < g->batch[0] * g->batch[1] * g->batch[2]; i++) {
        int64_t i2 = i % g->batch[2], i1 = i / g->batch[2] % g->batch[1];
        int64_t i0 = i / g->batch[2] / g->batch[1];
        int64_t at = i0 * g->c_batch[0] + i1 * g->c_batch[1] + i2 * g->c_batch[2];
        CUDA_TRY(cuMemsetD2D8Async((CUdeviceptr)(uintptr_t)(c + at * bytes),
                                   (size_t)((height == 1 ? width : pitch) * bytes), 0,
                                   (size_t)(width * bytes), (size_t)height, device->stream));
    }
    return ML_OK;
}

ml_status gemm_point(const cuda_gemm_library *library, const cuda_gemm *gemm,
                     void *const *operands) {
    if (operands[3])
        LT_TRY(library, cublasLtMatmulDescSetAttribute, gemm->operation,
               CUBLASLT_MATMUL_DESC_BIAS_POINTER, &operands[3], sizeof operands[3]);
    if (operands[4]) /* of both operands: that of Y is 1 */
        LT_TRY(library, cublasLtMatmulDescSetAttribute, gemm->operation,
               CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &operands[4], sizeof operands[4]);
    return ML_OK;
}

ml_status cuda_gemm_run(cuda_device *device, cuda_gemm *gemm, void *const *operands) {
    cuda_gemm_library *library = device->gemms;
    const ml_gemm *g = &gemm->shape.gemm;
    const int64_t in = ml_dtypes[g->a_dtype].bytes, out = ml_dtypes[g->c_dtype].bytes;
    const gemm_loop *p = &gemm->outer[0], *q = &gemm->outer[1];
    if (gemm->empty) return run_empty(device, gemm, operands[2]);
    ML_TRY(gemm_point(library, gemm, operands));
    for (int64_t i = 0; i < p->size; i++)
        for (int64_t j = 0; j < q->size; j++) {
            char *a = (char *)operands[0] + (i * p->a + j * q->a) * in;
            char *b = (char *)operands[1] + (i * p->b + j * q->b) * in;
            char *c = (char *)operands[2] + (i * p->c + j * q->c) * out;
            cublasStatus_t status = gemm_call(device, gemm, a, b, c, &gemm->algorithm);
            if (status != CUBLAS_STATUS_SUCCESS)
                return gemm_fail(library, status, "cublasLtMatmul");
        }
    return ML_OK;
}

int64_t gemm_extent(const cuda_gemm *gemm, int operand) {
    const ml_gemm *g = &gemm->shape.gemm;
    const ml_dtype dtype = operand == 0 ? g->a_dtype : operand == 1 ? g->b_dtype : g->c_dtype;
    const int64_t rows = operand == 1 ? g->k : g->m, columns = operand == 0 ? g->k : g->n;
    const int64_t row = operand == 0 ? g->a_row : operand == 1 ? g->b_row : g->c_row;
    const int64_t column = operand == 0 ? g->a_col : operand == 1 ? g->b_col : g->c_col;
    const int64_t *stride = operand == 0 ? g->a_batch : operand == 1 ? g->b_batch : g->c_batch;
    int64_t last = (rows - 1) * row + (columns - 1) * column;
    for (int i = 0; i < ML_GEMM_BATCHES; i++) last += (g->batch[i] - 1) * stride[i];
    return (last + 1) * ml_dtypes[dtype].bytes;
}
#endif
