/* The placement of a step's sequences on groups of ranks, for stdlib/dynamic.lua. */
#include "runtime/data/placement.h"

#include <string.h>

#include "runtime/ops/attention/by_sequence.h"
#include "vm/vm.h"

typedef struct {
    ml_placement_costs costs;
    ml_arena *arena; /* of the plan; reset for each */
    ml_step_placement plan;
    int64_t rank, mine; /* this rank; its microbatches */
} placement;

static const char *const placement_class = "placement";

static placement *check_placement(lua_State *L) {
    return luaL_checkudata(L, 1, placement_class);
}

static int placement_gc(lua_State *L) {
    placement *p = check_placement(L);
    if (p->arena) ml_arena_free(p->arena);
    p->arena = NULL;
    return 0;
}

static int64_t integer_of(lua_State *L, const char *name) {
    lua_getfield(L, -1, name);
    int64_t value = vm_integer(L, -1, name);
    lua_pop(L, 1);
    return value;
}

static double number_of(lua_State *L, const char *name) {
    lua_getfield(L, -1, name);
    double value = luaL_checknumber(L, -1);
    lua_pop(L, 1);
    return value;
}

/* Programs of one row, longer and longer, then of more and more rows as long as the last of those.
 */
static void check_programs(lua_State *L, ml_group_cost *group) {
    const int all = group->count;
    for (group->count = 0; group->count < all; group->count++)
        if (group->row[group->count].rows != 1) break;
    group->several = all - group->count;
    for (int i = 0; i < all; i++) {
        const ml_row_cost *row = &group->row[i], *before = i > 0 ? row - 1 : NULL;
        const bool alone = i < group->count;
        if (i == 0  ? alone && row->tokens > 0
            : alone ? row->tokens > before->tokens
                    : row->rows > before->rows && row->tokens == before->tokens)
            continue;
        vm_fail(L, NULL,
                "program %d of a group's is not longer, or of more rows, than those before", i + 1);
    }
}

/* The group at the top of the stack:
 * {ranks =, rows = {{tokens =, rows =, seconds =, attention =}, ...}}. */
static void read_group(lua_State *L, ml_group_cost *group) {
    group->ranks = integer_of(L, "ranks");
    lua_getfield(L, -1, "rows");
    group->count = (int)vm_table_length(L, lua_gettop(L));
    if (group->count < 1 || group->count > ML_ROW_SIZES)
        vm_fail(L, NULL, "a group has 1 to %d programs", ML_ROW_SIZES);
    for (int i = 0; i < group->count; i++) {
        lua_rawgeti(L, -1, i + 1);
        group->row[i] = (ml_row_cost){integer_of(L, "tokens"), number_of(L, "seconds"),
                                      number_of(L, "attention"), (int)integer_of(L, "rows")};
        lua_pop(L, 1);
    }
    check_programs(L, group);
    lua_pop(L, 1);
}

static int core_placement(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    placement *p = lua_newuserdatauv(L, sizeof *p, 0);
    *p = (placement){0};
    luaL_setmetatable(L, placement_class);
    p->arena = ml_arena_new();
    if (!p->arena) vm_fail(L, NULL, "not enough host memory for a placement");
    lua_pushvalue(L, 1);
    p->costs.ranks = integer_of(L, "ranks");
    p->costs.most = integer_of(L, "most");
    p->rank = integer_of(L, "rank");
    p->costs.batch = (int)integer_of(L, "batch");
    p->costs.slots = (int)integer_of(L, "slots");
    lua_getfield(L, -1, "together");
    p->costs.together = lua_toboolean(L, -1);
    lua_pop(L, 1);
    lua_getfield(L, -1, "groups");
    p->costs.count = (int)vm_table_length(L, lua_gettop(L));
    if (p->costs.count < 1 || p->costs.count > ML_GROUP_SIZES)
        vm_fail(L, NULL, "a placement has 1 to %d sizes of groups", ML_GROUP_SIZES);
    for (int i = 0; i < p->costs.count; i++) {
        lua_rawgeti(L, -1, i + 1);
        read_group(L, &p->costs.group[i]);
        lua_pop(L, 1);
    }
    lua_settop(L, 2);
    return 1;
}

