/* Which ranks compute which sequences of a step. */
#include "runtime/data/placement.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/status.h"
#include "runtime/data/placement_internal.h"

/* Of groups of so many ranks: ranks of a group have worked alike so far. */
static loads loads_of(planner *p, int64_t ranks) {
    loads l = {.count = p->costs->ranks / ranks};
    l.heap = ML_NEW_ARRAY(p->arena, int64_t, l.count);
    l.seconds = ML_NEW_ARRAY(p->arena, double, l.count);
    for (int64_t i = 0; i < l.count; i++) {
        l.heap[i] = i;
        l.seconds[i] = p->out->seconds[i * ranks];
    }
    for (int64_t i = l.count / 2; i-- > 0;) loads_sift(&l, i);
    return l;
}

/* The sequences that need groups of this size, each microbatch to the group with the least work. */
static void place_on_groups(planner *p, int g) {
    int64_t ranks = p->costs->group[g].ranks;
    loads l = loads_of(p, ranks);
    ml_microbatch *m;
    while ((m = long_rows(p, g)) != NULL) {
        int64_t which = l.heap[0];
        m->rank = which * ranks;
        ranks_load(p, m);
        l.seconds[which] = p->out->seconds[m->rank];
        loads_sift(&l, 0);
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
 * rows, of which those of the last microbatch may be shorter. */
static void pack(planner *p, int64_t rank, const uint32_t *list, uint32_t count) {
    const ml_group_cost *group = &p->costs->group[0];
    uint32_t batch = (uint32_t)ml_placement_rows(p->costs, 0);
    int64_t most = group->row[group->count - 1].tokens, total = 0, rest;
    for (uint32_t i = 0; i < count; i++) total += p->all[list[i]].sequence.length;
    uint32_t whole = (uint32_t)(total / most / batch), rows, *row;
    row = ML_NEW_ARRAY(p->arena, uint32_t, count);
    int64_t *left = ML_NEW_ARRAY(p->arena, int64_t, (count + whole + 2) * batch);
    rest = total - most * batch * whole;
    int last = rest ? row_for(group, (rest + batch - 1) / batch) : -1; /* -1: all are longest */
    for (;; last++) {
        if (last == group->count - 1) whole++, last = -1;
        rows = (whole + (last >= 0)) * batch;
        for (uint32_t k = 0; k < rows; k++)
            left[k] = k < whole * batch ? most : group->row[last].tokens;
        if (fit(p, list, count, left, rows, row)) break;
    }
    for (uint32_t k = 0; k < rows; k += batch) {
        int64_t room = (k < whole * batch ? most : group->row[last].tokens) * batch;
        for (uint32_t e = 0; e < batch; e++) room -= left[k + e];
        if (room == 0) continue;
        ml_microbatch *m = microbatch_begin(p, 0, rank);
        for (uint32_t e = 0; e < batch; e++) {
            row_begin(p);
            for (uint32_t i = 0; i < count; i++)
                if (row[i] == k + e) row_append(p, m, list[i]);
        }
        microbatch_end(p, m);
        ranks_load(p, m);
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
        if (p->alone[i] != i) continue;
        double length = (double)p->all[i].sequence.length;
        home[i] = l.heap[0];
        l.seconds[home[i]] += length * (linear + quadratic * length);
        loads_sift(&l, 0);
        count[home[i]]++;
    }
    first = ML_NEW_ARRAY(p->arena, uint32_t, ranks + 1);
    list = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    for (int64_t r = 0; r < ranks; r++) first[r + 1] = first[r] + count[r];
    memset(count, 0, sizeof *count * (size_t)ranks);
    for (uint32_t i = 0; i < p->count; i++)
        if (home[i] >= 0) list[first[home[i]] + count[home[i]]++] = i;
    for (int64_t r = 0; r < ranks; r++) {
        if (count[r]) {
            pack(p, r, list + first[r], count[r]);
        } else if (p->out->seconds[r] == 0) { /* a filled row begins the rank's sums */
            ml_microbatch *m = microbatch_begin(p, 0, r);
            microbatch_end(p, m);
            ranks_load(p, m);
        }
    }
}

/* All ranks compute each microbatch: the sequences that need larger groups first, then the others.
 * With slots, each microbatch is one. */
static void place_together(planner *p) {
    uint32_t count = 0, *list = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    int slots = p->costs->slots;
    ml_microbatch *m;
    for (int g = p->costs->count - 1; g > 0; g--)
        while ((m = long_rows(p, g)) != NULL) ranks_load(p, m);
    for (uint32_t i = 0; i < p->count; i++)
        if (p->alone[i] == i) list[count++] = i;
    if (count > 0) pack(p, 0, list, count);
    while (slots > 0 && p->out->microbatches.count % (uint32_t)slots != 0) {
        m = microbatch_begin(p, 0, 0);
        microbatch_end(p, m);
        ranks_load(p, m);
    }
    for (uint32_t i = 0; slots > 0 && i < p->out->microbatches.count; i++)
        p->out->microbatches.at[i].slot = (int)i;
    p->out->slots = slots > 0 ? (int)p->out->microbatches.count : 0;
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
            at = ml_sequence_end(documents, from, end);
            ML_PUSH(p->arena, &found)->sequence = (ml_sequence){from, at - from};
        }
    p->all = found.at, p->count = found.count;
    if (p->count) qsort(p->all, p->count, sizeof *p->all, longer_first);
    for (uint32_t i = 0; i < p->count; i++) {
        candidate *c = &p->all[i];
        const ml_group_cost *group = p->costs->group;
        while (p->costs->most * group->ranks < c->sequence.length)
            if (group++ == &p->costs->group[p->costs->count - 1])
                ml_raise(ML_INVALID, "a document of %lld tokens fits on no group of ranks",
                         (long long)c->sequence.length);
        c->group = (int)(group - p->costs->group);
        for (int g = 0; g <= c->group; g++) p->end[g] = i + 1;
    }
    p->alone = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    p->grouped = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
}

/* ---- The plan of a step ---------------------------------------------------------------------- */

static void place(planner *p) {
    ml_step_placement *out = p->out;
    for (uint32_t i = 0; i < p->count; i++) {
        p->alone[i] = p->all[i].group ? i + 1 : i;
        p->grouped[i] = i;
        p->all[i].next = 0;
    }
    out->sequence = ML_NEW_ARRAY(p->arena, ml_sequence, p->count + 1);
    out->seconds = ML_NEW_ARRAY(p->arena, double, p->costs->ranks);
    if (p->costs->together) {
        place_together(p);
    } else if (p->costs->slots > 0) {
        place_in_slots(p);
    } else {
        for (int g = p->costs->count - 1; g > 0; g--) place_on_groups(p, g);
        place_alone(p);
    }
}

static double busiest(const planner *p) {
    double most = 0;
    for (int64_t r = 0; r < p->costs->ranks; r++)
        if (p->out->seconds[r] > most) most = p->out->seconds[r];
    return most;
}

/* A short sequence takes longer on a row of a larger group, but may save a rank a row whose length
 * it begins; sequences on one row of a larger group cost its beginning once, but leave less to even
 * out ranks with: which is more follows from whole plans. */
void ml_placement_make(ml_arena *arena, const ml_placement_costs *costs, const int32_t *documents,
                       int64_t rows, int64_t columns, ml_step_placement *out) {
    enum { SEQUENCES = 1024 }; /* of all plans that are compared: their time is that of sequences */
    ml_step_placement next = {.tokens = rows * columns};
    planner p = {.arena = arena, .costs = costs, .out = out};
    *out = next;
    find_sequences(&p, documents, rows, columns);
    place(&p);
    const int lengths = costs->slots > 0 ? 0 : costs->group[costs->count - 1].count;
    double least = busiest(&p);
    p.out = &next;
    for (int i = 1; i < 2 * lengths && (uint32_t)i * p.count < SEQUENCES; i++) {
        p.apart = i % 2 == 1, p.longer = i / 2;
        next = (ml_step_placement){.tokens = rows * columns};
        place(&p);
        if (busiest(&p) >= least) continue;
        least = busiest(&p);
        *out = next;
    }
}

/* One row. */
static void fill_row(const ml_sequence *sequence, uint32_t count, const ml_token_rows *from,
                     const ml_token_rows *to) {
    enum { SHORT = 128 };
    const int64_t most = from->length < SHORT ? from->length : SHORT;
    int64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        const ml_sequence *s = &sequence[i];
        size_t bytes = sizeof(int32_t) * (size_t)s->length;
        memcpy(to->tokens + at, from->tokens + s->start, bytes);
        memcpy(to->targets + at, from->targets + s->start, bytes);
        memcpy(to->positions + at, from->positions + s->start, bytes);
        for (int64_t k = 0; k < s->length; k++) to->documents[at + k] = (int32_t)i;
        at += s->length;
    }
    for (int64_t k = 0; at < to->length; k++, at++) {
        to->tokens[at] = 0;
        to->targets[at] = -1;
        to->positions[at] = (int32_t)(k % most);
        to->documents[at] = -1 - (int32_t)(k / most);
    }
}

void ml_placement_fill(const ml_step_placement *p, const ml_microbatch *m,
                       const ml_token_rows *from, int64_t rows, const ml_token_rows *to) {
    static const ml_placed_row nothing;
    for (int64_t e = 0; e < rows; e++) {
        const ml_placed_row *row = m ? &p->rows.at[m->first_row + (uint32_t)e] : &nothing;
        int64_t at = e * to->length;
        ml_token_rows part = {to->tokens + at, to->targets + at, to->documents + at,
                              to->positions + at, to->length};
        fill_row(p->sequence + row->first, row->sequences, from, &part);
    }
}
