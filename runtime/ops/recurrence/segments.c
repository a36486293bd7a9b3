/* Recurrences by segments: a scan over segments, in whose step a scan over the segment's positions.
 * The gradient of the outer one stores the states before each segment alone; its step computes
 * those between anew. Scripts make short segments; how long they are, or that one has all
 * positions, is chosen with a plan's memory (recurrence/resize_segments.c, plan/fit_memory.c). */
#include <stdlib.h>
#include <string.h>

#include "runtime/ops/recurrence/recurrence_internal.h"

enum {
    LEAST_LENGTH = 64,
    LEAST_SEGMENT = 8,     /* ranks divide the number of segments */
    LEAST_BYTES = 1 << 20, /* of the states at all positions, for which the choice is worth it */
};
static const char SEGMENTS[] = "'segments", STEPS[] = "'steps";

/* Names say how long the whole is: all nodes with an axis of that name are of equal scans. */
static ml_axis axis_beside(ml_graph *g, ml_axis axis, const char *suffix, int64_t length) {
    return ml_axis_named(g, ml_arena_format(ml_graph_arena(g), "%s%s%lld", ml_axis_name(g, axis),
                                            suffix, (long long)length));
}

bool recurrence_segment_axes(const ml_graph *g, ml_axis axis, ml_axis *whole, ml_axis *steps) {
    const char *name = ml_axis_name(g, axis), *at = strstr(name, SEGMENTS);
    if (!at) return false;
    ml_graph *tables = (ml_graph *)g;
    ml_arena *arena = ml_graph_arena(tables);
    *whole = ml_axis_named(tables, ml_arena_format(arena, "%.*s", (int)(at - name), name));
    *steps = axis_beside(tables, *whole, STEPS, atoll(at + strlen(SEGMENTS)));
    return true;
}

static int results_of(const ml_recurrence_step *s) {
    return s->stacked_count + s->summed_count + s->state_count;
}

/* The step over one segment, of a scan over segments whose parameters stand for the operands. */
static ml_ref segment_new(ml_graph *g, const ml_recurrence_step *outer,
                          const ml_recurrence_step *step, int64_t size, ml_axis axis) {
    ml_arena *arena = ml_graph_arena(g);
    ml_recurrence_step inner = *step;
    ml_recurrence_pair *inputs = ML_NEW_ARRAY(arena, ml_recurrence_pair, step->input_count + 1);
    ml_recurrence_pair *states = ML_NEW_ARRAY(arena, ml_recurrence_pair, step->state_count + 1);
    for (int i = 0; i < step->input_count; i++)
        inputs[i] = (ml_recurrence_pair){step->inputs[i].parameter, outer->inputs[i].parameter};
    for (int i = 0; i < step->state_count; i++)
        states[i] = (ml_recurrence_pair){step->states[i].parameter, outer->states[i].parameter};
    inner.axis = axis;
    inner.length = size;
    inner.inputs = inputs;
    inner.states = states;
    return ml_recurrence_new(g, &inner);
}

/* The length is a multiple of the size. */
static void whole_segments(ml_graph *g, const ml_recurrence_step *step, int64_t size,
                           ml_ref *outputs) {
    ml_arena *arena = ml_graph_arena(g);
    ml_axis segments = axis_beside(g, step->axis, SEGMENTS, step->length);
    ml_axis steps = axis_beside(g, step->axis, STEPS, step->length);
    ml_recurrence_pair *inputs = ML_NEW_ARRAY(arena, ml_recurrence_pair, step->input_count + 1);
    ml_recurrence_pair *states = ML_NEW_ARRAY(arena, ml_recurrence_pair, step->state_count + 1);
    ml_recurrence_step outer = {.axis = segments,
                                .reverse = step->reverse,
                                .length = step->length / size,
                                .inputs = inputs,
                                .input_count = step->input_count,
                                .states = states,
                                .state_count = step->state_count,
                                .names = step->names,
                                .stacked_count = step->stacked_count,
                                .summed_count = step->summed_count};
    for (int i = 0; i < step->input_count; i++) {
        ml_type slice;
        ml_ref value =
            ml_split(g, step->inputs[i].value, step->axis, segments, outer.length, steps, size);
        ml_recurrence_slice(g, value, segments, outer.length, &slice);
        inputs[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &slice), value};
    }
    for (int i = 0; i < step->state_count; i++) {
        ml_type type = *ml_graph_type(g, step->states[i].parameter);
        states[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &type), step->states[i].value};
    }
    ml_ref inner = segment_new(g, &outer, step, size, steps);
    ml_ref *results = ML_NEW_ARRAY(arena, ml_ref, results_of(step) + 1);
    for (int i = 0; i < results_of(step); i++) results[i] = ml_out(g, inner, i);
    outer.stacked = results;
    outer.summed = results + step->stacked_count;
    outer.next = outer.summed + step->summed_count;
    ml_ref made = ml_recurrence_new(g, &outer);
    for (int i = 0; i < results_of(step); i++) {
        outputs[i] = ml_out(g, made, i);
        if (i < step->stacked_count)
            outputs[i] = ml_merge(g, outputs[i], segments, steps, step->axis);
    }
}

