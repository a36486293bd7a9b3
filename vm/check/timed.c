/* How long products take on this machine's CPU, by their very shape: timed once, when a prediction
 * first asks for them, and kept in the cache beside what `mlua doctor --bench` measured. */
#include "vm/check/timed.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "codegen/jit/jit.h"
#include "runtime/base/knobs.h"
#include "runtime/base/pool.h"
#include "vm/check/bench.h"
#include "vm/check/quiet.h"

static const uint64_t MAGIC = 0x3264656d69746c6d; /* "mltimed2" */

/* The cache entry of a product. */
typedef struct {
    uint64_t magic;
    double seconds; /* 0: it is not timed */
} timed_entry;

typedef struct {
    uint64_t key[2];
    int threads, ranks;
    double seconds; /* below 0: not known yet */
    ml_product product;
} timed_product;

typedef struct {
    predict_products base;
    uint64_t machine[2];
    int given;          /* threads, by the user; 0: as many as there are cores */
    int threads, ranks; /* of a rank; ranks that run at once */
    double turns;       /* of ranks that share cores */
    ml_arena *arena;
    ml_index index;
    ML_VEC(timed_product) all;
} timed_table;

/* ---- Keys ---- */
static void product_key(const timed_table *table, const ml_product *p, uint64_t key[2]) {
    const ml_gemm *g = &p->gemm;
    const ml_ragged *r = &p->ragged;
    const int64_t facts[] = {table->threads, table->ranks, p->grouped, p->rows,       g->a_dtype,
                             g->b_dtype,     g->c_dtype,   g->scaled,  g->accumulate, g->epilogue,
                             r->outer,       r->scaled,    r->squares, r->gated != 0, r->dtype,
                             r->b_dtype,     r->c_dtype};
    for (int i = 0; i < 2; i++) {
        uint64_t hash = ml_hash(facts, sizeof facts, table->machine[i]);
        hash = ml_hash(g, offsetof(ml_gemm, a_dtype), hash);
        key[i] =
            ml_hash(&r->batch, offsetof(ml_ragged, squares) - offsetof(ml_ragged, batch), hash);
    }
}

/* The machine, the day's measurement of it, after which products are timed again too, and what
 * computes them: a library, or this binary's own kernels. */
static bool read_machine(timed_table *table) {
    ml_device *device = NULL;
    struct stat binary;
    ml_rates rates;
    char by[256], date[ML_BENCH_DATE];
    if (ml_bench_key("cpu", 0, table->machine) != ML_OK || !ml_bench_rates("cpu", &rates, date))
        return false;
    if (stat("/proc/self/exe", &binary) != 0 || ml_device_open("cpu", 0, &device) != ML_OK)
        return false;
    const bool times = device->ops->time_products != NULL;
    if (times) device->ops->products_by(by, sizeof by);
    table->given = device->options.threads;
    ml_device_close(device);
    if (!times) return false;
    const int64_t facts[] = {binary.st_size, binary.st_mtim.tv_sec, binary.st_mtim.tv_nsec};
    for (int i = 0; i < 2; i++) {
        uint64_t hash = ml_hash(by, strlen(by), table->machine[i] ^ MAGIC);
        hash = ml_hash(&rates.wide_flops, sizeof rates.wide_flops, hash);
        table->machine[i] = ml_hash(facts, sizeof facts, hash);
    }
    return true;
}

static double read_entry(uint64_t key[2]) {
    void *bytes = NULL;
    int64_t size = 0;
    timed_entry entry = {0};
    if (ml_cache_read(key, "timed", &bytes, &size) != ML_OK) return -1;
    if (size == (int64_t)sizeof entry) memcpy(&entry, bytes, sizeof entry);
    ml_free(bytes);
    return entry.magic == MAGIC ? entry.seconds : -1;
}

/* ---- The table ---- */
typedef struct {
    timed_table *table;
    ml_product product;
    timed_product *found;
} find_call;

