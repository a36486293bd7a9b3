/* Whether a step is elementwise over rows: beside elementwise ops it has sums over one short axis
 * of the states, which a row's thread holds, and gives sums over the last axis of the rows. */
#include "runtime/graph/infer.h"
#include "runtime/ops/recurrence/recurrence.h"

typedef struct {
    const ml_graph *g;
    ml_recurrence_rows *rows;
    ml_type space; /* of the largest state */
} rows_check;

/* All of t's axes are in the space; how many of them are axes of the rows. */
static bool is_inside(const rows_check *c, const ml_type *t, int *in_rows) {
    *in_rows = 0;
    for (int i = 0; i < t->rank; i++) {
        int at = ml_type_find(&c->space, t->axis[i]);
        if (at < 0 || c->space.size[at] != t->size[i]) return false;
        *in_rows += t->axis[i] != c->rows->axis;
    }
    return true;
}

static bool reduces_only(const rows_check *c, ml_ref n, ml_axis axis) {
    return axis && ml_graph_node(c->g, n)->arg_count == 1 &&
           (ml_axis)ml_graph_args(c->g, n)[0] == axis;
}

static bool serves_body(const rows_check *c, ml_ref root) {
    ml_refs body = {0};
    graph_reach(c->g, root, ml_graph_arena((ml_graph *)c->g), &body);
    for (uint32_t i = 0; i < body.count; i++) {
        ml_op op = (ml_op)ml_graph_node(c->g, body.at[i])->op;
        bool sum = (op == ML_OP_SUM || op == ML_OP_DOT) &&
                   (reduces_only(c, body.at[i], c->rows->axis) ||
                    (op == ML_OP_DOT && ml_graph_node(c->g, body.at[i])->arg_count == 0));
        bool same = ml_op_is_function(op) || op == ML_OP_PARAM || op == ML_OP_CONST ||
                    op == ML_OP_BROADCAST || op == ML_OP_PERMUTE;
        int in_rows;
        if (!(same || sum) || !is_inside(c, ml_graph_type(c->g, body.at[i]), &in_rows))
            return false;
    }
    return true;
}

ml_ref ml_recurrence_row_sum(const ml_graph *g, const ml_recurrence_rows *rows, ml_ref root) {
    ml_axis last = rows->type.axis[rows->type.rank - 1];
    const ml_node *node = ml_graph_node(g, root);
    bool sums =
        node->op == ML_OP_SUM && node->arg_count == 1 && (ml_axis)ml_graph_args(g, root)[0] == last;
    return sums ? ml_graph_source(g, root, 0) : 0;
}

static bool serves(const rows_check *c, ml_ref n, const ml_recurrence *r) {
    for (int i = 0; i < ml_recurrence_roots(r); i++) {
        ml_ref root = ml_recurrence_root(c->g, n, i);
        bool stacked = i >= r->states && i < r->states + r->stacked;
        ml_ref sum = stacked ? ml_recurrence_row_sum(c->g, c->rows, root) : 0;
        int in_rows;
        bool wide = c->rows->axis && ml_type_find(ml_graph_type(c->g, root), c->rows->axis) >= 0;
        if (sum && wide && (c->rows->size > 32 || (c->rows->size & (c->rows->size - 1))))
            return false;
        if (!is_inside(c, ml_graph_type(c->g, root), &in_rows)) return false;
        if (in_rows != c->rows->type.rank - (sum ? 1 : 0)) return false;
        if (!serves_body(c, sum ? sum : root)) return false;
    }
    return true;
}

static void rows_of(const ml_type *space, ml_axis axis, ml_recurrence_rows *out) {
    *out = (ml_recurrence_rows){.axis = axis, .size = 1, .type = {.dtype = space->dtype}};
    for (int i = 0; i < space->rank; i++) {
        if (space->axis[i] == axis) {
            out->size = space->size[i];
            continue;
        }
        out->type.axis[out->type.rank] = space->axis[i];
        out->type.size[out->type.rank++] = space->size[i];
    }
}

bool ml_recurrence_by_rows(const ml_graph *g, ml_ref n, ml_recurrence_rows *out) {
    enum { MOST = 64 };
    ml_recurrence r;
    ml_recurrence_read(g, n, &r);
    rows_check c = {.g = g, .rows = out};
    for (int i = 0; i < r.states; i++) {
        const ml_type *type = ml_graph_type(g, ml_recurrence_root(g, n, i));
        if (i == 0 || type->rank > c.space.rank) c.space = *type;
    }
    if (r.states == 0) return false;
    const bool alone = ml_recurrence_elementwise(g, n);
    for (int i = alone ? 0 : c.space.rank; i-- > 0;) {
        if (c.space.size[i] > MOST) continue;
        rows_of(&c.space, c.space.axis[i], out);
        if (out->type.rank > 0 && serves(&c, n, &r)) return true;
    }
    rows_of(&c.space, 0, out);
    return out->type.rank > 0 && serves(&c, n, &r);
}
