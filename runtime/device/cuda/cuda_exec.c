#ifdef MLUA_CUDA
/* Executables: a plan prepared for the GPU.
 *
 * Loading compiles kernels on a pool of threads while a further thread opens the libraries and
 * builds attention plans. The first run enqueues step by step, which makes every library load its
 * kernels; the second one captures the whole step into one CUDA graph, which later runs replay, but
 * for long steps that copy beside computation (cuda_enqueue.c). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codegen/jit/jit.h"
#include "runtime/base/knobs.h"
#include "runtime/base/process.h"
#include "runtime/device/cuda/cuda_ce_collectives.h"

/* ---- Libraries, beside the compilation ------------------------------------------------------- */
typedef struct {
    ml_executable *executable;
    bool wants_gemm, wants_dnn;
    ml_status status;
    ml_error error; /* errors are a thread's own: carried over by hand */
} library_work;

static ml_status open_libraries(library_work *work) {
    ml_executable *e = work->executable;
    CUDA_TRY(cuCtxSetCurrent(e->device->context));
    if (work->wants_gemm) ML_TRY(cuda_gemm_open(e->device));
    /* A machine without cuDNN runs the template kernels. */
    if (!work->wants_dnn || cuda_dnn_load(e->device) != ML_OK) return ML_OK;
    for (uint32_t i = 0; i < e->step_count; i++) {
        char why[512] = "";
        cuda_step *step = &e->steps[i];
        if (step->step->kind != ML_STEP_ATTENTION) continue;
        cuda_doing(step->what);
        if (step->tuning && cuda_attention_own_won(e->device, step->tuning)) continue;
        if (cuda_dnn_open(e->device) != ML_OK) return ML_OK;
        ML_TRY(cuda_attention_new(e->device, e->plan->schedule, step->step, &step->attention, why,
                                  sizeof why));
        if (!step->attention)
            ml_debug(1, "attention: the template kernel serves %s: %s\n", step->what, why);
    }
    return ML_OK;
}

static void *library_thread(void *argument) {
    library_work *work = argument;
    work->status = open_libraries(work);
    if (work->status != ML_OK) work->error = *ml_error_last();
    return NULL;
}

/* ---- Kernels --------------------------------------------------------------------------------- */
static cuda_function *find_function(cuda_device *d, uint64_t key) {
    uint32_t cursor = 0, at;
    while ((at = ml_index_next(&d->function_index, key, &cursor)) != ML_INDEX_NONE)
        if (d->functions.at[at].key == key) return &d->functions.at[at];
    return NULL;
}

/* Raises. What it adds to the device's list stays there when a later one fails. */
static void load_function(cuda_device *d, const ml_kernel *kernel, const void *image) {
    cuda_function *f = ML_PUSH(d->arena, &d->functions);
    cuda_doing(kernel->label);
    ML_CHECK(CUDA_OK(cuModuleLoadData(&f->module, image)));
    ML_CHECK(CUDA_OK(cuModuleGetFunction(&f->function, f->module, kernel->entry)));
    f->key = kernel->key;
    f->shared_bytes = 0; /* 48 KiB, less what the kernel declares itself, are allowed unasked */
    ml_index_add(&d->function_index, kernel->key, d->functions.count - 1);
}

typedef ML_VEC(ml_kernel *) kernel_list;

/* The chain that begins with k. */
static void list_kernels(ml_executable *e, ml_kernel *k, ml_index *seen, kernel_list *list) {
    for (; k; k = k->next) {
        uint32_t cursor = 0;
        if (find_function(e->device, k->key)) continue;
        if (ml_index_next(seen, k->key, &cursor) != ML_INDEX_NONE) continue;
        ml_index_add(seen, k->key, list->count);
        *ML_PUSH(e->arena, list) = k;
    }
}

/* Those of programs that are loaded next, and of the bodies of loops. */
static void list_plan(ml_executable *e, const ml_plan *plan, ml_index *seen, kernel_list *list) {
    for (uint32_t i = 0; i < plan->schedule->steps.count; i++) {
        const ml_step *step = &plan->schedule->steps.at[i];
        list_kernels(e, step->kernel, seen, list);
        if (step->loop) list_plan(e, step->loop->plan, seen, list);
    }
}

