/* What the tests of the kernel templates share (tests/kernels/support.h). */
#include "tests/kernels/support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codegen/jit/jit.h"
#include "codegen/kernels/files.h"
#include "runtime/graph/convert.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/ops/linear_scan/linear_scan.h"
#include "tests/emit/emulate.h"

static bool with_gaps, without_cuda, emulating, sound_in_c;
static ml_axis spoilt_axis;
static int64_t spoilt_start, spoilt_stop;

void template_spoil(ml_axis axis, int64_t start, int64_t stop) {
    spoilt_axis = axis, spoilt_start = start, spoilt_stop = stop;
}

void template_spoil_c(bool spoil) {
    sound_in_c = !spoil;
}

void template_use_emulator(bool emulated) {
    if (emulated) emulate_need();
    emulating = emulated;
}

void template_use_cuda(bool compiled) {
    without_cuda = !compiled;
}

void template_use_gaps(bool gaps) {
    with_gaps = gaps;
}

typedef struct {
    ml_schedule *s;
    ml_step *step;
    char *memory[ML_MAX_OPERANDS]; /* of the step's values */
    int kernels;
    ml_kernel *kernel[96];
} run;

/* A value of this type: contiguous, or with two elements after each run of the last axis. */
static uint32_t add_value(ml_schedule *s, ml_ref node, const ml_type *type) {
    uint32_t id = s->values.count, storage = s->storages.count;
    ml_value *v = ML_PUSH(s->arena, &s->values);
    v->node = node;
    v->type = *type;
    v->storage = storage;
    int64_t stride = 1;
    for (int i = type->rank - 1; i >= 0; i--) {
        v->stride[i] = stride;
        stride *= type->size[i];
        if (with_gaps && i == type->rank - 1) stride += 2;
    }
    ml_storage *memory = ML_PUSH(s->arena, &s->storages);
    memory->bytes = stride * ml_dtypes[type->dtype].bytes;
    return id;
}

static ml_attention_strides strides_of(const ml_value *v, const ml_attention_args *args,
                                       const ml_type *q, bool captured) {
    ml_attention_strides strides = {0};
    int batches = 0;
    for (int i = 0; i < q->rank; i++) {
        ml_axis axis = q->axis[i];
        if (axis == args->seq || axis == args->heads || axis == args->head_dim) continue;
        int at = ml_type_find(&v->type, axis);
        strides.batch[batches++] = at < 0 ? 0 : v->stride[at];
    }
    for (int i = 0; i < v->type.rank; i++) {
        ml_axis axis = v->type.axis[i];
        if (axis == args->heads || axis == args->kv_heads) strides.head = v->stride[i];
        if (axis == args->seq || (!captured && axis == args->kv_seq)) strides.seq = v->stride[i];
        if (axis == args->head_dim || (captured && axis == args->kv_seq))
            strides.dim = v->stride[i];
    }
    return strides;
}

static int64_t size_of(const ml_type *t, ml_axis axis) {
    int at = ml_type_find(t, axis);
    return at < 0 ? 1 : t->size[at];
}

static void describe_attention(run *r, const ml_graph *g, ml_ref node) {
    ml_attention_step *a = ML_NEW(r->s->arena, ml_attention_step);
    ml_step *step = r->step;
    ml_attention_read(g, node, &a->args);
    const ml_type *q = &r->s->values.at[step->values[0]].type;
    const ml_type *k = &r->s->values.at[step->values[1]].type;
    const ml_type *v = &r->s->values.at[step->values[2]].type;
    a->graph = g;
    a->node = node;
    a->batch[0] = a->batch[1] = a->batch[2] = 1;
    int batches = 0;
    for (int i = 0; i < q->rank; i++)
        if (q->axis[i] != a->args.seq && q->axis[i] != a->args.heads &&
            q->axis[i] != a->args.head_dim)
            a->batch[batches++] = q->size[i];
    a->heads = size_of(q, a->args.heads), a->kv_heads = size_of(k, a->args.kv_heads);
    a->seq = size_of(q, a->args.seq), a->kv_seq = size_of(k, a->args.kv_seq);
    a->head_dim = size_of(q, a->args.head_dim), a->value_dim = size_of(v, a->args.head_dim);
    a->dtype = (ml_dtype)q->dtype;
    a->backward = ml_graph_node(g, node)->op == ML_OP_ATTENTION_GRAD;
    a->operand_count = step->read_count + step->write_count;
    for (int i = 0; i < a->operand_count; i++)
        a->strides[i] = strides_of(&r->s->values.at[step->values[i]], &a->args, q,
                                   i < step->read_count && i >= (a->backward ? 6 : 3));
    step->attention = a;
}

