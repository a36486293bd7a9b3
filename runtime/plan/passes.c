/* The compiler, top to bottom: from the session's graph to steps. Reads as the list of passes. */
#include "runtime/plan/plan_internal.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/passes/passes.h"

/* What MLUA_DUMP may name. */
static const char *const names[] = {
    "extract",        "places",          "conform",        "simplify",     "shard",
    "shard simplify", "sink orders",     "gather sorted",  "split sums",   "decompose",
    "simplify2",      "split dots",      "merge",          "simplify3",    "halves",
    "open halves",    "halves simplify", "chunk",          "open sums",    "simplify4",
    "recompute",      "read joined",     "ragged squares", "ragged gated", "copies",
    "piece",
};

static bool is_pass(const char *name, size_t length) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == length && strncmp(names[i], name, length) == 0) return true;
    return false;
}

/* Once. */
static void tell_unknown(const char *wanted) {
    static atomic_bool told;
    if (atomic_exchange(&told, true)) return;
    fprintf(stderr, "mlua: MLUA_DUMP=%s is ignored: there is no such pass\n  help: ", wanted);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        fprintf(stderr, "%s%s", i ? ", " : "passes: ", names[i]);
    fputs("\n", stderr);
}

/* Print the graph where MLUA_DUMP=pass or pass@program asks for it. */
static void pass_dump(const ml_plan *plan, const char *pass) {
    const char *wanted = ml_knobs()->dump, *at = wanted ? strchr(wanted, '@') : NULL;
    if (wanted == NULL) return;
    size_t length = at ? (size_t)(at - wanted) : strlen(wanted);
    assert(is_pass(pass, strlen(pass)));
    if (!is_pass(wanted, length)) tell_unknown(wanted);
    if (strlen(pass) != length || strncmp(pass, wanted, length) != 0) return;
    const char *name = plan->roots.name ? plan->roots.name : "";
    if (at != NULL && strcmp(at + 1, name) != 0) return;
    ml_text out = {.arena = plan->arena};
    ml_graph_print(plan->graph, &plan->roots, &out);
    fprintf(stderr, "-- %s of program \"%s\": %u nodes\n%s", pass, name,
            ml_graph_count(plan->graph) - 1, out.text ? out.text : "");
}

void pass_done(ml_plan *plan, ml_graph *graph, const char *name) {
    if (graph != plan->graph) {
        ml_graph *old = plan->graph, **keep = plan->keep;
        plan->graph = graph;
        plan->keep = NULL;
        if (keep != NULL)
            *keep = old;
        else
            ml_graph_free(old);
    }
    if (ml_knobs()->verify) ml_graph_verify(plan->graph, &plan->roots, name);
    pass_dump(plan, name);
    ml_debug(5, "%s: %u nodes\n", name, ml_graph_count(plan->graph) - 1);
}

/* New values take the dtype and the axis order of their states. */
static void updates_conform(ml_plan *plan) {
    ml_graph *g = plan->graph;
    for (int i = 0; i < plan->roots.update_count; i++) {
        ml_update *update = &plan->roots.updates[i];
        const ml_state *state = ml_graph_state(g, update->state);
        const ml_type *type = ml_graph_type(g, update->value);
        if (!ml_type_same_axes(&state->type, type)) {
            ml_text old = {.arena = plan->arena}, new = {.arena = plan->arena};
            ml_type_print(g, &state->type, &old);
            ml_type_print(g, type, &new);
            ml_raise(ML_INVALID, "state \"%s\" is %s and cannot be assigned %s",
                     state->name ? state->name : "?", old.text, new.text);
        }
        ml_graph_set_origin(g, ml_graph_origin(g, update->value));
        ml_ref value = ml_cast(g, update->value, state->type.dtype);
        update->value = ml_permute(g, value, &state->type);
    }
}

ml_roots plan_roots_copy(ml_arena *arena, const ml_roots *from) {
    ml_roots to = *from;
    if (from->name != NULL) to.name = ml_arena_copy(arena, from->name, strlen(from->name));
    to.outputs = ML_NEW_ARRAY(arena, ml_ref, (size_t)from->output_count + 1);
    to.updates = ML_NEW_ARRAY(arena, ml_update, (size_t)from->update_count + 1);
    for (int i = 0; i < from->output_count; i++) to.outputs[i] = from->outputs[i];
    for (int i = 0; i < from->update_count; i++) to.updates[i] = from->updates[i];
    if (from->watched == 0) return to;
    const ml_origin **origins = ML_NEW_ARRAY(arena, const ml_origin *, from->watched);
    memcpy(origins, from->watched_origins, sizeof *origins * (size_t)from->watched);
    to.watched_origins = origins;
    return to;
}

void plan_roots(ml_plan *plan, const ml_roots *from) {
    plan->roots = plan_roots_copy(plan->arena, from);
}

static void count_flops(ml_plan *plan) {
    const ml_schedule *s = plan->schedule;
    for (uint32_t i = 0; i < s->steps.count; i++) plan->flops += s->steps.at[i].flops;
}

