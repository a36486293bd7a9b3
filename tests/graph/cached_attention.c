/* The definition of cached attention (gathers, then attention's) against loops: drawn block tables,
 * starts and lengths, grouped and shared heads, windows with rings, score functions that see
 * positions, tables over positions and pools, rows with nothing. */
#include "runtime/ops/cached_attention/cached_attention.h"

#include <math.h>
#include <stdio.h>

#include "tests/passes/support.h"

enum { MOST_ROWS = 4, DRAWS = 60 };

/* Drawn; captured: 0 no score function, 1 a soft cap and a bias of heads, 2 a table over distances
 * and pools too. */
typedef struct {
    int rows, fresh, heads, kv_heads, dim, value_dim, block, columns, blocks, keys, captured;
    bool causal, shared, ring;
    int window;
} shape;

static shape draw(fixture *f) {
    shape p = {.rows = 1 + (int)fixture_below(f, MOST_ROWS), .fresh = 1 + (int)fixture_below(f, 4)};
    p.shared = fixture_below(f, 4) == 0;
    p.kv_heads = p.shared ? 1 : 1 + (int)fixture_below(f, 3);
    p.heads = p.kv_heads * (1 + (int)fixture_below(f, 3));
    p.dim = 1 + (int)fixture_below(f, 4), p.value_dim = 1 + (int)fixture_below(f, 4);
    p.block = 1 + (int)fixture_below(f, 4), p.columns = 1 + (int)fixture_below(f, 4);
    p.blocks = p.columns + (int)fixture_below(f, 4);
    p.captured = (int)fixture_below(f, 3);
    p.causal = fixture_below(f, 3) > 0;
    p.window = fixture_below(f, 2) ? 1 + (int)fixture_below(f, 6) : 0;
    p.ring = fixture_below(f, 2);
    p.keys = p.columns * p.block + (p.ring ? 9 : 0);
    return p;
}

/* Integers of the input i at element e. */
static int at(const fixture *f, int i, int e) {
    return (int)f->inputs[i][e];
}

/* Inputs: 0 q [r s h d], 1 k [p kv d], 2 v [p kv e], 3 table, 4 start, 5 length, 6 bias [h],
 * 7 [s t] over positions, 8 [p]. */
static double score_of(const fixture *f, const shape *p, int r, int h, int i, int t, int pool_row) {
    int kv = h / (p->heads / p->kv_heads), position = at(f, 4, r) + i;
    double s = 0;
    for (int d = 0; d < p->dim; d++)
        s += f->inputs[0][((r * p->fresh + i) * p->heads + h) * p->dim + d] *
             f->inputs[1][(pool_row * p->kv_heads + kv) * p->dim + d];
    s *= 0.7;
    if (p->captured == 0) return s;
    s = 2 * tanh(s / 2) + f->inputs[6][h] * (position - t);
    return p->captured == 1 ? s : s + f->inputs[7][i * p->keys + t] * f->inputs[8][pool_row];
}

static bool sees(const fixture *f, const shape *p, int r, int i, int t) {
    int position = at(f, 4, r) + i, length = at(f, 5, r);
    return t < length && t >= length - p->columns * p->block && !(p->causal && t > position) &&
           !(p->window && position - t >= p->window);
}

/* o [e] of one query. */
static void attend(const fixture *f, const shape *p, int r, int h, int i, double *o) {
    double sum = 0;
    for (int e = 0; e < p->value_dim; e++) o[e] = 0;
    for (int t = 0; t < at(f, 5, r); t++) {
        if (!sees(f, p, r, i, t)) continue;
        int kv = h / (p->heads / p->kv_heads), column = t / p->block % p->columns;
        int row = at(f, 3, r * p->columns + column) * p->block + t % p->block;
        double weight = exp(score_of(f, p, r, h, i, t, row));
        sum += weight;
        for (int e = 0; e < p->value_dim; e++)
            o[e] += weight * f->inputs[2][(row * p->kv_heads + kv) * p->value_dim + e];
    }
    for (int e = 0; e < p->value_dim && sum > 0; e++) o[e] /= sum;
}

