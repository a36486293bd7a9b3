/* The report of `mlua check`. */
#include "vm/check/traffic.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/passes/passes.h"
#include "runtime/pipeline/plan.h"
#include "runtime/plan/beside.h"
#include "vm/bindings/precision.h"
#include "vm/check/dry.h"
#include "vm/check/largest.h"
#include "vm/check/planned_for.h"
#include "vm/check/predicted.h"
#include "vm/check/recomputed.h"
#include "vm/check/scans.h"
#include "vm/check/sizes.h"
#include "vm/cli/output.h"

enum { STATE_KINDS = ML_STATE_CACHE + 1 };

typedef enum { PART_ALL, PART_MEMORY, PART_SHARD } report_part;

typedef struct {
    const ml_graph *graph; /* the session's */
    int64_t parameters, parameter_count;
    int64_t state_bytes[STATE_KINDS], state_count[STATE_KINDS]; /* by ml_state_kind */
    int64_t whole_bytes; /* of optimizer states that "flat" could not split */
    double flops;        /* of one step; at first those of its microbatches, where they are given */
    double busiest;      /* ml_shard_balance */
    const ml_plan *largest;                  /* the program with the most temporaries */
    int64_t host_bytes, offloaded_bytes;     /* of all programs: pinned; copied in a run of each */
    const struct ml_pipeline_plan *pipeline; /* of the program that runs most often, if it is cut */
    int64_t peak_bytes, other_bytes; /* of all programs; of those, what others hold beside it */
    int64_t memory[ML_MEMORY_KINDS]; /* of the peak */
    int kernels, gemms, attentions, copies, distinct;
    check_scans scans; /* of the step's programs */
    const char *kept;  /* of generation: text, or JSON; NULL: it is none */
    double plan_seconds;
    vm_predicted predicted;
    vm_traffic traffic;
    precision_report products; /* of the step's programs */
    report_part part;
    bool typed;            /* at the prompt: of states, those that the programs use */
    bool samples;          /* what a step counts are samples: there is no axis of positions */
    int64_t step_programs; /* the first ones; the others run between steps */
    vm_traffic between;    /* once each of these */
    const char *groups;    /* of cp = "dynamic", in words; NULL: none */
    bool partial;          /* there are programs that the report has not */
    bool fits;
    int repeats; /* runs that overflow: 1 are done again; -1 no memory for all; 0 none may */
} report;

/* ---- Numbers for people ---------------------------------------------------------------------- */

static void format_count(char *out, size_t size, double value) {
    static const char *const units[] = {"", " k", " M", " G", " T", " P"};
    int unit = 0;
    while (value >= 1000 && unit < 5) value /= 1000, unit++;
    snprintf(out, size, unit ? "%.1f%s" : "%.0f%s", value, units[unit]);
}

static const char *bytes_text(lua_State *L, int64_t bytes) {
    char text[64];
    vm_format_bytes(text, sizeof text, bytes);
    return lua_pushstring(L, text);
}

static const char *count_text(lua_State *L, double value) {
    char text[64];
    format_count(text, sizeof text, value);
    return lua_pushstring(L, text);
}

static const char *flops_text(lua_State *L, double flops) {
    const char *count = count_text(L, flops);
    return lua_pushfstring(L, flops < 1000 ? "%s FLOP" : "%sFLOP", count);
}

/* ---- Gathering ------------------------------------------------------------------------------- */

