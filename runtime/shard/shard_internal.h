/* Inside of sharding.
 *
 * Each live node of the global graph becomes a value with one or more versions: nodes of the local
 * graph, each with its placement. The first version is as the op gave it; others are
 * redistributions of it, made when an operand is first needed elsewhere. Values that need no
 * communication whatever their placement (constants, iotas, random numbers and what elementwise
 * ops make
 * of them) are free: they have no version until one is needed. A broadcast has none either: what
 * moves is what it repeats.
 * A version's type is ml_layout_local of the node's type: the same axes in the same order. */
#ifndef ML_SHARD_INTERNAL_H
#define ML_SHARD_INTERNAL_H

#include "runtime/graph/op_interface.h"
#include "runtime/shard/shard.h"

enum {
    SHARD_NO_CUT = 400,
    SHARD_KEEP_PARTIAL = 300,
    SHARD_UNLISTED = 200,
    SHARD_PARAMS = 100,
    SHARD_RELABEL = -1,
    SHARD_OWN = -2
};

typedef struct {
    ml_placements at;
    ml_ref node;   /* in the local graph */
    uint32_t next; /* 0: none */
    /* Gathered from parts, for the forward or the backward pass: not stored for the other. */
    bool gathered, backward;
} shard_version;

typedef struct {
    uint32_t versions; /* the first; 0 where there is none yet */
    uint32_t users;    /* live ones and roots */
    bool free, repeats;
    bool gradient;   /* becomes a gradient, and nothing else */
    bool added;      /* a term of a sum of gradients (ML_STATE_GRADIENT), and nothing else */
    bool params;     /* a parameter, a gradient or an optimizer's value: in the table `params` */
    ml_ref *outputs; /* of ops with several outputs */
    ml_placements *output_places;
    /* Of ML_OWNED and ML_SENT versions: starts and ends of the groups of rows. */
    ml_ref owner[2];
    ml_ref kept[3]; /* what the rules of its op keep for those of its gradient */
} shard_value;

/* The overflow check of an exchange with a bounded number of capacity slots: f32, 0 where all rows
 * have a slot, else the capacity factor that would be enough. */
typedef struct {
    ml_ref number;
    const ml_origin *origin;
} shard_overflow_check;

/* One way to cut an op's work over one mesh axis. */
typedef struct shard_strategy {
    int preference; /* among equals, the least: position in the table acts, or one of the enum above
                     */
    bool uneven;    /* along an axis that it does not divide */
    uint32_t sources; /* first of source_count placements in the pool */
    ml_placement out[ML_MAX_OUTPUTS];
} shard_strategy;

typedef struct sharder sharder;

/* Rows of groups (ML_OWNED, ML_SENT), as the rules of the op that first places some have them
 * (ops/ragged). */
typedef struct {
    /* Strategies of elementwise ops, sums and maxima over s->mesh that work on such rows. */
    void (*propose)(sharder *s, ml_ref n);
    /* Value n in the placement shard_unsent gives (node), sent as `at` says; and back. */
    ml_ref (*send)(sharder *s, ml_ref n, ml_ref node, const ml_placements *at);
    ml_ref (*bring_back)(sharder *s, ml_ref n, ml_ref node, const ml_placements *at);
    /* bool over rows of value n in placement `at` (node): they count as this rank's. */
    ml_ref (*own)(sharder *s, ml_ref n, ml_ref node, const ml_placements *at);
    /* The results of all overflow checks, as f32 over the checks: the largest of all ranks, or
     * under pipeline stages this rank's. */
    ml_ref (*overflows)(sharder *s);
    /* The value of an update, or that of the state before where a check found an overflow. */
    ml_ref (*unless)(sharder *s, ml_ref overflows, const ml_update *update, ml_ref value);
} shard_row_rules;

struct sharder {
    const ml_graph *from;
    ml_graph *to;
    const ml_layout *layout;
    const uint32_t *times; /* of ml_shard_times; may be NULL */
    ml_arena *scratch;
    shard_value *values; /* by node of `from` */
    ML_VEC(shard_version) versions;
    const shard_row_rules *rows;       /* NULL: no op of this program places rows of groups */
    struct shard_exchanges *exchanges; /* its own */
    struct shard_choices *choices;     /* of shard_alike.c */
    ML_VEC(shard_overflow_check) overflow_checks;
    ml_division division;
    ml_axis shared; /* the key/value heads of a program with gradients, where queries have others */
    /* Of a recurrence's step: by parameter, what stands for it and where that is. */
    const ml_ref *parameters;
    const ml_placements *parameter_places;
    /* Of the node at hand: */
    const ml_origin *origin;
    uint8_t flags;
    bool backward;             /* it is of the backward pass */
    const ml_placements *need; /* of its sources, over the mesh axes before `mesh` */
    int mesh;                  /* the mesh axis at hand */
    uint32_t strategy_count, pool_count;
    ML_VEC(shard_strategy) strategies;
    ML_VEC(ml_placement) pool;
};

static inline bool shard_same(ml_placement a, ml_placement b) {
    bool along = a.kind == ML_SPLIT || a.kind == ML_OWNED || a.kind >= ML_SENT;
    if (a.kind == ML_SENT && a.batch != b.batch) return false;
    if (a.kind == ML_SPLIT && a.within != b.within) return false;
    return a.kind == b.kind && (!along || a.axis == b.axis);
}
static inline ml_placement shard_split(int position) {
    return (ml_placement){ML_SPLIT, (uint8_t)position};
}
/* The elements of the axis at `position`, of which there are `size`, each that of a group. */
static inline ml_placement shard_shared(int position, int64_t size) {
    return (ml_placement){ML_SHARED, (uint8_t)position, (uint8_t)size};
}
static inline ml_placement shard_shared_sum(int position, int64_t size) {
    return (ml_placement){ML_SHARED_SUM, (uint8_t)position, (uint8_t)size};
}

