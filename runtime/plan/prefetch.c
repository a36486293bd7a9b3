/* What rebuilds a parameter cache by all-gathers: its order, and which of these are prefetches, as
 * they continue beside the programs that follow.
 *
 * Its kernels come first, then the all-gathers that wait for nothing else and whose results are
 * cached as they are, so that few launches have them. An all-gather whose result is a whole cached
 * state has its operand in the rank's part of that state's memory, a parameter that is not cast by
 * a copy. It takes no temporary then, and need not be done before another program starts: each
 * program waits for it where it first reads the state. They are in the order in which the cache's
 * program reads the states; the first launches are short.
 *
 * None is a prefetch along a mesh axis that the program's own collectives use: these would come
 * after it. Between hosts NCCL has them, and its kernels of two communicators have no common order
 * on all ranks: there is none where the program sends. Where groups run programs of their own,
 * those that send wait for the prefetches (device/cuda/cuda_prefetch.c).
 */
#include <stdlib.h>

#include "runtime/plan/dependencies.h"
#include "runtime/plan/plan_internal.h"

enum { LEAST_COPY = 64 << 10 }; /* bytes: a launch for all others costs less than a copy of each */

typedef __typeof__(((ml_schedule *)0)->steps) step_list;

static bool is_collective(const ml_step *step) {
    return step->kind == ML_STEP_COLLECTIVE;
}

/* ---- The order ---- */
enum { KERNELS, COLLECTIVES, REST, CLASSES };

/* Of the values that the rebuild assigns. */
static bool *assigned_find(const ml_plan *plan) {
    const ml_schedule *s = plan->schedule;
    bool *assigned = ML_NEW_ARRAY(s->arena, bool, (size_t)s->storages.count + 1);
    for (int i = 0; i < plan->roots.update_count; i++)
        assigned[s->values.at[s->update_values[i]].storage] = true;
    return assigned;
}

/* All-gathers whose result is cached as it is come before others, whose results are temporaries. */
static void order(ml_plan *plan) {
    ml_schedule *s = plan->schedule;
    const bool *assigned = assigned_find(plan);
    bool *late = ML_NEW_ARRAY(s->arena, bool, (size_t)s->storages.count + 1);
    uint8_t *class = ML_NEW_ARRAY(s->arena, uint8_t, (size_t)s->steps.count + 1);
    for (uint32_t t = 0; t < s->steps.count; t++) {
        const ml_step *step = &s->steps.at[t];
        const uint32_t *values = step->values;
        bool depends = false;
        for (int i = 0; i < step->read_count; i++) depends |= late[s->values.at[values[i]].storage];
        class[t] = KERNELS;
        if (is_collective(step))
            class[t] = assigned[s->values.at[values[1]].storage] ? COLLECTIVES : REST;
        if (depends) class[t] = REST;
        for (int i = step->read_count; i < step->read_count + step->write_count; i++)
            late[s->values.at[values[i]].storage] |= class[t] != KERNELS;
    }
    step_list steps = {0};
    for (int c = 0; c < CLASSES; c++)
        for (uint32_t t = 0; t < s->steps.count; t++)
            if (class[t] == c) *ML_PUSH(s->arena, &steps) = s->steps.at[t];
    s->steps = steps;
}

/* ---- Prefetches ---- */
typedef struct {
    ml_plan *plan;
    ml_schedule *s;
    const uint32_t *reads, *writes; /* by storage: how many steps */
    bool used[ML_MAX_MESH];         /* mesh axes of the program's collectives */
    bool sends;
} prefetch;

static void axes_find(prefetch *p, const ml_graph *program) {
    for (ml_ref n = 1; n < ml_graph_count(program); n++) {
        const ml_node *node = ml_graph_node(program, n);
        if (ml_ops[node->op].op_class != ML_CLASS_COLLECTIVE) continue;
        p->used[ml_graph_args(program, n)[0]] = true;
        p->sends = true;
    }
}

static void uses_count(prefetch *p) {
    const ml_schedule *s = p->s;
    uint32_t *reads = ML_NEW_ARRAY(s->arena, uint32_t, (size_t)s->storages.count + 1);
    uint32_t *writes = ML_NEW_ARRAY(s->arena, uint32_t, (size_t)s->storages.count + 1);
    storage_uses_count(s, reads, writes);
    p->reads = reads;
    p->writes = writes;
}

static ml_prefetch prefetch_kind(const prefetch *p, const ml_collective_step *c) {
    if (p->used[c->mesh_axis]) return ML_PREFETCH_NONE;
    if (!p->sends) return ML_PREFETCH_ANY;
    return plan_within_host(p->plan->layout, p->plan->target, c->mesh_axis) ? ML_PREFETCH_COPIES
                                                                            : ML_PREFETCH_NONE;
}

/* Whether the result is a whole state that nothing else uses, in which the operand has room. */
static bool fits(const prefetch *p, const ml_step *step) {
    const ml_collective_step *c = step->collective;
    const ml_value *from = &p->s->values.at[step->values[0]];
    const ml_value *to = &p->s->values.at[step->values[1]];
    const ml_storage *operand = &p->s->storages.at[from->storage];
    const ml_storage *result = &p->s->storages.at[to->storage];
    if (c->kind != ML_COLLECTIVE_ALL_GATHER || !prefetch_kind(p, c)) return false;
    if (result->kind != ML_STORAGE_STATE || result->offset != 0 || p->reads[to->storage] != 0)
        return false;
    return p->writes[to->storage] == 1 && value_is_whole(p->s, from) && value_is_whole(p->s, to) &&
           result->bytes == operand->bytes * c->ranks && operand->bytes % ARENA_ALIGNMENT == 0;
}

