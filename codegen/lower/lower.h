/* From a program's graph to steps: which nodes get memory, which share a kernel, in what order.
 *
 * A value is a tensor in memory: a view (offset, strides) of a storage. Movements (RENAME, SLICE,
 * PERMUTE, SPLIT, MERGE of contiguous axes) of a value are values of the same storage; a CONCAT is
 * a storage whose parts are written in place by their producers. A storage belongs to a state, an
 * input or an output, or is temporary; memory.c gives temporaries their offsets.
 * Invariant: a step reads only values that earlier steps wrote, inputs and states. */
#ifndef ML_LOWER_H
#define ML_LOWER_H

#include "codegen/kernel.h"
#include "runtime/graph/collectives.h"
#include "runtime/ops/attention/attention.h"

typedef enum {
    ML_STORAGE_TEMPORARY,
    ML_STORAGE_STATE,
    ML_STORAGE_INPUT,
    ML_STORAGE_SAVED, /* memory of the caller for output `id` (runtime/pipeline/split_tasks.h) */
    ML_STORAGE_COORDINATE, /* one i32: this rank's along mesh axis `id`; set before the first run */
    ML_STORAGE_HOST,       /* pinned host memory of the program: what is offloaded (ml_host_copy) */
} ml_storage_kind;
typedef struct {
    ml_storage_kind kind;
    uint32_t id; /* of the state, input or mesh axis */
    int64_t bytes;
    ml_ref node; /* for accounts and messages; 0 for partial results and workspace */
    /* set by memory.c for temporaries: */
    uint32_t first, last; /* steps between which it is alive */
    int64_t offset;       /* bytes, in the arena, of HOST in the program's host memory; a multiple
                             of 256 */
    int part_of;          /* of a state's memory this rank's part, by its coordinate along mesh axis
                             part_of - 1; 0: all of it */
} ml_storage;

typedef struct {
    ml_ref node; /* 0 for partial results and workspace */
    ml_type type;
    uint32_t storage;
    int64_t offset;              /* elements */
    int64_t stride[ML_MAX_AXES]; /* elements, by position in the type */
} ml_value;

/* C[m,n] = A[m,k] B[k,n] (+ C), batched over up to 3 loops. Strides in elements; of each matrix's
 * two strides at least one is 1 (or its size is 1). f32 or f64 or bf16 in, f32/f64/bf16 out;
 * accumulates in f32 (f64). Scaled: 8-bit floats in, contiguous along k, bf16 or f32 out; C = s A B
 * (+ C), where the step's last read is s, in f32. */
enum { ML_GEMM_BATCHES = 3 };
typedef enum { ML_EPILOGUE_NONE, ML_EPILOGUE_BIAS } ml_epilogue;
typedef struct {
    int64_t m, n, k;
    int64_t batch[ML_GEMM_BATCHES]; /* 1 where unused */
    int64_t a_row, a_col, b_row, b_col, c_row, c_col;
    int64_t a_batch[ML_GEMM_BATCHES], b_batch[ML_GEMM_BATCHES], c_batch[ML_GEMM_BATCHES];
    ml_dtype a_dtype, b_dtype, c_dtype;
    bool scaled;
    bool accumulate;      /* adds to what C holds; a step's last read but the scale has that, laid
                             out as C */
    ml_epilogue epilogue; /* BIAS: operand 2 is [n] and is added to every row */
} ml_gemm;

/* Attention's operands as strided [batch..., heads, seq, head_dim]; up to 3 batch axes. */
typedef struct {
    int64_t batch[3], head, seq, dim;
} ml_attention_strides;
typedef struct {
    ml_attention_args args; /* axis ids and functions refer to `graph` */
    const ml_graph *graph;
    ml_ref node;
    int64_t batch[3], heads, kv_heads, seq, kv_seq, head_dim, value_dim;
    ml_dtype dtype; /* of q, k, v, o */
    bool backward;
    bool no_cudnn, nondeterministic; /* the target's options */
    int operand_count; /* the step's values, reads then writes, as the node lists them */
    ml_attention_strides strides[ML_MAX_OPERANDS]; /* q,k,v,o,do,dq,dk,dv; lse has dim 0; places
                                                      have none; captured: batch, head, seq (q) and
                                                      dim (kv) strides, 0 where it lacks the axis */
} ml_attention_step;

