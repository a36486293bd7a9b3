/* The order in which pairs and next visit a table, and table.sort.
 *
 * Lua visits keys by their hashes, which depend on a seed and on addresses: two processes differ,
 * and with them the models that two ranks build. Scripts and stdlib/ get functions that visit keys
 * in a fixed order: the integers from 1, ascending; other numbers, ascending; texts, by their
 * bytes; false, true; then tables, functions, tensors and all other objects, in the order in which
 * they were made. For that the allocator counts the objects that Lua makes and puts the number
 * before each.
 *
 * A table whose keys are the integers from 1, in order, is visited by Lua's own function. Of others
 * the keys are sorted when the loop begins: a key that is added meanwhile is not visited, one whose
 * value becomes nil before its turn is left out. table.sort is stable: Lua's own chooses pivots by
 * the time, so that equal elements are in another order in each process. */
#include "vm/vm.h"

#include <stdlib.h>
#include <string.h>

/* ---- Objects are numbered -------------------------------------------------------------------- */

/* Blocks of memory are aligned to 16 bytes; an object follows its number, so that its address is 8
 * more than a multiple of 16. That is enough for what Lua and vm/ store in them. */
enum { NUMBER_BYTES = 8, ALIGNMENT = 16 };

static bool is_numbered(const void *block) {
    return (uintptr_t)block % ALIGNMENT == NUMBER_BYTES;
}

/* For a new block Lua passes its type as the old size. */
static bool is_object(size_t type) {
    return type == LUA_TTABLE || type == LUA_TFUNCTION || type == LUA_TUSERDATA ||
           type == LUA_TTHREAD;
}

static void *allocate_object(ml_vm *vm, size_t bytes) {
    uint64_t *number = ml_alloc(bytes + NUMBER_BYTES);
    if (!number) return NULL;
    *number = ++vm->objects;
    return vm->last_object = number + 1;
}

void *order_allocate(void *context, void *block, size_t old_bytes, size_t bytes) {
    if (block && is_numbered(block)) { /* objects do not grow */
        if (bytes == 0) return ml_free((char *)block - NUMBER_BYTES), NULL;
        char *moved = ml_realloc((char *)block - NUMBER_BYTES, old_bytes + NUMBER_BYTES,
                                 bytes + NUMBER_BYTES);
        return moved ? moved + NUMBER_BYTES : NULL;
    }
    if (bytes == 0) return ml_free(block), NULL;
    if (block) return ml_realloc(block, old_bytes, bytes);
    return is_object(old_bytes) ? allocate_object(context, bytes) : ml_alloc(bytes);
}

/* Where the memory of a userdata begins within its block depends on how many user values it has. */
static void measure_userdata(lua_State *L) {
    ml_vm *vm = vm_of(L);
    for (int values = 0; values < 3; values++) {
        char *memory = lua_newuserdatauv(L, NUMBER_BYTES, values);
        vm->userdata_offset[values] = memory - (char *)vm->last_object;
        lua_pop(L, 1);
    }
}

/* The block of the object at `index`; not one of these for a C function without upvalues. */
static const void *block_of(lua_State *L, int index) {
    const char *at = lua_topointer(L, index);
    switch (lua_type(L, index)) {
    case LUA_TTHREAD: return at - LUA_EXTRASPACE;
    case LUA_TFUNCTION:
        if (!lua_iscfunction(L, index)) return at;
        if (!lua_getupvalue(L, index, 1)) return NULL;
        lua_pop(L, 1);
        return at;
    case LUA_TUSERDATA: {
        const ptrdiff_t *offset = vm_of(L)->userdata_offset;
        int values = 0;
        while (lua_getiuservalue(L, index, values + 1) != LUA_TNONE) lua_pop(L, 1), values++;
        lua_pop(L, 1);
        return at -
               (values < 2 ? offset[values] : offset[2] + (values - 2) * (offset[2] - offset[1]));
    }
    case LUA_TTABLE: return at;
    default: return NULL;
    }
}

