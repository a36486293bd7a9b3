/* Slices of a stage's positions come by a ring of STAGES parts of shared memory at `ring`, each
 * STAGE_BYTES: COPY begins the copies of POSITIONS positions from `first` on to address `to`. */
#pragma once
#define POSITION(u) (REVERSE ? LENGTH - 1 - first - (u) : first + (u))
#define COPY_STAGE(begins, part)                                                                   \
    {                                                                                              \
        const long long first = begins;                                                            \
        const unsigned to = ring + (part)*STAGE_BYTES;                                             \
        COPY copies_commit();                                                                      \
    }
/* The first stages, but for one. */
#define COPY_FIRST_STAGES                                                                          \
    for (int s = 0; s < STAGES - 1; s++) COPY_STAGE(s *(long long)POSITIONS, s)
/* The stage of positions from `begin` on has arrived; the part behind the last begins its copies.
 */
#define NEXT_STAGE                                                                                 \
    copies_but<STAGES - 2>();                                                                      \
    __syncthreads();                                                                               \
    COPY_STAGE(begin + (STAGES - 1) * POSITIONS, next)
