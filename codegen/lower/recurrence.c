/* RECURRENCEs that one kernel serves: histories that are read from stacked results or computed
 * again from checkpoints, and the order of results in memory. */
#include "runtime/ops/recurrence/recurrence.h"
#include "codegen/lower/lower_internal.h"

enum { LOWER_CHECKPOINTS = 16 }; /* positions from one to the next */

typedef struct {
    uint32_t *values; /* reads, then writes */
    int count;
    ml_scan_step *scan;
} lower_scan;

static bool is_recurrence(const lowering *l, ml_ref n) {
    return ml_graph_node(l->g, n)->op == ML_OP_RECURRENCE;
}

/* Blocks of such kernels have rows that are side by side. */
static bool by_rows(const lowering *l, ml_ref n) {
    ml_recurrence_rows rows;
    if (l->target->kind != ML_TARGET_CUDA || l->target->arch < 80) return false;
    return ml_recurrence_by_rows(l->g, n, &rows) && rows.type.size[rows.type.rank - 1] % 32 == 0;
}

bool lower_one_kernel(lowering *l, ml_ref n) {
    int operands = 2 * ml_graph_node(l->g, n)->source_count + ml_op_outputs(l->g, n);
    if (operands > ML_MAX_OPERANDS || l->target->no_fuse) return false;
    return ml_recurrence_elementwise(l->g, n) || by_rows(l, n);
}

/* The recurrence's node that all users of n are: kernels that n is an input of. 0: others, too, or
 * several. `elementwise`: several may be, where all are. */
static ml_ref only_user(lowering *l, ml_ref n, bool elementwise) {
    ml_ref only = 0;
    for (uint32_t i = l->first_user[n]; i < l->first_user[n + 1]; i++) {
        ml_ref user = l->user[i];
        if (!is_recurrence(l, user) || !lower_one_kernel(l, user)) return 0;
        if (elementwise ? !ml_recurrence_elementwise(l->g, user) : only && user != only) return 0;
        ml_recurrence r;
        ml_recurrence_read(l->g, user, &r);
        for (int k = r.inputs; k < ml_graph_node(l->g, user)->source_count; k++)
            if (ml_graph_source(l->g, user, k) == n) return 0;
        only = user;
    }
    return only;
}

/* The recurrence whose history n is, where one kernel serves it and n has no memory of its own for
 * other reasons; *state: of which state. 0 for other nodes. */
static ml_ref history_of(lowering *l, ml_ref n, int *state) {
    if (ml_graph_node(l->g, n)->op != ML_OP_OUT || l->info[n].pinned) return 0;
    ml_ref of = ml_graph_source(l->g, n, 0);
    if (!is_recurrence(l, of) || !lower_one_kernel(l, of)) return 0;
    ml_recurrence r;
    ml_recurrence_read(l->g, of, &r);
    *state = (int)ml_graph_args(l->g, n)[0] - ml_recurrence_history(&r);
    return *state >= 0 ? of : 0;
}

ml_ref lower_shifted_history(lowering *l, ml_ref n, ml_ref *initial) {
    int state;
    ml_ref of = history_of(l, n, &state);
    if (!of || !ml_recurrence_elementwise(l->g, of)) return 0;
    ml_recurrence r;
    ml_recurrence_read(l->g, of, &r);
    for (int i = 0; i < r.stacked; i++) {
        ml_ref stacked = views_output_node(l, of, i);
        ml_ref root = ml_recurrence_root(l->g, of, r.states + i);
        if (root != ml_recurrence_root(l->g, of, state) || !stacked) continue;
        *initial = ml_graph_source(l->g, of, r.inputs + state);
        return only_user(l, n, true) ? stacked : 0;
    }
    return 0;
}

/* ---- Checkpoints ---- */

static bool is_source(const lowering *l, ml_ref n, ml_ref source) {
    for (int i = 0; i < ml_graph_node(l->g, n)->source_count; i++)
        if (ml_graph_source(l->g, n, i) == source) return true;
    return false;
}

/* The gradient's kernel that computes all histories of n again: where what it must read beside its
 * own operands is less than the histories, written and read. 0: none. */
