/* The dataflow graph: an arena of immutable, hash-consed nodes.
 *
 * A tensor type is a dtype and an ordered list of named axes with sizes; the order is the order in
 * memory (last axis contiguous) and means nothing else: every op finds axes by name. A node is an
 * op, sources, integer arguments, a type and an origin (Lua file:line and module path; not part
 * of its identity). Sources come before their users, so ascending order is a topological order.
 *
 * There is one session graph a Lua state, which scripts append to; a program copies what its
 * outputs reach (ml_graph_extract) into a graph of its own, which passes rewrite by copying.
 *
 * Broadcasting is by name and implicit in MAP ops: one operand has every axis that the others
 * have, and the result has its axes in its order. Operands with no axes (numbers) fit anything.
 *
 * Arguments (ml_graph_args): the column ARGS of ops.def. Axes are ml_axis ids, doubles are
 * stored by their bits. CONST, CAST, RANDOM, BROADCAST, PERMUTE, SCATTER_ADD and DOT have dtype,
 * axes or order of the node as a further argument. PLACE lists mesh axes by name, ascending;
 * axis 0: whole over that mesh axis.
 * A program that was sharded (ml_shard) has STATEs and INPUTs with the types of one rank's part:
 * the axes of the table's type, with sizes that divide its sizes. RANDOM may have a second source:
 * the global index of each element, i64, whose axes are the result's (before sharding, too).
 * DOT may have a third source, a number in f32: a scaled product, that number times the sum of
 * products of two floats of 8 bits, whose dtypes may differ; rounded to the node's own dtype.
 * CONST of an int dtype holds the integer itself. CONST always has no axes: BROADCAST adds them. */
#ifndef ML_GRAPH_H
#define ML_GRAPH_H

#include <assert.h>

#include "runtime/base/memory.h"
#include "runtime/base/status.h"
#include "runtime/graph/ops.h"

enum { ML_MAX_AXES = 8, ML_MAX_OUTPUTS = 16 };
typedef uint32_t ml_ref;  /* a node; 0 is none */
typedef uint16_t ml_axis; /* an interned axis name; 0 is none */

typedef struct {
    uint8_t dtype, rank;
    ml_axis axis[ML_MAX_AXES];
    int64_t size[ML_MAX_AXES];
} ml_type;

typedef struct {
    const char *file;   /* the Lua chunk; NULL where unknown */
    int line;           /* 1-based */
    const char *module; /* module path such as "blocks.3.attn"; "" outside of any */
    const char *name;   /* what the script calls it where that is known; may be NULL */
} ml_origin;

enum {
    ML_NODE_GRADIENT = 1, /* the gradient of a state: for memory accounts */
    ML_NODE_BACKWARD = 2, /* made by autodiff */
    ML_NODE_COPY = 4,     /* a deliberate second copy (recomputation): part of its identity */
    ML_NODE_FUNCTION = 8, /* of an attention's functions or a recurrence's step, reached by
                             arguments alone and never computed itself: part of its identity */
    ML_NODE_PROMPT = 16,  /* schedule early: before the next product or routine, never fused into a
                             later kernel. Shortens the live ranges of its operands, which are
                             large and have no later reader */
    ML_NODE_FP8 = 32,     /* DOT, RAGGED_*: a product of a block, to be computed of operands of
                             8 bits (ops/quantize/scale_products.c) */
};
typedef struct {
    uint8_t op, flags;
    uint16_t source_count, arg_count;
    uint32_t type;    /* index of an interned type */
    uint32_t sources; /* first of source_count in the graph's pool */
    uint32_t args;    /* first of arg_count in the graph's pool */
    uint32_t origin;  /* index of an interned origin */
} ml_node;

/* State: a named tensor that lives across steps and programs. The same table serves all graphs of
 * a session. Its initial value is a node of the session graph without INPUTs. */
typedef enum {
    ML_STATE_PARAMETER,
    ML_STATE_OPTIMIZER,
    ML_STATE_GRADIENT, /* a sum of gradients over microbatches */
    ML_STATE_OTHER,
    ML_STATE_CACHE, /* a cached parameter (param_cache.c): of one rank's part. Plans that cache
                       the same value share the state; no script makes one */
} ml_state_kind;
typedef struct {
    const char *name; /* unique; the key of its randomness and of checkpoints */
    ml_state_kind kind;
    ml_type type;
    ml_ref initial; /* in the session graph */
    ml_origin origin;
    bool no_fp8;     /* its products keep the compute dtype with --dtype fp8 */
    uint32_t gradient_of; /* of ML_STATE_GRADIENT: 1 + the parameter; 0: not known */
    uint64_t recipe; /* of ML_STATE_CACHE: a hash of what it is computed from, and how */
    int part_count;  /* of ML_STATE_CACHE: the values that lie side by side in it; 0: it is one */
    const uint64_t *parts; /* their recipes */
} ml_state;
typedef struct {
    const char *name;
    ml_type type;
} ml_input;