/* RAGGED_DOT: c[batch, rows, n] = a[batch, rows, k] b[group, k, n]; RAGGED_OUTER: c[group, k, n] =
 * sum over batch and the group's rows of a[batch, rows, k] b[batch, rows, n]. Strides in elements;
 * reads are a, b, starts, ends (, scale); starts and ends are [batch, group]. */
typedef struct {
    bool outer;
    int64_t batch, rows, groups, k, n;
    int64_t a_batch, b_batch, c_batch, start_batch, end_batch;
    int64_t a_row, a_col, b_group, b_row, b_col, c_group, c_row, c_col; /* 0 where it has none */
    int64_t start_stride, end_stride;
    bool squares;   /* a second result, f32: RAGGED_OUTER's output 1 */
    ml_ref gated;   /* 0, or a function that gives one: RAGGED_DOT's output 1 */
    bool scaled;    /* of 8 bits: every sum is multiplied by the fifth operand, an f32 number */
    int rows_known; /* the numbers of the rows that it reads, after these operands */
    int64_t s_group, s_batch, s_row, s_col; /* of the second result */
    ml_dtype dtype, b_dtype, c_dtype;       /* of a, b, c */
} ml_ragged;

/* An all-gather in its result's memory, a state. With a ticket and without a WAIT: it continues
 * beside the programs that follow, each of which waits for it where it first uses the state. */
typedef enum {
    ML_PREFETCH_NONE,
    ML_PREFETCH_COPIES, /* where copies between GPUs serve it: NCCL's kernels of two communicators
                           have no common order on all ranks */
    ML_PREFETCH_ANY,    /* no collective is beside it: programs that have some wait for it first */
} ml_prefetch;

/* A collective over the ranks that differ along one mesh axis only. Both operands are contiguous in
 * their type's order, the axis that is gathered, scattered or exchanged outermost. With a ticket
 * (1, 2, ...) it may go on beside the steps that follow, until the WAIT with the same one, which
 * reads both operands: then the result is there and the operand is free. */
typedef struct {
    ml_collective kind;
    int mesh_axis;
    int64_t ranks, count; /* count: elements of the operand; of the result of SCATTERED */
    ml_dtype dtype;
    ml_combine combine; /* of those that reduce */
    uint32_t ticket;    /* 0: done when the next step begins */
    uint32_t launch;    /* those of different ones are not to be joined */
    /* A sum of gradients in its own memory that leads: with a ticket it may start before the
     * program does, once a microbatch's program has written the last term; those of lower numbers
     * are final earlier. 0: it does not. */
    uint32_t lead_order;
    ml_prefetch prefetch;
} ml_collective_step;

/* HOST_COPY: a whole temporary to a HOST storage (offloaded), or `back` to another temporary. It
 * runs beside the steps that follow until the WAIT with the same ticket (1, 2, ...), which has
 * the device's storage among its reads: then that is free, or there. Copies of a direction are in
 * order. */
typedef struct {
    bool back;
    uint32_t ticket;
    int64_t bytes;
} ml_host_copy;

/* RECURRENCE: a step as a program of its own, which runs once for each position. Its inputs are
 * PARAM nodes, so storages of kind INPUT with these numbers; its outputs are of kind SAVED. Sums
 * are carried like states, from zero on. What is sliced or stacked has the positions outermost.
 * Kernels of GPUs take only storages at multiples of 256 bytes: slices elsewhere are copied to or
 * from the workspace at each position. */
typedef struct {
    uint32_t input;
    int value;      /* of the step's values */
    int64_t bytes;  /* of a position; 0: the same at all */
    int64_t all;    /* bytes of the value */
    int64_t staged; /* where a copy is, in the workspace; -1: read in place */
} ml_loop_input;
typedef struct {
    uint32_t output;
    int value;
    int64_t bytes, staged; /* -1: written in place */
} ml_loop_stacked;
typedef struct {
    uint32_t input, output;
    int initial, final, history;                       /* values; -1: zero, none, none */
    int64_t bytes, offset[2];                          /* in the workspace: two buffers in turn */
    bool initial_copied, history_copied, final_copied; /* from and to these buffers, not in place */
} ml_loop_carried;
typedef struct {
    int64_t length;
    bool reverse;
    int input_count, stacked_count, carried_count;
    ml_loop_input *inputs;
    ml_loop_stacked *stacked;
    ml_loop_carried *carried;
    const bool *wanted;   /* by root of the node: it is an output of the body */
    struct ml_plan *plan; /* of the body; NULL until it is compiled */
    int64_t arena;        /* in the workspace: where the body's temporaries begin */
    int workspace;        /* value; -1: none */
    const char *why;      /* it is no kernel */
} ml_loop;

