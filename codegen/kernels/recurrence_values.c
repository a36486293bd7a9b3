/* The step of a recurrence with products of its states, taken apart into values of one row and
 * column, and products over all columns (recurrence_grid.h). */
#include <stdio.h>
#include <string.h>

#include "codegen/kernels/recurrence_grid.h"

static int value_at(grid *x, ml_ref n, const grid_coordinate *at);

void grid_refuse(const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ml_raise(ML_INVALID, "%s", text);
}

static const ml_type *type_of(const grid *x, ml_ref n) {
    return ml_graph_type(x->g, n);
}

static int op_of(const grid *x, ml_ref n) {
    return ml_graph_node(x->g, n)->op;
}

static int64_t stride_of(const ml_value *v, ml_axis axis) {
    int at = ml_type_find(&v->type, axis);
    return at < 0 ? 0 : v->stride[at];
}

static int row_axis(const grid *x, ml_axis axis) {
    for (int i = 0; i < x->row_axes; i++)
        if (x->row_axis[i] == axis) return i;
    return -1;
}

const char *grid_address(const grid *x, int i, const ml_type *type, const grid_coordinate *at,
                         const char *row, const char *column) {
    const ml_value *v = template_value(x->schedule, x->step, i);
    int64_t base = 0, along = stride_of(v, x->r.axis), columns = 0;
    int64_t strides[ML_MAX_AXES] = {0};
    for (int k = 0; k < type->rank; k++) {
        int64_t stride = stride_of(v, type->axis[k]);
        base += at[k].base * stride;
        if (at[k].variable == GRID_COLUMN) columns += stride;
        if (at[k].variable >= GRID_ROW) strides[at[k].variable - GRID_ROW] += stride;
    }
    ml_template_loops loops = {0};
    for (int k = 0; k < x->row_axes; k++) template_loop_add(&loops, x->row_size[k], strides[k]);
    ml_text out = {.arena = x->text.arena};
    ml_text_add(&out, "%lldLL", (long long)base);
    if (along) ml_text_add(&out, " + t * %lldLL", (long long)along);
    if (columns) ml_text_add(&out, " + %s * %lldLL", column, (long long)columns);
    ml_text_add(&out, " + %s", template_offset(x->text.arena, &loops, row));
    return out.text;
}

/* ---- Coordinates of views ---- */

static void by_name(const grid *x, ml_ref n, ml_ref source, const grid_coordinate *at,
                    grid_coordinate *out) {
    const ml_type *type = type_of(x, n), *from = type_of(x, source);
    for (int i = 0; i < from->rank; i++) {
        int k = ml_type_find(type, from->axis[i]);
        if (k < 0) grid_refuse("its step has a view that it does not know");
        out[i] = at[k];
    }
}

static grid_coordinate along(const grid *x, ml_ref n, const grid_coordinate *at, int64_t axis) {
    int k = ml_type_find(type_of(x, n), (ml_axis)axis);
    return k < 0 ? (grid_coordinate){0, GRID_FIXED} : at[k];
}

/* How far a coordinate reaches above its base. */
static int64_t extent(const grid *x, grid_coordinate c) {
    return c.variable == GRID_FIXED ? 1
           : c.variable >= GRID_ROW ? x->row_size[c.variable - GRID_ROW]
                                    : x->size;
}

/* Axes of the source that the view does not have under this name: split, merged or renamed ones. */
static grid_coordinate source_coordinate(const grid *x, ml_ref n, int place,
                                         const grid_coordinate *at) {
    const int64_t *args = ml_graph_args(x->g, n);
    ml_axis axis = type_of(x, ml_graph_source(x->g, n, 0))->axis[place];
    int op = op_of(x, n);
    grid_coordinate c;
    if (op == ML_OP_RENAME) return at[place];
    if (op == ML_OP_SLICE && axis == (ml_axis)args[0]) {
        c = along(x, n, at, axis);
        c.base += args[1];
        return c;
    }
    if (op == ML_OP_SPLIT && axis == (ml_axis)args[0]) {
        grid_coordinate outer = along(x, n, at, args[1]), inner = along(x, n, at, args[3]);
        if (outer.variable != GRID_FIXED && (args[4] != 1 || inner.variable != GRID_FIXED))
            grid_refuse("its step divides an axis otherwise than by its columns");
        int variable = outer.variable ? outer.variable : inner.variable;
        return (grid_coordinate){outer.base * args[4] + inner.base, variable};
    }
    if (op == ML_OP_MERGE && (axis == (ml_axis)args[0] || axis == (ml_axis)args[1])) {
        const ml_type *from = type_of(x, ml_graph_source(x->g, n, 0));
        int64_t width = from->size[ml_type_find(from, (ml_axis)args[1])];
        c = along(x, n, at, args[2]);
        bool fits = c.base % width + extent(x, c) <= width;
        if (!fits && width != 1) grid_refuse("its step merges axes otherwise than by its columns");
        if (!fits) return axis == (ml_axis)args[0] ? c : (grid_coordinate){0, GRID_FIXED};
        if (axis == (ml_axis)args[0]) return (grid_coordinate){c.base / width, GRID_FIXED};
        return (grid_coordinate){c.base % width, c.variable};
    }
    int k = ml_type_find(type_of(x, n), axis);
    if (k < 0) grid_refuse("its step has a view that it does not know");
    return at[k];
}

