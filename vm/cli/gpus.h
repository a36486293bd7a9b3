/* Known GPUs, for planning without one and for model FLOP utilisation. */
#ifndef ML_GPUS_H
#define ML_GPUS_H

#include "codegen/target.h"

typedef struct {
    const char *key;   /* the value of --device in a check: "h200" */
    const char *model; /* a part of the driver's name for it */
    int arch, multiprocessors;
    double memory_gib; /* what the driver leaves to programs, about */
    double tflops;     /* dense bf16, from the vendor's data sheet */
    bool nvlink;       /* joins those of a host */
} vm_gpu;

const vm_gpu *gpu_by_key(const char *key);           /* NULL where there is none */
const vm_gpu *gpu_by_model(const char *description); /* NULL where none matches */
const vm_gpu *gpu_of_machine(void); /* from the driver's files; NULL: no GPU, or unknown */
bool gpu_is_present(void);
const vm_gpu *gpu_at(int i); /* NULL past the last */
void gpu_target(const vm_gpu *gpu, ml_target *target);

#endif
