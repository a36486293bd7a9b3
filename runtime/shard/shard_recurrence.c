/* Sharding of a recurrence: its step is sharded as a program is.
 *
 * The rule places states, slices of inputs and captured tensors by the axes that they have without
 * the scan's; collectives that the step then needs run at each position. What the step stacks or
 * sums stays as it comes, sums over ranks too: these are taken once, after the last position. The
 * scan's own axis is whole on each rank. */
#include <string.h>

#include "runtime/graph/recurrence.h"
#include "runtime/shard/shard_internal.h"

typedef struct {
    sharder *s, step; /* step: of the body */
    ml_ref n;
    ml_recurrence r;
    ml_placements *at;         /* by source: of what stands for it in the step */
    ml_recurrence_pair *pairs; /* by source */
    ml_ref *roots;             /* by root: in the local graph */
    ml_placements *root_at;
} cutting;

/* The same cuts where a new axis comes first. */
static ml_placements behind_axis(const ml_placements *at, int count) {
    ml_placements p = *at;
    for (int i = 0; i < count; i++)
        if (p.over[i].kind == ML_SPLIT) p.over[i].axis++;
    return p;
}

static void place_sources(cutting *c) {
    sharder *s = c->s;
    int count = ml_graph_node(s->from, c->n)->source_count;
    c->at = ML_NEW_ARRAY(s->scratch, ml_placements, count + 1);
    c->pairs = ML_NEW_ARRAY(s->scratch, ml_recurrence_pair, count + 1);
    for (int i = 0; i < count; i++) {
        ml_ref source = ml_graph_source(s->from, c->n, i);
        ml_type type = *ml_graph_type(s->from, source);
        bool sliced = i < c->r.inputs;
        if (sliced) ml_recurrence_slice(s->from, source, c->r.axis, c->r.length, &type);
        c->at[i] = ml_layout_place(s->layout, s->from, &type, -1, NULL);
        ml_placements need = sliced ? behind_axis(&c->at[i], s->layout->count) : c->at[i];
        ml_type local = ml_layout_local(s->layout, &type, &c->at[i]);
        c->pairs[i].value = shard_get(s, source, &need);
        c->pairs[i].parameter = ml_recurrence_parameter(s->to, &local);
    }
}

/* Whether a stacked or summed result may stay so. */
static bool may_stay(const sharder *s, const ml_placements *at) {
    for (int i = 0; i < s->layout->count; i++) {
        ml_placement p = at->over[i];
        bool plain = p.kind == ML_SPLIT && p.within == 0;
        if (!plain && p.kind != ML_REPLICATED && p.kind != ML_PARTIAL_SUM) return false;
    }
    return true;
}

static void take_roots(cutting *c, const ml_roots *roots) {
    sharder *step = &c->step;
    c->roots = ML_NEW_ARRAY(step->scratch, ml_ref, roots->output_count + 1);
    c->root_at = ML_NEW_ARRAY(step->scratch, ml_placements, roots->output_count + 1);
    for (int i = 0; i < roots->output_count; i++) {
        ml_ref root = roots->outputs[i];
        uint32_t first = step->values[root].versions;
        if (i < c->r.states)
            c->root_at[i] = c->at[c->r.inputs + i];
        else if (first && may_stay(step, &step->versions.at[first].at))
            c->root_at[i] = step->versions.at[first].at;
        else
            c->root_at[i] = ml_layout_place(step->layout, step->from,
                                            ml_graph_type(step->from, root), -1, NULL);
        shard_enter(step, root);
        c->roots[i] = shard_get(step, root, &c->root_at[i]);
    }
}

static ml_ref local_new(const cutting *c) {
    const ml_recurrence *r = &c->r;
    ml_recurrence_step step = {.axis = r->axis,
                               .reverse = r->reverse,
                               .length = r->length,
                               .inputs = c->pairs,
                               .input_count = r->inputs,
                               .states = c->pairs + r->inputs,
                               .state_count = r->states,
                               .captured = c->pairs + r->inputs + r->states,
                               .captured_count = r->captured,
                               .next = c->roots,
                               .stacked = c->roots + r->states,
                               .stacked_count = r->stacked,
                               .summed = c->roots + r->states + r->stacked,
                               .summed_count = r->summed};
    return ml_recurrence_new(c->s->to, &step);
}

static void add_outputs(cutting *c, ml_ref local) {
    sharder *s = c->s;
    const ml_recurrence *r = &c->r;
    int count = ml_op_outputs(s->from, c->n);
    shard_value *value = &s->values[c->n];
    value->outputs = ML_NEW_ARRAY(s->scratch, ml_ref, count);
    value->output_places = ML_NEW_ARRAY(s->scratch, ml_placements, count);
    for (int i = 0; i < count; i++) {
        int final = i - ml_recurrence_final(r), history = i - ml_recurrence_history(r);
        int root = history >= 0 ? history : final >= 0 ? final : r->states + i;
        bool sliced = history >= 0 || i < r->stacked;
        value->outputs[i] = ml_out(s->to, local, i);
        value->output_places[i] =
            sliced ? behind_axis(&c->root_at[root], s->layout->count) : c->root_at[root];
    }
    shard_add_version(s, c->n, &value->output_places[0], value->outputs[0], false);
}

static void cut(void *argument) {
    cutting *c = argument;
    sharder *s = c->s;
    ml_roots roots;
    c->step.from = ml_recurrence_body(s->from, c->n, NULL, &roots);
    c->step.to = s->to;
    c->step.layout = s->layout;
    c->step.scratch = s->scratch;
    place_sources(c);
    c->step.parameters = c->pairs;
    c->step.parameter_places = c->at;
    shard_nodes(&c->step, &roots);
    take_roots(c, &roots);
    if (c->step.overflow_checks.count)
        ml_raise(ML_INVALID, "the step of a scan cannot send tokens to their experts' ranks: "
                             "leave \"exchange\" out of the layout");
    shard_enter(s, c->n);
    ml_ref local = local_new(c);
    add_outputs(c, local);
}

void shard_recurrence(sharder *s, ml_ref n) {
    cutting c = {.s = s, .n = n};
    ml_recurrence_read(s->from, n, &c.r);
    ml_status status = ml_protect(cut, &c);
    if (c.step.from) ml_graph_free((ml_graph *)c.step.from);
    if (status != ML_OK) ml_raise_last();
    c.step.division.flops *= (double)c.r.length;
    for (int i = 0; i < s->layout->count; i++) {
        c.step.division.over[i].flops *= (double)c.r.length;
        c.step.division.over[i].most *= (double)c.r.length;
    }
    ml_division_add(&s->division, &c.step.division);
}
