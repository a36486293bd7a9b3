/* What the ranks of a layout send one another, for `mlua check`. */
#include "vm/check/traffic.h"

#include <math.h>
#include <string.h>

#include "runtime/passes/passes.h"

static const ml_origin *move_origin(const vm_move *m) {
    return ml_graph_origin(m->plan->graph, m->step->node);
}

static bool same_text(const char *a, const char *b) {
    return a == b || (a && b && strcmp(a, b) == 0);
}

/* The same line moves tensors of the same type, maybe in other modules. */
static bool alike(const vm_move *a, const vm_move *b) {
    const ml_collective_step *x = a->step->collective, *y = b->step->collective;
    const ml_origin *from = move_origin(a), *other = move_origin(b);
    return x->kind == y->kind && x->mesh_axis == y->mesh_axis && a->bytes == b->bytes &&
           from->line == other->line && same_text(from->file, other->file) &&
           ml_type_equal(ml_graph_type(a->plan->graph, a->step->node),
                         ml_graph_type(b->plan->graph, b->step->node));
}

static void add_move(vm_traffic *t, const vm_move *m) {
    for (int i = 0; i < t->count; i++)
        if (alike(&t->largest[i], m)) {
            t->largest[i].count += m->count;
            t->largest[i].modules |=
                !same_text(move_origin(&t->largest[i])->module, move_origin(m)->module);
            return;
        }
    if (t->count == VM_MOVES && m->bytes <= t->largest[VM_MOVES - 1].bytes) return;
    int at = t->count < VM_MOVES ? t->count++ : VM_MOVES - 1;
    for (; at > 0 && t->largest[at - 1].bytes < m->bytes; at--) t->largest[at] = t->largest[at - 1];
    t->largest[at] = *m;
}

/* No further than 2^62: a message of each of many microbatches may be large. */
static int64_t add_bytes(int64_t sum, int64_t bytes, int64_t times) {
    const int64_t most = (int64_t)1 << 62;
    if (bytes > 0 && times > (most - sum) / bytes) return most;
    return sum + bytes * times;
}

static void add_plan(vm_traffic *t, const ml_plan *plan, int64_t times) {
    t->layout = plan->layout;
    if (plan->layout == NULL) return;
    ml_division_add(&t->division, &plan->roots.division);
    for (int i = 0; i < plan->layout->count; i++)
        for (int k = 0; k < ML_COLLECTIVE_KINDS; k++) {
            t->total[i][k].count += plan->traffic[i][k].count * times;
            t->total[i][k].bytes =
                add_bytes(t->total[i][k].bytes, plan->traffic[i][k].bytes, times);
        }
    for (int p = 0; p < plan->part_count; p++) {
        const ml_schedule *s = plan->parts[p]->schedule;
        for (uint32_t i = 0; i < s->steps.count; i++) {
            const ml_step *step = &s->steps.at[i];
            if (step->kind != ML_STEP_COLLECTIVE) continue;
            add_move(t, &(vm_move){plan->parts[p], step, (int64_t)ml_step_sent(step->collective),
                                   times, false});
        }
    }
}

/* That of a plan with few layers becomes that of all. */
static void extend(vm_traffic *t, const vm_traffic *fewer, double beyond) {
    for (int i = 0; i < t->layout->count; i++)
        for (int k = 0; k < ML_COLLECTIVE_KINDS; k++) {
            ml_traffic *all = &t->total[i][k];
            const ml_traffic *part = &fewer->total[i][k];
            const double bytes = (double)(all->bytes - part->bytes) * beyond;
            all->count += llround((double)(all->count - part->count) * beyond);
            all->bytes += (int64_t)fmin(bytes, (double)(((int64_t)1 << 62) - all->bytes));
        }
    for (int i = 0; i < t->count; i++) {
        int64_t count = 0;
        for (int j = 0; j < fewer->count; j++)
            if (alike(&t->largest[i], &fewer->largest[j])) count += fewer->largest[j].count;
        t->largest[i].count += llround((double)(t->largest[i].count - count) * beyond);
    }
}

