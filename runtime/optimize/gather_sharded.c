/* Parameters whose parts lie on ranks of several groups (shard/groups.h), as ZeRO-1 leaves them
 * from one step to the next. A program of groups is sharded as if they were whole. No group may
 * gather them for itself: the others run programs of their own meanwhile. So each is read as an
 * all-gather over all ranks, which the parameter cache takes out of the program (param_cache.c):
 * all ranks compute it at once, before the first microbatch after an update.
 *
 * A parameter that is cast is gathered in the dtype that it is cast to. */
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"
#include "runtime/plan/plan_internal.h"

typedef struct {
    const ml_plan *plan;
    ml_ref *gathered[ML_DTYPE_COUNT]; /* by node: a parameter's all-gather in that dtype */
} gathers;

/* The mesh axis over whose ranks the parameter lies in parts of which the program's layout knows
 * nothing; -1: there is none. */
static int axis_sharded(const ml_plan *plan, uint32_t state, ml_type *part, ml_placement *at) {
    const ml_layout *all = plan->update_layout;
    if (all == NULL || all == plan->layout) return -1;
    if (ml_graph_state(plan->graph, state)->kind != ML_STATE_PARAMETER) return -1;
    const ml_type own = plan_state(plan, state);
    *part = ml_plan_state_type(all, plan->graph, state);
    if (ml_type_equal(part, &own)) return -1;
    const ml_placements places = ml_plan_state_places(all, plan->graph, state);
    for (int i = 0; i < all->count; i++) {
        if (places.over[i].kind != ML_SPLIT) continue;
        if (plan->layout != NULL && plan->layout->axis[i].size == all->axis[i].size) continue;
        *at = places.over[i];
        return i;
    }
    return -1;
}

bool plan_reads_sharded(const ml_plan *plan) {
    const ml_graph *g = plan->graph;
    ml_type part;
    ml_placement at;
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_STATE &&
            axis_sharded(plan, (uint32_t)ml_graph_args(g, n)[0], &part, &at) >= 0)
            return true;
    return false;
}

/* The parameter n gathered over all ranks, its parts cast before; 0: the program has it whole. */
static ml_ref gather(rewrite *r, ml_ref n, ml_dtype dtype) {
    const gathers *all = r->context;
    const ml_type *whole = ml_graph_type(r->from, n);
    const int64_t *id = ml_graph_args(r->from, n);
    ml_type part, order;
    ml_placement at;
    if (all->gathered[dtype][n] != 0) return all->gathered[dtype][n];
    const int mesh = axis_sharded(all->plan, (uint32_t)id[0], &part, &at);
    if (mesh < 0) return 0;
    const int64_t args[] = {mesh, all->plan->update_layout->axis[mesh].size};
    ml_ref x = ml_graph_add(r->to, ML_OP_STATE, NULL, 0, id, 1, &part);
    x = ml_cast(r->to, x, dtype);
    order = ml_type_fronted(&part, at.axis);
    x = ml_permute(r->to, x, &order);
    x = ml_graph_add(r->to, ML_OP_ALL_GATHER, &x, 1, args, 2, NULL);
    if (ml_graph_type(r->to, x)->size[0] > whole->size[at.axis]) /* the last part is filled up */
        x = ml_slice(r->to, x, whole->axis[at.axis], 0, whole->size[at.axis]);
    return all->gathered[dtype][n] = ml_permute(r->to, x, whole);
}

/* The value n, made of such parameters by movements, in that dtype; 0: it is made of others too. */
static ml_ref moved(rewrite *r, ml_ref n, ml_dtype dtype) {
    enum { MOST = 16 };
    const ml_node *node = ml_graph_node(r->from, n);
    ml_type type = *ml_graph_type(r->from, n);
    ml_ref sources[MOST];
    if (node->op == ML_OP_STATE) return gather(r, n, dtype);
    if (!ml_op_selects(node->op) || node->source_count > MOST) return 0;
    for (int i = 0; i < node->source_count; i++)
        if ((sources[i] = moved(r, ml_graph_source(r->from, n, i), dtype)) == 0) return 0;
    if (node->op == ML_OP_PERMUTE) return ml_permute(r->to, sources[0], &type);
    return ml_graph_add(r->to, node->op, sources, node->source_count, ml_graph_args(r->from, n),
                        node->arg_count, NULL);
}

