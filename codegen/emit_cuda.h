/* Inside the CUDA printer: how a kernel's work is laid over threads.
 *
 * A pack is `vec` neighbouring elements of the innermost loop, moved by wide loads and stores.
 * Elementwise kernels: one thread a pack. Kernels with columns: a team of `team` threads walks a
 * row, thread t of it the packs t, t + team, ... (`packs` of them); a block holds `teams` teams.
 * With chunks a block walks the rows of its chunk, team k the rows k, k + teams, ...; `tiled`
 * kernels (column sums of rows that need nothing from each other) also cut the columns over
 * blockIdx.x. Everything is a function of sizes and strides alone. */
#ifndef ML_EMIT_CUDA_H
#define ML_EMIT_CUDA_H

#include "codegen/emit.h"

enum { CUDA_WARP = 32, CUDA_MAX_THREADS = 1024 };

typedef struct {
    emitter *e;
    bool elementwise, chunked, tiled;
    int vec, team, teams, packs;
    bool unroll;         /* the loop over packs is unrolled, so that arrays live in registers */
    const char *integer; /* type of indices: int where they fit, else long long */
    const char *column_integer; /* the same for columns, or for the innermost loop */
    int *pack;    /* LOAD: the first load of the same elements, whose pack serves; -1: no pack */
    bool *cached; /* by pack: lives in registers from its first stage on */
    int *first_stage; /* by pack */
    int64_t *shared;  /* by pack: cached ones start there in shared memory, if any is used */
    uint32_t shared_bytes;
    bool in_registers; /* COLUMN accumulators; else they are added to memory row by row */
} cuda_shape;

void cuda_choose_shape(cuda_shape *s);
bool cuda_is_column(const cuda_shape *s, const ml_inst *inst); /* a COLUMN partial */
ml_dtype cuda_column_dtype(const ml_inst *inst); /* what a COLUMN partial is summed in */
bool cuda_is_row_partial(const cuda_shape *s, int inst);       /* an ALL partial, once a row */
/* Whether a STORE moves whole packs. */
bool cuda_stores_pack(const cuda_shape *s, int inst);
int cuda_threads(const cuda_shape *s); /* of a block */

#endif