typedef struct ml_graph ml_graph;

ml_graph *ml_graph_new(void); /* raises */
void ml_graph_free(ml_graph *g);
ml_arena *ml_graph_arena(ml_graph *g);      /* lives as long as the graph */
uint32_t ml_graph_count(const ml_graph *g); /* nodes are 1 .. count-1 */

/* Axis names. */
ml_axis ml_axis_named(ml_graph *g, const char *name); /* interns */
const char *ml_axis_name(const ml_graph *g, ml_axis axis);
/* A new name "stem'N" that no script can write. */
ml_axis ml_axis_fresh(ml_graph *g, const char *stem);
int ml_type_find(const ml_type *t, ml_axis axis);     /* position, or -1 */
int64_t ml_type_size(const ml_type *t, ml_axis axis); /* of the axis; 0 where t lacks it */
/* The type with the axis at `position` first. */
ml_type ml_type_fronted(const ml_type *t, int position);
/* What a tensor may have at most, and all states together: 2^57, so that sums of a few sizes in
 * bytes stay within int64. */
#define ML_MAX_ELEMENTS ((int64_t)1 << 57)
int64_t ml_type_elements(const ml_type *t);
/* What each of so many equal parts of an axis holds: where they do not divide it, rounded up, a
 * large part to a multiple of 16 so that rows are aligned in any dtype. The last parts are filled
 * up. */
int64_t ml_part_size(int64_t whole, int64_t parts);
/* Whether `part` elements can be one of several equal parts of an axis of `whole`. */
bool ml_is_part(int64_t whole, int64_t part);
int64_t ml_type_bytes(const ml_type *t);
bool ml_type_equal(const ml_type *a, const ml_type *b);     /* dtype, axes, sizes and order */
bool ml_type_same_axes(const ml_type *a, const ml_type *b); /* as sets, with sizes; any order */
void ml_type_print(const ml_graph *g, const ml_type *t, ml_text *out); /* f32[batch=8, embed=64] */

/* Private to graph.c but for the readers below, which are no calls: passes do little else.
 * Tables are shared by a graph and all that derive from it; entries never move. */
typedef struct {
    ml_arena *arena;
    ML_VEC(const char *) axes;
    ml_index axis_index;
    uint32_t fresh;
    ML_VEC(ml_type *) types;
    ml_index type_index;
    ML_VEC(ml_origin *) origins;
    ml_index origin_index;
    ML_VEC(ml_state *) states;
    int64_t state_elements; /* of all states */
    ML_VEC(ml_input *) inputs;
} ml_graph_tables;

struct ml_graph {
    ml_arena *arena;
    ml_graph_tables *tables;
    bool owns_tables;
    uint8_t flags;   /* of the nodes to come */
    uint32_t origin; /* of the nodes to come */
    ML_VEC(ml_node) nodes;
    /* What finds equal nodes (graph.c); none before one is looked up. */
    struct ml_graph_list *lists;             /* of each node: those whose newest operand it is */
    struct ml_graph_slot *slots;             /* a hash table of those that no list has room for */
    uint32_t list_count, slot_count, hashed; /* slots: a power of two; how many have a node */
    uint32_t indexed;      /* nodes before this one are found; the others when one is looked up */
    uint32_t expected;     /* nodes that it is likely to get */
    struct graph_log *log; /* of an open recording (recording.h); or NULL */
    /* Pools. Growing one leaves the old block in the arena, so pointers into it stay valid. */
    ML_VEC(ml_ref) sources;
    ML_VEC(int64_t) args;
};