/* Where a view's element is in its source; false for what is no view. */
static bool through_view(const grid *x, ml_ref n, const grid_coordinate *at, grid_coordinate *out) {
    int op = op_of(x, n);
    bool view = op == ML_OP_RENAME || op == ML_OP_PERMUTE || op == ML_OP_BROADCAST ||
                op == ML_OP_SLICE || op == ML_OP_SPLIT || op == ML_OP_MERGE;
    if (!view) return false;
    ml_ref source = ml_graph_source(x->g, n, 0);
    if (op == ML_OP_PERMUTE || op == ML_OP_BROADCAST) {
        by_name(x, n, source, at, out);
        return true;
    }
    for (int i = 0; i < type_of(x, source)->rank; i++) out[i] = source_coordinate(x, n, i, at);
    return true;
}

/* ---- Values ---- */

static int value_add(grid *x, ml_ref n, const grid_coordinate *at, int level, const char *name) {
    if (level >= GRID_LEVELS) grid_refuse("its step has products after too many others");
    const ml_type *type = type_of(x, n);
    grid_value *v = ML_PUSH(x->text.arena, &x->values);
    *v = (grid_value){.node = n, .dtype = (ml_dtype)type->dtype, .level = level, .name = name};
    memcpy(v->at, at, sizeof *at * (size_t)type->rank);
    return (int)x->values.count - 1;
}

static int value_find(const grid *x, ml_ref n, const grid_coordinate *at) {
    int rank = type_of(x, n)->rank;
    for (uint32_t i = 0; i < x->values.count; i++) {
        const grid_value *v = &x->values.at[i];
        bool same = v->node == n;
        for (int k = 0; k < rank && same; k++)
            same = v->at[k].base == at[k].base && v->at[k].variable == at[k].variable;
        if (same) return (int)i;
    }
    return -1;
}

/* A name for the next value, declared in `where`. */
static const char *declare(grid *x, ml_text *where, ml_dtype dtype) {
    unsigned number = x->values.count;
    ml_text_add(where, "%s v%u[ELEMENTS];\n", emit_compute_type(dtype), number);
    return ml_arena_format(x->text.arena, "v%u[e]", number);
}

/* Whether the coordinates are those of the thread's own row and column. */
static bool is_own(const grid *x, const ml_type *type, const grid_coordinate *at) {
    for (int i = 0; i < type->rank; i++) {
        int row = row_axis(x, type->axis[i]);
        if (at[i].base != 0 || at[i].variable != (row < 0 ? GRID_COLUMN : GRID_ROW + row))
            return false;
    }
    return true;
}

static int parameter_at(grid *x, ml_ref n, const grid_coordinate *at) {
    int i = (int)ml_graph_args(x->g, n)[0], state = i - x->r.inputs;
    const ml_type *type = type_of(x, n);
    ml_dtype dtype = (ml_dtype)type->dtype;
    if (state >= 0 && state < x->r.states) {
        if (!is_own(x, type, at)) grid_refuse("its step moves columns of a state");
        return value_add(x, n, at, 0, ml_arena_format(x->text.arena, "s%d[e]", state));
    }
    const char *index = grid_address(x, i, type, at, "row[e]", "column[e]");
    const char *memory = emit_memory_type(dtype);
    const char *element =
        ml_arena_format(x->text.arena, "((const %s *)P[%d])[%s]", memory, i, index);
    bool moves = state < 0;
    const char *name = declare(x, moves ? &x->declare : &x->setup, dtype);
    if (!moves) {
        ml_text_add(&x->setup, "EACH %s = %s;\n", name,
                    template_load(x->text.arena, dtype, element));
        return value_add(x, n, at, 0, name);
    }
    const char *raw = ml_arena_format(x->text.arena, "raw%d", x->raw_count++);
    ml_text_add(&x->setup, "%s %s[ELEMENTS];\n", memory, raw);
    ml_text_add(&x->load, "EACH %s[e] = %s;\n", raw, element);
    ml_text_add(&x->inputs, "EACH %s = %s;\n", name,
                template_load(x->text.arena, dtype, ml_arena_format(x->text.arena, "%s[e]", raw)));
    return value_add(x, n, at, 0, name);
}

