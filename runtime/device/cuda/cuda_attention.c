#ifdef MLUA_CUDA
/* Attention as cuDNN graphs of small nodes, which cuDNN recognises and fuses.
 *
 *   forward   S = scale Q K^T, masked; O = softmax(S) V; lse = log(sum(exp(S))) of each row
 *   backward  P = exp(S - lse); r = rowsum(dO O); dS = scale P (dO V^T - r);
 *             dV = P^T dO and dK = dS^T Q, summed over each group of heads; dQ = dS K
 *
 * Backward comes in two forms. Deterministic (the default): dS is stored in workspace of
 * heads * seq * kv_seq bf16 numbers and dQ is an ordinary product; to bound that workspace, the
 * step is cut into slices over batch and KV heads. With MLUA_DETERMINISTIC=0 blocks of keys add to
 * an f32 sum of dQ in any order: no such workspace and faster, but the last bits vary.
 *
 * Served: bf16, no score function, head sizes that are multiples of 8 up to 128 (256 where cuDNN
 * agrees), grouped heads, causal (as many queries as keys), windows where causal. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codegen/lower/library.h"
#include "runtime/device/cuda/cuda_dnn.h"

enum { /* ids of tensors with memory: those of the step, by its operands; scratch; host scalars */
       ID_Q,
       ID_K,
       ID_V,
       ID_O,
       ID_LSE,
       ID_DO,
       ID_DQ,
       ID_DK,
       ID_DV,
       ID_ROW_SUM,
       ID_DQ_SUM,
       ID_SCALE,
       ID_ONE,
       ID_LOWEST,
       ID_WINDOW_LOWEST,
       ID_WINDOW,
       ID_COUNT
};
enum { OPERANDS = ID_ROW_SUM, MAX_SLICES = 256 };

typedef struct {
    int64_t batch, head, seq;
} operand_strides;
typedef struct { /* no padding: compared as bytes */
    int64_t batch, heads, kv_heads, seq, kv_seq, dim, value_dim;
    int64_t causal, window, backward, deterministic, dtype; /* ML_BF16 or ML_F16 */
    double scale;
    operand_strides stride[OPERANDS];
} attention_shape;

struct attention_plan {
    attention_plan *next;
    attention_shape shape;
    dnn_graph graph;
    dnn_descriptor plan; /* NULL: refused, as graph.message says */
    int64_t engine_bytes, row_sum_bytes, dq_sum_bytes;
    int64_t ids[ID_COUNT];
    int id_count;
    float scale, one, lowest;
    int32_t window;
};

struct cuda_attention {
    attention_plan *plan;
    int64_t batch_slices, head_slices;
    int own;         /* the operand that is workspace of the step's own, large enough; 0: none */
    char *workspace; /* that, or the device's */
    dnn_graph packs; /* owns the variant packs of the current addresses */
    dnn_descriptor pack[MAX_SLICES];
};

/* ---- The graphs ------------------------------------------------------------------------------ */
typedef struct {
    attention_plan *p;
    dnn_graph *g;
    cudnnDataType_t narrow;          /* of operands and probabilities */
    dnn_layout q, k, k_t, v, v_t, o; /* as they lie in memory; _t transposed */
    dnn_layout head, value_head, scores, scores_t, rows, single; /* dense */
} builder;

static const cudnnDataType_t F32 = CUDNN_DATA_FLOAT;
static const cudnnDataType_t I32 = CUDNN_DATA_INT32, TRUTH = CUDNN_DATA_BOOLEAN;

static dnn_descriptor memory(builder *b, int id, cudnnDataType_t type, const dnn_layout *layout) {
    b->p->ids[b->p->id_count++] = id;
    return dnn_tensor(b->g, id, type, layout, id >= ID_SCALE);
}
static dnn_descriptor channel(builder *b, cudnnDataType_t type, const dnn_layout *layout) {
    return dnn_tensor(b->g, DNN_VIRTUAL, type, layout, false);
}
static dnn_descriptor map(builder *b, cudnnPointwiseMode_t mode, dnn_descriptor x,
                          dnn_descriptor y2, dnn_descriptor y) {
    return dnn_map(b->g, mode, F32, 0, x, y2, NULL, y);
}
static dnn_descriptor index_of(builder *b, int64_t axis, dnn_descriptor x) {
    return dnn_map(b->g, CUDNN_POINTWISE_GEN_INDEX, I32, axis, x, NULL, NULL,
                   channel(b, I32, &b->scores));
}