void traffic_add(vm_traffic *t, const ml_plan *plan, int64_t times) {
    if (plan->fewer == NULL || plan->layout == NULL) {
        add_plan(t, plan, times);
        return;
    }
    vm_traffic all = {0}, fewer = {0};
    add_plan(&all, plan, times);
    add_plan(&fewer, plan->fewer, times);
    extend(&all, &fewer, plan->beyond);
    t->layout = plan->layout;
    ml_division_add(&t->division, &plan->roots.division);
    for (int i = 0; i < t->layout->count; i++)
        for (int k = 0; k < ML_COLLECTIVE_KINDS; k++) {
            t->total[i][k].count += all.total[i][k].count;
            t->total[i][k].bytes = add_bytes(t->total[i][k].bytes, all.total[i][k].bytes, 1);
        }
    for (int i = 0; i < all.count; i++) add_move(t, &all.largest[i]);
}

/* But for the axes of groups, which are last. */
static void push_mesh(lua_State *L, const ml_layout *layout) {
    int count = layout->count - ml_session_groups(vm_of(L)->session)->count;
    luaL_Buffer text;
    luaL_buffinit(L, &text);
    for (int i = 0; i < count; i++) {
        char item[80];
        snprintf(item, sizeof item, "%s%s=%lld", i ? " " : "", layout->axis[i].name,
                 (long long)layout->axis[i].size);
        luaL_addstring(&text, item);
    }
    luaL_pushresult(&text);
}

void traffic_print(lua_State *L, const vm_traffic *t, const char *when) {
    const ml_layout *layout = t->layout;
    char size[64];
    if (layout == NULL) return;
    printf("collectives     of one rank, %s\n", when);
    for (int i = 0; i < layout->count; i++)
        for (int k = 0; k < ML_COLLECTIVE_KINDS; k++) {
            if (!t->total[i][k].count) continue;
            vm_format_bytes(size, sizeof size, t->total[i][k].bytes);
            printf("  %-6s %-14s %6lld  %10s sent\n", layout->axis[i].name, ml_collectives[k].label,
                   (long long)t->total[i][k].count, size);
        }
    if (t->count) printf("largest redistributions\n");
    for (int i = 0; i < t->count; i++) {
        const vm_move *m = &t->largest[i];
        const ml_origin *origin = move_origin(m);
        vm_format_bytes(size, sizeof size, m->bytes);
        vm_push_type(L, m->plan->graph, ml_graph_type(m->plan->graph, m->step->node));
        printf("  %10s x %-4lld %s over %s to %s", size, (long long)m->count,
               ml_collectives[m->step->collective->kind].name,
               layout->axis[m->step->collective->mesh_axis].name, lua_tostring(L, -1));
        lua_pop(L, 1);
        if (origin->module && origin->module[0])
            printf("  in %s%s", origin->module, m->modules ? " and others" : "");
        if (origin->file) printf("  %s:%d", origin->file, origin->line);
        printf("\n");
    }
}

bool traffic_push_undivided(lua_State *L, const ml_layout *layout, const ml_division *division,
                            int i) {
    static const double MOST = 0.5, ALL = 0.9995;
    const ml_undivided *whole = &division->over[i];
    const ml_mesh_axis *mesh = &layout->axis[i];
    double share = ml_layout_undivided(layout, division, i);
    char count[64];
    const ml_groups *groups = ml_session_groups(vm_of(L)->session);
    if (share < MOST || (groups->count > 0 && groups->of == i)) return false;
    luaL_Buffer text;
    luaL_buffinit(L, &text);
    snprintf(count, sizeof count, "its %lld ranks ", (long long)mesh->size);
    luaL_addstring(&text, count);
    snprintf(count, sizeof count, "do %.1f%% of the work alike", 100 * share);
    luaL_addstring(&text, share >= ALL ? "all do the same work" : count);
    if (!whole->axis && share >= ALL) {
        luaL_addstring(&text, ": what is computed has no axis that the layout's acts list for it");
        return luaL_pushresult(&text), true;
    }
    if (whole->origin && whole->origin->file) {
        snprintf(count, sizeof count, ":%d", whole->origin->line);
        luaL_addstring(&text, ", most of it at ");
        luaL_addstring(&text, whole->origin->file);
        luaL_addstring(&text, count);
    }
    if (!whole->axis) {
        luaL_addstring(&text, ", which has no axis that the layout's acts list for it");
    } else if (whole->size % mesh->size != 0) {
        bool few = whole->size < mesh->size;
        luaL_addstring(&text, ": ");
        luaL_addstring(&text, ml_axis_name(vm_of(L)->graph, whole->axis));
        snprintf(count, sizeof count,
                 few ? "=%lld is fewer than %lld" : "=%lld does not divide by %lld",
                 (long long)whole->size, (long long)mesh->size);
        luaL_addstring(&text, count);
    }
    luaL_pushresult(&text);
    return true;
}