/* ---- Keys and their order -------------------------------------------------------------------- */

typedef enum { INDEX, NUMBER, TEXT, BOOLEAN, OBJECT, ADDRESS } key_class;
typedef struct {
    uint64_t first;   /* an index, the first bytes of a text, a number of an object, ... */
    const char *text; /* which the key references */
    size_t length;
    uint32_t place; /* in the list that is sorted, from 1 */
    key_class class;
    bool whole; /* of NUMBER: an integer, else a double */
} key;

static uint64_t first_bytes(const char *text, size_t length) {
    uint64_t result = 0;
    for (size_t i = 0; i < 8; i++) result = result << 8 | (i < length ? (unsigned char)text[i] : 0);
    return result;
}

static key describe(lua_State *L, int index) {
    key k = {.class = ADDRESS};
    switch (lua_type(L, index)) {
    case LUA_TNUMBER:
        k.class = NUMBER;
        k.whole = lua_isinteger(L, index);
        if (k.whole) {
            lua_Integer value = lua_tointeger(L, index);
            if (value >= 1) k.class = INDEX;
            k.first = (uint64_t)value;
        } else {
            double value = lua_tonumber(L, index);
            memcpy(&k.first, &value, sizeof value);
        }
        break;
    case LUA_TSTRING:
        k.class = TEXT;
        k.text = lua_tolstring(L, index, &k.length);
        k.first = first_bytes(k.text, k.length);
        break;
    case LUA_TBOOLEAN:
        k.class = BOOLEAN;
        k.first = (uint64_t)lua_toboolean(L, index);
        break;
    default: {
        const void *block = block_of(L, lua_absindex(L, index));
        bool numbered = block && is_numbered(block);
        k.class = numbered ? OBJECT : ADDRESS; /* a function of C: the program's own order */
        k.first = numbered ? ((const uint64_t *)block)[-1] : (uintptr_t)lua_topointer(L, index);
    }
    }
    return k;
}

/* Exact for integers and doubles: it has 64 bits of mantissa, or more. */
static long double number_of(const key *k) {
    if (k->whole) return (long double)(int64_t)k->first;
    double value;
    memcpy(&value, &k->first, sizeof value);
    return (long double)value;
}

static int compare(const key *a, const key *b) {
    if (a->class != b->class) return a->class < b->class ? -1 : 1;
    if (a->class == NUMBER) {
        long double x = number_of(a), y = number_of(b);
        return (x > y) - (x < y);
    }
    if (a->first != b->first) return a->first < b->first ? -1 : 1;
    if (a->class != TEXT) return 0;
    int order = memcmp(a->text, b->text, a->length < b->length ? a->length : b->length);
    return order ? order : (a->length > b->length) - (a->length < b->length);
}

static int compare_keys(const void *left, const void *right) {
    return compare(left, right);
}

static bool in_run(lua_State *L, int index, lua_Integer run) {
    if (!run || !lua_isinteger(L, index)) return false;
    lua_Integer value = lua_tointeger(L, index);
    return value >= 1 && value <= run;
}

