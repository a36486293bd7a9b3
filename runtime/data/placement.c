/* Which ranks compute which sequences of a step. */
#include "runtime/data/placement.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/status.h"

/* A sequence in the making of the plan: in descending order of lengths. */
typedef struct {
    ml_sequence sequence;
    int group;        /* the least that it needs */
    uint32_t shorter; /* the next one that may be free; itself while it is free */
} candidate;

/* The groups of one size, the least loaded one first. */
typedef struct {
    int64_t *heap, count;
    double *seconds; /* by group */
} loads;

typedef struct {
    ml_arena *arena;
    const ml_placement_costs *costs;
    ml_step_placement *out;
    candidate *all;
    uint32_t count;
} planner;

/* ---- Loads ----------------------------------------------------------------------------------- */

static bool before(const loads *l, int64_t a, int64_t b) {
    if (l->seconds[a] < l->seconds[b]) return true;
    return l->seconds[a] == l->seconds[b] && a < b;
}

static void sift(loads *l, int64_t at) {
    for (int64_t child; (child = 2 * at + 1) < l->count; at = child) {
        if (child + 1 < l->count && before(l, l->heap[child + 1], l->heap[child])) child++;
        if (!before(l, l->heap[child], l->heap[at])) return;
        int64_t swapped = l->heap[at];
        l->heap[at] = l->heap[child];
        l->heap[child] = swapped;
    }
}

/* Of groups of so many ranks: ranks of a group have worked alike so far. */
static loads loads_of(planner *p, int64_t ranks) {
    loads l = {.count = p->costs->ranks / ranks};
    l.heap = ML_NEW_ARRAY(p->arena, int64_t, l.count);
    l.seconds = ML_NEW_ARRAY(p->arena, double, l.count);
    for (int64_t i = 0; i < l.count; i++) {
        l.heap[i] = i;
        l.seconds[i] = p->out->seconds[i * ranks];
    }
    for (int64_t i = l.count / 2; i-- > 0;) sift(&l, i);
    return l;
}

/* ---- Work ------------------------------------------------------------------------------------ */

/* Query-key pairs of the queries [from, to) of a sequence that begins at `start`. */
static double pairs(int64_t start, int64_t length, int64_t from, int64_t to) {
    if (from < start) from = start;
    if (to > start + length) to = start + length;
    if (to <= from) return 0;
    return 0.5 * (double)(to - from) * (double)(from + to + 1 - 2 * start);
}

/* Seconds of a microbatch; its sequences are in order. Rank r has blocks r and 2 n - 1 - r of 2 n
 * (runtime/ops/attention: traded halves). */
static double seconds_of(const planner *p, const ml_microbatch *m) {
    const ml_group_cost *group = &p->costs->group[m->group];
    const ml_row_cost *row = &group->row[m->row];
    int64_t ranks = group->ranks, half = row->tokens / 2, blocks = 2 * ranks;
    double most = 0, whole = (double)row->tokens * (double)row->tokens * (double)ranks / 2;
    for (int64_t r = 0; r < ranks; r++) {
        double sum = 0;
        int64_t start = 0, low = r * half, high = (blocks - 1 - r) * half;
        for (uint32_t i = 0; i < m->sequences; i++) {
            int64_t length = p->out->sequence[m->first + i].length;
            sum += pairs(start, length, low, low + half);
            sum += pairs(start, length, high, high + half);
            start += length;
        }
        if (sum > most) most = sum;
    }
    return row->seconds - row->attention * (1 - most / whole);
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* The number of the longest free sequence of at most `room` tokens among those of one rank;
 * p->count: none. */
static uint32_t longest_within(planner *p, int64_t room) {
    uint32_t low = 0, high = p->count; /* descending: the first that fits */
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (p->all[middle].sequence.length > room)
            low = middle + 1;
        else
            high = middle;
    }
    while (low < p->count && p->all[low].shorter != low) {
        uint32_t next = p->all[low].shorter;
        if (next < p->count && p->all[next].shorter != next)
            p->all[low].shorter = p->all[next].shorter;
        low = next;
    }
    return low;
}

static int row_for(const ml_group_cost *group, int64_t tokens) {
    int row = 0;
    while (row + 1 < group->count && group->row[row].tokens * group->ranks < tokens) row++;
    return row;
}

