/* A kernel's schedule for CUDA: how its work is laid over threads.
 *
 * A pack is `vec` neighbouring elements of the innermost loop, moved by vectorised loads and
 * stores. Elementwise kernels: a thread has two packs, or one where it loads an index before them
 * (cuda_choose_elements). Kernels with columns: a team, a group of `team` threads, loops over a
 * row, thread t of it the packs t, t + team, ... (`packs` of them); a block holds `teams` teams.
 * With chunks a block walks the rows of its chunk, team k its rows k, k + teams, ...; `tiled`
 * kernels (column sums of rows that need nothing from each other) also cut the columns over blocks,
 * tile by tile. Where passes read rows from shared memory (`slots` > 0), asynchronous copies bring
 * them slots - 1 rows ahead, or, with one slot, during the last pass over the row before; a thread
 * reads only what it copied itself, so that no barriers are needed. Everything is a function of
 * sizes, strides and the target alone. */
#ifndef ML_CUDA_SCHEDULE_H
#define ML_CUDA_SCHEDULE_H

#include "codegen/emit/emit_internal.h"

enum {
    CUDA_WARP = 32,
    CUDA_MAX_THREADS = 1024,
    CUDA_SHARED_BYTES = 110 << 10, /* of a block, so that two fit */
};

/* Of a thread's packs: all, those with room in a slot, the others. */
typedef enum { CUDA_ALL, CUDA_RESIDENT, CUDA_REST } cuda_part;

typedef struct cuda_schedule {
    emitter *e;
    /* --- chosen: threads (cuda_threads.c) --- */
    int vec, team, teams, packs;
    int lane_stride; /* neighbouring lanes are mapped to this many adjacent rows, so that loads are
                        coalesced: a team's lanes are so many apart; 1: lanes are a row's columns */
    int warps; /* where lane_stride > 1: warps of a team; with several, reductions use barriers
                  of the whole block */
    bool chunked, tiled;
    int64_t chunks; /* number of chunks of rows, where chunked */
    bool spread; /* chunk c has rows c, c + chunks, ... (in units of `teams` rows), not a range */
    bool unroll; /* the loop over packs is unrolled, so that arrays are in registers */
    bool in_registers; /* COLUMN accumulators; else they are added to memory row by row */
    int blocks;        /* a multiprocessor should hold at once (__launch_bounds__); 0: not known */
    /* --- chosen: memory (cuda_memory.c) --- */
    bool *register_pack; /* by pack: is in registers from its first phase on */
    bool *prefetched;    /* by pack: copied to shared memory ahead of its row */
    int slots;           /* rows of a team in shared memory at a time */
    int resident;        /* packs of a thread that a slot has room for; others stay in memory */
    bool prefetch_rest;  /* the non-resident packs are prefetched into registers, a row ahead
                            (double buffering) */
    bool keep_results;   /* intermediates replace their input packs in registers between passes */
    /* --- chosen: values (cuda_values.c) --- */
    bool *invariant;   /* element values that all rows share ... */
    bool *hoisted;     /* ... and those of them that are computed once, for rows to use */
    bool *next;        /* loads of one value a row: loaded while the row before is worked on */
    int in_place;      /* a value cached in place of its input elements, in their slot; else -1 */
    int online_sum;    /* online softmax: its accumulator, summed in the pass that finds the row's
                          maximum; else -1 */
    int rescale_packs; /* where online_sum >= 0: packs for one running maximum, after which sums are
                          rescaled */
    /* --- derived from the IR and what was chosen --- */
    bool elementwise;
    bool narrow;         /* all float stores of elements are of narrow floats */
    const char *integer; /* type of indices: int where they fit, else long long */
    const char *column_integer; /* the same for columns, or for the innermost loop */
    const char *chunk_integer;  /* the same for products of rows and chunks */
    int *pack;        /* LOAD: the first load of the same elements, whose pack serves; -1: none */
    int *first_phase; /* by pack */
    int64_t *shared;  /* by pack: where prefetched ones start in a slot */
    int64_t slot_bytes;
    int in_place_pack; /* the pack whose elements in_place replaces */
    /* One-hot predicates, column == a value of the row, are true in one pack of a row at most. The
     * loop's body is printed twice: as it is, and specialised for packs where all are false. */
    int *one_hot;         /* by comparison: the value that the column equals; else -1 */
    bool *zero_elsewhere; /* by value: 0 where all one-hot predicates are false */
    int *largest;      /* a row's maximum of elements as they are in memory: their pack; else -1 */
    bool *compensated; /* Kahan (compensated) summation: a thread adds up very many terms */
    /* --- where the printer is --- */
    struct {
        cuda_part part;
        bool all_false; /* the body for packs in which all one-hot predicates are false */
        bool grouped;   /* the loop over packs is one over `rescale_packs` of them */
        bool gathers;   /* the same loop, and these packs are an array */
    } at;
} cuda_schedule;

