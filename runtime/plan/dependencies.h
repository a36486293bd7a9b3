/* Which steps of a schedule read and write which storage, and which steps follow from which: one
 * table for all that orders steps (overlap.c, batch_kernels.c) or that asks when a storage is alive
 * (state_updates.c, memory.c). It describes the schedule as it is when the table is built: code
 * that reorders steps builds another. */
#ifndef ML_DEPENDENCIES_H
#define ML_DEPENDENCIES_H

#include "codegen/lower/lower.h"

enum { NO_STEP = UINT32_MAX };

typedef struct {
    uint32_t step;
    uint32_t next_write, end; /* in use[]: the next write of the storage (or end), its end */
    bool writes;
} step_use;
typedef struct {
    step_use *use;        /* those of a storage together, in the order of the steps */
    uint32_t *of_storage; /* storage i: use[of_storage[i] .. of_storage[i + 1]) */
    uint32_t *first;      /* value i of step t: use[by_value[first[t] + i]] */
    uint32_t *by_value;
} step_uses;

/* The uses of all steps. same[i] (NULL: i): the storage whose memory storage i will share, which is
 * listed instead of it. */
void step_uses_find(const ml_schedule *s, const uint32_t *same, ml_arena *arena, step_uses *out);
/* By storage: the first and the last step that uses it, the first that writes and the last that
 * reads it; NO_STEP: none. Much cheaper than all uses. */
typedef struct {
    uint32_t first, last, first_write, last_read;
} step_span;
step_span *step_spans_find(const ml_schedule *s, ml_arena *arena);

/* By state: 1 + the last step that reads or writes it; what a collective has beside the steps that
 * follow, and the first output_count outputs, last to the end. 0: none does. */
uint32_t *state_last_uses(const ml_schedule *s, int output_count, ml_arena *arena);

/* A directed graph of steps: edges of step i are edge[first[i] .. first[i + 1]), ascending in
 * `after`; an edge may occur twice. */
typedef struct {
    uint32_t *first, *edge;
} step_edges;

/* A step comes after all writers of what it reads, and after all readers of the temporaries that it
 * writes: before[t] lists these, after[t] the steps that come after t so. */
void step_dependencies_find(const ml_schedule *s, ml_arena *arena, step_edges *before,
                            step_edges *after);

/* How many operands of steps each storage is, by storage: added to what is there. */
void storage_uses_count(const ml_schedule *s, uint32_t *reads, uint32_t *writes);

#endif
