/* Parts of the forward pass (recompute_parts.h), and what their values take.
 *
 * A part is what lies between two places at which few bytes pass from what comes before to what
 * comes after. Such a place is looked for wherever the products begin to read the weights of
 * another layer: of another number in the names of states, "blocks.3.". What passes is kept: so
 * recomputation needs the memory of one layer at a time. A value that the next part alone reads is
 * of that part where fewer bytes pass so: a gathered one, of which a rank's part passes. */
#include "runtime/passes/recompute_parts.h"

#include <string.h>

#include "runtime/base/machine.h"
#include "runtime/graph/collectives.h"
#include "runtime/graph/op_interface.h"

enum { SMALL_SHARE = 1 << 14 }; /* of a part's bytes: a smaller value is kept */

typedef struct {
    const char *name; /* of a state, of which `length` bytes name the layer */
    size_t length;
} layer_name;

typedef struct {
    const recompute_program *p;
    const ml_graph *g;
    uint32_t count;
    bool *weight;                     /* by node: computed of states alone */
    layer_name *layer;                /* by node: of weights */
    ml_ref *last;                     /* by node: its last user in the forward phase, or itself */
    uint32_t *first_part, *last_part; /* by node: of its users in the forward phase */
    bool *needed;                     /* by node: the backward phase reads it */
    uint32_t *part_of;                /* by node */
    uint32_t *index; /* by node: 1 + its place among the values of its part; 0: is none */
    recompute_part *parts;
    bool *excluded; /* by part */
    uint32_t part_count;
} partition;

static bool is_value(const partition *t, ml_ref n) {
    return t->p->r->users[n] && !t->p->backward[n] && !t->p->kept[n] && !t->weight[n];
}

/* Up to the first number: "blocks.3" of "blocks.3.mlp.up"; nothing of a name without. */
static layer_name layer_of(const char *name) {
    layer_name none = {"", 0};
    for (const char *at = name; at != NULL && *at;) {
        size_t length = strcspn(at, ".");
        if (length > 0 && strspn(at, "0123456789") == length)
            return (layer_name){name, (size_t)(at - name) + length};
        at += length + (at[length] == '.');
    }
    return none;
}

static bool same_layer(layer_name a, layer_name b) {
    return a.length == b.length && memcmp(a.name, b.name, a.length) == 0;
}

static void find_weights(partition *t) {
    for (ml_ref n = 1; n < t->count; n++) {
        const ml_node *node = ml_graph_node(t->g, n);
        int op_class = ml_ops[node->op].op_class;
        if (node->op == ML_OP_STATE) {
            t->weight[n] = true;
            t->layer[n] = layer_of(ml_graph_state(t->g, (uint32_t)ml_graph_args(t->g, n)[0])->name);
            continue;
        }
        bool moves =
            node->op == ML_OP_CAST || op_class == ML_CLASS_MOVE || op_class == ML_CLASS_COLLECTIVE;
        t->weight[n] = moves && node->source_count > 0;
        for (int i = 0; t->weight[n] && i < node->source_count; i++)
            t->weight[n] = t->weight[ml_graph_source(t->g, n, i)];
        if (t->weight[n]) t->layer[n] = t->layer[ml_graph_source(t->g, n, 0)];
    }
}

