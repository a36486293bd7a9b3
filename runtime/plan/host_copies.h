/* Copies to pinned host memory and back beside computation (ml_host_copy): what they take by the
 * planner's machine, and the steps that begin and await them. optimize/offload.c copies temporaries
 * of one plan, pipeline/offload_saved.c what a stage saves between its tasks. */
#ifndef ML_HOST_COPIES_H
#define ML_HOST_COPIES_H

#include "runtime/plan/plan.h"

/* Bytes a second, each way, that a rank's share of the host's memory allows; `stages`: of pipeline
 * stages, some of which copy out while others copy back. */
double host_copy_share(const ml_target *target, const ml_layout *layout, bool stages);
/* The same, and no more than the link. */
double host_copy_rate(const ml_target *target, const ml_layout *layout, bool stages);
/* Of a copy of so many bytes. */
double host_copy_seconds(double rate, int64_t bytes);
/* When each step begins, [steps.count]: the end; in the arena. Steps may be faster than planned, so
 * that copies are later: they are planned beside such. */
double *host_copy_clock(const ml_schedule *s, const ml_layout *layout, ml_arena *arena);
/* The first step of [from, to] that begins no earlier than `when`; `to` where none does. */
uint32_t host_copy_step_after(const double *clock, uint32_t from, uint32_t to, double when);
/* Copies are hidden where computation waits for no more than this share of its time. */
#define HOST_COPY_HIDDEN 1e-3

/* The last ticket of the schedule's copies; 0: there are none. */
uint32_t host_copy_tickets(const ml_schedule *s);
const ml_host_copy *host_copy_new(ml_schedule *s, uint32_t ticket, bool back, int64_t bytes);
/* A storage of the size of another one. */
uint32_t host_copy_storage(ml_schedule *s, ml_storage_kind kind, uint32_t like);
/* The step that begins the copy between two storages, or (`waits`) that waits for its end. */
ml_step host_copy_step(ml_schedule *s, const ml_host_copy *copy, bool waits, uint32_t device,
                       uint32_t host);

#endif
