#ifdef MLUA_CUDA
/* Messages between two ranks: each channel has a stream of its own, so that they go on beside
 * computation and in no order with one another. Between GPUs of one host the copy engines carry
 * them (cuda_p2p_ring.h) where they can; else a communicator of the two. */
#include "runtime/device/cuda/cuda_nccl.h"
#include "runtime/device/cuda/cuda_p2p_ring.h"
#include "runtime/device/cuda/cuda_ranks.h"

#include <time.h>

#include "runtime/base/knobs.h"

/* The last message from this memory: sent once the event has passed. */
typedef struct {
    const void *memory;
    CUevent sent;
    bool pending; /* until wait_sent of it */
} sent_message;

typedef struct cuda_channel {
    struct cuda_channel *next;
    ml_channel *channel;
    bool direct; /* by copy engines, else `pair` */
    cuda_p2p_ring ring;
    cuda_pair pair;
    CUstream stream;
    CUevent ready; /* what was on the device's stream before */
    sent_message *sent;
    uint32_t sent_count;
    CUevent there; /* the expected message */
    void *expected;
} cuda_channel;

static cuda_channel *find(const cuda_device *d, const ml_channel *channel) {
    cuda_channel *c = d->channels;
    while (c && c->channel != channel) c = c->next;
    return c;
}

static ml_status open_channel(cuda_channel *c) {
    ML_TRY(cuda_nccl_stream(&c->stream));
    CUDA_TRY(cuEventCreate(&c->ready, CU_EVENT_DISABLE_TIMING));
    CUDA_TRY(cuEventCreate(&c->there, CU_EVENT_DISABLE_TIMING));
    return ML_OK;
}

static bool receives(const cuda_device *d, const cuda_channel *c) {
    return ml_channel_to(c->channel) == d->base.ranks->rank;
}

/* All ranks at once; c is NULL where this one is no end of a new channel. Its two ends agree on
 * whether the copy engines carry its messages; *direct says on all ranks whether they do so for all
 * new channels.
 */
static ml_status connect_peers(cuda_device *d, cuda_channel *c, int64_t usual, bool *direct) {
    ml_comm *comm = d->base.ranks->comm;
    cuda_offer mine = {.able = 0}, theirs;
    int other = !c ? -1 : receives(d, c) ? ml_channel_from(c->channel) : ml_channel_to(c->channel);
    int64_t here[2] = {0}, there[2]; /* whether it is open, and parts of a message */
    if (c && cuda_ipc_able(d))
        ML_TRY(cuda_p2p_ring_make(d, &c->ring, receives(d, c), usual, &mine));
    ML_TRY(ml_comm_swap(comm, other, &mine, &theirs, CUDA_OFFER_WORDS));
    if (mine.able && theirs.able)
        here[0] = cuda_p2p_ring_open(d, &c->ring, other, &theirs, c->stream);
    if (c) here[1] = c->ring.part;
    ML_TRY(ml_comm_swap(comm, other, here, there, 2));
    if (c) {
        c->direct = here[0] && there[0];
        if (c->direct && !receives(d, c)) cuda_p2p_ring_cut(&c->ring, there[1]);
        ml_debug(1, "ring: by %s: channel from rank %d to %d\n", c->direct ? "copies" : "NCCL",
                 ml_channel_from(c->channel), ml_channel_to(c->channel));
    }
    int64_t all = !c || c->direct;
    ML_TRY(ml_comm_least(comm, &all));
    *direct = all != 0;
    return ML_OK;
}

ml_status cuda_channel_connect(ml_device *device, ml_channel *channel, int64_t usual) {
    cuda_device *d = (cuda_device *)device;
    cuda_channel *c = NULL;
    bool direct;
    ML_TRY(cuda_nccl_ready(d));
    if (channel && !find(d, channel)) { /* one that is known is known to the other end too */
        c = ml_alloc(sizeof *c);
        if (!c) return ml_fail(ML_NO_MEMORY, "no memory for a channel between GPUs");
        c->channel = channel;
        c->next = d->channels;
        d->channels = c; /* closed with the device, however far this gets */
        ML_TRY(open_channel(c));
    }
    ML_TRY(connect_peers(d, c, usual, &direct));
    if (direct) return ML_OK;
    if (!c || c->direct) return cuda_pair_new(d, 0, 0, NULL, NULL);
    cuda_p2p_ring_close(d, &c->ring);
    ML_TRY(cuda_pair_new(d, ml_channel_from(channel), receives(d, c), c->stream, &c->pair));
    cuda_p2p_ring_free(d, &c->ring); /* all ranks have come here meanwhile */
    return ML_OK;
}

bool cuda_channel_patient(const ml_device *device, const ml_channel *channel) {
    const cuda_channel *c = find((const cuda_device *)device, channel);
    return c && c->direct;
}

/* On streams of their own: those of the channels wait. */
void cuda_channels_give_up(cuda_device *d) {
    CUstream stream = NULL;
    for (cuda_channel *c = d->channels; c; c = c->next) {
        if (!c->direct) continue;
        if (!stream && cuda_nccl_stream(&stream) != ML_OK) return;
        cuda_p2p_ring_give_up(&c->ring, stream);
    }
    if (stream) CUDA_OK(cuStreamDestroy(stream));
}

