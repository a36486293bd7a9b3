/* What session.c and program.c share. */
#ifndef ML_SESSION_H
#define ML_SESSION_H

#include "runtime/exec/program.h"
#include "runtime/plan/beside.h"

typedef struct {
    void *memory;     /* NULL until the first program uses it */
    bool initialized; /* holds its initial or a later value */
    bool lost;        /* held one, which a load has overwritten and not replaced */
    bool freed;       /* lost, with its memory: narrower states have its value */
    bool together;    /* the memory lasts as long as the session */
    bool within;      /* it is part of another state's allocation */
    int64_t bytes;    /* of this rank's part; set with `memory` */
    uint64_t set_at;  /* the session's clock when it was set last */
    int holders;      /* of a cached parameter: the programs that hold it */
} session_state;

struct ml_session {
    ml_graph *graph;
    ml_device *device;
    ml_compile_options options; /* of all programs */
    int64_t seed;
    int64_t memory_budget; /* bytes of a rank; 0: what the device has */
    ml_comm *comm;         /* NULL: one process */
    ml_layout layout;
    ml_layout unbounded; /* the layout without `exchange`: of retries */
    ml_groups groups;
    ml_layout group_layouts[ML_MAX_MESH + 1];   /* of programs of groups, by size; the last: of 1 */
    ml_layout group_unbounded[ML_MAX_MESH + 1]; /* these, likewise */
    ml_program *lead;                           /* of the programs that are made next; NULL: none */
    int64_t group_size;                         /* of these; 0: of all ranks */
    const ml_layout *group_layout;              /* theirs; NULL: one rank */
    ml_plan_list applied; /* of microbatches whose sums the programs that are made next apply */
    bool together;        /* programs that are made wait for ml_session_compile */
    bool without_retry;   /* of a program there is no room for one; the user knows */
    bool has_layout;
    bool connected; /* the devices of the ranks are, or try to be */
    ml_ranks ranks;
    ml_group *everyone;    /* all ranks; NULL where there is one */
    int channel_tags;      /* given out */
    ml_stage_map stages;   /* of pipelines: where layers and states live */
    session_state *states; /* by state id */
    uint32_t state_count;  /* entries of `states`; the graph may have more by now */
    int64_t state_bytes;   /* allocated */
    void *arena;           /* the temporaries of whichever program runs */
    int64_t arena_bytes;
    ml_program *programs; /* all of them, linked */
    ml_program *pending;  /* whose last run may have to be done again; NULL: none */
    uint64_t clock;       /* counts what sets states; from 1 */
};

struct ml_program {
    ml_session *session;
    ml_plan *plan;
    ml_executable *executable;
    ml_executable **rebuilds;      /* of plan->rebuild, its `next` and so on; then NULL */
    bool holds;                    /* is counted among the holders of its cache */
    struct pipeline_run *pipeline; /* of a program cut into stages: it has no executable */
    ml_program *lead;    /* whose steps its microbatches are of (roots.mixed); NULL: its */
    bool waits;          /* for ml_session_compile: it has no executable yet */
    bool bound;          /* to the session's present arena */
    void *inputs;        /* one block for all inputs, then the coordinates */
    int64_t coordinates; /* their offset: an i32 for each mesh axis, ARENA_ALIGNMENT apart */
    char *together;      /* host memory of small inputs, which are one transfer; NULL: none */
    void *part;          /* host memory for the largest part of an input; NULL on one rank */
    void *host;          /* memory for offloaded values; NULL: none */
    void **addresses;    /* by storage; in the plan's arena */
    uint32_t *input_ids;
    int64_t *input_offsets, *input_bytes; /* of this rank's parts */
    ml_placements *input_places;
    int input_count;
    void *microbatch_buffers; /* of stages: values saved between tasks, then the retry's */
    int64_t buffer_bytes;
    bool may_overflow; /* a run may turn out to have left rows without a slot, on some rank */
    int64_t until;     /* of one that is cut: the latest of all ranks' plans */
    bool unsettled;    /* has run, and its overflow check is pending: program_settle resolves it */
    bool ready;        /* all states that it reads are initialized */
    ml_program *retry; /* overflow_retry.c; NULL: none */
    int pauses_left, pause; /* runs that the retry does at once: left, and after the next failure */
    bool retried_at_once;   /* the last run was */
    ml_program *done;       /* of it and its retry, the one that did the last run */
    int64_t again;          /* runs that the retry did again */
    ml_program *owner;      /* whose retry it is, with its inputs and buffers; NULL: none's */
    ml_program *ran;        /* of it and its retry, the one whose stages ran last */
    ml_program *next, *previous;
};

