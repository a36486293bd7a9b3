/* The kernel IR, and a generated kernel.
 *
 * A kernel runs over nested loops: `row_loops` outer ones, then column loops. Values are
 * instructions in SSA order, each at a level:
 *   ML_LEVEL_ROW      one value for a row (does not depend on column loops)
 *   ML_LEVEL_ELEMENT  one value for a row and column
 * and in a phase. For each row, phase p first computes the ROW instructions of phase p, then makes
 * one pass over the columns with the ELEMENT instructions of phase p. A row reduction (REDUCE with
 * scope ROW) accumulates during the pass of phase p and its result is a ROW value of phase p + 1.
 * An ELEMENT value that later phases need is marked `saved` by lowering when it should stay in
 * registers or a row buffer; otherwise lowering repeats its instructions in the later phase.
 * ROW stores of the last phase run after its pass. A kernel without column loops is elementwise
 * over its row loops: every instruction is ROW, phase 0.
 *
 * Reductions over rows (scope COLUMN: one result a column; scope ALL: one result) cannot finish
 * inside a kernel: rows are cut into `chunks` chunks, as ranges or by turns (always alike, so that
 * results do not depend on timing or on the number of threads), chunk i writes its partial results
 * to the operand, whose memory is [chunks][columns] or [chunks] in the compute type, and a
 * following kernel adds them up in order.
 *
 * Memory: operand pointer + sum(loop index * stride[loop]) elements (+ the value of `index`, for a
 * computed address). On CUDA every operand's pointer is a multiple of 16 bytes: lowering puts odd
 * offsets into `index`. Loops were collapsed where every operand allows it. A load whose
 * `guard` is false yields 0 and reads nothing. Types: an instruction computes in the compute type
 * of its dtype; loads widen, MAPs and stores round to nearest even. Products and sums of different
 * instructions are not contracted to FMAs. So a value's bits do not depend on its kernel. */
#ifndef ML_KERNEL_H
#define ML_KERNEL_H

#include "codegen/target.h"
#include "runtime/base/memory.h"
#include "runtime/graph/graph.h"

enum { ML_MAX_LOOPS = 8, ML_MAX_OPERANDS = 48, ML_NO_INST = 0xffff };

typedef enum {
    ML_INST_CONST,  /* number or integer */
    ML_INST_INDEX,  /* the index of loop `operand`, i64 */
    ML_INST_LOAD,   /* operand; index and guard or ML_NO_INST */
    ML_INST_STORE,  /* src[0] to operand; index or ML_NO_INST */
    ML_INST_MAP,    /* op on src[0..]; CAST converts from from_dtype to dtype; RANDOM: src[0] key,
                       src[1] i64 index */
    ML_INST_REDUCE, /* op SUM, MAX, MIN, ARGMAX of src[0] in `scope`; COLUMN and ALL: partials to
                       operand */
} ml_inst_kind;
typedef enum { ML_LEVEL_ROW, ML_LEVEL_ELEMENT } ml_level;
typedef enum { ML_SCOPE_ROW, ML_SCOPE_COLUMN, ML_SCOPE_ALL } ml_scope;

typedef struct {
    uint8_t kind, op, dtype, from_dtype, level, phase, scope;
    bool saved; /* an ELEMENT value that a later phase uses: must survive the pass */
    bool quick; /* CUDA: EXP, SIGMOID or TANH by the approximate exponential */
    uint16_t src[3], operand, index, guard;
    union {
        double number;
        int64_t integer;
    } constant;
} ml_inst;

/* What an instruction reads: instruction number `at` of ML_INST_SOURCES (values, then the computed
 * index, then the guard); ML_NO_INST where there is none. */
enum { ML_INST_SOURCES = 5 };
int ml_inst_source(const ml_inst *inst, int at);
bool ml_inst_reduces_row(const ml_inst *inst);    /* its result is a ROW value of the next phase */
bool ml_inst_reduces_partly(const ml_inst *inst); /* COLUMN or ALL: a further kernel finishes it */

typedef struct {
    uint8_t dtype;
    bool written;
    int64_t stride[ML_MAX_LOOPS]; /* elements, by loop */
} ml_operand;

typedef struct {
    int loop_count, row_loops;
    int64_t size[ML_MAX_LOOPS];
    int operand_count;
    ml_operand *operand; /* at most ML_MAX_OPERANDS */
    int inst_count, phases;
    ml_inst *inst;
    int64_t chunks; /* 0 where there is no COLUMN or ALL reduction */
} ml_kernel_ir;

/* A kernel: how it is launched, and what its source is printed from. Plans are built and compared
 * without any source; ml_kernel_source prints it where a kernel is compiled or shown. It does not
 * depend on node numbers, names or addresses, so kernels of equal structure share one compilation.
 * Sizes that only bound the outermost loop and keys of random numbers are scalar arguments and not
 * in the source.
 *
 * C:    void ENTRY(char *const *p, const long long *s, long long begin, long long end)
 *       runs units begin .. end-1 of `units`; units may run in any order and at once.
 * CUDA: extern "C" __global__ void ENTRY(ml_arguments a), where ml_arguments is
 *       struct { char *p[]; long long s[]; } of exactly pointer_count pointers and scalar_count
 *       scalars, or fewer pointers and then nothing in their places; `units` is ignored. With
 *       tensor maps the struct is aligned to 64 bytes, begins with map_count of them, 128 bytes
 *       each, and the parameter is const __grid_constant__. */
