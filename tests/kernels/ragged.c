/* Products by groups of rows: on the CPU and on CUDA (emulated where there is no GPU) against the
 * reference, with ragged, empty and single-row groups, rows of no group, and every layout. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/graph/infer.h"
#include "runtime/ops/ragged/ragged.h"
#include "tests/kernels/support.h"
#include "tests/ops/support.h"

typedef struct {
    int groups;
    int64_t rows, starts[40], ends[40];
} grouping;

static grouping groupings[] = {
    {4, 200, {0, 70, 70, 71}, {70, 70, 71, 200}},   /* an empty one, one row */
    {3, 140, {5, 5, 133}, {5, 133, 139}},           /* rows before, none between, one after */
    {2, 300, {40, 260}, {130, 261}},                /* rows of no group on all sides */
    {5, 60, {0, 0, 0, 60, 60}, {0, 0, 60, 60, 60}}, /* all in one */
    {1, 33, {0}, {0}},                              /* nothing at all */
    {2, 50, {-3, 20}, {20, 99}},                    /* bounds outside of the rows */
    {2, 1100, {3, 1030}, {9, 1090}},                /* much to clear */
    {40, 90, {0}, {0}},                             /* more groups than a warp has lanes */
};
enum { GROUPINGS = sizeof groupings / sizeof *groupings, MANY = GROUPINGS - 1 };

/* Up to four rows each, some of none between. */
static void fill_many(void) {
    for (int e = 0; e < groupings[MANY].groups; e++) {
        groupings[MANY].starts[e] = 2 * e + e / 8;
        groupings[MANY].ends[e] = groupings[MANY].starts[e] + (e % 8 == 7 ? 3 : e % 3);
    }
}

/* The second batch element's groups are those of the first, one row later. */
static ml_ref bound(fixture *f, const grouping *p, const int64_t *values, bool batch) {
    char axes[16];
    snprintf(axes, sizeof axes, batch ? "b2 e%d" : "e%d", p->groups);
    ml_ref n = fixture_index(f, axes, 1);
    for (int i = 0; i < p->groups * (batch ? 2 : 1); i++)
        f->inputs[f->input_count - 1][i] = (double)(values[i % p->groups] + i / p->groups);
    return n;
}

static ml_ref matrix(fixture *f, ml_dtype dtype, const char *format, int64_t rows, int groups,
                     int64_t k, int64_t n) {
    char axes[64], *out = axes;
    for (const char *at = format; *at; at++) {
        int64_t size = *at == 'b'   ? 2
                       : *at == 'r' ? rows
                       : *at == 'e' ? groups
                       : *at == 'k' ? k
                                    : n;
        out += sprintf(out, "%c%lld ", *at, (long long)size);
    }
    out[-1] = 0;
    return fixture_input(f, dtype, axes, -1, 1);
}

static void kernel(fixture *f, const grouping *p, ml_dtype dtype, ml_dtype result, const char *a,
                   const char *b, int64_t k, int64_t n) {
    snprintf(f->label, sizeof f->label, "%s %s %s k %lld n %lld, grouping %d",
             ml_dtypes[dtype].name, a, b, (long long)k, (long long)n,
             p >= groupings && p < groupings + GROUPINGS ? (int)(p - groupings) : -1);
    bool batch = strchr(a, 'b') != NULL, outer = strchr(b, 'r') != NULL;
    /* what comes of gradients is E5M2: rows, the right operand of an outer product */
    const bool bytes = ml_dtypes[dtype].bytes == 1;
    const ml_dtype left = bytes && outer ? ML_E4M3 : dtype,
                   right = outer || !bytes ? dtype : ML_E4M3;
    ml_ref sources[5] = {matrix(f, left, a, p->rows, p->groups, k, n),
                         matrix(f, right, b, p->rows, p->groups, k, n),
                         bound(f, p, p->starts, batch), bound(f, p, p->ends, batch)};
    if (bytes) sources[4] = fixture_input(f, ML_F32, "", 0.5, 2);
    int64_t args[] = {fixture_axis(f, "r"), fixture_axis(f, "e"), result == ML_F32};
    ml_ref y =
        outer ? ml_graph_add(f->g, ML_OP_RAGGED_OUTER, sources, bytes ? 5 : 4, args, 3,
                             &(ml_type){.dtype = result})
              : ml_ragged_dot(f->g, sources, fixture_axis(f, "r"), fixture_axis(f, "k"), result);
    template_check(f, y, result == ML_BF16 ? 4e-3 : dtype == ML_F64 ? 1e-14 : 2e-6);
}