/* Make room for the states that the graph has by now. */
ml_status session_grow(ml_session *session);
/* Device memory for a state; done once. */
ml_status session_allocate(ml_session *session, uint32_t state);
/* Likewise of several that have none, in one allocation: other ranks then open one block to read
 * them. Those of less than 256 bytes are left out. */
ml_status session_allocate_together(ml_session *session, const uint32_t *ids, int count);
/* The state has no value any more, nor will it get its initial one: what reads it fails, until it
 * is set as a whole. */
void session_lose(ml_session *session, uint32_t state);
/* Compute the initial values of the states (of the program, or of all where it is NULL) that have
 * none yet. */
ml_status session_initialize(ml_session *session, const ml_program *program);
/* An arena of at least this size; programs bound to a smaller one are unbound. */
ml_status session_reserve(ml_session *session, int64_t bytes);
/* A program whose states need not be initialized: the one that initializes them. */
ml_status program_build(ml_session *session, const ml_roots *roots, const ml_layout *layout,
                        bool pipelined, ml_program **program);
ml_status program_execute(ml_program *program);
/* Steps of making one: among the session's programs; memory of states and temporaries; kernels. */
void program_enter(ml_session *session, ml_program *program);
ml_status program_reserve(ml_program *program);
ml_status program_compile(ml_program *program); /* all ranks together */
ml_status program_download(ml_program *program, int output, void *to);
/* States initialized, temporaries reserved. */
ml_status program_prepare(ml_program *program);
/* What a run needs before it: a cache of the present parameters. What the run sets counts as set
 * then. */
ml_status program_rebuild_cache(ml_program *program);
/* Rebuilds that all ranks run at once (plan.h): whether the program has some; run those that are
 * stale. The program is prepared. */
bool program_has_joint_rebuilds(const ml_program *program);
ml_status program_run_joint_rebuilds(ml_program *program);
/* The program is among those that hold its cache of parameters; and no longer: the last one
 * releases its memory. */
void program_hold_cache(ml_program *program);
void program_release_cache(ml_program *program);
/* The address of a state, a temporary or a coordinate. */
void *program_address(const ml_program *program, const ml_plan *plan, const ml_storage *storage);
/* What other programs of the session hold beside one with this plan. */
ml_status session_beside(const ml_session *session, ml_plan *plan, ml_beside *beside);
/* A plan for the session's device. */
ml_status session_plan(ml_session *session, const ml_roots *roots, const ml_layout *layout,
                       bool pipelined, ml_plan **plan);
/* Whether the layout is one of programs of groups. */
bool session_of_groups(const ml_session *session, const ml_layout *layout);
/* That of the retry of the program which has `plan`, and the plan that the program is to have with
 * it: `plan` itself or, where both do not fit, a smaller one. *retry becomes NULL where nothing
 * fits. */
ml_status session_plan_retry(ml_session *session, const ml_roots *roots, ml_plan *plan,
                             ml_plan **both, ml_plan **retry);

/* overflow_retry.c. A dispatch to experts without capacity slots for all its rows. */
enum { EXCHANGE_NAME = 256 };
typedef struct {
    double factor; /* of an even share, that would have been enough; 0: all rows found a slot */
    char name[EXCHANGE_NAME]; /* "blocks.3.moe (gpt_moe.lua:49)" */
} exchange_overflow;
void exchange_name(const ml_origin *origin, char name[EXCHANGE_NAME]);
/* Plan it, before the program has any memory; then, before kernels are compiled, its memory. */
ml_status retry_plan(ml_program *program, const ml_roots *roots);
ml_status retry_reserve(ml_program *program);
/* It reads the inputs of its owner: again once these have other places. */
ml_status retry_inputs(ml_program *retry);
/* Whether this run is to be the retry's at once. */
bool retry_at_once(ml_program *program);
/* After a run: *done has the results, the program itself or its retry, which then has run. */
ml_status retry_settle(ml_program *program, ml_program **done);
/* Resolve the pending overflow of the last run: read its check and, where rows were left without a
 * slot, have the retry run. Nothing is done where none is pending. */
ml_status program_settle(ml_program *program, ml_program **done);
/* Resolve a pending overflow of a program other than `next`: before anything else reads or sets
 * states. All ranks of a job call it in the same order. */
ml_status program_settle_others(ml_session *session, const ml_program *next);

/* What sessions and programs call of the rooms beside the core (other ranks, devices by name, the
 * text of kernels), by this table alone (beside_core.c), so that they link without these rooms.
 * Each is as the function of comm.h, device.h or jit.h that it is named after. */