/* Reading nodes. */
static inline const ml_node *ml_graph_node(const ml_graph *g, ml_ref n) {
    assert(n && n < g->nodes.count);
    return &g->nodes.at[n];
}
static inline const ml_type *ml_graph_type(const ml_graph *g, ml_ref n) {
    return g->tables->types.at[ml_graph_node(g, n)->type];
}
static inline const ml_ref *ml_graph_sources(const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    return node->source_count ? g->sources.at + node->sources : NULL;
}
static inline ml_ref ml_graph_source(const ml_graph *g, ml_ref n, int i) {
    assert(i < ml_graph_node(g, n)->source_count);
    return ml_graph_sources(g, n)[i];
}
static inline const int64_t *ml_graph_args(const ml_graph *g, ml_ref n) {
    const ml_node *node = ml_graph_node(g, n);
    return node->arg_count ? g->args.at + node->args : NULL;
}
/* A product of operands in 8 bits: a DOT whose third operand is their scale. */
static inline bool ml_is_scaled_dot(const ml_graph *g, ml_ref n) {
    return ml_graph_node(g, n)->op == ML_OP_DOT && ml_graph_node(g, n)->source_count == 3;
}
const ml_origin *ml_graph_origin(const ml_graph *g, ml_ref n);
bool ml_graph_constant(const ml_graph *g, ml_ref n, double *value); /* CONST, or BROADCAST of one */
int ml_op_outputs(const ml_graph *g, ml_ref n); /* number of outputs, 1 for most */

/* Nodes made from now on carry this origin and these flags. */
void ml_graph_set_origin(ml_graph *g, const ml_origin *origin);
void ml_graph_set_flags(ml_graph *g, uint8_t flags);
void ml_graph_mark(ml_graph *g, ml_ref n, uint8_t flags); /* adds flags to a node */

/* States and inputs; ids count from 0. */
uint32_t ml_graph_add_state(ml_graph *g, const ml_state *state); /* name may be NULL until named */
ml_state *ml_graph_state(const ml_graph *g, uint32_t id);
uint32_t ml_graph_state_count(const ml_graph *g);
uint32_t ml_graph_add_input(ml_graph *g, const ml_input *input);
const ml_input *ml_graph_input(const ml_graph *g, uint32_t id);
uint32_t ml_graph_input_count(const ml_graph *g);

/* The one constructor: checks operands, infers the type, hash-conses. Raises ML_INVALID with the
 * operands of the error for bad operands. `type` serves the ops whose type the arguments do not
 * give (CONST and CAST dtype, RANDOM, BROADCAST, PERMUTE, SCATTER_ADD, DOT dtype; PARAM; optional
 * for STATE and INPUT: the type of one rank's part): NULL elsewhere. Float operands of MAP, DOT,
 * CONCAT and attention are promoted to the widest by CASTs. Does not simplify. */
ml_ref ml_graph_add(ml_graph *g, ml_op op, const ml_ref *sources, int source_count,
                    const int64_t *args, int arg_count, const ml_type *type);
/* Copy node n of `from` with other sources (already in g). Axis ids are mapped by name unless the
 * graphs share tables (ml_graph_extract makes them share). Keeps origin and flags. */
ml_ref ml_graph_copy(ml_graph *g, const ml_graph *from, ml_ref n, const ml_ref *sources);

/* An empty graph that shares axis, type, origin, state and input tables with `parent`, which must
 * outlive it: what passes copy into. */
ml_graph *ml_graph_derive(const ml_graph *parent);

enum { ML_MAX_MESH = 8 };
/* Which of a program's FLOPs, counted for all ranks together and without those on parameters,
 * gradients and optimizer states, the ranks along a mesh axis do not share: each does all of them.
 * And the node with the most of them. */
typedef struct {
    double flops, most;
    const ml_origin *origin;
    ml_axis axis; /* of its axes, the first that the layout lists; 0: none */
    int64_t size;
} ml_undivided;
typedef struct {
    double flops;
    ml_undivided over[ML_MAX_MESH];
} ml_division;

/* A program: what a graph computes in one step. Updates assign states at the step's end. */
typedef struct {
    uint32_t state;
    ml_ref value;
    bool part;     /* of ML_STATE_CACHE: the value is that of some elements, one piece of memory, */
    int64_t start; /* from this one on; the others stay as they are */
} ml_update;
typedef struct {
    ml_ref *outputs;
    int output_count;
    ml_update *updates;
    int update_count;
    const char *name; /* for dumps and messages; may be NULL */
    int kept;         /* the last outputs, which stay where the sharding rule puts them (stage.h) */
    int microbatches; /* runs of one step, which pipeline stages may overlap; 0 is 1 */
    bool often;       /* it runs many times before anything sets what it reads */
    bool any_plan;    /* it is not run: the first plan that fits will do, or an estimate of it */
    bool estimate;    /* it is not run: an estimate of its best plan will do (ml_plan's `fewer`) */
    bool mixed;       /* microbatches of other programs are of the same steps, whose number varies:
                         `microbatches` are the most */
    bool step;        /* of a recurrence: PARAM nodes are its leaves (recurrence.h) */
    /* Where ml_shard bounds what ranks exchange, it adds one more output, behind all others: f32
     * over so many exchanges, 0 where all rows found a place, else the factor that would do. Under
     * pipeline stages, of this rank alone. */
    int overflow_count;
    const ml_origin *const *overflow_origins;
    ml_division division; /* set by ml_shard */
} ml_roots;
/* A new graph with only what the roots reach, which shares axis, state, input and origin tables
 * with `from` (`from` must outlive it). *roots is rewritten in place. */