static void take_chain(run *r, ml_kernel *k) {
    for (r->kernels = 0; k && r->kernels < 96; k = k->next) {
        CHECK_EQ_INT(k->pointer_count, r->step->read_count + r->step->write_count);
        r->kernel[r->kernels++] = k;
    }
}

static void print_linear_scan(ml_schedule *s, ml_step *step) {
    ml_linear_scan scan;
    ml_linear_scan_read(s->graph, step->node, &scan);
    if (ml_linear_scan_is_scalar(&scan))
        ml_template_linear_scan(s, step);
    else
        ml_template_delta_scan(s, step);
}

/* The node as a step with its kernels. */
static void print_step(run *r, fixture *f, ml_ref node, const ml_target *target) {
    ml_schedule *s = r->s = ML_NEW(f->arena, ml_schedule);
    ml_step *step = r->step = ML_NEW(f->arena, ml_step);
    s->graph = f->g, s->arena = f->arena, s->target = target;
    int reads = ml_graph_node(f->g, node)->source_count, writes = ml_op_outputs(f->g, node);
    step->node = node;
    step->read_count = reads, step->write_count = writes;
    step->values = ML_NEW_ARRAY(f->arena, uint32_t, reads + writes);
    for (int i = 0; i < reads; i++) {
        ml_ref source = ml_graph_source(f->g, node, i);
        step->values[i] = add_value(s, source, ml_graph_type(f->g, source));
    }
    for (int i = 0; i < writes; i++) {
        ml_ref output = i ? ml_out(f->g, node, i) : node;
        step->values[reads + i] = add_value(s, output, ml_graph_type(f->g, output));
    }
    ml_op op = ml_graph_node(f->g, node)->op;
    if (op == ML_OP_ATTENTION || op == ML_OP_ATTENTION_GRAD) {
        describe_attention(r, f->g, node);
        ml_template_attention(s, step);
    } else if (op == ML_OP_WRITE_ROWS)
        ml_template_write_rows(s, step);
    else if (op == ML_OP_CACHED_ATTENTION)
        ml_template_cached_attention(s, step);
    else if (op == ML_OP_SCATTER_ADD)
        ml_template_scatter_add(s, step);
    else if (op == ML_OP_RAGGED_DOT || op == ML_OP_RAGGED_OUTER)
        ml_template_ragged(s, step);
    else if (op == ML_OP_LINEAR_SCAN || op == ML_OP_LINEAR_SCAN_GRAD)
        print_linear_scan(s, step);
    else if (op == ML_OP_RECURRENCE)
        ml_template_recurrence(s, step);
    else
        ml_template_scan(s, step);
    take_chain(r, step->kernel);
}

/* The offset of element i (in type order). */
static int64_t offset_of(const ml_value *v, int64_t i) {
    int64_t offset = v->offset;
    for (int axis = v->type.rank - 1; axis >= 0; axis--) {
        offset += i % v->type.size[axis] * v->stride[axis];
        i /= v->type.size[axis];
    }
    return offset;
}

