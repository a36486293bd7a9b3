/* Lowering as pairs that one reads: a small graph, and the steps, kernel IR and schedules that it
 * becomes. Each case is compared with tests/lower/NAME.out; UPDATE_GOLDEN=1 rewrites that file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/lower/support.h"

/* (x - mean) * rsqrt(variance) * gain + bias: one kernel, three passes over each row. */
static void norm(void *context) {
    piece *p = context;
    output(p, layer_norm(p, input(p, ML_F32, "se", SIZES(2048, 768)), 768));
}

static void softmax(void *context) {
    piece *p = context;
    ml_ref x = ml_cast(p->g, input(p, ML_BF16, "st", SIZES(2048, 1024)), ML_F32);
    ml_axis t = axis(p, "t");
    ml_ref e = FN(EXP, SUB(x, ml_reduce(p->g, ML_OP_MAX, x, &t, 1)));
    output(p, ml_cast(p->g, DIV(e, ml_reduce(p->g, ML_OP_SUM, e, &t, 1)), ML_BF16));
}

/* The loss of logits in bf16, and their gradient: rows in shared memory, one kernel for both, and
 * one that adds up the chunks' sums. */
static void cross_entropy(void *context) {
    piece *p = context;
    ml_ref logits = input(p, ML_BF16, "sv", SIZES(4096, 50304)), gradient;
    ml_ref target = input(p, ML_I32, "s", SIZES(4096)), x = ml_cast(p->g, logits, ML_F32);
    ml_axis v = axis(p, "v"), s = axis(p, "s");
    ml_type whole = *ml_graph_type(p->g, logits);
    whole.dtype = ML_I32;
    ml_ref high = FN(STOP_GRADIENT, ml_reduce(p->g, ML_OP_MAX, x, &v, 1));
    ml_ref sum = ml_reduce(p->g, ML_OP_SUM, FN(EXP, SUB(x, high)), &v, 1);
    ml_ref numbers = ml_broadcast(p->g, ml_iota(p->g, v, 50304), &whole);
    ml_ref here = ml_map2(p->g, ML_OP_EQ, numbers, target);
    ml_ref picked = ml_reduce(p->g, ML_OP_SUM, ml_where(p->g, here, x, number(p, 0)), &v, 1);
    ml_ref loss = ml_reduce(p->g, ML_OP_SUM, SUB(ADD(FN(LOG, sum), high), picked), &s, 1);
    ml_autodiff(p->g, loss, &logits, 1, &gradient);
    output(p, loss);
    output(p, gradient);
}

/* A product with a bias, which the library adds, and GELU, which a kernel computes. */
static void product(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_BF16, "se", SIZES(2048, 768));
    ml_ref y = dot(p, x, input(p, ML_BF16, "ef", SIZES(768, 3072)), "e");
    ml_ref z = ADD(y, input(p, ML_BF16, "f", SIZES(3072)));
    output(p, ml_cast(p->g, gelu(p, ml_cast(p->g, z, ML_F32)), ML_BF16));
}

/* Movements: an axis split into heads and a permutation cost nothing before a product; an operand
 * that no BLAS takes is copied first; what is sliced and broadcast is read where it is used. */
static void views(void *context) {
    piece *p = context;
    ml_axis e = axis(p, "e"), h = axis(p, "h"), d = axis(p, "d"), s = axis(p, "s");
    ml_ref x = input(p, ML_F32, "bse", SIZES(4, 64, 96));
    ml_ref heads = ml_split(p->g, x, e, h, 6, d, 16);
    ml_ref w = input(p, ML_F32, "hdf", SIZES(6, 16, 32));
    ml_axis over[2] = {h, d};
    output(p, ml_dot(p->g, heads, w, over, 2, ML_F32));
    output(p, ml_dot(p->g, heads, input(p, ML_F32, "dhg", SIZES(16, 6, 32)), over, 2, ML_F32));
    ml_ref keys = ml_rename(p->g, heads, s, axis(p, "t"));
    output(p, dot(p, heads, keys, "d"));
    output(p, ADD(ml_slice(p->g, x, s, 1, 63), input(p, ML_F32, "e", SIZES(96))));
}

/* The gradient of a gain: sums over rows, by chunks, which a second kernel adds up. */
static void column_sums(void *context) {
    piece *p = context;
    ml_ref x = input(p, ML_BF16, "se", SIZES(16384, 768)),
           y = input(p, ML_BF16, "se", SIZES(16384, 768));
    ml_axis s = axis(p, "s");
    ml_ref product = MUL(ml_cast(p->g, x, ML_F32), ml_cast(p->g, y, ML_F32));
    output(p, ml_reduce(p->g, ML_OP_SUM, product, &s, 1));
}

static const struct {
    const char *name;
    ml_target_kind kind;
    void (*build)(void *piece);
} cases[] = {
    {"norm", ML_TARGET_CUDA, norm},
    {"norm_cpu", ML_TARGET_C, norm},
    {"softmax", ML_TARGET_CUDA, softmax},
    {"cross_entropy", ML_TARGET_CUDA, cross_entropy},
    {"product", ML_TARGET_CUDA, product},
    {"views", ML_TARGET_CUDA, views},
    {"column_sums", ML_TARGET_CUDA, column_sums},
};

static void print_launch(const ml_schedule *s, uint32_t i, ml_text *out) {
    const ml_kernel *k = s->steps.at[i].kernel;
    if (k == NULL) return;
    ml_text_add(out, "step %u: %s, ", i, k->label);
    if (s->target->kind == ML_TARGET_CUDA)
        ml_text_add(out, "%u blocks of %u threads, %u bytes of shared memory\n", k->grid[0],
                    k->block, k->shared_bytes);
    else
        ml_text_add(out, "%lld units, a thread for %lld\n", (long long)k->units,
                    (long long)k->grain);
    ml_kernel_print_schedule(k, out);
}

static void compare(const char *name, const char *actual) {
    char path[256], expected[1 << 16] = "";
    snprintf(path, sizeof path, "tests/lower/%s.out", name);
    FILE *file = fopen(path, getenv("UPDATE_GOLDEN") ? "w" : "r");
    REQUIRE(file != NULL);
    if (getenv("UPDATE_GOLDEN"))
        fputs(actual, file);
    else
        expected[fread(expected, 1, sizeof expected - 1, file)] = 0;
    fclose(file);
    if (!getenv("UPDATE_GOLDEN")) CHECK_TEXT(actual, expected);
}

TEST(lower, goldens) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        piece p;
        lower_for(&p, cases[i].kind, cases[i].build);
        ml_roots roots = {.outputs = p.outputs, .output_count = p.output_count};
        ml_text text = {.arena = p.arena};
        ml_text_add(&text, "GRAPH\n");
        ml_graph_print(p.simple, &roots, &text);
        ml_text_add(&text, "\nSTEPS\n");
        ml_lower_print(p.s, &text);
        ml_text_add(&text, "\nSCHEDULES\n");
        for (uint32_t k = 0; k < p.s->steps.count; k++) print_launch(p.s, k, &text);
        compare(cases[i].name, text.text);
        free_piece(&p);
    }
}
