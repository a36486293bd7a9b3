/* Comparing steps with the reference interpreter. For each value that a step wrote, the part of
 * the graph between it and the values known so far is copied into a graph of its own, in which
 * known values are inputs. */
#include "runtime/device/check.h"

#include <math.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/graph/convert.h"
#include "runtime/ops/ragged/ragged.h"
#include "runtime/ops/recurrence/recurrence.h"
#include "runtime/passes/passes.h"

struct ml_checker {
    const ml_plan *plan;
    ml_check_read *read;
    void *context;
    ml_arena *arena; /* of one run: what is known */
    double **known;  /* by node: its elements in type order, as the device has them */
};

/* The elements of a value, in type order. */
static double *value_take(ml_checker *c, const ml_value *value, ml_arena *to, ml_arena *scratch) {
    int64_t count = ml_type_elements(&value->type), span = 1, offset = 0, at[ML_MAX_AXES] = {0};
    int64_t width = ml_dtypes[value->type.dtype].bytes;
    double *out = ML_NEW_ARRAY(to, double, count + 1);
    if (count == 0) return out;
    for (int i = 0; i < value->type.rank; i++) span += (value->type.size[i] - 1) * value->stride[i];
    char *memory = ml_arena_alloc(scratch, (size_t)(span * width));
    c->read(c->context, value->storage, value->offset * width, span * width, memory);
    for (int64_t i = 0; i < count; i++) {
        out[i] = ml_element(value->type.dtype, memory, offset);
        for (int axis = value->type.rank - 1; axis >= 0; axis--) {
            offset += value->stride[axis];
            if (++at[axis] < value->type.size[axis]) break;
            offset -= value->stride[axis] * value->type.size[axis];
            at[axis] = 0;
        }
    }
    return out;
}

/* ---- one value worked out again ---- */
typedef struct {
    ml_checker *checker;
    uint32_t step;
    ml_arena *arena; /* scratch */
    ml_graph *graph; /* the copied part */
    ml_ref *copy;    /* by node of the plan's graph */
    const double **inputs;
    bool *unrounded;   /* inputs as the step may have read them before they were rounded to bf16 */
    ml_dtype roughest; /* of the narrow floats that the value is computed from and that may not be
                          rounded; ML_F64: none */
} check_call;

/* What the value of `root` is to be computed from: needed[] nodes, of which taken[] are known. */
static void part_find(const check_call *call, ml_ref root, bool *needed, bool *taken) {
    const ml_graph *g = call->checker->plan->graph;
    bool *computed = ML_NEW_ARRAY(call->arena, bool, (size_t)root + 1);
    computed[root] = needed[root] = true;
    for (ml_ref n = root; n > 0; n--) { /* sources come before their users */
        taken[n] = needed[n] && !computed[n] && call->checker->known[n] != NULL;
        if (!needed[n] || taken[n]) continue;
        const ml_node *node = ml_graph_node(g, n);
        for (int i = 0; i < node->source_count; i++) needed[ml_graph_source(g, n, i)] = true;
        if (node->op == ML_OP_OUT) computed[ml_graph_source(g, n, 0)] = true; /* all its outputs */
    }
}

/* Whether the step may have used a bf16 value before it was rounded: it writes the value itself, or
 * it finishes what an unknown step began (its partial results belong to no node). */
static bool sees_unrounded(const check_call *call, ml_ref n) {
    const ml_schedule *s = call->checker->plan->schedule;
    const ml_step *step = &s->steps.at[call->step];
    for (int i = 0; i < step->read_count + step->write_count; i++)
        if (s->values.at[step->values[i]].node == (i < step->read_count ? 0 : n)) return true;
    return false;
}