static void find_users(partition *t) {
    for (ml_ref n = 1; n < t->count; n++) {
        t->last[n] = n;
        if (!t->p->r->users[n]) continue;
        for (int i = 0; i < ml_graph_node(t->g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(t->g, n, i);
            if (t->p->backward[n])
                t->needed[source] = true;
            else
                t->last[source] = n;
        }
    }
    /* Results of the program outlive it. */
    const ml_roots *roots = t->p->r->roots;
    for (int i = 0; i < roots->output_count; i++) t->last[roots->outputs[i]] = t->count;
    for (int i = 0; i < roots->update_count; i++) t->last[roots->updates[i].value] = t->count;
}

/* The node in [from, to) after which the fewest bytes pass. */
static ml_ref narrowest(const int64_t *passing, ml_ref from, ml_ref to) {
    ml_ref best = from;
    for (ml_ref n = from; n < to; n++)
        if (passing[n] < passing[best]) best = n;
    return best;
}

/* passing[n]: bytes of values up to n that nodes after n of the forward phase read. */
static int64_t *find_passing(const partition *t, ml_arena *arena) {
    int64_t *passing = ML_NEW_ARRAY(arena, int64_t, (size_t)t->count + 2);
    for (ml_ref n = 1; n < t->count; n++) {
        if (!is_value(t, n)) continue;
        int64_t bytes = ml_type_bytes(ml_graph_type(t->g, n));
        passing[n] += bytes;
        passing[t->last[n]] -= bytes;
    }
    for (ml_ref n = 1; n < t->count; n++) passing[n] += passing[n - 1];
    return passing;
}

/* Whether the backward phase has begun: not by what it computes of states alone, such as the sums
 * of gradients that another program of the same states has made before this one's forward phase. */
static bool reads_forward(const partition *t, ml_ref n) {
    bool reads = false;
    for (int i = 0; i < ml_graph_node(t->g, n)->source_count; i++)
        reads = reads || is_value(t, ml_graph_source(t->g, n, i));
    return t->p->backward[n] && t->p->r->users[n] && reads;
}

static void find_parts(partition *t, ml_arena *arena) {
    const int64_t *passing = find_passing(t, arena);
    layer_name now = {NULL, 0};
    ml_ref before = 0, begin = 1;
    t->part_count = 0;
    /* Later ones that read weights, for their decay, are of no layer of the forward pass. */
    for (ml_ref n = 1; n < t->count && !reads_forward(t, n); n++) {
        for (int i = 0; is_value(t, n) && i < ml_graph_node(t->g, n)->source_count; i++) {
            ml_ref source = ml_graph_source(t->g, n, i);
            if (!t->weight[source]) continue;
            if (before > 0 && before < n && !same_layer(now, t->layer[source])) {
                ml_ref end = narrowest(passing, before, n) + 1;
                for (; begin < end; begin++) t->part_of[begin] = t->part_count;
                t->part_count++;
            }
            now = t->layer[source];
            before = n;
        }
    }
    for (; begin < t->count; begin++) t->part_of[begin] = t->part_count;
    t->part_count++;
    t->parts = ML_NEW_ARRAY(arena, recompute_part, t->part_count);
    t->excluded = ML_NEW_ARRAY(arena, bool, t->part_count);
    /* After the last layer the backward phase begins: there is nothing to free memory for. */
    t->excluded[t->part_count - 1] = t->part_count > 1 && now.length == 0;
}

static void note_part(partition *t, ml_ref n) {
    uint32_t part = t->part_of[n];
    for (int i = 0;
         t->p->r->users[n] && !t->p->backward[n] && i < ml_graph_node(t->g, n)->source_count; i++) {
        ml_ref source = ml_graph_source(t->g, n, i);
        if (part < t->first_part[source]) t->first_part[source] = part;
        if (part > t->last_part[source]) t->last_part[source] = part;
    }
}

/* Whether less passes to part `to`, which reads n first, where n is computed there. */
static bool belongs_to(const partition *t, ml_ref n, uint32_t to) {
    int64_t bytes = 0;
    for (int i = 0; i < ml_graph_node(t->g, n)->source_count; i++) {
        ml_ref source = ml_graph_source(t->g, n, i);
        if (is_value(t, source) && t->last_part[source] < to)
            bytes += ml_type_bytes(ml_graph_type(t->g, source));
    }
    return bytes < ml_type_bytes(ml_graph_type(t->g, n));
}

/* Where the halves of a batch take turns, one of them begins a layer before the other has ended the
 * one before: what it gathers, and other values that are larger than what they are made of, are of
 * the layer that reads them. */
static void move_to_readers(partition *t) {
    for (ml_ref n = 1; n < t->count; n++) t->first_part[n] = t->part_count;
    for (ml_ref n = t->count; n-- > 1;) {
        uint32_t to = t->first_part[n];
        if (is_value(t, n) && t->last[n] < t->count && to < t->part_count && to > t->part_of[n] &&
            belongs_to(t, n, to))
            t->part_of[n] = to;
        note_part(t, n);
    }
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* A kernel adds up long sums in an order that depends on what else it does, and so their last bits
 * do; they are kept, which takes few bytes beside what is summed. Short ones are written out. */
static bool is_written_out(const partition *t, ml_ref n) {
    enum { SHORT_SUM = 8 };
    int64_t from = ml_type_elements(ml_graph_type(t->g, ml_graph_source(t->g, n, 0)));
    return from <= SHORT_SUM * ml_type_elements(ml_graph_type(t->g, n));
}

static bool recomputable(const partition *t, ml_ref n) {
    const ml_node *node = ml_graph_node(t->g, n);
    if (t->p->fixed[n]) return false;
    switch (ml_ops[node->op].op_class) {
    case ML_CLASS_REDUCE: return is_written_out(t, n);
    case ML_CLASS_MAP:
    case ML_CLASS_CONTRACT: return true;
    case ML_CLASS_MOVE: return node->op != ML_OP_PLACE;
    case ML_CLASS_ROUTINE:
        return ml_op_interfaces[node->op] && ml_op_interfaces[node->op]->recomputes > 0;
    case ML_CLASS_COLLECTIVE:
        return t->p->speeds && !ml_collectives[ml_collective_of(node->op)].combines;
    case ML_CLASS_LEAF:
    case ML_CLASS_SCAN: break;
    }
    return false;
}

/* Part of a collective's time is hidden beside computation, which takes longer for it: of a step of
 * gpt-1.3b with split tensors it adds half. */
static double collective_seconds(const partition *t, ml_ref n) {
    const double shown = 0.5;
    const int64_t *args = ml_graph_args(t->g, n); /* mesh axis, ranks */
    int64_t bytes = ml_type_bytes(ml_graph_type(t->g, ml_graph_source(t->g, n, 0)));
    ml_collective kind = ml_collective_of(ml_graph_node(t->g, n)->op);
    return shown * ml_collective_sent(kind, (double)bytes, (double)args[1]) / t->p->speeds[args[0]];
}

static double seconds_of(const partition *t, ml_ref n) {
    const ml_machine *m = &ml_machine_planned;
    const ml_node *node = ml_graph_node(t->g, n);
    int op_class = ml_ops[node->op].op_class;
    if (t->p->light[n] || ml_op_is(node->op, ML_VIEW) || node->op == ML_OP_OUT) return 0;
    if (op_class == ML_CLASS_COLLECTIVE) return collective_seconds(t, n);
    double bytes = (double)ml_type_bytes(ml_graph_type(t->g, n)), work = 0;
    if (op_class == ML_CLASS_CONTRACT || op_class == ML_CLASS_ROUTINE)
        work = ml_flops(t->g, n) / m->product_flops;
    if (op_class == ML_CLASS_ROUTINE && ml_op_interfaces[node->op])
        work *= ml_op_interfaces[node->op]->recomputes;
    if (op_class == ML_CLASS_REDUCE)
        bytes = (double)ml_type_bytes(ml_graph_type(t->g, ml_graph_source(t->g, n, 0)));
    return work + bytes / m->memory_bytes;
}

/* Whether n is chosen about: it is read in its own part alone. */
static bool is_member(const partition *t, ml_ref n) {
    uint32_t part = t->part_of[n];
    bool alone = t->last[n] < t->count && (t->last[n] == n || t->last_part[n] == part);
    return is_value(t, n) && !t->excluded[part] && alone;
}

static void count_members(partition *t, ml_arena *arena) {
    for (ml_ref n = 1; n < t->count; n++) {
        if (!is_member(t, n)) continue;
        recompute_part *part = &t->parts[t->part_of[n]];
        t->index[n] = ++part->count;
        part->source_count += (uint32_t)ml_graph_node(t->g, n)->source_count;
    }
    for (uint32_t i = 0; i < t->part_count; i++) {
        recompute_part *part = &t->parts[i];
        part->values = ML_NEW_ARRAY(arena, recompute_value, (size_t)part->count + 1);
        part->sources = ML_NEW_ARRAY(arena, uint32_t, (size_t)part->source_count + 1);
        part->source_count = 0;
    }
}

static void fill_value(partition *t, ml_ref n) {
    recompute_part *part = &t->parts[t->part_of[n]];
    recompute_value *value = &part->values[t->index[n] - 1];
    *value = (recompute_value){
        .bytes = ml_type_bytes(ml_graph_type(t->g, n)),
        .seconds = recomputable(t, n) ? seconds_of(t, n) : -1,
        .needed = t->needed[n],
        .output = ml_graph_node(t->g, n)->op == ML_OP_OUT,
        .first_source = part->source_count,
    };
    for (int i = 0; i < ml_graph_node(t->g, n)->source_count; i++) {
        ml_ref source = ml_graph_source(t->g, n, i);
        if (t->index[source] && t->part_of[source] == t->part_of[n])
            part->sources[part->source_count++] = t->index[source] - 1;
    }
    value->source_count = part->source_count - value->first_source;
    if (value->output && value->source_count == 0) value->seconds = -1;
}

static void drop_small(recompute_part *part) {
    int64_t all = 0;
    for (uint32_t v = 0; v < part->count; v++) all += part->values[v].bytes;
    for (uint32_t v = 0; v < part->count; v++)
        if (part->values[v].bytes < all / SMALL_SHARE) part->values[v].bytes = 0;
}

static void fill_parts(partition *t, ml_arena *arena) {
    count_members(t, arena);
    for (ml_ref n = 1; n < t->count; n++)
        if (t->index[n]) fill_value(t, n);
    for (uint32_t i = 0; i < t->part_count; i++) drop_small(&t->parts[i]);
}

void recompute_program_choose(const recompute_program *p, uint8_t *fates) {
    ml_arena *arena = p->r->scratch;
    size_t count = (size_t)p->r->count + 1;
    partition t = {
        .p = p,
        .g = p->r->from,
        .count = p->r->count,
        .weight = ML_NEW_ARRAY(arena, bool, count),
        .layer = ML_NEW_ARRAY(arena, layer_name, count),
        .last = ML_NEW_ARRAY(arena, ml_ref, count),
        .needed = ML_NEW_ARRAY(arena, bool, count),
        .first_part = ML_NEW_ARRAY(arena, uint32_t, count),
        .last_part = ML_NEW_ARRAY(arena, uint32_t, count),
        .part_of = ML_NEW_ARRAY(arena, uint32_t, count),
        .index = ML_NEW_ARRAY(arena, uint32_t, count),
    };
    find_weights(&t);
    find_users(&t);
    find_parts(&t, arena);
    move_to_readers(&t);
    fill_parts(&t, arena);
    uint8_t **chosen = ML_NEW_ARRAY(arena, uint8_t *, t.part_count);
    recompute_choose(t.parts, t.part_count, p->share, p->curves, arena, chosen);
    for (ml_ref n = 1; n < t.count; n++) {
        if (!is_value(&t, n) || t.excluded[t.part_of[n]])
            fates[n] = RECOMPUTE_UNUSED;
        else
            fates[n] = t.index[n] ? chosen[t.part_of[n]][t.index[n] - 1] : RECOMPUTE_KEPT;
    }
}
