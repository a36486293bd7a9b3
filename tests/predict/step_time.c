/* The model of a step's time: what follows from shapes, and figures that were measured. */
#include "runtime/predict/predict.h"

#include <math.h>

#include "tests/test.h"

/* A schedule of one product. */
typedef struct {
    ml_gemm gemm;
    ml_step step;
    ml_schedule s;
} one_product;

static double product(const ml_rates *rates, int64_t m, int64_t n, int64_t k, ml_dtype dtype) {
    one_product p = {.gemm = {.m = m,
                              .n = n,
                              .k = k,
                              .batch = {1, 1, 1},
                              .a_dtype = dtype,
                              .b_dtype = dtype,
                              .c_dtype = dtype}};
    p.step = (ml_step){.kind = ML_STEP_GEMM, .gemm = &p.gemm};
    p.step.bytes = (m * k + k * n + m * n) * 2;
    p.step.flops = 2.0 * (double)m * (double)n * (double)k;
    p.s.steps.at = &p.step;
    p.s.steps.count = 1;
    return predict_step(&(predict_basis){.rates = rates}, &p.s, NULL, 0, NULL);
}

static double rate(const ml_rates *rates, int64_t m, int64_t n, int64_t k) {
    return 2.0 * (double)m * (double)n * (double)k / product(rates, m, n, k, ML_BF16);
}

static const char *const GPUS[] = {"h200", "h100", "a100", "b200"};
enum { GPU_COUNT = sizeof GPUS / sizeof *GPUS };

TEST(predict, more_work_takes_no_less_time) {
    for (int i = 0; i < GPU_COUNT; i++) {
        const ml_rates *r = ml_rates_of(GPUS[i]);
        double before[3] = {0, 0, 0};
        CHECK(r != NULL);
        for (int64_t size = 16; size <= 16384; size += size < 512 ? 16 : 384) {
            double now[3] = {product(r, size, 2048, 2048, ML_BF16),
                             product(r, 2048, size, 2048, ML_BF16),
                             product(r, 2048, 2048, size, ML_BF16)};
            /* A sum over more k may be cut into parts that fill waves better. */
            for (int d = 0; d < 3; d++) CHECK(now[d] >= before[d] * (d == 2 ? 0.6 : 0.999));
            for (int d = 0; d < 3; d++) before[d] = now[d];
        }
    }
}

TEST(predict, small_products_reach_less) {
    const ml_rates *r = ml_rates_of("h200");
    CHECK(rate(r, 8192, 8192, 8192) <= r->wave_flops);
    CHECK(rate(r, 128, 256, 8192) < r->wave_flops / 4);     /* few tiles; k in parts */
    CHECK(rate(r, 16, 8192, 8192) < r->product_flops / 10); /* waits for memory */
    CHECK(rate(r, 64, 64, 64) < r->product_flops / 100);    /* a launch */
    CHECK(product(r, 4096, 4096, 4096, ML_F32) > 5 * product(r, 4096, 4096, 4096, ML_BF16));
    /* 133 tiles take two waves, 132 one. */
    double one = product(r, 128 * 132, 256, 8192, ML_BF16);
    CHECK(product(r, 128 * 133, 256, 8192, ML_BF16) > 1.2 * one);
}

/* All products of a step in ms, forward, gradients of inputs and of weights, by cuBLASLt's fastest
 * algorithms on one H200 in November 2026. It was faster than the mean of the cards whose rate
 * `rates.c` has, by 715 to 695. */
TEST(predict, products_of_five_models) {
    const double card = 715.0 / 695;
    static const struct {
        int64_t layers, embed, heads, kv_heads, ffn, vocab, tokens;
        bool gated;
        double ms;
    } models[] = {
        {12, 768, 12, 12, 3072, 50304, 65536, false, 69.5},
        {24, 2048, 16, 16, 8192, 50304, 16384, false, 182.4},
        {48, 1600, 25, 25, 6400, 50304, 16384, false, 221.1},
        {16, 2048, 16, 8, 8192, 128256, 16384, true, 178.3},
        {28, 3072, 24, 8, 8192, 128256, 8192, true, 230.1},
    };
    const ml_rates *r = ml_rates_of("h200");
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        int64_t d = models[i].embed, dim = d / models[i].heads, m = models[i].tokens;
        int64_t shapes[5][2] = {{(models[i].heads + 2 * models[i].kv_heads) * dim, d},
                                {d, d},
                                {models[i].ffn * (models[i].gated ? 2 : 1), d},
                                {d, models[i].ffn},
                                {models[i].vocab, d}};
        double seconds = 0;
        for (int s = 0; s < 5; s++) {
            int64_t n = shapes[s][0], k = shapes[s][1];
            double one = product(r, m, n, k, ML_BF16) + product(r, m, k, n, ML_BF16) +
                         product(r, n, k, m, ML_BF16);
            seconds += one * (double)(s < 4 ? models[i].layers : 1);
        }
        double ratio = 1e3 * seconds / (models[i].ms * card);
        if (fabs(ratio - 1) > 0.03) test_fail("model %zu: %.3f of the measured time", i, ratio);
        test_checked();
    }
}

