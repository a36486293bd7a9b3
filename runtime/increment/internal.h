/* Inside of runtime/increment. */
#ifndef ML_INCREMENT_INTERNAL_H
#define ML_INCREMENT_INTERNAL_H

#include "runtime/increment/increment.h"
#include "runtime/ops/attention/attention.h"

/* rows.c: what the elements of a node are: of positions, or dispatched. */
typedef enum {
    ROWS_OF_POSITIONS,
    ROWS_SORTED,  /* of rows, in the order of the sort `since` */
    ROWS_ORDER,   /* the same: where they come from, divided by `divisor` */
    ROWS_COUNTED, /* how many rows have each of the axis `groups` as their key: the sum `since` */
    ROWS_ENDS,    /* running sums of that */
    ROWS_STARTS,  /* ... without the group's own */
    /* capacity.c: of {groups, places}, in which rows of each group lie one after another */
    ROWS_TAKEN,        /* whether a row is there */
    ROWS_INDEX,        /* its index in the order of the sort */
    ROWS_PLACED_ORDER, /* where it comes from, divided by `divisor` */
    ROWS_PLACED,       /* its values */
    ROWS_RETURNED      /* of positions again, of rows whose `rank` is below `capacity` */
} rows_kind;

/* How a node of the whole program depends on positions. */
typedef struct {
    bool fed;      /* it depends on the tokens */
    bool given;    /* not so, but on what the prompt gives: of the others `batch` alone counts */
    ml_axis axis;  /* then: its axis of positions */
    ml_axis other; /* of a pair of positions the second axis of them; 0: of one position */
    ml_axis over;  /* the axis of positions of its operands that it contracts; 0: none */
    ml_axis batch; /* of size 1, which increments leave out; 0: none */
    int64_t chunk; /* positions in chunks of so many; 0: not. With `outer`, its axis of chunks,
                      `axis` is that within a chunk; without, `axis` is that of chunks */
    ml_axis outer;
    int64_t lead;  /* position p makes known the element p + lead, of chunks (p + lead) / chunk */
    int64_t inner; /* elements of the axis for each position, which increments keep; 0: one */
    rows_kind kind;
    ml_ref since, keys;     /* where dispatched: of what; the keys that are counted */
    ml_axis groups, places; /* no groups: one axis of both */
    ml_ref counts, rank;
    int64_t divisor, capacity;
} place;

/* Which positions a value is computed for: all new ones of a row, or the last alone. */
typedef enum { AT_NEW, AT_LAST } at_positions;

/* Axes `axis`, `outer` and `batch` of a node of the whole program have the axes of `by` instead. */
typedef struct {
    ml_axis axis, batch, outer;
    ml_type by;
} lifting;

typedef struct {
    ml_ref node;
    place place;
    at_positions at;
    ml_ref value;
} table_entry;

/* Nodes first .. end - 1 are the definition of an attention. */
typedef struct {
    ml_ref attention, first, end;
} definition;

/* A node of queries and keys: what it is for the new queries and all keys. */
typedef struct {
    ml_ref node;
    ml_axis query, key;
    at_positions at;
    ml_ref value;
} wide_entry;

typedef struct {
    ml_graph *g;
    ml_arena *arena;
    const ml_increment *in;
    ml_kept_list *kept;
    ml_increment_result *out;
    ml_ref end;        /* nodes of the whole program are before it */
    bool *live;        /* by node: the logits depend on it */
    place *places;     /* by node */
    uint8_t *needs;    /* by node: a bit for each at_positions */
    ml_ref *values[2]; /* by at_positions and node; 0: not computed */
    ml_axis row, fresh, slot, pool, past;
    int64_t rows, size[2]; /* of `row`; of `fresh` by at_positions */
    ml_ref position[2];    /* i32 {row, new} */
    ml_ref valid;          /* bool {row, new}: i < count */
    ml_ref begins, active; /* bool {row}: start == 0; count > 0 */
    ML_VEC(table_entry) tables;
    ml_index table_index;
    ML_VEC(definition) definitions;
    ML_VEC(wide_entry) wide;
    ml_index wide_index;
} increment;

