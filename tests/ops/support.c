/* What the tests of ops on a device share (tests/ops/support.h). */
#include "tests/ops/support.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/exec/session.h"
#include "runtime/graph/convert.h"

static const char *device_name = "cpu";

static bool have_gpu(void) {
    static int known = -1;
    ml_device *device = NULL;
    if (known >= 0) return known;
    known = ml_device_open(device_name, 0, &device) == ML_OK;
    printf(known ? "device: %s\n" : "skipped: %s\n",
           known ? device->description : ml_error_last()->text);
    if (known) ml_device_close(device);
    return known;
}

bool ops_begin(const char *device) {
    const char *other = getenv("MLUA_TEST_DEVICE");
    device_name = device;
    if (strcmp(device, "cpu") == 0) return true;
    if (other != NULL && *other) device_name = other;
    return have_gpu();
}

ml_axis ops_axis(ops_case *c, const char *name) {
    return ml_axis_named(c->g, name);
}

ml_type ops_type(ops_case *c, ml_dtype dtype, const char *axes) {
    ml_type type = {.dtype = dtype};
    char name[32];
    int size, used;
    while (sscanf(axes, " %31[a-z_]%d%n", name, &size, &used) == 2) {
        type.axis[type.rank] = ops_axis(c, name);
        type.size[type.rank++] = size;
        axes += used;
    }
    return type;
}

void ops_store(ml_dtype dtype, void *to, int64_t i, double value) {
    ml_set_element(dtype, to, i, value);
}

double ops_fetch(ml_dtype dtype, const void *from, int64_t i) {
    return ml_element(dtype, from, i);
}

static ml_ref add_input(ops_case *c, const ml_type *type, double low, double high, double grid) {
    int64_t count = ml_type_elements(type);
    ml_input input = {.name = ml_arena_format(c->arena, "x%d", c->input_count), .type = *type};
    int64_t id = ml_graph_add_input(c->g, &input);
    double *values = ML_NEW_ARRAY(c->arena, double, count + 1);
    REQUIRE(id < OPS_INPUTS);
    for (int64_t i = 0; i < count; i++) {
        values[i] = floor(test_uniform(&c->random, low, high) * grid) / grid;
    }
    c->inputs[id] = values;
    c->input_count = (int)id + 1;
    return ml_graph_add(c->g, ML_OP_INPUT, NULL, 0, &id, 1, type);
}

ml_ref ops_input(ops_case *c, ml_dtype dtype, const char *axes, double low, double high) {
    ml_type type = ops_type(c, dtype, axes);
    return add_input(c, &type, low, high, ml_dtypes[dtype].kind == ML_KIND_FLOAT ? 64 : 1);
}

ml_ref ops_index(ops_case *c, const char *axes, int64_t bound) {
    ml_type type = ops_type(c, ML_I32, axes);
    return add_input(c, &type, 0, (double)bound, 1);
}