static void find_product(void *argument) {
    find_call *call = argument;
    timed_table *table = call->table;
    uint64_t key[2];
    uint32_t cursor = 0, at;
    product_key(table, &call->product, key);
    while ((at = ml_index_next(&table->index, key[0], &cursor)) != ML_INDEX_NONE) {
        call->found = &table->all.at[at];
        if (call->found->key[1] == key[1]) return;
    }
    call->found = ML_PUSH(table->arena, &table->all);
    *call->found = (timed_product){
        {key[0], key[1]}, table->threads, table->ranks, read_entry(key), call->product};
    ml_index_add(&table->index, key[0], table->all.count - 1);
}

static double timed_seconds(predict_products *products, const ml_step *step, int64_t rows) {
    find_call call = {.table = (timed_table *)products};
    if (step->gemm) call.product.gemm = *step->gemm;
    if (step->ragged)
        call.product.grouped = true, call.product.ragged = *step->ragged, call.product.rows = rows;
    if (ml_protect(find_product, &call) != ML_OK || call.found->seconds < 0) return 0;
    return call.found->seconds * call.table->turns;
}

static int table_free(lua_State *L) {
    timed_table *table = lua_touserdata(L, 1);
    ml_arena_free(table->arena);
    table->arena = NULL;
    return 0;
}

/* One for the life of the script. */
static timed_table *table_of(lua_State *L) {
    static const char *const name = "mlua.timed";
    if (lua_getfield(L, LUA_REGISTRYINDEX, name) == LUA_TUSERDATA) {
        timed_table *known = lua_touserdata(L, -1);
        lua_pop(L, 1);
        return known;
    }
    lua_pop(L, 1);
    timed_table *table = lua_newuserdatauv(L, sizeof *table, 0);
    *table = (timed_table){.base.seconds = timed_seconds};
    lua_createtable(L, 0, 1);
    vm_set_function(L, "__gc", table_free);
    lua_setmetatable(L, -2);
    lua_setfield(L, LUA_REGISTRYINDEX, name);
    if (read_machine(table)) table->arena = table->index.arena = ml_arena_new();
    return table;
}

/* As ranks that `mlua run -n` starts: each has as many threads as it has cores, at least one. */
predict_products *timed_products(lua_State *L, int64_t ranks) {
    timed_table *table = table_of(L);
    const int cores = ml_cpu_count(), given = table->given;
    if (!table->arena) return NULL;
    table->threads = given > 0 ? given : ranks < cores ? cores / (int)ranks : 1;
    table->ranks = table->threads < cores ? cores / table->threads : 1;
    if (ranks < table->ranks) table->ranks = (int)ranks;
    table->turns = (double)ranks / table->ranks;
    return &table->base;
}

/* ---- Timing ---- */
void timed_plan(const vm_options *options) {
    ml_rates rates;
    char date[ML_BENCH_DATE];
    if (options->confined || (options->device && strcmp(options->device, "cpu") != 0)) return;
    if (ml_bench_rates("cpu", &rates, date)) quiet_plan();
}

typedef struct {
    timed_table *table;
    ml_device *device;
    ml_arena *arena;
    uint32_t count;
    ml_product *products;
    timed_product **from;
    double *seconds;
} missing_call;

static bool is_missing(const timed_table *table, const timed_product *p) {
    return p->seconds < 0 && p->threads == table->threads && p->ranks == table->ranks;
}

static void print_product(const ml_product *p, double seconds) {
    const ml_gemm *g = &p->gemm;
    const ml_ragged *r = &p->ragged;
    if (p->grouped)
        ml_debug(1, "timed: %lld groups, %lld x %lld x %lld%s: %.3f ms\n", (long long)r->groups,
                 (long long)p->rows, (long long)r->k, (long long)r->n, r->outer ? ", outer" : "",
                 1e3 * seconds);
    else
        ml_debug(1, "timed: %lld x %lld x %lld%s, %lld times: %.3f ms\n", (long long)g->m,
                 (long long)g->n, (long long)g->k, g->accumulate ? " +=" : "",
                 (long long)(g->batch[0] * g->batch[1] * g->batch[2]), 1e3 * seconds);
}

