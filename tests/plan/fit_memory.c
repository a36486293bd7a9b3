/* Which attempts are made to fit a plan in memory (plan/fit_memory.c): of plans of given sizes. */
#include "runtime/plan/fit_memory.h"

#include <string.h>

#include "tests/test.h"

/* Bytes of a plan: `base`, and what each way of saving memory saves. */
typedef struct {
    int64_t base, no_cache, no_overlap, all, weight_grad; /* weight_grad: 0, nothing is deferred */
    int64_t moments;
    int count;
    char attempts[128]; /* letters of what is on: C cache, O overlap, A all; W as in the first */
    plan_size last;
} sizes;

static void attempt(void *context, const plan_choice *choice, plan_size *size) {
    sizes *s = context;
    bool all = choice->recompute == RECOMPUTE_FULL;
    bool stored = choice->recompute == RECOMPUTE_SELECTIVE_BUT_WEIGHT_GRAD;
    int64_t peak = s->base;
    if (!choice->param_cache) peak -= s->no_cache;
    if (!choice->overlap) peak -= s->no_overlap;
    if (!stored) peak -= s->weight_grad;
    if (all) peak -= s->all;
    s->last = *size = (plan_size){.peak = peak,
                                  .moments = s->moments,
                                  .caches = choice->param_cache,
                                  .weight_grad = s->weight_grad > 0};
    if (s->count++ > 0) strcat(s->attempts, " ");
    strcat(s->attempts, all ? "A" : stored && s->weight_grad ? "W" : "-");
    if (choice->param_cache) strcat(s->attempts, "C");
    if (choice->overlap) strcat(s->attempts, "O");
}

static sizes fit(sizes s, int64_t limit) {
    plan_choice first = {RECOMPUTE_SELECTIVE_BUT_WEIGHT_GRAD, .overlap = true, .param_cache = true};
    plan_fit f = {attempt, &s, limit};
    plan_fit_memory(&f, &first);
    return s;
}

TEST(plan, fits_at_once) {
    sizes s = fit((sizes){.base = 100}, 100);
    CHECK_TEXT(s.attempts, "-CO");
}

/* One measure after the other, the cheapest first, until one is enough. */
TEST(plan, fits_by_measures) {
    const sizes s = {.base = 100, .no_cache = 10, .no_overlap = 5, .all = 20, .weight_grad = 3};
    CHECK_TEXT(fit(s, 97).attempts, "WCO -CO");
    CHECK_TEXT(fit(s, 90).attempts, "WCO -CO -O");
    CHECK_TEXT(fit(s, 82).attempts, "WCO -CO -O -");
    CHECK_TEXT(fit(s, 65).attempts, "WCO -CO -O - A");
    CHECK_EQ_INT(fit(s, 65).last.peak, 62);
}

/* Room for the moments of the program that sets the parameters: the cache is given up for it. */
TEST(plan, fits_with_moments) {
    const sizes s = {.base = 100, .no_cache = 10, .moments = 15};
    CHECK_TEXT(fit(s, 115).attempts, "-CO");
    CHECK_TEXT(fit(s, 110).attempts, "-CO -O");
}

/* What is far too large is hardly saved by one measure: all of them first. Where they do not fit
 * either, no other attempt is made; where they do, the cheapest that is enough. */
TEST(plan, fits_far) {
    const sizes s = {.base = 100, .no_cache = 10, .no_overlap = 5, .all = 50};
    CHECK_TEXT(fit(s, 20).attempts, "-CO A");
    CHECK_TEXT(fit(s, 40).attempts, "-CO A -O - A");
}

/* A measure that makes a plan larger is not taken: the smallest is compiled again. */
TEST(plan, fits_smallest) {
    const sizes s = {.base = 100, .no_cache = -10, .no_overlap = 5, .all = -30};
    CHECK_EQ_INT(fit(s, 80).last.peak, 100);
    CHECK_TEXT(fit(s, 80).attempts, "-CO -O - A -CO");
}
