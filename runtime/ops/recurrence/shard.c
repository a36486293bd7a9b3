/* Sharding of a recurrence: its step is sharded as a program is.
 *
 * The rule places states, slices of inputs and captured tensors by the axes that they have without
 * the scan's; collectives that the step then needs run at each position. What the step stacks or
 * sums stays as it comes, sums over ranks too: these are taken once, after the last position. The
 * scan's own axis is cut where nothing in the step is cut over the same mesh axis, in consecutive
 * parts; each rank begins its part with the state that the parts before leave. Of steps by elements
 * whose states are each affine in itself, or max-plus, each rank computes the map of its part,
 * state -> total state + last or max(state + total, last), and all ranks gather the maps. Of other
 * steps the parts come one after the other: all ranks follow their parts from the states so far,
 * and go on with those of the rank whose turn it is. That takes as long as the whole axis on one
 * rank, but no rank has more than its part of what it reads, writes, and stores for the
 * gradient, which is such a scan in the other direction. */
#include <math.h>
#include <string.h>

#include "runtime/ops/recurrence/recurrence_internal.h"
#include "runtime/shard/shard_internal.h"

typedef struct {
    sharder *s, step; /* step: of the body */
    ml_ref n;
    ml_recurrence r;
    ml_placements *at;         /* by source: of what stands for it in the step */
    ml_recurrence_pair *pairs; /* by source */
    ml_ref *roots;             /* by root: in the local graph */
    ml_placements *root_at;
    int mesh;          /* over which the scan's axis is cut; -1: none */
    bool composes;     /* where it is cut: parts have maps */
    uint32_t max_plus; /* a bit for each state that is: where it is cut */
    ml_ref *finals;    /* where it is cut: the states after the last position, by state */
} cutting;

/* The same cuts where a new axis comes first. */
static ml_placements behind_axis(const ml_placements *at, int count) {
    ml_placements p = *at;
    for (int i = 0; i < count; i++)
        if (p.over[i].kind == ML_SPLIT) p.over[i].axis++;
    return p;
}

/* Of sources and states, what a step has of them. */
static ml_type type_in_step(const cutting *c, int i) {
    const ml_ref source = ml_graph_source(c->s->from, c->n, i);
    ml_type type = *ml_graph_type(c->s->from, source);
    if (i < c->r.inputs) ml_recurrence_slice(c->s->from, source, c->r.axis, c->r.length, &type);
    return type;
}

/* Over which mesh axis the scan's axis is cut: the one that the layout splits its inputs along,
 * where nothing in the step is split over it. */
static int find_mesh(const cutting *c) {
    const sharder *s = c->s;
    if (c->r.inputs == 0 || c->r.states == 0) return -1;
    const ml_type *type = ml_graph_type(s->from, ml_graph_source(s->from, c->n, 0));
    const ml_placements whole = ml_layout_place(s->layout, s->from, type, -1, NULL);
    int found = -1;
    for (int i = 0; i < s->layout->count; i++) {
        if (!shard_along(whole.over[i], 0)) continue;
        if (found >= 0) return -1;
        found = i;
    }
    if (found < 0 || whole.over[found].within || c->r.length % s->layout->axis[found].size)
        return -1;
    for (int i = 0; i < ml_graph_node(s->from, c->n)->source_count; i++) {
        const ml_type one = type_in_step(c, i);
        if (ml_layout_place(s->layout, s->from, &one, -1, NULL).over[found].kind != ML_REPLICATED)
            return -1;
    }
    return found;
}

