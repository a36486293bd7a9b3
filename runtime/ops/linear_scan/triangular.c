/* LINEAR_SCAN with transitions of rank 1 and more, by products over chunks: the WY form
 * (arXiv:2406.06484, 2412.06464).
 *
 * With z_t = w_t^T S_{t-1} the state is a sum of outer products k v^T + u z^T that decays, as one
 * of rank 0, and within a chunk that begins with S (I - L) Z = W S + B V,   L(t, j) = w_t D(t-1, j)
 * u_j,   B(t, j) = w_t D(t-1, j) k_j, j < t, where D are products of decays and W the w times the
 * decays before them. With the inverse T of the unit triangular matrix, X = T W and Y = T B V, the
 * state after the chunk is S' = (D + U^T X) S + K^T V + U^T Y, a small recurrence over chunks; then
 * Z = X S + Y at all positions. The rows of several u and w of one position are one after another.
 */
#include "runtime/ops/linear_scan/linear_scan_internal.h"

typedef struct {
    chunk_form *f;
    ml_axis rows, columns; /* positions of w; of u */
    ml_axis turn, other;   /* which of a position's: of w, of u; 0 for rank 1 */
    ml_axis keys;          /* keys, a second time */
    int64_t size;          /* of rows and columns */
    ml_ref u, w;           /* {chunks, j or p, (turn,) keys, ...} */
} triangle;

static const ml_type *type_of(const triangle *x, ml_ref n) {
    return ml_graph_type(x->f->g, n);
}

static ml_ref operand(const triangle *x, int i) {
    return ml_cast(x->f->g, chunk_operand(x->f, i, 0), x->f->dtype);
}

/* u or w of all pairs, side by side along `turn`. */
static ml_ref pairs(const triangle *x, int first, ml_axis turn) {
    ml_graph *g = x->f->g;
    ml_ref list[LINEAR_SCAN_MOST_RANK];
    ml_type all = {0};
    int count = x->f->s.rank;
    for (int r = 0; r < count; r++) list[r] = operand(x, first + 2 * r);
    if (count == 1) return list[0];
    for (int r = 0; r < count; r++) {
        ml_type t = *type_of(x, list[r]);
        if (r == 0) all = t;
        for (int k = 0; k < t.rank; k++)
            if (ml_type_find(&all, t.axis[k]) < 0)
                all.axis[all.rank] = t.axis[k], all.size[all.rank++] = t.size[k];
    }
    all.axis[all.rank] = turn, all.size[all.rank++] = 1;
    for (int r = 0; r < count; r++) list[r] = ml_broadcast(g, list[r], &all);
    return ml_concat(g, list, count, turn);
}

/* Rows or columns of a position as one axis. */
static ml_ref flat(const triangle *x, ml_ref n, ml_axis position, ml_axis turn, ml_axis as) {
    return turn ? ml_merge(x->f->g, n, position, turn, as) : n;
}

static ml_ref flat_rows(const triangle *x, ml_ref n) {
    ml_type t = *type_of(x, n);
    if (x->turn && ml_type_find(&t, x->turn) < 0) { /* the same for all of a position */
        t.axis[t.rank] = x->turn, t.size[t.rank++] = x->f->s.rank;
        n = ml_broadcast(x->f->g, n, &t);
    }
    return flat(x, n, x->f->p, x->turn, x->rows);
}

static ml_ref flat_columns(const triangle *x, ml_ref n) {
    return flat(x, n, x->f->j, x->other, x->columns);
}

/* The products over keys of what reads (by p) and what was written (by j), with the decays between.
 */
static ml_ref weights(const triangle *x, ml_ref read, ml_ref written, bool after) {
    chunk_form *f = x->f;
    ml_ref unused, decayed = chunk_decays(f, written, after, &unused);
    if (f->s.decay_per_key) return chunk_contract(f, read, decayed, f->s.keys);
    return chunk_join(f, ML_OP_MUL, chunk_contract(f, read, written, f->s.keys), decayed);
}