static int constant_at(grid *x, ml_ref n, const grid_coordinate *at) {
    const int64_t *args = ml_graph_args(x->g, n);
    ml_text text = {.arena = x->text.arena};
    double number;
    memcpy(&number, &args[0], sizeof number);
    ml_dtype dtype = (ml_dtype)type_of(x, n)->dtype;
    emit_constant(&text, dtype, number, args[0]);
    int made = value_add(x, n, at, 0, text.text);
    x->values.at[made].zero = ml_is_float(dtype) ? number == 0 : args[0] == 0;
    return made;
}

static int zero_at(grid *x, ml_ref n, const grid_coordinate *at) {
    int made = value_add(x, n, at, 0, "0");
    x->values.at[made].zero = true;
    return made;
}

/* Zeros around: where a range of columns is half inside, the step is another. */
static int pad_at(grid *x, ml_ref n, const grid_coordinate *at) {
    const int64_t *args = ml_graph_args(x->g, n);
    ml_ref source = ml_graph_source(x->g, n, 0);
    const ml_type *from = type_of(x, source);
    grid_coordinate inside[ML_MAX_AXES];
    by_name(x, n, source, at, inside);
    int k = ml_type_find(from, (ml_axis)args[0]);
    int64_t begin = inside[k].base - args[1], end = begin + extent(x, inside[k]);
    if (end <= 0 || begin >= from->size[k]) return zero_at(x, n, at);
    if (begin < 0 || end > from->size[k]) grid_refuse("its step pads by less than its columns");
    inside[k].base = begin;
    return value_at(x, source, inside);
}

static int concat_at(grid *x, ml_ref n, const grid_coordinate *at) {
    ml_axis axis = (ml_axis)ml_graph_args(x->g, n)[0];
    int64_t before = 0;
    for (int i = 0; i < ml_graph_node(x->g, n)->source_count; i++) {
        ml_ref source = ml_graph_source(x->g, n, i);
        const ml_type *from = type_of(x, source);
        grid_coordinate inside[ML_MAX_AXES];
        by_name(x, n, source, at, inside);
        int k = ml_type_find(from, axis);
        int64_t begin = inside[k].base - before, end = begin + extent(x, inside[k]);
        before += from->size[k];
        if (begin < 0 || end > from->size[k]) continue;
        inside[k].base = begin;
        return value_at(x, source, inside);
    }
    grid_refuse("its step joins tensors otherwise than by its columns");
}

static int sum_at(grid *x, ml_ref n, const grid_coordinate *at) {
    ml_ref source = ml_graph_source(x->g, n, 0);
    const ml_type *from = type_of(x, source);
    grid_coordinate inside[ML_MAX_AXES];
    for (int i = 0; i < from->rank; i++) {
        int k = ml_type_find(type_of(x, n), from->axis[i]);
        if (k < 0 && from->size[i] != 1)
            grid_refuse("its step sums over an axis beside its products");
        inside[i] = k < 0 ? (grid_coordinate){0, GRID_FIXED} : at[k];
    }
    return value_at(x, source, inside);
}

