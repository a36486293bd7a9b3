#ifdef MLUA_CUDA
#include "runtime/device/cuda/cuda_p2p_ring.h"

/* Bytes. */
enum { HEAD = 256, ALIGNMENT = 256, WHOLE = 2 << 20, PART = 32 << 20, LEAST = 1 << 20 };

static int64_t aligned(int64_t bytes, int64_t to) {
    return (bytes + to - 1) / to * to;
}

/* Rings come out of what is left for communicators: of this all may take so much, but for the least
 * parts. */
static int64_t rings_bytes(const cuda_device *d) {
    const int64_t most = 512 << 20, share = d->base.target.memory_bytes / 256;
    return share < most ? share : most;
}

/* Room for twice as much as is sent at once: the next messages may come while those before are
 * copied out. Memory of its own, which large blocks have: a piece of what others share cannot be
 * opened twice. */
ml_status cuda_peer_make(cuda_device *d, cuda_peer *peer, bool receives, int64_t usual,
                         cuda_offer *offer) {
    void *block = NULL;
    int64_t part = usual < PART ? aligned(usual, ALIGNMENT) : PART;
    int64_t left = rings_bytes(d) - d->ring_bytes;
    if (receives && part > left / 2) part = left / 2 / ALIGNMENT * ALIGNMENT;
    if (part < LEAST && part < usual) part = usual < LEAST ? aligned(usual, ALIGNMENT) : LEAST;
    *peer = (cuda_peer){.place = CUDA_SHARE_NONE};
    cuda_peer_cut(peer, part);
    int64_t bytes = aligned(HEAD + (receives ? peer->room : 0), WHOLE);
    ML_TRY(d->base.ops->allocate(&d->base, bytes, &block));
    peer->own = (CUdeviceptr)(uintptr_t)block;
    peer->bytes = bytes;
    d->ring_bytes += bytes;
    CUDA_TRY(cuMemsetD8Async(peer->own, 0, HEAD, d->stream));
    ML_TRY(cuda_wait_for(d, NULL));
    *offer = cuda_share_offer(d, block);
    return ML_OK;
}

/* The way there is made when it is first used, which may wait for all that runs: so that is now. */
bool cuda_peer_open(cuda_device *d, cuda_peer *peer, int rank, const cuda_offer *other,
                    CUstream stream) {
    peer->place = cuda_share_open(d, rank, other, true);
    if (peer->place == CUDA_SHARE_NONE) return false;
    peer->other = cuda_share_address(d, peer->place, other);
    return cuda.cuMemcpyDtoDAsync(peer->other + HEAD / 2, peer->own + HEAD / 2, 16, stream) ==
               CUDA_SUCCESS &&
           cuda.cuStreamWriteValue32(stream, peer->other, 0, 0) == CUDA_SUCCESS &&
           cuda.cuStreamWaitValue32(stream, peer->own, 0, CU_STREAM_WAIT_VALUE_GEQ) ==
               CUDA_SUCCESS &&
           cuda.cuStreamSynchronize(stream) == CUDA_SUCCESS;
}

void cuda_peer_cut(cuda_peer *peer, int64_t part) {
    peer->part = part;
    peer->room = 2 * part + 16 * ALIGNMENT;
}

void cuda_peer_close(cuda_device *d, cuda_peer *peer) {
    if (peer->own && peer->place != CUDA_SHARE_NONE)
        cuda_share_close(d, peer->place, d->opened_generation);
    peer->place = CUDA_SHARE_NONE;
}

void cuda_peer_free(cuda_device *d, cuda_peer *peer) {
    if (peer->own) d->base.ops->release(&d->base, (void *)(uintptr_t)peer->own);
    d->ring_bytes -= peer->bytes;
    *peer = (cuda_peer){0};
}

/* Where the next message goes. *before becomes how many messages must be copied out by then: those
 * up to the last one that lies there. */
static void place(cuda_peer *peer, int64_t bytes, int64_t *begin, uint32_t *before) {
    int64_t size = aligned(bytes, ALIGNMENT);
    if (peer->next + size > peer->room) peer->next = 0;
    uint32_t known = peer->count < CUDA_PEER_RECENT ? peer->count : CUDA_PEER_RECENT;
    *begin = peer->next;
    *before = peer->count - known; /* those that are forgotten */
    for (uint32_t i = 1; i <= known; i++) {
        uint32_t n = peer->count - i;
        if (peer->recent[n % CUDA_PEER_RECENT].begin >= *begin + size ||
            peer->recent[n % CUDA_PEER_RECENT].end <= *begin)
            continue;
        *before = n + 1;
        break;
    }
    peer->recent[peer->count % CUDA_PEER_RECENT].begin = *begin;
    peer->recent[peer->count % CUDA_PEER_RECENT].end = peer->next = *begin + size;
    peer->count++;
}

static ml_status send_part(cuda_peer *peer, CUdeviceptr from, int64_t bytes, CUstream stream) {
    int64_t begin;
    uint32_t before;
    place(peer, bytes, &begin, &before);
    CUdeviceptr to = peer->other + (CUdeviceptr)(HEAD + begin);
    if (before > 0)
        CUDA_TRY(cuStreamWaitValue32(stream, peer->own, before, CU_STREAM_WAIT_VALUE_GEQ));
    CUDA_TRY(cuMemcpyDtoDAsync(to, from, (size_t)bytes, stream));
    return ML_OK;
}

static ml_status receive_part(cuda_peer *peer, CUdeviceptr to, int64_t bytes, CUstream stream) {
    int64_t begin;
    uint32_t before;
    place(peer, bytes, &begin, &before);
    CUdeviceptr from = peer->own + (CUdeviceptr)(HEAD + begin);
    CUDA_TRY(cuStreamWaitValue32(stream, peer->own, peer->count, CU_STREAM_WAIT_VALUE_GEQ));
    CUDA_TRY(cuMemcpyDtoDAsync(to, from, (size_t)bytes, stream));
    return ML_OK;
}

ml_status cuda_peer_send(cuda_peer *peer, const void *memory, int64_t bytes, CUstream stream) {
    CUdeviceptr from = (CUdeviceptr)(uintptr_t)memory;
    for (; bytes > peer->part; from += (CUdeviceptr)peer->part, bytes -= peer->part) {
        ML_TRY(send_part(peer, from, peer->part, stream));
        ML_TRY(cuda_peer_tell(peer, stream));
    }
    return send_part(peer, from, bytes, stream);
}

ml_status cuda_peer_receive(cuda_peer *peer, void *memory, int64_t bytes, CUstream stream) {
    CUdeviceptr to = (CUdeviceptr)(uintptr_t)memory;
    for (; bytes > peer->part; to += (CUdeviceptr)peer->part, bytes -= peer->part) {
        ML_TRY(receive_part(peer, to, peer->part, stream));
        ML_TRY(cuda_peer_tell(peer, stream));
    }
    return receive_part(peer, to, bytes, stream);
}

ml_status cuda_peer_tell(const cuda_peer *peer, CUstream stream) {
    CUDA_TRY(cuStreamWriteValue32(stream, peer->other, peer->count, 0));
    return ML_OK;
}

void cuda_peer_give_up(const cuda_peer *peer, CUstream stream) {
    const uint32_t far = (uint32_t)1 << 30; /* numbers are compared as they wrap */
    if (peer->own) CUDA_OK(cuStreamWriteValue32(stream, peer->own, peer->count + far, 0));
}
#endif