/* What was written, as far as it has decayed at the end of the chunk. */
static ml_ref at_end(const triangle *x, ml_ref written) {
    ml_ref last;
    (void)chunk_decays(x->f, written, true, &last);
    return x->f->s.decay_per_key ? last : chunk_join(x->f, ML_OP_MUL, written, last);
}

static ml_ref since_begin(const triangle *x, ml_ref read, bool after) {
    ml_ref unused, since = chunk_decays_since(x->f, after, &unused);
    return chunk_join(x->f, ML_OP_MUL, read, since);
}

/* L where row and column are in the two halves of one block of 2 size rows; else 0. */
static ml_ref below_diagonal(const triangle *x, ml_ref matrix, int64_t size) {
    ml_graph *g = x->f->g;
    ml_type square = {
        .dtype = ML_I32, .rank = 2, .axis = {x->rows, x->columns}, .size = {x->size, x->size}};
    ml_ref half = ml_const_int(g, ML_I32, size), two = ml_const_int(g, ML_I32, 2);
    ml_ref row =
        ml_broadcast(g, ml_map2(g, ML_OP_IDIV, ml_iota(g, x->rows, x->size), half), &square);
    ml_ref column = ml_map2(g, ML_OP_IDIV, ml_iota(g, x->columns, x->size), half);
    ml_ref block =
        ml_map2(g, ML_OP_EQ, ml_map2(g, ML_OP_IDIV, row, two), ml_map2(g, ML_OP_IDIV, column, two));
    ml_ref halves = ml_map2(g, ML_OP_NE, row, column);
    return ml_where(g, ml_map2(g, ML_OP_AND, block, halves), matrix, ml_const(g, x->f->dtype, 0));
}

/* The inverse of I - L by halves: that of [[A, 0], [-B, D]] is [[A', 0], [D' B A', D']] with the
 * inverses A' and D' of blocks half as large. (Powers of L would overflow.) */
static ml_ref inverse(const triangle *x, ml_ref matrix) {
    ml_graph *g = x->f->g;
    ml_axis middle = ml_axis_named(g, "linear_scan'middle");
    ml_type square = {
        .dtype = ML_I32, .rank = 2, .axis = {x->rows, x->columns}, .size = {x->size, x->size}};
    ml_ref row = ml_broadcast(g, ml_iota(g, x->rows, x->size), &square);
    ml_ref diagonal = ml_map2(g, ML_OP_EQ, row, ml_iota(g, x->columns, x->size));
    ml_ref made = chunk_join(x->f, ML_OP_ADD, below_diagonal(x, matrix, 1),
                             ml_cast(g, diagonal, x->f->dtype));
    for (int64_t size = 2; size < x->size; size *= 2) {
        ml_ref left = ml_rename(g, made, x->columns, middle);
        ml_ref part = ml_rename(g, below_diagonal(x, matrix, size), x->rows, middle);
        ml_ref product = ml_rename(g, chunk_contract(x->f, left, part, middle), x->columns, middle);
        ml_ref right = ml_rename(g, made, x->rows, middle);
        made = chunk_join(x->f, ML_OP_ADD, made, chunk_contract(x->f, product, right, middle));
    }
    return made;
}

/* The inverse times something by rows. */
static ml_ref solved(const triangle *x, ml_ref inverse, ml_ref right) {
    return chunk_contract(x->f, inverse, ml_rename(x->f->g, right, x->rows, x->columns),
                          x->columns);
}

/* S' = P S + R, where P has the keys of S under a second name. */
static ml_ref next_state(chunk_form *f, ml_ref state, ml_ref transition, ml_ref sums) {
    ml_axis keys = ml_axis_named(f->g, "linear_scan'keys");
    ml_ref before = ml_rename(f->g, state, f->s.keys, keys);
    return chunk_join(f, ML_OP_ADD, chunk_contract(f, transition, before, keys), sums);
}

