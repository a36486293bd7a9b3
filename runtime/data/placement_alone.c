/* The sequences that one rank computes each: to which rank, and on which of its rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/data/placement_internal.h"

/* ---- The rows of one rank -------------------------------------------------------------------- */

typedef struct {
    planner *p;
    const ml_group_cost *group;
    uint32_t batch;       /* rows of a microbatch */
    uint32_t *row;        /* of each sequence of a list */
    int64_t *left, *used; /* tokens of each row */
    double *pairs;        /* query-key pairs of each row */
    int64_t tried;        /* rows of sequences, so far: the time that packing takes */
} packing;

static packing packing_of(planner *p) {
    packing k = {.p = p, .group = &p->costs->group[0]};
    k.batch = (uint32_t)ml_placement_rows(p->costs, 0, 0);
    const int64_t rows = p->count + 3 * (int64_t)k.batch; /* at most a row a sequence */
    k.row = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    k.left = ML_NEW_ARRAY(p->arena, int64_t, rows);
    k.used = ML_NEW_ARRAY(p->arena, int64_t, rows);
    k.pairs = ML_NEW_ARRAY(p->arena, double, rows);
    return k;
}

/* Whether the sequences, longest first, fit on rows with so much left: each on the one that it
 * fills best. */
static bool fit(packing *k, const uint32_t *list, uint32_t count, uint32_t rows) {
    k->tried += (int64_t)count * rows;
    for (uint32_t i = 0; i < count; i++) {
        const int64_t length = k->p->all[list[i]].sequence.length;
        uint32_t best = rows;
        for (uint32_t r = 0; r < rows; r++)
            if (k->left[r] >= length && (best == rows || k->left[r] < k->left[best])) best = r;
        if (best == rows) return false;
        k->left[best] -= length;
        k->row[i] = best;
    }
    return true;
}

/* The sequences of one rank on the least tokens of rows that they are found to fit on: longest
 * rows, of which those of the last microbatch may be shorter. Returns how many rows. */
static uint32_t pack(packing *k, const uint32_t *list, uint32_t count) {
    const int64_t most = longest_row(k->group)->tokens, batch = k->batch;
    int64_t total = 0;
    for (uint32_t i = 0; i < count; i++) total += k->p->all[list[i]].sequence.length;
    uint32_t whole = (uint32_t)(total / most / batch);
    const int64_t rest = total - most * batch * whole;
    int last = rest ? row_for(k->group, (rest + batch - 1) / batch) : -1; /* -1: all are longest */
    for (;; last++) {
        if (last == k->group->count - 1) whole++, last = -1;
        const uint32_t rows = (whole + (last >= 0)) * k->batch;
        for (uint32_t r = 0; r < rows; r++)
            k->left[r] = r < whole * k->batch ? most : k->group->row[last].tokens;
        if (fit(k, list, count, rows)) return rows;
    }
}

/* Seconds of a microbatch whose rows begin at `first`; 0 where they are empty. */
static double microbatch_seconds(const packing *k, uint32_t first) {
    int64_t used = 0;
    double pairs = 0;
    for (uint32_t r = first; r < first + k->batch; r++) {
        used = k->used[r] > used ? k->used[r] : used;
        pairs = fmax(pairs, k->pairs[r]);
    }
    if (used == 0) return 0;
    const ml_row_cost *row = &k->group->row[row_for(k->group, used)];
    return row_seconds(row, pairs / ml_sequence_pairs(row->tokens));
}

/* Seconds of these sequences on rows of a rank that computes others for `before` seconds: a rank
 * without any computes a row of filling. */
static double packed_seconds(packing *k, const uint32_t *list, uint32_t count, double before) {
    if (count == 0) return before > 0 ? before : row_seconds(&k->group->row[0], 0);
    const uint32_t rows = pack(k, list, count);
    memset(k->used, 0, sizeof *k->used * rows);
    memset(k->pairs, 0, sizeof *k->pairs * rows);
    for (uint32_t i = 0; i < count; i++) {
        const int64_t length = k->p->all[list[i]].sequence.length;
        k->used[k->row[i]] += length;
        k->pairs[k->row[i]] += ml_sequence_pairs(length);
    }
    for (uint32_t r = 0; r < rows; r += k->batch) before += microbatch_seconds(k, r);
    return before;
}

