/* Host: a typed array in host memory, the feeds and results of programs. */
#include "vm/vm.h"

#include <math.h>
#include <string.h>

#include "runtime/graph/convert.h"

void vm_push_element(lua_State *L, ml_dtype dtype, const void *data, int64_t i) {
    if (dtype == ML_BOOL)
        lua_pushboolean(L, ml_element(dtype, data, i) != 0);
    else if (dtype == ML_I64) /* exactly */
        lua_pushinteger(L, ((const int64_t *)data)[i]);
    else if (ml_is_float(dtype))
        lua_pushnumber(L, ml_element(dtype, data, i));
    else
        lua_pushinteger(L, (lua_Integer)ml_element(dtype, data, i));
}

void vm_store_number(lua_State *L, int index, const char *owner, ml_dtype dtype, void *data,
                     int64_t i) {
    int type = lua_type(L, index);
    const char *of = owner ? ": " : "";
    owner = owner ? owner : "";
    if (type != LUA_TNUMBER && type != LUA_TBOOLEAN)
        vm_fail(L, NULL, "%s%selement %lld must be a number, got %s", owner, of, (long long)i + 1,
                luaL_typename(L, index));
    double number = type == LUA_TBOOLEAN ? lua_toboolean(L, index) : lua_tonumber(L, index);
    int exact = 1;
    int64_t integer = 0;
    if (dtype == ML_I32 || dtype == ML_I64) {
        integer = type == LUA_TBOOLEAN ? lua_toboolean(L, index) : lua_tointegerx(L, index, &exact);
        if (!exact || (dtype == ML_I32 && (integer > INT32_MAX || integer < INT32_MIN)))
            vm_fail(L, NULL, "%s%selement %lld is %s, which %s cannot hold", owner, of,
                    (long long)i + 1, luaL_tolstring(L, index, NULL), ml_dtypes[dtype].name);
    }
    if (dtype == ML_I64)
        ((int64_t *)data)[i] = integer;
    else
        ml_set_element(dtype, data, i, dtype == ML_I32 ? (double)integer : number);
}

vm_host *vm_push_host(lua_State *L, ml_dtype dtype, int rank, const int64_t *dims) {
    vm_host *host = lua_newuserdatauv(L, sizeof *host, 0);
    *host = (vm_host){.dtype = dtype, .rank = rank, .count = 1};
    luaL_setmetatable(L, vm_host_class);
    for (int i = 0; i < rank; i++) {
        host->dims[i] = dims[i];
        if (dims[i] && host->count > INT64_MAX / 64 / dims[i])
            vm_fail(L, NULL, "a host array of that size cannot be");
        host->count *= dims[i];
    }
    size_t bytes = (size_t)host->count * (size_t)ml_dtypes[dtype].bytes;
    host->data = ml_alloc(bytes ? bytes : 1);
    if (!host->data) {
        host->count = 0;
        vm_fail(L, NULL, "not enough host memory for %.3f GiB", (double)bytes / (1 << 30));
    }
    return host;
}

vm_host *vm_to_host(lua_State *L, int index) {
    vm_host *host = lua_touserdata(L, index);
    if (!host || !lua_getmetatable(L, index)) return NULL;
    const void *class = lua_topointer(L, -1);
    lua_pop(L, 1);
    return class == vm_of(L)->host_class ? host : NULL;
}

static vm_host *check_host(lua_State *L) {
    vm_host *host = vm_to_host(L, 1);
    return host ? host : luaL_checkudata(L, 1, vm_host_class);
}

static int host_gc(lua_State *L) {
    vm_host *host = check_host(L);
    ml_free(host->data);
    *host = (vm_host){0};
    return 0;
}

/* Read the dimensions from argument `first` on; returns their number. */
static int read_dims(lua_State *L, int first, int64_t *dims) {
    int rank = lua_gettop(L) - first + 1;
    if (rank > ML_MAX_AXES) vm_fail(L, NULL, "a host array has at most %d dimensions", ML_MAX_AXES);
    for (int i = 0; i < rank; i++) {
        dims[i] = vm_integer(L, i + first, "a dimension of a host array");
        if (dims[i] < 0)
            vm_fail(L, NULL, "a dimension of a host array cannot be %lld", (long long)dims[i]);
    }
    return rank > 0 ? rank : 0;
}

static int core_host(lua_State *L) {
    int64_t dims[ML_MAX_AXES];
    ml_dtype dtype = vm_dtype(L, 1, -1);
    int rank = read_dims(L, 2, dims);
    vm_push_host(L, dtype, rank, dims);
    return 1;
}

static int64_t element_index(lua_State *L, const vm_host *host) {
    int64_t i = vm_integer(L, 2, "the index of a host array");
    if (i < 1 || i > host->count)
        vm_fail(L, "elements count from 1, in row-major order",
                "element %lld of a host array of %lld", (long long)i, (long long)host->count);
    return i - 1;
}

static int host_index(lua_State *L) {
    vm_host *host = check_host(L);
    if (lua_type(L, 2) == LUA_TNUMBER) {
        int behind; /* the end of what ipairs reads is nil */
        if (lua_tointegerx(L, 2, &behind) == host->count + 1 && behind) return 0;
        vm_push_element(L, host->dtype, host->data, element_index(L, host));
        return 1;
    }
    lua_pushvalue(L, 2);
    if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL) return 1;
    return vm_fail(L, "methods: table, set, fill, reshape, dtype, dims; elements by number",
                   "a host array has no field %s", luaL_tolstring(L, 2, NULL));
}

