/* m.attention: reads the options, traces the score function, and separates what it captures.
 *
 * The score function is called once with a tensor for the score and one for each index. All have
 * the scores' axes, so that they combine freely: an index is where(true, iota, s != s) in effect,
 * which costs nothing once compiled. What depends on them (vm->tainted) becomes the function that
 * runs inside the kernel; every other tensor that it meets is captured: computed outside, read
 * inside. */
#include "vm/vm.h"

#include <math.h>
#include <string.h>

#include "runtime/ops/attention/attention.h"
#include "runtime/ops/cached_attention/cached_attention.h"
#include "vm/bindings/precision.h"

enum { MAX_CAPTURED = 16, QKV = 3 };

typedef struct {
    ml_vm *vm;
    ml_graph *graph;
    ml_origin origin;
    ml_attention_args args;
    ml_cached_attention_args cached; /* block 0: it is none */
    ml_ref sources[CACHED_CAPTURED + MAX_CAPTURED];
    int source_count, first; /* the first captured one */
    ml_type score_type;
    ml_ref score;       /* PARAM(0) */
    ml_ref filler;      /* an i32 tensor of the scores' axes without a value of its own */
    ml_ref index;       /* for widen: the tensor to widen, then its result */
    ml_ref document[2]; /* of queries and of keys */
    ml_type order;      /* the axes of q as given, which are the result's */
    ml_ref result;
} attention_call;

static int64_t size_of(const attention_call *call, ml_ref n, ml_axis axis) {
    return ml_type_size(ml_graph_type(call->graph, n), axis);
}

/* n with `axis` innermost: kernels read rows of it. Not by ml_permute, which looks through a
 * permutation: m.grad by n, a tensor of the script, would be 0. */
static ml_ref by_rows(ml_graph *g, ml_ref n, ml_axis axis) {
    ml_type order = *ml_graph_type(g, n);
    int at = ml_type_find(&order, axis);
    if (at < 0) return n;
    int64_t size = order.size[at];
    for (; at < order.rank - 1; at++) {
        order.axis[at] = order.axis[at + 1];
        order.size[at] = order.size[at + 1];
    }
    order.axis[at] = axis;
    order.size[at] = size;
    if (ml_type_equal(&order, ml_graph_type(g, n))) return n;
    return ml_graph_add(g, ML_OP_PERMUTE, &n, 1, NULL, 0, &order);
}

/* Keys and values under the names of their own axes. */
static void prepare(void *argument) {
    attention_call *call = argument;
    ml_graph *g = call->graph;
    ml_graph_set_origin(g, &call->origin);
    ml_attention_args *a = &call->args;
    for (int i = 1; i < 3; i++)
        if (size_of(call, call->sources[i], a->seq))
            call->sources[i] = ml_rename(g, call->sources[i], a->seq, a->kv_seq);
    call->order = *ml_graph_type(g, call->sources[0]);
    for (int i = 0; i < 3; i++) call->sources[i] = by_rows(g, call->sources[i], a->head_dim);
    if (!size_of(call, call->sources[1], a->kv_heads)) a->kv_heads = a->heads;
    int64_t head_dim = size_of(call, call->sources[0], a->head_dim);
    if (a->scale == 0 && head_dim) a->scale = 1 / sqrt((double)head_dim);
}

/* PARAM(0), and a filler of its axes: int(s != s). */
static void make_score(void *argument) {
    attention_call *call = argument;
    ml_graph *g = call->graph;
    if (call->cached.block)
        ml_cached_attention_score_type(g, call->sources, &call->cached, &call->score_type);
    else
        ml_attention_score_type(g, call->sources[0], call->sources[1], &call->args,
                                &call->score_type);
    int64_t first = 0;
    call->score = ml_graph_add(g, ML_OP_PARAM, NULL, 0, &first, 1, &call->score_type);
    ml_ref both[2] = {call->score, call->score};
    ml_ref odd = ml_graph_add(g, ML_OP_NE, both, 2, NULL, 0, NULL);
    ml_type type = {.dtype = ML_I32};
    call->filler = ml_graph_add(g, ML_OP_CAST, &odd, 1, NULL, 0, &type);
    ml_ref tainted[] = {call->score, odd, call->filler};
    for (int i = 0; i < 3; i++) *ML_PUSH(call->vm->arena, &call->vm->tainted) = tainted[i];
}

