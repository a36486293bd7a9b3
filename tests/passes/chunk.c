/* Chunks: a loss over logits and its gradients are the same whether the logits are whole or made a
 * part of the tokens at a time. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tests/passes/support.h"

typedef struct {
    const char *tokens;  /* axes of x beside embed */
    const char *product; /* "xw": x first; "wx": the weight first */
    bool smoothing, z_loss, softcap, bias, tied, gathered;
} variant;

#define MAP1(op, a) ml_map1(f->g, ML_OP_##op, a)
#define MAP2(op, a, b) ml_map2(f->g, ML_OP_##op, a, b)
#define NUMBER(x) ml_const(f->g, ML_F64, x)
enum { VOCAB = 12 };

static const variant *current;

static ml_ref logits_of(fixture *f, ml_ref x, ml_ref w) {
    ml_axis embed = fixture_axis(f, "embed");
    bool turned = strcmp(current->product, "wx") == 0;
    ml_ref y = ml_dot(f->g, turned ? w : x, turned ? x : w, &embed, 1, ML_F64);
    if (current->bias) y = MAP2(ADD, y, fixture_input(f, ML_F64, "vocab12", -1, 1));
    if (current->softcap) y = MAP2(MUL, NUMBER(3), MAP1(TANH, MAP2(DIV, y, NUMBER(3))));
    return y;
}

/* As stdlib's cross_entropy writes it; targets of 0 are ignored. */
static ml_ref loss_of(fixture *f, ml_ref y, ml_ref targets) {
    ml_axis vocab = fixture_axis(f, "vocab");
    ml_ref top = ml_reduce(f->g, ML_OP_MAX, y, &vocab, 1);
    ml_ref sum = ml_reduce(f->g, ML_OP_SUM, MAP1(EXP, MAP2(SUB, y, top)), &vocab, 1);
    ml_ref lse = MAP2(ADD, MAP1(LOG, sum), top);
    ml_ref all = ml_broadcast(f->g, ml_iota(f->g, vocab, VOCAB), ml_graph_type(f->g, y));
    ml_ref hit = ml_where(f->g, MAP2(EQ, all, targets), y, NUMBER(0));
    ml_ref picked = current->gathered ? ml_gather(f->g, y, targets, vocab)
                                      : ml_reduce(f->g, ML_OP_SUM, hit, &vocab, 1);
    ml_ref loss = MAP2(SUB, lse, picked);
    if (current->smoothing)
        loss = MAP2(SUB, loss, MAP2(MUL, NUMBER(0.01), ml_reduce(f->g, ML_OP_SUM, y, &vocab, 1)));
    if (current->z_loss) loss = MAP2(ADD, loss, MAP2(MUL, NUMBER(1e-2), MAP2(MUL, lse, lse)));
    ml_ref counts = MAP2(NE, targets, ml_const_int(f->g, ML_I32, 0));
    loss = ml_where(f->g, counts, loss, NUMBER(0));
    ml_type type = *ml_graph_type(f->g, loss);
    return ml_reduce(f->g, ML_OP_SUM, loss, type.axis, type.rank);
}

static void check_variant(fixture *f) {
    char axes[64];
    ml_axis vocab = fixture_axis(f, "vocab");
    snprintf(axes, sizeof axes, "%s embed5", current->tokens);
    ml_ref x = fixture_input(f, ML_F64, axes, -1, 1);
    ml_ref w = fixture_input(f, ML_F64, "vocab12 embed5", -1, 1);
    ml_ref targets = fixture_index(f, current->tokens, VOCAB);
    if (current->tied) x = MAP2(ADD, x, ml_gather(f->g, w, targets, vocab));
    ml_ref loss = loss_of(f, logits_of(f, MAP1(SIN, x), w), targets);
    fixture_check_gradients(f, loss); /* "chunk" is among the passes that must not change them */
    ml_ref roots[2] = {loss};
    ml_autodiff(f->g, loss, &w, 1, &roots[1]);
    int whole = fixture_count_after(f, "simplify", roots, 2, ML_OP_DOT);
    int parts = fixture_count_after(f, "chunk", roots, 2, ML_OP_DOT);
    CHECK_EQ_INT(whole, current->tied ? 3 : 2);
    CHECK(parts >= 2 * whole && parts % whole == 0);
}