void ops_output(ops_case *c, ml_ref n, double tolerance, const char *format, ...) {
    char text[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    REQUIRE(c->output_count < OPS_OUTPUTS);
    c->outputs[c->output_count] = n;
    c->tolerances[c->output_count] = tolerance;
    c->labels[c->output_count++] = ml_arena_format(c->arena, "%s", text);
}

void ops_output_units(ops_case *c, ml_ref n, double units, unsigned loose, const char *format,
                      ...) {
    char text[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ops_output(c, n, 0, "%s", text);
    c->by_units[c->output_count - 1] = true;
    c->units[c->output_count - 1] = units;
    c->loose[c->output_count - 1] = loose;
}

bool ops_is_gpu(const ops_case *c) {
    return ml_session_device(c->session)->target.kind == ML_TARGET_CUDA;
}

double ops_tolerance(ml_dtype dtype) {
    return dtype == ML_BF16  ? 1.6e-2
           : dtype == ML_F16 ? 2e-3
           : dtype == ML_F64 ? 1e-11
           : dtype == ML_F32 ? 1e-5
                             : 0;
}

ml_ref ops_loss(ops_case *c, ml_ref y) {
    ml_type type = *ml_graph_type(c->g, y);
    if (type.dtype != ML_F64) type.dtype = ML_F32;
    ml_ref weights = add_input(c, &type, -1, 1, 64);
    ml_ref product = ml_map2(c->g, ML_OP_MUL, ml_cast(c->g, y, type.dtype), weights);
    return type.rank ? ml_reduce(c->g, ML_OP_SUM, product, type.axis, type.rank) : product;
}

void ops_gradients(ops_case *c, ml_ref y, const ml_ref *wrt, int count, double tolerance,
                   const char *label) {
    ml_ref gradients[OPS_INPUTS];
    ml_autodiff(c->g, ops_loss(c, y), wrt, count, gradients);
    for (int i = 0; i < count; i++) {
        if (gradients[i]) ops_output(c, gradients[i], tolerance, "gradient %d of %s", i, label);
    }
}

/* ---- running ---- */
static void poison(ops_case *c) {
    ml_session *s = c->session;
    if (s->arena == NULL || s->arena_bytes <= 0) return;
    void *bytes = ml_alloc((size_t)s->arena_bytes);
    REQUIRE(bytes != NULL);
    memset(bytes, 0xff, (size_t)s->arena_bytes);
    ml_status status = s->device->ops->upload(s->device, s->arena, bytes, s->arena_bytes);
    ml_free(bytes);
    ML_CHECK(status);
}

/* How far a is from what the dtype holds of the exact value, in units of the latter's last place.
 */
static double units_off(ml_dtype dtype, double a, double exact, unsigned loose) {
    int64_t bits;
    if (ml_dtypes[dtype].kind != ML_KIND_FLOAT) return a == exact ? 0 : INFINITY;
    ops_store(dtype, &bits, 0, exact);
    double rounded = ops_fetch(dtype, &bits, 0);
    bool same_zero = signbit(a) == signbit(rounded) || (loose & OPS_ANY_ZERO);
    if (isnan(a) || isnan(rounded)) return isnan(a) && isnan(rounded) ? 0 : INFINITY;
    if (a == rounded) return a != 0 || same_zero ? 0 : INFINITY;
    const int least = ilogb(ml_dtypes[dtype].least), digits = ml_dtypes[dtype].digits - 1;
    if (a == 0 && (loose & OPS_FLUSHED) && fabs(exact) < ldexp(1, least)) return 0;
    if (isinf(a) || isinf(rounded)) return INFINITY;
    int exponent = exact == 0 || ilogb(exact) < least ? least : ilogb(exact);
    return fabs(a - exact) / ldexp(1, exponent - digits);
}

static void compare_units(const ops_case *c, int output, const void *actual, const double *expected,
                          const char *how) {
    const ml_type *type = ml_graph_type(c->g, c->outputs[output]);
    int64_t count = ml_type_elements(type), worst = -1;
    double most = c->units[output];
    for (int64_t i = 0; i < count; i++) {
        double off = units_off(type->dtype, ops_fetch(type->dtype, actual, i), expected[i],
                               c->loose[output]);
        if (off > most) most = off, worst = i;
    }
    EXPECT(worst < 0, "%s (%s): element %lld is %.17g, expected %.17g: %.3g units off",
           c->labels[output], how, (long long)worst, ops_fetch(type->dtype, actual, worst),
           expected[worst], most);
}

static void compare(const ops_case *c, int output, const void *actual, const double *expected,
                    const char *how) {
    const ml_type *type = ml_graph_type(c->g, c->outputs[output]);
    int64_t count = ml_type_elements(type), worst = -1;
    double largest = 0, off = 0;
    if (c->by_units[output]) {
        compare_units(c, output, actual, expected, how);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        if (isfinite(expected[i])) largest = fmax(largest, fabs(expected[i]));
    }
    for (int64_t i = 0; i < count; i++) {
        double a = ops_fetch(type->dtype, actual, i), difference = fabs(a - expected[i]);
        if (a == expected[i] || (isnan(a) && isnan(expected[i]))) continue;
        if (!(difference <= off)) off = isfinite(difference) ? difference : INFINITY, worst = i;
    }
    test_checked();
    if (worst < 0 || off <= c->tolerances[output] * largest + 1e-30) return;
    ml_text text = {.arena = c->arena};
    ml_type_print(c->g, type, &text);
    test_fail("%s (%s, %s): element %lld is %.9g, expected %.9g (largest %.3g)", c->labels[output],
              text.text, how, (long long)worst, ops_fetch(type->dtype, actual, worst),
              expected[worst], largest);
}

static void run_program(ops_case *c, double *const *expected, const char *how) {
    ml_ref outputs[OPS_OUTPUTS];
    ml_program *program = NULL;
    uint32_t ids[OPS_INPUTS];
    const void *inputs[OPS_INPUTS];
    void *first[OPS_OUTPUTS], *second[OPS_OUTPUTS];
    memcpy(outputs, c->outputs, sizeof outputs);
    ml_roots roots = {.outputs = outputs, .output_count = c->output_count};
    ML_CHECK(ml_program_new(c->session, &roots, &program));
    int count = ml_program_inputs(program, ids);
    for (int i = 0; i < count; i++) {
        const ml_type *type = &ml_graph_input(c->g, ids[i])->type;
        void *memory = ml_arena_alloc(c->arena, (size_t)ml_type_bytes(type) + 8);
        for (int64_t e = 0; e < ml_type_elements(type); e++) {
            ops_store(type->dtype, memory, e, c->inputs[ids[i]][e]);
        }
        inputs[i] = memory;
    }
    for (int i = 0; i < c->output_count; i++) {
        size_t bytes = (size_t)ml_type_bytes(ml_graph_type(c->g, c->outputs[i])) + 8;
        first[i] = ml_arena_alloc(c->arena, bytes);
        second[i] = ml_arena_alloc(c->arena, bytes);
    }
    const int runs = c->session->device->target.kind == ML_TARGET_CUDA ? 4 : 2;
    for (int run = 0; run < runs; run++) {
        poison(c);
        ML_CHECK(ml_program_run(program, inputs, run == 0 ? first : second));
        for (int i = 0; i < c->output_count; i++) {
            size_t bytes = (size_t)ml_type_bytes(ml_graph_type(c->g, c->outputs[i]));
            if (run == 0) compare(c, i, first[i], expected[i], how);
            if (run > 0 && ml_knobs()->deterministic && memcmp(first[i], second[i], bytes) != 0) {
                test_fail("%s (%s): run %d differs from the first in its bits", c->labels[i], how,
                          run + 1);
            }
        }
    }
    ml_program_free(program);
}

typedef struct {
    ops_case *c;
    ops_body *body;
    int flags;
} ops_call;

static void run_body(void *argument) {
    ops_call *call = argument;
    ops_case *c = call->c;
    double *expected[OPS_OUTPUTS];
    ML_CHECK(ml_session_new(&c->session));
    ML_CHECK(ml_session_open(c->session, device_name, 0));
    c->g = ml_session_graph(c->session);
    call->body(c);
    ml_reference(c->g, NULL, (const double *const *)c->inputs, c->outputs, c->output_count,
                 expected, false, c->arena);
    run_program(c, expected, "fused");
    if (!(call->flags & OPS_UNFUSED)) return;
    ml_session_device(c->session)->target.no_fuse = true;
    run_program(c, expected, "unfused");
}

void ops_run(ops_body *body, uint64_t seed, int flags) {
    ops_case c = {.random = seed * 2 + 1, .arena = ml_arena_new()};
    ops_call call = {&c, body, flags};
    ml_status status = ml_protect(run_body, &call);
    EXPECT(status == ML_OK, "raised: %s %s", ml_error_last()->text, ml_error_last()->help);
    ml_session_free(c.session);
    ml_arena_free(c.arena);
}
