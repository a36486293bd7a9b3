/* Programs on the CPU: commands, one a kernel or a matrix product, in the order of the steps. */
#include "runtime/device/cpu_exec.h"

#include <string.h>
#include <time.h>

#include "codegen/jit.h"
#include "runtime/base/knobs.h"
#include "runtime/device/check.h"
#include "runtime/device/cpu.h"

typedef struct {
    const ml_step *step;
    uint32_t number;         /* of the step */
    const ml_kernel *kernel; /* NULL for products and copies */
    ml_c_function *function;
    char **pointers; /* of the step's values; set by bind */
    long long scalars[ML_MAX_SCALARS];
    int64_t parts;
    ml_group *group;  /* of collectives */
    const char *note; /* what others are told while this rank is in it */
} command;

struct ml_executable {
    cpu_device *cpu;
    const ml_plan *plan;
    ml_arena *arena;
    command *commands;
    uint32_t command_count;
    ml_jit_c *jit;
    void *scratch, *scratch_block; /* of products; 64-byte aligned */
    void **addresses;              /* by storage */
    double *seconds;               /* by command, where MLUA_DEBUG asks for times */
    ml_checker *checker;
    int64_t runs;
};

/* More parts than threads even out what the threads are otherwise disturbed by. */
enum { PARTS_PER_THREAD = 4 };

static int64_t kernel_parts(const ml_kernel *kernel, int threads) {
    int64_t grain = kernel->grain > 0 ? kernel->grain : 1;
    int64_t parts = kernel->units / grain;
    if (threads == 1 || parts <= 1) return 1;
    if (parts > (int64_t)PARTS_PER_THREAD * threads) parts = (int64_t)PARTS_PER_THREAD * threads;
    return parts;
}

static void collective_fill(ml_executable *e, command *c) {
    const ml_ranks *ranks = e->cpu->base.ranks;
    int axis = c->step->collective->mesh_axis;
    const ml_origin *origin = ml_graph_origin(e->plan->graph, c->step->node);
    if (ranks == NULL || ranks->group[axis] == NULL) {
        ml_raise(ML_INTERNAL, "a program for several ranks was loaded on one");
    }
    c->group = ranks->group[axis];
    ml_text note = {.arena = e->arena};
    ml_text_add(&note, "%s over %s", ml_ops[c->step->collective->op].name,
                ranks->layout->axis[axis].name);
    if (origin->module != NULL && origin->module[0]) ml_text_add(&note, " in %s", origin->module);
    if (origin->file != NULL) ml_text_add(&note, " %s:%d", origin->file, origin->line);
    c->note = note.text;
}

static void command_fill(ml_executable *e, command *c, uint32_t number, ml_kernel *kernel) {
    c->number = number;
    c->step = &e->plan->schedule->steps.at[number];
    c->kernel = kernel;
    c->parts = 1;
    if (c->step->collective != NULL) collective_fill(e, c);
    if (kernel == NULL) return;
    c->parts = kernel_parts(kernel, ml_pool_threads(e->cpu->pool));
    for (int i = 0; i < kernel->scalar_count; i++) c->scalars[i] = kernel->scalar[i];
}

static uint32_t count_commands(const ml_schedule *s) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->steps.count; i++) {
        count++;
        const ml_kernel *kernel = s->steps.at[i].kernel;
        while (kernel != NULL && kernel->next != NULL) kernel = kernel->next, count++;
    }
    return count;
}

typedef struct {
    ml_executable *e;
    ml_kernel **kernels;
    int kernel_count;
    int64_t scratch_bytes;
} load_work;

static void load_body(void *context) {
    load_work *work = context;
    ml_executable *e = work->e;
    const ml_schedule *s = e->plan->schedule;
    int threads = ml_pool_threads(e->cpu->pool);
    uint32_t count = count_commands(s), at = 0;
    e->commands = ML_NEW_ARRAY(e->arena, command, (size_t)count + 1);
    e->addresses = ML_NEW_ARRAY(e->arena, void *, (size_t)s->storages.count + 1);
    e->seconds = ML_NEW_ARRAY(e->arena, double, (size_t)count + 1);
    work->kernels = ML_NEW_ARRAY(e->arena, ml_kernel *, (size_t)count + 1);
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        int values = step->read_count + step->write_count;
        char **pointers = ML_NEW_ARRAY(e->arena, char *, (size_t)values + 1);
        ml_kernel *kernel = step->kernel;
        if (step->gemm != NULL) {
            int64_t bytes = cpu_gemm_scratch(step->gemm, threads);
            if (bytes > work->scratch_bytes) work->scratch_bytes = bytes;
        }
        if (step->ragged != NULL) {
            int64_t bytes = cpu_ragged_scratch(step->ragged, threads);
            if (bytes > work->scratch_bytes) work->scratch_bytes = bytes;
        }
        do {
            command_fill(e, &e->commands[at], i, kernel);
            e->commands[at++].pointers = pointers;
            if (kernel != NULL) work->kernels[work->kernel_count++] = kernel;
            kernel = kernel != NULL ? kernel->next : NULL;
        } while (kernel != NULL);
    }
    e->command_count = at;
}