static dnn_descriptor keep_where(builder *b, dnn_descriptor keep, dnn_descriptor x, int lowest_id) {
    dnn_descriptor lowest = memory(b, lowest_id, F32, &b->single);
    return dnn_map(b->g, CUDNN_POINTWISE_BINARY_SELECT, F32, 0, x, lowest, keep,
                   channel(b, F32, &b->scores));
}

/* x where the query may see the key, minus infinity elsewhere. */
static dnn_descriptor mask(builder *b, dnn_descriptor x) {
    if (!b->p->shape.causal) return x;
    dnn_descriptor row = index_of(b, 2, x), column = index_of(b, 3, x);
    dnn_descriptor keep = dnn_map(b->g, CUDNN_POINTWISE_CMP_GE, TRUTH, 0, row, column, NULL,
                                  channel(b, TRUTH, &b->scores));
    x = keep_where(b, keep, x, ID_LOWEST);
    if (b->p->shape.window == 0) return x;
    row = index_of(b, 2, x), column = index_of(b, 3, x);
    dnn_descriptor window = memory(b, ID_WINDOW, I32, &b->single);
    dnn_descriptor end = dnn_map(b->g, CUDNN_POINTWISE_ADD, I32, 0, column, window, NULL,
                                 channel(b, I32, &b->scores));
    keep = dnn_map(b->g, CUDNN_POINTWISE_CMP_GT, TRUTH, 0, end, row, NULL,
                   channel(b, TRUTH, &b->scores));
    return keep_where(b, keep, x, ID_WINDOW_LOWEST);
}

static void describe_forward(builder *b) {
    dnn_descriptor q = memory(b, ID_Q, b->narrow, &b->q), k_t = memory(b, ID_K, b->narrow, &b->k_t);
    dnn_descriptor v = memory(b, ID_V, b->narrow, &b->v),
                   scale = memory(b, ID_SCALE, F32, &b->single);
    dnn_descriptor s = dnn_matmul(b->g, q, k_t, channel(b, F32, &b->scores));
    s = mask(b, map(b, CUDNN_POINTWISE_MUL, s, scale, channel(b, F32, &b->scores)));
    dnn_descriptor max = dnn_reduce(b->g, CUDNN_REDUCE_TENSOR_MAX, s, channel(b, F32, &b->rows));
    s = map(b, CUDNN_POINTWISE_SUB, s, max, channel(b, F32, &b->scores));
    s = map(b, CUDNN_POINTWISE_EXP, s, NULL, channel(b, F32, &b->scores));
    dnn_descriptor sum = dnn_reduce(b->g, CUDNN_REDUCE_TENSOR_ADD, s, channel(b, F32, &b->rows));
    dnn_layout lse = b->rows;
    const operand_strides *stride = &b->p->shape.stride[ID_LSE];
    lse.stride[0] = stride->batch, lse.stride[1] = stride->head, lse.stride[2] = stride->seq;
    map(b, CUDNN_POINTWISE_ADD, max,
        map(b, CUDNN_POINTWISE_LOG, sum, NULL, channel(b, F32, &b->rows)),
        memory(b, ID_LSE, F32, &lse));
    s = map(b, CUDNN_POINTWISE_DIV, s, sum, channel(b, b->narrow, &b->scores));
    dnn_matmul(b->g, s, v, memory(b, ID_O, b->narrow, &b->o));
}

/* dK or dV: a product for each query head, then the sum over the heads that share a K/V head. */
static void head_gradient(builder *b, dnn_descriptor s, dnn_descriptor x, const dnn_layout *each,
                          int id, const dnn_layout *layout) {
    const bool grouped = b->p->shape.heads != b->p->shape.kv_heads;
    dnn_descriptor y = memory(b, id, b->narrow, layout);
    dnn_descriptor product = dnn_matmul(b->g, s, x, grouped ? channel(b, b->narrow, each) : y);
    if (grouped) dnn_reduce(b->g, CUDNN_REDUCE_TENSOR_ADD, product, y);
}

