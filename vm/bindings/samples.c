/* Examples that a script makes by itself: the numbers that it draws for one of them, which of them
 * a rank needs, and how what its function returns gets into a batch.
 *
 * Numbers are a counter generator's (runtime/graph/analysis.h): the n-th of an example is a
 * function of seed, example and n, whatever else was drawn. */
#include "vm/vm.h"

#include <math.h>
#include <string.h>

#include "runtime/base/memory.h"
#include "runtime/graph/analysis.h"
#include "runtime/graph/convert.h"

typedef struct {
    int64_t key, drawn; /* drawn: how many numbers so far */
} numbers;

static numbers *check_numbers(lua_State *L) {
    return luaL_checkudata(L, 1, vm_random_class);
}

/* ---- Drawing --------------------------------------------------------------------------------- */

typedef enum { UNIFORM, NORMAL, INTEGER } drawn_kind;
typedef struct {
    drawn_kind kind;
    double a, b;       /* bounds; mean and standard deviation */
    int64_t low, high; /* of integers */
} distribution;

static double uniform(uint64_t bits) {
    return (double)(bits >> 11) * 0x1p-53;
}

/* Box and Muller 1958: one of the two numbers, from the halves of the bits. */
static double normal(uint64_t bits) {
    double radius = sqrt(-2 * log(((double)(bits >> 32) + 1) * 0x1p-32));
    return radius * cos(6.283185307179586 * (double)(bits & 0xffffffffu) * 0x1p-32);
}

static int64_t integer(const distribution *d, uint64_t bits) {
    __extension__ typedef unsigned __int128 wide;
    uint64_t count = (uint64_t)d->high - (uint64_t)d->low + 1; /* 0: all of 64 bits */
    uint64_t above = count ? (uint64_t)(((wide)bits * count) >> 64) : bits;
    return (int64_t)((uint64_t)d->low + above);
}

static double number(const distribution *d, uint64_t bits) {
    if (d->kind == NORMAL) return d->a + d->b * normal(bits);
    return d->a + (d->b - d->a) * uniform(bits);
}

static double finite_number(lua_State *L, int index, double fallback, const char *what) {
    if (lua_isnoneornil(L, index)) return fallback;
    if (lua_type(L, index) != LUA_TNUMBER || !isfinite(lua_tonumber(L, index)))
        vm_fail(L, NULL, "%s must be a number, got %s", what, luaL_tolstring(L, index, NULL));
    return lua_tonumber(L, index);
}

static distribution read_integers(lua_State *L, int first) {
    distribution d = {.kind = INTEGER, .low = vm_integer(L, first, "the least integer to draw")};
    d.high = vm_integer(L, first + 1, "the largest integer to draw");
    if (d.high < d.low)
        vm_fail(L, "random:integer(0, 255) draws from 0 to 255, both included",
                "there are no integers from %lld to %lld", (long long)d.low, (long long)d.high);
    return d;
}

static distribution read_uniform(lua_State *L, int first) {
    return (distribution){.a = finite_number(L, first, 0, "the lower bound"),
                          .b = finite_number(L, first + 1, 1, "the upper bound")};
}

static distribution read_normal(lua_State *L, int first) {
    return (distribution){.kind = NORMAL,
                          .a = finite_number(L, first, 0, "the mean"),
                          .b = finite_number(L, first + 1, 1, "the standard deviation")};
}

static int draw(lua_State *L, numbers *n, const distribution *d) {
    uint64_t bits = ml_random_bits(n->key, n->drawn++);
    if (d->kind == INTEGER)
        lua_pushinteger(L, integer(d, bits));
    else
        lua_pushnumber(L, number(d, bits));
    return 1;
}

static int random_uniform(lua_State *L) {
    numbers *n = check_numbers(L);
    distribution d = read_uniform(L, 2);
    return draw(L, n, &d);
}

static int random_normal(lua_State *L) {
    numbers *n = check_numbers(L);
    distribution d = read_normal(L, 2);
    return draw(L, n, &d);
}