static int compare_keys(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

static void count_part(report *r, const ml_plan *plan) {
    scans_add(&r->scans, plan, r->predicted.known ? &r->predicted.rates : NULL);
    for (uint32_t i = 0; i < plan->schedule->steps.count; i++) {
        const ml_step *step = &plan->schedule->steps.at[i];
        r->kernels += step->kind == ML_STEP_KERNEL;
        r->gemms += step->kind == ML_STEP_GEMM || step->kind == ML_STEP_RAGGED;
        r->attentions += step->kind == ML_STEP_ATTENTION;
        r->copies += step->kind == ML_STEP_COPY;
    }
}

/* The keys of a part's kernels, those of the steps of its scans too; gives their number, of which
 * `keys` (NULL: they are counted) has room for all. Kernels of equal source share one
 * compilation. */
static size_t list_part(const ml_plan *part, uint64_t *keys) {
    const ml_schedule *s = part->schedule;
    size_t count = 0;
    for (uint32_t i = 0; i < s->steps.count; i++) {
        const ml_loop *loop = s->steps.at[i].loop;
        if (loop) count += list_part(loop->plan, keys ? keys + count : NULL);
        for (const ml_kernel *k = s->steps.at[i].kernel; k; k = k->next, count++)
            if (keys) keys[count] = k->key;
    }
    return count;
}

static void list_kernels(const ml_plan *plan, uint64_t *keys, size_t *key_count) {
    for (int p = 0; p < plan->part_count; p++)
        *key_count += list_part(plan->parts[p], keys ? keys + *key_count : NULL);
}

static int count_distinct(uint64_t *keys, size_t count) {
    int distinct = 0;
    if (count) qsort(keys, count, sizeof *keys, compare_keys);
    for (size_t i = 0; i < count; i++) distinct += i == 0 || keys[i] != keys[i - 1];
    return distinct;
}

static const vm_program *program_at(lua_State *L, int64_t i) {
    lua_rawgeti(L, 1, i);
    const vm_program *program = vm_to_program(L, -1);
    if (!program) vm_fail(L, NULL, "report takes a list of programs, got %s", luaL_typename(L, -1));
    lua_pop(L, 1);
    return program;
}

/* How unevenly ranks share causal attention (ml_shard_balance: 1 is even), of the stage that does
 * so least evenly. */
static double find_busiest(const ml_plan *plan) {
    double busiest = 1;
    for (int i = 0; i < plan->part_count && plan->layout; i++) {
        double part = ml_shard_balance(plan->parts[i]->graph, plan->layout);
        if (part > busiest) busiest = part;
    }
    return busiest;
}

typedef struct {
    const ml_vm *vm;
    uint32_t id;
    ml_type type;
    bool whole;          /* over a mesh axis that is to split optimizer states */
    vm_traffic *traffic; /* NULL: not noted */
} local_call;

static void find_local(void *argument) {
    local_call *call = argument;
    const ml_layout *layout = ml_session_layout(call->vm->session);
    call->type = ml_plan_state_type(layout, call->vm->graph, call->id);
    if (!layout) return;
    const ml_state *state = ml_graph_state(call->vm->graph, call->id);
    ml_placements at = ml_plan_state_places(layout, call->vm->graph, call->id);
    if (call->traffic && state->kind == ML_STATE_PARAMETER)
        traffic_add_placed(call->traffic, layout, &state->type, &at);
    if (state->kind != ML_STATE_OPTIMIZER) return;
    for (int i = 0; i < layout->count; i++)
        if (layout->axis[i].flat && layout->axis[i].size > 1 && at.over[i].kind != ML_SPLIT)
            call->whole = true;
}

static void find_input(void *argument) {
    local_call *call = argument;
    const ml_layout *layout = ml_session_layout(call->vm->session);
    if (!layout) return;
    ml_placements at = ml_plan_input_places(layout, call->vm->graph, call->id);
    traffic_add_placed(call->traffic, layout, &ml_graph_input(call->vm->graph, call->id)->type,
                       &at);
}

typedef struct {
    ml_rank_programs programs;
    const ml_plan *largest; /* the program with the most temporaries, which runs at the peak */
    ml_beside beside;       /* what the others hold meanwhile */
    int64_t peak_bytes;     /* of both */
} rank_memory;

static void find_largest(void *argument) {
    rank_memory *rank = argument;
    for (int i = 0; i < rank->programs.count; i++) {
        const ml_plan *plan = rank->programs.at[i].plan;
        if (!rank->largest || plan->arena_bytes > rank->largest->arena_bytes) rank->largest = plan;
    }
    rank->beside = ml_plan_beside(rank->largest, &rank->programs);
    rank->peak_bytes = rank->largest->peak_bytes + rank->beside.bytes;
}

static const ml_plan *retry_of(const vm_program *program) {
    return program->program ? ml_program_retry(program->program) : vm_program_plan(program)->retry;
}

/* Of the programs of the report, whose list is on top of the stack. */
static rank_memory push_memory(lua_State *L) {
    rank_memory rank = {.programs.count = (int)vm_table_length(L, 1)};
    ml_rank_program *at = lua_newuserdatauv(L, (size_t)rank.programs.count * sizeof *at, 0);
    for (int i = 0; i < rank.programs.count; i++) {
        const vm_program *program = program_at(L, i + 1);
        at[i] = (ml_rank_program){vm_program_plan(program), retry_of(program)};
    }
    rank.programs.at = at;
    vm_protect(L, find_largest, &rank);
    return rank;
}

typedef struct {
    ml_plan *plan;
    int coordinate;
} account_call;

static void account_again(void *argument) {
    account_call *call = argument;
    pipeline_memory(call->plan, call->coordinate);
}

/* All programs of a pipeline describe the rank at one coordinate; what it needs. */
static int64_t account_rank(lua_State *L, int coordinate) {
    for (int64_t i = 1; i <= vm_table_length(L, 1); i++) {
        account_call call = {program_at(L, i)->plan, coordinate};
        if (call.plan->pipeline) vm_protect(L, account_again, &call);
    }
    const rank_memory rank = push_memory(L);
    lua_pop(L, 1);
    return rank.peak_bytes;
}

/* In a check, the rank of a pipeline that needs the most memory for all programs. */
static void choose_rank(lua_State *L) {
    const ml_plan *first = program_at(L, 1)->plan;
    if (!first || !first->pipeline) return;
    int64_t most = -1;
    int chosen = 0;
    for (int i = 0; i < first->pipeline->ranks; i++) {
        int64_t needed = account_rank(L, i);
        if (needed > most) most = needed, chosen = i;
    }
    (void)account_rank(L, chosen);
}

/* How long a step takes. Rebuilds of the parameter cache come before its microbatches, all of
 * which one run of a pipeline has. */
static void predict_step_of(lua_State *L, report *r, double accum) {
    const ml_layout *layout = vm_program_plan(program_at(L, 1))->layout;
    if (vm_of(L)->options->mode != VM_CHECK) return;
    if (!predicted_rates(L, layout ? ml_layout_ranks(layout) : 1, &r->predicted)) return;
    for (int64_t i = 1; i <= r->step_programs; i++) {
        const ml_plan *plan = vm_program_plan(program_at(L, i));
        if (i > 1 || !predicted_runs(L, &r->predicted, accum))
            predicted_add(L, &r->predicted, plan, i == 1 && !plan->pipeline ? accum : 1);
        const ml_plan *b = plan->roots.microbatches > 1 ? plan->rebuild : NULL;
        for (; (b = predicted_rebuild(L, r->step_programs, b)) != NULL; b = b->next)
            predicted_add(L, &r->predicted, b, 1);
    }
}

static void read_programs(lua_State *L, report *r, double accum) {
    int64_t count = vm_table_length(L, 1);
    size_t keys = 0, key_count = 0;
    choose_rank(L);
    for (int64_t i = 1; i <= count; i++) {
        const ml_plan *plan = vm_program_plan(program_at(L, i));
        list_kernels(plan, NULL, &keys);
        r->host_bytes += plan->host_bytes;
        r->offloaded_bytes += plan->offloaded_bytes;
    }
    uint64_t *list = lua_newuserdatauv(L, (keys + 1) * sizeof *list, 0);
    for (int64_t i = 1; i <= count; i++) {
        const vm_program *program = program_at(L, i);
        const ml_plan *plan = vm_program_plan(program);
        r->plan_seconds += program->seconds;
        if (plan->may_overflow && r->repeats >= 0) r->repeats = retry_of(program) ? 1 : -1;
        if (i > r->step_programs) {
            list_kernels(plan, list, &key_count);
            traffic_add(&r->between, plan, 1);
            continue;
        }
        if (i > 1 || r->flops == 0) r->flops += plan->flops * (i == 1 ? accum : 1);
        if (i == 1) r->busiest = find_busiest(plan);
        if (i == 1) r->pipeline = plan->pipeline;
        for (int p = 0; p < plan->part_count; p++) {
            count_part(r, plan->parts[p]);
            precision_add(L, &r->products, plan->parts[p], i == 1 ? accum : 1);
        }
        list_kernels(plan, list, &key_count);
        traffic_add(&r->traffic, plan, i == 1 ? (int64_t)(accum + 0.5) : 1);
        const ml_plan *b = plan->roots.microbatches > 1 ? plan->rebuild : NULL;
        for (; (b = predicted_rebuild(L, r->step_programs, b)) != NULL; b = b->next)
            traffic_add(&r->traffic, b, 1);
    }
    r->distinct = count_distinct(list, key_count);
    lua_pop(L, 1);
}

/* The states that any of the programs has. */
static void mark_states(const rank_memory *rank, bool *used) {
    for (int i = 0; i < rank->programs.count; i++) {
        const ml_held_states *states = &rank->programs.at[i].plan->states;
        for (uint32_t k = 0; k < states->count; k++) used[states->at[k].id] = true;
    }
}

static void read_states(lua_State *L, report *r) {
    uint32_t states = ml_graph_state_count(r->graph);
    bool *used = lua_newuserdatauv(L, states + 1, 0);
    memset(used, 0, states + 1);
    const rank_memory rank = push_memory(L);
    mark_states(&rank, used);
    r->largest = rank.largest;
    r->other_bytes = rank.beside.bytes;
    r->peak_bytes = rank.peak_bytes;
    for (int i = 0; i < ML_MEMORY_KINDS; i++)
        r->memory[i] = rank.largest->kind_bytes[i] + rank.beside.kind_bytes[i];
    for (uint32_t id = 0; id < states; id++) {
        const ml_state *state = ml_graph_state(r->graph, id);
        local_call call = {.vm = vm_of(L), .id = id}; /* a rank's part */
        call.traffic = used[id] ? &r->traffic : NULL;
        vm_protect(L, find_local, &call);
        if (state->kind == ML_STATE_PARAMETER && (used[id] || !r->typed)) {
            r->parameters += ml_type_elements(&state->type);
            r->parameter_count++;
        }
        if (!used[id]) continue;
        const int64_t bytes = ml_type_bytes(&call.type);
        r->state_bytes[state->kind] += bytes;
        r->state_count[state->kind]++;
        if (call.whole) r->whole_bytes += bytes;
    }
    for (uint32_t id = 0; id < ml_graph_input_count(r->graph); id++) {
        local_call call = {.vm = vm_of(L), .id = id, .traffic = &r->traffic};
        vm_protect(L, find_input, &call);
    }
    lua_pop(L, 2);
}

/* ---- Printing -------------------------------------------------------------------------------- */

static void print_types(lua_State *L, const vm_program *program, const char *name) {
    const ml_plan *plan = vm_program_plan(program);
    const ml_graph *g = plan->graph;
    printf("tensors of %s\n", name);
    if (plan->layout) {
        traffic_print_types(L, &program->roots);
        return;
    }
    for (ml_ref n = 1; n < ml_graph_count(g); n++) {
        const ml_node *node = ml_graph_node(g, n);
        if (node->op == ML_OP_CONST || (node->flags & ML_NODE_FUNCTION)) continue;
        vm_push_type(L, g, ml_graph_type(g, n));
        traffic_print_node(g, n, lua_tostring(L, -1));
        lua_pop(L, 1);
    }
}

/* How many layers the stages have; or where they begin, if some do within layers. */
static void print_stages(const ml_stage_map *map) {
    bool within = false;
    for (int v = 0; v < map->count; v++) within = within || map->first[v] % map->members;
    printf(within ? "  begin at     " : "  layers       ");
    for (int v = 0; v < map->count; v++) {
        int at = map->first[v];
        printf(" %d", within ? at / map->members + 1 : (map->first[v + 1] - at) / map->members);
        if (at % map->members) printf(".%s", map->member[at % map->members]);
    }
    printf("\n");
}

static void print_pipeline(const struct ml_pipeline_plan *p) {
    printf(
        "pipeline        %d stages of %s, %s, %d microbatches, planned bubble %.1f%%; below, the "
        "rank of stage %d, which needs the most memory\n",
        p->count, p->map->list, ml_schedules[p->problem.kind].name, p->microbatches,
        100 * p->schedule.bubble, p->coordinate);
    print_stages(p->map);
}

static int64_t all_states(const report *r) {
    int64_t bytes = 0;
    for (int i = 0; i < STATE_KINDS; i++) bytes += r->state_bytes[i];
    return bytes;
}

static void print_end(const ml_vm *vm) {
    int line;
    const char *file = dry_end(vm, &line);
    if (file && vm->dry.message)
        printf("stopped         at %s:%d, where the script ends itself: %s; values are zeros in a "
               "check; programs that it would make later are not counted\n",
               file, line, vm->dry.message);
    else if (file)
        printf("stopped         at %s:%d, where the script calls programs that are known again and "
               "again: it may wait for values, which a check does not have; programs that it would "
               "make later are not counted\n",
               file, line);
}

static void print_states(lua_State *L, const report *r) {
    static const char *const kinds[] = {"parameters", "optimizer", "gradients", "other", "cached"};
    printf("parameters      %s in %lld tensors\n", count_text(L, (double)r->parameters),
           (long long)r->parameter_count);
    printf("states         ");
    for (int i = 0; i < STATE_KINDS; i++)
        if (r->state_count[i])
            printf(" %s %s in %lld,", kinds[i], bytes_text(L, r->state_bytes[i]),
                   (long long)r->state_count[i]);
    printf(" %s in all\n", bytes_text(L, all_states(r)));
    if (r->whole_bytes)
        printf("  %s of the optimizer's are whole over a mesh axis that is \"flat\": their axes "
               "are cut already, or shorter\n",
               bytes_text(L, r->whole_bytes));
}

static void print_work(lua_State *L, const report *r, double tokens) {
    printf("work a step     %s", flops_text(L, r->flops));
    if (tokens > 0)
        printf(", %s a %s of %.0f", flops_text(L, r->flops / tokens),
               r->samples ? "sample" : "token", tokens);
    if (r->busiest > 1.005)
        printf("\n  attention     %.2f times the average on the busiest rank", r->busiest);
    printf("\n");
    if (r->predicted.known)
        predicted_print(&r->predicted, tokens, r->samples, r->flops);
    else if (vm_of(L)->options->mode == VM_CHECK)
        printf("predicted step  not known: no table has the rates of %s; mlua doctor --bench "
               "measures this machine's\n",
               planned_device(vm_of(L)));
    printf("steps           %d kernels (%d to compile%s), %d matrix products, %d attention, %d "
           "copies\n",
           r->kernels, r->distinct, r->partial ? " of the programs planned here" : "", r->gemms,
           r->attentions, r->copies);
    scans_print(&r->scans);
    precision_print(&r->products);
    if (r->kept) fputs(r->kept, stdout);
    printf("planned in      %.0f ms\n", r->plan_seconds * 1e3);
}

static void print_memory(lua_State *L, const report *r) {
    const int64_t process = planned_process(vm_of(L), r->peak_bytes);
    printf("peak memory     %s\n", bytes_text(L, r->peak_bytes));
    for (int i = 0; i < ML_MEMORY_KINDS; i++)
        printf("  %-13s %s\n", ml_memory_names[i], bytes_text(L, r->memory[i]));
    if (process > r->peak_bytes)
        printf("process         %s with its context, libraries and communicators (--memory)%s\n",
               bytes_text(L, process),
               !planned_has(vm_of(L), process) ? ", which the device has not" : "");
    if (r->repeats < 0)
        printf("exchange        no memory for steps that are done again: one whose rows have no "
               "place ends the run\n");
    if (r->host_bytes == 0) return;
    printf("host memory     %s pinned", bytes_text(L, r->host_bytes));
    printf(" for %s offloaded a run", bytes_text(L, r->offloaded_bytes));
    if (r->predicted.known)
        printf(", copies %.1f ms a step, of which computation waits %.1f ms",
               1e3 * r->predicted.step.copied, 1e3 * r->predicted.step.held);
    printf("\n");
}

static void print_traffic(lua_State *L, const report *r) {
    traffic_print(L, &r->traffic, "in one step");
    if (r->step_programs < vm_table_length(L, 1))
        traffic_print(L, &r->between,
                      r->partial  ? "in one run of each other program of rows that is planned here"
                      : r->groups ? "in one run of each other program of rows"
                                  : "in one run of what runs between steps (evaluation)");
}

static void print_all_types(lua_State *L) {
    for (int64_t i = 1; i <= vm_table_length(L, 1); i++) {
        lua_rawgeti(L, 1, i);
        lua_getiuservalue(L, -1, 1);
        print_types(L, program_at(L, i), lua_isstring(L, -1) ? lua_tostring(L, -1) : "a program");
        lua_pop(L, 2);
    }
}

static void print_text(lua_State *L, const report *r, double tokens) {
    const ml_vm *vm = vm_of(L);
    printf("device          %s\n", planned_device(vm));
    traffic_print_ranks(L, &r->traffic);
    if (r->groups) printf("sequences       %s\n", r->groups);
    if (r->pipeline) print_pipeline(r->pipeline);
    if (r->part != PART_SHARD) print_states(L, r);
    if (r->part == PART_ALL) print_work(L, r, tokens);
    if (r->part != PART_SHARD) print_memory(L, r);
    if (r->part != PART_MEMORY) print_traffic(L, r);
    if (r->part != PART_SHARD && r->fits)
        largest_print(L, r->largest); /* the error lists them otherwise */
    if (vm->options->mode == VM_CHECK) print_end(vm);
    lua_settop(L, 2);
    if (vm->options->types) print_all_types(L);
    vm_print_hints(L);
}

static void add_end(const ml_vm *vm, json_t *object) {
    int line;
    const char *file = dry_end(vm, &line);
    if (object && file)
        json_object_set_new(object, "ended", json_pack("{s:s, s:i}", "file", file, "line", line));
    if (object && file && vm->dry.message)
        json_object_set_new(json_object_get(object, "ended"), "message",
                            json_string(vm->dry.message));
}

static void print_json(lua_State *L, const report *r, double tokens) {
    const ml_vm *vm = vm_of(L);
    json_t *memory = json_object();
    for (int i = 0; i < ML_MEMORY_KINDS; i++)
        json_object_set_new(memory, ml_memory_names[i], json_integer(r->memory[i]));
    json_t *object = json_pack(
        "{s:s, s:I, s:I, s:f, s:f, s:i, s:i, s:i, s:i, s:f, s:I, s:o, s:o}", "device",
        planned_device(vm), "parameters", (json_int_t)r->parameters, "state_bytes",
        (json_int_t)all_states(r), "flops", r->flops, "tokens", tokens, "kernels", r->kernels,
        "kernels_to_compile", r->distinct, "matrix_products", r->gemms, "attentions", r->attentions,
        "plan_seconds", r->plan_seconds, "peak_bytes", (json_int_t)r->peak_bytes, "memory_bytes",
        memory, "largest", largest_json(L, r->largest));
    if (object)
        json_object_set_new(object, "process_bytes",
                            json_integer((json_int_t)planned_process(vm, r->peak_bytes)));
    if (object) traffic_json(L, &r->traffic, object);
    if (object && r->step_programs < vm_table_length(L, 1)) {
        json_t *between = json_object();
        traffic_json(L, &r->between, between);
        json_object_set_new(object, "between_steps", between);
    }
    if (object && r->pipeline) {
        json_object_set_new(object, "bubble", json_real(r->pipeline->schedule.bubble));
        json_object_set_new(object, "stages", json_integer(r->pipeline->count));
        json_object_set_new(object, "microbatches", json_integer(r->pipeline->microbatches));
    }
    if (object) json_object_set_new(object, "hints", vm_hints_json(L));
    if (object && r->traffic.layout)
        json_object_set_new(object, "attention_balance", json_real(r->busiest));
    if (object && r->traffic.layout)
        json_object_set_new(object, "whole_optimizer_bytes", json_integer(r->whole_bytes));
    if (object) sizes_json(L, r->pipeline, object);
    if (object) scans_json(&r->scans, object);
    if (object) precision_json(&r->products, object);
    if (object) predicted_json(&r->predicted, tokens, r->flops, object);
    if (object && vm_table_length(L, 1) > 0) {
        const ml_plan *plan = vm_program_plan(program_at(L, 1));
        json_object_set_new(object, "recomputed", recomputed_json(plan));
        json_object_set_new(object, "offloaded", offloaded_json(plan));
        json_object_set_new(object, "host_bytes", json_integer(r->host_bytes));
    }
    if (object && r->repeats)
        json_object_set_new(object, "repeats_steps", json_boolean(r->repeats > 0));
    if (object && r->groups) json_object_set_new(object, "groups", json_string(r->groups));
    if (object && r->samples) json_object_set_new(object, "samples", json_true());
    if (object && r->kept) json_object_set_new(object, "increment", json_loads(r->kept, 0, NULL));
    add_end(vm, object);
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;
    if (text && vm->options->facts) {
        luaL_getsubtable(L, LUA_REGISTRYINDEX, "mlua.reports");
        lua_pushstring(L, text);
        lua_rawseti(L, -2, (lua_Integer)lua_rawlen(L, -2) + 1);
        lua_pop(L, 1);
    } else if (text) {
        fprintf(vm->options->json_out, "%s\n", text);
    }
    fflush(vm->options->json_out);
    ml_free(text); /* main.c sets ml_alloc as jansson's allocator */
    json_decref(object);
}

/* ---- core.report ----------------------------------------------------------------------------- */

/* The script of the prompt: `:check` reports it. */
static int keep_report(lua_State *L) {
    lua_createtable(L, 2, 0);
    lua_pushvalue(L, 1);
    lua_rawseti(L, -2, 1);
    lua_pushvalue(L, 2);
    lua_rawseti(L, -2, 2);
    lua_setfield(L, LUA_REGISTRYINDEX, "mlua.report");
    return 0;
}

static int core_report(lua_State *L) {
    static const char *const parts[] = {"all", "memory", "shard", NULL};
    ml_vm *vm = vm_of(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 2);
    if (vm_table_length(L, 1) < 1) vm_fail(L, NULL, "report needs a program");
    double tokens = 0, accum = 1;
    report r = {.graph = vm->graph, .step_programs = vm_table_length(L, 1)};
    if (lua_istable(L, 2)) {
        if (vm_option(L, 2, "step")) r.step_programs = (int64_t)lua_tonumber(L, -1);
        if (vm_option(L, 2, "tokens")) tokens = lua_tonumber(L, -1);
        if (vm_option(L, 2, "samples")) r.samples = lua_toboolean(L, -1);
        if (vm_option(L, 2, "accum")) accum = lua_tonumber(L, -1);
        if (vm_option(L, 2, "flops")) r.flops = lua_tonumber(L, -1);
        if (vm_option(L, 2, "part")) r.part = (report_part)luaL_checkoption(L, -1, "all", parts);
        if (vm_option(L, 2, "kept")) r.kept = lua_tostring(L, -1); /* options have it */
        if (vm_option(L, 2, "groups")) r.groups = lua_tostring(L, -1);
        if (vm_option(L, 2, "partial")) r.partial = lua_toboolean(L, -1);
        if (vm_option(L, 2, "typed")) r.typed = lua_toboolean(L, -1);
        lua_settop(L, 2);
    }
    lua_pushboolean(L, 1);
    lua_setfield(L, LUA_REGISTRYINDEX, "mlua.reported");
    if (vm->dry.runs && vm->options->mode == VM_REPL) return keep_report(L);
    const ml_target *target = vm_target(L);
    ml_time_part("the program's record");
    predict_step_of(L, &r, accum);
    read_programs(L, &r, accum);
    read_states(L, &r);
    luaL_checkstack(L, 64, "a report");
    r.fits = !target->memory_bytes || r.peak_bytes <= target->memory_bytes;
    bool discards = vm->discards;
    output_discard(vm, false);
    if (vm->options->json)
        print_json(L, &r, tokens);
    else
        print_text(L, &r, tokens);
    output_discard(vm, discards);
    ml_time_part("report");
    if (!r.fits) planned_require(L, r.largest, r.other_bytes);
    return 0;
}

/* In check mode, registry "mlua.programs" lists all programs, and "mlua.reported" says whether the
 * script has called core.report. */
int vm_report_rest(lua_State *L) {
    if (lua_getfield(L, LUA_REGISTRYINDEX, "mlua.reported") != LUA_TNIL) return 0;
    lua_pushcfunction(L, core_report);
    if (lua_getfield(L, LUA_REGISTRYINDEX, "mlua.programs") == LUA_TTABLE) {
        lua_call(L, 1, 0);
    } else if (!vm_of(L)->options->json) {
        printf("no program: nothing to plan\n");
    }
    return 0;
}

static int core_rank_memory(lua_State *L) {
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    if (vm_table_length(L, 1) < 1) vm_fail(L, NULL, "rank_memory needs a program");
    const rank_memory rank = push_memory(L);
    lua_newtable(L);
    for (int i = 0; i < ML_MEMORY_KINDS; i++)
        vm_set_integer(L, ml_memory_names[i],
                       rank.largest->kind_bytes[i] + rank.beside.kind_bytes[i]);
    const int64_t limit = vm_target(L)->memory_bytes;
    lua_pushboolean(L, limit <= 0 || rank.peak_bytes <= limit);
    return 2;
}

static int core_predicted_seconds(lua_State *L) {
    vm_predicted predicted = {0};
    lua_settop(L, 1);
    const vm_program *program = vm_to_program(L, 1);
    if (!program) vm_fail(L, NULL, "predicted_seconds takes a program");
    const ml_plan *plan = vm_program_plan(program);
    if (!predicted_rates(L, plan->layout ? ml_layout_ranks(plan->layout) : 1, &predicted)) return 0;
    predicted_add(L, &predicted, plan, 1);
    lua_pushnumber(L, predicted.step.seconds);
    return 1;
}

static const vm_entry functions[] = {
    {"predicted_seconds", core_predicted_seconds, "program: Program -> number?",
     "the time that mlua check predicts of a run; nil where nothing is known of the device"},
    {"rank_memory", core_rank_memory, "programs: Program[] -> table<string, integer>, boolean",
     "bytes by kind that a rank takes at its peak for all of these programs; whether they fit"},
    {"report", core_report,
     "programs: Program[], options?: {parameters: State[], tokens: number, accum: number, flops: "
     "number, step: integer, part: \"all\"|\"memory\"|\"shard\", typed: boolean, kept: string, "
     "groups: string, partial: boolean, runs: {program: Program, documents: Host|false, times?: "
     "number}[], lengths: "
     "string}",
     "print what mlua check prints, or a part of it, and raise where the programs do not fit the "
     "device; the first `step` programs (default: all) make a step, the others run between steps; "
     "the first runs `accum` times, of `flops` in all (default: its own)"},
    {0}};

void vm_check_register(lua_State *L) {
    vm_register(L, functions);
}