static int map_at(grid *x, ml_ref n, const grid_coordinate *at) {
    const ml_node *node = ml_graph_node(x->g, n);
    int sources[3] = {0}, level = 0;
    const char *operands[3] = {"", "", ""};
    for (int i = 0; i < node->source_count && i < 3; i++) {
        ml_ref source = ml_graph_source(x->g, n, i);
        grid_coordinate inside[ML_MAX_AXES];
        by_name(x, n, source, at, inside);
        sources[i] = value_at(x, source, inside);
        const grid_value *v = &x->values.at[sources[i]];
        operands[i] = v->name;
        if (v->level > level) level = v->level;
    }
    for (int i = 0; i < 2 && node->op == ML_OP_ADD; i++)
        if (x->values.at[sources[i]].zero) return sources[1 - i];
    ml_dtype dtype = (ml_dtype)type_of(x, n)->dtype;
    ml_dtype from = (ml_dtype)type_of(x, ml_graph_source(x->g, n, 0))->dtype;
    const char *name = declare(x, &x->declare, dtype);
    ml_text_add(&x->level[level], "%s = ", name);
    ml_emit_map(&x->level[level], (ml_op)node->op, dtype, from, operands);
    ml_text_add(&x->level[level], ";\n");
    return value_add(x, n, at, level, name);
}

/* ---- Columns ---- */

typedef struct {
    grid *x;
    ml_ref node;
    int main, count;
    grid_coordinate at[GRID_SLOTS][ML_MAX_AXES];
    int values[GRID_SLOTS];
} grid_columns;

static void columns_evaluate(void *argument) {
    grid_columns *c = argument;
    for (int i = 0; i < c->count; i++) c->values[i] = value_at(c->x, c->node, c->at[i]);
}

/* Slots where `main` is the axis along which the thread's own column is counted. */
static bool columns_list(grid_columns *c) {
    const grid *x = c->x;
    const ml_type *type = type_of(x, c->node);
    int64_t count = 1;
    for (int i = 0; i < type->rank; i++) {
        if (row_axis(x, type->axis[i]) >= 0) continue;
        count *= i == c->main ? type->size[i] / x->size : type->size[i];
    }
    if (count > GRID_SLOTS) return false;
    c->count = (int)count;
    for (int64_t slot = 0; slot < count; slot++) {
        int64_t rest = slot;
        for (int i = type->rank - 1; i >= 0; i--) {
            int row = row_axis(x, type->axis[i]);
            int64_t size = i == c->main ? type->size[i] / x->size : type->size[i];
            grid_coordinate *at = &c->at[slot][i];
            *at = (grid_coordinate){0, row < 0 ? GRID_FIXED : GRID_ROW + row};
            if (row >= 0) continue;
            at->base = rest % size * (i == c->main ? x->size : 1);
            if (i == c->main) at->variable = GRID_COLUMN;
            rest /= size;
        }
    }
    return true;
}

/* The node's columns, cut into slots; raises where it has others. */
static void columns_of(grid *x, ml_ref n, grid_columns *c) {
    const ml_type *type = type_of(x, n);
    int rows = 0;
    ml_error error = {.status = ML_OK};
    for (int i = 0; i < type->rank; i++) rows += row_axis(x, type->axis[i]) >= 0;
    if (rows != x->row_axes) grid_refuse("its step has results that lack an axis of the rows");
    *c = (grid_columns){.x = x, .node = n};
    for (c->main = type->rank - 1; c->main >= 0; c->main--) {
        bool row = row_axis(x, type->axis[c->main]) >= 0;
        if (row || type->size[c->main] % x->size != 0 || !columns_list(c)) continue;
        ml_status status = ml_protect(columns_evaluate, c);
        if (status == ML_OK) return;
        error = *ml_error_last();
        if (status != ML_INVALID) ml_raise_last();
    }
    if (error.status == ML_OK) grid_refuse("its step has tensors of other columns than the states");
    *ml_error_last() = error;
    ml_raise_last();
}

/* ---- Products ---- */

static ml_ref past_views(const grid *x, ml_ref n) {
    while (ml_op_is((ml_op)op_of(x, n), ML_VIEW) && op_of(x, n) != ML_OP_BROADCAST)
        n = ml_graph_source(x->g, n, 0);
    return n;
}

static bool is_matrix(const grid *x, ml_ref n) {
    n = past_views(x, n);
    return op_of(x, n) == ML_OP_PARAM && ml_graph_args(x->g, n)[0] >= x->r.inputs + x->r.states &&
           type_of(x, n)->dtype == ML_BF16;
}

