/* The placement of sequences on groups of ranks: every sequence once, equal work, no circles. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/data/placement.h"
#include "tests/test.h"

/* Rows of up to a quarter more than `most` tokens a rank; 1 us a token, as much as for an eighth of
 * `most` to begin a row and, of a row of one sequence, an eighth more for attention. Groups pay a
 * tenth for their messages; each size is so many `times` the one before. */
static ml_placement_costs costs_of_groups(int64_t ranks, int64_t most, int sizes, int64_t times) {
    ml_placement_costs costs = {.ranks = ranks, .count = sizes};
    for (int g = 0; g < sizes; g++) {
        ml_group_cost *group = &costs.group[g];
        group->ranks = g ? times * costs.group[g - 1].ranks : 1;
        group->count = g ? 6 : 10;
        for (int i = 0; i < group->count; i++) {
            int64_t tokens = g ? most / 2 + most / 8 * (i + 1) : most / 8 * (i + 1);
            double linear = 1e-6 * (double)(tokens + most / 8) * (g ? 1.1 : 1);
            double attention = linear / 8 * (double)(tokens * group->ranks) / (double)most;
            group->row[i] = (ml_row_cost){tokens, linear + attention, attention};
        }
    }
    return costs;
}

static ml_placement_costs costs_of(int64_t ranks, int64_t most, int sizes) {
    return costs_of_groups(ranks, most, sizes, 2);
}

/* Programs of up to `rows` rows besides, as long as the longest one; that many rows cost one
 * beginning. */
static void add_several(ml_placement_costs *costs, int64_t most, int rows) {
    for (int g = 1; g < costs->count; g++) {
        ml_group_cost *group = &costs->group[g];
        const ml_row_cost one = group->row[group->count - 1];
        for (int n = 2; n <= rows; n++) {
            ml_row_cost *row = &group->row[group->count + group->several++];
            *row = one;
            row->rows = n;
            row->seconds = n * one.seconds - (n - 1) * 1.1e-6 * (double)most / 8;
            row->attention = n * one.attention;
        }
    }
}

/* Documents of lognormal lengths (mean 1024, sigma 1.5) from 128 to `longest`, cut at the ends of
 * rows of as many tokens. */
static int32_t *draw_documents(ml_arena *arena, unsigned seed, int64_t rows, int64_t longest) {
    int32_t *documents = ML_NEW_ARRAY(arena, int32_t, rows * longest), number = 0;
    for (int64_t at = 0, left = 0; at < rows * longest; at++, left--) {
        while (left == 0) {
            double u = (rand_r(&seed) + 1.0) / (RAND_MAX + 2.0),
                   v = rand_r(&seed) / (double)RAND_MAX;
            double normal = sqrt(-2 * log(u)) * cos(2 * M_PI * v);
            double length = exp(log(1024) - 1.125 + 1.5 * normal);
            left = length >= 128 && length <= (double)longest ? (int64_t)length : 0;
            number++;
        }
        documents[at] = number;
    }
    return documents;
}

/* Attention follows the query-key pairs of the rank that has most of them: of ranks of ep the one
 * with most of all its rows. */
static double seconds_of(const ml_placement_costs *costs, const ml_step_placement *p,
                         const ml_microbatch *m) {
    const ml_group_cost *group = &costs->group[m->group];
    const ml_row_cost *program = &group->row[m->row];
    const int64_t rows = ml_placement_rows(costs, m->group, m->row);
    const int64_t each = program->rows ? program->rows : 1;
    double most = 0;
    for (int64_t e = 0; e < rows; e += each) {
        double mean = 0;
        for (int64_t k = e; k < e + each; k++) {
            const ml_placed_row *row = &p->rows.at[m->first_row + (uint32_t)k];
            mean += ml_sequences_share(p->sequence + row->first, row->sequences,
                                       program->tokens * group->ranks, group->ranks,
                                       (ml_pair_mask){.causal = true}) /
                    (double)each;
        }
        most = fmax(most, mean);
    }
    return program->seconds - program->attention * (1 - most);
}

/* Each token of the step is in one microbatch, no rank has too many of one sequence, and each
 * microbatch is on a row that is long enough.
 */
