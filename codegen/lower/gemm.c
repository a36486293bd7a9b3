/* DOT as matrix products: axes in groups (batch, m, k, n), each collapsed to one stride. An operand
 * with other strides is copied first. */
#include "codegen/lower/lower_internal.h"

#include <string.h>

typedef struct {
    int count;
    ml_axis axis[ML_MAX_AXES];
    int64_t size[ML_MAX_AXES], total;
} axis_group;

typedef struct {
    axis_group batch, m, n, k;
    bool scaled; /* operands of 8 bits for tensor cores, which read both along k */
} dot_axes;

enum { SCALED_UNIT = 16 }; /* bytes, to which cuBLASLt wants rows of 8-bit operands aligned */

static bool is_reduced(const ml_graph *g, ml_ref dot, ml_axis axis) {
    for (int i = 0; i < ml_graph_node(g, dot)->arg_count; i++)
        if (ml_graph_args(g, dot)[i] == axis) return true;
    return false;
}

static void add_axis(axis_group *group, const ml_type *type, int i) {
    if (group->total == 0) group->total = 1;
    group->total *= type->size[i];
    if (type->size[i] == 1) return;
    group->axis[group->count] = type->axis[i];
    group->size[group->count++] = type->size[i];
}

/* m, n and batch in the order of the result; k in the order of the first operand. */
static void read_axes(const ml_graph *g, ml_ref dot, dot_axes *out) {
    const ml_type *a = ml_graph_type(g, ml_graph_source(g, dot, 0));
    const ml_type *b = ml_graph_type(g, ml_graph_source(g, dot, 1));
    const ml_type *c = ml_graph_type(g, dot);
    memset(out, 0, sizeof *out);
    out->scaled = ml_is_scaled_dot(g, dot);
    out->batch.total = out->m.total = out->n.total = out->k.total = 1;
    for (int i = 0; i < c->rank; i++) {
        bool in_a = ml_type_find(a, c->axis[i]) >= 0, in_b = ml_type_find(b, c->axis[i]) >= 0;
        add_axis(in_a && in_b ? &out->batch : in_a ? &out->m : &out->n, c, i);
    }
    for (int i = 0; i < a->rank; i++)
        if (is_reduced(g, dot, a->axis[i])) add_axis(&out->k, a, i);
}

bool gemm_serves(const lowering *l, ml_ref dot) {
    const ml_graph *g = l->g;
    int a = ml_graph_type(g, ml_graph_source(g, dot, 0))->dtype;
    int b = ml_graph_type(g, ml_graph_source(g, dot, 1))->dtype, c = ml_graph_type(g, dot)->dtype;
    dot_axes axes;
    if (ml_is_scaled_dot(g, dot)) return true; /* ml_scaled_product_library */
    if (a != b || ml_dtypes[a].kind != ML_KIND_FLOAT || ml_graph_node(g, dot)->arg_count == 0)
        return false;
    if (ml_dtypes[a].bytes == 1) return false; /* of weights alone */
    if (c != a && !(ml_is_narrow((ml_dtype)a) && c == ML_F32)) return false;
    read_axes(g, dot, &axes);
    if (axes.m.total == 0 || axes.n.total == 0 || axes.k.total == 0 || axes.batch.total == 0)
        return false;
    if (axes.m.total == 1 && axes.n.total == 1) return false;
    return axes.batch.total == 1 || (axes.m.total > 1 && axes.n.total > 1);
}

/* The stride with which a group of axes can be walked as one; false where it cannot. */
static bool group_stride(const axis_group *group, const ml_type *type, const int64_t *stride,
                         int64_t *out) {
    *out = 1;
    for (int i = group->count - 1; i >= 0; i--) {
        int64_t step = views_axis_stride(type, stride, group->axis[i]);
        if (i == group->count - 1)
            *out = step;
        else if (step != views_axis_stride(type, stride, group->axis[i + 1]) * group->size[i + 1])
            return false;
    }
    return true;
}

/* Whether strides (row, col) of a matrix of rows x cols are what a BLAS takes. A dimension of size
 * 1 gets the stride that makes it so. */
static bool matrix_fits(int64_t rows, int64_t cols, int64_t *row, int64_t *col) {
    if (rows == 1) *row = *col == 1 ? cols : 1;
    if (cols == 1) *col = *row == 1 ? rows : 1;
    return (*col == 1 && *row >= cols) || (*row == 1 && *col >= rows);
}