static dnn_descriptor row_sums(builder *b, dnn_descriptor d_o, dnn_descriptor o) {
    /* The pattern wants a factor (it is for dropout), and the sums in memory. */
    dnn_descriptor one = memory(b, ID_ONE, F32, &b->single);
    dnn_descriptor r = map(b, CUDNN_POINTWISE_MUL, d_o, o, channel(b, F32, &b->value_head));
    r = dnn_reduce(b->g, CUDNN_REDUCE_TENSOR_ADD, r, channel(b, F32, &b->rows));
    return map(b, CUDNN_POINTWISE_MUL, r, one, memory(b, ID_ROW_SUM, F32, &b->rows));
}

static dnn_layout dense(int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
    return (dnn_layout){{batch, heads, rows, columns},
                        {heads * rows * columns, rows * columns, columns, 1}};
}

static void describe_backward(builder *b) {
    const attention_shape *shape = &b->p->shape;
    dnn_layout lse = b->rows, dq = b->q, dk = b->k, dv = b->v, d_o_layout = b->o;
    const dnn_layout k_head = dense(shape->batch, shape->heads, shape->kv_seq, shape->dim);
    const dnn_layout v_head = dense(shape->batch, shape->heads, shape->kv_seq, shape->value_dim);
    struct {
        dnn_layout *layout;
        int id;
    } others[] = {{&lse, ID_LSE}, {&dq, ID_DQ}, {&dk, ID_DK}, {&dv, ID_DV}, {&d_o_layout, ID_DO}};
    for (int i = 0; i < 5; i++)
        memcpy(others[i].layout->stride, &shape->stride[others[i].id], sizeof(operand_strides));
    dnn_descriptor q = memory(b, ID_Q, b->narrow, &b->q), k_t = memory(b, ID_K, b->narrow, &b->k_t);
    dnn_descriptor o = memory(b, ID_O, b->narrow, &b->o), v_t = memory(b, ID_V, b->narrow, &b->v_t);
    dnn_descriptor d_o = memory(b, ID_DO, b->narrow, &d_o_layout);
    dnn_descriptor stats = memory(b, ID_LSE, F32, &lse),
                   scale = memory(b, ID_SCALE, F32, &b->single);
    dnn_descriptor r = row_sums(b, d_o, o);
    /* P and dV */
    dnn_descriptor p = dnn_matmul(b->g, q, k_t, channel(b, F32, &b->scores));
    p = map(b, CUDNN_POINTWISE_MUL, p, scale, channel(b, F32, &b->scores));
    p = mask(b, map(b, CUDNN_POINTWISE_SUB, p, stats, channel(b, F32, &b->scores)));
    p = map(b, CUDNN_POINTWISE_EXP, p, NULL, channel(b, F32, &b->scores));
    head_gradient(b, dnn_reshape(b->g, p, channel(b, b->narrow, &b->scores_t)), d_o, &v_head, ID_DV,
                  &dv);
    /* dS and dK */
    dnn_descriptor d_s = dnn_matmul(b->g, d_o, v_t, channel(b, F32, &b->scores));
    d_s = map(b, CUDNN_POINTWISE_SUB, d_s, r, channel(b, F32, &b->scores));
    d_s = map(b, CUDNN_POINTWISE_MUL, d_s, p, channel(b, F32, &b->scores));
    d_s = map(b, CUDNN_POINTWISE_MUL, d_s, scale, channel(b, b->narrow, &b->scores));
    head_gradient(b, dnn_reshape(b->g, d_s, channel(b, b->narrow, &b->scores_t)), q, &k_head, ID_DK,
                  &dk);
    /* dQ */
    dnn_descriptor k = dnn_reshape(b->g, k_t, channel(b, b->narrow, &b->k));
    if (shape->deterministic) {
        dnn_matmul(b->g, d_s, k, memory(b, ID_DQ, b->narrow, &dq));
        return;
    }
    dnn_descriptor sum = dnn_matmul(b->g, d_s, k, memory(b, ID_DQ_SUM, F32, &b->head));
    map(b, CUDNN_POINTWISE_IDENTITY, sum, NULL, memory(b, ID_DQ, b->narrow, &dq));
}