static void check_complete(const ml_placement_costs *costs, const ml_step_placement *p,
                           ml_arena *arena) {
    unsigned char *seen = ML_NEW_ARRAY(arena, unsigned char, p->tokens);
    int64_t wrong = 0, missing = 0;
    for (uint32_t i = 0; i < p->microbatches.count; i++) {
        const ml_microbatch *m = &p->microbatches.at[i];
        const ml_group_cost *group = &costs->group[m->group];
        int64_t longest = 0;
        wrong += m->rank % group->ranks != 0 || m->rank + group->ranks > costs->ranks;
        wrong += (!p->slots || costs->together) && i > 0 &&
                 m->group > m[-1].group; /* larger groups come first */
        for (int64_t e = 0; e < ml_placement_rows(costs, m->group, m->row); e++) {
            const ml_placed_row *row = &p->rows.at[m->first_row + (uint32_t)e];
            int64_t used = 0;
            for (uint32_t k = 0; k < row->sequences; k++) {
                const ml_sequence *s = &p->sequence[row->first + k];
                wrong += costs->most > 0 && s->length > costs->most * group->ranks;
                for (int64_t t = 0; t < s->length; t++) wrong += seen[s->start + t]++;
                used += s->length;
            }
            longest = used > longest ? used : longest;
        }
        wrong += longest > group->row[m->row].tokens * group->ranks;
        wrong += fabs(m->seconds - seconds_of(costs, p, m)) > 1e-12;
        wrong += m->row > 0 && m->row < group->count &&
                 longest <= group->row[m->row - 1].tokens * group->ranks;
    }
    for (int64_t t = 0; t < p->tokens; t++) missing += !seen[t];
    CHECK_EQ_INT(wrong, 0);
    CHECK_EQ_INT(missing, 0);
}

static double imbalance(const ml_placement_costs *costs, const ml_step_placement *p) {
    double most = 0, sum = 0;
    for (int64_t r = 0; r < costs->ranks; r++) {
        if (p->seconds[r] > most) most = p->seconds[r];
        sum += p->seconds[r];
    }
    return most / (sum / (double)costs->ranks) - 1;
}

/* Microbatches of a rank, on average. */
static double microbatches_of(const ml_placement_costs *costs, const ml_step_placement *p) {
    int64_t sum = 0;
    for (uint32_t i = 0; i < p->microbatches.count; i++)
        sum += costs->group[p->microbatches.at[i].group].ranks;
    return (double)sum / (double)costs->ranks;
}

TEST(data, a_placement_has_each_sequence_once_and_equal_work) {
    static const struct {
        int64_t ranks, longest;
        int sizes;
        double most_uneven, most_filling;
        bool bounded; /* at most a microbatch's tokens of a sequence for each rank */
    } cases[] = {{1, 2048, 1, 0, 0.02, false},      {2, 4096, 2, 0.003, 0.02, false},
                 {8, 8192, 3, 0.0065, 0.02, false}, {64, 8192, 3, 0.008, 0.02, false},
                 {2, 4096, 2, 0.01, 0.02, true},    {8, 8192, 3, 0.01, 0.02, true},
                 {64, 8192, 3, 0.01, 0.02, true}};
    ml_arena *arena = ml_arena_new();
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const int64_t most = 2048, microbatches = 8;
        int64_t ranks = cases[c].ranks, rows = ranks * microbatches * most / cases[c].longest;
        ml_placement_costs costs = costs_of(ranks, most, cases[c].sizes);
        costs.most = cases[c].bounded ? most : 0;
        double uneven = 0, filling = 0, count = 0;
        for (unsigned seed = 1; seed <= 5; seed++) {
            ml_arena_reset(arena);
            int32_t *documents = draw_documents(arena, seed, rows, cases[c].longest);
            ml_step_placement p;
            ml_placement_make(arena, &costs, documents, rows, cases[c].longest, &p);
            check_complete(&costs, &p, arena);
            count += microbatches_of(&costs, &p) / 5;
            uneven += imbalance(&costs, &p) / 5;
            filling += (1 - (double)p.tokens / (double)p.computed) / 5;
        }
        CHECK(uneven <= cases[c].most_uneven);
        CHECK(filling <= cases[c].most_filling);
        CHECK(count <= (double)microbatches); /* longer rows make up for what is not filled */
    }
    ml_arena_free(arena);
}

/* Several sequences that need the same groups are one microbatch of several rows, no more of them
 * in one than an even share: then ranks are as even as with rows apart, in fewer microbatches. */