static bool operand_fits(const ml_type *type, const int64_t *stride, const axis_group *rows,
                         const axis_group *cols, int64_t *row, int64_t *col) {
    return group_stride(rows, type, stride, row) && group_stride(cols, type, stride, col) &&
           matrix_fits(rows->total, cols->total, row, col);
}

typedef struct {
    ml_ref node;
    ml_type type;
    int64_t stride[ML_MAX_AXES];
} operand;

/* k in the order of memory of `op`. */
static axis_group order_by(const axis_group *k, const operand *op) {
    axis_group out = *k;
    for (int i = 1; i < out.count; i++) {
        for (int at = i; at > 0; at--) {
            int64_t low = views_axis_stride(&op->type, op->stride, out.axis[at - 1]);
            int64_t high = views_axis_stride(&op->type, op->stride, out.axis[at]);
            if (low >= high) break;
            ml_axis axis = out.axis[at];
            int64_t size = out.size[at];
            out.axis[at] = out.axis[at - 1];
            out.size[at] = out.size[at - 1];
            out.axis[at - 1] = axis;
            out.size[at - 1] = size;
        }
    }
    return out;
}

/* Whether the operand is the cast of weights of 8 bits that mlua's own kernel widens: the second
 * one of a product of few rows, a state as it is in memory, which is a matrix along k or n. */
static bool widens_few_rows(const lowering *l, ml_ref dot) {
    const ml_graph *g = l->g;
    ml_ref cast = ml_graph_source(g, dot, 1), state = ml_graph_source(g, cast, 0);
    while (ml_graph_node(g, state)->op == ML_OP_RENAME) state = ml_graph_source(g, state, 0);
    const int c = ml_graph_type(g, dot)->dtype;
    if (ml_graph_node(g, state)->op != ML_OP_STATE || (c != ML_BF16 && c != ML_F32)) return false;
    if (ml_graph_type(g, cast)->dtype != ML_BF16) return false;
    if (ml_graph_type(g, ml_graph_source(g, dot, 0))->dtype != ML_BF16) return false;
    dot_axes axes;
    operand b = {.type = *ml_graph_type(g, ml_graph_source(g, cast, 0))};
    int64_t deep, wide;
    read_axes(g, dot, &axes);
    views_strides(&b.type, b.stride);
    const axis_group k = order_by(&axes.k, &b);
    return axes.batch.total == 1 &&
           ml_few_rows_of_bytes(l->target, axes.m.total, axes.n.total, axes.k.total) &&
           operand_fits(&b.type, b.stride, &axes.n, &k, &wide, &deep);
}

ml_ref gemm_operand(const lowering *l, ml_ref dot, int i) {
    ml_ref source = ml_graph_source(l->g, dot, i);
    if (l->target->no_fuse || ml_graph_node(l->g, source)->op != ML_OP_CAST) return source;
    ml_ref under = ml_graph_source(l->g, source, 0);
    int dtype = ml_graph_type(l->g, under)->dtype;
    if (!ml_is_narrow((ml_dtype)dtype) || ml_dtypes[dtype].bytes != 1) return source;
    if (l->target->kind != ML_TARGET_C && (i != 1 || !widens_few_rows(l, dot))) return source;
    return under;
}

/* An operand of a product, whose own axes are `free`; lines and columns of a matrix of k x free as
 * of one of free x k. */
static bool factor_fits(const dot_axes *axes, const ml_type *type, const int64_t *stride,
                        const axis_group *free, const axis_group *k, int64_t *free_step,
                        int64_t *k_step) {
    if (!operand_fits(type, stride, free, k, free_step, k_step)) return false;
    return !axes->scaled || (*k_step == 1 && *free_step % SCALED_UNIT == 0);
}

bool ml_scaled_product_library(const ml_target *target, const ml_graph *g, ml_ref dot) {
    enum { ADA = 89 }; /* the first whose tensor cores multiply 8-bit floats */
    dot_axes axes;
    read_axes(g, dot, &axes);
    return target->kind == ML_TARGET_CUDA && !target->no_fuse && target->arch >= ADA &&
           axes.batch.total == 1 && axes.m.total % SCALED_UNIT == 0 &&
           axes.n.total % SCALED_UNIT == 0 && axes.k.total % SCALED_UNIT == 0 && axes.k.total > 0 &&
           axes.m.total > 0 && axes.n.total > 0;
}