typedef struct {
    ml_status (*device_open)(const char *name, int ordinal, ml_device **device);
    void (*device_close)(ml_device *device);
    void (*show_kernel)(const ml_kernel *kernel, ml_target_kind kind, ml_arena *arena);
    int (*rank)(const ml_comm *comm), (*local_rank)(const ml_comm *comm);
    int (*world)(const ml_comm *comm), (*host_ranks)(const ml_comm *comm);
    bool (*local)(const ml_comm *comm);
    ml_group *(*everyone)(ml_comm *comm);
    ml_status (*group)(ml_comm *comm, const int *ranks, int count, ml_group **group);
    ml_status (*collect)(ml_group *group, ml_collective kind, const void *in, void *out,
                         int64_t count, ml_dtype dtype, ml_combine combine);
    ml_status (*agree)(ml_comm *comm, uint64_t value, const char *what);
    ml_status (*least)(ml_comm *comm, int64_t *value);
    ml_status (*barrier)(ml_comm *comm);
    void (*busy)(ml_comm *comm, const char *text);
    void (*expect)(ml_comm *comm, double seconds);
    void (*done)(ml_comm *comm), (*step)(ml_comm *comm);
} beside_core_ops;
extern const beside_core_ops beside_core;

/* The same for programs that are cut into pipeline stages, whose plan->pipeline is set: a table of
 * functions (exec/pipeline/run.c), so that sessions and programs do not depend on stages. */
typedef struct {
    ml_status (*load)(ml_program *program);
    ml_status (*connect)(ml_program *program); /* all ranks together */
    void (*unload)(ml_program *program);       /* of any program */
    void (*unbind)(ml_program *program);       /* addresses have changed */
    ml_status (*start)(ml_program *program, const void *const *inputs);
    ml_status (*finish)(ml_program *program, void *const *outputs);
    /* As ml_program_microbatches. */
    ml_status (*microbatches)(ml_program *program, int microbatches);
    /* A step with the microbatches that are queued; of a retry, those of its owner. */
    ml_status (*step)(ml_program *program);
    /* A state that no program uses yet gets a stage, which will hold it. Raises. */
    void (*assign_state)(const ml_graph *g, const ml_layout *layout, ml_stage_map *map,
                         uint32_t state);
    /* As ml_program_bubble. */
    double (*bubble)(const ml_program *program, double *forecast);
    /* A step that may be done again. Room for the buffers of a program's stages; no less than there
     * is already. */
    ml_status (*buffers_reserve)(ml_program *program, int64_t bytes);
    /* All ranks together: sets program->may_overflow and until. */
    ml_status (*overflow_agree)(ml_program *program);
    /* Whether the retry's stages run in the same order, and send and receive the same. */
    bool (*plans_alike)(const ml_program *program, const ml_program *retry);
    /* All ranks together, after a step: the exchange without enough places, the same on every rank.
     * Where there is one, the states are as they were before the step. */
    ml_status (*overflow)(ml_program *program, exchange_overflow *found);
} staged_program_ops;
extern const staged_program_ops staged_programs;

/* ranks.c. An all-gather or a sum of host memory between the ranks along mesh axis i. */
ml_status session_collect(const ml_session *session, int i, ml_collective kind, const void *from,
                          void *to, int64_t count, ml_dtype dtype);

/* state_owners.c. Whether this rank keeps the state, and whether it is the home of its value (where
 * several keep a copy): both where there are no stages. Before any program is cut, all ranks do. */
bool session_holds(const ml_session *session, uint32_t state);
bool session_home(const ml_session *session, uint32_t state);
/* Whether another stage's rank keeps the state since the last program was cut. */
bool session_elsewhere(const ml_session *session, uint32_t state);
/* Release what ranks kept before the last program was cut, and that now lives elsewhere. */
void session_release(ml_session *session);
/* Assign a pipeline stage, whose rank will hold it, to a state that no program has used yet. */
ml_status session_assign_state(ml_session *session, uint32_t state);
/* This rank's part of a state from whichever stage has it (the others give zeros); all at once. */
ml_status session_spread(const ml_session *session, uint32_t state, void *part, int64_t bytes);
/* ranks.c. Whether programs may be made: several ranks need a layout. */
ml_status session_ready(const ml_session *session);
/* All ranks at once, when the device is open; before the first program. */
ml_status session_devices_agree(ml_session *session);
ml_status session_connect(ml_session *session);
/* The type of this rank's part of a state, and where the whole is split. */
ml_status session_place(const ml_session *session, uint32_t state, ml_type *local,
                        ml_placements *places);
/* The whole state from the parts; all ranks at once. */
ml_status session_gather(const ml_session *session, uint32_t state, const void *part, void *whole);
/* This rank's part of a tensor under the session's layout, or that of groups. */
ml_status session_cut(const ml_session *session, const ml_layout *layout, const ml_type *global,
                      const ml_placements *places, const void *whole, void *part);
/* The layout of the next program of the script. */
const ml_layout *session_program_layout(const ml_session *session);
/* This rank's number among those of the layout of a program. */
int64_t session_rank_under(const ml_session *session, const ml_layout *layout);

#endif