static void add_filled(vm_traffic *t, const vm_filled *filled) {
    for (int i = 0; i < t->filled_count; i++)
        if (memcmp(&t->filled[i], filled, sizeof *filled) == 0) return;
    if (t->filled_count < VM_FILLED) t->filled[t->filled_count++] = *filled;
}

void traffic_add_placed(vm_traffic *t, const ml_layout *layout, const ml_type *type,
                        const ml_placements *at) {
    ml_type local = ml_layout_local(layout, type, at);
    for (int i = 0; i < layout->count; i++) {
        int k = at->over[i].axis;
        if (at->over[i].kind != ML_SPLIT || !ml_layout_uneven(layout, type, at, k)) continue;
        vm_filled filled;
        memset(&filled, 0, sizeof filled); /* it is compared */
        filled.axis = type->axis[k];
        filled.mesh = i;
        filled.size = type->size[k];
        filled.part = local.size[k];
        add_filled(t, &filled);
    }
}

void traffic_print_ranks(lua_State *L, const vm_traffic *t) {
    if (t->layout == NULL) return;
    push_mesh(L, t->layout);
    printf("ranks           %lld: %s; states, memory and work below are of each\n",
           (long long)ml_layout_ranks(t->layout), lua_tostring(L, -1));
    lua_pop(L, 1);
    for (int i = 0; i < t->layout->count; i++)
        if (traffic_push_undivided(L, t->layout, &t->division, i)) {
            printf("  %-6s %s\n", t->layout->axis[i].name, lua_tostring(L, -1));
            lua_pop(L, 1);
        }
    for (int i = 0; i < t->filled_count; i++) {
        const vm_filled *f = &t->filled[i];
        printf("  %-6s does not divide %s=%lld: %lld of each rank, filled up at the end\n",
               t->layout->axis[f->mesh].name, ml_axis_name(vm_of(L)->graph, f->axis),
               (long long)f->size, (long long)f->part);
    }
}

static json_t *moves_json(lua_State *L, const vm_traffic *t) {
    json_t *list = json_array();
    for (int i = 0; i < t->count; i++) {
        const vm_move *m = &t->largest[i];
        const ml_origin *origin = move_origin(m);
        vm_push_type(L, m->plan->graph, ml_graph_type(m->plan->graph, m->step->node));
        json_t *item = json_pack(
            "{s:s, s:s, s:s, s:I, s:I}", "kind", ml_collectives[m->step->collective->kind].name,
            "mesh_axis", t->layout->axis[m->step->collective->mesh_axis].name, "type",
            lua_tostring(L, -1), "bytes", (json_int_t)m->bytes, "count", (json_int_t)m->count);
        lua_pop(L, 1);
        if (origin->file) {
            json_object_set_new(item, "file", json_string(origin->file));
            json_object_set_new(item, "line", json_integer(origin->line));
        }
        json_array_append_new(list, item);
    }
    return list;
}

void traffic_json(lua_State *L, const vm_traffic *t, json_t *object) {
    if (t->layout == NULL) return;
    json_t *mesh = json_object(), *collectives = json_object();
    for (int i = 0; i < t->layout->count; i++) {
        json_t *axis = json_object();
        json_object_set_new(mesh, t->layout->axis[i].name, json_integer(t->layout->axis[i].size));
        for (int k = 0; k < ML_COLLECTIVE_KINDS; k++)
            if (t->total[i][k].count)
                json_object_set_new(axis, ml_collectives[k].label,
                                    json_pack("{s:I, s:I}", "count",
                                              (json_int_t)t->total[i][k].count, "bytes",
                                              (json_int_t)t->total[i][k].bytes));
        json_object_set_new(collectives, t->layout->axis[i].name, axis);
    }
    json_t *same = json_object();
    for (int i = 0; i < t->layout->count; i++)
        if (t->layout->axis[i].size > 1)
            json_object_set_new(same, t->layout->axis[i].name,
                                json_real(ml_layout_undivided(t->layout, &t->division, i)));
    json_object_set_new(object, "same_work", same);
    json_t *filled = json_array();
    for (int i = 0; i < t->filled_count; i++)
        json_array_append_new(filled, json_pack("{s:s, s:s, s:I, s:I}", "axis",
                                                ml_axis_name(vm_of(L)->graph, t->filled[i].axis),
                                                "mesh", t->layout->axis[t->filled[i].mesh].name,
                                                "size", (json_int_t)t->filled[i].size, "part",
                                                (json_int_t)t->filled[i].part));
    json_object_set_new(object, "filled", filled);
    json_object_set_new(object, "ranks", json_integer(ml_layout_ranks(t->layout)));
    json_object_set_new(object, "mesh", mesh);
    json_object_set_new(object, "collectives", collectives);
    json_object_set_new(object, "redistributions", moves_json(L, t));
}