static int random_integer(lua_State *L) {
    numbers *n = check_numbers(L);
    distribution d = read_integers(L, 2);
    return draw(L, n, &d);
}

static int fill_host(lua_State *L, numbers *n, const distribution *d, vm_host *host) {
    for (int64_t i = 0; i < host->count; i++) {
        uint64_t bits = ml_random_bits(n->key, n->drawn + i);
        if (host->dtype == ML_I32 && d->kind == INTEGER)
            ((int32_t *)host->data)[i] = (int32_t)integer(d, bits);
        else if (host->dtype == ML_I64 && d->kind == INTEGER)
            ((int64_t *)host->data)[i] = integer(d, bits);
        else if (host->dtype == ML_F32)
            ((float *)host->data)[i] = (float)number(d, bits);
        else
            ml_set_element(host->dtype, host->data, i, number(d, bits));
    }
    n->drawn += host->count;
    lua_settop(L, 2);
    return 1;
}

static vm_host *check_filled(lua_State *L) {
    vm_host *host = vm_to_host(L, 2);
    if (!host)
        vm_fail(L, "m.host(\"i32\", 1024) makes one, which each call may fill again",
                "random fills a host array, not %s", vm_typename(L, 2));
    return host;
}

static int random_fill(lua_State *L) {
    numbers *n = check_numbers(L);
    vm_host *host = check_filled(L);
    distribution d;
    if (host->dtype == ML_I32 || host->dtype == ML_I64) {
        d = read_integers(L, 3);
        if (host->dtype == ML_I32 && (d.low < INT32_MIN || d.high > INT32_MAX))
            vm_fail(L, NULL, "a host array of i32 cannot hold all integers from %lld to %lld",
                    (long long)d.low, (long long)(d.high));
    } else if (ml_is_float(host->dtype)) {
        d = read_uniform(L, 3);
    } else {
        vm_fail(L, NULL, "random fills host arrays of floats, i32 and i64, not of %s",
                ml_dtypes[host->dtype].name);
    }
    return fill_host(L, n, &d, host);
}

static int random_fill_normal(lua_State *L) {
    numbers *n = check_numbers(L);
    vm_host *host = check_filled(L);
    if (!ml_is_float(host->dtype))
        vm_fail(L, "m.host(\"f32\", 16)", "fill_normal fills host arrays of floats, not of %s",
                ml_dtypes[host->dtype].name);
    distribution d = read_normal(L, 3);
    return fill_host(L, n, &d, host);
}

static int random_restart(lua_State *L) {
    numbers *n = check_numbers(L);
    const int64_t from[2] = {vm_integer(L, 2, "the seed"), vm_integer(L, 3, "the index")};
    *n = (numbers){.key = (int64_t)ml_hash(from, sizeof from, 0)};
    lua_settop(L, 1);
    return 1;
}

static int core_random_numbers(lua_State *L) {
    lua_settop(L, 2);
    *(numbers *)lua_newuserdatauv(L, sizeof(numbers), 0) = (numbers){0};
    luaL_setmetatable(L, vm_random_class);
    lua_insert(L, 1);
    return random_restart(L);
}

/* ---- Batches --------------------------------------------------------------------------------- */

/* The program's input of this name. */
static uint32_t input_named(lua_State *L, const vm_program *p, const char *name) {
    const ml_graph *g = vm_of(L)->graph;
    for (int i = 0; i < p->input_count; i++)
        if (!strcmp(ml_graph_input(g, p->input_ids[i])->name, name)) return p->input_ids[i];
    vm_fail(L, NULL, "the program has no input \"%s\"", name);
}

static int core_own_rows(lua_State *L) {
    const vm_program *p = luaL_checkudata(L, 1, vm_program_class);
    uint32_t input = input_named(L, p, luaL_checkstring(L, 2));
    int64_t first = 0, held = 0;
    if (p->program) vm_check(L, ml_program_own_rows(p->program, input, &first, &held));
    lua_pushinteger(L, first);
    lua_pushinteger(L, held);
    return 2;
}