bool gemm_result_fits(lowering *l, ml_ref dot, const int64_t *stride) {
    dot_axes axes;
    int64_t row, col;
    read_axes(l->g, dot, &axes);
    return axes.batch.count <= ML_GEMM_BATCHES &&
           operand_fits(ml_graph_type(l->g, dot), stride, &axes.m, &axes.n, &row, &col);
}

/* --- operands that must be copied --- */

static void add_group(ml_type *type, const axis_group *group) {
    for (int i = 0; i < group->count; i++) {
        type->axis[type->rank] = group->axis[i];
        type->size[type->rank++] = group->size[i];
    }
}

/* The order for a copy of an operand: its groups as they are, the one that holds the innermost axis
 * of the memory last, so that the copy reads and writes in order. */
static ml_type pack_order(const operand *op, const dot_axes *axes, const axis_group *free) {
    ml_type type = {.dtype = op->type.dtype};
    bool free_last = false;
    for (int i = 0; i < free->count && !axes->scaled; i++)
        free_last = free_last || views_axis_stride(&op->type, op->stride, free->axis[i]) == 1;
    add_group(&type, &axes->batch);
    add_group(&type, free_last ? &axes->k : free);
    add_group(&type, free_last ? free : &axes->k);
    return type;
}

/* The operand is to be copied into that order first. */
static void pack(lower_group *group, int which, operand *op, const dot_axes *axes) {
    op->type = pack_order(op, axes, which ? &axes->n : &axes->m);
    views_strides(&op->type, op->stride);
    group->packs[which] = true;
    group->pack_type[which] = op->type;
}

/* How many axes of the written order are the columns of what is read, contiguous there. */
static int turned_columns(const ml_type *type, const int64_t *stride, const ml_type *order) {
    int64_t expected = 1;
    int count = order->rank;
    for (int i = order->rank; i-- > 0;)
        if (views_axis_stride(type, stride, order->axis[i]) == 1 && order->size[i] > 1) count = i;
    if (count == order->rank) return 0;
    for (int i = count; i >= 0; i--) {
        if (views_axis_stride(type, stride, order->axis[i]) != expected) return 0;
        expected *= order->size[i];
    }
    return count + 1;
}

bool gemm_turns(lowering *l, ml_ref node, const ml_type *order) {
    const ml_type *type = ml_graph_type(l->g, node);
    lower_view view;
    if (ml_dtypes[type->dtype].bytes != 1 || l->target->kind != ML_TARGET_CUDA) return false;
    if (!views_of(l, node, &view)) return false;
    const int columns = turned_columns(type, view.stride, order);
    if (columns == 0 || columns == order->rank) return false;
    axis_group rows = {.count = 0, .total = 1};
    int64_t wide = 1, step;
    for (int i = 0; i < columns; i++) wide *= order->size[i];
    for (int i = columns; i < order->rank; i++) {
        rows.axis[rows.count] = order->axis[i], rows.size[rows.count++] = order->size[i];
        rows.total *= order->size[i];
    }
    return group_stride(&rows, type, view.stride, &step) && step >= wide &&
           step % SCALED_UNIT == 0 && view.offset % SCALED_UNIT == 0 && wide % SCALED_UNIT == 0 &&
           rows.total % SCALED_UNIT == 0;
}

static void read_operand(lowering *l, ml_ref node, operand *out) {
    lower_view view;
    memset(out, 0, sizeof *out);
    if (!views_of(l, node, &view))
        ml_raise(ML_INTERNAL, "lowering: operand %%%u of a dot has no place in memory", node);
    out->node = node;
    out->type = *ml_graph_type(l->g, node);
    memcpy(out->stride, view.stride, sizeof out->stride);
}

/* Choose the order of k that needs the fewest copies; fits[i]: operand i needs none. */
static void choose_order(dot_axes *axes, const operand *a, const operand *b, bool *fits) {
    axis_group by_a = order_by(&axes->k, a), by_b = order_by(&axes->k, b);
    int64_t row, col;
    bool a1 = factor_fits(axes, &a->type, a->stride, &axes->m, &by_a, &row, &col);
    bool b1 = factor_fits(axes, &b->type, b->stride, &axes->n, &by_a, &row, &col);
    bool a2 = factor_fits(axes, &a->type, a->stride, &axes->m, &by_b, &row, &col);
    bool b2 = factor_fits(axes, &b->type, b->stride, &axes->n, &by_b, &row, &col);
    /* Weights of 8 bits are read where they are. */
    bool bytes = !axes->scaled && ml_dtypes[b->type.dtype].bytes == 1;
    bool second = a2 + b2 > a1 + b1 || (bytes && b2);
    axes->k = second ? by_b : by_a;
    fits[0] = second ? a2 : a1;
    fits[1] = second ? b2 : b1;
}

