/* Programs on the CPU: commands, one a kernel or a matrix product, in the order of the steps. */
#include "runtime/device/cpu/cpu_exec.h"

#include <string.h>

#include "codegen/jit/jit.h"
#include "runtime/base/clock.h"
#include "runtime/device/check.h"
#include "runtime/device/cpu/cpu_internal.h"

/* What a loop's body reads and writes at one position, by number. */
typedef struct {
    char **inputs, **outputs;
} loop_memory;

typedef struct {
    const ml_step *step;
    uint32_t number;         /* of the step */
    const ml_kernel *kernel; /* NULL for products and copies */
    ml_c_function *function;
    char **pointers; /* of the step's values; set by bind */
    long long scalars[ML_MAX_SCALARS];
    int64_t parts;
    ml_group *group;     /* of collectives */
    ml_executable *body; /* of loops */
    void **addresses;    /* of the body's storages */
    loop_memory memory;
    const char *note; /* what others print while this rank is in it */
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
    ml_profile_program *profiled;  /* its description; NULL until a run is timed */
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
    ml_text_add(&note, "%s over %s", ml_collectives[c->step->collective->kind].name,
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
    if (c->step->kind == ML_STEP_COLLECTIVE) collective_fill(e, c);
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
    ML_VEC(ml_kernel *) kernels;
    ML_VEC(command *) users; /* of the kernels */
    ml_arena *arena;
    int64_t scratch_bytes;
} load_work;

static void load_commands(load_work *work, ml_executable *e);

/* The body of a loop: an executable whose kernels are loaded with the others. */
static void load_loop(load_work *work, ml_executable *e, command *c) {
    c->body = ML_NEW(e->arena, ml_executable);
    c->body->cpu = e->cpu;
    c->body->plan = c->step->loop->plan;
    c->body->arena = e->arena;
    size_t inputs = (size_t)(2 * c->step->read_count + c->step->write_count);
    c->memory.inputs = ML_NEW_ARRAY(e->arena, char *, inputs + 1);
    c->memory.outputs = ML_NEW_ARRAY(e->arena, char *, c->body->plan->roots.output_count + 1);
    c->addresses = ML_NEW_ARRAY(e->arena, void *, c->body->plan->schedule->storages.count + 1);
    load_commands(work, c->body);
}

static void load_commands(load_work *work, ml_executable *e) {
    const ml_schedule *s = e->plan->schedule;
    int threads = ml_pool_threads(e->cpu->pool);
    uint32_t count = count_commands(s), at = 0;
    e->commands = ML_NEW_ARRAY(e->arena, command, (size_t)count + 1);
    e->addresses = ML_NEW_ARRAY(e->arena, void *, (size_t)s->storages.count + 1);
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
            if (kernel != NULL) {
                *ML_PUSH(work->arena, &work->kernels) = kernel;
                *ML_PUSH(work->arena, &work->users) = &e->commands[at - 1];
            }
            if (step->loop != NULL) load_loop(work, e, &e->commands[at - 1]);
            kernel = kernel != NULL ? kernel->next : NULL;
        } while (kernel != NULL);
    }
    e->command_count = at;
}

static void load_body(void *context) {
    load_work *work = context;
    work->arena = work->e->arena;
    load_commands(work, work->e);
}

static ml_status load_functions(load_work *work) {
    ml_executable *e = work->e;
    size_t count = work->kernels.count;
    ml_c_function **functions = ml_alloc((count + 1) * sizeof *functions);
    if (functions == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while loading kernels");
    ml_status status = ML_OK;
    if (count > 0) {
        status = ml_jit_c_load(work->kernels.at, (int)count, e->cpu->pool, &e->jit, functions);
    }
    for (size_t i = 0; i < count && status == ML_OK; i++)
        work->users.at[i]->function = functions[i];
    ml_free(functions);
    return status;
}

typedef struct {
    ml_arena *arena;
    const ml_plan *const *plans;
    int count;
    ML_VEC(ml_kernel *) kernels;
} plans_work;

static void list_plan(plans_work *work, const ml_plan *plan) {
    const ml_schedule *s = plan->schedule;
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        for (ml_kernel *k = step->kernel; k != NULL; k = k->next)
            *ML_PUSH(work->arena, &work->kernels) = k;
        if (step->loop != NULL) list_plan(work, step->loop->plan);
    }
}

