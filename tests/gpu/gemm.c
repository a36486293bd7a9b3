/* Products on the GPU: every orientation, batches, odd sizes and alignments, sums and biases. */
#include "tests/ops/support.h"

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

static int reduced_axes(ops_case *c, const char *text, ml_axis *axes) {
    int count = 0;
    for (; *text; text++) {
        char name[2] = {*text, 0};
        if (*text != ' ') axes[count++] = ops_axis(c, name);
    }
    return count;
}

static ml_ref dot(ops_case *c, const product *p, ml_dtype in, ml_dtype out) {
    ml_axis axes[ML_MAX_AXES];
    ml_ref a = ops_input(c, in, p->a, -2, 2), b = ops_input(c, in, p->b, -2, 2);
    int count = reduced_axes(c, p->reduced, axes);
    return ml_dot(c->g, a, b, axes, count, out);
}

static ml_dtype current_in, current_out;

/* bf16 operands into f32: the products are exact, only their sum rounds. */
static void build_products(ops_case *c) {
    for (int i = 0; i < PRODUCTS; i++) {
        const product *p = &products[i];
        ops_output(c, dot(c, p, current_in, current_out), ops_tolerance(current_out),
                   "%s . %s over %s, %s -> %s", p->a, p->b, p->reduced, ml_dtypes[current_in].name,
                   ml_dtypes[current_out].name);
    }
}

static void check_products(ml_dtype in, ml_dtype out) {
    current_in = in, current_out = out;
    ops_run(build_products, (uint64_t)in, 0);
}

GPU_TEST(gemm, f32) {
    check_products(ML_F32, ML_F32);
}
GPU_TEST(gemm, bf16) {
    check_products(ML_BF16, ML_BF16);
}
GPU_TEST(gemm, bf16_into_f32) {
    check_products(ML_BF16, ML_F32);
}
GPU_TEST(gemm, f64) {
    check_products(ML_F64, ML_F64);
}

/* Of 8 bits, which both operands are transposed for or neither; values are exact in E5M2. The last
 * are no product of tensor cores: sizes, batches. */
static const product scaled_products[] = {
    {"m64 k32", "n48 k32", "k"},           {"k272 m144", "k272 n160", "k"},
    {"b2 s64 e128", "e128 h4 d32", "e"},   {"b2 s64 h4 d32", "h4 d32 e128", "h d"},
    {"b2 s64 e128", "b2 s64 f256", "b s"}, {"m37 k19", "k19 n23", "k"},
    {"b3 m16 k16", "b3 k16 n32", "k"},
};

static void build_scaled_products(ops_case *c) {
    const ml_ref scale = ops_input(c, ML_F32, "", 0.5, 2);
    for (int i = 0; i < (int)(sizeof scaled_products / sizeof *scaled_products); i++) {
        const product *p = &scaled_products[i];
        ml_axis axes[ML_MAX_AXES];
        const int count = reduced_axes(c, p->reduced, axes);
        const ml_dtype dtypes[] = {ML_E4M3, i % 2 ? ML_E5M2 : ML_E4M3};
        ml_ref operands[2];
        for (int k = 0; k < 2; k++) {
            ml_ref x = ops_input(c, ML_F32, k ? p->b : p->a, -3, 3);
            x = ml_map2(c->g, ML_OP_MUL, ml_map1(c->g, ML_OP_ROUND, x), ml_const(c->g, ML_F32, 2));
            operands[k] = ml_cast(c->g, x, dtypes[k]);
        }
        ml_ref y = ml_scaled_dot(c->g, operands[0], operands[1], scale, axes, count, current_out);
        ops_output(c, y, ops_tolerance(current_out), "%s . %s scaled, over %s -> %s", p->a, p->b,
                   p->reduced, ml_dtypes[current_out].name);
    }
}

GPU_TEST(gemm, scaled) {
    for (int i = 0; i < 2; i++) {
        current_out = i ? ML_F32 : ML_BF16;
        ops_run(build_scaled_products, 8, 0);
    }
}

/* A product plus a bias, plus another product, and of a slice that begins at an odd address. */
static void build_sums(ops_case *c) {
    const product p = {"b2 s24 k40", "k40 n56", "k"};
    const ml_dtype dtype = current_in;
    const ml_axis k = ops_axis(c, "k");
    const double tolerance = ops_tolerance(dtype);
    ml_ref first = dot(c, &p, dtype, dtype), second = dot(c, &p, dtype, dtype);
    ml_ref bias = ops_input(c, dtype, "n56", -2, 2), weight = ops_input(c, dtype, "k40 n56", -2, 2);
    ml_ref sliced = ml_slice(c->g, ops_input(c, dtype, "b2 s24 k41", -2, 2), k, 1, 41);
    ops_output(c, ml_map2(c->g, ML_OP_ADD, first, bias), tolerance, "product and bias");
    ops_output(c, ml_map2(c->g, ML_OP_ADD, second, dot(c, &p, dtype, dtype)), 2 * tolerance,
               "two products");
    ops_output(c, ml_dot(c->g, sliced, weight, &k, 1, dtype), tolerance, "product of a slice");
}

/* Gradients of a product: both transposes. */
static void build_gradients(ops_case *c) {
    ml_axis e = ops_axis(c, "e");
    ml_ref x = ops_input(c, current_in, "b2 s32 e64", -2, 2);
    ml_ref w = ops_input(c, current_in, "e64 h4 d16", -2, 2), wrt[] = {x, w};
    ops_gradients(c, ml_dot(c->g, x, w, &e, 1, current_in), wrt, 2, 2 * ops_tolerance(current_in),
                  "a product");
}

static void check_rest(ml_dtype dtype) {
    current_in = dtype;
    ops_run(build_sums, 1, OPS_UNFUSED);
    ops_run(build_gradients, 2, 0);
}

GPU_TEST(gemm, sums_f32) {
    check_rest(ML_F32);
}
GPU_TEST(gemm, sums_bf16) {
    check_rest(ML_BF16);
}
