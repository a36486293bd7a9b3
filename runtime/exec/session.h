/* What session.c and program.c share. */
#ifndef ML_SESSION_H
#define ML_SESSION_H

#include "runtime/exec/program.h"

typedef struct {
    void *memory;     /* NULL until the first program uses it */
    bool initialized; /* holds its initial or a later value */
    int64_t bytes;    /* of this rank's part; set with `memory` */
} session_state;

struct ml_session {
    ml_graph *graph;
    ml_device *device;
    int64_t seed;
    ml_comm *comm; /* NULL: one process */
    ml_layout layout;
    bool has_layout;
    bool connected; /* the devices of the ranks are, or try to be */
    ml_ranks ranks;
    ml_group *world;       /* all ranks; NULL where there is one */
    session_state *states; /* by state id */
    uint32_t state_count;  /* entries of `states`; the graph may have more by now */
    int64_t state_bytes;   /* allocated */
    void *arena;           /* the temporaries of whichever program runs */
    int64_t arena_bytes;
    ml_program *programs; /* all of them, linked */
};

struct ml_program {
    ml_session *session;
    ml_plan *plan;
    ml_executable *executable;
    bool bound;          /* to the session's present arena */
    void *inputs;        /* one block for all inputs, then the coordinates */
    int64_t coordinates; /* their offset: an i32 for each mesh axis, PLACE_ALIGNMENT apart */
    void *part;          /* host memory for the largest part of an input; NULL on one rank */
    void **addresses;    /* by storage; in the plan's arena */
    uint32_t *input_ids;
    int64_t *input_offsets, *input_bytes; /* of this rank's parts */
    ml_placements *input_places;
    int input_count;
    bool ready; /* all states that it reads are initialized */
    ml_program *next, *previous;
};

/* Make room for the states that the graph has by now. */
ml_status session_grow(ml_session *session);
/* Device memory for a state; done once. */
ml_status session_allocate(ml_session *session, uint32_t state);
/* Compute the initial values of the states (of the program, or of all where it is NULL) that have
 * none yet. */
ml_status session_initialize(ml_session *session, const ml_program *program);
/* An arena of at least this size; programs bound to a smaller one are unbound. */
ml_status session_reserve(ml_session *session, int64_t bytes);
/* A program whose states need not be initialized: the one that initializes them. */
ml_status program_make(ml_session *session, const ml_roots *roots, ml_program **program);
ml_status program_execute(ml_program *program);

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
/* This rank's part of a tensor. */
ml_status session_cut(const ml_session *session, const ml_type *global, const ml_placements *places,
                      const void *whole, void *part);

#endif