/* call->index with every axis of the scores. */
static void widen(void *argument) {
    attention_call *call = argument;
    ml_graph *g = call->graph;
    ml_ref sources[3] = {ml_const_int(g, ML_BOOL, 1), ml_cast(g, call->index, ML_I32),
                         call->filler};
    call->index = ml_graph_add(g, ML_OP_WHERE, sources, 3, NULL, 0, NULL);
    *ML_PUSH(call->vm->arena, &call->vm->tainted) = call->index;
}

static void widen_iota(void *argument) {
    attention_call *call = argument;
    ml_axis axis = (ml_axis)call->index;
    call->index = ml_iota(call->graph, axis, ml_type_size(&call->score_type, axis));
    widen(argument);
}

static void rename_document(void *argument) {
    attention_call *call = argument;
    call->index = ml_rename(call->graph, call->document[0], call->args.seq, call->args.kv_seq);
    call->document[1] = call->index;
    call->index = call->document[0];
    widen(argument);
    call->document[0] = call->index;
}

/* ---- Separating function and captured tensors ------------------------------------------------ */

static bool is_tainted(const ml_vm *vm, ml_ref n) {
    for (uint32_t i = 0; i < vm->tainted.count; i++)
        if (vm->tainted.at[i] == n) return true;
    return false;
}

static ml_ref capture(attention_call *call, ml_ref n) {
    int i = call->first;
    while (i < call->source_count && call->sources[i] != n) i++;
    if (i == call->first + MAX_CAPTURED)
        ml_raise(ML_INVALID, "a score function can use at most %d tensors", MAX_CAPTURED);
    if (i == call->source_count) call->sources[call->source_count++] = n;
    int64_t index = i - call->first + 1;
    ml_type type = *ml_graph_type(call->graph, n);
    if (call->cached.block)
        ml_cached_attention_param_type(call->graph, call->sources, &call->cached, n, &type);
    return ml_graph_add(call->graph, ML_OP_PARAM, NULL, 0, &index, 1, &type);
}

typedef ML_VEC(ml_ref) ref_list;

/* Copies by reference of the tainted list: copies.at[i] is that of tainted.at[i], 0 until made. */
static ml_ref separate(attention_call *call, ref_list *copies, ml_ref n) {
    ml_graph *g = call->graph;
    const ml_node *node = ml_graph_node(g, n);
    if (node->op == ML_OP_CONST || node->op == ML_OP_IOTA || n == call->score) return n;
    if (!is_tainted(call->vm, n)) {
        /* Indices and what is simply computed of them, such as 0 - iota, need no memory. */
        bool simple = node->source_count > 0 && ml_ops[node->op].op_class == ML_CLASS_MAP &&
                      ml_ops[node->op].flops <= 1 && ml_graph_type(g, n)->rank <= 1;
        for (int i = 0; i < node->source_count && simple; i++) {
            int op = ml_graph_node(g, ml_graph_source(g, n, i))->op;
            simple = op == ML_OP_CONST || op == ML_OP_IOTA;
        }
        return simple ? n : capture(call, n);
    }
    uint32_t at = 0;
    while (call->vm->tainted.at[at] != n) at++;
    if (copies->at[at]) return copies->at[at];
    ml_ref sources[3];
    for (int i = 0; i < node->source_count; i++) {
        sources[i] = separate(call, copies, ml_graph_source(g, n, i));
        node = ml_graph_node(g, n); /* the graph may have moved */
    }
    ml_ref copy = ml_graph_copy(g, g, n, sources);
    copies->at[at] = copy;
    return copy;
}

