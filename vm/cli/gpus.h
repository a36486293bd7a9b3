/* Looking up known GPUs (base/machine.h), for planning without one and for model FLOP
 * utilisation. */
#ifndef ML_GPUS_H
#define ML_GPUS_H

#include "codegen/target.h"
#include "runtime/base/machine.h"

const ml_gpu *gpu_by_key(const char *key);           /* NULL where there is none */
const ml_gpu *gpu_by_model(const char *description); /* NULL where none matches */
const ml_gpu *gpu_of_machine(void); /* from the driver's files; NULL: no GPU, or unknown */
bool gpu_is_present(void);
const ml_gpu *gpu_at(int i); /* NULL past the last */
void gpu_target(const ml_gpu *gpu, ml_target *target);

#endif