static void list_plans(void *context) {
    plans_work *work = context;
    for (int i = 0; i < work->count; i++) list_plan(work, work->plans[i]);
}

/* They are in the cache then, from which a load takes them. */
ml_status cpu_exec_compile(ml_device *device, const ml_plan *const *plans, int count) {
    const cpu_device *cpu = (const cpu_device *)device;
    plans_work work = {.arena = ml_arena_new(), .plans = plans, .count = count};
    if (work.arena == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while compiling kernels");
    ml_status status = ml_protect(list_plans, &work);
    size_t kernels = work.kernels.count;
    ml_c_function **functions = ml_alloc((kernels + 1) * sizeof *functions);
    ml_jit_c *jit = NULL;
    if (functions == NULL) status = ml_fail(ML_NO_MEMORY, "out of memory while compiling kernels");
    if (status == ML_OK && kernels > 0)
        status = ml_jit_c_load(work.kernels.at, (int)kernels, cpu->pool, &jit, functions);
    if (status == ML_OK && jit != NULL) ml_jit_c_free(jit);
    ml_free(functions);
    ml_arena_free(work.arena);
    return status;
}

static void read_storage(void *context, uint32_t storage, int64_t offset, int64_t bytes, void *to) {
    const ml_executable *e = context;
    if (bytes > 0) memcpy(to, (const char *)e->addresses[storage] + offset, (size_t)bytes);
}

/* Bodies of loops work in the same memory. */
static void share_scratch(ml_executable *e, void *scratch) {
    e->scratch = scratch;
    for (uint32_t i = 0; i < e->command_count; i++)
        if (e->commands[i].body != NULL) share_scratch(e->commands[i].body, scratch);
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
        share_scratch(e, e->scratch);
    }
    if (status == ML_OK && e->cpu->base.options.check) {
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
    char *to = c->pointers[1], note[256];
    const char *program = e->plan->roots.name;
    snprintf(note, sizeof note, "%s %lld, %s", program != NULL ? program : "run",
             (long long)e->runs, c->note);
    ml_comm_note(e->cpu->base.ranks->comm, note);
    return ml_comm_collect(c->group, s->kind, from, to, s->count, s->dtype, s->combine);
}

/* What a product is added to must be where the result is written: mostly it is. */
static ml_status accumulate_in_place(ml_executable *e, const command *c) {
    const ml_step *step = c->step;
    const ml_value *value = &e->plan->schedule->values.at[step->values[step->read_count]];
    copy_call call = {c->pointers[step->read_count], c->pointers[step->read_count - 1]};
    if (call.to == call.from) return ML_OK;
    return ml_pool_run(e->cpu->pool, ml_type_bytes(&value->type), 1, copy_job, &call);
}

static ml_status command_run(ml_executable *e, command *c);

static ml_status commands_run(ml_executable *e) {
    ml_status status = ML_OK;
    for (uint32_t i = 0; i < e->command_count && status == ML_OK; i++)
        status = command_run(e, &e->commands[i]);
    return status;
}

static void loop_bind(command *c, const loop_memory *m) {
    const ml_schedule *s = c->body->plan->schedule;
    const ml_loop *loop = c->step->loop;
    char *arena = loop->workspace >= 0 ? c->pointers[loop->workspace] + loop->arena : NULL;
    for (uint32_t i = 0; i < s->storages.count; i++) {
        const ml_storage *storage = &s->storages.at[i];
        c->addresses[i] = storage->kind == ML_STORAGE_INPUT   ? m->inputs[storage->id]
                          : storage->kind == ML_STORAGE_SAVED ? m->outputs[storage->id]
                                                              : arena + storage->offset;
    }
    cpu_exec_bind(c->body, c->addresses);
}

/* Where carried value k is before step i, from 0 on, and after the last. */
static char *carried_at(const command *c, const ml_loop_carried *k, int64_t i) {
    const ml_loop *loop = c->step->loop;
    if (i == loop->length && k->final >= 0) return c->pointers[k->final];
    if (k->history >= 0 && i < loop->length)
        return c->pointers[k->history] + (loop->reverse ? loop->length - 1 - i : i) * k->bytes;
    if (i == 0 && k->initial >= 0) return c->pointers[k->initial];
    return c->pointers[loop->workspace] + k->offset[i & 1];
}

static void loop_begin(const command *c) {
    const ml_loop *loop = c->step->loop;
    for (int i = 0; i < loop->carried_count; i++) {
        const ml_loop_carried *k = &loop->carried[i];
        char *first = carried_at(c, k, 0);
        if (k->initial < 0)
            memset(first, 0, (size_t)k->bytes);
        else if (first != c->pointers[k->initial])
            memcpy(first, c->pointers[k->initial], (size_t)k->bytes);
    }
}

static ml_status loop_run(command *c) {
    const ml_loop *loop = c->step->loop;
    ml_status status = ML_OK;
    loop_begin(c);
    for (int64_t i = 0; i < loop->length && status == ML_OK; i++) {
        int64_t at = loop->reverse ? loop->length - 1 - i : i;
        for (int k = 0; k < loop->input_count; k++) {
            const ml_loop_input *input = &loop->inputs[k];
            c->memory.inputs[input->input] = c->pointers[input->value] + at * input->bytes;
        }
        for (int k = 0; k < loop->stacked_count; k++) {
            const ml_loop_stacked *stacked = &loop->stacked[k];
            c->memory.outputs[stacked->output] = c->pointers[stacked->value] + at * stacked->bytes;
        }
        for (int k = 0; k < loop->carried_count; k++) {
            const ml_loop_carried *carried = &loop->carried[k];
            c->memory.inputs[carried->input] = carried_at(c, carried, i);
            c->memory.outputs[carried->output] = carried_at(c, carried, i + 1);
        }
        loop_bind(c, &c->memory);
        status = commands_run(c->body);
    }
    return status;
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
        ML_TRY(step->gemm->accumulate ? accumulate_in_place(e, c) : ML_OK);
        return cpu_gemm_run(step->gemm, c->pointers[0], c->pointers[1],
                            c->pointers[step->read_count], bias, e->scratch, pool);
    }
    if (step->kind == ML_STEP_RAGGED)
        return cpu_ragged_run(step->ragged, c->pointers, e->scratch, pool);
    if (step->kind == ML_STEP_COPY || step->kind == ML_STEP_HOST_COPY) {
        const ml_value *value = &e->plan->schedule->values.at[step->values[0]];
        copy_call call = {c->pointers[1], c->pointers[0]};
        int64_t bytes = step->host_copy ? step->host_copy->bytes : ml_type_bytes(&value->type);
        int64_t parts = bytes < 1 << 20 ? 1 : ml_pool_threads(pool);
        return ml_pool_run(pool, bytes, parts, copy_job, &call);
    }
    if (step->kind == ML_STEP_COLLECTIVE) return collective_run(e, c);
    if (step->kind == ML_STEP_LOOP) return loop_run(c);
    if (step->kind == ML_STEP_WAIT) return ML_OK; /* what it waits for is done when it returns */
    return ml_fail(ML_INTERNAL, "step %u has no kernel for the CPU", c->number);
}

