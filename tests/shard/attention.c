/* Attention under drawn layouts: heads, key/value heads, queries, keys (rings), batches; and
 * context parallelism: every mask in every form of it, and the work of each rank. */
#include <math.h>
#include <stdio.h>

#include "codegen/lower/library.h"
#include "runtime/compile.h"
#include "runtime/ops/attention/attention.h"
#include "tests/shard/support.h"

enum { DRAWS = 40 };

typedef struct {
    int kv_heads, queries;
    bool causal, score;
    int window;
} attention_case;

static const attention_case cases[] = {
    {8, 8, false, false, 0}, {8, 8, true, false, 0}, {4, 8, true, false, 3},
    {2, 8, true, true, 0},   {1, 4, false, true, 2}, {4, 4, true, true, 0},
};
enum { CASES = sizeof cases / sizeof *cases };

static const attention_case *current;

static ml_ref parameter(fixture *f, int64_t index, const ml_type *type) {
    return ml_graph_add(f->g, ML_OP_PARAM, NULL, 0, &index, 1, type);
}

/* s * bias[heads] + key position * slope[seq] where the query's position is even. */
static ml_ref make_score(fixture *f, const ml_ref *sources, const ml_attention_args *args) {
    ml_type score;
    ml_attention_score_type(f->g, sources[0], sources[1], args, &score);
    ml_ref s = parameter(f, 0, &score);
    ml_ref bias = parameter(f, 1, ml_graph_type(f->g, sources[3]));
    ml_ref slope = parameter(f, 2, ml_graph_type(f->g, sources[4]));
    ml_ref key = ml_cast(f->g, ml_iota(f->g, args->kv_seq, score.size[score.rank - 1]), ML_F64);
    ml_ref query = ml_iota(f->g, args->seq, score.size[score.rank - 2]);
    ml_ref head = ml_cast(f->g, ml_iota(f->g, args->heads, score.size[score.rank - 3]), ML_F64);
    ml_ref even =
        ml_map2(f->g, ML_OP_EQ, ml_map2(f->g, ML_OP_MOD, query, ml_const_int(f->g, ML_I32, 2)),
                ml_const_int(f->g, ML_I32, 0));
    ml_ref wide = ml_where(f->g, even, ml_map2(f->g, ML_OP_MUL, s, slope), s);
    wide = ml_map2(f->g, ML_OP_ADD, wide, ml_map2(f->g, ML_OP_MUL, bias, head));
    return ml_map2(f->g, ML_OP_ADD, wide,
                   ml_map2(f->g, ML_OP_MUL, key, ml_const(f->g, ML_F64, 0.1)));
}

static ml_ref build(fixture *f) {
    char q[64], k[64];
    bool grouped = current->kv_heads != 8;
    snprintf(q, sizeof q, "b4 s%d h8 d2", current->queries);
    snprintf(k, sizeof k, "b4 t8 %s%d d2", grouped ? "k" : "h", current->kv_heads);
    ml_ref sources[] = {fixture_input(f, ML_F64, q, -2, 2), fixture_input(f, ML_F64, k, -2, 2),
                        fixture_input(f, ML_F64, k, -2, 2), 0, 0};
    ml_attention_args args = {.seq = fixture_axis(f, "s"),
                              .kv_seq = fixture_axis(f, "t"),
                              .heads = fixture_axis(f, "h"),
                              .kv_heads = fixture_axis(f, grouped ? "k" : "h"),
                              .head_dim = fixture_axis(f, "d"),
                              .causal = current->causal,
                              .window = current->window,
                              .scale = 0.7};
    if (!current->score) return ml_attention(f->g, sources, 3, &args);
    sources[3] = fixture_input(f, ML_F64, "h8", -1, 1);
    sources[4] = fixture_input(f, ML_F64, "t8", -1, 1);
    args.score = make_score(f, sources, &args);
    return ml_attention(f->g, sources, 5, &args);
}

static void check(fixture *f) {
    snprintf(f->label, sizeof f->label, "attention case %d", (int)(current - cases));
    ml_ref o = build(f);
    ml_ref y = ml_map2(f->g, ML_OP_ADD, o, ml_out(f->g, o, 1));
    CHECK(shard_check_drawn(f, y, "b s h t k", DRAWS) > DRAWS / 4);
}

TEST(shard_attention, drawn_layouts) {
    for (int i = 0; i < CASES; i++) {
        current = &cases[i];
        fixture_run(check, (uint64_t)i);
    }
}

