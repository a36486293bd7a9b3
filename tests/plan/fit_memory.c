/* Which attempts are made to fit a plan in memory (plan/fit_memory.c): of plans of given sizes. */
#include "runtime/plan/fit_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

/* Bytes of a plan: `base`, what each way of saving memory saves, and seconds that it adds. */
typedef struct {
    int64_t base, no_cache, no_overlap, all, weight_grad; /* weight_grad: 0, nothing is deferred */
    int64_t cheap; /* more where what is cheap is computed again nowhere, as it is tried first */
    bool hopeless; /* that does not fit by a look at the graph */
    int64_t moments, states;
    int64_t update, cache; /* of the program that sets the parameters: bytes; more with a cache */
    double no_cache_seconds, overlap_seconds; /* that overlap off adds, beside 20 */
    bool overlaps;                            /* the last attempt */
    int64_t scan, scans, scan_state;          /* positions, how many scans, bytes of a state */
    bool offloads, any;
    const int64_t *curve; /* of 65 shares: the peak where values are copied to the host */
    double estimated;     /* the arena, by what it is; 0: there are no estimates */
    int count, estimates;
    char attempts[512]; /* percent that is kept; A also what is cheap; C cache, O overlap; W
                            as in the first */
    plan_size last;
} sizes;

static void attempt(void *context, const plan_choice *choice, plan_size *size) {
    sizes *s = context;
    int64_t peak = s->base - (int64_t)((1 - choice->kept) * (double)s->all);
    double seconds = 100 + 30 * (1 - choice->kept);
    if (choice->offload != OFFLOAD_NONE && s->curve) {
        peak = s->curve[(int)(64 * choice->kept)];
        seconds += choice->offload == OFFLOAD_ALL ? 60 : 2;
    }
    if (!choice->param_cache) peak -= s->no_cache, seconds += s->no_cache_seconds;
    if (!choice->overlap) peak -= s->no_overlap, seconds += 20 + s->overlap_seconds;
    s->overlaps = choice->overlap;
    if (choice->cheap == CHEAP_EVERYWHERE) peak -= s->weight_grad;
    bool keeps_all = choice->cheap == CHEAP_NOWHERE && !s->hopeless;
    if (keeps_all) peak += s->cheap, seconds -= 1;
    if (choice->segment) { /* states before segments of all scans, and within one of one scan */
        peak -= s->scans * s->scan * s->scan_state;
        peak += (s->scans * s->scan / choice->segment + choice->segment) * s->scan_state;
        seconds += 1 + (double)s->scan / (double)choice->segment / 100;
    }
    s->last = *size = (plan_size){.peak = peak,
                                  .scan = s->scan,
                                  .reach = peak,
                                  .arena = peak,
                                  .keeps_all = keeps_all,
                                  .moments = s->moments,
                                  .shared = s->update + (choice->param_cache ? s->cache : 0),
                                  .states = s->states,
                                  .seconds = seconds,
                                  .caches = choice->param_cache && s->no_cache != 0,
                                  .weight_grad = s->weight_grad > 0};
    size_t at = strlen(s->attempts);
    snprintf(s->attempts + at, sizeof s->attempts - at, "%s%.0f%s%s%s%s", s->count++ ? " " : "",
             100 * choice->kept, keeps_all ? "A" : "", choice->param_cache ? "C" : "",
             choice->overlap ? "O" : "",
             choice->cheap != CHEAP_EVERYWHERE && s->weight_grad ? "W" : "");
    at = strlen(s->attempts);
    if (choice->segment)
        snprintf(s->attempts + at, sizeof s->attempts - at, "S%lld", (long long)choice->segment);
}

static void estimate(void *context, const plan_choice *choice, plan_size *size) {
    sizes *s = context, own = *s;
    attempt(&own, choice, size);
    const int64_t wrong = (int64_t)((s->estimated - 1) * (double)size->arena);
    size->arena += wrong;
    size->peak += wrong;
    size->reach += wrong;
    s->estimates++;
}

static sizes fit(sizes s, int64_t limit) {
    plan_choice first = {.kept = 1, .overlap = true, .param_cache = true};
    if (s.cheap) first.cheap = CHEAP_NOWHERE;
    plan_fit f = {attempt, &s, limit, s.offloads, .any = s.any};
    if (s.estimated > 0) f.estimate = estimate;
    plan_fit_memory(&f, &first);
    return s;
}

TEST(plan, fits_at_once) {
    sizes s = fit((sizes){.base = 1000}, 1000);
    CHECK_TEXT(s.attempts, "100CO");
}

/* What is cheap is kept where there is memory for it, and computed again before anything else. */
TEST(plan, fits_with_all_kept) {
    sizes s = {.base = 1000, .cheap = 200, .all = 400};
    CHECK_TEXT(fit(s, 1200).attempts, "100ACO");
    CHECK_TEXT(fit(s, 1100).attempts, "100ACO 100CO");
    s.hopeless = true;
    CHECK_TEXT(fit(s, 1100).attempts, "100CO");
    CHECK(fit(s, 900).last.peak <= 900 && strncmp(fit(s, 900).attempts, "100CO 0CO", 9) == 0);
}

