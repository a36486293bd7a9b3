/* A plan: everything about a program that is decided before it runs: the graph of one rank after
 * all passes, its steps in order, where every state is updated and where every temporary is in the
 * arena. runtime/compile.c builds one by functions of this folder. A plan is a value: once it is
 * accepted nothing writes it.
 *
 * A program that is divided into pipeline stages has a plan of the whole, without steps of its own,
 * whose parts are the plans of its tasks (runtime/pipeline/plan.h). */
#ifndef ML_PLAN_H
#define ML_PLAN_H

#include "codegen/lower/lower.h"
#include "runtime/plan/options.h"
#include "runtime/shard/shard.h"

typedef enum {
    ML_MEMORY_PARAMETERS,
    ML_MEMORY_GRADIENTS,
    ML_MEMORY_OPTIMIZER,
    ML_MEMORY_ACTIVATIONS,
    ML_MEMORY_WORKSPACE, /* inputs, partial results, library workspace */
    ML_MEMORY_KINDS
} ml_memory_kind;
extern const char *const ml_memory_names[ML_MEMORY_KINDS];
ml_memory_kind ml_plan_memory_kind(ml_state_kind kind); /* what a state counts as */

/* A state's part on the rank. */
typedef struct {
    uint32_t id;
    ml_memory_kind kind;
    int64_t bytes;
} ml_held_state;
typedef ML_VEC(ml_held_state) ml_held_states;

typedef struct ml_plan ml_plan;
typedef struct {
    const ml_plan *const *at;
    int count;
} ml_plan_list;

struct ml_plan {
    ml_arena *arena;               /* owns everything below */
    ml_graph *graph;               /* of one rank, after all passes; of a pipeline the global one */
    bool local;                    /* the graph is that of one rank */
    bool borrows;                  /* the graph is another's, not to be freed */
    struct compile_shared *shared; /* what attempts at the same plan share (compile.c) */
    const ml_target *target;
    int64_t limit;                     /* bytes that the plan may take; 0: none is known */
    const ml_compile_options *options; /* while it is compiled */
    ml_plan_list
        applied; /* while it is compiled: of microbatches whose sums of gradients it applies */
    ml_roots roots;
    const ml_layout *layout;           /* NULL: one rank */
    const ml_layout *update_layout;    /* of the program that applies sums of gradients */
    ml_schedule *schedule;             /* NULL of a pipeline: its parts have them */
    struct ml_pipeline_plan *pipeline; /* runtime/pipeline/plan.h; NULL: none */
    ml_plan **parts; /* what runs on this rank, each with a schedule: the tasks of its stages, or
                        the plan itself */
    int part_count;
    /* Computes the parameter cache (param_cache.c), and its `next` those of it that are stale at
     * other times; each is to be run before this plan where one of the states that it reads, its
     * cache_sources[], was set since. NULL: no cache; the last. Of a plan that sets parts of cached
     * parameters these are what the other parts are computed of. */
    ml_plan *rebuild, *next;
    bool all_ranks; /* a rebuild that all ranks compute at once, whatever groups they are in */
    uint32_t *cache_sources;
    int cache_source_count;
    /* In a check: the plan that repeats a step which left rows without a capacity slot; it shares
     * the memory of this one, whose accounts count what it needs beyond. NULL: none. */
    ml_plan *retry;
    bool may_overflow;      /* a step may turn out to have left rows without a slot */
    uint32_t script_inputs; /* the INPUT ids below are the script's */
    bool pipeline_task;     /* a part of another plan: inputs and outputs are its caller's memory */
    int64_t arena_bytes;    /* temporaries: the peak that the offsets reach */
    int64_t library_bytes;  /* workspace that the device's libraries want beside the arena */
    int64_t buffer_bytes;   /* of pipeline stages: values saved for open microbatches */
    int64_t input_bytes;    /* inputs; of pipeline stages, copies of states for a repeated step */
    ml_held_states states;  /* that the rank has for it and its rebuild, each once */
    /* Of microbatches: what the program that sets the parameters, which is made later, will need of
     * states beside these and of the arena. */
    int64_t update_states, update_arena;
    int64_t needed_bytes;  /* of the rank: with what was beside the plan and what is made later */
    /* Of a program of many layers, an estimate (compile_few.h): this is the plan of one with few of
     * them, `fewer` that of one with fewer yet, and what grows with layers is this plan's and
     * `beyond` times the difference of both. Needed bytes, temporaries, work, what is copied to the
     * host and `update_` are of all layers. NULL: this is no estimate. */
    ml_plan *fewer;
    double beyond;
    int64_t update_inputs; /* of these states, room for inputs of programs of other groups */
    /* Temporaries that are copied to host memory and back (optimize/offload.c): that memory, the
     * bytes that are copied each way, what that adds to computation by the planner's machine, and
     * the peak that as many copies as computation hides would reach. */
    int64_t host_bytes, offloaded_bytes, reach_bytes;
    double copy_seconds;
    double slowed; /* predicted seconds, by those of a plan that keeps all values */
    int64_t kept_bytes; /* needed_bytes of such a plan */
    int64_t kind_bytes[ML_MEMORY_KINDS];  /* at the step of the peak; states in full */
    int64_t state_bytes[ML_MEMORY_KINDS]; /* the states among them */
    int64_t peak_bytes;                   /* states + arena + library + buffers + inputs */
    uint32_t peak_step;
    double flops;  /* of one run */
    uint64_t hash; /* of graph and schedule: equal on every rank */
    ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS]; /* of one run, of one rank */
};

