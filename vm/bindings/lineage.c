/* The origin of tensors: what the nodes behind a tensor say about the script that created them,
 * and hints about lines of it that compute something else than was probably meant. */
#include "vm/vm.h"

#include <jansson.h>
#include <string.h>

/* ---- Nodes behind a node ------------------------------------------------------------------------
 * Sources precede their users, so that one pass over the nodes below n is enough. */

/* Push n + 1 bytes, all 0: one for each node up to n. */
static char *push_marks(lua_State *L, ml_ref n) {
    char *marks = lua_newuserdatauv(L, (size_t)n + 1, 0);
    memset(marks, 0, (size_t)n + 1);
    return marks;
}

/* Mark n, what it is computed from, what that is computed from, ... */
static void mark_behind(const ml_graph *g, ml_ref n, ml_ref lowest, char *marks) {
    marks[n] = 1;
    for (ml_ref at = n; at >= lowest && at > 0; at--) {
        if (!marks[at]) continue;
        for (int i = 0; i < ml_graph_node(g, at)->source_count; i++)
            marks[ml_graph_source(g, at, i)] = 1;
    }
}

/* Mark the nodes up to n that depend on an input. */
static void mark_fed(const ml_graph *g, ml_ref n, char *marks) {
    for (ml_ref at = 1; at <= n; at++) {
        const ml_node *node = ml_graph_node(g, at);
        marks[at] = node->op == ML_OP_INPUT;
        for (int i = 0; i < node->source_count && !marks[at]; i++)
            marks[at] = marks[ml_graph_source(g, at, i)];
    }
}

/* Whether n depends on an input, looking at no more than *steps nodes (which ends below 0 where
 * they did not suffice). With `seen` (n + 1 bytes) no node is looked at twice. */
static bool find_input(const ml_graph *g, ml_ref n, char *seen, int *steps) {
    if (--*steps < 0 || (seen && seen[n])) return false;
    if (seen) seen[n] = 1;
    const ml_node *node = ml_graph_node(g, n);
    if (node->op == ML_OP_INPUT) return true;
    for (int i = 0; i < node->source_count; i++)
        if (find_input(g, ml_graph_source(g, n, i), seen, steps)) return true;
    return false;
}

bool vm_depends_on_input(lua_State *L, ml_ref n) {
    enum { FEW = 64, MANY = 20000 };
    const ml_graph *g = vm_of(L)->graph;
    int steps = FEW;
    bool found = find_input(g, n, NULL, &steps);
    if (!found && steps < 0) { /* many paths: take note of what has been seen */
        steps = MANY;
        found = find_input(g, n, push_marks(L, n), &steps);
        lua_pop(L, 1);
    }
    return found;
}

/* ---- Where an axis enters -------------------------------------------------------------------- */

static bool has_axis(const ml_graph *g, ml_ref n, ml_axis axis) {
    return ml_type_find(ml_graph_type(g, n), axis) >= 0;
}

/* Whether `at` combines x, which lacks the axis, with something that is computed from x and has it:
 * x + f(x), where f was to sum over the axis. */
static bool spreads(lua_State *L, ml_ref at, ml_axis axis, const char *fed) {
    const ml_graph *g = vm_of(L)->graph;
    const ml_node *node = ml_graph_node(g, at);
    if (ml_ops[node->op].op_class != ML_CLASS_MAP) return false;
    for (int i = 0; i < node->source_count; i++) {
        ml_ref x = ml_graph_source(g, at, i);
        while (ml_graph_node(g, x)->op == ML_OP_CAST) x = ml_graph_source(g, x, 0);
        if (!fed[x] || !ml_graph_type(g, x)->rank || has_axis(g, x, axis)) continue;
        for (int k = 0; k < node->source_count; k++) {
            ml_ref f = ml_graph_source(g, at, k);
            if (f <= x || !has_axis(g, f, axis)) continue;
            char *behind = push_marks(L, f);
            mark_behind(g, f, x, behind);
            bool found = behind[x];
            lua_pop(L, 1);
            if (found) return true;
        }
    }
    return false;
}

/* The node from which on the values that lead to n have the axis: where a tensor without it is
 * first combined with one that is computed from it and has it; if there is none, the first that
 * depends on an input; else the first of all. */
