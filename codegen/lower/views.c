/* Tensors as strided views of storages: which movements cost nothing, where values are stored.
 */
#include "codegen/lower/lower_internal.h"

#include <string.h>

void views_strides(const ml_type *type, int64_t *stride) {
    int64_t step = 1;
    for (int i = type->rank - 1; i >= 0; i--) {
        stride[i] = step;
        step *= type->size[i];
    }
}

bool views_contiguous(const ml_type *type, const int64_t *stride) {
    int64_t step = 1;
    for (int i = type->rank - 1; i >= 0; i--) {
        if (type->size[i] != 1 && stride[i] != step) return false;
        step *= type->size[i];
    }
    return true;
}

int64_t views_axis_stride(const ml_type *type, const int64_t *stride, ml_axis axis) {
    int at = ml_type_find(type, axis);
    return at < 0 ? 0 : stride[at];
}

const lower_layout *views_layout(lowering *l, ml_ref n, lower_layout *scratch) {
    if (l->info[n].layout != 0) return &l->layouts.at[l->info[n].layout];
    memset(scratch, 0, sizeof *scratch);
    scratch->holder = n;
    views_strides(ml_graph_type(l->g, n), scratch->stride);
    return scratch;
}

static int64_t stride_of(const ml_type *type, const lower_view *view, ml_axis axis) {
    return views_axis_stride(type, view->stride, axis);
}

/* RENAME leaves positions; the other strided movements find axes by name. */
static bool move_view(lowering *l, ml_ref n, lower_view *view) {
    ml_ref source = ml_graph_source(l->g, n, 0);
    const ml_type *from = ml_graph_type(l->g, source), *to = ml_graph_type(l->g, n);
    const int64_t *args = ml_graph_args(l->g, n);
    int op = ml_graph_node(l->g, n)->op;
    lower_view inner;
    if (!ml_op_is(op, ML_VIEW) && op != ML_OP_PLACE) return false;
    if (!views_of(l, source, &inner)) return false;
    memset(view, 0, sizeof *view);
    view->base = inner.base;
    view->offset = inner.offset;
    for (int i = 0; i < to->rank; i++)
        view->stride[i] =
            op == ML_OP_RENAME ? inner.stride[i] : stride_of(from, &inner, to->axis[i]);
    if (op == ML_OP_SLICE) {
        view->offset += args[1] * stride_of(from, &inner, (ml_axis)args[0]);
    } else if (op == ML_OP_SPLIT) {
        int64_t step = stride_of(from, &inner, (ml_axis)args[0]);
        view->stride[ml_type_find(to, (ml_axis)args[1])] = step * args[4];
        view->stride[ml_type_find(to, (ml_axis)args[3])] = step;
    } else if (op == ML_OP_MERGE) {
        int outer = ml_type_find(from, (ml_axis)args[0]), in = ml_type_find(from, (ml_axis)args[1]);
        int64_t step = from->size[in] == 1 ? inner.stride[outer] : inner.stride[in];
        bool joins = from->size[outer] == 1 || from->size[in] == 1 ||
                     inner.stride[outer] == inner.stride[in] * from->size[in];
        if (!joins) return false;
        view->stride[ml_type_find(to, (ml_axis)args[2])] = step;
    }
    return true;
}

bool views_of(lowering *l, ml_ref n, lower_view *view) {
    if (lower_in_memory(l, n)) {
        lower_layout scratch;
        const lower_layout *layout = views_layout(l, n, &scratch);
        view->base = n;
        view->offset = layout->offset;
        memcpy(view->stride, layout->stride, sizeof view->stride);
        return true;
    }
    if (ml_ops[ml_graph_node(l->g, n)->op].op_class != ML_CLASS_MOVE) return false;
    return move_view(l, n, view);
}

void views_require(lowering *l, ml_ref n, bool broadcast) {
    if (lower_in_memory(l, n)) return;
    int op = ml_graph_node(l->g, n)->op;
    lower_view view;
    bool strided = broadcast ? ml_op_is(op, ML_VIEW) : ml_op_selects(op);
    if (strided) {
        views_require(l, ml_graph_source(l->g, n, 0), broadcast);
        if (views_of(l, n, &view)) return;
    }
    l->info[n].role = LOWER_ROOT;
}

