/* Splitting a stage's graph into tasks: which task computes each node, which values are saved
 * between tasks, and the tasks' graphs. */
#include "runtime/pipeline/split_tasks.h"

#include <math.h>
#include <string.h>

#include "runtime/base/knobs.h"
#include "runtime/pipeline/subgraph.h"
#include "runtime/plan/arena_offsets.h"

enum { FREE = -1, NOT_SAVED = -1, NO_TASK = -1 };
typedef uint32_t task_mask;

/* The values in memory from which another one can be recomputed. */
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
    task_set *set;
    uint32_t count;
    int main_tasks;      /* without the weight-gradient task */
    int *wave;           /* by node: FREE where it needs nothing received */
    bool *cheap;         /* FREE, and computed in every task that uses it */
    bool *exclusive;     /* by state: one task alone reads and updates it */
    bool *once_per_step; /* the once-per-step task computes it for others */
    bool *in_once;       /* the once-per-step task computes it */
    bool *input_grad;    /* of the highest wave, and not of the weight-gradient task */
    bool *root;          /* an output or the new value of a state */
    bool *live;
    task_mask *used;       /* by node: the tasks that read it */
    task_mask *computed;   /* by node: the tasks that compute it */
    task_mask *first_used; /* `used` of the first walk, and what views_join adds */
    task_mask *siblings;   /* by node: the tasks that read another output of the same op */
    base_list *bases;      /* by node and task: see bases_find */
    double *source_bytes;  /* by node and task: bytes of its bases */
    int *saved_of;         /* by node: its saved value, or NOT_SAVED */
    ML_VEC(saved_value) saved;
} cutting;

static int lowest(task_mask mask) {
    return mask ? __builtin_ctz(mask) : 0;
}
static task_mask bit(int task) {
    return (task_mask)1 << task;
}

/* ---- waves ---- */
static bool cheap_op(ml_op op) {
    return ml_ops[op].op_class == ML_CLASS_LEAF || op == ML_OP_ALL_GATHER || ml_op_is(op, ML_CHEAP);
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

/* By node: 1 + the state that sums over microbatches and whose new value is all that uses the node;
 * 0 where there is none, or where something else uses it. */
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

/* A sum over microbatches is read in the wave in which its new value is known: of several terms the
 * first would read it earlier. */
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
        (split_task){.wave = waves->wave[waves->count - 1], .weight_grad = true};
    c->set->count++;
}

/* ---- which task computes what ---- */
static int task_at(const cutting *c, ml_ref n) {
    int i = 0;
    while (c->set->tasks[i].wave != c->wave[n]) i++;
    bool last = i == c->main_tasks - 1, split = c->set->count > c->main_tasks;
    return last && split && !c->input_grad[n] ? c->main_tasks : i;
}

/* Whether computing it again costs no more than a pass over memory. */
static bool is_light(const cutting *c, ml_ref n) {
    const ml_node *node = ml_graph_node(c->g, n);
    return node->source_count > 0 && cheap_op(node->op);
}

static ml_ref viewed(const ml_graph *g, ml_ref n) {
    while (ml_op_selects(ml_graph_node(g, n)->op)) n = ml_graph_source(g, n, 0);
    return n;
}

/* Where a task uses slices that together are a whole tensor (queries, keys and values of one
 * product), every task that uses one of them uses the tensor itself: the slices are views of it. */
static void views_join(cutting *c) {
    int programs = c->set->count;
    memset(c->source_bytes, 0, sizeof *c->source_bytes * c->count * (size_t)programs);
    for (ml_ref n = 1; n < c->count; n++) {
        ml_ref base = viewed(c->g, n);
        for (int p = 0; base != n && p < programs; p++) {
            if (!(c->used[n] & ~c->computed[n] & bit(p))) continue;
            c->source_bytes[base * (size_t)programs + p] +=
                (double)ml_type_bytes(ml_graph_type(c->g, n));
        }
    }
    for (ml_ref n = 1; n < c->count; n++) {
        double bytes = (double)ml_type_bytes(ml_graph_type(c->g, n)), most = 0;
        const double *parts = &c->source_bytes[n * (size_t)programs];
        for (int p = 0; p < programs; p++) most = parts[p] > most ? parts[p] : most;
        for (int p = 0; most >= bytes && p < programs; p++)
            if (parts[p] > 0) c->first_used[n] |= bit(p);
    }
}

