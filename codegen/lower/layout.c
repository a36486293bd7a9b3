/* Memory orders: a value that a product cannot read as it is stored is written in another order by
 * its producer (a product or a kernel, to which it is all one), instead of being copied. So
 * attention written out as products needs no transposes between [batch, heads, seq] and [batch,
 * seq, heads].
 */
#include "codegen/lower/lower_internal.h"

#include <string.h>

enum { MOST_VIEWS = 48 };

typedef struct {
    ml_ref node[MOST_VIEWS]; /* the value and all views of it */
    bool strided[MOST_VIEWS];
    int count;
} family;

static bool collect(lowering *l, ml_ref n, family *f) {
    if (f->count == MOST_VIEWS) return false;
    lower_view view;
    f->strided[f->count] = views_of(l, n, &view);
    f->node[f->count++] = n;
    for (uint32_t i = l->first_user[n]; i < l->first_user[n + 1]; i++) {
        ml_ref u = l->user[i];
        bool moves = ml_op_is(ml_graph_node(l->g, u)->op, ML_VIEW);
        if (moves && !lower_in_memory(l, u) && !collect(l, u, f)) return false;
    }
    return true;
}

/* Copies that all products of the family need. */
static int copies(lowering *l, const family *f) {
    int total = 0;
    for (int i = 0; i < f->count; i++) {
        ml_ref n = f->node[i];
        for (uint32_t u = l->first_user[n]; u < l->first_user[n + 1]; u++) {
            ml_ref user = l->user[u];
            if (ml_graph_node(l->g, user)->op != ML_OP_DOT) continue;
            if (l->info[user].role == LOWER_OPAQUE) total += gemm_copies(l, user, -1, NULL);
        }
    }
    return total;
}

static bool still_strided(lowering *l, const family *f) {
    for (int i = 0; i < f->count; i++) {
        lower_view view;
        if (f->strided[i] && !views_of(l, f->node[i], &view)) return false;
    }
    return true;
}

static bool can_change(lowering *l, ml_ref n, const int64_t *stride) {
    const lower_info *info = &l->info[n];
    if (info->pinned || info->layout != 0) return false;
    if (info->role == LOWER_ROOT) return true;
    return info->role == LOWER_OPAQUE && ml_graph_node(l->g, n)->op == ML_OP_DOT &&
           gemm_result_fits(l, n, stride);
}

static void try_layout(lowering *l, ml_ref dot, int which) {
    ml_ref tensor = ml_graph_source(l->g, dot, which);
    const ml_type *type = ml_graph_type(l->g, tensor);
    ml_type order;
    if (ml_is_scaled_dot(l->g, dot)) return; /* its operands are transposed on their own */
    if (!gemm_copies(l, dot, which, &order)) return;
    int64_t packed[ML_MAX_AXES], stride[ML_MAX_AXES] = {0};
    views_strides(&order, packed);
    for (int i = 0; i < type->rank; i++) /* axes of size 1 are not in the order */
        stride[i] = ml_type_find(&order, type->axis[i]) < 0
                        ? ml_type_elements(type)
                        : views_axis_stride(&order, packed, type->axis[i]);
    ml_ref maker = views_producer(l, tensor, stride);
    if (maker == 0 || !can_change(l, maker, stride)) return;
    family f = {.count = 0};
    if (!collect(l, maker, &f)) return;
    int before = copies(l, &f);
    lower_layout *layout = ML_PUSH(l->scratch, &l->layouts);
    layout->holder = maker;
    memcpy(layout->stride, stride, sizeof stride);
    l->info[maker].layout = l->layouts.count - 1;
    if (!still_strided(l, &f) || copies(l, &f) >= before) l->info[maker].layout = 0;
}

void layout_choose(lowering *l) {
    if (l->target->no_fuse) return;
    for (ml_ref n = 1; n < l->count; n++) {
        if (!l->info[n].reached || l->info[n].role != LOWER_OPAQUE) continue;
        if (ml_graph_node(l->g, n)->op != ML_OP_DOT) continue;
        for (int i = 0; i < 2; i++) try_layout(l, n, i);
    }
}