static int chosen; /* the grouping of the run */

static void kernels(fixture *f) {
    const grouping *p = &groupings[chosen];
    bool odd = chosen % 2;
    if (chosen >= MANY - 1) {
        kernel(f, p, ML_F32, ML_F32, "rk", "ekn", 5, 4);
        kernel(f, p, ML_F32, ML_F32, "rk", "rn", 5, 4);
        return;
    }
    kernel(f, p, ML_BF16, ML_BF16, "rk", odd ? "enk" : "ekn", 72, 40);
    if (chosen != 3) kernel(f, p, ML_BF16, ML_F32, "rk", "rn", 40, 24);
    if (chosen < 2) {
        kernel(f, p, ML_F32, ML_F32, odd ? "kr" : "rk", odd ? "ken" : "ekn", 19, 70);
        kernel(f, p, ML_F32, ML_F32, odd ? "rk" : "kr", "nr", 70, 5);
    }
    if (chosen == 0) { /* a tile has rows of both */
        kernel(f, p, ML_BF16, ML_BF16, "brk", "ekn", 72, 40);
        kernel(f, p, ML_BF16, ML_F32, "brk", "brn", 40, 24);
        kernel(f, p, ML_F32, ML_F32, "rbk", "ekn", 19, 5);
        kernel(f, p, ML_F32, ML_F32, "brk", "bnr", 5, 19);
    }
    if (chosen == 0) {
        kernel(f, p, ML_BF16, ML_F32, "rk", "enk", 136, 120);
        kernel(f, p, ML_BF16, ML_BF16, "rk", "rn", 136, 120);
        kernel(f, p, ML_F64, ML_F64, "rk", "enk", 33, 7);
        kernel(f, p, ML_BF16, ML_BF16, "rk", "ekn", 33, 7); /* no tensor cores */
        kernel(f, p, ML_BF16, ML_BF16, "rk", "rn", 33, 8);
    }
}
TEST(kernels, moe_kernels_emulated) {
    template_use_emulator(true);
    fill_many();
    bool all = test_all(); /* others take half a minute */
    for (chosen = 0; chosen < GROUPINGS; chosen++)
        if (all || chosen == 0 || chosen == MANY) fixture_run(kernels, 3);
    template_use_emulator(false);
}

/* Few rows in all: groups without any, of one and of several rows, more than a warp has lanes; rows
 * of no group, which may not be read. */
static void few(fixture *f) {
    static const grouping one = {5, 8, {1, 1, 1, 5, 6}, {1, 4, 1, 6, 8}};
    grouping many = {40, 5, {0}, {0}};
    for (int e = 34; e < 40; e++) many.starts[e] = e / 36, many.ends[e] = e == 35 ? 1 : e / 36;
    many.ends[39] = 4;
    template_spoil(fixture_axis(f, "r"), 4, 5);
    kernel(f, &one, ML_BF16, ML_BF16, "rk", "ekn", 136, 136);
    kernel(f, &many, ML_BF16, ML_F32, "rk", "enk", 72, 40);
    template_spoil(0, 0, 0);
}
TEST(kernels, moe_few_rows_emulated) {
    template_use_emulator(true);
    fixture_run(few, 4);
    template_use_emulator(false);
}

/* Hopper's own kernels: either order of the matrices, more steps than stages, more than a tile of
 * columns, tiles with rows of both sequences. */
static void wide(fixture *f) {
    static const grouping p = {3, 150, {0, 90, 100}, {90, 90, 145}};
    template_spoil(fixture_axis(f, "r"), 91, 100); /* of no group: they may not be read */
    kernel(f, &p, ML_BF16, ML_BF16, "brk", "ekn", 392, 136);
    kernel(f, &p, ML_BF16, ML_F32, "rk", "enk", 200, 264);
    if (test_all()) kernel(f, &p, ML_BF16, ML_F32, "brk", "brn", 136, 264);
    if (test_all()) kernel(f, &p, ML_BF16, ML_BF16, "rk", "ekn", 40, 136);
    kernel(f, &p, ML_BF16, ML_F32, "rk", "rn", 72, 520); /* tiles odd in number both ways */
    kernel(f, &p, ML_F32, ML_F32, "rk", "rn", 70, 840);  /* two bands of columns */
    template_spoil(0, 0, 0);
}
/* Of 8 bits: matrices with either side contiguous, more steps than slots, rows of both sequences,
 * tiles odd in number both ways; gradients. */
