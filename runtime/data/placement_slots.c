/* A placement in slots: each rank has one microbatch in each, all ranks take the slots in one
 * order.
 *
 * Groups of neighbours divide the ranks anew in each slot: rows of larger groups first, which are
 * spread over the slots and, within these, to the ranks with the least work; each other rank
 * computes a row by itself. These rows are the longest there are, packed as full as sequences fit;
 * what is left of the step's sequences is in the last slot, on rows as short as hold them. The
 * slowest of these rows are for the ranks with the least work in each of their slots, and in the
 * first slots.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/status.h"
#include "runtime/data/placement_internal.h"

/* A row that one rank computes: in the order of what is left of it. */
typedef struct {
    int64_t left;
    uint32_t number;
} bin;

typedef struct {
    planner *p;
    uint32_t *list, count; /* sequences of one rank, longest first */
    uint32_t *bin_of;      /* by position in the list */
    bin *bins;             /* ascending by what is left, then by number */
    int64_t *used;         /* slots: ranks that groups take */
    bool *taken;           /* slots x ranks: a group has the rank there */
    int slots;
} slotting;

static bool bin_before(bin a, bin b) {
    return a.left != b.left ? a.left < b.left : a.number < b.number;
}

/* Whether the list fits on `whole` rows of `most` tokens and `last` of `least`: each sequence on
 * the row that it fills best. */
static bool fits(slotting *s, uint32_t whole, int64_t most, uint32_t last, int64_t least) {
    uint32_t count = whole + last;
    for (uint32_t k = 0; k < last; k++) s->bins[k] = (bin){least, whole + k};
    for (uint32_t k = 0; k < whole; k++) s->bins[last + k] = (bin){most, k};
    if (last > 0 && whole > 0 && least == most)
        for (uint32_t k = 0; k < count; k++) s->bins[k].number = k;
    for (uint32_t i = 0; i < s->count; i++) {
        int64_t length = s->p->all[s->list[i]].sequence.length;
        uint32_t low = 0, high = count;
        while (low < high) {
            uint32_t middle = (low + high) / 2;
            if (s->bins[middle].left < length)
                low = middle + 1;
            else
                high = middle;
        }
        if (low == count) return false;
        bin filled = {s->bins[low].left - length, s->bins[low].number};
        s->bin_of[i] = filled.number;
        for (; low > 0 && bin_before(filled, s->bins[low - 1]); low--)
            s->bins[low] = s->bins[low - 1];
        s->bins[low] = filled;
    }
    return true;
}

/* Rows of larger groups, which are the first microbatches: the columns that they take. */
static int64_t long_ones(planner *p) {
    int64_t columns = 0;
    const ml_microbatch *m;
    for (int g = p->costs->count - 1; g > 0; g--)
        while ((m = long_rows(p, g, 1)) != NULL) columns += p->costs->group[m->group].ranks;
    return columns;
}

/* Deal the first `count` microbatches to `slots` slots; false where they do not fit. */
static bool deal_groups(slotting *s, uint32_t count, int slots) {
    planner *p = s->p;
    memset(s->used, 0, sizeof *s->used * (size_t)(s->slots + 1));
    for (uint32_t i = 0; i < count; i++) {
        ml_microbatch *m = &p->out->microbatches.at[i];
        int64_t ranks = p->costs->group[m->group].ranks;
        int best = 0;
        for (int k = 1; k < slots; k++)
            if (s->used[k] < s->used[best]) best = k;
        if (s->used[best] + ranks > p->costs->ranks) return false;
        m->slot = best;
        s->used[best] += ranks;
    }
    return true;
}

/* Of the groups of a slot that are free yet, the one whose ranks have the least work. */
static int64_t idle_group(const slotting *s, int slot, int64_t ranks) {
    int64_t all = s->p->costs->ranks, best = -1;
    const bool *taken = s->taken + slot * all;
    const double *seconds = s->p->out->seconds;
    double least = 0;
    for (int64_t from = 0; from < all; from += ranks) {
        double most = 0;
        for (int64_t r = from; r < from + ranks; r++) most = seconds[r] > most ? seconds[r] : most;
        if (taken[from] || (best >= 0 && most >= least)) continue;
        best = from, least = most;
    }
    return best;
}

