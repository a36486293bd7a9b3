/* Which ranks compute which sequences of a step. */
#include "runtime/data/placement.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/status.h"
#include "runtime/data/placement_internal.h"

/* About how many microbatches of one row (of each rank of ep) the sequences need that need groups
 * of this size. */
static int64_t rows_needed(const planner *p, int g) {
    const ml_group_cost *group = &p->costs->group[g];
    const int64_t most = longest_row(group)->tokens * group->ranks;
    int64_t tokens = 0, longer = 0;
    for (uint32_t i = p->end[g + 1]; i < p->end[g]; i++) {
        tokens += p->all[i].sequence.length;
        longer += 2 * p->all[i].sequence.length > most;
    }
    const int64_t rows = tokens > longer * most ? (tokens + most - 1) / most : longer;
    const int64_t batch = ml_placement_rows(p->costs, g, 0);
    return (rows + batch - 1) / batch;
}

/* The sequences that need groups of this size, each microbatch to the group with the least work. A
 * microbatch has an even share of the rows that are left when every group has one more. */
static void place_on_groups(planner *p, int g) {
    int64_t ranks = p->costs->group[g].ranks;
    loads l = loads_of(p, ranks);
    int64_t left = rows_needed(p, g), each = 1;
    ml_microbatch *m;
    for (int64_t n = 0;; n++) {
        if (n % l.count == 0 && !p->choices.single) each = (left + l.count - 1) / l.count;
        if (!(m = long_rows(p, g, left < each ? left : each))) return;
        left -= rows_side_by_side(p->costs, g, m->row);
        const int64_t which = l.heap[0];
        m->rank = which * ranks;
        ranks_load(p, m);
        l.seconds[which] = p->out->seconds[m->rank];
        loads_sift(&l, 0);
    }
}

/* All ranks compute each microbatch: the sequences that need larger groups first, then the others.
 * With slots, each microbatch is one. */
static void place_together(planner *p) {
    uint32_t count = 0, *list = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    int slots = p->costs->slots;
    ml_microbatch *m;
    for (int g = p->costs->count - 1; g > 0; g--)
        while ((m = long_rows(p, g, 1)) != NULL) ranks_load(p, m);
    for (uint32_t i = 0; i < p->count; i++)
        if (p->alone[i] == i) list[count++] = i;
    if (count > 0) pack_alone(p, 0, list, count);
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
    p->alone = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
    p->grouped = ML_NEW_ARRAY(p->arena, uint32_t, p->count + 1);
}

/* How many tokens a group's ranks may have of a sequence. */
static int64_t room_of(const planner *p, const ml_group_cost *group) {
    int64_t each = longest_row(group)->tokens >> p->choices.halved;
    if (p->costs->most > 0 && p->costs->most < each) each = p->costs->most;
    return each * group->ranks;
}

/* The size of groups for each sequence: the smallest that has room for it and, without slots, takes
 * no longer than an even share of the step, as far as there are larger ones. */
static void choose_groups(planner *p) {
    const ml_group_cost *group = p->costs->group, *largest = &group[p->costs->count - 1];
    const work_rate rate = work_rate_of(p->costs);
    const double rows = (double)p->costs->ranks * (p->costs->batch ? p->costs->batch : 1);
    double share = p->costs->slots > 0 ? INFINITY : 0;
    memset(p->end, 0, sizeof p->end);
    for (uint32_t i = 0; i < p->count; i++)
        share += work_of(rate, p->all[i].sequence.length) / rows;
    share *= 1 + 1e-9; /* what a sum of equal parts may lack of them */
    for (uint32_t i = 0; i < p->count; i++) {
        const int64_t length = p->all[i].sequence.length;
        const double work = work_of(rate, length);
        const ml_group_cost *its = group;
        if (length > longest_row(largest)->tokens * largest->ranks)
            ml_raise(ML_INVALID, "a document of %lld tokens fits on no group of ranks",
                     (long long)length);
        while (its < largest && (length > room_of(p, its) || work > share * (double)its->ranks))
            its++;
        p->all[i].group = (int)(its - group);
        for (int g = 0; g <= p->all[i].group; g++) p->end[g] = i + 1;
    }
}

/* ---- The plan of a step ---------------------------------------------------------------------- */

static void place(planner *p) {
    ml_step_placement *out = p->out;
    *out = (ml_step_placement){.tokens = out->tokens};
    choose_groups(p);
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

/* Plan with these choices; they are the best so far if the busiest rank has less to do. */
static void compare(planner *p, choices with, choices *best, double *least) {
    p->choices = with;
    place(p);
    if (busiest(p) >= *least) return;
    *least = busiest(p);
    *best = with;
}

/* Fewer ranks for a sequence have fewer messages, more are more even. A short sequence takes longer
 * on a row of a larger group, but may save a rank a row whose length it begins; sequences on one
 * row of a larger group cost its beginning once, but leave less to even out ranks with. Which is
 * more follows from whole plans. So does whether few rows are better apart. */
static choices choose(planner *p) {
    enum { SEQUENCES = 1024, HALVED = 2 }; /* of all plans: their time is that of sequences */
    const int groups = p->costs->count, lengths = p->costs->group[groups - 1].count;
    choices best = {0}, with;
    double least = INFINITY;
    uint32_t plans = 1;
    if (groups == 1 || p->costs->slots > 0 || 2 * p->count > SEQUENCES) return best;
    for (with = best; with.halved <= HALVED && plans * p->count < SEQUENCES; plans++, with.halved++)
        compare(p, with, &best, &least);
    with = best;
    with.single = true;
    if (p->costs->group[groups - 1].several > 0) compare(p, with, &best, &least), plans++;
    with = best;
    for (int i = 1; i < 2 * lengths && plans * p->count < SEQUENCES; plans++, i++) {
        with.apart = i % 2 == 1, with.longer = i / 2;
        compare(p, with, &best, &least);
    }
    return best;
}

void ml_placement_make(ml_arena *arena, const ml_placement_costs *costs, const int32_t *documents,
                       int64_t rows, int64_t columns, ml_step_placement *out) {
    planner p = {.arena = arena, .costs = costs, .out = out};
    *out = (ml_step_placement){.tokens = rows * columns};
    find_sequences(&p, documents, rows, columns);
    p.choices = choose(&p);
    p.even = true;
    place(&p);
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