static bool has_base(const base_list *list, ml_ref n) {
    for (int i = 0; i < list->count; i++)
        if (list->of[i] == n) return true;
    return false;
}

/* The bases of the node's sources in task p, and their bytes; infinitely many for more than BASES
 * values. */
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

/* What task p must find in memory to have n: nothing where n is there anyway, n itself, or the
 * bases of its sources where recomputing it from them is light work on fewer bytes. */
static void bases_find(cutting *c) {
    int programs = c->set->count;
    for (ml_ref n = 1; n < c->count; n++) {
        const ml_node *node = ml_graph_node(c->g, n);
        double bytes = (double)ml_type_bytes(ml_graph_type(c->g, n));
        for (int p = 0; p < programs; p++) {
            base_list *list = &c->bases[n * (size_t)programs + (size_t)p];
            double parts = is_light(c, n) ? bases_join(c, n, p, list) : bytes;
            c->source_bytes[n * (size_t)programs + (size_t)p] = parts;
            if (c->cheap[n] || node->op == ML_OP_INPUT || (c->first_used[n] & bit(p)))
                list->count = 0;
            else if (!(parts < bytes))
                *list = (base_list){1, {n}};
        }
    }
}

/* Whether task p should compute n again rather than read a saved value. */
static bool worth_recomputing(const cutting *c, ml_ref n, int p) {
    double bytes = (double)ml_type_bytes(ml_graph_type(c->g, n));
    return is_light(c, n) && c->source_bytes[n * (size_t)c->set->count + p] < bytes;
}

/* One walk from users to sources. The first one finds which tasks use what; the following ones,
 * with that known, recompute what is better not saved. */
