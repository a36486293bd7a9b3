/* What library calls are cut into. */
#include <math.h>

#include "codegen/lower/library.h"
#include "tests/test.h"

/* The slices of cuDNN's gradient: the fewest whose dS fits 256 MiB, where these are too many 512
 * MiB or 1 GiB; 2 GiB for a smallest one. */
static bool slices_by_search(const ml_attention_step *a, int64_t *batch, int64_t *heads) {
    const double gib = 1 << 30;
    const double each = 2.0 * (double)(a->heads / a->kv_heads * a->seq * a->kv_seq);
    const int64_t samples = a->batch[0];
    for (double most = gib / 4; most <= gib; most *= 2) {
        *batch = *heads = 1;
        while (*batch < samples &&
               (samples % *batch || each * (double)(a->kv_heads * (samples / *batch)) > most))
            ++*batch;
        while (each * (double)a->kv_heads > most && *heads < a->kv_heads &&
               (a->kv_heads % *heads || each * (double)(a->kv_heads / *heads) > most))
            ++*heads;
        if (*batch * *heads <= 256) return each <= 2 * gib;
    }
    return false;
}

TEST(lower, slices_of_attention) {
    uint64_t random = 5;
    int possible = 0;
    for (int i = 0; i < 500; i++) {
        ml_attention_step a = {.kv_heads = test_range(&random, 1, 24)};
        a.batch[0] = test_range(&random, 1, 600), a.batch[1] = a.batch[2] = 1;
        a.heads = a.kv_heads * test_range(&random, 1, 3);
        a.seq = (int64_t)1 << test_range(&random, 6, 15);
        a.kv_seq = a.seq + test_range(&random, 0, 5);
        int64_t batch, heads, wanted_batch, wanted_heads;
        bool can = ml_attention_slices(&a, &batch, &heads);
        CHECK(can == slices_by_search(&a, &wanted_batch, &wanted_heads));
        if (!can) continue;
        possible++;
        CHECK_EQ_INT(batch, wanted_batch);
        CHECK_EQ_INT(heads, wanted_heads);
    }
    CHECK(possible > 100 && possible < 400);
}

/* Sizes whose products are beyond int64, and prime ones. */
TEST(lower, slices_of_long_attention) {
    int64_t batch, heads;
    ml_attention_step a = {.batch = {(int64_t)1 << 40, 1, 1}, .heads = 4, .kv_heads = 2};
    a.seq = a.kv_seq = (int64_t)1 << 31;
    CHECK(!ml_attention_slices(&a, &batch, &heads));
    a.seq = a.kv_seq = 16;
    CHECK(!ml_attention_slices(&a, &batch, &heads));
    a.batch[0] = 2305843009213693951; /* 2^61 - 1, a prime */
    a.heads = a.kv_heads = 1;
    a.seq = a.kv_seq = 1;
    CHECK(!ml_attention_slices(&a, &batch, &heads));
}