/* The element of the captured matrix, and how far apart columns and depths are. */
static int64_t matrix_element(const grid *x, ml_ref n, const grid_coordinate *at,
                              grid_result *out) {
    grid_coordinate here[ML_MAX_AXES], next[ML_MAX_AXES];
    memcpy(here, at, sizeof *at * (size_t)type_of(x, n)->rank);
    while (through_view(x, n, here, next)) {
        n = ml_graph_source(x->g, n, 0);
        memcpy(here, next, sizeof here);
    }
    if (op_of(x, n) != ML_OP_PARAM) grid_refuse("its step multiplies by what it computes");
    out->matrix = (int)ml_graph_args(x->g, n)[0];
    const ml_value *v = template_value(x->schedule, x->step, out->matrix);
    const ml_type *type = type_of(x, n);
    int64_t base = 0;
    out->depth_stride = out->column_stride = 0;
    for (int i = 0; i < type->rank; i++) {
        int64_t stride = stride_of(v, type->axis[i]);
        base += here[i].base * stride;
        if (here[i].variable >= GRID_ROW) grid_refuse("its step has a matrix for each row");
        if (here[i].variable == GRID_COLUMN) out->column_stride += stride;
        if (here[i].variable == GRID_DEEP) out->depth_stride += stride;
    }
    return base;
}

static grid_product *product_of(grid *x, const grid_columns *c) {
    for (int i = 0; i < x->product_count; i++) {
        grid_product *p = &x->products[i];
        bool same = p->slots == c->count;
        for (int k = 0; k < c->count && same; k++) same = p->operand[k] == c->values[k];
        if (same) return p;
    }
    if (x->product_count == GRID_PRODUCTS) grid_refuse("its step has too many products");
    grid_product *p = &x->products[x->product_count++];
    *p = (grid_product){.slots = c->count};
    for (int k = 0; k < c->count; k++) {
        p->operand[k] = c->values[k];
        int level = x->values.at[c->values[k]].level;
        if (level > p->level) p->level = level;
    }
    return p;
}

/* Whether the contracted axes are all of the operand but the rows. */
static void check_contracted(const grid *x, ml_ref n, ml_ref operand) {
    const ml_type *type = type_of(x, operand);
    int count = ml_graph_node(x->g, n)->arg_count;
    if (type->dtype != ML_BF16) grid_refuse("its products' operands are no bf16");
    if (type->rank != count + x->row_axes) grid_refuse("its products have several batches");
    for (int i = 0; i < count; i++)
        if (row_axis(x, (ml_axis)ml_graph_args(x->g, n)[i]) >= 0)
            grid_refuse("its step sums over its rows");
}

static int dot_at(grid *x, ml_ref n, const grid_coordinate *at) {
    const ml_type *type = type_of(x, n);
    int side = is_matrix(x, ml_graph_source(x->g, n, 1)) ? 1 : 0;
    ml_ref operand = ml_graph_source(x->g, n, 1 - side), matrix = ml_graph_source(x->g, n, side);
    if (!is_matrix(x, matrix)) grid_refuse("its products have no captured bf16 matrix");
    check_contracted(x, n, operand);
    for (int i = 0; i < type->rank; i++)
        if (row_axis(x, type->axis[i]) >= 0 &&
            (at[i].base || at[i].variable != GRID_ROW + row_axis(x, type->axis[i])))
            grid_refuse("its step moves rows");
    grid_columns c;
    columns_of(x, operand, &c);
    grid_product *p = product_of(x, &c);
    if (p->results == GRID_SLOTS) grid_refuse("its products have too many columns");
    grid_result made = {0};
    const ml_type *m = type_of(x, matrix);
    for (int slot = 0; slot < c.count; slot++) {
        grid_coordinate there[ML_MAX_AXES];
        for (int i = 0; i < m->rank; i++) {
            int k = ml_type_find(type_of(x, operand), m->axis[i]);
            there[i] = k >= 0 ? c.at[slot][k] : along(x, n, at, m->axis[i]);
            if (k >= 0 && there[i].variable == GRID_COLUMN) there[i].variable = GRID_DEEP;
        }
        made.base[slot] = matrix_element(x, matrix, there, &made);
    }
    int level = p->level + 1;
    made.value = value_add(x, n, at, level, NULL);
    x->values.at[made.value].name = ml_arena_format(x->text.arena, "v%d[e]", made.value);
    ml_text_add(&x->declare, "%s v%d[ELEMENTS];\n", emit_compute_type((ml_dtype)type->dtype),
                made.value);
    p->result[p->results++] = made;
    return made.value;
}