static ml_microbatch *begin(planner *p, int group, int row, int64_t rank) {
    ml_microbatch *m = ML_PUSH(p->arena, &p->out->microbatches);
    *m = (ml_microbatch){.group = group, .row = row, .rank = rank, .first = p->out->sequences};
    return m;
}

static void append(planner *p, ml_microbatch *m, uint32_t i) {
    p->out->sequence[p->out->sequences++] = p->all[i].sequence;
    p->all[i].shorter = i + 1;
    m->sequences++;
}

static void finish(planner *p, ml_microbatch *m) {
    const ml_group_cost *group = &p->costs->group[m->group];
    m->seconds = seconds_of(p, m);
    for (int64_t r = 0; r < group->ranks; r++) p->out->seconds[m->rank + r] += m->seconds;
    p->out->computed += group->row[m->row].tokens * group->ranks;
}

/* The sequences that need groups of this size, each on a row with short ones behind it. */
static void place_on_groups(planner *p, int g) {
    const ml_group_cost *group = &p->costs->group[g];
    loads l = loads_of(p, group->ranks);
    for (uint32_t i = 0; i < p->count; i++) {
        if (p->all[i].group != g) continue;
        int row = row_for(group, p->all[i].sequence.length);
        int64_t which = l.heap[0], room = group->row[row].tokens * group->ranks;
        ml_microbatch *m = begin(p, g, row, which * group->ranks);
        for (uint32_t next = i; next < p->count; next = longest_within(p, room)) {
            room -= p->all[next].sequence.length;
            append(p, m, next);
        }
        finish(p, m);
        l.seconds[which] = p->out->seconds[m->rank];
        sift(&l, 0);
    }
}

/* Whether the sequences, longest first, fit on rows with so much left: each on the one that it
 * fills best; row[i] becomes that of the i-th. */
static bool fit(const planner *p, const uint32_t *list, uint32_t count, int64_t *left,
                uint32_t rows, uint32_t *row) {
    for (uint32_t i = 0; i < count; i++) {
        int64_t length = p->all[list[i]].sequence.length;
        uint32_t best = rows;
        for (uint32_t k = 0; k < rows; k++)
            if (left[k] >= length && (best == rows || left[k] < left[best])) best = k;
        if (best == rows) return false;
        left[best] -= length;
        row[i] = best;
    }
    return true;
}

/* The sequences of one rank on the least tokens of rows that they are found to fit on: longest
 * rows, of which the last may be shorter. */
static void pack(planner *p, int64_t rank, const uint32_t *list, uint32_t count) {
    const ml_group_cost *group = &p->costs->group[0];
    int64_t most = group->row[group->count - 1].tokens, total = 0;
    for (uint32_t i = 0; i < count; i++) total += p->all[list[i]].sequence.length;
    uint32_t whole = (uint32_t)(total / most), rows, *row = ML_NEW_ARRAY(p->arena, uint32_t, count);
    int64_t *left = ML_NEW_ARRAY(p->arena, int64_t, count + whole + 2);
    int last = total % most ? row_for(group, total % most) : -1; /* -1: all are longest ones */
    for (;; last++) {
        if (last == group->count - 1) whole++, last = -1;
        rows = whole + (last >= 0);
        for (uint32_t k = 0; k < rows; k++) left[k] = k < whole ? most : group->row[last].tokens;
        if (fit(p, list, count, left, rows, row)) break;
    }
    for (uint32_t k = 0; k < rows; k++) {
        int64_t room = k < whole ? most : group->row[last].tokens;
        if (left[k] == room) continue;
        ml_microbatch *m = begin(p, 0, row_for(group, room - left[k]), rank);
        for (uint32_t i = 0; i < count; i++)
            if (row[i] == k) append(p, m, list[i]);
        finish(p, m);
    }
}