/* ---- Types ----------------------------------------------------------------------------------- */

typedef struct {
    const ml_vm *vm;
    const ml_layout *layout;
    const ml_roots *asked;
    ml_arena *arena;
    ml_graph *graph, *local;
    ml_type type;     /* of the tensor that was reported last */
    ml_placements at; /* and its place */
} types_call;

void traffic_print_node(const ml_graph *g, ml_ref n, const char *type) {
    const ml_node *node = ml_graph_node(g, n);
    const ml_origin *origin = ml_graph_origin(g, n);
    printf("  %-12s %s", ml_ops[node->op].name, type);
    if (node->op == ML_OP_STATE) {
        const char *state = ml_graph_state(g, (uint32_t)ml_graph_args(g, n)[0])->name;
        printf("  state %s", state ? state : "?");
    }
    if (node->flags & ML_NODE_BACKWARD) printf("  backward");
    if (origin->module && origin->module[0]) printf("  in %s", origin->module);
    if (origin->file) printf("  %s:%d", origin->file, origin->line);
    printf("\n");
}

static void print_node(void *context, const ml_graph *g, ml_ref n, const ml_placements *at) {
    const types_call *call = context;
    const ml_node *node = ml_graph_node(g, n);
    if (node->op == ML_OP_CONST || (node->flags & ML_NODE_FUNCTION)) return;
    ml_text type = {.arena = call->arena};
    ml_layout_print_type(call->layout, g, ml_graph_type(g, n), at, &type);
    traffic_print_node(g, n, type.text);
}

/* Extract, simplify, shard: the frame of both reports. */
static void shard_asked(types_call *call, ml_shard_visitor *visit) {
    ml_roots roots = *call->asked;
    roots.outputs = ML_NEW_ARRAY(call->arena, ml_ref, roots.output_count + 1);
    roots.updates = ML_NEW_ARRAY(call->arena, ml_update, roots.update_count + 1);
    for (int i = 0; i < roots.output_count; i++) roots.outputs[i] = call->asked->outputs[i];
    for (int i = 0; i < roots.update_count; i++) roots.updates[i] = call->asked->updates[i];
    call->graph = ml_simplify(call->vm->graph, &roots);
    call->local = ml_shard_report(call->graph, &roots, call->layout, visit, call);
}

static void print_global(void *argument) {
    shard_asked(argument, print_node);
}

static void types_end(lua_State *L, types_call *call, ml_status status) {
    if (call->local) ml_graph_free(call->local);
    if (call->graph) ml_graph_free(call->graph);
    if (call->arena) ml_arena_free(call->arena);
    vm_check(L, status);
}

void traffic_print_types(lua_State *L, const ml_roots *roots) {
    types_call call = {.vm = vm_of(L), .asked = roots, .arena = ml_arena_new()};
    call.layout = ml_session_layout(call.vm->session);
    ml_status status = call.arena ? ml_protect(print_global, &call)
                                  : ml_fail(ML_NO_MEMORY, "not enough host memory");
    types_end(L, &call, status);
}

static void keep_last(void *context, const ml_graph *g, ml_ref n, const ml_placements *at) {
    types_call *call = context;
    call->type = *ml_graph_type(g, n);
    call->at = *at;
}

static void print_tensor(void *argument) {
    types_call *call = argument;
    const ml_ref n = call->asked->outputs[0];
    call->type = *ml_graph_type(call->vm->graph, n);
    shard_asked(call, keep_last);
    /* What no op has placed (numbers) is whole. */
    if (!ml_type_same_axes(&call->type, ml_graph_type(call->vm->graph, n)))
        call->at = (ml_placements){0};
    ml_text text = {.arena = call->arena};
    ml_type local = ml_layout_local(call->layout, &call->type, &call->at);
    ml_layout_print_type(call->layout, call->vm->graph, &call->type, &call->at, &text);
    ml_text_add(&text, "  of each rank ");
    ml_type_print(call->vm->graph, &local, &text);
    printf("%s", text.text);
}