typedef struct {
    cuda_device *device;
    kernel_list list;
    const void **images;
} image_work;

static void load_images(void *argument) {
    const image_work *work = argument;
    for (uint32_t i = 0; i < work->list.count; i++)
        load_function(work->device, work->list.at[i], work->images[i]);
}

/* Of this host: each has a GPU of its own, unless they take themselves for those of several. */
static int local_ranks(const cuda_device *d) {
    if (!d->base.ranks || !d->base.ranks->comm) return 1;
    int world = ml_comm_world(d->base.ranks->comm), gpus = ml_cuda_count();
    return d->base.options.hosts > 1 || world < gpus ? world : gpus;
}

/* Kernels of attention come second, once it is known what cuDNN serves, but for those that may be
 * preferred to it. */
static bool takes_part(const cuda_step *step, bool templates) {
    if (step->step->kind != ML_STEP_ATTENTION) return !templates;
    return templates ? !step->attention : step->tuning != NULL;
}

static ml_status compile_list(ml_executable *e, kernel_list list) {
    if (list.count == 0) return ML_OK;
    image_work work = {e->device, list, ML_NEW_ARRAY(e->arena, const void *, list.count)};
    int64_t *sizes = ML_NEW_ARRAY(e->arena, int64_t, list.count);
    int ranks = local_ranks(e->device), threads = ml_cpu_count() < 32 ? ml_cpu_count() : 32;
    if (ranks > 1) ml_jit_cuda_share(ml_comm_local_rank(e->device->base.ranks->comm), ranks);
    threads = threads > 2 * ranks ? threads / ranks : 2; /* a compiler's memory counts too */
    ml_pool *pool = ml_pool_new(threads);
    if (!pool) ml_raise(ML_NO_MEMORY, "no memory for %d compile threads", threads);
    ml_jit_cuda *jit = NULL;
    ml_status status = ml_jit_cuda_compile(list.at, (int)list.count, e->device->base.target.arch,
                                           pool, &jit, work.images, sizes);
    ml_pool_free(pool);
    if (status == ML_OK) status = ml_protect(load_images, &work);
    if (jit) ml_jit_cuda_free(jit);
    return status;
}

/* Compile and load what the device does not have yet. Distinct keys are compiled once. */
static ml_status try_kernels(ml_executable *e, bool templates) {
    kernel_list list = {0};
    ml_index seen = {.arena = e->arena};
    for (uint32_t i = 0; i < e->step_count; i++) {
        const cuda_step *step = &e->steps[i];
        if (takes_part(step, templates)) list_kernels(e, step->kernel, &seen, &list);
        if (step->step->loop && !templates) list_plan(e, step->step->loop->plan, &seen, &list);
    }
    for (const ml_plan *r = e->plan->rebuild; r && !templates; r = r->next)
        list_plan(e, r, &seen, &list);
    return compile_list(e, list);
}
/* Kernels with instructions that this NVRTC does not know give way to those it knows. */
static bool take_others(ml_executable *e, bool templates) {
    bool any = false;
    for (uint32_t i = 0; i < e->step_count; i++) {
        cuda_step *step = &e->steps[i];
        if (!takes_part(step, templates) || !step->kernel || !step->kernel->fallback) continue;
        step->kernel = step->kernel->fallback;
        any = true;
    }
    return any;
}

/* Raises. */
static void load_kernels(ml_executable *e, bool templates) {
    for (uint32_t i = 0; i < e->step_count; i++) cuda_maps_choose(&e->steps[i]);
    ml_status status = try_kernels(e, templates);
    while (status == ML_COMPILE && take_others(e, templates)) {
        fprintf(stderr, "mlua: with other kernels, which are slower: %s\n", ml_error_last()->text);
        status = try_kernels(e, templates);
    }
    if (status != ML_OK) ml_raise_last();
}

