/* What a device and its links reach, by shape: the numbers from which the time of a step is
 * predicted (runtime/predict). Plans never depend on them (ml_machine_planned, machine.h, is for
 * plans): predictions may be corrected, and differ from machine to machine, while plans stay equal.
 *
 * Four GPUs have tables (rates.c), where each number says whether it was measured, is from a data
 * sheet, or is assumed. Other devices are measured: mlua doctor --bench. */
#ifndef ML_RATES_H
#define ML_RATES_H

#include <stdbool.h>
#include <stdint.h>

/* Rates are a second; a FLOP is an addition or a multiplication. */
typedef struct {
    /* Products with operands of 2 bytes. Large ones are bounded by power: product_flops. A product
     * of few tiles is bounded by the clock: tiles run in waves, one on each of `units`
     * multiprocessors, and a full wave reaches wave_flops. units 0: no waves. Of the time in which
     * the result passes memory result_share is not hidden. */
    double product_flops, wave_flops, result_share;
    int units;
    double scaled_speed; /* products of 8-bit floats, over those of 2 bytes; 0: none are served */
    double wide_flops;   /* products in f32 */
    /* A product whose smallest side has so many elements takes twice its FLOPs' time, one of ten
     * times as many 1.1 times. 0: of no account (tiles and waves say it). */
    double product_side;
    double grouped_flops; /* products by groups of rows (experts) */
    /* Attention by the FLOPs of ml_flops. Heads of 128 are bounded by products, narrow ones by the
     * exponentials: query-key pairs a second. A causal mask computes its diagonal's tiles of so
     * many positions in full. */
    double attention_flops, attention_grad_flops, attention_pairs, attention_grad_pairs;
    int attention_tile;
    double score_share;  /* of these rates, with a score function in Lua */
    double copy_bytes;   /* read and written by a large copy: mlua doctor --bench measures it */
    double memory_bytes; /* the same by kernels that wait for memory, on average */
    double cached_bytes; /* the same where all that a kernel touches is in caches of cache_size */
    int64_t cache_size;  /* bytes; 0: of no account */
    double simple_flops; /* of elementwise kernels */
    double scan_share;   /* of products and memory, in kernels of scans */
    double position_seconds; /* of a scan whose blocks wait for one another at each position */
    double launch_seconds;   /* from the end of a step to the start of the next */
    /* Generation: products of few rows read their weights once. mlua's kernel for at most 8 rows:
     * FLOPs; weights of 8 bits that it widens; the time until it reads at memory's rate. Libraries
     * and products by groups: the share of memory's rate. Attention over cached positions: its
     * share, its time beside that of its bytes, and its FLOPs where many are new. 0: of no account.
     */
    double few_rows_flops, few_rows_widened, few_rows_seconds, few_rows_share;
    double cached_share, cached_seconds, cached_flops;
    /* Collectives: bytes that leave a rank, one way, of those within a host and between hosts; the
     * time until the first byte has arrived, and for each further rank that it passes. */
    double link_bytes, network_bytes, link_seconds, hop_seconds, network_seconds;
    int host_ranks;    /* ranks of a host where nothing else says so */
    double host_bytes; /* to pinned host memory, and as many back at the same time */
    /* Beside one another, computation is longer by beside_share, and a collective reaches
     * beside_link of the rate that it has alone. A step of several ranks takes as long as that of
     * the slowest: for each doubling of their number so much longer (rank_spread), and at each
     * collective so much (meet_seconds). */
    double beside_share, beside_link, rank_spread, meet_seconds;
} ml_rates;

/* Seconds of all-reduces among ranks of a host: of a few bytes; of `bytes` among `ranks`. */
typedef struct {
    double few_of_2, few_of_4, many, bytes;
    int ranks;
} ml_link_times;
/* The links of CPU ranks, whose messages pass memory. */
void ml_rates_by_links(ml_rates *rates, const ml_link_times *times);

/* Seconds in which each of `ranks` on `cores` waits for the others, after work of short_work and of
 * long_work seconds. */
typedef struct {
    double after_short, after_long, short_work, long_work;
    int ranks, cores;
} ml_wait_times;
/* How CPU ranks wait for one another; the links are known. Ranks without a core each also wait for
 * the others' turns, which ml_rates_share counts: nothing is known of them. */
void ml_rates_by_waits(ml_rates *rates, const ml_wait_times *times);
/* Of one of `ranks` that share the `cores` of a CPU, of all of which the rates were measured; those
 * of links were of ranks with a core each. */
void ml_rates_share(ml_rates *rates, int64_t ranks, int cores);

/* Of a known GPU (ml_gpu.key); NULL: it has no table. */
const ml_rates *ml_rates_of(const char *gpu);

#endif
