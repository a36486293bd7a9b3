/* The pass: every live node in order, cut over each mesh axis in the way that moves fewest bytes.
 */
#include <string.h>

#include "runtime/passes/passes.h"
#include "runtime/shard/shard_internal.h"

uint32_t shard_next_version(const sharder *s, ml_ref n, uint32_t version) {
    bool forward = !(ml_graph_node(s->from, n)->flags & ML_NODE_BACKWARD);
    version = version ? s->versions.at[version].next : s->values[n].versions;
    while (version && forward && s->versions.at[version].gathered &&
           s->versions.at[version].backward != s->backward)
        version = s->versions.at[version].next;
    return version;
}

bool shard_gathers_again(const sharder *s, ml_ref n, int i) {
    return s->values[n].params && !s->layout->axis[i].keep;
}

void shard_add_version(sharder *s, ml_ref n, const ml_placements *at, ml_ref node, bool gathered) {
    if (!s->versions.count) (void)ML_PUSH(s->scratch, &s->versions); /* 0 is none */
    uint32_t version = s->versions.count, *last = &s->values[n].versions;
    shard_version *made = ML_PUSH(s->scratch, &s->versions);
    *made = (shard_version){*at, node, 0, gathered, s->backward};
    while (*last) last = &s->versions.at[*last].next;
    *last = version;
}

/* ---- The choice of a strategy ---------------------------------------------------------------- */

typedef struct {
    bool forbidden; /* it gathers what a listed axis splits, in favour of none listed before */
    double bytes;
    int preference;
} price;

static bool cheaper(const price *a, const price *b) {
    if (a->forbidden != b->forbidden) return b->forbidden;
    if (a->bytes != b->bytes) return a->bytes < b->bytes;
    return a->preference < b->preference;
}

/* Parameters are split along it over this mesh axis: the work is where they are. */
static bool lists_params(const sharder *s, ml_axis axis) {
    const ml_mesh_axis *mesh = &s->layout->axis[s->mesh];
    for (int i = 0; i < mesh->params_count; i++)
        if (mesh->params[i] == axis) return true;
    return false;
}

/* The cheapest way to have source `n` in placement `to`; false where there is none. */
static bool price_source(const sharder *s, ml_ref n, ml_placement to, int preference, price *out) {
    while (s->values[n].repeats) {
        ml_placement repeated = to;
        to = shard_repeated(s, n, to);
        if (repeated.kind == ML_SHARED_SUM && to.kind != ML_SHARED_SUM) return false;
        n = ml_graph_source(s->from, n, 0);
    }
    const ml_type *t = ml_graph_type(s->from, n);
    int64_t ranks = s->layout->axis[s->mesh].size;
    bool found = s->values[n].free && to.kind <= ML_PARTIAL_SUM;
    *out = (price){0};
    if (found || (s->values[n].free && (to.kind == ML_SENT || to.kind == ML_SHARED))) return true;
    for (uint32_t v = shard_next_version(s, n, 0); v; v = shard_next_version(s, n, v)) {
        const ml_placements *at = &s->versions.at[v].at;
        ml_placement from = at->over[s->mesh];
        double bytes = (double)ml_type_bytes(t);
        for (int i = 0; i < s->layout->count; i++)
            if (i != s->mesh && at->over[i].kind == ML_SPLIT)
                bytes /= (double)s->layout->axis[i].size;
        price p = {.bytes = shard_move_cost(from, to, bytes, ranks)};
        if (p.bytes < 0) continue;
        if (to.kind == ML_SENT) p.bytes = 0; /* the layout wants it */
        if (from.kind == ML_SPLIT && to.kind != ML_PARTIAL_SUM && !shard_same(from, to)) {
            int listed = shard_preference(s, t->axis[from.axis]);
            bool kept =
                to.kind == ML_SPLIT && preference < SHARD_PARAMS; /* exchanged, both listed */
            bool weights = lists_params(s, t->axis[from.axis]);
            kept = kept && !weights;
            /* To where parameters are split, activations may go: the cheaper of the two moves. */
            if (preference >= 0 && preference < SHARD_PARAMS && !weights)
                kept = kept || lists_params(s, s->layout->axis[s->mesh].acts[preference]);
            p.forbidden = listed < SHARD_PARAMS && preference >= listed && !kept;
        }
        if (!found || cheaper(&p, out)) *out = p;
        found = true;
    }
    return found;
}

