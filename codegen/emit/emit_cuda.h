/* Inside the CUDA printer: how a kernel's work is laid over threads.
 *
 * A pack is `vec` neighbouring elements of the innermost loop, moved by wide loads and stores.
 * Elementwise kernels: one thread a pack. Kernels with columns: a team of `team` threads walks a
 * row, thread t of it the packs t, t + team, ... (`packs` of them); a block holds `teams` teams.
 * With chunks a block walks the rows of its chunk, team k its rows k, k + teams, ...; `tiled`
 * kernels (column sums of rows that need nothing from each other) also cut the columns over blocks,
 * tile by tile. Where passes read rows from shared memory (`slots` > 0), asynchronous copies bring
 * them slots - 1 rows ahead, or, with one slot, during the last pass over the row before; a thread
 * reads only what it copied itself, so that no barriers are needed. Everything is a function of
 * sizes and strides alone. */
#ifndef ML_EMIT_CUDA_H
#define ML_EMIT_CUDA_H

#include "codegen/emit/emit.h"

/* More registers of columns' sums do not leave room for a second block. */
enum { CUDA_WARP = 32, CUDA_MAX_THREADS = 1024, CUDA_TWO_BLOCKS_SUMS = 16 };

/* Of a thread's packs: all, those with room in a slot, the others. */
typedef enum { CUDA_ALL, CUDA_RESIDENT, CUDA_REST } cuda_part;

typedef struct cuda_shape {
    emitter *e;
    bool elementwise, chunked, tiled;
    int vec, team, teams, packs;
    int apart;      /* threads of a team lie so many apart: neighbours have neighbouring rows */
    int warps;      /* then: that share a team; where several do, whole blocks meet for results */
    int64_t chunks; /* that rows are dealt to, where chunked */
    bool spread;    /* by turns, as many rows as there are teams at a time */
    bool unroll;    /* the loop over packs is unrolled, so that arrays live in registers */
    const char *integer;        /* type of indices: int where they fit, else long long */
    const char *column_integer; /* the same for columns, or for the innermost loop */
    const char *chunk_integer;  /* the same for products of rows and chunks */
    bool *long_sum; /* a thread adds up so many terms that it keeps beside the sum what is lost */
    int *pack;      /* LOAD: the first load of the same elements, whose pack serves; -1: no pack */
    bool *cached;   /* by pack: lives in registers from its first stage on */
    int *first_stage; /* by pack */
    bool *staged;     /* by pack: copied to shared memory ahead of its row */
    int64_t *shared;  /* by pack: where staged ones start in a slot */
    /* A comparison of the column's number with one value of the row is true in one pack of the row
     * at most. Others are printed without it: */
    int *hit;        /* the row's value, by comparison; else -1 */
    bool *zero;      /* values that are 0 where no comparison is true */
    int *largest;    /* a row's maximum of elements as they lie in memory: their pack; else -1 */
    bool quick;      /* rounding to bf16 hides errors of about 1e-6 */
    bool missed;     /* such a pack is being printed */
    bool *next;      /* loads of one value a row: loaded while the row before is worked on */
    bool *invariant; /* element values that all rows share ... */
    bool *hoisted;   /* ... and those of them that are computed once, for rows to use */
    int slots;       /* rows of a team in shared memory at a time */
    int64_t slot_bytes;
    int resident;    /* packs of a thread that a slot has room for; others stay in memory */
    bool held;       /* or rather in registers, from the row before on */
    int folded;      /* a value that takes the place of the elements it is made of; else -1 */
    int folded_pack; /* theirs */
    int online;      /* the folded value's sum, made in the pass of the largest element; else -1 */
    int group;       /* then: packs whose largest element their values refer to */
    bool grouped;    /* the packs' loop being printed is one of a group */
    bool gathers;    /* likewise, and the group's packs are an array */
    cuda_part part;  /* that is being printed */
    bool instead;    /* values wait in registers in place of the packs they are made of */
    int blocks;      /* that a multiprocessor is to hold at once, where that is known; or 0 */
    bool in_registers; /* COLUMN accumulators; else they are added to memory row by row */
} cuda_shape;

void cuda_choose_shape(cuda_shape *s);
/* Whether instruction i reads a pack in this pass. */
bool cuda_reads_pack(const cuda_shape *s, int stage, int i, int pack);
bool cuda_is_column(const cuda_shape *s, const ml_inst *inst); /* a COLUMN partial */
ml_dtype cuda_column_dtype(const ml_inst *inst); /* what a COLUMN partial is summed in */
int64_t cuda_column_bytes(const cuda_shape *s);
bool cuda_is_row_partial(const cuda_shape *s, int inst); /* an ALL partial, once a row */
/* Whether a STORE moves whole packs. */
bool cuda_stores_pack(const cuda_shape *s, int inst);
int cuda_threads(const cuda_shape *s);   /* of a block */
int64_t cuda_tiles(const cuda_shape *s); /* that columns are cut into */
bool cuda_is_alone(const cuda_shape *s); /* a block on its multiprocessor, for its shared memory */
int cuda_pack_bytes(const cuda_shape *s, int pack);
int cuda_last_stage(const cuda_shape *s, int pack);
bool cuda_is_of_number(const cuda_shape *s, int inst);