static int host_set(lua_State *L) {
    vm_host *host = check_host(L);
    if (host->dtype == ML_I32 && lua_isinteger(L, 2) &&
        lua_isinteger(L, 3)) { /* tokens one by one */
        lua_Integer i = lua_tointeger(L, 2), value = lua_tointeger(L, 3);
        if (i >= 1 && i <= host->count && value == (int32_t)value) {
            ((int32_t *)host->data)[i - 1] = (int32_t)value;
            return 0;
        }
    }
    vm_store_number(L, 3, NULL, host->dtype, host->data, element_index(L, host));
    return 0;
}

static int host_length(lua_State *L) {
    lua_pushinteger(L, check_host(L)->count);
    return 1;
}

static int host_table(lua_State *L) {
    vm_host *host = check_host(L);
    lua_createtable(L, host->count < 1 << 28 ? (int)host->count : 0, 0);
    for (int64_t i = 0; i < host->count; i++) {
        vm_push_element(L, host->dtype, host->data, i);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int host_fill(lua_State *L) {
    vm_host *host = check_host(L);
    lua_settop(L, 2);
    if (lua_istable(L, 2) || vm_to_host(L, 2)) {
        vm_wanted wanted = {.name = "the host array", .dtype = host->dtype, .rank = host->rank};
        memcpy(wanted.dims, host->dims, sizeof wanted.dims);
        const void *data = vm_contents(L, 2, &wanted);
        size_t bytes = (size_t)host->count * (size_t)ml_dtypes[host->dtype].bytes;
        if (bytes) memmove(host->data, data, bytes);
    } else {
        for (int64_t i = 0; i < host->count; i++)
            vm_store_number(L, 2, NULL, host->dtype, host->data, i);
    }
    lua_settop(L, 1);
    return 1;
}

static int host_reshape(lua_State *L) {
    const vm_host *host = check_host(L);
    int64_t dims[ML_MAX_AXES], count = 1;
    int rank = read_dims(L, 2, dims);
    bool fits = true;
    for (int i = 0; i < rank; i++) fits = !__builtin_mul_overflow(count, dims[i], &count) && fits;
    if (!fits || count != host->count)
        vm_fail(L, NULL, "the product of the dimensions must be the %lld elements of the array",
                (long long)host->count);
    vm_host *copy = vm_push_host(L, host->dtype, rank, dims);
    size_t bytes = (size_t)count * (size_t)ml_dtypes[host->dtype].bytes;
    if (bytes) memcpy(copy->data, host->data, bytes);
    return 1;
}

static int host_dtype(lua_State *L) {
    lua_pushstring(L, ml_dtypes[check_host(L)->dtype].name);
    return 1;
}

static int host_dims(lua_State *L) {
    vm_host *host = check_host(L);
    lua_createtable(L, host->rank, 0);
    for (int i = 0; i < host->rank; i++) {
        lua_pushinteger(L, host->dims[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int host_tostring(lua_State *L) {
    vm_host *host = check_host(L);
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    char text[64];
    luaL_addstring(&b, "host ");
    luaL_addstring(&b, ml_dtypes[host->dtype].name);
    luaL_addchar(&b, '[');
    for (int i = 0; i < host->rank; i++) {
        snprintf(text, sizeof text, "%s%lld", i ? ", " : "", (long long)host->dims[i]);
        luaL_addstring(&b, text);
    }
    luaL_addchar(&b, ']');
    int64_t shown = host->count < 8 ? host->count : 8;
    for (int64_t i = 0; i < shown; i++) {
        luaL_addstring(&b, i ? ", " : " {");
        vm_push_element(L, host->dtype, host->data, i);
        if (lua_isinteger(L, -1))
            snprintf(text, sizeof text, "%lld", (long long)lua_tointeger(L, -1));
        else if (lua_isboolean(L, -1))
            snprintf(text, sizeof text, "%s", lua_toboolean(L, -1) ? "true" : "false");
        else if (isnan(lua_tonumber(L, -1)))
            snprintf(text, sizeof text, "nan"); /* whatever its sign bit is */
        else
            snprintf(text, sizeof text, "%.6g", lua_tonumber(L, -1));
        lua_pop(L, 1);
        luaL_addstring(&b, text);
    }
    if (shown) luaL_addstring(&b, shown < host->count ? ", ...}" : "}");
    luaL_pushresult(&b);
    return 1;
}

static const vm_entry functions[] = {
    {"host", core_host, "dtype: string, ...: integer -> Host",
     "a typed array of zeros in host memory, with these dimensions"},
    {0}};
static const vm_entry methods[] = {
    {"set", host_set, "i: integer, value: number|boolean",
     "set an element, counted from 1 in row-major order"},
    {"table", host_table, "-> table", "the elements as a flat list"},
    {"fill", host_fill, "values: number|boolean|table|Host -> Host",
     "set all elements: to one value, from a flat list, or from a nested one or another host array "
     "of these dimensions"},
    {"reshape", host_reshape, "...: integer -> Host",
     "a copy with other dimensions: the same elements in row-major order"},
    {"dtype", host_dtype, "-> string", "the name of the element type"},
    {"dims", host_dims, "-> integer[]", "the dimensions"},
    {0}};

void vm_host_register(lua_State *L) {
    vm_register(L, functions);
    vm_new_class(L, vm_host_class, methods, host_index, host_gc);
    lua_pop(L, 1);
    static const luaL_Reg meta[] = {{"__len", host_length},
                                    {"__tostring", host_tostring},
                                    {"__newindex", host_set},
                                    {NULL, NULL}};
    luaL_getmetatable(L, vm_host_class);
    vm_of(L)->host_class = lua_topointer(L, -1);
    luaL_setfuncs(L, meta, 0);
    lua_pop(L, 1);
}
