/* Ceilings of a device, measured by programs like any other. */
#include "vm/check/bench.h"

#include <string.h>
#include <time.h>

#include "codegen/jit/jit.h"
#include "runtime/base/pool.h"
#include "runtime/compile.h"
#include "runtime/exec/program.h"
#include "runtime/graph/analysis.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/ragged/ragged.h"
#include "vm/cli/gpus.h"

enum { RUNS = 5, MOST_RUNS = 200 };
static const double LONG_ENOUGH = 0.3; /* seconds of runs: others may use the machine too */

typedef struct {
    ml_session *session;
    ml_graph *graph;
    ml_device *device;
    ml_dtype dtype; /* of products */
    int states;     /* made so far: names differ */
    bool alone;     /* no other rank runs as often */
    ml_ceilings found;
    ml_rates rates;
} bench;

ml_dtype ml_bench_dtype(const char *device) {
    return strcmp(device, "cuda") == 0 ? ML_BF16 : ML_F32;
}

/* ---- Programs ---- */
static uint32_t state_new(bench *b, const ml_type *type, bool random) {
    char *name = ml_arena_format(ml_graph_arena(b->graph), "bench %d", ++b->states);
    ml_type wide = *type;
    wide.dtype = ML_F32;
    ml_ref key = ml_const_int(b->graph, ML_I64, b->states);
    ml_ref initial = random ? ml_graph_add(b->graph, ML_OP_RANDOM, &key, 1, NULL, 0, &wide)
                            : ml_broadcast(b->graph, ml_const(b->graph, ML_F32, 0), &wide);
    ml_state state = {.name = name,
                      .kind = ML_STATE_OTHER,
                      .type = *type,
                      .initial = ml_cast(b->graph, initial, type->dtype)};
    return ml_graph_add_state(b->graph, &state);
}

static ml_ref state_read(bench *b, uint32_t state) {
    int64_t id = state;
    const ml_type *type = &ml_graph_state(b->graph, state)->type;
    return ml_graph_add(b->graph, ML_OP_STATE, NULL, 0, &id, 1, type);
}

/* Seconds of the fastest of several runs of a program that assigns values to states. */
static double fastest_of(bench *b, ml_update *updates, int count) {
    ml_roots roots = {.updates = updates, .update_count = count, .name = "bench"};
    ml_program *program = NULL;
    double best = 1e30, all = 0;
    ml_status status = ml_program_new(b->session, &roots, &program);
    for (int run = 0; run < RUNS || (b->alone && all < LONG_ENOUGH && run < MOST_RUNS); run++) {
        if (status != ML_OK) break;
        double before = b->device->profile->busy;
        status = ml_program_run(program, NULL, NULL);
        if (status == ML_OK) status = b->device->ops->wait(b->device);
        double seconds = b->device->profile->busy - before;
        all += seconds;
        if (run > 0 && seconds < best) best = seconds; /* the first one also makes ready */
    }
    ml_program_free(program);
    if (status != ML_OK) ml_raise_last();
    return best > 1e-9 ? best : 1e-9;
}

static double fastest(bench *b, uint32_t state, ml_ref value) {
    return fastest_of(b, &(ml_update){state, value}, 1);
}

/* Caches are as large as the largest kernel that is this much faster than memory. */
static const double CACHED = 1.3;
typedef struct {
    int count;
    double bytes[16], rate[16];
} copy_rates;

static void find_caches(bench *b, const copy_rates *c) {
    b->rates.memory_bytes = b->found.copy_bytes;
    for (int i = 0; i < c->count; i++) {
        if (c->rate[i] < CACHED * b->found.copy_bytes) continue;
        b->rates.cache_size = (int64_t)c->bytes[i];
        if (c->rate[i] > b->rates.cached_bytes) b->rates.cached_bytes = c->rate[i];
    }
}

