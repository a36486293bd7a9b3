/* Cutting a stage's graph into pieces: which node is of which piece, what lies in cells, and the
 * graphs of the pieces. */
#include "runtime/pipeline/split_tasks.h"

#include <math.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/plan/arena_place.h"

enum { FREE = -1, NOT_SAVED = -1, NO_TASK = -1 };
typedef uint32_t task_mask;

/* Values in memory that another is made of. */
enum { BASES = 8 };
typedef struct {
    int count;
    ml_ref of[BASES];
} base_list;

typedef struct {
    const ml_graph *g;
    const ml_roots *roots;
    const int *input_wave;
    ml_arena *arena;
    task_programs *set;
    uint32_t count;
    int main_tasks;      /* without the late one */
    int *wave;           /* by node: FREE where it needs nothing received */
    bool *cheap;         /* FREE, and computed anew wherever it is needed */
    bool *exclusive;     /* by state: read by one piece alone */
    bool *once_per_step; /* the steady piece makes it for others */
    bool *in_once;       /* the steady piece computes it */
    bool *input_grad;    /* of the highest level, and not of the late piece */
    bool *root;          /* an output or the new value of a state */
    bool *live;
    task_mask *need, *made; /* by node: the pieces that read it, and that compute it */
    task_mask *wanted;      /* need of the first walk, and what views_join adds */
    task_mask *several;     /* of an op's other outputs */
    base_list *bases;       /* by node and piece: see bases_find */
    double *parts;          /* bytes of what it is made of */
    int *saved_of;          /* by node */
    ML_VEC(saved_value) saved;
} cutting;

static int lowest(task_mask mask) {
    return mask ? __builtin_ctz(mask) : 0;
}
static task_mask bit(int task) {
    return (task_mask)1 << task;
}

/* ---- levels ---- */
static bool cheap_op(ml_op op) {
    switch (ml_ops[op].op_class) {
    case ML_CLASS_LEAF:
    case ML_CLASS_MAP: return true;
    case ML_CLASS_COLLECTIVE: return op == ML_OP_ALL_GATHER;
    case ML_CLASS_MOVE: return op != ML_OP_GATHER && op != ML_OP_OUT;
    default: return false;
    }
}

static void waves_find(cutting *c) {
    for (ml_ref n = 1; n < c->count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        c->wave[n] = FREE;
        c->cheap[n] = cheap_op(node->op);
        if (node->op == ML_OP_INPUT) {
            int wave = c->input_wave[ml_graph_args(c->g, n)[0]];
            if (wave > 0) c->wave[n] = wave, c->cheap[n] = false;
        }
        if (node->op == ML_OP_STATE && c->exclusive[ml_graph_args(c->g, n)[0]]) c->cheap[n] = false;
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            if (c->wave[source] > c->wave[n]) c->wave[n] = c->wave[source];
            c->cheap[n] = c->cheap[n] && c->cheap[source];
        }
    }
}

/* By node: the sum over microbatches, plus 1, whose new value alone needs it; 0 where there is none
 * or something else does. */
