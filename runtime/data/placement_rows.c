/* Microbatches of a placement row by row, and what they take. */
#include <stdlib.h>

#include "runtime/data/placement_internal.h"

/* ---- Loads ----------------------------------------------------------------------------------- */

static bool before(const loads *l, int64_t a, int64_t b) {
    if (l->seconds[a] < l->seconds[b]) return true;
    return l->seconds[a] == l->seconds[b] && a < b;
}

void loads_sift(loads *l, int64_t at) {
    for (int64_t child; (child = 2 * at + 1) < l->count; at = child) {
        if (child + 1 < l->count && before(l, l->heap[child + 1], l->heap[child])) child++;
        if (!before(l, l->heap[child], l->heap[at])) return;
        int64_t swapped = l->heap[at];
        l->heap[at] = l->heap[child];
        l->heap[child] = swapped;
    }
}

/* Ranks of a group have worked alike so far. */
loads loads_of(planner *p, int64_t ranks) {
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

/* ---- Work ------------------------------------------------------------------------------------ */

work_rate work_rate_of(const ml_placement_costs *costs) {
    const ml_row_cost *row = longest_row(&costs->group[0]);
    const double tokens = (double)row->tokens;
    return (work_rate){(row->seconds - row->attention) / tokens,
                       row->attention / (tokens * tokens)};
}

double work_of(work_rate rate, int64_t length) {
    return (double)length * (rate.linear + rate.quadratic * (double)length);
}

double row_seconds(const ml_row_cost *row, double share) {
    return row->seconds - row->attention * (1 - share);
}

static int shorter_first(const void *a, const void *b) {
    const ml_sequence *x = a, *y = b;
    if (x->length != y->length) return x->length < y->length ? -1 : 1;
    return x->start < y->start ? -1 : x->start > y->start;
}

static void reverse(ml_sequence *at, uint32_t count) {
    for (uint32_t i = 0; i < count / 2; i++) {
        const ml_sequence swapped = at[i];
        at[i] = at[count - 1 - i];
        at[count - 1 - i] = swapped;
    }
}

/* Rotated to the left. */
static void rotate(ml_sequence *at, uint32_t count, uint32_t by) {
    reverse(at, by);
    reverse(at + by, count - by);
    reverse(at, count);
}

static double share_of(const planner *p, const ml_placed_row *row, int64_t tokens, int64_t ranks) {
    return ml_sequences_share(p->out->sequence + row->first, row->sequences, tokens * ranks, ranks,
                              (ml_pair_mask){.causal = true});
}

/* Order the sequences of a group's row so that its ranks have about as many query-key pairs, which
 * a long one at the row's beginning does not give them where it ends before the row: of the orders
 * that are tried, the ascending ones, rotated, the best. Returns share_of. */
static double row_arrange(planner *p, const ml_placed_row *row, int64_t tokens, int64_t ranks) {
    enum { TRIED = 8 };
    const uint32_t count = row->sequences, step = (count + TRIED - 1) / TRIED;
    ml_sequence *at = p->out->sequence + row->first;
    double least = share_of(p, row, tokens, ranks);
    if (ranks == 1 || count < 2) return least;
    uint32_t best = 0, turned = 0;
    qsort(at, count, sizeof *at, shorter_first);
    least = share_of(p, row, tokens, ranks);
    while (turned + step < count) {
        rotate(at, count, step);
        turned += step;
        const double most = share_of(p, row, tokens, ranks);
        if (most < least) least = most, best = turned;
    }
    rotate(at, count, (best + count - turned) % count);
    return least;
}

int64_t rows_side_by_side(const ml_placement_costs *costs, int g, int row) {
    const int rows = costs->group[g].row[row].rows;
    return rows ? rows : 1;
}

static double seconds_of(planner *p, const ml_microbatch *m) {
    const ml_group_cost *group = &p->costs->group[m->group];
    const ml_row_cost *row = &group->row[m->row];
    const int64_t rows = ml_placement_rows(p->costs, m->group, m->row);
    const int64_t each = rows_side_by_side(p->costs, m->group, m->row);
    double most = 0;
    for (int64_t e = 0; e < rows; e += each) {
        double sum = 0;
        for (int64_t k = e; k < e + each; k++)
            sum += row_arrange(p, &p->out->rows.at[m->first_row + (uint32_t)k], row->tokens,
                               group->ranks);
        if (sum > most) most = sum;
    }
    return row_seconds(row, most / (double)each);
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* The number of the longest sequence of at most `room` tokens that is free by these links among
 * those from `low` to `end`; `end`: none. */
static uint32_t longest_within(const planner *p, uint32_t *links, uint32_t low, uint32_t end,
                               int64_t room) {
    uint32_t high = end; /* descending: the first that fits */
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (p->all[middle].sequence.length > room)
            low = middle + 1;
        else
            high = middle;
    }
    while (low < end && links[low] != low) {
        uint32_t next = links[low];
        if (next < end && links[next] != next) links[low] = links[next];
        low = next;
    }
    return low;
}

int64_t ml_placement_rows(const ml_placement_costs *costs, int g, int row) {
    const int64_t groups = costs->together ? costs->ranks / costs->group[g].ranks : 1;
    return groups * (costs->batch ? costs->batch : 1) * rows_side_by_side(costs, g, row);
}

const ml_row_cost *longest_row(const ml_group_cost *group) {
    return &group->row[group->count - 1];
}

int row_for(const ml_group_cost *group, int64_t tokens) {
    int row = 0;
    while (row + 1 < group->count && group->row[row].tokens * group->ranks < tokens) row++;
    return row;
}

ml_microbatch *microbatch_begin(planner *p, int group, int64_t rank) {
    ml_microbatch *m = ML_PUSH(p->arena, &p->out->microbatches);
    *m = (ml_microbatch){.group = group, .rank = rank, .first_row = p->out->rows.count};
    return m;
}

void row_begin(planner *p) {
    *ML_PUSH(p->arena, &p->out->rows) = (ml_placed_row){.first = p->out->sequences};
}

void row_append(planner *p, ml_microbatch *m, uint32_t i) {
    ml_placed_row *row = &p->out->rows.at[p->out->rows.count - 1];
    int64_t used = p->all[i].sequence.length;
    for (uint32_t k = 0; k < row->sequences; k++) used += p->out->sequence[row->first + k].length;
    int needed = row_for(&p->costs->group[m->group], used);
    if (needed > m->row) m->row = needed; /* not where there are several rows */
    p->out->sequence[p->out->sequences++] = p->all[i].sequence;
    p->alone[i] = i + 1;
    row->sequences++;
}

void microbatch_end(planner *p, ml_microbatch *m) {
    int64_t rows = ml_placement_rows(p->costs, m->group, m->row);
    while (p->out->rows.count < m->first_row + (uint32_t)rows) row_begin(p);
    const ml_group_cost *group = &p->costs->group[m->group];
    m->seconds = seconds_of(p, m);
    p->out->computed += group->row[m->row].tokens * group->ranks * rows;
}

void ranks_load(planner *p, const ml_microbatch *m) {
    int64_t ranks = p->costs->together ? p->costs->ranks : p->costs->group[m->group].ranks;
    for (int64_t r = 0; r < ranks; r++) p->out->seconds[m->rank + r] += m->seconds;
}

/* A row of a larger group: its sequences that need the group. */
typedef struct {
    uint32_t first, last; /* 1 + their numbers; 0: none */
    int64_t used;         /* tokens */
} long_row;

/* Sequences that need groups of size number g, longest first, to rows of `capacity` tokens, `each`
 * of them for each rank of ep in turns: one to each row, then as many more as fit. Returns how many
 * tokens the fullest row has. */
static int64_t choose_long(planner *p, int g, long_row *rows, int64_t count, int64_t each,
                           int64_t capacity) {
    const int64_t batch = count / each;
    const uint32_t end = p->end[g];
    int64_t fullest = 0, chosen;
    do {
        chosen = 0;
        for (int64_t r = 0; r < count; r++) {
            long_row *row = &rows[r % batch * each + r / batch];
            const uint32_t i =
                longest_within(p, p->grouped, p->end[g + 1], end, capacity - row->used);
            if (i == end) continue;
            if (row->last)
                p->all[row->last - 1].next = i + 1;
            else
                row->first = i + 1;
            row->last = i + 1;
            row->used += p->all[i].sequence.length;
            p->grouped[i] = i + 1;
            fullest = row->used > fullest ? row->used : fullest;
            chosen++;
        }
    } while (chosen > 0 && !p->choices.apart);
    return fullest;
}

ml_microbatch *long_rows(planner *p, int g, int64_t several) {
    const ml_group_cost *group = &p->costs->group[g];
    int program = group->count + group->several - 1;
    while (program >= group->count && group->row[program].rows > several) program--;
    const bool one = program < group->count;
    const int64_t count = ml_placement_rows(p->costs, g, program);
    const int64_t most = longest_row(group)->tokens * group->ranks;
    if (longest_within(p, p->grouped, p->end[g + 1], p->end[g], most) == p->end[g]) return NULL;
    long_row *rows = ML_NEW_ARRAY(p->arena, long_row, count);
    const int64_t fullest =
        choose_long(p, g, rows, count, rows_side_by_side(p->costs, g, program), most);
    int row = one ? row_for(group, fullest) + p->choices.longer : program;
    if (one && row >= group->count) row = group->count - 1;
    ml_microbatch *m = microbatch_begin(p, g, 0);
    if (!one) m->row = program;
    for (int64_t e = 0; e < count; e++) {
        int64_t room = group->row[row].tokens * group->ranks - rows[e].used;
        row_begin(p);
        for (uint32_t i = rows[e].first; i > 0; i = p->all[i - 1].next) row_append(p, m, i - 1);
        for (uint32_t i; (i = longest_within(p, p->alone, 0, p->count, room)) < p->count;) {
            room -= p->all[i].sequence.length;
            row_append(p, m, i);
        }
    }
    microbatch_end(p, m);
    return m;
}
