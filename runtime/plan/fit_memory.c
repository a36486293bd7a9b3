/* The search for a plan that fits. Values that computation can copy to host memory and back beside
 * it cost next to nothing, so as many as the limit asks for are copied before any is computed again
 * that takes long. Collectives beside computation and the cache of parameters take memory too; with
 * and without them, the share of values that is kept is searched: the peak grows with it nearly
 * linearly, so a few attempts reach the limit. */
#include "runtime/plan/fit_memory.h"

typedef struct {
    const plan_fit *fit;
    plan_choice last; /* the choice of the present plan */
    plan_choice best; /* the fastest that fits, or else the smallest */
    plan_size best_size;
    plan_size size; /* of the present plan */
    bool found;     /* the best fits */
} search;

/* With microbatches, another program sets the parameters after all of them: its states, mostly
 * Adam's m and v of each parameter, are reserved beside this program's peak. */
static int64_t limit_of(const search *s) {
    return s->fit->limit - s->size.moments;
}

/* Of both programs. */
static int64_t peak_of(const plan_size *size) {
    return size->peak > size->shared ? size->peak : size->shared;
}

static bool fits(const search *s, const plan_size *size) {
    return peak_of(size) <= limit_of(s);
}

static bool attempt(search *s, const plan_choice *choice) {
    s->last = *choice;
    s->fit->attempt(s->fit->context, choice, &s->size);
    bool fit = fits(s, &s->size);
    bool better = s->found ? fit && s->size.seconds < s->best_size.seconds
                           : fit || peak_of(&s->size) < peak_of(&s->best_size);
    if (better) {
        s->best = *choice;
        s->best_size = s->size;
        s->found = fit;
    }
    return fit;
}

/* Between shares of which one fits and the other one does not: by the line through their peaks, and
 * in the middle where that has come from one side twice. */
static void search_share(search *s, plan_choice choice, double low, int64_t low_peak, double high,
                         int64_t high_peak) {
    const int most = choice.offload == OFFLOAD_NONE ? 5 : 8; /* with copies less of a line */
    const double close = 0.02, margin = 0.05;
    const double all = (double)(high_peak - low_peak);
    for (int i = 0, side = 0; i < most && high_peak > low_peak; i++) {
        double width = high - low, left = (double)(limit_of(s) - low_peak);
        if (width < close || left < close * all) return;
        double share = left / (double)(high_peak - low_peak);
        if (share < margin) share = margin;
        if (share > 1 - margin) share = 1 - margin;
        if (side >= 2 || side <= -2) share = 0.5;
        choice.kept = low + share * width;
        if (attempt(s, &choice)) {
            low = choice.kept, low_peak = s->size.reach;
            side = side > 0 ? side + 1 : 1;
        } else {
            high = choice.kept, high_peak = s->size.reach;
            side = side < 0 ? side - 1 : -1;
        }
    }
}

/* With a cache or not, and with overlap or not: from all kept, whose peak is `most` if known, to
 * the least. Whether any share fits. */
static bool search_kept(search *s, plan_choice choice, int64_t most) {
    choice.kept = 1;
    if (most == 0) {
        if (attempt(s, &choice)) return true;
        most = s->size.reach;
    }
    choice.kept = 0;
    if (!attempt(s, &choice)) return false;
    search_share(s, choice, 0, s->size.reach, 1, most);
    return true;
}

/* The same where the least with more memory taken did not fit: the least first. */
static bool search_least(search *s, plan_choice choice) {
    choice.kept = 0;
    if (!attempt(s, &choice)) return false;
    int64_t least = s->size.reach;
    choice.kept = 1;
    if (!attempt(s, &choice)) search_share(s, choice, 0, least, 1, s->size.reach);
    return true;
}

static bool same(const plan_choice *a, const plan_choice *b) {
    return a->kept == b->kept && a->cheap == b->cheap && a->overlap == b->overlap &&
           a->param_cache == b->param_cache && a->segment == b->segment && a->offload == b->offload;
}