static ml_ref input_add(check_call *call, ml_ref n) {
    const ml_graph *g = call->checker->plan->graph;
    ml_input input = {.name = "known", .type = *ml_graph_type(g, n)};
    for (int i = 0; i < input.type.rank; i++) {
        input.type.axis[i] = ml_axis_named(call->graph, ml_axis_name(g, input.type.axis[i]));
    }
    int64_t id = ml_graph_add_input(call->graph, &input);
    call->inputs[id] = call->checker->known[n];
    call->unrounded[id] = ml_is_narrow((ml_dtype)input.type.dtype) && sees_unrounded(call, n);
    return ml_graph_add(call->graph, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
}

/* The value of node n by definition; NULL where something that it needs is not known. */
static double *value_expected(check_call *call, ml_ref root) {
    const ml_graph *g = call->checker->plan->graph;
    bool *needed = ML_NEW_ARRAY(call->arena, bool, (size_t)root + 1);
    bool *taken = ML_NEW_ARRAY(call->arena, bool, (size_t)root + 1);
    call->copy = ML_NEW_ARRAY(call->arena, ml_ref, (size_t)root + 1);
    call->inputs = ML_NEW_ARRAY(call->arena, const double *, (size_t)root + 1);
    call->unrounded = ML_NEW_ARRAY(call->arena, bool, (size_t)root + 1);
    call->roughest = ML_F64;
    part_find(call, root, needed, taken);
    for (ml_ref n = 1; n <= root; n++) {
        const ml_node *node = ml_graph_node(g, n);
        if (!needed[n]) continue;
        ml_dtype dtype = (ml_dtype)ml_graph_type(g, n)->dtype;
        if (ml_is_narrow(dtype) && (!taken[n] || sees_unrounded(call, n)) &&
            ml_dtypes[dtype].digits < ml_dtypes[call->roughest].digits)
            call->roughest = dtype;
        if (taken[n]) {
            call->copy[n] = input_add(call, n);
            continue;
        }
        if (node->op == ML_OP_RECURRENCE) {
            ml_dtype inside = ml_recurrence_roughest(g, n);
            if (ml_dtypes[inside].digits < ml_dtypes[call->roughest].digits)
                call->roughest = inside;
        }
        if (node->op == ML_OP_STATE || node->op == ML_OP_INPUT || node->op == ML_OP_COORDINATE ||
            ml_ops[node->op].op_class == ML_CLASS_COLLECTIVE) {
            return NULL;
        }
        ml_ref *sources = ML_NEW_ARRAY(call->arena, ml_ref, node->source_count + 1);
        for (int i = 0; i < node->source_count; i++) {
            sources[i] = call->copy[ml_graph_source(g, n, i)];
        }
        call->copy[n] = ml_graph_copy(call->graph, g, n, sources);
    }
    double *result = NULL;
    ml_reference(call->graph, NULL, call->inputs, &call->copy[root], 1, &result, false,
                 call->arena);
    return result;
}

/* How far an element may be off, as a share of the largest: 2e-2 for the 8 bits of bf16. */
static double tolerance(ml_dtype dtype) {
    if (ml_is_narrow(dtype)) return ldexp(5.12, -ml_dtypes[dtype].digits);
    return dtype == ML_F32 ? 5e-4 : dtype == ML_F64 ? 1e-9 : 0;
}

/* Tensor cores add the products of 8-bit floats, 32 of them to a sum, with 13 bits behind the
 * largest. Sums of squares are off by twice as much. */
static double adder_tolerance(const ml_graph *g, ml_ref n) {
    enum { ADDENDS = 33, BITS = 13 };
    const bool second = ml_graph_node(g, n)->op == ML_OP_OUT;
    if (second) n = ml_graph_source(g, n, 0);
    const bool scaled =
        ml_is_scaled_dot(g, n) || (ml_op_is_ragged(ml_graph_node(g, n)->op) &&
                                   ml_ragged_is_scaled(g, ml_graph_source(g, n, 0)));
    return scaled ? ldexp(ADDENDS, second - BITS) : 0;
}

/* NaN without a sign, which would be printed. */
static double shown(double x) {
    return isnan(x) ? fabs(x) : x;
}

static void fail(const check_call *call, ml_ref n, int64_t at, double is, double should) {
    const ml_plan *plan = call->checker->plan;
    const ml_step *step = &plan->schedule->steps.at[call->step];
    const ml_origin *origin = ml_graph_origin(plan->graph, n);
    ml_text type = {.arena = call->arena};
    ml_type_print(plan->graph, ml_graph_type(plan->graph, n), &type);
    for (int i = 0; i < step->read_count; i++) {
        ml_ref read = plan->schedule->values.at[step->values[i]].node;
        if (read == 0 || call->checker->known[read] == NULL) continue;
        if (ml_type_elements(ml_graph_type(plan->graph, read)) > at) {
            ml_debug(1, "  element %lld of what it reads, %%%u: %.9g\n", (long long)at, read,
                     shown(call->checker->known[read][at]));
        }
    }
    ml_raise(ML_INTERNAL,
             "MLUA_CHECK: step %u (%s) is wrong: element %lld of %%%u = %s %s is %.9g and should "
             "be %.9g (%s:%d %s)",
             call->step, ml_step_label(step), (long long)at, n,
             ml_ops[ml_graph_node(plan->graph, n)->op].name, type.text, shown(is), shown(should),
             origin->file ? origin->file : "?", origin->line, origin->module ? origin->module : "");
}

static double largest_of(const double *values, int64_t count) {
    double largest = 0;
    for (int64_t i = 0; i < count; i++) {
        if (isfinite(values[i]) && fabs(values[i]) > largest) largest = fabs(values[i]);
    }
    return largest;
}

/* An element may be off by a share of the largest one, as kernels take quick functions, or by what
 * rounding on the way to it may do. */
static void compare(check_call *call, ml_ref n, const double *is, const double *should) {
    const ml_type *type = ml_graph_type(call->checker->plan->graph, n);
    int64_t count = ml_type_elements(type);
    bool is_float = ml_dtypes[type->dtype].kind == ML_KIND_FLOAT;
    ml_dtype dtype = is_float && call->roughest != ML_F64 ? call->roughest : (ml_dtype)type->dtype;
    const double share = fmax(tolerance(dtype), adder_tolerance(call->checker->plan->graph, n));
    double most = share * largest_of(should, count), *bounds = NULL;
    for (int64_t i = 0; i < count; i++) {
        if (is[i] == should[i] || (isnan(is[i]) && isnan(should[i]))) continue;
        double deviation = fabs(is[i] - should[i]);
        if (deviation <= most) continue;
        if (bounds == NULL)
            ml_reference_bounds(call->graph, call->inputs, call->unrounded, call->copy[n], &bounds,
                                call->arena);
        if (!isinf(bounds[i]) && !(deviation <= most + bounds[i]))
            fail(call, n, i, is[i], should[i]);
    }
}

/* Values that are parts or views are checked where a step reads the whole. */
static bool value_is_whole(const ml_checker *c, const ml_value *value) {
    return value->node != 0 && value->offset == 0 && ml_value_contiguous(value) &&
           ml_type_equal(&value->type, ml_graph_type(c->plan->graph, value->node)) &&
           ml_type_bytes(&value->type) == c->plan->schedule->storages.at[value->storage].bytes;
}

static void value_check(check_call *call, const ml_value *value, double *is) {
    ml_checker *c = call->checker;
    const ml_node *node = ml_graph_node(c->plan->graph, value->node);
    if (ml_ops[node->op].op_class == ML_CLASS_COLLECTIVE) { /* other ranks' values are not known */
        c->known[value->node] = is;
        return;
    }
    call->graph = ml_graph_new();
    double *should = value_expected(call, value->node);
    if (should != NULL) compare(call, value->node, is, should);
    ml_graph_free(call->graph);
    call->graph = NULL;
    if (value->type.dtype != ML_I64) c->known[value->node] = is; /* doubles hold 53 bits */
}

static void unchanged(const check_call *call, const ml_value *value, const double *now) {
    const double *known = call->checker->known[value->node];
    const ml_step *step = &call->checker->plan->schedule->steps.at[call->step];
    for (int64_t e = 0; e < ml_type_elements(&value->type); e++) {
        if (now[e] == known[e] || (isnan(now[e]) && isnan(known[e]))) continue;
        ml_raise(ML_INTERNAL,
                 "MLUA_CHECK: step %u (%s) reads %%%u, but something has been written over it: "
                 "element %lld is %.9g and was %.9g",
                 call->step, ml_step_label(step), value->node, (long long)e, shown(now[e]),
                 shown(known[e]));
    }
}

static void reads_body(void *context) {
    check_call *call = context;
    ml_checker *c = call->checker;
    const ml_schedule *s = c->plan->schedule;
    const ml_step *step = &s->steps.at[call->step];
    for (int i = 0; i < step->read_count; i++) {
        const ml_value *value = &s->values.at[step->values[i]];
        if (!value_is_whole(c, value)) continue;
        bool known = c->known[value->node] != NULL;
        double *is = value_take(c, value, known ? call->arena : c->arena, call->arena);
        if (known)
            unchanged(call, value, is);
        else
            value_check(call, value, is);
    }
}

static void step_body(void *context) {
    check_call *call = context;
    ml_checker *c = call->checker;
    const ml_schedule *s = c->plan->schedule;
    const ml_step *step = &s->steps.at[call->step];
    for (int i = 0; i < step->write_count && step->kind != ML_STEP_COPY && !step->host_copy; i++) {
        const ml_value *value = &s->values.at[step->values[step->read_count + i]];
        if (!value_is_whole(c, value)) continue;
        value_check(call, value, value_take(c, value, c->arena, call->arena));
    }
}

static ml_status check_with(ml_checker *checker, uint32_t step, void (*body)(void *)) {
    check_call call = {.checker = checker, .step = step};
    call.arena = ml_arena_new();
    if (call.arena == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while checking a step");
    ml_status status = ml_protect(body, &call);
    if (call.graph != NULL) ml_graph_free(call.graph);
    ml_arena_free(call.arena);
    return status;
}

ml_status ml_check_reads(ml_checker *checker, uint32_t step) {
    return check_with(checker, step, reads_body);
}

ml_status ml_check_step(ml_checker *checker, uint32_t step) {
    return check_with(checker, step, step_body);
}

/* ---- states and inputs ---- */
/* Doubles hold integers of 53 bits: what follows from larger ones, as seeds are, is not checked. */
static bool exact(const ml_type *type, const double *values) {
    return type->dtype != ML_I64 || largest_of(values, ml_type_elements(type)) < 0x1p53;
}

static void begin_body(void *context) {
    check_call *call = context;
    ml_checker *c = call->checker;
    const ml_schedule *s = c->plan->schedule;
    const ml_graph *g = c->plan->graph;
    c->known = ML_NEW_ARRAY(c->arena, double *, (size_t)ml_graph_count(g) + 1);
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        ml_op op = ml_graph_node(g, n)->op;
        if (op != ML_OP_STATE && op != ML_OP_INPUT && op != ML_OP_COORDINATE) continue;
        ml_storage_kind kind = op == ML_OP_STATE   ? ML_STORAGE_STATE
                               : op == ML_OP_INPUT ? ML_STORAGE_INPUT
                                                   : ML_STORAGE_COORDINATE;
        uint32_t id = (uint32_t)ml_graph_args(g, n)[0], storage = 0;
        while (storage < s->storages.count &&
               (s->storages.at[storage].kind != kind || s->storages.at[storage].id != id)) {
            storage++;
        }
        if (storage == s->storages.count) continue;
        ml_value value = {.node = n, .type = *ml_graph_type(g, n), .storage = storage};
        int64_t stride = 1;
        for (int i = value.type.rank - 1; i >= 0; i--) {
            value.stride[i] = stride;
            stride *= value.type.size[i];
        }
        double *is = value_take(c, &value, c->arena, call->arena);
        if (exact(&value.type, is)) c->known[n] = is;
    }
}

ml_status ml_check_begin(ml_checker *checker) {
    if (checker->arena != NULL) ml_arena_free(checker->arena);
    checker->arena = ml_arena_new();
    check_call call = {.checker = checker, .arena = ml_arena_new()};
    ml_status status = ML_NO_MEMORY;
    if (checker->arena != NULL && call.arena != NULL)
        status = ml_protect(begin_body, &call);
    else
        ml_fail(ML_NO_MEMORY, "out of memory while checking a program");
    if (call.arena != NULL) ml_arena_free(call.arena);
    return status;
}

ml_status ml_check_new(const ml_plan *plan, ml_check_read *read, void *context,
                       ml_checker **checker) {
    ml_checker *new = ml_alloc(sizeof *new);
    if (new == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while checking a program");
    *new = (ml_checker){.plan = plan, .read = read, .context = context};
    *checker = new;
    return ML_OK;
}

void ml_check_free(ml_checker *checker) {
    if (checker == NULL) return;
    if (checker->arena != NULL) ml_arena_free(checker->arena);
    ml_free(checker);
}
