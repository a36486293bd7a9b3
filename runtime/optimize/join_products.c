/* A step of decoding is short: what lies between two of its products, the end of a kernel and the
 * start of the next, takes as long as reading several megabytes. So products of few rows of one
 * first operand become one kernel; and what computes that operand, such as a norm or a gate, a part
 * of the product's kernel, in which each block does it again.
 *
 * What computes an operand has one result, which the product alone reads. */
#include "runtime/optimize/optimize.h"
#include "runtime/plan/dependencies.h"
#include "runtime/plan/plan_internal.h"

#include <string.h>

typedef struct {
    ml_schedule *s;
    step_uses uses;
    bool *leaves; /* by storage: an output or a new value of a state */
    bool *joined; /* by step: it is a part of another */
} work;

static const ml_value *value_of(const work *w, const ml_step *step, int i) {
    return &w->s->values.at[step->values[i]];
}

/* The step that computes what product t reads first, and does nothing else; NO_STEP. */
static uint32_t find_computing(const work *w, uint32_t t) {
    const ml_step *product = &w->s->steps.at[t];
    const ml_value *operand = value_of(w, product, 0);
    const uint32_t storage = operand->storage;
    const step_use *use = &w->uses.use[w->uses.of_storage[storage]];
    if (w->s->storages.at[storage].kind != ML_STORAGE_TEMPORARY || w->leaves[storage])
        return NO_STEP;
    if (w->uses.of_storage[storage + 1] - w->uses.of_storage[storage] != 2) return NO_STEP;
    const ml_step *step = &w->s->steps.at[use->step];
    if (!use->writes || use[1].step != t || step->kind != ML_STEP_KERNEL || step->ir == NULL)
        return NO_STEP;
    if (step->members > 0 || step->write_count != 1 || step->read_count == 0) return NO_STEP;
    return value_of(w, step, step->read_count)->offset == operand->offset ? use->step : NO_STEP;
}

/* The product with the operands of what computes its first one in the place of that. */
static void join(work *w, uint32_t from, uint32_t t) {
    ml_schedule *s = w->s;
    const ml_step *computing = &s->steps.at[from];
    ml_step *product = &s->steps.at[t], whole = *product;
    ml_few_rows *few = ML_NEW(s->arena, ml_few_rows);
    const int own = product->read_count, others = computing->read_count - 1;
    *few = *product->few_rows;
    few->computes = computing->ir;
    whole.few_rows = few;
    whole.read_count = own + others;
    whole.values = ML_NEW_ARRAY(s->arena, uint32_t, own + others + product->write_count);
    memcpy(whole.values, product->values, sizeof *whole.values * (size_t)own);
    whole.values[0] = computing->values[0];
    for (int i = 0; i < others; i++) whole.values[own + i] = computing->values[1 + i];
    for (int i = 0; i < product->write_count; i++)
        whole.values[own + others + i] = product->values[own + i];
    whole.flops += computing->flops;
    whole.bytes += computing->bytes;
    if (!ml_template_few_rows(s, &whole, few)) return;
    const char *label = computing->kernel->label;
    whole.kernel->label = ml_arena_format(s->arena, "%s+%s", label, product->kernel->label);
    *product = whole;
    w->joined[from] = true;
}

/* ---- Products of one operand ----------------------------------------------------------------- */

/* Whether what step t reads is there before step `before`: all parts of what steps write in parts.
 */
static bool reads_early(const work *w, uint32_t t, uint32_t before) {
    const ml_step *step = &w->s->steps.at[t];
    for (int i = 0; i < step->read_count; i++) {
        const uint32_t storage = value_of(w, step, i)->storage;
        const uint32_t end = w->uses.of_storage[storage + 1];
        for (uint32_t k = w->uses.of_storage[storage]; k < end; k++) {
            const step_use *use = &w->uses.use[k];
            if (use->writes && use->step >= before && use->step < t) return false;
        }
    }
    return true;
}

