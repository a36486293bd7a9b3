/* What a script passes as the contents of a tensor: a number for all elements, a table of numbers,
 * nested by the axes or flat in row-major order, or a host array.
 *
 * The shape must be the tensor's, not its number of elements alone: an array of the transpose would
 * train something else in silence. Axes of size 1 make no difference. Floats of a host array are
 * converted to any float dtype, integers to any integer dtype that holds their values. */
#include "vm/vm.h"

#include <string.h>

#include "runtime/graph/convert.h"

/* ---- Messages -------------------------------------------------------------------------------- */

/* Push: input "x" takes f32[a=2, b=3] */
static const char *push_wanted(lua_State *L, const vm_wanted *w) {
    vm_push_shape(L, w->dtype, w->rank, w->dims, w->axes[0] ? w->axes : NULL);
    return lua_pushfstring(L, "%s takes %s", w->name, lua_tostring(L, -1));
}

static const char *push_given(lua_State *L, const vm_host *host) {
    vm_push_shape(L, host->dtype, host->rank, host->dims, NULL);
    return lua_tostring(L, -1);
}

static int64_t count_of(const vm_wanted *wanted) {
    int64_t count = 1;
    for (int i = 0; i < wanted->rank; i++) count *= wanted->dims[i];
    return count;
}

/* Push the axes in an order in which they have the array's sizes: "b", "a"; false for none. */
static bool push_order(lua_State *L, const vm_wanted *w, const vm_host *host) {
    unsigned used = 0;
    lua_pushliteral(L, "");
    for (int k = 0; k < host->rank; k++) {
        int i = 0;
        while (i < w->rank && (used >> i & 1 || w->dims[i] != host->dims[k])) i++;
        if (i == w->rank) return false;
        used |= 1u << i;
        lua_pushfstring(L, "%s%s\"%s\"", lua_tostring(L, -1), k ? ", " : "", w->axes[i]);
    }
    return w->rank == host->rank;
}

static _Noreturn void wrong_shape(lua_State *L, const vm_wanted *w, const vm_host *host) {
    const char *help = NULL;
    luaL_checkstack(L, 40, "a shape");
    if (w->axes[0] && push_order(L, w, host)) {
        help = lua_pushfstring(L,
                               w->is_state ? "p:set(h, {%s}) names the array's axes in its order"
                                           : "if the array's axes are %s: list the input's axes "
                                             "in that order",
                               lua_tostring(L, -1));
    } else if (host->count == count_of(w)) {
        lua_pushliteral(L, "if the array has these elements in row-major order: h:reshape(");
        for (int i = 0; i < w->rank; i++)
            lua_pushfstring(L, i ? "%s, %I" : "%s%I", lua_tostring(L, -1), (LUAI_UACINT)w->dims[i]);
        help = lua_pushfstring(L, "%s)", lua_tostring(L, -1));
    }
    const char *given = push_given(L, host);
    vm_fail(L, help, "%s, not a host array %s", push_wanted(L, w), given);
}

/* ---- Tables ---------------------------------------------------------------------------------- */

/* A table of tables has the sizes of the axes; the numbers of a flat one are counted later. */
static void check_nesting(lua_State *L, int index, const vm_wanted *wanted, int depth) {
    int64_t length = vm_table_length(L, index);
    int64_t expected = depth < wanted->rank ? wanted->dims[depth] : 0;
    luaL_checkstack(L, 8, "nested tables");
    bool nested = lua_rawgeti(L, index, 1) == LUA_TTABLE;
    lua_pop(L, 1);
    for (int k = depth + 1; !nested && k < wanted->rank; k++) expected *= wanted->dims[k];
    if (!nested && depth == 0) return;
    if (depth == wanted->rank)
        vm_fail(L, NULL, "%s; the table has tables in tables to a depth of more than %d",
                push_wanted(L, wanted), wanted->rank);
    if (length != expected)
        vm_fail(L, "a flat list of all elements, in row-major order, is accepted too",
                "%s; %s has %lld elements where %lld are wanted", push_wanted(L, wanted),
                depth ? "a table inside" : "the table", (long long)length, (long long)expected);
    for (int64_t i = 1; nested && i <= length; i++) {
        if (lua_rawgeti(L, index, i) != LUA_TTABLE)
            vm_fail(L, NULL, "%s; the table has both tables and %s", push_wanted(L, wanted),
                    luaL_typename(L, -1));
        check_nesting(L, lua_gettop(L), wanted, depth + 1);
        lua_pop(L, 1);
    }
}

