#include "vm/bindings/precision.h"
#include "runtime/ops/attention/attention.h"

#include <string.h>

/* ---- The dtypes that are given --------------------------------------------------------------- */

/* Where the dtype of a node with elements of f32 or f64 comes from; of several sources the largest
 * counts. */
typedef enum {
    NUMBERS, /* constants, integers and narrower floats that were widened beside others */
    STORED,  /* a state's value, a gradient */
    DEFAULT, /* an input or a random draw, without a dtype of its own */
    EXPLICIT /* an explicit dtype: a cast, dtype= of an input or product */
} dtype_source;

static bool is_wide(const ml_graph *g, ml_ref n) {
    int dtype = ml_graph_type(g, n)->dtype;
    return dtype == ML_F32 || dtype == ML_F64;
}

static bool is_product(ml_op op) {
    return ml_op_is(op, ML_PRODUCT) || op == ML_OP_CONV || ml_op_attends(op);
}

static bool is_explicit_input(const ml_vm *vm, ml_ref n) {
    for (uint32_t i = 0; i < vm->explicit_inputs.count; i++)
        if (vm->explicit_inputs.at[i] == n) return true;
    return ml_graph_type(vm->graph, n)->dtype == ML_F64;
}

static dtype_source kind_of(const ml_vm *vm, ml_ref n) {
    const ml_graph *g = vm->graph;
    const ml_node *node = ml_graph_node(g, n);
    dtype_source largest = NUMBERS;
    if (!is_wide(g, n)) return NUMBERS;
    if (node->flags & ML_NODE_BACKWARD) return STORED;
    if (node->op == ML_OP_STATE) return STORED;
    if (node->op == ML_OP_RANDOM) return DEFAULT;
    if (node->op == ML_OP_INPUT) return is_explicit_input(vm, n) ? EXPLICIT : DEFAULT;
    for (int i = 0; i < node->source_count; i++) {
        ml_ref source = ml_graph_source(g, n, i);
        if (!is_wide(g, source)) continue;
        bool same = ml_graph_type(g, source)->dtype == ml_graph_type(g, n)->dtype;
        if (node->op == ML_OP_CAST && same) return EXPLICIT;
        if ((dtype_source)vm->dtype_sources.at[source] > largest)
            largest = vm->dtype_sources.at[source];
    }
    /* A product of nothing else would have been narrowed: {dtype="f32"}. */
    return is_product(node->op) && largest != STORED ? EXPLICIT : largest;
}

/* Sources precede what is computed from them. */
static void extend_kinds(void *argument) {
    ml_vm *vm = argument;
    for (ml_ref n = vm->dtype_sources.count; n < ml_graph_count(vm->graph); n++) {
        dtype_source kind = n ? kind_of(vm, n) : NUMBERS;
        *ML_PUSH(vm->arena, &vm->dtype_sources) = (uint8_t)kind;
    }
}

bool precision_narrow(lua_State *L, ml_ref *operands, int count) {
    ml_vm *vm = vm_of(L);
    const ml_graph *g = vm->graph;
    bool any = false;
    for (int i = 0; i < count; i++) any = any || ml_graph_type(g, operands[i])->dtype == ML_F32;
    if (!any || vm->exact || vm_compute_dtype(L) == ML_F32) return false;
    vm_protect(L, extend_kinds, vm);
    for (int i = 0; i < count; i++) {
        dtype_source kind = vm->dtype_sources.at[operands[i]];
        if (kind == EXPLICIT || kind == STORED) return false;
    }
    for (int i = 0; i < count; i++)
        if (ml_graph_type(g, operands[i])->dtype == ML_F32)
            operands[i] = vm_cast(L, operands[i], vm_compute_dtype(L));
    return true;
}

ml_ref precision_product(lua_State *L, vm_node *node, int operands) {
    ml_ref product = vm_add(L, node); /* errors show the operands as the script has them */
    if (node->type || !precision_narrow(L, node->sources, operands)) return product;
    return vm_add(L, node);
}

/* ---- Products in 8 bits ---------------------------------------------------------------------- */

enum {
    FP8_UNIT = 16, /* what tensor cores' products of 8 bits divide sizes by */
    FP8_LEAST = 64 /* sizes below which rounding costs more than it saves */
};

/* The parameter that n is, cast and moved; or NULL. */
static const ml_state *parameter_of(const ml_graph *g, ml_ref n) {
    for (;;) {
        const ml_node *node = ml_graph_node(g, n);
        if (node->op == ML_OP_STATE) break;
        const bool moves = node->op == ML_OP_CAST || ml_ops[node->op].op_class == ML_CLASS_MOVE;
        if (node->source_count != 1 || !moves) return NULL;
        n = ml_graph_source(g, n, 0);
    }
    const ml_state *state = ml_graph_state(g, (uint32_t)ml_graph_args(g, n)[0]);
    return state->kind == ML_STATE_PARAMETER ? state : NULL;
}

