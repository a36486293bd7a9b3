/* Cached attention to pools that the same program writes rows of, as programs of a device: tables,
 * starts and lengths are inputs. */
#include "runtime/ops/cached_attention/cached_attention.h"

#include <string.h>

#include "tests/ops/support.h"

typedef struct {
    const char *name, *q, *k, *v, *table, *rows;
    ml_dtype dtype, pool;
    int64_t blocks, block, window, longest;
} shape;

static const shape SHAPES[] = {
    {"a step", "r3 s1 h8 d64", "k2 p96 d64", "p96 k2 d64", "r3 c4", "r3", ML_F32, ML_F32, 12, 8, 0,
     33},
    {"a step in bf16", "r2 s1 h4 d128", "k4 p256 d128", "k4 p256 d128", "r2 c8", "r2", ML_BF16,
     ML_BF16, 16, 16, 0, 129},
    {"a chunk in bf16", "r2 s20 h4 d64", "p128 k2 d64", "p128 k2 d32", "c6 r2", "r2", ML_BF16,
     ML_BF16, 8, 16, 0, 97},
    {"a ring", "s2 r3 h4 d16", "p64 k4 d16", "p64 k4 d16", "r3 c4", "r3", ML_F32, ML_BF16, 8, 8, 20,
     60},
    {"shared keys", "r2 s1 h16 d72", "p64 d72", "p64 d64", "r2 c4", "r2", ML_F32, ML_F32, 8, 8, 0,
     33},
};
enum { SHAPE_COUNT = sizeof SHAPES / sizeof *SHAPES };
static const shape *current;

/* A pool with rows 1, 4 and 7 replaced by others of itself. */
static ml_ref pool(ops_case *c, const char *axes) {
    ml_graph *g = c->g;
    ml_ref x = ops_input(c, current->pool, axes, -1, 1), i = ml_iota(g, ops_axis(c, "w"), 3);
    ml_ref three = ml_const_int(g, ML_I32, 3), one = ml_const_int(g, ML_I32, 1);
    ml_ref at = ml_map2(g, ML_OP_ADD, ml_map2(g, ML_OP_MUL, i, three), one);
    return ml_write_rows(g, x, at, ml_gather(g, x, i, ops_axis(c, "p")), ops_axis(c, "p"));
}

static void build_shape(ops_case *c) {
    const shape *p = current;
    const bool shared = strchr(p->k, 'k') == NULL;
    ml_ref sources[] = {ops_input(c, p->dtype, p->q, -1, 1),
                        pool(c, p->k),
                        pool(c, p->v),
                        ops_index(c, p->table, p->blocks),
                        ops_index(c, p->rows, p->longest),
                        ops_index(c, p->rows, p->longest)};
    ml_cached_attention_args args = {.seq = ops_axis(c, "s"),
                                     .pool = ops_axis(c, "p"),
                                     .columns = ops_axis(c, "c"),
                                     .heads = ops_axis(c, "h"),
                                     .kv_heads = shared ? 0 : ops_axis(c, "k"),
                                     .head_dim = ops_axis(c, "d"),
                                     .kv_seq = ops_axis(c, "t"),
                                     .causal = true,
                                     .window = p->window,
                                     .block = p->block,
                                     .scale = 0.25};
    ml_ref y = ml_cached_attention(c->g, sources, CACHED_CAPTURED, &args);
    ops_output(c, y, ops_tolerance(p->dtype), "%s", p->name);
}

OPS_TEST(cached_attention) {
    for (int i = 0; i < SHAPE_COUNT; i++) {
        current = &SHAPES[i];
        for (uint64_t seed = 0; seed < 3; seed++) ops_run(build_shape, seed, 0);
    }
}