static void check_no_nan(lua_State *L, const char *name, const ml_type *type, const void *data) {
    int64_t i = 0, count = ml_type_elements(type);
    if (type->dtype == ML_F32)
        while (i < count && !isnan(((const float *)data)[i])) i++;
    else
        while (i < count && !isnan(ml_element((ml_dtype)type->dtype, data, i))) i++;
    if (i < count) vm_fail(L, NULL, "%s%s is nan", name, vm_push_place(L, type, i));
}

static int core_take_row(lua_State *L) {
    const vm_program *p = luaL_checkudata(L, 1, vm_program_class);
    const char *input_name = luaL_checkstring(L, 2), *name = luaL_checkstring(L, 6);
    uint32_t input = input_named(L, p, input_name);
    vm_host *host = luaL_checkudata(L, 3, vm_host_class);
    int64_t row = vm_integer(L, 4, "the row");
    ml_type type = ml_graph_input(vm_of(L)->graph, input)->type;
    if (host->rank != type.rank || host->dtype != (ml_dtype)type.dtype || row < 0 ||
        row >= host->dims[0])
        vm_fail(L, NULL, "there is no row %lld for input \"%s\"", (long long)row, input_name);
    type.rank--;
    memmove(type.axis, type.axis + 1, type.rank * sizeof *type.axis);
    memmove(type.size, type.size + 1, type.rank * sizeof *type.size);
    vm_wanted wanted;
    vm_want(L, lua_pushfstring(L, "%s.%s", name, input_name), &type, &wanted);
    const void *data = vm_contents(L, 5, &wanted);
    vm_check_range_of(L, p, input, wanted.name, &type, data);
    if (ml_is_float((ml_dtype)type.dtype)) check_no_nan(L, wanted.name, &type, data);
    int64_t bytes = ml_type_bytes(&type);
    if (bytes) memcpy((char *)host->data + row * bytes, data, (size_t)bytes);
    return 0;
}

static const vm_entry functions[] = {
    {"random_numbers", core_random_numbers, "seed: integer, index: integer -> Random",
     "numbers of a counter generator, of this seed and index alone"},
    {"own_rows", core_own_rows, "program: Program, input: string -> integer, integer",
     "which rows along its first axis this rank reads of a program's input: the first, from 0, and "
     "how many"},
    {"take_row", core_take_row,
     "program: Program, input: string, batch: Host, row: integer, value: any, name: string",
     "copy an example into a row, from 0, of the host array that the input is fed from: checked as "
     "programs check what they are fed; errors begin with the name"},
    {0}};
static const vm_entry methods[] = {
    {"uniform", random_uniform, "low?: number, high?: number -> number",
     "uniform between low and high (default: 0 and 1)"},
    {"normal", random_normal, "mean?: number, deviation?: number -> number",
     "normal with this mean and standard deviation (default: 0 and 1)"},
    {"integer", random_integer, "low: integer, high: integer -> integer",
     "an integer from low to high, both included, all equally likely"},
    {"fill", random_fill, "host: Host, low?: number, high?: number -> Host",
     "draw all elements of a host array: integers as integer does, floats as uniform does"},
    {"fill_normal", random_fill_normal, "host: Host, mean?: number, deviation?: number -> Host",
     "draw all elements of a host array of floats as normal does"},
    {"restart", random_restart, "seed: integer, index: integer -> Random",
     "begin again with another seed and index"},
    {0}};

/* Methods are found without a call, as scripts draw number by number; the class's function for
 * unknown ones is asked after that. The methods are on top. */
static void index_by_table(lua_State *L) {
    luaL_getmetatable(L, vm_random_class);
    lua_createtable(L, 0, 2);
    lua_getfield(L, -2, "__index");
    lua_setfield(L, -2, "__index");
    vm_set_string(L, "__name", vm_random_class);
    lua_setmetatable(L, -3);
    lua_pushvalue(L, -2);
    lua_setfield(L, -2, "__index");
    lua_pop(L, 1);
}

void vm_samples_register(lua_State *L) {
    vm_register(L, functions);
    vm_new_class(L, vm_random_class, methods, NULL, NULL);
    index_by_table(L);
    lua_pop(L, 1);
}