/* From the global program to that of one rank. Results keep the order of their axes. */
static void shard(ml_plan *plan) {
    ml_roots *r = &plan->roots;
    ml_type *types = ML_NEW_ARRAY(plan->arena, ml_type, (size_t)r->output_count + 1);
    for (int i = 0; i < r->output_count; i++) {
        const ml_type *type = ml_graph_type(plan->graph, r->outputs[i]);
        ml_placements places = {0};
        if (i >= r->output_count - r->kept)
            places = ml_layout_place(plan->layout, plan->graph, type, -1, NULL);
        types[i] = ml_layout_local(plan->layout, type, &places);
    }
    int asked = r->output_count;
    pass_done(plan, ml_shard(plan->graph, r, plan->layout), "shard");
    if (r->watched > 0) plan_roots(plan, &plan->roots); /* what was added is the graph's */
    ml_graph *g = plan->graph;
    for (int i = 0; i < asked; i++) {
        ml_graph_set_origin(g, ml_graph_origin(g, r->outputs[i]));
        r->outputs[i] = ml_permute(g, r->outputs[i], &types[i]);
    }
    for (int i = 0; i < r->update_count; i++) {
        ml_type type = plan_state(plan, r->updates[i].state);
        ml_graph_set_origin(g, ml_graph_origin(g, r->updates[i].value));
        r->updates[i].value = ml_permute(g, r->updates[i].value, &type);
    }
    ml_shard_traffic(g, plan->layout, plan->traffic);
}

static bool has_places(const ml_graph *g) {
    for (ml_ref n = 1; n < ml_graph_count(g); n++)
        if (ml_graph_node(g, n)->op == ML_OP_PLACE) return true;
    return false;
}

/* The bytes that a GPU moves in one part in 128 of the time that the program's products take. */
static int64_t spare_bytes(const ml_plan *plan) {
    const double flops_a_byte = 150, share = 128;
    double flops = 0;
    for (ml_ref n = 1; n < ml_graph_count(plan->graph); n++) {
        int op_class = ml_ops[ml_graph_node(plan->graph, n)->op].op_class;
        if (op_class == ML_CLASS_CONTRACT || op_class == ML_CLASS_ROUTINE)
            flops += ml_flops(plan->graph, n);
    }
    const double bytes = flops / flops_a_byte / share, most = 0x1p62;
    return (int64_t)(bytes < most ? bytes : most); /* flops grow with the square of a sequence */
}

/* What is kept for the backward pass, and what is computed twice: all that saves memory where that
 * is asked for; else, on a GPU, what takes next to no time. */
static void recompute(ml_plan *plan, bool gpu, plan_recompute how, bool late) {
    ml_roots *r = &plan->roots;
    int wanted = how == RECOMPUTE_ALL ? 1 : ml_knobs()->recompute;
    bool keep = late && how == RECOMPUTE_FREE_NOT_LATE;
    if (wanted == 1)
        pass_done(plan, ml_recompute(plan->graph, r), "recompute");
    else if (wanted == ML_RECOMPUTE_THRIFTY && gpu && !keep)
        pass_done(plan, ml_recompute_thrifty(plan->graph, r, spare_bytes(plan)), "recompute");
}

/* Costs, memory and traffic are sums of bytes in int64: raise where all tensors of the program have
 * more than 2^60. */
static void check_total(const ml_plan *plan) {
    const ml_graph *g = plan->graph;
    const int64_t most = (int64_t)1 << 60;
    int64_t left = most;
    ml_ref largest = 0;
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        int64_t bytes = ml_type_bytes(ml_graph_type(g, n));
        if (!largest || bytes > ml_type_bytes(ml_graph_type(g, largest))) largest = n;
        left = bytes < left ? left - bytes : -1;
    }
    if (left >= 0) return;
    const ml_origin *origin = ml_graph_origin(g, largest);
    ml_text type = {.arena = plan->arena};
    ml_type_print(g, ml_graph_type(g, largest), &type);
    ml_fail(ML_INVALID, "the tensors of program \"%s\" have more than 2^60 bytes",
            plan->roots.name ? plan->roots.name : "");
    if (origin && origin->file)
        ml_help("the largest is %s from %s:%d", type.text, origin->file, origin->line);
    ml_raise_last();
}

void plan_global(ml_plan *plan, const ml_graph *from, const ml_roots *roots) {
    ml_roots *r = &plan->roots;
    plan_roots(plan, roots);
    pass_done(plan, ml_graph_extract(from, r), "extract");
    check_total(plan);
    if (plan->layout == NULL && has_places(plan->graph))
        pass_done(plan, ml_drop_places(plan->graph, r), "places");
    updates_conform(plan);
    pass_done(plan, plan->graph, "conform");
    pass_done(plan, ml_simplify(plan->graph, r), "simplify");
}