/* RECURRENCE that one kernel serves. The step's reads: the node's sources, then initial states of
 * histories that are stacked results; from `forward_at` on, where `forward` is a recurrence whose
 * histories the kernel computes again, its sources, and its states at every `every` positions. The
 * last `checkpoints` writes are such states of the node itself. The states are those before the
 * first position and wherever a multiple of `every` is left; the last comes first. */
typedef struct {
    ml_ref forward; /* 0: none */
    int forward_at, every, checkpoints;
} ml_scan_step;

/* A product of few rows that is a kernel of the step; several of one first operand, as a list: the
 * step reads that, then what each reads beside it, and writes the result of each. */
typedef struct ml_few_rows {
    const struct ml_few_rows *next;
    const ml_gemm *gemm;
    bool constant;                /* no step of the program writes the second operand */
    bool scaled;                  /* f32 sums are multiplied by scales of columns */
    const ml_kernel_ir *computes; /* of the first of a list: what computes the first operand; NULL:
                                     that is in memory */
} ml_few_rows;

typedef enum {
    ML_STEP_KERNEL,    /* a generated kernel: loops, or a template (scatter_add, scan, sort) */
    ML_STEP_GEMM,      /* reads a, b (, bias) (, what c accumulates to); writes c */
    ML_STEP_ATTENTION, /* forward or backward; the device picks cuDNN or the template */
    ML_STEP_COPY,      /* one contiguous value to another of the same type */
    ML_STEP_RAGGED, /* products by groups of rows, where the device has products of its own: CPU */
    ML_STEP_COLLECTIVE,
    ML_STEP_LOOP, /* a recurrence: its body at each position */
    ML_STEP_HOST_COPY,
    ML_STEP_WAIT, /* for the collective, or the copy, with the same ticket */
    ML_STEP_KINDS
} ml_step_kind;

typedef struct {
    ml_step_kind kind;
    ml_ref node; /* the node it is named after, for origins */
    int read_count, write_count;
    int members; /* kernels that it is a batch of, each with as many reads and writes; 0: none */
    uint32_t *values;       /* reads, then writes: in the order of the kernel's pointers */
    const ml_kernel_ir *ir; /* loops; NULL for templates */
    ml_kernel *kernel;      /* KERNEL, and ATTENTION where the template serves */
    const ml_gemm *gemm;
    const ml_few_rows *few_rows; /* of KERNEL */
    int fresh_at; /* CACHED_ATTENTION: from this read on it has the row of K's pool for the one new
                     position, its key, and the same of V, which it writes; 0: they are there */
    const ml_attention_step *attention;
    const ml_ragged *ragged;
    ml_loop *loop;
    const ml_scan_step *scan;
    const ml_collective_step *collective;
    const ml_host_copy *host_copy;
    uint64_t *may_alias; /* for each write: bit set of its member's reads whose memory it may
                            overwrite (same elements read before they are written, never after) */
    double flops;
    int64_t bytes; /* that must move: each operand once */
} ml_step;

/* Kernels of templates, by a hash of the body and of what is put in, and by one of a file's name
 * and of all that was set for it: layers repeat. */
typedef struct {
    ml_index index, settings;
    ML_VEC(const ml_kernel *) kernels;
} ml_expansions;

typedef struct {
    const ml_graph *graph;
    ml_arena *arena;
    const ml_target *target;
    ML_VEC(ml_storage) storages;
    ML_VEC(ml_value) values;
    ML_VEC(ml_step) steps;
    uint32_t *output_values; /* by output of the roots */
    uint32_t *update_values; /* by update: where the new value is before it is assigned */
    ml_expansions expansions;
} ml_schedule;

/* Fuse (fuse.c), choose views, build kernel IR and kernels (kernel.c), describe GEMMs and
 * attention. No source is printed. Everything lives in `arena`. Raises. */
ml_schedule *ml_lower(const ml_graph *g, const ml_roots *roots, const ml_target *target,
                      ml_arena *arena);
