/* The exact texts of what users get wrong. */
#include <stdio.h>

#include "runtime/ops/attention/attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"
#include "tests/graph/support.h"

typedef struct {
    ml_graph *g;
    void (*body)(ml_graph *g);
} mistake;

static void make_mistake(void *argument) {
    mistake *m = argument;
    m->body(m->g);
}

static ml_ref f32(ml_graph *g, const char *axes) {
    return graph_input(g, ML_F32, axes);
}
static ml_axis axis(ml_graph *g, const char *name) {
    return graph_axis(g, name);
}

static void dot_sizes(ml_graph *g) {
    ml_axis e = axis(g, "embed");
    ml_dot(g, f32(g, "batch512 seq4096 embed4096"), f32(g, "embed2048 heads32"), &e, 1, ML_F32);
}
static void dot_batch(ml_graph *g) {
    ml_axis e = axis(g, "embed");
    ml_dot(g, f32(g, "batch4 embed8"), f32(g, "embed8 batch2"), &e, 1, ML_F32);
}
static void dot_missing(ml_graph *g) {
    ml_axis e = axis(g, "embde");
    ml_dot(g, f32(g, "batch4 embed8"), f32(g, "embed8"), &e, 1, ML_F32);
}
static void dot_missing_right(ml_graph *g) {
    ml_axis e = axis(g, "embed");
    ml_dot(g, f32(g, "batch4 embed8"), f32(g, "ffn8 heads2"), &e, 1, ML_F32);
}
static void dot_bool(ml_graph *g) {
    ml_axis e = axis(g, "e");
    ml_dot(g, graph_input(g, ML_BOOL, "e2"), f32(g, "e2"), &e, 1, ML_F32);
}
static void add_mixed(ml_graph *g) {
    ml_map2(g, ML_OP_ADD, f32(g, "batch2 seq4"), f32(g, "seq4 heads2"));
}
static void add_sizes(ml_graph *g) {
    ml_map2(g, ML_OP_ADD, f32(g, "batch2 seq4"), f32(g, "seq5"));
}
static void where_mixed(ml_graph *g) {
    ml_where(g, graph_input(g, ML_BOOL, "seq4"), f32(g, "seq4"), f32(g, "heads2"));
}
static void int_float(ml_graph *g) {
    ml_map2(g, ML_OP_MUL, graph_input(g, ML_I32, "seq4"), f32(g, "seq4"));
}
static void exp_int(ml_graph *g) {
    ml_map1(g, ML_OP_EXP, graph_input(g, ML_I32, "seq4"));
}
static void add_bool(ml_graph *g) {
    ml_ref x = graph_input(g, ML_BOOL, "seq4");
    ml_map2(g, ML_OP_ADD, x, x);
}
static void and_float(ml_graph *g) {
    ml_map2(g, ML_OP_AND, f32(g, ""), f32(g, ""));
}
static void where_float(ml_graph *g) {
    ml_where(g, f32(g, "s4"), f32(g, "s4"), f32(g, "s4"));
}
static void sum_unknown(ml_graph *g) {
    ml_axis e = axis(g, "head");
    ml_reduce(g, ML_OP_SUM, f32(g, "batch2 heads4"), &e, 1);
}
static void max_scalar(ml_graph *g) {
    ml_axis e = axis(g, "heads");
    ml_reduce(g, ML_OP_MAX, f32(g, ""), &e, 1);
}
static void sum_twice(ml_graph *g) {
    ml_axis e[] = {axis(g, "s"), axis(g, "s")};
    ml_reduce(g, ML_OP_SUM, f32(g, "b2 s4"), e, 2);
}
static void slice_far(ml_graph *g) {
    ml_slice(g, f32(g, "seq4"), axis(g, "seq"), 2, 5);
}
static void pad_negative(ml_graph *g) {
    ml_pad(g, f32(g, "seq4"), axis(g, "seq"), -1, 0);
}
static void split_uneven(ml_graph *g) {
    ml_split(g, f32(g, "embed10"), axis(g, "embed"), axis(g, "heads"), 4, axis(g, "head_dim"), 2);
}
static void rename_taken(ml_graph *g) {
    ml_rename(g, f32(g, "batch2 seq4"), axis(g, "batch"), axis(g, "seq"));
}
static void permute_partly(ml_graph *g) {
    ml_type as = graph_axes(g, ML_F32, "seq4");
    ml_permute(g, f32(g, "batch2 seq4"), &as);
}
static void broadcast_lost(ml_graph *g) {
    ml_type as = graph_axes(g, ML_F32, "heads2 seq4");
    ml_broadcast(g, f32(g, "batch2 seq4"), &as);
}
static void broadcast_size(ml_graph *g) {
    ml_type as = graph_axes(g, ML_F32, "heads2 seq8");
    ml_broadcast(g, f32(g, "seq4"), &as);
}
static void concat_sizes(ml_graph *g) {
    ml_concat(g, (ml_ref[]){f32(g, "batch2 seq4"), f32(g, "batch3 seq4")}, 2, axis(g, "seq"));
}
static void concat_missing(ml_graph *g) {
    ml_concat(g, (ml_ref[]){f32(g, "batch2 seq4"), f32(g, "seq4")}, 2, axis(g, "seq"));
}
static void gather_large(ml_graph *g) {
    ml_gather(g, f32(g, "vocab3000000000"), graph_input(g, ML_I32, "seq4"), axis(g, "vocab"));
}
static void iota_large(ml_graph *g) {
    ml_iota(g, axis(g, "seq"), (int64_t)INT32_MAX + 2);
}
static void gather_index(ml_graph *g) {
    ml_gather(g, f32(g, "vocab9"), f32(g, "seq4"), axis(g, "vocab"));
}
static void top_k_many(ml_graph *g) {
    ml_ref x = f32(g, "experts4");
    ml_graph_add(g, ML_OP_TOP_K, &x, 1, (int64_t[]){axis(g, "experts"), 5, axis(g, "k")}, 3, NULL);
}
static void nine_axes(ml_graph *g) {
    ml_type as = graph_axes(g, ML_F32, "a1 b1 c1 d1 e1 f1 g1 h1");
    ml_ref x = ml_broadcast(g, f32(g, ""), &as);
    ml_split(g, x, axis(g, "a"), axis(g, "i"), 1, axis(g, "j"), 1);
}
static void zero_size(ml_graph *g) {
    ml_iota(g, axis(g, "seq"), 0);
}
static void attention_heads(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_F32, 3);
    ml_attention(g, (ml_ref[]){a.q, a.k, a.v}, 3, &a.args);
}
static void attention_axis(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_F32, 2);
    ml_attention(g, (ml_ref[]){a.q, a.k, f32(g, "b2 u6 kv2 d8")}, 3, &a.args);
}
static void score_captures(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_F32, 4);
    ml_ref bias = f32(g, "x7");
    a.args.score = graph_score(g, &a, 0);
    ml_attention(g, (ml_ref[]){a.q, a.k, a.v, bias}, 4, &a.args);
}
static void score_reduces(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_F32, 4);
    ml_ref s = graph_score(g, &a, 0);
    a.args.score = ml_map2(g, ML_OP_SUB, s, ml_reduce(g, ML_OP_MAX, s, &a.args.kv_seq, 1));
    ml_attention(g, (ml_ref[]){a.q, a.k, a.v}, 3, &a.args);
}
static void score_bool(ml_graph *g) {
    graph_qkv a = graph_attention(g, ML_F32, 4);
    a.args.score = ml_map2(g, ML_OP_GT, graph_score(g, &a, 0), ml_const(g, ML_F32, 0));
    ml_attention(g, (ml_ref[]){a.q, a.k, a.v}, 3, &a.args);
}
/* With one operand replaced. */
static void cached(ml_graph *g, int which, ml_ref other, int64_t block) {
    ml_ref sources[] = {f32(g, "r2 s3 h4 d8"),        f32(g, "p8 kv2 d8"),
                        f32(g, "p8 kv2 d8"),          graph_input(g, ML_I32, "r2 c3"),
                        graph_input(g, ML_I32, "r2"), graph_input(g, ML_I32, "r2")};
    ml_cached_attention_args args = {.seq = axis(g, "s"),
                                     .pool = axis(g, "p"),
                                     .columns = axis(g, "c"),
                                     .heads = axis(g, "h"),
                                     .kv_heads = axis(g, "kv"),
                                     .head_dim = axis(g, "d"),
                                     .kv_seq = axis(g, "t"),
                                     .block = block};
    if (other) sources[which] = other;
    ml_cached_attention(g, sources, CACHED_CAPTURED, &args);
}
static void cached_axes(ml_graph *g) {
    cached(g, CACHED_V, f32(g, "p8 h4 d8"), 2);
}
static void cached_heads(ml_graph *g) {
    cached(g, CACHED_Q, f32(g, "r2 s3 h5 d8"), 2);
}
static void cached_rows(ml_graph *g) {
    cached(g, CACHED_LENGTH, graph_input(g, ML_I32, "r3"), 2);
}
static void cached_table(ml_graph *g) {
    cached(g, CACHED_TABLE, f32(g, "r2 c3"), 2);
}
static void cached_dtypes(ml_graph *g) {
    cached(g, CACHED_K, graph_input(g, ML_BF16, "p8 kv2 d8"), 2);
}
static void cached_block(ml_graph *g) {
    cached(g, 0, 0, 3);
}
static void write_axis(ml_graph *g) {
    ml_write_rows(g, f32(g, "p8 d4"), graph_input(g, ML_I32, "n3"), f32(g, "n3 d4"), axis(g, "q"));
}
static void write_shared(ml_graph *g) {
    ml_write_rows(g, f32(g, "p8 b3"), graph_input(g, ML_I32, "b3"), f32(g, "b3"), axis(g, "p"));
}
static void write_size(ml_graph *g) {
    ml_write_rows(g, f32(g, "p8 d4"), graph_input(g, ML_I32, "n3"), f32(g, "n3 d5"), axis(g, "p"));
}
static void write_more(ml_graph *g) {
    ml_write_rows(g, f32(g, "p8 d4"), graph_input(g, ML_I32, "n3"), f32(g, "n3 d4 e2"),
                  axis(g, "p"));
}
static void write_dtype(ml_graph *g) {
    ml_write_rows(g, graph_input(g, ML_BF16, "p8 d4"), graph_input(g, ML_I32, "n3"),
                  f32(g, "n3 d4"), axis(g, "p"));
}
static void int_constant(ml_graph *g) {
    ml_const(g, ML_I32, 0.5);
}

