/* The search for a plan that fits. Values that computation can copy to host memory and back beside
 * it cost next to nothing, so as many as the limit asks for are copied before any is computed again
 * that takes long. Collectives beside computation and the cache of parameters take memory too; with
 * and without them, the share of values that is kept is searched: the peak grows with it nearly
 * linearly, so a few attempts reach the limit. */
#include "runtime/plan/fit_memory.h"

#include <stddef.h>

enum { MOST_ESTIMATES = 64 }; /* that are remembered: a search makes about ten */

/* An attempt at a share of what is kept. */
typedef struct {
    double kept, seconds;
    int64_t reach;
} share_end;

typedef struct {
    const plan_fit *fit;
    void (*attempt)(void *context, const plan_choice *choice, plan_size *size); /* or estimate */
    plan_choice last; /* the choice of the present plan */
    plan_choice best; /* the fastest that fits, or else the smallest */
    plan_size best_size;
    plan_size size;         /* of the present plan */
    bool found;             /* the best fits */
    share_end copied[2];    /* by whether there is a cache: all is kept, with as many copies as
                               computation hides, and does not fit; reach 0: not tried */
    share_end all, line[2]; /* with a cache: all is kept, and does not fit; the ends between which
                               shares were searched; reach 0: none */
    struct {
        plan_choice choice;
        plan_size size;
    } estimates[MOST_ESTIMATES]; /* of a search by estimates */
    int estimate_count;
    double ratio; /* by which arenas are taken to be larger than estimated */
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

static double larger(double a, double b) {
    return a > b ? a : b;
}

static share_end end_of(const search *s) {
    return (share_end){s->last.kept, s->size.seconds, s->size.reach};
}

/* Whether a plan that fits was found, and any does. */
static bool enough(const search *s) {
    return s->found && s->fit->any;
}

/* Than the best that fits. Seconds of steps alone do not say what runs beside what: a plan whose
 * collectives wait for computation is for where no other one fits. */
static bool faster(const search *s, const plan_choice *choice) {
    if (choice->overlap != s->best.overlap) return choice->overlap;
    return s->size.seconds < s->best_size.seconds;
}

static void take_better(search *s, const plan_choice *choice, bool fit) {
    bool better = fit || peak_of(&s->size) < peak_of(&s->best_size);
    if (s->found) better = fit && faster(s, choice);
    if (!better) return;
    s->best = *choice;
    s->best_size = s->size;
    s->found = fit;
}

/* Were the arena `ratio` times as large. */
static void enlarge(plan_size *size, double ratio) {
    const int64_t room = size->arena > size->others ? size->arena : size->others;
    const int64_t arena = (int64_t)(ratio * (double)size->arena);
    size->arena = arena;
    if (arena <= room) return;
    size->peak += arena - room;
    size->reach += arena - room;
    size->shared += arena - room;
}

static bool attempt(search *s, const plan_choice *choice) {
    if (enough(s)) return true;
    s->last = *choice;
    s->attempt(s->fit->context, choice, &s->size);
    if (s->attempt == s->fit->estimate && s->estimate_count < MOST_ESTIMATES) {
        s->estimates[s->estimate_count].choice = *choice;
        s->estimates[s->estimate_count++].size = s->size;
    }
    if (s->ratio > 1) enlarge(&s->size, s->ratio);
    bool fit = fits(s, &s->size);
    if (!fit && choice->offload == OFFLOAD_HIDDEN && choice->kept == 1)
        s->copied[choice->param_cache] = end_of(s);
    take_better(s, choice, fit);
    return fit;
}

/* Of the limit: how far below it attempts aim, as the peak may be above the line by that. */
static const double BELOW = 0.004;

/* The part of the best plan's time that the share which reaches the limit would save, by the line
 * through the ends. */
static double gain_left(const search *s, const share_end *low, const share_end *high) {
    double part = (double)(limit_of(s) - low->reach) / (double)(high->reach - low->reach);
    return part * (low->seconds - high->seconds) / s->best_size.seconds;
}

static const double CLOSE = 0.005; /* of the best plan's time: what is not searched for */

/* Between shares of which one fits and the other one does not: by the line through their peaks, a
 * little below the limit, and in the middle where that has come from one side twice, or where peaks
 * have steps; so no further where an end has moved over two. */
static void search_line(search *s, plan_choice choice, share_end low, share_end high) {
    enum { MOST = 5 };
    const double close = 0.02, margin = 0.05;
    const double all = (double)(high.reach - low.reach);
    for (int i = 0, side = 0, flat = 0; i < MOST && high.reach > low.reach; i++) {
        double width = high.kept - low.kept, left = (double)(limit_of(s) - low.reach);
        if (width < close || left < close * all || gain_left(s, &low, &high) < CLOSE) return;
        double less = BELOW * (double)limit_of(s);
        double share =
            (left - (less < left / 2 ? less : left / 2)) / (double)(high.reach - low.reach);
        if (share < margin) share = margin;
        if (share > 1 - margin) share = 1 - margin;
        if (side >= 2 || side <= -2 || flat > 0) share = 0.5;
        choice.kept = low.kept + share * width;
        const bool fit = attempt(s, &choice);
        share_end *moved = fit ? &low : &high;
        if (s->size.reach == moved->reach && ++flat == 2) return;
        *moved = end_of(s);
        side = fit ? (side > 0 ? side + 1 : 1) : (side < 0 ? side - 1 : -1);
    }
}

/* With copies to the host the peak is far from a line, and may be larger where less is kept: by
 * halves, until neither end can be much faster than the other. So a larger limit does not lead to a
 * smaller share. */
static void search_halves(search *s, plan_choice choice, share_end low, share_end high) {
    while (low.seconds - high.seconds > CLOSE * s->best_size.seconds) {
        choice.kept = (low.kept + high.kept) / 2;
        if (attempt(s, &choice))
            low = end_of(s);
        else
            high = end_of(s);
        if (high.kept - low.kept < CLOSE) return;
    }
}

static void search_share(search *s, plan_choice choice, share_end low, share_end high) {
    if (enough(s)) return;
    if (choice.param_cache) s->line[0] = low, s->line[1] = high;
    if (choice.offload == OFFLOAD_NONE)
        search_line(s, choice, low, high);
    else
        search_halves(s, choice, low, high);
}

/* A share that fits where half of what is no state follows what is kept, as it mostly does; 0 where
 * much less than all is to be kept, and a guess would be far off. */
static double share_guess(const search *s, const share_end *most) {
    const double over = (double)(most->reach - limit_of(s)) + BELOW * (double)limit_of(s);
    const double share = 1 - over / (0.5 * (double)(most->reach - s->size.states));
    return s->last.offload == OFFLOAD_HIDDEN && share > 0.75 && share < 1 ? share : 0;
}

/* Whether, without the cache, more time is lost than the memory that this saves could save by the
 * line of shares with the cache. `all`: all is kept, without. */
static bool slower_without(const search *s, const share_end *all) {
    const share_end *low = &s->line[0], *high = &s->line[1];
    if (s->all.reach == 0 || high->reach <= low->reach) return false;
    const double saved = (double)(s->all.reach - all->reach);
    const double rate = (low->seconds - high->seconds) / (double)(high->reach - low->reach);
    return all->seconds - s->all.seconds > saved * rate;
}

/* With a cache or not, and with overlap or not: from all kept, of which `most` says how that is, if
 * it is known, to the least. Whether any share fits. */
static bool search_kept(search *s, plan_choice choice, const share_end *most) {
    choice.kept = 1;
    if (most == NULL && attempt(s, &choice)) return true;
    share_end high = most != NULL ? *most : end_of(s);
    if (choice.param_cache) s->all = high;
    if (!choice.param_cache && slower_without(s, &high)) return false;
    choice.kept = share_guess(s, &high);
    bool fit = attempt(s, &choice);
    if (!fit && choice.kept > 0) {
        high = end_of(s);
        choice.kept = 0;
        fit = attempt(s, &choice);
    }
    if (fit) search_share(s, choice, end_of(s), high);
    return fit;
}

/* The same where the least with more memory taken did not fit: the least first. */
static bool search_least(search *s, plan_choice choice) {
    choice.kept = 0;
    if (!attempt(s, &choice)) return false;
    const share_end least = end_of(s);
    choice.kept = 1;
    if (!attempt(s, &choice)) search_share(s, choice, least, end_of(s));
    return true;
}

bool plan_choice_same(const plan_choice *a, const plan_choice *b) {
    return a->kept == b->kept && a->cheap == b->cheap && a->overlap == b->overlap &&
           a->param_cache == b->param_cache && a->segment == b->segment && a->offload == b->offload;
}

static const double WORTH = 1.01; /* a plan that is slower by more is not taken at once */

/* Whether copies of all that is too much, which computation waits for, take longer than the best
 * plan that was found: they take what is beyond those that computation hides at least half of the
 * time that the host needs for it. */
static bool waits_too_long(const search *s) {
    const share_end *hidden = &s->copied[s->best.param_cache];
    const double excess = (double)(hidden->reach - limit_of(s));
    return s->fit->host_rate > 0 && hidden->reach > 0 &&
           hidden->seconds + excess / (2 * s->fit->host_rate) > s->best_size.seconds;
}

/* Without the cache parameters are cast at each use, which may take less time than computing values
 * again. `most`: all is kept, with copies that computation hides if there are to be any. */
static void search_all(search *s, plan_choice choice, bool caches, double fast,
                       const share_end *most) {
    bool found = search_kept(s, choice, most);
    if (caches && (!found || s->best_size.seconds > WORTH * fast)) {
        choice.param_cache = false;
        found = (found ? search_kept(s, choice, NULL) : search_least(s, choice)) || found;
    }
    if (!found && choice.overlap) {
        choice.overlap = false;
        found = search_least(s, choice);
    }
    if (!s->fit->offloads || (found && s->best_size.seconds <= WORTH * fast)) return;
    /* To wait for a copy may take less time than to compute again. */
    const bool no_wait = s->best.offload == OFFLOAD_HIDDEN && s->best.kept == 1;
    if (found && (no_wait || waits_too_long(s))) return;
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
static void find(search *s, const plan_choice *first) {
    const plan_fit *fit = s->fit;
    plan_choice choice = *first;
    attempt(s, &choice);
    if (!s->found && choice.cheap == CHEAP_NOWHERE) {
        choice.cheap = CHEAP_UNDEFERRED;
        if (s->size.keeps_all) attempt(s, &choice);
    }
    if (s->found) return;
    double fast = s->size.seconds;
    share_end most = {1, s->size.seconds, s->size.peak};
    bool caches = s->size.caches;
    bool far = most.reach / 2 > limit_of(s) || s->size.states > limit_of(s);
    const int64_t scan = s->size.scan;
    const plan_choice least = {.cheap = CHEAP_EVERYWHERE,
                               .offload = fit->offloads ? OFFLOAD_ALL : OFFLOAD_NONE};
    const bool least_fits = !far || attempt(s, &least);
    choice.cheap = CHEAP_EVERYWHERE;
    if (least_fits && fit->offloads) {
        choice.offload = OFFLOAD_HIDDEN;
        bool copied = attempt(s, &choice);
        if (copied && s->size.seconds <= WORTH * fast) return;
        if (copied)
            choice.offload = OFFLOAD_NONE;
        else
            most = end_of(s);
    }
    if (least_fits && s->size.weight_grad && !far) {
        if (attempt(s, &choice)) return;
        most = (share_end){1, s->size.seconds, s->size.peak};
    }
    if (least_fits) search_all(s, choice, caches, fast, &most);
    choice.offload = OFFLOAD_NONE; /* peaks of segments are compared */
    if (scan > 0 && s->size.states <= limit_of(s)) search_segments(s, choice, scan);
}

static const double WORSE = 1.02; /* by how much estimates are taken to be worse at each try */

static bool same_but_kept(plan_choice a, const plan_choice *b) {
    a.kept = b->kept;
    return plan_choice_same(&a, b);
}

/* Keep less than with the best choice, whose plan is as large as `size`: by the line between that
 * and the next smaller share that would fit, were all arenas `ratio` times as large as estimated.
 */
static bool keep_less(search *s, const plan_size *size, double ratio) {
    const double over = (double)(peak_of(size) - limit_of(s));
    const double goal = (double)size->arena - over - BELOW * (double)limit_of(s);
    const plan_choice *best = &s->best, *low = NULL;
    double arena = 0;
    for (int i = 0; i < s->estimate_count; i++) {
        const plan_choice *other = &s->estimates[i].choice;
        const double needed = ratio * (double)s->estimates[i].size.arena;
        if (!same_but_kept(*other, best) || other->kept >= best->kept || needed > goal) continue;
        if (low == NULL || other->kept > low->kept) low = other, arena = needed;
    }
    if (low == NULL) return false;
    const double slope = (best->kept - low->kept) / ((double)size->arena - arena);
    s->best.kept = low->kept + (goal - arena) * slope;
    s->best_size.arena = (int64_t)(goal / ratio * s->ratio);
    return true;
}

/* Whether the smallest estimate with overlap is that of a plan which fits after all: estimates of
 * copies to the host may be too large, by two fifths where it was most. */
static bool overlap_fits(search *s) {
    enum { FARTHEST = 2 }; /* times the limit: no plan of a larger estimate fits */
    const plan_choice *least = NULL;
    int64_t bytes = 0;
    for (int i = 0; i < s->estimate_count; i++) {
        const int64_t now = peak_of(&s->estimates[i].size);
        if (!s->estimates[i].choice.overlap || (least != NULL && now >= bytes)) continue;
        least = &s->estimates[i].choice;
        bytes = now;
    }
    if (least == NULL || bytes / FARTHEST > limit_of(s)) return false;
    plan_size size;
    s->fit->attempt(s->fit->context, least, &size);
    return fits(s, &size);
}

/* Whether what estimates lead to is to be accepted: it fits, and none with overlap does where it
 * has none; `compile`: to be sure, one with overlap may be compiled. */
static bool is_best(search *s, const plan_choice *first, bool compile) {
    return s->found && (!first->overlap || s->best.overlap || (compile && !overlap_fits(s)));
}

/* The choice that estimates lead to, compiled; where it turns out to need more than estimated,
 * another one, of the same estimates or of more of them. `estimated`: the last estimate is of the
 * choice that they lead to. Whether it is accepted. */
static bool compile_estimated(const plan_fit *fit, const plan_choice *first, bool estimated) {
    enum { TRIES = 4 };
    search s = {.fit = fit, .attempt = fit->estimate, .ratio = 1, .best_size = {.peak = INT64_MAX}};
    find(&s, first);
    if (estimated) {
        if (!fit->any && !is_best(&s, first, false)) return false;
        if (!plan_choice_same(&s.last, &s.best)) fit->estimate(fit->context, &s.best, &s.size);
        return true;
    }
    double ratio = 1; /* of what is needed to what is estimated */
    for (int i = 0; i < TRIES; i++) {
        plan_size size;
        if (!is_best(&s, first, true)) return false;
        fit->attempt(fit->context, &s.best, &size);
        s.size.moments = size.moments;
        if (fits(&s, &size)) return true;
        const double estimated = (double)s.best_size.arena / s.ratio;
        ratio = larger(i == 0 ? 1 : WORSE * ratio, (double)size.arena / larger(1, estimated));
        if (keep_less(&s, &size, ratio)) continue;
        s = (search){.fit = fit, .attempt = fit->estimate, .ratio = ratio};
        s.best_size.peak = INT64_MAX;
        find(&s, first);
    }
    return false;
}

bool plan_fit_memory(const plan_fit *fit, const plan_choice *first) {
    search s = {.fit = fit, .attempt = fit->attempt, .best_size = {.peak = INT64_MAX}};
    const bool estimated = fit->any || fit->estimated;
    if (fit->estimate != NULL && compile_estimated(fit, first, estimated)) return estimated;
    find(&s, first);
    if (!plan_choice_same(&s.last, &s.best)) fit->attempt(fit->context, &s.best, &s.size);
    return false;
}