static uint32_t *sums_find(const cutting *c) {
    const ml_roots *r = c->roots;
    uint32_t *sum = ML_NEW_ARRAY(c->arena, uint32_t, c->count);
    uint32_t *users = ML_NEW_ARRAY(c->arena, uint32_t, c->count); /* but those of the sum */
    for (ml_ref n = 1; n < c->count; n++)
        for (int i = 0; i < ml_graph_node(c->g, n)->source_count; i++)
            users[ml_graph_source(c->g, n, i)]++;
    for (int i = 0; i < r->output_count; i++) users[r->outputs[i]]++;
    for (int i = 0; i < r->update_count; i++) {
        const ml_update *update = &r->updates[i];
        bool adds = c->exclusive[update->state] &&
                    ml_graph_state(c->g, update->state)->kind == ML_STATE_GRADIENT;
        if (adds && !sum[update->value]) sum[update->value] = update->state + 1;
        if (!adds || sum[update->value] != update->state + 1) users[update->value]++;
    }
    for (ml_ref n = c->count; n-- > 1;) {
        if (users[n]) sum[n] = 0; /* not all of them lead to the sum */
        for (int i = 0; sum[n] && i < ml_graph_node(c->g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            if (!sum[source]) sum[source] = sum[n];
            if (sum[source] == sum[n]) users[source]--;
        }
    }
    return sum;
}

/* A sum over microbatches is read where its new value is known: of several terms the first would
 * read it before. */
static void sums_wait(cutting *c) {
    const ml_roots *r = c->roots;
    uint32_t *sum = sums_find(c);
    bool *reads = ML_NEW_ARRAY(c->arena, bool, c->count);
    int *wave = ML_NEW_ARRAY(c->arena, int, (size_t)ml_graph_state_count(c->g) + 1);
    for (int i = 0; i < r->update_count; i++)
        wave[r->updates[i].state] = c->wave[r->updates[i].value];
    for (ml_ref n = 1; n < c->count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        if (!sum[n]) continue;
        reads[n] = node->op == ML_OP_STATE && (uint32_t)ml_graph_args(c->g, n)[0] + 1 == sum[n];
        for (int i = 0; i < node->source_count; i++)
            reads[n] = reads[n] || reads[ml_graph_source(c->g, n, i)];
        if (node->op != ML_OP_STATE && reads[n] && c->wave[n] < wave[sum[n] - 1])
            c->wave[n] = wave[sum[n] - 1];
    }
}

static void tasks_list(cutting *c, const task_waves *waves) {
    c->main_tasks = c->set->count = waves->count;
    for (int i = 0; i < waves->count; i++) c->set->tasks[i].wave = waves->wave[i];
    if (!waves->weight_grad) return;
    c->set->tasks[waves->count] =
        (task_program){.wave = waves->wave[waves->count - 1], .weight_grad = true};
    c->set->count++;
}

/* ---- which piece computes what ---- */
static int task_at(const cutting *c, ml_ref n) {
    int i = 0;
    while (c->set->tasks[i].wave != c->wave[n]) i++;
    bool last = i == c->main_tasks - 1, split = c->set->count > c->main_tasks;
    return last && split && !c->input_grad[n] ? c->main_tasks : i;
}

/* What costs no more than a pass over memory to compute again. */
static bool light(const cutting *c, ml_ref n) {
    const ml_node *node = ml_graph_node(c->g, n);
    return node->source_count > 0 && cheap_op(node->op);
}

static ml_ref viewed(const ml_graph *g, ml_ref n) {
    for (;;) {
        switch (ml_graph_node(g, n)->op) {
        case ML_OP_SLICE:
        case ML_OP_RENAME:
        case ML_OP_PERMUTE:
        case ML_OP_SPLIT:
        case ML_OP_MERGE: n = ml_graph_source(g, n, 0); break;
        default: return n;
        }
    }
}

/* Where a piece wants slices that together are all of a tensor (queries, keys and values of one
 * product), it is wanted itself, by all that want any: they are views of it. */
static void views_join(cutting *c) {
    int programs = c->set->count;
    memset(c->parts, 0, sizeof *c->parts * c->count * (size_t)programs);
    for (ml_ref n = 1; n < c->count; n++) {
        ml_ref base = viewed(c->g, n);
        for (int p = 0; base != n && p < programs; p++) {
            if (!(c->need[n] & ~c->made[n] & bit(p))) continue;
            c->parts[base * (size_t)programs + p] += (double)ml_type_bytes(ml_graph_type(c->g, n));
        }
    }
    for (ml_ref n = 1; n < c->count; n++) {
        double bytes = (double)ml_type_bytes(ml_graph_type(c->g, n)), most = 0;
        const double *parts = &c->parts[n * (size_t)programs];
        for (int p = 0; p < programs; p++) most = parts[p] > most ? parts[p] : most;
        for (int p = 0; most >= bytes && p < programs; p++)
            if (parts[p] > 0) c->wanted[n] |= bit(p);
    }
}

static bool has_base(const base_list *list, ml_ref n) {
    for (int i = 0; i < list->count; i++)
        if (list->of[i] == n) return true;
    return false;
}

/* What the node is made of in piece p, and how many bytes that is; infinitely many where it is more
 * than BASES values. */
static double bases_join(const cutting *c, ml_ref n, int p, base_list *out) {
    double bytes = 0;
    out->count = 0;
    for (int i = 0; i < ml_graph_node(c->g, n)->source_count; i++) {
        const base_list *of =
            &c->bases[ml_graph_source(c->g, n, i) * (size_t)c->set->count + (size_t)p];
        for (int k = 0; k < of->count; k++) {
            if (has_base(out, of->of[k])) continue;
            if (out->count == BASES) return INFINITY;
            bytes += (double)ml_type_bytes(ml_graph_type(c->g, of->of[k]));
            out->of[out->count++] = of->of[k];
        }
    }
    return bytes;
}

/* What a piece after n's own would have to find in memory to have n: nothing where others want it
 * there, n itself, or what it is made of where that is light work on fewer bytes. */
static void bases_find(cutting *c) {
    int programs = c->set->count;
    for (ml_ref n = 1; n < c->count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        double bytes = (double)ml_type_bytes(ml_graph_type(c->g, n));
        for (int p = 0; p < programs; p++) {
            base_list *list = &c->bases[n * (size_t)programs + (size_t)p];
            double parts = light(c, n) ? bases_join(c, n, p, list) : bytes;
            c->parts[n * (size_t)programs + (size_t)p] = parts;
            if (c->cheap[n] || node->op == ML_OP_INPUT || (c->wanted[n] & bit(p)))
                list->count = 0;
            else if (!(parts < bytes))
                *list = (base_list){1, {n}};
        }
    }
}

/* Whether piece p should rather compute n than read it from memory. */
static bool worth_anew(const cutting *c, ml_ref n, int p) {
    double bytes = (double)ml_type_bytes(ml_graph_type(c->g, n));
    return light(c, n) && c->parts[n * (size_t)c->set->count + p] < bytes;
}

/* One walk from users to sources. The first finds out who needs what; the second, which knows,
 * computes anew what is better not kept. */
static void tasks_walk(cutting *c, bool anew) {
    memset(c->need, 0, sizeof *c->need * c->count);
    memset(c->made, 0, sizeof *c->made * c->count);
    memset(c->several, 0, sizeof *c->several * c->count);
    memset(c->live, 0, sizeof *c->live * c->count);
    for (ml_ref n = c->count - 1; n > 0; n--) {
        const ml_node *node = ml_graph_node(c->g, n);
        if (c->root[n] && (c->wave[n] == FREE || node->op == ML_OP_INPUT))
            c->need[n] |= bit(c->wave[n] == FREE ? 0 : task_at(c, n));
        if (!c->need[n] && !c->several[n] && !c->root[n]) continue;
        c->live[n] = true;
        if (c->once_per_step[n]) continue; /* comes from the steady piece */
        task_mask need = c->need[n] | c->several[n];
        if (node->op == ML_OP_INPUT || c->cheap[n])
            c->made[n] = need;
        else
            c->made[n] = bit(c->wave[n] == FREE ? lowest(need) : task_at(c, n));
        bool again = node->flags & ML_NODE_COPY; /* meant to be computed where it is used */
        if (anew && !(need & c->made[n]) && !c->root[n] &&
            (again || worth_anew(c, n, lowest(need))))
            c->made[n] = bit(lowest(need)); /* its own piece has no use for it */
        for (int p = 0; anew && p < c->set->count; p++) {
            if ((need & ~c->made[n] & bit(p)) && worth_anew(c, n, p)) c->made[n] |= bit(p);
        }
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            if (node->op == ML_OP_OUT)
                c->several[source] |= c->need[n] | (c->root[n] ? c->made[n] : 0);
            else
                c->need[source] |= c->made[n];
        }
    }
    for (ml_ref n = 1; n < c->count; n++) { /* outputs of an op come with it */
        if (c->live[n] && ml_graph_node(c->g, n)->op == ML_OP_OUT)
            c->made[n] = c->made[ml_graph_source(c->g, n, 0)];
    }
    if (!anew) memcpy(c->wanted, c->need, sizeof *c->need * c->count);
}