/* ---- The three ways of context parallelism --------------------------------------------------- */

static void under(fixture *f, const ml_roots *roots, const char *text, int gathers, int exchanges,
                  int shifts) {
    ml_layout layout = shard_layout(f, text);
    ml_roots local;
    CHECK(shard_check(f, &layout, roots, 1e-9, true));
    ml_graph *g = shard_program(f, &layout, roots, &local);
    int64_t counts[] = {shard_count(g, &layout, 0, ML_COLLECTIVE_ALL_GATHER),
                        shard_count(g, &layout, 0, ML_COLLECTIVE_ALL_TO_ALL),
                        shard_count(g, &layout, 0, ML_COLLECTIVE_SHIFT)};
    ml_graph_free(g);
    const int expected[] = {gathers, exchanges, shifts};
    for (int i = 0; i < 3; i++) EXPECT(CHECK_EQ_INT(counts[i], expected[i]), "under %s", text);
}

/* The output is gathered once, as all outputs are. */
static void three_ways(fixture *f) {
    current = &cases[1];
    ml_ref o = build(f);
    ml_roots roots = {.outputs = &o, .output_count = 1};
    under(f, &roots, "cp4 acts s t", 1, 0, 6);
    under(f, &roots, "cp4 acts h s", 1, 0, 0);
    under(f, &roots, "cp2 acts t s", 1, 0, 2);
    ml_ref parts[3];
    for (int i = 0; i < 3; i++) { /* q, k and v as a model has them: along the sequence */
        ml_axis d = fixture_axis(f, "d");
        ml_ref h = fixture_input(f, ML_F64, "b4 s8 d2", -1, 1);
        ml_ref wh = fixture_input(f, ML_F64, "d2 h8 e2", -1, 1);
        parts[i] = ml_dot(f->g, h, wh, &d, 1, ML_F64);
        parts[i] = ml_rename(f->g, parts[i], fixture_axis(f, "e"), d);
        if (i) parts[i] = ml_rename(f->g, parts[i], fixture_axis(f, "s"), fixture_axis(f, "t"));
    }
    ml_attention_args args;
    ml_attention_read(f->g, o, &args);
    ml_ref made = ml_attention(f->g, parts, 3, &args);
    roots.outputs = &made;
    under(f, &roots, "cp4 acts s", 3, 0, 0);
    under(f, &roots, "cp4 acts s t", 1, 0, 6);
}
TEST(shard_attention, three_ways) {
    fixture_run(three_ways, 7);
}

/* ---- Key/value heads that ranks share -------------------------------------------------------- */

/* Heads of x, normalised, each half turned into the other: as a model has them. */
static ml_ref made_heads(fixture *f, ml_ref x, const char *weight) {
    ml_graph *g = f->g;
    ml_axis e = fixture_axis(f, "e"), d = fixture_axis(f, "d");
    ml_ref k = ml_dot(g, x, fixture_state(f, ML_F64, weight), &e, 1, ML_F64);
    ml_ref mean = ml_reduce(g, ML_OP_SUM, ml_map2(g, ML_OP_MUL, k, k), &d, 1);
    mean = ml_map1(g, ML_OP_RSQRT, ml_map2(g, ML_OP_ADD, mean, ml_const(g, ML_F64, 0.1)));
    k = ml_map2(g, ML_OP_MUL, k, mean);
    ml_ref halves[] = {ml_map1(g, ML_OP_NEG, ml_slice(g, k, d, 1, 2)), ml_slice(g, k, d, 0, 1)};
    ml_ref turned = ml_cast(g, ml_cast(g, ml_concat(g, halves, 2, d), ML_F32), ML_F64);
    k = ml_map2(g, ML_OP_ADD, k, ml_map2(g, ML_OP_MUL, turned, ml_const(g, ML_F64, 0.5)));
    return k;
}