/* y = -x: a kernel of ours that reads and writes memory. */
static void measure_copy(bench *b) {
    copy_rates all = {0};
    static const double long_enough = 0.01;
    int64_t most = b->device->target.memory_bytes / 8 < (int64_t)1 << 30
                       ? b->device->target.memory_bytes / 8
                       : (int64_t)1 << 30;
    double seconds = 0;
    for (int64_t bytes = (int64_t)1 << 18; bytes <= most && seconds < long_enough; bytes *= 4) {
        ml_type type = {.dtype = ML_F32,
                        .rank = 1,
                        .axis = {ml_axis_named(b->graph, "element")},
                        .size = {bytes / 4}};
        uint32_t from = state_new(b, &type, false), to = state_new(b, &type, false);
        seconds = fastest(b, to, ml_map1(b->graph, ML_OP_NEG, state_read(b, from)));
        b->found.copy_bytes = 2 * (double)bytes / seconds;
        all.bytes[all.count] = 2 * (double)bytes;
        all.rate[all.count++] = b->found.copy_bytes;
    }
    find_caches(b, &all);
}

static ml_type vector(bench *b, int64_t elements) {
    return (ml_type){.dtype = ML_F32,
                     .rank = 1,
                     .axis = {ml_axis_named(b->graph, "element")},
                     .size = {elements}};
}

/* A kernel of next to no work; one of much work on few bytes: sums, products, a square root and a
 * division, as an optimizer's. Exponentials take longer for their FLOPs. */
static void measure_simple(bench *b) {
    enum { FEW = 256, MANY = 1 << 16, TIMES = 16 };
    ml_type few = vector(b, FEW), many = vector(b, MANY);
    ml_ref x = state_read(b, state_new(b, &few, true));
    b->rates.launch_seconds =
        fastest(b, state_new(b, &few, false), ml_map1(b->graph, ML_OP_NEG, x));
    x = state_read(b, state_new(b, &many, true));
    ml_ref one = ml_broadcast(b->graph, ml_const(b->graph, ML_F32, 1), &many);
    for (int i = 0; i < TIMES; i++) { /* x / (1 + sqrt(1 + x * x)) */
        ml_ref square = ml_map2(b->graph, ML_OP_MUL, x, x);
        ml_ref root = ml_map1(b->graph, ML_OP_SQRT, ml_map2(b->graph, ML_OP_ADD, one, square));
        x = ml_map2(b->graph, ML_OP_DIV, x, ml_map2(b->graph, ML_OP_ADD, one, root));
    }
    double seconds = fastest(b, state_new(b, &many, false), x) - b->rates.launch_seconds;
    int each = ml_ops[ML_OP_MUL].flops + 2 * ml_ops[ML_OP_ADD].flops + ml_ops[ML_OP_SQRT].flops +
               ml_ops[ML_OP_DIV].flops;
    double flops = (double)MANY * TIMES * each;
    b->rates.simple_flops = flops / (seconds > 1e-9 ? seconds : 1e-9);
}

static void measure_gemm(bench *b) {
    static const double long_enough = 0.02;
    enum { SMALLEST = 256, LARGEST = 8192 };
    ml_axis rows = ml_axis_named(b->graph, "rows"), columns = ml_axis_named(b->graph, "columns");
    ml_axis inner = ml_axis_named(b->graph, "inner");
    double seconds = 0;
    for (int64_t size = SMALLEST; size <= LARGEST && seconds < long_enough; size *= 2) {
        ml_type a = {.dtype = b->dtype, .rank = 2, .axis = {rows, inner}, .size = {size, size}};
        ml_type c = {.dtype = b->dtype, .rank = 2, .axis = {rows, columns}, .size = {size, size}};
        ml_type other = {
            .dtype = b->dtype, .rank = 2, .axis = {inner, columns}, .size = {size, size}};
        ml_ref left = state_read(b, state_new(b, &a, true));
        ml_ref right = state_read(b, state_new(b, &other, true));
        uint32_t to = state_new(b, &c, false);
        seconds = fastest(b, to, ml_dot(b->graph, left, right, &inner, 1, b->dtype));
        double rate = 2 * (double)size * (double)size * (double)size / seconds;
        if (rate < b->found.gemm_flops) continue;
        b->found.gemm_flops = rate;
        b->found.gemm_size = size;
    }
}

