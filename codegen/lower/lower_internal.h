/* Inside the lowering: what fuse*.c decide and kernel.c, opaque.c, gemm.c and views.c turn into
 * steps.
 *
 * Every node has a role. INLINE nodes have no memory: their users compute them again at the indices
 * they need. The others are values in memory or in the registers of one kernel: leaves (states,
 * inputs), results of library steps, concatenations, and ROOTs, which generated kernels compute.
 *
 * A group is one step: a library step, or a kernel that computes one or several roots over one
 * iteration space. The space is a list of digits (loops, outermost first); an axis of a root is an
 * affine combination of digits, so that SPLIT, MERGE and RENAME inside a kernel cost nothing.
 * Digits of size 1 do not exist. Once a reduction is in the group, its digits are split into rows
 * and columns (`committed`), as in kernel.h.
 *
 * Order: group levels. A group's level is above the levels of all groups whose results it reads,
 * so a root may join a group without any search for cycles where all it reads from other groups
 * has a lower level, or where nothing reads the group yet (`sealed` is false). */
#ifndef ML_LOWER_INTERNAL_H
#define ML_LOWER_INTERNAL_H

#include "codegen/lower/lower.h"
#include "runtime/passes/passes.h"

typedef enum {
    LOWER_INLINE,
    LOWER_LEAF,
    LOWER_ROOT,
    LOWER_OPAQUE,
    LOWER_CONCAT,
} lower_role;

enum { LOWER_NONE = UINT32_MAX };

/* offset + sum(coef[d] * digit d) + scale * inst. `inst` is an i64 instruction, ML_NO_INST: none.
 * Zeroed padding: indices are compared and hashed as bytes. */
typedef struct {
    int64_t offset, coef[ML_MAX_LOOPS], scale;
    uint64_t inst;
} lower_index;

/* Where a value is stored: in the storage of `holder` (itself unless it is written into a CONCAT).
 */
typedef struct {
    ml_ref holder;
    int64_t offset, stride[ML_MAX_AXES];
} lower_layout;

/* Any tensor as strides over the memory of `base`. */
typedef struct {
    ml_ref base;
    int64_t offset, stride[ML_MAX_AXES];
} lower_view;

/* One tensor that a kernel reads, at one affine map of its digits. Opaque axes have inst 0. */
typedef struct {
    ml_ref node;
    bool partial; /* the chunks' partial results of a reduction */
    uint8_t rank;
    lower_index *index; /* by axis; inst is ML_NO_INST, or anything else for a computed index */
} lower_access;

typedef enum {
    LOWER_ROOT_VALUE,  /* elementwise: the node at every point of the space */
    LOWER_ROOT_REDUCE, /* REDUCE, or a DOT that no library serves */
    LOWER_ROOT_FINISH, /* adds up the partial results of a REDUCE */
    LOWER_ROOT_PART,   /* part `part` of CONCAT `node`, copied into place */
    LOWER_ROOT_PACK,   /* the node copied into the order of `space`: a library's operand */
} lower_root_kind;

typedef struct {
    uint8_t kind, scope, phase; /* phase: passes over the columns before it can be computed */
    int part;
    ml_ref node;
    ml_type space;      /* its iteration axes: FINISH has axis 0 (chunks) first */
    lower_index *index; /* by axis of `space`, over the group's digits */
    uint32_t value;     /* PACK: the value it writes */
} lower_root;

typedef struct {
    bool opaque, sealed, committed, prompt; /* prompt: ML_NODE_PROMPT */
    uint32_t shape; /* of kernels: equal ones have equal indices, roots and loops, but other nodes
                       (fuse_join.c) */
    ml_ref node;    /* what it is named after */
    uint32_t level;
    int digits, row_digits; /* row_digits counts only when committed */
    int64_t size[ML_MAX_LOOPS];
    int64_t chunks; /* 0 before a COLUMN or ALL reduction needs them */
    int insts;      /* instructions of all roots, an estimate for limits */
    ML_VEC(lower_root) roots;
    ML_VEC(lower_access) accesses; /* of kernels: reads from outside the group */
    bool packs[2];                 /* DOT: whether gemm_plan wants an operand copied ... */
    ml_type pack_type[2];          /* ... into this order */
    uint32_t packed[2];  /* the copies' values; LOWER_NONE: the operand as it is in memory */
    uint32_t packers[2]; /* the groups that copy them */
    bool turns;          /* the copy `packed[0]` of `node`, transposed: a step of its own */
    ml_gemm *gemm;       /* DOT */
    ml_ref result;       /* what a library step writes: itself, or the ADD fused as its epilogue */
    ml_ref bias, addend; /* of that ADD, what else it adds; 0: none */
    ml_ref scale;        /* what multiplies the columns before that; 0: none */
} lower_group;