typedef struct {
    placement *p;
    const vm_host *documents;
} make_call;

static void make(void *argument) {
    make_call *call = argument;
    placement *p = call->p;
    ml_arena_reset(p->arena);
    ml_placement_make(p->arena, &p->costs, call->documents->data, call->documents->dims[0],
                      call->documents->dims[1], &p->plan);
}

static bool is_mine(const placement *p, const ml_microbatch *m) {
    return p->costs.together ||
           (p->rank >= m->rank && p->rank < m->rank + p->costs.group[m->group].ranks);
}

static const vm_host *check_rows(lua_State *L, int at) {
    const vm_host *host = vm_to_host(L, at);
    if (!host || host->dtype != ML_I32 || host->rank != 2)
        vm_fail(L, NULL, "a placement is of two-dimensional i32 host arrays");
    return host;
}

static int placement_plan(lua_State *L) {
    make_call call = {check_placement(L), check_rows(L, 2)};
    placement *p = call.p;
    int64_t busiest_rank = 0;
    if (!lua_isnoneornil(L, 3)) p->rank = vm_integer(L, 3, "the rank");
    double begin = vm_profile_clock(L), busiest = 0, sum = 0;
    vm_protect(L, make, &call);
    vm_profile_span(L, "placement", begin);
    lua_newtable(L);
    lua_Integer count = 0;
    for (uint32_t i = 0; i < p->plan.microbatches.count; i++) {
        const ml_microbatch *m = &p->plan.microbatches.at[i];
        if (!is_mine(p, m)) continue;
        lua_createtable(L, 0, 3);
        vm_set_integer(L, "group", m->group + 1);
        vm_set_integer(L, "row", m->row + 1);
        vm_set_integer(L, "at", i);
        lua_rawseti(L, -2, ++count);
    }
    for (int64_t r = 0; r < p->costs.ranks; r++) {
        sum += p->plan.seconds[r];
        if (p->plan.seconds[r] > busiest) busiest = p->plan.seconds[r], busiest_rank = r;
    }
    lua_createtable(L, 0, 7);
    vm_set_integer(L, "busiest_rank", busiest_rank);
    vm_set_number(L, "busiest", busiest);
    vm_set_number(L, "mean", sum / (double)p->costs.ranks);
    vm_set_integer(L, "tokens", p->plan.tokens);
    vm_set_integer(L, "computed", p->plan.computed);
    vm_set_integer(L, "microbatches", p->plan.microbatches.count);
    vm_set_integer(L, "slots", p->plan.slots);
    return 2;
}

/* The four arrays of a table at `at`: so many rows. */
static ml_token_rows rows_of(lua_State *L, int at, int64_t *rows) {
    static const char *const names[] = {"tokens", "targets", "documents", "positions"};
    int32_t *data[4];
    int64_t length = 0;
    for (int i = 0; i < 4; i++) {
        lua_getfield(L, at, names[i]);
        const vm_host *host = check_rows(L, -1);
        data[i] = host->data;
        if (i > 0 && (host->dims[0] != *rows || host->dims[1] != length))
            vm_fail(L, NULL, "rows differ in length");
        *rows = host->dims[0], length = host->dims[1];
        lua_pop(L, 1);
    }
    return (ml_token_rows){data[0], data[1], data[2], data[3], length};
}

