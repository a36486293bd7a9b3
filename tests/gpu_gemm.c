/* Products on the GPU: every orientation, batches, odd sizes and alignments, sums and biases. */
#include "tests/gpu_support.h"

typedef struct {
    const char *a, *b, *reduced; /* axes of the operands; names of those summed over */
} product;

static const product products[] = {
    {"m64 k32", "k32 n48", "k"},
    {"k32 m64", "n48 k32", "k"},
    {"k32 m64", "k32 n48", "k"},
    {"m64 k32", "n48 k32", "k"},
    {"m37 k19", "k19 n23", "k"}, /* no multiple of 16 bytes */
    {"k19 m37", "n23 k19", "k"},
    {"m1 k64", "k64 n33", "k"},
    {"m33 k64", "k64", "k"},
    {"k64", "k64 n33", "k"},
    {"m16 k1", "k1 n24", "k"},
    {"k128", "k128", "k"},
    {"b3 m16 k8", "b3 k8 n24", "k"},
    {"m16 b3 k8", "k8 n24 b3", "k"},
    {"b3 h2 m16 k8", "h2 k8 n24 b3", "k"},
    {"b3 h2 m16 k8", "b3 n24 h2 k8", "k"},
    {"m5 k3 j4", "j4 k3 n7", "k j"},
    {"b2 s64 e128", "e128 h4 d32", "e"},
    {"b2 s64 h4 d32", "h4 d32 e128", "h d"},
    {"b2 s64 e128", "b2 s64 f256", "b s"},
    {"m512 k1024", "k1024 n768", "k"},
    {"m8 k16384", "k16384 n8", "k"}, /* tempts the library to split the sum */
};
enum { PRODUCTS = sizeof products / sizeof *products };

static int reduced_axes(gpu_case *c, const char *text, ml_axis *axes) {
    int count = 0;
    for (; *text; text++) {
        char name[2] = {*text, 0};
        if (*text != ' ') axes[count++] = gpu_axis(c, name);
    }
    return count;
}

static ml_ref dot(gpu_case *c, const product *p, ml_dtype in, ml_dtype out) {
    ml_axis axes[ML_MAX_AXES];
    ml_ref a = gpu_input(c, in, p->a, -1, 1), b = gpu_input(c, in, p->b, -1, 1);
    int count = reduced_axes(c, p->reduced, axes);
    return ml_dot(c->g, a, b, axes, count, out);
}

static const product *current;
static ml_dtype current_in, current_out;

static void check_product(gpu_case *c) {
    gpu_label(c, "%s . %s over %s, %s -> %s", current->a, current->b, current->reduced,
              ml_dtypes[current_in].name, ml_dtypes[current_out].name);
    ml_ref y = dot(c, current, current_in, current_out);
    gpu_check(c, &y, 1, gpu_tolerance(current_out));
}

static void check_all(ml_dtype in, ml_dtype out) {
    current_in = in, current_out = out;
    for (int i = 0; i < PRODUCTS; i++) {
        current = &products[i];
        gpu_run(check_product, (uint64_t)i);
    }
}

TEST(gpu_gemm, f32) {
    check_all(ML_F32, ML_F32);
}
TEST(gpu_gemm, bf16) {
    check_all(ML_BF16, ML_BF16);
}
TEST(gpu_gemm, bf16_into_f32) {
    check_all(ML_BF16, ML_F32);
}
TEST(gpu_gemm, f64) {
    check_all(ML_F64, ML_F64);
}

/* A product plus a bias, plus another product, and of slices that begin at odd addresses. */
static void check_sums(gpu_case *c) {
    const product p = {"b2 s24 k40", "k40 n56", "k"};
    const ml_dtype dtype = current_in;
    gpu_label(c, "sums of products in %s", ml_dtypes[dtype].name);
    ml_ref first = dot(c, &p, dtype, dtype), second = dot(c, &p, dtype, dtype);
    ml_ref bias = gpu_input(c, dtype, "n56", -1, 1);
    ml_ref sliced =
        ml_slice(c->g, gpu_input(c, dtype, "b2 s24 k41", -1, 1), gpu_axis(c, "k"), 1, 41);
    ml_axis k = gpu_axis(c, "k");
    ml_ref weight = gpu_input(c, dtype, "k40 n56", -1, 1);
    ml_ref outputs[] = {
        ml_map2(c->g, ML_OP_ADD, first, bias),
        ml_map2(c->g, ML_OP_ADD, second, dot(c, &p, dtype, dtype)),
        ml_dot(c->g, sliced, weight, &k, 1, dtype),
    };
    gpu_check(c, outputs, 3, gpu_tolerance(dtype));
}

TEST(gpu_gemm, sums_f32) {
    current_in = ML_F32;
    gpu_run(check_sums, 1);
}
TEST(gpu_gemm, sums_bf16) {
    current_in = ML_BF16;
    gpu_run(check_sums, 2);
}

/* Gradients of a product: both transposes, in the storage types of mixed precision. */
static void check_gradient(gpu_case *c) {
    const product p = {"b2 s32 e64", "e64 h4 d16", "e"};
    gpu_label(c, "gradient of a product in %s", ml_dtypes[current_in].name);
    ml_ref loss = gpu_loss(c, dot(c, &p, current_in, current_in));
    ml_ref outputs[3] = {loss};
    ml_autodiff(c->g, loss, c->nodes, 2, outputs + 1);
    gpu_check(c, outputs, 3, 2 * gpu_tolerance(current_in));
}

TEST(gpu_gemm, gradient_f32) {
    current_in = ML_F32;
    gpu_run(check_gradient, 3);
}
TEST(gpu_gemm, gradient_bf16) {
    current_in = ML_BF16;
    gpu_run(check_gradient, 4);
}
