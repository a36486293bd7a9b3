/* Programs on the CPU device (cpu_exec.c). */
#ifndef ML_CPU_EXEC_H
#define ML_CPU_EXEC_H

#include <stdio.h>

#include "runtime/base/pool.h"
#include "runtime/device/device.h"

typedef struct {
    ml_channel *channel;
    void *memory; /* NULL: no message is expected */
    int64_t bytes;
} cpu_message;

typedef struct {
    ml_device base;
    ml_pool *pool;
    cpu_message *expected; /* one a channel that was ever received from */
    int expected_count, expected_room;
} cpu_device;

ml_status cpu_exec_compile(ml_device *device, const ml_plan *const *plans, int count);
ml_status cpu_exec_load(ml_device *device, const ml_plan *plan, ml_executable **executable);
ml_status cpu_exec_bind(ml_executable *executable, void *const *addresses);
ml_status cpu_exec_run(ml_executable *executable);
void cpu_exec_unload(ml_executable *executable);

#endif
