#include "runtime/base/memory.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <xxhash.h>

#include "runtime/base/knobs.h"
#include "runtime/base/status.h"

/* Allocations still to come before one fails; <= 0 is never. */
static atomic_llong countdown;
static atomic_llong live;
static pthread_once_t countdown_once = PTHREAD_ONCE_INIT;

static void read_countdown(void) {
    atomic_store(&countdown, ml_knobs()->out_of_memory);
}

static bool fails_now(void) {
    pthread_once(&countdown_once, read_countdown);
    if (atomic_load_explicit(&countdown, memory_order_relaxed) <= 0) return false;
    return atomic_fetch_sub(&countdown, 1) == 1;
}

void ml_memory_fail_at(int64_t n) {
    pthread_once(&countdown_once, read_countdown);
    atomic_store(&countdown, n);
}

/* calloc takes no small block from the thread's own list of free ones, malloc does. The compiler
 * makes calloc of malloc and memset where it sees both. */
static void *zeroed(size_t bytes) {
    enum { SMALL = 512 };
    if (bytes > SMALL) return calloc(1, bytes);
    void *block = malloc(bytes);
    __asm__("" : "+r"(block));
    return block ? memset(block, 0, bytes) : NULL;
}

static void *counted(void *block) {
    if (block) atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return block;
}

void *ml_alloc(size_t bytes) {
    return fails_now() ? NULL : counted(zeroed(bytes ? bytes : 1));
}

void *ml_realloc(void *block, size_t old_bytes, size_t bytes) {
    if (!block) return ml_alloc(bytes);
    if (fails_now()) return NULL;
    char *moved = realloc(block, bytes ? bytes : 1);
    if (moved && bytes > old_bytes) memset(moved + old_bytes, 0, bytes - old_bytes);
    return moved;
}

void ml_free(void *block) {
    if (!block) return;
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
    free(block);
}

void ml_memory_grow_huge(void) {
#ifndef __SANITIZE_ADDRESS__
    enum { PAGE = 2 << 20, BLOCK = 8 * PAGE, BLOCKS = 64 };
    char *blocks[BLOCKS] = {0};
    for (int i = 0; i < BLOCKS && (blocks[i] = malloc(BLOCK)) != NULL; i++) {
        const size_t before = -(uintptr_t)blocks[i] & (PAGE - 1);
        madvise(blocks[i] + before, (BLOCK - before) & ~(size_t)(PAGE - 1), MADV_HUGEPAGE);
    }
    for (int i = BLOCKS - 1; i >= 0; i--) free(blocks[i]);
#endif
}

int64_t ml_live_blocks(void) {
    return atomic_load(&live);
}

/* An arena is a chain of chunks, the newest first; each chunk's bytes follow its header. What is
 * allocated is zeroed then, when it is about to be written, and not a chunk at once. */
typedef struct chunk {
    struct chunk *older;
    size_t used, capacity;
    _Alignas(16) char bytes[];
} chunk;

struct ml_arena {
    chunk *newest;
    size_t next_capacity;
};

enum { FIRST_CHUNK = 4 << 10, LARGEST_CHUNK = 1 << 20 };

ml_arena *ml_arena_new(void) {
    ml_arena *arena = ml_alloc(sizeof *arena);
    if (arena) arena->next_capacity = FIRST_CHUNK;
    return arena;
}

void ml_arena_free(ml_arena *arena) {
    if (!arena) return;
    for (chunk *at = arena->newest; at;) {
        chunk *older = at->older;
        ml_free(at);
        at = older;
    }
    ml_free(arena);
}

void ml_arena_reset(ml_arena *arena) {
    chunk *newest = arena->newest;
    if (!newest) return;
    for (chunk *at = newest->older; at;) {
        chunk *older = at->older;
        ml_free(at);
        at = older;
    }
    newest->used = 0;
    newest->older = NULL;
}

static chunk *chunk_new(size_t capacity) {
    chunk *fresh = fails_now() ? NULL : counted(malloc(sizeof(chunk) + capacity));
    if (!fresh) ml_raise(ML_NO_MEMORY, "out of memory: could not get %zu bytes", capacity);
    *fresh = (chunk){.capacity = capacity};
    return fresh;
}

static size_t rounded(size_t bytes) {
    if (bytes > SIZE_MAX / 2)
        ml_raise(ML_NO_MEMORY, "out of memory: could not get %zu bytes", bytes);
    return bytes ? (bytes + 15) & ~(size_t)15 : 16;
}

/* Not zeroed. */
static void *arena_take(ml_arena *arena, size_t bytes) {
    bytes = rounded(bytes);
    chunk *newest = arena->newest;
    if (newest && newest->capacity - newest->used >= bytes) {
        newest->used += bytes;
        return newest->bytes + newest->used - bytes;
    }
    if (newest && bytes > arena->next_capacity / 2) { /* a chunk of its own, behind the newest */
        chunk *own = chunk_new(bytes);
        own->used = bytes;
        own->older = newest->older;
        newest->older = own;
        return own->bytes;
    }
    chunk *fresh = chunk_new(bytes > arena->next_capacity ? bytes : arena->next_capacity);
    if (arena->next_capacity < LARGEST_CHUNK) arena->next_capacity *= 2;
    fresh->used = bytes;
    fresh->older = newest;
    arena->newest = fresh;
    return fresh->bytes;
}

