/* libcublasLt for the emulator: products by their definition, in float64. Refuses what the library
 * refuses: shapes that disagree, leading dimensions that are too small. */
#include <cublasLt.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fibers.h"

typedef struct {
    cudaDataType type;
    int64_t rows, columns, distance, batch, batch_stride;
} layout;
typedef struct {
    cudaDataType scale;
    cublasOperation_t a_form, b_form;
    cublasLtEpilogue_t epilogue;
    cudaDataType bias_type;
    const void *bias;
    const float *scale_a;
} operation;
typedef struct {
    operation op;
    layout a, b, d;
    const void *a_memory, *b_memory;
    void *d_memory;
    double alpha, beta;
} product;

/* E4M3 where `digits` is 3, E5M2 where it is 2. */
static double small_float(unsigned bits, int digits) {
    const int exponent = (int)(bits >> digits & ((0x80u >> digits) - 1)),
              bias = digits == 3 ? 7 : 15;
    const double fraction = (double)(bits & ((1u << digits) - 1)) / (1 << digits);
    const int top = digits == 3 ? (bits & 0x7f) == 0x7f : exponent == 31;
    double value = exponent ? ldexp(1 + fraction, exponent - bias) : ldexp(fraction, 1 - bias);
    if (top) value = digits == 2 && fraction == 0 ? INFINITY : NAN;
    return bits & 0x80 ? -value : value;
}

