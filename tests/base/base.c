/* Errors, memory, the hash index, the pool of threads, knobs, suggestions. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/base/machine.h"
#include "runtime/base/pool.h"
#include "runtime/base/suggest.h"
#include "tests/test.h"

static void raise_invalid(void *argument) {
    (void)argument;
    ml_raise(ML_INVALID, "wrong by %d", 3);
}
static void raise_nested(void *argument) {
    CHECK_STATUS(ml_protect(raise_invalid, NULL), ML_INVALID);
    ml_fail(ML_IO, "outer, after \"%s\"", ml_error_last()->text);
    ml_help("first");
    CHECK_EQ_INT(ml_help("second"), ML_IO);
    *(int *)argument = 1;
    ml_raise_last();
}

TEST(base, errors_nest) {
    int reached = 0;
    CHECK_RAISES(raise_nested, &reached, ML_IO, "outer, after \"wrong by 3\"");
    CHECK_TEXT(ml_error_last()->help, "first\nsecond");
    CHECK_EQ_INT(reached, 1);
    CHECK_RAISES(raise_invalid, NULL, ML_INVALID, "wrong by 3");
    CHECK_TEXT(ml_error_last()->help, "");
}

static void fill_arena(void *argument) {
    ml_arena *arena = argument;
    ML_VEC(int) numbers = {0};
    for (int i = 0; i < 1000; i++) {
        char *block = ml_arena_alloc(arena, (size_t)i * 7);
        CHECK_EQ_INT((int64_t)((uintptr_t)block % 16), 0);
        for (int k = 0; k < i * 7; k++) EXPECT(!block[k], "the arena's memory is not zeroed");
        memset(block, 0xff, (size_t)i * 7);
        *ML_PUSH(arena, &numbers) = i;
    }
    for (int i = 0; i < 1000; i++) CHECK_EQ_INT(numbers.at[i], i);
    ml_text text = {.arena = arena};
    for (int i = 0; i < 300; i++) ml_text_add(&text, "%d,", i % 10);
    CHECK_EQ_INT((int64_t)text.length, 600);
    CHECK_EQ_INT((int64_t)strlen(text.text), 600);
    CHECK_TEXT(ml_arena_format(arena, "%s-%d", "x", 5), "x-5");
    CHECK_TEXT(ml_arena_copy(arena, "abcdef", 3), "abc");
}

/* Texts that fit into the rest of a chunk and texts that do not leave what follows them zeroed. */
static void fill_with_texts(void *argument) {
    ml_arena *arena = argument;
    for (int length = 0; length < 12000; length = length * 3 / 2 + 1) {
        for (int i = 0; i < 5; i++) {
            const char *text = ml_arena_format(arena, "%*d", length, i);
            CHECK_EQ_INT((int64_t)strlen(text), length > 1 ? length : 1);
            CHECK_EQ_INT(atoi(text), i);
            const char *block = ml_arena_alloc(arena, 100);
            for (int k = 0; k < 100; k++)
                EXPECT(!block[k], "after a text of %d the memory is not zeroed", length);
        }
    }
}

TEST(base, arenas) {
    ml_arena *arena = ml_arena_new();
    REQUIRE(arena);
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(ml_protect(fill_arena, arena), ML_OK);
        CHECK_STATUS(ml_protect(fill_with_texts, arena), ML_OK);
        int64_t blocks = ml_live_blocks();
        ml_arena_reset(arena);
        CHECK(ml_live_blocks() < blocks);
    }
    ml_arena_free(arena);
    for (int n = 1; n < 12; n++) {
        ml_memory_fail_at(n);
        arena = ml_arena_new();
        ml_status status = arena ? ml_protect(fill_arena, arena) : ML_NO_MEMORY;
        ml_memory_fail_at(0);
        ml_arena_free(arena);
        CHECK_EQ_INT(status, ML_NO_MEMORY);
    }
}

TEST(base, heap) {
    int64_t blocks = ml_live_blocks();
    char *block = ml_alloc(10);
    REQUIRE(block);
    memset(block, 1, 10);
    block = ml_realloc(block, 10, 1000);
    REQUIRE(block);
    CHECK(block[9] == 1 && block[10] == 0 && block[999] == 0);
    CHECK_EQ_INT(ml_live_blocks(), blocks + 1);
    ml_memory_fail_at(2);
    char *other = ml_alloc(1);
    CHECK(other != NULL);
    CHECK(!ml_realloc(block, 1000, 2000)); /* the old block lives on */
    CHECK(block[9] == 1);
    ml_free(other);
    ml_free(block);
    ml_free(NULL);
}

