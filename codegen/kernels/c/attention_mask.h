/* Which keys a query of attention sees, in C and in CUDA: causal masks, sliding windows, and
 * kernels that work on a part of longer sequences.
 *
 * Rows count from the first one that the kernel has: `qi` is a query position, `kv` a key position.
 * Query qi is at the position of key qi + SHIFT. Where the host does not know where the parts begin
 * (PIECES), operands say it, and POSITIONS declares what it needs of them; each function that names
 * a mask or a score begins with it. Queries of two pieces have two places, and SHIFT and Q_START
 * depend on `head`. A file that includes this one defines OPERANDS, the array of pointers. */
#pragma once
#ifndef MLUA_EMBEDDED
#define CAUSAL 1
#define WINDOW 0 /* keys that a query sees, the newest being its own; 0: all */
#define PIECES 0 /* 0: SHIFT is known; else of queries, whose places are operands PLACED_AT.. */
#define PLACED_AT 0
#define OFFSET (0) /* SHIFT, or what is added to the difference of the places */
#endif

#if PIECES
#define PLACE(i) (*(const int *)OPERANDS[PLACED_AT + i])
#if PIECES == 2
#define POSITIONS                                                                                  \
    const int q_start = PLACE(0), apart = PLACE(1) - q_start, k_start = PLACE(2);                  \
    const int shift = q_start - k_start + OFFSET;                                                  \
    (void)q_start, (void)apart, (void)k_start, (void)shift
#define Q_START (q_start + (head % 2 ? apart : 0))
#define SHIFT (shift + (head % 2 ? apart : 0))
#define LEAST_SHIFT (shift + (apart < 0 ? apart : 0))
#define MOST_SHIFT (shift + (apart < 0 ? 0 : apart))
#else
#define POSITIONS                                                                                  \
    const int q_start = PLACE(0), k_start = PLACE(1), shift = q_start - k_start + OFFSET;          \
    (void)q_start, (void)k_start, (void)shift
#define Q_START q_start
#define SHIFT shift
#endif
#else
#define POSITIONS
#define SHIFT OFFSET
#endif
#if PIECES < 2
#define LEAST_SHIFT SHIFT
#define MOST_SHIFT SHIFT
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
 * EARLIEST_QUERY and LATEST_END: the same of the queries of all pieces. */
#if CAUSAL
#define END_KEY(last_query) (last_query + SHIFT + 1 < KV_SEQ ? last_query + SHIFT + 1 : KV_SEQ)
#define FIRST_QUERY(key) (key > SHIFT ? key - SHIFT : 0)
#define EARLIEST_QUERY(key) (key > MOST_SHIFT ? key - MOST_SHIFT : 0)
#else
#define END_KEY(last_query) KV_SEQ
#define FIRST_QUERY(key) 0
#define EARLIEST_QUERY(key) 0
#endif
#if WINDOW
#define FIRST_KEY(query) (query + SHIFT >= WINDOW ? query + SHIFT - WINDOW + 1 : 0)
#define END_QUERY(last_key) (last_key + WINDOW - SHIFT < SEQ ? last_key + WINDOW - SHIFT : SEQ)
#define LATEST_END(last_key)                                                                       \
    (last_key + WINDOW - LEAST_SHIFT < SEQ ? last_key + WINDOW - LEAST_SHIFT : SEQ)
#else
#define FIRST_KEY(query) 0
#define END_QUERY(last_key) SEQ
#define LATEST_END(last_key) SEQ
#endif