/* Causal attention of 8 heads of 64, forward, and with its gradients: what these take longer. */
static void measure_attention(bench *b) {
    enum { HEADS = 8, SEQ = 512, DIM = 64, BATCH = 2, OPERANDS = 3 };
    ml_graph *g = b->graph;
    ml_axis batch = ml_axis_named(g, "batch"), heads = ml_axis_named(g, "heads");
    ml_axis seq = ml_axis_named(g, "seq"), keys = ml_axis_named(g, "kv_seq");
    ml_axis dim = ml_axis_named(g, "head_dim");
    ml_attention_args args = {.seq = seq,
                              .kv_seq = keys,
                              .heads = heads,
                              .kv_heads = heads,
                              .head_dim = dim,
                              .causal = true,
                              .scale = 0.125};
    ml_ref sources[OPERANDS], gradients[OPERANDS];
    ml_update updates[1 + OPERANDS];
    ml_type type[OPERANDS];
    for (int i = 0; i < OPERANDS; i++) {
        type[i] = (ml_type){.dtype = b->dtype,
                            .rank = 4,
                            .axis = {batch, heads, seq, dim},
                            .size = {BATCH, HEADS, SEQ, DIM}};
        if (i > 0) type[i].axis[2] = keys;
        sources[i] = state_read(b, state_new(b, &type[i], true));
    }
    ml_ref out = ml_attention(g, sources, OPERANDS, &args);
    updates[0] = (ml_update){state_new(b, ml_graph_type(g, out), false), out};
    double forward = fastest_of(b, updates, 1), flops = ml_flops(g, out);
    ml_ref all = ml_reduce(g, ML_OP_SUM, out, ml_graph_type(g, out)->axis, 4);
    ml_compile_gradients(g, all, sources, OPERANDS, gradients);
    for (int i = 0; i < OPERANDS; i++)
        updates[1 + i] = (ml_update){state_new(b, &type[i], false), gradients[i]};
    double both = fastest_of(b, updates, 1 + OPERANDS);
    b->rates.attention_flops = flops / forward;
    b->rates.attention_grad_flops = 2 * flops / (both > 1.5 * forward ? both - forward : forward);
    b->rates.score_share = 1;
}

/* Copies to pinned memory and back, alone and both at once. */
static void measure_host(bench *b) {
    const int64_t bytes = (int64_t)256 << 20;
    double seconds[3];
    if (b->device->ops->time_host_copies == NULL) return;
    ML_CHECK(b->device->ops->time_host_copies(b->device, bytes, seconds));
    double *rate[] = {&b->found.host_out, &b->found.host_back, &b->found.host_both};
    for (int i = 0; i < 3; i++) *rate[i] = (double)bytes / (seconds[i] > 1e-9 ? seconds[i] : 1e-9);
}

/* On a GPU the table's numbers, by what this card reaches of them; on a CPU what was measured, and
 * what is not measured in proportion. */
static void rates_of_gpu(bench *b) {
    const ml_gpu *gpu = gpu_by_model(b->device->description);
    const ml_rates *table = ml_rates_of(gpu ? gpu->key : "h200");
    if (!table) table = ml_rates_of("h200");
    double products = b->found.gemm_flops / table->wave_flops;
    double memory = b->found.copy_bytes / table->copy_bytes;
    b->rates = *table;
    if (b->found.host_both > 0) b->rates.host_bytes = b->found.host_both;
    b->rates.units = b->device->target.multiprocessors;
    b->rates.copy_bytes *= memory;
    b->rates.memory_bytes *= memory;
    double *flops[] = {
        &b->rates.product_flops,   &b->rates.wave_flops,           &b->rates.wide_flops,
        &b->rates.grouped_flops,   &b->rates.attention_flops,      &b->rates.attention_grad_flops,
        &b->rates.attention_pairs, &b->rates.attention_grad_pairs, &b->rates.simple_flops};
    for (size_t i = 0; i < sizeof flops / sizeof *flops; i++) *flops[i] *= products;
}

/* Some items of so many bytes for each thread; of a device with little memory fewer. */
static int64_t items_of(const bench *b, int64_t bytes) {
    enum { FOR_A_THREAD = 4, LEAST = 8 };
    const ml_target *target = &b->device->target;
    int64_t items = FOR_A_THREAD * (int64_t)target->threads;
    int64_t room = target->memory_bytes / 8 / bytes;
    if (items > room) items = room;
    return items > LEAST ? items : LEAST;
}

/* What products with a short side take beside large ones: several for each thread, so that none is
 * cut for threads. */
