/* Heap blocks, arenas and growable arrays.
 *
 * Every heap block of the program comes from ml_alloc, which MLUA_OOM=n makes fail at the n-th
 * call (for tests), and which counts live blocks so that tests can prove that none leaks.
 * An arena frees all of its blocks at once; allocating from it never returns NULL but raises
 * ML_NO_MEMORY. Memory from both is zeroed. */
#ifndef ML_MEMORY_H
#define ML_MEMORY_H

#include <stddef.h>
#include <stdint.h>

void *ml_alloc(size_t bytes); /* NULL when exhausted; zeroed */
/* NULL when exhausted; zeroes the new part. */
void *ml_realloc(void *block, size_t old_bytes, size_t bytes);
void ml_free(void *block);
int64_t ml_live_blocks(void); /* heap blocks not yet freed */
/* Most of the next GiB of the heap is of huge pages, where the kernel gives them, as far as it is
 * used. Call it after mallopt has put blocks of 16 MiB into the heap (M_MMAP_THRESHOLD), which
 * retains what is freed (M_TRIM_THRESHOLD). */
void ml_memory_grow_huge(void);
/* From now on the n-th allocation fails (once); 0 is never. MLUA_OOM=n sets it at the start. */
void ml_memory_fail_at(int64_t n);

typedef struct ml_arena ml_arena;
ml_arena *ml_arena_new(void); /* NULL when exhausted */
void ml_arena_free(ml_arena *arena);
void ml_arena_reset(ml_arena *arena); /* frees all blocks, retains some memory for the next */
void *ml_arena_alloc(ml_arena *arena, size_t bytes); /* 16-byte aligned, zeroed; raises */
char *ml_arena_format(ml_arena *arena, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
char *ml_arena_copy(ml_arena *arena, const void *bytes, size_t count); /* adds a final 0 */
#define ML_NEW(arena, type) ((type *)ml_arena_alloc(arena, sizeof(type)))
#define ML_NEW_ARRAY(arena, type, n) ((type *)ml_arena_alloc(arena, sizeof(type) * (size_t)(n)))

/* A growable array in an arena: struct { type *at; uint32_t count, capacity; } */
#define ML_VEC(type)                                                                               \
    struct {                                                                                       \
        type *at;                                                                                  \
        uint32_t count, capacity;                                                                  \
    }
/* Append a zeroed element; the value is a pointer to it, valid until the next push. */
#define ML_PUSH(arena, vec)                                                                        \
    ((vec)->count < (vec)->capacity                                                                \
         ? (vec)->at + (vec)->count++                                                              \
         : (__typeof__((vec)->at))ml_vec_grow(arena, &(vec)->at, &(vec)->count, &(vec)->capacity,  \
                                              sizeof *(vec)->at))
/* Of a full array. */
void *ml_vec_grow(ml_arena *arena, void *at, uint32_t *count, uint32_t *capacity, size_t size);
/* Room in an ML_VEC without elements for that many. */
#define ML_VEC_RESERVE(arena, vec, room)                                                           \
    ((vec)->at = (__typeof__((vec)->at))ml_arena_alloc(arena, sizeof *(vec)->at * (room)),         \
     (vec)->capacity = (room))

/* A text that grows; `text` is always terminated. */
typedef struct {
    ml_arena *arena;
    char *text;
    size_t length, capacity;
} ml_text;
void ml_text_add(ml_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A hash index from 64-bit hashes to u32 values; the caller compares keys. Grows, never shrinks. */
typedef struct {
    ml_arena *arena;
    struct ml_index_slot *slots;
    uint32_t count, capacity;
} ml_index;
enum { ML_INDEX_NONE = UINT32_MAX };
/* Make room for `count` values at once. */
void ml_index_reserve(ml_index *index, uint32_t count);
void ml_index_add(ml_index *index, uint64_t hash, uint32_t value);
/* The next value under `hash`, starting with *cursor = 0; ML_INDEX_NONE after the last. */
uint32_t ml_index_next(const ml_index *index, uint64_t hash, uint32_t *cursor);

uint64_t ml_hash(const void *bytes, size_t count, uint64_t seed);
/* The finalizer of SplitMix64 over a + (b + 1) * K, K odd: one-to-one in either. */
static inline uint64_t ml_mix(uint64_t a, uint64_t b) {
    uint64_t z = a + (b + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

#endif
