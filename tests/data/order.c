/* The order of samples: permutations and blends. */
#include <math.h>
#include <string.h>

#include "runtime/data/order.h"
#include "tests/test.h"

TEST(data, a_permutation_has_each_number_once) {
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 64, 65, 1000, 4097};
    static unsigned char seen[4097];
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int64_t n = sizes[s], wrong = 0, fixed = 0;
        memset(seen, 0, sizeof seen);
        for (int64_t i = 0; i < n; i++) {
            int64_t at = order_permute(77, n, i);
            wrong += at < 0 || at >= n || seen[at]++;
            fixed += at == i;
        }
        CHECK_EQ_INT(wrong, 0);
        CHECK(n < 64 || fixed < 12);
    }
    const int64_t large = (int64_t)1 << 50;
    CHECK(order_permute(1, large, 0) != order_permute(2, large, 0));
    CHECK(order_permute(1, large, large - 1) < large);
}

/* Pairs of neighbours are as far from each other as those of random numbers. */
TEST(data, a_permutation_is_scattered) {
    enum { N = 10000 };
    double sum = 0;
    for (int64_t i = 0; i + 1 < N; i++)
        sum += fabs((double)(order_permute(5, N, i) - order_permute(5, N, i + 1)));
    CHECK_NEAR(sum / (N - 1), N / 3.0, 0.03);
}

/* The largest distance of a source from its weight over all prefixes; counts each sample once. */
static double worst(const double *weights, int sources, int64_t samples) {
    ml_arena *arena = ml_arena_new();
    data_blend blend;
    int64_t taken[16] = {0}, nth, wrong = 0;
    double sum = 0, distance = 0;
    blend_make(arena, weights, sources, &blend);
    for (int i = 0; i < sources; i++) sum += weights[i];
    for (int64_t n = 0; n < samples; n++) {
        int source = blend_find(&blend, n, &nth);
        wrong += nth != taken[source]++;
        for (int i = 0; i < sources; i++)
            distance = fmax(distance, fabs((double)taken[i] - (double)(n + 1) * weights[i] / sum));
    }
    CHECK_EQ_INT(wrong, 0);
    ml_arena_free(arena);
    return distance;
}

TEST(data, every_prefix_of_a_blend_has_its_weights) {
    static const double weights[][6] = {{0.7, 0.3},
                                        {1, 1, 1},
                                        {90, 1, 1, 1, 1, 1},
                                        {0.5, 0.25, 0.125, 0.125},
                                        {0.45, 0.5, 0.05, 3, 2, 0.01},
                                        {1},
                                        {3.14159, 2.71828}};
    static const int counts[] = {2, 3, 6, 4, 6, 1, 2};
    uint64_t state = 3;
    for (int i = 0; i < 7; i++) CHECK(worst(weights[i], counts[i], 20000) < 1);
    for (int i = 0; i < 20; i++) {
        double drawn[12];
        int sources = (int)test_range(&state, 2, 12);
        for (int k = 0; k < sources; k++) drawn[k] = (double)test_range(&state, 1, 999) / 1000;
        CHECK(worst(drawn, sources, 4000) < 1);
    }
    const double odd[3] = {1 / 3.0, sqrt(2), 1e-9}; /* as millionths */
    CHECK(worst(odd, 3, 4000) < 1.01);
}

/* As many sources as there may be, with weights of many digits. */
TEST(data, a_blend_of_all_sources_has_their_counts) {
    static double weights[BLEND_MOST];
    static int64_t taken[BLEND_MOST];
    uint64_t state = 11;
    int64_t wrong = 0;
    ml_arena *arena = ml_arena_new();
    data_blend blend;
    for (int i = 0; i < BLEND_MOST; i++) weights[i] = (double)test_range(&state, 1000, 99999);
    memset(taken, 0, sizeof taken);
    blend_make(arena, weights, BLEND_MOST, &blend);
    for (int64_t n = 0; n < blend.period; n++)
        wrong += blend.nth[n] != (uint32_t)taken[blend.source[n]]++;
    for (int i = 0; i < BLEND_MOST; i++) wrong += taken[i] != blend.count[i];
    CHECK_EQ_INT(wrong, 0);
    CHECK(blend.period > 900000);
    ml_arena_free(arena);
}