static int value_at(grid *x, ml_ref n, const grid_coordinate *at) {
    grid_coordinate inside[ML_MAX_AXES];
    int known = value_find(x, n, at), op = op_of(x, n);
    if (known >= 0) return known;
    if (through_view(x, n, at, inside)) return value_at(x, ml_graph_source(x->g, n, 0), inside);
    if (op == ML_OP_PARAM) return parameter_at(x, n, at);
    if (op == ML_OP_CONST) return constant_at(x, n, at);
    if (op == ML_OP_PAD) return pad_at(x, n, at);
    if (op == ML_OP_CONCAT) return concat_at(x, n, at);
    if (op == ML_OP_SUM) return sum_at(x, n, at);
    if (op == ML_OP_DOT) return dot_at(x, n, at);
    if (!ml_op_is_function((ml_op)op) || op == ML_OP_RANDOM)
        grid_refuse("its step takes %s", ml_ops[op].name);
    return map_at(x, n, at);
}

/* ---- The whole step ---- */

/* The rows are what the first product does not sum over; a state's columns are its other axis. */
static void find_rows(grid *x) {
    ml_ref dot = 0;
    for (int i = 0; i < ml_recurrence_roots(&x->r) && !dot; i++)
        dot = ml_recurrence_find(x->g, ml_recurrence_root(x->g, x->step->node, i), ML_OP_DOT);
    if (!dot) grid_refuse("its step has no product");
    int side = is_matrix(x, ml_graph_source(x->g, dot, 1)) ? 0 : 1;
    if (!is_matrix(x, ml_graph_source(x->g, dot, 1 - side)))
        grid_refuse("its products have no captured bf16 matrix");
    const ml_type *type = type_of(x, ml_graph_source(x->g, dot, side));
    const ml_node *node = ml_graph_node(x->g, dot);
    x->rows = 1;
    for (int i = 0; i < type->rank; i++) {
        bool summed = false;
        for (int k = 0; k < node->arg_count; k++)
            summed = summed || (ml_axis)ml_graph_args(x->g, dot)[k] == type->axis[i];
        if (summed) continue;
        x->row_axis[x->row_axes] = type->axis[i];
        x->row_size[x->row_axes++] = type->size[i];
        x->rows *= type->size[i];
    }
    if (x->rows > GRID_ROWS)
        grid_refuse("its states have %lld rows, more than %d", (long long)x->rows, GRID_ROWS);
    for (int i = 0; i < x->r.states; i++) {
        const ml_type *state = type_of(x, ml_recurrence_root(x->g, x->step->node, i));
        int rows = 0, other = 0;
        for (int k = 0; k < state->rank; k++)
            if (row_axis(x, state->axis[k]) >= 0)
                rows++;
            else
                other = k;
        if (rows != x->row_axes || state->rank != rows + 1)
            grid_refuse("its states are no rows of columns");
        if (x->size && x->size != state->size[other])
            grid_refuse("its states have different columns");
        x->size = state->size[other];
    }
    if (x->size % 16)
        grid_refuse("its states have %lld columns, no multiple of 16", (long long)x->size);
}

/* Which output of the node operand i is. */
static int output_of(const grid *x, int i) {
    ml_ref node = template_value(x->schedule, x->step, i)->node;
    return op_of(x, node) == ML_OP_OUT ? (int)ml_graph_args(x->g, node)[0] : 0;
}

static void store(grid *x, ml_text *out, int i, const ml_type *type, const grid_coordinate *at,
                  const char *value) {
    ml_dtype dtype = (ml_dtype)template_value(x->schedule, x->step, i)->type.dtype;
    ml_text_add(out, "EACH if (on[e]) ((%s *)P[%d])[%s] = %s(%s);\n", emit_memory_type(dtype), i,
                grid_address(x, i, type, at, "row[e]", "column[e]"), ml_dtypes[dtype].store, value);
}

