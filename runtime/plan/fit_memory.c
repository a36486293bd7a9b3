/* The ladder of attempts. What is saved first costs least time: selective recomputation
 * also for deferred weight gradients, no cache of parameters, collectives
 * that do not overlap, everything recomputed that need not be stored. */
#include "runtime/plan/fit_memory.h"

typedef struct {
    const plan_fit *fit;
    plan_choice last; /* the choice of the present plan */
    plan_choice best; /* that of the smallest so far */
    plan_size size;   /* of the smallest */
} ladder;

/* Whether the cache of parameters leaves too little for the optimizer program, which sets the
 * parameters after all microbatches: its memory, mostly Adam's m and v of each parameter, is
 * reserved beside this program's peak. */
static bool needs_less(const ladder *l) {
    return l->size.caches && l->size.peak + l->size.moments > l->fit->limit;
}

static bool too_large(const ladder *l) {
    return l->size.peak > l->fit->limit;
}

static void attempt(ladder *l, const plan_choice *choice) {
    plan_size size;
    l->last = *choice;
    l->fit->attempt(l->fit->context, choice, &size);
    if (size.peak >= l->size.peak) return;
    l->best = *choice;
    l->size = size;
}

static void attempt_all(ladder *l, const plan_choice *first) {
    plan_choice choice = *first;
    choice.recompute = RECOMPUTE_SELECTIVE;
    if (l->size.weight_grad) attempt(l, &choice);
    choice.param_cache = false;
    if (needs_less(l)) attempt(l, &choice);
    if (too_large(l) && choice.overlap) {
        choice.overlap = false;
        attempt(l, &choice);
    }
    choice.recompute = RECOMPUTE_FULL;
    if (too_large(l)) attempt(l, &choice);
}

static bool same(const plan_choice *a, const plan_choice *b) {
    return a->recompute == b->recompute && a->overlap == b->overlap &&
           a->param_cache == b->param_cache;
}

/* A plan of more than twice the memory is hardly ever saved by a single measure: the last one is
 * tried first, and where it does not fit either, those between would not. */
void plan_fit_memory(const plan_fit *fit, const plan_choice *first) {
    ladder l = {.fit = fit, .last = *first, .best = *first, .size = {.peak = INT64_MAX}};
    attempt(&l, first);
    bool reserves = l.size.weight_grad || l.size.caches;
    if (l.size.peak + (reserves ? l.size.moments : 0) <= fit->limit) return;
    const ladder begin = l;
    bool far = l.size.peak / 2 > fit->limit;
    if (far) attempt(&l, &(plan_choice){.recompute = RECOMPUTE_FULL});
    if (!far || !too_large(&l)) {
        l.best = begin.best;
        l.size = begin.size;
        attempt_all(&l, first);
    }
    if (!same(&l.last, &l.best)) fit->attempt(fit->context, &l.best, &l.size);
}
