/* The query-key pairs of sequences that share a row, against counting them one by one. */
#include "runtime/base/sequences.h"

#include <math.h>

#include "tests/test.h"

enum { TOKENS = 96 };

/* The rank that computes a query: of blocks r and 2 n - 1 - r. */
static int64_t rank_of(int64_t query, int64_t ranks) {
    const int64_t block = query / (TOKENS / (2 * ranks));
    return block < ranks ? block : 2 * ranks - 1 - block;
}

static bool sees(const int32_t *documents, int64_t query, int64_t key, ml_pair_mask mask) {
    if (documents[query] != documents[key]) return false;
    if (mask.causal && key > query) return false;
    return mask.window == 0 || query - key < mask.window;
}

static double counted(const int32_t *documents, int64_t ranks, ml_pair_mask mask) {
    double of_rank[8] = {0}, most = 0;
    for (int64_t q = 0; q < TOKENS; q++)
        for (int64_t k = 0; k < TOKENS; k++)
            of_rank[ranks == 1 ? 0 : rank_of(q, ranks)] += sees(documents, q, k, mask);
    for (int64_t r = 0; r < ranks; r++) most = of_rank[r] > most ? of_rank[r] : most;
    return most;
}

TEST(base, pairs_of_sequences) {
    static const int32_t one[TOKENS];
    static const ml_pair_mask masks[] = {{true, 0}, {true, 7}, {true, 200}, {false, 0}};
    ml_arena *arena = ml_arena_new();
    uint32_t seed = 1;
    for (int trial = 0; trial < 200; trial++) {
        int32_t documents[TOKENS];
        for (int i = 0, number = 0; i < TOKENS; i++) {
            seed = seed * 1664525u + 1013904223u;
            documents[i] = number += i > 0 && (seed >> 16) % (1 + (uint32_t)trial / 4) == 0;
        }
        ml_sequence_rows rows;
        ml_sequence_rows_read(arena, documents, 1, TOKENS, &rows);
        CHECK_EQ_INT(rows.sequence.count, documents[TOKENS - 1] + 1);
        for (int64_t ranks = 1; ranks <= 8; ranks *= 2)
            for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
                double share =
                    counted(documents, ranks, masks[i]) * (double)ranks / counted(one, 1, masks[i]);
                for (int again = 0; again < 2; again++)
                    CHECK(fabs(ml_sequence_rows_share(&rows, ranks, masks[i]) - share) < 1e-9);
            }
    }
    ml_arena_free(arena);
}

/* Of several rows the mean; of a row that is one sequence all, on any number of ranks. */
TEST(base, shares_of_rows) {
    const int32_t documents[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1};
    ml_arena *arena = ml_arena_new();
    ml_sequence_rows rows;
    ml_sequence_rows_read(arena, documents, 2, 8, &rows);
    CHECK(fabs(ml_sequence_rows_share(&rows, 1, (ml_pair_mask){false, 0}) - 0.75) < 1e-12);
    CHECK(fabs(ml_sequence_rows_share(&rows, 1, (ml_pair_mask){true, 0}) - 28.0 / 36) < 1e-12);
    const ml_sequence whole = {0, 1 << 20};
    for (int64_t ranks = 1; ranks <= 64; ranks *= 2)
        CHECK(fabs(ml_sequences_share(&whole, 1, 1 << 20, ranks, (ml_pair_mask){true, 0}) - 1) <
              1e-6);
    ml_arena_free(arena);
}