static ml_ref axis_entry(lua_State *L, ml_ref n, ml_axis axis) {
    const ml_graph *g = vm_of(L)->graph;
    char *carries = push_marks(L, n), *fed = push_marks(L, n);
    mark_fed(g, n, fed);
    carries[n] = 1;
    ml_ref first = n, first_fed = 0;
    for (ml_ref at = n; at > 0; at--) {
        if (!carries[at]) continue;
        first = at;
        if (fed[at]) first_fed = at;
        for (int i = 0; i < ml_graph_node(g, at)->source_count; i++) {
            ml_ref source = ml_graph_source(g, at, i);
            if (has_axis(g, source, axis)) carries[source] = 1;
        }
    }
    ml_ref found = first_fed ? first_fed : first;
    for (ml_ref at = first; at <= n; at++)
        if (carries[at] && fed[at] && spreads(L, at, axis, fed)) {
            found = at;
            break;
        }
    lua_pop(L, 2);
    return found;
}

/* core.fail_axis(tensor, axis, message, help): raise, with the line where the axis entered. */
static int core_fail_axis(lua_State *L) {
    ml_ref n = vm_tensor(L, 1, "the operand");
    const ml_graph *g = vm_of(L)->graph;
    ml_axis axis = vm_axis_of(L, 2, n, "fail_axis", "cannot find").id;
    const char *message = luaL_checkstring(L, 3);
    ml_ref entry = axis_entry(L, n, axis);
    const ml_origin *origin = ml_graph_origin(g, entry);
    if (entry == n || !origin || !origin->file)
        return vm_fail_with(L, &n, 1, lua_tostring(L, 4), "%s", message);
    vm_push_line(L, origin->file, origin->line);
    const char *text = lua_tostring(L, -1);
    return vm_fail_with(L, &n, 1, lua_tostring(L, 4), "%s\n  \"%s\" comes in at %s:%d%s\n%5d | %s",
                        message, ml_axis_name(g, axis), origin->file, origin->line,
                        text ? "" : ", which cannot be shown", origin->line, text ? text : "");
}

/* ---- Parameters and origins ------------------------------------------------------------------ */

/* core.parameters_behind(tensor): the parameters from which gradients may flow to it. */
static int core_parameters_behind(lua_State *L) {
    ml_ref n = vm_tensor(L, 1, "the operand");
    const ml_graph *g = vm_of(L)->graph;
    char *reached = push_marks(L, n);
    reached[n] = 1;
    lua_newtable(L);
    int list = lua_gettop(L);
    for (ml_ref at = n; at > 0; at--) {
        const ml_node *node = ml_graph_node(g, at);
        bool differentiable = ml_dtypes[ml_graph_type(g, at)->dtype].kind == ML_KIND_FLOAT;
        if (!reached[at] || !differentiable || node->op == ML_OP_STOP_GRADIENT) continue;
        for (int i = 0; i < node->source_count; i++) reached[ml_graph_source(g, at, i)] = 1;
        if (node->op != ML_OP_STATE) continue;
        uint32_t id = (uint32_t)ml_graph_args(g, at)[0];
        if (ml_graph_state(g, id)->kind != ML_STATE_PARAMETER) continue;
        vm_push_state(L, id);
        lua_rawseti(L, list, (lua_Integer)lua_rawlen(L, list) + 1);
    }
    return 1;
}

/* core.is_zero(tensor): whether it is the constant 0, as gradients are where nothing flows. */
static int core_is_zero(lua_State *L) {
    double value;
    ml_ref n = vm_tensor(L, 1, "the operand");
    lua_pushboolean(L, ml_graph_constant(vm_of(L)->graph, n, &value) && value == 0);
    return 1;
}

/* core.origin(value): "gpt.lua:12", where a tensor, a state or a function was made. */
static int core_origin(lua_State *L) {
    const ml_graph *g = vm_of(L)->graph;
    const ml_origin *origin = NULL;
    uint32_t id;
    if (lua_isfunction(L, 1)) {
        lua_Debug frame;
        lua_pushvalue(L, 1);
        lua_getinfo(L, ">S", &frame);
        if (frame.linedefined < 1) return 0;
        lua_pushfstring(L, "%s:%d", vm_file_of(frame.source), frame.linedefined);
        return 1;
    }
    if (vm_is_state(L, 1, &id))
        origin = &ml_graph_state(g, id)->origin;
    else if (vm_is_tensor(L, 1))
        origin = ml_graph_origin(g, vm_tensor(L, 1, "the operand"));
    if (!origin || !origin->file) return 0;
    lua_pushfstring(L, "%s:%d", origin->file, origin->line);
    return 1;
}