/* Check what must hold of a fresh schedule (ml_lower does with MLUA_VERIFY=1); raises. */
void ml_lower_verify(const ml_schedule *s);
/* Steps, operands and the IR of kernels as text: for MLUA_DEBUG=3 and golden tests. */
void ml_lower_print(const ml_schedule *s, ml_text *out);
/* With the values of a step of it; NULL: none. */
void ml_kernel_ir_print(const ml_kernel_ir *ir, const ml_step *step, ml_text *out);
const char *ml_step_kind_name(ml_step_kind kind); /* "kernel", "gemm", ... */
/* What a step does, for people: its kernel's label ("sum+mul"), else the name of its kind. */
const char *ml_step_label(const ml_step *step);
double ml_step_sent(const ml_collective_step *step); /* bytes that leave one rank */
/* Kernels from templates (codegen/kernels). The step's `kernel` is filled in. Workspace that a
 * template needs is a further written value that it adds to the step. */
/* The program of a loop's body: a graph of its own, whose leaves are PARAM nodes. */
ml_graph *ml_loop_body(const ml_schedule *s, const ml_step *step, ml_roots *roots);
void ml_template_attention(ml_schedule *s, ml_step *step);
/* Reads index, value (, what it is added to, laid out as the result); writes the result. */
void ml_template_scatter_add(ml_schedule *s, ml_step *step);
void ml_template_scan(ml_schedule *s, ml_step *step);       /* CUMSUM, SORT, TOP_K */
void ml_template_recurrence(ml_schedule *s, ml_step *step); /* ml_recurrence_elementwise */
/* Where positions of a recurrence by elements compose, so that a scan of them is associative: the
 * algebra ("affine", "max-plus", "affine and max-plus"); NULL: they do not. */
const char *ml_recurrence_algebra(const ml_graph *g, ml_ref n);
/* Whether the target's library computes a scaled product of these sizes. */
bool ml_scaled_product_library(const ml_target *target, const ml_graph *g, ml_ref dot);
/* LINEAR_SCAN and LINEAR_SCAN_GRAD: of rank 0 with one decay a position; others. Whether a kernel
 * serves the node. */
bool ml_linear_scan_kernel(const ml_target *target, const ml_graph *g, ml_ref n);
bool ml_delta_scan_kernel(const ml_target *target, const ml_graph *g, ml_ref n);
void ml_template_linear_scan(ml_schedule *s, ml_step *step);
void ml_template_delta_scan(ml_schedule *s, ml_step *step);
/* RECURRENCE with products of states, as one kernel of GPUs; false, and why not. */
bool ml_template_recurrence_grid(ml_schedule *s, ml_step *step, const char **why);
void ml_template_write_rows(ml_schedule *s, ml_step *step);
/* A matrix of 8-bit elements whose columns are contiguous, with its rows contiguous; on CUDA. Sizes
 * are multiples of 16. */
void ml_template_transpose(ml_schedule *s, ml_step *step);
void ml_template_cached_attention(ml_schedule *s, ml_step *step); /* f32 and bf16 */
/* Whether its kernel may also write these new keys and values (values of the schedule) to the
 * pools: those of one position of each row, which no score function reads. */
enum { ML_POOL_READ = 1 }; /* the step's read of K's pool, which is before V's */
bool ml_cached_attention_writes(ml_schedule *s, ml_step *step, const uint32_t *fresh);
/* A product of few rows of GPUs as a kernel of the step, which has its operands: a, b, then a
 * bias, scales of columns and what is added, those that there are. */
bool ml_template_few_rows(ml_schedule *s, ml_step *step, const ml_few_rows *product);
/* The same with the first operand computed by a kernel of loops, whose IR `product` has: the step's
 * first read is then the first of that, further ones are the step's last reads. False where that
 * does not serve. */
/* Whether the kernel widens a second operand of 8 bits, a matrix along one of its sides. */
bool ml_few_rows_of_bytes(const ml_target *target, int64_t m, int64_t n, int64_t k);
void ml_template_reset(ml_schedule *s, ml_step *step); /* WHERE(test, 0, state), both contiguous */
/* Describes the step; on CUDA with kernels, elsewhere its kind becomes ML_STEP_RAGGED. */
void ml_template_ragged(ml_schedule *s, ml_step *step);
/* Whether a kernel of the target computes a product by groups of operands of 8 bits. */
bool ml_scaled_ragged_kernel(const ml_target *target, const ml_graph *g, ml_ref n);

#endif