/* Launches of a kernel and its chain. Raises. */
static void prepare_launches(ml_executable *e, cuda_step *step) {
    const ml_kernel *k = step->kernel;
    int count = 0;
    for (const ml_kernel *at = k; at; at = at->next) count++;
    if (count == 0)
        ml_raise(ML_INTERNAL, "no kernel was generated for %s, and no library serves it",
                 step->what);
    step->launches = ML_NEW_ARRAY(e->arena, cuda_launch, count);
    step->launch_count = count;
    cuda_doing(step->what);
    for (int i = 0; i < count; i++, k = k->next) {
        cuda_launch *launch = &step->launches[i];
        cuda_function *f = find_function(e->device, k->key);
        if (k->shared_bytes > f->shared_bytes) {
            ML_CHECK(CUDA_OK(cuFuncSetAttribute(f->function,
                                                CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                (int)k->shared_bytes)));
            f->shared_bytes = k->shared_bytes;
        }
        launch->function = f->function;
        launch->kernel = k;
        enum { PADDING = ML_MAP_BYTES / sizeof(void *) }; /* the struct may be aligned */
        int maps = k->map_count * ML_MAP_BYTES / (int)sizeof(void *);
        int scalars = k->scalar_count + k->table_count;
        launch->arguments =
            ML_NEW_ARRAY(e->arena, void *, maps + k->pointer_count + scalars + PADDING);
        launch->pointers = launch->arguments + maps;
        for (int s = 0; s < scalars; s++) {
            const int64_t *from =
                s < k->scalar_count ? &k->scalar[s] : &k->table[s - k->scalar_count];
            memcpy(&launch->pointers[k->pointer_count + s], from, 8);
        }
    }
}

/* ---- GEMMs ----------------------------------------------------------------------------------- */
static int64_t largest_power(int64_t bytes) {
    return bytes == 0 || (bytes & 255) == 0 ? 256 : bytes & -bytes;
}

/* What an operand's address is a multiple of, through all batches; storages are at 256 B. */
static int64_t operand_alignment(const ml_schedule *s, uint32_t value,
                                 const int64_t *batch_stride) {
    const ml_value *v = &s->values.at[value];
    int64_t bytes = ml_dtypes[v->type.dtype].bytes;
    int64_t alignment = largest_power(v->offset * bytes);
    for (int i = 0; i < ML_GEMM_BATCHES && batch_stride; i++) {
        int64_t other = largest_power(batch_stride[i] * bytes);
        if (other < alignment) alignment = other;
    }
    return alignment;
}

static ml_status prepare_gemm(ml_executable *e, cuda_step *step) {
    const ml_schedule *s = e->plan->schedule;
    const ml_gemm *g = step->step->gemm;
    const uint32_t *values = step->step->values;
    int reads = step->step->read_count;
    cuda_gemm_shape shape = {.gemm = *g};
    cuda_doing(step->what);
    shape.alignment[0] = operand_alignment(s, values[0], g->a_batch);
    shape.alignment[1] = operand_alignment(s, values[1], g->b_batch);
    shape.alignment[2] = operand_alignment(s, values[reads], g->c_batch);
    shape.alignment[3] = 256;
    if (g->epilogue == ML_EPILOGUE_BIAS) shape.alignment[3] = operand_alignment(s, values[2], NULL);
    return cuda_gemm_find(e->device, &shape, &step->gemm);
}

/* ---- Load ------------------------------------------------------------------------------------ */
static const char *describe_step(ml_executable *e, uint32_t i) {
    const ml_step *step = &e->plan->schedule->steps.at[i];
    const char *label = ml_step_label(step);
    const ml_origin *origin = step->node ? ml_graph_origin(e->plan->graph, step->node) : NULL;
    if (origin && origin->file)
        return ml_arena_format(e->arena, "step %u (%s), %s:%d", i, label, origin->file,
                               origin->line);
    return ml_arena_format(e->arena, "step %u (%s)", i, label);
}