ml_graph *ml_graph_extract(const ml_graph *from, ml_roots *roots);

/* Short forms for passes (build.c). Arithmetic folds constants and drops x+0, x*1. */
ml_ref ml_const(ml_graph *g, ml_dtype dtype, double value);
ml_ref ml_const_int(ml_graph *g, ml_dtype dtype, int64_t value);
ml_ref ml_map1(ml_graph *g, ml_op op, ml_ref a);
ml_ref ml_map2(ml_graph *g, ml_op op, ml_ref a, ml_ref b);
ml_ref ml_where(ml_graph *g, ml_ref test, ml_ref a, ml_ref b);
ml_ref ml_cast(ml_graph *g, ml_ref a, ml_dtype dtype); /* a itself where it has that dtype */
ml_ref ml_broadcast(ml_graph *g, ml_ref a, const ml_type *as); /* to these axes, this order */
ml_ref ml_permute(ml_graph *g, ml_ref a, const ml_type *as);   /* a itself where in that order */
ml_ref ml_split(ml_graph *g, ml_ref a, ml_axis axis, ml_axis outer, int64_t outer_size,
                ml_axis inner, int64_t inner_size);
ml_ref ml_merge(ml_graph *g, ml_ref a, ml_axis outer, ml_axis inner, ml_axis merged);
ml_ref ml_concat(ml_graph *g, const ml_ref *sources, int count, ml_axis axis);
ml_ref ml_rename(ml_graph *g, ml_ref a, ml_axis old, ml_axis new_name);
ml_ref ml_slice(ml_graph *g, ml_ref a, ml_axis axis, int64_t start, int64_t stop);
ml_ref ml_pad(ml_graph *g, ml_ref a, ml_axis axis, int64_t before, int64_t after);
ml_ref ml_reduce(ml_graph *g, ml_op op, ml_ref a, const ml_axis *axes, int count);
ml_ref ml_iota(ml_graph *g, ml_axis axis, int64_t size); /* i32 */
ml_ref ml_gather(ml_graph *g, ml_ref table, ml_ref index, ml_axis axis);
ml_ref ml_scatter_add(ml_graph *g, ml_ref index, ml_ref value, ml_axis axis, const ml_type *type);
/* The cache with row index[j] along `axis` replaced by value[j] (ops.def: WRITE_ROWS). */
ml_ref ml_write_rows(ml_graph *g, ml_ref cache, ml_ref index, ml_ref value, ml_axis axis);
ml_ref ml_dot(ml_graph *g, ml_ref a, ml_ref b, const ml_axis *axes, int count, ml_dtype dtype);
ml_ref ml_scaled_dot(ml_graph *g, ml_ref a, ml_ref b, ml_ref scale, const ml_axis *axes, int count,
                     ml_dtype dtype);
ml_ref ml_out(ml_graph *g, ml_ref n, int output); /* n itself for output 0 */

/* Inline a function: copy `root` with PARAM(i) replaced by values[i]. */
ml_ref ml_graph_inline(ml_graph *g, ml_ref root, const ml_ref *values, int count);

/* Printing: one line a node, "%12 f32[batch=8] = add %3 %11   -- gpt.lua:12 blocks.0". */
void ml_graph_print(const ml_graph *g, const ml_roots *roots, ml_text *out);
/* Of all nodes, with axes and inputs by name: equal graphs of two sessions have equal ones. */
uint64_t ml_graph_hash(const ml_graph *g, uint64_t seed);
/* Check every invariant of this header; raises ML_INTERNAL naming pass, node and what is broken. */
void ml_graph_verify(const ml_graph *g, const ml_roots *roots, const char *pass);

#endif