/* D + U^T X */
static ml_ref transition(const triangle *x, ml_ref ends, ml_ref solved_w) {
    chunk_form *f = x->f;
    ml_graph *g = f->g;
    ml_ref total;
    ml_type square = {.dtype = ML_I32,
                      .rank = 2,
                      .axis = {f->s.keys, x->keys},
                      .size = {f->s.key_size, f->s.key_size}};
    ml_ref row = ml_broadcast(g, ml_iota(g, f->s.keys, f->s.key_size), &square);
    ml_ref diagonal = ml_map2(g, ML_OP_EQ, row, ml_iota(g, x->keys, f->s.key_size));
    (void)chunk_decays_since(f, true, &total);
    ml_ref low_rank = chunk_contract(
        f, ends, ml_rename(g, ml_rename(g, solved_w, f->s.keys, x->keys), x->rows, x->columns),
        x->columns);
    ml_ref kept = chunk_join(f, ML_OP_MUL, ml_cast(g, diagonal, f->dtype), total);
    return chunk_join(f, ML_OP_ADD, low_rank, kept);
}

void chunk_triangular(chunk_form *f, ml_ref outputs[2]) {
    ml_graph *g = f->g;
    bool one = f->s.rank == 1;
    triangle t = {.f = f,
                  .rows = one ? f->p : ml_axis_named(g, "linear_scan'rows"),
                  .columns = one ? f->j : ml_axis_named(g, "linear_scan'columns"),
                  .turn = one ? 0 : ml_axis_named(g, "linear_scan'turn"),
                  .other = one ? 0 : ml_axis_named(g, "linear_scan'other"),
                  .keys = ml_axis_named(g, "linear_scan'keys"),
                  .size = f->chunk * f->s.rank};
    const triangle *x = &t;
    ml_ref q = operand(x, LINEAR_SCAN_Q), k = ml_rename(g, operand(x, LINEAR_SCAN_K), f->p, f->j);
    ml_ref v = ml_rename(g, operand(x, LINEAR_SCAN_V), f->p, f->j);
    ml_ref u = ml_rename(g, pairs(x, LINEAR_SCAN_FIRST_PAIR, t.other), f->p, f->j);
    ml_ref w = pairs(x, LINEAR_SCAN_FIRST_PAIR + 1, t.turn);
    ml_ref matrix = flat_columns(x, flat_rows(x, weights(x, w, u, false)));
    ml_ref inverted = inverse(x, matrix);
    ml_ref written = chunk_contract(f, flat_rows(x, weights(x, w, k, false)), v, f->j);
    ml_ref solved_w = solved(x, inverted, flat_rows(x, since_begin(x, w, false)));
    ml_ref solved_v = solved(x, inverted, written);
    ml_ref ends = flat_columns(x, at_end(x, u));
    ml_ref sums = chunk_join(
        f, ML_OP_ADD, chunk_contract(f, at_end(x, k), v, f->j),
        chunk_contract(f, ends, ml_rename(g, solved_v, x->rows, x->columns), x->columns));
    ml_ref before = chunk_states(f, transition(x, ends, solved_w), sums, next_state, &outputs[1]);
    ml_ref z = chunk_join(f, ML_OP_ADD, chunk_contract(f, solved_w, before, f->s.keys), solved_v);
    ml_ref y = chunk_contract(f, since_begin(x, q, f->s.after), before, f->s.keys);
    y = chunk_join(f, ML_OP_ADD, y, chunk_contract(f, weights(x, q, k, f->s.after), v, f->j));
    ml_ref of_u = flat_columns(x, weights(x, q, u, f->s.after));
    y = chunk_join(f, ML_OP_ADD, y,
                   chunk_contract(f, of_u, ml_rename(g, z, x->rows, x->columns), x->columns));
    outputs[0] = chunk_merge(f, y);
}
