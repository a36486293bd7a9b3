/* Products by groups of rows on the CPU. A group's matrix is multiplied with the rows that all
 * elements of the batch have of it: as in one product of so many rows, whose blocks (cpu_gemm.c)
 * are the units of one job for all groups, the largest groups' first. Where several elements have
 * few rows of a group, a unit gathers them in memory of its thread: a group's matrix is packed once
 * for all of them. What cpu_gemm.c has to convert is one product after another. */
#include <stdlib.h>
#include <string.h>

#include "runtime/device/cpu/cpu_few.h"
#include "runtime/device/cpu/cpu_internal.h"

enum { GATHERED_ROWS = 256 }; /* the most; so many of one element are multiplied where they are */

/* The product of `rows` rows; strides are those of the whole tensors. */
static ml_gemm group_product(const ml_ragged *r, int64_t rows) {
    ml_gemm g = {.batch = {1, 1, 1}, .n = r->n, .b_row = r->b_row, .b_col = r->b_col};
    g.a_dtype = g.b_dtype = r->dtype, g.c_dtype = r->c_dtype;
    g.c_row = r->c_row, g.c_col = r->c_col;
    if (r->outer) {
        g.m = r->k, g.k = rows;
        g.a_row = r->a_col, g.a_col = r->a_row;
    } else {
        g.m = rows, g.k = r->k;
        g.a_row = r->a_row, g.a_col = r->a_col;
    }
    return g;
}

/* ---- the rows of groups ---- */
typedef struct {
    int64_t first, rows;
} span; /* of one element of the batch */

typedef struct {
    int64_t group, rows; /* of all elements */
    int64_t unit;        /* its first */
    const span *spans;   /* by elements */
} group_rows;

typedef struct {
    const ml_ragged *r;
    char *const *operands;
    span *spans; /* by groups, then elements */
    group_rows *groups;
    int64_t rows, units; /* of all groups */
    char *scratch;       /* of threads: what they gather, and packing */
    int64_t first_bytes, second_bytes, thread_bytes;
} ragged_call;

static void clear(const ml_ragged *r, char *to, int64_t rows, int64_t cols) {
    size_t size = (size_t)ml_dtypes[r->c_dtype].bytes;
    for (int64_t i = 0; i < rows; i++) {
        char *row = to + i * r->c_row * (int64_t)size;
        if (r->c_col == 1) {
            memset(row, 0, (size_t)cols * size);
            continue;
        }
        for (int64_t j = 0; j < cols; j++) memset(row + j * r->c_col * (int64_t)size, 0, size);
    }
}

/* Of group e in batch element b, not before `done`. */
static span span_of(const ragged_call *call, int64_t b, int64_t e, int64_t done) {
    const ml_ragged *r = call->r;
    const int32_t *starts = (const int32_t *)call->operands[2];
    const int32_t *ends = (const int32_t *)call->operands[3];
    int64_t start = starts[b * r->start_batch + e * r->start_stride];
    int64_t end = ends[b * r->end_batch + e * r->end_stride];
    int64_t first = start < done ? done : start;
    if (end > r->rows) end = r->rows;
    return (span){first, end > first ? end - first : 0};
}

/* All spans; RAGGED_DOT's rows between them are cleared. */
static void find_spans(const ragged_call *call) {
    const ml_ragged *r = call->r;
    int64_t size = ml_dtypes[r->c_dtype].bytes;
    for (int64_t b = 0; b < r->batch; b++) {
        char *out = call->operands[4] + b * r->c_batch * size;
        int64_t done = 0;
        for (int64_t e = 0; e < r->groups; e++) {
            span s = span_of(call, b, e, r->outer ? 0 : done);
            call->spans[e * r->batch + b] = s;
            if (s.rows == 0 || r->outer) continue;
            clear(r, out + done * r->c_row * size, s.first - done, r->n);
            done = s.first + s.rows;
        }
        if (!r->outer) clear(r, out + done * r->c_row * size, r->rows - done, r->n);
    }
}

static int larger_first(const void *a, const void *b) {
    const group_rows *x = a, *y = b;
    if (x->rows != y->rows) return x->rows > y->rows ? -1 : 1;
    return x->group < y->group ? -1 : 1;
}

/* How many groups as large as this one the call would have. */
static int64_t products_like(const ragged_call *call, const group_rows *g) {
    return g->rows > 0 ? call->rows / g->rows : 1;
}

