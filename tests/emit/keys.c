/* A kernel's key names its source: equal keys, equal sources, whatever else is different. */
#include <string.h>

#include "tests/emit/cases.h"
#include "tests/test.h"

typedef struct {
    uint64_t key, source;
} pair;

typedef struct {
    ml_arena *arena;
    ml_index by_key, by_source;
    ML_VEC(pair) pairs;
    int same, other_sources, other_keys;
} keys;

/* The source without its name. */
static uint64_t hash_source(keys *k, const ml_kernel *kernel) {
    const char *source = ml_kernel_source(kernel, k->arena);
    size_t length = strlen(kernel->entry);
    uint64_t hash = 0;
    for (const char *name; (name = strstr(source, kernel->entry)) != NULL; source = name + length)
        hash = ml_hash(source, (size_t)(name - source), hash);
    return ml_hash(source, strlen(source), hash);
}

static const pair *find(const keys *k, const ml_index *index, uint64_t hash) {
    uint32_t cursor = 0, at = ml_index_next(index, hash, &cursor);
    return at == ML_INDEX_NONE ? NULL : &k->pairs.at[at];
}

static void add(keys *k, const ml_kernel *kernel) {
    pair new = {kernel->key, hash_source(k, kernel)};
    const pair *key = find(k, &k->by_key, new.key), *source = find(k, &k->by_source, new.source);
    k->same += key != NULL;
    k->other_sources += key != NULL && key->source != new.source;
    k->other_keys += source != NULL && source->key != new.key;
    if (key == NULL) ml_index_add(&k->by_key, new.key, k->pairs.count);
    if (source == NULL) ml_index_add(&k->by_source, new.source, k->pairs.count);
    *ML_PUSH(k->arena, &k->pairs) = new;
}

/* More rows, and more chunks of them: what a source does not show, unless the printer chooses
 * otherwise for it. */
static void add_sizes(keys *k, const ml_kernel_ir *from, const ml_target *target) {
    static const int64_t factors[] = {1, 2, 7, 100, 20000, 3000000};
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        ml_kernel_ir ir = *from;
        ml_kernel kernel;
        if (ir.row_loops == 0) return;
        ir.size[0] *= factors[i];
        ml_emit(&ir, target, k->arena, &kernel);
        add(k, &kernel);
        if (ml_batch_capacity(&kernel) > 1) {
            const ml_kernel *const members[] = {&kernel, &kernel};
            ml_kernel batch;
            ml_kernel_batch(members, 2, k->arena, &batch);
            add(k, &batch);
        }
    }
}

static void check_keys(const ml_target *target) {
    double tolerance;
    ir_kernel k;
    keys all = {.arena = ml_arena_new()};
    all.by_key.arena = all.by_source.arena = all.arena;
    for (int i = 0; emit_case(&k, i, &tolerance) != NULL; i++) {
        add_sizes(&all, &k.ir, target);
        ir_free(&k);
    }
    CHECK_EQ_INT(all.other_sources, 0);
    CHECK_EQ_INT(all.other_keys, 0);
    CHECK(all.same > 100 && all.pairs.count > 200);
    ml_arena_free(all.arena);
}

TEST(emit, keys_name_sources) {
    check_keys(&(ml_target){.kind = ML_TARGET_C, .threads = 2, .vector_bytes = 32});
    check_keys(&(ml_target){.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132});
    check_keys(&(ml_target){.kind = ML_TARGET_CUDA, .arch = 75, .multiprocessors = 20});
}
