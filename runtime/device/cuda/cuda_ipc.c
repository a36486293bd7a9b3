#ifdef MLUA_CUDA
#include "runtime/device/cuda/cuda_ipc.h"

/* Memory of another rank. */
struct cuda_opened {
    int rank;        /* of the job */
    uint64_t serial; /* of the block, in its rank */
    CUdeviceptr base;
    int64_t users;       /* 0: closed */
    uint32_t generation; /* of the device, when it was opened */
    bool lasting;
};

_Static_assert(sizeof(cuda_offer) % sizeof(int64_t) == 0, "offers are whole words");

bool cuda_ipc_able(const cuda_device *d) {
    return d->base.options.peer != 0 && cuda_driver_shares() && cuda.cuStreamBatchMemOp &&
           cuda.cuStreamWaitValue32 && cuda.cuStreamWriteValue32;
}

cuda_offer cuda_ipc_offer(const cuda_device *d, const void *memory) {
    CUdeviceptr base = 0, at = (CUdeviceptr)(uintptr_t)memory;
    cuda_offer offer = {.host = ml_comm_host(d->base.ranks->comm)};
    size_t size = 0;
    for (uint32_t i = 0; i < d->block_count; i++) {
        const char *from = d->blocks[i].memory, *to = from + d->blocks[i].bytes;
        if ((const char *)memory < from || (const char *)memory >= to) continue;
        offer.serial = d->blocks[i].serial;
        offer.able = cuda_ipc_able(d) &&
                     cuda.cuMemGetAddressRange(&base, &size, at) == CUDA_SUCCESS &&
                     cuda.cuIpcGetMemHandle(&offer.handle, base) == CUDA_SUCCESS;
        offer.offset = (int64_t)(at - base);
        break;
    }
    return offer;
}

static uint32_t free_place(cuda_device *d) {
    for (uint32_t i = 0; i < d->opened_count; i++)
        if (d->opened[i].users == 0) return i;
    size_t old = d->opened_count * sizeof *d->opened;
    struct cuda_opened *more = ml_realloc(d->opened, old, old + sizeof *more);
    if (!more) return CUDA_SHARE_NONE;
    d->opened = more;
    d->opened[d->opened_count] = (struct cuda_opened){0};
    return d->opened_count++;
}

uint32_t cuda_ipc_open(cuda_device *d, int rank, const cuda_offer *offer, bool lasting) {
    CUdeviceptr base = 0;
    for (uint32_t i = 0; i < d->opened_count; i++) {
        struct cuda_opened *o = &d->opened[i];
        if (o->users == 0 || o->rank != rank || o->serial != offer->serial) continue;
        o->users++;
        o->lasting |= lasting;
        return i;
    }
    /* A handle of another host would not be refused for certain. */
    if (!offer->able || !cuda_ipc_able(d) || offer->host != ml_comm_host(d->base.ranks->comm))
        return CUDA_SHARE_NONE;
    uint32_t place = free_place(d);
    if (place == CUDA_SHARE_NONE ||
        cuda.cuIpcOpenMemHandle(&base, offer->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) !=
            CUDA_SUCCESS)
        return CUDA_SHARE_NONE;
    d->opened[place] =
        (struct cuda_opened){rank, offer->serial, base, 1, d->opened_generation, lasting};
    return place;
}

CUdeviceptr cuda_ipc_address(const cuda_device *d, uint32_t place, const cuda_offer *offer) {
    return d->opened[place].base + (CUdeviceptr)offer->offset;
}

void cuda_ipc_close(cuda_device *d, uint32_t place, uint32_t generation) {
    struct cuda_opened *o = &d->opened[place];
    bool other = o->generation > generation; /* its place was taken since */
    if (other || (generation != d->opened_generation && !o->lasting)) return;
    if (o->users > 0 && --o->users == 0) CUDA_OK(cuIpcCloseMemHandle(o->base));
}

uint32_t cuda_ipc_count(const cuda_device *d) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < d->opened_count; i++) count += d->opened[i].users > 0;
    return count;
}

static void close_all(cuda_device *d, bool lasting_too) {
    for (uint32_t i = 0; i < d->opened_count; i++) {
        if (d->opened[i].users == 0 || (d->opened[i].lasting && !lasting_too)) continue;
        d->opened[i].users = 0;
        CUDA_OK(cuIpcCloseMemHandle(d->opened[i].base));
    }
}

void cuda_ipc_forget(cuda_device *d) {
    d->opened_generation++;
    close_all(d, false);
}

void cuda_ipc_end(cuda_device *d) {
    if (d->parted) return;
    d->parted = true;
    close_all(d, true);
    ml_free(d->opened);
    d->opened = NULL;
    d->opened_count = 0;
    if (cuda_ipc_able(d)) ml_comm_part(d->base.ranks->comm);
}
#endif
