/* The time of one step, by its shape. */
#include "runtime/predict/predict.h"

#include <math.h>

#include "runtime/graph/ops.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/attention/by_sequence.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "runtime/ops/recurrence/recurrence.h"

const char *const predict_names[PREDICT_KINDS] = {"products", "attention", "memory", "other"};

static double most(double a, double b) {
    return a > b ? a : b;
}

/* ---- Products ---- */
/* Tiles of a product's result that one multiprocessor computes at once, and the share of the full
 * rate that they reach: small ones read more of the operands for each FLOP. */
static const struct {
    int rows, columns;
    double share;
} TILES[] = {{128, 256, 1},    {256, 128, 1},   {128, 192, 0.97},
             {128, 128, 0.92}, {64, 128, 0.75}, {64, 64, 0.5}};
enum { TILE_KINDS = sizeof TILES / sizeof *TILES, MOST_PARTS = 8, LEAST_PART = 1024 };

static double ceiling(double a, double b) {
    double quotient = a / b;
    int64_t whole = (int64_t)quotient;
    return (double)whole < quotient ? (double)whole + 1 : (double)whole;
}

/* The fastest tile, with the sum over k in up to MOST_PARTS parts, each of which is written in f32
 * and read. */
static double waves_seconds(const ml_rates *rates, double m, double n, double k, double batch) {
    double best = 0;
    for (int i = 0; i < TILE_KINDS; i++) {
        double tiles = batch * ceiling(m, TILES[i].rows) * ceiling(n, TILES[i].columns);
        double flops = 2.0 * TILES[i].rows * TILES[i].columns * k;
        double rate = rates->wave_flops * TILES[i].share / rates->units;
        for (int parts = 1; parts <= MOST_PARTS; parts *= 2) {
            if (parts > 1 && k < (double)parts * LEAST_PART) break;
            double seconds = ceiling(tiles * parts, rates->units) * flops / parts / rate;
            if (parts > 1) seconds += 8 * batch * m * n * parts / rates->memory_bytes;
            if (best == 0 || seconds < best) best = seconds;
        }
    }
    return best;
}

static double smallest(double m, double n, double k) {
    return fmin(fmin(m, n), k);
}

static double gemm_seconds(const ml_rates *rates, const ml_gemm *g) {
    double batch = (double)(g->batch[0] * g->batch[1] * g->batch[2]);
    double m = (double)g->m, n = (double)g->n, k = (double)g->k;
    bool wide = ml_dtypes[g->a_dtype].bytes > 2;
    double speed = g->scaled && rates->scaled_speed > 0 ? rates->scaled_speed : 1;
    double seconds = 2 * m * n * k * batch / (wide ? rates->wide_flops : rates->product_flops);
    seconds *= (1 + rates->product_side / smallest(m, n, k)) / speed;
    if (wide || rates->units == 0) return seconds;
    double result = m * n * batch * (double)ml_dtypes[g->c_dtype].bytes * (g->accumulate ? 2 : 1);
    seconds = most(seconds, waves_seconds(rates, m, n, k, batch) / speed);
    return seconds + rates->result_share * result / rates->memory_bytes;
}

/* Rows of groups that are there, as a share of those for which there is room: ranks that exchange
 * tokens have room for `exchange` times an even share. */
static double filled_share(const ml_layout *layout) {
    return layout && layout->exchange > 1 ? 1 / layout->exchange : 1;
}

/* As it was timed, with its start; 0: by rates. */
static double timed_seconds(const predict_basis *by, const ml_layout *layout, const ml_step *step) {
    if (by->products == NULL || (step->gemm == NULL && step->ragged == NULL)) return 0;
    int64_t rows = 0;
    if (step->ragged) rows = (int64_t)((double)step->ragged->rows * filled_share(layout) + 0.5);
    return by->products->seconds(by->products, step, rows);
}

/* ---- Attention ---- */
/* What the sequences of the program's rows leave of its query-key pairs. Queries are pieces of a
 * row that ranks share, or all of one, which may be longer than the rows that are known. */
static double pairs_share(ml_sequence_rows *rows, const ml_attention_step *a) {
    if (rows == NULL || !ml_attention_by_document(a->graph, a->node)) return 1;
    if (rows->end.count == 0) return 0;
    const ml_pair_mask mask = {a->args.causal || a->args.window, a->args.window};
    if (a->args.pieces && rows->tokens > a->seq)
        return ml_sequence_rows_share(rows, rows->tokens / a->seq, mask);
    const ml_sequence known = {0, rows->tokens};
    double longer = (double)a->kv_seq / (double)rows->tokens; /* holds so many of them */
    double share = ml_sequence_rows_share(rows, 1, mask) *
                   ml_sequences_share(&known, 1, a->kv_seq, 1, mask) * longer;
    return share < 1 ? share : 1;
}