static void print_sent(const types_call *call, const char *before, const char *after) {
    ml_traffic sent[ML_MAX_MESH][ML_COLLECTIVE_KINDS];
    char size[64];
    ml_shard_traffic(call->local, call->layout, sent);
    for (int i = 0; i < call->layout->count; i++)
        for (int k = 0; k < ML_COLLECTIVE_KINDS; k++) {
            if (!sent[i][k].count) continue;
            vm_format_bytes(size, sizeof size, sent[i][k].bytes);
            printf("%s%lld %s over %s, %s%s", before, (long long)sent[i][k].count,
                   ml_collectives[k].label, call->layout->axis[i].name, size, after);
        }
}

void traffic_print_typed(lua_State *L, const ml_roots *roots) {
    types_call call = {.vm = vm_of(L), .asked = roots, .arena = ml_arena_new()};
    call.layout = ml_session_layout(call.vm->session);
    push_mesh(L, call.layout);
    printf("ranks           %lld: %s\n", (long long)ml_layout_ranks(call.layout),
           lua_tostring(L, -1));
    lua_pop(L, 1);
    ml_status status = call.arena ? ml_protect(print_global, &call)
                                  : ml_fail(ML_NO_MEMORY, "not enough host memory");
    if (status == ML_OK) print_sent(&call, "  of each rank  ", " sent\n");
    types_end(L, &call, status);
}

bool traffic_print_tensor(lua_State *L, ml_ref n) {
    ml_roots roots = {.outputs = &n, .output_count = 1};
    types_call call = {.vm = vm_of(L), .asked = &roots};
    call.layout = ml_session_layout(call.vm->session);
    if (!call.layout) return false;
    call.arena = ml_arena_new();
    ml_status status = call.arena ? ml_protect(print_tensor, &call)
                                  : ml_fail(ML_NO_MEMORY, "not enough host memory");
    char size[64];
    if (status == ML_OK) {
        ml_type local = ml_layout_local(call.layout, &call.type, &call.at);
        vm_format_bytes(size, sizeof size, ml_type_bytes(&local));
        printf("  %s", size);
        print_sent(&call, "; ", "");
    }
    types_end(L, &call, status);
    return true;
}

/* ---- Placements of many tensors -------------------------------------------------------------- */

typedef struct {
    const ml_layout *layout;
    const ml_graph *session;
    ml_graph *graph, *local;
    ml_arena *arena;
    const ml_ref *nodes;
    int count;
    ml_placements *by_ref, *places; /* of nodes of `graph`; of nodes[] */
    bool *placed;                   /* by ref */
    bool *known;
} place_call;

static void keep_place(void *context, const ml_graph *g, ml_ref n, const ml_placements *at) {
    place_call *call = context;
    (void)g;
    call->by_ref[n] = *at;
    call->placed[n] = true;
}

static void place_nodes(void *argument) {
    place_call *call = argument;
    size_t size = sizeof(ml_ref) * (size_t)call->count;
    ml_roots roots = {.output_count = call->count, .outputs = ml_arena_alloc(call->arena, size)};
    ml_ref *kept = ml_arena_alloc(call->arena, size);
    memcpy(roots.outputs, call->nodes, size);
    call->graph = ml_simplify(call->session, &roots);
    memcpy(kept, roots.outputs, size);
    call->by_ref = ML_NEW_ARRAY(call->arena, ml_placements, ml_graph_count(call->graph));
    call->placed = ML_NEW_ARRAY(call->arena, bool, ml_graph_count(call->graph));
    call->local = ml_shard_report(call->graph, &roots, call->layout, keep_place, call);
    for (int i = 0; i < call->count; i++) {
        const ml_type *type = ml_graph_type(call->session, call->nodes[i]);
        call->known[i] =
            call->placed[kept[i]] && ml_type_same_axes(type, ml_graph_type(call->graph, kept[i]));
        if (call->known[i]) call->places[i] = call->by_ref[kept[i]];
    }
}

void traffic_place(lua_State *L, ml_arena *arena, const ml_ref *nodes, int count,
                   ml_placements *places, bool *known) {
    place_call call = {.session = vm_of(L)->graph, .arena = arena, .nodes = nodes};
    call.count = count;
    call.places = places;
    call.known = known;
    call.layout = ml_session_layout(vm_of(L)->session);
    memset(known, 0, sizeof *known * (size_t)count);
    if (!call.layout || count == 0) return;
    if (ml_protect(place_nodes, &call) != ML_OK) memset(known, 0, sizeof *known * (size_t)count);
    if (call.local) ml_graph_free(call.local);
    if (call.graph) ml_graph_free(call.graph);
}
