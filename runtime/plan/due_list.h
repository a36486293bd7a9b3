/* Steps in the order in which they were listed, each with the time from which it can start. There
 * may be thousands of which few can: blocks of neighbours have their earliest time, so that who
 * asks for those passes the others by. */
#ifndef ML_DUE_LIST_H
#define ML_DUE_LIST_H

#include "runtime/base/memory.h"

enum { DUE_NONE = UINT32_MAX };

typedef struct {
    double when;
    uint32_t step; /* DUE_NONE: a place that is free */
} due_step;
typedef struct {
    ml_arena *arena;
    ML_VEC(due_step) places;
    ML_VEC(double) earliest; /* of the steps of a block */
    uint32_t count;          /* of steps */
} due_list;

void due_add(due_list *list, due_step step); /* at the end */
/* DBL_MAX where the list is empty. */
double due_earliest(const due_list *list);
/* The first place from `from` on whose step can start `now`; DUE_NONE. */
uint32_t due_find(const due_list *list, uint32_t from, double now);
/* Put other steps at the place of one that is removed; returns the place behind them. */
uint32_t due_replace(due_list *list, uint32_t place, const due_step *by, uint32_t count);
/* Give places that are free back, where most are. */
void due_trim(due_list *list);

#endif
