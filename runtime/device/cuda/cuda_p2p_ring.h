#ifdef MLUA_CUDA
/* Messages between two GPUs of one host by their copy engines. The sender writes into a ring in the
 * receiver's memory, then a number beside it: how many messages are there. The receiver copies them
 * out and reports to the sender, in the same way, how many it has copied. Streams wait for these
 * numbers, so that nothing waits on a multiprocessor, and what finds room in the ring leaves the
 * sender's memory before it is expected.
 *
 * Both ends cut messages into parts, and place these in the ring, by the same rule from the sizes
 * alone. */
#ifndef ML_CUDA_P2P_RING_H
#define ML_CUDA_P2P_RING_H

#include "runtime/device/cuda/cuda_ipc.h"

enum { CUDA_P2P_RING_RECENT = 64 };
typedef struct {
    CUdeviceptr own, other; /* a number, then the receiver's ring: this end's, the other one's */
    int64_t bytes;          /* of this end's block */
    uint32_t place;         /* of the block of `other`, among what is open */
    int64_t room, next;     /* bytes of the ring; the offset of the next message if it fits there */
    int64_t part;           /* bytes: what is longer is sent as several messages */
    uint32_t count;         /* messages so far */
    struct {
        int64_t begin, end;
    } recent[CUDA_P2P_RING_RECENT]; /* message n's part of the ring at n % CUDA_P2P_RING_RECENT */
} cuda_p2p_ring;

/* A block for messages of `usual` bytes together, or of less where that is much; what to report of
 * it. Fails where there is no memory; `able` says whether others can open it. */
ml_status cuda_p2p_ring_make(cuda_device *device, cuda_p2p_ring *ring, bool receives, int64_t usual,
                         cuda_offer *offer);
/* Whether the other end's block can be opened; one of these tries the way there. */
bool cuda_p2p_ring_open(cuda_device *device, cuda_p2p_ring *ring, int rank, const cuda_offer *other,
                    CUstream stream);
/* The sender cuts messages as the receiver's ring asks for. */
void cuda_p2p_ring_cut(cuda_p2p_ring *ring, int64_t part);
void cuda_p2p_ring_close(cuda_device *device, cuda_p2p_ring *ring);
/* Gives the block back, once the other end has closed it. */
void cuda_p2p_ring_free(cuda_device *device, cuda_p2p_ring *ring);

/* On the channel's stream: a copy to the ring once there is room, or from it once the message is
 * there. Then, when the stream has noted that, `report` to the other end. */
ml_status cuda_p2p_ring_send(cuda_p2p_ring *ring, const void *memory, int64_t bytes,
                             CUstream stream);
ml_status cuda_p2p_ring_receive(cuda_p2p_ring *ring, void *memory, int64_t bytes, CUstream stream);
ml_status cuda_p2p_ring_report(const cuda_p2p_ring *ring, CUstream stream);
/* Nothing waits for the other end any more: it has failed. What is copied is of no use. */
void cuda_p2p_ring_give_up(const cuda_p2p_ring *ring, CUstream stream);

#endif
#endif
