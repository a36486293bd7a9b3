/* A layout: a mesh of ranks, and which logical axes are split over which mesh axis.
 *
 * The sharding spec of a tensor has one entry for each mesh axis (ml_layout_place):
 * 1. A table of each mesh axis lists logical axes in order: `params` is that of states and of
 *    gradients shaped like them, `acts` that of all else.
 * 2. The tensor is split over the mesh axis along the first listed axis that it has. Where the size
 *    does not divide, each part has the quotient rounded up (ml_part_size); the last ones are
 * filled up, or nothing but filling, which no result shows (README.md). Such an axis is cut by one
 * mesh axis alone: another that lists it too is an error, or, where none is asked for, does not
 * split it.
 * 3. A tensor without a listed axis is replicated, but for rules 4 to 7; and so is one whose axis
 *    has fewer elements than there are ranks to split it (key/value heads that ranks share).
 * `flat` on a mesh axis is ZeRO-1. It places the optimizer states that rule 2 has not split:
 * 4. along the first axis that divides and that no inner mesh axis (a later one) splits;
 * 5. else along the first axis that divides, inside of the parts of the inner mesh axes;
 * 6. else along the longest axis that no mesh axis splits and that has an element for each rank. It
 *    is cut into equal parts, of which the last are padded;
 * 7. else the state is replicated.
 * Each rank updates the part that it holds.
 *
 * Parameters that the forward pass has gathered the backward pass gathers again, unless the mesh
 * axis says `keep`: then they are gathered once and live until the backward pass is done with them.
 * Other values are gathered once, or again where memory is short (passes/recompute.c). With `flat`
 * and `keep` parameters too lie in parts from one step to the next (not under pipeline stages), and
 * are gathered ahead of use, beside other work, instead of after their update; with accumulation
 * once a step.
 * Sums of gradients (ML_STATE_GRADIENT) are split as the parameters are; over other mesh axes each
 * rank holds its own part of the sum, so that the ranks add them up once and not at each addition.
 * Ranks are numbered with the first mesh axis outermost. An axis split over several mesh axes is
 * cut by the outermost first. A mesh axis of size 1 splits nothing and costs nothing.
 * `exchange` has rows of groups (tokens of experts) sent to the ranks that hold the groups, with
 * places for so many times an even share of them (ragged/moe_dispatch.c); 0: weights or tokens are
 * gathered instead. */
#ifndef ML_LAYOUT_H
#define ML_LAYOUT_H

#include "runtime/graph/graph.h"

enum { ML_MAX_LISTED = 16 };

typedef struct {
    const char *name; /* "dp" */
    int64_t size;
    int params_count, acts_count;
    ml_axis params[ML_MAX_LISTED], acts[ML_MAX_LISTED]; /* in order of preference */
    bool flat;                                          /* state = {dp = "flat"} */
    bool keep;                                          /* reshard = {dp = false} */
} ml_mesh_axis;

/* Pipeline stages: which mesh axis, and how (runtime/pipeline). */
typedef struct {
    bool on; /* and the mesh axis has more than one rank */
    int mesh_axis;
    int chunks; /* virtual stages of a rank; more than 1 is interleaved */
    int microbatches;
    int schedule;  /* ml_schedule_kind: runtime/pipeline/schedules.def */
    char list[64]; /* of modules: "layers" is the longest */
} ml_stages;

typedef struct ml_layout {
    int count; /* 0: one rank */
    ml_mesh_axis axis[ML_MAX_MESH];
    ml_stages stages;
    double exchange;
} ml_layout;

int64_t ml_layout_ranks(const ml_layout *layout);
/* Coordinate of `rank` along mesh axis i. */
int64_t ml_layout_coordinate(const ml_layout *layout, int64_t rank, int i);
/* The share of the work that each rank along mesh axis i does, as all others along it do. */
double ml_layout_undivided(const ml_layout *layout, const ml_division *division, int i);
void ml_division_add(ml_division *to, const ml_division *division);
/* Text that identifies the layout, for plan hashes and messages: "dp=2 tp=4 ...". */
void ml_layout_print(const ml_layout *layout, const ml_graph *g, ml_text *out);

/* Where a tensor lies along one mesh axis. */
typedef enum {
    ML_REPLICATED,  /* whole on each rank */
    ML_SPLIT,       /* along one axis: each rank has a part */
    ML_PARTIAL_SUM, /* the sum over the ranks is the value */
    ML_PARTIAL_MAX,
    ML_PARTIAL_MIN,
    ML_OWNED,  /* expert-local rows: of full size, but only rows of this rank's experts (groups:
                  ragged.h) hold values */
    ML_SENT,   /* dispatched rows: of this rank's experts, from all ranks along the mesh axis (an
                  all-to-all). The batch axis counts senders, the rows' axis the capacity slots of
                  each sender */
    ML_SHARED, /* split along an axis of fewer elements than ranks: each is that of a group of
                  neighbouring ranks (key/value heads) */
    ML_SHARED_SUM, /* likewise, and the sum over the ranks of a group is the value */
} ml_placement_kind;
typedef struct {
    uint8_t kind;   /* ml_placement_kind */
    uint8_t axis;   /* ML_SPLIT, ML_SHARED: position in the tensor's type; ML_OWNED, ML_SENT: of the
                       rows */
    uint8_t batch;  /* ML_SENT: position of the axis that was split; ML_SHARED: number of groups */
    uint8_t within; /* ML_SPLIT: inside of the cuts of that axis that are not `within`, instead of
                       by the order of the mesh axes */
} ml_placement;
typedef struct ml_placements {
    ml_placement over[ML_MAX_MESH];
} ml_placements; /* by mesh axis */

static inline bool ml_placement_shared(ml_placement p) {
    return p.kind == ML_SHARED || p.kind == ML_SHARED_SUM;
}

/* The sharding spec. state_kind is that of the state where the tensor is one (or -1 for
 * activations). Raises ML_INVALID where several mesh axes cut an axis that they do not divide, with
 * what would divide in the help; with `what` NULL such an axis is left whole. */
ml_placements ml_layout_place(const ml_layout *layout, const ml_graph *g, const ml_type *type,
                              int state_kind, const char *what);
/* Raises ML_INVALID: mesh axis i cannot split the axis at `position` of `what`, beside those of p.
 */
_Noreturn void ml_layout_indivisible(const ml_layout *layout, const ml_graph *g,
                                     const ml_type *type, const ml_placements *p, int i,
                                     int position, const char *what);
/* Into how many parts the axis at `position` is cut. */
int64_t ml_layout_parts(const ml_layout *layout, const ml_placements *p, int position);
/* Places for the rows that one rank sends to another, of a tensor that is ML_SENT over mesh axis i:
 * `exchange` times an even share, and never more than all rows of a rank. */
int64_t ml_layout_sent_places(const ml_layout *layout, const ml_type *type, const ml_placements *p,
                              int i);
/* Whether the parts of the axis at `position` do not divide it: then one mesh axis alone cuts it,
 * and the last parts hold less, or nothing, and then what does not count. */
bool ml_layout_uneven(const ml_layout *layout, const ml_type *type, const ml_placements *p,
                      int position);
/* The type of one rank's part. */
ml_type ml_layout_local(const ml_layout *layout, const ml_type *type, const ml_placements *p);
/* bf16[batch=512@dp, seq=4096@tp, embed=4096]; partial sums as "partial(tp)". */
void ml_layout_print_type(const ml_layout *layout, const ml_graph *g, const ml_type *type,
                          const ml_placements *p, ml_text *out);

#endif
