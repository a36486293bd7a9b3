/* The increment of a causal program: from the graph that computes logits for all positions of a
 * sequence, the graph that computes them for a few new positions of several sequences, with states
 * that hold what the new positions need of earlier ones.
 *
 * The whole program is over one sequence: every axis of `tokens` but `seq` has size 1. Row i of the
 * increment continues the sequence of slot slots[i]: its first count[i] new tokens stand at
 * positions start[i] .. start[i] + count[i] - 1. What a row with start 0 reads of states is what
 * a sequence begins with. New positions from count[i] on change nothing and their logits mean
 * nothing.
 *
 * States are of three kinds. A pool holds a value for each position, in the rows that `table` gives
 * (cached_attention.h); a ring holds the last `ring` positions of each slot, what attention with a
 * window reads; a slot state holds one value for each slot. Programs that derive with the same
 * ml_kept share their states.
 *
 * What depends on inputs that a prompt gives beside its tokens (`given`) is computed once a prompt,
 * into slot states: ml_increment_give.
 *
 * Raises ML_INVALID, with the Lua line, for what is not proven to be causal. */
#ifndef ML_INCREMENT_H
#define ML_INCREMENT_H

#include "runtime/graph/graph.h"

typedef enum { ML_KEPT_POOL, ML_KEPT_RING, ML_KEPT_SLOT } ml_kept_kind;
typedef struct {
    ml_kept_kind kind;
    ml_ref node;    /* of the whole program: whose values it holds */
    int64_t rows;   /* values along the axis of positions: 1 but for delayed values; 0: of chunks */
    int64_t ring;   /* of ML_KEPT_RING: the positions of each slot */
    uint32_t state; /* of the graph; its first axis is of positions or slots */
} ml_kept;
/* Fields of an ML_VEC, in an arena of its own. */
typedef struct {
    ml_arena *arena;
    ml_kept *at;
    uint32_t count, capacity;
} ml_kept_list;

typedef struct {
    ml_ref logits, tokens; /* of the whole program */
    ml_axis seq;           /* the axis of `tokens` that grows */
    ml_ref fed;            /* i32 {row, new}: the new tokens */
    ml_ref start, count;   /* i32 {row} */
    ml_ref slots;          /* i32 {row}; 0: row i is slot i */
    ml_ref table;          /* i32 {row, columns}; 0 where nothing is kept by position */
    int64_t pool, block;   /* positions of a pool, those of a block */
    int64_t slot_count;
    int64_t most; /* new positions of a row in any program that shares what is kept; 0: no rings */
    bool last;           /* logits of the last new position of each row alone */
    const ml_ref *given; /* inputs of the whole program that a prompt gives */
    int given_count;
} ml_increment;

typedef struct {
    ml_ref logits; /* {row, new, ...}, or {row, ...} where `last` */
    ML_VEC(ml_update) updates;
} ml_increment_result;

/* Appends to g. `kept` is read, and gets the states that are new; the updates are in `arena`. */
void ml_increment_derive(ml_graph *g, const ml_increment *in, ml_kept_list *kept, ml_arena *arena,
                         ml_increment_result *out);
/* What a prompt gives: out->updates write what the increment reads of it, from the whole program's
 * own inputs `given`, to the slot of the one row of `slots`. Of `in` no new tokens are read. */
void ml_increment_give(ml_graph *g, const ml_increment *in, ml_kept_list *kept, ml_arena *arena,
                       ml_increment_result *out);

#endif