enum { ML_MAX_SCALARS = 8, ML_MAP_AXES = 5, ML_MAP_BYTES = 128 };

/* What the copy engine of Hopper (TMA) needs to know of an operand, encoded by the driver once the
 * operand's address is known. Axes from the innermost one, which is contiguous; other strides and
 * the address must be multiples of 16 bytes. Elements of a box outside of the tensor arrive as 0.
 * Pieces of 16 bytes of a box's lines are exchanged by the address in shared memory (swizzle). */
typedef struct {
    int pointer; /* which of the kernel's pointers */
    uint8_t dtype;
    int rank;
    int64_t size[ML_MAP_AXES], stride[ML_MAP_AXES]; /* elements */
    int box[ML_MAP_AXES];                           /* elements, at most 256 each */
    int swizzle;                                    /* bytes of a line: 0, 32, 64 or 128 */
} ml_tensor_map;

typedef struct ml_kernel {
    uint64_t key;      /* hash of all that the source depends on: equal keys, equal sources */
    const char *entry; /* C identifier, derived from key */
    const char *label; /* for people: "sum+mul+store", shown in debug output and traces */
    /* Prints the source, a function of the kernel alone. NULL: `recipe` is the source. */
    const char *(*print)(const struct ml_kernel *kernel, ml_arena *arena);
    const void *recipe; /* loops: the schedule (codegen/emit); templates: bodies and parameters */
    int capacity;       /* CUDA: kernels that a batch has room for; 0: no batch */
    int pointer_count, scalar_count;
    int64_t scalar[ML_MAX_SCALARS];
    const int64_t *table; /* CUDA: more scalars, behind these */
    int table_count;
    const ml_tensor_map *maps; /* CUDA: map_count of them */
    int map_count;
    int64_t units, grain;    /* C: parallel units, and the fewest worth waking a thread */
    uint32_t grid[3], block; /* CUDA */
    uint32_t shared_bytes;   /* dynamic. The function's attribute must be set to it: beside what the
                                kernel declares itself, less than 48 KiB are allowed unasked */
    bool cooperative; /* CUDA: all blocks are resident at once, and may wait for one another */
    bool early; /* CUDA: it waits for the steps ahead itself (kernel_begins), so that it may be
                   launched while they run */
    bool contracts; /* the compiler may join its products and sums to FMAs: templates, in which
                       nothing is fused */
    bool batchable; /* CUDA: the grid is one-dimensional, so that several kernels may share a launch
                     */
    struct ml_kernel *next; /* to be run with the same pointers once this one is finished, or NULL:
                               templates (attention backward, scatter_add) need such chains */
    struct ml_kernel *fallback; /* CUDA: runs where this chain does not compile, or the driver
                                    encodes no tensor maps; or NULL */
} ml_kernel;

/* The source, without the prelude; in `arena`, or as long as the kernel is. Raises. */
static inline const char *ml_kernel_source(const ml_kernel *kernel, ml_arena *arena) {
    return kernel->print != NULL ? kernel->print(kernel, arena) : (const char *)kernel->recipe;
}

/* The kernel of `ir` for `target`: its schedule and launch. Copies what it needs of both. Raises.
 */
void ml_emit(const ml_kernel_ir *ir, const ml_target *target, ml_arena *arena, ml_kernel *out);
/* What a kernel of loops does by which threads, as lines for people: all that the printer was free
 * to choose. Prints nothing of templates. */
void ml_kernel_print_schedule(const ml_kernel *kernel, ml_text *out);
/* CUDA: one launch of several kernels that share a key and do not depend on one another: each has
 * its own blocks and so computes the same bits. The pointers are all members' reads, then all their
 * writes; pointer_count counts what there is room for. Raises.
 * ml_batch_capacity: how many such kernels one launch may have; 0 where a kernel takes no part. */
int ml_batch_capacity(const ml_kernel *kernel);
void ml_kernel_batch(const ml_kernel *const *members, int count, ml_arena *arena, ml_kernel *out);
/* The text before every kernel's source: types, conversions, ml_exp_f32, ... */
const char *ml_prelude(ml_target_kind kind);
/* Expression of a MAP op with operand texts filled in, e.g. "ml_exp_f32(v3)"; for templates too. */
void ml_emit_map(ml_text *out, ml_op op, ml_dtype dtype, ml_dtype from,
                 const char *const *operands);
/* A closed function of the graph (a score function). values[i] is the text for PARAM(i) (for a
 * captured tensor: the template's load expression); index_of(axis) texts for IOTA by axis; bools of
 * `known` are what `holds` says; special(context, n), where there is one, may give a value's text.
 */
typedef struct {
    const ml_graph *g;
    const char *const *values;
    const char *(*index_of)(void *, ml_axis);
    const char *(*special)(void *, ml_ref);
    void *context;
    const ml_ref *known;
    const bool *holds;
    int known_count;
} ml_function;
/* Print it as C/CUDA statements in f32, with names that begin with `prefix`; the result's name. */
const char *ml_emit_function(ml_text *out, const ml_function *f, ml_ref root, const char *prefix);
/* The same of several, which share what they compute. */
void ml_emit_functions(ml_text *out, const ml_function *f, const ml_ref *roots, int count,
                       const char *prefix, const char **names);
/* Past what repeats, renames, or picks a side by a bool that is known. */
ml_ref ml_function_strip(const ml_function *f, ml_ref n);

#endif