/* Groups of ranks share a key/value head. */
static void shared_heads(fixture *f) {
    static const struct {
        const char *layout;
        bool alone; /* no keys are sent, nor their gradients */
    } under[] = {{"tp4 params h k acts h k", true},
                 {"tp8 params h k acts h k", true},
                 {"dp2 acts b flat; tp4 params h k acts h k", true},
                 {"tp4 params h k acts h k; dp2 acts b params e", true},
                 {"tp4 params h k acts h k s", true},
                 {"cp2 acts s; tp4 params h k acts h k", false},
                 {"tp2 params h acts h; cp4 params h k acts h k", false},
                 {"tp4 params h k acts h k; cp2 acts h s params h", false},
                 {"tp6 params h k acts h k", false},
                 {"tp3 params h k acts h k", false}};
    int kv_heads = 1 + (int)(f->random / 2 % 2);
    char axes[] = {'e', '4', ' ', 'k', (char)('0' + kv_heads), ' ', 'd', '2', 0};
    ml_graph *g = f->g;
    ml_axis s = fixture_axis(f, "s"), d = fixture_axis(f, "d"), h = fixture_axis(f, "h");
    ml_ref x = fixture_input(f, ML_F64, "b4 s8 e4", -1, 1), parts[3];
    for (int i = 0; i < 3; i++) {
        parts[i] = made_heads(f, x, i ? axes : "e4 h8 d2");
        if (i) parts[i] = ml_rename(g, parts[i], s, fixture_axis(f, "t"));
    }
    ml_attention_args args = {.seq = s,
                              .kv_seq = fixture_axis(f, "t"),
                              .heads = h,
                              .kv_heads = fixture_axis(f, "k"),
                              .head_dim = d,
                              .causal = true,
                              .scale = 0.7};
    ml_ref o = ml_attention(g, parts, 3, &args);
    ml_ref y = ml_dot(g, o, fixture_state(f, ML_F64, "h8 d2 e4"), (ml_axis[]){h, d}, 2, ML_F64);
    ml_roots roots = shard_roots(f, y);
    roots.kept = 0;
    for (size_t i = 0; i < sizeof under / sizeof *under; i++) {
        ml_layout layout = shard_layout(f, under[i].layout);
        ml_roots local;
        CHECK(shard_check(f, &layout, &roots, 1e-6, true));
        ml_graph *made = shard_program(f, &layout, &roots, &local);
        for (ml_ref n = 1; n < ml_graph_count(made); n++) {
            const ml_type *t = ml_graph_type(made, n);
            bool moved = ml_ops[ml_graph_node(made, n)->op].op_class == ML_CLASS_COLLECTIVE;
            moved = moved && ml_type_find(t, args.kv_heads) >= 0;
            moved = moved && (ml_type_find(t, s) >= 0 || ml_type_find(t, args.kv_seq) >= 0);
            EXPECT(!moved || !under[i].alone || kv_heads == 1, "%s of keys under %s kv %d",
                   ml_ops[ml_graph_node(made, n)->op].name, under[i].layout, kv_heads);
        }
        ml_graph_free(made);
    }
}
TEST(shard_attention, shared_heads) {
    for (uint64_t seed = 2; seed < 6; seed++) fixture_run(shared_heads, seed);
}

/* ---- Every mask, every form of context parallelism ------------------------------------------- */

typedef enum { PLAIN, SCORED, DOCUMENTS, BIASED } function_kind;
typedef struct {
    const char *name;
    int queries, keys, kv_heads;
    bool causal;
    int window;
    function_kind function;
} mask_case;

static const mask_case masks[] = {
    {"whole", 24, 24, 2, false, 0, PLAIN},
    {"causal", 24, 24, 4, true, 0, PLAIN},
    {"causal, grouped", 24, 24, 1, true, 0, PLAIN},
    {"narrow window", 24, 24, 2, true, 5, PLAIN},
    {"window of one", 24, 24, 2, true, 1, PLAIN},
    {"wide window", 24, 24, 2, true, 17, PLAIN},
    {"window, not causal", 24, 24, 2, false, 7, PLAIN},
    {"more keys", 24, 48, 2, true, 0, PLAIN},
    {"fewer keys, window", 48, 24, 2, true, 9, PLAIN}, /* some see nothing */
    {"score function", 24, 24, 2, true, 0, SCORED},
    {"score function, not causal", 24, 24, 4, false, 0, SCORED},
    {"documents", 24, 24, 2, true, 0, DOCUMENTS},
    {"documents, wide window", 24, 24, 2, true, 20, DOCUMENTS},
    {"bias", 24, 24, 2, true, 0, BIASED},
    {"bias, not causal", 24, 24, 2, false, 0, BIASED},
};
enum { MASKS = sizeof masks / sizeof *masks };
static const mask_case *mask;