/* Number of elements stored from a table of numbers or of such tables. */
static int64_t store_table(lua_State *L, int index, const vm_wanted *wanted, void *data,
                           int64_t at) {
    const int64_t count = count_of(wanted), length = vm_table_length(L, index);
    bool nested = false; /* as check_nesting has it: by the first element */
    index = lua_absindex(L, index);
    for (int64_t i = 1; i <= length; i++) {
        bool table = lua_rawgeti(L, index, i) == LUA_TTABLE;
        nested = i == 1 ? table : nested;
        if (nested) {
            at = store_table(L, -1, wanted, data, at);
        } else {
            if (at >= count)
                vm_fail(L, NULL, "%s, %lld elements; the table has more", push_wanted(L, wanted),
                        (long long)count);
            vm_store_number(L, -1, wanted->name, wanted->dtype, data, at++);
        }
        lua_pop(L, 1);
    }
    return at;
}

/* ---- Host arrays ----------------------------------------------------------------------------- */

/* But for axes of size 1. */
static bool same_shape(const vm_wanted *wanted, const vm_host *host) {
    int i = 0, k = 0;
    for (;;) {
        while (i < wanted->rank && wanted->dims[i] == 1) i++;
        while (k < host->rank && host->dims[k] == 1) k++;
        if (i == wanted->rank || k == host->rank) return i == wanted->rank && k == host->rank;
        if (wanted->dims[i++] != host->dims[k++]) return false;
    }
}

/* Lua's own, which its collector counts. */
static void *push_memory(lua_State *L, const vm_wanted *wanted) {
    return lua_newuserdatauv(L, (size_t)count_of(wanted) * (size_t)ml_dtypes[wanted->dtype].bytes,
                             0);
}

static const void *host_contents(lua_State *L, int index, const vm_host *host,
                                 const vm_wanted *wanted) {
    if (!ml_converts(host->dtype, wanted->dtype)) {
        const char *given = push_given(L, host);
        vm_fail(L,
                "of floats any float dtype is made, of integers any integer dtype; a table of "
                "numbers, such as h:table(), does for all",
                "%s, not a host array %s", push_wanted(L, wanted), given);
    }
    if (!same_shape(wanted, host)) wrong_shape(L, wanted, host);
    if (host->dtype == wanted->dtype) {
        lua_pushvalue(L, index);
        return host->data;
    }
    void *data = push_memory(L, wanted);
    int64_t bad = ml_convert(host->dtype, host->data, wanted->dtype, data, host->count);
    if (bad >= 0)
        vm_fail(L, NULL, "%s: element %lld is %lld, which %s cannot hold", wanted->name,
                (long long)bad + 1, (long long)((const int64_t *)host->data)[bad],
                ml_dtypes[wanted->dtype].name);
    return data;
}

const void *vm_contents(lua_State *L, int index, const vm_wanted *wanted) {
    index = lua_absindex(L, index);
    const int64_t count = count_of(wanted);
    const vm_host *host = vm_to_host(L, index);
    if (host) return host_contents(L, index, host, wanted);
    bool table = lua_istable(L, index);
    if (!table && lua_type(L, index) != LUA_TNUMBER && !lua_isboolean(L, index))
        vm_fail(L,
                vm_is_tensor(L, index)
                    ? "state:get() gives the values of a state; state:assign(tensor) sets "
                      "it when a program runs"
                    : NULL,
                "%s: a host array, a table or a number, not %s", push_wanted(L, wanted),
                vm_typename(L, index));
    void *data = push_memory(L, wanted);
    if (!table) {
        for (int64_t i = 0; i < count; i++)
            vm_store_number(L, index, wanted->name, wanted->dtype, data, i);
        return data;
    }
    check_nesting(L, index, wanted, 0);
    int64_t stored = store_table(L, index, wanted, data, 0);
    if (stored != count)
        vm_fail(L, NULL, "%s, %lld elements; the table has %lld", push_wanted(L, wanted),
                (long long)count, (long long)stored);
    return data;
}

void vm_want(lua_State *L, const char *name, const ml_type *type, vm_wanted *wanted) {
    const ml_graph *g = vm_of(L)->graph;
    *wanted = (vm_wanted){.name = name, .dtype = (ml_dtype)type->dtype, .rank = type->rank};
    for (int i = 0; i < type->rank; i++) {
        wanted->dims[i] = type->size[i];
        wanted->axes[i] = ml_axis_name(g, type->axis[i]);
    }
}