TEST(data, a_placement_puts_rows_of_groups_together) {
    const int64_t ranks[] = {4, 16, 64}, most = 2048, longest = 8192;
    ml_arena *arena = ml_arena_new();
    for (int c = 0; c < 3; c++) {
        double count[4] = {0}, seconds[4] = {0}, uneven = 0;
        for (int rows = 1; rows <= 3; rows++)
            for (unsigned seed = 1; seed <= 5; seed++) {
                ml_arena_reset(arena);
                const int64_t windows = 4 * ranks[c];
                ml_placement_costs costs = costs_of(ranks[c], most, 3);
                costs.most = most;
                add_several(&costs, most, rows);
                int32_t *documents = draw_documents(arena, seed, windows, longest);
                ml_step_placement p;
                ml_placement_make(arena, &costs, documents, windows, longest, &p);
                check_complete(&costs, &p, arena);
                count[rows] += microbatches_of(&costs, &p) / 5;
                uneven = fmax(uneven, imbalance(&costs, &p));
                for (int64_t r = 0; r < ranks[c]; r++) seconds[rows] += p.seconds[r];
            }
        CHECK(uneven <= 0.01);
        CHECK(count[2] < 0.78 * count[1] && count[3] < 0.73 * count[1]);
        CHECK(seconds[3] < seconds[2] && seconds[2] < seconds[1]);
    }
    ml_arena_free(arena);
}

/* Microbatches are as few as even shares allow, also where each has a row for each rank of ep. */
TEST(data, a_placement_gives_groups_as_many_rows) {
    static const struct {
        int64_t ranks, windows, microbatches;
        int batch;
    } cases[] = {{2, 16, 4, 1}, {4, 16, 4, 1}, {8, 8, 4, 1}, {2, 32, 4, 2}, {8, 16, 4, 2}};
    ml_arena *arena = ml_arena_new();
    for (int c = 0; c < 5; c++) {
        const int64_t most = 64, longest = 80, columns = 2 * longest, windows = cases[c].windows;
        ml_placement_costs costs = costs_of(cases[c].ranks, most, 2);
        costs.most = longest, costs.batch = cases[c].batch;
        add_several(&costs, most, 4);
        int32_t *documents = ML_NEW_ARRAY(arena, int32_t, windows * columns);
        ml_step_placement p;
        ml_placement_make(arena, &costs, documents, windows, columns, &p);
        check_complete(&costs, &p, arena);
        CHECK_EQ_INT(p.microbatches.count, cases[c].microbatches);
        CHECK(imbalance(&costs, &p) < 1e-9);
    }
    ml_arena_free(arena);
}

/* Sequences that each need two ranks share a row of these where it holds them. */
TEST(data, a_placement_puts_long_sequences_on_one_row) {
    ml_placement_costs costs = costs_of(2, 64, 2);
    int32_t documents[160];
    ml_arena *arena = ml_arena_new();
    ml_step_placement p;
    costs.group[0].count = 6; /* rows of one rank have 48 tokens */
    for (int i = 0; i < 160; i++) documents[i] = i < 80 ? 1 : 2;
    ml_placement_make(arena, &costs, documents, 1, 160, &p);
    check_complete(&costs, &p, arena);
    CHECK_EQ_INT(p.microbatches.count, 1);
    CHECK_EQ_INT(p.microbatches.at[0].group, 1);
    CHECK_EQ_INT(p.rows.at[p.microbatches.at[0].first_row].sequences, 2);
    ml_arena_free(arena);
}

/* The size of the group that computes the first of these sequences, whose lengths are given; `more`
 * of one token follow. Rows have up to 80 tokens a rank. */
static int64_t group_of_first(int64_t ranks, const int *lengths, int count, int more) {
    ml_arena *arena = ml_arena_new();
    ml_placement_costs costs =
        ranks % 2 ? costs_of_groups(ranks, 64, 2, ranks) : costs_of(ranks, 64, 3);
    int32_t documents[1024];
    int64_t tokens = 0, found = 0;

    ml_step_placement p;
    for (int i = 0; i < count; i++)
        for (int k = 0; k < lengths[i]; k++) documents[tokens++] = i;
    for (int i = 0; i < more; i++) documents[tokens++] = count + i;
    ml_placement_make(arena, &costs, documents, 1, tokens, &p);
    check_complete(&costs, &p, arena);
    for (uint32_t m = 0; m < p.microbatches.count; m++) {
        const ml_microbatch *b = &p.microbatches.at[m];
        const ml_placed_row *row = &p.rows.at[b->first_row];
        for (uint32_t i = row->first; i < row->first + row->sequences; i++)
            if (p.sequence[i].start == 0) found = costs.group[b->group].ranks;
    }
    ml_arena_free(arena);
    return found;
}

/* No sequence is split that a rank's row holds, while the ranks are even; one that would take a
 * rank longer than an even share of the step is, whether whole plans are compared or not. */