/* Whether the axis that the strategy splits divides, after the mesh axes before this one; an uneven
 * one alone cuts it. */
static bool splits(const sharder *s, const ml_type *t, const ml_placements *before,
                   ml_placement cut, bool uneven) {
    bool shared = ml_placement_shared(cut);
    if (cut.kind != ML_SPLIT && !shared) return true;
    int64_t parts = s->layout->axis[s->mesh].size;
    for (int i = 0; i < s->mesh; i++) {
        ml_placement p = before->over[i];
        bool sent = p.kind >= ML_SENT && p.axis == cut.axis;
        if (sent || (shared && shard_along(p, cut.axis))) return false;
        if (shard_along(p, cut.axis) || (p.kind == ML_SENT && p.batch == cut.axis))
            parts *= s->layout->axis[i].size;
    }
    if (shared) return true;
    return uneven ? parts == s->layout->axis[s->mesh].size : t->size[cut.axis] % parts == 0;
}

static bool feasible(const sharder *s, ml_ref n, const shard_strategy *strategy,
                     const ml_placements *need, const ml_placements *out) {
    const ml_op_interface *own = ml_op_interfaces[ml_graph_node(s->from, n)->op];
    if (own && own->feasible && !own->feasible(s, n, strategy, need)) return false;
    for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
        if (!splits(s, ml_graph_type(s->from, ml_graph_source(s->from, n, k)), &need[k],
                    s->pool.at[strategy->sources + (uint32_t)k], strategy->uneven))
            return false;
    return splits(s, ml_graph_type(s->from, n), &out[0], strategy->out[0], strategy->uneven);
}

/* The gradient of what heads are made of, by shared ones: its other terms are sums over the ranks.
 */
static bool joins_sums(const sharder *s, ml_ref n, const shard_strategy *strategy) {
    bool shared = false;
    for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
        shared = shared || s->pool.at[strategy->sources + (uint32_t)k].kind == ML_SHARED_SUM;
    return shared && strategy->out[0].kind == ML_PARTIAL_SUM;
}

/* Bytes that moving the result to the placement of the rule will send later; 0 where nothing asks
 * for that: replicated, expert-local (ML_OWNED), dispatched (ML_SENT) and shared results. */
static double rest_cost(const sharder *s, ml_ref n, const shard_strategy *strategy,
                        const ml_placements *out) {
    const ml_type *t = ml_graph_type(s->from, n);
    if (strategy->out[0].kind == ML_REPLICATED || strategy->out[0].kind == ML_OWNED ||
        strategy->out[0].kind == ML_SENT || strategy->out[0].kind == ML_SHARED ||
        (strategy->out[0].kind == ML_SHARED_SUM && !s->values[n].params) ||
        joins_sums(s, n, strategy))
        return 0;
    if (strategy->out[0].kind >= ML_PARTIAL_SUM && ml_graph_node(s->from, n)->op == ML_OP_CAST)
        return 0; /* always wanted */
    int kind = s->values[n].added    ? ML_STATE_GRADIENT
               : s->values[n].params ? ML_STATE_OPTIMIZER
                                     : -1;
    ml_placement home = ml_layout_place(s->layout, s->from, t, kind, NULL).over[s->mesh];
    if (home.kind != ML_SPLIT && strategy->out[0].kind == ML_SPLIT) return 0;
    double bytes = (double)ml_type_bytes(t);
    for (int i = 0; i < s->mesh; i++)
        if (out[0].over[i].kind == ML_SPLIT) bytes /= (double)s->layout->axis[i].size;
    return shard_move_cost(strategy->out[0], home, bytes, s->layout->axis[s->mesh].size);
}

