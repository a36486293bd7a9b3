#ifdef MLUA_CUDA
#include "runtime/device/cuda/cuda_dnn.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/dynamic.h"

#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- The library ----------------------------------------------------------------------------- */
static const char *resolve(cuda_dnn *dnn, void *handle) {
    static const struct {
        const char *symbol;
        size_t at;
    } calls[] = {
#define ENTRY(name) {#name, offsetof(cuda_dnn, name)},
        CUDNN_CALLS(ENTRY)
#undef ENTRY
    };
    for (int i = 0; i < LENGTH(calls); i++) {
        void *address = dlsym(handle, calls[i].symbol);
        if (!address) return calls[i].symbol;
        memcpy((char *)dnn + calls[i].at, &address, sizeof address);
    }
    return NULL;
}

cuda_dnn *dnn_load(void) {
    void *handle = ml_dynamic_open("libcudnn.so.9");
    if (!handle) {
        ml_fail(ML_DEVICE, "cuDNN is missing: %s", dlerror());
        ml_help("without libcudnn.so.9 attention runs on mlua's own kernels, which are slower");
        return NULL;
    }
    cuda_dnn *dnn = ml_alloc(sizeof *dnn);
    if (!dnn) {
        ml_fail(ML_NO_MEMORY, "no memory for cuDNN");
        return NULL;
    }
    const char *missing = resolve(dnn, handle);
    if (missing) {
        ml_fail(ML_DEVICE, "cuDNN is too old: it has no %s", missing);
        ml_free(dnn);
        return NULL;
    }
    return dnn;
}

ml_status dnn_fail(const cuda_dnn *dnn, cudnnStatus_t status, const char *call) {
    char detail[512] = "";
    const char *what = cuda_doing_now();
    dnn->cudnnGetLastErrorString(detail, sizeof detail);
    return ml_fail(ML_DEVICE, "%s failed: %s (%s)%s%s", call, dnn->cudnnGetErrorString(status),
                   detail, *what ? " at " : "", what);
}

ml_status cuda_dnn_load(cuda_device *device) {
    if (!device->dnn) device->dnn = dnn_load();
    return device->dnn ? ML_OK : ml_error_last()->status;
}

ml_status cuda_dnn_open(cuda_device *device) {
    ML_TRY(cuda_dnn_load(device));
    cuda_dnn *dnn = device->dnn;
    if (dnn->handle) return ML_OK;
    cudnnStatus_t status = dnn->cudnnCreate(&dnn->handle);
    if (status == CUDNN_STATUS_SUCCESS) status = dnn->cudnnSetStream(dnn->handle, device->stream);
    if (status != CUDNN_STATUS_SUCCESS) {
        dnn_fail(dnn, status, "cudnnCreate");
        if (dnn->handle) dnn->cudnnDestroy(dnn->handle);
        dnn->handle = NULL;
        return ML_DEVICE;
    }
    return ML_OK;
}

/* ---- Descriptors ----------------------------------------------------------------------------- */
static void note(dnn_graph *g, cudnnStatus_t status, const char *call) {
    char detail[384] = "";
    if (status == CUDNN_STATUS_SUCCESS || g->status != CUDNN_STATUS_SUCCESS) return;
    g->status = status;
    g->dnn->cudnnGetLastErrorString(detail, sizeof detail);
    snprintf(g->message, sizeof g->message, "%s: %s (%s)", call,
             g->dnn->cudnnGetErrorString(status), detail);
}

dnn_descriptor dnn_make(dnn_graph *g, cudnnBackendDescriptorType_t type, const dnn_attribute *list,
                        int count, bool finalize) {
    dnn_descriptor d = NULL;
    if (g->status != CUDNN_STATUS_SUCCESS) return NULL;
    if (g->owned_count == DNN_OWNED) {
        g->status = CUDNN_STATUS_BAD_PARAM;
        snprintf(g->message, sizeof g->message, "a graph of more than %d descriptors", DNN_OWNED);
        return NULL;
    }
    note(g, g->dnn->cudnnBackendCreateDescriptor(type, &d), "cudnnBackendCreateDescriptor");
    if (!d) return NULL;
    g->owned[g->owned_count++] = d;
    for (int i = 0; i < count && g->status == CUDNN_STATUS_SUCCESS; i++)
        if (list[i].count > 0)
            note(g,
                 g->dnn->cudnnBackendSetAttribute(d, list[i].name, list[i].type, list[i].count,
                                                  list[i].data),
                 "cudnnBackendSetAttribute");
    if (finalize && g->status == CUDNN_STATUS_SUCCESS)
        note(g, g->dnn->cudnnBackendFinalize(d), "cudnnBackendFinalize");
    return d;
}

