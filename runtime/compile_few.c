/* Estimates of plans of many layers (compile_few.h). */
#include "runtime/compile_few.h"

#include "runtime/passes/fold_layers.h"
#include "runtime/plan/plan_internal.h"

enum {
    FEWER = 12,     /* layers that stay at each end of the first program: the ends are apart */
    LEAST_SHARE = 3 /* times the nodes of both that the whole program has, at least */
};

typedef struct {
    const ml_graph *g;
    const ml_roots *roots;
    int64_t left_out; /* of `g`; 0: it is the whole program */
    ml_arena *arena, *scratch;
    few_layers *few;
    bool made;
} making;

/* Without most layers of `from`, whose number *left is lowered. */
static bool make(making *m, const ml_graph *from, const ml_roots *of, int margin, few_program *to,
                 double *left) {
    fold f;
    ml_roots roots = *of;
    to->graph = fold_layers(from, &roots, margin, m->scratch, &f);
    if (to->graph == NULL) return false;
    to->roots = plan_roots_copy(m->arena, &roots);
    *left -= (double)(f.high - f.low);
    to->layers = *left;
    return true;
}

static void copy(making *m, few_program *to) {
    ml_roots roots = *m->roots;
    to->roots = plan_roots_copy(m->arena, &roots);
    to->graph = ml_graph_extract(m->g, &to->roots);
    to->layers = -(double)m->left_out;
}

/* The layers of the smaller program, from the first of its regions: what `layers` counts from. */
static double count_layers(making *m, const few_program *p) {
    repeats all;
    repeats_find(p->graph, 2 * FEWER, m->scratch, &all);
    uint32_t least = 0;
    for (uint32_t i = 0; i < all.count; i++)
        if (least == 0 || all.at[i].count < least) least = all.at[i].count;
    return least;
}

/* Whether there are so many layers in all that plans of few take a small part of the time. */
static bool are_few(const making *m, double layers) {
    const few_layers *few = m->few;
    const uint32_t second = ml_graph_count(few->at[1].graph);
    const uint32_t both = ml_graph_count(few->at[0].graph) + second;
    if (m->left_out > 0) return few->layers >= LEAST_SHARE * (layers + few->at[1].layers);
    return ml_graph_count(m->g) / LEAST_SHARE >= both;
}

static void body(void *argument) {
    making *m = argument;
    few_layers *few = m->few;
    few_program *fewer = &few->at[0], *more = &few->at[1];
    double left = -(double)m->left_out;
    if (m->left_out > 0)
        copy(m, more);
    else if (!make(m, m->g, m->roots, FEW_MARGIN, more, &left))
        return;
    const double before = left;
    if (!make(m, more->graph, &more->roots, FEWER, fewer, &left)) return;
    if (m->left_out > 0 && before - left != 2 * (FEW_MARGIN - FEWER)) return; /* other layers */
    const double layers = count_layers(m, fewer);
    few->layers = layers - fewer->layers;
    more->layers += few->layers;
    fewer->layers = layers;
    m->made = layers > 0 && are_few(m, layers);
}

bool few_layers_make(const ml_graph *g, const ml_roots *roots, int64_t left_out, ml_arena *arena,
                     few_layers *few) {
    making m = {g, roots, left_out, arena, ml_arena_new(), few, false};
    *few = (few_layers){0};
    if (m.scratch == NULL) ml_raise(ML_NO_MEMORY, "out of memory while planning a program");
    const ml_status status = ml_protect(body, &m);
    ml_arena_free(m.scratch);
    if (status != ML_OK || !m.made) few_layers_free(few);
    if (status != ML_OK) ml_raise_last();
    return m.made;
}

void few_layers_free(few_layers *few) {
    for (int i = 0; i < 2; i++) {
        if (few->at[i].graph != NULL) ml_graph_free(few->at[i].graph);
        few->at[i].graph = NULL;
    }
}

double few_beyond(const few_layers *few) {
    return (few->layers - few->at[1].layers) / (few->at[1].layers - few->at[0].layers);
}

double few_extended(const few_layers *few, double first, double second) {
    return second + (second - first) * few_beyond(few);
}

static int64_t extended(const few_layers *few, int64_t first, int64_t second) {
    const double value = few_extended(few, (double)first, (double)second);
    return value > 0 ? (int64_t)value : 0;
}

update_memory few_extended_update(const few_layers *few, const update_memory *of) {
    return (update_memory){.states = extended(few, of[0].states, of[1].states),
                           .inputs = extended(few, of[0].inputs, of[1].inputs),
                           .temporaries = extended(few, of[0].temporaries, of[1].temporaries),
                           .copies = extended(few, of[0].copies, of[1].copies)};
}

plan_size few_extended_size(const few_layers *few, const plan_size *of) {
    plan_size size = of[1];
    size.peak = extended(few, of[0].peak, of[1].peak);
    size.reach = extended(few, of[0].reach, of[1].reach);
    size.states = extended(few, of[0].states, of[1].states);
    size.moments = extended(few, of[0].moments, of[1].moments);
    size.shared = extended(few, of[0].shared, of[1].shared);
    size.seconds = few_extended(few, of[0].seconds, of[1].seconds);
    return size;
}

void few_extend_work(const few_layers *few, const ml_plan *fewer, ml_plan *plan) {
    plan->host_bytes = extended(few, fewer->host_bytes, plan->host_bytes);
    plan->offloaded_bytes = extended(few, fewer->offloaded_bytes, plan->offloaded_bytes);
    plan->flops = few_extended(few, fewer->flops, plan->flops);
}

void few_extend_temporaries(const few_layers *few, ml_plan *const *plans) {
    const ml_plan *a = plans[0], *b = plans[1];
    const int64_t arena = extended(few, a->arena_bytes, b->arena_bytes);
    /* The arena with as many copies as computation hides. */
    const int64_t reach = extended(few, a->reach_bytes - a->peak_bytes + a->arena_bytes,
                                   b->reach_bytes - b->peak_bytes + b->arena_bytes);
    ml_plan *first = plans[0]->rebuild, *second = plans[1]->rebuild;
    for (; first != NULL && second != NULL; first = first->next, second = second->next)
        first->arena_bytes = second->arena_bytes =
            extended(few, first->arena_bytes, second->arena_bytes);
    for (int i = 0; i < 2; i++) {
        ml_plan *plan = plans[i];
        const int64_t others = plan->peak_bytes - plan->arena_bytes;
        plan->kind_bytes[ML_MEMORY_ACTIVATIONS] += arena - plan->arena_bytes;
        plan->arena_bytes = arena;
        plan->peak_bytes = others + arena;
        plan->reach_bytes = others + reach;
    }
}