/* -infinity where the documents of query and key differ. */
static ml_ref documents(fixture *f, ml_ref s, const ml_ref *captured) {
    ml_ref of[2];
    for (int i = 0; i < 2; i++)
        of[i] = ml_cast(f->g, parameter(f, 1 + i, ml_graph_type(f->g, captured[i])), ML_F64);
    ml_ref query = ml_map2(f->g, ML_OP_MUL, s, ml_const(f->g, ML_F64, 0)); /* with all axes */
    query = ml_map2(f->g, ML_OP_ADD, query, of[0]);
    return ml_where(f->g, ml_map2(f->g, ML_OP_EQ, query, of[1]), s,
                    ml_const(f->g, ML_F64, -INFINITY));
}

static ml_ref build_mask(fixture *f) {
    char q[64], k[64];
    const char *kv = mask->kv_heads == 4 ? "h" : "k";
    snprintf(q, sizeof q, "b2 s%d h4 d2", mask->queries);
    snprintf(k, sizeof k, "b2 t%d %s%d d2", mask->keys, kv, mask->kv_heads);
    ml_ref sources[] = {fixture_input(f, ML_F64, q, -2, 2), fixture_input(f, ML_F64, k, -2, 2),
                        fixture_input(f, ML_F64, k, -2, 2), 0, 0};
    ml_attention_args args = {.seq = fixture_axis(f, "s"),
                              .kv_seq = fixture_axis(f, "t"),
                              .heads = fixture_axis(f, "h"),
                              .kv_heads = fixture_axis(f, kv),
                              .head_dim = fixture_axis(f, "d"),
                              .causal = mask->causal,
                              .window = mask->window,
                              .scale = 0.7};
    if (mask->function == PLAIN) return ml_attention(f->g, sources, 3, &args);
    ml_type score;
    ml_attention_score_type(f->g, sources[0], sources[1], &args, &score);
    ml_ref s = parameter(f, 0, &score);
    if (mask->function == SCORED) {
        sources[3] = fixture_input(f, ML_F64, "h4", -1, 1);
        sources[4] = fixture_input(f, ML_F64, "t24", -1, 1);
        args.score = make_score(f, sources, &args);
        return ml_attention(f->g, sources, 5, &args);
    }
    if (mask->function == DOCUMENTS) {
        sources[3] = fixture_index(f, "b2 s24", 3);
        sources[4] = fixture_index(f, "b2 t24", 3);
        args.score = documents(f, s, sources + 3);
        return ml_attention(f->g, sources, 5, &args);
    }
    sources[3] = fixture_input(f, ML_F64, "t24 h4 s24", -1, 1);
    ml_ref bias = parameter(f, 1, ml_graph_type(f->g, sources[3]));
    args.score = ml_map2(f->g, ML_OP_ADD, s, bias);
    return ml_attention(f->g, sources, 4, &args);
}

static const char *const forms[] = {"acts s t", "acts s",
                                    "acts h s"}; /* ring, gathered, exchanged */

static void check_mask(fixture *f) {
    static const int ranks[] = {2, 3, 4};
    ml_ref o = build_mask(f);
    ml_roots roots = shard_roots(f, o);
    for (int i = 0; i < 9; i++) {
        char text[64];
        if (ranks[i / 3] == 3 && i % 3 == 2) continue; /* four heads */
        snprintf(f->label, sizeof f->label, "%s", mask->name);
        snprintf(text, sizeof text, "cp%d %s", ranks[i / 3], forms[i % 3]);
        ml_layout layout = shard_layout(f, text);
        CHECK(shard_check(f, &layout, &roots, 1e-9, i == 6));
    }
}

TEST(shard_attention, masks) {
    for (int i = 0; i < MASKS; i++) {
        mask = &masks[i];
        fixture_run(check_mask, (uint64_t)i);
    }
}

/* ---- The work of each rank ------------------------------------------------------------------- */

/* Pairs of a query and a key that the attentions of one rank look at: what masks do not hide. */
static int64_t pairs_of(const ml_graph *g, ml_ref n, double *const *place) {
    ml_attention_args args;
    ml_attention_read(g, n, &args);
    const ml_type *q = ml_graph_type(g, ml_graph_source(g, n, 0));
    const ml_type *k = ml_graph_type(g, ml_graph_source(g, n, 1));
    int64_t queries = q->size[ml_type_find(q, args.seq)], pairs = 0;
    int64_t keys = k->size[ml_type_find(k, args.kv_seq)];
    int64_t piece = args.pieces ? queries / args.pieces : queries;
    for (int64_t i = 0; i < queries; i++) {
        int64_t at = i + keys - queries;
        if (args.pieces)
            at = i % piece + args.offset + (int64_t)(*place[i / piece] - *place[args.pieces]);
        for (int64_t j = 0; j < keys; j++)
            pairs += !(args.causal && j > at) && !(args.window && at - j >= args.window);
    }
    int64_t dim = q->size[ml_type_find(q, args.head_dim)];
    return pairs * (ml_type_elements(q) / (queries * dim)); /* of each head of each sample */
}

