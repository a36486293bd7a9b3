/* cuDNN's backend graph API: descriptors, graphs of nodes, execution plans.
 *
 * A graph is built by calls that never fail one by one: the first error sticks in the graph, later
 * calls do nothing, and dnn_plan reports it. The graph owns every descriptor created for it. */
#ifndef ML_CUDA_DNN_H
#define ML_CUDA_DNN_H
#ifdef MLUA_CUDA

#include <stdbool.h> /* before cudnn.h, which needs it in C */

#include <cudnn.h>

#include "runtime/device/cuda/cuda_internal.h"

#define CUDNN_CALLS(X)                                                                             \
    X(cudnnCreate)                                                                                 \
    X(cudnnDestroy) X(cudnnSetStream) X(cudnnGetVersion) X(cudnnGetErrorString)                    \
        X(cudnnGetLastErrorString) X(cudnnBackendCreateDescriptor)                                 \
            X(cudnnBackendDestroyDescriptor) X(cudnnBackendSetAttribute)                           \
                X(cudnnBackendGetAttribute) X(cudnnBackendFinalize) X(cudnnBackendExecute)

typedef struct attention_plan attention_plan;

struct cuda_dnn {
#define CUDNN_DECLARE(name) __typeof__(name) *name;
    CUDNN_CALLS(CUDNN_DECLARE)
#undef CUDNN_DECLARE
    cudnnHandle_t handle; /* NULL where a described device stands in for a GPU (tests) */
    cudnnBackendDescriptor_t described;
    attention_plan *plans; /* a list; built once for each shape */
};

typedef cudnnBackendDescriptor_t dnn_descriptor;
typedef struct {
    int64_t size[4], stride[4];
} dnn_layout;
enum { DNN_OWNED = 320, DNN_NODES = 48, DNN_VIRTUAL = -1 };

typedef struct {
    cuda_dnn *dnn;
    dnn_descriptor owned[DNN_OWNED], nodes[DNN_NODES];
    int owned_count, node_count;
    int64_t next_virtual; /* id of the next channel without memory */
    cudnnStatus_t status; /* of the first call that failed */
    char message[512];
} dnn_graph;

typedef struct {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t count; /* 0 leaves the attribute out */
    const void *data;
} dnn_attribute;

/* A descriptor with the `count` attributes given; finalized unless it is a draft to be filled. */
dnn_descriptor dnn_make(dnn_graph *g, cudnnBackendDescriptorType_t type, const dnn_attribute *list,
                        int count, bool finalize);
/* id: a unique id from 0 up, or DNN_VIRTUAL. by_value: a scalar that the host passes. */
dnn_descriptor dnn_tensor(dnn_graph *g, int64_t id, cudnnDataType_t type, const dnn_layout *layout,
                          bool by_value);
dnn_descriptor dnn_matmul(dnn_graph *g, dnn_descriptor a, dnn_descriptor b, dnn_descriptor c);
dnn_descriptor dnn_reduce(dnn_graph *g, cudnnReduceTensorOp_t op, dnn_descriptor x,
                          dnn_descriptor y);
dnn_descriptor dnn_reshape(dnn_graph *g, dnn_descriptor x, dnn_descriptor y);
/* y = mode(x), mode(x, b) or mode(x, b, t); `axis` for GEN_INDEX alone. */
dnn_descriptor dnn_map(dnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t compute,
                       int64_t axis, dnn_descriptor x, dnn_descriptor b, dnn_descriptor t,
                       dnn_descriptor y);
/* Ask the heuristics for engines and take the first that serves the whole graph; NULL and a text in
 * g->message where none does. */
dnn_descriptor dnn_plan(dnn_graph *g, int64_t *workspace_bytes);
dnn_descriptor dnn_variant_pack(dnn_graph *g, int count, const int64_t *ids, void *const *pointers,
                                void *workspace);
void dnn_graph_free(dnn_graph *g);
ml_status dnn_fail(const cuda_dnn *dnn, cudnnStatus_t status, const char *call);
/* Open the library without a handle; NULL and an error where it is missing. */
cuda_dnn *dnn_load(void);

#endif
#endif