typedef struct {
    uint8_t role;
    bool reached, stored, pinned, unrolled, generic_dot;
    bool shares;            /* is stored in the memory of what it adds to */
    bool taken;             /* a DOT or SCATTER_ADD whose only user, an ADD, is its step's result */
    uint8_t users;          /* that are not movements, or behind movements; at most 255 */
    uint32_t group;         /* that makes the final value */
    uint32_t partial_group; /* that makes the partial results of a REDUCE */
    uint32_t partial_value, value, storage;
    uint32_t layout; /* index of a lower_layout; 0: contiguous in the type's order */
    ml_ref product; /* of an ADD fused as the epilogue of a DOT or SCATTER_ADD: that; 0 elsewhere */
    ml_ref bias, addend;   /* of such an ADD: the other operand, as one or the other */
    ml_ref scale;          /* of products by weights of 8 bits: what multiplies the columns */
    uint32_t *part_groups; /* CONCAT: groups of the copied parts, LOWER_NONE where in place */
    uint32_t recent[2];    /* groups that read it lately */
    uint32_t *checkpoints; /* RECURRENCE: lower_checkpoints, NULL not yet */
    bool no_checkpoints;   /* there are none */
} lower_info;

typedef struct {
    ml_ref node;
    uint32_t value, group;
} lower_pack; /* a copy of a library's operand */

/* What was made for groups, by the words that describe them (alike.c). */
typedef struct {
    const uint64_t *words;
    uint32_t count;
    void *result;
} lower_alike_entry;
typedef struct {
    ml_index index;
    ML_VEC(lower_alike_entry) entries;
} lower_alike;

typedef struct {
    const ml_graph *g;
    const ml_roots *roots;
    const ml_target *target;
    ml_arena *arena;   /* of the schedule */
    ml_arena *scratch; /* of this pass */
    ml_arena *work;    /* of the builder in use */
    lower_root single;
    ml_schedule *s;
    uint32_t count;
    lower_info *info;
    uint32_t *first_user; /* users of n: user[first_user[n] .. first_user[n + 1]) */
    ml_ref *user;
    uint32_t *update; /* by node: 1 + the first of roots->updates that it is the value of; 0 */
    bool *assigned;   /* by state: the program sets it */
    bool narrow;      /* the program has narrow floats */
    uint32_t *stamp, stamps; /* marks for bounded walks */
    ML_VEC(lower_layout) layouts;
    ML_VEC(lower_group) groups; /* 0 is not a group */
    uint32_t last_opaque;       /* the group */
    ML_VEC(lower_pack) packs;
    ml_index pack_index;      /* by node */
    uint32_t scalar_group;    /* a recent kernel without loops */
    uint32_t finish_group[4]; /* recent kernels that add up partial results */
    int finish_next;
    ML_VEC(uint64_t) words;  /* alike.c: that describe the group at hand */
    ML_VEC(ml_ref) numbered; /* its nodes */
    uint32_t *number;        /* by node: its place among these, from 1; 0: it is not */
    uint32_t shapes;
    lower_alike singles;  /* kernels for a root alone (fuse_space.c) */
    lower_alike meetings; /* of a kernel with one for a root alone (fuse_join.c) */
    lower_alike made;     /* kernels (kernel.c) */
    ml_index kernels;     /* distinct kernels by structure */
    ML_VEC(const ml_kernel_ir *) distinct;
    ML_VEC(ml_kernel *) distinct_kernels;
} lowering;

static inline bool lower_in_memory(const lowering *l, ml_ref n) {
    return l->info[n].role != LOWER_INLINE;
}

/* views.c */
const lower_layout *views_layout(lowering *l, ml_ref n, lower_layout *scratch);
bool views_of(lowering *l, ml_ref n, lower_view *view);    /* false: not expressible by strides */
void views_require(lowering *l, ml_ref n, bool broadcast); /* make roots so that n has a view */
uint32_t views_storage(lowering *l, ml_ref n);
uint32_t views_value(lowering *l, ml_ref n); /* the ml_value of n: its own, or a view */
uint32_t views_value_at(lowering *l, ml_ref base, const ml_type *type, int64_t offset,
                        const int64_t *stride);
uint32_t views_temporary(lowering *l, ml_ref node, const ml_type *type); /* contiguous */
bool views_contiguous(const ml_type *type, const int64_t *stride);
void views_strides(const ml_type *type, int64_t *stride); /* of contiguous memory */
int64_t views_axis_stride(const ml_type *type, const int64_t *stride, ml_axis axis);
/* Follow movements from a tensor down to the node that computes it, turning the strides that the
 * tensor must have into the strides of that node. 0 where a movement cannot be turned round. */
ml_ref views_producer(lowering *l, ml_ref tensor, int64_t *stride);

/* layout.c: memory orders other than the type's, where they save copies for products */
void layout_choose(lowering *l);