static void describe_steps(ml_executable *e, library_work *work) {
    const ml_schedule *s = e->plan->schedule;
    e->step_count = s->steps.count;
    e->steps = ML_NEW_ARRAY(e->arena, cuda_step, e->step_count + 1);
    e->addresses = ML_NEW_ARRAY(e->arena, void *, s->storages.count + 1);
    for (uint32_t i = 0; i < e->step_count; i++) {
        cuda_step *step = &e->steps[i];
        step->step = &s->steps.at[i];
        step->kernel = step->step->kernel;
        step->what = describe_step(e, i);
        step->tuning = cuda_attention_tuning_key(e, step->step);
        step->pointers =
            ML_NEW_ARRAY(e->arena, void *, step->step->read_count + step->step->write_count + 1);
        work->wants_gemm |= step->step->kind == ML_STEP_GEMM;
        work->wants_dnn |= step->step->kind == ML_STEP_ATTENTION;
    }
}

static void load_kernels_body(void *executable) {
    load_kernels(executable, false);
}

/* Kernels, by `body`, and libraries at the same time; raises. */
static void load_code(void (*body)(void *), void *argument, library_work *work) {
    pthread_t thread;
    bool started = (work->wants_gemm || work->wants_dnn) &&
                   ml_process_thread(&thread, library_thread, work) == 0;
    ml_status status = ml_protect(body, argument);
    ml_error error = {0};
    if (status != ML_OK) error = *ml_error_last();
    if (started)
        pthread_join(thread, NULL);
    else
        library_thread(work);
    if (status == ML_OK && work->status != ML_OK) error = work->error, status = work->status;
    if (status == ML_OK) return;
    *ml_error_last() = error;
    ml_raise_last();
}

static void load_body(void *argument) {
    ml_executable *e = argument;
    library_work work = {.executable = e};
    describe_steps(e, &work);
    load_code(load_kernels_body, e, &work);
    load_kernels(e, true);
    for (uint32_t i = 0; i < e->step_count; i++)
        if (e->steps[i].step->kind == ML_STEP_LOOP) cuda_loop_load(e, &e->steps[i]);
    cuda_collect_load(e);
    cuda_lead_load(e);
    cuda_prefetch_load(e);
    cuda_host_copy_load(e);
    int64_t workspace = work.wants_gemm ? ML_GEMM_WORKSPACE : 0;
    for (uint32_t i = 0; i < e->step_count; i++) {
        cuda_step *step = &e->steps[i];
        bool attention = step->step->kind == ML_STEP_ATTENTION;
        /* Kernels that gave way to others, for want of instructions, do not contend. */
        step->undecided = step->attention && step->tuning && step->kernel->fallback;
        if (step->step->kind == ML_STEP_GEMM) ML_CHECK(prepare_gemm(e, step));
        if (step->step->kind == ML_STEP_KERNEL ||
            (attention && (!step->attention || step->undecided)))
            prepare_launches(e, step);
        if (!step->attention) continue;
        int64_t bytes = cuda_attention_workspace(step->attention);
        if (bytes > workspace) workspace = bytes;
    }
    ML_CHECK(cuda_workspace(e->device, workspace));
}

static ml_status load(cuda_device *device, const ml_plan *plan, bool check,
                      ml_executable **executable) {
    ml_executable *e = ml_alloc(sizeof *e);
    *executable = NULL;
    if (!e) return ml_fail(ML_NO_MEMORY, "no memory for an executable");
    e->device = device;
    e->plan = plan;
    e->arena = ml_arena_new();
    ml_status status =
        e->arena ? ml_protect(load_body, e) : ml_fail(ML_NO_MEMORY, "no memory for an executable");
    cuda_doing(NULL);
    if (status == ML_OK && check) status = ml_check_new(plan, cuda_read_storage, e, &e->checker);
    if (status != ML_OK) {
        ml_error error = *ml_error_last();
        cuda_unload(e);
        *ml_error_last() = error;
        return status;
    }
    *executable = e;
    return ML_OK;
}

ml_status cuda_load(ml_device *device, const ml_plan *plan, ml_executable **executable) {
    return load((cuda_device *)device, plan, device->options.check, executable);
}

