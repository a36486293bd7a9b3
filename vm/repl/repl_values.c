/* Numbers at the prompt: `= x:sum()` computes a small tensor here, whatever the device is.
 *
 * The reference interpreter does it, one op at a time, with values rounded as their dtypes have it:
 * no kernel is compiled and no device opened. Parameters and other states have the values that
 * programs of the prompt have given them, else their initial ones. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/graph/convert.h"
#include "runtime/passes/passes.h"
#include "vm/repl/repl.h"

enum { SHOWN_COLUMNS = 8, SHOWN_ROWS = 12 };
/* Elements, multiplications and additions: some three seconds; elements of one value: 0.4 GB. */
static const double MOST_WORK = 1e9, MOST_ELEMENTS = 5e7;

/* ---- Computing ------------------------------------------------------------------------------- */

typedef struct {
    ml_vm *vm;
    ml_arena *arena;
    ML_VEC(ml_graph *) graphs; /* to be freed */
    double work;               /* of all of them */
    double **states;           /* by id; NULL: not computed yet */
    bool *under_way;           /* by id */
    ml_ref node;
    double *result;
} computation;

static const char *origin_text(const computation *c, const ml_origin *origin) {
    if (!origin->file) return "";
    return ml_arena_format(c->arena, " from %s:%d", origin->file, origin->line);
}

static _Noreturn void refuse_input(const computation *c, const ml_graph *g, ml_ref n) {
    const char *name = ml_graph_input(g, (uint32_t)ml_graph_args(g, n)[0])->name;
    ml_fail(ML_INVALID, "the input \"%s\"%s has no value", name,
            origin_text(c, ml_graph_origin(g, n)));
    ml_help("a call of the program gives it one: f{%s = ...}; m.iota, m.full and m.normal make "
            "tensors that have values",
            name);
    ml_raise_last();
}

static _Noreturn void refuse_work(const computation *c, const ml_graph *g, ml_ref largest) {
    ml_text type = {.arena = c->arena};
    ml_type_print(g, ml_graph_type(g, largest), &type);
    ml_fail(ML_TOO_LARGE,
            "too much to compute at the prompt: %.0f million operations, most of them for %s%s; up "
            "to %.0f million are done here, on %.0f million elements",
            c->work / 1e6, type.text, origin_text(c, ml_graph_origin(g, largest)), MOST_WORK / 1e6,
            MOST_ELEMENTS / 1e6);
    ml_help("m.compile(function() return { y = ... } end)() runs it on the device");
    ml_raise_last();
}

static void count_work(computation *c, const ml_graph *g) {
    ml_ref largest = 0;
    double most = -1, longest = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        if (ml_graph_node(g, n)->op == ML_OP_INPUT) refuse_input(c, g, n);
        double elements = (double)ml_type_elements(ml_graph_type(g, n)), flops = ml_flops(g, n);
        double work = flops > elements ? flops : elements;
        c->work += work;
        if (elements > longest) longest = elements;
        if (work > most) most = work, largest = n;
    }
    if (c->work > MOST_WORK || longest > MOST_ELEMENTS) refuse_work(c, g, largest);
}

static double *widen(const computation *c, const ml_type *type, const void *data) {
    int64_t count = ml_type_elements(type);
    double *values = ML_NEW_ARRAY(c->arena, double, (size_t)count + 1);
    const ml_dtype dtype = (ml_dtype)type->dtype;
    if (ml_dtypes[dtype].kind == ML_KIND_FLOAT) {
        ml_convert(dtype, data, ML_F64, values, count);
        return values;
    }
    for (int64_t i = 0; i < count; i++)
        values[i] = dtype == ML_BOOL  ? ((const uint8_t *)data)[i]
                    : dtype == ML_I32 ? ((const int32_t *)data)[i]
                                      : (double)((const int64_t *)data)[i];
    return values;
}

static double *compute_node(computation *c, ml_ref n);

static double *compute_state(computation *c, uint32_t id) {
    ml_session *session = c->vm->session;
    const ml_state *state = ml_graph_state(c->vm->graph, id);
    int64_t count = ml_type_elements(&state->type);
    if (ml_session_has_value(session, id)) {
        void *data = ml_arena_alloc(c->arena, (size_t)ml_type_bytes(&state->type) + 1);
        ML_CHECK(ml_session_read_state(session, id, data));
        return widen(c, &state->type, data);
    }
    if (state->kind == ML_STATE_PARAMETER && !state->name && !state->initial) {
        ml_fail(ML_INVALID, "the parameter%s has no value before its module is called or listed",
                origin_text(c, &state->origin));
        ml_help("m.parameters(model) gives all of a model their names and initial values");
        ml_raise_last();
    }
    if (!state->initial) return ML_NEW_ARRAY(c->arena, double, (size_t)count + 1);
    if (c->under_way[id])
        ml_raise(ML_INVALID, "the initial value of state \"%s\" depends on itself",
                 state->name ? state->name : "?");
    c->under_way[id] = true;
    double *values = compute_node(c, state->initial);
    c->under_way[id] = false;
    return values;
}