TEST(data, a_placement_splits_sequences_no_more_than_needed) {
    static const int alike[] = {80, 80, 80, 80}, one[] = {80, 10, 10, 10};
    for (int ranks = 3; ranks <= 9; ranks += 2)
        for (int length = 48; length <= 80; length += 8) {
            int equal[9];
            for (int i = 0; i < ranks; i++) equal[i] = length;
            EXPECT(group_of_first(ranks, equal, ranks, 0) == 1, "%d sequences of %d are split",
                   ranks, length);
        }
    CHECK_EQ_INT(group_of_first(4, alike, 4, 0), 1);
    CHECK_EQ_INT(group_of_first(4, one, 4, 0), 4);
    CHECK_EQ_INT(group_of_first(64, one, 1, 600), 4);
}

/* Many short sequences are placed in about the time that reading them takes. */
TEST(data, a_placement_of_many_sequences_is_quick) {
    enum { RANKS = 8, MOST = 8192, ROWS = 128, LENGTH = 50 };
    ml_arena *arena = ml_arena_new();
    ml_placement_costs costs = costs_of(RANKS, MOST, 1);
    int32_t *documents = ML_NEW_ARRAY(arena, int32_t, ROWS * MOST);
    ml_step_placement p;
    for (int64_t i = 0, left = 0, number = 0; i < ROWS * MOST; i++, left--) {
        if (left == 0) left = LENGTH + number++ % LENGTH;
        documents[i] = (int32_t)number;
    }
    const clock_t begin = clock();
    ml_placement_make(arena, &costs, documents, ROWS, MOST, &p);
    const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    check_complete(&costs, &p, arena);
    EXPECT(seconds < 1, "%g s of processor time for %u sequences", seconds, p.sequences);
    ml_arena_free(arena);
}

/* A microbatch with a row for each of four ranks takes as long as one row. */
TEST(data, a_placement_shares_the_rows_of_a_microbatch) {
    ml_arena *arena = ml_arena_new();
    ml_placement_costs costs = costs_of(4, 64, 3);
    int32_t documents[680];
    ml_step_placement p;
    costs.batch = 4;
    for (int i = 0; i < 680; i++) documents[i] = i < 80 ? 0 : i;
    ml_placement_make(arena, &costs, documents, 1, 680, &p);
    check_complete(&costs, &p, arena);
    CHECK(imbalance(&costs, &p) < 0.05);
    ml_arena_free(arena);
}

/* The ranks of a group have about as many query-key pairs, though a sequence is shorter than its
 * row: short ones come before it. */
TEST(data, a_placement_evens_out_the_ranks_of_a_group) {
    static const int lengths[] = {128, 12, 10, 8};
    ml_placement_costs costs = costs_of(2, 64, 2);
    int32_t documents[158];
    double pairs = 0;
    ml_arena *arena = ml_arena_new();
    ml_step_placement p;
    for (int i = 0, at = 0; i < 4; i++) {
        pairs += 0.5 * lengths[i] * lengths[i];
        for (int k = 0; k < lengths[i]; k++) documents[at++] = i;
    }
    ml_placement_make(arena, &costs, documents, 1, 158, &p);
    check_complete(&costs, &p, arena);
    CHECK_EQ_INT(p.microbatches.count, 1);
    const ml_microbatch *m = &p.microbatches.at[0];
    const ml_row_cost *row = &costs.group[1].row[m->row];
    const double whole = (double)(row->tokens * row->tokens);
    const double most = (1 - (row->seconds - m->seconds) / row->attention) * whole;
    EXPECT(most < 1.1 * pairs / 2, "%.0f pairs on a rank, %.0f of both", most, pairs);
    ml_arena_free(arena);
}

/* Every rank has one microbatch in each slot, whose times are nearly alike, and so are those of the
 * ranks over all slots. Three rows a microbatch as one. */