static int placement_fill(lua_State *L) {
    placement *p = check_placement(L);
    int64_t at = vm_integer(L, 2, "the microbatch"), windows, rows;
    ml_token_rows from = rows_of(L, 3, &windows), to = rows_of(L, 4, &rows);
    const ml_microbatch *m = NULL; /* at < 0: rows of filling */
    if (at >= 0) {
        if (at >= p->plan.microbatches.count) vm_fail(L, NULL, "there is no such microbatch");
        m = &p->plan.microbatches.at[at];
    }
    const int64_t own = m ? ml_placement_rows(&p->costs, m->group, m->row) : 0;
    const int64_t length =
        m ? p->costs.group[m->group].ranks * p->costs.group[m->group].row[m->row].tokens : 0;
    const bool larger = lua_toboolean(L, 5) && own <= rows && length <= to.length;
    if (m && (p->plan.tokens != windows * from.length ||
              (!larger && (own != rows || length != to.length))))
        vm_fail(L, NULL, "the rows are not those of the placement");
    if (m) ml_placement_fill(&p->plan, m, &from, own, &to);
    const ml_token_rows rest = {to.tokens + own * to.length, to.targets + own * to.length,
                                to.documents + own * to.length, to.positions + own * to.length,
                                to.length};
    ml_placement_fill(&p->plan, NULL, &from, rows - own, &rest);
    return 0;
}

static int placement_window(lua_State *L) {
    placement *p = check_placement(L);
    int64_t row = vm_integer(L, 2, "the row"), all, rows;
    ml_token_rows from = rows_of(L, 3, &all), to = rows_of(L, 4, &rows);
    const int64_t length = to.length;
    if (row < 0 || length != from.length || row >= all) vm_fail(L, NULL, "there is no such row");
    if (row + rows > all) ml_placement_fill(&p->plan, NULL, &from, rows, &to);
    size_t bytes = sizeof(int32_t) * (size_t)((row + rows > all ? all - row : rows) * length);
    memcpy(to.tokens, from.tokens + row * length, bytes);
    memcpy(to.targets, from.targets + row * length, bytes);
    memcpy(to.documents, from.documents + row * length, bytes);
    memcpy(to.positions, from.positions + row * length, bytes);
    return 0;
}

typedef struct {
    const ml_graph *graph;
    ml_ref *roots, *others;
    int count;
    ml_axis batch, seq;
    ml_ref documents;
    ml_apart *apart;
    int apart_count;
    ml_across_sequences found;
} check_call;

/* The list of tensors at an index. Pushes what holds it. */
static ml_ref *read_roots(lua_State *L, int at, int *count) {
    luaL_checktype(L, at, LUA_TTABLE);
    *count = (int)vm_table_length(L, at);
    ml_ref *roots = lua_newuserdatauv(L, sizeof *roots * (size_t)(*count + 1), 0);
    for (int i = 0; i < *count; i++) {
        lua_rawgeti(L, at, i + 1);
        roots[i] = vm_tensor(L, -1, "a root");
        lua_pop(L, 1);
    }
    return roots;
}

/* Likewise the pairs of node counts. */
static void read_apart(lua_State *L, int at, check_call *c) {
    luaL_checktype(L, at, LUA_TTABLE);
    c->apart_count = (int)vm_table_length(L, at) / 2;
    c->apart = lua_newuserdatauv(L, sizeof *c->apart * (size_t)(c->apart_count + 1), 0);
    for (int i = 0; i < c->apart_count; i++) {
        lua_rawgeti(L, at, 2 * i + 1);
        lua_rawgeti(L, at, 2 * i + 2);
        c->apart[i] = (ml_apart){(ml_ref)lua_tointeger(L, -2), (ml_ref)lua_tointeger(L, -1)};
        lua_pop(L, 2);
    }
}

static int fail_across(lua_State *L, const check_call *c) {
    if (!c->found.node) return 0;
    return vm_fail_with(L, &c->found.node, 1,
                        "a number for cp has every rank split all sequences alike",
                        "cp=\"dynamic\" places sequences anywhere, which \"%s\" does not allow: %s",
                        ml_ops[ml_graph_node(c->graph, c->found.node)->op].name, c->found.why);
}

static void find_across(void *argument) {
    check_call *c = argument;
    c->found = ml_find_across_sequences(c->graph, c->roots, c->count, c->batch, c->seq,
                                        c->documents, c->apart, c->apart_count);
}

/* core.check_by_sequence(roots, batch, seq, documents, apart): raise at the line that makes a loss
 * more than a sum over sequences. */