static void fit_operands(lower_group *group, dot_axes *axes, operand *a, operand *b) {
    bool fits[2];
    choose_order(axes, a, b, fits);
    if (!fits[0]) pack(group, 0, a, axes);
    if (!fits[1]) pack(group, 1, b, axes);
}

int gemm_copies(lowering *l, ml_ref dot, int which, ml_type *order) {
    dot_axes axes;
    operand op[2];
    bool fits[2];
    read_axes(l->g, dot, &axes);
    for (int i = 0; i < 2; i++) read_operand(l, gemm_operand(l, dot, i), &op[i]);
    choose_order(&axes, &op[0], &op[1], fits);
    if (which >= 0) {
        if (fits[which]) return 0;
        *order = pack_order(&op[which], &axes, which ? &axes.n : &axes.m);
        return 1;
    }
    return !fits[0] + !fits[1];
}

/* Batch axes as at most ML_GEMM_BATCHES loops; 0 where there are more. */
static int batch_loops(const axis_group *batch, const operand *const *operands, ml_gemm *gemm) {
    int64_t *stride[3] = {gemm->a_batch, gemm->b_batch, gemm->c_batch};
    int64_t size[ML_MAX_AXES] = {0}, step[3][ML_MAX_AXES] = {{0}};
    int count = 0;
    for (int i = 0; i < batch->count; i++) {
        int64_t here[3];
        bool joins = count > 0;
        for (int o = 0; o < 3; o++) {
            here[o] = views_axis_stride(&operands[o]->type, operands[o]->stride, batch->axis[i]);
            joins = joins && step[o][count - 1] == here[o] * batch->size[i];
        }
        if (!joins) size[count++] = 1;
        size[count - 1] *= batch->size[i];
        for (int o = 0; o < 3; o++) step[o][count - 1] = here[o];
    }
    if (count > ML_GEMM_BATCHES) return 0;
    for (int i = 0; i < ML_GEMM_BATCHES; i++) {
        int from = i - (ML_GEMM_BATCHES - count); /* unused loops come first */
        gemm->batch[i] = from < 0 ? 1 : size[from];
        for (int o = 0; o < 3; o++) stride[o][i] = from < 0 ? 0 : step[o][from];
    }
    return 1;
}

void gemm_plan(lowering *l, lower_group *group) {
    ml_ref n = group->node;
    dot_axes axes;
    operand a, b, c;
    lower_layout scratch;
    const operand *all[3] = {&a, &b, &c};
    ml_gemm *gemm = ML_NEW(l->arena, ml_gemm);
    read_axes(l->g, n, &axes);
    read_operand(l, gemm_operand(l, n, 0), &a);
    read_operand(l, gemm_operand(l, n, 1), &b);
    fit_operands(group, &axes, &a, &b);
    memset(&c, 0, sizeof c);
    c.type = *ml_graph_type(l->g, group->result);
    memcpy(c.stride, views_layout(l, group->result, &scratch)->stride, sizeof c.stride);
    if (!batch_loops(&axes.batch, all, gemm)) {
        if (!group->packs[0]) pack(group, 0, &a, &axes);
        if (!group->packs[1]) pack(group, 1, &b, &axes);
        if (!batch_loops(&axes.batch, all, gemm))
            ml_raise(ML_INVALID, "a dot over %d batch axes", axes.batch.count);
    }
    gemm->m = axes.m.total;
    gemm->n = axes.n.total;
    gemm->k = axes.k.total;
    gemm->a_dtype = (ml_dtype)a.type.dtype;
    gemm->b_dtype = (ml_dtype)b.type.dtype;
    gemm->c_dtype = (ml_dtype)c.type.dtype;
    gemm->scaled = axes.scaled;
    bool fits =
        factor_fits(&axes, &a.type, a.stride, &axes.m, &axes.k, &gemm->a_row, &gemm->a_col) &&
        factor_fits(&axes, &b.type, b.stride, &axes.n, &axes.k, &gemm->b_col, &gemm->b_row) &&
        operand_fits(&c.type, c.stride, &axes.m, &axes.n, &gemm->c_row, &gemm->c_col);
    if (!fits) ml_raise(ML_INTERNAL, "lowering: a dot's operands cannot be laid out as matrices");
    group->gemm = gemm;
}