/* Which ranks compute the first `count` microbatches, whose slots are chosen; larger ones come
 * first, so that a slot's free ranks are whole groups of the next size. */
static void place_groups(slotting *s, uint32_t count) {
    planner *p = s->p;
    s->taken = ML_NEW_ARRAY(p->arena, bool, s->slots * p->costs->ranks + 1);
    for (uint32_t i = 0; i < count; i++) {
        ml_microbatch *m = &p->out->microbatches.at[i];
        int64_t ranks = p->costs->group[m->group].ranks;
        m->rank = idle_group(s, m->slot, ranks);
        memset(s->taken + m->slot * p->costs->ranks + m->rank, true, (size_t)ranks);
        ranks_load(p, m);
    }
}

/* The number of slots and the rows of single ranks: as few slots as hold all, the last one's rows
 * as short as can be. Returns the tokens of these. */
static int64_t choose_slots(slotting *s, uint32_t groups, int64_t columns) {
    planner *p = s->p;
    const ml_group_cost *group = &p->costs->group[0];
    int64_t ranks = p->costs->ranks, most = group->row[group->count - 1].tokens, total = 0;
    int64_t batch = ml_placement_rows(p->costs, 0, 0);
    for (uint32_t i = 0; i < s->count; i++) total += p->all[s->list[i]].sequence.length;
    int64_t cells = columns + (total + most * batch - 1) / (most * batch);
    for (int64_t slots = (cells + ranks - 1) / ranks;; slots++) {
        if (slots < 1) slots = 1;
        s->slots = (int)slots;
        s->used = ML_NEW_ARRAY(p->arena, int64_t, slots + 1);
        s->bins = ML_NEW_ARRAY(p->arena, bin, slots * ranks * batch + 1);
        if (!(slots > 1 && deal_groups(s, groups, (int)slots - 1)) &&
            !deal_groups(s, groups, (int)slots))
            continue;
        int64_t last = ranks - s->used[slots - 1], whole = slots * ranks - columns - last;
        for (int row = 0; row < group->count; row++) {
            int64_t least = group->row[row].tokens;
            if ((whole * most + last * least) * batch < total) continue;
            if (fits(s, (uint32_t)(whole * batch), most, (uint32_t)(last * batch), least))
                return least;
        }
    }
}

/* ---- Rows by themselves ---------------------------------------------------------------------- */

/* The rows of bins [from, to) become microbatches; those without sequences too. */
static void make_rows(slotting *s, uint32_t from, uint32_t to, const uint32_t *begin,
                      const uint32_t *sorted) {
    planner *p = s->p;
    uint32_t batch = (uint32_t)ml_placement_rows(p->costs, 0, 0);
    for (uint32_t k = from; k < to; k += batch) {
        ml_microbatch *m = microbatch_begin(p, 0, 0);
        for (uint32_t e = 0; e < batch; e++) {
            row_begin(p);
            for (uint32_t i = begin[k + e]; i < begin[k + e + 1]; i++)
                row_append(p, m, s->list[sorted[i]]);
        }
        microbatch_end(p, m);
    }
}

static int slower_first(const void *a, const void *b) {
    const ml_microbatch *x = a, *y = b;
    if (x->seconds != y->seconds) return x->seconds > y->seconds ? -1 : 1;
    return x->first_row < y->first_row ? -1 : x->first_row > y->first_row;
}

/* Seconds that each free slot of a rank is to take more than so far, below 0, for all ranks to work
 * as long as the average. */
static double key_of(const slotting *s, int64_t rank, int64_t cells, double level) {
    return (s->p->out->seconds[rank] - level) / (double)cells;
}

/* Microbatches [at, end), slowest first, to the ranks' free slots of [from, to): each to the rank
 * that needs the slowest ones, and in the first of its free slots. */