static ml_ref recomputes(lowering *l, ml_ref n, const ml_recurrence *r) {
    ml_ref user = 0;
    int64_t histories = 0, further = 0;
    for (int i = 0; i < r->states; i++) {
        ml_ref initial, out = views_output_node(l, n, ml_recurrence_history(r) + i);
        int state;
        if (!out) continue;
        if (!history_of(l, out, &state) || lower_shifted_history(l, out, &initial)) return 0;
        ml_ref one = only_user(l, out, false);
        if (!one || (user && one != user)) return 0;
        user = one;
        histories += ml_type_bytes(ml_graph_type(l->g, out));
    }
    for (int i = 0; i < ml_graph_node(l->g, n)->source_count; i++) {
        int state;
        if (history_of(l, ml_graph_source(l->g, n, i), &state)) return 0;
    }
    if (!user || !by_rows(l, n) || !by_rows(l, user) || r->length < LOWER_CHECKPOINTS) return 0;
    ml_recurrence of;
    ml_recurrence_read(l->g, user, &of);
    if (of.reverse == r->reverse) return 0;
    for (int i = 0; i < r->inputs; i++) {
        ml_ref source = ml_graph_source(l->g, n, i);
        if (!is_source(l, user, source)) further += ml_type_bytes(ml_graph_type(l->g, source));
    }
    int operands = ml_graph_node(l->g, user)->source_count + ml_op_outputs(l->g, user) +
                   ml_graph_node(l->g, n)->source_count + 2 * r->states;
    return further < 2 * histories && operands <= ML_MAX_OPERANDS ? user : 0;
}

/* A state at every so many positions: the chunks, the rows' short axis, the rows. */
static uint32_t checkpoint_value(lowering *l, ml_ref n, const ml_recurrence *r, int state) {
    ml_recurrence_rows rows;
    ml_type type = {.rank = 1}, whole = *ml_graph_type(l->g, ml_recurrence_root(l->g, n, state));
    ml_recurrence_by_rows(l->g, n, &rows);
    type.dtype = whole.dtype;
    type.axis[0] = r->axis;
    type.size[0] = (r->length + LOWER_CHECKPOINTS - 1) / LOWER_CHECKPOINTS;
    if (rows.axis && ml_type_find(&whole, rows.axis) >= 0) {
        type.axis[type.rank] = rows.axis;
        type.size[type.rank++] = rows.size;
    }
    for (int i = 0; i < rows.type.rank; i++) {
        type.axis[type.rank] = rows.type.axis[i];
        type.size[type.rank++] = rows.type.size[i];
    }
    return views_temporary(l, n, &type);
}

const uint32_t *lower_checkpoints(lowering *l, ml_ref n) {
    lower_info *info = &l->info[n];
    if (info->checkpoints || info->no_checkpoints) return info->checkpoints;
    ml_recurrence r;
    ml_recurrence_read(l->g, n, &r);
    info->no_checkpoints = !lower_one_kernel(l, n) || !recomputes(l, n, &r);
    if (info->no_checkpoints) return NULL;
    uint32_t *values = ML_NEW_ARRAY(l->arena, uint32_t, r.states + 1);
    for (int i = 0; i < r.states; i++) values[i] = checkpoint_value(l, n, &r, i);
    return info->checkpoints = values;
}

/* The recurrence whose history n is and whose states there are checkpoints of; 0 for other nodes.
 */
static ml_ref checkpointed(lowering *l, ml_ref n, int *state) {
    ml_ref of = history_of(l, n, state);
    return of && lower_checkpoints(l, of) ? of : 0;
}

/* ---- Steps ---- */

static void add(lower_scan *x, uint32_t value) {
    x->values[x->count++] = value;
}

/* Histories that are stacked results are read there, the initial states after all others. Those
 * that are computed again are checkpoints; after all others come the operands of what computes
 * them. */