static ml_status load_functions(load_work *work) {
    ml_executable *e = work->e;
    size_t count = (size_t)work->kernel_count;
    ml_c_function **functions = ml_alloc((count + 1) * sizeof *functions);
    if (functions == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while loading kernels");
    ml_status status = ML_OK;
    if (count > 0) {
        status = ml_jit_c_load(work->kernels, work->kernel_count, e->cpu->pool, &e->jit, functions);
    }
    size_t at = 0;
    for (uint32_t i = 0; i < e->command_count && status == ML_OK; i++) {
        if (e->commands[i].kernel != NULL) e->commands[i].function = functions[at++];
    }
    ml_free(functions);
    return status;
}

static void read_storage(void *context, uint32_t storage, int64_t offset, int64_t bytes, void *to) {
    const ml_executable *e = context;
    if (bytes > 0) memcpy(to, (const char *)e->addresses[storage] + offset, (size_t)bytes);
}

ml_status cpu_exec_load(ml_device *device, const ml_plan *plan, ml_executable **executable) {
    ml_executable *e = ml_alloc(sizeof *e);
    *executable = NULL;
    if (e != NULL) e->arena = ml_arena_new();
    if (e == NULL || e->arena == NULL) {
        ml_free(e);
        return ml_fail(ML_NO_MEMORY, "out of memory while loading a program");
    }
    e->cpu = (cpu_device *)device;
    e->plan = plan;
    load_work work = {.e = e};
    ml_status status = ml_protect(load_body, &work);
    if (status == ML_OK) status = load_functions(&work);
    if (status == ML_OK && work.scratch_bytes > 0) {
        e->scratch_block = ml_alloc((size_t)work.scratch_bytes + 64);
        if (e->scratch_block == NULL) {
            status = ml_fail(ML_NO_MEMORY, "out of memory for the workspace of matrix products");
        }
        e->scratch = (void *)(((uintptr_t)e->scratch_block + 63) & ~(uintptr_t)63);
    }
    if (status == ML_OK && ml_knobs()->check != NULL) {
        status = ml_check_new(plan, read_storage, e, &e->checker);
    }
    if (status != ML_OK) {
        cpu_exec_unload(e);
        return status;
    }
    *executable = e;
    return ML_OK;
}

void cpu_exec_unload(ml_executable *e) {
    if (e == NULL) return;
    ml_check_free(e->checker);
    if (e->jit != NULL) ml_jit_c_free(e->jit);
    ml_free(e->scratch_block);
    ml_arena_free(e->arena);
    ml_free(e);
}

ml_status cpu_exec_bind(ml_executable *e, void *const *addresses) {
    const ml_schedule *s = e->plan->schedule;
    for (uint32_t i = 0; i < s->storages.count; i++) e->addresses[i] = addresses[i];
    for (uint32_t i = 0; i < e->command_count; i++) {
        const ml_step *step = e->commands[i].step;
        for (int v = 0; v < step->read_count + step->write_count; v++) {
            const ml_value *value = &s->values.at[step->values[v]];
            int64_t offset = value->offset * ml_dtypes[value->type.dtype].bytes;
            e->commands[i].pointers[v] = (char *)addresses[value->storage] + offset;
        }
    }
    return ML_OK;
}

static void kernel_job(void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const command *c = context;
    c->function(c->pointers, c->scalars, begin, end);
}

typedef struct {
    char *to;
    const char *from;
} copy_call;

static void copy_job(void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const copy_call *call = context;
    memcpy(call->to + begin, call->from + begin, (size_t)(end - begin));
}

static ml_status collective_run(ml_executable *e, const command *c) {
    const ml_collective_step *s = c->step->collective;
    const char *from = c->pointers[0];
    static const ml_reduce_op reduces[] = {[ML_COMBINE_SUM] = ML_REDUCE_SUM,
                                           [ML_COMBINE_MAX] = ML_REDUCE_MAX,
                                           [ML_COMBINE_MIN] = ML_REDUCE_MIN};
    ml_reduce_op reduce = reduces[s->combine];
    char *to = c->pointers[1], note[256];
    const char *program = e->plan->roots.name;
    snprintf(note, sizeof note, "%s %lld, %s", program != NULL ? program : "run",
             (long long)e->runs, c->note);
    ml_comm_note(e->cpu->base.ranks->comm, note);
    switch (s->op) {
    case ML_OP_ALL_REDUCE:
        return ml_comm_all_reduce(c->group, from, to, s->count, s->dtype, reduce);
    case ML_OP_ALL_GATHER: return ml_comm_all_gather(c->group, from, to, s->count, s->dtype);
    case ML_OP_REDUCE_SCATTER:
        return ml_comm_reduce_scatter(c->group, from, to, s->count, s->dtype, reduce);
    case ML_OP_ALL_TO_ALL:
        return ml_comm_all_to_all(c->group, from, to, s->count / s->ranks, s->dtype);
    case ML_OP_SHIFT: return ml_comm_shift(c->group, from, to, s->count, s->dtype);
    case ML_OP_MIRROR: return ml_comm_mirror(c->group, from, to, s->count, s->dtype);
    default: return ml_fail(ML_INTERNAL, "step %u is no collective", c->number);
    }
}

static ml_status command_run(ml_executable *e, command *c) {
    const ml_step *step = c->step;
    ml_pool *pool = e->cpu->pool;
    if (c->kernel != NULL) {
        if (c->parts > 1) return ml_pool_run(pool, c->kernel->units, c->parts, kernel_job, c);
        if (c->kernel->units > 0) kernel_job(c, 0, c->kernel->units, 0);
        return ML_OK;
    }
    if (step->kind == ML_STEP_GEMM) {
        const void *bias = step->gemm->epilogue == ML_EPILOGUE_BIAS ? c->pointers[2] : NULL;
        return cpu_gemm_run(step->gemm, c->pointers[0], c->pointers[1],
                            c->pointers[step->read_count], bias, e->scratch, pool);
    }
    if (step->kind == ML_STEP_RAGGED)
        return cpu_ragged_run(step->ragged, c->pointers, e->scratch, pool);
    if (step->kind == ML_STEP_COPY) {
        const ml_value *value = &e->plan->schedule->values.at[step->values[0]];
        copy_call call = {c->pointers[1], c->pointers[0]};
        int64_t bytes = ml_type_bytes(&value->type);
        int64_t parts = bytes < 1 << 20 ? 1 : ml_pool_threads(pool);
        return ml_pool_run(pool, bytes, parts, copy_job, &call);
    }
    if (step->kind == ML_STEP_COLLECTIVE) return collective_run(e, c);
    return ml_fail(ML_INTERNAL, "step %u has no kernel for the CPU", c->number);
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static const char *command_label(const command *c, char *buffer, size_t size) {
    if (c->kernel != NULL) return c->kernel->label ? c->kernel->label : "kernel";
    if (c->step->ragged != NULL) return ml_ops[ML_OP_RAGGED_DOT + c->step->ragged->outer].name;
    if (c->note != NULL) return c->note;
    if (c->step->gemm == NULL) return "copy";
    const ml_gemm *g = c->step->gemm;
    long long batches = (long long)(g->batch[0] * g->batch[1] * g->batch[2]);
    snprintf(buffer, size, "gemm %lldx%lldx%lld", (long long)g->m, (long long)g->n,
             (long long)g->k);
    if (batches != 1) {
        size_t length = strlen(buffer);
        snprintf(buffer + length, size - length, " x%lld", batches);
    }
    return buffer;
}

/* MLUA_DEBUG=2: a line for each command of the run that just ended. */
static void print_times(const ml_executable *e) {
    const ml_graph *g = e->plan->graph;
    double total = 0;
    fprintf(stderr, "%5s %9s %8s %8s  %s\n", "step", "ms", "GB/s", "GFLOP/s", "kernel");
    for (uint32_t i = 0; i < e->command_count; i++) {
        const command *c = &e->commands[i];
        char buffer[96];
        const ml_origin *o = c->step->node != 0 ? ml_graph_origin(g, c->step->node) : NULL;
        double s = e->seconds[i] > 0 ? e->seconds[i] : 1e-9;
        total += e->seconds[i];
        fprintf(stderr, "%5u %9.3f %8.1f %8.1f  %s", c->number, s * 1e3,
                (double)c->step->bytes / s * 1e-9, c->step->flops / s * 1e-9,
                command_label(c, buffer, sizeof buffer));
        if (o != NULL && o->module != NULL && o->module[0]) fprintf(stderr, "  %s", o->module);
        if (o != NULL && o->file != NULL) fprintf(stderr, "  %s:%d", o->file, o->line);
        fprintf(stderr, "\n");
    }
    fprintf(stderr, "total %9.3f ms\n", total * 1e3);
}

ml_status cpu_exec_run(ml_executable *e) {
    bool timed = ml_knobs()->debug >= 2;
    e->runs++;
    ml_status status = e->checker != NULL ? ml_check_begin(e->checker) : ML_OK;
    for (uint32_t i = 0; i < e->command_count && status == ML_OK; i++) {
        command *c = &e->commands[i];
        bool begins = i == 0 || e->commands[i - 1].number != c->number;
        if (begins && e->checker != NULL) status = ml_check_reads(e->checker, c->number);
        double start = timed ? seconds_now() : 0;
        if (status == ML_OK) status = command_run(e, c);
        if (timed) e->seconds[i] = seconds_now() - start;
        bool ends = i + 1 == e->command_count || e->commands[i + 1].number != c->number;
        if (status == ML_OK && ends && e->checker != NULL) {
            status = ml_check_step(e->checker, c->number);
        }
    }
    if (status == ML_OK && timed) print_times(e);
    return status;
}
