#ifdef MLUA_CUDA
/* Device memory that ranks of one host open in one another's GPU (CUDA IPC). A rank offers the
 * block that contains an address; the offer travels as plain words; its receiver opens the block,
 * once however often it is offered. Blocks are counted, and closed when no executable uses them any
 * more.
 *
 * A block must not be given back while another rank has it open. So a rank that gives back what was
 * offered has all ranks close it first and waits for them: cuda_ipc_forget before a session's
 * memory moves, cuda_ipc_end when the device is closed. */
#ifndef ML_CUDA_IPC_H
#define ML_CUDA_IPC_H

#include "runtime/device/cuda/cuda_internal.h"

enum { CUDA_SHARE_NONE = UINT32_MAX };

/* What a rank reports to the others of memory. */
typedef struct {
    int64_t able;   /* 0: it cannot be opened */
    int64_t offset; /* in the block */
    uint64_t serial, host;
    CUipcMemHandle handle;
} cuda_offer;
enum { CUDA_OFFER_WORDS = sizeof(cuda_offer) / sizeof(int64_t) };

/* Whether this driver can, and MLUA_PEER does not say otherwise. Ranks may have different drivers:
 * all of them take part in exchanges all the same. */
bool cuda_ipc_able(const cuda_device *device);
cuda_offer cuda_ipc_offer(const cuda_device *device, const void *memory);
/* A place in the device's list of what is opened, for one user more; CUDA_SHARE_NONE where it
 * cannot be opened. What is `lasting` stays open until the device is closed. */
uint32_t cuda_ipc_open(cuda_device *device, int rank, const cuda_offer *offer, bool lasting);
CUdeviceptr cuda_ipc_address(const cuda_device *device, uint32_t place, const cuda_offer *offer);
/* A user less of what was opened in a generation (d->opened_generation): what is not lasting has
 * been closed by cuda_ipc_forget if that is over. */
void cuda_ipc_close(cuda_device *device, uint32_t place, uint32_t generation);
uint32_t cuda_ipc_count(const cuda_device *device); /* of blocks that are open */
/* Closes all that is not lasting. */
void cuda_ipc_forget(cuda_device *device);
/* Closes all, and waits a moment until the other ranks have done so too. Streams are idle. */
void cuda_ipc_end(cuda_device *device);

#endif
#endif