static void deal_rows(slotting *s, uint32_t at, uint32_t end, int from, int to) {
    planner *p = s->p;
    int64_t all = p->costs->ranks, *cells = ML_NEW_ARRAY(p->arena, int64_t, all + 1);
    loads l = {.heap = ML_NEW_ARRAY(p->arena, int64_t, all + 1),
               .seconds = ML_NEW_ARRAY(p->arena, double, all + 1)};
    double level = 0;
    for (uint32_t i = at; i < end; i++) level += p->out->microbatches.at[i].seconds;
    for (int64_t r = 0; r < all; r++) {
        for (int k = from; k < to; k++) cells[r] += !s->taken[k * all + r];
        level += p->out->seconds[r];
    }
    level /= (double)all;
    for (int64_t r = 0; r < all; r++) {
        if (cells[r] == 0) continue;
        l.heap[l.count++] = r;
        l.seconds[r] = key_of(s, r, cells[r], level);
    }
    for (int64_t i = l.count / 2; i-- > 0;) loads_sift(&l, i);
    for (; at < end; at++) {
        ml_microbatch *m = &p->out->microbatches.at[at];
        int64_t r = m->rank = l.heap[0];
        m->slot = from;
        while (s->taken[m->slot * all + r]) m->slot++;
        s->taken[m->slot * all + r] = true;
        ranks_load(p, m);
        if (--cells[r] > 0)
            l.seconds[r] = key_of(s, r, cells[r], level);
        else
            l.heap[0] = l.heap[--l.count];
        loads_sift(&l, 0);
    }
}

static int slot_then_rank(const void *a, const void *b) {
    const ml_microbatch *x = a, *y = b;
    if (x->slot != y->slot) return x->slot - y->slot;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* Slots of filled rows alone, until their number is a multiple of what the schedule takes. */
static void add_slots(slotting *s) {
    planner *p = s->p;
    for (; s->slots % p->costs->slots != 0; s->slots++)
        for (int64_t r = 0; r < p->costs->ranks; r++) {
            ml_microbatch *m = microbatch_begin(p, 0, r);
            m->slot = s->slots;
            microbatch_end(p, m);
            ranks_load(p, m);
        }
}

void place_in_slots(planner *p) {
    slotting s = {.p = p};
    int64_t columns = long_ones(p), ranks = p->costs->ranks,
            batch = ml_placement_rows(p->costs, 0, 0);
    uint32_t groups = p->out->microbatches.count;
    s.list = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    s.bin_of = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    for (uint32_t i = 0; i < p->count; i++)
        if (p->alone[i] == i) s.list[s.count++] = i;
    choose_slots(&s, groups, columns);
    place_groups(&s, groups);
    /* The sequences by rows, as sums of counts; rows of the last slot are behind the others. */
    uint32_t bins = (uint32_t)((s.slots * ranks - columns) * batch);
    uint32_t last = (uint32_t)((ranks - s.used[s.slots - 1]) * batch);
    uint32_t *begin = ML_NEW_ARRAY(p->arena, uint32_t, bins + 2);
    uint32_t *sorted = ML_NEW_ARRAY(p->arena, uint32_t, s.count + 1);
    for (uint32_t i = 0; i < s.count; i++) begin[s.bin_of[i] + 2]++;
    for (uint32_t k = 2; k < bins + 2; k++) begin[k] += begin[k - 1];
    for (uint32_t i = 0; i < s.count; i++) sorted[begin[s.bin_of[i] + 1]++] = i;
    make_rows(&s, 0, bins - last, begin, sorted);
    ml_microbatch *at = p->out->microbatches.at + groups;
    const uint32_t alone = p->out->microbatches.count - groups;
    if (alone > 0) qsort(at, alone, sizeof *at, slower_first);
    make_rows(&s, bins - last, bins, begin, sorted);
    at = p->out->microbatches.at + p->out->microbatches.count - last / (uint32_t)batch;
    qsort(at, last / (uint32_t)batch, sizeof *at, slower_first);
    uint32_t end = p->out->microbatches.count, middle = end - last / (uint32_t)batch;
    deal_rows(&s, groups, middle, 0, s.slots - 1);
    deal_rows(&s, middle, end, s.slots - 1, s.slots);
    add_slots(&s);
    p->out->slots = s.slots;
    qsort(p->out->microbatches.at, p->out->microbatches.count, sizeof *p->out->microbatches.at,
          slot_then_rank);
}