static int core_check_by_sequence(lua_State *L) {
    lua_settop(L, 5);
    check_call c = {.graph = vm_of(L)->graph};
    c.roots = read_roots(L, 1, &c.count);
    c.batch = vm_axis_id(L, 2, "the batch");
    c.seq = vm_axis_id(L, 3, "the sequences' axis");
    c.documents = vm_tensor(L, 4, "the documents");
    read_apart(L, 5, &c);
    vm_protect(L, find_across, &c);
    return fail_across(L, &c);
}

static void find_by_length(void *argument) {
    check_call *c = argument;
    c->found.node =
        ml_find_by_length(c->graph, c->roots, c->others, c->count, c->apart, c->apart_count);
    c->found.why = "it computes with the length or number of rows, which varies";
}

/* core.check_by_length(roots, others, apart): raise at the line that computes otherwise in another
 * trace, whose rows are of another length. */
static int core_check_by_length(lua_State *L) {
    int others;
    lua_settop(L, 3);
    check_call c = {.graph = vm_of(L)->graph};
    c.roots = read_roots(L, 1, &c.count);
    c.others = read_roots(L, 2, &others);
    if (others != c.count) vm_fail(L, NULL, "two traces of a loss differ in their results");
    read_apart(L, 3, &c);
    vm_protect(L, find_by_length, &c);
    return fail_across(L, &c);
}

static int core_count_sequences(lua_State *L) {
    const vm_host *host = check_rows(L, 1);
    int64_t count = 0;
    for (int64_t row = 0, at = 0; row < host->dims[0]; row++)
        for (const int64_t end = at + host->dims[1]; at < end; count++)
            at = ml_sequence_end(host->data, at, end);
    lua_pushinteger(L, count);
    return 1;
}

static int core_node_count(lua_State *L) {
    lua_pushinteger(L, ml_graph_count(vm_of(L)->graph));
    return 1;
}

static const vm_entry functions[] = {
    {"check_by_sequence", core_check_by_sequence,
     "roots: Tensor[], batch: Axis, seq: Axis, documents: Tensor, apart: integer[]",
     "raise where roots are not sums over the sequences of a batch, each by itself; apart: pairs "
     "of "
     "node counts, between which nodes were made that keep documents apart"},
    {"check_by_length", core_check_by_length, "roots: Tensor[], others: Tensor[], apart: integer[]",
     "raise where roots are computed otherwise than others, the same of rows of another length"},
    {"count_sequences", core_count_sequences, "documents: Host -> integer",
     "how many sequences rows of numbers of documents have"},
    {"node_count", core_node_count, "-> integer", "how many nodes the script's graph has"},
    {"placement", core_placement,
     "costs: {ranks: integer, most: integer, rank: integer, batch: integer, slots: integer, "
     "together: boolean, groups: table} -> Placement",
     "plans which ranks compute which sequences: groups = {{ranks = 1, rows = {{tokens = 1024, "
     "rows = 1, seconds = 0.1, attention = 0.02}, ...}}, ...}, ascending, those of several rows "
     "last, as long as the longest of one; most: tokens of a sequence "
     "for each rank of its group (0: a row's); batch: rows of a microbatch; slots: each rank has "
     "one microbatch in each slot, whose number is a multiple of this (0: none); together: all "
     "groups run each microbatch"},
    {0}};
static const vm_entry methods[] = {
    {"plan", placement_plan, "documents: Host -> table[], table",
     "this rank's microbatches of the step whose documents these are: the positions of their group "
     "and row in the costs, and `at` for fill; and the seconds of the busiest rank and the mean, "
     "tokens, and those with what fills rows up"},
    {"fill", placement_fill,
     "at: integer, from: table<string, Host>, to: table<string, Host>, larger?: boolean",
     "write a microbatch's rows: tokens, targets, documents and positions; `larger`: `to` may have "
     "more rows, and longer ones, where filling follows; at below 0: filling alone"},
    {"window", placement_window, "row: integer, from: table<string, Host>, to: table<string, Host>",
     "copy rows of a step as they are, as many as a microbatch has"},
    {0}};

void vm_placement_register(lua_State *L) {
    vm_register(L, functions);
    vm_new_class(L, placement_class, methods, NULL, placement_gc);
    lua_pop(L, 1);
}
