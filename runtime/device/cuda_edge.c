#ifdef MLUA_CUDA
/* Messages between two ranks: each edge has a communicator and a stream of its own, so that they go
 * on beside computation and in no order with one another. */
#include "runtime/device/cuda_nccl.h"

/* The last message from this memory: gone once the event has passed. */
typedef struct {
    const void *memory;
    CUevent gone;
    bool pending; /* until it is settled */
} sent_message;

typedef struct cuda_edge {
    struct cuda_edge *next;
    ml_edge *edge;
    cuda_pair pair;
    CUstream stream;
    CUevent ready; /* what was on the device's stream before */
    sent_message *sent;
    uint32_t sent_count;
    CUevent there; /* the expected message */
    void *expected;
} cuda_edge;

static cuda_edge *find(const cuda_device *d, const ml_edge *edge) {
    cuda_edge *e = d->edges;
    while (e && e->edge != edge) e = e->next;
    return e;
}

static ml_status open_edge(cuda_edge *e) {
    ML_TRY(cuda_nccl_stream(&e->stream));
    CUDA_TRY(cuEventCreate(&e->ready, CU_EVENT_DISABLE_TIMING));
    CUDA_TRY(cuEventCreate(&e->there, CU_EVENT_DISABLE_TIMING));
    return ML_OK;
}

ml_status cuda_edge_connect(ml_device *device, ml_edge *edge) {
    cuda_device *d = (cuda_device *)device;
    /* A rank has no color of an edge that it knows: the other end knows it too. */
    if (!edge || find(d, edge)) return cuda_pair_new(d, 0, 0, NULL, NULL);
    cuda_edge *e = ml_alloc(sizeof *e);
    if (!e) return ml_fail(ML_NO_MEMORY, "no memory for an edge between GPUs");
    e->edge = edge;
    e->next = d->edges;
    d->edges = e; /* closed with the device, however far this gets */
    ML_TRY(open_edge(e));
    bool receives = ml_edge_to(edge) == d->base.ranks->rank;
    return cuda_pair_new(d, ml_edge_from(edge), receives, e->stream, &e->pair);
}

void cuda_edges_close(cuda_device *d) {
    while (d->edges) {
        cuda_edge *e = d->edges;
        d->edges = e->next;
        for (uint32_t i = 0; i < e->sent_count; i++) CUDA_OK(cuEventDestroy(e->sent[i].gone));
        if (e->ready) CUDA_OK(cuEventDestroy(e->ready));
        if (e->there) CUDA_OK(cuEventDestroy(e->there));
        if (e->stream) CUDA_OK(cuStreamDestroy(e->stream));
        ml_free(e->sent);
        ml_free(e);
    }
}

static ml_status edge_of(cuda_device *d, ml_edge *edge, cuda_edge **e) {
    *e = find(d, edge);
    if (!*e) return ml_fail(ML_INTERNAL, "an edge between GPUs that was not connected");
    return cuda_nccl_ready(d);
}

static sent_message *message_of(cuda_edge *e, const void *memory) {
    for (uint32_t i = 0; i < e->sent_count; i++)
        if (e->sent[i].memory == memory) return &e->sent[i];
    return NULL;
}

/* A place for a message from memory that none was sent from before. */
static ml_status message_new(cuda_edge *e, const void *memory, sent_message **message) {
    size_t old = e->sent_count * sizeof *e->sent;
    sent_message *sent = ml_realloc(e->sent, old, old + sizeof *sent);
    if (!sent) return ml_fail(ML_NO_MEMORY, "no memory for a message between GPUs");
    e->sent = sent;
    *message = &sent[e->sent_count];
    **message = (sent_message){.memory = memory};
    CUDA_TRY(cuEventCreate(&(*message)->gone, CU_EVENT_DISABLE_TIMING));
    e->sent_count++;
    return ML_OK;
}

/* The edge goes on after what is on the device's stream by now. */
static ml_status after_stream(cuda_device *d, cuda_edge *e) {
    CUDA_TRY(cuEventRecord(e->ready, d->stream));
    CUDA_TRY(cuStreamWaitEvent(e->stream, e->ready, 0));
    return ML_OK;
}

ml_status cuda_edge_send(ml_device *device, ml_edge *edge, const void *memory, int64_t bytes) {
    cuda_device *d = (cuda_device *)device;
    cuda_edge *e;
    ML_TRY(edge_of(d, edge, &e));
    sent_message *message = message_of(e, memory);
    if (!message) ML_TRY(message_new(e, memory, &message));
    ML_TRY(after_stream(d, e));
    ML_TRY(cuda_pair_send(&e->pair, memory, bytes, e->stream));
    CUDA_TRY(cuEventRecord(message->gone, e->stream));
    message->pending = true;
    return ML_OK;
}

ml_status cuda_edge_settle(ml_device *device, ml_edge *edge, const void *memory) {
    cuda_device *d = (cuda_device *)device;
    cuda_edge *e = find(d, edge);
    sent_message *message = e ? message_of(e, memory) : NULL;
    if (!message || !message->pending) return ML_OK;
    message->pending = false;
    CUDA_TRY(cuStreamWaitEvent(d->stream, message->gone, 0));
    return ML_OK;
}

ml_status cuda_edge_expect(ml_device *device, ml_edge *edge, void *memory, int64_t bytes) {
    cuda_device *d = (cuda_device *)device;
    cuda_edge *e;
    ML_TRY(edge_of(d, edge, &e));
    if (e->expected)
        return ml_fail(ML_INTERNAL, "a second message of the edge from rank %d is expected",
                       ml_edge_from(edge));
    ML_TRY(after_stream(d, e));
    ML_TRY(cuda_pair_receive(&e->pair, memory, bytes, e->stream));
    CUDA_TRY(cuEventRecord(e->there, e->stream));
    e->expected = memory;
    return ML_OK;
}

ml_status cuda_edge_arrive(ml_device *device, ml_edge *edge, void *memory) {
    cuda_device *d = (cuda_device *)device;
    cuda_edge *e = find(d, edge);
    if (!e || e->expected != memory)
        return ml_fail(ML_INTERNAL, "a message of the edge from rank %d was not expected there",
                       ml_edge_from(edge));
    e->expected = NULL;
    CUDA_TRY(cuStreamWaitEvent(d->stream, e->there, 0));
    return ML_OK;
}
#endif