/* The score function over what it captures. */
static void finish_score(attention_call *call) {
    ml_graph_set_origin(call->graph, &call->origin);
    if (call->args.score) {
        ref_list copies = {0};
        for (uint32_t i = 0; i < call->vm->tainted.count; i++)
            *ML_PUSH(call->vm->arena, &copies) = 0;
        call->args.score = separate(call, &copies, call->args.score);
    }
}

static void finish(void *argument) {
    attention_call *call = argument;
    finish_score(call);
    call->result = ml_attention(call->graph, call->sources, call->source_count, &call->args);
    for (int i = 0; i < call->order.rank; i++) /* rows may be as long as those of v */
        call->order.size[i] = size_of(call, call->result, call->order.axis[i]);
    call->result = ml_permute(call->graph, call->result, &call->order);
}

/* ---- Tracing --------------------------------------------------------------------------------- */

static int push_index(lua_State *L, attention_call *call, ml_axis axis) {
    call->index = axis;
    vm_protect(L, widen_iota, call);
    return vm_push_tensor(L, call->index);
}

/* The table i of a score function: i.q, i.k, i.head and, where there are batch axes, i.batch. */
static void push_indices(lua_State *L, attention_call *call) {
    lua_newtable(L);
    const ml_attention_args *a = &call->args;
    push_index(L, call, a->seq), lua_setfield(L, -2, "q");
    push_index(L, call, a->kv_seq), lua_setfield(L, -2, "k");
    push_index(L, call, a->heads), lua_setfield(L, -2, "head");
    for (int i = call->score_type.rank - 4; i >= 0; i--) {
        push_index(L, call, call->score_type.axis[i]);
        lua_pushvalue(L, -1);
        lua_setfield(L, -3, ml_axis_name(call->graph, call->score_type.axis[i]));
        lua_setfield(L, -2, "batch"); /* the outermost, in the end */
    }
}

/* score(s, i), then the document mask; arguments: the call as light userdata, options. */
static int trace(lua_State *L) {
    attention_call *call = lua_touserdata(L, 1);
    vm_protect(L, make_score, call);
    ml_ref result = call->score;
    if (vm_option(L, 2, "score")) {
        if (!lua_isfunction(L, -1))
            vm_fail(L, "score = function(s, i) return s end",
                    "attention's score must be a function, got %s", luaL_typename(L, -1));
        vm_push_tensor(L, call->score);
        push_indices(L, call);
        lua_call(L, 2, 1);
        if (!vm_is_tensor(L, -1))
            vm_fail(L, "return the new score",
                    "attention's score function must return a tensor, got %s",
                    luaL_typename(L, -1));
        result = vm_tensor(L, -1, "the score");
    }
    if (call->document[0]) {
        vm_protect(L, rename_document, call);
        vm_node same, masked;
        vm_begin(L, &same, ML_OP_EQ);
        same.sources = call->document;
        same.source_count = 2;
        lua_pushnumber(L, -INFINITY);
        ml_ref operands[3] = {vm_add(L, &same), result,
                              vm_number(L, -1, ml_graph_type(call->graph, result)->dtype)};
        vm_begin(L, &masked, ML_OP_WHERE);
        masked.sources = operands;
        masked.source_count = 3;
        result = vm_add(L, &masked);
    }
    call->args.score = result;
    return 0;
}

static ml_axis axis_option(lua_State *L, const char *key, const char *fallback) {
    if (!vm_option(L, 4, key)) lua_pushstring(L, fallback);
    ml_axis axis = vm_axis_id(L, -1, "attention");
    lua_pop(L, 1);
    return axis;
}