/* A vector along the columns of a product, contiguous in memory. */
static bool is_row(lowering *l, ml_ref dot, ml_ref vector) {
    const ml_type *type = ml_graph_type(l->g, vector);
    dot_axes axes;
    lower_view view;
    int64_t stride;
    read_axes(l->g, dot, &axes);
    if (axes.batch.total != 1 || ml_type_elements(type) != axes.n.total) return false;
    for (int i = 0; i < axes.n.count; i++)
        if (ml_type_find(type, axes.n.axis[i]) < 0) return false;
    views_require(l, vector, false);
    return views_of(l, vector, &view) && group_stride(&axes.n, type, view.stride, &stride) &&
           stride == 1;
}

/* Whether n is DOT + bias where the bias is a contiguous vector along the DOT's columns. cuBLASLt
 * adds it to the sum in f32 and rounds once; added in bf16 after the product is rounded, a bias far
 * below the spacing of what it is added to would decide each tie, and so count several times over.
 * GELU, its gradient and sums for biases are not left to cuBLASLt, which has them (GELU_AUX_BIAS,
 * DGELU, BGRADA): its kernels that do take 3 to 46 % longer alone (with DGELU_BGRAD 170 % and
 * more), and steps of gpt2-124m that are limited by power took the same time with and without. */
static bool takes_bias(lowering *l, ml_ref n, ml_ref dot, ml_ref bias) {
    const ml_type *type = ml_graph_type(l->g, dot), *vector = ml_graph_type(l->g, bias);
    if (ml_graph_node(l->g, dot)->op != ML_OP_DOT || l->info[dot].role != LOWER_OPAQUE)
        return false;
    if (l->info[dot].pinned || l->info[dot].layout != 0 || l->info[n].layout != 0) return false;
    if (l->first_user[dot + 1] - l->first_user[dot] != 1) return false;
    if (!ml_type_equal(type, ml_graph_type(l->g, n)) || vector->dtype != type->dtype) return false;
    return is_row(l, dot, bias);
}

bool gemm_updates(const lowering *l, ml_ref n, ml_ref state) {
    uint32_t update = l->update[n];
    return update != 0 &&
           l->roots->updates[update - 1].state == (uint32_t)ml_graph_args(l->g, state)[0];
}

/* The last of the additions that n begins, each with nothing but the next for a user. */
static ml_ref last_addition(const lowering *l, ml_ref n) {
    while (!l->info[n].pinned && l->first_user[n + 1] - l->first_user[n] == 1 &&
           ml_graph_node(l->g, l->user[l->first_user[n]])->op == ML_OP_ADD)
        n = l->user[l->first_user[n]];
    return n;
}

/* Whether n is work + addend, f32 or f64, where the memory of the addend is free after that: a
 * tensor that a library step wrote for n alone, or the state that n is the new value of. */
static bool takes_addend(const lowering *l, ml_ref n, ml_ref work, ml_ref addend) {
    const ml_type *type = ml_graph_type(l->g, n);
    const lower_info *product = &l->info[work], *other = &l->info[addend];
    int adder = ml_graph_node(l->g, work)->op, op = ml_graph_node(l->g, addend)->op;
    if (adder != ML_OP_DOT && adder != ML_OP_SCATTER_ADD) return false;
    if (product->role != LOWER_OPAQUE) return false;
    if (work < (other->product ? other->product : addend)) return false; /* it would have to wait */
    if ((type->dtype != ML_F32 && type->dtype != ML_F64)) return false;
    if (product->pinned || other->pinned || product->layout || l->info[n].layout ||
        (other->layout && !other->shares))
        return false;
    if (l->first_user[work + 1] - l->first_user[work] != 1 ||
        l->first_user[addend + 1] - l->first_user[addend] != 1)
        return false;
    if (!ml_type_equal(type, ml_graph_type(l->g, work)) ||
        !ml_type_equal(type, ml_graph_type(l->g, addend)))
        return false;
    return (other->role == LOWER_OPAQUE && op != ML_OP_OUT) ||
           (op == ML_OP_STATE && gemm_updates(l, n, addend));
}

