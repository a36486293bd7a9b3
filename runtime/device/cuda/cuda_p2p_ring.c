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
ml_status cuda_p2p_ring_make(cuda_device *d, cuda_p2p_ring *ring, bool receives, int64_t usual,
                             cuda_offer *offer) {
    void *block = NULL;
    int64_t part = usual < PART ? aligned(usual, ALIGNMENT) : PART;
    int64_t left = rings_bytes(d) - d->ring_bytes;
    if (receives && part > left / 2) part = left / 2 / ALIGNMENT * ALIGNMENT;
    if (part < LEAST && part < usual) part = usual < LEAST ? aligned(usual, ALIGNMENT) : LEAST;
    *ring = (cuda_p2p_ring){.place = CUDA_SHARE_NONE};
    cuda_p2p_ring_cut(ring, part);
    int64_t bytes = aligned(HEAD + (receives ? ring->room : 0), WHOLE);
    ML_TRY(d->base.ops->allocate(&d->base, bytes, &block));
    ring->own = (CUdeviceptr)(uintptr_t)block;
    ring->bytes = bytes;
    d->ring_bytes += bytes;
    CUDA_TRY(cuMemsetD8Async(ring->own, 0, HEAD, d->stream));
    ML_TRY(cuda_wait_for(d, NULL));
    *offer = cuda_ipc_offer(d, block);
    return ML_OK;
}

/* The path is set up when it is first used, which may wait for all that runs: so that is now. */
bool cuda_p2p_ring_open(cuda_device *d, cuda_p2p_ring *ring, int rank, const cuda_offer *other,
                        CUstream stream) {
    ring->place = cuda_ipc_open(d, rank, other, true);
    if (ring->place == CUDA_SHARE_NONE) return false;
    ring->other = cuda_ipc_address(d, ring->place, other);
    return cuda.cuMemcpyDtoDAsync(ring->other + HEAD / 2, ring->own + HEAD / 2, 16, stream) ==
               CUDA_SUCCESS &&
           cuda.cuStreamWriteValue32(stream, ring->other, 0, 0) == CUDA_SUCCESS &&
           cuda.cuStreamWaitValue32(stream, ring->own, 0, CU_STREAM_WAIT_VALUE_GEQ) ==
               CUDA_SUCCESS &&
           cuda.cuStreamSynchronize(stream) == CUDA_SUCCESS;
}

void cuda_p2p_ring_cut(cuda_p2p_ring *ring, int64_t part) {
    ring->part = part;
    ring->room = 2 * part + 16 * ALIGNMENT;
}

void cuda_p2p_ring_close(cuda_device *d, cuda_p2p_ring *ring) {
    if (ring->own && ring->place != CUDA_SHARE_NONE)
        cuda_ipc_close(d, ring->place, d->opened_generation);
    ring->place = CUDA_SHARE_NONE;
}

void cuda_p2p_ring_free(cuda_device *d, cuda_p2p_ring *ring) {
    if (ring->own) d->base.ops->release(&d->base, (void *)(uintptr_t)ring->own);
    d->ring_bytes -= ring->bytes;
    *ring = (cuda_p2p_ring){0};
}

/* The offset of the next message. *before becomes how many messages must be copied out by then:
 * those up to the last one that is there. */
static void place(cuda_p2p_ring *ring, int64_t bytes, int64_t *begin, uint32_t *before) {
    int64_t size = aligned(bytes, ALIGNMENT);
    if (ring->next + size > ring->room) ring->next = 0;
    uint32_t known = ring->count < CUDA_P2P_RING_RECENT ? ring->count : CUDA_P2P_RING_RECENT;
    *begin = ring->next;
    *before = ring->count - known; /* those that are forgotten */
    for (uint32_t i = 1; i <= known; i++) {
        uint32_t n = ring->count - i;
        if (ring->recent[n % CUDA_P2P_RING_RECENT].begin >= *begin + size ||
            ring->recent[n % CUDA_P2P_RING_RECENT].end <= *begin)
            continue;
        *before = n + 1;
        break;
    }
    ring->recent[ring->count % CUDA_P2P_RING_RECENT].begin = *begin;
    ring->recent[ring->count % CUDA_P2P_RING_RECENT].end = ring->next = *begin + size;
    ring->count++;
}

static ml_status send_part(cuda_p2p_ring *ring, CUdeviceptr from, int64_t bytes, CUstream stream) {
    int64_t begin;
    uint32_t before;
    place(ring, bytes, &begin, &before);
    CUdeviceptr to = ring->other + (CUdeviceptr)(HEAD + begin);
    if (before > 0)
        CUDA_TRY(cuStreamWaitValue32(stream, ring->own, before, CU_STREAM_WAIT_VALUE_GEQ));
    CUDA_TRY(cuMemcpyDtoDAsync(to, from, (size_t)bytes, stream));
    return ML_OK;
}

static ml_status receive_part(cuda_p2p_ring *ring, CUdeviceptr to, int64_t bytes, CUstream stream) {
    int64_t begin;
    uint32_t before;
    place(ring, bytes, &begin, &before);
    CUdeviceptr from = ring->own + (CUdeviceptr)(HEAD + begin);
    CUDA_TRY(cuStreamWaitValue32(stream, ring->own, ring->count, CU_STREAM_WAIT_VALUE_GEQ));
    CUDA_TRY(cuMemcpyDtoDAsync(to, from, (size_t)bytes, stream));
    return ML_OK;
}

ml_status cuda_p2p_ring_send(cuda_p2p_ring *ring, const void *memory, int64_t bytes,
                             CUstream stream) {
    CUdeviceptr from = (CUdeviceptr)(uintptr_t)memory;
    for (; bytes > ring->part; from += (CUdeviceptr)ring->part, bytes -= ring->part) {
        ML_TRY(send_part(ring, from, ring->part, stream));
        ML_TRY(cuda_p2p_ring_report(ring, stream));
    }
    return send_part(ring, from, bytes, stream);
}

ml_status cuda_p2p_ring_receive(cuda_p2p_ring *ring, void *memory, int64_t bytes, CUstream stream) {
    CUdeviceptr to = (CUdeviceptr)(uintptr_t)memory;
    for (; bytes > ring->part; to += (CUdeviceptr)ring->part, bytes -= ring->part) {
        ML_TRY(receive_part(ring, to, ring->part, stream));
        ML_TRY(cuda_p2p_ring_report(ring, stream));
    }
    return receive_part(ring, to, bytes, stream);
}

ml_status cuda_p2p_ring_report(const cuda_p2p_ring *ring, CUstream stream) {
    CUDA_TRY(cuStreamWriteValue32(stream, ring->other, ring->count, 0));
    return ML_OK;
}

void cuda_p2p_ring_give_up(const cuda_p2p_ring *ring, CUstream stream) {
    const uint32_t far = (uint32_t)1 << 30; /* numbers are compared as they wrap */
    if (ring->own) CUDA_OK(cuStreamWriteValue32(stream, ring->own, ring->count + far, 0));
}
#endif