/* Whether a step of these programs leaves a rebuild stale: one of them sets what it reads, and none
 * what it computes. */
bool ml_plan_leaves_stale(const ml_plan *const *programs, int64_t count, const ml_plan *rebuild);
/* The plans whose steps a program runs, by number: its parts, then what rebuilds its cache; then
 * NULL. */
const ml_plan *ml_plan_part(const ml_plan *plan, int i);
/* Takes `retry`, and its memory into the accounts. */
void ml_plan_set_retry(ml_plan *plan, ml_plan *retry);
/* The type of a rank's part of a state or input. */
ml_type ml_plan_state_type(const ml_layout *layout, const ml_graph *g, uint32_t state);
ml_type ml_plan_input_type(const ml_layout *layout, const ml_graph *g, uint32_t input);
/* Where the rule puts them; not to be asked for without a layout. */
ml_placements ml_plan_state_places(const ml_layout *layout, const ml_graph *g, uint32_t state);
ml_placements ml_plan_input_places(const ml_layout *layout, const ml_graph *g, uint32_t input);
typedef struct {
    const ml_graph *graph;
    ml_ref node; /* 0: workspace */
    int64_t bytes;
} ml_plan_block;
/* The largest storages alive at the peak (of a program that is cut: of each part's), largest first.
 */
int ml_plan_largest(const ml_plan *plan, int count, ml_plan_block *list);
typedef struct {
    int64_t bytes;      /* 0: no limit */
    const char *device; /* what has them */
    int64_t budget;     /* of --memory, which is less than the device has; 0: none is */
    int64_t outside;    /* what a process takes beside its plans */
} ml_plan_limit;
/* Raise ML_TOO_LARGE, with the ten largest tensors and their lines, and the least --memory where
 * there is one, where the plan plus `extra` bytes (states of other programs) exceeds the limit. */
void ml_plan_require(const ml_plan *plan, int64_t extra, const ml_plan_limit *limit);

/* Place the temporaries (memory.c): sets offsets, first and last; the value is the arena's size.
 * The first output_count of schedule->output_values stay alive to the end. */
int64_t ml_memory_assign_offsets(ml_schedule *schedule, int output_count);
/* Whether the value covers its elements in type order without gaps. */
bool ml_value_contiguous(const ml_value *value);

#endif