static const double WORTH = 1.01; /* a plan that is slower by more is not taken at once */

/* Without the cache parameters are cast at each use, which may take less time than computing values
 * again. */
static void search_all(search *s, plan_choice choice, bool caches, double fast, int64_t most) {
    bool found = search_kept(s, choice, most);
    if (caches && (!found || s->best_size.seconds > WORTH * fast)) {
        choice.param_cache = false;
        found = (found ? search_kept(s, choice, 0) : search_least(s, choice)) || found;
    }
    if (!found && choice.overlap) {
        choice.overlap = false;
        found = search_least(s, choice);
    }
    if (!s->fit->offloads || (found && s->best_size.seconds <= WORTH * fast)) return;
    /* To wait for a copy may take less time than to compute again. */
    if (found) choice = s->best;
    choice.offload = OFFLOAD_ALL;
    choice.kept = 1;
    if (found)
        attempt(s, &choice);
    else
        search_least(s, choice);
}

/* The longest segments that fit with all else kept. A scan stores the states before each segment
 * and, in its gradient, those within one: the least for a length between the root of the positions
 * and, where many scans wait for their gradients, all; fewer segments take less time. */
static bool search_segments(search *s, plan_choice choice, int64_t scan) {
    int64_t least = 1, peak = INT64_MAX;
    while (least * least < scan) least *= 2;
    choice.kept = 1;
    for (choice.segment = least; choice.segment < scan; choice.segment *= 2) {
        if (attempt(s, &choice)) break;
        if (s->size.peak >= peak) break;
        peak = s->size.peak;
        least = choice.segment;
    }
    if (!fits(s, &s->size)) { /* the length of the least memory, with less kept */
        choice.segment = least;
        return search_least(s, choice);
    }
    int64_t low = choice.segment, high = scan;
    while (2 * low < high) {
        int64_t middle = low;
        while (middle * middle < low * high) middle *= 2;
        choice.segment = middle < high ? middle : high / 2;
        if (choice.segment == low) break;
        if (attempt(s, &choice))
            low = choice.segment;
        else
            high = choice.segment;
    }
    return true;
}

/* What needs more than twice the memory may not fit at all: the least is tried first. Where states
 * alone are too large it is the answer. */
void plan_fit_memory(const plan_fit *fit, const plan_choice *first) {
    search s = {.fit = fit, .best_size = {.peak = INT64_MAX}};
    plan_choice choice = *first;
    attempt(&s, &choice);
    if (!s.found && choice.cheap == CHEAP_NOWHERE) {
        choice.cheap = CHEAP_UNDEFERRED;
        if (s.size.keeps_all) attempt(&s, &choice);
    }
    if (s.found) return;
    double fast = s.size.seconds;
    int64_t most = s.size.peak;
    bool caches = s.size.caches;
    bool far = most / 2 > limit_of(&s) || s.size.states > limit_of(&s);
    const int64_t scan = s.size.scan;
    const plan_choice least = {.cheap = CHEAP_EVERYWHERE,
                               .offload = fit->offloads ? OFFLOAD_ALL : OFFLOAD_NONE};
    const bool least_fits = !far || attempt(&s, &least);
    choice.cheap = CHEAP_EVERYWHERE;
    if (least_fits && fit->offloads) {
        choice.offload = OFFLOAD_HIDDEN;
        bool enough = attempt(&s, &choice);
        if (enough && s.size.seconds <= WORTH * fast) goto end;
        if (enough)
            choice.offload = OFFLOAD_NONE;
        else
            most = s.size.reach;
    }
    if (least_fits && s.size.weight_grad && !far) {
        if (attempt(&s, &choice)) goto end;
        most = s.size.peak;
    }
    if (least_fits) search_all(&s, choice, caches, fast, most);
    choice.offload = OFFLOAD_NONE; /* peaks of segments are compared */
    if (scan > 0 && s.size.states <= limit_of(&s)) search_segments(&s, choice, scan);
end:
    if (!same(&s.last, &s.best)) fit->attempt(fit->context, &s.best, &s.size);
}