static void make_inputs(fixture *f, const shape *p, ml_ref *sources) {
    ml_arena *a = f->arena;
    const char *kv = p->shared ? "" : ml_arena_format(a, "kv%d", p->kv_heads);
    int pool = p->blocks * p->block;
    const char *floats[] = {
        ml_arena_format(a, "r%d s%d h%d d%d", p->rows, p->fresh, p->heads, p->dim),
        ml_arena_format(a, "p%d %s d%d", pool, kv, p->dim),
        ml_arena_format(a, "p%d %s d%d", pool, kv, p->value_dim),
        ml_arena_format(a, "h%d", p->heads),
        ml_arena_format(a, "s%d t%d", p->fresh, p->keys),
        ml_arena_format(a, "p%d", pool)};
    for (int i = 0; i < 3; i++) sources[i] = fixture_input(f, ML_F64, floats[i], -1, 1);
    const char *rows = ml_arena_format(a, "r%d", p->rows);
    sources[3] = fixture_index(f, ml_arena_format(a, "r%d c%d", p->rows, p->columns), p->blocks);
    sources[4] = fixture_index(f, rows, p->keys - p->fresh + 1 > 0 ? p->keys - p->fresh + 1 : 1);
    sources[5] = fixture_index(f, rows, p->keys + 1);
    for (int i = 3; i < 6; i++) sources[3 + i] = fixture_input(f, ML_F64, floats[i], -1, 1);
}

static ml_ref parameter(fixture *f, const ml_ref *sources, const ml_cached_attention_args *args,
                        int64_t i) {
    ml_type type;
    if (i == 0)
        ml_cached_attention_score_type(f->g, sources, args, &type);
    else
        ml_cached_attention_param_type(f->g, sources, args, sources[CACHED_CAPTURED + i - 1],
                                       &type);
    return ml_graph_add(f->g, ML_OP_PARAM, NULL, 0, &i, 1, &type);
}

static ml_ref all_axes(fixture *f, ml_ref n, const ml_type *score) {
    ml_type type = *score;
    type.dtype = ml_graph_type(f->g, n)->dtype;
    ml_ref s = ml_graph_add(f->g, ML_OP_PARAM, NULL, 0, (int64_t[]){0}, 1, score);
    ml_ref odd = ml_map2(f->g, ML_OP_NE, s, s), filler = ml_cast(f->g, odd, (ml_dtype)type.dtype);
    ml_ref sources[] = {ml_const_int(f->g, ML_BOOL, 1), n, filler};
    return ml_graph_add(f->g, ML_OP_WHERE, sources, 3, NULL, 0, NULL);
}

/* 2 tanh(s / 2) + bias * distance + table * pool. */
static void make_score(fixture *f, const shape *p, const ml_ref *sources,
                       ml_cached_attention_args *args) {
    ml_graph *g = f->g;
    ml_type score;
    ml_cached_attention_score_type(g, sources, args, &score);
    ml_ref s = parameter(f, sources, args, 0), two = ml_const(g, ML_F64, 2);
    s = ml_map2(g, ML_OP_MUL, two, ml_map1(g, ML_OP_TANH, ml_map2(g, ML_OP_DIV, s, two)));
    ml_ref query = all_axes(f, ml_iota(g, args->seq, p->fresh), &score);
    ml_ref key = all_axes(f, ml_iota(g, args->kv_seq, p->keys), &score);
    ml_ref distance = ml_cast(g, ml_map2(g, ML_OP_SUB, query, key), ML_F64);
    ml_ref bias = parameter(f, sources, args, 1);
    s = ml_map2(g, ML_OP_ADD, s, ml_map2(g, ML_OP_MUL, distance, bias));
    if (p->captured == 2) {
        ml_ref of = all_axes(f, parameter(f, sources, args, 2), &score);
        ml_ref pool = all_axes(f, parameter(f, sources, args, 3), &score);
        s = ml_map2(g, ML_OP_ADD, s, ml_map2(g, ML_OP_MUL, of, pool));
    }
    args->score = s;
}