/* By rank; every attention's places as the ranks compute them. */
static void count_pairs(fixture *f, const ml_layout *layout, const ml_graph *g, int64_t *pairs) {
    int64_t ranks = ml_layout_ranks(layout);
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        if (ml_graph_node(g, n)->op != ML_OP_ATTENTION) continue;
        ml_attention_args args;
        ml_attention_read(g, n, &args);
        int count = ml_attention_places(&args);
        double **places = ML_NEW_ARRAY(f->arena, double *, count *ranks + 1);
        double ***results = ML_NEW_ARRAY(f->arena, double **, ranks);
        for (int64_t r = 0; r < ranks; r++) results[r] = places + count * r;
        if (count)
            shard_run_ranks(g, layout, NULL, NULL,
                            ml_graph_sources(g, n) + ml_attention_captured(g, n) - count, count,
                            results, f->arena);
        for (int64_t r = 0; r < ranks; r++) pairs[r] += pairs_of(g, n, results[r]);
    }
}

/* The ranks look at every pair that the mask leaves once, and at no other; the busiest has `most`
 * percent of the average. */
static void check_work(fixture *f, const char *text, double most) {
    int64_t pairs[8] = {0}, sum = 0, largest = 0;
    ml_ref o = build_mask(f);
    ml_roots roots = {.outputs = &o, .output_count = 1}, local;
    ml_layout layout = shard_layout(f, text);
    ml_graph *g = shard_program(f, &layout, &roots, &local);
    count_pairs(f, &layout, g, pairs);
    double balance = ml_shard_balance(g, &layout);
    ml_graph_free(g);
    int64_t ranks = ml_layout_ranks(&layout);
    for (int64_t r = 0; r < ranks; r++) {
        sum += pairs[r];
        largest = pairs[r] > largest ? pairs[r] : largest;
    }
    CHECK_EQ_INT(sum, pairs_of(f->g, o, NULL));
    CHECK_NEAR(balance, (double)(largest * ranks) / (double)sum, 1e-12);
    EXPECT(CHECK(100.0 * (double)(largest * ranks) <= most * (double)sum + 1e-6),
           "%s under %s: the busiest rank has %.1f%% of the average", mask->name, text,
           100.0 * (double)(largest * ranks) / (double)sum);
}

static void work(fixture *f) {
    mask = &masks[1]; /* causal */
    for (int i = 0; i < 2; i++) {
        check_work(f, i ? "cp2 acts s" : "cp2 acts s t", 100);
        check_work(f, i ? "cp3 acts s" : "cp3 acts s t", 100);
        check_work(f, i ? "cp4 acts s" : "cp4 acts s t", 100);
        check_work(f, i ? "dp2 acts b;cp4 acts s" : "dp2 acts b;cp4 acts s t", 100);
    }
    check_work(f, "cp4 acts h s", 100); /* by heads: each has all of the pairs */
    check_work(f, "cp8 acts s t", 188); /* parts of 3 rows have no halves */
    mask = &masks[3];                   /* a narrow window: the first ranks have a little less */
    check_work(f, "cp4 acts s t", 110);
    mask = &masks[5]; /* a wide one */
    check_work(f, "cp4 acts s t", 130);
}
TEST(shard_attention, work) {
    fixture_run(work, 3);
}