static void read_options(lua_State *L, attention_call *call) {
    static const char *const known[] = {"causal", "window", "scale",    "score", "document",
                                        "seq",    "heads",  "head_dim", NULL};
    if (lua_isnoneornil(L, 4)) lua_settop(L, 3), lua_newtable(L);
    if (!lua_istable(L, 4))
        vm_fail(L, "{causal=true}", "attention takes its options in a table, got %s",
                luaL_typename(L, 4));
    vm_check_options(L, 4, "attention", known);
    ml_attention_args *a = &call->args;
    a->seq = axis_option(L, "seq", "seq");
    a->heads = axis_option(L, "heads", "heads");
    a->head_dim = axis_option(L, "head_dim", "head_dim");
    a->kv_seq = axis_option(L, "", "kv_seq");
    a->kv_heads = axis_option(L, "", "kv_heads");
    if (vm_option(L, 4, "causal")) {
        if (!lua_isboolean(L, -1))
            vm_fail(L, NULL, "attention's causal must be true or false, got %s",
                    luaL_tolstring(L, -1, NULL));
        a->causal = lua_toboolean(L, -1);
    }
    if (vm_option(L, 4, "window")) a->window = vm_integer(L, -1, "attention's window");
    if (vm_option(L, 4, "scale")) {
        a->scale = lua_tonumber(L, -1);
        if (lua_type(L, -1) != LUA_TNUMBER || a->scale == 0)
            vm_fail(L, NULL, "attention's scale must be a number other than 0");
    }
    if (vm_option(L, 4, "document")) {
        ml_ref n = call->document[0] = vm_tensor(L, -1, "attention's document");
        const ml_type *type = ml_graph_type(call->graph, n);
        if (ml_dtypes[type->dtype].kind != ML_KIND_INT)
            vm_fail_with(L, &n, 1, "t:cast(\"i32\")", "attention's document must hold integers");
        if (ml_type_find(type, a->seq) < 0)
            vm_fail_with(L, &n, 1, NULL, "attention's document must have the axis \"%s\"",
                         ml_axis_name(call->graph, a->seq));
    }
    lua_settop(L, 4);
}

/* q, k and v as products take them. Errors show them as the script has them. */
static void lower_operands(lua_State *L, attention_call *call) {
    ml_ref lowered[3];
    memcpy(lowered, call->sources, sizeof lowered);
    if (!precision_narrow(L, lowered, 3)) return;
    attention_call probe = *call;
    vm_protect(L, prepare, &probe);
    vm_protect(L, finish, &probe);
    memcpy(call->sources, lowered, sizeof lowered);
}

static int core_attention(lua_State *L) {
    ml_vm *vm = vm_of(L);
    attention_call call = {.vm = vm, .graph = vm->graph, .source_count = QKV, .first = QKV};
    static const char *const words[] = {"attention's q", "attention's k", "attention's v"};
    for (int i = 0; i < 3; i++) call.sources[i] = vm_tensor(L, i + 1, words[i]);
    read_options(L, &call);
    vm_origin(L, &call.origin);
    lower_operands(L, &call);
    vm_protect(L, prepare, &call);
    lua_getfield(L, 4, "score");
    bool traced = !lua_isnil(L, -1) || call.document[0];
    if (traced) {
        /* Type errors of q and k are raised first, by an attention without the function. */
        ml_attention_args full = call.args;
        vm_protect(L, finish, &call);
        call.args = full;
        vm->tainted.count = 0;
        lua_pushcfunction(L, trace);
        lua_pushlightuserdata(L, &call);
        lua_pushvalue(L, 4);
        int status = lua_pcall(L, 2, 0, 0);
        if (status != LUA_OK) {
            vm->tainted.count = 0;
            return lua_error(L);
        }
    }
    ml_status status = ml_protect(finish, &call);
    vm->tainted.count = 0;
    vm_check(L, status);
    return vm_push_tensor(L, call.result);
}

/* ---- Cached attention ------------------------------------------------------------------------ */

static void finish_cached(void *argument) {
    attention_call *call = argument;
    finish_score(call);
    call->cached.score = call->args.score;
    call->result =
        ml_cached_attention(call->graph, call->sources, call->source_count, &call->cached);
}

static ml_axis cached_axis(lua_State *L, const char *key) {
    if (!vm_option(L, 7, key)) lua_pushstring(L, key);
    ml_axis axis = vm_axis_id(L, -1, "cached_attention");
    lua_pop(L, 1);
    return axis;
}

static int64_t cached_integer(lua_State *L, const char *key, int64_t fallback) {
    char what[64];
    snprintf(what, sizeof what, "cached_attention's %s", key);
    return vm_option(L, 7, key) ? vm_integer(L, -1, what) : fallback;
}