/* ---- Hints ----------------------------------------------------------------------------------- */

typedef struct {
    ml_vm *vm;
    vm_hint hint;
} hint_call;

static void add_hint(void *argument) {
    hint_call *call = argument;
    *ML_PUSH(call->vm->arena, &call->vm->hints) = call->hint;
}

void vm_add_hint(lua_State *L, const ml_origin *origin, const char *text) {
    ml_vm *vm = vm_of(L);
    hint_call call = {vm, {origin->file, origin->line, vm_intern(L, text)}};
    if (!origin->file) return;
    for (uint32_t i = 0; i < vm->hints.count; i++) {
        const vm_hint *known = &vm->hints.at[i];
        if (known->line == origin->line && known->text == call.hint.text &&
            strcmp(known->file, origin->file) == 0)
            return;
    }
    vm_protect(L, add_hint, &call);
}

void vm_print_hints(lua_State *L) {
    ml_vm *vm = vm_of(L);
    for (; vm->hints_shown < vm->hints.count; vm->hints_shown++) {
        const vm_hint *hint = &vm->hints.at[vm->hints_shown];
        vm_push_line(L, hint->file, hint->line);
        printf("%s:%d: hint: %s\n", hint->file, hint->line, hint->text);
        if (lua_isstring(L, -1)) printf("%5d | %s\n", hint->line, lua_tostring(L, -1));
        lua_pop(L, 1);
    }
}

struct json_t *vm_hints_json(lua_State *L) {
    const ml_vm *vm = vm_of(L);
    json_t *list = json_array();
    for (uint32_t i = 0; i < vm->hints.count; i++) {
        const vm_hint *hint = &vm->hints.at[i];
        json_array_append_new(list, json_pack("{s:s, s:i, s:s}", "file", hint->file, "line",
                                              hint->line, "text", hint->text));
    }
    return list;
}

typedef struct {
    ml_vm *vm;
    ml_axis head_dim;
} names_call;

/* ---- Tables over positions ------------------------------------------------------------------- */

/* What is a function of the position alone: a state over seq, or at least two axes of numbers made
 * from 0, 1, 2, ... along it; never with kv_seq, as distances of positions have it. */
typedef struct {
    const ml_graph *graph;
    ml_axis seq, batch, kv_seq;
} table_axes;

static bool begins_table(const table_axes *a, ml_ref n) {
    const ml_node *node = ml_graph_node(a->graph, n);
    bool leaf = node->op == ML_OP_STATE || node->op == ML_OP_IOTA;
    return leaf && ml_type_find(ml_graph_type(a->graph, n), a->seq) >= 0;
}

/* Whether n, which has the batch, repeats its operand `source` over it. */
static bool repeats_table(const table_axes *a, ml_ref n, ml_ref source) {
    ml_op op = ml_graph_node(a->graph, n)->op;
    const ml_type *to = ml_graph_type(a->graph, n), *from = ml_graph_type(a->graph, source);
    return (op == ML_OP_BROADCAST || ml_ops[op].op_class == ML_CLASS_MAP) && from->rank > 1 &&
           ml_dtypes[to->dtype].kind == ML_KIND_FLOAT && ml_type_find(from, a->kv_seq) < 0 &&
           ml_type_find(from, a->seq) >= 0;
}

static void name_kv_seq(void *argument) {
    names_call *call = argument;
    call->head_dim = ml_axis_named(call->vm->graph, "kv_seq");
}

/* core.table_over(t, seq, batch) */
static int core_table_over(lua_State *L) {
    ml_ref t = vm_tensor(L, 1, "table_over"), found = 0;
    names_call names = {vm_of(L), 0};
    vm_protect(L, name_kv_seq, &names);
    table_axes axes = {names.vm->graph, vm_axis_id(L, 2, "table_over"),
                       vm_axis_id(L, 3, "table_over"), names.head_dim};
    char *behind = push_marks(L, t), *table = push_marks(L, t);
    mark_behind(axes.graph, t, 1, behind);
    for (ml_ref at = 1; at <= t && !found; at++) {
        const ml_type *type = ml_graph_type(axes.graph, at);
        bool whole = ml_type_find(type, axes.batch) >= 0;
        table[at] = begins_table(&axes, at);
        for (int i = 0; i < ml_graph_node(axes.graph, at)->source_count; i++) {
            ml_ref source = ml_graph_source(axes.graph, at, i);
            if (!table[source]) continue;
            if (!whole)
                table[at] = 1;
            else if (behind[at] && repeats_table(&axes, at, source))
                found = at;
        }
    }
    if (!found) return 0;
    const ml_origin *origin = ml_graph_origin(axes.graph, found);
    if (origin && origin->file)
        lua_pushfstring(L, "%s:%d", origin->file, origin->line);
    else
        lua_pushliteral(L, "the model");
    return 1;
}