static void bytes(fixture *f) {
    static const grouping few = {3, 40, {0, 20, 25}, {20, 20, 38}};
    static const grouping p = {3, 150, {0, 90, 100}, {90, 90, 145}};
    template_spoil(fixture_axis(f, "r"), 21, 25); /* of no group: they may not be read */
    kernel(f, &few, ML_E4M3, ML_BF16, "brk", "ekn", 528, 80);
    kernel(f, &few, ML_E5M2, ML_F32, "brk", "brn", 80, 272);
    kernel(f, &few, ML_E5M2, ML_BF16, "rk", "ekn", 33, 7); /* no tensor cores */
    template_spoil(fixture_axis(f, "r"), 91, 100);
    if (test_all()) {
        kernel(f, &p, ML_E4M3, ML_BF16, "brk", "ekn", 784, 144);
        kernel(f, &p, ML_E5M2, ML_BF16, "rk", "enk", 208, 272);
        kernel(f, &p, ML_E5M2, ML_F32, "brk", "brn", 144, 272);
        kernel(f, &p, ML_E4M3, ML_F32, "rk", "enk", 208, 48);
        kernel(f, &p, ML_E4M3, ML_BF16, "rk", "rn", 80, 528);
    }
    template_spoil(0, 0, 0);
}
TEST(kernels, moe_bytes_emulated) {
    template_use_emulator(true);
    fixture_run(bytes, 4);
    template_use_emulator(false);
}

/* The hidden tensor of an expert beside gate and up: of rows of both sequences, and of none. */
static void gated(fixture *f, ml_dtype dtype, const char *x_axes, const char *w_axes,
                  const char *row_axes) {
    ml_graph *g = f->g;
    static const grouping p = {3, 50, {0, 30, 33}, {30, 30, 48}};
    bool batch = x_axes[0] == 'b';
    snprintf(f->label, sizeof f->label, "gated %s %s %s", x_axes, w_axes, row_axes);
    ml_ref sources[7] = {fixture_input(f, dtype, x_axes, -1, 1),
                         fixture_input(f, dtype, w_axes, -1, 1), bound(f, &p, p.starts, batch),
                         bound(f, &p, p.ends, batch)};
    int rows = RAGGED_SCALE;
    if (dtype != ML_BF16) sources[rows++] = fixture_input(f, ML_F32, "", 0.5, 2);
    sources[rows] = fixture_input(f, ML_F32, row_axes, 0, 1);
    sources[rows + 1] = fixture_input(f, ML_F32, "r50", -1, 1);
    ml_type type = fixture_type(f, ML_BF16, batch ? "b2 r50 h256" : "r50 h256");
    ml_ref x[4];
    for (int64_t i = 0; i < 4; i++) {
        const ml_type *own = i < 2 ? &type : ml_graph_type(g, sources[rows + i - 2]);
        x[i] = ml_graph_add(g, ML_OP_PARAM, NULL, 0, &i, 1, own);
        x[i] = ml_cast(g, x[i], ML_F32);
    }
    ml_ref y =
        ml_map2(g, ML_OP_MUL, ml_map2(g, ML_OP_MUL, x[0], ml_map1(g, ML_OP_SIGMOID, x[0])), x[1]);
    y = ml_map2(g, ML_OP_MUL, ml_cast(g, ml_cast(g, y, ML_BF16), ML_F32), x[2]);
    y = ml_cast(g, ml_map2(g, ML_OP_ADD, y, x[3]), ML_BF16);
    int64_t args[] = {fixture_axis(f, "r"), fixture_axis(f, "e"), fixture_axis(f, "k"),
                      graph_copy_function(g, g, y)};
    ml_type narrow = {.dtype = ML_BF16};
    template_check(f, ml_graph_add(g, ML_OP_RAGGED_DOT, sources, rows + 2, args, 4, &narrow), 4e-3);
}
static void all_gated(fixture *f) {
    gated(f, ML_BF16, "b2 r50 k40", "e3 k40 n512", "b2 r50");
    if (test_all()) gated(f, ML_BF16, "r50 k72", "e3 n512 k72", "r50");
    if (test_all()) gated(f, ML_E4M3, "b2 r50 k48", "e3 k48 n512", "b2 r50");
}
TEST(kernels, moe_gated_emulated) {
    template_use_emulator(true);
    fixture_run(all_gated, 5);
    template_use_emulator(false);
}

