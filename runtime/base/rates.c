#include "runtime/base/rates.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* An H200, measured in November 2026 (tests/README.md) but for what is said to be assumed. */
static const ml_rates h200 = {
    /* All products of a step of five models, the fastest of 16 algorithms: 686e12 to 707e12 with
     * what their results cost, on a card that was 3 % faster than the mean of eight: in as many
     * runs of gpt-1.3b one card reached 63,545 to 69,114 tokens/s, 66,700 on average. */
    .product_flops = 695e12,
    .wave_flops = 820e12,    /* 8192 x 8192 x 8192, which has full waves and lasts 1.4 ms: 800e12 */
    .result_share = 0.4,     /* 65536 x 3072 x 768: 602e12, 65536 x 768 x 3072: 687e12 */
    .units = 132,            /* data sheet */
    .scaled_speed = 1.75,    /* an H100's, all products of a step of three models: 1245e12 */
    .wide_flops = 50e12,     /* data sheet: 67e12 without tensor cores; the share is assumed */
    .grouped_flops = 620e12, /* assumed: a tenth below products; PyTorch's reach 760e12 alone */
    /* In steps of llama-1b of 4,096 to 131,072 tokens, heads of 128. Alone and for a moment they
     * reach 1.17 times as much (625e12 and 475e12), before power limits the clock. */
    .attention_flops = 535e12,
    .attention_grad_flops = 405e12,
    .attention_pairs = 1.41e12,      /* heads of 64, 1,024 tokens: 320e12 FLOP/s */
    .attention_grad_pairs = 0.65e12, /* likewise: 296e12 FLOP/s */
    .attention_tile = 128,
    .score_share = 0.8, /* a soft cap 0.78, ALiBi 0.95 */
    .copy_bytes = 4.14e12,
    .memory_bytes = 3.9e12,     /* 0.82 to 1.08 of a copy's 4.14e12, by kind of kernel */
    .simple_flops = 30e12,      /* assumed: half of the data sheet's 67e12 */
    .scan_share = 0.25,         /* 0.2 (Gated DeltaNet) to 0.3 (scalar decay) */
    .position_seconds = 5.6e-6, /* LSTM, 1,024 wide, batch 64: 4.4 and, of gradients, 6.8 us */
    .launch_seconds = 1.5e-6,   /* assumed: between two kernels of a graph */
    .few_rows_flops = 27e12,    /* llama-3b, 8 sequences: 2.98 ms a step */
    .few_rows_widened = 1.8e12, /* llama-3b, one sequence, weights in int8: 2.72 ms */
    .few_rows_seconds = 1e-6,   /* llama-3b, one sequence: 2.49 ms */
    .few_rows_share = 0.82,     /* llama-3b, 16 and 32 sequences: 3.03 and 3.45 ms */
    .cached_share = 0.55,       /* llama-3b, 128 sequences of 560 tokens: 6.87 ms */
    .cached_seconds = 6e-6,     /* llama-3b: 12.7 us a layer by events, 2.6 MB */
    .cached_flops = 200e12,     /* llama-3b, a prompt of 512 tokens: 8.0 ms */
    .link_bytes = 345e9,        /* 8 ranks, 1 GiB: 346e9 (sum), 324e9 (gathered) on the bus */
    .link_seconds = 20e-6,      /* assumed */
    .hop_seconds = 12e-6,       /* 8 ranks, 64 MiB: 251e9 (sum), 180e9 (gathered) */
    .network_bytes = 45e9,      /* assumed: nine tenths of a 400 Gbit/s card for each GPU */
    .host_bytes = 50e9,         /* assumed: PCIe 5, 16 lanes */
    .network_seconds = 40e-6,   /* assumed */
    .host_ranks = 8,            /* assumed */
    /* Assumed once for all layouts, of which tests/README.md has 20 that were measured. */
    .beside_share = 0.3,
    .beside_link = 0.6,
    .rank_spread = 0.01, /* cards differ by 2 to 3 % */
};

/* The same chip, clock and power limit as the H200, with slower memory: by its data sheet. Nothing
 * was measured here. */
static const ml_rates h100 = {
    .product_flops = 695e12,
    .wave_flops = 820e12,
    .result_share = 0.4,
    .units = 132, /* data sheet */
    .scaled_speed = 1.75,
    .wide_flops = 50e12,
    .grouped_flops = 620e12,
    .attention_flops = 535e12,
    .attention_grad_flops = 405e12,
    .attention_pairs = 1.41e12,
    .attention_grad_pairs = 0.65e12,
    .attention_tile = 128,
    .score_share = 0.8,
    .copy_bytes = 2.89e12, /* data sheet 3.35e12, times the H200's share of 0.86 */
    .memory_bytes = 2.72e12,
    .simple_flops = 30e12,
    .scan_share = 0.25,
    .position_seconds = 5.6e-6,
    .launch_seconds = 1.5e-6,
    .few_rows_flops = 27e12,
    .few_rows_widened = 1.8e12,
    .few_rows_seconds = 1e-6,
    .few_rows_share = 0.82,
    .cached_share = 0.55,
    .cached_seconds = 6e-6,
    .cached_flops = 200e12,
    .link_bytes = 345e9, /* NVLink 4, as the H200 */
    .link_seconds = 20e-6,
    .hop_seconds = 12e-6,
    .network_bytes = 45e9, /* assumed: a 400 Gbit/s card for each GPU */
    .host_bytes = 50e9,
    .network_seconds = 40e-6,
    .host_ranks = 8,
    .beside_share = 0.3,
    .beside_link = 0.6,
    .rank_spread = 0.01,
};

/* By the data sheet: 312e12 FLOP/s, 2.04e12 bytes/s (80 GB), NVLink 300e9. Shares of it, and all
 * else, are assumed. */
