/* Second outputs of products by groups of rows (ragged.h): their types, values and definitions in
 * terms of other ops. fuse_expert_norms.c and fuse_gated_experts.c ask for them.
 */
#include "runtime/graph/infer.h"
#include "runtime/graph/reference.h"
#include "runtime/ops/ragged/ragged.h"

/* ---- Sums of squares of blocks of a RAGGED_OUTER ---- */
int64_t ragged_blocks(int64_t size, int64_t block) {
    return (size + block - 1) / block;
}

/* The axes of a RAGGED_OUTER are {groups, m, n}. */
void ragged_squares_type(const ml_graph *g, ml_ref outer, int i, ml_type *out) {
    (void)i;
    *out = *ml_graph_type(g, outer);
    out->dtype = ML_F32;
    out->size[1] = ragged_blocks(out->size[1], RAGGED_SQUARE_ROWS);
    out->size[2] = ragged_blocks(out->size[2], RAGGED_SQUARE_COLUMNS);
}

void ragged_squares(const reference_value *outer, reference_value *out) {
    int64_t rows = outer->type.size[1], columns = outer->type.size[2];
    for (int64_t i = 0; i < ml_type_elements(&outer->type); i++) {
        int64_t row = i / columns, group = row / rows;
        int64_t at = group * out->type.size[1] + row % rows / RAGGED_SQUARE_ROWS;
        double x = outer->cells[i].number;
        out->cells[at * out->type.size[2] + i % columns / RAGGED_SQUARE_COLUMNS].number += x * x;
    }
}

/* ---- A RAGGED_DOT whose epilogue combines the halves of its columns ---- */
/* The axes of a RAGGED_DOT are {batch, rows, n}, or without the first. */
void ragged_gated_type(const ml_graph *g, ml_ref dot, int i, ml_type *out) {
    (void)i;
    *out = *ml_graph_type(g, dot);
    out->size[out->rank - 1] /= RAGGED_HALVES;
}

/* Numbers of the rows: each axis is one of the result's, but not its last. */
void ragged_check_gated(infer *in, const ml_type *out) {
    const int own = ml_ragged_sources(in->g, in->sources[0]);
    for (int i = own; i < in->source_count; i++) {
        const ml_type *t = infer_source(in, i);
        for (int k = 0; k < t->rank; k++) {
            int at = ml_type_find(out, t->axis[k]);
            if (at < 0 || at == out->rank - 1 || out->size[at] != t->size[k])
                ml_raise(ML_INTERNAL, "the function of a product by groups reads its rows alone");
        }
    }
    if (in->args[3] && out->size[out->rank - 1] % RAGGED_HALVES)
        ml_raise(ML_INTERNAL, "the product has no halves for its epilogue");
}

/* For the reference: the product, and what follows it node by node. */
void ragged_gated_define(ml_graph *g, ml_ref n, ml_ref *outputs) {
    const ml_node *node = ml_graph_node(g, n);
    const int64_t *args = ml_graph_args(g, n);
    ml_ref sources[RAGGED_MOST_SOURCES], values[RAGGED_HALVES + RAGGED_GATED_ROWS],
        root = (ml_ref)args[3];
    const int own_sources = ml_ragged_sources(g, ml_graph_source(g, n, 0));
    const ml_type type = *ml_graph_type(g, n);
    int count = RAGGED_HALVES, rows = node->source_count - own_sources;
    for (int i = 0; i < own_sources; i++) sources[i] = ml_graph_source(g, n, i);
    for (int i = 0; i < rows; i++) values[count++] = ml_graph_source(g, n, own_sources + i);
    outputs[0] =
        ml_ragged_dot(g, sources, (ml_axis)args[0], (ml_axis)args[2], (ml_dtype)type.dtype);
    ml_axis own = type.axis[type.rank - 1], named = ml_graph_type(g, root)->axis[type.rank - 1];
    int64_t half = type.size[type.rank - 1] / RAGGED_HALVES;
    for (int i = 0; i < RAGGED_HALVES; i++) {
        values[i] = ml_slice(g, outputs[0], own, i * half, (i + 1) * half);
        if (named != own) values[i] = ml_rename(g, values[i], own, named);
    }
    outputs[1] = ml_graph_inline(g, root, values, count);
    if (named != own) outputs[1] = ml_rename(g, outputs[1], named, own);
}