/* Bus bandwidth of eight H200s of a host, in 1e9 bytes a second: 64 MiB and 1 GiB. */
TEST(predict, collectives_of_eight) {
    static const struct {
        ml_collective kind;
        int64_t bytes;
        double bus;
    } known[] = {
        {ML_COLLECTIVE_ALL_REDUCE, 1 << 26, 251}, {ML_COLLECTIVE_ALL_REDUCE, 1 << 30, 346},
        {ML_COLLECTIVE_ALL_GATHER, 1 << 26, 180}, {ML_COLLECTIVE_ALL_GATHER, 1 << 30, 324},
        {ML_COLLECTIVE_ALL_TO_ALL, 1 << 26, 212}, {ML_COLLECTIVE_ALL_TO_ALL, 1 << 30, 312}};
    const ml_rates *r = ml_rates_of("h200");
    ml_layout layout = {.count = 1};
    ml_target target = {.host_ranks = 8};
    layout.axis[0].size = 8;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        double part = known[i].kind == ML_COLLECTIVE_ALL_GATHER ? 8 : 1;
        double sent = ml_collective_sent(known[i].kind, (double)known[i].bytes / part, 8);
        double seconds = predict_collective(r, &target, &layout, 0, 8, sent, true);
        double ratio = sent / known[i].bus / 1e9 / seconds;
        if (ratio < 0.75 || ratio > 1.33)
            test_fail("case %zu: %.2f times the measured bandwidth", i, 1 / ratio);
        test_checked();
    }
}

TEST(predict, networks_are_slower_than_links) {
    const ml_rates *r = ml_rates_of("h200");
    ml_layout layout = {.count = 2};
    ml_target target = {.host_ranks = 8};
    layout.axis[0].size = 16;
    layout.axis[1].size = 8;
    double bytes = 1e9;
    double inside = predict_collective(r, &target, &layout, 1, 8, bytes, true);
    double outside = predict_collective(r, &target, &layout, 0, 16, bytes, true);
    CHECK(outside > 5 * inside);
    layout.axis[1].size = 2; /* four neighbours of the outer axis are of one host */
    double mixed = predict_collective(r, &target, &layout, 0, 16, bytes, true);
    CHECK(mixed < outside && mixed > inside);
}

static void near(double found, double expected) {
    if (fabs(found / expected - 1) > 1e-9) test_fail("%g in place of %g", found, expected);
    test_checked();
}

static double cpu_sum(const ml_rates *r, int ranks, double bytes) {
    ml_layout layout = {.count = 1};
    ml_target target = {.kind = ML_TARGET_C};
    layout.axis[0].size = ranks;
    double sent = ml_collective_sent(ML_COLLECTIVE_ALL_REDUCE, bytes, ranks);
    return predict_collective(r, &target, &layout, 0, ranks, sent, true);
}

/* All-reduces of CPU ranks take what they were measured to take. */
TEST(predict, cpu_ranks_by_measured_sums) {
    const double mega = 1 << 20;
    ml_link_times times = {
        .few_of_2 = 7e-6, .few_of_4 = 18e-6, .many = 207e-6, .bytes = mega, .ranks = 2};
    ml_rates r = {.host_ranks = 1 << 20};
    ml_rates_by_links(&r, &times);
    near(cpu_sum(&r, 2, 0), 7e-6);
    near(cpu_sum(&r, 4, 0), 18e-6);
    near(cpu_sum(&r, 2, mega), 207e-6);
    near(cpu_sum(&r, 4, mega), 18e-6 + 1.5 * 200e-6);
    times.ranks = 8, times.many = 400e-6; /* they share the memory */
    ml_rates_by_links(&r, &times);
    near(cpu_sum(&r, 8, mega), 400e-6);
    near(cpu_sum(&r, 8, 0), 7e-6 + 6 * 5.5e-6);
    times.few_of_4 = 5e-6; /* by chance */
    ml_rates_by_links(&r, &times);
    near(cpu_sum(&r, 2, 0), 7e-6);
    near(cpu_sum(&r, 4, 0), 7e-6);
}

