/* Ceilings of a device, measured by programs like any other. */
#include "vm/check/bench.h"

#include <string.h>

#include "codegen/jit/jit.h"
#include "runtime/exec/program.h"

enum { RUNS = 5 };

typedef struct {
    ml_session *session;
    ml_graph *graph;
    ml_device *device;
    ml_dtype dtype; /* of products */
    int states;     /* made so far: names differ */
    ml_ceilings found;
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

/* Seconds of the fastest of several runs of a program that assigns `value` to a state. */
static double fastest(bench *b, uint32_t state, ml_ref value) {
    ml_update update = {state, value};
    ml_roots roots = {.updates = &update, .update_count = 1, .name = "bench"};
    ml_program *program = NULL;
    double best = 1e30;
    ml_status status = ml_program_new(b->session, &roots, &program);
    for (int run = 0; run < RUNS && status == ML_OK; run++) {
        double before = b->device->profile->busy;
        status = ml_program_run(program, NULL, NULL);
        if (status == ML_OK) status = b->device->ops->wait(b->device);
        double seconds = b->device->profile->busy - before;
        if (run > 0 && seconds < best) best = seconds; /* the first one also makes ready */
    }
    ml_program_free(program);
    if (status != ML_OK) ml_raise_last();
    return best > 1e-9 ? best : 1e-9;
}

/* y = -x: a kernel of ours that reads and writes memory. */
static void measure_copy(bench *b) {
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
    }
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

static void bench_body(void *context) {
    bench *b = context;
    measure_copy(b);
    measure_gemm(b);
}

static ml_status bench_run(const char *device, int ordinal, ml_session *session,
                           ml_ceilings *ceilings) {
    ml_status status = ml_session_open(session, device, ordinal);
    bench b = {.session = session,
               .graph = ml_session_graph(session),
               .device = ml_session_device(session),
               .dtype = ml_bench_dtype(device)};
    if (status == ML_OK) status = ml_device_profile(b.device);
    if (status == ML_OK) status = ml_profile_begin_step(b.device->profile, 1, ML_RUN_WHOLE);
    if (status == ML_OK) status = ml_protect(bench_body, &b);
    *ceilings = b.found;
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
typedef struct {
    uint64_t magic;
    ml_ceilings ceilings;
} kept;
static const uint64_t MAGIC = 0x31686365626d6c; /* "lmbech1" */

/* The model and what else decides its speed; what is free of its memory today does not. */
static ml_status kept_key(const char *name, int ordinal, uint64_t key[2]) {
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

static bool read_kept(uint64_t key[2], ml_ceilings *ceilings) {
    void *bytes = NULL;
    int64_t size = 0;
    kept entry;
    if (ml_cache_read(key, "bench", &bytes, &size) != ML_OK) return false;
    bool whole = size == (int64_t)sizeof entry;
    if (whole) memcpy(&entry, bytes, sizeof entry);
    ml_free(bytes);
    if (!whole || entry.magic != MAGIC) return false;
    *ceilings = entry.ceilings;
    return true;
}

ml_status ml_bench(const char *device, int ordinal, bool again, ml_ceilings *ceilings) {
    uint64_t key[2];
    ml_session *session = NULL;
    *ceilings = (ml_ceilings){0};
    ml_status status = kept_key(device, ordinal, key);
    if (status != ML_OK || (!again && read_kept(key, ceilings))) return status;
    ML_TRY(ml_session_new(&session));
    status = bench_run(device, ordinal, session, ceilings);
    ml_error error = *ml_error_last();
    ml_session_free(session);
    *ml_error_last() = error;
    kept entry = {.magic = MAGIC, .ceilings = *ceilings};
    /* Without a cache they are measured again next time. */
    if (status == ML_OK) ml_cache_write(key, "bench", &entry, sizeof entry);
    return status;
}