/* The step over positions from `begin` on. */
static ml_recurrence_step part_of(ml_graph *g, const ml_recurrence_step *step, int64_t begin,
                                  int64_t length) {
    ml_recurrence_step part = *step;
    ml_recurrence_pair *inputs =
        ML_NEW_ARRAY(ml_graph_arena(g), ml_recurrence_pair, step->input_count + 1);
    for (int i = 0; i < step->input_count; i++) {
        ml_ref value = ml_slice(g, step->inputs[i].value, step->axis, begin, begin + length);
        inputs[i] = (ml_recurrence_pair){step->inputs[i].parameter, value};
    }
    part.length = length;
    part.inputs = inputs;
    return part;
}

/* What is no whole segment comes last. */
void ml_recurrence_segments(ml_graph *g, const ml_recurrence_step *step, int64_t size,
                            ml_ref *outputs) {
    int64_t rest = step->length % size, whole = step->length - rest;
    ml_arena *arena = ml_graph_arena(g);
    if (rest == 0 || whole == 0) {
        whole_segments(g, step, rest ? step->length : size, outputs);
        return;
    }
    int finals = step->stacked_count + step->summed_count;
    ml_ref *first = ML_NEW_ARRAY(arena, ml_ref, results_of(step) + 1);
    ml_recurrence_step head = part_of(g, step, step->reverse ? rest : 0, whole);
    ml_recurrence_step tail = part_of(g, step, step->reverse ? 0 : whole, rest);
    whole_segments(g, &head, size, first);
    ml_recurrence_pair *states = ML_NEW_ARRAY(arena, ml_recurrence_pair, step->state_count + 1);
    for (int i = 0; i < step->state_count; i++)
        states[i] = (ml_recurrence_pair){step->states[i].parameter, first[finals + i]};
    tail.states = states;
    ml_ref made = ml_recurrence_new(g, &tail);
    for (int i = 0; i < results_of(step); i++) {
        outputs[i] = ml_out(g, made, i);
        ml_ref both[2] = {step->reverse ? outputs[i] : first[i],
                          step->reverse ? first[i] : outputs[i]};
        if (i < step->stacked_count)
            outputs[i] = ml_concat(g, both, 2, step->axis);
        else if (i < finals)
            outputs[i] = ml_map2(g, ML_OP_ADD, first[i], outputs[i]);
    }
}

/* Whether a kernel may serve the step that stores less than all states. */
static bool has_kernel(ml_graph *g, const ml_recurrence_step *step) {
    recurrence_body b;
    ml_recurrence_rows rows;
    recurrence_body_find(&b, g, step, step->next, step->state_count);
    if (recurrence_multiplies(&b)) return false;
    const ml_ref n = ml_recurrence_new(g, step);
    return ml_recurrence_elementwise(g, n) || ml_recurrence_by_rows(g, n, &rows);
}

/* The least one that divides the length; else, of very large states, one with a rest; 0: none. */
static int64_t segment_of(int64_t length, int64_t state_bytes) {
    const int64_t large = (int64_t)1 << 30;
    for (int64_t size = LEAST_SEGMENT; size <= 8 * LEAST_SEGMENT; size++)
        if (length % size == 0) return size;
    return state_bytes > large / length ? LEAST_SEGMENT : 0;
}

bool recurrence_segments(ml_graph *g, const ml_recurrence_step *step, ml_ref *outputs) {
    int64_t bytes = 0;
    for (int i = 0; i < step->state_count; i++) {
        const ml_type *type = ml_graph_type(g, step->states[i].parameter);
        bytes += ml_type_elements(type) * ml_dtypes[type->dtype].bytes;
    }
    if (step->length < LEAST_LENGTH || bytes < LEAST_BYTES / step->length) return false;
    for (int i = 0; i < step->input_count; i++)
        if (ml_graph_type(g, step->inputs[i].value)->rank == ML_MAX_AXES) return false;
    for (int i = 0; i < step->stacked_count; i++)
        if (ml_graph_type(g, step->stacked[i])->rank + 2 > ML_MAX_AXES) return false;
    const int64_t size = segment_of(step->length, bytes);
    if (size == 0 || has_kernel(g, step)) return false;
    ml_recurrence_segments(g, step, size, outputs);
    return true;
}