/* The orders that collectives have their operands and results in, for all between them, where that
 * leaves less to permute: tensors and sequences that are split, not parameters alone. */
static void sink_orders(ml_plan *plan) {
    ml_roots before = plan->roots;
    plan_roots(plan, &before);
    ml_graph *sunk = ml_sink_orders(plan->graph, &plan->roots);
    if (ml_permuted_bytes(sunk) >= ml_permuted_bytes(plan->graph)) {
        ml_graph_free(sunk);
        plan->roots = before;
        return;
    }
    pass_done(plan, sunk, "sink orders");
}

/* The passes that depend on the program, the layout and the target alone. */
static void passes_first(ml_plan *plan, const ml_target *target) {
    ml_roots *r = &plan->roots;
    bool gpu = target->kind == ML_TARGET_CUDA;

    if (plan->layout != NULL) {
        shard(plan);
        pass_done(plan, ml_simplify(plan->graph, r), "shard simplify");
        sink_orders(plan);
    }
    if (gpu && ml_gather_sorted_applies(plan->graph))
        pass_done(plan, ml_gather_sorted(plan->graph, r), "gather sorted");
    if (gpu && ml_split_sums_applies(plan->graph))
        pass_done(plan, ml_split_sums(plan->graph, r), "split sums");
    pass_done(plan, ml_decompose(plan->graph, r, target->longest_materialized), "decompose");
    pass_done(plan, ml_simplify(plan->graph, r), "simplify2");
    if (gpu && !target->no_fuse && ml_split_dots_applies(plan->graph))
        pass_done(plan, ml_split_dots(plan->graph, r), "split dots");
    /* Merged weights are written side by side by the casts that a GPU makes of them anyway. The
     * CPU computes with the f32 states themselves, which would have to be copied at each step. */
    if (gpu && !target->no_fuse) {
        pass_done(plan, ml_merge_dots(plan->graph, r), "merge");
        pass_done(plan, ml_simplify(plan->graph, r), "simplify3");
    }
}

/* Those that also depend on how memory is saved. */
static void passes_then(ml_plan *plan, const ml_target *target, plan_recompute how, bool overlap,
                        const int *late) {
    ml_roots *r = &plan->roots;
    bool gpu = target->kind == ML_TARGET_CUDA;

    plan_halves(plan, target, overlap);
    const int64_t chunk = (int64_t)ml_knobs()->chunk << 20;
    if (ml_chunk_applies(plan->graph, chunk) && !target->no_fuse) {
        pass_done(plan, ml_chunk(plan->graph, r, chunk), "chunk");
        pass_done(plan, ml_open_sums(plan->graph, r), "open sums");
        pass_done(plan, ml_simplify(plan->graph, r), "simplify4");
        if (plan->layout != NULL) ml_shard_traffic(plan->graph, plan->layout, plan->traffic);
    }
    recompute(plan, gpu, how, late != NULL);
    if (late != NULL) pass_done(plan, ml_read_joined(plan->graph, r, late), "read joined");
    if (!gpu || target->no_fuse) return;
    if (ml_ragged_squares_apply(plan->graph))
        pass_done(plan, ml_ragged_squares(plan->graph, r), "ragged squares");
    enum { HOPPER = 90 }; /* where kernels of products have what to go on with in registers */
    if (target->arch == HOPPER && ml_knobs()->tma && ml_ragged_gated_applies(plan->graph))
        pass_done(plan, ml_ragged_gated(plan->graph, r), "ragged gated");
}

/* The graph is kept where the next pass would free it; the roots, which that changes, now. */
static void part_keep(plan_part *part, ml_arena *arena, ml_plan *plan) {
    part->roots = plan_roots_copy(arena, &plan->roots);
    memcpy(part->traffic, plan->traffic, sizeof part->traffic);
    plan->keep = &part->graph;
}

/* No pass has replaced it. */
static void part_copy(plan_part *part, ml_plan *plan) {
    plan->keep = NULL;
    part->graph = ml_graph_extract(plan->graph, &part->roots);
}

static void part_take(const plan_part *part, ml_plan *plan) {
    plan_roots(plan, &part->roots);
    plan->graph = ml_graph_extract(part->graph, &plan->roots);
    memcpy(plan->traffic, part->traffic, sizeof part->traffic);
}

void plan_local(ml_plan *plan, const ml_target *target, plan_recompute how, bool overlap,
                const int *late, struct plan_base *base, plan_part *part) {
    if (part->graph != NULL) {
        part_take(part, plan);
    } else {
        passes_first(plan, target);
        if (base->keeps) part_keep(part, base->arena, plan);
    }
    passes_then(plan, target, how, overlap, late);
    if (plan->keep != NULL) part_copy(part, plan);
}

void plan_lower(ml_plan *plan, const ml_target *target) {
    if (plan->pipeline_task) pass_done(plan, plan->graph, "piece");
    plan->schedule = ml_lower(plan->graph, &plan->roots, target, plan->arena);
    count_flops(plan);
}