/* ---- Plans ----------------------------------------------------------------------------------- */
static dnn_layout in_memory(const attention_shape *s, int id, int64_t heads, int64_t rows,
                            int64_t columns) {
    const operand_strides *stride = &s->stride[id];
    return (dnn_layout){{s->batch, heads, rows, columns},
                        {stride->batch, stride->head, stride->seq, 1}};
}

static dnn_layout transposed(dnn_layout x) {
    return (dnn_layout){{x.size[0], x.size[1], x.size[3], x.size[2]},
                        {x.stride[0], x.stride[1], x.stride[3], x.stride[2]}};
}

static void build_plan(cuda_dnn *dnn, attention_plan *p) {
    const attention_shape *s = &p->shape;
    builder b = {.p = p,
                 .g = &p->graph,
                 .narrow = s->dtype == ML_F16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16};
    p->graph.dnn = dnn;
    b.q = in_memory(s, ID_Q, s->heads, s->seq, s->dim);
    b.k = in_memory(s, ID_K, s->kv_heads, s->kv_seq, s->dim);
    b.v = in_memory(s, ID_V, s->kv_heads, s->kv_seq, s->value_dim);
    b.o = in_memory(s, ID_O, s->heads, s->seq, s->value_dim);
    b.k_t = transposed(b.k);
    b.v_t = transposed(b.v);
    b.head = dense(s->batch, s->heads, s->seq, s->dim);
    b.value_head = dense(s->batch, s->heads, s->seq, s->value_dim);
    b.scores = dense(s->batch, s->heads, s->seq, s->kv_seq);
    b.scores_t = transposed(dense(s->batch, s->heads, s->seq, s->kv_seq));
    b.rows = dense(s->batch, s->heads, s->seq, 1);
    b.single = dense(1, 1, 1, 1);
    (s->backward ? describe_backward : describe_forward)(&b);
    p->plan = dnn_plan(&p->graph, &p->engine_bytes);
    p->scale = (float)s->scale, p->one = 1, p->lowest = -INFINITY, p->window = (int32_t)s->window;
    int64_t rows = s->batch * s->heads * s->seq;
    if (s->backward) p->row_sum_bytes = (rows * 4 + 255) / 256 * 256;
    if (s->backward && !s->deterministic) p->dq_sum_bytes = (rows * s->dim * 4 + 255) / 256 * 256;
}

static ml_status find_plan(cuda_dnn *dnn, const attention_shape *shape, attention_plan **plan) {
    for (attention_plan *p = dnn->plans; p; p = p->next)
        if (memcmp(&p->shape, shape, sizeof *shape) == 0) {
            *plan = p;
            return ML_OK;
        }
    attention_plan *p = ml_alloc(sizeof *p);
    if (!p) return ml_fail(ML_NO_MEMORY, "no memory for an attention plan");
    p->shape = *shape;
    p->next = dnn->plans;
    dnn->plans = p;
    build_plan(dnn, p);
    *plan = p;
    return ML_OK;
}

void cuda_dnn_close(cuda_device *device) {
    cuda_dnn *dnn = device->dnn;
    if (!dnn) return;
    while (dnn->plans) {
        attention_plan *p = dnn->plans;
        dnn->plans = p->next;
        dnn_graph_free(&p->graph);
        ml_free(p);
    }
    if (dnn->handle) dnn->cudnnDestroy(dnn->handle);
    ml_free(dnn);
    device->dnn = NULL;
}

/* ---- Steps ----------------------------------------------------------------------------------- */
#define REFUSE(...) return snprintf(why, (size_t)why_size, __VA_ARGS__), false

/* The batch axes as one: the stride of the innermost, where each outer one steps over all of it. */
static bool join_batches(const ml_attention_step *a, int operand, int64_t *stride) {
    const int64_t *s = a->strides[operand].batch;
    int64_t size = 1, step = 0;
    for (int i = 2; i >= 0; i--) {
        if (a->batch[i] == 1) continue;
        if (size == 1)
            step = s[i];
        else if (s[i] != size * step)
            return false;
        size *= a->batch[i];
    }
    *stride = step;
    return true;
}