/* Of several plans: their executables find the functions on the device. */
typedef struct {
    ml_executable *e; /* without steps */
    const ml_plan *const *plans;
    int count;
} plans_work;

static void compile_plans(void *argument) {
    const plans_work *work = argument;
    kernel_list list = {0};
    ml_index seen = {.arena = work->e->arena};
    for (int i = 0; i < work->count; i++) list_plan(work->e, work->plans[i], &seen, &list);
    ml_status status = compile_list(work->e, list);
    if (status == ML_COMPILE) /* the load of each decides on other kernels */
        ml_debug(1, "%s\n", ml_error_last()->text);
    else
        ML_CHECK(status);
}

static void compile_plans_body(void *argument) {
    plans_work *work = argument;
    library_work libraries = {.executable = work->e};
    for (int i = 0; i < work->count; i++)
        for (uint32_t k = 0; k < work->plans[i]->schedule->steps.count; k++) {
            ml_step_kind kind = work->plans[i]->schedule->steps.at[k].kind;
            libraries.wants_gemm |= kind == ML_STEP_GEMM;
            libraries.wants_dnn |= kind == ML_STEP_ATTENTION;
        }
    load_code(compile_plans, work, &libraries);
}

ml_status cuda_compile(ml_device *device, const ml_plan *const *plans, int count) {
    plans_work work = {ml_alloc(sizeof *work.e), plans, count};
    if (!work.e) return ml_fail(ML_NO_MEMORY, "no memory to compile kernels");
    work.e->device = (cuda_device *)device;
    work.e->arena = ml_arena_new();
    ml_status status = work.e->arena ? ml_protect(compile_plans_body, &work)
                                     : ml_fail(ML_NO_MEMORY, "no memory to compile kernels");
    if (work.e->arena) ml_arena_free(work.e->arena);
    ml_free(work.e);
    return status;
}

ml_status cuda_load_body(cuda_device *device, const ml_plan *plan, ml_executable **body) {
    return load(device, plan, false, body);
}

void cuda_unload(ml_executable *e) {
    if (!e) return;
    cuda_prefetch_await_all(e->device);
    cuda_wait_for(e->device, NULL);
    ml_check_free(e->checker);
    cuda_graph_forget(e);
    cuda_times_forget(e);
    cuda_collect_unload(e);
    cuda_lead_unload(e);
    cuda_host_copy_unload(e);
    cuda_ce_unbind(e);
    for (uint32_t i = 0; i < e->step_count; i++) {
        if (e->steps[i].attention) cuda_attention_free(e->device, e->steps[i].attention);
        cuda_loop_unload(&e->steps[i]);
    }
    ml_arena_free(e->arena);
    ml_free(e);
}

/* ---- Bind ------------------------------------------------------------------------------------ */
static ml_status bind_pointers(ml_executable *e, cuda_step *step) {
    const ml_schedule *s = e->plan->schedule;
    int count = step->step->read_count + step->step->write_count;
    for (int i = 0; i < count; i++) {
        const ml_value *v = &s->values.at[step->step->values[i]];
        step->pointers[i] =
            (char *)e->addresses[v->storage] + v->offset * ml_dtypes[v->type.dtype].bytes;
    }
    for (int i = 0; i < step->launch_count; i++) {
        cuda_launch *launch = &step->launches[i];
        int room = launch->kernel->pointer_count;
        memcpy(launch->pointers, step->pointers,
               (size_t)(count < room ? count : room) * sizeof *step->pointers);
        ML_TRY(cuda_maps_bind(launch));
    }
    return ML_OK;
}

/* Before a run, temporaries hold nothing: a GEMM may be tuned on them. */
static bool is_temporary(const ml_executable *e, uint32_t value) {
    const ml_schedule *s = e->plan->schedule;
    return s->storages.at[s->values.at[value].storage].kind == ML_STORAGE_TEMPORARY;
}