static double get(const void *memory, cudaDataType type, int64_t i) {
    uint32_t bits;
    float value;
    if (type == CUDA_R_64F) return ((const double *)memory)[i];
    if (type == CUDA_R_32F) return (double)((const float *)memory)[i];
    if (type == CUDA_R_8F_E4M3) return small_float(((const uint8_t *)memory)[i], 3);
    if (type == CUDA_R_8F_E5M2) return small_float(((const uint8_t *)memory)[i], 2);
    if (type == CUDA_R_16F) return (double)((const _Float16 *)memory)[i];
    bits = (uint32_t)((const uint16_t *)memory)[i] << 16;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static void put(void *memory, cudaDataType type, int64_t i, double value) {
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    if (type == CUDA_R_64F)
        ((double *)memory)[i] = value;
    else if (type == CUDA_R_32F)
        ((float *)memory)[i] = narrow;
    else if (type == CUDA_R_16F)
        ((_Float16 *)memory)[i] = (_Float16)narrow;
    else
        ((uint16_t *)memory)[i] =
            narrow != narrow ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static double element(const void *memory, const layout *l, cublasOperation_t form, int64_t batch,
                      int64_t row, int64_t column) {
    int64_t i = form == CUBLAS_OP_N ? row + column * l->distance : column + row * l->distance;
    return get(memory, l->type, batch * l->batch_stride + i);
}

static int multiply(void *data) {
    const product *p = data;
    const int64_t depth = p->op.a_form == CUBLAS_OP_N ? p->a.columns : p->a.rows;
    for (int64_t batch = 0; batch < p->d.batch; batch++)
        for (int64_t column = 0; column < p->d.columns; column++)
            for (int64_t row = 0; row < p->d.rows; row++) {
                const int64_t at = batch * p->d.batch_stride + row + column * p->d.distance;
                double sum = 0;
                for (int64_t k = 0; k < depth; k++)
                    sum += element(p->a_memory, &p->a, p->op.a_form, batch, row, k) *
                           element(p->b_memory, &p->b, p->op.b_form, batch, k, column);
                sum *= p->alpha * (p->op.scale_a ? (double)*p->op.scale_a : 1);
                if (p->beta != 0) sum += p->beta * get(p->d_memory, p->d.type, at);
                if (p->op.epilogue == CUBLASLT_EPILOGUE_BIAS)
                    sum += get(p->op.bias, p->op.bias_type, row);
                put(p->d_memory, p->d.type, at, sum);
            }
    return 1;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = (cublasLtHandle_t)1;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    (void)handle;
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion(void) {
    return 1;
}
const char *cublasLtGetStatusName(cublasStatus_t status) {
    return status ? "CUBLAS_STATUS_EMULATED" : "CUBLAS_STATUS_SUCCESS";
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
    operation *op = calloc(1, sizeof *op);
    (void)compute;
    op->scale = scale;
    op->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    *desc = (cublasLtMatmulDesc_t)op;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    free(desc);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t name,
                                              const void *value, size_t bytes) {
    operation *op = (operation *)desc;
    switch (name) {
    case CUBLASLT_MATMUL_DESC_TRANSA: memcpy(&op->a_form, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_TRANSB: memcpy(&op->b_form, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE: memcpy(&op->epilogue, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: memcpy(&op->bias_type, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: memcpy(&op->bias, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: memcpy(&op->scale_a, value, bytes); break;
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM: break;
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *result, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t distance) {
    layout *l = calloc(1, sizeof *l);
    *l = (layout){type, (int64_t)rows, (int64_t)columns, distance, 1, 0};
    *result = (cublasLtMatrixLayout_t)l;
    return distance < (int64_t)rows ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
    free(l);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t result,
                                                cublasLtMatrixLayoutAttribute_t name,
                                                const void *value, size_t bytes) {
    layout *l = (layout *)result;
    if (name == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && bytes == 4)
        l->batch = *(const int32_t *)value;
    else if (name == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET && bytes == 8)
        l->batch_stride = *(const int64_t *)value;
    else
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = malloc(8);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t name,
                                                    const void *value, size_t bytes) {
    (void)preference, (void)name, (void)value, (void)bytes;
    return CUBLAS_STATUS_SUCCESS;
}

static int is_small(cudaDataType type) {
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

/* Of 8 bits: both along k, rows at multiples of 16 bytes, not both E5M2. */
static int types_agree(const operation *op, const layout *a, const layout *b) {
    if (!is_small(a->type)) return a->type == b->type;
    return is_small(b->type) && (a->type == CUDA_R_8F_E4M3 || b->type == CUDA_R_8F_E4M3) &&
           op->a_form == CUBLAS_OP_T && op->b_form == CUBLAS_OP_N && a->distance % 16 == 0 &&
           b->distance % 16 == 0;
}

static int agree(const operation *op, const layout *a, const layout *b, const layout *d) {
    int64_t m = op->a_form == CUBLAS_OP_N ? a->rows : a->columns;
    int64_t k = op->a_form == CUBLAS_OP_N ? a->columns : a->rows;
    int64_t k2 = op->b_form == CUBLAS_OP_N ? b->rows : b->columns;
    int64_t n = op->b_form == CUBLAS_OP_N ? b->columns : b->rows;
    return m == d->rows && n == d->columns && k == k2 && a->batch == d->batch &&
           b->batch == d->batch && types_agree(op, a, b);
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *found, int *count) {
    (void)handle, (void)c, (void)preference;
    *count = wanted < 2 ? wanted : 2;
    memset(found, 0, (size_t)*count * sizeof *found);
    return agree((operation *)desc, (layout *)a, (layout *)b, (layout *)d)
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algorithm,
                                       cublasLtMatmulHeuristicResult_t *result) {
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)algorithm;
    memset(result, 0, sizeof *result);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a_memory, cublasLtMatrixLayout_t a, const void *b_memory,
                              cublasLtMatrixLayout_t b, const void *beta, const void *c_memory,
                              cublasLtMatrixLayout_t c, void *d_memory, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    product *p = malloc(sizeof *p);
    (void)handle, (void)c_memory, (void)c, (void)algorithm;
    if (!workspace && workspace_bytes) return CUBLAS_STATUS_INVALID_VALUE;
    *p = (product){*(operation *)desc,
                   *(layout *)a,
                   *(layout *)b,
                   *(layout *)d,
                   a_memory,
                   b_memory,
                   d_memory,
                   0,
                   0};
    const int wide = p->op.scale == CUDA_R_64F;
    p->alpha = wide ? *(const double *)alpha : (double)*(const float *)alpha;
    p->beta = wide ? *(const double *)beta : (double)*(const float *)beta;
    emu_enqueue(stream, multiply, p);
    return CUBLAS_STATUS_SUCCESS;
}