static void choose_over(sharder *s, ml_ref n, ml_placements *need, ml_placements *out) {
    int count = ml_graph_node(s->from, n)->source_count, best = -1;
    price least = {0};
    s->strategy_count = s->pool_count = 0;
    s->need = need;
    shard_propose(s, n);
    for (uint32_t i = 0; i < s->strategy_count; i++) {
        const shard_strategy *strategy = &s->strategies.at[i];
        if (!feasible(s, n, strategy, need, out)) continue;
        price total = {.bytes = rest_cost(s, n, strategy, out), .preference = strategy->preference};
        bool found = true;
        for (int k = 0; k < count && found; k++) {
            price p;
            found =
                price_source(s, ml_graph_source(s->from, n, k),
                             s->pool.at[strategy->sources + (uint32_t)k], strategy->preference, &p);
            total.bytes += p.bytes;
            total.forbidden = total.forbidden || p.forbidden;
        }
        if (!found || (best >= 0 && !cheaper(&total, &least))) continue;
        best = (int)i;
        least = total;
    }
    if (best < 0) ml_raise(ML_INTERNAL, "sharding: node %%%u cannot be placed", n);
    const shard_strategy *strategy = &s->strategies.at[best];
    for (int k = 0; k < count; k++)
        need[k].over[s->mesh] = s->pool.at[strategy->sources + (uint32_t)k];
    for (int i = 0; i < ML_MAX_OUTPUTS; i++) out[i].over[s->mesh] = strategy->out[i];
}

/* Over one mesh axis after the other: out[0..] of the results, need[k] of source k, all zero. */
static void choose(sharder *s, ml_ref n, ml_placements *need, ml_placements *out) {
    if (shard_chosen(s, n, need, out)) return;
    for (s->mesh = 0; s->mesh < s->layout->count; s->mesh++)
        if (s->layout->axis[s->mesh].size > 1) choose_over(s, n, need, out);
    shard_note_choice(s, n, need, out);
}

/* ---- Nodes ----------------------------------------------------------------------------------- */

/* What messages call a state: its kind, name and line. */
static const char *state_text(const sharder *s, const ml_state *state) {
    const char *kind = state->kind == ML_STATE_PARAMETER ? "parameter" : "state";
    const char *name = state->name ? state->name : "?";
    if (!state->origin.file) return ml_arena_format(s->scratch, "%s \"%s\"", kind, name);
    return ml_arena_format(s->scratch, "%s \"%s\" (%s:%d)", kind, name, state->origin.file,
                           state->origin.line);
}

static void place_leaf(sharder *s, ml_ref n) {
    const ml_type *t = ml_graph_type(s->from, n);
    uint32_t id = (uint32_t)ml_graph_args(s->from, n)[0];
    const char *what;
    int kind = -1;
    if (ml_graph_node(s->from, n)->op == ML_OP_STATE) {
        const ml_state *state = ml_graph_state(s->from, id);
        what = state_text(s, state);
        kind = (int)state->kind;
    } else {
        const char *name = ml_graph_input(s->from, id)->name;
        what = ml_arena_format(s->scratch, "input \"%s\"", name ? name : "?");
    }
    ml_placements at = ml_layout_place(s->layout, s->from, t, kind, what);
    ml_ref local;
    shard_local(s, n, NULL, NULL, &at, &local);
    shard_add_version(s, n, &at, local, false);
}

static void place_parameter(sharder *s, ml_ref n) {
    int64_t index = ml_graph_args(s->from, n)[0];
    shard_add_version(s, n, &s->parameter_places[index], s->parameters[index], false);
}

static bool is_free(const sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    if (node->op == ML_OP_CONST || node->op == ML_OP_IOTA) return true;
    if (ml_graph_type(s->from, n)->rank == 0) return false;
    if (!ml_op_is_map(node->op) && !ml_op_is(node->op, ML_RELABEL)) return false;
    for (int k = 0; k < node->source_count; k++) {
        ml_ref source = ml_graph_source(s->from, n, k);
        if (s->values[source].free) continue;
        if (ml_graph_type(s->from, source)->rank > 0) return false;
    }
    return true;
}

/* Gradients and states, and what elementwise ops, movements and reductions make of them. */
static bool is_params(const sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    if (s->values[n].gradient || node->op == ML_OP_STATE) return true;
    if (node->op == ML_OP_GATHER || ml_ops[node->op].op_class == ML_CLASS_ROUTINE) return false;
    bool any = false;
    for (int k = 0; k < node->source_count; k++) {
        ml_ref source = ml_graph_source(s->from, n, k);
        if (s->values[source].params)
            any = true;
        else if (ml_graph_type(s->from, source)->rank > 0 && !s->values[source].free)
            return false;
    }
    return any;
}

static void place_output(sharder *s, ml_ref n) {
    ml_ref of = ml_graph_source(s->from, n, 0);
    int64_t output = ml_graph_args(s->from, n)[0];
    const shard_value *value = &s->values[of];
    shard_add_version(s, n, &value->output_places[output], value->outputs[output], false);
}