/* Each sequence that is left, longest first, is given to the rank with the least work. */
static void place_alone(planner *p) {
    const ml_group_cost *group = &p->costs->group[0];
    const ml_row_cost *row = &group->row[group->count - 1];
    int64_t ranks = p->costs->ranks;
    loads l = loads_of(p, 1);
    double tokens = (double)row->tokens, linear = (row->seconds - row->attention) / tokens;
    double quadratic = row->attention / (tokens * tokens);
    uint32_t *count = ML_NEW_ARRAY(p->arena, uint32_t, ranks + 1), *first, *list;
    int64_t *home = ML_NEW_ARRAY(p->arena, int64_t, p->count + 1);
    for (uint32_t i = 0; i < p->count; i++) {
        home[i] = -1;
        if (p->all[i].shorter != i) continue;
        double length = (double)p->all[i].sequence.length;
        home[i] = l.heap[0];
        l.seconds[home[i]] += length * (linear + quadratic * length);
        sift(&l, 0);
        count[home[i]]++;
    }
    first = ML_NEW_ARRAY(p->arena, uint32_t, ranks + 1);
    list = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    for (int64_t r = 0; r < ranks; r++) first[r + 1] = first[r] + count[r];
    memset(count, 0, sizeof *count * (size_t)ranks);
    for (uint32_t i = 0; i < p->count; i++)
        if (home[i] >= 0) list[first[home[i]] + count[home[i]]++] = i;
    for (int64_t r = 0; r < ranks; r++) {
        if (count[r])
            pack(p, r, list + first[r], count[r]);
        else if (p->out->seconds[r] == 0)
            finish(p, begin(p, 0, 0, r)); /* which begins the rank's sums */
    }
}

/* ---- Sequences ------------------------------------------------------------------------------- */

static int longer_first(const void *a, const void *b) {
    const ml_sequence *x = &((const candidate *)a)->sequence,
                      *y = &((const candidate *)b)->sequence;
    if (x->length != y->length) return x->length > y->length ? -1 : 1;
    return x->start < y->start ? -1 : x->start > y->start;
}

static void find_sequences(planner *p, const int32_t *documents, int64_t rows, int64_t columns) {
    ML_VEC(candidate) found = {0};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t from = row * columns, end = from + columns, at = from; from < end; from = at) {
            while (at < end && documents[at] == documents[from]) at++;
            ML_PUSH(p->arena, &found)->sequence = (ml_sequence){from, at - from};
        }
    p->all = found.at, p->count = found.count;
    if (p->count) qsort(p->all, p->count, sizeof *p->all, longer_first);
    for (uint32_t i = 0; i < p->count; i++) {
        candidate *c = &p->all[i];
        const ml_group_cost *group = p->costs->group;
        while (group->row[group->count - 1].tokens * group->ranks < c->sequence.length)
            if (group++ == &p->costs->group[p->costs->count - 1])
                ml_raise(ML_INVALID, "a document of %lld tokens fits on no group of ranks",
                         (long long)c->sequence.length);
        c->group = (int)(group - p->costs->group);
        c->shorter = c->group ? i + 1 : i;
    }
}

void ml_placement_make(ml_arena *arena, const ml_placement_costs *costs, const int32_t *documents,
                       int64_t rows, int64_t columns, ml_step_placement *out) {
    planner p = {.arena = arena, .costs = costs, .out = out};
    *out = (ml_step_placement){.tokens = rows * columns};
    find_sequences(&p, documents, rows, columns);
    out->sequence = ML_NEW_ARRAY(arena, ml_sequence, p.count + 1);
    out->seconds = ML_NEW_ARRAY(arena, double, costs->ranks);
    for (int g = costs->count - 1; g > 0; g--) place_on_groups(&p, g);
    place_alone(&p);
}

void ml_placement_fill(const ml_step_placement *p, const ml_microbatch *m,
                       const ml_token_rows *from, int64_t length, const ml_token_rows *to) {
    enum { SHORT = 128 };
    int64_t at = 0;
    int32_t number = 0;
    for (uint32_t i = 0; i < m->sequences; i++, number++) {
        const ml_sequence *s = &p->sequence[m->first + i];
        size_t bytes = sizeof(int32_t) * (size_t)s->length;
        memcpy(to->tokens + at, from->tokens + s->start, bytes);
        memcpy(to->targets + at, from->targets + s->start, bytes);
        memcpy(to->positions + at, from->positions + s->start, bytes);
        for (int64_t k = 0; k < s->length; k++) to->documents[at + k] = number;
        at += s->length;
    }
    for (int64_t k = 0; at < length; k++, at++) {
        to->tokens[at] = 0;
        to->targets[at] = -1;
        to->positions[at] = (int32_t)(k % SHORT);
        to->documents[at] = number + (int32_t)(k / SHORT);
    }
}
