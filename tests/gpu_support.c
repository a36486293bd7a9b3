/* What the GPU's tests share (gpu_support.h). */
#include "tests/gpu_support.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/exec/session.h"

static const char *device_name(void) {
    const char *name = getenv("MLUA_TEST_DEVICE");
    return name && *name ? name : "cuda";
}

/* Whether the device can be opened; told once where it cannot. */
static bool have_device(void) {
    static int known = -1;
    if (known >= 0) return known;
    ml_device *device = NULL;
    known = ml_device_open(device_name(), 0, &device) == ML_OK;
    if (known)
        printf("device: %s\n", device->description);
    else
        printf("skipped: %s\n", ml_error_last()->text);
    if (known) ml_device_close(device);
    return known;
}

typedef struct {
    gpu_case *c;
    gpu_body *body;
} gpu_call;

static void run_body(void *argument) {
    gpu_call *call = argument;
    gpu_case *c = call->c;
    ML_CHECK(ml_session_new(&c->session));
    ML_CHECK(ml_session_open(c->session, device_name(), 0));
    c->g = ml_session_graph(c->session);
    call->body(c);
}

void gpu_run(gpu_body *body, uint64_t seed) {
    if (!have_device()) return;
    gpu_case c = {.random = seed * 2 + 1, .arena = ml_arena_new()};
    gpu_call call = {&c, body};
    ml_status status = ml_protect(run_body, &call);
    if (status != ML_OK)
        test_fail("%s: raised: %s %s", c.label, ml_error_last()->text, ml_error_last()->help);
    if (c.session) ml_session_free(c.session);
    ml_arena_free(c.arena);
}

void gpu_label(gpu_case *c, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(c->label, sizeof c->label, format, arguments);
    va_end(arguments);
}

/* ---- Inputs
 * -------------------------------------------------------------------------------------- */
ml_axis gpu_axis(gpu_case *c, const char *name) {
    return ml_axis_named(c->g, name);
}

ml_type gpu_type(gpu_case *c, ml_dtype dtype, const char *axes) {
    ml_type type = {.dtype = dtype};
    char name[32];
    int size, used;
    while (sscanf(axes, " %31[a-z_]%d%n", name, &size, &used) == 2) {
        type.axis[type.rank] = gpu_axis(c, name);
        type.size[type.rank++] = size;
        axes += used;
    }
    return type;
}

static uint16_t to_bf16(double value) {
    union {
        float number;
        uint32_t bits;
    } x = {(float)value};
    if (x.number != x.number) return 0x7fc0;
    return (uint16_t)((x.bits + 0x7fff + (x.bits >> 16 & 1)) >> 16);
}

static double from_bf16(uint16_t bits) {
    union {
        uint32_t bits;
        float number;
    } x = {(uint32_t)bits << 16};
    return (double)x.number;
}

static void store(ml_dtype dtype, void *to, int64_t i, double value) {
    switch (dtype) {
    case ML_BOOL: ((uint8_t *)to)[i] = value != 0; break;
    case ML_I32: ((int32_t *)to)[i] = (int32_t)value; break;
    case ML_I64: ((int64_t *)to)[i] = (int64_t)value; break;
    case ML_BF16: ((uint16_t *)to)[i] = to_bf16(value); break;
    case ML_F32: ((float *)to)[i] = (float)value; break;
    default: ((double *)to)[i] = value; break;
    }
}

static double fetch(ml_dtype dtype, const void *from, int64_t i) {
    switch (dtype) {
    case ML_BOOL: return ((const uint8_t *)from)[i];
    case ML_I32: return ((const int32_t *)from)[i];
    case ML_I64: return (double)((const int64_t *)from)[i];
    case ML_BF16: return from_bf16(((const uint16_t *)from)[i]);
    case ML_F32: return (double)((const float *)from)[i];
    default: return ((const double *)from)[i];
    }
}

static ml_ref add_input(gpu_case *c, const ml_type *type, double low, double high, bool whole) {
    int64_t count = ml_type_elements(type);
    ml_input input = {.name = ml_arena_format(c->arena, "x%d", c->input_count), .type = *type};
    int64_t id = ml_graph_add_input(c->g, &input);
    double *values = ML_NEW_ARRAY(c->arena, double, count + 1);
    uint64_t rounded[1];
    for (int64_t i = 0; i < count; i++) {
        double u = ml_random_uniform((int64_t)c->random, i);
        values[i] = low + (high - low) * u;
        if (whole) values[i] = floor(values[i]);
        store(type->dtype, rounded, 0, values[i]);
        values[i] = fetch(type->dtype, rounded, 0);
    }
    c->random++;
    REQUIRE(id < GPU_INPUTS);
    c->inputs[id] = values;
    c->input_count = (int)id + 1;
    return c->nodes[id] = ml_graph_add(c->g, ML_OP_INPUT, NULL, 0, &id, 1, type);
}

ml_ref gpu_input(gpu_case *c, ml_dtype dtype, const char *axes, double low, double high) {
    ml_type type = gpu_type(c, dtype, axes);
    return add_input(c, &type, low, high, false);
}

ml_ref gpu_integers(gpu_case *c, ml_dtype dtype, const char *axes, int64_t low, int64_t high) {
    ml_type type = gpu_type(c, dtype, axes);
    return add_input(c, &type, (double)low, (double)high, true);
}