static bool read_strides(const ml_attention_step *a, attention_shape *shape, char *why,
                         int why_size) {
    for (int i = 0; i < (a->backward ? OPERANDS : ID_DO); i++) {
        operand_strides *to = &shape->stride[i];
        const ml_attention_strides *from = &a->strides[i];
        const bool is_kv = i == ID_K || i == ID_V || i == ID_DK || i == ID_DV;
        const int64_t heads = is_kv ? a->kv_heads : a->heads, rows = is_kv ? a->kv_seq : a->seq;
        if (!join_batches(a, i, &to->batch)) REFUSE("its batch axes do not lie one behind another");
        to->head = from->head, to->seq = from->seq;
        /* Axes of one element have no stride to speak of; cuDNN wants one that is no overlap. */
        if (rows == 1)
            to->seq = i == ID_LSE ? 1 : a->head_dim > a->value_dim ? a->head_dim : a->value_dim;
        if (heads == 1) to->head = rows * to->seq;
        if (shape->batch == 1)
            to->batch = heads * (to->head > rows * to->seq ? to->head : rows * to->seq);
        if (i == ID_LSE) {
            if (to->seq != 1) REFUSE("the rows of its logsumexp are not contiguous");
            continue;
        }
        if (from->dim != 1) REFUSE("head_dim is not the innermost axis of an operand");
        if ((to->batch | to->head | to->seq) & 7) REFUSE("an operand is not aligned to 16 bytes");
        if (to->batch <= 0 || to->head <= 0 || to->seq <= 0) REFUSE("an operand is broadcast");
    }
    return true;
}

/* What cuDNN is asked for; false with a reason where this is nothing for it. */
static bool read_shape(const ml_target *target, const ml_attention_step *a, attention_shape *shape,
                       char *why, int why_size) {
    memset(shape, 0, sizeof *shape);
    shape->batch = a->batch[0] * a->batch[1] * a->batch[2];
    shape->heads = a->heads, shape->kv_heads = a->kv_heads;
    shape->seq = a->seq, shape->kv_seq = a->kv_seq;
    shape->dim = a->head_dim, shape->value_dim = a->value_dim;
    shape->causal = a->args.causal, shape->window = a->args.window;
    shape->scale = a->args.scale;
    shape->backward = a->backward;
    shape->deterministic = a->backward && !target->nondeterministic;
    shape->dtype = a->dtype;
    if (shape->window >= shape->kv_seq) shape->window = 0;
    const char *refused = ml_attention_refused(a);
    if (refused) REFUSE("%s", refused);
    return read_strides(a, shape, why, why_size);
}

/* Cut a deterministic backward step so that dS of one slice fits the workspace. */
static bool slice(const ml_attention_step *step, attention_shape *shape, cuda_attention *a,
                  char *why, int why_size) {
    a->batch_slices = a->head_slices = 1;
    if (!shape->deterministic) return true;
    if (!ml_attention_slices(step, &a->batch_slices, &a->head_slices))
        REFUSE("a deterministic backward pass over %lld x %lld scores wants too much workspace",
               (long long)shape->seq, (long long)shape->kv_seq);
    shape->batch /= a->batch_slices;
    shape->kv_heads /= a->head_slices;
    shape->heads /= a->head_slices;
    return true;
}

static bool fits(const ml_step *step, const ml_schedule *s, char *why, int why_size) {
    const ml_attention_step *a = step->attention;
    if (step->read_count != (a->backward ? ID_DQ : ID_O)) REFUSE("it captures tensors");
    for (int i = 0; i < (a->backward ? OPERANDS : ID_DO); i++) {
        const ml_value *v = &s->values.at[step->values[i]];
        if (v->offset * ml_dtypes[v->type.dtype].bytes % 16)
            REFUSE("an operand is not aligned to 16 bytes");
    }
    return true;
}

static int64_t workspace_bytes(const attention_plan *p) {
    return p->row_sum_bytes + p->dq_sum_bytes + p->engine_bytes;
}

/* The plan gives a backward step a place to work in. The library may want more than was foreseen.
 */
static int own_workspace(const ml_schedule *schedule, const ml_step *step,
                         const attention_plan *p) {
    int last = step->read_count + step->write_count - 1;
    if (last < OPERANDS) return 0;
    const ml_value *value = &schedule->values.at[step->values[last]];
    return schedule->storages.at[value->storage].bytes >= workspace_bytes(p) ? last : 0;
}