/* What still waits after a while waits for a rank that has stopped. */
void cuda_channels_drain(cuda_device *d) {
    const struct timespec pause = {.tv_nsec = 2000000};
    bool idle = false;
    for (int tries = 0; tries < 500 && !idle; tries++) {
        idle = true;
        for (cuda_channel *c = d->channels; c; c = c->next)
            if (c->direct && cuda.cuStreamQuery(c->stream) == CUDA_ERROR_NOT_READY) idle = false;
        if (!idle) nanosleep(&pause, NULL);
    }
    if (!idle) cuda_channels_give_up(d);
}

void cuda_channels_close(cuda_device *d) {
    cuda_channels_drain(d);
    while (d->channels) {
        cuda_channel *c = d->channels;
        d->channels = c->next;
        for (uint32_t i = 0; i < c->sent_count; i++) CUDA_OK(cuEventDestroy(c->sent[i].sent));
        if (c->ready) CUDA_OK(cuEventDestroy(c->ready));
        if (c->there) CUDA_OK(cuEventDestroy(c->there));
        if (c->stream) CUDA_OK(cuStreamDestroy(c->stream));
        ml_free(c->sent);
        ml_free(c);
    }
}

static ml_status channel_of(cuda_device *d, ml_channel *channel, cuda_channel **c) {
    *c = find(d, channel);
    if (!*c) return ml_fail(ML_INTERNAL, "a channel between GPUs that was not connected");
    return cuda_nccl_ready(d);
}

static sent_message *message_of(cuda_channel *c, const void *memory) {
    for (uint32_t i = 0; i < c->sent_count; i++)
        if (c->sent[i].memory == memory) return &c->sent[i];
    return NULL;
}

/* A place for a message from memory that none was sent from before. */
static ml_status message_new(cuda_channel *c, const void *memory, sent_message **message) {
    size_t old = c->sent_count * sizeof *c->sent;
    sent_message *sent = ml_realloc(c->sent, old, old + sizeof *sent);
    if (!sent) return ml_fail(ML_NO_MEMORY, "no memory for a message between GPUs");
    c->sent = sent;
    *message = &sent[c->sent_count];
    **message = (sent_message){.memory = memory};
    CUDA_TRY(cuEventCreate(&(*message)->sent, CU_EVENT_DISABLE_TIMING));
    c->sent_count++;
    return ML_OK;
}

/* The channel continues after what is on the device's stream by now. */
static ml_status after_stream(cuda_device *d, cuda_channel *c) {
    CUDA_TRY(cuEventRecord(c->ready, d->stream));
    CUDA_TRY(cuStreamWaitEvent(c->stream, c->ready, 0));
    return ML_OK;
}

ml_status cuda_channel_send(ml_device *device, ml_channel *channel, const void *memory,
                            int64_t bytes) {
    cuda_device *d = (cuda_device *)device;
    cuda_channel *c;
    ML_TRY(channel_of(d, channel, &c));
    sent_message *message = message_of(c, memory);
    if (!message) ML_TRY(message_new(c, memory, &message));
    ML_TRY(after_stream(d, c));
    if (c->direct)
        ML_TRY(cuda_p2p_ring_send(&c->ring, memory, bytes, c->stream));
    else
        ML_TRY(cuda_pair_send(&c->pair, memory, bytes, c->stream));
    CUDA_TRY(cuEventRecord(message->sent, c->stream));
    message->pending = true;
    return c->direct ? cuda_p2p_ring_report(&c->ring, c->stream) : ML_OK;
}

ml_status cuda_channel_wait_sent(ml_device *device, ml_channel *channel, const void *memory) {
    cuda_device *d = (cuda_device *)device;
    cuda_channel *c = find(d, channel);
    sent_message *message = c ? message_of(c, memory) : NULL;
    if (!message || !message->pending) return ML_OK;
    message->pending = false;
    CUDA_TRY(cuStreamWaitEvent(d->stream, message->sent, 0));
    return ML_OK;
}

ml_status cuda_channel_expect(ml_device *device, ml_channel *channel, void *memory, int64_t bytes) {
    cuda_device *d = (cuda_device *)device;
    cuda_channel *c;
    ML_TRY(channel_of(d, channel, &c));
    if (c->expected)
        return ml_fail(ML_INTERNAL, "a second message of the channel from rank %d is expected",
                       ml_channel_from(channel));
    ML_TRY(after_stream(d, c));
    if (c->direct)
        ML_TRY(cuda_p2p_ring_receive(&c->ring, memory, bytes, c->stream));
    else
        ML_TRY(cuda_pair_receive(&c->pair, memory, bytes, c->stream));
    CUDA_TRY(cuEventRecord(c->there, c->stream));
    c->expected = memory;
    return c->direct ? cuda_p2p_ring_report(&c->ring, c->stream) : ML_OK;
}

ml_status cuda_channel_arrive(ml_device *device, ml_channel *channel, void *memory) {
    cuda_device *d = (cuda_device *)device;
    cuda_channel *c = find(d, channel);
    if (!c || c->expected != memory)
        return ml_fail(ML_INTERNAL, "a message of the channel from rank %d was not expected there",
                       ml_channel_from(channel));
    c->expected = NULL;
    CUDA_TRY(cuStreamWaitEvent(d->stream, c->there, 0));
    return ML_OK;
}
#endif