/* One that is timed beside all others, before each few of them. Its rows, which no step's has, keep
 * its entry apart from that of such a product of a step. */
static ml_product reference(void) {
    enum { SIDE = 512 };
    return (ml_product){.rows = -1,
                        .gemm = {.m = SIDE,
                                 .n = SIDE,
                                 .k = SIDE,
                                 .batch = {1, 1, 1},
                                 .a_row = SIDE,
                                 .a_col = 1,
                                 .b_row = SIDE,
                                 .b_col = 1,
                                 .c_row = SIDE,
                                 .c_col = 1,
                                 .a_dtype = ML_F32,
                                 .b_dtype = ML_F32,
                                 .c_dtype = ML_F32}};
}

static void add_product(missing_call *call, const ml_product *product, timed_product *from) {
    call->products[call->count] = *product;
    call->from[call->count++] = from;
}

/* Those that another process has timed meanwhile are known now. */
static void list_missing(missing_call *call) {
    enum { FEW = 6 };
    const size_t room = 2 * (size_t)call->table->all.count;
    const ml_product beside = reference();
    int listed = 0;
    call->products = ML_NEW_ARRAY(call->arena, ml_product, room);
    call->from = ML_NEW_ARRAY(call->arena, timed_product *, room);
    call->seconds = ML_NEW_ARRAY(call->arena, double, room);
    for (uint32_t i = 0; i < call->table->all.count; i++) {
        timed_product *p = &call->table->all.at[i];
        if (is_missing(call->table, p)) p->seconds = read_entry(p->key);
        if (!is_missing(call->table, p)) continue;
        if (listed++ % FEW == 0) add_product(call, &beside, NULL);
        add_product(call, &p->product, p);
    }
}

static void write_entry(uint64_t key[2], double seconds) {
    const timed_entry entry = {MAGIC, seconds};
    ml_cache_write(key, "timed", &entry, sizeof entry); /* else again next time */
}

/* The speed of a machine that others use too changes from minute to minute: products that are timed
 * at different times, on as many ranks and threads, are compared by what the reference took beside
 * them, and beside the first. */
static double speed(const missing_call *call) {
    const ml_product beside = reference();
    uint64_t key[2];
    double seconds = 0, count = 0;
    for (uint32_t i = 0; i < call->count; i++)
        if (call->from[i] == NULL) seconds += call->seconds[i], count++;
    if (seconds <= 0) return 1;
    product_key(call->table, &beside, key);
    double first = read_entry(key);
    if (first > 0) return first * count / seconds;
    write_entry(key, seconds / count);
    return 1;
}

static void time_missing(void *argument) {
    missing_call *call = argument;
    const timed_table *table = call->table;
    list_missing(call);
    ML_CHECK(call->device->ops->time_products(call->device, call->products, (int)call->count,
                                              table->ranks, table->threads, call->seconds));
    const double scale = speed(call);
    for (uint32_t i = 0; i < call->count; i++) {
        if (call->from[i] == NULL) continue;
        call->from[i]->seconds = scale * call->seconds[i];
        print_product(&call->products[i], call->from[i]->seconds);
        write_entry(call->from[i]->key, call->from[i]->seconds);
    }
    ml_debug(1, "timed on %d threads, of %d ranks at once, scaled by %.6f\n", table->threads,
             table->ranks, scale);
}

static bool any_missing(const timed_table *table) {
    for (uint32_t i = 0; i < table->all.count; i++)
        if (is_missing(table, &table->all.at[i])) return true;
    return false;
}

bool timed_missing(predict_products *products) {
    missing_call call = {.table = (timed_table *)products};
    if (!products || !any_missing(call.table)) return false;
    if (ml_device_open("cpu", 0, &call.device) != ML_OK) return false;
    call.arena = ml_arena_new();
    quiet_begin();
    ml_status status = call.arena ? ml_protect(time_missing, &call) : ML_NO_MEMORY;
    quiet_end();
    ml_arena_free(call.arena);
    ml_device_close(call.device);
    return status == ML_OK;
}