/* "blocks.3.wq": in an item of a list, as m.stack makes them. */
static bool in_block(const char *name) {
    for (const char *at = name; at && (at = strchr(at, '.')) != NULL; at++) {
        const size_t digits = strspn(at + 1, "0123456789");
        if (digits > 0 && at[1 + digits] == '.') return true;
    }
    return false;
}

/* The sizes of a weight that a product sums over, and of the others; of one expert's. */
static void weight_sizes(const ml_graph *g, ml_ref product, ml_ref weight, int64_t size[2]) {
    const ml_type *type = ml_graph_type(g, weight), *result = ml_graph_type(g, product);
    const bool ragged = ml_graph_node(g, product)->op == ML_OP_RAGGED_DOT;
    const ml_type *groups = ragged ? ml_graph_type(g, ml_graph_source(g, product, 2)) : NULL;
    size[0] = size[1] = 1;
    for (int i = 0; i < type->rank; i++)
        if (!groups || ml_type_find(groups, type->axis[i]) < 0)
            size[ml_type_find(result, type->axis[i]) >= 0] *= type->size[i];
}

static void check_fp8(lua_State *L, ml_ref product, const ml_state *parameter,
                      const int64_t size[2]) {
    const ml_target *target = vm_target(L);
    const ml_ref sources[2] = {ml_graph_source(vm_of(L)->graph, product, 0),
                               ml_graph_source(vm_of(L)->graph, product, 1)};
    if (target->kind == ML_TARGET_CUDA && target->arch < 89)
        vm_fail(
            L, "--dtype bf16",
            "--dtype fp8 needs a GPU of compute capability 8.9 or more, and this is one of %d.%d",
            target->arch / 10, target->arch % 10);
    for (int i = 0; i < 2; i++)
        if (size[i] % FP8_UNIT != 0)
            vm_fail_with(L, sources, 2,
                         "m.param{..., fp8 = false} or fp8_except=NAME keeps a parameter's "
                         "products in bf16",
                         "--dtype fp8 needs sizes that %d divides, and this product with %s %s "
                         "%lld",
                         FP8_UNIT, parameter->name, i ? "has a result of" : "sums over",
                         (long long)size[i]);
}

typedef struct {
    ml_graph *graph;
    ml_ref node;
} marking;

static void mark_fp8(void *argument) {
    const marking *m = argument;
    ml_graph_mark(m->graph, m->node, ML_NODE_FP8);
}

void precision_mark_fp8(lua_State *L, ml_ref product) {
    ml_vm *vm = vm_of(L);
    const ml_graph *g = vm->graph;
    const ml_op op = ml_graph_node(g, product)->op;
    if (!vm->fp8 || vm->exact || (op != ML_OP_DOT && op != ML_OP_RAGGED_DOT)) return;
    const ml_ref sources[2] = {ml_graph_source(g, product, 0), ml_graph_source(g, product, 1)};
    const ml_state *parameters[2] = {parameter_of(g, sources[0]), parameter_of(g, sources[1])};
    const int which = parameters[0] == NULL;
    const ml_state *parameter = parameters[which];
    if (parameter == NULL || parameters[1 - which] != NULL) return;
    if (parameter->no_fp8 || !in_block(parameter->name)) return;
    for (int i = 0; i < 2; i++)
        if (ml_graph_type(g, sources[i])->dtype != ML_BF16) return;
    int64_t size[2];
    weight_sizes(g, product, sources[which], size);
    if (size[0] < FP8_LEAST || size[1] < FP8_LEAST) return;
    check_fp8(L, product, parameter, size);
    vm_protect(L, mark_fp8, &(marking){vm->graph, product});
}

static bool called_by_script(lua_State *L) {
    lua_Debug frame;
    if (!lua_getstack(L, 1, &frame)) return false;
    lua_getinfo(L, "S", &frame);
    return frame.what[0] != 'C' && strncmp(frame.source, VM_STDLIB, sizeof VM_STDLIB - 1) != 0;
}

ml_ref precision_explicit_cast(lua_State *L, ml_ref n, ml_dtype dtype) {
    n = vm_cast(L, n, dtype);
    bool wide = dtype == ML_F32 || dtype == ML_F64;
    if (!wide || !called_by_script(L) || vm_compute_dtype(L) == dtype) return n;
    ml_type type = {.dtype = (uint8_t)dtype};
    return vm_unary(L, ML_OP_CAST, n, &type);
}

static void add_explicit_input(void *argument) {
    vm_node *node = argument;
    *ML_PUSH(node->vm->arena, &node->vm->explicit_inputs) = node->result;
}