/* The microbatches of a rank. */
static void make_rows(packing *k, int64_t rank, const uint32_t *list, uint32_t count) {
    const uint32_t rows = pack(k, list, count);
    for (uint32_t first = 0; first < rows; first += k->batch) {
        bool empty = true;
        for (uint32_t i = 0; i < count; i++) empty &= k->row[i] / k->batch != first / k->batch;
        if (empty) continue;
        ml_microbatch *m = microbatch_begin(k->p, 0, rank);
        for (uint32_t r = first; r < first + k->batch; r++) {
            row_begin(k->p);
            for (uint32_t i = 0; i < count; i++)
                if (k->row[i] == r) row_append(k->p, m, list[i]);
        }
        microbatch_end(k->p, m);
        ranks_load(k->p, m);
    }
}

void pack_alone(planner *p, int64_t rank, const uint32_t *list, uint32_t count) {
    packing k = packing_of(p);
    make_rows(&k, rank, list, count);
}

/* ---- Even ranks ------------------------------------------------------------------------------ */

/* A rank's sequences, longest first. */
typedef struct {
    ML_VEC(uint32_t) list;
    double before, seconds; /* of its microbatches of larger groups; of all */
} lone_rank;

typedef struct {
    packing k;
    lone_rank *rank;
    int64_t count;
    work_rate rate;
    uint32_t *from, *to; /* lists that are tried */
} evening;

/* Seconds of a sequence beside others: the rows of a microbatch take as long as one. */
static double work(const evening *e, uint32_t sequence) {
    return work_of(e->rate, e->k.p->all[sequence].sequence.length) / e->k.batch;
}

/* A list less the sequence at `given` and with `added`, or `none`: its length. */
static uint32_t changed(const lone_rank *r, uint32_t given, uint32_t added, uint32_t none,
                        uint32_t *out) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->list.count; i++) {
        if (added != none && added < r->list.at[i]) out[n++] = added, added = none;
        if (i != given) out[n++] = r->list.at[i];
    }
    if (added != none) out[n++] = added;
    return n;
}

/* An exchange: the sequence at `given` of the busier rank for that at `taken` of the other, where
 * it is not the end of its list; the seconds of the slower of both then, and of each. */
typedef struct {
    uint32_t given, taken;
    double slower, busy, idle;
} exchange;

static void try_exchange(evening *e, const lone_rank *busy, const lone_rank *idle, uint32_t given,
                         uint32_t taken, exchange *best) {
    const uint32_t none = e->k.p->count, end = idle->list.count;
    const uint32_t back = taken < end ? idle->list.at[taken] : none;
    exchange x = {given, taken};
    uint32_t n = changed(idle, taken, busy->list.at[given], none, e->to);
    x.idle = packed_seconds(&e->k, e->to, n, idle->before);
    if (x.idle >= best->slower) return;
    n = changed(busy, given, back, none, e->from);
    x.busy = packed_seconds(&e->k, e->from, n, busy->before);
    x.slower = fmax(x.busy, x.idle);
    if (x.slower < best->slower) *best = x;
}

/* When to stop: a gain of the busiest rank's time; rows of sequences that are tried (some ms). */
static const double LEAST_GAIN = 1e-4;
enum { MOST_TRIED = 1 << 20 };

/* For each sequence of the busier rank two of the other that are shorter, or none: the one that
 * leaves half of the difference of the ranks' times, and the longest. */
static exchange best_exchange(evening *e, const lone_rank *busy, const lone_rank *idle) {
    const double gap = busy->seconds - idle->seconds;
    exchange best = {.slower = busy->seconds * (1 - LEAST_GAIN)};
    for (uint32_t i = 0; i < busy->list.count && e->k.tried < MOST_TRIED; i++) {
        if (i > 0 && work(e, busy->list.at[i]) >= work(e, busy->list.at[i - 1])) continue;
        const uint32_t end = idle->list.count;
        const double mine = work(e, busy->list.at[i]);
        uint32_t longest = 0, half;
        while (longest < end && work(e, idle->list.at[longest]) >= mine) longest++;
        for (half = longest; half < end && mine - work(e, idle->list.at[half]) < gap / 2;) half++;
        if (mine - (longest < end ? work(e, idle->list.at[longest]) : 0) < gap)
            try_exchange(e, busy, idle, i, longest, &best);
        if (half != longest && mine - (half < end ? work(e, idle->list.at[half]) : 0) < gap)
            try_exchange(e, busy, idle, i, half, &best);
    }
    return best;
}