static void measure_narrow(bench *b) {
    enum { SIDE = 32, LONG = 256 };
    ml_graph *g = b->graph;
    const int64_t batch = items_of(b, 4 * LONG * (LONG + 2 * SIDE));
    ml_axis item = ml_axis_named(g, "item"), rows = ml_axis_named(g, "rows");
    ml_axis columns = ml_axis_named(g, "columns"), inner = ml_axis_named(g, "inner");
    ml_type of[] = {{.axis = {item, rows, inner}, .size = {batch, LONG, LONG}},
                    {.axis = {item, inner, columns}, .size = {batch, LONG, SIDE}},
                    {.axis = {item, rows, columns}, .size = {batch, LONG, SIDE}}};
    for (int i = 0; i < 3; i++) of[i].dtype = b->dtype, of[i].rank = 3;
    ml_ref left = state_read(b, state_new(b, &of[0], true));
    ml_ref right = state_read(b, state_new(b, &of[1], true));
    ml_ref product = ml_dot(g, left, right, &inner, 1, b->dtype);
    double flops = 2.0 * (double)batch * LONG * LONG * SIDE;
    double share = fastest(b, state_new(b, &of[2], false), product) * b->found.gemm_flops / flops;
    b->rates.product_side = share > 1 ? (share - 1) * SIDE : 0;
}

/* The rows of each group times its matrix, as of experts; some groups for each thread. */
static void measure_grouped(bench *b) {
    enum { EACH = 256, SIDE = 256 };
    ml_graph *g = b->graph;
    const int64_t groups = items_of(b, 4 * SIDE * (SIDE + 2 * EACH)), all = groups * EACH;
    ml_axis group = ml_axis_named(g, "group"), rows = ml_axis_named(g, "rows");
    ml_axis columns = ml_axis_named(g, "columns"), inner = ml_axis_named(g, "inner");
    ml_type x = {.rank = 2, .axis = {rows, inner}, .size = {all, SIDE}};
    ml_type w = {.rank = 3, .axis = {group, inner, columns}, .size = {groups, SIDE, SIDE}};
    ml_type y = {.rank = 2, .axis = {rows, columns}, .size = {all, SIDE}};
    x.dtype = w.dtype = y.dtype = b->dtype;
    ml_ref at = ml_cast(g, ml_iota(g, group, groups), ML_I32);
    ml_ref each = ml_broadcast(g, ml_const_int(g, ML_I32, EACH), ml_graph_type(g, at));
    ml_ref starts = ml_map2(g, ML_OP_MUL, at, each);
    ml_ref sources[] = {state_read(b, state_new(b, &x, true)),
                        state_read(b, state_new(b, &w, true)), starts,
                        ml_map2(g, ML_OP_ADD, starts, each)};
    ml_ref product = ml_ragged_dot(g, sources, rows, inner, b->dtype);
    double seconds = fastest(b, state_new(b, &y, false), product);
    b->rates.grouped_flops = 2.0 * (double)all * SIDE * SIDE / seconds;
}

static void measure_links(bench *b, int ranks) {
    enum { FEW = 16, MANY = 1 << 18 };
    ml_link_times times = {.bytes = 4 * MANY, .ranks = ranks};
    ML_CHECK(ml_comm_measure_sum(2, FEW, &times.few_of_2));
    ML_CHECK(ml_comm_measure_sum(4, FEW, &times.few_of_4));
    ML_CHECK(ml_comm_measure_sum(ranks, MANY, &times.many));
    ml_rates_by_links(&b->rates, &times);
}

/* The links are known. */
static void measure_waits(bench *b, int ranks, int cores) {
    ml_wait_times waits = {.short_work = 1e-4, .long_work = 1e-3, .ranks = ranks, .cores = cores};
    ML_CHECK(ml_comm_measure_wait(ranks, waits.short_work, &waits.after_short));
    ML_CHECK(ml_comm_measure_wait(ranks, waits.long_work, &waits.after_long));
    ml_rates_by_waits(&b->rates, &waits);
}

/* Of as many ranks as have a core each, at least two. */
static void measure_ranks(bench *b) {
    enum { MOST = 8 };
    const int cores = ml_cpu_count(), ranks = cores < 2 ? 2 : cores > MOST ? MOST : cores;
    measure_links(b, ranks);
    measure_waits(b, ranks, cores);
}