/* core.sequence_axis(axis): which axis holds positions, "seq" by default. */
static int core_sequence_axis(lua_State *L) {
    vm_of(L)->sequence = vm_axis_id(L, 1, "sequence_axis");
    return 0;
}

/* The number of axes of a that b lacks. */
static int own_axes(const ml_type *a, const ml_type *b) {
    int count = 0;
    for (int i = 0; i < a->rank; i++) count += ml_type_find(b, a->axis[i]) < 0;
    return count;
}

static bool contracts(const ml_node *node, const int64_t *args, ml_axis axis) {
    for (int i = 0; i < node->arg_count; i++)
        if (args[i] == axis) return true;
    return false;
}

/* A mixture per position (weights[seq, experts] with outputs[seq, experts, embed]) has axes on one
 * side alone; scores have them on both or on none, but for grouped heads. */
static bool looks_like_scores(const ml_graph *g, ml_ref dot, ml_axis head_dim) {
    const ml_type *a = ml_graph_type(g, ml_graph_source(g, dot, 0));
    const ml_type *b = ml_graph_type(g, ml_graph_source(g, dot, 1));
    bool left = own_axes(a, b) > 0, right = own_axes(b, a) > 0;
    return left == right || contracts(ml_graph_node(g, dot), ml_graph_args(g, dot), head_dim);
}

static void name_axes(void *argument) {
    names_call *call = argument;
    if (!call->vm->sequence) call->vm->sequence = ml_axis_named(call->vm->graph, "seq");
    call->head_dim = ml_axis_named(call->vm->graph, "head_dim");
}

void vm_hint_scores(lua_State *L, ml_ref dot) {
    const ml_graph *g = vm_of(L)->graph;
    names_call names = {vm_of(L), 0};
    vm_protect(L, name_axes, &names);
    ml_axis seq = vm_of(L)->sequence;
    ml_ref a = ml_graph_source(g, dot, 0), b = ml_graph_source(g, dot, 1);
    /* an axis that stays was in both operands, or in one alone */
    if (!has_axis(g, dot, seq) || !has_axis(g, a, seq) || !has_axis(g, b, seq)) return;
    if (!looks_like_scores(g, dot, names.head_dim)) return;
    if (!vm_depends_on_input(L, a) || !vm_depends_on_input(L, b)) return;
    const char *word = ml_axis_name(g, seq), *name = "b";
    int top = lua_gettop(L);
    lua_Debug frame;
    if (vm_script_frame(L, &frame) && vm_push_name(L, &frame, b)) name = lua_tostring(L, -1);
    lua_pushfstring(L,
                    "this product keeps \"%s\" of both operands as one axis: position i meets "
                    "position i alone. For scores of each position with all others rename one: "
                    "%s:rename(\"%s\", \"kv_%s\")",
                    word, name, word, word);
    vm_add_hint(L, ml_graph_origin(g, dot), lua_tostring(L, -1));
    lua_settop(L, top);
}

static const vm_entry functions[] = {
    {"fail_axis", core_fail_axis, "t: Tensor, axis: Axis|string, message: string, help?: string",
     "raise an error about an axis that a tensor should not have, with the line where it entered"},
    {"parameters_behind", core_parameters_behind, "t: Tensor -> State[]",
     "the parameters that a tensor depends on by differentiable ops"},
    {"is_zero", core_is_zero, "t: Tensor -> boolean", "whether a tensor is the constant 0"},
    {"origin", core_origin, "value: any -> string?",
     "the script's line (\"gpt.lua:12\") that made a tensor, a state or a function"},
    {"table_over", core_table_over, "t: Tensor, seq: Axis, batch: Axis -> string?",
     "the script's line that repeats over the batch what is a function of the position alone, "
     "behind "
     "a tensor"},
    {"sequence_axis", core_sequence_axis, "axis: Axis|string",
     "the axis of positions, for hints; \"seq\" at first"},
    {0}};

void vm_lineage_register(lua_State *L) {
    vm_register(L, functions);
}
