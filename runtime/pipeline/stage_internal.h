/* What the files of cutting a program into stages share. A cut runs through
 *   stage_layers.c  which layers there are, and which stage has which
 *   stage_home.c    where each node is computed
 *   stage_wanted.c  where else it is wanted
 *   stage_build.c   the graphs, with their transfers and levels
 * A node is one of four kinds. Sums of parts are those that end in a gradient or a number, so that
 * what layers hand on is never one. */
#ifndef ML_STAGE_INTERNAL_H
#define ML_STAGE_INTERNAL_H

#include "runtime/passes/passes.h"
#include "runtime/pipeline/stage.h"

typedef enum {
    STAGE_FREE, /* of inputs and constants alone: computed wherever it is wanted */
    STAGE_LAZY, /* elementwise of states: computed wherever it is wanted, by copies of the states */
    STAGE_HOME, /* computed at its home, sent elsewhere */
    STAGE_SUM,  /* of parts, each at a stage of `set`; added up at its home where that is wanted */
} stage_kind;

/* A node at one stage: the whole value, or the stage's part of a sum. */
typedef struct stage_value {
    int stage;
    bool received; /* from the node's home; else computed here */
    ml_ref ref;    /* in the stage's graph */
    int wave;
    int transfer; /* by which it came; -1 */
    int output;   /* among those that the stage keeps for others; -1 */
    struct stage_value *next;
} stage_value;

typedef struct {
    uint8_t kind; /* stage_kind */
    bool live;
    bool sum;      /* may stay a sum of parts */
    bool absorbed; /* an ADD whose one user is a sum of the same type, which takes its terms */
    bool output, updates;
    uint32_t users;      /* roots count too */
    int at;              /* its position in the list (stage.h); -1 where it is of no layer */
    int home;            /* -1: not known yet */
    int hint;            /* stage of the states that it reads; -1 where they tell none */
    uint64_t *set;       /* SUM: bits of stages; the lowest is the home */
    stage_value *values; /* whole */
    stage_value *parts;  /* SUM: by place in `set`; NULL where nobody wants them */
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
    ml_stage_map map; /* becomes the caller's when all went well */
    ml_stage_graphs *out;
    int ranks, words; /* of 64 bits in a set */
    uint32_t node_count, state_count;
    stage_node *node;
    stage_state *state;
} stage_cutting;

/* ---- stage_layers.c */

int stage_of_position(const ml_stage_map *map, int position);
/* By the state's name; -1 where it tells none. */
int stage_by_name(const ml_graph *g, const ml_stage_map *map, uint32_t state);
/* Fill in the positions of nodes and, where the map has none yet, deal them to stages. */
void stage_layers_assign(stage_cutting *c);
/* The same for a map that no program was cut with, by the names of states alone; false where they
 * name no list. */
bool stage_layers_assign_by_names(const ml_graph *g, const ml_layout *layout, ml_stage_map *map);
double stage_flops(const ml_graph *g, ml_ref n);
static inline bool stage_backward(const ml_graph *g, ml_ref n) {
    return ml_graph_node(g, n)->flags & ML_NODE_BACKWARD;
}

/* ---- stage_home.c */

/* Whether each element is made of elements at one place, wherever that is wanted. */
bool stage_elementwise(ml_op op);
void stage_assign(stage_cutting *c);
/* Whether operand i of a sum is one of its terms: the others are factors and tests. */
bool stage_is_term(const stage_cutting *c, ml_ref n, int i);

/* ---- stage_wanted.c */

void stage_liveness_find(stage_cutting *c);
stage_value *stage_find(stage_node *at, int stage); /* the whole value; NULL where not wanted */
stage_value *stage_part(const stage_node *at, int stage); /* NULL where it has none there */
typedef ML_VEC(ml_ref) stage_refs;
/* The terms of sum n, those of the sums that it absorbed included, in order. */
void stage_terms(stage_cutting *c, ml_ref n, stage_refs *out);
int stage_set_count(const stage_cutting *c, const uint64_t *set);
static inline bool stage_in(const uint64_t *set, int stage) {
    return set[stage / 64] >> (stage % 64) & 1;
}
static inline void stage_include(uint64_t *set, int stage) {
    set[stage / 64] |= (uint64_t)1 << (stage % 64);
}
/* The lowest of a set at or above `from`; -1. */
int stage_next(const stage_cutting *c, const uint64_t *set, int from);

/* ---- stage_build.c */

void stage_graphs_build(stage_cutting *c);

#endif