static void fill_index(void *argument) {
    ml_index index = {.arena = argument};
    uint32_t cursor = 0;
    CHECK_EQ_INT(ml_index_next(&index, 5, &cursor), ML_INDEX_NONE);
    for (uint32_t i = 0; i < 5000; i++) ml_index_add(&index, i % 1000, i); /* five of a hash */
    for (uint32_t hash = 0; hash < 1000; hash++) {
        uint32_t found = 0, value;
        cursor = 0;
        while ((value = ml_index_next(&index, hash, &cursor)) != ML_INDEX_NONE) {
            CHECK_EQ_INT(value % 1000, hash);
            found++;
        }
        CHECK_EQ_INT(found, 5);
    }
    cursor = 0;
    CHECK_EQ_INT(ml_index_next(&index, 1000, &cursor), ML_INDEX_NONE);
}

TEST(base, index) {
    ml_arena *arena = ml_arena_new();
    REQUIRE(arena);
    CHECK_STATUS(ml_protect(fill_index, arena), ML_OK);
    ml_arena_free(arena);
}

enum { UNITS = 1000, PARTS = 7 };
typedef struct {
    atomic_int touched[UNITS];
    atomic_int begins[UNITS + 1]; /* where a range begins */
    int64_t fails_from;
} pool_work;

static void touch(void *context, int64_t begin, int64_t end, int thread) {
    pool_work *work = context;
    (void)thread;
    atomic_fetch_add(&work->begins[begin], 1);
    for (int64_t i = begin; i < end; i++) atomic_fetch_add(&work->touched[i], 1);
    if (end > work->fails_from) ml_raise(ML_COMPILE, "range %d fails", (int)begin);
}

TEST(base, pool) {
    static pool_work work;
    for (int threads = 1; threads <= 4; threads++) {
        ml_pool *pool = ml_pool_new(threads);
        REQUIRE(pool);
        for (int round = 0; round < 200; round++) {
            memset(&work, 0, sizeof work);
            work.fails_from = round % 3 ? UNITS : 300;
            ml_status status = ml_pool_run(pool, UNITS, PARTS, touch, &work);
            CHECK_EQ_INT(status, round % 3 ? ML_OK : ML_COMPILE);
            if (round % 3 == 0) CHECK_TEXT(ml_error_last()->text, "range 286 fails");
            for (int i = 0; i < UNITS; i++)
                EXPECT(work.touched[i] == 1, "unit %d ran %d times", i, work.touched[i]);
            CHECK(work.begins[0] && work.begins[143] && work.begins[286] && work.begins[858]);
        }
        CHECK_STATUS(ml_pool_run(pool, 0, 4, touch, &work), ML_OK);
        ml_pool_free(pool);
    }
    CHECK(ml_cpu_count() >= 1);
}

TEST(base, knobs) {
    const char *name, *syntax, *meaning;
    int count = 0;
    while (ml_knob_describe(count, &name, &syntax, &meaning)) {
        CHECK(strncmp(name, "MLUA_", 5) == 0 && *syntax && *meaning);
        count++;
    }
    CHECK(count >= 9);
}

TEST(base, suggestions) {
    static const char *const words[] = {"heads", "head_dim", "embed", NULL, "seq", "Batch"};
    CHECK_TEXT(ml_suggest("embde", words, 6), "embed");
    CHECK_TEXT(ml_suggest("head", words, 6), "heads");
    CHECK_TEXT(ml_suggest("batch", words, 6), "Batch");
    CHECK_TEXT(ml_suggest("sq", words, 6), "seq");
    CHECK(!ml_suggest("vocabulary", words, 6));
    CHECK(!ml_suggest("", words, 6));
}

/* More memory of a process never leaves less to plans, and what plans have is never more than the
 * process has: one that is given what they take leaves them as much. */
TEST(base, memory_of_a_process_and_of_its_plans) {
    for (int several = 0; several < 2; several++) {
        int64_t before = 0;
        for (int64_t process = 1 << 20; process < (int64_t)200 << 30; process += process / 64) {
            const int64_t plans = ml_plan_bytes(process, several);
            CHECK(plans >= before && plans < process);
            CHECK(plans == 1 || ml_process_bytes(plans, several) <= process + (1 << 20));
            CHECK(ml_plan_bytes(ml_process_bytes(plans, several), several) >= plans - (1 << 20));
            before = plans;
        }
    }
}
