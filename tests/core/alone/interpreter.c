/* A device for the core alone: it computes what each step of a plan writes by the reference
 * interpreter, from what the step reads in memory and from nothing else. So a value that the plan
 * overwrites too early, or never writes, gives another result. */
#include <string.h>

#include "runtime/exec/session.h"
#include "runtime/graph/analysis.h"
#include "runtime/graph/convert.h"

struct ml_executable {
    const ml_plan *plan;
    ml_arena *arena; /* of one run */
    char **memory;   /* by storage */
};

static const ml_device_ops interpreter;

static ml_status opened(const char *name, int ordinal, ml_device **device) {
    (void)name, (void)ordinal;
    *device = ml_alloc(sizeof **device);
    if (*device == NULL) return ml_fail(ML_NO_MEMORY, "out of memory");
    (*device)->ops = &interpreter;
    strcpy((*device)->description, "the reference interpreter");
    (*device)->target = (ml_target){.kind = ML_TARGET_C, .threads = 1, .vector_bytes = 32};
    return ML_OK;
}
static void closed(ml_device *device) {
    ml_free(device);
}
static ml_status allocated(ml_device *device, int64_t bytes, void **memory) {
    (void)device;
    *memory = ml_alloc((size_t)bytes);
    if (*memory == NULL) return ml_fail(ML_NO_MEMORY, "out of memory");
    memset(*memory, 0xff, (size_t)bytes); /* NaN, until something is written */
    return ML_OK;
}
static void released(ml_device *device, void *memory) {
    (void)device;
    ml_free(memory);
}
static ml_status copied(ml_device *device, void *to, const void *from, int64_t bytes) {
    (void)device;
    memcpy(to, from, (size_t)bytes);
    return ML_OK;
}
static ml_status zeroed(ml_device *device, void *memory, int64_t bytes) {
    (void)device;
    memset(memory, 0, (size_t)bytes);
    return ML_OK;
}
static ml_status waited(ml_device *device) {
    (void)device;
    return ML_OK;
}

/* ---- Programs ---- */
static ml_status loaded(ml_device *device, const ml_plan *plan, ml_executable **executable) {
    (void)device;
    *executable = ml_alloc(sizeof **executable);
    if (*executable == NULL) return ml_fail(ML_NO_MEMORY, "out of memory");
    **executable = (ml_executable){.plan = plan, .arena = ml_arena_new()};
    (*executable)->memory = ml_alloc((plan->schedule->storages.count + 1) * sizeof(char *));
    return ML_OK;
}
static ml_status bound(ml_executable *e, void *const *addresses) {
    for (uint32_t i = 0; i < e->plan->schedule->storages.count; i++) e->memory[i] = addresses[i];
    return ML_OK;
}
static void unloaded(ml_executable *e) {
    ml_arena_free(e->arena);
    ml_free(e->memory);
    ml_free(e);
}

/* For each element: its number in type order, and its place in the storage. */
typedef void element_use(void *context, int64_t number, int64_t place);
static void each_element(const ml_value *value, element_use *use, void *context) {
    int64_t at[ML_MAX_AXES] = {0}, place = value->offset;
    for (int64_t i = 0; i < ml_type_elements(&value->type); i++) {
        use(context, i, place);
        for (int axis = value->type.rank - 1; axis >= 0; axis--) {
            place += value->stride[axis];
            if (++at[axis] < value->type.size[axis]) break;
            place -= value->stride[axis] * value->type.size[axis];
            at[axis] = 0;
        }
    }
}

typedef struct {
    ml_dtype dtype;
    void *memory;
    double *numbers;
} transfer;
static void read_element(void *context, int64_t number, int64_t place) {
    const transfer *t = context;
    t->numbers[number] = ml_element(t->dtype, t->memory, place);
}
static void write_element(void *context, int64_t number, int64_t place) {
    const transfer *t = context;
    ml_set_element(t->dtype, t->memory, place, t->numbers[number]);
}

/* One step: its graph is a copy of the plan's between what it reads and what it writes. */
typedef struct {
    ml_executable *e;
    const ml_step *step;
    ml_graph *graph;
    ml_ref *copy; /* by node of the plan's graph; 0: not copied */
    const double **inputs;
} one_step;

