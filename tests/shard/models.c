/* A transformer's whole training step (two blocks, tied embeddings, cross entropy, clipping, AdamW)
 * under every kind of layout, alone and combined: loss, gradient norm and new states are those of
 * one rank. What layouts move is counted. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "runtime/ops/attention/attention.h"
#include "tests/shard/support.h"

typedef struct {
    fixture *f;
    ml_graph *g;
    ml_dtype dtype;
    int kv_heads;
    bool sixes; /* a batch of 6, not 8 */
    bool large; /* of real size: its states have no values */
    ml_roots roots;
    ml_ref tokens, *states; /* parameters */
    int count;
} model;

static ml_axis axis(model *m, const char *name) {
    return fixture_axis(m->f, name);
}
static ml_ref map2(model *m, ml_op op, ml_ref a, ml_ref b) {
    return ml_map2(m->g, op, a, b);
}
static ml_ref number(model *m, double value) {
    return ml_const(m->g, m->dtype, value);
}
static ml_ref sum(model *m, ml_ref x, const char *name) {
    ml_axis a = axis(m, name);
    return ml_reduce(m->g, ML_OP_SUM, x, &a, 1);
}
static ml_ref dot(model *m, ml_ref a, ml_ref b, const char *over) {
    ml_type axes = fixture_type(m->f, m->dtype, over);
    return ml_dot(m->g, a, b, axes.axis, axes.rank, m->dtype);
}
/* Real sizes: embed 4096, ffn 8192, vocab 32768, seq 4096, head_dim 128, 32 heads. */
static ml_type shape(model *m, ml_dtype dtype, const char *axes) {
    static const struct {
        const char *name;
        int64_t times;
    } real[] = {{"batch", 20}, {"embed", 256},  {"ffn", 256},     {"vocab", 1024}, {"seq", 512},
                {"heads", 4},  {"kv_heads", 4}, {"head_dim", 64}, {"kv_seq", 512}};
    ml_type type = fixture_type(m->f, dtype, axes);
    for (int i = 0; i < type.rank && m->large; i++)
        for (int k = 0; k < 9; k++)
            if (type.axis[i] == axis(m, real[k].name)) type.size[i] *= real[k].times;
    return type;
}
static ml_ref state(model *m, const char *axes) {
    if (!m->large) return fixture_state(m->f, m->dtype, axes);
    ml_state made = {.name = axes, .type = shape(m, m->dtype, axes)};
    int64_t id = ml_graph_add_state(m->g, &made);
    return ml_graph_add(m->g, ML_OP_STATE, NULL, 0, &id, 1, NULL);
}
static ml_ref token_input(model *m) {
    if (!m->large) return fixture_index(m->f, m->sixes ? "batch6 seq8" : "batch8 seq8", 32);
    int64_t id = ml_graph_add_input(m->g, &(ml_input){"tokens", shape(m, ML_I32, "batch8 seq8")});
    return ml_graph_add(m->g, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
}
static ml_ref parameter(model *m, const char *axes) {
    return m->states[m->count++] = state(m, axes);
}

static ml_ref norm(model *m, ml_ref x) {
    ml_ref square = map2(m, ML_OP_DIV, sum(m, map2(m, ML_OP_MUL, x, x), "embed"), number(m, 16));
    ml_ref scale = ml_map1(m->g, ML_OP_RSQRT, map2(m, ML_OP_ADD, square, number(m, 1e-5)));
    return map2(m, ML_OP_MUL, map2(m, ML_OP_MUL, x, scale), parameter(m, "embed16"));
}

/* x times the cosine of its position: something that needs the global one. */
static ml_ref rotate(model *m, ml_ref x, int64_t seq) {
    ml_ref position =
        ml_cast(m->g, ml_iota(m->g, axis(m, "seq"), m->large ? 512 * seq : seq), m->dtype);
    return map2(m, ML_OP_MUL, x, ml_map1(m->g, ML_OP_COS, position));
}

static ml_ref attend(model *m, ml_ref x) {
    bool grouped = m->kv_heads != 8;
    char shape[64];
    snprintf(shape, sizeof shape, "embed16 %s%d head_dim2", grouped ? "kv_heads" : "heads",
             m->kv_heads);
    ml_ref q = rotate(m, dot(m, x, parameter(m, "embed16 heads8 head_dim2"), "embed16"), 8);
    ml_ref k = rotate(m, dot(m, x, parameter(m, shape), "embed16"), 8);
    ml_ref v = dot(m, x, parameter(m, shape), "embed16");
    ml_ref sources[] = {q, ml_rename(m->g, k, axis(m, "seq"), axis(m, "kv_seq")),
                        ml_rename(m->g, v, axis(m, "seq"), axis(m, "kv_seq"))};
    ml_attention_args args = {.seq = axis(m, "seq"),
                              .kv_seq = axis(m, "kv_seq"),
                              .heads = axis(m, "heads"),
                              .kv_heads = axis(m, grouped ? "kv_heads" : "heads"),
                              .head_dim = axis(m, "head_dim"),
                              .causal = true,
                              .scale = 0.7};
    ml_ref o = ml_attention(m->g, sources, 3, &args);
    return dot(m, o, parameter(m, "heads8 head_dim2 embed16"), "heads8 head_dim2");
}

static ml_ref feed_forward(model *m, ml_ref x) {
    ml_ref h = map2(m, ML_OP_ADD, dot(m, x, parameter(m, "embed16 ffn32"), "embed16"),
                    parameter(m, "ffn32"));
    h = map2(m, ML_OP_MUL, h, ml_map1(m->g, ML_OP_SIGMOID, h));
    return map2(m, ML_OP_ADD, dot(m, h, parameter(m, "ffn32 embed16"), "ffn32"),
                parameter(m, "embed16"));
}

/* The sum over all tokens of logsumexp(logits) - logits[target]. */
static ml_ref cross_entropy(model *m, ml_ref logits, ml_ref targets) {
    ml_axis vocab = axis(m, "vocab");
    ml_ref largest =
        ml_map1(m->g, ML_OP_STOP_GRADIENT, ml_reduce(m->g, ML_OP_MAX, logits, &vocab, 1));
    ml_ref shifted = map2(m, ML_OP_SUB, logits, largest);
    ml_ref total = ml_map1(m->g, ML_OP_LOG, sum(m, ml_map1(m->g, ML_OP_EXP, shifted), "vocab"));
    ml_ref loss = map2(m, ML_OP_SUB, total, ml_gather(m->g, shifted, targets, vocab));
    return sum(m, sum(m, loss, "seq"), "batch");
}

static ml_ref forward(model *m, int layers) {
    ml_ref tokens = m->tokens = token_input(m), targets = token_input(m);
    ml_ref table = parameter(m, "vocab32 embed16");
    ml_ref x = ml_gather(m->g, table, tokens, axis(m, "vocab"));
    x = map2(m, ML_OP_ADD, x, parameter(m, "seq8 embed16"));
    for (int i = 0; i < layers; i++) {
        x = map2(m, ML_OP_ADD, x, attend(m, norm(m, x)));
        x = map2(m, ML_OP_ADD, x, feed_forward(m, norm(m, x)));
    }
    return cross_entropy(m, dot(m, norm(m, x), table, "embed16"), targets);
}

static void update(model *m, ml_ref old, ml_ref value) {
    m->roots.updates[m->roots.update_count++] =
        (ml_update){(uint32_t)ml_graph_args(m->g, old)[0], value};
}

static ml_ref extra_state(model *m, ml_state_kind kind, const ml_type *type) {
    ml_state made = {.name = "more", .kind = kind, .type = *type};
    int64_t id = ml_graph_add_state(m->g, &made);
    if (!m->large) {
        int64_t count = ml_type_elements(type);
        double *values = ML_NEW_ARRAY(m->f->arena, double, count);
        for (int64_t i = 0; i < count; i++) values[i] = fixture_uniform(m->f, -1, 1);
        m->f->states[id] = values;
        m->f->state_count = (int)id + 1;
    }
    return ml_graph_add(m->g, ML_OP_STATE, NULL, 0, &id, 1, NULL);
}

static void adamw(model *m, ml_ref w, ml_ref gradient, ml_ref scale) {
    const ml_type type = *ml_graph_type(m->g, w);
    ml_ref first = extra_state(m, ML_STATE_OPTIMIZER, &type),
           second = extra_state(m, ML_STATE_OPTIMIZER, &type), moments[] = {first, second};
    ml_ref g = map2(m, ML_OP_MUL, gradient, scale);
    ml_ref squares = map2(m, ML_OP_MUL, second, second); /* second moments are not negative */
    first = map2(m, ML_OP_ADD, map2(m, ML_OP_MUL, first, number(m, 0.9)),
                 map2(m, ML_OP_MUL, g, number(m, 0.1)));
    squares = map2(m, ML_OP_ADD, map2(m, ML_OP_MUL, squares, number(m, 0.95)),
                   map2(m, ML_OP_MUL, map2(m, ML_OP_MUL, g, g), number(m, 0.05)));
    ml_ref root = map2(m, ML_OP_ADD, ml_map1(m->g, ML_OP_SQRT, squares), number(m, 1e-3));
    ml_ref step =
        map2(m, ML_OP_ADD, map2(m, ML_OP_DIV, first, root), map2(m, ML_OP_MUL, w, number(m, 0.1)));
    update(m, w, map2(m, ML_OP_SUB, w, map2(m, ML_OP_MUL, step, number(m, 0.01))));
    update(m, moments[0], first);
    update(m, moments[1], squares);
}

/* With accumulation a step is microbatches, which add up gradients, and an update. */
typedef enum { FORWARD, GRADIENTS, STEP, MICROBATCH, UPDATE } extent;

static ml_ref sum_of_gradients(model *m, int i) {
    ml_type type = *ml_graph_type(m->g, m->states[i]);
    if (type.dtype == ML_BF16) type.dtype = ML_F32;
    return extra_state(m, ML_STATE_GRADIENT, &type);
}

static void add_gradient(model *m, int i, ml_ref gradient) {
    ml_ref sum = sum_of_gradients(m, i);
    ml_dtype dtype = (ml_dtype)ml_graph_type(m->g, sum)->dtype;
    ml_ref zero = ml_const(m->g, dtype, 0),
           seen = ml_reduce(m->g, ML_OP_MAX, m->tokens, ml_graph_type(m->g, m->tokens)->axis, 2);
    ml_ref first = ml_map2(m->g, ML_OP_GT, seen, ml_const_int(m->g, ML_I32, 16));
    ml_ref before = ml_where(m->g, first, zero, sum);
    update(m, sum, ml_map2(m->g, ML_OP_ADD, before, ml_cast(m->g, gradient, dtype)));
}

static void clip_and_update(model *m, const ml_ref *gradients) {
    ml_ref squares = 0;
    for (int i = 0; i < m->count; i++) {
        ml_ref square = map2(m, ML_OP_MUL, gradients[i], gradients[i]);
        ml_type t = *ml_graph_type(m->g, square);
        square = ml_reduce(m->g, ML_OP_SUM, square, t.axis, t.rank);
        squares = squares ? map2(m, ML_OP_ADD, squares, square) : square;
    }
    ml_ref length = ml_map1(m->g, ML_OP_SQRT, squares);
    ml_ref scale = map2(m, ML_OP_MINIMUM, map2(m, ML_OP_DIV, number(m, 1), length), number(m, 1));
    for (int i = 0; i < m->count; i++) adamw(m, m->states[i], gradients[i], scale);
    m->roots.outputs[m->roots.output_count++] = length;
}

/* Outputs: the loss and, of a step, the gradient norm. */
static void build_model(model *m, int layers, extent how) {
    int most = 10 * layers + 8;
    m->g = m->f->g;
    m->states = ML_NEW_ARRAY(m->f->arena, ml_ref, most);
    m->roots.outputs = ML_NEW_ARRAY(m->f->arena, ml_ref, 2);
    m->roots.updates = ML_NEW_ARRAY(m->f->arena, ml_update, 3 * most);
    ml_ref loss = forward(m, layers), *gradients = ML_NEW_ARRAY(m->f->arena, ml_ref, most);
    m->roots.outputs[m->roots.output_count++] = loss;
    if (how == FORWARD) return;
    for (int i = 0; i < m->count && how == UPDATE; i++)
        gradients[i] = ml_cast(m->g, sum_of_gradients(m, i), m->dtype);
    if (how == UPDATE)
        m->roots.output_count = 0;
    else
        ml_autodiff(m->g, loss, m->states, m->count, gradients);
    if (how == STEP || how == UPDATE) clip_and_update(m, gradients);
    for (int i = 0; i < m->count && how == GRADIENTS; i++) update(m, m->states[i], gradients[i]);
    for (int i = 0; i < m->count && how == MICROBATCH; i++) add_gradient(m, i, gradients[i]);
}

#define TP "heads kv_heads ffn vocab"
/* Listed axes of params and acts. */
static const char *const layouts[] = {
    "dp2 acts batch",
    "dp4 acts batch",
    "dp4 acts batch flat",
    "dp4 acts batch params embed",
    "tp2 params " TP " acts " TP,
    "tp4 params " TP " acts " TP,
    "tp2 params " TP " acts " TP " seq",
    "tp4 params " TP " acts " TP " seq",
    "cp2 acts seq",
    "cp4 acts seq kv_seq",
    "cp2 acts heads kv_heads seq",
    "cp4 acts heads kv_heads seq",
    "dp2 acts batch; tp2 params " TP " acts " TP,
    "dp2 acts batch flat; tp2 params " TP " acts " TP " seq",
    "fsdp2 acts batch params embed; tp2 params " TP " acts " TP " seq",
    "fsdp4 acts batch params embed; tp2 params " TP " acts " TP,
    "dp2 acts batch; fsdp2 acts batch params embed",
    "dp2 acts batch; cp2 acts seq; tp2 params " TP " acts " TP,
    "dp2 acts batch; cp2 acts seq kv_seq; tp2 params " TP " acts " TP,
    "dp2 acts batch; cp2 acts heads kv_heads seq; tp2 params " TP " acts " TP,
    "dp2 acts batch flat; cp2 acts seq kv_seq; tp2 params " TP " acts " TP " seq",
    "dp2 acts batch; cp2 acts seq flat",
    "cp2 acts seq; tp2 params " TP " acts " TP " seq",
    "tp2 params " TP " acts " TP "; dp2 acts batch",
    "tp2 params " TP " acts " TP " seq; cp2 acts seq kv_seq",
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

static void every_layout(fixture *f) {
    model m = {.f = f, .dtype = ML_F64, .kv_heads = 4};
    build_model(&m, 2, STEP);
    for (int i = 0; i < LAYOUTS; i++) {
        ml_layout layout = shard_layout(f, layouts[i]);
        snprintf(f->label, sizeof f->label, "transformer, layout %d", i);
        (void)shard_check(f, &layout, &m.roots, 1e-9, i % 4 == 0);
    }
}
TEST(shard_models, transformer) {
    fixture_run(every_layout, 3);
}

/* ZeRO-1 over ranks that divide no axis of any parameter. */
static void uneven(fixture *f) {
    static const char *const odd[] = {
        "dp3 acts batch flat",
        "dp6 acts batch flat",
        "dp3 acts batch flat; tp2 params " TP " acts " TP " seq",
        "tp2 params " TP " acts " TP "; dp3 acts batch flat",
        "dp3 acts batch flat; fsdp2 acts batch params embed",
        "dp3 acts batch flat; cp2 acts seq kv_seq flat",
        "dp3 flat",
    };
    static const extent programs[] = {STEP, MICROBATCH, UPDATE};
    for (int k = 0; k < 3; k++) {
        model m = {.f = f, .dtype = ML_F64, .kv_heads = 4, .sixes = true};
        build_model(&m, 1, programs[k]);
        for (int i = 0; i < 7; i++) {
            ml_layout layout = shard_layout(f, odd[i]);
            snprintf(f->label, sizeof f->label, "uneven, program %d, layout %d", k, i);
            (void)shard_check(f, &layout, &m.roots, 1e-9, true);
        }
    }
}
TEST(shard_models, uneven) {
    fixture_run(uneven, 3);
}

/* Sums of gradients: what the ranks' parts add up to, and what an update makes of them. */
static void accumulated(fixture *f) {
    static const extent programs[] = {MICROBATCH, UPDATE};
    for (int k = 0; k < 2; k++) {
        model m = {.f = f, .dtype = ML_F64, .kv_heads = 4};
        build_model(&m, 1, programs[k]);
        for (int i = k; i < LAYOUTS; i += 2) {
            ml_layout layout = shard_layout(f, layouts[i]);
            snprintf(f->label, sizeof f->label, "accumulation, layout %d", i);
            (void)shard_check(f, &layout, &m.roots, 1e-9, i % 4 == 0);
        }
    }
}
TEST(shard_models, accumulation) {
    fixture_run(accumulated, 3);
}

/* Fewer key/value heads than ranks: refused while listed, right when left out. */
static void few_kv_heads(fixture *f) {
    model m = {.f = f, .dtype = ML_F64, .kv_heads = 2};
    build_model(&m, 1, STEP);
    static const char *const allowed[] = {
        "tp4 params heads ffn vocab acts heads ffn vocab",
        "tp4 params heads ffn vocab acts heads ffn vocab seq",
        "tp8 params heads ffn vocab acts heads ffn vocab",
        "tp2 params heads ffn vocab acts heads ffn vocab; cp2 acts seq kv_seq",
        "tp2 params heads ffn vocab acts heads ffn vocab; xp2 params heads ffn acts heads ffn",
    };
    for (int i = 0; i < 5; i++) {
        ml_layout layout = shard_layout(f, allowed[i]);
        (void)shard_check(f, &layout, &m.roots, 1e-9, false);
    }
}
TEST(shard_models, few_kv_heads) {
    fixture_run(few_kv_heads, 5);
}

/* ---- Traffic --------------------------------------------------------------------------------- */

/* Of a model with so many layers. */
static void traffic_of(const char *text, int layers, extent how, int over,
                       ml_traffic out[ML_COLLECTIVE_KINDS]) {
    fixture f = {.random = 1, .arena = ml_arena_new()};
    f.g = ml_graph_new();
    model m = {.f = &f, .dtype = ML_BF16, .kv_heads = 8, .large = true};
    build_model(&m, layers, how);
    ml_layout layout = shard_layout(&f, text);
    ml_roots local;
    ml_graph *g = shard_program(&f, &layout, &m.roots, &local);
    ml_traffic traffic[ML_MAX_MESH][ML_COLLECTIVE_KINDS];
    ml_shard_traffic(g, &layout, traffic);
    memcpy(out, traffic[over], sizeof traffic[over]);
    ml_graph_free(g);
    ml_graph_free(f.g);
    ml_arena_free(f.arena);
}

/* What one more layer costs over one mesh axis: collectives of each kind. */
static void per_layer(const char *text, extent how, int over,
                      const int expected[ML_COLLECTIVE_KINDS]) {
    static const char *const names[] = {"forward", "with gradients", "a whole step", "a microbatch",
                                        "an update"};
    ml_traffic two[ML_COLLECTIVE_KINDS], three[ML_COLLECTIVE_KINDS];
    traffic_of(text, 2, how, over, two);
    traffic_of(text, 3, how, over, three);
    for (int k = 0; k < ML_COLLECTIVE_KINDS; k++)
        EXPECT(CHECK_EQ_INT(three[k].count - two[k].count, expected[k]),
               "%s of one layer, %s, under %s", ml_collectives[k].label, names[how], text);
}

/* Kinds: all-reduce, all-gather, reduce-scatter, all-to-all, shift, reverse. */
#define COUNTS(...) ((const int[ML_COLLECTIVE_KINDS]){__VA_ARGS__})
TEST(shard_models, tensor_parallel_traffic) {
    /* Megatron's: an all-reduce after each half of a layer, and as many backward. */
    static const char tensor[] = "tp2 params " TP " acts " TP;
    per_layer(tensor, FORWARD, 0, COUNTS(2, 0, 0, 0, 0));
    per_layer(tensor, GRADIENTS, 0, COUNTS(4, 0, 0, 0, 0));
    /* With sequence parallelism; the inputs of products are gathered once, as is the gradient of
     * each half, and gradients of what acts on parts of the sequence (two gains, a bias) are
     * summed. */
    static const char sequence[] = "tp8 params " TP " acts " TP " seq";
    per_layer(sequence, FORWARD, 0, COUNTS(0, 2, 2, 0, 0));
    per_layer(sequence, GRADIENTS, 0, COUNTS(3, 4, 4, 0, 0));
}

TEST(shard_models, data_parallel_traffic) {
    per_layer("dp2 acts batch", FORWARD, 0, COUNTS(0, 0, 0, 0, 0));
    per_layer("dp2 acts batch", STEP, 0, COUNTS(10, 0, 0, 0, 0));
    /* ZeRO-1: gradients scattered, new parameters gathered; a scalar for the norm. */
    per_layer("dp8 acts batch flat", STEP, 0, COUNTS(0, 10, 10, 0, 0));
    /* Also what tensor parallelism cuts: inside of its parts. */
    per_layer("dp8 acts batch flat; tp4 params " TP " acts " TP, STEP, 0, COUNTS(0, 10, 10, 0, 0));
    /* FSDP: what is split is gathered for each pass; the bias of ffn is not split. */
    per_layer("dp8 acts batch params embed", FORWARD, 0, COUNTS(0, 9, 0, 0, 0));
    per_layer("dp8 acts batch params embed", STEP, 0, COUNTS(1, 17, 9, 0, 0));
}

/* Gradients are added up over ranks once a step, not with each microbatch. */
TEST(shard_models, accumulation_traffic) {
    per_layer("dp4 acts batch", MICROBATCH, 0, COUNTS(0, 0, 0, 0, 0));
    per_layer("dp4 acts batch", UPDATE, 0, COUNTS(10, 0, 0, 0, 0));
    per_layer("dp4 acts batch flat", MICROBATCH, 0, COUNTS(0, 0, 0, 0, 0));
    per_layer("dp4 acts batch flat", UPDATE, 0, COUNTS(0, 10, 10, 0, 0));
    /* Split as the parameters are: scattered at once, which keeps memory small. */
    per_layer("dp8 acts batch params embed", MICROBATCH, 0, COUNTS(0, 17, 9, 0, 0));
    per_layer("dp8 acts batch params embed", UPDATE, 0, COUNTS(1, 0, 0, 0, 0));
    /* Gains and a bias, of which each rank sees its part of the sequence. */
    per_layer("tp8 params " TP " acts " TP " seq", MICROBATCH, 0, COUNTS(0, 4, 4, 0, 0));
    per_layer("tp8 params " TP " acts " TP " seq", UPDATE, 0, COUNTS(3, 0, 0, 0, 0));
}

/* What is split as the parameters are is scattered where it is made, not where it is added: no more
 * than a few nodes lie between a product and the collective. */
TEST(shard_models, gradients_are_scattered_at_once) {
    static const extent programs[] = {STEP, MICROBATCH};
    for (int k = 0; k < 2; k++) {
        fixture f = {.random = 1, .arena = ml_arena_new()};
        f.g = ml_graph_new();
        model m = {.f = &f, .dtype = ML_BF16, .kv_heads = 8, .large = true};
        build_model(&m, 3, programs[k]);
        ml_layout layout = shard_layout(&f, "dp8 acts batch params embed");
        ml_roots local;
        ml_graph *g = shard_program(&f, &layout, &m.roots, &local);
        int scattered = 0;
        for (ml_ref n = 1; n < ml_graph_count(g); n++) {
            if (ml_graph_node(g, n)->op != ML_OP_REDUCE_SCATTER) continue;
            ml_ref made = ml_graph_source(g, n, 0);
            bool permuted = ml_graph_node(g, made)->op == ML_OP_PERMUTE;
            if (permuted) made = ml_graph_source(g, made, 0);
            CHECK(n - made <= 4);
            CHECK(!permuted || ml_graph_node(g, made)->op != ML_OP_DOT); /* made in its order */
            scattered++;
        }
        CHECK(scattered >= 3 * 9);
        ml_graph_free(g);
        ml_graph_free(f.g);
        ml_arena_free(f.arena);
    }
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* A thousand layers on ten thousand ranks. */
TEST(shard_models, scale) {
    fixture f = {.random = 1, .arena = ml_arena_new()};
    f.g = ml_graph_new();
    model m = {.f = &f, .dtype = ML_BF16, .kv_heads = 8, .large = true};
    build_model(&m, 1000, STEP);
    ml_layout layout = shard_layout(&f, "hsdp20 acts batch flat; fsdp8 acts batch params embed; "
                                        "cp8 acts seq; tp8 params " TP " acts " TP " seq");
    for (int i = 0; i < m.roots.update_count; i++) CHECK(m.roots.updates[i].value != 0);
    CHECK_EQ_INT(ml_layout_ranks(&layout), 10240);
    double start = seconds();
    ml_graph *g = ml_shard(f.g, &m.roots, &layout);
    double taken = seconds() - start;
    printf("%u nodes became %u in %.2f s\n", ml_graph_count(f.g), ml_graph_count(g), taken);
    CHECK(taken < 20);
    ml_graph_free(g);
    ml_graph_free(f.g);
    ml_arena_free(f.arena);
}

TEST(shard_models, context_parallel_traffic) {
    per_layer("cp2 acts heads kv_heads seq", FORWARD, 0, COUNTS(0, 0, 0, 4, 0));
    per_layer("cp2 acts heads kv_heads seq", GRADIENTS, 0, COUNTS(10, 0, 0, 8, 0));
    /* Causal halves are traded: q and o; do and dq in the backward pass. */
    per_layer("cp4 acts seq", FORWARD, 0, COUNTS(0, 2, 0, 0, 0, 2));
    per_layer("cp4 acts seq", GRADIENTS, 0, COUNTS(10, 2, 2, 0, 0, 4));
    /* k and v too, dk and dv. k and v go around again for the backward pass, with dk and dv. */
    per_layer("cp4 acts seq kv_seq", FORWARD, 0, COUNTS(0, 0, 0, 0, 6, 4));
    per_layer("cp4 acts seq kv_seq", GRADIENTS, 0, COUNTS(10, 0, 0, 0, 20, 9));
}