/* The next keys are on their way (S) before a round's attentions (A). */
static void order_of_ring(fixture *f) {
    ml_roots roots = {.outputs = ML_NEW(f->arena, ml_ref), .output_count = 1}, local;
    mask = &masks[1];
    roots.outputs[0] = build_mask(f);
    static const char *const expected[] = {"SSASSAASSAAAA", "SSASSASSAA"};
    for (int i = 0; i < 2; i++) {
        char order[64] = "", *at = order;
        ml_layout layout = shard_layout(f, "cp4 acts s t");
        ml_graph *g = shard_program(f, &layout, &roots, &local);
        for (ml_ref n = 1; n < ml_graph_count(g); n++) {
            int op = ml_graph_node(g, n)->op;
            if (op == ML_OP_SHIFT || op == ML_OP_ATTENTION) *at++ = op == ML_OP_SHIFT ? 'S' : 'A';
        }
        ml_graph_free(g);
        CHECK_TEXT(order, expected[i]);
        mask = &masks[0];
        roots.outputs[0] = build_mask(f);
    }
}
TEST(shard_attention, order_of_ring) {
    fixture_run(order_of_ring, 3);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Temporary bytes of attention and its gradients over rings of so many ranks. */
static int64_t arena_of(fixture *f, const ml_roots *roots, int ranks) {
    static const ml_target target = {.kind = ML_TARGET_C, .threads = 2, .vector_bytes = 32};
    char text[32];
    snprintf(text, sizeof text, "cp%d acts s t", ranks);
    ml_layout *layout = ML_NEW(f->arena, ml_layout);
    *layout = shard_layout(f, text);
    ml_plan *plan = NULL;
    ml_compile(&(ml_compile_input){f->g, roots, &target, layout}, &plan);
    int64_t bytes = plan->arena_bytes;
    ml_plan_free(plan);
    return bytes;
}

/* Gradients of causal attention, which stay where they are. */
static ml_roots causal_gradients(fixture *f) {
    ml_ref wrt[3], *gradients = ML_NEW_ARRAY(f->arena, ml_ref, 3);
    ml_attention_args args = {.seq = fixture_axis(f, "s"),
                              .kv_seq = fixture_axis(f, "t"),
                              .heads = fixture_axis(f, "h"),
                              .kv_heads = fixture_axis(f, "h"),
                              .head_dim = fixture_axis(f, "d"),
                              .causal = true,
                              .scale = 0.1};
    for (int i = 0; i < 3; i++)
        wrt[i] = fixture_input(f, ML_BF16, i ? "t8192 h2 d32" : "s8192 h2 d32", -1, 1);
    ml_ref weighted = ml_map2(f->g, ML_OP_MUL, ml_attention(f->g, wrt, 3, &args),
                              fixture_input(f, ML_BF16, "s8192 h2 d32", -1, 1));
    ml_type type = *ml_graph_type(f->g, weighted);
    ml_ref loss = ml_reduce(f->g, ML_OP_SUM, weighted, type.axis, type.rank);
    ml_autodiff(f->g, loss, wrt, 3, gradients);
    return (ml_roots){.outputs = gradients, .output_count = 3, .kept = 3};
}

/* A rank never holds the keys, or what the rounds made, of all others: with four times the ranks it
 * has a quarter, and a few rounds' results more. */
static void memory_of_ring(fixture *f) {
    ml_roots roots = causal_gradients(f);
    int64_t few = arena_of(f, &roots, 4), many = arena_of(f, &roots, 16);
    EXPECT(CHECK(many * 3 < few), "%lld bytes with 4 ranks, %lld with 16", (long long)few,
           (long long)many);
}
TEST(shard_attention, memory_of_ring) {
    fixture_run(memory_of_ring, 3);
}

/* Attentions of a GPU's plan that cuDNN is asked for, of how many. */
static int cudnn_calls(fixture *f, const char *text, int *of) {
    static const ml_target target = {.kind = ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132};
    ml_roots roots = causal_gradients(f);
    ml_layout *layout = ML_NEW(f->arena, ml_layout);
    *layout = shard_layout(f, text);
    ml_plan *plan = NULL;
    int asked = *of = 0;
    ml_compile(&(ml_compile_input){f->g, &roots, &target, layout}, &plan);
    for (uint32_t i = 0; i < plan->schedule->steps.count; i++) {
        const ml_attention_step *step = plan->schedule->steps.at[i].attention;
        if (!step) continue;
        *of += 1;
        asked += ml_attention_refused(step) == NULL;
    }
    ml_plan_free(plan);
    return asked;
}

/* No call of a causal ring needs places. With gathered keys there is one call a direction, by
 * kernels that are given the places of both halves of the queries. */
static void cudnn_serves(fixture *f) {
    int of;
    CHECK_EQ_INT(cudnn_calls(f, "cp4 acts s t", &of), 14);
    CHECK_EQ_INT(of, 14); /* own keys at once, two calls for each other rank's; backward too */
    CHECK_EQ_INT(cudnn_calls(f, "cp4 acts s", &of), 0);
    CHECK_EQ_INT(of, 2);
}
TEST(shard_attention, cudnn_serves) {
    fixture_run(cudnn_serves, 3);
}
