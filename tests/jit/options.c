/* The border of tests that compile, or multiply on the CPU, without opening a device. */
#include "codegen/jit/jit.h"
#include "runtime/base/knobs.h"
#include "runtime/device/cpu/cpu_internal.h"

__attribute__((constructor)) static void set_options(void) {
    const ml_knobs_values *k = ml_knobs();
    ml_jit_set_options(
        &(ml_jit_options){.keep = k->keep, .cache = k->cache, .compilers = k->compilers});
    cpu_blas_choose(k->blas);
}