/* Whose rows an op on rows of groups gives. */
static void keep_owner(sharder *s, ml_ref n, const ml_placements *need) {
    for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
        for (int i = 0; i < s->layout->count; i++)
            if (need[k].over[i].kind == ML_OWNED || need[k].over[i].kind == ML_SENT)
                memcpy(s->values[n].owner, shard_owner(s, ml_graph_source(s->from, n, k)),
                       sizeof s->values[n].owner);
}

/* Sources that are to be sent are sent as the rows of these groups. */
static void give_owner(sharder *s, ml_ref n, const ml_placements *need) {
    const ml_node *node = ml_graph_node(s->from, n);
    const ml_ref *sources = ml_graph_sources(s->from, n), *owner = NULL;
    const ml_op_interface *own = ml_op_interfaces[node->op];
    if (own && own->row_bounds) owner = own->row_bounds(s->from, n);
    for (int k = 0; k < node->source_count && !owner; k++)
        if (shard_sent_over(s, &need[k]) >= 0 && shard_owner(s, sources[k])[0])
            owner = shard_owner(s, sources[k]);
    for (int k = 0; k < node->source_count; k++) {
        if (shard_sent_over(s, &need[k]) < 0) continue;
        ml_ref source = sources[k];
        while (s->values[source].repeats) source = ml_graph_source(s->from, source, 0);
        memcpy(s->values[source].owner, owner, sizeof s->values[source].owner);
    }
}

static bool is_divided(ml_placement at) {
    return at.kind == ML_SPLIT || at.kind == ML_OWNED || at.kind >= ML_SENT;
}

/* The first axis of n, or of what it is computed from, that acts list for mesh axis i. */
static void find_listed(const sharder *s, ml_ref n, int i, ml_undivided *whole) {
    const ml_mesh_axis *mesh = &s->layout->axis[i];
    whole->axis = 0;
    for (int l = 0; l < mesh->acts_count; l++)
        for (int k = -1; k < ml_graph_node(s->from, n)->source_count; k++) {
            const ml_type *t = ml_graph_type(s->from, k < 0 ? n : ml_graph_source(s->from, n, k));
            int at = ml_type_find(t, mesh->acts[l]);
            if (at < 0) continue;
            whole->axis = mesh->acts[l];
            whole->size = t->size[at];
            return;
        }
}

/* Over which mesh axes ranks do the same work for n. That of optimizers does not count. */
static void note_division(sharder *s, ml_ref n, const ml_placements *need,
                          const ml_placements *out) {
    if (s->values[n].params) return;
    double one = ml_flops(s->from, n), flops = s->times ? one * s->times[n] : one;
    s->division.flops += flops;
    for (int i = 0; i < s->layout->count; i++) {
        bool divided = is_divided(out[0].over[i]);
        for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
            divided = divided || is_divided(need[k].over[i]);
        if (divided) continue;
        ml_undivided *whole = &s->division.over[i];
        whole->flops += flops;
        if (one <= whole->most) continue;
        whole->most = one;
        whole->origin = ml_graph_origin(s->from, n);
        find_listed(s, n, i, whole);
    }
}

static void place_node(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    int count = node->source_count, outputs = ml_op_outputs(s->from, n);
    ml_placements few_need[8] = {0}, *need = few_need, out[ML_MAX_OUTPUTS] = {0};
    ml_ref few[8], *sources = few, results[ML_MAX_OUTPUTS];
    if (count > 8) {
        need = ML_NEW_ARRAY(s->scratch, ml_placements, count);
        sources = ML_NEW_ARRAY(s->scratch, ml_ref, count);
    }
    choose(s, n, need, out);
    give_owner(s, n, need);
    note_division(s, n, need, out);
    for (int k = 0; k < count; k++)
        sources[k] = shard_get(s, ml_graph_source(s->from, n, k), &need[k]);
    shard_local(s, n, sources, need, out, results);
    shard_add_version(s, n, &out[0], results[0], false);
    keep_owner(s, n, need);
    const ml_op_interface *own = ml_op_interfaces[node->op];
    if (own && own->placed) own->placed(s, n, need, &out[0], results[0]);
    if (outputs == 1) return;
    shard_value *value = &s->values[n];
    value->outputs = ML_NEW_ARRAY(s->scratch, ml_ref, outputs);
    value->output_places = ML_NEW_ARRAY(s->scratch, ml_placements, outputs);
    for (int i = 0; i < outputs; i++) {
        value->outputs[i] = results[i];
        value->output_places[i] = out[i];
    }
}