/* concat.c: which parts are written in place; and CONCATs in the memory of their parts */
void concat_place_parts(lowering *l);
void concat_share_memory(lowering *l);

/* alike.c: describe a group, then look for what was made for one that is alike, or note it. A node
 * of that has the number of the node of this one in its place. */
void alike_begin(lowering *l);
void alike_word(lowering *l, uint64_t word);
void alike_root(lowering *l, const lower_root *root);
void alike_kernel(lowering *l, const lower_group *group);      /* begins, too */
void *alike_find(const lowering *l, const lower_alike *known); /* NULL: nothing */
void alike_add(lowering *l, lower_alike *known, void *result);

/* fuse.c: roles */
void fuse_roles(lowering *l);
void fuse_dot_space(const ml_graph *g, ml_ref n, ml_type *space);

/* fuse_join.c: a kernel and one for a root alone, which meet: what they share, and what becomes of
 * them, as far as that follows from shapes and from which nodes are the same. */
typedef struct {
    bool fits;
    lower_group group;      /* with the root, of the first such kernel */
    ML_VEC(uint32_t) taken; /* which accesses of the root's kernel are the group's last ones */
} lower_joined;
typedef struct {
    int64_t shared;          /* elements that need not be read again */
    bool consumes;           /* the root uses a result of the kernel */
    lower_joined *joined[2]; /* by whether loops of equal size are the same; NULL: not known yet */
} lower_meeting;
lower_meeting *fuse_meeting(lowering *l, const lower_group *to, const lower_group *from);
const lower_joined *fuse_joined(lowering *l, lower_meeting *meeting, const lower_group *to,
                                const lower_group *from, bool by_size);
/* The root of `from` becomes one of `to`, as `joined` says. */
void fuse_take(lowering *l, lower_group *to, const lower_group *from, const lower_joined *joined);
/* The root of the kernel whose result is what is read, and can be used there; NULL. */
const lower_root *fuse_find_available(const lower_group *group, const lower_access *access);

/* fuse_group.c: groups. fuse_place puts a root into a kernel and returns the group. */
uint32_t fuse_place(lowering *l, lower_root *root);
void fuse_groups(lowering *l);
void fuse_producers(lowering *l, ml_ref n, bool partial,
                    void (*visit)(void *context, uint32_t group), void *context);
void fuse_group_dependencies(lowering *l, uint32_t group,
                             void (*visit)(void *context, uint32_t group), void *context);

/* fuse_match.c: fitting a root's own kernel `from` into `to`. On success match->map[d] is the digit
 * of *to for digit d of *from, and both have been refined alike. */
typedef struct {
    int digits[2];
    int64_t size[2][ML_MAX_LOOPS];
    int map[ML_MAX_LOOPS];            /* from's digit to to's; -1 */
    int refined[2][ML_MAX_LOOPS * 2]; /* digit numbers in the order of refinement */
    int64_t inner[2][ML_MAX_LOOPS * 2];
    int refinements[2];
} lower_match;
bool fuse_match(const ml_graph *g, const lower_group *to, const lower_group *from, bool by_size,
                lower_match *match);
void fuse_refine(lower_group *group, int digit, int64_t inner);
void fuse_refine_index(lower_index *index, int digit, int64_t inner, int digits);
lower_index fuse_map_index(const lower_index *index, const lower_match *match);
lower_index fuse_refined_index(const lower_index *index, const lower_match *match, int which);
/* The indices of a root's result, by axis of its type. */
void fuse_result_index(const ml_graph *g, const lower_root *root, lower_index *out);
bool fuse_available(const lower_root *root); /* other roots of its kernel can use its result */
int fuse_digits_of(const lower_index *index, const int64_t *size, int digits, int *out);
lower_index fuse_index_zero(void);
bool fuse_index_equal(const lower_index *a, const lower_index *b);

/* fuse_space.c: rows and columns */
lower_group fuse_single(lowering *l, const lower_root *root); /* a kernel for this root alone */
bool fuse_joins_space(lowering *l, const lower_group *to, const lower_group *from,
                      const lower_match *match, bool consumes, int *order, int *row_digits,
                      ml_scope *scope);
void fuse_reorder(lower_group *group,
                  const int *order); /* order[i]: the digit that becomes digit i */
int64_t fuse_rows(const lower_group *group);
int64_t fuse_columns(const lower_group *group);
int64_t fuse_chunks(const lowering *l, const lower_group *group, ml_scope scope);