static void set_list(planner *p, lone_rank *r, const uint32_t *list, uint32_t count) {
    while (r->list.count < count) ML_PUSH(p->arena, &r->list);
    r->list.count = count;
    memcpy(r->list.at, list, sizeof *list * count);
}

static bool relieve(evening *e, lone_rank *busy, lone_rank *idle) {
    const uint32_t none = e->k.p->count;
    const exchange x = best_exchange(e, busy, idle);
    if (x.busy == 0) return false;
    const uint32_t given = busy->list.at[x.given];
    const uint32_t taken = x.taken < idle->list.count ? idle->list.at[x.taken] : none;
    uint32_t n = changed(busy, x.given, taken, none, e->from);
    set_list(e->k.p, busy, e->from, n);
    n = changed(idle, x.taken, given, none, e->to);
    set_list(e->k.p, idle, e->to, n);
    busy->seconds = x.busy, idle->seconds = x.idle;
    return true;
}

/* Rows have few lengths, so ranks with equal work may take unequal time: the busiest rank gives a
 * sequence to one of the least busy, or exchanges it for a shorter one, until that is no faster, or
 * much has been tried. */
static void even_out(evening *e) {
    enum { STEPS = 256, OTHERS = 3 };
    e->k.tried = 0;
    for (int step = 0; step < STEPS && e->k.tried < MOST_TRIED; step++) {
        lone_rank *busy = e->rank, *idle[OTHERS];
        bool relieved = false;
        for (int64_t r = 1; r < e->count; r++)
            if (e->rank[r].seconds > busy->seconds) busy = &e->rank[r];
        for (int k = 0; k < OTHERS && k + 1 < e->count && !relieved; k++) {
            idle[k] = NULL;
            for (lone_rank *r = e->rank; r < e->rank + e->count; r++) {
                bool tried = r == busy;
                for (int before = 0; before < k; before++) tried |= r == idle[before];
                if (!tried && (!idle[k] || r->seconds < idle[k]->seconds)) idle[k] = r;
            }
            relieved = relieve(e, busy, idle[k]);
        }
        if (!relieved) return;
    }
}

/* Longest first, each sequence to the rank with the least work. */
static void deal(evening *e) {
    planner *p = e->k.p;
    loads l = loads_of(p, 1);
    for (int64_t r = 0; r < e->count; r++) e->rank[r].before = l.seconds[r];
    for (uint32_t i = 0; i < p->count; i++) {
        if (p->alone[i] != i) continue;
        const int64_t r = l.heap[0];
        *ML_PUSH(p->arena, &e->rank[r].list) = i;
        l.seconds[r] += work(e, i);
        loads_sift(&l, 0);
    }
    for (int64_t r = 0; r < e->count; r++)
        e->rank[r].seconds =
            packed_seconds(&e->k, e->rank[r].list.at, e->rank[r].list.count, e->rank[r].before);
}

void place_alone(planner *p) {
    evening e = {packing_of(p), .count = p->costs->ranks, .rate = work_rate_of(p->costs)};
    e.rank = ML_NEW_ARRAY(p->arena, lone_rank, e.count);
    e.from = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    e.to = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    deal(&e);
    if (p->even) even_out(&e);
    for (int64_t r = 0; r < e.count; r++) {
        const lone_rank *rank = &e.rank[r];
        if (rank->list.count > 0) {
            make_rows(&e.k, r, rank->list.at, rank->list.count);
        } else if (p->out->seconds[r] == 0) { /* a filled row begins the rank's sums */
            ml_microbatch *m = microbatch_begin(p, 0, r);
            microbatch_end(p, m);
            ranks_load(p, m);
        }
    }
}