TEST(passes, chunks_of_a_loss) {
    static const variant variants[] = {
        {"b4 s6", "xw"},
        {"b4 s6", "wx", .smoothing = true, .z_loss = true},
        {"s8", "xw", .softcap = true, .bias = true},
        {"b5 s3", "xw", .tied = true, .bias = true},
        {"b2 c2 s4", "wx", .tied = true, .softcap = true, .z_loss = true},
        {"b4 s6", "xw", .gathered = true},
    };
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        current = &variants[i];
        fixture_run(check_variant, 100 + i);
    }
}

/* What must be whole for somebody stays whole: logits that are shown, a loss that its own gradient
 * depends on, a product whose result the model uses. */
static void check_whole(fixture *f) {
    static const variant plain = {"b4 s6", "xw"};
    ml_axis hidden = fixture_axis(f, "vocab");
    current = &plain;
    ml_ref x = fixture_input(f, ML_F64, "b4 s6 embed5", -1, 1);
    ml_ref w = fixture_input(f, ML_F64, "vocab12 embed5", -1, 1);
    ml_ref targets = fixture_index(f, "b4 s6", VOCAB), y = logits_of(f, x, w);
    ml_ref shown[3] = {loss_of(f, y, targets), y};
    ml_autodiff(f->g, shown[0], &w, 1, &shown[2]);
    CHECK_EQ_INT(fixture_count_after(f, "chunk", shown, 3, ML_OP_DOT), 2);
    ml_ref squared[2] = {MAP2(MUL, shown[0], shown[0])};
    ml_autodiff(f->g, squared[0], &w, 1, &squared[1]);
    CHECK_EQ_INT(fixture_count_after(f, "chunk", squared, 2, ML_OP_DOT), 2);
    ml_ref next = ml_dot(f->g, MAP1(TANH, y), w, &hidden, 1, ML_F64);
    ml_ref through[2] = {fixture_loss(f, MAP1(SIN, next))};
    ml_autodiff(f->g, through[0], &w, 1, &through[1]);
    int dots = fixture_count_after(f, "simplify", through, 2, ML_OP_DOT);
    CHECK_EQ_INT(fixture_count_after(f, "chunk", through, 2, ML_OP_DOT), dots);
}

TEST(passes, no_chunks_of_what_is_whole) {
    fixture_run(check_whole, 9);
}

/* `count` microbatches, one after the other: a feed-forward with a large hidden tensor and its
 * residual, logits, their loss and the weights' gradients. Three roots of each. */
static void add_microbatches(fixture *f, int count, ml_ref *roots) {
    static const variant plain = {"b4 s6", "xw"};
    ml_axis embed = fixture_axis(f, "embed"), hidden = fixture_axis(f, "hidden");
    ml_ref x = fixture_input(f, ML_F64, "b4 s6 embed5", -1, 1);
    ml_ref up = fixture_input(f, ML_F64, "embed5 hidden14", -1, 1);
    ml_ref down = fixture_input(f, ML_F64, "hidden14 embed5", -1, 1);
    ml_ref w = fixture_input(f, ML_F64, "vocab12 embed5", -1, 1);
    ml_ref targets = fixture_index(f, "b4 s6", VOCAB), weights[2] = {up, w};
    current = &plain;
    for (int i = 0; i < count; i++) {
        ml_ref part = MAP2(MUL, x, NUMBER(1 + 0.01 * i));
        ml_ref inner = MAP1(TANH, ml_dot(f->g, part, up, &embed, 1, ML_F64));
        ml_ref y = MAP2(ADD, part, ml_dot(f->g, inner, down, &hidden, 1, ML_F64));
        ml_ref mean = ml_reduce(f->g, ML_OP_SUM, y, &embed, 1);
        roots[3 * i] = loss_of(f, logits_of(f, MAP2(SUB, y, mean), w), targets);
        ml_autodiff(f->g, roots[3 * i], weights, 2, &roots[3 * i + 1]);
    }
}