/* ---- Looking at runs ---- */
typedef struct {
    ml_executable *e;
    uint32_t first, last; /* commands of the step */
} step_call;

static ml_status step_again(const step_call *call) {
    ml_status status = ML_OK;
    for (uint32_t i = call->first; i <= call->last && status == ML_OK; i++)
        status = command_run(call->e, &call->e->commands[i]);
    return status;
}

static ml_status step_fastest(const step_call *call, double *best) {
    double total = 0;
    ml_status status = ML_OK;
    *best = 1e30;
    for (int runs = 0; status == ML_OK && !ml_profile_alone_enough(runs, total); runs++) {
        double start = ml_clock_now();
        status = step_again(call);
        double seconds = ml_clock_now() - start;
        if (seconds < *best) *best = seconds;
        total += seconds;
    }
    return status;
}

/* Copy what a step wrote to `saved`, or back from it. */
static void writes_copy(const step_call *call, char *saved, bool back) {
    const ml_step *step = call->e->commands[call->first].step;
    char **pointers = call->e->commands[call->first].pointers;
    for (int i = step->read_count; i < step->read_count + step->write_count; i++) {
        size_t bytes =
            (size_t)ml_profile_span(&call->e->plan->schedule->values.at[step->values[i]]);
        memcpy(back ? pointers[i] : saved, back ? saved : pointers[i], bytes);
        saved += bytes;
    }
}