/* A sum over positions: where the step's result is a sum over the rows, of what it adds up. */
static void sum_output(grid *x, int i, ml_ref root) {
    ml_ref inner = root;
    while (op_of(x, inner) == ML_OP_CAST || op_of(x, inner) == ML_OP_PERMUTE)
        inner = ml_graph_source(x->g, inner, 0);
    bool rows =
        op_of(x, inner) == ML_OP_SUM && ml_graph_node(x->g, inner)->arg_count == x->row_axes;
    for (int k = 0; k < x->row_axes && rows; k++)
        rows = row_axis(x, (ml_axis)ml_graph_args(x->g, inner)[k]) >= 0;
    ml_ref term = rows ? ml_graph_source(x->g, inner, 0) : root;
    grid_columns c;
    columns_of(x, term, &c);
    for (int k = 0; k < c.count; k++) {
        const char *sum = ml_arena_format(x->text.arena, "sum%d", x->sum_count++);
        const ml_type *type = type_of(x, term);
        ml_text_add(&x->setup, "float %s[ELEMENTS];\nEACH %s[e] = 0;\n", sum, sum);
        ml_text_add(&x->stores, "EACH %s[e] += %s;\n", sum, x->values.at[c.values[k]].name);
        if (!rows) {
            store(x, &x->last, i, type, c.at[k], ml_arena_format(x->text.arena, "%s[e]", sum));
            continue;
        }
        grid_coordinate at[ML_MAX_AXES];
        for (int d = 0; d < type->rank; d++) {
            at[d] = c.at[k][d];
            if (at[d].variable >= GRID_ROW) at[d].variable = GRID_FIXED;
        }
        ml_dtype dtype = (ml_dtype)template_value(x->schedule, x->step, i)->type.dtype;
        ml_text_add(&x->last, "{ const float all = row_sum(part, row, own, on, %s);\n", sum);
        ml_text_add(&x->last, "if (threadIdx.x < BLOCK_COLUMNS) ((%s *)P[%d])[%s] = %s(all); }\n",
                    emit_memory_type(dtype), i,
                    grid_address(x, i, type, at, "0", "(column0 + (int)threadIdx.x)"),
                    ml_dtypes[dtype].store);
    }
}

static void write_output(grid *x, int i) {
    const ml_recurrence *r = &x->r;
    int output = output_of(x, i);
    int final = output - ml_recurrence_final(r), history = output - ml_recurrence_history(r);
    ml_ref root = ml_recurrence_root(x->g, x->step->node,
                                     history >= 0 ? history
                                     : final >= 0 ? final
                                                  : r->states + output);
    grid_columns c;
    if (final >= 0) {
        const ml_type *type = type_of(x, root);
        grid_coordinate at[ML_MAX_AXES];
        for (int k = 0; k < type->rank; k++) {
            int row = row_axis(x, type->axis[k]);
            at[k] = (grid_coordinate){0, row < 0 ? GRID_COLUMN : GRID_ROW + row};
        }
        store(x, history >= 0 ? &x->stores : &x->last, i, type, at,
              ml_arena_format(x->text.arena, "s%d[e]", history >= 0 ? history : final));
        return;
    }
    if (output >= r->stacked) {
        sum_output(x, i, root);
        return;
    }
    columns_of(x, root, &c);
    for (int k = 0; k < c.count; k++)
        store(x, &x->stores, i, type_of(x, root), c.at[k], x->values.at[c.values[k]].name);
}

static void write_states(grid *x) {
    for (int i = 0; i < x->r.states; i++) {
        ml_ref root = ml_recurrence_root(x->g, x->step->node, i);
        const ml_type *type = type_of(x, root);
        ml_dtype dtype = (ml_dtype)type->dtype;
        const char *compute = emit_compute_type(dtype);
        grid_columns c;
        columns_of(x, root, &c);
        grid_coordinate *at = c.at[0];
        const char *first = grid_address(x, x->r.inputs + i, type, at, "row[e]", "column[e]");
        first = ml_arena_format(x->text.arena, "((const %s *)P[%d])[%s]", emit_memory_type(dtype),
                                x->r.inputs + i, first);
        ml_text_add(&x->setup, "%s s%d[ELEMENTS];\nEACH s%d[e] = %s;\n", compute, i, i,
                    template_load(x->text.arena, dtype, first));
        ml_text_add(&x->next, "const %s next%d = %s;\n", compute, i,
                    x->values.at[c.values[0]].name);
    }
    for (int i = 0; i < x->r.states; i++) {
        bool narrow = type_of(x, ml_recurrence_root(x->g, x->step->node, i))->dtype == ML_BF16;
        ml_text_add(&x->next, narrow ? "s%d[e] = ml_round_bf16(next%d);\n" : "s%d[e] = next%d;\n",
                    i, i);
    }
}

void grid_take_apart(grid *x) {
    find_rows(x);
    write_states(x);
    int count = x->step->read_count + x->step->write_count;
    for (int i = x->step->read_count; i < count; i++) write_output(x, i);
    if (x->product_count == 0) grid_refuse("its step has no product that a state needs");
}