/* The peak is linear in what is kept: a few attempts reach the limit within 2 % of what may be
 * saved. */
TEST(plan, fits_by_share) {
    const sizes s = {.base = 1000000, .all = 400000};
    for (int64_t limit = 610000; limit < 1000000; limit += 30000) {
        sizes done = fit(s, limit);
        CHECK(done.last.peak <= limit && done.last.peak >= limit - 8000);
        CHECK(done.count <= 6);
    }
}

/* More memory never leads to a slower plan, though where values are copied to the host the peak may
 * be larger where less is kept. */
TEST(plan, fits_monotone) {
    uint64_t seed = 1;
    for (int round = 0; round < 60; round++) {
        int64_t curve[65], low = 400000;
        for (int i = 0; i <= 64; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            curve[i] = 500000 + (int64_t)i * i * 100 + (int64_t)(seed >> 33) % 40000;
            low = curve[i] < low ? curve[i] : low;
        }
        const sizes s = {.base = 1000000,
                         .all = 400000,
                         .no_cache = round % 3 * 30000,
                         .no_cache_seconds = round % 2 ? 1 : 10,
                         .no_overlap = round % 5 ? 0 : 20000,
                         .cheap = round % 4 * 10000,
                         .offloads = true,
                         .curve = curve};
        double before = 1000;
        for (int64_t limit = low; limit < 1050000; limit += 1500) {
            const plan_size last = fit(s, limit).last;
            if (last.peak > limit) continue;
            EXPECT(last.seconds <= 1.02 * before, "%lld bytes: %.1f s, with less memory %.1f",
                   (long long)limit, last.seconds, before);
            before = last.seconds < before ? last.seconds : before;
        }
        CHECK(before < 101);
    }
}

/* The cache is given up where recomputation would take longer, or is not enough. */
TEST(plan, fits_without_cache) {
    const sizes s = {.base = 1000, .all = 400, .no_cache = 200, .no_cache_seconds = 5};
    CHECK(strstr(fit(s, 850).attempts, " 100O") != NULL);
    CHECK_EQ_INT(fit(s, 850).last.peak, 800);
    CHECK_EQ_INT((int)fit(s, 850).last.seconds, 105);
    sizes slow = s;
    slow.no_cache_seconds = 29;
    CHECK(fit(slow, 850).last.caches);
    CHECK(fit(s, 500).last.peak <= 500 && !fit(s, 500).last.caches);
}

/* Where what is lost without the cache is more than the memory that it takes could save, less is
 * not kept without it. */
TEST(plan, fits_without_search_for_less_cache) {
    sizes s = {.base = 1000000, .all = 400000, .no_cache = 5000, .no_cache_seconds = 5};
    CHECK(strstr(fit(s, 850000).attempts, " 100O") != NULL);
    CHECK(strstr(fit(s, 850000).attempts, " 0O") == NULL);
    CHECK(fit(s, 850000).last.caches && fit(s, 850000).last.peak >= 842000);
    s.no_cache_seconds = 0.1;
    CHECK(strstr(fit(s, 850000).attempts, " 100O 0O ") != NULL && !fit(s, 850000).last.caches);
}

/* Any plan that fits will do: the first is the last. */
TEST(plan, fits_any) {
    sizes s = {.base = 1000, .all = 400, .no_cache = 100, .any = true};
    CHECK_TEXT(fit(s, 1000).attempts, "100CO");
    CHECK_TEXT(fit(s, 850).attempts, "100CO 0CO");
    CHECK_TEXT(fit(s, 550).attempts, "100CO 0CO 0O");
    s.offloads = true;
    CHECK_TEXT(fit(s, 850).attempts, "100CO 100CO 0CO");
    s.scan = 4096, s.scans = 4;
    CHECK_TEXT(fit(s, 850).attempts, "100CO 100CO 0CO");
}

/* Room for the moments of the program that sets the parameters: the cache is given up for it, where
 * computing again does not save enough. */
TEST(plan, fits_with_moments) {
    const sizes s = {.base = 1000, .no_cache = 100, .moments = 150};
    CHECK_TEXT(fit(s, 1150).attempts, "100CO");
    CHECK_TEXT(fit(s, 1100).attempts, "100CO 0CO 0O 100O");
}

/* Temporaries of that program need room beside the cache too: where there is none, it is given up,
 * though the program of the microbatches would fit with less kept. */
TEST(plan, fits_with_update) {
    const sizes s = {.base = 1000,
                     .all = 500,
                     .no_cache = 100,
                     .update = 700,
                     .cache = 100,
                     .no_cache_seconds = 29};
    for (int64_t limit = 700; limit <= 1000; limit += 20) {
        sizes done = fit(s, limit);
        CHECK(done.last.peak <= limit && done.last.shared <= limit);
    }
    CHECK(!fit(s, 780).last.caches && fit(s, 820).last.caches);
}

