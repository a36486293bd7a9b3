#include "vm/cli/gpus.h"

#include <glob.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const ml_gpu *gpu_at(int i) {
    return ml_gpus[i].key ? &ml_gpus[i] : NULL;
}

const ml_gpu *gpu_by_key(const char *key) {
    for (const ml_gpu *gpu = ml_gpus; gpu->key; gpu++)
        if (strcmp(gpu->key, key) == 0) return gpu;
    return NULL;
}

const ml_gpu *gpu_by_model(const char *description) {
    const ml_gpu *best = NULL; /* the longest name: "GH200" holds "H200" */
    for (const ml_gpu *gpu = ml_gpus; gpu->key; gpu++)
        if (strstr(description, gpu->model) && (!best || strlen(gpu->model) > strlen(best->model)))
            best = gpu;
    return best;
}

bool gpu_is_present(void) {
    return access("/dev/nvidiactl", F_OK) == 0;
}

const ml_gpu *gpu_of_machine(void) {
    glob_t found;
    const ml_gpu *result = NULL;
    if (glob("/proc/driver/nvidia/gpus/*/information", 0, NULL, &found) != 0) return NULL;
    FILE *file = fopen(found.gl_pathv[0], "r");
    globfree(&found);
    char line[256];
    while (file && !result && fgets(line, sizeof line, file))
        if (strncmp(line, "Model:", 6) == 0) result = gpu_by_model(line);
    if (file) fclose(file);
    return result;
}

/* What a GPU's rank may pin. Assumed: hosts of eight with 2 TiB, half of which may be pinned. */
static const int64_t HOST_MEMORY = (int64_t)128 << 30;

void gpu_target(const ml_gpu *gpu, ml_target *target) {
    *target = (ml_target){.kind = ML_TARGET_CUDA,
                          .arch = gpu->arch,
                          .multiprocessors = gpu->multiprocessors,
                          .threads = 1,
                          .vector_bytes = 64,
                          .memory_bytes = (int64_t)(gpu->memory_gib * (1 << 30)),
                          .link_bytes = ml_machine_link(gpu->arch, gpu->nvlink),
                          .host_bytes = ml_machine_host(gpu->arch),
                          .host_memory = HOST_MEMORY,
                          .longest_materialized = ML_CUDA_MATERIALIZED};
}