/* refuse.c: raise, for node n of the whole program. `help`: what would mend it; may be NULL. */
_Noreturn void increment_refuse(increment *inc, ml_ref n, const char *help, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* types.c */
ml_type increment_plain(ml_dtype dtype);
void increment_push(ml_type *t, ml_axis axis, int64_t size);
/* t without the axes a and b, which it may lack. */
ml_type increment_without(const ml_type *t, ml_axis a, ml_axis b);
ml_type increment_lifted_type(const ml_type *t, const lifting *by);
/* The place's axes in the operand of a RENAME, where others have its names; p itself for other ops.
 */
place increment_inner_place(const increment *inc, ml_ref n, const place *p);
/* Whether an argument of n is this axis. */
bool increment_names(const ml_graph *g, ml_ref n, ml_axis axis);
/* Whether n computes a part along an axis from the same part of its operands. */
bool increment_by_parts(const ml_graph *g, ml_ref n, ml_axis axis);
/* n without an axis of size 1; n itself where it has none of that name. */
ml_ref increment_squeeze(ml_graph *g, ml_ref n, ml_axis axis);
/* Axis `axis` of source 0, or of the others, as `axis` of the result of a RENAME; else itself. */
ml_axis increment_renamed(const ml_graph *g, ml_ref n, ml_axis axis);
ml_axis increment_before(const ml_graph *g, ml_ref n, ml_axis axis);
/* The same; 0 where n has no such axis. */
ml_axis increment_inner(const ml_graph *g, ml_ref n, ml_axis axis);

/* reads.c: what n reads of its operands' positions. */
bool increment_mixes(const increment *inc, ml_ref n); /* others than its own */
/* Of operand i of n: the lead at which n reads it. */
int64_t increment_source_lead(const increment *inc, ml_ref n, int i);
/* Whether n is attention to keys and values that no token gives, which mixes no positions. */
bool increment_crosses(const increment *inc, ml_ref n);
bool increment_is_running_sum(const increment *inc, ml_ref n);
/* x:cumsum(chunks) - x: of the chunks before. */
bool increment_exclusive(const increment *inc, ml_ref n);
/* A merge of chunks with an axis of as many elements as one has positions: values of chunks become
 * those of positions. */
bool increment_spreads(const increment *inc, ml_ref n);
/* n looks ahead, or what it is computed of does: raises at the line that is the first to. */
_Noreturn void increment_refuse_ahead(increment *inc, ml_ref n);

/* lift.c: node n by its lifted operands. */
ml_ref increment_lift(increment *inc, ml_ref n, const ml_ref *sources, const lifting *by);

/* definitions.c: the logits, with some attention by its definition. */
ml_ref increment_with_definitions(increment *inc, ml_ref logits);
/* The attention of whose definition n is; 0: of none. */
ml_ref increment_defines(const increment *inc, ml_ref n);

/* places.c: all that the logits depend on. Raises for what is not causal. */
void increment_find_places(increment *inc);

/* keys.c: keys by which rows are sorted and counted. */
const place *increment_source_place(const increment *inc, ml_ref n, int i);
/* Elements of positions, one or several each, all of which the positions make known. */
bool increment_of_positions(const place *p);
bool increment_is(const increment *inc, ml_ref n, ml_op op);
int64_t increment_size_along(const increment *inc, ml_ref n, ml_axis axis);
/* What n permutes, and merges and renames. */
ml_ref increment_without_order(const increment *inc, ml_ref n, bool merges);
ml_ref increment_without_broadcast(const increment *inc, ml_ref n); /* or permutation */
/* No element of n is below 0: such a key would stand before all groups, and move them. */
bool increment_is_index(const increment *inc, ml_ref n);
/* The keys that n, a sum of `eq`, counts for each element of *groups: 0 where it counts none. */
ml_ref increment_counted_keys(const increment *inc, ml_ref n, ml_axis *groups);
/* The counts are those of this sort's keys. */
bool increment_same_keys(const increment *inc, const place *counts, const place *sorted);

/* rows.c: several elements a position, and their dispatch by keys. */
/* Gives n's place where it is of those. */
bool increment_find_rows(increment *inc, ml_ref n, place *p);
/* n has one element a position, and is not dispatched. */
void increment_require_positions(increment *inc, ml_ref n);
int64_t increment_each(const place *p); /* elements of its axis for each position */

/* capacity.c: the same where n is of places of groups. */
bool increment_find_capacity(increment *inc, ml_ref n, place *p);

/* dispatch.c: their values. */
bool increment_is_rows(const increment *inc, ml_ref n); /* increment_rows computes it */
ml_ref increment_rows(increment *inc, ml_ref n, at_positions at);

/* tables.c: what depends on no token, at the positions `at` of a place's axes. */
ml_ref increment_table(increment *inc, ml_ref n, const place *p, at_positions at);
/* The same along the axis of p, which has several elements a position: {row, new, axis, ...}. */
ml_ref increment_inner_table(increment *inc, ml_ref n, const place *p, at_positions at);
/* The first `count` elements along the axis of a node that depends on tokens and whose lead is no
 * less than that: {past, ...}. Of another node, along `axis`. */
ml_ref increment_prefix(increment *inc, ml_ref n, int64_t count);
ml_ref increment_part(increment *inc, ml_ref n, const place *p, int64_t first, int64_t last);

/* moves.c */
/* n by its lifted operands, where it computes each position from the same ones of its operands:
 * also where it renames, splits or merges the axes of positions and of the batch. */
ml_ref increment_move(increment *inc, ml_ref n, const ml_ref *sources, const lifting *by);
/* positions.c */
lifting increment_by(const increment *inc, const place *p, at_positions at);
ml_ref increment_index(increment *inc, int64_t lead, at_positions at); /* position + lead */
/* The same as an index along the place's axis, or its outer one. */
ml_ref increment_place_index(increment *inc, const place *p, bool outer, at_positions at);
/* How many positions an element of this axis has: that of n's place; 0 for others. */
int64_t increment_unit(const place *p, ml_axis axis);
/* Of the new positions of each row the last. */
ml_ref increment_last(increment *inc, ml_ref value);

/* beyond.c */
/* The results of n, which names the axis `key` of positions, depend along `query` on no element of
 * `key` that is more than `ahead` after it: comparisons of positions make those constant. */
bool increment_masked(increment *inc, ml_ref n, ml_axis query, ml_axis key, int64_t ahead);

/* contraction.c: sums over positions of which a mask hides the later ones. */
/* Gives n's place where it is one. */
bool increment_find_contraction(increment *inc, ml_ref n, const place *operands, place *out);
void increment_need_contraction(increment *inc, ml_ref n);
ml_ref increment_contraction(increment *inc, ml_ref n, at_positions at);

/* chunks.c: positions that a script cuts into chunks. */
/* Sums over a whole chunk, running sums within or over chunks: gives n's place where it is one. */
bool increment_find_chunks(increment *inc, ml_ref n, const place *operands, place *out);
ml_ref increment_spread(increment *inc, ml_ref n, at_positions at);
/* Elements of s along the chunk that `query` is in at each position, {row, new, key, ...}; those
 * behind the position are 0. */
ml_ref increment_window(increment *inc, ml_ref s, const place *query, ml_axis key, at_positions at);
ml_ref increment_chunk_cumsum(increment *inc, ml_ref n, at_positions at);
/* {row, new}: this position is the last of a chunk, whose value it makes known. */
ml_ref increment_ends_chunk(increment *inc, const place *p);
/* value {row, new, ...} of the last position so far that ended a chunk, where n is over chunks;
 * value itself elsewhere. */
ml_ref increment_hold(increment *inc, ml_ref n, ml_ref value);

/* recall.c: gathers of earlier positions. */
/* Gives n's place where it is one. */
bool increment_find_recall(increment *inc, ml_ref n, place *out);
bool increment_recalls(const increment *inc, ml_ref n);
void increment_need_recall(increment *inc, ml_ref n);
ml_ref increment_recall(increment *inc, ml_ref n, at_positions at);

/* operands.c */
/* Node s, which depends on tokens, at a lead that is not above its own. */
ml_ref increment_value(increment *inc, ml_ref s, int64_t lead, at_positions at);
/* Operand i of n, at the lead at which n reads it. */
ml_ref increment_operand(increment *inc, ml_ref n, int i, at_positions at);

/* states.c */
/* The slot state that holds n, and as many rows: of type {slot, value's axes}. */
uint32_t increment_slot_state(increment *inc, ml_ref n, int64_t rows, const ml_type *value);
/* The positions of a ring that holds, until the new positions are read, the `window` before each;
 * 0 where a pool of all positions is no larger. */
int64_t increment_ring(const increment *inc, int64_t window);
/* i32 {row, columns}: the blocks of pools, or of rings of so many positions; *columns: its axis. */
ml_ref increment_blocks(increment *inc, int64_t ring, ml_axis *columns);
/* {row, ...} of a slot state as it is. */
ml_ref increment_slot_rows(increment *inc, uint32_t state);
/* value {row, ...}: what the slots of the rows hold from now on. */
void increment_slot_give(increment *inc, uint32_t state, ml_ref value);
/* {row, ...} of a slot state, `initial` where a sequence begins. */
ml_ref increment_slot_read(increment *inc, uint32_t state, ml_ref initial);
/* value {row, ...}: what rows with new positions hold from now on. */
void increment_slot_write(increment *inc, uint32_t state, ml_ref value);
/* n's value as it was `delay` positions before; {row, new, ...}. */
ml_ref increment_delayed(increment *inc, ml_ref n, int64_t delay);
/* {row, new = rows + new, ...}: n's last `rows` values before the new ones, then those. */
ml_ref increment_stacked(increment *inc, ml_ref n, int64_t rows);
/* The pool that holds s at this lead, {pool, ...}, with `value`, that of the new positions: element
 * p + lead of the axis is in the row of position p. `ring` > 0: rings of so many positions. */
ml_ref increment_pool(increment *inc, ml_ref s, int64_t lead, int64_t ring, ml_ref value);
/* The rows of pools in which these positions of each row lie. */
ml_ref increment_pool_rows(increment *inc, ml_ref position);
/* All elements of s along its axis of positions, {row, axis, ...}; 0 where no position so far makes
 * them known. */
ml_ref increment_keys(increment *inc, ml_ref s);

/* latent.c: keys and values that are linear in less. */
typedef struct latent latent;
/* What attention n keeps instead of its keys and values; NULL where it keeps these. */
const latent *increment_latent(increment *inc, ml_ref n);
void increment_need_latent(increment *inc, const latent *l);
ml_axis increment_latent_axis(increment *inc); /* of the features that are kept */
ml_ref increment_latent_pool(increment *inc, const latent *l, ml_ref n, int64_t ring);
/* q {row, new, heads, head_dim} over the features; values {row, new, heads, head_dim = size} from
 * sums over them. */
ml_ref increment_latent_query(increment *inc, const latent *l, const ml_attention_args *a,
                              ml_ref q);
ml_ref increment_latent_value(increment *inc, const latent *l, const ml_attention_args *a,
                              ml_ref value, int64_t size);

/* given.c */
/* Whether n is an input that a prompt gives, or one of its operands depends on those. */
bool increment_gives(const increment *inc, ml_ref n);
place increment_given_place(const increment *inc, ml_ref n);
place increment_cross_place(increment *inc, ml_ref n, place combined);
/* Raises where n, which depends on tokens, reads what is given as no increment can yet. */
void increment_check_given(increment *inc, ml_ref n);
/* {row, ...} of what is given; along `axis`, if it has that, at the positions shifted by `lead`. */
ml_ref increment_given(increment *inc, ml_ref n, ml_axis axis, int64_t lead, at_positions at);
/* {row, ...} of what is given, {...} of what depends on no prompt either; without the batch. */
ml_ref increment_without_tokens(increment *inc, ml_ref n, ml_axis batch);
/* Slots get all that the increment reads of what is given. */
void increment_hold_given(increment *inc);

/* cross.c: attention to it; {row, new, ...} */
ml_ref increment_cross(increment *inc, ml_ref n, at_positions at);

/* ends.c */
/* PAD and CONCAT along the positions. */
ml_ref increment_pad(increment *inc, ml_ref n, at_positions at);
ml_ref increment_concat(increment *inc, ml_ref n, at_positions at);
/* value {row, new, ...} of node s at `lead`, 0 beyond the ends of its axis. */
ml_ref increment_bounded(increment *inc, ml_ref value, int64_t lead, int64_t first, int64_t last,
                         at_positions at);

/* mix.c, attend.c, scan.c: ops that read earlier positions; {row, new, ...} */
ml_ref increment_attention(increment *inc, ml_ref n, at_positions at);
ml_ref increment_cumsum(increment *inc, ml_ref n);
/* The sum of value, {row, new, ...}, and of those at earlier positions; n's state. */
ml_ref increment_running_sum(increment *inc, ml_ref n, ml_ref value);
/* A running sum as it was one position before, which its state holds. */
ml_ref increment_sum_before(increment *inc, ml_ref n);
ml_ref increment_conv(increment *inc, ml_ref n);
ml_ref increment_linear_scan(increment *inc, ml_ref n);
ml_ref increment_recurrence(increment *inc, ml_ref n);
/* step.c: the roots of recurrence n's step on rows, of `leaves` in the place of its parameters.
 * Refusals are at `owner`, within whose step n may be. */
void increment_step(increment *inc, ml_ref owner, ml_ref n, const lifting *by, const ml_ref *leaves,
                    ml_ref *roots);
/* cross.c: the score function of attention n, for attention of these operands; 0: none. */
ml_ref increment_score_function(increment *inc, ml_ref n, const ml_ref *sources, int count,
                                const ml_attention_args *args);

#endif