static double *compute_node(computation *c, ml_ref n) {
    ml_roots roots = {.outputs = ml_arena_alloc(c->arena, sizeof n), .output_count = 1};
    roots.outputs[0] = n;
    ml_graph *placed = *ML_PUSH(c->arena, &c->graphs) = ml_drop_placements(c->vm->graph, &roots);
    ml_graph *g = *ML_PUSH(c->arena, &c->graphs) = ml_simplify(placed, &roots);
    count_work(c, g);
    for (ml_ref at = 1; at < ml_graph_count(g); at++) {
        if (ml_graph_node(g, at)->op != ML_OP_STATE) continue;
        uint32_t id = (uint32_t)ml_graph_args(g, at)[0];
        if (!c->states[id]) c->states[id] = compute_state(c, id);
    }
    double *result;
    ml_reference(g, (const double *const *)c->states, NULL, roots.outputs, 1, &result, true,
                 c->arena);
    return result;
}

static void compute(void *argument) {
    computation *c = argument;
    size_t states = (size_t)ml_graph_state_count(c->vm->graph) + 1;
    c->states = ML_NEW_ARRAY(c->arena, double *, states);
    c->under_way = ML_NEW_ARRAY(c->arena, bool, states);
    c->result = compute_node(c, c->node);
}

/* ---- Printing -------------------------------------------------------------------------------- */

/* The fewest digits that are this number in its dtype. */
static void format_number(char *out, size_t size, ml_dtype dtype, double x) {
    if (ml_dtypes[dtype].kind != ML_KIND_FLOAT) {
        if (dtype == ML_BOOL)
            snprintf(out, size, x != 0 ? "true" : "false");
        else
            snprintf(out, size, "%.0f", x);
        return;
    }
    if (x != x) {
        snprintf(out, size, "nan"); /* whatever its sign is */
        return;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(out, size, "%.*g", digits, x);
        double back = strtod(out, NULL);
        bool same = dtype == ML_BF16  ? ml_to_bf16(back) == ml_to_bf16(x)
                    : dtype == ML_F32 ? (float)back == (float)x
                                      : back == x;
        if (same) return;
    }
}

/* An item of a row: what a column has room for. */
static void print_item(ml_dtype dtype, double x) {
    char text[64];
    if (ml_dtypes[dtype].kind == ML_KIND_FLOAT && x == x)
        snprintf(text, sizeof text, "%.5g", x);
    else
        format_number(text, sizeof text, dtype, x);
    printf(" %11s", text);
}

static void print_row(ml_dtype dtype, const double *values, int64_t count) {
    int64_t shown = count > SHOWN_COLUMNS ? SHOWN_COLUMNS : count;
    for (int64_t i = 0; i < shown; i++) print_item(dtype, values[i]);
    printf(shown < count ? " ...\n" : "\n");
}

/* The coordinates of a row: "batch=0 seq=3", or "0 3" of arrays without names. */
static int format_place(char *out, size_t size, const repl_array *a, int64_t row) {
    int64_t at[ML_MAX_AXES];
    size_t used = 0;
    out[0] = 0;
    for (int i = a->rank - 2; i >= 0; i--) at[i] = row % a->size[i], row /= a->size[i];
    for (int i = 0; i + 1 < a->rank && used < size; i++)
        used +=
            (size_t)snprintf(out + used, size - used, "%s%s%s%lld", i ? " " : "",
                             a->names ? a->names[i] : "", a->names ? "=" : "", (long long)at[i]);
    return (int)used;
}

static void print_summary(const repl_array *a, int64_t count) {
    double sum = 0, squares = 0, least = INFINITY, most = -INFINITY;
    int64_t strange = 0;
    if (ml_dtypes[a->dtype].kind != ML_KIND_FLOAT || count < 2) return;
    for (int64_t i = 0; i < count; i++) {
        double x = a->values[i];
        if (!isfinite(x)) {
            strange++;
            continue;
        }
        sum += x;
        if (x < least) least = x;
        if (x > most) most = x;
    }
    int64_t finite = count - strange;
    double mean = sum / (double)finite;
    for (int64_t i = 0; i < count; i++)
        if (isfinite(a->values[i])) squares += (a->values[i] - mean) * (a->values[i] - mean);
    if (finite)
        printf("  mean %.5g  deviation %.5g  from %.5g to %.5g", mean,
               sqrt(squares / (double)finite), least, most);
    if (strange) printf("  %lld not finite", (long long)strange);
    printf("\n");
}