static void check_draw(fixture *f) {
    const shape p = draw(f);
    ml_ref sources[9];
    make_inputs(f, &p, sources);
    ml_cached_attention_args args = {.seq = fixture_axis(f, "s"),
                                     .pool = fixture_axis(f, "p"),
                                     .columns = fixture_axis(f, "c"),
                                     .heads = fixture_axis(f, "h"),
                                     .kv_heads = p.shared ? 0 : fixture_axis(f, "kv"),
                                     .head_dim = fixture_axis(f, "d"),
                                     .kv_seq = fixture_axis(f, "t"),
                                     .keys = p.keys,
                                     .causal = p.causal,
                                     .window = p.window,
                                     .block = p.block,
                                     .scale = 0.7};
    if (p.captured) make_score(f, &p, sources, &args);
    int captured = p.captured == 2 ? 3 : p.captured;
    ml_ref node = ml_cached_attention(f->g, sources, CACHED_CAPTURED + captured, &args);
    ml_graph_verify(f->g, NULL, "building");
    double *actual = fixture_value(f, f->g, node), o[8];
    for (int r = 0; r < p.rows; r++)
        for (int i = 0; i < p.fresh; i++)
            for (int h = 0; h < p.heads; h++) {
                attend(f, &p, r, h, i, o);
                for (int e = 0; e < p.value_dim; e++)
                    EXPECT(CHECK_NEAR(actual[((r * p.fresh + i) * p.heads + h) * p.value_dim + e],
                                      o[e], 1e-12),
                           "%s: row %d, query %d, head %d", f->label, r, i, h);
            }
}

TEST(graph_cached_attention, definition) {
    for (int i = 0; i < DRAWS; i++) fixture_run(check_draw, (uint64_t)i + 1);
}

/* Garbage in pool rows that hold no valid position, such as NaN, is not in any result. */
static void unread_garbage(fixture *f) {
    ml_ref sources[] = {fixture_input(f, ML_F64, "r2 s1 h2 d2", -1, 1),
                        fixture_input(f, ML_F64, "p8 h2 d2", -1, 1),
                        fixture_input(f, ML_F64, "p8 h2 d2", -1, 1),
                        fixture_index(f, "r2 c2", 2),
                        fixture_index(f, "r2", 1),
                        fixture_index(f, "r2", 4)};
    ml_cached_attention_args args = {.seq = fixture_axis(f, "s"),
                                     .pool = fixture_axis(f, "p"),
                                     .columns = fixture_axis(f, "c"),
                                     .heads = fixture_axis(f, "h"),
                                     .kv_heads = fixture_axis(f, "h"),
                                     .head_dim = fixture_axis(f, "d"),
                                     .kv_seq = fixture_axis(f, "t"),
                                     .block = 4,
                                     .scale = 1};
    f->inputs[3][0] = 1, f->inputs[3][1] = 0, f->inputs[3][2] = 1000, f->inputs[3][3] = -5;
    f->inputs[5][0] = 3, f->inputs[5][1] = 0;
    for (int source = 1; source < 3; source++)
        for (int e = 0; e < 32; e++)
            if (e < 16 || e >= 28) f->inputs[source][e] = NAN; /* all but rows 4 to 6 */
    double *o = fixture_value(f, f->g, ml_cached_attention(f->g, sources, CACHED_CAPTURED, &args));
    for (int e = 0; e < 8; e++) CHECK(e < 4 ? isfinite(o[e]) && o[e] != 0 : o[e] == 0);
}

TEST(graph_cached_attention, unread_garbage) {
    fixture_run(unread_garbage, 1);
}