static bool has_one_operand(const work *w, const ml_step *a, const ml_step *b) {
    const ml_value *x = value_of(w, a, 0), *y = value_of(w, b, 0);
    return x->storage == y->storage && x->offset == y->offset;
}

/* Product t with product `other`, which comes later, too. */
static bool add_product(work *w, uint32_t t, uint32_t other) {
    ml_schedule *s = w->s;
    const ml_step *more = &s->steps.at[other];
    ml_step *step = &s->steps.at[t], whole = *step;
    const int reads = step->read_count, new = more->read_count - 1;
    ml_few_rows *list = NULL, *last = NULL;
    for (const ml_few_rows *p = step->few_rows; p; p = p->next) {
        ml_few_rows *own = ML_NEW(s->arena, ml_few_rows);
        *own = *p;
        *(last ? (ml_few_rows **)&last->next : &list) = own;
        last = own;
    }
    last->next = more->few_rows;
    uint32_t *values =
        ML_NEW_ARRAY(s->arena, uint32_t, reads + new + step->write_count + more->write_count);
    memcpy(values, step->values, sizeof *values * (size_t)reads);
    memcpy(values + reads, more->values + 1, sizeof *values * (size_t) new);
    memcpy(values + reads + new, step->values + reads, sizeof *values * (size_t)step->write_count);
    memcpy(values + reads + new + step->write_count, more->values + more->read_count,
           sizeof *values * (size_t)more->write_count);
    whole.values = values, whole.few_rows = list, whole.may_alias = NULL;
    whole.read_count = reads + new, whole.write_count = step->write_count + more->write_count;
    whole.flops += more->flops, whole.bytes += more->bytes;
    if (!ml_template_few_rows(s, &whole, list)) return false;
    *step = whole;
    return w->joined[other] = true;
}

static void add_products(work *w, uint32_t t) {
    enum { FARTHEST = 8, MOST = 8 }; /* steps; products */
    const ml_schedule *s = w->s;
    int count = 1;
    for (uint32_t i = t + 1; i < s->steps.count && i <= t + FARTHEST && count < MOST; i++)
        if (s->steps.at[i].few_rows && !w->joined[i] &&
            has_one_operand(w, &s->steps.at[t], &s->steps.at[i]) && reads_early(w, i, t))
            count += add_product(w, t, i);
}

static void begin(work *w, ml_plan *plan) {
    ml_schedule *s = w->s = plan->schedule;
    w->leaves = ML_NEW_ARRAY(s->arena, bool, s->storages.count + 1);
    w->joined = ML_NEW_ARRAY(s->arena, bool, s->steps.count + 1);
    step_uses_find(s, NULL, s->arena, &w->uses);
    for (int i = 0; i < plan->roots.output_count; i++)
        w->leaves[s->values.at[s->output_values[i]].storage] = true;
    for (int i = 0; i < plan->roots.update_count; i++)
        w->leaves[s->values.at[s->update_values[i]].storage] = true;
}

static void drop_joined(work *w) {
    ml_schedule *s = w->s;
    __typeof__(s->steps) steps = {0};
    for (uint32_t t = 0; t < s->steps.count; t++)
        if (!w->joined[t]) *ML_PUSH(s->arena, &steps) = s->steps.at[t];
    s->steps = steps;
}

void plan_join_products(ml_plan *plan) {
    work w;
    begin(&w, plan);
    for (uint32_t t = 0; t < w.s->steps.count; t++)
        if (w.s->steps.at[t].few_rows && !w.joined[t]) add_products(&w, t);
    drop_joined(&w);
    begin(&w, plan);
    for (uint32_t t = 0; t < w.s->steps.count; t++) {
        if (w.s->steps.at[t].few_rows == NULL) continue;
        const uint32_t from = find_computing(&w, t);
        if (from != NO_STEP) join(&w, from, t);
    }
    drop_joined(&w);
}