void precision_explicit_input(lua_State *L, ml_ref input) {
    vm_node node = {.vm = vm_of(L), .result = input};
    vm_protect(L, add_explicit_input, &node);
}

static int core_exact(lua_State *L) {
    ml_vm *vm = vm_of(L);
    lua_pushboolean(L, vm->exact);
    if (!lua_isnoneornil(L, 1)) vm->exact = lua_toboolean(L, 1);
    return 1;
}

/* ---- Products in f32 ------------------------------------------------------------------------- */

static bool narrows(lua_State *L) {
    return ml_is_narrow(vm_compute_dtype(L));
}

bool precision_is_wide(lua_State *L, const ml_graph *g, ml_ref n) {
    return is_product(ml_graph_node(g, n)->op) && is_wide(g, ml_graph_source(g, n, 0)) &&
           narrows(L);
}

/* Whether a step multiplies matrices, and of which dtype. */
static bool read_product(const ml_step *step, ml_dtype *dtype) {
    if (step->gemm)
        *dtype = step->gemm->a_dtype;
    else if (step->attention)
        *dtype = step->attention->dtype;
    else if (step->ragged)
        *dtype = step->ragged->dtype;
    return step->gemm || step->attention || step->ragged;
}

static bool same_text(const char *a, const char *b) {
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* Lines beyond the table's end are counted in the sums alone. */
static void add_line(precision_report *r, const ml_origin *origin, double flops) {
    int at = 0;
    while (at < r->line_count && (r->lines[at].origin->line != origin->line ||
                                  !same_text(r->lines[at].origin->file, origin->file)))
        at++;
    if (at == r->line_count) {
        if (at == PRECISION_LINES) return;
        r->lines[r->line_count++] = (precision_line){.origin = origin};
    }
    precision_line line = r->lines[at];
    line.flops += flops;
    line.count++;
    line.modules |= !same_text(line.origin->module, origin->module);
    for (; at > 0 && r->lines[at - 1].flops < line.flops; at--) r->lines[at] = r->lines[at - 1];
    r->lines[at] = line;
}

void precision_add(lua_State *L, precision_report *r, const ml_plan *part, double times) {
    const ml_schedule *s = part->schedule;
    bool narrow = narrows(L);
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_step *step = &s->steps.at[i];
        ml_dtype dtype;
        if (!read_product(step, &dtype)) continue;
        double flops = step->flops * times;
        r->flops += flops;
        r->count++;
        if ((step->gemm && step->gemm->scaled) || (step->ragged && step->ragged->scaled))
            r->scaled_flops += flops, r->scaled_count++;
        if (!narrow || (dtype != ML_F32 && dtype != ML_F64)) continue;
        r->wide_flops += flops;
        r->wide_count++;
        add_line(r, ml_graph_origin(s->graph, step->node), flops);
    }
}

void precision_print(const precision_report *r) {
    if (r->scaled_count)
        printf("products in fp8 %d of %d, %.3g%% of the products' FLOPs\n", r->scaled_count,
               r->count, 100 * r->scaled_flops / r->flops);
    if (!r->wide_count) return;
    printf("products in f32 %d of %d, %.2g%% of the products' FLOPs; the others are in bf16, which "
           "GPUs multiply some 15 times as fast\n",
           r->wide_count, r->count, r->flops > 0 ? 100 * r->wide_flops / r->flops : 0);
    for (int i = 0; i < r->line_count; i++) {
        const precision_line *line = &r->lines[i];
        printf("  %9.2g%%  %3d", r->flops > 0 ? 100 * line->flops / r->flops : 0, line->count);
        if (line->origin->module && line->origin->module[0])
            printf("  in %s%s", line->origin->module, line->modules ? " and others" : "");
        if (line->origin->file) printf("  %s:%d", line->origin->file, line->origin->line);
        printf("\n");
    }
}

void precision_json(const precision_report *r, json_t *object) {
    json_t *list = json_array();
    for (int i = 0; i < r->line_count; i++) {
        const precision_line *line = &r->lines[i];
        json_t *item = json_pack("{s:f, s:i}", "flops", line->flops, "count", line->count);
        if (line->origin->file) {
            json_object_set_new(item, "file", json_string(line->origin->file));
            json_object_set_new(item, "line", json_integer(line->origin->line));
        }
        json_array_append_new(list, item);
    }
    json_object_set_new(object, "f32_products", list);
    json_object_set_new(
        object, "fp8_products",
        json_pack("{s:i, s:f}", "count", r->scaled_count, "flops", r->scaled_flops));
}

static const vm_entry functions[] = {
    {"exact", core_exact, "on?: boolean -> boolean",
     "whether products keep the dtype of their operands from now on (initial values); gives "
     "whether they did"},
    {0}};

void precision_register(lua_State *L) {
    vm_register(L, functions);
}