/* One attribute: its name less CUDNN_ATTR_, its type less CUDNN_TYPE_. */
#define VALUE(name, type, data)                                                                    \
    { CUDNN_ATTR_##name, CUDNN_TYPE_##type, 1, data }
#define VALUES(name, type, n, data)                                                                \
    { CUDNN_ATTR_##name, CUDNN_TYPE_##type, n, data }
#define LINK(name, d)                                                                              \
    { CUDNN_ATTR_##name, CUDNN_TYPE_BACKEND_DESCRIPTOR, (d) != NULL, &(d) }

dnn_descriptor dnn_tensor(dnn_graph *g, int64_t id, cudnnDataType_t type, const dnn_layout *layout,
                          bool by_value) {
    const bool is_virtual = id == DNN_VIRTUAL;
    const int64_t unique = is_virtual ? 1000 + g->next_virtual++ : id, alignment = 16;
    const dnn_attribute list[] = {
        VALUE(TENSOR_UNIQUE_ID, INT64, &unique),
        VALUE(TENSOR_DATA_TYPE, DATA_TYPE, &type),
        VALUE(TENSOR_BYTE_ALIGNMENT, INT64, &alignment),
        VALUES(TENSOR_DIMENSIONS, INT64, 4, layout->size),
        VALUES(TENSOR_STRIDES, INT64, 4, layout->stride),
        VALUE(TENSOR_IS_VIRTUAL, BOOLEAN, &is_virtual),
        VALUE(TENSOR_IS_BY_VALUE, BOOLEAN, &by_value),
    };
    return dnn_make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR, list, LENGTH(list), true);
}

static void add_node(dnn_graph *g, cudnnBackendDescriptorType_t type, const dnn_attribute *list,
                     int count) {
    dnn_descriptor node = dnn_make(g, type, list, count, true);
    if (g->status != CUDNN_STATUS_SUCCESS) return;
    if (g->node_count == DNN_NODES) {
        g->status = CUDNN_STATUS_BAD_PARAM;
        snprintf(g->message, sizeof g->message, "a graph of more than %d nodes", DNN_NODES);
        return;
    }
    g->nodes[g->node_count++] = node;
}

dnn_descriptor dnn_matmul(dnn_graph *g, dnn_descriptor a, dnn_descriptor b, dnn_descriptor c) {
    const cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    const dnn_attribute how[] = {VALUE(MATMUL_COMP_TYPE, DATA_TYPE, &compute)};
    dnn_descriptor kind = dnn_make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR, how, LENGTH(how), true);
    const dnn_attribute list[] = {LINK(OPERATION_MATMUL_DESC, kind),
                                  LINK(OPERATION_MATMUL_ADESC, a), LINK(OPERATION_MATMUL_BDESC, b),
                                  LINK(OPERATION_MATMUL_CDESC, c)};
    add_node(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, list, LENGTH(list));
    return c;
}

dnn_descriptor dnn_reduce(dnn_graph *g, cudnnReduceTensorOp_t op, dnn_descriptor x,
                          dnn_descriptor y) {
    const cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    const dnn_attribute how[] = {VALUE(REDUCTION_COMP_TYPE, DATA_TYPE, &compute),
                                 VALUE(REDUCTION_OPERATOR, REDUCTION_OPERATOR_TYPE, &op)};
    dnn_descriptor kind = dnn_make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, how, LENGTH(how), true);
    const dnn_attribute list[] = {LINK(OPERATION_REDUCTION_DESC, kind),
                                  LINK(OPERATION_REDUCTION_XDESC, x),
                                  LINK(OPERATION_REDUCTION_YDESC, y)};
    add_node(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, list, LENGTH(list));
    return y;
}

dnn_descriptor dnn_reshape(dnn_graph *g, dnn_descriptor x, dnn_descriptor y) {
    const dnn_attribute list[] = {LINK(OPERATION_RESHAPE_XDESC, x),
                                  LINK(OPERATION_RESHAPE_YDESC, y)};
    add_node(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, list, LENGTH(list));
    return y;
}

dnn_descriptor dnn_map(dnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute,
                       int64_t axis, dnn_descriptor x, dnn_descriptor b, dnn_descriptor t,
                       dnn_descriptor y) {
    const dnn_attribute how[] = {
        VALUE(POINTWISE_MODE, POINTWISE_MODE, &mode),
        VALUE(POINTWISE_MATH_PREC, DATA_TYPE, &compute),
        VALUES(POINTWISE_AXIS, INT64, mode == CUDNN_POINTWISE_GEN_INDEX, &axis),
    };
    dnn_descriptor kind = dnn_make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, how, LENGTH(how), true);
    const dnn_attribute list[] = {
        LINK(OPERATION_POINTWISE_PW_DESCRIPTOR, kind), LINK(OPERATION_POINTWISE_XDESC, x),
        LINK(OPERATION_POINTWISE_BDESC, b), LINK(OPERATION_POINTWISE_TDESC, t),
        LINK(OPERATION_POINTWISE_YDESC, y)};
    add_node(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, list, LENGTH(list));
    return y;
}