/* The step ran just now: repeat it on the same operands, and leave behind what it wrote. */
static ml_status step_alone(const step_call *call) {
    ml_executable *e = call->e;
    const command *c = &e->commands[call->first];
    const ml_schedule *s = e->plan->schedule;
    char *saved = NULL;
    double best;
    if (!ml_profile_wants_alone(e->cpu->base.profile, e->profiled, c->number)) return ML_OK;
    bool changes = ml_profile_changes(s, c->step, (void *const *)c->pointers);
    if (changes) {
        int64_t bytes = 0;
        for (int i = 0; i < c->step->write_count; i++)
            bytes += ml_profile_span(&s->values.at[c->step->values[c->step->read_count + i]]);
        saved = ml_alloc((size_t)bytes + 1);
        if (saved == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while profiling");
        writes_copy(call, saved, false);
    }
    ml_status status = step_fastest(call, &best);
    if (changes) writes_copy(call, saved, true);
    ml_free(saved);
    if (status != ML_OK) return status;
    return ml_profile_alone(e->cpu->base.profile, e->profiled, c->number, best);
}

/* The commands of one step, commands[*at] on; *at becomes that of the next step. */
static ml_status step_run(ml_executable *e, uint32_t *at, ml_run_mode mode) {
    step_call call = {e, *at, *at};
    ml_profile *profile = e->cpu->base.profile;
    uint32_t number = e->commands[*at].number;
    while (call.last + 1 < e->command_count && e->commands[call.last + 1].number == number)
        call.last++;
    *at = call.last + 1;
    ml_status status = e->checker != NULL ? ml_check_reads(e->checker, number) : ML_OK;
    double start = mode == ML_RUN_STEPS ? ml_clock_now() : 0;
    if (status == ML_OK) status = step_again(&call);
    bool works = e->commands[call.first].step->kind != ML_STEP_WAIT;
    if (status == ML_OK && mode == ML_RUN_STEPS && works)
        status = ml_profile_step_ran(profile, e->profiled, number, ML_STREAM_MAIN, start,
                                     ml_clock_now());
    if (status == ML_OK && e->checker != NULL) status = ml_check_step(e->checker, number);
    return status == ML_OK && mode == ML_RUN_ALONE ? step_alone(&call) : status;
}

ml_status cpu_exec_run(ml_executable *e) {
    ml_profile *profile = e->cpu->base.profile;
    ml_run_mode mode = ml_profile_mode(profile);
    ml_status status = ML_OK;
    const ml_ranks *ranks = e->cpu->base.ranks;
    ml_comm *comm = ranks != NULL ? ranks->comm : NULL;
    e->runs++;
    if (mode != ML_RUN_PLAIN) {
        if (e->profiled == NULL) status = ml_profile_describe(profile, e->plan, &e->profiled);
        ml_profile_run_begins(profile);
    }
    double start = mode != ML_RUN_PLAIN ? ml_clock_now() : 0;
    if (status == ML_OK && e->checker != NULL) status = ml_check_begin(e->checker);
    for (uint32_t at = 0; at < e->command_count && status == ML_OK;) {
        status = step_run(e, &at, mode);
        if (comm != NULL) ml_comm_progress(comm);
    }
    if (status == ML_OK && mode != ML_RUN_PLAIN)
        status = ml_profile_run_ends(profile, e->profiled, start, ml_clock_now());
    return status;
}