/* Registers for one column of a row: packs in bytes / 4, column accumulators. */
double cuda_column_registers(const cuda_shape *s, double *accumulators);
/* Whether a team walks enough rows for it to pay that work is done ahead of them. */
bool cuda_rows_follow(const cuda_shape *s);

/* Of emit_cuda_values.c. */
void cuda_choose_hoisted(cuda_shape *s);
void cuda_find_needs(cuda_shape *s); /* what passes need, less what leads to hoisted values alone */
void cuda_choose_next(cuda_shape *s);
void cuda_choose_kept(cuda_shape *s);
void cuda_choose_folded(cuda_shape *s);
int cuda_guarded(const ml_kernel_ir *ir, int inst);
/* Of emit_cuda_online.c. A row's largest element and the sum of exponentials, in one pass. */
void cuda_choose_online(cuda_shape *s);
int cuda_online_largest(const cuda_shape *s);
int cuda_groups(const cuda_shape *s);             /* of s->part */
void cuda_print_group_start(const cuda_shape *s); /* the loop over groups, of the last pass */
void cuda_print_group_end(const cuda_shape *s);
void cuda_print_online_pass(const cuda_shape *s, int stage);
void cuda_print_online_put(const cuda_shape *s); /* a team's results of it */
void cuda_print_online_get(const cuda_shape *s);
/* Of emit_cuda_team.c. "ml_team_reduce<...>(a3, ...)" over teams of `team` threads. */
const char *cuda_reduction_text(const cuda_shape *s, int inst, int team);
/* A sum of so many terms by a thread that what they lose to rounding is added up beside it, lost3;
 * it is added to a3 before threads meet. */
void cuda_find_long_sums(cuda_shape *s);
void cuda_print_total(const cuda_shape *s, int inst);
/* Shared memory that kernels declare for results of rows and of all rows. */
int64_t cuda_results_bytes(const cuda_shape *s);
bool cuda_takes_turns(const cuda_shape *s);
bool cuda_meets_apart(const cuda_shape *s); /* threads without a row come along, but for effects */
void cuda_print_row_results(const cuda_shape *s, int stage);
/* Of emit_cuda_partial.c. Before a chunk's rows, and after them. */
void cuda_print_partials(const cuda_shape *s, bool start);
/* Of emit_cuda_index.c. The offset of an access over the loops inside the row; at pack level the
 * innermost index is that of the pack's first element. */
const char *cuda_access_text(const cuda_shape *s, const ml_inst *inst, bool whole_pack);
void cuda_print_unravel(const cuda_shape *s, const char *linear, int first, int last,
                        const char *integer);
void cuda_print_pointers(const cuda_shape *s);
/* Of emit_cuda.c. */
void cuda_print_pack_loop(const cuda_shape *s);
ml_dtype cuda_accumulator_dtype(const cuda_shape *s, int inst); /* of a REDUCE */
void cuda_print_combine(const cuda_shape *s, int reduce, const char *to, const char *value);
void cuda_print_accumulator(const cuda_shape *s, int reduce);
void cuda_print_accumulators(const cuda_shape *s, int stage);
void cuda_print_pack_load(const cuda_shape *s, int pack, const char *to);
void cuda_print_columns_outside(const cuda_shape *s, int stage); /* loops around the packs' */
void cuda_print_elements(const cuda_shape *s, int stage);        /* of a pack */
/* Of emit_cuda_simpler.c. */
void cuda_find_hits(cuda_shape *s);
void cuda_find_largest(cuda_shape *s);
bool cuda_print_largest_start(const cuda_shape *s, int inst); /* whether it did */
void cuda_print_largest_end(const cuda_shape *s, int stage);
bool cuda_print_simpler(const cuda_shape *s, int inst); /* whether it did */
/* Of emit_cuda_ahead.c. A thread's place for a pack in a slot. */
const char *cuda_staged_text(const cuda_shape *s, int pack, const char *slot);
bool cuda_holds_rest(const cuda_shape *s);  /* in registers */
void cuda_print_start(const cuda_shape *s); /* before a chunk's rows */
void cuda_print_step(const cuda_shape *s);  /* before a row: see to the next ones, await this one */
void cuda_print_row_end(const cuda_shape *s);
bool cuda_refills(
    const cuda_shape *s); /* whether the last pass over a row has the next one copied */
void cuda_print_commit(const cuda_shape *s);
/* With one slot: before a pass that is some pack's last, find out where the next row lies; and once
 * the pass has such a pack in registers, copy the next row's in its place. */
void cuda_print_refill_start(const cuda_shape *s, int stage);
void cuda_print_refill(const cuda_shape *s, int pack, int stage);

#endif