ml_status cuda_attention_new(cuda_device *device, const ml_schedule *schedule, const ml_step *step,
                             cuda_attention **attention, char *why, int why_size) {
    attention_shape shape;
    *attention = NULL;
    if (!fits(step, schedule, why, why_size)) return ML_OK;
    if (!read_shape(&device->base.target, step->attention, &shape, why, why_size)) return ML_OK;
    cuda_attention *a = ml_alloc(sizeof *a);
    if (!a) return ml_fail(ML_NO_MEMORY, "no memory for an attention step");
    a->packs.dnn = device->dnn;
    if (!slice(step->attention, &shape, a, why, why_size)) {
        ml_free(a);
        return ML_OK;
    }
    ml_status status = find_plan(device->dnn, &shape, &a->plan);
    if (status == ML_OK && a->plan->plan) {
        a->own = own_workspace(schedule, step, a->plan);
        *attention = a;
        return ML_OK;
    }
    if (status == ML_OK) snprintf(why, (size_t)why_size, "%s", a->plan->graph.message);
    ml_free(a);
    return status;
}

void cuda_attention_free(cuda_device *device, cuda_attention *attention) {
    (void)device;
    dnn_graph_free(&attention->packs);
    ml_free(attention);
}

int64_t cuda_attention_workspace(const cuda_attention *attention) {
    return attention->own ? 0 : workspace_bytes(attention->plan);
}

/* Where slice (batch, head) of an operand begins. */
static char *slice_address(const attention_plan *p, int id, char *base, int64_t batch,
                           int64_t head) {
    const attention_shape *s = &p->shape;
    const bool is_kv = id == ID_K || id == ID_V || id == ID_DK || id == ID_DV;
    const int64_t heads = is_kv ? s->kv_heads : s->heads;
    return base + (batch * s->batch * s->stride[id].batch + head * heads * s->stride[id].head) *
                      (id == ID_LSE ? 4 : 2);
}

static void *pointer_of(attention_plan *p, int id, void *const *operands, char *workspace,
                        int64_t batch, int64_t head) {
    switch (id) {
    case ID_ROW_SUM: return workspace;
    case ID_DQ_SUM: return workspace + p->row_sum_bytes;
    case ID_SCALE: return &p->scale;
    case ID_ONE: return &p->one;
    case ID_LOWEST:
    case ID_WINDOW_LOWEST: return &p->lowest;
    case ID_WINDOW: return &p->window;
    default: return slice_address(p, id, operands[id], batch, head);
    }
}

ml_status cuda_attention_bind(cuda_device *device, cuda_attention *a, void *const *operands) {
    attention_plan *p = a->plan;
    char *workspace = a->own ? operands[a->own] : (char *)(uintptr_t)device->workspace;
    void *pointers[ID_COUNT];
    a->workspace = workspace;
    dnn_graph_free(&a->packs);
    for (int64_t i = 0; i < a->batch_slices * a->head_slices; i++) {
        for (int j = 0; j < p->id_count; j++)
            pointers[j] = pointer_of(p, (int)p->ids[j], operands, workspace, i / a->head_slices,
                                     i % a->head_slices);
        a->pack[i] = dnn_variant_pack(&a->packs, p->id_count, p->ids, pointers,
                                      workspace + p->row_sum_bytes + p->dq_sum_bytes);
    }
    if (a->packs.status != CUDNN_STATUS_SUCCESS)
        return ml_fail(ML_DEVICE, "%s at %s", a->packs.message, cuda_doing_now());
    return ML_OK;
}

ml_status cuda_attention_run(cuda_device *device, cuda_attention *a) {
    cuda_dnn *dnn = device->dnn;
    const attention_plan *p = a->plan;
    for (int64_t i = 0; i < a->batch_slices * a->head_slices; i++) {
        if (p->dq_sum_bytes && dnn->cudnnGetVersion() < 90600) /* newer ones zero it themselves */
            CUDA_TRY(cuMemsetD8Async((CUdeviceptr)(uintptr_t)a->workspace + p->row_sum_bytes, 0,
                                     (size_t)p->dq_sum_bytes, device->stream));
        cudnnStatus_t status = dnn->cudnnBackendExecute(dnn->handle, p->plan, a->pack[i]);
        if (status != CUDNN_STATUS_SUCCESS) return dnn_fail(dnn, status, "cudnnBackendExecute");
    }
    return ML_OK;
}
#endif
