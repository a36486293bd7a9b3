/* What a device can do at best: `mlua doctor --bench`, and the ceilings beside which --profile puts
 * every step. */
#ifndef ML_BENCH_H
#define ML_BENCH_H

#include "runtime/base/rates.h"
#include "runtime/device/device.h"

/* Measures by programs of its own on a device opened for it: a kernel that reads and writes memory,
 * and the largest square product that is quickly done; matrices grow until the rate does not. Takes
 * a second or two, and is kept in the cache folder under the device's model. Unless `again` is set,
 * what is kept there is taken. `device`: "cpu" or "cuda". */
ml_status ml_bench(const char *device, int ordinal, bool again, ml_ceilings *ceilings);
/* All ranks at once: the bandwidth of an all-reduce among them, as the links see it: each byte of
 * the result passes 2 (ranks - 1) / ranks times. `bytes`: of the tensor that reached it. */
ml_status ml_bench_all_reduce(ml_comm *comm, double *bus_bytes, int64_t *bytes);
/* The rates that were last measured of a device of this machine, and on which day ("2026-11-26");
 * false: none are kept. */
enum { ML_BENCH_DATE = 16 };
bool ml_bench_rates(const char *device, ml_rates *rates, char date[ML_BENCH_DATE]);
/* The model of a device and what else decides its speed; what is free of its memory today does not.
 */
ml_status ml_bench_key(const char *device, int ordinal, uint64_t key[2]);
ml_dtype ml_bench_dtype(const char *device); /* of the products */

#endif