/* Accesses. */
bool cuda_is_contiguous(const cuda_schedule *s, int inst);   /* follows the innermost loop */
bool cuda_allows(const cuda_schedule *s, int inst, int vec); /* packs of vec are aligned */
/* Whether the hardware caches serve it: small, and read again and again. */
bool cuda_hits_cache(const cuda_schedule *s, const ml_inst *inst);
bool cuda_reads_pack(const cuda_schedule *s, int phase, int inst, int pack);
bool cuda_stores_pack(const cuda_schedule *s, int inst); /* whole packs */
int cuda_pack_bytes(const cuda_schedule *s, int pack);
int cuda_last_phase(const cuda_schedule *s, int pack); /* that needs the pack's elements */

/* Reductions. */
bool cuda_is_column(const cuda_schedule *s, const ml_inst *inst); /* a COLUMN partial */
ml_dtype cuda_column_dtype(const ml_inst *inst);            /* what a COLUMN partial is summed in */
bool cuda_is_row_partial(const cuda_schedule *s, int inst); /* an ALL partial, once a row */
ml_dtype cuda_accumulator_dtype(const cuda_schedule *s, int inst);
/* Results that are reduced alike share their exchanges, two by two: the other one of a pair. */
int cuda_pair_of(const cuda_schedule *s, int inst);
/* Whether values that teams of several warps share alternate between two addresses, so that threads
 * of one row need not wait for those that still read the row before's. */
bool cuda_takes_turns(const cuda_schedule *s);
/* Whether threads without a row (inactive ones, past the last) run the same code up to the
 * barriers, with their stores and partial sums predicated off, since all threads must reach a
 * barrier. */
bool cuda_predicates_rows(const cuda_schedule *s);
int64_t cuda_column_bytes(const cuda_schedule *s); /* shared memory for the teams' column results */
int64_t cuda_results_bytes(const cuda_schedule *s); /* and for results of rows and of all rows */

/* Threads, registers and shared memory. */
int cuda_threads(const cuda_schedule *s);   /* of a block */
int64_t cuda_tiles(const cuda_schedule *s); /* that columns are cut into */
/* Registers for one column of a row: packs in bytes / 4, column accumulators. */
double cuda_column_registers(const cuda_schedule *s, double *accumulators);
/* Whether a team loops over enough rows for prefetching and hoisting to pay. */
bool cuda_rows_follow(const cuda_schedule *s);
bool cuda_is_alone(
    const cuda_schedule *s); /* a block on its multiprocessor, for its shared memory */
bool cuda_holds_rest(const cuda_schedule *s); /* a row's non-resident packs are in registers */
bool cuda_refills(const cuda_schedule *s);    /* the last pass over a row has the next one copied */

/* Values. */
bool cuda_is_of_number(const cuda_schedule *s, int inst); /* computed of the row's number alone */
int cuda_guarded(const ml_kernel_ir *ir, int inst);       /* past "0 where it is not finite" */
int cuda_online_largest(const cuda_schedule *s);
int cuda_groups(const cuda_schedule *s); /* of s->at.part */

#endif
