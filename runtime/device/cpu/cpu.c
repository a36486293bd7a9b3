/* The CPU device: kernels from the C compiler and matrix products, run step by step over a pool of
 * threads. Everything is done when run() returns. */
#include "runtime/device/cpu/cpu_exec.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/base/cgroup.h"
#include "runtime/device/cpu/cpu_internal.h"

enum { ALIGNMENT = 256, HUGE_PAGE = 2 << 20 };

/* In front of every block of device memory. */
typedef struct {
    void *block; /* from ml_alloc */
    int64_t bytes;
} block_head;

static int vector_bytes(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 64;
    if (__builtin_cpu_supports("avx2")) return 32;
#endif
    return 16;
}

static void processor_name(char *out, int size) {
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[256];
    snprintf(out, (size_t)size, "CPU");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL) continue;
        snprintf(out, (size_t)size, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    if (file != NULL) fclose(file);
}

static ml_status cpu_open(ml_device **device, int ordinal, const ml_device_options *options) {
    (void)ordinal;
    cpu_blas_choose(options->blas);
    int threads = options->threads > 0 ? options->threads : ml_cpu_count();
    cpu_device *cpu = ml_alloc(sizeof *cpu);
    if (cpu != NULL) cpu->pool = ml_pool_new(threads);
    if (cpu == NULL || cpu->pool == NULL) {
        ml_free(cpu);
        return ml_fail(ML_NO_MEMORY, "out of memory while opening the CPU device");
    }
    cpu->base.ops = &ml_device_cpu;
    cpu->base.target = (ml_target){.kind = ML_TARGET_C,
                                   .threads = ml_pool_threads(cpu->pool),
                                   .vector_bytes = vector_bytes(),
                                   .memory_bytes = ml_memory_here(),
                                   .longest_materialized = 0};
    char name[128];
    processor_name(name, sizeof name);
    snprintf(cpu->base.description, sizeof cpu->base.description, "%s, %d thread%s, %.1f GiB", name,
             cpu->base.target.threads, cpu->base.target.threads == 1 ? "" : "s",
             (double)cpu->base.target.memory_bytes / (1 << 30));
    *device = &cpu->base;
    return ML_OK;
}

static void cpu_close(ml_device *device) {
    cpu_device *cpu = (cpu_device *)device;
    ml_pool_free(cpu->pool);
    ml_free(cpu->expected);
    ml_free(cpu);
}

/* Large blocks begin at huge pages: kernels walk them from end to end. */
static ml_status cpu_allocate(ml_device *device, int64_t bytes, void **memory) {
    size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
    char *block = NULL;
    if (bytes >= 0 && (uint64_t)bytes < SIZE_MAX / 2) {
        block = ml_alloc((size_t)bytes + alignment + sizeof(block_head));
    }
    if (block == NULL) {
        *memory = NULL;
        return ml_fail(ML_NO_MEMORY, "out of memory: cannot get %.3f GiB for tensors",
                       (double)bytes / (1 << 30));
    }
    uintptr_t at = (uintptr_t)block + sizeof(block_head) + alignment - 1;
    char *aligned = (char *)(at / alignment * alignment);
    if (bytes >= HUGE_PAGE) madvise(aligned, (size_t)bytes, MADV_HUGEPAGE);
    block_head head = {block, bytes};
    memcpy(aligned - sizeof head, &head, sizeof head);
    device->current_bytes += bytes;
    if (device->current_bytes > device->peak_bytes) device->peak_bytes = device->current_bytes;
    *memory = aligned;
    return ML_OK;
}

static void cpu_release(ml_device *device, void *memory) {
    if (memory == NULL) return;
    block_head head;
    memcpy(&head, (char *)memory - sizeof head, sizeof head);
    device->current_bytes -= head.bytes;
    ml_free(head.block);
}

static ml_status cpu_copy(ml_device *device, void *to, const void *from, int64_t bytes) {
    (void)device;
    if (bytes > 0) memcpy(to, from, (size_t)bytes);
    return ML_OK;
}

static ml_status cpu_zero(ml_device *device, void *memory, int64_t bytes) {
    (void)device;
    if (bytes > 0) memset(memory, 0, (size_t)bytes);
    return ML_OK;
}

static ml_status cpu_wait(ml_device *device) {
    (void)device;
    return ML_OK;
}

/* ---- Between ranks ----------------------------------------------------------------------------
 * Runs are finished when they return, so a message is sent from where it is and received where it
 * is awaited; in between it is in the channel's room. */

static ml_status cpu_send(ml_device *device, ml_channel *channel, const void *memory,
                          int64_t bytes) {
    (void)device;
    return ml_channel_send(channel, memory, bytes);
}

static ml_status cpu_wait_sent(ml_device *device, ml_channel *channel, const void *memory) {
    (void)device, (void)channel, (void)memory;
    return ML_OK;
}

/* The channel's place in the list; NULL: no memory for it. */
static cpu_message *message_of(cpu_device *cpu, ml_channel *channel) {
    for (int i = 0; i < cpu->expected_count; i++)
        if (cpu->expected[i].channel == channel) return &cpu->expected[i];
    if (cpu->expected_count == cpu->expected_room) {
        int room = 2 * cpu->expected_room + 8;
        cpu_message *grown = ml_realloc(cpu->expected, (size_t)cpu->expected_room * sizeof *grown,
                                        (size_t)room * sizeof *grown);
        if (grown == NULL) return NULL;
        cpu->expected = grown;
        cpu->expected_room = room;
    }
    cpu_message *message = &cpu->expected[cpu->expected_count++];
    *message = (cpu_message){.channel = channel};
    return message;
}

static ml_status cpu_expect(ml_device *device, ml_channel *channel, void *memory, int64_t bytes) {
    cpu_message *message = message_of((cpu_device *)device, channel);
    if (message == NULL) return ml_fail(ML_NO_MEMORY, "no memory to receive from another rank");
    if (message->memory != NULL)
        return ml_fail(ML_INTERNAL, "a second message of the channel from rank %d is expected",
                       ml_channel_from(channel));
    message->memory = memory;
    message->bytes = bytes;
    return ML_OK;
}

static ml_status cpu_arrive(ml_device *device, ml_channel *channel, void *memory) {
    cpu_message *message = message_of((cpu_device *)device, channel);
    if (message == NULL || message->memory != memory)
        return ml_fail(ML_INTERNAL, "a message of the channel from rank %d was not expected there",
                       ml_channel_from(channel));
    message->memory = NULL;
    return ml_channel_receive(channel, memory, message->bytes);
}

const ml_device_ops ml_device_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .time_products = cpu_time_products,
    .products_by = cpu_blas_describe,
    .wait = cpu_wait,
    .compile = cpu_exec_compile,
    .load = cpu_exec_load,
    .bind = cpu_exec_bind,
    .run = cpu_exec_run,
    .unload = cpu_exec_unload,
    .send = cpu_send,
    .wait_sent = cpu_wait_sent,
    .expect = cpu_expect,
    .arrive = cpu_arrive,
};