static ml_ref rule(rewrite *r, ml_ref n, const ml_ref *sources) {
    const ml_node *node = ml_graph_node(r->from, n);
    const ml_dtype dtype = (ml_dtype)ml_graph_type(r->from, n)->dtype;
    ml_ref made = 0;
    if (node->op == ML_OP_STATE) made = gather(r, n, dtype);
    if (node->op == ML_OP_CAST && ml_is_narrow(dtype))
        made = moved(r, ml_graph_source(r->from, n, 0), dtype);
    return made != 0 ? made : rewrite_copy(r, n, sources);
}

static void begin(rewrite *r) {
    gathers *all = r->context;
    for (int dtype = 0; dtype < ML_DTYPE_COUNT; dtype++)
        all->gathered[dtype] = ML_NEW_ARRAY(r->scratch, ml_ref, r->count);
}

ml_graph *plan_gather_sharded(ml_plan *plan) {
    gathers all = {.plan = plan};
    return rewrite_run(plan->graph, &plan->roots, begin, rule, &all);
}

/* ---- What is side by side is gathered as one ------------------------------------------------- */
/* The all-gather of which n is merged or renamed axes, none of them the gathered one; 0: none. */
static ml_ref gather_of(const ml_graph *g, ml_ref n) {
    const ml_axis outermost = ml_graph_type(g, n)->axis[0];
    while (ml_graph_node(g, n)->op == ML_OP_MERGE || ml_graph_node(g, n)->op == ML_OP_RENAME)
        n = ml_graph_source(g, n, 0);
    const bool same = ml_graph_type(g, n)->axis[0] == outermost;
    return ml_graph_node(g, n)->op == ML_OP_ALL_GATHER && same ? n : 0;
}

/* The same merged and renamed axes of the rank's part. */
static ml_ref part_moved(rewrite *r, ml_ref n) {
    const ml_node *node = ml_graph_node(r->from, n);
    if (node->op == ML_OP_ALL_GATHER) return r->map[ml_graph_source(r->from, n, 0)];
    const ml_ref source = part_moved(r, ml_graph_source(r->from, n, 0));
    return ml_graph_add(r->to, node->op, &source, 1, ml_graph_args(r->from, n), node->arg_count,
                        NULL);
}

static ml_ref join(rewrite *r, ml_ref n, const ml_ref *sources) {
    const ml_node *node = ml_graph_node(r->from, n);
    const ml_type *type = ml_graph_type(r->from, n);
    const int64_t *args = NULL;
    if (node->op != ML_OP_CONCAT) return rewrite_copy(r, n, sources);
    const ml_axis along = (ml_axis)ml_graph_args(r->from, n)[0];
    bool alike = type->rank > 0 && type->axis[0] != along;
    for (int i = 0; i < node->source_count && alike; i++) {
        const ml_ref gather = gather_of(r->from, ml_graph_source(r->from, n, i));
        const int64_t *own = gather != 0 ? ml_graph_args(r->from, gather) : NULL;
        alike = own != NULL && (args == NULL || (args[0] == own[0] && args[1] == own[1]));
        args = own;
    }
    if (!alike || args == NULL) return rewrite_copy(r, n, sources);
    ml_ref *parts = ML_NEW_ARRAY(r->scratch, ml_ref, node->source_count);
    for (int i = 0; i < node->source_count; i++)
        parts[i] = part_moved(r, ml_graph_source(r->from, n, i));
    const ml_ref whole = ml_concat(r->to, parts, node->source_count, along);
    return ml_graph_add(r->to, ML_OP_ALL_GATHER, &whole, 1, args, 2, NULL);
}

ml_graph *plan_gather_joined(const ml_graph *from, ml_roots *roots) {
    return rewrite_run(from, roots, NULL, join, NULL);
}