TEST(data, a_placement_in_slots_has_each_rank_once_in_each) {
    static const struct {
        int64_t ranks, longest;
        int sizes, batch, multiple;
        double most_uneven, most_filling;
    } cases[] = {{1, 2048, 1, 1, 1, 0, 0.1},
                 {2, 4096, 2, 1, 1, 0.04, 0.1},
                 {8, 8192, 3, 3, 4, 0.04, 0.12},
                 {64, 8192, 3, 1, 1, 0.03, 0.1}};
    ml_arena *arena = ml_arena_new();
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const int64_t most = 2048, microbatches = 8, ranks = cases[c].ranks;
        int64_t rows = ranks * cases[c].batch * microbatches * most / cases[c].longest, wrong = 0;
        ml_placement_costs costs = costs_of(ranks, most, cases[c].sizes);
        costs.batch = cases[c].batch, costs.slots = cases[c].multiple;
        double uneven = 0, filling = 0;
        for (unsigned seed = 1; seed <= 5; seed++) {
            ml_arena_reset(arena);
            int32_t *documents = draw_documents(arena, seed, rows, cases[c].longest);
            ml_step_placement p;
            ml_placement_make(arena, &costs, documents, rows, cases[c].longest, &p);
            check_complete(&costs, &p, arena);
            int64_t at = 0; /* of the ranks of all slots, one after another */
            for (uint32_t i = 0; i < p.microbatches.count; i++) {
                const ml_microbatch *m = &p.microbatches.at[i];
                wrong += m->slot * ranks + m->rank != at;
                at += costs.group[m->group].ranks;
            }
            wrong += at != p.slots * ranks || p.slots % costs.slots != 0;
            uneven += imbalance(&costs, &p) / 5;
            filling += (1 - (double)p.tokens / (double)p.computed) / 5;
        }
        CHECK_EQ_INT(wrong, 0);
        CHECK(uneven <= cases[c].most_uneven);
        CHECK(filling <= cases[c].most_filling);
    }
    ml_arena_free(arena);
}

/* All ranks run each microbatch, which has a row for each of its groups. */
TEST(data, a_placement_together_has_rows_for_all_groups) {
    const int64_t most = 2048, ranks = 8, rows = 16;
    ml_placement_costs costs = costs_of(ranks, most, 3);
    costs.together = true, costs.slots = 4;
    ml_arena *arena = ml_arena_new();
    ml_step_placement p;
    ml_placement_make(arena, &costs, draw_documents(arena, 3, rows, 8192), rows, 8192, &p);
    check_complete(&costs, &p, arena);
    CHECK_EQ_INT(p.slots % 4, 0);
    CHECK_EQ_INT(p.slots, p.microbatches.count);
    CHECK(imbalance(&costs, &p) < 1e-9);
    int64_t computed = 0;
    for (uint32_t i = 0; i < p.microbatches.count; i++) {
        const ml_microbatch *m = &p.microbatches.at[i];
        CHECK_EQ_INT(ml_placement_rows(&costs, m->group, m->row),
                     ranks / costs.group[m->group].ranks);
        computed += ranks * costs.group[m->group].row[m->row].tokens;
    }
    CHECK_EQ_INT(computed, p.computed);
    CHECK((double)p.computed < 1.2 * (double)p.tokens);
    ml_arena_free(arena);
}

/* Ranks without sequences begin their sums, too; a row is filled up with what no loss counts. */
TEST(data, a_placement_fills_rows_up) {
    ml_placement_costs costs = costs_of(4, 64, 1);
    int32_t documents[16] = {5, 5, 5, 5, 5, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7}, tokens[16],
            targets[16], positions[16];
    int32_t out[4][40];
    ml_arena *arena = ml_arena_new();
    ml_step_placement p;
    for (int i = 0; i < 16; i++)
        tokens[i] = i, targets[i] = i + 1, positions[i] = i < 5 ? i : i - 5;
    ml_placement_make(arena, &costs, documents, 1, 16, &p);
    CHECK_EQ_INT(p.microbatches.count, 4);
    int64_t sequences = 0;
    for (uint32_t i = 0; i < 4; i++) sequences += p.rows.at[i].sequences;
    CHECK_EQ_INT(sequences, 2);
    const ml_microbatch *m = p.microbatches.at;
    const ml_placed_row *row = p.rows.at;
    while (row[m->first_row].sequences == 0 || p.sequence[row[m->first_row].first].length != 11)
        m++;
    const ml_token_rows from = {tokens, targets, documents, positions, 16};
    ml_placement_fill(&p, m, &from, 1, &(ml_token_rows){out[0], out[1], out[2], out[3], 40});
    for (int i = 0; i < 11; i++)
        CHECK(out[0][i] == 5 + i && out[1][i] == 6 + i && out[2][i] == 0 && out[3][i] == i);
    for (int i = 11; i < 40; i++) {
        CHECK(out[1][i] == -1 && out[2][i] < 0 && out[3][i] >= 0);
        CHECK(out[3][i] < 16); /* as many positions as a window has */
        CHECK((out[3][i] == 0) == (out[2][i] != out[2][i - 1]));
    }
    ml_arena_free(arena);
}