/* The rank's part of the gathered state. */
static ml_storage part_of(const prefetch *p, const ml_step *step) {
    ml_storage part = p->s->storages.at[p->s->values.at[step->values[0]].storage];
    part.kind = ML_STORAGE_STATE;
    part.id = p->s->storages.at[p->s->values.at[step->values[1]].storage].id;
    part.part_of = step->collective->mesh_axis + 1;
    return part;
}

/* A copy of a state, a parameter that is not cast, to the part of the result, which becomes the
 * step's operand. */
static ml_step copy_part(const prefetch *p, ml_step *step) {
    ml_schedule *s = p->s;
    ml_step copy = {.kind = ML_STEP_COPY, .node = step->node, .read_count = 1, .write_count = 1};
    ml_value to = s->values.at[step->values[0]];
    const ml_storage part = part_of(p, step);
    to.storage = s->storages.count;
    *ML_PUSH(s->arena, &s->storages) = part;
    *ML_PUSH(s->arena, &s->values) = to;
    copy.values = ML_NEW_ARRAY(s->arena, uint32_t, 2);
    copy.values[0] = step->values[0];
    copy.values[1] = s->values.count - 1;
    copy.may_alias = ML_NEW(s->arena, uint64_t);
    copy.bytes = 2 * part.bytes;
    uint32_t *values = ML_NEW_ARRAY(s->arena, uint32_t, 2);
    values[0] = copy.values[1];
    values[1] = step->values[1];
    step->values = values;
    return copy;
}

/* The operand lies in the rank's part of the result, where need be by a copy; false: it cannot. */
static bool in_place(const prefetch *p, ml_step *step, step_list *copies) {
    const uint32_t from = p->s->values.at[step->values[0]].storage;
    if (!fits(p, step)) return false;
    ml_storage *operand = &p->s->storages.at[from];
    if (operand->kind == ML_STORAGE_TEMPORARY && p->reads[from] == 1)
        *operand = part_of(p, step);
    else if (operand->kind == ML_STORAGE_STATE && p->writes[from] == 0 &&
             operand->bytes >= LEAST_COPY)
        *ML_PUSH(p->s->arena, copies) = copy_part(p, step);
    else
        return false;
    return true;
}

/* By state: the first node of the program that reads it. */
static uint32_t *first_uses(const ml_graph *g, ml_arena *arena) {
    const uint32_t states = ml_graph_state_count(g);
    uint32_t *first = ML_NEW_ARRAY(arena, uint32_t, (size_t)states + 1);
    for (uint32_t i = 0; i < states; i++) first[i] = UINT32_MAX;
    for (ml_ref n = ml_graph_count(g) - 1; n > 0; n--)
        for (int i = 0; i < ml_graph_node(g, n)->source_count; i++) {
            const ml_ref source = ml_graph_source(g, n, i);
            if (ml_graph_node(g, source)->op == ML_OP_STATE) first[ml_graph_args(g, source)[0]] = n;
        }
    return first;
}

typedef struct {
    uint32_t use, at; /* of the state; the step */
} first_use;

static int compare_uses(const void *left, const void *right) {
    const first_use *a = left, *b = right;
    if (a->use != b->use) return a->use < b->use ? -1 : 1;
    return a->at < b->at ? -1 : a->at > b->at;
}

/* Launches: each of `least` of all bytes, or half of what came before it, and of `most` at most. */
static void launches_number(const prefetch *p, uint32_t first, double all) {
    ml_schedule *s = p->s;
    const double least = 1.0 / 32, most = 1.0 / 8;
    double begun = 0, bytes = 0;
    uint32_t launch = 1;
    for (uint32_t t = first; t < s->steps.count; t++) {
        ml_collective_step *c = ML_NEW(s->arena, ml_collective_step);
        ml_step *step = &s->steps.at[t];
        double size = begun / 2 < least * all ? least * all : begun / 2;
        if (size > most * all) size = most * all;
        if (bytes >= size) launch++, begun += bytes, bytes = 0;
        *c = *step->collective;
        c->prefetch = prefetch_kind(p, c);
        c->ticket = t - first + 1;
        c->launch = launch;
        step->collective = c;
        bytes += ml_step_sent(c);
    }
}

void plan_prefetch(ml_plan *plan, const ml_graph *program) {
    ml_schedule *s = plan->schedule;
    prefetch p = {.plan = plan, .s = s};
    const uint32_t *first = first_uses(program, s->arena);
    uint32_t count = 0;
    step_list steps = {0}, others = {0};
    double all = 0;
    axes_find(&p, program);
    order(plan);
    plan_update_states(plan);
    uses_count(&p);
    first_use *chosen = ML_NEW_ARRAY(s->arena, first_use, (size_t)s->steps.count + 1);
    for (uint32_t t = 0; t < s->steps.count; t++) {
        ml_step *step = &s->steps.at[t];
        if (!is_collective(step) || !in_place(&p, step, &steps)) {
            *ML_PUSH(s->arena, &others) = *step;
            continue;
        }
        const uint32_t state = s->storages.at[s->values.at[step->values[1]].storage].id;
        chosen[count++] = (first_use){first[state], t};
        all += ml_step_sent(step->collective);
    }
    qsort(chosen, count, sizeof *chosen, compare_uses);
    for (uint32_t i = 0; i < others.count; i++) *ML_PUSH(s->arena, &steps) = others.at[i];
    for (uint32_t i = 0; i < count; i++) *ML_PUSH(s->arena, &steps) = s->steps.at[chosen[i].at];
    s->steps = steps;
    launches_number(&p, steps.count - count, all);
}