static void read_sources(lowering *l, ml_ref n, lower_scan *x) {
    int sources = ml_graph_node(l->g, n)->source_count, initials = 0;
    uint32_t *initial = ML_NEW_ARRAY(l->scratch, uint32_t, sources + 1);
    ml_scan_step *scan = x->scan;
    for (int i = 0; i < sources; i++) {
        int state;
        ml_ref source = ml_graph_source(l->g, n, i), first;
        ml_ref shifted = lower_shifted_history(l, source, &first);
        ml_ref of = shifted ? 0 : checkpointed(l, source, &state);
        if (shifted) initial[initials++] = views_value(l, first);
        if (of) scan->forward = of;
        add(x, of ? lower_checkpoints(l, of)[state] : views_value(l, shifted ? shifted : source));
    }
    for (int i = 0; i < initials; i++) add(x, initial[i]);
    scan->forward_at = x->count;
    if (!scan->forward) return;
    ml_recurrence r;
    ml_recurrence_read(l->g, scan->forward, &r);
    for (int i = 0; i < ml_graph_node(l->g, scan->forward)->source_count; i++)
        add(x, views_value(l, ml_graph_source(l->g, scan->forward, i)));
    for (int i = 0; i < r.states; i++) add(x, lower_checkpoints(l, scan->forward)[i]);
}

void lower_scan_step(lowering *l, ml_ref n) {
    lower_scan x = {.scan = ML_NEW(l->arena, ml_scan_step)};
    ml_recurrence r;
    ml_recurrence_read(l->g, n, &r);
    int outputs = ml_op_outputs(l->g, n);
    x.values = ML_NEW_ARRAY(l->arena, uint32_t, 3 * ML_MAX_OPERANDS);
    x.scan->every = LOWER_CHECKPOINTS;
    read_sources(l, n, &x);
    int reads = x.count;
    const uint32_t *checkpoints = lower_checkpoints(l, n);
    for (int i = 0; i < outputs; i++) {
        ml_ref node = views_output_node(l, n, i), initial;
        bool history = i >= ml_recurrence_history(&r);
        if (!node || (history && (checkpoints || lower_shifted_history(l, node, &initial))))
            continue;
        add(&x, views_value(l, node));
    }
    x.scan->checkpoints = checkpoints ? r.states : 0;
    for (int i = 0; i < x.scan->checkpoints; i++) add(&x, checkpoints[i]);
    ml_step *step =
        lower_step(l, ML_STEP_KERNEL, n, x.values, reads, x.values + reads, x.count - reads);
    step->scan = x.scan;
    ml_template_recurrence(l->s, step);
}

/* ---- Orders ---- */

static bool is_result(const lowering *l, ml_ref n) {
    for (int i = 0; i < l->roots->output_count; i++)
        if (l->roots->outputs[i] == n) return true;
    return l->update[n] != 0;
}

/* The result is stored in the order of a PERMUTE of it that leaves the rows as they are. */
static void follow_permute(lowering *l, ml_ref n) {
    if (is_result(l, n)) return;
    const ml_type *type = ml_graph_type(l->g, n);
    for (uint32_t i = l->first_user[n]; i < l->first_user[n + 1]; i++) {
        ml_ref user = l->user[i];
        const ml_type *order = ml_graph_type(l->g, user);
        if (ml_graph_node(l->g, user)->op != ML_OP_PERMUTE || type->rank == 0) continue;
        if (order->axis[type->rank - 1] != type->axis[type->rank - 1]) continue;
        int64_t stride[ML_MAX_AXES];
        views_strides(order, stride);
        lower_layout *layout = ML_PUSH(l->scratch, &l->layouts);
        *layout = (lower_layout){.holder = n};
        for (int k = 0; k < type->rank; k++)
            layout->stride[k] = views_axis_stride(order, stride, type->axis[k]);
        l->info[n].layout = l->layouts.count - 1;
        return;
    }
}

void lower_recurrence_layouts(lowering *l) {
    if (l->target->no_fuse) return;
    if (l->layouts.count == 0) (void)ML_PUSH(l->scratch, &l->layouts);
    for (ml_ref n = 1; n < l->count; n++) {
        const ml_node *node = ml_graph_node(l->g, n);
        if (!l->info[n].reached || (!is_recurrence(l, n) && node->op != ML_OP_OUT)) continue;
        ml_ref of = is_recurrence(l, n) ? n : ml_graph_source(l->g, n, 0);
        if (is_recurrence(l, of) && lower_one_kernel(l, of)) follow_permute(l, n);
    }
}