/* Of each microbatch the three products of the loss are cut, those of the feed-forward are not. */
static void check_many(fixture *f) {
    enum { COUNT = 3 };
    ml_ref roots[3 * COUNT];
    add_microbatches(f, COUNT, roots);
    fixture_check_pass(f, "chunk", roots, 3 * COUNT, 1e-9);
    int whole = fixture_count_after(f, "simplify", roots, 3 * COUNT, ML_OP_DOT);
    int chunks = fixture_count_after(f, "chunk", roots, 3 * COUNT, ML_OP_DOT) - whole;
    CHECK_EQ_INT(whole, 7 * COUNT);
    CHECK(chunks > 0 && chunks % (3 * COUNT) == 0);
}

TEST(passes, chunks_of_many_losses) {
    fixture_run(check_many, 11);
}

/* `count` layers, one into the other, whose hidden tensors are large, and one loss. */
static void add_layers(fixture *f, int count, ml_ref *roots) {
    static const variant plain = {"b4 s6", "xw"};
    ml_axis embed = fixture_axis(f, "embed"), hidden = fixture_axis(f, "hidden");
    ml_ref x = fixture_input(f, ML_F64, "b4 s6 embed5", -1, 1);
    ml_ref up = fixture_input(f, ML_F64, "embed5 hidden14", -1, 1);
    ml_ref down = fixture_input(f, ML_F64, "hidden14 embed5", -1, 1);
    ml_ref w = fixture_input(f, ML_F64, "vocab12 embed5", -1, 1);
    ml_ref weights[3] = {up, down, w};
    current = &plain;
    for (int i = 0; i < count; i++) {
        ml_ref scale = ml_reduce(f->g, ML_OP_SUM, MAP2(MUL, x, x), &embed, 1);
        ml_ref norm = MAP2(DIV, x, MAP2(ADD, scale, NUMBER(1 + i)));
        ml_ref inner = ml_dot(f->g, norm, up, &embed, 1, ML_F64);
        ml_ref top = ml_reduce(f->g, ML_OP_SUM, inner, &hidden, 1);
        inner = MAP1(TANH, MAP2(SUB, inner, top));
        x = MAP2(ADD, x, ml_dot(f->g, inner, down, &hidden, 1, ML_F64));
    }
    roots[0] = loss_of(f, logits_of(f, x, w), fixture_index(f, "b4 s6", VOCAB));
    ml_autodiff(f->g, roots[0], weights, 3, roots + 1);
}

typedef struct {
    const char *what;
    void (*add)(fixture *f, int count, ml_ref *roots);
    int roots, roots_each, cut; /* cut: products that are made in chunks, at the least */
} program;

static double seconds_for(fixture *f, const program *p, int count) {
    int root_count = p->roots + p->roots_each * count;
    ml_ref *roots = ML_NEW_ARRAY(f->arena, ml_ref, root_count);
    p->add(f, count, roots);
    int whole = fixture_count_after(f, "simplify", roots, root_count, ML_OP_DOT);
    clock_t began = clock();
    int dots = fixture_count_after(f, "chunk", roots, root_count, ML_OP_DOT);
    double seconds = (double)(clock() - began) / CLOCKS_PER_SEC;
    CHECK(dots >= whole + p->cut);
    return seconds;
}

/* One run cuts all of them. A run for each, as it once was, takes 64 times as long for 8 times as
 * many. Processor time, so that a busy machine does not matter. */
static void check_scaling(fixture *f) {
    static const program programs[] = {{"losses", add_microbatches, 0, 3, 3},
                                       {"layers", add_layers, 4, 0, 3}};
    for (int i = 0; i < 2; i++) {
        double few = seconds_for(f, &programs[i], 50), many = seconds_for(f, &programs[i], 400);
        EXPECT(!(many > 0.25 && many > 24 * few), "chunks: %.3f s for 50 %s, %.3f s for 400", few,
               programs[i].what, many);
    }
}

TEST(passes, chunks_in_linear_time) {
    fixture_run(check_scaling, 12);
}