static const ml_rates a100 = {
    .product_flops = 250e12, /* 0.8 */
    .wave_flops = 270e12,
    .result_share = 0.4,
    .units = 108, /* data sheet */
    .wide_flops = 15e12,
    .grouped_flops = 200e12,
    /* Assumed: alone 200e12 and 160e12, in a step as much less as on an H200. */
    .attention_flops = 171e12,
    .attention_grad_flops = 136e12,
    .attention_pairs = 0.65e12,
    .attention_grad_pairs = 0.27e12,
    .attention_tile = 128,
    .score_share = 0.8,
    .copy_bytes = 1.76e12, /* the H200's share of 0.86 */
    .memory_bytes = 1.66e12,
    .simple_flops = 9e12,
    .scan_share = 0.25,
    .position_seconds = 5.6e-6,
    .launch_seconds = 2e-6,
    .few_rows_flops = 14e12,
    .few_rows_widened = 1e12,
    .few_rows_seconds = 1e-6,
    .few_rows_share = 0.82,
    .cached_share = 0.55,
    .cached_seconds = 6e-6,
    .cached_flops = 70e12,
    .link_bytes = 230e9, /* the H200's share of 0.77 */
    .link_seconds = 20e-6,
    .hop_seconds = 12e-6,
    .network_bytes = 22e9, /* a 200 Gbit/s card for each GPU */
    .host_bytes = 24e9,    /* assumed: PCIe 4 */
    .network_seconds = 40e-6,
    .host_ranks = 8,
    .beside_share = 0.3,
    .beside_link = 0.6,
    .rank_spread = 0.01,
};

/* By the data sheet: 2,250e12 FLOP/s, 8.0e12 bytes/s, NVLink 900e9, times the H200's shares. All
 * else is assumed. */
static const ml_rates b200 = {
    .product_flops = 1620e12,
    .wave_flops = 1860e12,
    .result_share = 0.4,
    .units = 148,         /* data sheet */
    .scaled_speed = 1.75, /* assumed: as the H100 */
    .wide_flops = 60e12,
    .grouped_flops = 1400e12,
    /* Assumed: alone 1300e12 and 1000e12, in a step as much less as on an H200. */
    .attention_flops = 1110e12,
    .attention_grad_flops = 853e12,
    .attention_pairs = 2e12, /* exponentials became little faster */
    .attention_grad_pairs = 1.2e12,
    .attention_tile = 128,
    .score_share = 0.8,
    .copy_bytes = 6.9e12,
    .memory_bytes = 6.5e12,
    .simple_flops = 37e12,
    .scan_share = 0.2,
    .position_seconds = 5.6e-6,
    .launch_seconds = 1.5e-6,
    .few_rows_flops = 28e12,
    .few_rows_widened = 2e12,
    .few_rows_seconds = 1e-6,
    .few_rows_share = 0.82,
    .cached_share = 0.55,
    .cached_seconds = 6e-6,
    .cached_flops = 400e12,
    .link_bytes = 690e9,
    .link_seconds = 20e-6,
    .hop_seconds = 12e-6,
    .network_bytes = 45e9,
    .host_bytes = 50e9,
    .network_seconds = 40e-6,
    .host_ranks = 8,
    .beside_share = 0.3,
    .beside_link = 0.6,
    .rank_spread = 0.01,
};

const ml_rates *ml_rates_of(const char *gpu) {
    static const struct {
        const char *gpu;
        const ml_rates *rates;
    } known[] = {{"h200", &h200}, {"h100", &h100}, {"a100", &a100}, {"b200", &b200}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].gpu, gpu) == 0) return known[i].rates;
    return NULL;
}

static double positive(double a) {
    return a > 0 ? a : 0;
}

void ml_rates_by_links(ml_rates *rates, const ml_link_times *times) {
    const double least = 1e-9, others = times->ranks - 1;
    double hop = positive(times->few_of_4 - times->few_of_2) / 2;
    rates->hop_seconds = hop;
    rates->link_seconds = positive(times->few_of_2 - hop);
    double seconds = times->many - rates->link_seconds - hop * others;
    double sent = 2 * others / times->ranks * times->bytes; /* by each rank */
    rates->link_bytes = sent / (seconds > least ? seconds : least);
    rates->network_seconds = rates->link_seconds; /* all CPU ranks are of one host */
    rates->network_bytes = rates->link_bytes;
}

void ml_rates_by_waits(ml_rates *rates, const ml_wait_times *times) {
    rates->rank_spread = rates->meet_seconds = 0;
    if (times->ranks > times->cores) return;
    const double doublings = log2(times->ranks);
    double sum = rates->link_seconds + rates->hop_seconds * (times->ranks - 1);
    double spread =
        positive(times->after_long - times->after_short) / (times->long_work - times->short_work);
    rates->rank_spread = spread / doublings;
    rates->meet_seconds =
        positive(times->after_short - spread * times->short_work - sum) / doublings;
}

void ml_rates_share(ml_rates *rates, int64_t ranks, int cores) {
    double *all[] = {&rates->product_flops,   &rates->wide_flops,           &rates->grouped_flops,
                     &rates->attention_flops, &rates->attention_grad_flops, &rates->memory_bytes,
                     &rates->cached_bytes,    &rates->simple_flops};
    double *links[] = {&rates->link_bytes, &rates->network_bytes};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) *all[i] /= (double)ranks;
    rates->cache_size /= ranks;
    int64_t alone = cores > 2 ? cores : 2;
    for (size_t i = 0; i < sizeof links / sizeof *links && ranks > alone; i++)
        *links[i] *= (double)alone / (double)ranks;
}
