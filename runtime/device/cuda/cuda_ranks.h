/* The life of a GPU among those of other ranks: NCCL's communicators, copies between GPUs and
 * channels are connected, aborted after a failure, and closed together. */
#ifndef ML_CUDA_RANKS_H
#define ML_CUDA_RANKS_H
#ifdef MLUA_CUDA

#include "runtime/device/cuda/cuda_internal.h"

/* All ranks at once, with device->ranks set. */
ml_status cuda_ranks_join(ml_device *device);
/* No executables are left: nothing of this rank uses the others' memory from now on. Waits a moment
 * until the others say so too; then memory that they opened may be given back. */
void cuda_ranks_part(ml_device *device);
/* Destroys the communicators, or aborts them after a failure. Graphs are destroyed before. False
 * where a thread still uses the device, which must stay until the process ends. */
bool cuda_ranks_close(cuda_device *device);

/* Channels between ranks, as device.h says (cuda_p2p_channel.c). */
ml_status cuda_channel_connect(ml_device *device, ml_channel *channel, int64_t usual);
bool cuda_channel_patient(const ml_device *device, const ml_channel *channel);
ml_status cuda_channel_send(ml_device *device, ml_channel *channel, const void *memory,
                            int64_t bytes);
ml_status cuda_channel_wait_sent(ml_device *device, ml_channel *channel, const void *memory);
ml_status cuda_channel_expect(ml_device *device, ml_channel *channel, void *memory, int64_t bytes);
ml_status cuda_channel_arrive(ml_device *device, ml_channel *channel, void *memory);
void cuda_channels_give_up(cuda_device *device); /* another rank has failed */
void cuda_channels_drain(cuda_device *device);   /* until all that was sent and expected is there */
void cuda_channels_close(cuda_device *device);

#endif
#endif
