/* Whether a rank's program takes turns with two halves of its batch (ml_half_batches), and along
 * which axis. A mesh axis that splits what is computed, and not only the batch or parameters, has
 * collectives between products that need each other's results (tensor, sequence and context
 * parallelism, experts): nothing else could run beside these but another part of the batch. */
#include "runtime/base/machine.h"
#include "runtime/ops/attention/attention.h"
#include "runtime/plan/plan_internal.h"

#include "runtime/base/knobs.h"
#include "runtime/graph/rewrite.h"
#include "runtime/optimize/optimize.h"
#include "runtime/shard/shard.h"

/* Where it pays: collectives take so much of the time of products and routines, about all of these
 * are done by halves, and half of one is still much longer than a launch (seconds). */
static const double LEAST_SHARE = 0.025, LEAST_HALVED = 0.9, LEAST_PRODUCT = 100e-6;
enum { MOST_CANDIDATES = 16 };

typedef struct {
    ml_axis axis;
    int64_t size;
    double exchanged, computed; /* seconds, of what has the axis */
    int products;
} candidate;

typedef struct {
    const ml_graph *g;
    double computed; /* seconds, in all */
    int count;
    candidate candidates[MOST_CANDIDATES];
} choice;

static bool has_axis(const ml_type *type, const candidate *c) {
    int at = ml_type_find(type, c->axis);
    return at >= 0 && type->size[at] == c->size;
}

/* The axes of inputs that can be halved. */
static void add_input(choice *x, const ml_type *type) {
    for (int i = 0; i < type->rank && x->count < MOST_CANDIDATES; i++) {
        bool fits = type->size[i] % 2 == 0;
        for (int k = 0; k < x->count; k++) fits = fits && x->candidates[k].axis != type->axis[i];
        if (fits) x->candidates[x->count++] = (candidate){type->axis[i], type->size[i], 0, 0, 0};
    }
}

/* Rows of one sequence depend on one another. */
static void drop_sequences(choice *x, ml_ref attention) {
    ml_attention_args args;
    ml_attention_read(x->g, attention, &args);
    int kept = 0;
    for (int k = 0; k < x->count; k++) {
        ml_axis axis = x->candidates[k].axis;
        if (axis != args.seq && axis != args.kv_seq) x->candidates[kept++] = x->candidates[k];
    }
    x->count = kept;
}

static void find_candidates(choice *x) {
    for (ml_ref n = 1; n < ml_graph_count(x->g); n++)
        if (ml_graph_node(x->g, n)->op == ML_OP_INPUT) add_input(x, ml_graph_type(x->g, n));
    for (ml_ref n = 1; n < ml_graph_count(x->g); n++) {
        int op = ml_graph_node(x->g, n)->op;
        if (ml_op_attends((ml_op)op)) drop_sequences(x, n);
    }
}

/* Seconds that a product, a routine or a collective takes. */
static double time_of(const choice *x, ml_ref n, const ml_plan *plan) {
    const int64_t *args = ml_graph_args(x->g, n); /* of a collective: mesh axis, ranks */
    if (ml_ops[ml_graph_node(x->g, n)->op].op_class != ML_CLASS_COLLECTIVE)
        return ml_flops(x->g, n) / ml_machine_planned.product_flops;
    return (double)ml_shard_sent(x->g, n) /
           plan_link_speed(plan->layout, plan->target, (int)args[0]);
}

/* Whether a product or a routine over the axis is done by halves. */
static bool can_halve(const choice *x, ml_ref n) {
    int op = ml_graph_node(x->g, n)->op;
    ml_attention_args args;
    if (op == ML_OP_DOT) return true;
    if (!ml_op_attends((ml_op)op)) return false;
    ml_attention_read(x->g, n, &args);
    return !args.score;
}

/* Attention over a ring already computes beside what it shifts. */
static bool waits_for_ranks(const ml_graph *g, ml_ref n) {
    return ml_graph_node(g, n)->op != ML_OP_SHIFT;
}

static void add_times(choice *x, const ml_plan *plan) {
    for (ml_ref n = 1; n < ml_graph_count(x->g); n++) {
        int op_class = ml_ops[ml_graph_node(x->g, n)->op].op_class;
        bool works = op_class == ML_CLASS_CONTRACT || op_class == ML_CLASS_ROUTINE;
        if (!works && op_class != ML_CLASS_COLLECTIVE) continue;
        double seconds = time_of(x, n, plan);
        if (works) x->computed += seconds;
        for (int k = 0; k < x->count; k++) {
            candidate *c = &x->candidates[k];
            if (works && can_halve(x, n) &&
                has_axis(ml_graph_type(x->g, ml_graph_source(x->g, n, 0)), c)) {
                c->computed += seconds;
                c->products++;
            } else if (!works && waits_for_ranks(x->g, n) && has_axis(ml_graph_type(x->g, n), c) &&
                       rewrite_splits(x->g, n, c->axis)) {
                c->exchanged += seconds;
            }
        }
    }
}

static bool pays(const choice *x, const candidate *c) {
    return c->exchanged >= LEAST_SHARE * c->computed && c->computed >= LEAST_HALVED * x->computed &&
           c->computed >= LEAST_PRODUCT * (double)c->products;
}

bool plan_half_batch(const ml_plan *plan, bool overlap, ml_axis *axis, int64_t *size) {
    const ml_target *target = plan->target;
    ml_choice wanted = plan->options->half_batch;
    bool may = overlap && target->kind == ML_TARGET_CUDA && !target->no_fuse;
    if (plan->layout == NULL || wanted == ML_NEVER || (wanted != ML_ALWAYS && !may)) return false;
    choice x = {.g = plan->graph};
    find_candidates(&x);
    add_times(&x, plan);
    const candidate *best = NULL;
    for (int k = 0; k < x.count; k++)
        if (best == NULL || x.candidates[k].exchanged > best->exchanged) best = &x.candidates[k];
    if (best == NULL || best->exchanged == 0 || (wanted != ML_ALWAYS && !pays(&x, best)))
        return false;
    ml_debug(1, "halves of %s: %.2f ms of collectives, %.2f ms of %d products\n",
             ml_axis_name(plan->graph, best->axis), 1e3 * best->exchanged, 1e3 * best->computed,
             best->products);
    *axis = best->axis;
    *size = best->size;
    return true;
}