/* A gradient of which each rank has a part is added up at once where the rule splits it: it would
 * fill memory until its first use. */
static void reduce_gradient(sharder *s, ml_ref n) {
    const ml_type *t = ml_graph_type(s->from, n);
    int kind = s->values[n].added ? ML_STATE_GRADIENT : ML_STATE_OPTIMIZER;
    ml_placements home = ml_layout_place(s->layout, s->from, t, kind, NULL);
    ml_placements at = s->versions.at[s->values[n].versions].at;
    bool moves = false;
    for (int i = 0; i < s->layout->count; i++) {
        if (at.over[i].kind != ML_PARTIAL_SUM || home.over[i].kind != ML_SPLIT) continue;
        at.over[i] = home.over[i];
        moves = true;
    }
    for (int i = 0; i < t->rank; i++)
        if (ml_layout_uneven(s->layout, t, &at, i) &&
            ml_layout_parts(s->layout, &at, i) != ml_layout_parts(s->layout, &home, i))
            return;
    if (moves) ml_graph_mark(s->to, shard_get(s, n, &at), ML_NODE_GRADIENT);
}

static void visit(sharder *s, ml_ref n) {
    const ml_node *node = ml_graph_node(s->from, n);
    s->origin = ml_graph_origin(s->from, n);
    s->flags = node->flags & (uint8_t)~ML_NODE_GRADIENT;
    s->backward = node->flags & ML_NODE_BACKWARD;
    ml_graph_set_origin(s->to, s->origin);
    ml_graph_set_flags(s->to, s->flags);
    s->values[n].params = is_params(s, n);
    s->values[n].free = is_free(s, n);
    s->values[n].repeats = node->op == ML_OP_BROADCAST && !s->values[n].free;
    if (s->values[n].free || s->values[n].repeats) return;
    if (node->op == ML_OP_STATE || node->op == ML_OP_INPUT)
        place_leaf(s, n);
    else if (node->op == ML_OP_PARAM)
        place_parameter(s, n);
    else if (node->op == ML_OP_OUT)
        place_output(s, n);
    else if (ml_op_interfaces[node->op] && ml_op_interfaces[node->op]->place)
        ml_op_interfaces[node->op]->place(s, n);
    else
        place_node(s, n);
    if (!(node->flags & ML_NODE_GRADIENT)) return;
    ml_graph_mark(s->to, s->versions.at[s->values[n].versions].node, ML_NODE_GRADIENT);
    reduce_gradient(s, n);
}

/* ---- Programs -------------------------------------------------------------------------------- */

/* A node that only a gradient is made of is one: whatever casts and movements lie between. */
static void mark_gradients(sharder *s) {
    for (ml_ref n = ml_graph_count(s->from); n-- > 1;) {
        const ml_node *node = ml_graph_node(s->from, n);
        shard_value *value = &s->values[n];
        bool passes_on = node->op == ML_OP_CAST || node->op == ML_OP_PERMUTE ||
                         node->op == ML_OP_PLACE || node->op == ML_OP_ADD || node->op == ML_OP_NEG;
        if (!value->users) continue;
        value->gradient =
            (value->gradient && value->users == 1) || (node->flags & ML_NODE_GRADIENT);
        for (int k = 0; k < node->source_count && passes_on && value->gradient; k++)
            s->values[ml_graph_source(s->from, n, k)].gradient = true;
    }
}

/* What linear ops bring into a sum of gradients, and nothing else uses. */
static void mark_added(sharder *s, const ml_roots *roots) {
    for (int i = 0; i < roots->update_count; i++) {
        const ml_update *update = &roots->updates[i];
        if (ml_graph_state(s->from, update->state)->kind == ML_STATE_GRADIENT)
            s->values[update->value].added = s->values[update->value].users == 1;
    }
    for (ml_ref n = ml_graph_count(s->from); n-- > 1;) {
        const ml_node *node = ml_graph_node(s->from, n);
        bool passes_on = node->op == ML_OP_CAST || node->op == ML_OP_PERMUTE ||
                         node->op == ML_OP_PLACE || node->op == ML_OP_ADD ||
                         node->op == ML_OP_SUB || node->op == ML_OP_NEG || node->op == ML_OP_WHERE;
        if (!s->values[n].added || !passes_on) continue;
        for (int k = node->op == ML_OP_WHERE; k < node->source_count; k++) {
            shard_value *source = &s->values[ml_graph_source(s->from, n, k)];
            source->added = source->users == 1;
        }
    }
}