static ml_status tune_gemm(ml_executable *e, const cuda_step *step) {
    const uint32_t *values = step->step->values;
    void *operands[CUDA_GEMM_OPERANDS];
    bool scratch[3] = {is_temporary(e, values[0]), is_temporary(e, values[1]),
                       is_temporary(e, values[step->step->read_count])};
    cuda_gemm_operands(step, operands);
    return cuda_gemm_tune(e->device, step->gemm, operands, scratch);
}

static ml_status bind_step(ml_executable *e, cuda_step *step) {
    cuda_doing(step->what);
    ML_TRY(bind_pointers(e, step));
    if (step->gemm) ML_TRY(tune_gemm(e, step));
    if (step->loop) ML_TRY(cuda_loop_bind(e, step));
    if (step->attention) ML_TRY(cuda_attention_bind(e->device, step->attention, step->pointers));
    return step->undecided ? cuda_attention_tune(e, step) : ML_OK;
}

ml_status cuda_bind_body(ml_executable *e, bool choose) {
    for (uint32_t i = 0; i < e->step_count; i++) {
        cuda_step *step = &e->steps[i];
        if (choose) {
            ML_TRY(bind_step(e, step));
            continue;
        }
        ML_TRY(bind_pointers(e, step));
        if (step->attention)
            ML_TRY(cuda_attention_bind(e->device, step->attention, step->pointers));
    }
    return ML_OK;
}

ml_status cuda_bind(ml_executable *e, void *const *addresses) {
    ml_status status = ML_OK;
    if (e->device->nccl) {
        ML_TRY(cuda_nccl_ready(e->device));
        ml_comm_busy(e->device->base.ranks->comm, "tuning kernels");
    }
    cuda_graph_forget(e);
    e->graph_refused = false;
    e->runs = 0;
    bool others = addresses != (void *const *)e->addresses;
    if (others)
        memcpy(e->addresses, addresses, e->plan->schedule->storages.count * sizeof *addresses);
    for (uint32_t i = 0; i < e->step_count && status == ML_OK; i++)
        status = bind_step(e, &e->steps[i]);
    if (others && status == ML_OK) status = cuda_ce_bind(e);
    cuda_doing(NULL);
    if (e->device->nccl) ml_comm_done(e->device->base.ranks->comm);
    e->workspace_generation = e->device->workspace_generation;
    e->bound = status == ML_OK;
    return status;
}

/* The program waits for prefetches of what it uses; a graph that waits for fewer is captured anew.
 */
static ml_status follow_prefetches(ml_executable *e) {
    bool more = false;
    ML_TRY(cuda_prefetch_follow(e, &more));
    if (more) cuda_graph_forget(e);
    return ML_OK;
}

/* ---- Run ------------------------------------------------------------------------------------- */
ml_status cuda_run(ml_executable *e) {
    if (!e->bound) return ml_fail(ML_INTERNAL, "an executable was run before it was bound");
    if (e->workspace_generation != e->device->workspace_generation)
        ML_TRY(cuda_bind(e, e->addresses));
    e->runs++;
    e->behind = e->device->marked;
    e->device->marked = NULL;
    e->led = false;
    if (e->device->nccl) cuda_note_run(e);
    ml_run_mode mode = ml_profile_mode(e->device->base.profile);
    const bool plain = !e->checker && (mode == ML_RUN_PLAIN || mode == ML_RUN_WHOLE);
    ML_TRY(plain ? follow_prefetches(e) : cuda_prefetch_await_all(e->device));
    if (e->checker) return cuda_run_checked(e);
    return mode == ML_RUN_PLAIN ? cuda_run_plain(e) : cuda_run_profiled(e, mode);
}

ml_status cuda_ready(ml_executable *e) {
    if (e->workspace_generation != e->device->workspace_generation)
        ML_TRY(cuda_bind(e, e->addresses));
    if (e->checker || e->graph || e->graph_refused) return ML_OK;
    ML_TRY(follow_prefetches(e));
    ML_TRY(cuda_graph_capture(e));
    if (e->graph) CUDA_TRY(cuGraphUpload(e->graph, e->device->stream));
    cuda_doing(NULL);
    return cuda_wait_for(e->device, NULL);
}

#endif