TEST(kernels, moe_wide_kernels_emulated) {
    template_use_emulator(true);
    fixture_run(wide, 4);
    template_use_emulator(false);
}

/* ---- Gate and up in one product ----------------------------------------------------------------
 */

static void merged(fixture *f) {
    ml_axis r = fixture_axis(f, "r"), d = fixture_axis(f, "d"), h = fixture_axis(f, "h");
    ml_ref bounds[2] = {bound(f, &groupings[1], groupings[1].starts, true),
                        bound(f, &groupings[1], groupings[1].ends, true)};
    ml_ref x = fixture_input(f, ML_F64, "b2 r140 d6", -1, 1), weights[3], made[2], gradients[4];
    weights[0] = fixture_state(f, ML_F64, "e3 d6 h5");
    weights[1] = fixture_state(f, ML_F64, "e3 d6 h5");
    weights[2] = fixture_state(f, ML_F64, "e3 h5 d6");
    for (int i = 0; i < 2; i++)
        made[i] =
            ml_ragged_dot(f->g, (ml_ref[]){x, weights[i], bounds[0], bounds[1]}, r, d, ML_F64);
    ml_ref y = ml_map2(f->g, ML_OP_MUL, made[0], ml_map1(f->g, ML_OP_SIN, made[1]));
    y = ml_ragged_dot(f->g, (ml_ref[]){y, weights[2], bounds[0], bounds[1]}, r, h, ML_F64);
    ml_ref wrt[4] = {x, weights[0], weights[1], weights[2]};
    ml_ref loss = fixture_loss(f, ml_map1(f->g, ML_OP_SIN, y));
    ml_autodiff(f->g, loss, wrt, 4, gradients);
    ml_ref roots[5] = {loss, gradients[0], gradients[1], gradients[2], gradients[3]};
    fixture_check_passes(f, roots, 5, 1e-9);
    CHECK_EQ_INT(fixture_count_after(f, "simplify", roots, 5, ML_OP_RAGGED_DOT), 6);
    CHECK_EQ_INT(fixture_count_after(f, "simplify", roots, 5, ML_OP_RAGGED_OUTER), 3);
    CHECK_EQ_INT(fixture_count_after(f, "merge_products", roots, 5, ML_OP_RAGGED_DOT), 4);
    CHECK_EQ_INT(fixture_count_after(f, "merge_products", roots, 5, ML_OP_RAGGED_OUTER), 2);
}
TEST(kernels, moe_merged) {
    fixture_run(merged, 9);
}

/* The norm of gradients, gate and up apart: whole blocks of columns alone are known. */
static void squares(fixture *f) {
    ml_graph *g = f->g;
    ml_axis r = fixture_axis(f, "r"), n = fixture_axis(f, "n");
    const grouping *p = &groupings[0];
    ml_ref sources[4] = {fixture_input(f, ML_F32, "r200 k19", -1, 1),
                         fixture_input(f, ML_F32, "r200 n560", -1, 1),
                         bound(f, p, p->starts, false), bound(f, p, p->ends, false)};
    ml_ref y = ml_ragged_outer(g, sources, r, ML_F32),
           parts[4] = {y, ml_rename(g, ml_slice(g, y, n, 0, 256), n, fixture_axis(f, "m")),
                       ml_slice(g, y, n, 256, 560), ml_slice(g, y, n, 100, 356)};
    for (int i = 0; i < 4; i++) {
        ml_type type = *ml_graph_type(g, parts[i]);
        ml_ref norm = ml_map2(g, ML_OP_MUL, parts[i], parts[i]);
        norm = ml_reduce(g, ML_OP_SUM, norm, type.axis, type.rank);
        CHECK_EQ_INT(fixture_count_after(f, "fuse_expert_norms", &norm, 1, ML_OP_MUL), i == 3);
        fixture_check_pass(f, "fuse_expert_norms", (ml_ref[]){norm, parts[i]}, 2, 1e-12);
    }
}
TEST(kernels, moe_squares) {
    fixture_run(squares, 11);
}

