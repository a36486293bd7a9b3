#include "vm/cli/gpus.h"

#include <glob.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const vm_gpu gpus[] = {
    {"h200", "H200", 90, 132, 139.8, 989.5, true},
    {"h100", "H100", 90, 132, 79.1, 989.5, true},
    {"gh200", "GH200", 90, 132, 94.5, 989.5, true},
    {"b200", "B200", 100, 148, 178.0, 2250.0, true},
    {"a100", "A100", 80, 108, 79.2, 312.0, true},
    {"l40s", "L40S", 89, 142, 44.5, 362.0, false},
    {"rtx5090", "RTX 5090", 120, 170, 31.3, 209.5, false},
    {"rtx4090", "RTX 4090", 89, 128, 23.5, 165.2, false},
    {"rtx3090", "RTX 3090", 86, 82, 23.6, 71.0, false},
};
enum { COUNT = sizeof gpus / sizeof *gpus };

const vm_gpu *gpu_at(int i) {
    return i < COUNT ? &gpus[i] : NULL;
}

const vm_gpu *gpu_by_key(const char *key) {
    for (int i = 0; i < COUNT; i++)
        if (strcmp(gpus[i].key, key) == 0) return &gpus[i];
    return NULL;
}

const vm_gpu *gpu_by_model(const char *description) {
    const vm_gpu *best = NULL; /* the longest name: "GH200" holds "H200" */
    for (int i = 0; i < COUNT; i++)
        if (strstr(description, gpus[i].model) &&
            (!best || strlen(gpus[i].model) > strlen(best->model)))
            best = &gpus[i];
    return best;
}

bool gpu_is_present(void) {
    return access("/dev/nvidiactl", F_OK) == 0;
}

const vm_gpu *gpu_of_machine(void) {
    glob_t found;
    const vm_gpu *result = NULL;
    if (glob("/proc/driver/nvidia/gpus/*/information", 0, NULL, &found) != 0) return NULL;
    FILE *file = fopen(found.gl_pathv[0], "r");
    globfree(&found);
    char line[256];
    while (file && !result && fgets(line, sizeof line, file))
        if (strncmp(line, "Model:", 6) == 0) result = gpu_by_model(line);
    if (file) fclose(file);
    return result;
}

void gpu_target(const vm_gpu *gpu, ml_target *target) {
    *target = (ml_target){.kind = ML_TARGET_CUDA,
                          .arch = gpu->arch,
                          .multiprocessors = gpu->multiprocessors,
                          .threads = 1,
                          .vector_bytes = 64,
                          .memory_bytes = (int64_t)(gpu->memory_gib * (1 << 30)),
                          .link_bytes = ml_target_link(gpu->arch, gpu->nvlink),
                          .longest_materialized = ML_CUDA_MATERIALIZED};
}
