/* How a program is compiled to fit in memory: the fastest of some attempts whose plan fits. */
#ifndef ML_FIT_MEMORY_H
#define ML_FIT_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/* Which values are copied to host memory, until the peak fits: none; as many as computation hides;
 * also those that it waits for. */
typedef enum { OFFLOAD_NONE, OFFLOAD_HIDDEN, OFFLOAD_ALL } offload_choice;

/* Where what is cheap is computed again (selective recomputation). */
typedef enum {
    CHEAP_UNDEFERRED, /* but not where weight-gradient tasks are deferred, which need kernels of
                         their own for it */
    CHEAP_EVERYWHERE,
    CHEAP_NOWHERE,
} cheap_choice;

/* What attempts differ in. */
typedef struct {
    double kept; /* of the bytes that the backward pass may read instead of computing them
                    again, between the least and the most: a share (ml_recompute) */
    cheap_choice cheap;
    bool overlap;     /* collectives run beside computation */
    bool param_cache; /* parameters are stored in the products' dtype too */
    int64_t segment;  /* positions of a segment of a scan, whose states are computed again from
                         those before it; 0: states at all positions are stored */
    offload_choice offload;
} plan_choice;

typedef struct {
    int64_t peak;     /* bytes of the plan */
    int64_t reach;    /* what the peak, or `shared` if that is more, would be with as many copies as
                         computation hides; itself where there are to be none */
    int64_t states;   /* bytes that the plan of any choice takes, at least */
    int64_t moments;  /* bytes to reserve for the program that sets the parameters */
    int64_t shared;   /* the peak, but with the temporaries of that program in the arena, which both
                         share */
    int64_t arena;    /* of the peak: temporaries */
    int64_t others;   /* the largest arena of other programs, which have it in the same memory */
    double seconds;   /* that its steps would take alone, by the planner's machine */
    bool caches;      /* it has a cache of parameters */
    bool weight_grad; /* weight-gradient tasks are deferred */
    int64_t scan;     /* positions of the longest scan that segments may cut; 0: there is none */
    bool keeps_all; /* it was compiled with CHEAP_NOWHERE; false where that was chosen, but a lower
                       bound of its memory is above the limit: CHEAP_UNDEFERRED replaced it */
} plan_size;

typedef struct {
    /* Compile with a choice, instead of the attempt before: a large plan takes most of the
     * memory that compiling takes, so there is one at a time. */
    void (*attempt)(void *context, const plan_choice *choice, plan_size *size);
    void *context;
    int64_t limit;    /* bytes */
    bool offloads;    /* values may be copied to host memory */
    bool any;         /* no attempt follows one that fits */
    bool estimated;   /* an estimate will do */
    double host_rate; /* bytes a second of such copies, each way; 0: seconds of attempts do not say
                         what waiting for one adds */
    /* NULL, or as `attempt` in a small part of the time and without a plan: what one would need,
     * which may be wrong by some percent. */
    void (*estimate)(void *context, const plan_choice *choice, plan_size *size);
} plan_fit;

bool plan_choice_same(const plan_choice *a, const plan_choice *b);
/* The last attempt is `first` if it fits, else the fastest that was found to fit, else the
 * smallest. True: there is none, and the same is so of the last estimate, where there are estimates
 * and one will do, or any plan. */
bool plan_fit_memory(const plan_fit *fit, const plan_choice *first);

#endif