/* Ranks wait as they were measured to wait, whatever part of it grows with the work. */
TEST(predict, cpu_ranks_by_measured_waits) {
    ml_link_times links = {
        .few_of_2 = 7e-6, .few_of_4 = 18e-6, .many = 207e-6, .bytes = 1 << 20, .ranks = 2};
    ml_wait_times waits = {80e-6, 260e-6, 1e-4, 1e-3, 4, .cores = 4};
    ml_rates r = {.host_ranks = 1 << 20};
    ml_rates_by_links(&r, &links);
    ml_rates_by_waits(&r, &waits);
    near(cpu_sum(&r, 4, 0) + 1e-4 * r.rank_spread * 2, 80e-6);
    near(cpu_sum(&r, 4, 0) + 1e-3 * r.rank_spread * 2, 260e-6);
    waits.cores = 3; /* ranks wait for a core, which is counted where they share cores */
    ml_rates_by_waits(&r, &waits);
    near(cpu_sum(&r, 4, 0), 18e-6);
    CHECK(r.rank_spread == 0);
    waits.cores = 4, waits.after_long = 70e-6; /* by chance */
    ml_rates_by_waits(&r, &waits);
    near(cpu_sum(&r, 4, 0), 80e-6);
    CHECK(r.rank_spread == 0);
    waits.after_short = 5e-6;
    ml_rates_by_waits(&r, &waits);
    near(cpu_sum(&r, 4, 0), 18e-6);
}

/* Ranks divide the cores; their links only where they have no core each. */
TEST(predict, cpu_ranks_share_cores) {
    const ml_rates whole = {.wide_flops = 1e12, .memory_bytes = 8e10, .link_bytes = 6e9};
    ml_rates r = whole;
    ml_rates_share(&r, 4, 16);
    near(r.wide_flops, whole.wide_flops / 4);
    near(r.memory_bytes, whole.memory_bytes / 4);
    near(r.link_bytes, whole.link_bytes);
    r = whole;
    ml_rates_share(&r, 4, 2);
    near(r.link_bytes, whole.link_bytes / 2);
    r = whole;
    ml_rates_share(&r, 2, 1); /* measured so */
    near(r.link_bytes, whole.link_bytes);
}

/* Products by what a table says of them. */
typedef struct {
    predict_products base;
    double seconds;
    int64_t asked, rows; /* how often; of the last product */
} known_products;

static double known_seconds(predict_products *products, const ml_step *step, int64_t rows) {
    known_products *known = (known_products *)products;
    CHECK(step->gemm != NULL || step->ragged != NULL);
    known->asked++, known->rows = rows;
    return known->seconds;
}

static double timed_step(ml_step *step, const ml_layout *layout, predict_products *products,
                         predict_kind *kind) {
    const ml_rates r = {
        .wide_flops = 1e11, .grouped_flops = 1e11, .memory_bytes = 1e10, .launch_seconds = 1e-6};
    ml_schedule s = {.steps = {.at = step, .count = 1}};
    const predict_basis by = {.rates = &r, .products = products};
    return predict_step(&by, &s, layout, 0, kind);
}

/* As it was timed, with its start; by rates where it was not, and no sooner than its bytes pass. */
TEST(predict, products_that_were_timed) {
    ml_gemm gemm = {.m = 512, .n = 256, .k = 256, .batch = {1, 1, 1}, .a_dtype = ML_F32};
    ml_step step = {.kind = ML_STEP_GEMM, .gemm = &gemm, .bytes = 1 << 20, .flops = 1 << 26};
    known_products known = {.base.seconds = known_seconds, .seconds = 9e-4};
    predict_kind kind = PREDICT_KINDS;
    double rated = timed_step(&step, NULL, NULL, NULL);
    near(rated, 1e-6 + (1 << 26) / 1e11);
    near(timed_step(&step, NULL, &known.base, &kind), 9e-4);
    CHECK(kind == PREDICT_PRODUCTS && known.asked == 1);
    known.seconds = 1e-5;
    near(timed_step(&step, NULL, &known.base, &kind), (1 << 20) / 1e10);
    CHECK(kind == PREDICT_MEMORY);
    known.seconds = 0;
    near(timed_step(&step, NULL, &known.base, &kind), rated);
    step = (ml_step){.kind = ML_STEP_KERNEL, .bytes = 1 << 20, .flops = 1 << 26};
    known.asked = 0;
    timed_step(&step, NULL, &known.base, NULL);
    CHECK(known.asked == 0);
}

/* Of groups as many rows as are there, not those for which there is room. */
TEST(predict, products_by_groups_that_were_timed) {
    ml_ragged ragged = {.outer = true, .batch = 1, .rows = 1536, .groups = 4, .k = 192, .n = 384};
    ml_step step = {.kind = ML_STEP_RAGGED, .ragged = &ragged, .bytes = 1 << 20, .flops = 1e8};
    known_products known = {.base.seconds = known_seconds, .seconds = 3e-3};
    ml_layout layout = {.count = 1, .exchange = 1.5};
    near(timed_step(&step, NULL, &known.base, NULL), 3e-3);
    CHECK(known.rows == 1536);
    near(timed_step(&step, &layout, &known.base, NULL), 3e-3);
    CHECK(known.rows == 1024);
}