void *ml_arena_alloc(ml_arena *arena, size_t bytes) {
    return memset(arena_take(arena, bytes), 0, rounded(bytes));
}

char *ml_arena_copy(ml_arena *arena, const void *bytes, size_t count) {
    char *copy = arena_take(arena, count + 1);
    if (count) memcpy(copy, bytes, count);
    copy[count] = '\0';
    return copy;
}

/* Into the rest of the newest chunk, where it fits: to count first takes longer than to write.
 */
char *ml_arena_format(ml_arena *arena, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    chunk *newest = arena->newest;
    size_t room = newest ? newest->capacity - newest->used : 0;
    char *rest = room ? newest->bytes + newest->used : NULL;
    size_t length = (size_t)vsnprintf(rest, room, format, arguments);
    va_end(arguments);
    char *text = arena_take(arena, length + 1);
    if (text != rest) vsnprintf(text, length + 1, format, again);
    va_end(again);
    return text;
}

void *ml_vec_grow(ml_arena *arena, void *at, uint32_t *count, uint32_t *capacity, size_t size) {
    if (*capacity > UINT32_MAX / 2) ml_raise(ML_NO_MEMORY, "an array has too many elements");
    uint32_t larger = *capacity ? *capacity * 2 : 8;
    const size_t used = size * *count;
    char *moved = arena_take(arena, size * larger), *elements;
    memcpy(&elements, at, sizeof elements); /* `at` points to a pointer of some type */
    if (used) memcpy(moved, elements, used);
    memset(moved + used, 0, size * larger - used);
    memcpy(at, &moved, sizeof moved);
    *capacity = larger;
    return moved + size * (*count)++;
}

void ml_text_add(ml_text *text, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    size_t room = text->capacity - text->length;
    size_t added =
        (size_t)vsnprintf(room ? text->text + text->length : NULL, room, format, arguments);
    va_end(arguments);
    if (added >= room) {
        size_t capacity = (text->length + added + 1) * 2;
        char *moved = ml_arena_alloc(text->arena, capacity);
        if (text->length) memcpy(moved, text->text, text->length);
        text->text = moved;
        text->capacity = capacity;
        vsnprintf(text->text + text->length, capacity - text->length, format, again);
    }
    va_end(again);
    text->length += added;
}

/* Linear probing; the load stays below 2/3. A slot's hash and value are one line of a cache. */
struct ml_index_slot {
    uint64_t hash;
    uint32_t next_value; /* one more than the value; 0: free */
};

static uint32_t slot_of(const ml_index *index, uint64_t hash) {
    return (uint32_t)((hash * 0x9E3779B97F4A7C15u) >> 32) & (index->capacity - 1);
}

static void put(ml_index *index, uint64_t hash, uint32_t next_value) {
    uint32_t slot = slot_of(index, hash);
    while (index->slots[slot].next_value != 0) slot = (slot + 1) & (index->capacity - 1);
    index->slots[slot] = (struct ml_index_slot){hash, next_value};
}

void ml_index_reserve(ml_index *index, uint32_t count) {
    ml_index old = *index;
    uint32_t capacity = old.capacity ? old.capacity : 16;
    while (count >= capacity / 3 * 2) {
        if (capacity > UINT32_MAX / 4) ml_raise(ML_NO_MEMORY, "an index is too large");
        capacity *= 2;
    }
    if (capacity == old.capacity) return;
    index->slots = ML_NEW_ARRAY(index->arena, struct ml_index_slot, capacity);
    index->capacity = capacity;
    for (uint32_t i = 0; i < old.capacity; i++)
        if (old.slots[i].next_value != 0) put(index, old.slots[i].hash, old.slots[i].next_value);
}

void ml_index_add(ml_index *index, uint64_t hash, uint32_t value) {
    if (index->count >= index->capacity / 3 * 2) ml_index_reserve(index, index->count);
    put(index, hash, value + 1);
    index->count++;
}

uint32_t ml_index_next(const ml_index *index, uint64_t hash, uint32_t *cursor) {
    if (!index->capacity) return ML_INDEX_NONE;
    uint32_t first = slot_of(index, hash);
    for (;;) {
        const struct ml_index_slot *slot =
            &index->slots[(first + (*cursor)++) & (index->capacity - 1)];
        if (slot->next_value == 0) return ML_INDEX_NONE;
        if (slot->hash == hash) return slot->next_value - 1;
    }
}

uint64_t ml_hash(const void *bytes, size_t count, uint64_t seed) {
    return XXH3_64bits_withSeed(bytes, count, seed);
}