static void tasks_walk(cutting *c, bool recompute) {
    memset(c->used, 0, sizeof *c->used * c->count);
    memset(c->computed, 0, sizeof *c->computed * c->count);
    memset(c->siblings, 0, sizeof *c->siblings * c->count);
    memset(c->live, 0, sizeof *c->live * c->count);
    for (ml_ref n = c->count - 1; n > 0; n--) {
        const ml_node *node = ml_graph_node(c->g, n);
        if (c->root[n] && (c->wave[n] == FREE || node->op == ML_OP_INPUT))
            c->used[n] |= bit(c->wave[n] == FREE ? 0 : task_at(c, n));
        if (!c->used[n] && !c->siblings[n] && !c->root[n]) continue;
        c->live[n] = true;
        if (c->once_per_step[n]) continue; /* comes from the once-per-step task */
        task_mask used = c->used[n] | c->siblings[n];
        if (node->op == ML_OP_INPUT || c->cheap[n])
            c->computed[n] = used;
        else
            c->computed[n] = bit(c->wave[n] == FREE ? lowest(used) : task_at(c, n));
        bool again =
            node->flags & ML_NODE_COPY; /* a copy that is to be computed where it is used */
        if (recompute && !(used & c->computed[n]) && !c->root[n] &&
            (again || worth_recomputing(c, n, lowest(used))))
            c->computed[n] = bit(lowest(used)); /* its own task does not use it */
        for (int p = 0; recompute && p < c->set->count; p++) {
            if ((used & ~c->computed[n] & bit(p)) && worth_recomputing(c, n, p))
                c->computed[n] |= bit(p);
        }
        for (int i = 0; i < node->source_count; i++) {
            ml_ref source = ml_graph_source(c->g, n, i);
            if (node->op == ML_OP_OUT)
                c->siblings[source] |= c->used[n] | (c->root[n] ? c->computed[n] : 0);
            else
                c->used[source] |= c->computed[n];
        }
    }
    for (ml_ref n = 1; n < c->count; n++) { /* an op's outputs are of its tasks */
        if (c->live[n] && ml_graph_node(c->g, n)->op == ML_OP_OUT)
            c->computed[n] = c->computed[ml_graph_source(c->g, n, 0)];
    }
    if (!recompute) memcpy(c->first_used, c->used, sizeof *c->used * c->count);
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

/* Whether it costs more than passes over memory. */
static bool is_heavy(const cutting *c, ml_ref n) {
    ml_op_class class = ml_ops[ml_graph_node(c->g, n)->op].op_class;
    return class == ML_CLASS_CONTRACT || class == ML_CLASS_ROUTINE || class == ML_CLASS_SCAN ||
           class == ML_CLASS_COLLECTIVE;
}

/* Of the highest wave, the input-gradient task computes what a message needs, and new values that
 * need nothing heavy besides: sums for biases and gains reduce values that this task computes, and
 * that the weight-gradient task would have to read from memory, maybe in a wider dtype than others
 * use. */
static void input_grad_find(cutting *c) {
    const ml_roots *r = c->roots;
    int last = c->set->tasks[c->main_tasks - 1].wave;
    bool *weight_grad = ML_NEW_ARRAY(c->arena, bool, c->count);
    input_grad_spread(c);
    for (ml_ref n = 1; n < c->count; n++) {
        if (c->wave[n] != last || c->input_grad[n]) continue;
        weight_grad[n] = is_heavy(c, n);
        for (int i = 0; i < ml_graph_node(c->g, n)->source_count; i++)
            weight_grad[n] |= weight_grad[ml_graph_source(c->g, n, i)];
    }
    for (int i = 0; i < r->update_count; i++)
        c->input_grad[r->updates[i].value] |= !weight_grad[r->updates[i].value];
    input_grad_spread(c);
}

/* States that the next microbatch reads while this one is in flight. */
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

/* The first task that has the value. */
static int first_task(const cutting *c, ml_ref n) {
    return lowest(c->computed[n] ? c->computed[n] : c->used[n]);
}

/* A state is updated by the task that has its new value, but not before the last read of the old
 * one. */
static void updates_place(cutting *c, int *task_of) {
    uint32_t states = ml_graph_state_count(c->g);
    int *last = ML_NEW_ARRAY(c->arena, int, (size_t)states + 1);
    for (uint32_t i = 0; i < states; i++) last[i] = NO_TASK;
    for (ml_ref n = 1; n < c->count; n++) {
        if (ml_graph_node(c->g, n)->op != ML_OP_STATE || !c->computed[n]) continue;
        int task = 31 - __builtin_clz(c->computed[n]);
        int64_t state = ml_graph_args(c->g, n)[0];
        if (task > last[state]) last[state] = task;
    }
    for (int i = 0; i < c->roots->update_count; i++) {
        ml_ref value = c->roots->updates[i].value;
        int home = first_task(c, value), read = last[c->roots->updates[i].state];
        task_of[i] = home > read ? home : read;
        if (c->exclusive[c->roots->updates[i].state] && read != NO_TASK && read < task_of[i])
            raise_early_read(c, c->roots->updates[i].state);
        if (!(c->computed[value] & bit(task_of[i]))) c->used[value] |= bit(task_of[i]);
    }
}

/* ---- the once-per-step task ---- */
/* Whether the node is a weight that the program does not assign, or follows from such weights by
 * views, concatenation and casts to no wider dtype; weights[] says so of its sources. */
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

/* Worth computing once a step: weights in the form in which others read them. Lookups read few
 * rows, and do not count. */
static void once_per_step_find(cutting *c) {
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

/* Only what tasks read after all, and what that needs. */
static void once_per_step_prune(cutting *c) {
    for (ml_ref n = c->count - 1; n > 0; n--) {
        c->once_per_step[n] = c->once_per_step[n] && c->used[n];
        c->in_once[n] |= c->once_per_step[n];
        c->set->once_per_step |= c->once_per_step[n];
        for (int i = 0; c->in_once[n] && i < ml_graph_node(c->g, n)->source_count; i++)
            c->in_once[ml_graph_source(c->g, n, i)] = true;
    }
}

/* ---- saved values ---- */
static int saved_add(cutting *c, ml_ref n, uint32_t input, int from) {
    saved_value *saved = ML_PUSH(c->arena, &c->saved);
    *saved = (saved_value){.input = input, .from = from};
    saved->bytes = ml_type_bytes(ml_graph_type(c->g, n));
    c->saved_of[n] = (int)c->saved.count - 1;
    return c->saved_of[n];
}

/* Everything that is in memory between tasks. */
static void saved_find(cutting *c, ml_graph *tables) {
    for (ml_ref n = 1; n < c->count; n++) {
        c->saved_of[n] = NOT_SAVED;
        if (!c->live[n]) continue;
        if (ml_graph_node(c->g, n)->op == ML_OP_INPUT) {
            saved_add(c, n, (uint32_t)ml_graph_args(c->g, n)[0], SAVED_GIVEN);
        } else if (c->used[n] & ~c->computed[n]) {
            ml_input input = {"a saved value", *ml_graph_type(c->g, n)};
            saved_add(c, n, ml_graph_add_input(tables, &input),
                      c->once_per_step[n] ? SAVED_ONCE_PER_STEP : first_task(c, n));
        }
    }
    for (int i = 0; i < c->roots->output_count; i++) {
        ml_ref n = c->roots->outputs[i];
        if (c->saved_of[n] == NOT_SAVED) saved_add(c, n, UINT32_MAX, first_task(c, n));
        c->set->saved_of_output[i] = c->saved_of[n];
        c->set->task_of_output[i] = first_task(c, n);
    }
    for (uint32_t i = 0; i < c->saved.count; i++) {
        saved_value *saved = &c->saved.at[i];
        int64_t *end =
            saved->from == SAVED_ONCE_PER_STEP ? &c->set->once_bytes : &c->set->buffer_bytes;
        saved->offset = *end;
        *end += memory_padded(saved->bytes);
    }
    c->set->saved = c->saved.at;
    c->set->saved_count = (int)c->saved.count;
}

/* MLUA_DEBUG=4: what is saved between tasks. */
static void saved_print(const cutting *c) {
    ml_text out = {.arena = c->arena};
    if (!ml_debug_on(4)) return;
    for (ml_ref n = 1; n < c->count; n++) {
        if (c->saved_of[n] == NOT_SAVED) continue;
        const saved_value *saved = &c->saved.at[c->saved_of[n]];
        const ml_origin *origin = ml_graph_origin(c->g, n);
        ml_text_add(&out, "  saved %d: %lld bytes, ", c->saved_of[n], (long long)saved->bytes);
        if (saved->from == SAVED_GIVEN) ml_text_add(&out, "received");
        if (saved->from == SAVED_ONCE_PER_STEP) ml_text_add(&out, "once a step");
        if (saved->from >= 0) ml_text_add(&out, "by task %d", saved->from);
        ml_text_add(&out, ", read by %x: %s ", c->used[n] & ~c->computed[n],
                    ml_ops[ml_graph_node(c->g, n)->op].name);
        ml_type_print(c->g, ml_graph_type(c->g, n), &out);
        ml_text_add(&out, "  %s:%d %s\n", origin->file ? origin->file : "", origin->line,
                    origin->module ? origin->module : "");
    }
    ml_debug(4, "saved values of \"%s\": %lld bytes a microbatch, %lld once a step\n%s",
             c->roots->name ? c->roots->name : "", (long long)c->set->buffer_bytes,
             (long long)c->set->once_bytes, out.text ? out.text : "");
}

/* ---- the tasks' graphs ---- */
/* A saved value is memory of its own: a view of another value must be written out. */
static ml_ref written(const cutting *c, ml_graph *to, ml_ref n, ml_ref value) {
    ml_op op = ml_graph_node(c->g, n)->op;
    bool viewing = op != ML_OP_CONCAT && op != ML_OP_OUT; /* these have memory of their own */
    if (ml_ops[op].op_class != ML_CLASS_MOVE || !viewing) return value;
    ml_graph_set_origin(to, ml_graph_origin(c->g, n));
    return ml_graph_add(to, ML_OP_STOP_GRADIENT, &value, 1, NULL, 0, NULL);
}

static ml_ref mapped(void *map, ml_ref source) {
    return ((const ml_ref *)map)[source];
}

static void task_fill(const cutting *c, int p, subgraph *part, ml_ref *map) {
    for (ml_ref n = 1; n < c->count; n++) {
        map[n] = 0;
        if (!c->live[n] && !c->in_once[n]) continue;
        if (p == c->set->count ? c->in_once[n] : c->computed[n] & bit(p))
            map[n] = subgraph_copy(part, c->g, n, mapped, map);
        else if (p < c->set->count && (c->used[n] & bit(p)))
            map[n] = subgraph_import(part, c->g, n, c->saved.at[c->saved_of[n]].input);
    }
}

static void task_roots(const cutting *c, int p, const int *update_task, const ml_ref *map,
                       subgraph *part) {
    split_task *task = &c->set->tasks[p];
    int from = p == c->set->count ? SAVED_ONCE_PER_STEP : p;
    task->exports = ML_NEW_ARRAY(c->arena, int, (size_t)c->saved.count + 1);
    for (ml_ref n = 1; n < c->count; n++) {
        int saved = c->saved_of[n];
        if (saved == NOT_SAVED || c->saved.at[saved].from != from) continue;
        task->exports[subgraph_export(part, written(c, part->graph, n, map[n]))] = saved;
    }
    for (int i = 0; i < c->roots->update_count; i++)
        if (update_task[i] == p)
            subgraph_update(part, c->roots->updates[i].state, map[c->roots->updates[i].value]);
    task->roots = subgraph_roots(part, c->roots->name, NULL, 0);
}

static void tasks_build(cutting *c, const int *update_task) {
    ml_ref *map = ML_NEW_ARRAY(c->arena, ml_ref, c->count);
    for (int p = 0; p < c->set->count + c->set->once_per_step; p++) {
        subgraph part = {.arena = c->arena, .graph = c->set->tasks[p].graph};
        task_fill(c, p, &part, map);
        task_roots(c, p, update_task, map, &part);
    }
}

static void cutting_start(cutting *c) {
    size_t count = c->count = ml_graph_count(c->g);
    c->wave = ML_NEW_ARRAY(c->arena, int, count);
    c->saved_of = ML_NEW_ARRAY(c->arena, int, count);
    c->cheap = ML_NEW_ARRAY(c->arena, bool, count);
    c->input_grad = ML_NEW_ARRAY(c->arena, bool, count);
    c->root = ML_NEW_ARRAY(c->arena, bool, count);
    c->once_per_step = ML_NEW_ARRAY(c->arena, bool, count);
    c->in_once = ML_NEW_ARRAY(c->arena, bool, count);
    c->live = ML_NEW_ARRAY(c->arena, bool, count);
    c->used = ML_NEW_ARRAY(c->arena, task_mask, count);
    c->computed = ML_NEW_ARRAY(c->arena, task_mask, count);
    c->first_used = ML_NEW_ARRAY(c->arena, task_mask, count);
    c->siblings = ML_NEW_ARRAY(c->arena, task_mask, count);
    size_t outputs = (size_t)c->roots->output_count + 1;
    c->set->saved_of_output = ML_NEW_ARRAY(c->arena, int, outputs);
    c->set->task_of_output = ML_NEW_ARRAY(c->arena, int, outputs);
}

void task_set_split(const ml_graph *g, const ml_roots *roots, const int *input_wave,
                    const task_waves *waves, ml_arena *arena, task_set *out) {
    cutting c = {.g = g, .roots = roots, .input_wave = input_wave, .arena = arena, .set = out};
    memset(out, 0, sizeof *out);
    cutting_start(&c);
    int *update_task = ML_NEW_ARRAY(arena, int, (size_t)roots->update_count + 1);
    states_mark(&c, waves->overlaps);
    waves_find(&c);
    sums_wait(&c);
    tasks_list(&c, waves);
    roots_mark(&c);
    input_grad_find(&c);
    if (waves->once_per_step && waves->overlaps) once_per_step_find(&c);
    tasks_walk(&c, false);
    c.bases = ML_NEW_ARRAY(arena, base_list, c.count * (size_t)out->count);
    c.source_bytes = ML_NEW_ARRAY(arena, double, c.count *(size_t)out->count);
    for (int i = 0; i < 2; i++) { /* what is recomputed may use a whole tensor by its slices */
        views_join(&c);
        bases_find(&c);
        tasks_walk(&c, true);
    }
    updates_place(&c, update_task);
    once_per_step_prune(&c);
    for (int p = 0; p < out->count + out->once_per_step; p++)
        out->tasks[p].graph = ml_graph_derive(g);
    saved_find(&c, out->tasks[0].graph);
    saved_print(&c);
    tasks_build(&c, update_task);
}

void task_set_free(task_set *set) {
    for (int p = 0; p <= set->count; p++) {
        if (set->tasks[p].graph != NULL) ml_graph_free(set->tasks[p].graph);
        set->tasks[p].graph = NULL;
    }
}