static double get(const ml_value *v, const char *memory, int64_t i) {
    int64_t at = offset_of(v, i);
    switch ((ml_dtype)v->type.dtype) {
    case ML_F32: return ((const float *)memory)[at];
    case ML_F64: return ((const double *)memory)[at];
    case ML_I32: return ((const int *)memory)[at];
    case ML_I64: return (double)((const int64_t *)memory)[at];
    case ML_BOOL: return ((const uint8_t *)memory)[at];
    case ML_E4M3: return ml_from_e4m3(((const uint8_t *)memory)[at]);
    case ML_E5M2: return ml_from_e5m2(((const uint8_t *)memory)[at]);
    default: {
        uint32_t bits = (uint32_t)((const uint16_t *)memory)[at] << 16;
        float number;
        memcpy(&number, &bits, sizeof number);
        return number;
    }
    }
}

static void put(const ml_value *v, char *memory, int64_t i, double x) {
    int64_t at = offset_of(v, i);
    float number = (float)x;
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    switch ((ml_dtype)v->type.dtype) {
    case ML_F32: ((float *)memory)[at] = number; break;
    case ML_F64: ((double *)memory)[at] = x; break;
    case ML_I32: ((int *)memory)[at] = (int)x; break;
    case ML_I64: ((int64_t *)memory)[at] = (int64_t)x; break;
    case ML_BOOL: ((uint8_t *)memory)[at] = x != 0; break;
    case ML_E4M3: ((uint8_t *)memory)[at] = ml_to_e4m3(number); break;
    case ML_E5M2: ((uint8_t *)memory)[at] = ml_to_e5m2(number); break;
    default: /* to nearest even; tests hold no NaN in bf16 */
        ((uint16_t *)memory)[at] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

/* Whether element i (in type order) is of those that are to be spoilt. */
static bool is_spoilt(const ml_type *t, int64_t i) {
    int at = spoilt_axis ? ml_type_find(t, spoilt_axis) : -1;
    if (at < 0 || ml_dtypes[t->dtype].kind != ML_KIND_FLOAT) return false;
    for (int axis = t->rank - 1; axis > at; axis--) i /= t->size[axis];
    i %= t->size[at];
    return i >= spoilt_start && i < spoilt_stop;
}

/* Memory of all values: sources hold the reference's values as their dtype can, others poison. */
static void fill(run *r, double *const *sources, bool sound) {
    for (int i = 0; i < r->step->read_count + r->step->write_count; i++) {
        const ml_value *v = &r->s->values.at[r->step->values[i]];
        int64_t bytes = (r->s->storages.at[v->storage].bytes + 63) / 64 * 64;
        r->memory[i] = aligned_alloc(64, (size_t)bytes);
        REQUIRE(r->memory[i]);
        memset(r->memory[i], 0xff, (size_t)bytes);
        if (i >= r->step->read_count) continue;
        for (int64_t e = 0; e < ml_type_elements(&v->type); e++)
            put(v, r->memory[i], e, !sound && is_spoilt(&v->type, e) ? NAN : sources[i][e]);
    }
}

static void release(run *r) {
    for (int i = 0; i < r->step->read_count + r->step->write_count; i++) free(r->memory[i]);
}

/* Run the chain; units in unequal ranges, last range first. */
static void execute(run *r, ml_c_function *const *functions) {
    for (int i = 0; i < r->kernels; i++) {
        const ml_kernel *k = r->kernel[i];
        long long scalars[ML_MAX_SCALARS];
        for (int j = 0; j < k->scalar_count; j++) scalars[j] = k->scalar[j];
        int64_t third = k->units / 3;
        functions[i](r->memory, scalars, third, k->units);
        functions[i](r->memory, scalars, 0, third);
    }
}

static void compare(run *r, fixture *f, int output, const double *expected, double tolerance) {
    int at = ml_graph_node(f->g, r->step->node)->source_count + output;
    const ml_value *v = &r->s->values.at[r->step->values[at]];
    double difference = 0, total = 0, largest = 0, worst = 0;
    int64_t count = ml_type_elements(&v->type);
    for (int64_t i = 0; i < count; i++) {
        double actual = get(v, r->memory[at], i), off = fabs(actual - expected[i]);
        if (actual == expected[i] || (isnan(actual) && isnan(expected[i])))
            off = 0;
        else if (isnan(off))
            off = INFINITY;
        if (isfinite(expected[i])) total += expected[i] * expected[i];
        if (isfinite(expected[i]) && fabs(expected[i]) > largest) largest = fabs(expected[i]);
        difference += off * off;
        if (off > worst) worst = off;
    }
    bool exact = ml_dtypes[v->type.dtype].kind != ML_KIND_FLOAT;
    bool good = exact ? worst == 0
                      : difference <= tolerance * tolerance * total + 1e-30 &&
                            worst <= 8 * tolerance * largest + 1e-15;
    EXPECT(good, "%s: output %d of %s is off by %g (root mean square %g of %g)", f->label, output,
           r->step->kernel->label, worst, sqrt(difference / (double)count),
           sqrt(total / (double)count));
    CHECK(good);
}

enum { HOPPER = 90, H200 = 132 };
static ml_target cuda_target = {.kind = ML_TARGET_CUDA, .arch = HOPPER, .multiprocessors = H200};

void template_use_gpu(int arch, int multiprocessors) {
    cuda_target.arch = arch ? arch : HOPPER;
    cuda_target.multiprocessors = multiprocessors ? multiprocessors : H200;
}

void template_use_tiles(int tiles) {
    cuda_target.no_wgmma = tiles < 0;
    cuda_target.attention_tiles = tiles < 0 ? 0 : tiles;
}

static void check_room(const run *r) {
    for (int i = 0; i < r->kernels; i++)
        CHECK(r->kernel[i]->shared_bytes <= ml_target_shared(cuda_target.arch));
}

static void compare_all(run *r, fixture *f, ml_ref node, double *const *values, double tolerance) {
    for (int i = 0; i < ml_op_outputs(f->g, node); i++)
        compare(r, f, i, values[r->step->read_count + i], tolerance);
}

static void check_emulated(fixture *f, ml_ref node, double *const *values, double tolerance) {
    if (!emulating) return;
    run r = {0};
    print_step(&r, f, node, &cuda_target);
    check_room(&r);
    fill(&r, values, false);
    const ml_kernel *last = r.kernels ? r.kernel[r.kernels - 1] : NULL;
    if (last && last->map_count > 0) { /* what is before it prepares its operands */
        bool ran = r.kernels == 1 || template_emulate(r.kernel, r.kernels - 1, r.memory);
        if (ran && template_emulate_pair(last, r.memory))
            compare_all(&r, f, node, values, tolerance);
        release(&r);
        while (r.kernel[r.kernels - 1]->map_count > 0) take_chain(&r, r.kernel[0]->fallback);
        fill(&r, values, false);
    }
    if (template_emulate(r.kernel, r.kernels, r.memory))
        compare_all(&r, f, node, values, tolerance);
    release(&r);
}

/* NVRTC takes about a second a kernel: a test compiles the first of each file and dtype, and all of
 * them with DIST_ALL=1. */
static bool compiles_by_nvrtc(const run *r, const ml_kernel *k) {
    static struct {
        const ml_kernel_file *file;
        int dtype;
    } compiled[64];
    static const char *test;
    static size_t count;
    const ml_file_recipe *recipe = k->recipe;
    int dtype = r->s->values.at[r->step->values[0]].type.dtype;
    if (test != test_running()) count = 0;
    test = test_running();
    for (size_t i = 0; i < count && !test_all(); i++)
        if (compiled[i].file == recipe->file && compiled[i].dtype == dtype) return false;
    if (count < sizeof compiled / sizeof *compiled)
        compiled[count].file = recipe->file, compiled[count++].dtype = dtype;
    return true;
}

static void check_cuda(fixture *f, ml_ref node, ml_pool *pool) {
    char text[256];
    if (without_cuda) return;
    if (ml_jit_cuda_describe(text, sizeof text) != ML_OK) {
        test_left_out("CUDA kernels are not compiled: %s", ml_error_last()->text);
        return;
    }
    run r = {0};
    print_step(&r, f, node, &cuda_target);
    int count = 0;
    for (int i = 0; i < r.kernels; i++)
        if (compiles_by_nvrtc(&r, r.kernel[i])) r.kernel[count++] = r.kernel[i];
    if (count == 0) return;
    ml_jit_cuda *jit = NULL;
    const void **images = ML_NEW_ARRAY(f->arena, const void *, count);
    int64_t *sizes = ML_NEW_ARRAY(f->arena, int64_t, count);
    ml_status status =
        ml_jit_cuda_compile(r.kernel, count, cuda_target.arch, pool, &jit, images, sizes);
    EXPECT(status == ML_OK, "%s: %s", f->label, ml_error_last()->text);
    ml_jit_cuda_free(jit);
}

/* With KERNELS=FILE in the environment kernels are appended to that file instead of run: what
 * compares two versions of mlua reads them. */
static void write_chain(FILE *file, const fixture *f, const ml_kernel *k) {
    for (; k; k = k->next) {
        fprintf(file, "KERNEL %s\t%s\t%s\tgrid %u %u %u block %u shared %u units %lld\n%s\n",
                k->entry, k->label, f->label, k->grid[0], k->grid[1], k->grid[2], k->block,
                k->shared_bytes, (long long)k->units, ml_kernel_source(k, f->arena));
        if (k->fallback) write_chain(file, f, k->fallback);
    }
}

static void write_kernels(const char *path, fixture *f, ml_ref node, const ml_target *target) {
    FILE *file = fopen(path, "a");
    REQUIRE(file);
    run r = {0};
    print_step(&r, f, node, target);
    write_chain(file, f, r.step->kernel);
    static const ml_target gpus[] = {
        {ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132},
        {ML_TARGET_CUDA, .arch = 90, .multiprocessors = 13, .attention_tiles = 1},
        {ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132, .attention_tiles = 2},
        {ML_TARGET_CUDA, .arch = 90, .multiprocessors = 132, .no_tma = true, .no_wgmma = true},
        {ML_TARGET_CUDA, .arch = 89, .multiprocessors = 100, .no_tma = true, .no_wgmma = true},
        {ML_TARGET_CUDA, .arch = 70, .multiprocessors = 80, .no_tma = true, .no_wgmma = true}};
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++) {
        print_step(&r, f, node, &gpus[i]);
        write_chain(file, f, r.step->kernel);
    }
    fclose(file);
}

void template_check_target(fixture *f, ml_ref node, double tolerance, const ml_target *target) {
    run r = {0};
    if (getenv("KERNELS")) {
        write_kernels(getenv("KERNELS"), f, node, target);
        return;
    }
    print_step(&r, f, node, target);
    int reads = ml_graph_node(f->g, node)->source_count, writes = ml_op_outputs(f->g, node);
    ml_ref nodes[ML_MAX_OPERANDS];
    double *values[ML_MAX_OPERANDS];
    for (int i = 0; i < reads + writes; i++) nodes[i] = r.s->values.at[r.step->values[i]].node;
    /* inputs as their dtypes hold them */
    const double *const *states = (const double *const *)f->states;
    const double *const *inputs = (const double *const *)f->inputs;
    ml_reference(f->g, states, inputs, nodes, reads + writes, values, true, f->arena);
    ml_pool *pool = ml_pool_new(1);
    REQUIRE(pool);
    ml_jit_c *jit = NULL;
    ml_c_function *functions[96];
    ml_status status =
        r.kernels ? ml_jit_c_load(r.kernel, r.kernels, pool, &jit, functions) : ML_OK;
    EXPECT(status == ML_OK, "%s: %s", f->label, ml_error_last()->text);
    if (status == ML_OK && r.kernels) {
        fill(&r, values, sound_in_c);
        execute(&r, functions);
        for (int i = 0; i < writes; i++) compare(&r, f, i, values[reads + i], tolerance);
        release(&r);
    }
    ml_jit_c_free(jit);
    check_emulated(f, node, values, tolerance);
    check_cuda(f, node, pool);
    ml_pool_free(pool);
}

void template_check(fixture *f, ml_ref node, double tolerance) {
    ml_target target = {.kind = ML_TARGET_C, .threads = 2, .vector_bytes = 32};
    template_check_target(f, node, tolerance, &target);
}
