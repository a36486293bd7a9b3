#ifdef MLUA_CUDA
/* Messages between two ranks: each edge has a stream of its own, so that they go on beside
 * computation and in no order with one another. Between GPUs of one host the copy engines carry
 * them (cuda_peer.h) where they can; else a communicator of the two. */
#include "runtime/device/cuda/cuda_nccl.h"
#include "runtime/device/cuda/cuda_p2p_ring.h"

#include <time.h>

#include "runtime/base/knobs.h"

/* The last message from this memory: gone once the event has passed. */
typedef struct {
    const void *memory;
    CUevent gone;
    bool pending; /* until it is settled */
} sent_message;

typedef struct cuda_edge {
    struct cuda_edge *next;
    ml_edge *edge;
    bool direct; /* by copy engines, else `pair` */
    cuda_peer peer;
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

static bool receives(const cuda_device *d, const cuda_edge *e) {
    return ml_edge_to(e->edge) == d->base.ranks->rank;
}

/* All ranks at once; e is NULL where this one is no end of a new edge. Its two ends agree on
 * whether the copy engines carry its messages; *direct tells all ranks whether they do so for all
 * new edges.
 */
static ml_status connect_peers(cuda_device *d, cuda_edge *e, int64_t usual, bool *direct) {
    ml_comm *comm = d->base.ranks->comm;
    cuda_offer mine = {.able = 0}, theirs;
    int other = !e ? -1 : receives(d, e) ? ml_edge_from(e->edge) : ml_edge_to(e->edge);
    int64_t here[2] = {0}, there[2]; /* whether it is open, and parts of a message */
    if (e && cuda_share_able(d)) ML_TRY(cuda_peer_make(d, &e->peer, receives(d, e), usual, &mine));
    ML_TRY(ml_comm_swap(comm, other, &mine, &theirs, CUDA_OFFER_WORDS));
    if (mine.able && theirs.able) here[0] = cuda_peer_open(d, &e->peer, other, &theirs, e->stream);
    if (e) here[1] = e->peer.part;
    ML_TRY(ml_comm_swap(comm, other, here, there, 2));
    if (e) {
        e->direct = here[0] && there[0];
        if (e->direct && !receives(d, e)) cuda_peer_cut(&e->peer, there[1]);
        ml_debug(1, "peer: by %s: edge from rank %d to %d\n", e->direct ? "copies" : "NCCL",
                 ml_edge_from(e->edge), ml_edge_to(e->edge));
    }
    int64_t all = !e || e->direct;
    ML_TRY(ml_comm_least(comm, &all));
    *direct = all != 0;
    return ML_OK;
}

ml_status cuda_edge_connect(ml_device *device, ml_edge *edge, int64_t usual) {
    cuda_device *d = (cuda_device *)device;
    cuda_edge *e = NULL;
    bool direct;
    ML_TRY(cuda_nccl_ready(d));
    if (edge && !find(d, edge)) { /* one that is known is known to the other end too */
        e = ml_alloc(sizeof *e);
        if (!e) return ml_fail(ML_NO_MEMORY, "no memory for an edge between GPUs");
        e->edge = edge;
        e->next = d->edges;
        d->edges = e; /* closed with the device, however far this gets */
        ML_TRY(open_edge(e));
    }
    ML_TRY(connect_peers(d, e, usual, &direct));
    if (direct) return ML_OK;
    if (!e || e->direct) return cuda_pair_new(d, 0, 0, NULL, NULL);
    cuda_peer_close(d, &e->peer);
    ML_TRY(cuda_pair_new(d, ml_edge_from(edge), receives(d, e), e->stream, &e->pair));
    cuda_peer_free(d, &e->peer); /* all ranks have come here meanwhile */
    return ML_OK;
}

bool cuda_edge_patient(const ml_device *device, const ml_edge *edge) {
    const cuda_edge *e = find((const cuda_device *)device, edge);
    return e && e->direct;
}

/* On streams of their own: those of the edges wait. */
void cuda_edges_give_up(cuda_device *d) {
    CUstream stream = NULL;
    for (cuda_edge *e = d->edges; e; e = e->next) {
        if (!e->direct) continue;
        if (!stream && cuda_nccl_stream(&stream) != ML_OK) return;
        cuda_peer_give_up(&e->peer, stream);
    }
    if (stream) CUDA_OK(cuStreamDestroy(stream));
}

/* What still waits after a while waits for a rank that has stopped. */
void cuda_edges_drain(cuda_device *d) {
    const struct timespec pause = {.tv_nsec = 2000000};
    bool idle = false;
    for (int tries = 0; tries < 500 && !idle; tries++) {
        idle = true;
        for (cuda_edge *e = d->edges; e; e = e->next)
            if (e->direct && cuda.cuStreamQuery(e->stream) == CUDA_ERROR_NOT_READY) idle = false;
        if (!idle) nanosleep(&pause, NULL);
    }
    if (!idle) cuda_edges_give_up(d);
}

void cuda_edges_close(cuda_device *d) {
    cuda_edges_drain(d);
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
    if (e->direct)
        ML_TRY(cuda_peer_send(&e->peer, memory, bytes, e->stream));
    else
        ML_TRY(cuda_pair_send(&e->pair, memory, bytes, e->stream));
    CUDA_TRY(cuEventRecord(message->gone, e->stream));
    message->pending = true;
    return e->direct ? cuda_peer_tell(&e->peer, e->stream) : ML_OK;
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
    if (e->direct)
        ML_TRY(cuda_peer_receive(&e->peer, memory, bytes, e->stream));
    else
        ML_TRY(cuda_pair_receive(&e->pair, memory, bytes, e->stream));
    CUDA_TRY(cuEventRecord(e->there, e->stream));
    e->expected = memory;
    return e->direct ? cuda_peer_tell(&e->peer, e->stream) : ML_OK;
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
