#ifdef MLUA_CUDA
/* Messages between two GPUs of one host by their copy engines. The sender writes into a ring in the
 * receiver's memory, then a number beside it: how many messages are there. The receiver copies them
 * out and tells the sender, in the same way, how many it has. Streams wait for these numbers, so
 * that nothing waits on a multiprocessor, and what finds room in the ring leaves the sender's
 * memory before it is expected.
 *
 * Both ends cut messages into parts, and place these in the ring, by the same rule from the sizes
 * alone. */
#ifndef ML_CUDA_PEER_H
#define ML_CUDA_PEER_H

#include "runtime/device/cuda/cuda_ipc.h"

enum { CUDA_PEER_RECENT = 64 };
typedef struct {
    CUdeviceptr own, other; /* a number, then the receiver's ring: this end's, the other one's */
    int64_t bytes;          /* of this end's block */
    uint32_t place;         /* of what `other` lies in, among what is open */
    int64_t room, next;     /* bytes of the ring; where the next message goes if it fits there */
    int64_t part;           /* what is longer goes in parts of so many bytes, each as a message */
    uint32_t count;         /* messages so far */
    struct {
        int64_t begin, end;
    } recent[CUDA_PEER_RECENT]; /* message n's part of the ring at n % CUDA_PEER_RECENT */
} cuda_peer;

/* A block for messages of `usual` bytes together, or of less where that is much; what to tell of
 * it. Fails where there is no memory; `able` tells whether others can open it. */
ml_status cuda_peer_make(cuda_device *device, cuda_peer *peer, bool receives, int64_t usual,
                         cuda_offer *offer);
/* Whether the other end's block can be opened; one of these tries the way there. */
bool cuda_peer_open(cuda_device *device, cuda_peer *peer, int rank, const cuda_offer *other,
                    CUstream stream);
/* The sender cuts messages as the receiver's ring asks for. */
void cuda_peer_cut(cuda_peer *peer, int64_t part);
void cuda_peer_close(cuda_device *device, cuda_peer *peer);
/* Gives the block back, once the other end has closed it. */
void cuda_peer_free(cuda_device *device, cuda_peer *peer);

/* On the edge's stream: a copy to the ring once there is room, or from it once the message is
 * there. Then, when the stream has noted that, `tell` the other end. */
ml_status cuda_peer_send(cuda_peer *peer, const void *memory, int64_t bytes, CUstream stream);
ml_status cuda_peer_receive(cuda_peer *peer, void *memory, int64_t bytes, CUstream stream);
ml_status cuda_peer_tell(const cuda_peer *peer, CUstream stream);
/* Nothing waits for the other end any more: it has failed. What is copied is of no use. */
void cuda_peer_give_up(const cuda_peer *peer, CUstream stream);

#endif
#endif