/* ---- Plans ----------------------------------------------------------------------------------- */
static int64_t read_integer(cuda_dnn *dnn, dnn_descriptor d, cudnnBackendAttributeName_t name) {
    int64_t value = 0, count = 0;
    if (dnn->cudnnBackendGetAttribute(d, name, CUDNN_TYPE_INT64, 1, &count, &value) !=
        CUDNN_STATUS_SUCCESS)
        return 0;
    return value;
}

/* A plan of one engine configuration; NULL where cuDNN refuses it, which is no error. On a device
 * that is only described, a kernel that compiled and could not be loaded counts as served. */
static dnn_descriptor try_engine(dnn_graph *g, dnn_descriptor config, int64_t *workspace_bytes) {
    cuda_dnn *dnn = g->dnn;
    const dnn_attribute list[] = {
        LINK(EXECUTION_PLAN_ENGINE_CONFIG, config),
        VALUES(EXECUTION_PLAN_HANDLE, HANDLE, dnn->handle != NULL, &dnn->handle),
        LINK(EXECUTION_PLAN_DEVICEPROP, dnn->described)};
    dnn_descriptor plan =
        dnn_make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, list, LENGTH(list), false);
    if (g->status != CUDNN_STATUS_SUCCESS) return NULL;
    cudnnStatus_t status = dnn->cudnnBackendFinalize(plan);
    bool compiled = dnn->described && status == CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER;
    if (status == CUDNN_STATUS_SUCCESS)
        *workspace_bytes = read_integer(dnn, plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
    else if (compiled)
        *workspace_bytes = read_integer(dnn, config, CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE);
    else
        dnn->cudnnGetLastErrorString(g->message, sizeof g->message);
    return status == CUDNN_STATUS_SUCCESS || compiled ? plan : NULL;
}

dnn_descriptor dnn_plan(dnn_graph *g, int64_t *workspace_bytes) {
    enum { CONFIGS = 8 };
    const cudnnBackendHeurMode_t modes[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
    cuda_dnn *dnn = g->dnn;
    const dnn_attribute list[] = {
        VALUES(OPERATIONGRAPH_OPS, BACKEND_DESCRIPTOR, g->node_count, g->nodes),
        VALUES(OPERATIONGRAPH_HANDLE, HANDLE, dnn->handle != NULL, &dnn->handle)};
    dnn_descriptor graph =
        dnn_make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, list, LENGTH(list), true);
    for (int m = 0; m < LENGTH(modes) && g->status == CUDNN_STATUS_SUCCESS; m++) {
        dnn_descriptor configs[CONFIGS];
        int64_t count = 0;
        const dnn_attribute ask[] = {LINK(ENGINEHEUR_OPERATION_GRAPH, graph),
                                     VALUE(ENGINEHEUR_MODE, HEUR_MODE, &modes[m]),
                                     LINK(ENGINEHEUR_DEVICEPROP, dnn->described)};
        dnn_descriptor heuristics =
            dnn_make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, ask, LENGTH(ask), false);
        for (int i = 0; i < CONFIGS; i++)
            configs[i] = dnn_make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, NULL, 0, false);
        if (g->status != CUDNN_STATUS_SUCCESS) break;
        if (dnn->cudnnBackendFinalize(heuristics) != CUDNN_STATUS_SUCCESS ||
            dnn->cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                          CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGS, &count,
                                          configs) != CUDNN_STATUS_SUCCESS)
            dnn->cudnnGetLastErrorString(g->message, sizeof g->message);
        for (int64_t i = 0; i < count; i++) {
            dnn_descriptor plan = try_engine(g, configs[i], workspace_bytes);
            if (plan) return plan;
        }
    }
    if (!*g->message) snprintf(g->message, sizeof g->message, "no engine serves it");
    return NULL;
}

dnn_descriptor dnn_variant_pack(dnn_graph *g, int count, const int64_t *ids, void *const *pointers,
                                void *workspace) {
    const dnn_attribute list[] = {VALUES(VARIANT_PACK_UNIQUE_IDS, INT64, count, ids),
                                  VALUES(VARIANT_PACK_DATA_POINTERS, VOID_PTR, count, pointers),
                                  VALUE(VARIANT_PACK_WORKSPACE, VOID_PTR, &workspace)};
    return dnn_make(g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, list, LENGTH(list), true);
}

void dnn_graph_free(dnn_graph *g) {
    while (g->owned_count > 0) g->dnn->cudnnBackendDestroyDescriptor(g->owned[--g->owned_count]);
    g->node_count = 0;
    g->status = CUDNN_STATUS_SUCCESS;
}
#endif