static void place_sources(cutting *c) {
    sharder *s = c->s;
    int count = ml_graph_node(s->from, c->n)->source_count;
    c->at = ML_NEW_ARRAY(s->scratch, ml_placements, count + 1);
    c->pairs = ML_NEW_ARRAY(s->scratch, ml_recurrence_pair, count + 1);
    for (int i = 0; i < count; i++) {
        ml_ref source = ml_graph_source(s->from, c->n, i);
        const ml_type type = type_in_step(c, i);
        bool sliced = i < c->r.inputs;
        c->at[i] = ml_layout_place(s->layout, s->from, &type, -1, NULL);
        ml_placements need = sliced ? behind_axis(&c->at[i], s->layout->count) : c->at[i];
        if (sliced && c->mesh >= 0) need.over[c->mesh] = shard_split(0);
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

/* A state behind positions whose map has this slope and, but for parts of slopes, offset. */
static ml_ref map_applied(const cutting *c, int state, ml_ref x, ml_ref slope, ml_ref offset) {
    ml_graph *g = c->s->to;
    const bool max_plus = c->max_plus >> state & 1;
    x = ml_map2(g, max_plus ? ML_OP_ADD : ML_OP_MUL, x, slope);
    return offset ? ml_map2(g, max_plus ? ML_OP_MAXIMUM : ML_OP_ADD, x, offset) : x;
}

/* What a map begins with: the slope and offset of no position. */
static double first_of_map(const cutting *c, int state, bool offset) {
    const bool max_plus = c->max_plus >> state & 1;
    return max_plus ? (offset ? -INFINITY : 0) : offset ? 0 : 1;
}

/* total and last of each state over this rank's part, of all ranks: {parts, ...}. */
static void gather_maps(cutting *c, const ml_recurrence_step *step, ml_axis parts, ml_ref *maps) {
    sharder *s = c->s;
    ml_graph *g = s->to;
    const int count = step->state_count;
    ml_ref *slopes = ML_NEW_ARRAY(s->scratch, ml_ref, 2 * count), *offsets = slopes + count;
    ml_ref *next = ML_NEW_ARRAY(s->scratch, ml_ref, 2 * count);
    ml_recurrence_pair *states = ML_NEW_ARRAY(s->scratch, ml_recurrence_pair, 2 * count);
    if (!ml_recurrence_slopes(g, step, slopes, offsets, &c->max_plus))
        ml_raise(ML_INTERNAL, "a recurrence is cut where it cannot be");
    for (int i = 0; i < 2 * count; i++) {
        const ml_type type = *ml_graph_type(g, step->states[i / 2].parameter);
        const ml_ref first = ml_const(g, (ml_dtype)type.dtype, first_of_map(c, i / 2, i % 2));
        states[i].parameter = ml_recurrence_parameter(g, &type);
        states[i].value = ml_broadcast(g, first, &type);
        next[i] =
            map_applied(c, i / 2, states[i].parameter, slopes[i / 2], i % 2 ? offsets[i / 2] : 0);
    }
    ml_recurrence_step map = *step;
    map.states = states;
    map.next = next;
    map.state_count = 2 * count;
    map.stacked_count = map.summed_count = 0;
    const ml_ref made = ml_recurrence_new(g, &map);
    for (int i = 0; i < 2 * count; i++)
        maps[i] = shard_gathered_parts(s, ml_out(g, made, i), c->mesh, parts);
}

/* The states before this rank's part instead of the first ones; those after the last part. */
static void pass_states(cutting *c, ml_recurrence_step *step) {
    sharder *s = c->s;
    ml_graph *g = s->to;
    const int count = step->state_count;
    const ml_axis parts = ml_axis_named(g, SHARD_PARTS);
    ml_ref *maps = ML_NEW_ARRAY(s->scratch, ml_ref, 2 * count);
    ml_ref *next = ML_NEW_ARRAY(s->scratch, ml_ref, 2 * count), *before = next + count;
    ml_recurrence_pair *in = ML_NEW_ARRAY(s->scratch, ml_recurrence_pair, 4 * count);
    ml_recurrence_pair *states = in + 2 * count, *passed = in + 3 * count;
    ml_recurrence_step chain = {.axis = parts,
                                .reverse = step->reverse,
                                .length = s->layout->axis[c->mesh].size,
                                .inputs = in,
                                .input_count = 2 * count,
                                .states = states,
                                .state_count = count,
                                .next = next,
                                .stacked = before,
                                .stacked_count = count};
    gather_maps(c, step, parts, maps);
    for (int i = 0; i < 2 * count; i++) {
        ml_type slice;
        ml_recurrence_slice(g, maps[i], parts, chain.length, &slice);
        in[i] = (ml_recurrence_pair){ml_recurrence_parameter(g, &slice), maps[i]};
    }
    for (int i = 0; i < count; i++) {
        const ml_type type = *ml_graph_type(g, step->states[i].parameter);
        before[i] = ml_recurrence_parameter(g, &type);
        states[i] = (ml_recurrence_pair){before[i], step->states[i].value};
        next[i] = map_applied(c, i, before[i], in[2 * i].parameter, in[2 * i + 1].parameter);
    }
    const ml_ref made = ml_recurrence_new(g, &chain), number = shard_coordinate(s, c->mesh);
    for (int i = 0; i < count; i++) {
        const ml_type type = *ml_graph_type(g, step->states[i].parameter);
        const ml_ref own = ml_gather(g, ml_out(g, made, i), number, parts);
        passed[i] = (ml_recurrence_pair){step->states[i].parameter, ml_permute(g, own, &type)};
        c->finals[i] = ml_out(g, made, count + i);
    }
    step->states = passed;
}

/* What the rank that has part `part` has of x. */
static ml_ref from_part(cutting *c, ml_ref x, int64_t part) {
    ml_graph *g = c->s->to;
    const ml_axis parts = ml_axis_named(g, SHARD_PARTS);
    const ml_type type = *ml_graph_type(g, x);
    x = shard_gathered_parts(c->s, x, c->mesh, parts);
    x = ml_slice(g, x, parts, part, part + 1);
    return ml_permute(g, ml_reduce(g, ML_OP_SUM, x, &parts, 1), &type);
}

/* The same for steps whose positions do not compose: one part after the other. */
static void pass_states_in_turns(cutting *c, ml_recurrence_step *step) {
    sharder *s = c->s;
    ml_graph *g = s->to;
    const int count = step->state_count;
    const int64_t ranks = s->layout->axis[c->mesh].size;
    const ml_ref number = shard_coordinate(s, c->mesh);
    ml_recurrence_pair *states = ML_NEW_ARRAY(s->scratch, ml_recurrence_pair, 2 * count);
    ml_recurrence_pair *own = states + count;
    for (int i = 0; i < count; i++) own[i] = states[i] = step->states[i];
    ml_recurrence_step part = *step;
    part.states = states;
    part.stacked_count = part.summed_count = 0;
    for (int64_t turn = 0; turn + 1 < ranks; turn++) {
        const int64_t at = step->reverse ? ranks - 1 - turn : turn;
        const int64_t next = step->reverse ? at - 1 : at + 1;
        const ml_ref made = ml_recurrence_new(g, &part);
        const ml_ref mine = ml_map2(g, ML_OP_EQ, number, ml_const_int(g, ML_I32, next));
        for (int i = 0; i < count; i++) states[i].value = from_part(c, ml_out(g, made, i), at);
        for (int i = 0; i < count; i++)
            own[i].value = ml_where(g, mine, states[i].value, own[i].value);
    }
    step->states = own;
}

/* The node that x is an output of, and which; through what only moves elements. */
static ml_ref output_behind(const ml_graph *g, ml_ref x, int *index) {
    while (ml_op_moves((ml_op)ml_graph_node(g, x)->op) && ml_graph_node(g, x)->source_count == 1 &&
           ml_graph_node(g, x)->op != ML_OP_OUT)
        x = ml_graph_source(g, x, 0);
    const bool out = ml_graph_node(g, x)->op == ML_OP_OUT;
    *index = out ? (int)ml_graph_args(g, x)[0] : 0;
    return out ? ml_graph_source(g, x, 0) : x;
}

int64_t ml_recurrence_turns(const ml_graph *g, ml_ref n) {
    ml_recurrence r;
    ml_recurrence_read(g, n, &r);
    if (ml_recurrence_composes(g, n)) return 0;
    for (ml_ref x = n + 1; x < ml_graph_count(g); x++) {
        if (ml_graph_node(g, x)->op != ML_OP_ALL_GATHER) continue;
        int index;
        if (output_behind(g, ml_graph_source(g, x, 0), &index) != n) continue;
        if (index >= ml_recurrence_final(&r) && index < ml_recurrence_history(&r))
            return ml_graph_args(g, x)[1];
    }
    return 0;
}

static ml_ref local_new(cutting *c) {
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
    if (c->mesh < 0) return ml_recurrence_new(c->s->to, &step);
    const int64_t ranks = c->s->layout->axis[c->mesh].size;
    step.length /= ranks;
    c->finals = ML_NEW_ARRAY(c->s->scratch, ml_ref, r->states);
    if (c->composes) {
        pass_states(c, &step);
        return ml_recurrence_new(c->s->to, &step);
    }
    pass_states_in_turns(c, &step);
    const ml_ref local = ml_recurrence_new(c->s->to, &step);
    for (int i = 0; i < r->states; i++) {
        const ml_ref final = ml_out(c->s->to, local, ml_recurrence_final(r) + i);
        c->finals[i] = from_part(c, final, r->reverse ? 0 : ranks - 1);
    }
    return local;
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
        const bool last = history < 0 && final >= 0 && c->mesh >= 0;
        value->outputs[i] = last ? c->finals[final] : ml_out(s->to, local, i);
        value->output_places[i] =
            sliced ? behind_axis(&c->root_at[root], s->layout->count) : c->root_at[root];
        if (c->mesh >= 0 && !last)
            value->output_places[i].over[c->mesh] =
                sliced ? shard_split(0) : (ml_placement){ML_PARTIAL_SUM, 0};
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
    c->mesh = find_mesh(c);
    c->composes = ml_recurrence_composes(s->from, c->n);
    place_sources(c);
    const int count = ml_graph_node(s->from, c->n)->source_count;
    ml_ref *parameters = ML_NEW_ARRAY(s->scratch, ml_ref, count + 1);
    for (int i = 0; i < count; i++) parameters[i] = c->pairs[i].parameter;
    c->step.parameters = parameters;
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

void recurrence_shard(sharder *s, ml_ref n) {
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
    if (c.mesh >= 0) c.step.division.over[c.mesh] = (ml_undivided){0};
    ml_division_add(&s->division, &c.step.division);
}
