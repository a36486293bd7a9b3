/* Blocked matrix products with the interface of Fortran's sgemm and dgemm, for machines on which
 * no BLAS is found. Vectors are chosen by the processor at run time. */
#ifndef ML_CPU_KERNEL_H
#define ML_CPU_KERNEL_H

#include "runtime/device/cpu.h"

const cpu_blas *cpu_kernel_blas(void);

#endif