/* Gate, up and a weight: what a product's kernel continues with, and what it cannot. */
static void check_gated(fixture *f, int64_t cut, bool late, bool joined) {
    ml_graph *g = f->g;
    ml_axis r = fixture_axis(f, "r"), k = fixture_axis(f, "k"), n = fixture_axis(f, "n");
    const grouping *p = &groupings[0];
    ml_ref bounds[2] = {bound(f, p, p->starts, false), bound(f, p, p->ends, false)};
    ml_ref x = fixture_input(f, ML_BF16, "r200 k5", -1, 1), half[2];
    ml_ref weight = fixture_input(f, ML_F32, "r200", -1, 1);
    ml_ref up = fixture_input(f, ML_BF16, "e4 k5 n512", -1, 1);
    ml_ref down = fixture_input(f, ML_BF16, "e4 n256 k5", -1, 1);
    ml_ref y = ml_ragged_dot(g, (ml_ref[]){x, up, bounds[0], bounds[1]}, r, k, ML_BF16);
    if (late) weight = ml_reduce(g, ML_OP_SUM, ml_cast(g, y, ML_F32), &n, 1);
    for (int i = 0; i < 2; i++)
        half[i] = ml_cast(g, ml_slice(g, y, n, cut * !i, cut * !i + 256), ML_F32);
    ml_ref h = ml_map2(g, ML_OP_MUL, half[0], ml_map1(g, ML_OP_SIGMOID, half[1]));
    h = ml_cast(g, ml_map2(g, ML_OP_MUL, h, weight), ML_BF16);
    ml_ref z = ml_ragged_dot(g, (ml_ref[]){h, down, bounds[0], bounds[1]}, r, n, ML_BF16);
    CHECK_EQ_INT(fixture_count_after(f, "fuse_gated_experts", &z, 1, ML_OP_OUT), joined);
    fixture_check_pass(f, "fuse_gated_experts", (ml_ref[]){z, h, y}, 3, 1e-12);
}
static void gated_or_not(fixture *f) {
    check_gated(f, 256, false, true);
    check_gated(f, 128, false, false); /* the halves overlap */
    check_gated(f, 256, true, false);  /* the weight is known after the product */
}
TEST(kernels, moe_gated) {
    fixture_run(gated_or_not, 12);
}

/* ---- Through sessions --------------------------------------------------------------------------
 */

static ml_dtype dtype;

static void build(ops_case *c) {
    char x_axes[32], w_axes[48], y_axes[32];
    int64_t rows = 96, groups = 5, k = 24, n = 40;
    snprintf(x_axes, sizeof x_axes, "r%lld k%lld", (long long)rows, (long long)k);
    snprintf(w_axes, sizeof w_axes, "e%lld k%lld n%lld", (long long)groups, (long long)k,
             (long long)n);
    snprintf(y_axes, sizeof y_axes, "r%lld n%lld", (long long)rows, (long long)n);
    ml_graph *g = c->g;
    /* expert ids of the rows, sorted; one never chosen, rows of the last dropped */
    ml_ref ids = ops_index(c, "r96", groups - 1);
    ml_ref sorted = ml_graph_add(g, ML_OP_SORT, &ids, 1, (int64_t[]){ops_axis(c, "r"), 0}, 2, NULL);
    ml_type both = ops_type(c, ML_I32, "e5 r96");
    ml_ref expert = ml_broadcast(g, ml_iota(g, ops_axis(c, "e"), groups), &both);
    ml_ref hit = ml_map2(g, ML_OP_EQ, ml_broadcast(g, sorted, &both), expert);
    ml_axis r = ops_axis(c, "r");
    ml_ref counts = ml_reduce(g, ML_OP_SUM, ml_cast(g, hit, ML_I32), &r, 1);
    ml_ref ends =
        ml_graph_add(g, ML_OP_CUMSUM, &counts, 1, (int64_t[]){ops_axis(c, "e"), 0}, 2, NULL);
    ml_ref starts = ml_map2(g, ML_OP_SUB, ends, counts);
    ml_ref x = ops_input(c, dtype, x_axes, -1, 1), w = ops_input(c, dtype, w_axes, -1, 1);
    ml_ref y = ml_ragged_dot(g, (ml_ref[]){x, w, starts, ends}, r, ops_axis(c, "k"), dtype);
    ops_output(c, y, ops_tolerance(dtype), "%s product", ml_dtypes[dtype].name);
    ops_gradients(c, y, (ml_ref[]){x, w}, 2, 4 * ops_tolerance(dtype), "product");
}
OPS_TEST(ragged) {
    static const ml_dtype dtypes[] = {ML_F32, ML_F64, ML_BF16};
    for (int i = 0; i < 3; i++) {
        dtype = dtypes[i];
        ops_run(build, 40 + (uint64_t)i, OPS_UNFUSED);
    }
}