/* A group without rows has a unit where its result is to be cleared. */
static void cut_groups(ragged_call *call) {
    const ml_ragged *r = call->r;
    for (int64_t e = 0; e < r->groups; e++) {
        group_rows *g = &call->groups[e];
        *g = (group_rows){.group = e, .spans = call->spans + e * r->batch};
        for (int64_t b = 0; b < r->batch; b++) g->rows += g->spans[b].rows;
        call->rows += g->rows;
    }
    qsort(call->groups, (size_t)r->groups, sizeof *call->groups, larger_first);
    for (int64_t i = 0; i < r->groups; i++) {
        group_rows *g = &call->groups[i];
        ml_gemm whole = group_product(r, g->rows);
        g->unit = call->units;
        if (r->outer || g->rows > 0) call->units += cpu_gemm_blocks(&whole, products_like(call, g));
    }
}

/* ---- a unit ---- */

/* Rows that are multiplied at once: `rows` from row `skip` of batch element `batch` on, and where
 * it has fewer, those of the elements after it. */
typedef struct {
    int64_t batch, skip, rows;
    bool gathered;
} piece;

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* The one that begins at row `begin` of a group. */
static piece piece_at(const group_rows *g, int64_t begin, int64_t end) {
    piece p = {.skip = begin};
    while (p.skip >= g->spans[p.batch].rows) p.skip -= g->spans[p.batch++].rows;
    int64_t left = end - begin, here = g->spans[p.batch].rows - p.skip;
    p.rows = least(here, left);
    if (p.rows >= GATHERED_ROWS || p.rows == left) return p;
    int64_t parts = (left + GATHERED_ROWS - 1) / GATHERED_ROWS;
    left = (left + parts - 1) / parts;
    for (int64_t b = p.batch + 1; p.rows < left; b++) {
        int64_t more = g->spans[b].rows;
        if (more >= GATHERED_ROWS) break;
        if (more > 0) p.gathered = true;
        p.rows += more;
    }
    p.rows = least(p.rows, left);
    return p;
}

/* Columns of a tensor of rows of the batch, in elements of `size` bytes. */
typedef struct {
    char *data;
    int64_t size, batch, row, col, cols;
} columns;

static void copy_row(char *to, int64_t to_col, const char *from, int64_t from_col, int64_t cols,
                     int64_t size) {
    if (to_col == 1 && from_col == 1) {
        memcpy(to, from, (size_t)(cols * size));
        return;
    }
    for (int64_t j = 0; j < cols; j++)
        memcpy(to + j * to_col * size, from + j * from_col * size, (size_t)size);
}

enum { TO_BUFFER, FROM_BUFFER };

/* The piece's rows, one after another in `buffer`: from there, or to there. */
static void copy_piece(const columns *t, const group_rows *g, piece p, char *buffer, int way) {
    for (int64_t b = p.batch; p.rows > 0; b++, p.skip = 0) {
        int64_t rows = least(g->spans[b].rows - p.skip, p.rows);
        char *at = t->data + (b * t->batch + (g->spans[b].first + p.skip) * t->row) * t->size;
        p.rows -= rows;
        for (; rows > 0; rows--, at += t->row * t->size, buffer += t->cols * t->size) {
            if (way == TO_BUFFER)
                copy_row(buffer, 1, at, t->col, t->cols, t->size);
            else
                copy_row(at, t->col, buffer, 1, t->cols, t->size);
        }
    }
}

/* Where a product finds the piece's rows: where they are, or in `buffer`. */
static columns piece_columns(columns t, const group_rows *g, piece p, char *buffer) {
    if (p.gathered) return (columns){buffer, t.size, 0, t.cols, 1, t.cols};
    t.data += (p.batch * t.batch + (g->spans[p.batch].first + p.skip) * t.row) * t.size;
    return t;
}

typedef struct {
    const ragged_call *call;
    const group_rows *group;
    cpu_gemm_block block;
    char *first, *second, *packing; /* of this thread */
} unit_call;

static columns columns_of(const char *data, ml_dtype dtype, int64_t batch, int64_t row, int64_t col,
                          int64_t begin, int64_t cols) {
    int64_t size = ml_dtypes[dtype].bytes;
    return (columns){(char *)data + begin * col * size, size, batch, row, col, cols};
}

