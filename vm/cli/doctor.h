/* `mlua doctor`: what there is on this machine, and with --bench what it can do. */
#ifndef ML_DOCTOR_H
#define ML_DOCTOR_H

#include <stdbool.h>

#include "runtime/comm/comm.h"

bool doctor_print(void); /* false with the error stored */
/* Copies and products of each device, printed with their errors; whether all of it went well. */
bool doctor_bench(void);
int doctor_gpus(void); /* how many */
/* As one of several ranks: the all-reduce among them, which the first prints. */
bool doctor_rank(const ml_launch *launch);

#endif