ml_ref gpu_loss(gpu_case *c, ml_ref y) {
    ml_type type = *ml_graph_type(c->g, y);
    type.dtype = ML_F32;
    ml_ref weights = add_input(c, &type, -1, 1, false);
    ml_ref product = ml_map2(c->g, ML_OP_MUL, ml_cast(c->g, y, ML_F32), weights);
    return type.rank ? ml_reduce(c->g, ML_OP_SUM, product, type.axis, type.rank) : product;
}

double gpu_tolerance(ml_dtype dtype) {
    return dtype == ML_BF16 ? 1e-2 : dtype == ML_F64 ? 1e-12 : 2e-5;
}

/* ---- Running
 * ------------------------------------------------------------------------------------- */
static void poison(gpu_case *c) {
    ml_session *s = c->session;
    if (s->arena_bytes <= 0 || !s->arena) return;
    void *nan_bytes = ml_alloc((size_t)s->arena_bytes);
    REQUIRE(nan_bytes != NULL);
    memset(nan_bytes, 0xff, (size_t)s->arena_bytes);
    ml_status status = s->device->ops->upload(s->device, s->arena, nan_bytes, s->arena_bytes);
    ml_free(nan_bytes);
    ML_CHECK(status);
}

static void **host_inputs(gpu_case *c, const ml_program *program) {
    uint32_t ids[GPU_INPUTS];
    int count = ml_program_inputs(program, ids);
    void **memory = ML_NEW_ARRAY(c->arena, void *, count + 1);
    for (int i = 0; i < count; i++) {
        const ml_type *type = &ml_graph_input(c->g, ids[i])->type;
        int64_t elements = ml_type_elements(type);
        memory[i] = ml_arena_alloc(c->arena, (size_t)ml_type_bytes(type) + 8);
        for (int64_t e = 0; e < elements; e++)
            store((ml_dtype)type->dtype, memory[i], e, c->inputs[ids[i]][e]);
    }
    return memory;
}

static void compare(gpu_case *c, int output, const ml_type *type, const void *actual,
                    const double *expected, double tolerance) {
    int64_t count = ml_type_elements(type), worst = 0;
    double error = 0, norm = 0, largest = 0, off = -1;
    const bool exact = ml_dtypes[type->dtype].kind != ML_KIND_FLOAT;
    for (int64_t i = 0; i < count; i++) {
        double a = fetch((ml_dtype)type->dtype, actual, i), b = expected[i];
        double difference = fabs(a - b);
        if ((isnan(a) && isnan(b)) || a == b) difference = 0;
        if (!(difference <= 1e300)) difference = INFINITY;
        if (difference > off) off = difference, worst = i;
        if (!isfinite(b)) continue;
        error += difference * difference;
        norm += b * b;
        largest = fmax(largest, fabs(b));
    }
    bool good = exact ? off <= 0
                      : sqrt(error) <= tolerance * sqrt(norm) + 1e-30 &&
                            off <= 8 * tolerance * largest + 1e-30;
    if (good) return;
    test_fail("%s: output %d: relative error %.2e (at most %.0e); element %lld of %lld is %.8g, "
              "expected %.8g",
              c->label, output, sqrt(error / fmax(norm, 1e-300)), tolerance, (long long)worst,
              (long long)count, fetch((ml_dtype)type->dtype, actual, worst), expected[worst]);
}

static void run_program(gpu_case *c, ml_program *program, const ml_ref *outputs, int count,
                        double **expected, double tolerance) {
    void **inputs = host_inputs(c, program);
    void *actual[GPU_OUTPUTS], *again[GPU_OUTPUTS];
    for (int i = 0; i < count; i++) {
        size_t bytes = (size_t)ml_type_bytes(ml_graph_type(c->g, outputs[i])) + 8;
        actual[i] = ml_arena_alloc(c->arena, bytes);
        again[i] = ml_arena_alloc(c->arena, bytes);
    }
    for (int run = 0; run < 4; run++) {
        poison(c);
        ML_CHECK(ml_program_run(program, (const void *const *)inputs, run ? again : actual));
        for (int i = 0; i < count; i++) {
            const ml_type *type = ml_graph_type(c->g, outputs[i]);
            if (run == 0) compare(c, i, type, actual[i], expected[i], tolerance);
            if (run && memcmp(actual[i], again[i], (size_t)ml_type_bytes(type)))
                test_fail("%s: output %d: run %d differs from the first in its bits", c->label, i,
                          run + 1);
        }
    }
}

void gpu_check(gpu_case *c, const ml_ref *outputs, int count, double tolerance) {
    double *expected[GPU_OUTPUTS];
    ml_ref roots_of[GPU_OUTPUTS];
    ml_program *program = NULL;
    REQUIRE(count <= GPU_OUTPUTS);
    memcpy(roots_of, outputs, (size_t)count * sizeof *outputs);
    ml_reference(c->g, NULL, (const double *const *)c->inputs, outputs, count, expected, true,
                 c->arena);
    ml_roots roots = {.outputs = roots_of, .output_count = count};
    ML_CHECK(ml_program_new(c->session, &roots, &program));
    run_program(c, program, outputs, count, expected, tolerance);
    ml_program_free(program);
}