static void roots_mark(cutting *c) {
    const ml_roots *r = c->roots;
    for (int i = 0; i < r->output_count; i++) {
        c->root[r->outputs[i]] = true;
        if (i >= r->output_count - r->kept) c->input_grad[r->outputs[i]] = true;
    }
    for (int i = 0; i < r->update_count; i++) {
        const ml_update *update = &r->updates[i];
        c->root[update->value] = true;
        /* The next microbatch waits for it. */
        if (c->exclusive[update->state] &&
            ml_graph_state(c->g, update->state)->kind != ML_STATE_GRADIENT)
            c->input_grad[update->value] = true;
    }
}

static void input_grad_spread(cutting *c) {
    for (ml_ref n = c->count - 1; n > 0; n--) {
        for (int i = 0; c->input_grad[n] && i < ml_graph_node(c->g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            c->input_grad[source] |= c->wave[source] == c->wave[n];
        }
    }
}

/* What is more than passes over memory. */
static bool heavy(const cutting *c, ml_ref n) {
    ml_op_class class = ml_ops[ml_graph_node(c->g, n)->op].op_class;
    return class == ML_CLASS_CONTRACT || class == ML_CLASS_ROUTINE || class == ML_CLASS_SCAN ||
           class == ML_CLASS_COLLECTIVE;
}

/* Of the highest level early is what something that is sent needs, and new values that need nothing
 * heavy besides: sums for biases and gains go over values that are just being computed, which the
 * late piece would have to read, or to find in memory in a wider dtype than others want them in. */
static void input_grad_find(cutting *c) {
    const ml_roots *r = c->roots;
    int last = c->set->tasks[c->main_tasks - 1].wave;
    bool *weight_grad = ML_NEW_ARRAY(c->arena, bool, c->count);
    input_grad_spread(c);
    for (ml_ref n = 1; n < c->count; n++) {
        if (c->wave[n] != last || c->input_grad[n]) continue;
        weight_grad[n] = heavy(c, n);
        for (int i = 0; i < ml_graph_node(c->g, n)->source_count; i++)
            weight_grad[n] |= weight_grad[ml_graph_source(c->g, n, i)];
    }
    for (int i = 0; i < r->update_count; i++)
        c->input_grad[r->updates[i].value] |= !weight_grad[r->updates[i].value];
    input_grad_spread(c);
}

/* States that the next microbatch reads while this one is under way. */
static void states_mark(cutting *c, bool overlaps) {
    c->exclusive = ML_NEW_ARRAY(c->arena, bool, (size_t)ml_graph_state_count(c->g) + 1);
    for (int i = 0; overlaps && i < c->roots->update_count; i++)
        c->exclusive[c->roots->updates[i].state] = true;
}

static _Noreturn void raise_early_read(const cutting *c, uint32_t state) {
    const ml_state *info = ml_graph_state(c->g, state);
    ml_fail(
        ML_INVALID,
        "state \"%s\" (%s:%d) is read before what it is assigned is known, and by then a pipeline "
        "has begun the next microbatch",
        info->name ? info->name : "?", info->origin.file ? info->origin.file : "?",
        info->origin.line);
    ml_help("assign what the forward pass of the layers that read it gives; or microbatches = 1");
    ml_raise_last();
}

/* The first piece that has the value. */
static int home_of(const cutting *c, ml_ref n) {
    return lowest(c->made[n] ? c->made[n] : c->need[n]);
}

/* An update comes with its value, but not before the last read of what the state held. */
static void updates_place(cutting *c, int *task_of) {
    uint32_t states = ml_graph_state_count(c->g);
    int *last = ML_NEW_ARRAY(c->arena, int, (size_t)states + 1);
    for (uint32_t i = 0; i < states; i++) last[i] = NO_TASK;
    for (ml_ref n = 1; n < c->count; n++) {
        if (ml_graph_node(c->g, n)->op != ML_OP_STATE || !c->made[n]) continue;
        int task = 31 - __builtin_clz(c->made[n]);
        int64_t state = ml_graph_args(c->g, n)[0];
        if (task > last[state]) last[state] = task;
    }
    for (int i = 0; i < c->roots->update_count; i++) {
        ml_ref value = c->roots->updates[i].value;
        int home = home_of(c, value), read = last[c->roots->updates[i].state];
        task_of[i] = home > read ? home : read;
        if (c->exclusive[c->roots->updates[i].state] && read != NO_TASK && read < task_of[i])
            raise_early_read(c, c->roots->updates[i].state);
        if (!(c->made[value] & bit(task_of[i]))) c->need[value] |= bit(task_of[i]);
    }
}

/* ---- the steady piece ---- */
/* Whether the node is a weight that is not assigned, or made of such by views, side by side, or by
 * casts to no wider dtype; weights[] says so of its sources. */
static bool of_weights(const cutting *c, ml_ref n, const bool *weights) {
    const ml_node *node = ml_graph_node(c->g, n);
    int64_t read = 0;
    if (node->op == ML_OP_STATE) return !c->exclusive[ml_graph_args(c->g, n)[0]];
    if (node->op != ML_OP_CAST && node->op != ML_OP_CONCAT && viewed(c->g, n) == n) return false;
    for (int i = 0; i < node->source_count; i++) {
        ml_ref source = ml_graph_source(c->g, n, i);
        if (!weights[source]) return false;
        read += ml_type_bytes(ml_graph_type(c->g, source));
    }
    return ml_type_bytes(ml_graph_type(c->g, n)) <= read;
}

/* What is worth making once: weights as others read them, but for lookups, which read few rows. */
static void once_find(cutting *c) {
    bool *weights = ML_NEW_ARRAY(c->arena, bool, c->count);
    for (ml_ref n = 1; n < c->count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        weights[n] = of_weights(c, n, weights);
        if (weights[n] || node->op == ML_OP_GATHER) continue;
        for (int i = 0; i < node->source_count; i++) {
            ml_ref base = viewed(c->g, ml_graph_source(c->g, n, i));
            ml_op op = ml_graph_node(c->g, base)->op;
            if (weights[base] && (op == ML_OP_CAST || op == ML_OP_CONCAT) && !c->root[base])
                c->once_per_step[base] = true;
        }
    }
}

/* Now that it is known what pieces read. */
static void once_task(cutting *c) {
    for (ml_ref n = c->count - 1; n > 0; n--) {
        c->once_per_step[n] = c->once_per_step[n] && c->need[n];
        c->in_once[n] |= c->once_per_step[n];
        c->set->once_per_step |= c->once_per_step[n];
        for (int i = 0; c->in_once[n] && i < ml_graph_node(c->g, n)->source_count; i++)
            c->in_once[ml_graph_source(c->g, n, i)] = true;
    }
}

/* ---- cells ---- */
static int saved_add(cutting *c, ml_ref n, uint32_t input, int from) {
    saved_value *saved = ML_PUSH(c->arena, &c->saved);
    *saved = (saved_value){.input = input, .from = from};
    saved->bytes = ml_type_bytes(ml_graph_type(c->g, n));
    c->saved_of[n] = (int)c->saved.count - 1;
    return c->saved_of[n];
}

/* Everything that is in memory between pieces. */
static void saved_list(cutting *c, ml_graph *tables) {
    for (ml_ref n = 1; n < c->count; n++) {
        c->saved_of[n] = NOT_SAVED;
        if (!c->live[n]) continue;
        if (ml_graph_node(c->g, n)->op == ML_OP_INPUT) {
            saved_add(c, n, (uint32_t)ml_graph_args(c->g, n)[0], SAVED_GIVEN);
        } else if (c->need[n] & ~c->made[n]) {
            ml_input input = {"a kept value", *ml_graph_type(c->g, n)};
            saved_add(c, n, ml_graph_add_input(tables, &input),
                      c->once_per_step[n] ? SAVED_ONCE_PER_STEP : home_of(c, n));
        }
    }
    for (int i = 0; i < c->roots->output_count; i++) {
        ml_ref n = c->roots->outputs[i];
        if (c->saved_of[n] == NOT_SAVED) saved_add(c, n, UINT32_MAX, home_of(c, n));
        c->set->saved_of_output[i] = c->saved_of[n];
        c->set->task_of_output[i] = home_of(c, n);
    }
    for (uint32_t i = 0; i < c->saved.count; i++) {
        saved_value *saved = &c->saved.at[i];
        int64_t *end =
            saved->from == SAVED_ONCE_PER_STEP ? &c->set->once_bytes : &c->set->buffer_bytes;
        saved->offset = *end;
        *end += (saved->bytes + PLACE_ALIGNMENT - 1) / PLACE_ALIGNMENT * PLACE_ALIGNMENT;
    }
    c->set->saved = c->saved.at;
    c->set->saved_count = (int)c->saved.count;
}

/* For people, with MLUA_DEBUG=4: what is kept between pieces. */
static void saved_print(const cutting *c) {
    ml_text out = {.arena = c->arena};
    if (ml_knobs()->debug < 4) return;
    for (ml_ref n = 1; n < c->count; n++) {
        if (c->saved_of[n] == NOT_SAVED) continue;
        const saved_value *saved = &c->saved.at[c->saved_of[n]];
        const ml_origin *origin = ml_graph_origin(c->g, n);
        ml_text_add(&out, "  cell %d: %lld bytes, ", c->saved_of[n], (long long)saved->bytes);
        if (saved->from == SAVED_GIVEN) ml_text_add(&out, "given");
        if (saved->from == SAVED_ONCE_PER_STEP) ml_text_add(&out, "of the steady piece");
        if (saved->from >= 0) ml_text_add(&out, "of piece %d", saved->from);
        ml_text_add(&out, ", read by %x: %s ", c->need[n] & ~c->made[n],
                    ml_ops[ml_graph_node(c->g, n)->op].name);
        ml_type_print(c->g, ml_graph_type(c->g, n), &out);
        ml_text_add(&out, "  %s:%d %s\n", origin->file ? origin->file : "", origin->line,
                    origin->module ? origin->module : "");
    }
    ml_debug(4, "cells of \"%s\": %lld bytes a microbatch, %lld steady\n%s",
             c->roots->name ? c->roots->name : "", (long long)c->set->buffer_bytes,
             (long long)c->set->once_bytes, out.text ? out.text : "");
}

/* ---- the graphs ---- */
/* A kept value is a block of memory: what is a view of another must be written out. */
static ml_ref exported(const cutting *c, ml_graph *to, ml_ref n, ml_ref made) {
    ml_op op = ml_graph_node(c->g, n)->op;
    bool viewing = op != ML_OP_CONCAT && op != ML_OP_OUT; /* these have memory of their own */
    if (ml_ops[op].op_class != ML_CLASS_MOVE || !viewing) return made;
    ml_graph_set_origin(to, ml_graph_origin(c->g, n));
    return ml_graph_add(to, ML_OP_STOP_GRADIENT, &made, 1, NULL, 0, NULL);
}

static ml_ref imported(const cutting *c, ml_graph *to, ml_ref n) {
    const saved_value *saved = &c->saved.at[c->saved_of[n]];
    int64_t id = saved->input;
    ml_graph_set_origin(to, ml_graph_origin(c->g, n));
    return ml_graph_add(to, ML_OP_INPUT, NULL, 0, &id, 1, NULL);
}

static void task_fill(cutting *c, int p, ml_ref *map) {
    ml_graph *to = c->set->tasks[p].graph;
    for (ml_ref n = 1; n < c->count; n++) {
        map[n] = 0;
        if (!c->live[n] && !c->in_once[n]) continue;
        if (p == c->set->count ? c->in_once[n] : c->made[n] & bit(p)) {
            const ml_node *node = ml_graph_node(c->g, n);
            ml_ref few[8], *sources = few;
            if (node->source_count > 8)
                sources = ML_NEW_ARRAY(c->arena, ml_ref, node->source_count);
            for (int i = 0; i < node->source_count; i++)
                sources[i] = map[ml_graph_source(c->g, n, i)];
            map[n] = ml_graph_copy(to, c->g, n, sources);
        } else if (p < c->set->count && (c->need[n] & bit(p))) {
            map[n] = imported(c, to, n);
        }
    }
}

static void task_roots(cutting *c, int p, const int *update_task, const ml_ref *map) {
    task_program *task = &c->set->tasks[p];
    int from = p == c->set->count ? SAVED_ONCE_PER_STEP : p;
    ml_roots *roots = &task->roots;
    roots->name = c->roots->name;
    roots->outputs = ML_NEW_ARRAY(c->arena, ml_ref, (size_t)c->saved.count + 1);
    roots->updates = ML_NEW_ARRAY(c->arena, ml_update, (size_t)c->roots->update_count + 1);
    task->exports = ML_NEW_ARRAY(c->arena, int, (size_t)c->saved.count + 1);
    for (ml_ref n = 1; n < c->count; n++) {
        if (c->saved_of[n] == NOT_SAVED || c->saved.at[c->saved_of[n]].from != from) continue;
        task->exports[roots->output_count] = c->saved_of[n];
        roots->outputs[roots->output_count++] = exported(c, task->graph, n, map[n]);
    }
    for (int i = 0; i < c->roots->update_count; i++) {
        ml_update update = c->roots->updates[i];
        if (update_task[i] != p) continue;
        update.value = map[update.value];
        roots->updates[roots->update_count++] = update;
    }
    roots->kept = roots->output_count;
}

void task_programs_split(const ml_graph *g, const ml_roots *roots, const int *input_wave,
                         const task_waves *waves, ml_arena *arena, task_programs *out) {
    memset(out, 0, sizeof *out);
    size_t count = ml_graph_count(g);
    cutting c = {.g = g, .roots = roots, .input_wave = input_wave, .arena = arena, .set = out};
    c.count = (uint32_t)count;
    c.wave = ML_NEW_ARRAY(arena, int, count);
    c.saved_of = ML_NEW_ARRAY(arena, int, count);
    c.cheap = ML_NEW_ARRAY(arena, bool, count);
    c.input_grad = ML_NEW_ARRAY(arena, bool, count);
    c.root = ML_NEW_ARRAY(arena, bool, count);
    c.once_per_step = ML_NEW_ARRAY(arena, bool, count);
    c.in_once = ML_NEW_ARRAY(arena, bool, count);
    c.live = ML_NEW_ARRAY(arena, bool, count);
    c.need = ML_NEW_ARRAY(arena, task_mask, count);
    c.made = ML_NEW_ARRAY(arena, task_mask, count);
    c.wanted = ML_NEW_ARRAY(arena, task_mask, count);
    c.several = ML_NEW_ARRAY(arena, task_mask, count);
    out->saved_of_output = ML_NEW_ARRAY(arena, int, (size_t)roots->output_count + 1);
    out->task_of_output = ML_NEW_ARRAY(arena, int, (size_t)roots->output_count + 1);
    int *update_task = ML_NEW_ARRAY(arena, int, (size_t)roots->update_count + 1);
    states_mark(&c, waves->overlaps);
    waves_find(&c);
    sums_wait(&c);
    tasks_list(&c, waves);
    roots_mark(&c);
    input_grad_find(&c);
    if (waves->once_per_step && waves->overlaps) once_find(&c);
    tasks_walk(&c, false);
    c.bases = ML_NEW_ARRAY(arena, base_list, count * (size_t)out->count);
    c.parts = ML_NEW_ARRAY(arena, double, count *(size_t)out->count);
    for (int i = 0; i < 2; i++) { /* what is computed anew may read all of a tensor by views */
        views_join(&c);
        bases_find(&c);
        tasks_walk(&c, true);
    }
    updates_place(&c, update_task);
    once_task(&c);
    int programs = out->count + out->once_per_step;
    for (int p = 0; p < programs; p++) out->tasks[p].graph = ml_graph_derive(g);
    saved_list(&c, out->tasks[0].graph);
    saved_print(&c);
    ml_ref *map = ML_NEW_ARRAY(arena, ml_ref, count);
    for (int p = 0; p < programs; p++) {
        task_fill(&c, p, map);
        task_roots(&c, p, update_task, map);
    }
}

void task_programs_free(task_programs *set) {
    for (int p = 0; p <= set->count; p++) {
        if (set->tasks[p].graph != NULL) ml_graph_free(set->tasks[p].graph);
        set->tasks[p].graph = NULL;
    }
}