/* Whether n is work + where(test, 0, sum), f32 or f64, and the new value of state `sum`: one term
 * of a sum over microbatches, which begins anew where the input `test` says so. */
static bool takes_sum(const lowering *l, ml_ref n, ml_ref work, ml_ref sum) {
    const ml_graph *g = l->g;
    const lower_info *product = &l->info[work];
    int adder = ml_graph_node(g, work)->op;
    double zero = 1;
    if (adder != ML_OP_DOT && adder != ML_OP_SCATTER_ADD) return false;
    if (ml_graph_node(g, sum)->op != ML_OP_WHERE || l->info[sum].role != LOWER_INLINE) return false;
    ml_ref test = ml_graph_source(g, sum, 0), state = ml_graph_source(g, sum, 2);
    const ml_type *type = ml_graph_type(g, n),
                  *all[] = {ml_graph_type(g, work), ml_graph_type(g, sum), ml_graph_type(g, state)};
    if (product->role != LOWER_OPAQUE || product->pinned || product->layout) return false;
    if (l->info[n].layout || (type->dtype != ML_F32 && type->dtype != ML_F64)) return false;
    for (int i = 0; i < 3; i++)
        if (!ml_type_equal(type, all[i])) return false;
    const ml_ref single[] = {work, sum, state};
    for (int i = 0; i < 3; i++)
        if (l->first_user[single[i] + 1] - l->first_user[single[i]] != 1) return false;
    return ml_graph_node(g, state)->op == ML_OP_STATE &&
           gemm_updates(l, last_addition(l, n), state) &&
           ml_graph_node(g, test)->op == ML_OP_INPUT && ml_graph_type(g, test)->rank == 0 &&
           ml_graph_constant(g, ml_graph_source(g, sum, 1), &zero) && zero == 0;
}

/* n is stored where `sum` is, so that all its terms can be added to the memory of the state. */
static void share_memory(lowering *l, ml_ref n, ml_ref sum) {
    lower_layout *layout = ML_PUSH(l->scratch, &l->layouts);
    layout->holder = sum;
    views_strides(ml_graph_type(l->g, n), layout->stride);
    l->info[n].layout = l->layouts.count - 1;
    l->info[n].shares = true;
}

/* Whether `only` serves nothing but its one user, which need not have it in memory. */
static bool serves_one(const lowering *l, ml_ref only) {
    return l->first_user[only + 1] - l->first_user[only] == 1 && !l->info[only].pinned &&
           l->info[only].layout == 0;
}

/* The result of a product of few rows by weights of 8 bits, that n continues: a product, times its
 * scales, rounded to bf16, plus a tensor in bf16. */
static bool takes_step(lowering *l, ml_ref n, ml_ref work, ml_ref other) {
    const ml_graph *g = l->g;
    const int op = ml_graph_node(g, n)->op, dtype = ml_graph_type(g, n)->dtype;
    const lower_info *info = &l->info[work];
    ml_ref dot = info->product ? info->product : work;
    if (l->info[n].role != LOWER_ROOT && l->info[n].role != LOWER_INLINE) return false;
    if (info->role != LOWER_OPAQUE || !serves_one(l, work) || l->info[n].layout) return false;
    if (ml_graph_node(g, dot)->op != ML_OP_DOT || l->target->kind != ML_TARGET_CUDA ||
        gemm_operand(l, dot, 1) == ml_graph_source(g, dot, 1))
        return false;
    if (op == ML_OP_MUL)
        return !info->product && ml_type_equal(ml_graph_type(g, n), ml_graph_type(g, work)) &&
               dtype == ML_F32 && ml_graph_type(g, other)->dtype == ML_F32 && is_row(l, dot, other);
    if (!info->scale || info->addend) return false;
    if (op == ML_OP_CAST) return dtype == ML_BF16;
    if (op != ML_OP_ADD || dtype != ML_BF16 || other > n) return false;
    lower_view view;
    if (!ml_type_equal(ml_graph_type(g, n), ml_graph_type(g, work)) ||
        !ml_type_equal(ml_graph_type(g, n), ml_graph_type(g, other)))
        return false;
    views_require(l, other, false);
    return views_of(l, other, &view) && views_contiguous(ml_graph_type(g, other), view.stride);
}

