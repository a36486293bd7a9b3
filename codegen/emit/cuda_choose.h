/* The choices of a schedule for CUDA; cuda.c makes them in order. Each reads what is chosen already
 * and sets fields of its own. */
#ifndef ML_CUDA_CHOOSE_H
#define ML_CUDA_CHOOSE_H

#include "codegen/emit/cuda_schedule.h"

enum {
    CUDA_TWO_BLOCKS_SUMS = 16, /* more registers of columns' sums leave no room for two blocks */
    CUDA_CHUNK_THREADS = 512,  /* chunks are few, so each gets many threads */
    CUDA_TWO_BLOCKS_THREADS = 640,
    CUDA_LONG_ROW_THREADS = 512,
};

/* cuda_threads.c */
void cuda_choose_vector(cuda_schedule *s);
void cuda_find_packs(cuda_schedule *s);
bool cuda_choose_adjacent_rows(
    cuda_schedule *s);                         /* lanes over adjacent rows; false: they are not */
bool cuda_choose_persistent(cuda_schedule *s); /* blocks loop over rows; false: they do not */
void cuda_choose_team(cuda_schedule *s);       /* of the others */
bool cuda_choose_spread(const cuda_schedule *s);
int cuda_choose_lanes(int64_t packs, int64_t most, int warp);
int cuda_summing_threads(const cuda_schedule *s, int64_t packs); /* of a row; 0: it has no sums */
int cuda_blocks_together(const cuda_schedule *s);
int cuda_at_most(int64_t n, int most);

/* cuda_memory.c */
void cuda_choose_elements(cuda_schedule *s); /* of elementwise kernels */
void cuda_prefetch_ahead(cuda_schedule *s);
void cuda_choose_kept_results(cuda_schedule *s);
void cuda_choose_registers(cuda_schedule *s);
bool cuda_fits_registers(const cuda_schedule *s);
void cuda_move_to_shared(cuda_schedule *s);
void cuda_choose_blocks(cuda_schedule *s);

/* cuda_values.c */
void cuda_find_one_hot(cuda_schedule *s);
void cuda_find_largest(cuda_schedule *s);
void cuda_choose_hoisted(cuda_schedule *s);
void cuda_find_needs(
    cuda_schedule *s); /* what passes need, less what leads to hoisted values alone */
void cuda_choose_in_place(cuda_schedule *s);
void cuda_choose_online(cuda_schedule *s);
void cuda_choose_saved(cuda_schedule *s);
void cuda_choose_next(cuda_schedule *s);
void cuda_find_compensated(cuda_schedule *s);

#endif