static void rates_of_cpu(bench *b) {
    measure_simple(b);
    measure_attention(b);
    measure_narrow(b);
    measure_grouped(b);
    measure_ranks(b);
    ml_rates *r = &b->rates;
    r->product_flops = r->wide_flops = b->found.gemm_flops;
    r->copy_bytes = b->found.copy_bytes;
    r->scan_share = 0.25;
    r->host_ranks = 1 << 20;
}

static void bench_body(void *context) {
    bench *b = context;
    measure_copy(b);
    measure_gemm(b);
    measure_host(b);
    if (b->device->target.kind == ML_TARGET_CUDA)
        rates_of_gpu(b);
    else
        rates_of_cpu(b);
}

/* The cache entry of a device: what was measured, and when. */
typedef struct {
    uint64_t magic;
    ml_ceilings ceilings;
    ml_rates rates;
    char date[ML_BENCH_DATE];
} bench_entry;

static ml_status bench_run(const char *device, int ordinal, ml_session *session,
                           bench_entry *entry) {
    ml_status status = ml_session_open(session, device, ordinal);
    bench b = {.session = session,
               .graph = ml_session_graph(session),
               .device = ml_session_device(session),
               .dtype = ml_bench_dtype(device),
               .alone = true};
    if (status == ML_OK) status = ml_device_profile(b.device);
    if (status == ML_OK) status = ml_profile_begin_step(b.device->profile, 1, ML_RUN_WHOLE);
    if (status == ML_OK) status = ml_protect(bench_body, &b);
    entry->ceilings = b.found;
    entry->rates = b.rates;
    return status;
}

/* ---- Between ranks ---- */
typedef struct {
    bench b;
    ml_comm *comm;
    double bus_bytes;
    int64_t bytes;
} reduce_bench;

/* Seconds of the fastest collective among the events since `first`. */
static double fastest_collective(const ml_profile *profile, uint32_t first) {
    double best = 1e30;
    for (uint32_t i = first; i < profile->events.count; i++) {
        const ml_profile_event *event = &profile->events.at[i];
        if (event->at >= ML_EVENT_HOST) continue;
        if (event->program->steps[event->at].work != ML_WORK_COLLECTIVE) continue;
        if (event->end - event->begin < best) best = event->end - event->begin;
    }
    return best > 1e-9 ? best : 1e-9;
}

/* The sum of what all ranks have of x[rank, element]. */
static double reduce_seconds(reduce_bench *r, int64_t bytes) {
    bench *b = &r->b;
    ml_axis rank = ml_axis_named(b->graph, "rank"), element = ml_axis_named(b->graph, "element");
    ml_type whole = {.dtype = ML_F32,
                     .rank = 2,
                     .axis = {rank, element},
                     .size = {ml_comm_world(r->comm), bytes / 4}};
    ml_type sum = {.dtype = ML_F32, .rank = 1, .axis = {element}, .size = {bytes / 4}};
    uint32_t from = state_new(b, &whole, true), to = state_new(b, &sum, false);
    uint32_t first = b->device->profile->events.count;
    fastest(b, to, ml_reduce(b->graph, ML_OP_SUM, state_read(b, from), &rank, 1));
    double seconds = fastest_collective(b->device->profile, first);
    ML_CHECK(ml_comm_share(r->comm, &seconds, sizeof seconds)); /* all ranks go on alike */
    return seconds;
}

static void reduce_body(void *context) {
    static const double long_enough = 0.02;
    reduce_bench *r = context;
    int ranks = ml_comm_world(r->comm);
    int64_t most = r->b.device->target.memory_bytes / 8 < (int64_t)1 << 30
                       ? r->b.device->target.memory_bytes / 8
                       : (int64_t)1 << 30;
    double seconds = 0;
    for (int64_t bytes = (int64_t)1 << 18; bytes <= most && seconds < long_enough; bytes *= 4) {
        seconds = reduce_seconds(r, bytes);
        double rate = ml_collective_sent(ML_COLLECTIVE_ALL_REDUCE, (double)bytes, ranks) / seconds;
        if (rate < r->bus_bytes) continue;
        r->bus_bytes = rate;
        r->bytes = bytes;
    }
}