/* eval.c: expressions to instructions. */
enum {
    LOWER_INST_AFFINE = 100
}; /* a lower_index's affine part, i64; replaced once loops are final */
typedef struct {
    ml_ref node;
    uint16_t guard, inst;
    uint8_t rank;
    lower_index *index;
} lower_memo;
typedef struct {
    lowering *l;
    ml_arena *arena; /* ends with the next builder */
    int digits;
    int64_t size[ML_MAX_LOOPS];
    ML_VEC(ml_inst) inst;
    ML_VEC(lower_index) affine;
    ML_VEC(lower_access) access;
    ML_VEC(lower_memo) memo;
    ml_index memos, insts;
    ML_VEC(lower_memo) computed; /* roots of this kernel */
    int refine_digit;            /* a MERGE wants this digit cut; -1 */
    int64_t refine_inner;
    int depth;
} lower_builder;
void eval_begin(lower_builder *b, lowering *l, const lower_group *group);
uint16_t eval_root(lower_builder *b, const lower_root *root); /* the value before any reduction */
uint16_t eval_inst(lower_builder *b, const ml_inst *inst);    /* appends, or finds an equal one */
uint16_t eval_rounded(lower_builder *b, uint16_t value, ml_dtype dtype);
uint16_t eval_index(lower_builder *b, const lower_index *index);

/* step.c */
ml_step *lower_step(lowering *l, ml_step_kind kind, ml_ref node, const uint32_t *reads,
                    int read_count, const uint32_t *writes, int write_count);

/* gemm.c: products. Whether the library computes this DOT. */
bool gemm_serves(const lowering *l, ml_ref dot);
/* What a product that a library serves reads as operand i: where that is the cast of weights of 8
 * bits, those, which a CPU's product and a GPU's of few rows widen themselves. */
ml_ref gemm_operand(const lowering *l, ml_ref dot, int i);
/* How many operands of a DOT must be copied as they are stored; for operand `which` alone: 0 or 1,
 * and the order in which it would need no copy. */
int gemm_copies(lowering *l, ml_ref dot, int which, ml_type *order);
/* Give ADDs to the DOT before them: of a bias, where the target's library adds for nothing, and of
 * an f32 or f64 tensor that nothing else reads, which the product is accumulated to. The latter to
 * SCATTER_ADDs too. Products of few rows by weights of 8 bits take their scales, the rounding and
 * an addition in bf16. */
void gemm_take_additions(lowering *l);
/* Whether n is the new value of the state that the STATE reads. */
bool gemm_updates(const lowering *l, ml_ref n, ml_ref state);
bool gemm_result_fits(lowering *l, ml_ref dot, const int64_t *stride);
/* Whether a copy of `node`, in memory, into this order is the transposed matrix of 8-bit elements
 * that ml_template_transpose makes. */
bool gemm_turns(lowering *l, ml_ref node, const ml_type *order);
/* The product's shape and strides, and which operands must be copied into which order first. */
void gemm_plan(lowering *l, lower_group *group);
void gemm_step(lowering *l, lower_group *group);

/* kernel.c, opaque.c: groups to steps. */
void lower_kernel_step(lowering *l, lower_group *group);
void lower_opaque_step(lowering *l, lower_group *group);
/* The step of n on its operands and outputs, for routines.c. */
ml_step *lower_routine_step(lowering *l, ml_step_kind kind, ml_ref n);
/* How a routine of runtime/ops becomes a step (routines.c); a row of NULLs for other ops. */
typedef struct {
    void (*step)(lowering *l, ml_ref n);
    /* While roles are decided: gives operands that its kernels cannot read as they are a place of
     * their own in memory; NULL: they read all. */
    void (*require)(lowering *l, ml_ref n);
    bool any_strides; /* reads operands and writes results with any strides */
    bool by_position; /* where it is no one kernel: moves along operands and results by positions */
} lower_routine;
extern const lower_routine lower_routines[ML_OP_COUNT];
void lower_recurrence_step(lowering *l, ml_ref n); /* loop.c */
/* Whether rows of n along `axis` lie in memory one element after another, aligned to 16 bytes. */
bool fuse_has_rows(lowering *l, ml_ref n, ml_axis axis);
/* recurrence.c: whether one kernel serves a recurrence. */
bool lower_one_kernel(lowering *l, ml_ref n);
/* Of a recurrence's history that is not stored: the result that has the states after each position,
 * and the state before the first. 0 for other nodes. */
ml_ref lower_shifted_history(lowering *l, ml_ref n, ml_ref *initial);
/* The states of a recurrence at every so many positions, from which its gradient's kernel computes
 * the histories again: a value for each. NULL where it does not. */
const uint32_t *lower_checkpoints(lowering *l, ml_ref n);
void lower_scan_step(lowering *l, ml_ref n);
/* Orders of such kernels' results that save copies. */
void lower_recurrence_layouts(lowering *l);
/* The node of output i; 0 where nothing uses it. */
ml_ref views_output_node(lowering *l, ml_ref n, int i);

/* order.c: the groups in the order in which they run. */
uint32_t *lower_order(lowering *l, uint32_t *count);

#endif