static void take_steps(lowering *l, ml_ref n) {
    const ml_node *node = ml_graph_node(l->g, n);
    const bool binary = node->op == ML_OP_MUL || node->op == ML_OP_ADD;
    if (!l->info[n].reached || (!binary && node->op != ML_OP_CAST)) return;
    for (int i = 0; i < node->source_count && !l->info[n].product; i++) {
        ml_ref work = ml_graph_source(l->g, n, i);
        ml_ref other = binary ? ml_graph_source(l->g, n, 1 - i) : 0;
        if (!takes_step(l, n, work, other)) continue;
        lower_info *info = &l->info[n], *before = &l->info[work];
        info->role = LOWER_OPAQUE;
        info->product = before->product ? before->product : work;
        info->scale = node->op == ML_OP_MUL ? other : before->scale;
        info->addend = node->op == ML_OP_ADD ? other : 0;
        before->role = LOWER_INLINE;
        before->product = before->scale = 0;
        before->taken = true;
    }
}

static void take_addition(lowering *l, ml_ref n, ml_ref work) {
    l->info[n].role = LOWER_OPAQUE;
    l->info[n].product = work;
    l->info[work].role = LOWER_INLINE; /* its only user computes it */
    l->info[work].taken = true;
}

void gemm_take_additions(lowering *l) {
    bool biases = l->target->kind == ML_TARGET_CUDA;
    for (ml_ref n = 1; n < l->count && !l->target->no_fuse; n++) {
        take_steps(l, n);
        bool adds = l->info[n].reached && ml_graph_node(l->g, n)->op == ML_OP_ADD;
        for (int i = 0; i < 2 && adds && l->info[n].product == 0; i++) {
            ml_ref work = ml_graph_source(l->g, n, i), other = ml_graph_source(l->g, n, 1 - i);
            bool fused = l->info[n].role == LOWER_ROOT || l->info[n].role == LOWER_INLINE;
            if (biases && fused && takes_bias(l, n, work, other)) {
                take_addition(l, n, work);
                l->info[n].bias = other;
            } else if (takes_addend(l, n, work, other)) {
                take_addition(l, n, work);
                l->info[n].addend = other;
                if (l->info[other].shares)
                    share_memory(l, n, l->layouts.at[l->info[other].layout].holder);
            } else if (takes_sum(l, n, work, other)) {
                take_addition(l, n, work);
                l->info[n].addend = other;
                l->info[other].role = LOWER_OPAQUE; /* a step of its own: opaque.c */
                share_memory(l, n, other);
            }
        }
    }
}

/* Whether no step writes the memory of a value. */
static bool is_constant(const lowering *l, uint32_t value) {
    const ml_storage *storage = &l->s->storages.at[l->s->values.at[value].storage];
    return storage->kind == ML_STORAGE_STATE && !l->assigned[storage->id];
}

void gemm_step(lowering *l, lower_group *group) {
    ml_ref n = group->node;
    uint32_t reads[6], write = views_value(l, group->result);
    int read_count = 2;
    for (int i = 0; i < 2; i++)
        reads[i] = group->packed[i] != LOWER_NONE ? group->packed[i]
                                                  : views_value(l, gemm_operand(l, n, i));
    if (group->bias != 0) {
        reads[read_count++] = views_value(l, group->bias);
        group->gemm->epilogue = ML_EPILOGUE_BIAS;
    }
    if (group->scale != 0) reads[read_count++] = views_value(l, group->scale);
    if (group->addend != 0) {
        reads[read_count++] = views_value(l, group->addend);
        group->gemm->accumulate = true;
    }
    const int addend = read_count - 1;
    if (group->gemm->scaled) reads[read_count++] = views_value(l, ml_graph_source(l->g, n, 2));
    ml_step *step = lower_step(l, ML_STEP_GEMM, n, reads, read_count, &write, 1);
    ml_few_rows *product = ML_NEW(l->arena, ml_few_rows);
    *product = (ml_few_rows){
        .gemm = group->gemm, .scaled = group->scale != 0, .constant = is_constant(l, reads[1])};
    if (l->target->kind == ML_TARGET_CUDA && ml_template_few_rows(l->s, step, product))
        step->kind = ML_STEP_KERNEL, step->few_rows = product;
    else
        step->gemm = group->gemm;
    if (group->addend == 0 || group->scale != 0) return;
    step->may_alias = ML_NEW(l->arena, uint64_t);
    step->may_alias[0] = (uint64_t)1 << addend;
}