ml_status ml_bench_all_reduce(ml_comm *comm, double *bus_bytes, int64_t *bytes) {
    ml_session *session = NULL;
    ML_TRY(ml_session_new(&session));
    ml_graph *graph = ml_session_graph(session);
    ml_layout layout = {.count = 1};
    ml_axis rank = ml_axis_named(graph, "rank");
    layout.axis[0] = (ml_mesh_axis){.name = "dp",
                                    .size = ml_comm_world(comm),
                                    .params_count = 1,
                                    .acts_count = 1,
                                    .params = {rank},
                                    .acts = {rank}};
    ml_session_join(session, comm);
    ml_status status = ml_session_open(session, NULL, 0);
    if (status == ML_OK) status = ml_session_lay_out(session, &layout, false);
    ml_device *device = ml_session_device(session);
    if (status == ML_OK) status = ml_device_profile(device);
    if (status == ML_OK) device->profile->stores = true;
    if (status == ML_OK) status = ml_profile_begin_step(device->profile, 1, ML_RUN_STEPS);
    reduce_bench r = {.b = {.session = session, .graph = graph, .device = device}, .comm = comm};
    if (status == ML_OK) status = ml_protect(reduce_body, &r);
    ml_error error = *ml_error_last();
    ml_session_free(session);
    *ml_error_last() = error;
    *bus_bytes = r.bus_bytes;
    *bytes = r.bytes;
    return status;
}

/* ---- What was measured before ---- */
static const uint64_t MAGIC = 0x38686365626d6c; /* "lmbech8" */

ml_status ml_bench_key(const char *name, int ordinal, uint64_t key[2]) {
    ml_device *device = NULL;
    ML_TRY(ml_device_open(name, ordinal, &device));
    const ml_target *target = &device->target;
    int64_t facts[] = {target->kind, target->threads, target->vector_bytes, target->arch,
                       target->multiprocessors};
    for (int i = 0; i < 2; i++) {
        uint64_t hash =
            ml_hash(device->description, strcspn(device->description, ","), MAGIC + (uint64_t)i);
        key[i] = ml_hash(facts, sizeof facts, hash);
    }
    ml_device_close(device);
    return ML_OK;
}

static bool read_entry(uint64_t key[2], bench_entry *entry) {
    void *bytes = NULL;
    int64_t size = 0;
    if (ml_cache_read(key, "bench", &bytes, &size) != ML_OK) return false;
    bool whole = size == (int64_t)sizeof *entry;
    if (whole) memcpy(entry, bytes, sizeof *entry);
    ml_free(bytes);
    return whole && entry->magic == MAGIC;
}

static ml_status bench_new(const char *device, int ordinal, uint64_t key[2], bench_entry *entry) {
    ml_session *session = NULL;
    time_t now = time(NULL);
    struct tm day;
    *entry = (bench_entry){.magic = MAGIC};
    strftime(entry->date, sizeof entry->date, "%Y-%m-%d", gmtime_r(&now, &day));
    ML_TRY(ml_session_new(&session));
    ml_status status = bench_run(device, ordinal, session, entry);
    ml_error error = *ml_error_last();
    ml_session_free(session);
    *ml_error_last() = error;
    /* Without a cache they are measured again next time. */
    if (status == ML_OK) ml_cache_write(key, "bench", entry, sizeof *entry);
    return status;
}

ml_status ml_bench(const char *device, int ordinal, bool again, ml_ceilings *ceilings) {
    uint64_t key[2];
    bench_entry entry = {0};
    *ceilings = (ml_ceilings){0};
    ml_status status = ml_bench_key(device, ordinal, key);
    if (status == ML_OK && (again || !read_entry(key, &entry)))
        status = bench_new(device, ordinal, key, &entry);
    if (status == ML_OK) *ceilings = entry.ceilings;
    return status;
}

bool ml_bench_rates(const char *device, ml_rates *rates, char date[ML_BENCH_DATE]) {
    uint64_t key[2];
    bench_entry entry;
    if (ml_bench_key(device, 0, key) != ML_OK || !read_entry(key, &entry)) return false;
    *rates = entry.rates;
    memcpy(date, entry.date, ML_BENCH_DATE);
    return true;
}