ml_ref views_producer(lowering *l, ml_ref part, int64_t *stride) {
    for (;;) {
        int op = ml_graph_node(l->g, part)->op;
        bool moves = ml_op_is(op, ML_VIEW | ML_BIJECTIVE);
        if (lower_in_memory(l, part) || !moves) return part;
        ml_ref source = ml_graph_source(l->g, part, 0);
        const ml_type *to = ml_graph_type(l->g, part), *from = ml_graph_type(l->g, source);
        const int64_t *args = ml_graph_args(l->g, part);
        int64_t inner[ML_MAX_AXES] = {0};
        for (int i = 0; i < from->rank; i++)
            inner[i] =
                op == ML_OP_RENAME ? stride[i] : views_axis_stride(to, stride, from->axis[i]);
        if (op == ML_OP_MERGE) {
            int64_t step = views_axis_stride(to, stride, (ml_axis)args[2]);
            int in = ml_type_find(from, (ml_axis)args[1]);
            inner[in] = step;
            inner[ml_type_find(from, (ml_axis)args[0])] = step * from->size[in];
        } else if (op == ML_OP_SPLIT) {
            int64_t outer = views_axis_stride(to, stride, (ml_axis)args[1]);
            int64_t step = views_axis_stride(to, stride, (ml_axis)args[3]);
            if (args[2] != 1 && outer != step * args[4]) return 0;
            inner[ml_type_find(from, (ml_axis)args[0])] = step;
        }
        memcpy(stride, inner, sizeof inner);
        part = source;
    }
}

static uint32_t new_storage(lowering *l, ml_storage_kind kind, uint32_t id, int64_t bytes,
                            ml_ref n) {
    ml_storage *storage = ML_PUSH(l->arena, &l->s->storages);
    storage->kind = kind;
    storage->id = id;
    storage->bytes = bytes;
    storage->node = n;
    return l->s->storages.count - 1;
}

uint32_t views_storage(lowering *l, ml_ref n) {
    lower_layout scratch;
    ml_ref holder = views_layout(l, n, &scratch)->holder;
    if (l->info[holder].storage != LOWER_NONE) return l->info[holder].storage;
    int op = ml_graph_node(l->g, holder)->op;
    int64_t bytes = ml_type_bytes(ml_graph_type(l->g, holder));
    ml_storage_kind kind = op == ML_OP_STATE        ? ML_STORAGE_STATE
                           : op == ML_OP_INPUT      ? ML_STORAGE_INPUT
                           : op == ML_OP_PARAM      ? ML_STORAGE_INPUT
                           : op == ML_OP_COORDINATE ? ML_STORAGE_COORDINATE
                                                    : ML_STORAGE_TEMPORARY;
    uint32_t id = kind == ML_STORAGE_TEMPORARY ? 0 : (uint32_t)ml_graph_args(l->g, holder)[0];
    return l->info[holder].storage = new_storage(l, kind, id, bytes, holder);
}

static uint32_t new_value(lowering *l, ml_ref n, const ml_type *type, uint32_t storage,
                          int64_t offset, const int64_t *stride) {
    ml_value *value = ML_PUSH(l->arena, &l->s->values);
    value->node = n;
    value->type = *type;
    value->storage = storage;
    value->offset = offset;
    memcpy(value->stride, stride, sizeof(int64_t) * type->rank);
    return l->s->values.count - 1;
}

uint32_t views_value(lowering *l, ml_ref n) {
    if (l->info[n].value != LOWER_NONE) return l->info[n].value;
    lower_view view;
    if (!views_of(l, n, &view))
        ml_raise(ML_INTERNAL, "lowering: node %%%u (%s) has no place in memory", n,
                 ml_ops[ml_graph_node(l->g, n)->op].name);
    uint32_t storage = views_storage(l, view.base);
    return l->info[n].value =
               new_value(l, n, ml_graph_type(l->g, n), storage, view.offset, view.stride);
}

uint32_t views_value_at(lowering *l, ml_ref base, const ml_type *type, int64_t offset,
                        const int64_t *stride) {
    return new_value(l, base, type, views_storage(l, base), offset, stride);
}

uint32_t views_temporary(lowering *l, ml_ref node, const ml_type *type) {
    int64_t stride[ML_MAX_AXES] = {0};
    views_strides(type, stride);
    int64_t bytes = ml_type_elements(type) * ml_dtypes[type->dtype].bytes;
    return new_value(l, node, type, new_storage(l, ML_STORAGE_TEMPORARY, 0, bytes, node), 0,
                     stride);
}

ml_ref views_output_node(lowering *l, ml_ref n, int i) {
    if (i == 0) return n;
    for (uint32_t u = l->first_user[n]; u < l->first_user[n + 1]; u++) {
        ml_ref out = l->user[u];
        if (ml_graph_node(l->g, out)->op == ML_OP_OUT && ml_graph_args(l->g, out)[0] == i)
            return out;
    }
    return 0;
}