static void count_users(sharder *s, const ml_roots *roots) {
    for (int i = 0; i < roots->output_count; i++) s->values[roots->outputs[i]].users++;
    for (int i = 0; i < roots->update_count; i++) s->values[roots->updates[i].value].users++;
    for (ml_ref n = ml_graph_count(s->from); n-- > 1;) {
        if (!s->values[n].users) continue;
        for (int k = 0; k < ml_graph_node(s->from, n)->source_count; k++)
            s->values[ml_graph_source(s->from, n, k)].users++;
    }
}

static void find_shared(sharder *s) {
    for (ml_ref n = 1; n < ml_graph_count(s->from); n++) {
        const ml_op_interface *own = ml_op_interfaces[ml_graph_node(s->from, n)->op];
        ml_axis axis =
            own && own->shared_axis && s->values[n].users ? own->shared_axis(s->from, n) : 0;
        if (axis) s->shared = axis;
    }
}

void shard_nodes(sharder *s, const ml_roots *roots) {
    uint32_t count = ml_graph_count(s->from);
    s->values = ML_NEW_ARRAY(s->scratch, shard_value, count);
    count_users(s, roots);
    mark_gradients(s);
    mark_added(s, roots);
    find_shared(s);
    for (ml_ref n = 1; n < count; n++)
        if (s->values[n].users) visit(s, n);
}

/* A state's placement, for a value that may have the state's axes in another order. */
static ml_placements update_placement(const sharder *s, const ml_update *update) {
    const ml_state *state = ml_graph_state(s->from, update->state);
    const ml_type *t = ml_graph_type(s->from, update->value);
    ml_placements at =
        ml_layout_place(s->layout, s->from, &state->type, (int)state->kind, state_text(s, state));
    for (int i = 0; i < s->layout->count; i++)
        if (at.over[i].kind == ML_SPLIT)
            at.over[i].axis = (uint8_t)ml_type_find(t, state->type.axis[at.over[i].axis]);
    return at;
}

/* Results are whole, but for the last `kept`, which stay where the rule puts them. */
static ml_placements output_placement(const sharder *s, const ml_roots *roots, int i) {
    if (i < roots->output_count - roots->kept) return (ml_placements){0};
    return ml_layout_place(s->layout, s->from, ml_graph_type(s->from, roots->outputs[i]), -1, NULL);
}

/* Raise where a PLACE splits over a mesh axis that the layout has not, or that cuts stages. */
static void check_place(const sharder *s, const ml_origin *origin, const char *name, bool split) {
    const ml_layout *layout = s->layout;
    const char *file = origin->file ? origin->file : "?";
    int at = 0;
    while (at < layout->count && strcmp(layout->axis[at].name, name) != 0) at++;
    if (at == layout->count)
        ml_raise(ML_INVALID, "%s:%d: the layout has no mesh axis \"%s\"", file, origin->line, name);
    if (split && layout->stages.on && layout->stages.mesh_axis == at)
        ml_raise(ML_INVALID,
                 "%s:%d: on: the mesh axis %s cuts the model into stages and splits nothing else",
                 file, origin->line, name);
}

static void check_places(const sharder *s) {
    for (ml_ref n = 1; n < ml_graph_count(s->from); n++) {
        const ml_node *node = ml_graph_node(s->from, n);
        const int64_t *args = ml_graph_args(s->from, n);
        for (int k = 0; node->op == ML_OP_PLACE && k < node->arg_count; k += 2)
            check_place(s, ml_graph_origin(s->from, n), ml_axis_name(s->from, (ml_axis)args[k]),
                        args[k + 1] != 0);
    }
}

typedef struct {
    sharder s;
    ml_roots *roots, local;
    ml_shard_visitor *visit; /* may be NULL */
    void *context;
} pass;

void shard_enter(sharder *s, ml_ref n) {
    s->origin = ml_graph_origin(s->from, n);
    s->backward = false;
    s->flags = 0;
    ml_graph_set_origin(s->to, s->origin);
    ml_graph_set_flags(s->to, 0);
}