/* The keys are in a list or on the stack; push the list of them, in order, on the stack. */
static void push_sorted(lua_State *L, key *keys, size_t count, int list) {
    qsort(keys, count, sizeof *keys, compare_keys);
    lua_createtable(L, (int)count, 0);
    for (size_t i = 0; i < count; i++) {
        if (list)
            lua_rawgeti(L, list, keys[i].place);
        else
            lua_pushvalue(L, (int)keys[i].place);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
}

enum { FEW = 32 };

/* push_keys for up to FEW keys, which takes less memory; else false. */
static bool push_few_keys(lua_State *L, int index, lua_Integer run) {
    key keys[FEW];
    size_t count = 0;
    int top = lua_gettop(L);
    luaL_checkstack(L, FEW + 8, "keys");
    lua_pushnil(L);
    while (lua_next(L, index)) {
        lua_pop(L, 1);
        if (in_run(L, -1, run)) continue;
        if (count == FEW) return lua_settop(L, top), false;
        keys[count] = describe(L, -1);
        keys[count++].place = (uint32_t)lua_gettop(L);
        lua_pushvalue(L, -1); /* the loop pops this one */
    }
    push_sorted(L, keys, count, 0);
    if (count) lua_replace(L, top + 1);
    lua_settop(L, top + 1);
    return true;
}

/* Push the list of the keys of the table at `index`, in order, without the integers 1 to `run`. */
static void push_keys(lua_State *L, int index, lua_Integer run) {
    index = lua_absindex(L, index);
    if (push_few_keys(L, index, run)) return;
    lua_newtable(L);
    int list = lua_gettop(L);
    lua_Integer count = 0;
    lua_pushnil(L);
    while (lua_next(L, index)) {
        lua_pop(L, 1);
        if (in_run(L, -1, run)) continue;
        lua_pushvalue(L, -1);
        lua_rawseti(L, list, ++count);
    }
    key *keys = lua_newuserdatauv(L, (size_t)count * sizeof *keys, 0);
    for (lua_Integer i = 1; i <= count; i++) {
        lua_rawgeti(L, list, i);
        keys[i - 1] = describe(L, -1);
        keys[i - 1].place = (uint32_t)i;
        lua_pop(L, 1);
    }
    push_sorted(L, keys, (size_t)count, list);
    lua_replace(L, list);
    lua_settop(L, list);
}

void order_push_keys(lua_State *L, int index) {
    push_keys(L, index, 0);
}

/* ---- pairs ----------------------------------------------------------------------------------- */

/* Whether Lua's own order of the table at `index` is the fixed one. If not, *run is how many
 * integers from 1 on it begins with, one after another. */
static bool in_order(lua_State *L, int index, lua_Integer *run) {
    lua_Integer before = 0;
    *run = 0;
    lua_pushnil(L);
    while (lua_next(L, index)) {
        lua_pop(L, 1);
        if (!lua_isinteger(L, -1) || lua_tointeger(L, -1) <= before) {
            if (before == 0 && !lua_next(L, index)) return true; /* the only key */
            lua_settop(L, index);
            return false;
        }
        before = lua_tointeger(L, -1);
        if (before == *run + 1) *run = before;
    }
    return true;
}

/* A loop over a table visits the integers up to `run`, then the keys of a list. Push the next pair
 * after the place-th of them and give its place; at the end push nil and give 0. */
static lua_Integer push_next(lua_State *L, int table, int keys, lua_Integer run,
                             lua_Integer place) {
    for (int top = lua_gettop(L);; lua_settop(L, top)) {
        if (++place <= run)
            lua_pushinteger(L, place);
        else if (lua_rawgeti(L, keys, place - run) == LUA_TNIL)
            return 0;
        lua_pushvalue(L, -1);
        if (lua_rawget(L, table) != LUA_TNIL) return place;
    }
}

enum { TABLE = 1, KEYS, RUN, PLACE }; /* upvalues of visit */

static int visit(lua_State *L) {
    lua_Integer run = lua_tointeger(L, lua_upvalueindex(RUN));
    lua_Integer place = lua_isnoneornil(L, 2) ? 0 : lua_tointeger(L, lua_upvalueindex(PLACE));
    lua_settop(L, 0);
    place = push_next(L, lua_upvalueindex(TABLE), lua_upvalueindex(KEYS), run, place);
    if (!place) return 1;
    lua_pushinteger(L, place);
    lua_replace(L, lua_upvalueindex(PLACE));
    return 2;
}

static int after_metamethod(lua_State *L, int status, lua_KContext context) {
    (void)L, (void)status, (void)context;
    return 3;
}

/* Upvalue: Lua's own next. */
static int pairs(lua_State *L) {
    if (luaL_getmetafield(L, 1, "__pairs") != LUA_TNIL) {
        lua_pushvalue(L, 1);
        lua_callk(L, 1, 3, 0, after_metamethod);
        return 3;
    }
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    lua_Integer run;
    if (in_order(L, 1, &run)) {
        lua_settop(L, 1);
        lua_pushvalue(L, lua_upvalueindex(1));
    } else {
        lua_pushvalue(L, 1);
        push_keys(L, 1, run);
        lua_pushinteger(L, run);
        lua_pushinteger(L, 0);
        lua_pushcclosure(L, visit, PLACE);
    }
    lua_insert(L, 1);
    lua_pushnil(L);
    return 3;
}

/* ---- next ------------------------------------------------------------------------------------ */

/* The first key of the table at 1, and its value. Finding one key takes no sorting. */
static int first(lua_State *L) {
    lua_pushinteger(L, 1);
    if (lua_rawgeti(L, 1, 1) != LUA_TNIL) return 2;
    lua_settop(L, 1);
    lua_pushnil(L); /* the first so far */
    key best = {0};
    lua_pushnil(L);
    while (lua_next(L, 1)) {
        lua_pop(L, 1);
        key k = describe(L, -1);
        if (!lua_isnil(L, 2) && compare(&k, &best) > 0) continue;
        best = k;
        lua_pushvalue(L, -1);
        lua_replace(L, 2);
    }
    if (lua_isnil(L, 2)) return 1;
    lua_pushvalue(L, 2);
    lua_rawget(L, 1);
    return 2;
}

enum { LOOPS = 1 }; /* upvalue of next */
/* A loop is a list of keys; beside them it has the place of the last one visited, and its run. */
enum { LOOP_PLACE = 0, LOOP_RUN = -1 };

static lua_Integer loop_field(lua_State *L, int loop, int field) {
    lua_rawgeti(L, loop, field);
    lua_Integer value = lua_tointeger(L, -1);
    lua_pop(L, 1);
    return value;
}

/* The place of the key at 2 in a loop, or of the last before it. */
static lua_Integer place_of(lua_State *L, int loop, lua_Integer run) {
    lua_Integer place = loop_field(L, loop, LOOP_PLACE);
    lua_rawgeti(L, loop, place - run);
    bool same = place > run && lua_rawequal(L, -1, 2);
    lua_pop(L, 1);
    if (same) return place;
    key wanted = describe(L, 2);
    if (wanted.class == INDEX && wanted.first <= (uint64_t)run) return (lua_Integer)wanted.first;
    lua_Integer low = 0, high = (lua_Integer)lua_rawlen(L, loop);
    while (low < high) {
        lua_Integer middle = low + (high - low) / 2;
        lua_rawgeti(L, loop, middle + 1);
        key k = describe(L, -1);
        lua_pop(L, 1);
        if (compare(&k, &wanted) <= 0)
            low = middle + 1;
        else
            high = middle;
    }
    return run + low;
}

static void set_loop(lua_State *L) {
    lua_pushvalue(L, 1);
    lua_insert(L, -2);
    lua_rawset(L, lua_upvalueindex(LOOPS));
}

/* Push the loop over the table at 1 that is under way, or one that begins: the value `true` where
 * Lua's own order does. Loops are found by their table, by a weak reference. */
static bool push_loop(lua_State *L) {
    lua_pushvalue(L, 1);
    int type = lua_rawget(L, lua_upvalueindex(LOOPS));
    if (type != LUA_TNIL) return type == LUA_TTABLE;
    lua_settop(L, 2);
    lua_pushvalue(L, 1);
    lua_Integer run;
    bool own = in_order(L, 3, &run);
    lua_settop(L, 2);
    if (own) {
        lua_pushboolean(L, true);
    } else {
        push_keys(L, 1, run);
        lua_pushinteger(L, run);
        lua_rawseti(L, 3, LOOP_RUN);
    }
    lua_pushvalue(L, 3);
    set_loop(L);
    return !own;
}

static int end_loop(lua_State *L) {
    lua_pushnil(L);
    set_loop(L);
    lua_pushnil(L);
    return 1;
}

static int next(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 2);
    if (lua_isnil(L, 2)) {
        lua_pushnil(L);
        set_loop(L);
        return first(L);
    }
    int whole;
    lua_Integer index = lua_tointegerx(L, 2, &whole); /* also of 1.0 and "1" */
    if (whole && lua_type(L, 2) == LUA_TNUMBER) {
        lua_pushinteger(L, index);
        lua_replace(L, 2);
        if (index >= 1 && index < LUA_MAXINTEGER) {
            lua_pushinteger(L, index + 1);
            if (lua_rawgeti(L, 1, index + 1) != LUA_TNIL) return 2;
            lua_settop(L, 2);
        }
    }
    if (!push_loop(L)) {
        lua_settop(L, 2);
        return lua_next(L, 1) ? 2 : end_loop(L);
    }
    lua_Integer run = loop_field(L, 3, LOOP_RUN);
    lua_Integer place = push_next(L, 1, 3, run, place_of(L, 3, run));
    if (!place) return end_loop(L);
    lua_pushinteger(L, place);
    lua_rawseti(L, 3, LOOP_PLACE);
    return 2;
}