/* Whether it is split along this axis. */
static inline bool shard_along(ml_placement p, int position) {
    return p.kind == ML_SPLIT && p.axis == position;
}

/* ---- shard.c ---- */
/* The versions of a value that the pass at hand may use: call with 0, then with the last one. */
uint32_t shard_next_version(const sharder *s, ml_ref n, uint32_t version);
/* Parameters that the forward pass gathers over mesh axis i the backward pass gathers again, where
 * the layout asks for it. Other values are gathered once; passes/recompute.c decides by the budget
 * of memory whether the backward pass gathers them again. */
bool shard_gathers_again(const sharder *s, ml_ref n, int i);
void shard_add_version(sharder *s, ml_ref n, const ml_placements *at, ml_ref node, bool gathered);

/* Places all live nodes of s->from, whose users it counts. */
void shard_nodes(sharder *s, const ml_roots *roots);
/* Nodes to come are of the forward pass and have the origin of n. */
void shard_enter(sharder *s, ml_ref n);

/* ---- shard_alike.c ---- */
/* The placements that were noted for a node alike; false where there are none. */
bool shard_chosen(sharder *s, ml_ref n, ml_placements *need, ml_placements *out);
/* After shard_chosen, of the same node, was false. */
void shard_note_choice(sharder *s, ml_ref n, const ml_placements *need, const ml_placements *out);

/* ---- shard_move.c ---- */
/* bool over rows of value n, which is ML_OWNED in placement `at` (node): they count as this rank's,
 * being of its groups, or of none on the first rank. */
ml_ref shard_rows_of_own(sharder *s, ml_ref n, ml_ref node, const ml_placements *at);
/* The local node that holds value n in this placement (no partial one that it does not have). */
ml_ref shard_get(sharder *s, ml_ref n, const ml_placements *at);
/* Bytes that leave a rank when a tensor of `bytes` (whole along a mesh axis of `ranks`) changes its
 * placement over it; negative where it cannot. Anything is a sum with zeros elsewhere. */
double shard_move_cost(ml_placement from, ml_placement to, double bytes, int64_t ranks);
/* This rank's number along mesh axis i. */
ml_ref shard_coordinate(sharder *s, int i);
#define SHARD_PARTS "ranks'parts"
/* {parts, ...}: n of each rank along mesh axis i. */
ml_ref shard_gathered_parts(sharder *s, ml_ref n, int i, ml_axis parts);
/* The number of this rank's group of neighbours along mesh axis i, of so many: an i32. */
ml_ref shard_group(sharder *s, int i, int64_t groups);
/* The global index of the first element of this rank's part of an axis, an i32 number; 0 where the
 * axis is whole. */
ml_ref shard_base(sharder *s, const ml_placements *at, int position, int64_t local);

/* The mesh axis over which it is ML_SENT; -1: none. */
int shard_sent_over(const sharder *s, const ml_placements *at);
/* What it was, or will be, before it is sent. */
ml_placements shard_unsent(const sharder *s, const ml_placements *at);

/* ---- shard_rules.c: strategies over s->mesh ---- */
void shard_propose(sharder *s, ml_ref n);
const ml_type *shard_source_type(const sharder *s, ml_ref n, int k);
/* A cut along `axis`, at source_positions[k] of source k (-1: it lacks it) and at `out` of the
 * result; with out -1 the result is partial in the way of `combine`. Inside of the cuts of other
 * mesh axes too where a source is split so. shard_cut_evenly: where the axis divides alone. */
void shard_cut_along(sharder *s, ml_ref n, ml_axis axis, const int *source_positions, int out,
                     ml_placement_kind combine);
void shard_cut_evenly(sharder *s, ml_ref n, ml_axis axis, const int *source_positions, int out,
                      ml_placement_kind combine);
/* Operands of a linear op that are sums over the ranks, and so its result. */
void shard_propose_partial(sharder *s, ml_ref n);
/* A strategy with everything whole. The pointer is valid until the next. */
shard_strategy *shard_strategy_new(sharder *s, ml_ref n, int preference);
/* Preference of a logical axis over s->mesh. */
int shard_preference(const sharder *s, ml_axis axis);
/* The placement over s->mesh of what broadcast n repeats, where n is in placement `over`. */
ml_placement shard_repeated(const sharder *s, ml_ref n, ml_placement over);
/* Starts and ends of the groups whose rows an ML_OWNED or ML_SENT version of n holds. */
const ml_ref *shard_owner(const sharder *s, ml_ref n);
/* Where the rows are in a value that holds those of this rank's groups (ML_OWNED); -1: nowhere. */
int shard_own_rows(const sharder *s, ml_ref n);
/* Whether source k has a version in this placement over s->mesh. */
bool shard_source_has(const sharder *s, ml_ref n, int k, ml_placement over);
/* Whether cutting along this axis is worth a thought: it is listed, or a source is split so. */
bool shard_candidate(const sharder *s, ml_ref n, ml_axis axis, const int *source_positions);

/* ---- shard_local.c: the local op ---- */
/* outputs[0..]: n on local sources, with results in these placements. need[i] is the placement of
 * source i. */
void shard_local(sharder *s, ml_ref n, const ml_ref *sources, const ml_placements *need,
                 const ml_placements *out, ml_ref *outputs);
/* x, a part of a tensor of type `global`, with 0 in what fills it up. */
ml_ref shard_clear(sharder *s, ml_ref x, const ml_type *global, const ml_placements *at);
/* Source k of n, which is x, along the axes that n reduces: its filling changes nothing. */
ml_ref shard_reduced_source(sharder *s, ml_ref n, int k, ml_ref x, const ml_placements *at);

#endif