void repl_print_array(const repl_array *a) {
    int64_t width = a->rank ? a->size[a->rank - 1] : 1, rows = 1;
    char place[256];
    int room = 0;
    if (a->rank == 0) {
        format_number(place, sizeof place, a->dtype, a->values[0]);
        printf("  = %s\n", place);
        return;
    }
    for (int i = 0; i + 1 < a->rank; i++) rows *= a->size[i];
    int64_t shown = rows > SHOWN_ROWS ? SHOWN_ROWS : rows;
    for (int64_t i = 0; i < shown; i++) {
        int length = format_place(place, sizeof place, a, i);
        if (length > room) room = length;
    }
    for (int64_t i = 0; i < shown && width; i++) {
        format_place(place, sizeof place, a, i);
        printf("  %-*s", room, place);
        print_row(a->dtype, a->values + i * width, width);
    }
    if (shown < rows) printf("  ... %lld rows\n", (long long)rows);
    print_summary(a, rows * width);
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* The header is printed after what may fail. */
static void print_tensor(lua_State *L, int index, ml_ref n) {
    ml_vm *vm = vm_of(L);
    const ml_type *type = ml_graph_type(vm->graph, n);
    const char *names[ML_MAX_AXES];
    for (int i = 0; i < type->rank; i++) names[i] = ml_axis_name(vm->graph, type->axis[i]);
    computation c = {.vm = vm, .arena = ml_arena_new(), .node = n};
    if (!c.arena) vm_fail(L, NULL, "not enough host memory");
    ml_status status = ml_protect(compute, &c);
    if (status == ML_OK) {
        repl_print(L, index);
        repl_print_array(&(repl_array){.dtype = (ml_dtype)type->dtype,
                                       .rank = type->rank,
                                       .size = type->size,
                                       .names = names,
                                       .values = c.result});
    }
    for (uint32_t i = 0; i < c.graphs.count; i++) ml_graph_free(c.graphs.at[i]);
    ml_arena_free(c.arena);
    vm_check(L, status);
}

static void print_host(lua_State *L, const vm_host *host) {
    ml_type type = {.dtype = (uint8_t)host->dtype, .rank = host->rank};
    printf("host %s[", ml_dtypes[host->dtype].name);
    for (int i = 0; i < host->rank; i++) printf("%s%lld", i ? ", " : "", (long long)host->dims[i]);
    printf("]\n");
    memcpy(type.size, host->dims, sizeof type.size);
    computation c = {.arena = ml_arena_new()};
    if (!c.arena) vm_fail(L, NULL, "not enough host memory");
    repl_print_array(&(repl_array){.dtype = host->dtype,
                                   .rank = host->rank,
                                   .size = host->dims,
                                   .values = widen(&c, &type, host->data)});
    ml_arena_free(c.arena);
}

/* A table of numbers and arrays, as a program returns it: an item on a line of its own. */
static bool holds_values(lua_State *L, int index) {
    bool any = false, all = lua_type(L, index) == LUA_TTABLE;
    if (!all || luaL_getmetafield(L, index, "__tostring") != LUA_TNIL) return false;
    lua_pushnil(L);
    while (lua_next(L, index)) {
        any = any || vm_to_host(L, -1) || vm_is_tensor(L, -1);
        all = all && (vm_to_host(L, -1) || vm_is_tensor(L, -1) || lua_isnumber(L, -1));
        lua_pop(L, 1);
    }
    return any && all;
}

static void print_items(lua_State *L, int index) {
    vm_push_library_globals(L);
    lua_getfield(L, -1, "next"); /* which visits keys in a fixed order */
    int next = lua_gettop(L);
    lua_pushnil(L);
    for (;;) {
        lua_pushvalue(L, next);
        lua_pushvalue(L, index);
        lua_pushvalue(L, next + 1);
        lua_call(L, 2, 2);
        if (lua_isnil(L, next + 2)) break;
        printf("%s: ", luaL_tolstring(L, next + 2, NULL));
        lua_pop(L, 1);
        repl_print_values(L, next + 3);
        lua_pop(L, 1);
        lua_replace(L, next + 1);
    }
    lua_settop(L, next - 2);
}

void repl_print_values(lua_State *L, int index) {
    uint32_t id;
    index = lua_absindex(L, index);
    luaL_checkstack(L, 16, "printing");
    const vm_host *host = vm_to_host(L, index);
    if (holds_values(L, index)) {
        print_items(L, index);
        return;
    }
    if (vm_is_state(L, index, &id)) {
        print_tensor(L, index, vm_state_node(L, id));
    } else if (vm_is_tensor(L, index)) {
        print_tensor(L, index, vm_tensor(L, index, "the value"));
    } else if (host) {
        print_host(L, host);
    } else {
        repl_print(L, index);
    }
}
