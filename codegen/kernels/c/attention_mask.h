/* Which keys a query of attention sees, in C and in CUDA: causal masks, sliding windows, and
 * kernels that work on a part of longer sequences.
 *
 * Rows count from the first one that the kernel has: `qi` is a query position, `kv` a key position.
 * Query qi is at the position of key qi + SHIFT. Where the host does not know the offsets of the
 * parts (PLACED), they are two operands, and POSITIONS declares q_start, k_start and shift; each
 * function that names a mask or a score begins with it. A file that includes this one defines
 * OPERANDS, the array of pointers. */
#pragma once
#ifndef MLUA_EMBEDDED
#define CAUSAL 1
#define WINDOW 0 /* keys that a query sees, the newest being its own; 0: all */
#define PLACED 0 /* whether the parts' offsets are operands PLACED_AT and the next */
#define PLACED_AT 0
#define OFFSET (0) /* SHIFT, or PLACED: what is added to the difference of the offsets */
#endif

#if PLACED
#define POSITIONS                                                                                  \
    const int q_start = *(const int *)OPERANDS[PLACED_AT],                                         \
              k_start = *(const int *)OPERANDS[PLACED_AT + 1];                                     \
    const int shift = q_start - k_start + OFFSET;                                                  \
    (void)q_start, (void)k_start, (void)shift
#define SHIFT shift
#else
#define POSITIONS
#define SHIFT OFFSET
#endif

/* VISIBLE: does query qi see key kv? Of a tile of queries query .. last_query by keys key ..
 * key + keys - 1, NEEDS_MASK: may the mask hide a part of it; HIDDEN: all of it? */
#if CAUSAL && WINDOW
#define VISIBLE(qi, kv) (kv <= qi + SHIFT && qi + SHIFT - kv < WINDOW)
#define NEEDS_MASK(query, last_query, key, keys)                                                   \
    (key + keys - 1 > query + SHIFT || last_query + SHIFT - key >= WINDOW)
#define HIDDEN(query, last_query, key, keys)                                                       \
    (key > last_query + SHIFT || query + SHIFT - (key + keys - 1) >= WINDOW)
#elif CAUSAL
#define VISIBLE(qi, kv) (kv <= qi + SHIFT)
#define NEEDS_MASK(query, last_query, key, keys) (key + keys - 1 > query + SHIFT)
#define HIDDEN(query, last_query, key, keys) (key > last_query + SHIFT)
#elif WINDOW
#define VISIBLE(qi, kv) (qi + SHIFT - kv < WINDOW)
#define NEEDS_MASK(query, last_query, key, keys) (last_query + SHIFT - key >= WINDOW)
#define HIDDEN(query, last_query, key, keys) (query + SHIFT - (key + keys - 1) >= WINDOW)
#else
#define VISIBLE(qi, kv) (1)
#define NEEDS_MASK(query, last_query, key, keys) (0)
#define HIDDEN(query, last_query, key, keys) (0)
#endif

/* Queries query .. last_query see keys FIRST_KEY .. END_KEY - 1 at most, and keys key .. last_key
 * are seen by queries FIRST_QUERY .. END_QUERY - 1 at most. Ranges may be empty, with end < first.
 */
#if CAUSAL
#define END_KEY(last_query) (last_query + SHIFT + 1 < KV_SEQ ? last_query + SHIFT + 1 : KV_SEQ)
#define FIRST_QUERY(key) (key > SHIFT ? key - SHIFT : 0)
#else
#define END_KEY(last_query) KV_SEQ
#define FIRST_QUERY(key) 0
#endif
#if WINDOW
#define FIRST_KEY(query) (query + SHIFT >= WINDOW ? query + SHIFT - WINDOW + 1 : 0)
#define END_QUERY(last_key) (last_key + WINDOW - SHIFT < SEQ ? last_key + WINDOW - SHIFT : SEQ)
#else
#define FIRST_KEY(query) 0
#define END_QUERY(last_key) SEQ
#endif