/* Rows of the block, all that are in it of the columns. */
static void multiply_piece(const unit_call *u, piece p) {
    const ml_ragged *r = u->call->r;
    char *const *operands = u->call->operands;
    columns a = columns_of(operands[0], r->dtype, r->a_batch, r->a_row, r->a_col, 0, r->k);
    columns c = columns_of(operands[4], r->c_dtype, r->c_batch, r->c_row, r->c_col, u->block.col,
                           u->block.cols);
    if (p.gathered) copy_piece(&a, u->group, p, u->first, TO_BUFFER);
    columns x = piece_columns(a, u->group, p, u->first);
    columns y = piece_columns(c, u->group, p, u->second);
    ml_gemm g = group_product(r, p.rows);
    g.n = u->block.cols;
    g.a_row = x.row, g.a_col = x.col, g.c_row = y.row, g.c_col = y.col;
    int64_t w = u->group->group * r->b_group + u->block.col * r->b_col;
    cpu_gemm_compute(&g, x.data, operands[1] + w * a.size, y.data, u->packing);
    if (p.gathered) copy_piece(&c, u->group, p, u->second, FROM_BUFFER);
}

/* Adds the rows' part to the block. */
static void add_piece(const unit_call *u, piece p, bool accumulate) {
    const ml_ragged *r = u->call->r;
    char *const *operands = u->call->operands;
    columns a = columns_of(operands[0], r->dtype, r->a_batch, r->a_row, r->a_col, u->block.row,
                           u->block.rows);
    columns b = columns_of(operands[1], r->dtype, r->b_batch, r->b_row, r->b_col, u->block.col,
                           u->block.cols);
    if (p.gathered) {
        copy_piece(&a, u->group, p, u->first, TO_BUFFER);
        copy_piece(&b, u->group, p, u->second, TO_BUFFER);
    }
    columns x = piece_columns(a, u->group, p, u->first);
    columns y = piece_columns(b, u->group, p, u->second);
    ml_gemm g = group_product(r, p.rows);
    g.m = u->block.rows, g.n = u->block.cols, g.accumulate = accumulate;
    g.a_row = x.col, g.a_col = x.row, g.b_row = y.row, g.b_col = y.col;
    int64_t out = u->group->group * r->c_group + u->block.row * r->c_row + u->block.col * r->c_col;
    cpu_gemm_compute(&g, x.data, y.data, operands[4] + out * ml_dtypes[r->c_dtype].bytes,
                     u->packing);
}

static void compute_unit(const unit_call *u) {
    const ml_ragged *r = u->call->r;
    int64_t at = r->outer ? 0 : u->block.row;
    const int64_t end = r->outer ? u->group->rows : at + u->block.rows;
    if (u->group->rows == 0)
        clear(r, u->call->operands[4] + u->group->group * r->c_group * ml_dtypes[r->c_dtype].bytes,
              r->k, r->n);
    for (bool any = false; at < end; any = true) {
        piece p = piece_at(u->group, at, end);
        if (r->outer)
            add_piece(u, p, any);
        else
            multiply_piece(u, p);
        at += p.rows;
    }
}

static void compute_units(void *context, int64_t begin, int64_t end, int thread) {
    const ragged_call *call = context;
    char *scratch = call->scratch + thread * call->thread_bytes;
    unit_call u = {.call = call, .first = scratch, .group = call->groups};
    u.second = u.first + call->first_bytes, u.packing = u.second + call->second_bytes;
    for (int64_t unit = begin; unit < end; unit++) {
        const group_rows *last = call->groups + call->r->groups - 1;
        while (u.group < last && u.group[1].unit <= unit) u.group++;
        ml_gemm whole = group_product(call->r, u.group->rows);
        u.block = cpu_gemm_block_at(&whole, products_like(call, u.group), unit - u.group->unit);
        compute_unit(&u);
    }
}

enum { LEAST_OF_JOB = 1 << 16 }; /* operations that take longer than another thread's start */

static ml_status run_units(ragged_call *call, ml_pool *pool) {
    const ml_ragged *r = call->r;
    cut_groups(call);
    bool alone = 2.0 * (double)call->rows * (double)r->k * (double)r->n < LEAST_OF_JOB;
    return ml_pool_run(pool, call->units, alone ? 1 : call->units, compute_units, call);
}

/* ---- one product after another ---- */