static void body(void *argument) {
    pass *p = argument;
    sharder *s = &p->s;
    uint32_t count = ml_graph_count(s->from);
    s->to = ml_graph_derive(s->from);
    check_places(s);
    shard_nodes(s, p->roots);
    p->local = *p->roots;
    p->local.outputs = ML_NEW_ARRAY(s->scratch, ml_ref, p->roots->output_count + 2);
    p->local.updates = ML_NEW_ARRAY(s->scratch, ml_update, p->roots->update_count + 1);
    for (int i = 0; i < p->roots->output_count; i++) {
        shard_enter(s, p->roots->outputs[i]);
        uint32_t first = s->values[p->roots->outputs[i]].versions;
        bool stays = p->visit && first;
        ml_placements at = output_placement(s, p->roots, i);
        p->local.outputs[i] =
            stays ? s->versions.at[first].node : shard_get(s, p->roots->outputs[i], &at);
    }
    ml_ref unfit = 0;
    if (s->overflow_checks.count && !p->visit) {
        unfit = s->rows->overflows(s);
        p->local.outputs[p->local.output_count++] = unfit;
        p->local.overflow_count = (int)s->overflow_checks.count;
    }
    for (int i = 0; i < p->roots->update_count; i++) {
        const ml_update *update = &p->roots->updates[i];
        shard_enter(s, update->value);
        ml_placements at = update_placement(s, update);
        ml_ref value = shard_get(s, update->value, &at);
        value = shard_clear(s, value, ml_graph_type(s->from, update->value), &at);
        if (unfit && !s->layout->stages.on) value = s->rows->unless(s, unfit, update, value);
        p->local.updates[i] = (ml_update){update->state, value};
    }
    for (ml_ref n = 1; n < count && p->visit; n++)
        if (s->values[n].versions)
            p->visit(p->context, s->from, n, &s->versions.at[s->values[n].versions].at);
}

/* Copies what lives into a graph that outlives the pass's own. */
static void finish(void *argument) {
    pass *p = argument;
    ml_graph *live = ml_graph_extract(p->s.to, &p->local);
    if (p->local.overflow_count) {
        ml_arena *arena = ml_graph_arena(live);
        const ml_origin **origins = ML_NEW_ARRAY(arena, const ml_origin *, p->local.overflow_count);
        for (int i = 0; i < p->local.overflow_count; i++)
            origins[i] = p->s.overflow_checks.at[i].origin;
        p->roots->outputs = ML_NEW_ARRAY(arena, ml_ref, p->local.output_count);
        p->roots->output_count = p->local.output_count;
        p->roots->overflow_count = p->local.overflow_count;
        p->roots->overflow_origins = origins;
    }
    p->roots->division = p->s.division;
    for (int i = 0; i < p->local.output_count; i++) p->roots->outputs[i] = p->local.outputs[i];
    for (int i = 0; i < p->local.update_count; i++) p->roots->updates[i] = p->local.updates[i];
    ml_graph_free(p->s.to);
    p->s.to = live;
}

static ml_graph *run(const ml_graph *from, ml_roots *roots, const ml_layout *layout, pass p) {
    if (ml_layout_ranks(layout) == 1) return ml_drop_placements(from, roots);
    p.s.from = from;
    p.s.layout = layout;
    p.s.scratch = ml_arena_new();
    p.roots = roots;
    if (!p.s.scratch) ml_raise(ML_NO_MEMORY, "no memory left to shard the program");
    ml_status status = ml_protect(body, &p);
    if (status == ML_OK) status = ml_protect(finish, &p);
    ml_arena_free(p.s.scratch);
    if (status == ML_OK) return p.s.to;
    if (p.s.to) ml_graph_free(p.s.to);
    ml_raise_last();
}

ml_graph *ml_shard_times(const ml_graph *from, ml_roots *roots, const ml_layout *layout,
                         const uint32_t *times) {
    return run(from, roots, layout, (pass){.s.times = times});
}

ml_graph *ml_shard_report(const ml_graph *from, ml_roots *roots, const ml_layout *layout,
                          ml_shard_visitor *visit, void *context) {
    return run(from, roots, layout, (pass){.visit = visit, .context = context});
}

ml_graph *ml_shard(const ml_graph *from, ml_roots *roots, const ml_layout *layout) {
    return run(from, roots, layout, (pass){0});
}