/* What is cheap is computed again in deferred tasks too, before anything else. */
TEST(plan, fits_with_weight_gradients) {
    const sizes s = {.base = 1000, .weight_grad = 30, .all = 100};
    CHECK_TEXT(fit(s, 975).attempts, "100COW 100CO");
}

/* What is far too large may not fit at all: the least is tried first, and it is the answer. */
TEST(plan, fits_far) {
    const sizes s = {.base = 1000, .no_cache = 100, .no_overlap = 50, .all = 500};
    CHECK_TEXT(fit(s, 200).attempts, "100CO 0");
    CHECK_EQ_INT(fit(s, 200).last.peak, 350);
    CHECK(fit(s, 400).last.peak <= 400);
    CHECK(fit(s, 480).last.peak <= 480);
}

/* States alone are too large: there is nothing to search. */
TEST(plan, fits_no_states) {
    const sizes s = {.base = 1000, .no_cache = 50, .no_overlap = 50, .all = 50, .states = 845};
    CHECK_TEXT(fit(s, 840).attempts, "100CO 0");
    CHECK_EQ_INT(fit(s, 840).last.peak, 850);
}

/* What nothing makes fit takes one attempt of each kind. */
TEST(plan, fits_nothing) {
    const sizes s = {.base = 1000, .no_cache = 100, .no_overlap = 50, .all = 100};
    CHECK_TEXT(fit(s, 700).attempts, "100CO 0CO 0O 0");
}

/* A measure that makes a plan larger is not taken: the smallest is compiled again. */
TEST(plan, fits_smallest) {
    const sizes s = {.base = 100, .no_cache = -10, .no_overlap = -5, .all = -30};
    CHECK_EQ_INT(fit(s, 80).last.peak, 100);
}

/* Scans get the longest segments that fit: one forward pass of them more, but fewer segments; where
 * many scans wait for their gradients the least memory is at longer ones than the root. */
TEST(plan, fits_by_segments) {
    const sizes s = {.base = 5000000, .scan = 4096, .scans = 4, .scan_state = 256, .all = 1};
    const struct {
        int64_t limit, segment;
    } cases[] = {{5000000, 0}, {1600000, 2048}, {1200000, 1024}, {900000, 256}, {875000, 128}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sizes done = fit(s, cases[i].limit);
        const char *at = strrchr(done.attempts, 'S');
        CHECK_EQ_INT(at ? atoll(at + 1) : 0, cases[i].segment);
        CHECK(done.last.peak <= cases[i].limit && done.count <= 10);
    }
}

/* Estimates find the choice, and it is compiled: once where they are right, and a few times where
 * they are some percent off. */
TEST(plan, fits_by_estimates) {
    static const double estimated[] = {0.92, 0.95, 0.98, 1, 1.03};
    for (size_t i = 0; i < sizeof estimated / sizeof *estimated; i++) {
        const sizes s = {.base = 1000000, .all = 600000, .estimated = estimated[i]};
        for (int64_t limit = 450000; limit < 1000000; limit += 7000) {
            const sizes done = fit(s, limit);
            const double unused = (double)(limit - done.last.peak) / (double)limit;
            EXPECT(unused >= 0 && unused < 0.05, "%lld bytes, %.2f estimated: %.3f unused by %s",
                   (long long)limit, estimated[i], unused, done.attempts);
            EXPECT(done.count <= (estimated[i] < 1 ? 3 : 1) && done.estimates >= done.count,
                   "%lld bytes, %.2f estimated: %s after %d estimates", (long long)limit,
                   estimated[i], done.attempts, done.estimates);
        }
    }
}

/* Any plan that fits will do: the estimate is enough. Where none is estimated to fit all is tried,
 * and where none with overlap is, the smallest of these first. */
TEST(plan, fits_by_estimates_alone) {
    sizes s = {.base = 1000, .all = 400, .no_cache = 10, .no_overlap = 1, .estimated = 1};
    CHECK_TEXT(fit(s, 500).attempts, "100CO 0CO 0O 0");
    s.no_overlap = 20;
    CHECK_TEXT(fit(s, 585).attempts, "0O 3");
    s.no_overlap = 1;
    s.any = true;
    CHECK(fit(s, 850).count == 0 && fit(s, 850).estimates == 2);
}

/* What collectives that wait for computation cost is not in the seconds of a plan: it is taken
 * where no other one fits. */
TEST(plan, fits_with_overlap) {
    sizes s = {.base = 1000000, .all = 900000, .no_overlap = 10000, .overlap_seconds = -25};
    for (int64_t limit = 110000; limit < 1000000; limit += 20000) CHECK(fit(s, limit).overlaps);
    CHECK(!fit(s, 95000).overlaps && fit(s, 95000).last.peak <= 95000);
}