/* ---- table.sort ------------------------------------------------------------------------------ */

/* Whether the value at the top comes before the one below it; pops neither. Index 2: the order. */
static bool comes_before(lua_State *L) {
    if (lua_isnil(L, 2)) return lua_compare(L, -1, -2, LUA_OPLT);
    lua_pushvalue(L, 2);
    lua_pushvalue(L, -2);
    lua_pushvalue(L, -4);
    lua_call(L, 2, 1);
    bool before = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return before;
}

/* Merge the sorted runs [low, middle) and [middle, high) of the list `from` into the list `to`. */
static void merge(lua_State *L, int from, int to, lua_Integer low, lua_Integer middle,
                  lua_Integer high) {
    lua_Integer left = low, right = middle;
    for (lua_Integer at = low; at < high; at++) {
        bool take_right = left == middle;
        if (left < middle && right < high) {
            lua_rawgeti(L, from, left);
            lua_rawgeti(L, from, right);
            take_right = comes_before(L);
            lua_pop(L, 2);
        }
        lua_rawgeti(L, from, take_right ? right++ : left++);
        lua_rawseti(L, to, at);
    }
}

static int sort(lua_State *L) {
    lua_Integer count = luaL_len(L, 1);
    if (!lua_isnoneornil(L, 2)) luaL_checktype(L, 2, LUA_TFUNCTION);
    luaL_argcheck(L, count < INT32_MAX, 1, "array too big");
    lua_settop(L, 2);
    if (count < 2) return 0;
    lua_createtable(L, (int)count, 0);
    lua_createtable(L, (int)count, 0);
    for (lua_Integer i = 1; i <= count; i++) {
        lua_geti(L, 1, i);
        lua_rawseti(L, 3, i);
    }
    for (lua_Integer width = 1; width < count; width *= 2) {
        for (lua_Integer low = 1; low <= count; low += 2 * width) {
            lua_Integer end = count + 1;
            lua_Integer middle = low + width < end ? low + width : end;
            merge(L, 3, 4, low, middle, middle + width < end ? middle + width : end);
        }
        lua_insert(L, 3); /* the merged list is the next to be read */
    }
    for (lua_Integer i = 1; i <= count; i++) {
        lua_rawgeti(L, 3, i);
        lua_seti(L, 1, i);
    }
    return 0;
}

void order_register(lua_State *L) {
    measure_userdata(L);
    lua_pushglobaltable(L);
    lua_getfield(L, -1, "next");
    lua_pushcclosure(L, pairs, 1);
    lua_setfield(L, -2, "pairs");
    lua_newtable(L);
    lua_createtable(L, 0, 1);
    lua_pushliteral(L, "k");
    lua_setfield(L, -2, "__mode");
    lua_setmetatable(L, -2);
    lua_pushcclosure(L, next, 1);
    lua_setfield(L, -2, "next");
    lua_getfield(L, -1, "table");
    vm_set_function(L, "sort", sort);
    lua_pop(L, 2);
}