static void read_cached(lua_State *L, attention_call *call) {
    static const char *const known[] = {"causal",   "window",   "scale",  "score",   "block",
                                        "keys",     "seq",      "pool",   "columns", "heads",
                                        "kv_heads", "head_dim", "kv_seq", NULL};
    luaL_checktype(L, 7, LUA_TTABLE);
    vm_check_options(L, 7, "cached_attention", known);
    ml_cached_attention_args *c = &call->cached;
    c->seq = cached_axis(L, "seq"), c->pool = cached_axis(L, "pool");
    c->columns = cached_axis(L, "columns"), c->heads = cached_axis(L, "heads");
    c->kv_heads = cached_axis(L, "kv_heads"), c->head_dim = cached_axis(L, "head_dim");
    c->kv_seq = cached_axis(L, "kv_seq");
    if (!size_of(call, call->sources[CACHED_K], c->kv_heads))
        c->kv_heads = size_of(call, call->sources[CACHED_K], c->heads) ? c->heads : 0;
    c->causal = vm_option(L, 7, "causal") && lua_toboolean(L, -1);
    c->window = cached_integer(L, "window", 0);
    c->block = cached_integer(L, "block", 16);
    if (c->block < 1)
        vm_fail(L, NULL, "cached_attention's block is %lld: a block has 1 position or more",
                (long long)c->block);
    int64_t columns = size_of(call, call->sources[CACHED_TABLE], c->columns);
    c->keys = cached_integer(L, "keys", c->block * columns);
    int64_t dim = size_of(call, call->sources[CACHED_Q], c->head_dim);
    c->scale = vm_option(L, 7, "scale") ? luaL_checknumber(L, -1) : dim ? 1 / sqrt((double)dim) : 1;
    call->args.seq = c->seq, call->args.kv_seq = c->kv_seq, call->args.heads = c->heads;
    lua_settop(L, 7);
}

static int core_cached_attention(lua_State *L) {
    ml_vm *vm = vm_of(L);
    attention_call call = {
        .vm = vm, .graph = vm->graph, .source_count = CACHED_CAPTURED, .first = CACHED_CAPTURED};
    for (int i = 0; i < CACHED_CAPTURED; i++)
        call.sources[i] = vm_tensor(L, i + 1, "an operand of cached_attention");
    vm_origin(L, &call.origin);
    read_cached(L, &call);
    vm_protect(L, finish_cached, &call); /* checks the operands */
    if (vm_option(L, 7, "score")) {
        vm->tainted.count = 0;
        lua_pushcfunction(L, trace);
        lua_pushlightuserdata(L, &call);
        lua_pushvalue(L, 7);
        int status = lua_pcall(L, 2, 0, 0);
        if (status != LUA_OK) {
            vm->tainted.count = 0;
            return lua_error(L);
        }
        ml_status made = ml_protect(finish_cached, &call);
        vm->tainted.count = 0;
        vm_check(L, made);
    }
    return vm_push_tensor(L, call.result);
}

static const vm_entry functions[] = {
    {"cached_attention", core_cached_attention,
     "q: Tensor, k: Tensor, v: Tensor, table: Tensor, start: Tensor, length: Tensor, options: "
     "{causal: boolean, window: integer, block: integer, keys: integer, scale: number, score: "
     "function, seq: string, pool: string, columns: string, heads: string, kv_heads: string, "
     "head_dim: string, kv_seq: string} -> Tensor",
     "attention of each row's queries, of which the first stands at position start, to the keys "
     "and values at positions below length, which lie in rows table[p / block] * block + p % block "
     "of pools"},
    {"attention", core_attention,
     "q: Tensor, k: Tensor, v: Tensor, options?: {causal: boolean, window: integer, scale: number, "
     "score: function, document: Tensor, seq: string, heads: string, head_dim: string} -> Tensor",
     "softmax(scale * q k, masked) v over the keys"},
    {0}};

void vm_attention_register(lua_State *L) {
    vm_register(L, functions);
}
