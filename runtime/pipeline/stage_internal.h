/* What the files that divide a program into stages share. They run in this order, and each uses
 * only those before it: stage_map.c       the layer and stage of a module path or a state's name
 *   stage_balance.c   parts of given cost to stages
 *   stage_layers.c    the layers and members of the model, and which stage has which
 *   stage_assign.c    the home stage of each node
 *   stage_liveness.c  at which other stages it is used
 *   stage_graphs.c    a graph for each stage, with transfers and waves
 *   stage_cut.c       all of it
 * A node is one of four kinds. Sums of parts are those that end in a gradient or a scalar, so that
 * activations are never sums of parts. */
#ifndef ML_STAGE_INTERNAL_H
#define ML_STAGE_INTERNAL_H

#include "runtime/passes/passes.h"
#include "runtime/pipeline/stage.h"

typedef enum {
    STAGE_FREE, /* of inputs and constants alone: computed wherever it is used */
    STAGE_LAZY, /* elementwise of states: computed wherever it is used, from the state there */
    STAGE_HOME, /* computed at its home, sent elsewhere */
    STAGE_SUM,  /* of parts, each at a stage of `set`; added up at its home where the sum is used */
} stage_kind;

/* A node at one stage: the whole value, or the stage's part of a sum. */
typedef struct stage_value {
    int stage;
    bool received; /* from the node's home; else computed here */
    ml_ref ref;    /* in the stage's graph */
    int wave;
    int transfer; /* by which it came; -1 */
    int output;   /* its number among the stage's exports; -1 */
    struct stage_value *next;
} stage_value;

typedef struct {
    uint8_t kind; /* stage_kind */
    bool live;
    bool sum;      /* may stay a sum of parts */
    bool absorbed; /* an ADD whose one user is a sum of the same type, which takes its terms */
    bool output, updates;
    uint32_t users;         /* roots count too */
    int at;                 /* its position in the list (stage.h); -1 where it is of no layer */
    int home;               /* -1: not known yet */
    int hint;               /* stage of the states that it reads; -1 where unknown */
    uint64_t *set;          /* SUM: bits of stages; the lowest is the home */
    stage_value *values;    /* whole */
    stage_value **by_stage; /* the same, where they are many; else NULL */
    int value_count;
    stage_value *parts; /* SUM: by index in `set`; NULL where unused */
} stage_node;

typedef struct {
    bool known;    /* the map has its holders already */
    int home;      /* -1: not known yet */
    uint64_t *set; /* of a sum of gradients: its holders */
    ml_ref node;   /* its STATE node; 0 */
} stage_state;

typedef struct {
    const ml_graph *g;
    const ml_roots *roots;
    const ml_layout *layout;
    ml_arena *arena, *scratch;
    ml_stage_map map; /* becomes the caller's on success */
    ml_stage_graphs *out;
    int ranks, words; /* of 64 bits in a set */
    uint32_t node_count, state_count;
    stage_node *node;
    stage_state *state;
} stage_cutting;

/* ---- stage_map.c */

/* The number that begins at text, up to its '.' or end; 0 where it is none. */
int stage_path_number(const char *text);
/* The layer of a module path or a state's name, counted from 0, and the rest of the path; -1 where
 * it is in none. */
int stage_path_layer(const char *list, const char *path, const char **within);
/* The member with which a path within a layer begins; -1 where it is none of them. */
int stage_path_member(const ml_stage_map *map, const char *within);
/* Length of the outermost list in a path: up to the dot before its first number; 0 for none. */
int stage_path_list(const char *path);
int stage_of_position(const ml_stage_map *map, int position);
/* By the state's name; -1 where it implies none. */
int stage_by_name(const ml_graph *g, const ml_stage_map *map, uint32_t state);

/* ---- stage_balance.c */

/* Which part each stage begins with: first[stages + 1]. Every stage has a part at least. */
void stage_balance(const double *cost, int parts, const ml_layout *layout, ml_arena *scratch,
                   int *first);

/* ---- stage_layers.c */

/* Find the positions of nodes and, where the map has no stages yet, assign positions to stages. */
void stage_layers_assign(stage_cutting *c);
/* The same for a map before any program, by the names of states alone; false where they name no
 * list. */
bool stage_layers_assign_by_names(const ml_graph *g, const ml_layout *layout, ml_stage_map *map);
double stage_flops(const ml_graph *g, ml_ref n);
/* Whether each element follows from elements at one index, so that any stage can compute it. */
bool stage_elementwise(ml_op op);
static inline bool stage_backward(const ml_graph *g, ml_ref n) {
    return ml_graph_node(g, n)->flags & ML_NODE_BACKWARD;
}

/* ---- stage_assign.c */

void stage_assign(stage_cutting *c);
/* Whether operand i of a sum is one of its terms: the others are factors and predicates. */
bool stage_is_term(const stage_cutting *c, ml_ref n, int i);

/* ---- stage_liveness.c */

void stage_liveness_find(stage_cutting *c);
stage_value *stage_find(stage_node *at, int stage);       /* the whole value; NULL where not live */
stage_value *stage_part(const stage_node *at, int stage); /* NULL where it has none there */
typedef ML_VEC(ml_ref) stage_refs;
/* The terms of sum n, with those of the sums that it absorbed, in order. */
void stage_terms(stage_cutting *c, ml_ref n, stage_refs *out);

/* ---- stage_graphs.c */

void stage_graphs_build(stage_cutting *c);

/* ---- sets of stages */

static inline bool stage_in(const uint64_t *set, int stage) {
    return set[stage / 64] >> (stage % 64) & 1;
}
static inline void stage_include(uint64_t *set, int stage) {
    set[stage / 64] |= (uint64_t)1 << (stage % 64);
}
static inline int stage_set_count(const stage_cutting *c, const uint64_t *set) {
    int count = 0;
    for (int w = 0; w < c->words; w++) count += __builtin_popcountll(set[w]);
    return count;
}
/* The lowest of a set at or above `from`; -1. */
static inline int stage_next(const stage_cutting *c, const uint64_t *set, int from) {
    for (int w = from / 64; w < c->words; w++) {
        uint64_t word = w == from / 64 ? set[w] >> (from % 64) << (from % 64) : set[w];
        if (word) return 64 * w + __builtin_ctzll(word);
    }
    return -1;
}

#endif