/* Sequences end within tiles, as the diagonal does. */
static double attention_seconds(const predict_basis *by, const ml_attention_step *a, double flops) {
    const ml_rates *rates = by->rates;
    double dims = (double)(a->head_dim + a->value_dim);
    double pairs = flops / (a->backward ? 4 * dims : 2 * dims);
    double seconds = flops / (a->backward ? rates->attention_grad_flops : rates->attention_flops);
    double limit = a->backward ? rates->attention_grad_pairs : rates->attention_pairs;
    if (limit > 0) seconds = most(seconds, pairs / limit);
    double share = pairs_share(by->rows, a);
    if (a->args.causal || a->args.window) share += rates->attention_tile / (double)a->kv_seq;
    seconds *= share;
    return a->args.score ? seconds / rates->score_share : seconds;
}

/* ---- Generation ---- */
enum { KERNEL_ROWS = 8 };

/* A product that mlua's kernel for few rows computes: it has neither loops nor a library's form. */
static bool has_few_rows(const ml_schedule *s, const ml_step *step) {
    if (step->kind != ML_STEP_KERNEL || step->ir != NULL || step->node == 0) return false;
    if (step->ragged != NULL) return !step->ragged->outer && step->ragged->rows <= KERNEL_ROWS;
    return ml_graph_node(s->graph, step->node)->op == ML_OP_DOT;
}

static double few_rows_seconds(const ml_rates *rates, const ml_schedule *s, const ml_step *step) {
    const ml_value *weights = &s->values.at[step->values[1]];
    double flops = rates->few_rows_flops > 0 ? rates->few_rows_flops : rates->simple_flops;
    double seconds = step->flops / flops;
    if (rates->few_rows_widened <= 0 || ml_dtypes[weights->type.dtype].bytes > 1) return seconds;
    return most(seconds, (double)ml_type_elements(&weights->type) / rates->few_rows_widened);
}

static bool reads_cache(const ml_schedule *s, const ml_step *step) {
    return step->node && ml_graph_node(s->graph, step->node)->op == ML_OP_CACHED_ATTENTION;
}

/* The share of memory's rate that a step reaches. */
static double memory_share(const ml_rates *rates, const ml_schedule *s, const ml_step *step) {
    bool groups = step->ragged != NULL && !step->ragged->outer && step->ragged->rows > KERNEL_ROWS;
    double share = step->gemm != NULL || groups ? rates->few_rows_share
                   : reads_cache(s, step)       ? rates->cached_share
                                                : 1;
    return share > 0 ? share : 1;
}

/* Bytes that a step moves. Of the groups' weights a product reads those that some row has: as many
 * as are expected where each row's group is drawn. */
static double bytes_of(const ml_schedule *s, const ml_step *step) {
    double bytes = (double)step->bytes;
    if (step->ragged == NULL || step->ragged->outer) return bytes;
    double groups = (double)step->ragged->groups, rows = (double)step->ragged->rows;
    double weights = (double)ml_type_bytes(&s->values.at[step->values[1]].type);
    return bytes - weights * pow(1 - 1 / groups, rows);
}

static double memory_seconds(const ml_rates *rates, double bytes) {
    bool cached = rates->cache_size > 0 && bytes <= (double)rates->cache_size;
    return bytes / (cached ? rates->cached_bytes : rates->memory_bytes);
}

static bool is_scan(const ml_schedule *s, const ml_step *step) {
    ml_op op = step->node ? (ml_op)ml_graph_node(s->graph, step->node)->op : ML_OP_CONST;
    return step->scan != NULL || ml_op_is_linear_scan(op) || op == ML_OP_RECURRENCE;
}

/* Kernels by elements are as fast as memory; cooperative ones wait at each position for all blocks;
 * the others reach a share of the rates of products and memory. */
static double scan_seconds(const ml_rates *rates, const ml_schedule *s, const ml_step *step,
                           double *memory) {
    const bool recurrence = ml_graph_node(s->graph, step->node)->op == ML_OP_RECURRENCE;
    if (recurrence && s->target->kind == ML_TARGET_CUDA &&
        ml_recurrence_elementwise(s->graph, step->node))
        return step->flops / rates->simple_flops;
    ml_recurrence r = {0};
    for (const ml_kernel *k = step->kernel; recurrence && k; k = k->next)
        if (k->cooperative) ml_recurrence_read(s->graph, step->node, &r);
    *memory /= rates->scan_share;
    return most(step->flops / (rates->product_flops * rates->scan_share),
                (double)r.length * rates->position_seconds);
}