static const ml_value *value_at(const one_step *s, int i) {
    return &s->e->plan->schedule->values.at[s->step->values[i]];
}

static ml_type type_in(const one_step *s, ml_type type) {
    for (int i = 0; i < type.rank; i++)
        type.axis[i] = ml_axis_named(s->graph, ml_axis_name(s->e->plan->graph, type.axis[i]));
    return type;
}

static ml_ref read_value(one_step *s, const ml_value *value) {
    ml_input input = {.name = "read", .type = type_in(s, value->type)};
    transfer t = {(ml_dtype)value->type.dtype, s->e->memory[value->storage], NULL};
    t.numbers = ML_NEW_ARRAY(s->e->arena, double, ml_type_elements(&value->type) + 1);
    each_element(value, read_element, &t);
    int64_t id = ml_graph_add_input(s->graph, &input);
    s->inputs[id] = t.numbers;
    return ml_graph_add(s->graph, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
}

static ml_ref copied_node(one_step *s, ml_ref n) {
    const ml_graph *g = s->e->plan->graph;
    const ml_node *node = ml_graph_node(g, n);
    if (s->copy[n] != 0) return s->copy[n];
    if (node->op == ML_OP_STATE || node->op == ML_OP_INPUT)
        ml_raise(ML_INTERNAL, "a step computes with %%%u, which it does not read", n);
    ml_ref *sources = ML_NEW_ARRAY(s->e->arena, ml_ref, node->source_count + 1);
    for (int i = 0; i < node->source_count; i++)
        sources[i] = copied_node(s, ml_graph_source(g, n, i));
    return s->copy[n] = ml_graph_copy(s->graph, g, n, sources);
}

static void run_step(one_step *s) {
    const ml_step *step = s->step;
    s->graph = ml_graph_new();
    s->copy = ML_NEW_ARRAY(s->e->arena, ml_ref, ml_graph_count(s->e->plan->graph) + 1);
    s->inputs = ML_NEW_ARRAY(s->e->arena, const double *, step->read_count + 1);
    for (int i = 0; i < step->read_count; i++) {
        const ml_value *value = value_at(s, i);
        if (value->node == 0) ml_raise(ML_INTERNAL, "a step reads partial results");
        s->copy[value->node] = read_value(s, value);
    }
    for (int i = step->read_count; i < step->read_count + step->write_count; i++) {
        const ml_value *value = value_at(s, i);
        ml_ref node = step->kind == ML_STEP_COPY ? s->copy[value_at(s, 0)->node]
                                                 : copied_node(s, value->node);
        transfer t = {(ml_dtype)value->type.dtype, s->e->memory[value->storage], NULL};
        ml_reference(s->graph, NULL, s->inputs, &node, 1, &t.numbers, false, s->e->arena);
        each_element(value, write_element, &t);
    }
}

static void run_body(void *context) {
    one_step *s = context;
    const ml_schedule *schedule = s->e->plan->schedule;
    for (uint32_t i = 0; i < schedule->steps.count; i++) {
        s->step = &schedule->steps.at[i];
        run_step(s);
        ml_graph_free(s->graph);
        s->graph = NULL;
    }
}

static ml_status ran(ml_executable *e) {
    one_step s = {.e = e};
    ml_status status = ml_protect(run_body, &s);
    if (s.graph != NULL) ml_graph_free(s.graph);
    return status;
}

static const ml_device_ops interpreter = {
    .name = "interpreter",
    .close = closed,
    .allocate = allocated,
    .release = released,
    .upload = copied,
    .download = copied,
    .copy = copied,
    .zero = zeroed,
    .wait = waited,
    .load = loaded,
    .bind = bound,
    .run = ran,
    .unload = unloaded,
};

/* In place of runtime/exec/beside_core.c and exec/pipeline: one rank, this device, no stages. */
static void nothing_to_unload(ml_program *program) {
    (void)program;
}
const beside_core_ops beside_core = {.device_open = opened, .device_close = closed};
const staged_program_ops staged_programs = {.unload = nothing_to_unload};