/* Each group's rows times its matrix. */
static ml_status run_dot(const ragged_call *call, int64_t b, int64_t e, ml_pool *pool) {
    const ml_ragged *r = call->r;
    const span s = call->spans[e * r->batch + b];
    int64_t size = ml_dtypes[r->dtype].bytes, c_size = ml_dtypes[r->c_dtype].bytes;
    if (s.rows == 0) return ML_OK;
    ml_gemm g = group_product(r, s.rows);
    const char *x = call->operands[0] + (b * r->a_batch + s.first * r->a_row) * size;
    const char *w = call->operands[1] + e * r->b_group * size;
    char *out = call->operands[4] + (b * r->c_batch + s.first * r->c_row) * c_size;
    return cpu_gemm_run(&g, x, w, out, NULL, call->scratch, pool);
}

/* One group's matrix: the sum over the batch, in order. */
static ml_status run_outer(const ragged_call *call, int64_t e, ml_pool *pool) {
    const ml_ragged *r = call->r;
    int64_t size = ml_dtypes[r->dtype].bytes;
    bool any = false;
    char *out = call->operands[4] + e * r->c_group * ml_dtypes[r->c_dtype].bytes;
    for (int64_t b = 0; b < r->batch; b++) {
        const span s = call->spans[e * r->batch + b];
        if (s.rows == 0) continue;
        ml_gemm g = group_product(r, s.rows);
        g.accumulate = any;
        any = true;
        const char *x = call->operands[0] + (b * r->a_batch + s.first * r->a_row) * size;
        const char *y = call->operands[1] + (b * r->b_batch + s.first * r->b_row) * size;
        ML_TRY(cpu_gemm_run(&g, x, y, out, NULL, call->scratch, pool));
    }
    if (!any) clear(r, out, r->k, r->n);
    return ML_OK;
}

static ml_status run_products(const ragged_call *call, ml_pool *pool) {
    const ml_ragged *r = call->r;
    for (int64_t e = 0; r->outer && e < r->groups; e++) ML_TRY(run_outer(call, e, pool));
    for (int64_t b = 0; !r->outer && b < r->batch; b++)
        for (int64_t e = 0; e < r->groups; e++) ML_TRY(run_dot(call, b, e, pool));
    return ML_OK;
}

/* ---- memory ---- */

/* Whether all groups' products are read and written where they are. */
static bool by_units(const ml_ragged *r) {
    ml_gemm whole = group_product(r, r->rows);
    return cpu_gemm_direct(&whole) && r->batch * r->rows <= INT32_MAX;
}

/* Of one product after another; one of few rows may convert what others need not. */
static int64_t products_scratch(const ml_ragged *r, int threads) {
    int64_t most = 0;
    for (int64_t rows = 1; rows <= least(r->rows, CPU_FEW_ROWS + 1); rows++) {
        ml_gemm g = group_product(r, rows > CPU_FEW_ROWS ? r->rows : rows);
        int64_t bytes = cpu_gemm_scratch(&g, threads);
        if (bytes > most) most = bytes;
    }
    return most;
}

/* The call's parts in `scratch`; the value is their size. */
static int64_t place(ragged_call *call, char *scratch, int threads) {
    const ml_ragged *r = call->r;
    int64_t groups_at = cpu_aligned(r->groups * r->batch * (int64_t)sizeof(span));
    int64_t rest_at = groups_at + cpu_aligned(r->groups * (int64_t)sizeof(group_rows));
    if (scratch != NULL) {
        call->spans = (span *)scratch;
        call->groups = (group_rows *)(scratch + groups_at);
        call->scratch = scratch + rest_at;
    }
    if (!by_units(r)) return rest_at + products_scratch(r, threads);
    ml_gemm most = group_product(r, r->batch * r->rows);
    int64_t rows = r->batch > 1 ? least(r->batch * r->rows, GATHERED_ROWS) : 0;
    int64_t row_bytes = ml_dtypes[r->dtype].bytes;
    call->first_bytes = cpu_aligned(rows * r->k * row_bytes);
    call->second_bytes = cpu_aligned(rows * r->n * row_bytes);
    call->thread_bytes =
        call->first_bytes + call->second_bytes + cpu_aligned(cpu_gemm_packing(&most));
    return rest_at + call->thread_bytes * threads;
}

int64_t cpu_ragged_scratch(const ml_ragged *r, int threads) {
    ragged_call call = {.r = r};
    return place(&call, NULL, threads);
}

ml_status cpu_ragged_run(const ml_ragged *r, char *const *operands, void *scratch, ml_pool *pool) {
    ragged_call call = {.r = r, .operands = operands};
    place(&call, scratch, ml_pool_threads(pool));
    find_spans(&call);
    return by_units(r) ? run_units(&call, pool) : run_products(&call, pool);
}