static double loop_seconds(const predict_basis *by, const ml_loop *loop) {
    double seconds = 0;
    if (loop->plan == NULL) return 0;
    for (uint32_t i = 0; i < loop->plan->schedule->steps.count; i++)
        seconds += predict_step(by, loop->plan->schedule, NULL, i, NULL);
    return seconds * (double)loop->length;
}

/* ---- Collectives ---- */
bool predict_leaves_host(const ml_rates *rates, const ml_target *target, const ml_layout *layout,
                         int axis) {
    int64_t span = 1;
    for (int i = axis; i < layout->count; i++) span *= layout->axis[i].size;
    return span > (target->host_ranks > 0 ? target->host_ranks : rates->host_ranks);
}

double predict_collective(const ml_rates *rates, const ml_target *target, const ml_layout *layout,
                          int axis, int64_t ranks, double bytes, bool begins) {
    int64_t stride = 1;
    for (int i = axis + 1; i < layout->count; i++) stride *= layout->axis[i].size;
    int64_t host = target->host_ranks > 0 ? target->host_ranks : rates->host_ranks;
    const bool beyond = predict_leaves_host(rates, target, layout, axis);
    /* Of those along the axis, neighbours within a host pass data on by its links. */
    int64_t inside = stride < host ? host / stride : 1, hosts = beyond ? ranks / inside : 1;
    if (hosts < 1) hosts = 1;
    double first = rates->link_seconds + rates->hop_seconds * (double)(ranks / hosts - 1);
    first += rates->meet_seconds * log2((double)ranks);
    if (beyond) {
        int rounds = 0; /* trees between hosts */
        for (int64_t i = 1; i < hosts; i *= 2) rounds++;
        first += rates->network_seconds * rounds;
    }
    /* A ring through all ranks of a host enters and leaves by the cards of all its GPUs. */
    double rate = beyond ? rates->network_bytes * (double)inside : rates->link_bytes;
    if (rate > rates->link_bytes) rate = rates->link_bytes;
    return bytes / rate + (begins ? first : 0);
}

double predict_step(const predict_basis *by, const ml_schedule *s, const ml_layout *layout,
                    uint32_t at, predict_kind *kind) {
    const ml_rates *rates = by->rates;
    const ml_step *step = &s->steps.at[at];
    double memory = memory_seconds(rates, bytes_of(s, step)) / memory_share(rates, s, step);
    double work = 0, start = rates->launch_seconds;
    predict_kind bound = PREDICT_SIMPLE;
    switch (step->kind) {
    case ML_STEP_HOST_COPY:
    case ML_STEP_WAIT: return 0;
    case ML_STEP_COLLECTIVE: {
        const ml_collective_step *c = step->collective;
        return predict_collective(rates, s->target, layout, c->mesh_axis, c->ranks, ml_step_sent(c),
                                  true);
    }
    case ML_STEP_GEMM:
        work = gemm_seconds(rates, step->gemm);
        bound = PREDICT_PRODUCTS;
        break;
    case ML_STEP_ATTENTION:
        work = attention_seconds(by, step->attention, step->flops);
        bound = PREDICT_ATTENTION;
        break;
    case ML_STEP_LOOP: return loop_seconds(by, step->loop);
    default:
        work = step->flops / rates->simple_flops;
        if (step->ragged)
            work = step->flops * filled_share(layout) / rates->grouped_flops /
                   (step->ragged->scaled && rates->scaled_speed > 0 ? rates->scaled_speed : 1),
            bound = PREDICT_PRODUCTS;
        if (has_few_rows(s, step))
            work = few_rows_seconds(rates, s, step), start += rates->few_rows_seconds;
        if (reads_cache(s, step)) {
            start += rates->cached_seconds;
            if (rates->cached_flops > 0) work = step->flops / rates->cached_flops;
        }
        if (is_scan(s, step)) work = scan_seconds(rates, s, step, &memory);
    }
    const double timed = timed_seconds(by, layout, step);
    if (timed > 0) work = timed, start = 0, bound = PREDICT_PRODUCTS;
    double seconds = most(work, memory);
    if (memory > work) bound = PREDICT_MEMORY;
    if (kind) *kind = start > seconds ? PREDICT_SIMPLE : bound;
    return start + seconds;
}