#define MIX_HELP                                                                                   \
    "elementwise operands broadcast only where one has every axis of the other: broadcast one "    \
    "first, or rename an axis"

static const struct {
    const char *name;
    void (*body)(ml_graph *g);
    int operands;
    const char *text, *help;
} MISTAKES[] = {
    {"dot_sizes", dot_sizes, 2, "cannot contract \"embed\": 4096 on the left, 2048 on the right",
     ""},
    {"dot_batch", dot_batch, 2, "cannot contract: \"batch\" is 4 on the left, 2 on the right",
     "an axis that both have and that is not contracted pairs them element by element"},
    {"dot_missing", dot_missing, 2, "cannot contract \"embde\": the left has no such axis",
     "its axes are batch, embed; did you mean \"embed\"?"},
    {"dot_missing_right", dot_missing_right, 2,
     "cannot contract \"embed\": the right has no such axis", "its axes are ffn, heads"},
    {"dot_bool", dot_bool, 2, "dot works on numbers, not on bool",
     "cast it: x:cast(\"f32\") gives 1 where true, 0 where false"},
    {"add_mixed", add_mixed, 2, "cannot add: the left lacks \"heads\", the right lacks \"batch\"",
     MIX_HELP},
    {"add_sizes", add_sizes, 2, "cannot add: \"seq\" is 4 on the left, 5 on the right", ""},
    {"where_mixed", where_mixed, 3,
     "cannot combine: the test lacks \"heads\", the second value lacks \"seq\"", MIX_HELP},
    {"int_float", int_float, 2,
     "mul needs operands of one dtype: the left is i32, the right is f32",
     "cast one: x:cast(\"f32\")"},
    {"exp_int", exp_int, 1, "exp works on floats, not on i32", "cast it: x:cast(\"f32\")"},
    {"add_bool", add_bool, 2, "add works on numbers, not on bool",
     "cast it: x:cast(\"f32\") gives 1 where true, 0 where false"},
    {"and_float", and_float, 2, "logical_and works on booleans, not on f32",
     "compare it with something: m.ne(x, 0)"},
    {"where_float", where_float, 3, "the test of where is bool, not f32",
     "compare it with something: m.ne(x, 0)"},
    {"sum_unknown", sum_unknown, 1, "cannot sum over \"head\": the tensor has no such axis",
     "its axes are batch, heads; did you mean \"heads\"?"},
    {"max_scalar", max_scalar, 1, "cannot take the max over \"heads\": the tensor has no such axis",
     "it has no axes: it is a single number"},
    {"sum_twice", sum_twice, 1, "sum names axis \"s\" twice", ""},
    {"slice_far", slice_far, 1, "cannot slice \"seq\" from 2 to 5: it has 4 elements",
     "positions count from 0, and the last is not included"},
    {"pad_negative", pad_negative, 1, "cannot pad \"seq\" by -1 and 0 elements",
     "slice takes elements away"},
    {"split_uneven", split_uneven, 1,
     "cannot split \"embed\" of size 10 into \"heads\" 4 x \"head_dim\" 2", ""},
    {"rename_taken", rename_taken, 1, "rename would give a tensor with axis \"seq\" twice",
     "rename one of them first"},
    {"permute_partly", permute_partly, 1,
     "cannot permute to seq: permute names each of the axes once", "its axes are batch, seq"},
    {"broadcast_lost", broadcast_lost, 1, "cannot broadcast: axis \"batch\" would be lost",
     "name all of its axes"},
    {"broadcast_size", broadcast_size, 1, "cannot broadcast \"seq\" from 4 to 8", ""},
    {"concat_sizes", concat_sizes, 2,
     "cannot concatenate: \"batch\" is 2 in tensor 1, 3 in tensor 2", ""},
    {"concat_missing", concat_missing, 2,
     "cannot concatenate tensors with \"batch\": tensor 2 has no such axis", "its axes are seq"},
    {"gather_index", gather_index, 2, "the index of gather is i32, not f32",
     "cast it: x:cast(\"i32\")"},
    {"gather_large", gather_large, 2,
     "axis \"vocab\" has 3000000000 elements: gather counts them in i32, which ends at 2147483647",
     "split it into two axes"},
    {"iota_large", iota_large, 0,
     "axis \"seq\" has 2147483649 elements: iota counts them in i32, which ends at 2147483647",
     "split it into two axes"},
    {"top_k_many", top_k_many, 1, "cannot take the 5 largest over \"experts\": it has 4 elements",
     ""},
    {"nine_axes", nine_axes, 1, "split would give a tensor with more than 8 axes",
     "merge some of its axes first"},
    {"zero_size", zero_size, 0, "axis \"seq\" has size 0: sizes are 1 or more", ""},
    {"attention_heads", attention_heads, 3, "cannot attend: \"h\" is 4 in q, \"kv\" is 3 in k",
     "the number of heads is a multiple of that of key/value heads"},
    {"attention_axis", attention_axis, 3, "cannot attend over \"t\": v has no such axis",
     "its axes are b, u, kv, d"},
    {"cached_axes", cached_axes, 4, "cannot attend: v has axes p, h, d, and should have p, d, kv",
     ""},
    {"cached_heads", cached_heads, 4, "cannot attend: \"h\" is 5 in q, \"kv\" is 2 in k",
     "the number of heads is a multiple of that of key/value heads"},
    {"cached_rows", cached_rows, 4, "cannot attend: \"r\" is 2 in q, 3 in the length", ""},
    {"cached_table", cached_table, 4, "the table of cached_attention is i32, not f32",
     "cast it: x:cast(\"i32\")"},
    {"cached_dtypes", cached_dtypes, 4, "cannot attend: k is bf16, v is f32",
     "keep both in one dtype"},
    {"cached_block", cached_block, 4, "cannot attend: blocks of 3 positions in a pool of 8",
     "a pool is a whole number of blocks"},
    {"write_axis", write_axis, 3, "cannot write rows along \"q\": the cache has no such axis",
     "its axes are p, d"},
    {"write_shared", write_shared, 3,
     "cannot write rows: both the cache and the index have axis \"b\"",
     "rename it in the index and the value"},
    {"write_size", write_size, 3, "cannot write rows: \"d\" is 4 in the cache, 5 in the value", ""},
    {"write_more", write_more, 3,
     "cannot write rows: the value has axes n, d, e, the index n, the cache p, d",
     "the value has the axes of the index and those of a row of the cache"},
    {"write_dtype", write_dtype, 3, "cannot write rows of f32 into a cache of bf16",
     "cast the value"},
    {"score_captures", score_captures, 4,
     "a tensor that the score function uses has axis \"x\", the scores have b, h, s, t",
     "a score function works on one score at a time"},
    {"score_reduces", score_reduces, 3, "a score function cannot use max: it is elementwise",
     "compute it outside and let the function use the result"},
    {"score_bool", score_bool, 0, "a score function gives a float, not bool",
     "m.where(test, s, -math.huge) masks"},
    {"int_constant", int_constant, 0, "0.5 is not an i32", "cast the tensor: x:cast(\"f32\")"},
};

static void all_mistakes(ml_graph *g) {
    for (size_t i = 0; i < sizeof MISTAKES / sizeof *MISTAKES; i++) {
        mistake m = {g, MISTAKES[i].body};
        bool right = CHECK_RAISES(make_mistake, &m, ML_INVALID, MISTAKES[i].text);
        right &= CHECK_TEXT(ml_error_last()->help, MISTAKES[i].help);
        right &= CHECK_EQ_INT(ml_error_last()->operand_count, MISTAKES[i].operands);
        EXPECT(right, "in %s", MISTAKES[i].name);
    }
    /* what went wrong left the graph as it should be */
    ml_graph_verify(g, NULL, "mistakes");
}
TEST(graph_errors, texts) {
    graph_run(all_mistakes);
}
